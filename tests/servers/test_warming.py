"""Warming: what is stored is what every later request begins with, computed once, in every tier, for every kind of model.

The models and the tokenizer are real, and so is the code of mlx_lm.server that says what a request's tokens are.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import CompletionRequest, ResponseGenerator
from mlx_lm.utils import load, load_tokenizer

from prefixcache import PrefixCache
from prefixcache.servers.warm_prompts import BadPrompt, WarmPrompt, WarmSequence, read_prompts, sequences_of, tokens_of
from prefixcache.servers.warming import Step, Warmed, branch_points, warm_sequences
from tests.models.families import FAMILIES, greedy

TINY = str(Path(__file__).parent.parent / "fixtures" / "tiny-llama")
SYSTEM = {"role": "system", "content": "You answer in one word. The secret number of Oscar is 7615."}
USER = {"role": "user", "content": "What is the secret number of Oscar?"}
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]

# As many models' templates: tools in front, a date that the caller may give, and a thought that the answer opens with.
RICH = (
    "{{ bos_token }}{% if tools %}<|system|>\nTools: {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% if day %}Today is {{ day }}.\n{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def warm(cache: PrefixCache, tokenizer: Any, load_model: Any, prompts: list[WarmPrompt], **more: Any) -> Warmed:
    sequences = sequences_of(tokenizer, prompts, more.pop("chat_template_args", None))
    return warm_sequences(cache, load_model, sequences, **more)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def rich() -> Any:
    return load_tokenizer(TINY, {"chat_template": RICH})


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load(TINY)[0]


@pytest.fixture(scope="module")
def llama() -> Any:
    return FAMILIES["llama"].build()


CACHE = {"ram": "50MB", "ssd": "100MB"}


def requested(
    tokenizer: Any, messages: list[Any], tools: Any = None, kwargs: Any = None, server: Any = None, text: str = ""
) -> tuple[list[int], list[list[int]]]:
    """What mlx_lm.server makes of a request: its tokens, and the segments at whose ends it stores."""
    generator = object.__new__(ResponseGenerator)
    provider = SimpleNamespace(cli_args=SimpleNamespace(chat_template_args=server or {}), processor=None)
    generator.model_provider = provider
    request = CompletionRequest("text" if text else "chat", text, json.loads(json.dumps(messages)), tools, None)
    prompt, segments, *_ = generator._tokenize(tokenizer, request, SimpleNamespace(chat_template_kwargs=kwargs))
    return prompt, segments


class Watched:
    """A model that notes how many tokens it was given in each call."""

    def __init__(self, model: Any):
        self.model = model
        self.chunks: list[int] = []

    def __call__(self, tokens: mx.array, **kwargs: Any) -> mx.array:
        self.chunks.append(tokens.size)
        return self.model(tokens, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def never() -> Any:
    raise AssertionError("the model is loaded though all is stored")


def prompt(*messages: Any, **more: Any) -> WarmPrompt:
    return WarmPrompt("test:1", messages, **more)


def some_tokens(n: int, seed: int = 0, vocabulary: int = 128) -> list[int]:
    return random.Random(seed).choices(range(1, vocabulary), k=n)


def sequences(*tokens: list[int]) -> list[WarmSequence]:
    return [WarmSequence(one) for one in tokens]


# -- tokens -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(content=st.text(max_size=12))
def test_a_system_prompts_tokens_begin_every_request_whatever_the_user_says(tokenizer: Any, content: str) -> None:
    stored = tokens_of(tokenizer, prompt(SYSTEM))
    request, segments = requested(tokenizer, [SYSTEM, {"role": "user", "content": content}])
    assert request[: len(stored)] == stored
    if content[:1].isalpha() and content[0].isascii():
        assert 0 <= len(segments[0]) - len(stored) <= 1  # where the server's own "system" segment ends, or nearly


@given(content=st.text(max_size=12))
def test_so_they_do_after_an_answer(tokenizer: Any, content: str) -> None:
    chat = [SYSTEM, USER, {"role": "assistant", "content": "7615"}]
    stored = tokens_of(tokenizer, prompt(*chat))
    request, _ = requested(tokenizer, [*chat, {"role": "user", "content": content}])
    assert request[: len(stored)] == stored
    assert "7615<|end|>" in tokenizer.decode(stored)


@given(content=st.text(max_size=12))
def test_so_they_do_after_a_call_whatever_its_tool_says(tokenizer: Any, content: str) -> None:
    call = {"id": "7", "type": "function", "function": {"name": "count", "arguments": "{}"}}
    chat = [SYSTEM, USER, {"role": "assistant", "content": "I count.", "tool_calls": [call]}]
    stored = tokens_of(tokenizer, prompt(*chat))
    request, _ = requested(tokenizer, [*chat, {"role": "tool", "tool_call_id": "7", "content": content}])
    assert request[: len(stored)] == stored
    assert tokenizer.decode(stored).rstrip().endswith("<|tool|>")


def test_tools_and_the_templates_arguments_are_rendered_as_the_server_does_it(rich: Any) -> None:
    server, own = {"day": "Monday", "enable_thinking": False}, {"day": "Friday"}
    for kwargs in (None, own):
        stored = tokens_of(rich, prompt(SYSTEM, tools=tuple(TOOLS), chat_template_kwargs=kwargs or {}), server)
        request, segments = requested(rich, [SYSTEM, USER], TOOLS, kwargs, server)
        assert request[: len(stored)] == stored
        assert len(segments[0]) - 1 <= len(stored) <= len(segments[0])
        assert ("Friday" if kwargs else "Monday") in rich.decode(stored)
        assert '"count"' in rich.decode(stored)


def test_text_in_parts_is_what_the_same_text_is_in_one(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "You answer "}, {"type": "text", "text": "in one word."}]
    one, other = ({"role": "system", "content": c} for c in (parts, "You answer in one word."))
    assert tokens_of(tokenizer, prompt(one)) == tokens_of(tokenizer, prompt(other))
    assert one["content"] == parts  # the server's code changes messages where they are: copies, here


def test_roles_are_those_that_the_server_gives_the_template(tokenizer: Any) -> None:
    two = [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}]
    one = {"role": "system", "content": "Be brief.\n\nBe kind."}
    assert tokens_of(tokenizer, prompt(*two)) == tokens_of(tokenizer, prompt(one))


def test_a_request_is_stored_to_its_last_token_but_one(tokenizer: Any) -> None:
    for last in (USER, {"role": "tool", "content": "17"}):
        request, _ = requested(tokenizer, [SYSTEM, last])
        assert tokens_of(tokenizer, prompt(SYSTEM, last)) == request[:-1]


def test_a_request_with_a_tail_that_opens_a_thought_is_stored_to_where_the_servers_segment_ends() -> None:
    more = {"additional_special_tokens": ["<think>", "</think>"]}
    thinking = load_tokenizer(TINY, {"chat_template": RICH, **more})
    assert thinking.has_thinking
    request, segments = requested(thinking, [SYSTEM, USER])
    assert len(segments) == 3
    assert tokens_of(thinking, prompt(SYSTEM, USER)) == [*segments[0], *segments[1]]
    assert request[: -len(segments[2])] == [*segments[0], *segments[1]]


def test_a_model_without_a_chat_template_gets_the_servers_own_words(tokenizer: Any) -> None:
    class Plain:
        has_chat_template, has_thinking = False, False
        encode = tokenizer.encode

    stored = tokens_of(Plain(), prompt(SYSTEM))
    request, _ = requested(Plain(), [SYSTEM, USER])
    assert request[: len(stored)] == stored
    assert "7615" in tokenizer.decode(stored)


@settings(max_examples=100)
@given(more=st.one_of(st.text(max_size=8).map(lambda s: " " + s), st.text(alphabet="\n\t\r", max_size=4)))
def test_a_texts_tokens_begin_every_text_that_goes_on_after_its_last_word(tokenizer: Any, more: str) -> None:
    text = "The secret number of Oscar is 7615, and that of Paula"
    stored = tokens_of(tokenizer, WarmPrompt("test:1", text=text))
    request, _ = requested(tokenizer, [], text=text + more)
    assert request[: len(stored)] == stored
    assert len(tokenizer.encode(text)) - 2 <= len(stored) < len(tokenizer.encode(text))


def test_of_a_text_that_stops_within_a_word_the_tokens_that_could_change_are_left_out(tokenizer: Any) -> None:
    stored = tokens_of(tokenizer, WarmPrompt("test:1", text="Numbers: 12 \n"))
    for more in ("\n\nNext", " next", "  next", "next", "3"):
        assert tokenizer.encode("Numbers: 12 \n" + more)[: len(stored)] == stored


def test_what_a_template_refuses_is_named_by_its_line(rich: Any, tokenizer: Any) -> None:
    refusing = load_tokenizer(TINY, {"chat_template": "{{ raise_exception('no system role here') }}"})
    with pytest.raises(BadPrompt, match=r"p\.jsonl:7: .*refuses it: no system role here"):
        tokens_of(refusing, WarmPrompt("p.jsonl:7", (SYSTEM,)))
    with pytest.raises(BadPrompt, match=r"p\.jsonl:7: "):
        tokens_of(tokenizer, WarmPrompt("p.jsonl:7", (SYSTEM,), chat_template_kwargs={"tokenize": False}))


# -- storing ----------------------------------------------------------------------------------------------------------


def test_the_first_request_finds_its_system_prompt_and_answers_as_without_a_cache(
    opened: Callable[..., PrefixCache], tiny: Any, tokenizer: Any
) -> None:
    cache = opened()
    done = warm(cache, tokenizer, lambda: tiny, [prompt(SYSTEM)], model="m")
    assert done == Warmed(prompts=1, tokens=done.tokens, computed=done.tokens, skipped=0, unkept=0)
    assert cache.stats().labels["system"].sequences == 1
    request, _ = requested(tokenizer, [SYSTEM, USER])
    made, rest = cache.fetch(request, model="m")
    assert len(request) - len(rest) == done.tokens
    assert greedy(tiny, made, rest, 8) == greedy(tiny, make_prompt_cache(tiny), request, 8)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_request_after_warming_gives_the_tokens_that_it_gives_without(
    opened: Callable[..., PrefixCache], family: str
) -> None:
    model = FAMILIES[family].build()
    cache, system = opened(), some_tokens(600)
    warm_sequences(cache, lambda: model, sequences(system), model="m", prefill_step_size=128)
    request = [*system, *some_tokens(20, seed=1)]
    made, rest = cache.fetch(request, model="m")
    assert len(rest) == 20
    assert greedy(model, made, rest, 8) == greedy(model, make_prompt_cache(model), request, 8)


def test_what_is_stored_costs_no_call_and_no_loading_also_after_a_restart(
    opened: Callable[..., PrefixCache], tiny: Any, tokenizer: Any
) -> None:
    prompts = [prompt(SYSTEM), prompt(SYSTEM, USER), WarmPrompt("test:3", text="A text that is stored.", salt=b"t")]
    cache = opened()
    first = warm(cache, tokenizer, lambda: tiny, prompts, model="m")
    again = first._replace(computed=0, skipped=3)
    assert warm(cache, tokenizer, never, prompts, model="m") == again
    cache.close()
    assert warm(opened(), tokenizer, never, prompts, model="m") == again


def test_a_state_that_can_not_be_cut_is_stored_with_exactly_the_tokens(opened: Callable[..., PrefixCache]) -> None:
    model = FAMILIES["qwen3_next"].build()
    cache, system = opened(), some_tokens(500)
    warm_sequences(cache, lambda: model, sequences(system), model="m", prefill_step_size=64)
    assert cache.match(system, model="m").ram == 500
    assert cache.match(system[:499], model="m").ram == 0
    assert warm_sequences(cache, never, sequences(system), model="m").skipped == 1


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_prompts_that_share_a_beginning_compute_it_once(opened: Callable[..., PrefixCache], family: str) -> None:
    model = Watched(FAMILIES[family].build())
    shared = some_tokens(400)
    own = [some_tokens(50 + i, seed=i) for i in range(1, 4)]
    tools = [*shared, *some_tokens(300, seed=9)]
    wanted = sequences([*shared, *own[0]], [*tools, *own[1]], [*tools, *own[2]], shared)
    done = warm_sequences(opened(), lambda: model, wanted, model="m")
    unique = len(tools) + sum(map(len, own))
    assert unique <= done.computed <= unique + 2  # two random endings may begin with the same token
    assert done.computed == sum(model.chunks)
    assert (done.skipped, done.unkept) == (1, 0)


def test_what_only_the_ssd_has_is_read_not_computed(opened: Callable[..., PrefixCache], llama: Any) -> None:
    cache, system = opened(), some_tokens(700)
    warm_sequences(cache, lambda: llama, sequences(system), model="m")
    assert cache.flush(30)
    cache.trim_to(0)
    assert cache.match(system, model="m") == (0, 700)
    longer = [*system, *some_tokens(60, seed=1)]
    assert warm_sequences(cache, lambda: llama, sequences(longer), model="m").computed == 60
    assert cache.stats().counters.promoted_tokens == 700


def test_salts_share_nothing(opened: Callable[..., PrefixCache], llama: Any) -> None:
    cache, system = opened(), some_tokens(300)
    wanted = [WarmSequence(system, salt) for salt in (b"", b"one", b"two", b"one")]
    done = warm_sequences(cache, lambda: llama, wanted, model="m")
    assert (done.computed, done.skipped) == (900, 1)
    assert cache.match(system, model="m", salt=b"three").ssd == 0


@pytest.mark.parametrize("step", [1, 7, 2048])
def test_chunks_are_no_longer_than_asked_for(opened: Callable[..., PrefixCache], llama: Any, step: int) -> None:
    model = Watched(llama)
    warm_sequences(opened(), lambda: model, sequences(some_tokens(30)), model="m", prefill_step_size=step)
    assert max(model.chunks) <= step
    assert sum(model.chunks) == 30


def test_progress_counts_every_token_once_and_ends_at_all_of_them(
    opened: Callable[..., PrefixCache], llama: Any
) -> None:
    told: list[Step] = []
    first, second = some_tokens(300), some_tokens(200, seed=1)
    wanted = sequences(first, [*first[:100], *second], first, [])
    done = warm_sequences(opened(), lambda: llama, wanted, model="m", prefill_step_size=64, progress=told.append)
    counts = [step.done for step in told]
    assert counts == sorted(counts)
    assert counts[-1] == done.tokens == 900
    assert {step.total for step in told} == {900}
    assert [step.prompt for step in told if step.done == 300] == [1]
    assert {step.prompt for step in told} == {1, 2, 3, 4}


class Enough(Exception):
    pass


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_who_stops_it_keeps_what_was_computed_and_the_next_goes_on(
    opened: Callable[..., PrefixCache], family: str
) -> None:
    model = Watched(FAMILIES[family].build())
    cache, wanted = opened(), sequences(some_tokens(300), some_tokens(500, seed=1))

    def stop(step: Step) -> None:
        if step.done >= 300 + 192:
            raise Enough

    with pytest.raises(Enough):
        warm_sequences(cache, lambda: model, wanted, model="m", prefill_step_size=64, progress=stop)
    assert cache.match(wanted[1].tokens, model="m").ram == 192
    done = warm_sequences(cache, lambda: model, wanted, model="m", prefill_step_size=64)
    assert (done.computed, done.skipped, sum(model.chunks)) == (500 - 192, 1, 800)


def test_prompts_without_room_are_counted(opened: Callable[..., PrefixCache], llama: Any) -> None:
    cache = opened(ram="800KB", ssd_dir=None)
    small, large = some_tokens(100), some_tokens(500, seed=1)
    assert warm_sequences(cache, lambda: llama, sequences(small), model="m").unkept == 0
    assert warm_sequences(cache, lambda: llama, sequences(small, large), model="m").unkept in (1, 2)


def test_it_runs_on_the_thread_that_owns_the_model(opened: Callable[..., PrefixCache], tokenizer: Any) -> None:
    cache, done = opened(), []

    def serve() -> None:
        model = load(TINY)[0]
        done.append(warm(cache, tokenizer, lambda: model, [prompt(SYSTEM)], model="m"))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(120)
    assert done[0].unkept == 0


def test_a_model_and_its_draft_model_fill_one_prompt_cache(opened: Callable[..., PrefixCache]) -> None:
    model, draft = FAMILIES["llama"].build(), FAMILIES["qwen2"].build()
    cache, system = opened(), some_tokens(300)
    warm_sequences(cache, lambda: (model, draft), sequences(system), model="m|d", prefill_step_size=100)
    made, rest = cache.fetch([*system, 5], model="m|d")
    layers = len(make_prompt_cache(model))
    assert rest == [5]
    for net, part in ((model, made[:layers]), (draft, made[layers:])):
        assert greedy(net, part, rest, 6) == greedy(net, make_prompt_cache(net), [*system, 5], 6)


short = st.lists(st.integers(0, 1), max_size=6)


@settings(max_examples=100)
@given(st.lists(st.tuples(short, st.sampled_from([b"", b"s"])), max_size=7))
def test_where_sequences_part_is_found_for_every_pair(wanted: list[tuple[list[int], bytes]]) -> None:
    made = [WarmSequence([token for token in tokens for _ in range(256)], salt) for tokens, salt in wanted]
    expected = [set[int]() for _ in made]
    for i, (one, salt) in enumerate(wanted):
        for j, (other, of) in enumerate(wanted):
            if i != j and salt == of:
                pairs = list(zip(one, other, strict=False))
                expected[i].add(256 * next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs)))
        expected[i] = {depth for depth in expected[i] if 0 < depth < len(made[i].tokens)}
    assert branch_points(made) == [sorted(found) for found in expected]


# -- reading ----------------------------------------------------------------------------------------------------------


def file_of(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_file_of_prompts_is_read_line_by_line(tmp_path: Path) -> None:
    chat = {
        "messages": [SYSTEM],
        "tools": TOOLS,
        "cache_salt": "tenant \u00e9",
        "chat_template_kwargs": {"day": "Monday"},
    }
    path = file_of(tmp_path, "\ufeff" + json.dumps(chat), "", "   \r", {"prompt": "text", "tools": None})
    one, other = read_prompts(path)
    assert (one.where, other.where) == (f"{path}:1", f"{path}:4")
    assert one == WarmPrompt(one.where, (SYSTEM,), tuple(TOOLS), "", "tenant \u00e9".encode(), {"day": "Monday"})
    assert other == WarmPrompt(other.where, text="text")


SECRET = "swordfish"
HELD = {"role": "system", "content": SECRET}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r":2: not JSON \(Expecting property name"),
        ('{"prompt": "' + SECRET, r":2: not JSON \("),
        (b'{"prompt": "\xff"}', r":2: not JSON \(not UTF-8\)"),
        ("[" * 100_000, r":2: not JSON \((nested too deep|Expecting)"),
        ([HELD], r':2: no JSON object; write \{"messages"'),
        ({"mesages": [HELD]}, r":2: unknown key 'mesages'; write messages"),
        ({"prompt": SECRET, "salt": SECRET}, r":2: unknown key 'salt'; write cache_salt"),
        ({"prompt": SECRET, "temperature": 1}, r":2: unknown key 'temperature'; write messages, tools, "),
        ({"cache_salt": SECRET}, r':2: no prompt; give one of "messages" and "prompt"'),
        ({"messages": [HELD], "prompt": SECRET}, r":2: messages and prompt; give one of"),
        ({"prompt": SECRET, "tools": TOOLS}, r':2: tools: goes with "messages" only'),
        ({"prompt": ""}, r":2: prompt: empty"),
        ({"prompt": [SECRET]}, r":2: prompt: not a text"),
        ({"messages": []}, r":2: messages: not a list of messages"),
        ({"messages": SECRET}, r":2: messages: not a list of messages"),
        ({"messages": [HELD, SECRET]}, r":2: messages: not a list of messages"),
        ({"messages": [HELD, {"content": SECRET}]}, r":2: messages\[1\]\.role: missing"),
        ({"messages": [{"role": "user", "content": 7}]}, r":2: messages\[0\]\.content: not a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]},
            r":2: messages\[0\]\.content: .*images can't be warmed",
        ),
        ({"messages": [HELD], "tools": {"name": SECRET}}, r":2: tools: not a list of objects"),
        ({"messages": [HELD], "chat_template_kwargs": [SECRET]}, r":2: chat_template_kwargs: not an object"),
        ({"prompt": SECRET, "cache_salt": 7}, r":2: cache_salt: not a text"),
        ('{"prompt": "x", "cache_salt": "\\ud800' + SECRET + '"}', r":2: cache_salt: not Unicode"),
    ],
)
def test_a_bad_line_is_named_with_its_key_and_what_to_do_and_not_quoted(tmp_path: Path, line: Any, said: str) -> None:
    path = file_of(tmp_path, {"prompt": "fine"})
    text = line if isinstance(line, (bytes, str)) else json.dumps(line)
    path.write_bytes(path.read_bytes() + b"\n" + (text if isinstance(text, bytes) else text.encode()))
    with pytest.raises(BadPrompt, match=said) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadPrompt, match=r"nowhere\.jsonl: No such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(BadPrompt, match=r"prompts\.jsonl: no prompts in it"):
        read_prompts(file_of(tmp_path, "", " "))


def test_a_prompt_says_where_it_is_from_and_nothing_else() -> None:
    held = WarmPrompt("p.jsonl:1", (HELD,), tuple(TOOLS), SECRET, SECRET.encode(), {"a": SECRET})
    assert repr(held) == "WarmPrompt(where='p.jsonl:1')"
    assert repr(WarmSequence([1, 2, 3], b"s")) == "WarmSequence()"
