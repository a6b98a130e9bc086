"""In which part of a chat two prompts part: found by rendering, for templates that look ahead, move tools and trim. A part is
the right one, or not told.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.utils import load_tokenizer

from prefixcache.servers.prompt_parts import MESSAGE, SYSTEM, TEMPLATE, TOOLS, ChatText, Part, common_length, place_of
from tests.servers.serving import TINY

TURN = "{{ '<|' + m.role + '|>' + m.content|trim + '<|end|>' }}"
ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments|tojson }}</call>{% endfor %}"
)
TEMPLATES = {
    "turns": "Today is Monday.{% for m in messages %}" + TURN + "{% endfor %}" + ANSWER,
    # tools behind the system text; reasoning stays behind the last message of the user only
    "looks ahead": """{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}
{%- if m.role == 'user' and not m.content.startswith('<result>') %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor -%}
{%- if messages[0].role == 'system' or tools %}<|system|>{{ messages[0].content if messages[0].role == 'system' }}
{%- if tools %} # Tools:{% for t in tools %}
{{ t|tojson }}{% endfor %}
/tools{% endif %}<|end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}"""
    + CALLS
    + """<|end|>
{% elif m.role != 'system' or loop.index0 > 0 -%}
<|{{ m.role }}|>{{ m.content }}<|end|>
{% endif -%}
{%- endfor -%}"""
    + ANSWER,
    "tools first": "{% if tools %}[TOOLS]{{ tools|tojson }}[/TOOLS]{% endif %}{% for m in messages %}"
    + TURN
    + CALLS
    + "{% endfor %}"
    + ANSWER,
}


def render_by(template: str) -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(template)

    def render(messages: Any, tools: Any, *, answer_follows: bool) -> str:
        chat = copy.deepcopy(messages)
        for call in (call for message in chat for call in message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):  # as mlx-lm does it
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return compiled.render(messages=chat, tools=tools, add_generation_prompt=answer_follows)

    return render


WORD = st.text("abcxyz <>é", min_size=1, max_size=12).filter(str.strip)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(WORD)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(WORD)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(WORD)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(WORD)
        messages.append(answer)
        if draw(st.booleans()):
            arguments: Any = {"path": draw(WORD), "all": draw(st.booleans())}
            arguments = draw(st.sampled_from([arguments, json.dumps(arguments)]))
            answer["tool_calls"] = [{"type": "function", "function": {"name": "read", "arguments": arguments}}]
            messages.append({"role": "tool", "content": draw(WORD)})
    return [*messages, {"role": "user", "content": draw(WORD)}]


TOOL = st.builds(lambda name, about: {"type": "function", "function": {"name": name, "description": about}}, WORD, WORD)


def right(messages: list[dict[str, Any]], number: int) -> Part:
    if number == 0 and messages[0]["role"] == "system":
        return Part(SYSTEM)
    return Part(MESSAGE, number + 1, len(messages))


@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=chats(), tools=st.lists(TOOL, max_size=3), data=st.data())
def test_two_chats_that_differ_in_a_message_part_in_it(template, messages, tools, data):
    render = render_by(TEMPLATES[template])
    number = data.draw(st.integers(0, len(messages) - 1))
    other = copy.deepcopy(messages)
    other[number]["content"] = data.draw(WORD)
    mine, theirs = ChatText(render, messages, tools), ChatText(render, other, tools)
    assume(mine.text != theirs.text)
    told = mine.part_at(common_length(mine.text, theirs.text))
    assert told in (right(messages, number), Part(MESSAGE))
    if template == "turns":
        assert told == right(messages, number)


@pytest.mark.parametrize("template", list(TEMPLATES)[1:])
@given(messages=chats(), tools=st.lists(TOOL, min_size=1, max_size=3), more=TOOL, data=st.data())
def test_chats_that_differ_in_their_tools_part_there(template, messages, tools, more, data):
    render = render_by(TEMPLATES[template])
    place = data.draw(st.integers(0, len(tools)))
    replaced = data.draw(st.booleans())
    other = [*tools[:place], more, *tools[place + replaced :]]
    mine, theirs = ChatText(render, messages, tools), ChatText(render, messages, other)
    assume(mine.text != theirs.text)
    assert mine.part_at(common_length(mine.text, theirs.text)) == Part(TOOLS)


@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=chats(), tools=st.lists(TOOL, max_size=2), data=st.data())
def test_a_chat_that_goes_on_parts_behind_what_both_say(template, messages, tools, data):
    render = render_by(TEMPLATES[template])
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    said = data.draw(st.sampled_from(users))
    longer, shorter = ChatText(render, messages, tools), ChatText(render, messages[: said + 1], tools)
    assume(longer.text != shorter.text)
    told = longer.part_at(common_length(longer.text, shorter.text))
    if told.name == MESSAGE and told.number:
        assert told.number > said or template == "looks ahead"  # where the reasoning before it goes


@pytest.mark.parametrize("template", list(TEMPLATES)[1:])
@pytest.mark.parametrize("arguments", [{"path": "a"}, '{"path": "a"}', ""])
def test_an_answer_that_only_calls_a_tool_is_found(template, arguments):
    call = {"type": "function", "function": {"name": "read", "arguments": arguments or {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = [{"role": "user", "content": "hello"}, answer, {"role": "tool", "content": "there"}]
    text = ChatText(render_by(TEMPLATES[template]), chat)
    assert text.part_at(text.text.index("<call>") + 7) == Part(MESSAGE, 2, 3)
    assert text.part_at(text.text.index("there") + 2) == Part(MESSAGE, 3, 3)


@pytest.mark.parametrize("messages", [1, 10, 400])
def test_a_place_is_found_in_some_renderings(messages):
    count = 0
    plain = render_by(TEMPLATES["looks ahead"])

    def render(*given: Any, **more: Any) -> str:
        nonlocal count
        count += 1
        return plain(*given, **more)

    chat = [{"role": ("user", "assistant")[place % 2], "content": f"text {place}"} for place in range(messages)]
    text = ChatText(render, chat).text
    for number in {0, messages // 2, messages - 1}:
        count = 0
        told = ChatText(render, chat, [{"function": {"name": "f"}}])
        assert told.part_at(told.text.index(f"text {number}") + 3) == Part(MESSAGE, number + 1, messages)
        assert count <= 8 + messages.bit_length()
    assert ChatText(render, chat).part_at(2).name in (MESSAGE, TEMPLATE)
    assert ChatText(render, chat).part_at(len(text) - 1).name in (MESSAGE, TEMPLATE)


def test_a_template_that_raises_of_a_changed_chat_tells_no_message():
    def render(messages: Any, tools: Any, *, answer_follows: bool) -> str:
        if messages != said:
            raise ValueError
        return "user: hello there"

    said = [{"role": "user", "content": "hello"}, {"role": "user", "content": "there"}]
    assert ChatText(render, said).part_at(8) == Part(MESSAGE)


@given(text=st.text("ab é\n<|user|>", max_size=60), data=st.data())
def test_the_place_of_a_token_is_where_its_text_begins(text, data):
    tokenizer = load_tokenizer_once()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assume(tokens)
    position = data.draw(st.integers(0, len(tokens) - 1))
    place = place_of(tokenizer, text, tokens, position)
    assert place is not None
    before = tokenizer.decode(tokens[:position])
    assert text.startswith(before.rstrip("\ufffd"))
    assert place <= len(before) <= len(text)
    assert place_of(tokenizer, text, [*tokens[:position], -1], position) is None
    assert place_of(tokenizer, text, tokens, len(tokens)) is None


_tokenizers: list[Any] = []


def load_tokenizer_once() -> Any:
    if not _tokenizers:
        _tokenizers.append(load_tokenizer(TINY))
    return _tokenizers[0]
