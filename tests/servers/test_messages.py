"""`/v1/messages` and `/v1/messages/count_tokens`, asked by Anthropic's own client; and the translation alone."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
import requests

from tests.servers.serving import SECONDS, Endpoint, Server, text, user

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
