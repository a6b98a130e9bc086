"""APIs beside OpenAI's chat, each a translation: a request becomes a chat request, and the chat's answer becomes that API's.

Nothing here knows of sockets, models or MLX. `mlx_lm.translation` stands between these and mlx-lm.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from prefixcache.servers.request_schema import ChatRequest, GenerationRequest

Json = dict[str, Any]

PASSED_ON = {
    *GenerationRequest.model_fields,
    "chat_template",
    "role_mapping",
}  # fields that mean in a chat what they do here
PASSED_ON -= {"logprobs", "top_logprobs", "stream_options", "max_completion_tokens"}
assert set(ChatRequest.model_fields) > PASSED_ON


def as_chat(asked: Json, **meant: Any) -> Json:
    """Return a chat request: those fields that are `meant`, but for None, and the others that are passed on as they are. A
    streamed one asks for its usage.
    """
    chat = {name: asked[name] for name in PASSED_ON & asked.keys()}
    chat |= {name: value for name, value in meant.items() if value is not None}
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def objects(value: Any) -> list[Json]:
    """Return the objects of a list, or none of what is no list."""
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []


def error_type(status: int) -> str:
    """Return what OpenAI's APIs call an error with this status of HTTP."""
    if status >= 500:
        return "server_error"
    return "authentication_error" if status == 401 else "invalid_request_error"


class Event(NamedTuple):
    """A server-sent event: its name and its data."""

    name: str
    data: Json


class EventStream(Protocol):
    """One streamed answer. What a call returns is sent before the next call."""

    def take(self, chunk: Json) -> list[Event]:
        """Return the events for a chunk of the chat's stream. The first chunk and the last have no choices: the first has the
        usage so far, as soon as the prompt's turn has come, the last has all of it. The choice that has `finish_reason`
        may have `stop_reason`, too: which of the request's `stop` texts ended the answer.
        """

    def keep_alive(self) -> list[Event]:
        """Return events that say no more than that the answer goes on. Where an API has none, a comment is sent."""

    def end(self) -> list[Event]:
        """Return the events that end a whole answer, after its last chunk."""

    def fail(self, status: int, message: str) -> list[Event]:
        """Return the events that end an answer which is not whole. `status`: what HTTP would have said."""


class Api(Protocol):
    """One API. `path`: where its requests are posted. `counts_only`: its answer has the prompt's tokens only, none is
    generated.
    """

    path: str
    counts_only: bool

    def chat_request(self, body: Json) -> Json:
        """Return the chat request that a request means. `request_schema` checks the fields that are passed on as they are;
        a streamed one asks for its usage. RequestRefused for what can't be translated.
        """

    def answer(self, request: Json, chat: Json) -> Json:
        """Return the answer to a request, of the chat's whole answer (its usage alone, with `counts_only`)."""

    def stream(self, request: Json) -> EventStream:
        """Return the translation of a streamed answer to a request."""

    def error(self, status: int, message: str) -> Json:
        """Return the body of an error, as clients of this API read it."""
