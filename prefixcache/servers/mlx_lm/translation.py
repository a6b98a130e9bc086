"""Between mlx-lm's answer to a chat request and a client of another API (`servers.apis`)."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prefixcache.servers.apis import Api, Event, EventStream, Json
from prefixcache.servers.request_log import COUNTED
from prefixcache.servers.request_schema import STOP_LIMIT

CHAT_PATH = "/v1/chat/completions"
THOUGHT_BEGUN = 16  # last tokens of a prompt among which a template begins a thought
QUIET_SECONDS = (
    10.0  # without a word to the client, as while a long call of a tool is generated: then it hears that there is one
)


class ThoughtCount:
    """Counts the tokens of an answer's thoughts, marks included. `prompt`: the tokens before it, which may have begun one."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        marks = (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else ("", "")
        self._begin, self._end = ([*tokenizer.encode(mark, add_special_tokens=False)] if mark else [] for mark in marks)
        self._last = deque[int](maxlen=max(len(self._begin), len(self._end)))
        self._is_open, self.tokens = False, 0
        for token in prompt[-THOUGHT_BEGUN:]:
            self.add(token)
        self.tokens = 0

    def add(self, token: int) -> None:
        if not self._begin:
            return
        self._last.append(token)
        last = list(self._last)
        if self._is_open:
            self.tokens += 1
            self._is_open = last[-len(self._end) :] != self._end
        elif last[-len(self._begin) :] == self._begin:
            self.tokens += len(self._begin)
            self._is_open = True


class Translation:
    """What mlx-lm's `Completion` takes for the connection of a chat's client, and for the generator of the answer: what it
    sends reaches the client of `api` by `http`, translated. `request`: what that client asked.
    """

    path = CHAT_PATH

    def __init__(self, http: Any, api: Api, request: Json):
        self._http, self._api, self._request = http, api, request
        streams = bool(request.get("stream")) and not api.counts_only
        self._events = api.stream(request) if streams else None
        self._completion: Any = None
        self._context: Any = None  # of the answer, once the prompt's turn has come
        self._tokenizer: Any = None  # of the model that answers, once it does
        self._has_begun = False
        self._sent_at = time.monotonic()
        self._thoughts: ThoughtCount | None = None
        self._tokens: deque[int] = deque(maxlen=2 * STOP_LIMIT)  # the last ones of the answer
        self.wfile = self
        self.send_response, self.send_cors_headers = http.send_response, http.send_cors_headers

    def complete(self, completion: Any, request: Any, answer: Callable[[], None]) -> None:
        """Have mlx-lm's answer sent, or the tokens of its prompt, with `counts_only`."""
        self._completion, self._generator = completion, completion.response_generator
        completion.response_generator = self
        self._http.complete(completion, request, (lambda: self._count(request)) if self._api.counts_only else answer)

    def generate(self, request: Any, *args: Any, **options: Any) -> Any:
        """Have the answer generated, as `Generator` does."""
        self._context, responses = self._generator.generate(request, *args, **options)
        self._tokenizer = request.tokenizer
        self._thoughts = ThoughtCount(self._tokenizer, list(self._context.prompt))
        return self._context, self._watch(responses)

    def _watch(self, responses: Iterable[Any]) -> Iterator[Any]:
        for response in responses:
            self._tokens.append(response.token)
            if self._thoughts is not None:
                self._thoughts.add(response.token)
            if self._events is not None and time.monotonic() - self._sent_at > QUIET_SECONDS:
                self._keep_alive(self._events)
            yield response

    def _count(self, request: Any) -> None:
        tokens = self._generator.prompt_tokenizer.count(request, self._completion.prompt_arguments)
        request.request_log.end = COUNTED
        self._http.send_response(200)
        self._http.send_header("Content-Type", "application/json")
        self._http.send_cors_headers()
        self.write(json.dumps({"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": 0}}).encode())

    # -- what mlx-lm sends --------------------------------------------------------------------------------------------

    def send_header(self, name: str, value: str) -> None:
        if name != "Content-Length":  # of the chat's answer
            self._http.send_header(name, value)

    def end_headers(self) -> None:
        if self._events is not None:
            self._http.end_headers()

    def write(self, data: bytes) -> None:
        """Send what mlx-lm sends at once: a whole answer, or one server-sent event of a stream."""
        if self._events is None:
            body = json.dumps(self._api.answer(self._request, self._told_why(json.loads(data)))).encode()
            self._http.send_header("Content-Length", str(len(body)))
            self._http.end_headers()
            self._http.wfile.write(body)
            return
        field, _, value = data.partition(b": ")
        if not field:  # a comment
            return self._keep_alive(self._events)
        self._begin(self._events)
        if value.strip() == b"[DONE]":
            self._send(self._events.end())
        else:
            self._send(self._events.take(self._told_why(json.loads(value))))

    def flush(self) -> None:
        self._http.wfile.flush()

    def fail(self, status: int, message: str) -> None:
        """End a streamed answer that is not whole."""
        assert self._events is not None
        self._send(self._events.fail(status, message))

    def _begin(self, stream: EventStream) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._send(stream.take(self._first_chunk()))

    def _keep_alive(self, stream: EventStream) -> None:
        self._begin(stream)
        events = stream.keep_alive()
        self._send(events)
        if not events:
            self._http.wfile.write(b": keepalive\n\n")
        self.flush()

    def _send(self, events: Iterable[Event]) -> None:
        self._sent_at = time.monotonic()
        for event in events:
            self._http.wfile.write(f"event: {event.name}\ndata: {json.dumps(event.data)}\n\n".encode())

    def _first_chunk(self) -> Json:
        prompt, cached = len(self._context.prompt), max(self._context.prompt_cache_count, 0)
        usage = {"prompt_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": cached}}
        named = {"id": self._completion.request_id, "model": self._completion.requested_model}
        return {**named, "choices": [], "usage": usage}

    def _told_why(self, chat: Json) -> Json:
        """Return a chunk or an answer that says by which of its `stop` texts it ended, as `stop_reason`, and how many of its
        tokens were thoughts.
        """
        if chat.get("usage") and self._thoughts is not None:
            chat["usage"]["completion_tokens_details"] = {"reasoning_tokens": self._thoughts.tokens}
        stops = self._completion.body.get("stop") or ()
        for choice in chat["choices"]:
            if choice.get("finish_reason") == "stop" and stops:
                ended_by = self._completion.stopped_by or stop_text(self._tokenizer, stops, list(self._tokens))
                choice["stop_reason"] = ended_by
        return chat


def stop_text(tokenizer: Any, stops: Sequence[str], tokens: Sequence[int]) -> str | None:
    """Return the stop text whose tokens end an answer's; None where its last token is the model's own end."""
    for stop in sorted(stops, key=len, reverse=True):
        ending = list(tokenizer.encode(stop, add_special_tokens=False))
        if ending and ending == list(tokens[-len(ending) :]):
            return stop
    return None
