"""What agents' clients send: sessions in the shapes of Claude Code, opencode, qwen-code and `llm`, with texts made here.

Shapes are those of requests that the real clients were seen to make (docs/agents.md); no text is theirs. Sizes are in tokens
of tiny-llama's tokenizer, roughly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

Json = dict[str, Any]

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
WORDS = (
    "file",
    "path",
    "line",
    "test",
    "run",
    "read",
    "change",
    "before",
    "after",
    "never",
    "keep",
    "open",
    "a",
    "folder",
)
CHARACTERS = 2.6  # of these words a token
SHORT, LONG = 40, 700  # tokens of what a tool gives back
FUNCTIONS = 80  # that the long call writes


class Answer(NamedTuple):
    """What the model says: a thought, a text, and the arguments of a call of a tool with this name."""

    text: str
    thought: str = ""
    tool: str = ""
    arguments: Json = {}


class Asked(NamedTuple):
    """A request of a client: what it is for its session, where it goes, and what the model answers."""

    what: str
    path: str
    body: Json
    answer: Answer


Session = Iterator[Asked]


def prose(tokens: int, of: str) -> str:
    """Return a text of about so many tokens that is another one for each `of`."""
    draw, sentences, length = random.Random(of), [], 0
    while length < tokens * CHARACTERS:
        words = draw.choices(WORDS, k=draw.randint(6, 16))
        sentences.append(" ".join(words).capitalize() + draw.choice([". ", ".\n", ".\n- "]))
        length += len(sentences[-1])
    return "".join(sentences).rstrip("- \n")


def functions(count: int, tokens: int, of: str) -> list[Json]:
    """Return functions with about so many tokens together; the first ones are a shell and one that writes files."""
    named = [
        ("shell", {"command": "string", "background": "boolean"}),
        ("write", {"path": "string", "content": "string", "append": "boolean"}),
    ]
    named += [(f"{of}_tool_{number}", {"path": "string", "limit": "integer"}) for number in range(2, count)]
    made = []
    for name, properties in named:
        described = {
            key: {"type": kind, "description": prose(12, f"{of} {name} {key}")} for key, kind in properties.items()
        }
        schema = {"type": "object", "properties": described, "required": list(properties)[:1]}
        description = prose(max(tokens // count - 90, 10), f"{of} {name}")
        made.append({"name": name, "description": description, "parameters": schema})
    return made


LOOK = Answer(
    "\n\nLet me look at the notes.",
    "The user wants to know what is in the notes. I look first.",
    "shell",
    {"command": "cat notes.txt", "background": False},
)
COUNT = Answer(
    "\n\nNow I count them.",
    "The notes are there, so counting is next.",
    "shell",
    {"command": "wc -l notes.txt", "background": True},
)
DONE = Answer("\n\nThe notes have two lines about alpha, and one about beta.", "That is all that was asked for.")


# -- Claude Code --------------------------------------------------------------------------------------------------------


def claude_code(size: int) -> Session:
    """A header that is another one in each talk, tools, and a list of agents behind the user's first words."""
    tools = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in functions(20, size * 6 // 10, "claude")
    ]
    main = prose(size * 3 // 10, "claude system") + "\nWorking directory: /home/user/work\n"

    def body(talk: str, messages: list[Json]) -> Json:
        header = f"x-anthropic-billing-header: version=1.{talk}; entry=cli;"
        system = [{"type": "text", "text": text} for text in (header, "You are an agent for a terminal.", main)]
        return {
            "system": system,
            "tools": tools,
            "messages": messages,
            "thinking": {"type": "adaptive"},
            "max_tokens": 4096,
        }

    def first(day: str, words: str) -> list[Json]:
        reminder = f"<system-reminder>\nToday is {day}.\n</system-reminder>\n"
        user = [{"type": "text", "text": reminder}, {"type": "text", "text": words}]
        return [{"role": "user", "content": user}, {"role": "system", "content": prose(size // 10, "claude agents")}]

    def said(answer: Answer, number: int) -> Json:
        blocks: list[Json] = [
            {"type": "thinking", "thinking": answer.thought, "signature": ""},
            {"type": "text", "text": answer.text},
        ]
        if answer.tool:
            blocks.append({"type": "tool_use", "id": f"toolu_{number}", "name": answer.tool, "input": answer.arguments})
        return {"role": "assistant", "content": blocks}

    def result(number: int, tokens: int) -> Json:
        block = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": prose(tokens, f"claude {number}")}
        return {"role": "user", "content": [block]}

    messages = first("Thursday", "What do the notes say about alpha?")
    yield Asked("first prompt", MESSAGES, body("a", messages), LOOK)
    messages = [*messages, said(LOOK, 1), result(1, SHORT)]
    yield Asked("step", MESSAGES, body("a", messages), COUNT)
    messages = [*messages, said(COUNT, 2), result(2, LONG)]
    yield Asked("step", MESSAGES, body("a", messages), DONE)
    messages = [*messages, said(DONE, 3), {"role": "user", "content": [{"type": "text", "text": "And about beta?"}]}]
    yield Asked("turn", MESSAGES, body("a", messages), LOOK)
    yield Asked("step", MESSAGES, body("a", [*messages, said(LOOK, 4), result(4, SHORT)]), DONE)
    yield Asked("new talk", MESSAGES, body("b", first("Thursday", "Rename the notes, please.")), LOOK)
    yield Asked("next day", MESSAGES, body("c", first("Friday", "Which notes are old?")), LOOK)


# -- clients of /v1/chat/completions ------------------------------------------------------------------------------------


def _called(answer: Answer, number: int) -> Json:
    """Return an answer as clients of chats bring it back: arguments as JavaScript writes JSON."""
    message: Json = {"role": "assistant", "content": answer.text}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    if answer.tool:
        arguments = json.dumps(answer.arguments, separators=(",", ":"))
        function = {"name": answer.tool, "arguments": arguments}
        message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
    return message


def _result(number: int, tokens: int, of: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": prose(tokens, f"{of} {number}")}


def _chat(messages: list[Json], tools: list[Json] | None = None) -> Json:
    offered = {"tools": [{"type": "function", "function": tool} for tool in tools]} if tools else {}
    return {"model": "default_model", "messages": messages, "max_tokens": 4096, **offered}


def opencode(size: int) -> Session:
    """A system text whose last lines name directory and day, and three quarters of the prompt in tools."""
    tools, main = functions(10, size * 3 // 4, "open"), prose(size // 4, "open system")
    rules = prose(60, "open rules")

    def begun(directory: str, day: str, words: str = "What do the notes say?") -> list[Json]:
        where = f"{main}\n<env>\n  Working directory: /home/user/{directory}\n  Today: {day}\n</env>\n{rules}"
        return [{"role": "system", "content": where}, {"role": "user", "content": words}]

    messages = begun("alpha", "Thu 26")
    yield Asked("first prompt", CHAT, _chat(messages, tools), LOOK)
    messages = [*messages, _called(LOOK, 1), _result(1, SHORT, "open")]
    yield Asked("step", CHAT, _chat(messages, tools), COUNT)
    messages = [*messages, _called(COUNT, 2), _result(2, LONG, "open")]
    yield Asked("step", CHAT, _chat(messages, tools), DONE)
    messages = [*messages, _called(DONE, 3), {"role": "user", "content": "And about beta?"}]
    yield Asked("turn", CHAT, _chat(messages, tools), DONE)
    yield Asked("second directory", CHAT, _chat(begun("beta", "Thu 26"), tools), LOOK)
    for directory in ("gamma", "delta"):
        yield Asked("other directory", CHAT, _chat(begun(directory, "Thu 26"), tools), LOOK)
    yield Asked("next day", CHAT, _chat(begun("alpha", "Fri 27"), tools), LOOK)
    yield Asked("new talk", CHAT, _chat(begun("alpha", "Thu 26", "Rename the notes."), tools), LOOK)


def qwen_code(size: int) -> Session:
    """Directory and day in the user's first message, no thoughts, and a call that writes 80 functions."""
    tools, main = functions(14, size // 2, "qwen"), prose(size // 2, "qwen system")
    written = "\n\n".join(f"def function_{n}(value):\n    return value * {n} + {n % 7}" for n in range(FUNCTIONS))
    long_call = Answer(
        "Let me write the files.\n", "", "write", {"path": "made.py", "content": written, "append": True}
    )

    def begun(day: str) -> list[Json]:
        setup = f"This is the setup. Today is {day}. The directory is /home/user/work:\n{prose(150, 'qwen folder')}"
        said = [{"role": "user", "content": setup}, {"role": "assistant", "content": "Got it."}]
        return [{"role": "system", "content": main}, *said, {"role": "user", "content": "Write the functions."}]

    messages = begun("Thursday")
    yield Asked("first prompt", CHAT, _chat(messages, tools), long_call)
    messages = [*messages, _called(long_call, 1), _result(1, SHORT, "qwen")]
    yield Asked("long call", CHAT, _chat(messages, tools), COUNT._replace(thought=""))
    messages = [*messages, _called(COUNT._replace(thought=""), 2), _result(2, SHORT, "qwen")]
    yield Asked("step", CHAT, _chat(messages, tools), DONE._replace(thought=""))
    messages = [*messages, _called(DONE._replace(thought=""), 3), {"role": "user", "content": "Now test them."}]
    yield Asked("turn", CHAT, _chat(messages, tools), DONE._replace(thought=""))
    yield Asked("next day", CHAT, _chat(begun("Friday"), tools), long_call)


def llm(size: int) -> Session:
    """No tools and no system text: turns of some dozens of tokens."""
    answer = Answer("Alpha is the first of them, and beta is the second one.")
    messages: list[Json] = []
    for what, words in (
        ("first prompt", "Tell me in one sentence what alpha is."),
        ("turn", "And gamma?"),
        ("turn", "Which one is last?"),
    ):
        messages = [*messages, {"role": "user", "content": words}]
        yield Asked(what, CHAT, _chat(messages), answer)
        messages = [*messages, _called(answer, 0)]


CLIENTS = {"Claude Code": claude_code, "opencode": opencode, "qwen-code": qwen_code, "llm": llm}
