"""Between mlx-lm's answer and another API's client: what is sent while nothing is said, and which stop text was it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from prefixcache.servers.apis import Api
from prefixcache.servers.apis.messages import Messages
from prefixcache.servers.apis.responses import Responses
from prefixcache.servers.mlx_lm import translation
from prefixcache.servers.mlx_lm.translation import Translation, stop_text


class Http:
    """A client's connection, on which the answer is what `answer` sends."""

    def __init__(self) -> None:
        self.wfile = io.BytesIO()
        self.send_response = self.send_header = self.send_cors_headers = self.end_headers = lambda *about: None

    def complete(self, completion: Any, request: Any, answer: Any) -> None:
        answer()


def streamed(api: Api, request: dict[str, Any], tokens: int) -> str:
    """What a client hears of an answer whose tokens are all of one call."""
    http = Http()
    sends = Translation(http, api, {**request, "stream": True})
    context = SimpleNamespace(prompt=[1, 2, 3], prompt_cache_count=1)
    generator = SimpleNamespace(generate=lambda: (context, iter([SimpleNamespace(token=0)] * tokens)))
    completion = SimpleNamespace(response_generator=generator, request_id="chatcmpl-1", requested_model="m", body={})

    def answer() -> None:
        _, responses = completion.response_generator.generate()
        assert len(list(responses)) == tokens
        sends.write(b"data: [DONE]\n\n")

    sends.complete(completion, None, answer)
    return http.wfile.getvalue().decode()


def names(sent: str) -> Iterator[str]:
    return (line.removeprefix("event: ") for line in sent.splitlines() if line.startswith("event: "))


def test_a_client_hears_of_an_answer_that_says_nothing_for_long(monkeypatch):
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert "ping" not in names(streamed(Messages(), asked, 3))
    monkeypatch.setattr(translation, "QUIET_SECONDS", -1)
    sent = streamed(Messages(), asked, 3)
    assert list(names(sent)) == ["message_start", "ping", "ping", "ping", "message_delta", "message_stop"]
    begun = json.loads(sent.splitlines()[1].removeprefix("data: "))["message"]
    assert (begun["usage"]["input_tokens"], begun["usage"]["cache_read_input_tokens"]) == (2, 1)
    assert streamed(Responses(), {"model": "m", "input": "a"}, 3).count(": keepalive\n\n") == 3


@pytest.mark.parametrize(
    ("said", "expected"),
    [("ends with STOP", "STOP"), ("ends with FULL STOP", "FULL STOP"), ("STOP is not its end", None), ("", None)],
)
def test_the_longest_stop_text_that_ends_an_answer_is_the_one(said, expected):
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode()))
    assert stop_text(tokenizer, ["STOP", "FULL STOP", "other"], list(said.encode())) == expected
