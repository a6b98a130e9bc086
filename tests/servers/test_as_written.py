"""Answers in a history become what the model wrote, as far as they say the same: `servers/as_written.py`, on stored
sequences in a list, and under `prefixcache serve`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm.server import CompletionRequest
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from prefixcache import PrefixCache
from prefixcache.keys import common_prefix
from prefixcache.servers.as_written import Rewriting, as_written
from prefixcache.servers.canonical import EVERY_RULE, CanonicalText
from prefixcache.servers.mlx_lm.answer_reader import MarkReader
from prefixcache.servers.mlx_lm.prompt_tokenizer import PromptTokenizer
from tests.servers.serving import SECONDS, Message, Server, save_parrot, serving, text, user
from tests.servers.test_requests import Asked, arguments, generating

END = 0  # the token behind each turn; others are characters
ASK = "U:"  # with which a turn of the user begins
OPENING = "A:"  # of the model


class Sequences:
    def __init__(self, *stored: list[int]):
        self.stored = stored

    def known(self, tokens: Sequence[int]) -> int:
        return max((common_prefix(tokens, each) for each in self.stored), default=0)

    def beyond(self, tokens: Sequence[int], start: int, limit: int, most: int) -> list[list[int]]:
        going_on = [each[start:][:limit] for each in self.stored if each[:start] == list(tokens[:start])]
        return [each for each in going_on if each][:most]


def reader(parser: Any = json_tools, tools: Any = None, **more: Any) -> MarkReader:
    """What reads turns whose tokens are characters."""
    tokenizer = SimpleNamespace(
        eos_token_ids={END},
        think_start="<think>",
        think_end="</think>",
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
        decode=lambda tokens, **options: "".join(map(chr, tokens)),
    )
    return MarkReader(SimpleNamespace(**{**vars(tokenizer), **more}), tools)


def tokens_of(*turns: str, asks: bool = True) -> list[int]:
    """The tokens of turns, and of the prompt's end that asks for another one."""
    return [token for turn in turns for token in (*map(ord, turn), END)] + list(map(ord, OPENING if asks else ""))


def turns_of(tokens: Sequence[int]) -> list[str]:
    return "".join(map(chr, tokens)).split(chr(END))


def said_in(turn: str) -> tuple[str, ...]:
    return reader().meaning(turn.removeprefix(OPENING))


SPACE = st.sampled_from(["", " ", "\n", "\n\n"])
CALLS = st.sampled_from([{"all": True}, {"all": False}, {"n": 1}, {"n": None, "all": True}, {"text": "True"}])


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str]:
    """Two turns of the model that say the same."""
    said, thought, call = draw(st.sampled_from(["", "Let me look.", "x"])), draw(st.booleans()), draw(CALLS)
    spaces = [(draw(SPACE), draw(SPACE)) for _ in range(4)]
    forms = [draw(st.sampled_from([json.dumps, lambda value: json.dumps(value, indent=1), repr])) for _ in range(2)]
    both = []
    for which, form in enumerate(forms):
        space = [pair[which] for pair in spaces]
        parts = [f"{space[0]}<think>Hm.{space[1]}</think>" if thought else "", f"{space[2]}{said}{space[3]}"]
        function = f'{{"name": "count", "arguments": {form(call)}}}'
        both.append(f"{OPENING}{''.join(parts)}<tool_call>\n{function}\n</tool_call>")
    return both[0], both[1]


ASKED = st.sampled_from(["look", "count\n", "<tool_call> ", ""]).map(lambda asked: ASK + asked)
TALKS = st.lists(st.tuples(ASKED, answers()), min_size=1, max_size=4)


@given(TALKS, ASKED, st.booleans())
def test_a_history_that_says_the_same_is_what_the_model_wrote(talk, last, ended):
    wrote = [turn for asked, (written, _) in talk for turn in (asked, written)]
    history = [turn for asked, (_, rendered) in talk for turn in (asked, rendered)]
    stored = tokens_of(*wrote, asks=False)
    sequences = Sequences(stored if ended else stored[:-1])
    rewritten = as_written(tokens_of(*history, last), sequences, reader())
    assert rewritten.tokens == tokens_of(*wrote, last)
    assert as_written(rewritten.tokens, sequences, reader()) == (rewritten.tokens, [])


@given(st.lists(TALKS, min_size=1, max_size=3), TALKS, ASKED)
def test_each_turn_says_what_it_said(stored, talk, last):
    """Whatever is stored: only turns of the model change, and none of them its meaning."""
    sequences = Sequences(
        *(tokens_of(*(turn for asked, (said, _) in each for turn in (asked, said))) for each in stored)
    )
    tokens = tokens_of(*(turn for asked, (_, said) in talk for turn in (asked, said)), last)
    rewritten, rewritings = as_written(tokens, sequences, reader())
    for before, after in zip(turns_of(tokens), turns_of(rewritten), strict=True):
        if before.startswith(OPENING):
            assert said_in(before) == said_in(after)
        else:
            assert before == after
    assert (rewritten != tokens) == bool(rewritings)
    assert sequences.known(rewritten) >= sequences.known(tokens)


@given(TALKS, ASKED)
def test_nothing_stored_changes_nothing(talk, last):
    tokens = tokens_of(*(turn for asked, (_, said) in talk for turn in (asked, said)), last)
    for sequences in (Sequences(), Sequences(tokens_of("U:something else")), Sequences(tokens)):
        assert as_written(tokens, sequences, reader()) == (tokens, [])


@given(answers(), answers())
def test_an_answer_that_says_something_else_stays(one, other):
    assume(said_in(one[0]) != said_in(other[0]))
    tokens = tokens_of("U:look", one[0], "U:and?")
    assert as_written(tokens, Sequences(tokens_of("U:look", other[0])), reader()) == (tokens, [])


def test_of_several_answers_in_its_place_the_one_is_taken_that_says_the_same():
    wrote = [tokens_of("U:look", f'A:Hm.\n<tool_call>{{"n": {n}}}</tool_call>', asks=False) for n in range(5)]
    tokens = tokens_of("U:look", 'A:Hm.\n\n<tool_call>{"n":3}</tool_call>', "U:and?")
    assert as_written(tokens, Sequences(*wrote), reader()).tokens[: len(wrote[3])] == wrote[3]


def test_a_turn_of_the_user_stays_even_if_it_looks_like_an_answer():
    tokens = tokens_of("U:look <tool_call>{}</tool_call>", "A:No.", "U:and?")
    assert (
        as_written(tokens, Sequences(tokens_of("U:look\n<tool_call>{}</tool_call>", "A:No.")), reader()).rewritings
        == []
    )


def test_a_dropped_thought_is_not_brought_back():
    tokens = tokens_of("U:look", "A:No.", "U:and?")
    assert as_written(tokens, Sequences(tokens_of("U:look", "A:<think>Hm.</think>No.")), reader()).rewritings == []


@pytest.mark.parametrize(
    ("place", "moved"), [(0, 0), (10, 10), (12, 10), (20, 25), (30, 35)], ids=["before", "begin", "in", "end", "behind"]
)
def test_places_move_with_what_is_before_them(place, moved):
    assert Rewriting(10, 20, 25).moved(place) == moved


TYPED = [
    {"function": {"name": "f", "parameters": {"properties": {"all": {"type": "boolean"}, "n": {"type": "number"}}}}}
]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("<parameter=all>\ntrue\n</parameter>", "<parameter=all>True</parameter>"),
        (
            "<parameter=n>1.0</parameter><parameter=all>false</parameter>",
            "<parameter=all>False</parameter><parameter=n>1</parameter>",
        ),
    ],
)
def test_calls_in_xml_say_the_same_by_the_types_of_their_tool(one, other):
    read = reader(qwen3_coder, TYPED)
    told = [read.meaning(f"<tool_call>\n<function=f>\n{each}\n</function>\n</tool_call>") for each in (one, other)]
    assert told[0] == told[1]
    assert json.loads(told[0][1])["name"] == "f"


def test_a_boolean_is_no_number_and_a_text_no_boolean():
    calls = ['{"a": 1}', '{"a": true}', '{"a": "true"}', '{"a": "1"}', '{"a": 1.5}', '{"a": null}', "not a call"]
    assert len({reader().meaning(f"<tool_call>{call}</tool_call>") for call in calls}) == len(calls)
    assert reader().meaning('<tool_call>{"a": 1.0}</tool_call>') == reader().meaning("<tool_call>{'a': 1}</tool_call>")


def test_a_tokenizer_without_marks_reads_texts():
    none = dict.fromkeys(("think_start", "think_end", "tool_call_start", "tool_call_end"))
    assert reader(**none).meaning(" <think> Hm. ") == ("<think> Hm.",)


# -- served -----------------------------------------------------------------------------------------------------------

CALL = '{"name": "count", "arguments": {"to": 3, "all": true}}'
SAYS = ["Let me ", "look.", "\n\n", "<tool_call>", CALL, "</tool_call>"]
TEMPLATE = (  # one more line break before a call, and arguments as Python prints them
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}{{ '\n' }}<tool_call>"
    "{{ '{\"name\": \"' + tool_call.name + '\", \"arguments\": ' ~ tool_call.arguments ~ '}' }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_parrot(tmp_path_factory.mktemp("written") / "model", SAYS, template=TEMPLATE)


class Turn:
    """One answer of a server, the talk with it, and what of the prompt was cached."""

    def __init__(self, server: Server, talk: list[Message], **more: Any):
        given = server.client.chat.completions.create(
            model="default_model", messages=talk, tools=TOOLS, max_tokens=20, temperature=0, **more
        )
        said = given.choices[0].message.model_dump(exclude_none=True)
        self.prompt, self.answer = given.usage.prompt_tokens, given.usage.completion_tokens
        self.cached = given.usage.prompt_tokens_details.cached_tokens
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "three"} for call in said["tool_calls"]]
        self.talk = [*talk, said, *results]


def test_each_step_hits_the_answers_before_it_and_so_after_a_restart(parrot, tmp_path):
    flags = ("--canonical", "--model", parrot, "--ssd-dir", tmp_path / "ssd", "--ssd", "200MB")
    with serving(tmp_path / "first.log", *flags) as server:
        first = Turn(server, user(text(300, "first")))
        second = Turn(server, first.talk)
        assert second.cached >= first.prompt + first.answer - 1
        assert server.metrics()["prefixcache_canonical_prompts_total{answers}"] == 1
    with serving(tmp_path / "second.log", *flags) as server:
        third = Turn(server, second.talk)
        assert third.cached >= second.prompt + second.answer - 1
        salted = Turn(server, second.talk, extra_body={"cache_salt": "another"})
        assert salted.cached == 0
        assert salted.prompt != third.prompt  # which nobody else learns of
        assert server.metrics()["prefixcache_canonical_prompts_total{answers}"] == 1


def test_without_canonical_text_the_template_has_its_way(parrot, tmp_path):
    with serving(tmp_path / "log", "--model", parrot, "--no-canonical") as server:
        first = Turn(server, user(text(300, "first")))
        second = Turn(server, first.talk)
        assert second.cached < first.prompt + first.answer - 1
        assert server.metrics()["prefixcache_canonical_prompts_total{answers}"] == 0


HEADER = "x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=cli;"
UNORDERED = [{"function": {"parameters": {"properties": {"b": {}, "a": {}}}, "name": "count"}, "type": "function"}]
CHATS = st.tuples(
    st.sampled_from(["", f"{HEADER}\nYou count.", "You count."]),
    st.lists(
        st.tuples(st.sampled_from(["first", "and?"]), st.sampled_from(["Let me look.", "Let me look.\n\n"]), CALLS),
        max_size=3,
    ),
    st.sampled_from([None, UNORDERED]),
)


def test_without_canonical_text_every_prompt_is_mlx_lms_to_the_token(parrot):
    def chat(system: str, turns: Any, tools: Any) -> Any:
        messages = [{"role": "system", "content": system}] if system else []
        for asked, content, call in turns:
            calls = [{"id": "1", "function": {"name": "count", "arguments": json.dumps(call)}}]
            messages += [*user(asked), {"role": "assistant", "content": content, "tool_calls": calls}]
        return CompletionRequest("chat", "", [*messages, *user("count")], tools, None)

    with PrefixCache(ram="100MB", codec="raw") as cache, generating(cache, "--model", parrot) as generator:
        loaded, by_mlx_lm, args = generator.model_provider.loaded, generator.loop.tokenize, arguments(max_tokens=1)
        Asked(generator, user("first"), max_tokens=20).answered()
        assert generator.wait_for_stores(SECONDS)
        parts = generator.model_provider, by_mlx_lm
        off, on = (PromptTokenizer(*parts, CanonicalText(rules), generator.stored_of) for rules in ((), EVERY_RULE))

        @given(CHATS)
        def tokens_are_mlx_lms(given_chat):
            stock = by_mlx_lm(loaded.tokenizer, chat(*given_chat), args)
            assert off.tokenize(loaded, chat(*given_chat), args) == stock
            prompt, segments, *_ = on.tokenize(loaded, chat(*given_chat), args)
            assert [token for segment in segments for token in segment] == prompt

        tokens_are_mlx_lms()
        as_told = chat("", [("first", "Let me look.", json.loads(CALL)["arguments"])], None)
        wrote = loaded.tokenizer.encode("".join(SAYS), add_special_tokens=False)
        prompt = on.tokenize(loaded, as_told, args)[0]
        assert any(prompt[place:][: len(wrote)] == wrote for place in range(len(prompt)))
