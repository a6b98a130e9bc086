"""Canonical text of chats: each rule of `servers/canonical.py` changes what it names, once, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.servers.canonical import (
    ANSWERS,
    CHANGING_HEADERS,
    RULES,
    CanonicalText,
    TemplateChat,
    canonical,
    with_ordered_schemas,
    without_changing_headers,
)

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=cli;"
NAMES = st.sampled_from(["path", "type", "items", "properties", "required", "name", "old_string", "command", "zeta"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
TEXTS = st.lists(st.sampled_from([HEADER, "You are an agent.", "", "x-anthropic", HEADER[:-1], "\n"]), max_size=4).map(
    "\n".join
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": TEXTS | PARTS}
    ),
    min_size=1,
    max_size=4,
)
TOOLS = st.none() | st.lists(st.dictionaries(NAMES, VALUES, max_size=5), max_size=3)
CHATS = st.builds(TemplateChat, MESSAGES, TOOLS)


def texts(chat: TemplateChat) -> list[str]:
    """What mlx-lm makes of each message's content."""
    return ["".join(p["text"] for p in c) if isinstance(c := m["content"], list) else c for m in chat.messages]


def shuffled(value: Any, draw: st.DataObject) -> Any:
    """The same value with the keys of its objects in another order."""
    if isinstance(value, list):
        return [shuffled(each, draw) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: shuffled(value[key], draw) for key in draw.draw(st.permutations(list(value)))}


@given(CHATS)
def test_rules_are_idempotent_and_leave_what_they_are_given(chat):
    before = copy.deepcopy(chat)
    for rule in RULES.values():
        once = rule(chat)
        assert rule(once) is once
    assert repr(chat) == repr(before)
    assert canonical(canonical(chat)) == canonical(chat)


@given(CHATS)
def test_a_chat_without_what_a_rule_names_is_the_very_same(chat):
    if not any(HEADER[:-1] in text for text in texts(chat)):
        assert without_changing_headers(chat) is chat
    assert with_ordered_schemas(chat._replace(tools=None)).tools is None
    assert with_ordered_schemas(chat).messages is chat.messages
    assert without_changing_headers(chat).tools is chat.tools


@given(CHATS)
def test_the_headers_rule_leaves_out_whole_lines_at_the_beginning_of_system_texts_alone(chat):
    changed = without_changing_headers(chat)
    leading = True
    for message, before, after in zip(chat.messages, texts(chat), texts(changed), strict=True):
        leading &= message["role"] in ("system", "developer")
        assert before.endswith(after)
        gone = before.removesuffix(after)
        assert not gone or leading
        assert all(part.startswith(CHANGING_HEADERS) for part in gone.split("\n") if part)


@given(CHATS, st.data())
def test_tools_in_another_order_of_keys_become_the_same_text(chat, data):
    other = shuffled(chat.tools, data)
    assert json.dumps(with_ordered_schemas(chat).tools) == json.dumps(
        with_ordered_schemas(TemplateChat([], other)).tools
    )
    assert with_ordered_schemas(chat).tools == chat.tools  # as JSON has it, where order says nothing


@given(CHATS)
def test_nothing_changes_where_canonical_text_is_off(chat):
    off = CanonicalText(rules=())
    assert off.of(chat) is chat
    assert not any(off.changed().values())


@given(CHATS, st.sampled_from(sorted(RULES)))
def test_a_rule_is_switched_on_by_itself(chat, name):
    text = CanonicalText(rules=[name])
    assert text.of(chat) == canonical(chat, [name]) == RULES[name](chat)
    assert all(changed == name for changed, count in text.changed().items() if count)


def test_prompts_are_counted_by_the_rule_that_changed_them():
    text = CanonicalText()
    schema = {"required": ["b"], "properties": {"a": {}, "b": {}}}
    for _ in range(2):
        text.of(TemplateChat([{"role": "system", "content": f"{HEADER}\nYou"}]))
    text.of(TemplateChat([{"role": "system", "content": "You"}], [schema]))
    assert text.changed() == {"headers": 2, "schemas": 1, ANSWERS: 0}


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (f"{HEADER}\nYou are an agent.", "You are an agent."),
        ([{"type": "text", "text": HEADER}, {"type": "text", "text": "You"}], [{"type": "text", "text": "You"}]),
        (f"You are an agent.\n{HEADER}", f"You are an agent.\n{HEADER}"),
        (None, None),
    ],
    ids=["Claude Code's", "LiteLLM's", "not at the beginning", "no text"],
)
def test_claude_codes_header_leaves_the_system_text(content, left):
    user = {"role": "user", "content": f"{HEADER}\nwhat is this?"}
    changed = without_changing_headers(TemplateChat([{"role": "system", "content": content}, user]))
    assert changed.messages == [{"role": "system", "content": left}, user]


def test_properties_keep_the_order_in_which_required_has_them():
    names = ["file_path", "old_string", "new_string"]
    schema = {
        "parameters": {"required": names, "type": "object", "properties": {name: {} for name in ["all", *names[::-1]]}},
        "name": "Edit",
    }
    tool = {"function": schema, "type": "function"}
    (ordered,) = with_ordered_schemas(TemplateChat([], [tool])).tools or ()
    assert list(ordered) == ["type", "function"]
    assert list(ordered["function"]) == ["name", "parameters"]
    assert list(ordered["function"]["parameters"]["properties"]) == [*names, "all"]
