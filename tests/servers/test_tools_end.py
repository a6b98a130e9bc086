"""Where the tools of a prompt end, by the templates of real tokenizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from prefixcache.keys import BLOCK, as_tokens, common_prefix
from prefixcache.servers.mlx_lm.tools_end import REMEMBERED, ToolsEnds, segment_at
from tests.servers.serving import TINY, Message, text
from tests.servers.test_serve_answers import TEMPLATE

LAST = TEMPLATE.replace("{% if tools %}", "{% if false %}").replace(
    "{% if add_gen", "{{ tools | tojson }}{% if add_gen"
)
RAISES = "{{ raise_exception('no') }}"
TOOLS = [{"type": "function", "function": {"name": "count", "description": text(700, "tool")}}]
TOKENIZER = load_tokenizer(str(TINY))
CONTENTS = st.text(max_size=30)
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


def end_of(template: str, messages: list[Message], ends: ToolsEnds, tools: Any = TOOLS) -> int:
    tokens = as_tokens(tokenize(template, tools, messages) if template != RAISES else [1] * 600)
    return ends.find(tokens, messages, (template, tools), partial(tokenize, template, tools))


@given(CHATS, CHATS)
def test_chats_with_the_same_tools_are_the_same_up_to_there(one, other):
    ends = ToolsEnds()
    end = end_of(TEMPLATE, one, ends)
    tokens = [as_tokens(tokenize(TEMPLATE, TOOLS, chat)) for chat in (one, other)]
    assert end % BLOCK == 0
    assert 512 <= end <= common_prefix(*tokens)
    assert end_of(TEMPLATE, one, ends) == end == end_of(TEMPLATE, other, ends)


@pytest.mark.parametrize("template", [LAST, RAISES])
def test_there_is_none_where_tools_come_later_or_the_template_refuses_others(template):
    assert end_of(template, [{"role": "user", "content": "hello"}], ToolsEnds()) == 0


def test_tools_are_rendered_once_for_all_chats_until_many_others_came():
    ends, chat, rendered = ToolsEnds(), [{"role": "user", "content": "hello"}], []

    def rendered_for(tools: Any) -> list[int]:
        rendered.append(tools)
        return [1] * 300

    def find(number: int) -> int:
        return ends.find(as_tokens([1] * 600), chat, (number,), lambda messages: rendered_for(number))

    assert [find(0) for _ in range(3)] == [256] * 3
    for number in range(REMEMBERED):
        assert find(number) == 256
    find(0)
    assert rendered == [*range(REMEMBERED)]
    find(REMEMBERED)
    find(0)
    find(1)
    assert rendered == [*range(REMEMBERED + 1), 1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 30))
def test_a_prompt_is_cut_in_its_first_segment_alone(lengths, end):
    segments = [[at] * length for at, length in enumerate(lengths)]
    prompt = [token for segment in segments for token in segment]
    cut = segment_at((prompt, segments, ["user"] * len(segments), "normal", None), end)
    assert [token for segment in cut[1] for token in segment] == cut[0] == prompt
    assert len(cut[1]) == len(cut[2]) == len(segments) + (0 < end < lengths[0])
    assert all(cut[1])
    assert cut[3:] == ("normal", None)
