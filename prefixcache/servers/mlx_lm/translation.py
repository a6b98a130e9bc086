"""Between mlx-lm's answer to a chat request and a client of another API (`servers.apis`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from prefixcache.servers.apis import Api, Event, Json
from prefixcache.servers.request_log import COUNTED

CHAT_PATH = "/v1/chat/completions"


class Translation:
    """What mlx-lm's `Completion` takes for the connection of a chat's client: what it sends reaches the client of `api` by
    `http`, translated. `request`: what that client asked.
    """

    path = CHAT_PATH

    def __init__(self, http: Any, api: Api, request: Json):
        self._http, self._api, self._request = http, api, request
        self._events = api.stream(request) if request.get("stream") and not api.counts_only else None
        self._has_begun = False
        self.wfile = self
        self.send_response, self.send_cors_headers = http.send_response, http.send_cors_headers
        self._first_chunk: Callable[[], Json] = dict

    def complete(self, completion: Any, request: Any, answer: Callable[[], None]) -> None:
        """Have mlx-lm's answer sent, or the tokens of its prompt, with `counts_only`."""
        self._first_chunk = lambda: {
            "id": completion.request_id,
            "model": completion.requested_model,
            "choices": [],
            "usage": request.request_log.usage(),
        }
        if self._api.counts_only:
            answer = lambda: self._count(completion, request)  # noqa: E731
        self._http.complete(completion, request, answer)

    def _count(self, completion: Any, request: Any) -> None:
        tokens = completion.response_generator.count_tokens(request, completion.prompt_arguments)
        self._http.send_response(200)
        self._http.send_header("Content-Type", "application/json")
        self._http.send_cors_headers()
        request.request_log.end = COUNTED
        self.write(json.dumps({"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": 0}}).encode())

    def send_header(self, name: str, value: str) -> None:
        if name != "Content-Length":  # of the chat's answer
            self._http.send_header(name, value)

    def end_headers(self) -> None:
        if self._events is not None:
            self._http.end_headers()

    def write(self, data: bytes) -> None:
        """Send what mlx-lm sends at once: a whole answer, or one server-sent event of a stream."""
        if self._events is None:
            body = json.dumps(self._api.answer(self._request, json.loads(data))).encode()
            self._http.send_header("Content-Length", str(len(body)))
            self._http.end_headers()
            self._http.wfile.write(body)
            return
        if not self._has_begun:
            self._has_begun = True
            self._send(self._events.take(self._first_chunk()))
        field, _, value = data.partition(b": ")
        if not field:
            self._http.wfile.write(data)  # a comment, which keeps the connection alive
        elif value.strip() == b"[DONE]":
            self._send(self._events.end())
        else:
            self._send(self._events.take(json.loads(value)))

    def flush(self) -> None:
        self._http.wfile.flush()

    def fail(self, status: int, message: str) -> None:
        """End a streamed answer that is not whole."""
        assert self._events is not None
        self._send(self._events.fail(status, message))

    def _send(self, events: Iterable[Event]) -> None:
        for event in events:
            self._http.wfile.write(f"event: {event.name}\ndata: {json.dumps(event.data)}\n\n".encode())
