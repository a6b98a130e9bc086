"""`/v1/responses` as chat requests and back, without a server. Types and the accumulator of streams are openai's."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from prefixcache.servers.apis.responses import Responses
from prefixcache.servers.request_schema import ChatRequest, RequestRefused, checked

API = Responses()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 60},
}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}
TOOLS = [
    SHELL,
    PATCH,
    {"type": "namespace", "name": "agents", "description": "", "tools": [SHELL]},
    {"type": "web_search"},
]
REQUEST = {"input": "hello", "tools": TOOLS, "model": "m", "stream": True}


def messages(items: Any, **more: Any) -> list[dict[str, Any]]:
    """The messages of the chat that these items make; it is one that the chat API takes."""
    chat = API.chat_request({"input": items, **more})
    checked(ChatRequest, chat)
    return chat["messages"]


def call(name: str, arguments: dict[str, Any], number: str = "1") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_text_is_a_message_of_the_user_and_instructions_stand_before_it():
    assert messages("hello", instructions="Be short.") == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hello"},
    ]


def test_what_one_answer_gave_is_one_message_again():
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "look"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "1", "name": "shell", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "LINE"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "Done."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Both."}]},
        {"type": "message", "role": "assistant", "content": "And more."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    assert messages(items) == [
        {"role": "developer", "content": "ab"},
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "reasoning_content": "I look.",
            "content": "Looking.",
            "tool_calls": [call("shell", {"a": 1}), call("patch", {"input": "LINE"}, "2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "reasoning_content": "Done.", "content": "Both."},
        {"role": "assistant", "content": "And more."},
    ]


def test_an_image_keeps_its_place_among_the_parts():
    parts = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    assert messages([{"role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]


def test_tools_have_one_name_each_and_those_of_servers_are_left_out():
    later = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "late"}]}
    chat = API.chat_request({"input": [{"role": "user", "content": "x"}, later], "tools": TOOLS})
    functions = {tool["function"]["name"]: tool["function"] for tool in chat["tools"]}
    assert list(functions) == ["shell", "patch", "agents__shell", "late"]
    assert functions["shell"] == {"name": "shell", "parameters": SHELL["parameters"]}
    assert "start: LINE" in functions["patch"]["parameters"]["properties"]["input"]["description"]


def test_what_is_sampled_by_goes_through_and_what_is_the_responses_own_does_not():
    body = {"input": "x", "max_output_tokens": 5, "temperature": 0, "top_p": None, "store": True, "include": ["x"]}
    more = {"reasoning": {"effort": "low"}, "cache_salt": "s", "stream": True, "text": {"format": {"type": "text"}}}
    assert API.chat_request(body | more | {"tool_choice": "none"}) == {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "temperature": 0.0,
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"reasoning_effort": "low"},
        "tool_choice": "none",
    }
    assert API.chat_request({"input": "x", "max_tokens": 7})["max_tokens"] == 7
    assert API.chat_request({"input": "x", "max_tokens": 7, "max_output_tokens": 5})["max_tokens"] == 5
    chat = API.chat_request({"input": "x", "reasoning": {"effort": "none"}})
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server keeps no responses; send the whole"),
        ({"conversation": "conv_1"}, "conversation: this server keeps no responses"),
        ({"background": True}, "background must be false"),
        (
            {"text": {"format": {"type": "json_object"}}},
            'no answer is held to a schema: format.type is wrong, "json_object"',
        ),
        ({"tools": [{"type": "function", "parameters": {}}]}, "a tool of the type function must have a name"),
        ({"max_output_tokens": 0}, "max_output_tokens must be an integer from 1"),
        ({"input": 5}, "input must be a text, or a list of items, not 5"),
        ({"input": []}, "input must be a text, or a list of items with a message among them"),
        ({"input": [{"x": 1}]}, "input.0 must have a type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 'input.0 is of the type "item_reference"'),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0 must be an input_text"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content must be a text or a list of parts, not 5"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]},
            'input.0.arguments must be the text of a JSON object, not "{"',
        ),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input.0.name must be a string, not null"),
    ],
    ids=str,
)
def test_what_cant_be_had_is_refused_by_name(more: dict[str, Any], told: str):
    with pytest.raises(RequestRefused) as error:
        API.chat_request({"input": "x"} | more)
    assert told in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "input_image"]) | JSON, "text": JSON}), max_size=2
)
KINDS = ["message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "additional_tools", "x"]
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS) | JSON,
        "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
        **dict.fromkeys(("content", "summary", "output", "tools"), JSON | PARTS),
        **dict.fromkeys(("name", "namespace", "arguments", "input"), JSON),
    },
)
TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace"]) | JSON},
    optional=dict.fromkeys(("name", "description", "parameters", "format", "tools"), JSON),
)


@settings(max_examples=300)
@given(
    st.lists(ITEMS, max_size=4) | JSON,
    st.lists(TOOL, max_size=3) | JSON,
    st.dictionaries(st.sampled_from(["text", "reasoning", "tool_choice", "instructions"]), JSON),
)
def test_whatever_a_request_says_it_is_refused_or_is_a_chat(items, tools, more):
    with suppress(RequestRefused):
        checked(ChatRequest, API.chat_request({"input": items, "tools": tools, **more}))
        assert API.stream({"input": items, "tools": tools, **more}).end()[-1].name == "response.completed"


# -- answers ----------------------------------------------------------------------------------------------------------


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish}]}


def accumulated(chunks: list[dict[str, Any]], failure: str = "") -> Response:
    """The response that openai's client makes of these chunks, after each event was checked against its type."""
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    response = None
    stream = API.stream(REQUEST)
    events = [event for one in json.loads(json.dumps(chunks)) for event in stream.take(one)]
    events += stream.fail(503, failure) if failure else stream.end()
    for number, (name, data) in enumerate(events):
        assert (data["type"], data["sequence_number"]) == (name, number)
        for event in state.handle_event(EVENT.validate_python(json.loads(json.dumps(data)))):
            response = getattr(event, "response", response)
    assert response is not None
    return response


def test_a_stream_of_reasoning_text_and_calls():
    response = accumulated(
        [
            chunk(reasoning="I "),
            chunk(reasoning="look."),
            chunk(content="\n\n"),
            chunk(content="Looking."),
            chunk(tool_calls=[call("shell", {"a": 1}), call("agents__shell", {}, "2")]),
            chunk(tool_calls=[call("patch", {"input": "LINE"}, "3"), call("patch", {"other": 1}, "4")]),
            chunk("tool_calls"),
            {"choices": [], "usage": USAGE},
        ]
    )
    assert [item.type for item in response.output] == [
        *("reasoning", "message", "function_call", "function_call", "custom_tool_call", "custom_tool_call"),
    ]
    reasoning, message, shell, agents, patch, other = response.output
    assert (reasoning.content[0].text, message.content[0].text) == ("I look.", "\n\nLooking.")
    assert (shell.call_id, shell.name, shell.namespace, shell.arguments) == ("1", "shell", None, '{"a": 1}')
    assert (agents.call_id, agents.name, agents.namespace, agents.arguments) == ("2", "shell", "agents", "{}")
    assert (patch.input, other.input) == ("LINE", '{"other": 1}')
    assert {item.status for item in (reasoning, message, shell, agents)} == {"completed"}
    assert (response.status, response.model, response.usage.input_tokens) == ("completed", "m", 100)
    assert response.usage.input_tokens_details.cached_tokens == 60
    assert (response.usage.output_tokens, response.usage.total_tokens) == (7, 107)


def test_white_space_between_reasoning_and_a_call_is_no_message():
    response = accumulated([chunk(reasoning="x"), chunk(content="\n"), chunk("stop", tool_calls=[call("shell", {})])])
    assert [item.type for item in response.output] == ["reasoning", "function_call"]


def test_an_answer_that_had_no_more_tokens_is_incomplete():
    response = accumulated([chunk(content="so"), chunk("length", content=" far")])
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("so far", "incomplete")


def test_an_answer_that_was_cut_has_failed():
    response = accumulated([chunk(content="so")], "the server ends")
    assert (response.status, response.output[0].status) == ("failed", "incomplete")
    assert (response.error.code, response.error.message) == ("server_error", "the server ends")
    assert accumulated([], "the server ends").status == "failed"


WORDS = st.text(max_size=4)
DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "reasoning": WORDS,
        "content": WORDS | st.just("\n"),
        "tool_calls": st.lists(st.builds(call, st.sampled_from(["shell", "patch", "agents__shell", "x"]), st.just({}))),
    },
)


@given(st.lists(DELTAS, max_size=6), st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_whole_answer_is_what_its_stream_ends_with(deltas, finish):
    numbers = iter(range(100))
    for delta in deltas:
        for one in delta.get("tool_calls", []):
            one["id"] = str(next(numbers))
    streamed = accumulated([*(chunk(**delta) for delta in deltas), chunk(finish), {"choices": [], "usage": USAGE}])
    said = "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(delta.get("reasoning", "") for delta in deltas)
    calls = [one for delta in deltas for one in delta.get("tool_calls", [])]
    message = {"role": "assistant", "content": said or None, "reasoning": thought, "tool_calls": calls}
    chat = {"choices": [{"message": message, "finish_reason": finish}], "usage": USAGE}
    whole = Response.model_validate(json.loads(json.dumps(API.answer(REQUEST, chat))))
    assert (whole.status, whole.usage) == (streamed.status, streamed.usage)
    assert _calls(whole) == _calls(streamed) == [one["id"] for one in calls]
    assert _thoughts(whole) == _thoughts(streamed) == thought
    for response in (whole, streamed):  # what is white space alone is no item
        assert "".join(response.output_text.split()) == "".join(said.split())


def _calls(response: Response) -> list[str]:
    return [item.call_id for item in response.output if item.type in ("function_call", "custom_tool_call")]


def _thoughts(response: Response) -> str:
    return "".join(part.text for item in response.output if item.type == "reasoning" for part in item.content)


@given(st.lists(DELTAS, max_size=6))
def test_what_a_response_gave_is_the_message_that_the_next_request_has(deltas):
    """Reasoning, text and calls, each once and in the order in which models give them, come back as they were."""
    said = "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(delta.get("reasoning", "") for delta in deltas)
    chat_message = {
        "content": said,
        "reasoning": thought,
        "tool_calls": deltas[0].get("tool_calls", []) if deltas else [],
    }
    chat = {"choices": [{"message": chat_message, "finish_reason": "stop"}], "usage": USAGE}
    output = API.answer(REQUEST, chat)["output"]
    expected: dict[str, Any] = {"role": "assistant"}
    if thought:
        expected["reasoning_content"] = thought
    if said.strip():
        expected["content"] = said
    if chat_message["tool_calls"]:
        expected["tool_calls"] = chat_message["tool_calls"]
    got = messages([{"role": "user", "content": "x"}, *output], tools=TOOLS)[1:]
    for message in got:
        for one in message.get("tool_calls", []):
            if one["function"]["name"] == "patch":
                one["function"]["arguments"] = "{}"  # its text was that, which is now its input
    assert got == ([expected] if len(expected) > 1 else [])


def test_errors_have_openais_form():
    assert API.error(400, "x: wrong") == {
        "error": {"message": "x: wrong", "type": "invalid_request_error", "param": None, "code": 400}
    }
    assert API.error(503, "")["error"]["type"] == "server_error"
