"""What a request may say: `servers/request_schema.py`, without a server; with one it is tests/fuzz/test_requests.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.servers.request_schema import (
    ChatRequest,
    GenerationRequest,
    RequestRefused,
    TextRequest,
    checked,
    rows,
)
from tests.fuzz.hostile_requests import CHAT, HOSTILE, TEXT

FIELDS = sorted({*ChatRequest.model_fields, *TextRequest.model_fields})
HUGE = st.integers(-(2**80), 2**80)
LEAVES = st.one_of(
    st.none(), st.booleans(), HUGE, st.floats(), st.text(), st.sampled_from([value for value in HOSTILE if value != {}])
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


def refused(more: dict[str, Any], kind: type[GenerationRequest] = ChatRequest) -> str:
    with pytest.raises(RequestRefused) as error:
        checked(kind, (CHAT if kind is ChatRequest else TEXT) | more)
    assert error.value.status == 400
    return str(error.value)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(), VALUES, max_size=5), st.booleans())
def test_whatever_a_request_says_it_is_refused_in_a_short_line_or_all_of_it_can_be_used(more, chat):
    kind: type[GenerationRequest] = ChatRequest if chat else TextRequest
    told, asked = "", {}
    try:
        asked = checked(kind, (CHAT if chat else TEXT) | more)
    except RequestRefused as error:
        told = str(error)
    assert told.isascii()
    assert len(told) < 300
    assert bool(told) != bool(asked)
    assert all(value is not None for value in asked.values())
    declared = {name: asked[name] for name in kind.model_fields if name in asked}
    for name, value in declared.items():
        if isinstance(value, (int, float)):
            assert math.isfinite(value)
            assert abs(value) < 2**64
            assert isinstance(value, bool) == (name in ("stream", "logprobs"))
    json.dumps(declared, allow_nan=all(name not in ("tools", "messages", "chat_template_kwargs") for name in declared))
    json.dumps(asked, ensure_ascii=False).encode()  # no half of a surrogate pair


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"temperature": 2**63}, "temperature must be a number from 0 to 100, not 9223372036854775808"),
        ({"temperature": 10**400}, "temperature must be a number from 0 to 100, not an integer of 1329 bits"),
        ({"min_p": math.nan}, "min_p must be a number from 0 to 1, not NaN"),
        ({"top_k": True}, "top_k must be an integer from 0 to 2**31 - 1, not true"),
        ({"xtc_threshold": 0.6}, "xtc_threshold must be a number from 0 to 0.5, not 0.6"),
        ({"seed": -1}, "seed must be an integer from 0 to 2**64 - 1, not -1"),
        ({"role_mapping": {"user": 1}}, "role_mapping must be an object of strings: user is wrong, 1"),
        ({"tools": "none"}, 'tools must be a list of objects, not "none"'),
        ({"stream_options": 5}, 'stream_options must be an object such as {"include_usage": true}, not 5'),
        ({"stream_options": {"include_usage": 1}}, "include_usage is wrong, 1"),
        ({"logit_bias": {"1": math.inf}}, "1 is wrong, Infinity"),
        (
            {"logit_bias": {"-1": 1}},
            "logit_bias must be an object of token ids, each with a number from -10,000 to 10,000",
        ),
        ({"stop": ["a", ""]}, "stop must be a string or a list of strings, none of them empty"),
        ({"stop": "\ud800"}, "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": ["\ud800"]}]}, "messages must be a list of objects"),
        ({"user": {"deep": ["\udfff"]}}, "user must be Unicode text"),
        ({"messages": []}, "messages must be a list of objects"),
        ({"messages": [{"content": "x"}]}, "0.role is wrong"),
        ({"model": "a\0b"}, "model must be a name or a folder"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize is not a variable"),
        ({"chat_template": "x"}, "leave chat_template out, or start the server with --allow-chat-template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "leave chat_template_kwargs.chat_template out"),
    ],
    ids=str,
)
def test_an_error_names_the_field_the_value_and_what_it_may_be(more, told):
    assert told in refused(more)


def test_a_salt_is_in_no_error():
    assert refused({"cache_salt": 123456789}) == "cache_salt must be a string of at most 1024 Unicode characters"


def test_what_is_needed_is_told():
    with pytest.raises(RequestRefused, match=r'messages must be a list of objects such as \{"role"'):
        checked(ChatRequest, {})
    with pytest.raises(RequestRefused, match="prompt must be one string"):
        checked(TextRequest, {})
    with pytest.raises(RequestRefused, match="the body must be a JSON object"):
        checked(TextRequest, [])


def test_null_is_not_given_and_what_is_not_declared_passes():
    body = CHAT | {"seed": None, "adapters": None, "user": "me", "n": 1, "response_format": {"type": "text"}}
    assert checked(ChatRequest, body) == CHAT | {"user": "me", "n": 1, "response_format": {"type": "text"}}


def test_numbers_get_their_type_and_a_stop_becomes_a_list():
    asked = checked(ChatRequest, CHAT | {"temperature": 1, "xtc_probability": 1, "stop": "end", "stream_options": {}})
    assert (asked["temperature"], asked["stop"]) == (1.0, ["end"])
    assert isinstance(asked["xtc_probability"], float)
    assert asked["stream_options"] == {"include_usage": False}


def test_null_is_not_given_in_stream_options_either():
    asked = checked(ChatRequest, CHAT | {"stream_options": {"include_usage": None, "include_obfuscation": False}})
    assert asked["stream_options"] == {"include_usage": False}


def test_a_temperature_that_half_precision_cant_divide_by_is_0():
    assert [checked(ChatRequest, CHAT | {"temperature": t})["temperature"] for t in (1e-300, 1e-4, 0.001)] == [
        0,
        0,
        0.001,
    ]


def test_a_template_is_one_of_the_variables_where_it_is_allowed():
    body = CHAT | {"chat_template": "x", "chat_template_kwargs": {"enable_thinking": False}}
    asked = checked(ChatRequest, body, allow_chat_template=True)
    assert asked["chat_template_kwargs"] == {"chat_template": "x", "enable_thinking": False}
    assert "chat_template" not in asked
    with pytest.raises(RequestRefused, match="must be a string"):
        checked(ChatRequest, CHAT | {"chat_template_kwargs": {"chat_template": 5}}, allow_chat_template=True)


def test_every_field_is_explained():
    told = [row for kind in (GenerationRequest, ChatRequest, TextRequest) for row in rows(kind)]
    assert sorted(row.name for row in told) == FIELDS
    assert all(row.value and row.about for row in told)
