"""`servers.apis.messages`: Anthropic's Messages API as a chat and back, judged by Anthropic's own types and client."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from prefixcache.servers.apis import Event
from prefixcache.servers.apis.messages import Messages, TokenCount
from prefixcache.servers.request_schema import ChatRequest, checked

API = Messages()
ASKED = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.text("abc_", min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def chat_call(name: str, given: dict[str, Any], number: int) -> dict[str, Any]:
    return {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    calls = draw(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=3)), max_size=3))
    message: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS) or None}
    if reasoning := draw(TEXTS):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [chat_call(name, given, number) for number, (name, given) in enumerate(calls)]
    prompt, generated = draw(st.integers(1, 10**6)), draw(st.integers(0, 10**6))
    usage = {"prompt_tokens": prompt, "completion_tokens": generated}
    if draw(st.booleans()):
        usage["prompt_tokens_details"] = {"cached_tokens": draw(st.integers(0, prompt))}
    choice = {"index": 0, "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])), "message": message}
    if choice["finish_reason"] == "stop" and draw(st.booleans()):
        choice["stop_reason"] = "END"
    return {"id": "chatcmpl-12-34", "model": "m", "choices": [choice], "usage": usage}


def chunks_of(chat: dict[str, Any], cut: st.DataObject) -> Iterator[dict[str, Any]]:
    """The same answer as a stream: reasoning, text and calls, in pieces."""
    choice = chat["choices"][0]
    message, usage = choice["message"], chat["usage"]
    named = {"id": chat["id"], "model": chat["model"]}
    yield {**named, "choices": [], "usage": {**usage, "completion_tokens": 0}}

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        return {**named, "choices": [{"index": 0, "finish_reason": finish, "delta": delta, **more}]}

    for field in ("reasoning", "content"):
        rest = message.get(field) or ""
        while rest:
            size = cut.draw(st.integers(1, len(rest)))
            yield chunk({field: rest[:size]})
            rest = rest[size:]
    for number, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{**call, "index": number}]})
    more = {"stop_reason": choice["stop_reason"]} if "stop_reason" in choice else {}
    yield chunk({"role": "assistant"}, choice["finish_reason"], **more)
    yield {**named, "choices": [], "usage": usage}


def events_of(request: dict[str, Any], chunks: Iterator[dict[str, Any]]) -> list[Event]:
    stream = API.stream(request)
    return [event for chunk in chunks for event in [*stream.take(chunk), *stream.keep_alive()]] + stream.end()


def read_by_client(events: list[Event]) -> Message:
    """What Anthropic's client makes of a stream of these."""
    sent = "".join(f"event: {event.name}\ndata: {json.dumps(event.data)}\n\n" for event in events).encode()

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=sent)

    http = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(respond))
    with (
        anthropic.Anthropic(api_key="none", max_retries=0, http_client=http) as client,
        client.messages.stream(**ASKED) as stream,
    ):
        return stream.get_final_message()


def plain(message: Message) -> dict[str, Any]:
    unset = {"content": {"__all__": {"parsed_output"}}}
    return message.model_dump(exclude=unset, exclude_none=True)


# -- answers ----------------------------------------------------------------------------------------------------------


@given(chat=chats(), cut=st.data(), caches=st.booleans())
def test_a_stream_says_what_a_whole_answer_says_and_both_are_of_anthropics_types(chat, cut, caches):
    request = {**ASKED, "cache_control": {"type": "ephemeral"}} if caches else ASKED
    whole = Message.model_validate(API.answer(request, copy.deepcopy(chat)))
    events = events_of(request, chunks_of(chat, cut))
    for event in events:
        if event.name != "ping":
            TypeAdapter(RawMessageStreamEvent).validate_python(event.data)
        assert event.name == event.data["type"]
    assert plain(read_by_client(events)) == plain(whole)


@given(chat=chats(), caches=st.booleans())
def test_all_tokens_of_a_prompt_are_in_its_usage_once(chat, caches):
    request = {**ASKED, "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
    usage = API.answer(request if caches else ASKED, chat)["usage"]
    parts = usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    assert sum(parts) == chat["usage"]["prompt_tokens"]
    assert parts[0 if caches else 2] == 0


@given(chat=chats())
def test_a_field_that_is_called_as_a_mark_in_a_call_of_a_tool_is_none(chat):
    call = {"type": "tool_use", "id": "1", "name": "warm", "input": {"cache_control": {"max-age": 60}}}
    usage = API.answer({**ASKED, "messages": [said_by("assistant", call)]}, chat)["usage"]
    assert usage["cache_creation_input_tokens"] == 0


@given(chat=chats())
def test_an_answer_comes_back_in_the_chats_history_as_it_was(chat):
    content = API.answer(ASKED, copy.deepcopy(chat))["content"]
    said = {"role": "assistant", "content": content}
    message = API.chat_request({**ASKED, "messages": [*ASKED["messages"], said]})["messages"][-1]
    given = chat["choices"][0]["message"]
    assert message["content"] == (given["content"] if (given["content"] or "").strip() else "")
    assert message.get("reasoning_content") == given.get("reasoning")
    calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
    assert calls == [(call["id"], call["function"]["name"]) for call in given.get("tool_calls", ())]
    for call, before in zip(message.get("tool_calls", ()), given.get("tool_calls", ()), strict=True):
        assert json.loads(call["function"]["arguments"]) == json.loads(before["function"]["arguments"])


def test_a_stream_that_fails_is_an_error_for_the_client():
    stream = API.stream(ASKED)
    begun = stream.take({"id": "1", "model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}})
    with pytest.raises(anthropic.APIStatusError, match="the server ends") as raised:
        read_by_client([*begun, *stream.fail(503, "the server ends")])
    assert raised.value.body["error"]["type"] == "overloaded_error"


def test_what_was_meant_as_a_call_and_is_none_ends_a_turn():
    chat = {"id": "1", "model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    chat["choices"] = [{"finish_reason": "tool_calls", "message": {"role": "assistant", "content": "a"}}]
    assert API.answer(ASKED, chat)["stop_reason"] == "end_turn"


# -- requests ---------------------------------------------------------------------------------------------------------

RESULT = {"type": "tool_result", "tool_use_id": "1"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def messages_of(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return API.chat_request({**ASKED, "messages": list(messages), **more})["messages"]


def said_by(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def words(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize("system", ["Be good.", [words("Be", cache_control={"type": "ephemeral"}), words("good.")]])
def test_a_system_text_is_the_first_message_and_may_come_later_too(system):
    given = messages_of({"role": "user", "content": "a"}, {"role": "system", "content": "b"}, system=system)
    expected = "Be good." if isinstance(system, str) else "Be\ngood."
    assert given == [
        {"role": "system", "content": expected},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
    ]


def test_results_of_tools_are_messages_of_their_own_in_their_order():
    given = messages_of(
        said_by(
            "user",
            {**RESULT, "content": "one"},
            {**RESULT, "tool_use_id": "2", "content": [words("t"), words("wo")], "is_error": True},
            {**RESULT, "tool_use_id": "3", "is_error": True},
            {**RESULT, "tool_use_id": "4", "content": [IMAGE]},
            words("and"),
            words("this"),
            {**RESULT, "tool_use_id": "5"},
        )
    )
    assert given == [
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "t\nwo"},
        {"role": "tool", "tool_call_id": "3", "content": "error"},
        {"role": "tool", "tool_call_id": "4", "content": [IMAGE_PART]},
        {"role": "user", "content": "and\nthis"},
        {"role": "tool", "tool_call_id": "5", "content": ""},
    ]


def test_an_assistants_text_is_joined_as_it_was_generated():
    (given,) = messages_of(
        said_by(
            "assistant",
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "?"},
            words("Let me "),
            {"type": "tool_use", "id": "1", "name": "count", "input": {"to": 3}},
            words("look."),
            {"type": "tool_use", "id": "2", "name": "count", "input": {}},
        )
    )
    assert (given["content"], given["reasoning_content"]) == ("Let me look.", "Hm.")
    assert [call["function"] for call in given["tool_calls"]] == [
        {"name": "count", "arguments": '{"to": 3}'},
        {"name": "count", "arguments": "{}"},
    ]


def test_images_and_documents_are_parts():
    linked = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    found = {"type": "search_result", "source": "http://a", "title": "T", "content": [words("f")]}
    (given,) = messages_of(said_by("user", words("see"), IMAGE, linked, document, found))
    linked_part = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    assert given["content"] == [words("see"), IMAGE_PART, linked_part, words("T\nd"), words("T\nhttp://a\nf")]


def test_tools_with_a_schema_are_the_chats_and_others_are_left_out():
    tools = [
        {"name": "count", "description": "Counts.", "input_schema": {"type": "object"}, "cache_control": {}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "custom", "name": "bare", "input_schema": {}},
    ]
    assert API.chat_request({**ASKED, "tools": tools})["tools"] == [
        {
            "type": "function",
            "function": {"name": "count", "parameters": {"type": "object"}, "description": "Counts."},
        },
        {"type": "function", "function": {"name": "bare", "parameters": {}}},
    ]
    assert "tools" not in API.chat_request({**ASKED, "tools": tools[1:2]})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"tool_choice": {"type": "auto"}}, {}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"output_config": {"effort": "low"}}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        ({"stop_sequences": ["a"], "top_k": 3}, {"stop": ["a"], "top_k": 3}),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"stop": "a", "stop_sequences": ["b"]}, {"stop": ["b"]}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "a": 1}},
        ),
        (
            {"metadata": {"user_id": "u"}, "context_management": {}, "service_tier": "auto", "cache_salt": "s"},
            {"cache_salt": "s"},
        ),
    ],
)
def test_fields_are_the_chats_by_its_names_and_those_it_has_not_are_left_out(given, expected):
    basic = {"model": "m", "max_tokens": 9, "messages": ASKED["messages"]}
    assert API.chat_request({**ASKED, **given}) == {**basic, **expected}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"messages": "hello"}, r'^messages must be a list of objects such as .*, not "hello"'),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            r"^messages\[0\]\.role must be one of user, assistant, system",
        ),
        ({"messages": [{"role": "user"}]}, r"^messages\[0\]\.content must be a text or a list of objects, not null"),
        (
            {"messages": [said_by("user", {"type": "video"})]},
            r'^messages\[0\]\.content\[0\]\.type "video" is not read here',
        ),
        ({"messages": [said_by("user", words(3))]}, r"^messages\[0\]\.content\[0\]\.text must be a text, not 3"),
        ({"messages": [said_by("user", {"type": "image"})]}, r"content\[0\]\.source\.type null must be base64 or url"),
        ({"messages": [said_by("assistant", IMAGE)]}, r"content\[0\]: an assistant's message has no image here"),
        ({"messages": [said_by("user", {"type": "tool_result"})]}, r"content\[0\]\.tool_use_id must be a text"),
        ({"messages": [said_by("assistant", {"type": "tool_use", "input": "a"})]}, r"\.input must be an object"),
        ({"system": 3}, "^system must be a text or a list of blocks, not 3"),
        ({"tools": [{"input_schema": {}}]}, r"^tools\[0\]\.name must be a text, not null"),
        ({"tool_choice": "auto"}, "^tool_choice must be an object such as"),
        ({"tool_choice": {}}, "^tool_choice.type must be auto or none, since no answer is held to a call, not null"),
        ({"tool_choice": {"type": "any"}}, '^tool_choice.type must be auto or none, .* not "any"'),
        ({"tool_choice": {"type": "tool", "name": "count"}}, '^tool_choice.type must be auto or none, .* not "tool"'),
        ({"output_config": {"format": {"type": "json_schema"}}}, "^output_config.format must be left out"),
        (
            {"messages": [said_by("user", PDF)]},
            r'content\[0\]: a document of type "application/pdf" can\'t be read here; send its text',
        ),
        ({"stop_sequences": ["", "a"]}, "^stop_sequences must be a list of strings"),
        ({"thinking": True}, "^thinking must be an object such as"),
        ({"thinking": {"type": 1}}, "^thinking.type must be enabled, adaptive or disabled, not 1"),
    ],
)
def test_what_cant_be_translated_is_named(given, told):
    with pytest.raises(ValueError, match=told):
        API.chat_request({**ASKED, **given})


FIELDS = ("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "chat_template_kwargs", "stream")
KEYS = ("role", "content", "type", "text", "source", "input", "name", "id", "tool_use_id", "input_schema", "data")
KINDS = ("user", "assistant", "system", "text", "image", "tool_use", "tool_result", "thinking", "document", "base64")
HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | TEXTS, inner, max_size=5),
    max_leaves=20,
)


@given(body=st.dictionaries(st.sampled_from(FIELDS), HOSTILE, max_size=4), api=st.sampled_from([API, TokenCount()]))
def test_whatever_is_asked_becomes_a_chat_request_or_is_refused(body, api):
    with suppress(ValueError):
        checked(ChatRequest, api.chat_request({**ASKED, **body}))


def test_tokens_are_counted_without_a_stream():
    assert "stream" not in TokenCount().chat_request({**ASKED, "stream": True})
    assert TokenCount().answer(ASKED, {"usage": {"prompt_tokens": 7}}) == {"input_tokens": 7}
