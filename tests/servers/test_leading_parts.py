"""Where the tools and the system text of a prompt end, by the templates of real tokenizers."""

from __future__ import annotations

from datetime import date
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from prefixcache.keys import BLOCK, as_tokens, common_prefix
from prefixcache.servers.mlx_lm import leading_parts
from prefixcache.servers.mlx_lm.leading_parts import REMEMBERED, LeadingEnds, LeadingParts, segments_at, system_end
from tests.servers.serving import TEMPLATE, TINY, Message, text

LAST = TEMPLATE.replace("{% if tools %}", "{% if false %}").replace(
    "{% if add_gen", "{{ tools | tojson }}{% if add_gen"
)
RAISES = "{{ raise_exception('no') }}"
TOOLS = [{"type": "function", "function": {"name": "count", "description": text(700, "tool")}}]
TOKENIZER = load_tokenizer(str(TINY))
CONTENTS = st.text(max_size=30)
SAID = st.lists(CONTENTS.map("x{}".format), min_size=1, max_size=3)
CHATS = st.builds(
    lambda system, contents: [
        *({"role": "system", "content": content} for content in system),
        *({"role": "user", "content": content} for content in contents),
    ],
    st.lists(CONTENTS, max_size=1),
    st.lists(CONTENTS, min_size=1, max_size=3),
)


def tokenize(template: str, tools: Any, messages: list[Message]) -> list[int]:
    return TOKENIZER.apply_chat_template(messages, tools=tools, chat_template=template, add_generation_prompt=True)


def ends_of(template: str, messages: list[Message], parts: LeadingParts, tools: Any = TOOLS) -> LeadingEnds:
    tokens = as_tokens(tokenize(template, tools, messages) if template != RAISES else [1] * 600)
    return parts.ends(tokens, messages, (template, tools), partial(tokenize, template, tools))


@given(CHATS, CHATS)
def test_chats_with_the_same_tools_are_the_same_up_to_there(one, other):
    parts = LeadingParts()
    ends = [ends_of(TEMPLATE, chat, parts) for chat in (one, other)]
    tokens = [as_tokens(tokenize(TEMPLATE, TOOLS, chat)) for chat in (one, other)]
    assert ends[0].tools % BLOCK == 0
    assert 512 <= ends[0].tools == ends[1].tools <= common_prefix(*tokens)
    assert ends_of(TEMPLATE, one, parts) == ends[0]


@given(CONTENTS, SAID, SAID, st.booleans())
def test_chats_with_the_same_system_text_are_the_same_up_to_its_end(system, one, other, late):
    """Whoever spoke last."""
    leading: list[Message] = [{"role": "system", "content": system}]
    last = [{"role": "system" if late else "tool", "content": "and this"}]
    chats = [[*leading, *({"role": "user", "content": content} for content in talk), *last] for talk in (one, other)]
    parts = LeadingParts()
    (_, end), (_, again) = (ends_of(TEMPLATE, chat, parts) for chat in chats)
    tokens = [as_tokens(tokenize(TEMPLATE, TOOLS, chat)) for chat in chats]
    alone = common_prefix(
        *(as_tokens(tokenize(TEMPLATE, TOOLS, [*leading, {"role": "user", "content": c}])) for c in "ab")
    )
    assert end == again == alone <= common_prefix(*tokens)


@pytest.mark.parametrize("template", [LAST, RAISES])
def test_there_is_none_where_tools_come_later_or_the_template_refuses_others(template):
    assert ends_of(template, [{"role": "user", "content": "hello"}], LeadingParts()) == (0, 0)


def test_tools_are_rendered_once_for_all_chats_until_many_others_came():
    parts, chat, rendered = LeadingParts(), [{"role": "user", "content": "hello"}], []

    def rendered_for(tools: Any) -> list[int]:
        rendered.append(tools)
        return [1] * 300

    def find(number: int) -> int:
        return parts.ends(as_tokens([1] * 600), chat, (number,), lambda messages: rendered_for(number)).tools

    assert [find(0) for _ in range(3)] == [256] * 3
    for number in range(REMEMBERED):
        assert find(number) == 256
    find(0)
    assert rendered == [*range(REMEMBERED)]
    find(REMEMBERED)
    find(0)
    find(1)
    assert rendered == [*range(REMEMBERED + 1), 1]


def test_a_template_that_writes_the_day_ends_its_system_text_where_it_does_on_the_next_day_too(monkeypatch):
    day = [date(2026, 1, 9), date(2026, 1, 10)]
    monkeypatch.setattr(leading_parts, "date", SimpleNamespace(today=lambda: day[0]))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    parts, ends = LeadingParts(), []
    for _ in range(2):
        template = f"Today is {day[0]}. {TEMPLATE}"
        prompt = as_tokens(tokenize(template, TOOLS, chat))
        ends.append(parts.ends(prompt, chat, (TOOLS,), partial(tokenize, template, TOOLS)))
        assert ends[-1] == ends_of(template, chat, LeadingParts())
        day.pop(0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.lists(st.integers(0, 30), max_size=3))
def test_a_prompt_is_cut_in_its_first_segment_alone(lengths, ends):
    segments = [[at] * length for at, length in enumerate(lengths)]
    prompt = [token for segment in segments for token in segment]
    cut = segments_at((prompt, segments, ["user"] * len(segments), "normal", None), ends)
    cuts = {end for end in ends if 0 < end < lengths[0]}
    assert [token for segment in cut[1] for token in segment] == cut[0] == prompt
    assert len(cut[1]) == len(cut[2]) == len(segments) + len(cuts)
    assert all(cut[1])
    assert cut[3:] == ("normal", None)
    assert system_end(cut[1], cut[2]) == max(cuts, default=0)
