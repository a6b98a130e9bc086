"""A chat's messages as templates take them: `servers/chat_messages.py`, without a server, with templates like models'."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefixcache.servers.chat_messages import MARK, TemplateRoles, for_template, roles_of
from prefixcache.servers.request_schema import RequestRefused

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
RAISES = "{{ raise_exception('no') }}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}" + RAISES + "{% endif %}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + RAISES
    + "{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}" + RAISES + "{% endif %}"
DROPS_LATE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
MOVES_LATE = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TEMPLATES = {
    "all": (EACH, TemplateRoles()),
    "one system": (ONE_SYSTEM + EACH, TemplateRoles(late_system=False)),
    "drops late": (DROPS_LATE, TemplateRoles(late_system=False)),
    "moves late": (MOVES_LATE, TemplateRoles(late_system=False)),
    "alternates": (ONE_SYSTEM + ALTERNATES + EACH, TemplateRoles(late_system=False, users_in_a_row=False)),
    "no system": (NO_SYSTEM + ONE_SYSTEM + ALTERNATES + EACH, TemplateRoles(False, False, False)),
    "only with a variable": (RAISES + EACH, TemplateRoles()),
}


def render(template: str, chat: list[dict[str, Any]]) -> str:
    def raise_exception(text: str) -> None:
        raise ValueError(text)

    environment = ImmutableSandboxedEnvironment()
    return environment.from_string(template).render(messages=chat, raise_exception=raise_exception)


def taken(*messages: tuple[str, Any], roles: TemplateRoles = TemplateRoles()) -> list[tuple[str, Any]]:  # noqa: B008
    given = [{"role": role, "content": content} for role, content in messages]
    return [(message["role"], message["content"]) for message in for_template(given, roles, images=True)]


def refused(message: dict[str, Any], *, images: bool = False) -> str:
    with pytest.raises(RequestRefused) as error:
        for_template([{"role": "user", "content": "x"}, message], TemplateRoles(), images=images)
    return str(error.value)


@pytest.mark.parametrize(("template", "roles"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_is_asked_which_messages_it_takes(template: str, roles: TemplateRoles):
    assert roles_of(lambda chat: render(template, chat)) == roles


ROLES = st.sampled_from(["system", "developer", "user", "assistant"])


@given(st.lists(ROLES, max_size=6), st.sampled_from([name for name in TEMPLATES if name != "only with a variable"]))
def test_nothing_said_is_dropped_and_nothing_raises(said: list[str], name: str):
    template, roles = TEMPLATES[name]
    chat = [{"role": role, "content": f"{MARK}{place}"} for place, role in enumerate(["user", *said])]
    twice = any(first["role"] == second["role"] == "assistant" for first, second in pairwise(chat))
    assume(roles.users_in_a_row or not twice)  # nothing is made of two answers in a row
    before = copy.deepcopy(chat)
    text = render(template, for_template(chat, roles, images=False))
    assert chat == before
    places = [text.index(one["content"]) for one in chat]
    assert places == sorted(places)
    assert "developer" not in text


def test_system_messages_at_the_beginning_are_one():
    assert taken(("developer", "a"), ("system", "b"), ("user", "c"), ("system", "d")) == [
        ("system", "a\n\nb"),
        ("user", "c"),
        ("system", "d"),
    ]


def test_parts_stay_parts_and_an_empty_text_adds_nothing():
    parts = [{"type": "text", "text": "b"}]
    assert taken(("system", "a"), ("system", parts), ("system", "")) == [
        ("system", [{"type": "text", "text": text} for text in ("a", "\n\n", "b")])
    ]


def test_a_late_system_message_is_the_users_where_the_template_takes_no_other():
    chat = [("system", "a"), ("user", "b"), ("developer", "c"), ("assistant", "d"), ("system", "e"), ("user", "f")]
    assert taken(*chat, roles=TemplateRoles(late_system=False)) == [
        *(("system", "a"), ("user", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("user", "f")),
    ]
    assert taken(*chat, roles=TemplateRoles(True, False, False)) == [
        *(("system", "a"), ("user", "b\n\nc"), ("assistant", "d"), ("user", "e\n\nf")),
    ]
    assert taken(*chat, roles=TemplateRoles(False, False, False))[0] == ("user", "a\n\nb\n\nc")


def test_null_is_not_given():
    call = {"id": "1", "function": {"name": "f", "arguments": None}}
    chat = [{"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [call]}]
    assert for_template(chat, TemplateRoles(), images=False) == [
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    ]


def test_arguments_are_text_as_it_was_given():
    for said, text in (('{"a":  1}', '{"a":  1}'), ({"a": "é"}, '{"a": "é"}'), ("", "{}"), ({}, "{}")):
        call = {"function": {"name": "f", "arguments": said}}
        (message,) = for_template([{"role": "assistant", "tool_calls": [call]}], TemplateRoles(), images=False)
        assert message["tool_calls"][0]["function"]["arguments"] == text


def test_what_cant_be_read_is_refused_by_name():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert "messages.1.content.0 is an image, and the model reads text only" in refused(
        {"role": "user", "content": [image]}
    )
    audio = refused({"role": "user", "content": [image, {"type": "input_audio"}]}, images=True)
    assert audio == 'messages.1.content.1 must be a text or an image, not of type "input_audio"; leave it out'
    assert "messages.1.content.0 must have its text" in refused({"role": "user", "content": [{"type": "text"}]})
    for arguments in ('{"a": ', "[1]", "5", 5, 0, False, "nul"):
        call = {"function": {"name": "f", "arguments": arguments}}
        told = refused({"role": "assistant", "tool_calls": [call]})
        assert told.startswith("messages.1.tool_calls.0.function.arguments must be a JSON object, or its text, not")
        assert told.endswith((json.dumps(arguments), "a list of 1"))
