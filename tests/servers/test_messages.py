"""`/v1/messages` and `/v1/messages/count_tokens`, asked by Anthropic's own client."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import anthropic
import pytest
import requests

from tests.servers.serving import (
    SECONDS,
    Endpoint,
    Server,
    serve,
    serving,
    starting,
    text,
    user,
    wait_for,
)

MODEL = "default_model"


def client(server: Endpoint, **options: Any) -> anthropic.Anthropic:
    options = {"api_key": "none", **options}
    return anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=SECONDS, **options)


def create(server: Endpoint, messages: Any, **more: Any) -> anthropic.types.Message:
    """What is answered at once, which is what is answered piece by piece."""
    body = {"model": MODEL, "max_tokens": 8, "messages": messages, **more}
    with client(server).messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    whole = client(server).messages.create(**body)
    assert contents(whole) == contents(streamed)
    assert whole.stop_reason == streamed.stop_reason
    assert prompt_tokens(whole) == prompt_tokens(streamed)
    return whole


def contents(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"parsed_output", "id"}) for block in message.content]


def prompt_tokens(message: Any) -> int:
    usage = message.usage
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_message_is_answered_whole_and_in_pieces_and_hits_what_was_stored(served: Server):
    answer = create(served, user(text(300, "message")), system="Say little.")
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8
    assert answer.usage.input_tokens == 1
    assert answer.usage.cache_read_input_tokens > 250


def test_tokens_are_counted_as_a_message_has_them(served: Server):
    messages = user(text(100, "count"))
    counted = client(served).messages.count_tokens(model=MODEL, messages=messages, system="Count.")
    assert counted.input_tokens == prompt_tokens(create(served, messages, system="Count."))


def test_an_error_is_one_of_this_api(served: Server):
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role must be one of") as raised:
        create(served, [{"role": "nobody", "content": "hello"}])
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": raised.value.body["error"]["message"]},
    }


def test_clients_that_look_whether_the_server_is_there_find_it(served: Server):
    answer = requests.head(f"{served.url}/", timeout=SECONDS)
    assert (answer.status_code, answer.content) == (200, b"")
    assert requests.head(f"{served.url}/nowhere", timeout=SECONDS).status_code == 404


# -- tools, thoughts, stops -------------------------------------------------------------------------------------------

TOOLS = [{"name": "count", "description": "Counts.", "input_schema": {"type": "object", "properties": {}}}]


def test_an_agent_thinks_and_calls_tools_and_its_turn_is_hit(agent: Server):
    messages = user(text(100, "agent"))
    more = {"tools": TOOLS, "max_tokens": 100, "thinking": {"type": "adaptive"}}
    first = create(agent, messages, **more)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    thought, said, call = first.content
    assert (thought.thinking, said.text) == ("Hm, three.", "\n\nLet me count.")
    assert (call.name, call.input) == ("count", {"to": 3})
    assert first.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "1, 2, 3"}]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client(agent).messages.create(model=MODEL, messages=messages, **more)
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first) - 1
    assert prompt_tokens(second) > prompt_tokens(first) + 20


def test_an_answer_says_which_stop_sequence_ended_it(agent: Server):
    answer = create(agent, user("stop"), stop_sequences=["nowhere", "count."], max_tokens=100)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "count.")
    answer = create(agent, user("stop"), stop_sequences=["nowhere", "me co"], max_tokens=100)  # in no token of its own
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "me co")
    assert answer.content[-1].text == "\n\nLet "
    answer = create(agent, user("stop"), stop_sequences=["nowhere"], max_tokens=100, tools=TOOLS)
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


def test_images_are_refused_by_a_model_that_has_none(served: Server):
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    with pytest.raises(anthropic.BadRequestError, match="is an image, and the model reads text only"):
        create(served, user([{"type": "image", "source": source}]))


# -- clients ----------------------------------------------------------------------------------------------------------


def test_an_api_key_is_a_tenant_in_either_header(model: Path, tmp_path: Path):
    prompt = user(text(300, "tenant"))
    flags = ("--salt-from", "authorization", "--require-salt")
    with serving(tmp_path / "log", "--model", model, *flags) as server:
        body = {"model": MODEL, "max_tokens": 2, "messages": prompt}
        for key in ("sk-one", "sk-two"):
            as_key, as_token = client(server, api_key=key), client(server, api_key=None, auth_token=key)
            assert as_key.messages.create(**body).usage.cache_read_input_tokens < 30
            assert as_token.messages.create(**body).usage.input_tokens == 1
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = requests.post(f"{server.url}{path}", json=body, timeout=SECONDS)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_pages_of_other_origins_may_not_ask(served: Server):
    headers = {"Origin": "http://elsewhere.example"}
    body = {"model": MODEL, "max_tokens": 2, "messages": user("hello")}
    refused = requests.post(f"{served.url}/v1/messages", json=body, headers=headers, timeout=SECONDS)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


def test_a_client_that_goes_ends_its_answer(served: Server):
    body = {"model": MODEL, "max_tokens": 4000, "messages": user(text(50, "gone"))}
    with client(served).messages.stream(**body) as stream:
        next(iter(stream.text_stream))
    wait_for(lambda: "(client gone)" in served.said(), "a line of the log that says so", served.log)


def test_a_prompt_that_is_too_long_is_refused_in_the_words_by_which_clients_make_it_shorter(
    model: Path, tmp_path: Path
):
    with (
        serving(tmp_path / "log", "--model", model, "--max-context", 100) as server,
        pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 100"),
    ):
        create(server, user(text(200)))


def test_a_stream_that_the_servers_end_cuts_is_an_error_for_its_client(model: Path, tmp_path: Path):
    with starting(serve, tmp_path / "log", "--model", model, "--ram", "100MB", "--grace", 0.1) as server:
        body = {"model": MODEL, "max_tokens": 100_000, "messages": user("Go on for ever.")}
        with client(server.ready()).messages.stream(**body) as stream:
            next(iter(stream.text_stream))
            server.send(signal.SIGTERM)
            with pytest.raises(anthropic.APIStatusError, match="the server ends") as raised:
                stream.get_final_message()
        assert raised.value.body["error"]["type"] == "overloaded_error"
        assert server.process.wait(SECONDS) == 0
        assert server.troubles() == []
