"""OpenAI's Responses API, `/v1/responses`: its request as a chat request, and the chat's answer as a response. Nothing here
knows sockets or MLX. The server keeps no responses, so what refers to one that it gave is refused by name (decision 0043).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from prefixcache.servers.apis import Event, Json, as_chat, error_type, objects
from prefixcache.servers.request_schema import (
    Count,
    GenerationRequest,
    RequestPart,
    RequestRefused,
    ResponseFormat,
    Said,
    checked,
    shown,
)

KEEPS_NOTHING = "this server keeps no responses; send the whole conversation in input"
STORED = ("previous_response_id", "conversation", "prompt")  # fields that refer to what a server has kept
STORED_ITEMS = ("item_reference", "compaction")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class AnswerText(RequestPart):
    """What a request may say of the answer's text. Other fields of it are ignored."""

    format: ResponseFormat | None = None


class ResponsesRequest(GenerationRequest):
    """What `/v1/responses` takes, beside what is sampled by."""

    input: Annotated[str | list[Json], Said("a text, or a list of items")] = Field(
        description="The conversation so far."
    )
    instructions: str | None = Field(None, description="A system message before it.")
    max_output_tokens: Count | None = Field(None, description="As `max_tokens`.")
    tools: list[Json] | None = Field(
        None, description="Functions, custom tools and namespaces of them; tools that a server runs itself are ignored."
    )
    tool_choice: str | Json | None = Field(None, description="As in chats.")
    text: Annotated[
        AnswerText | None, Said('an object whose `format` is {"type": "text"}, since no answer is held to a schema')
    ] = Field(None, description="The form of the answer.")
    reasoning: Json | None = Field(
        None,
        description="Its `effort` is the template's `reasoning_effort`; `none` is `enable_thinking` false.",
    )
    background: bool = Field(False, description="Must be false.")
    chat_template_kwargs: Json | None = Field(None, description="As in chats.")
    chat_template: str | None = Field(None, description="As in chats.")


class Responses:
    """The API as the HTTP server asks it."""

    path = "/v1/responses"
    counts_only = False

    def chat_request(self, body: Json) -> Json:
        """Return the chat request that this request means. RequestRefused names what can't be had."""
        asked = checked(ResponsesRequest, body)
        _refuse_stored(asked)
        return as_chat(
            asked,
            messages=_Conversation.of(asked).messages,
            tools=[tool.definition for tool in _tools(asked).values()] or None,
            max_tokens=asked.get("max_output_tokens"),
            tool_choice=asked.get("tool_choice"),
            chat_template_kwargs=_template_variables(asked),
        )

    def answer(self, request: Json, chat: Json) -> Json:
        """Return the response that a whole answer of the chat makes: that of the last event of it as a stream."""
        choice = chat["choices"][0]
        stream = ResponseStream(request)
        stream.take({**chat, "choices": [{"delta": choice["message"], "finish_reason": choice["finish_reason"]}]})
        response: Json = stream.end()[-1].data["response"]
        return response

    def stream(self, request: Json) -> ResponseStream:
        return ResponseStream(request)

    def error(self, status: int, message: str) -> Json:
        """Return the body of an error, as OpenAI's clients read it."""
        return {"error": {"message": message, "type": error_type(status), "param": None, "code": status}}


# -- the request ------------------------------------------------------------------------------------------------------


def _refuse_stored(asked: Json) -> None:
    for name in STORED:
        if name in asked:
            raise RequestRefused(f"{name}: {KEEPS_NOTHING}")
    if asked.get("background"):
        raise RequestRefused("background must be false: an answer is given to the client that waits for it")


def _template_variables(asked: Json) -> Json | None:
    variables = dict(asked.get("chat_template_kwargs") or {})
    effort = (asked.get("reasoning") or {}).get("effort")
    if effort == "none":
        variables.setdefault("enable_thinking", False)
    elif isinstance(effort, str):
        variables.setdefault("reasoning_effort", effort)
    return variables or None


class _Tool(NamedTuple):
    """A tool as the response names it, and as the chat defines it. `custom`: its input is a text, not JSON."""

    name: str
    namespace: str | None
    custom: bool
    definition: Json


def _tools(asked: Json) -> dict[str, _Tool]:
    """Return the tools that a request offers by their names in the chat, those of items `additional_tools` among them."""
    later = (item.get("tools") for item in objects(asked["input"]) if item.get("type") == "additional_tools")
    given = (tool for tools in (asked.get("tools"), *later) for tool in objects(tools))
    return {name: tool for flat in given for name, tool in _flat(flat, None).items()}


def _flat(tool: Json, namespace: str | None) -> dict[str, _Tool]:
    """Return a tool by its name in the chat, or the tools of a namespace; none of what the server would have to run."""
    name, kind = tool.get("name"), tool.get("type")
    if kind not in ("namespace", "function", "custom"):
        return {}
    if not isinstance(name, str):
        raise RequestRefused(f"a tool of the type {kind} must have a name, a string, not {shown(name)}")
    if kind == "namespace":
        inside = (_flat(part, name) for part in objects(tool.get("tools")))
        return {name: tool for flat in inside for name, tool in flat.items()}
    in_chat = _chat_name(name, namespace)
    parameters = _text_parameters(tool) if kind == "custom" else tool.get("parameters")
    function = {"name": in_chat, "description": tool.get("description"), "parameters": parameters}
    definition = {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
    return {in_chat: _Tool(name, namespace, kind == "custom", definition)}


def _chat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _text_parameters(tool: Json) -> Json:
    """Return the JSON schema of a custom tool, whose grammar can only be told."""
    form = tool.get("format")
    told = f"{form.get('syntax')}:\n{form['definition']}" if isinstance(form, dict) and "definition" in form else "text"
    properties = {"input": {"type": "string", "description": told}}
    return {"type": "object", "properties": properties, "required": ["input"], "additionalProperties": False}


@dataclass
class _Conversation:
    """The messages that the items of a request make. Reasoning, texts and calls in a row are one message of the assistant,
    as one answer made them.
    """

    messages: list[Json] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Json) -> _Conversation:
        talk = cls()
        if asked.get("instructions"):
            talk.messages.append({"role": "system", "content": asked["instructions"]})
        given = asked["input"]
        for place, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
            talk.add(f"input.{place}", item)
        if not talk.messages:
            raise RequestRefused("input must be a text, or a list of items with a message among them")
        return talk

    def add(self, place: str, item: Json) -> None:
        """Add an item. Those of tools that a server runs itself have nothing for the model here."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._add_message(place, item)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind in ("function_call", "custom_tool_call"):
            self._assistant(without="").setdefault("tool_calls", []).append(_call(place, item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(f"{place}.output", item.get("output"))
            self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind in STORED_ITEMS:
            raise RequestRefused(f"{place} is of the type {shown(kind)}: {KEEPS_NOTHING}")
        elif not isinstance(kind, str):
            raise RequestRefused(f"{place} must have a type, such as message or function_call_output")

    def _add_message(self, place: str, item: Json) -> None:
        role, content = item.get("role"), _content(f"{place}.content", item.get("content"))
        if role == "assistant":
            self._assistant(without="content")["content"] = content
        elif isinstance(role, str) and role:
            self.messages.append({"role": role, "content": content})
        else:
            raise RequestRefused(f"{place}.role must be a string, not {shown(role)}")

    def _add_reasoning(self, item: Json) -> None:
        texts = [part.get("text") for part in objects(item.get("content") or item.get("summary"))]
        if text := "".join(text for text in texts if isinstance(text, str)):
            self._assistant(without="reasoning_content")["reasoning_content"] = text

    def _assistant(self, *, without: str) -> Json:
        """Return the assistant's message to go on with, a new one where the last has the field `without` or what comes
        behind it.
        """
        last = self.messages[-1] if self.messages else {}
        order = ("reasoning_content", "content", "tool_calls", "")
        behind = order[order.index(without) : -1]
        if last.get("role") != "assistant" or any(name in last for name in behind):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


def _call(place: str, item: Json) -> Json:
    name, given = item.get("name"), item.get("arguments") or "{}"
    if not isinstance(name, str):
        raise RequestRefused(f"{place}.name must be a string, not {shown(name)}")
    if item["type"] == "custom_tool_call":
        given = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    function = {"name": _chat_name(name, item.get("namespace")), "arguments": _json_object(f"{place}.arguments", given)}
    return {"type": "function", "id": item.get("call_id"), "function": function}


def _json_object(place: str, text: Any) -> str:
    try:
        if isinstance(text, str) and isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise RequestRefused(f"{place} must be the text of a JSON object, not {shown(text)}")


def _content(place: str, content: Any) -> str | list[Json]:
    """Return the content of a message or of a tool's result as a chat has it: a text, or parts where images are in it."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        raise RequestRefused(f"{place} must be a text or a list of parts, not {shown(content)}")
    parts = [_part(f"{place}.{number}", part) for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(place: str, part: Any) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if isinstance(text, str):
        return {"type": "text", "text": text}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise RequestRefused(
        f"{place} must be an input_text with its text or an input_image with its image_url; leave it out"
    )


# -- the answer -------------------------------------------------------------------------------------------------------


class ResponseStream:
    """One response, as the chunks of a chat's answer make it. One item is open at a time."""

    def __init__(self, request: Json):
        given = {name: value for name, value in request.items() if value is not None}
        self._tools = _tools(given)
        self._response = _begun(given)
        self._sequence = 0
        self._finish = ""
        self._open: _TextItem | None = None
        self._white = ""  # white space that may be the beginning of a text, or all of it

    def take(self, chunk: Json) -> list[Event]:
        events = self._begin()
        for choice in chunk.get("choices") or []:
            events += self._delta(choice.get("delta") or {})
            self._finish = choice.get("finish_reason") or self._finish
        if chunk.get("usage"):
            self._response["usage"] = _usage(chunk["usage"])
        return events

    def keep_alive(self) -> list[Event]:
        """Return no events: this API has none that say nothing."""
        return []

    def end(self) -> list[Event]:
        whole = self._finish != "length"
        status = "completed" if whole else "incomplete"
        events = [*self._begin(), *self._close(status)]
        if not whole:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._last(status)]

    def fail(self, status: int, message: str) -> list[Event]:
        events = [*self._begin(), *self._close("incomplete")]
        self._response["error"] = {"code": "server_error", "message": message}
        return [*events, self._last("failed")]

    def _begin(self) -> list[Event]:
        if self._sequence:
            return []
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def _last(self, status: str) -> Event:
        self._response["status"] = status
        return self._event(f"response.{status}", response=self._response)

    def _delta(self, delta: Json) -> Iterator[Event]:
        if reasoning := delta.get("reasoning"):
            yield from self._add(_ReasoningItem, reasoning)
        if text := delta.get("content"):
            yield from self._add_text(text)
        for call in delta.get("tool_calls") or []:
            yield from self._close("completed")
            yield from self._call(call)

    def _add_text(self, text: str) -> Iterator[Event]:
        """A text of white space alone, as models put it between reasoning and a call, is no item."""
        if not isinstance(self._open, _MessageItem):
            text = self._white + text
            self._white = text if text.isspace() else ""
        if not self._white:
            yield from self._add(_MessageItem, text)

    def _add(self, kind: type[_TextItem], text: str) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            self._open = kind(len(self._response["output"]))
            self._response["output"].append(self._open.item("in_progress", parts=[]))
            yield self._item_event("added")
            yield self._part_event("response.content_part.added", part=kind.part(""))
        self._open.text += text
        yield self._part_event(f"response.{kind.name}.delta", delta=text, **kind.beside)

    def _close(self, status: str) -> Iterator[Event]:
        self._white = ""
        open_item = self._open
        if open_item is None:
            return
        part = open_item.part(open_item.text)
        yield self._part_event(f"response.{open_item.name}.done", text=open_item.text, **open_item.beside)
        yield self._part_event("response.content_part.done", part=part)
        self._response["output"][open_item.index] = open_item.item(status, parts=[part])
        yield self._item_event("done")
        self._open = None

    def _call(self, call: Json) -> Iterator[Event]:
        item, name, text = _call_item(call, self._tools)
        place = {"item_id": item["id"], "output_index": len(self._response["output"])}
        self._response["output"].append({**item, name: ""})
        yield self._item_event("added")
        events = "response.function_call_arguments" if name == "arguments" else "response.custom_tool_call_input"
        yield self._event(f"{events}.delta", **place, delta=text)
        yield self._event(f"{events}.done", **place, **{name: text})
        self._response["output"][-1] = {**item, **({"status": "completed"} if "status" in item else {})}
        yield self._item_event("done")

    def _item_event(self, what: str) -> Event:
        output = self._response["output"]
        return self._event(f"response.output_item.{what}", output_index=len(output) - 1, item=output[-1])

    def _part_event(self, name: str, **about: Any) -> Event:
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": self._open.index, "content_index": 0}
        return self._event(name, **place, **about)

    def _event(self, name: str, **about: Any) -> Event:
        self._sequence += 1
        return Event(name, {"type": name, "sequence_number": self._sequence - 1, **about})

    def _snapshot(self) -> Json:
        return {**self._response, "output": list(self._response["output"])}


class _TextItem:
    """An item of one text that grows. `index`: its place in the output."""

    name = ""  # of its events
    prefix = ""  # of its id
    beside: Json = {}  # what its events have beside the text

    def __init__(self, index: int):
        self.index, self.id, self.text = index, _new_id(self.prefix), ""

    @staticmethod
    def part(text: str) -> Json:
        """Return a part of its content."""
        raise NotImplementedError

    def item(self, status: str, parts: list[Json]) -> Json:
        """Return it as the output has it."""
        raise NotImplementedError


class _MessageItem(_TextItem):
    name, prefix = "output_text", "msg"
    beside = {"logprobs": []}

    @staticmethod
    def part(text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: str, parts: list[Json]) -> Json:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}


class _ReasoningItem(_TextItem):
    name, prefix = "reasoning_text", "rs"

    @staticmethod
    def part(text: str) -> Json:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str, parts: list[Json]) -> Json:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": parts}


class _CallItem(NamedTuple):
    """The item of a call, the name of the field that its text is in, and that text."""

    item: Json
    name: str
    text: str


def _call_item(call: Json, tools: dict[str, _Tool]) -> _CallItem:
    function = call["function"]
    text: str = function["arguments"]
    tool = tools.get(function["name"]) or _Tool(function["name"], None, False, {})
    beside = {"call_id": call.get("id") or _new_id("call"), "name": tool.name}
    if tool.namespace is not None:
        beside["namespace"] = tool.namespace
    if not tool.custom:
        item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress", **beside, "arguments": text}
        return _CallItem(item, "arguments", text)
    given = json.loads(text)
    text = given["input"] if isinstance(given, dict) and isinstance(given.get("input"), str) else text
    return _CallItem({"id": _new_id("ctc"), "type": "custom_tool_call", **beside, "input": text}, "input", text)


def _begun(request: Json) -> Json:
    """Return a response that has begun: what its request said, and what it has not yet."""
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata") or {},
        "model": request.get("model", "default_model"),
        "output": [],
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": request.get("reasoning"),
        "store": False,
        "temperature": request.get("temperature"),
        "text": request.get("text") or {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice", "auto"),
        "tools": request.get("tools") or [],
        "top_p": request.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _usage(usage: Json) -> Json:
    """Return a chat's usage as this API has it. What is not cached is computed, and stored."""
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thoughts = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": prompt + generated,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
