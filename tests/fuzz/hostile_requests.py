"""Requests of which each has one field with a value that it should not have: every declared field, every hostile value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from prefixcache.servers.apis.responses import ResponsesRequest
from prefixcache.servers.request_schema import ChatRequest, GenerationRequest, TextRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}]}
TEXT: dict[str, Any] = {"prompt": "hello there"}
RESPONSE: dict[str, Any] = {"input": "hello there"}
HOSTILE: tuple[Any, ...] = (
    True,
    False,
    0,
    1,
    -1,
    2,
    12,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    0.6,
    1.5,
    1e-320,
    1e-30,
    1e39,
    -1e39,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "a",
    "1",
    "\0",
    "\ud800",
    "\U0001f600",
    "x" * 5000,
    "../..",
    "/no/such/folder",
    [],
    [[]],
    [None],
    [1],
    ["a"],
    [""],
    ["\ud800"],
    ["a"] * 100,
    [{}],
    [{"role": "user"}],
    {},
    {"a": None},
    {"1": 1},
    {"1": 2**70},
    {"1": math.nan},
    {"999999": 1},
    {"": ""},
    {"\ud800": "\ud800"},
    {"include_usage": 1},
    {"chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"},
    {"tokenize": False},
    {"messages": []},
)
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 2}  # what is wrong with a sampler shows when it samples
BESIDE = {  # without which a field does nothing
    "xtc_threshold": {"xtc_probability": 0.5},
    "stream_options": {"stream": True},
    "repetition_context_size": {"repetition_penalty": 1.1},
    "presence_context_size": {"presence_penalty": 0.5},
    "frequency_context_size": {"frequency_penalty": 0.5},
    "top_logprobs": {"logprobs": True},
}


class Hostile(NamedTuple):
    """A request's path and body, and the field that is hostile."""

    path: str
    field: str
    value: Any
    body: bytes


def hostile_requests() -> Iterator[Hostile]:
    for path, kind, sound in (
        ("/v1/chat/completions", ChatRequest, CHAT),
        ("/v1/completions", TextRequest, TEXT),
        ("/v1/responses", ResponsesRequest, RESPONSE),
    ):
        fields = kind.model_fields.keys()
        if kind is not ChatRequest:
            fields = fields - (GenerationRequest.model_fields.keys() - {"seed", "max_tokens"})
        for field in sorted(fields):
            for value in HOSTILE:
                body = {**sound, **SAMPLING, **BESIDE.get(field, {}), field: value}
                yield Hostile(path, field, value, json.dumps(body).encode())
