"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`, as a chat request and its answer (decision 0043).

How an answer is sampled is said as in a chat request.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from prefixcache.servers.apis import Event, Json, as_chat
from prefixcache.servers.request_schema import STOPS, GenerationRequest, RequestRefused, Said, Stop, checked, shown

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesRequest(GenerationRequest):
    """What `/v1/messages` takes, beside what is sampled by."""

    messages: Annotated[
        list[Json], Field(min_length=1), Said('a list of objects such as {"role": "user", "content": "..."}')
    ] = Field(description="The conversation so far; `system` is a role, too.")
    system: Annotated[str | list[Json] | None, Said("a text or a list of blocks")] = Field(
        None, description="A system message before it."
    )
    tools: list[Json] | None = Field(
        None, description="Tools with an `input_schema`; those that Anthropic's servers run are ignored."
    )
    tool_choice: Annotated[Json | None, Said('an object such as {"type": "auto"}')] = Field(
        None, description="Its `type` is `tool_choice` of chats."
    )
    stop_sequences: Annotated[
        list[Stop] | None, Field(max_length=STOPS), Said(f"a list of strings, {STOPS} at most")
    ] = Field(None, description="As `stop`.")
    output_config: Annotated[Json | None, Said('an object such as {"effort": "low"}')] = Field(
        None,
        description="Its `effort` is the template's `reasoning_effort`. It has no `format`: none is held to a schema.",
    )
    thinking: Annotated[Json | None, Said('an object such as {"type": "adaptive"}')] = Field(
        None, description="`disabled` is the template's `enable_thinking` false, any other type true."
    )
    chat_template_kwargs: Json | None = Field(None, description="As in chats.")
    chat_template: str | None = Field(None, description="As in chats.")


class Messages:
    """`/v1/messages`."""

    path = "/v1/messages"
    counts_only = False

    def chat_request(self, body: Json) -> Json:
        asked = checked(MessagesRequest, body)
        return as_chat(
            asked,
            messages=list(_messages(asked)),
            tools=list(_tools(asked)) or None,
            tool_choice=_tool_choice(asked),
            stop=asked.get("stop_sequences"),
            chat_template_kwargs=_template_variables(asked),
            cache={**_kept(asked), **(asked.get("cache") or {})} or None,
        )

    def answer(self, request: Json, chat: Json) -> Json:
        choice = chat["choices"][0]
        content = list(_blocks_of(choice["message"]))
        return {
            **_message(chat, content),
            **_stopped(choice, content),
            "usage": _usage(request, chat["usage"]),
        }

    def stream(self, request: Json) -> MessageStream:
        return MessageStream(request)

    def error(self, status: int, message: str) -> Json:
        return _error(status, message)


class TokenCount(Messages):
    """`/v1/messages/count_tokens`."""

    path = "/v1/messages/count_tokens"
    counts_only = True

    def chat_request(self, body: Json) -> Json:
        return super().chat_request({name: value for name, value in body.items() if name != "stream"})

    def answer(self, request: Json, chat: Json) -> Json:
        return {"input_tokens": chat["usage"]["prompt_tokens"]}


# -- a request --------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """An object of a request, and its place there, which errors name."""

    where: str
    value: Json


def _messages(asked: Json) -> Iterator[Json]:
    if asked.get("system"):
        yield from _of_system(_blocks(asked["system"], "system"))
    for where, message in _objects(asked["messages"], "messages"):
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise RequestRefused(f"{where}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
        yield from ROLES[role](_blocks(message.get("content"), f"{where}.content"))


def _of_user(blocks: list[Placed]) -> Iterator[Json]:
    """Give a user's message, with each result of a tool as a message of its own."""
    for are_results, run in groupby(blocks, lambda placed: placed.value.get("type") == "tool_result"):
        if are_results:
            yield from (_tool_result(block, where) for where, block in run)
        else:
            yield {"role": "user", "content": _content([_part(block, where) for where, block in run])}


def _tool_result(block: Json, where: str) -> Json:
    given = block.get("content")
    parts = [_part(inner, place) for place, inner in _blocks(given, f"{where}.content")] if given else []
    content = _content(parts) or ("error" if block.get("is_error") else "")
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": content}


def _of_assistant(blocks: list[Placed]) -> Iterator[Json]:
    text, reasoning, calls = "", "", []
    for where, block in blocks:
        if block.get("type") == "thinking":
            reasoning += _text(block, "thinking", where)
        elif block.get("type") == "tool_use":
            calls.append(_tool_call(block, where))
        elif block.get("type") != "redacted_thinking":  # which nobody here can read
            part = _part(block, where)
            if part["type"] != "text":
                raise RequestRefused(f"{where}: an assistant's message has no {block['type']} here; leave it out")
            text += part["text"]
    message: Json = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    yield message


def _tool_call(block: Json, where: str) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestRefused(f"{where}.input must be an object, not {shown(given)}")
    function = {"name": _text(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _of_system(blocks: list[Placed]) -> Iterator[Json]:
    yield {"role": "system", "content": _content([_part(block, where) for where, block in blocks])}


ROLES: dict[str, Callable[[list[Placed]], Iterator[Json]]] = {
    "user": _of_user,
    "assistant": _of_assistant,
    "system": _of_system,
}


def _part(block: Json, where: str) -> Json:
    """Return a block as a part of a chat message: a text or an image."""
    kind = block.get("type")
    if kind == "image":
        return _image(block, where)
    if not isinstance(kind, str) or kind not in TEXTS:
        known = ", ".join(["image", *TEXTS, "tool_use", "tool_result", "thinking"])
        raise RequestRefused(f"{where}.type {shown(kind)} is not read here; send {known}")
    return {"type": "text", "text": TEXTS[kind](block, where)}


def _image(block: Json, where: str) -> Json:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64":
        media_type, data = (_text(source, name, f"{where}.source") for name in ("media_type", "data"))
        url = f"data:{media_type};base64,{data}"
    elif source.get("type") == "url":
        url = _text(source, "url", f"{where}.source")
    else:
        raise RequestRefused(f"{where}.source.type {shown(source.get('type'))} must be base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Json, where: str) -> str:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "text":
        text = _text(source, "data", f"{where}.source")
    elif source.get("type") == "content":
        text = _only_text(source.get("content"), f"{where}.source.content")
    else:
        kind = source.get("media_type", source.get("type"))
        raise RequestRefused(f"{where}: a document of type {shown(kind)} can't be read here; send its text")
    return _lines(block.get("title"), block.get("context"), text)


def _search_result(block: Json, where: str) -> str:
    text = _only_text(block.get("content"), f"{where}.content")
    return _lines(block.get("title"), block.get("source"), text)


TEXTS: dict[str, Callable[[Json, str], str]] = {  # what the blocks say that are a text for the model
    "text": lambda block, where: _text(block, "text", where),
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda block, where: _text(block, "tool_name", where),
}


def _only_text(content: Any, where: str) -> str:
    parts = [_part(block, place) for place, block in _blocks(content, where)]
    if any(part["type"] != "text" for part in parts):
        raise RequestRefused(f"{where} must be text only")
    return "\n".join(part["text"] for part in parts)


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _content(parts: list[Json]) -> str | list[Json]:
    """Return parts as the content of a chat message: texts as one, a line for each at least."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _blocks(content: Any, where: str) -> list[Placed]:
    if isinstance(content, str):
        return [Placed(where, {"type": "text", "text": content})]
    return _objects(content, where)


def _objects(given: Any, where: str) -> list[Placed]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RequestRefused(f"{where} must be a text or a list of objects, not {shown(given)}")
    return [Placed(f"{where}[{i}]", each) for i, each in enumerate(given)]


def _text(block: Json, name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise RequestRefused(f"{where}.{name} must be a text, not {shown(text)}")
    return text


def _tools(asked: Json) -> Iterator[Json]:
    """Give the tools that have a schema. Others are run by Anthropic's servers, or known to its models alone."""
    for where, tool in _objects(asked.get("tools", []), "tools"):
        if "input_schema" not in tool:
            continue
        function = {"name": _text(tool, "name", where), "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function["description"] = _text(tool, "description", where)
        yield {"type": "function", "function": function}


def _kept(body: Json) -> Json:
    """Return how long the request's marks (`cache_control`) ask the cache to keep the prompt: one of tools or of the system
    text keeps these, any other all of it. The longest counts.
    """
    of_system, of_messages = set[str](), {*_ttl_of(body, "cache_control")}
    for name, ttls in (("tools", of_system), ("system", of_system), ("messages", of_messages)):
        ttls.update(_marks(body.get(name), name))
    wanted = {"system_ttl": of_system, "ttl": of_messages}
    return {name: "1h" if "1h" in ttls else "5m" for name, ttls in wanted.items() if ttls}


def _marks(blocks: Any, where: str) -> Iterator[str]:
    for i, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if isinstance(block, dict):
            yield from _ttl_of(block, f"{where}[{i}].cache_control")
            yield from _marks(block.get("content"), f"{where}[{i}].content")


def _ttl_of(block: Json, where: str) -> Iterator[str]:
    if (mark := block.get("cache_control")) is None:
        return
    ttl = mark.get("ttl", "5m") if isinstance(mark, dict) else mark
    if not isinstance(mark, dict) or ttl not in ("5m", "1h"):
        raise RequestRefused(f'{where} must be an object such as {{"type": "ephemeral", "ttl": "1h"}}, or with "5m"')
    yield ttl


def _tool_choice(asked: Json) -> Any:
    """Return the chat's `tool_choice`; None for the one that it has without."""
    kind = asked.get("tool_choice", {"type": "auto"}).get("type")
    if kind not in ("auto", "none"):
        raise RequestRefused(
            f"tool_choice.type must be auto or none, since no answer is held to a call, not {shown(kind)}"
        )
    return "none" if kind == "none" else None


def _template_variables(asked: Json) -> Json | None:
    """Return the chat template's variables; None for none."""
    variables = dict(asked.get("chat_template_kwargs", {}))
    if "thinking" in asked:
        kind = asked["thinking"].get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise RequestRefused(f"thinking.type must be enabled, adaptive or disabled, not {shown(kind)}")
        variables.setdefault("enable_thinking", kind != "disabled")
    wanted = asked.get("output_config", {})
    if wanted.get("format") is not None:
        raise RequestRefused("output_config.format must be left out, since no answer is held to a schema")
    if isinstance(wanted.get("effort"), str):
        variables.setdefault("reasoning_effort", wanted["effort"])
    return variables or None


# -- an answer --------------------------------------------------------------------------------------------------------


def _message(chat: Json, content: list[Json]) -> Json:
    """Return the beginning of a message. `chat`: an answer of the chat, or a chunk of one."""
    name = f"msg_{str(chat['id']).rpartition('chatcmpl-')[2].replace('-', '')}"
    return {"id": name, "type": "message", "role": "assistant", "model": chat["model"], "content": content}


def _blocks_of(message: Json) -> Iterator[Json]:
    if message.get("reasoning"):
        yield {"type": "thinking", "thinking": message["reasoning"], "signature": ""}
    if (message.get("content") or "").strip():
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or ():
        yield {**_tool_use(call), "input": json.loads(call["function"]["arguments"])}


def _tool_use(call: Json) -> Json:
    name = call.get("id") or f"toolu_{uuid.uuid4().hex}"
    return {"type": "tool_use", "id": name, "name": call["function"]["name"], "input": {}}


def _stopped(choice: Json, content: list[Json]) -> Json:
    """Return why a message ended. `choice`: the chat's, or its last one of a stream."""
    if choice.get("stop_reason"):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}
    reason = STOP_REASONS.get(choice.get("finish_reason") or "", "end_turn")
    if reason == "tool_use" and not any(block["type"] == "tool_use" for block in content):
        reason = "end_turn"  # what the model wrote as a call is none
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(request: Json, usage: Json) -> Json:
    """Return the chat's usage as this API has it: a request with a mark writes all that it doesn't read."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    computed = usage["prompt_tokens"] - cached
    written = computed if _kept(request) else 0
    return {
        "input_tokens": computed - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": usage["completion_tokens"],
    }


def _error(status: int, message: str) -> Json:
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageStream:
    """The events of one streamed message: a block is begun by its first text, and ended by what is not of it."""

    def __init__(self, request: Json):
        self._request = request
        self._usage: Json = {}
        self._content: list[Json] = []  # the blocks that were begun; the last one is open while `_is_open`
        self._is_open, self._has_begun = False, False
        self._space = ""  # white space that begins a text, if more of it follows
        self._last_choice: Json = {}

    def take(self, chunk: Json) -> list[Event]:
        self._usage = chunk.get("usage") or self._usage
        events = [] if self._has_begun else [self._begin(chunk)]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            events += self._more("thinking", delta.get("reasoning") or "")
            events += self._more("text", delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                events += self._call(call)
            self._last_choice = choice
        return events

    def keep_alive(self) -> list[Event]:
        return [Event("ping", {"type": "ping"})]

    def end(self) -> list[Event]:
        usage = _usage(self._request, self._usage)
        delta = {"type": "message_delta", "delta": _stopped(self._last_choice, self._content), "usage": usage}
        return [*self._close(), Event("message_delta", delta), Event("message_stop", {"type": "message_stop"})]

    def fail(self, status: int, message: str) -> list[Event]:
        return [Event("error", _error(status, message))]

    def _begin(self, chunk: Json) -> Event:
        self._has_begun = True
        message = {**_message(chunk, []), "stop_reason": None, "stop_sequence": None}
        message["usage"] = _usage(self._request, self._usage)
        return Event("message_start", {"type": "message_start", "message": message})

    def _more(self, kind: str, text: str) -> list[Event]:
        """Return the events for more of a text, or of a thought."""
        if not text:
            return []
        events: list[Event] = []
        if not self._is_open or self._content[-1]["type"] != kind:
            if kind == "text":
                text = self._space + text
                if text.isspace():
                    self._space = text
                    return []
            empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}[kind]
            events = self._open({"type": kind, **empty})
        delta = {"type": f"{kind}_delta", kind: text}
        return [*events, self._delta(delta)]

    def _call(self, call: Json) -> list[Event]:
        arguments = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        return [*self._open(_tool_use(call)), self._delta(arguments), *self._close()]

    def _open(self, block: Json) -> list[Event]:
        closing = self._close()
        self._content.append(block)
        self._is_open, self._space = True, ""
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*closing, Event("content_block_start", start)]

    def _delta(self, delta: Json) -> Event:
        return Event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return [Event("content_block_stop", {"type": "content_block_stop", "index": self._index})]

    @property
    def _index(self) -> int:
        return len(self._content) - 1
