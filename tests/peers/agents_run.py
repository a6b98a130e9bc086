"""Run with openai-agents' interpreter: `agents_run.py URL`. An agent with a shell is asked at once and then as a stream, and
what it said, how often its shell ran, and its tokens are written as JSON.
"""

import asyncio
import json
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def shell(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20).stdout


def told(result) -> dict:
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    usage = result.context_wrapper.usage
    cached = usage.input_tokens_details.cached_tokens
    return {"said": result.final_output, "outputs": outputs, "prompts": usage.input_tokens, "cached": cached}


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"))
    agent = Agent(name="helper", instructions="You help. " * 100, tools=[shell], model="default_model")
    whole = await Runner.run(agent, "How many lines have alpha?")
    turn = [*whole.to_input_list(), {"role": "user", "content": "And beta?"}]
    streamed = Runner.run_streamed(agent, turn)
    async for _ in streamed.stream_events():
        pass
    print(json.dumps([told(whole), told(streamed)]))


asyncio.run(main())
