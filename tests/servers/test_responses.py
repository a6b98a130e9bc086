"""`/v1/responses`, asked by openai's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai.types.responses import Response

from tests.servers.serving import SECONDS, Endpoint, Server, ask, serving, text, user, wait_for

MODEL = "default_model"
TOOLS = [{"type": "function", "name": "count", "parameters": {"type": "object", "properties": {}}, "strict": False}]


def create(server: Endpoint, given: Any, **more: Any) -> Response:
    """What is answered at once, which is what is answered piece by piece."""
    body = {"model": MODEL, "max_output_tokens": 8, "input": given, **more}
    with server.client.responses.stream(**body) as stream:
        last = [event for event in stream if event.type in ("response.completed", "response.incomplete")][-1].response
    whole = server.client.responses.create(**body)
    assert contents(whole) == contents(last)
    assert (whole.status, whole.usage.input_tokens) == (last.status, last.usage.input_tokens)
    return whole


def contents(response: Response) -> list[dict[str, Any]]:
    ours = {"parsed", "parsed_arguments", "id", "call_id"}
    dumped = [item.model_dump(exclude=ours, exclude_none=True) for item in response.output]
    return [{**item, "content": [dict(p, parsed=None) for p in item.get("content", [])]} for item in dumped]


def test_a_response_is_whole_and_in_pieces_and_hits_what_was_stored(served: Server):
    answer = create(served, text(300, "response"), instructions="Say little.")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = answer.usage
    assert (usage.output_tokens, usage.total_tokens) == (8, usage.input_tokens + 8)
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens - 1 > 250


def test_a_response_is_the_chats_answer_and_its_prompt_the_chats(served: Server):
    messages = [{"role": "system", "content": "Say little."}, *user(text(100, "same"))]
    chat = ask(served, messages, max_tokens=8)
    answer = create(served, [{"role": "developer", "content": "Say little."}, messages[1]], temperature=0)
    assert (answer.output_text, answer.usage.input_tokens) == (chat.text, chat.prompt)


def test_errors_are_openais(served: Server):
    with pytest.raises(openai.BadRequestError, match="previous_response_id: this server keeps no responses"):
        create(served, "x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be an integer from 1"):
        create(served, "x", max_output_tokens=0)
    with pytest.raises(openai.BadRequestError, match=r"text must be .*: format.type is wrong"):
        create(served, "x", text={"format": {"type": "json_object"}})
    with pytest.raises(openai.NotFoundError, match="is loaded: name that"):
        create(served, "x", model="no-such-model")
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    with pytest.raises(openai.BadRequestError, match="the model reads text only"):
        create(served, [{"role": "user", "content": [image]}])


@pytest.mark.parametrize("depth", [310, 400, 5000])
def test_a_body_is_answered_however_deep_it_is_nested(served: Server, depth: int):
    tool = depth * '{"type": "namespace", "name": "n", "tools": [' + depth * "]}"
    block = depth * '{"type": "document", "source": {"type": "content", "content": [' + depth * "]}}"
    bodies = {
        "/v1/responses": f'{{"input": "a", "max_output_tokens": 1, "tools": [{tool}]}}',
        "/v1/messages": f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": [{block}]}}]}}',
    }
    for path, body in bodies.items():
        assert requests.post(f"{served.url}{path}", data=body, timeout=SECONDS).status_code in (200, 400)


def test_an_agent_thinks_and_calls_tools_and_its_turn_is_hit(agent: Server):
    items = user(text(100, "agent"))
    more = {"tools": [*TOOLS, {"type": "web_search"}], "max_output_tokens": 100}
    first = create(agent, items, **more)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.usage.output_tokens_details.reasoning_tokens == 4
    thought, said, call = first.output
    assert (thought.content[0].text, said.content[0].text) == ("Hm, three.", "\n\nLet me count.")
    assert (call.name, call.arguments, first.status) == ("count", '{"to": 3}', "completed")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "1, 2, 3"}
    items += [*(item.to_dict() for item in first.output), output]
    second = agent.client.responses.create(model=MODEL, input=items, **more)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert second.usage.input_tokens > first.usage.input_tokens + 20


def test_an_api_key_is_a_tenant(model: Path, tmp_path: Path):
    flags = ("--salt-from", "authorization", "--require-salt")
    with serving(tmp_path / "log", "--model", model, *flags) as server:
        for key in ("sk-one", "sk-two"):
            create_as = server.as_tenant(key).client.responses.create
            usages = [create_as(model=MODEL, input=text(300, "tenant"), max_output_tokens=2).usage for _ in range(2)]
            first, second = [usage.input_tokens_details.cached_tokens for usage in usages]
            assert first < 30 < 250 < second
        refused = requests.post(f"{server.url}/v1/responses", json={"input": "x"}, timeout=SECONDS)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_a_client_that_goes_ends_its_answer(served: Server):
    with served.client.responses.create(model=MODEL, input=text(50, "gone"), stream=True) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
    wait_for(lambda: "(client gone)" in served.said(), "a line of the log that says so", served.log)


def test_an_answer_that_is_cut_is_a_failed_response(model: Path, tmp_path: Path):
    with serving(tmp_path / "log", "--model", model, "--grace", "0", "--max-tokens", "100000") as server:
        stream = server.client.responses.create(model=MODEL, input=text(50, "cut"), stream=True)
        next(event for event in stream if event.type == "response.output_text.delta")
        assert server.end() == 0
        last = [*stream][-1]
        assert (last.type, last.response.error.message) == (
            "response.failed",
            "the server ends; ask again when it is back",
        )
