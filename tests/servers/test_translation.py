"""Between mlx-lm's answer and another API's client: what is sent while nothing is said, and which stop text was it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.servers.apis import Api
from prefixcache.servers.apis.messages import Messages
from prefixcache.servers.apis.responses import Responses
from prefixcache.servers.mlx_lm import translation
from prefixcache.servers.mlx_lm.translation import ThoughtCount, Translation, stop_text

THINKS_NOT = SimpleNamespace(has_thinking=False)
MARKS = {"<": [1, 2], ">": [3]}  # of a thought, and their tokens


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
    asked = SimpleNamespace(tokenizer=THINKS_NOT)  # by then, another model may be loaded
    responses = iter([SimpleNamespace(token=0)] * tokens)
    generator = SimpleNamespace(generate=lambda request: (context, responses))
    completion = SimpleNamespace(response_generator=generator, request_id="chatcmpl-1", requested_model="m", body={})

    def answer() -> None:
        _, responses = completion.response_generator.generate(asked)
        assert len(list(responses)) == tokens
        sends.write(b"data: [DONE]\n\n")

    sends.complete(completion, asked, answer)
    return http.wfile.getvalue().decode()


@given(st.lists(st.sampled_from(["<", ">", "x"]), max_size=12), st.booleans())
def test_tokens_of_thoughts_are_counted_with_their_marks(said, begun):
    tokenizer = SimpleNamespace(
        has_thinking=True, think_start="<", think_end=">", encode=lambda mark, add_special_tokens: MARKS[mark]
    )
    count = ThoughtCount(tokenizer, [7, 3, *(MARKS["<"] if begun else [])])
    for token in (token for each in said for token in MARKS.get(each, [9])):
        count.add(token)
    thoughts = re.findall(r"<[^>]*>?", "<" * begun + "".join(said))
    assert count.tokens == sum(len(thought) + thought.count("<") for thought in thoughts) - 2 * begun


def test_an_answer_without_marks_has_no_thoughts():
    count = ThoughtCount(THINKS_NOT, [1])
    count.add(1)
    assert count.tokens == 0


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
