"""What a block decodes to depends on its own rows and the codec: a neighbour that begins alike changes no bit of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from tests.models import states
from tests.models.families import FAMILIES, greedy
from tests.models.transforming import uneven_bases

CODECS = ["turboquant:4", "turboquant:3:4:sink_tokens=0", "turboquant:4:4:plain", "transform:5", "raw"]
CODED = ["turboquant:4", "transform:5"]
FIRST = list(range(700))


def opened(codec: str, layers: str) -> PrefixCache:
    bases = uneven_bases(states.windows_of(states.LAYERS[layers]()))
    return PrefixCache(ram="20MB", codec=codec, basis_dir=bases, memory_reserve=0)


def branch(tokens: list[int], shared: int, total: int, other: int) -> list[int]:
    return [*tokens[:shared], *[other] * total][:total]


def differing(layers: list[Any], others: list[Any], last: int) -> list[list[int]]:
    """Of each layer the tokens before `last` of which both have a row, and not the same."""
    found = []
    for own, other in zip(states.held(layers), others, strict=True):
        rows = [(own[part], other[part]) for part in ("keys", "values")]
        found.append(sorted({t for a, b in rows for t in a.keys() & b if t < last and a[t] != b[t]}))
    return found


# Of three lengths, two ways to store and two to encode, each pair.
WAYS = [
    (20, True, True),
    (234, True, False),
    (500, True, True),
    (20, False, False),
    (234, False, True),
    (500, False, False),
]


def each_pair(codecs: list[str], values: list[Any], step: int) -> list[tuple[str, str, Any]]:
    """Each codec with each kind of layers, by every `step`-th of the values: each value with each codec, and each layers."""
    return [
        (codec, layers, values[(i + j + k) % len(values)])
        for i, codec in enumerate(codecs)
        for j, layers in enumerate(sorted(states.LAYERS))
        for k in range(0, len(values), step)
    ]


@pytest.mark.parametrize(("codec", "layers", "way"), each_pair(CODECS, WAYS, 3))
def test_a_neighbour_that_begins_alike_changes_no_bit(codec, layers, way, monkeypatch):
    shared, write_back, here = way
    monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda: here)
    tokens, found = branch(FIRST, shared, 700, 9), []
    for others in ([], [FIRST], [FIRST[:300], FIRST]):
        with opened(codec, layers) as cache:
            for prompt in (*others, tokens):
                live = states.LAYERS[layers]()
                if write_back:
                    states.stored_in_steps(cache, cache.prompt(prompt, model="m"), live, 0, 256)
                else:  # in steps, or the first block's window would be the other's, whose block it is
                    for end in range(256, len(prompt) + 256, 256):
                        states.fed_uneven(live, prompt[:end], end - 256)
                        cache.store(prompt[:end], live, model="m")
            found.append(cache.fetch(tokens, model="m", leave=0)[0])
            cache.check_integrity()
    alone = states.held(found[0])
    assert any(rows for own in alone for rows in own.values())
    assert not any(any(differing(made, alone, len(tokens))) for made in found)


@pytest.mark.parametrize(("codec", "layers", "tail"), each_pair(CODED, [300, 490], 2))
def test_a_stored_tail_that_the_live_cache_has_forgotten_changes_no_bit(codec, layers, tail):
    """Its window's rows join those of the block that it grows to, and have the levels of these."""
    found = []
    for others in ([], [FIRST[:tail]]):
        with opened(codec, layers) as cache:
            for prompt in others:
                cache.store(prompt, states.fed_uneven(states.LAYERS[layers](), prompt, 0), model="m")
            live = states.fed_uneven(states.LAYERS[layers](), FIRST[: tail + 20], 0)
            states.fed_uneven(live, FIRST[:600], tail + 20, step=1)
            cache.store(FIRST[:600], live, model="m")
            found.append(cache.fetch(FIRST[:600], model="m", leave=0)[0])
    assert not any(differing(found[1], states.held(found[0]), 600))


@pytest.mark.parametrize(
    ("codec", "layers", "parts"), each_pair([*CODED, "raw"], [(20, 280), (234, 300), (250, 400), (256, 300)], 2)
)
def test_a_block_that_the_live_cache_has_half_forgotten_is_kept_beside_one_that_begins_alike(codec, layers, parts):
    """Stored at once: the windows have moved on into the block, and into the next one."""
    shared, end = parts
    tokens, found = branch(FIRST, shared, end, 9), []
    for others in ([], [FIRST[:256]], [FIRST[:256], FIRST[:520]]):
        with opened(codec, layers) as cache:
            for prompt in (*others, tokens):
                live = states.fed_uneven(states.LAYERS[layers](), prompt[:256], 0)
                states.fed_uneven(live, prompt, 256, step=1)
                assert cache.store(prompt, live, model="m").tokens == len(prompt)
            cache.check_integrity()
            found.append(cache.fetch(tokens, model="m", leave=0)[0])
    if shared < 256:  # else a whole block is the other's
        assert not any(any(differing(made, states.held(found[0]), end)) for made in found)


@pytest.mark.parametrize(("codec", "layers", "write_back"), each_pair(CODED, [True, False], 2))
def test_rows_that_a_hit_gave_keep_their_codes(codec, layers, write_back):
    """They are what the model went on from, and to code them again would be to code them twice."""
    with opened(codec, layers) as cache:
        states.stored_in_steps(cache, cache.prompt(FIRST, model="m"), states.LAYERS[layers](), 0, 256)
        tokens = branch(FIRST, 490, 700, 9)
        live, rest = cache.fetch(tokens, model="m")
        depth = len(tokens) - len(rest)
        given_rows = states.held(live)
        assert depth in (490, 256)
        states.fed_uneven(live, tokens, depth)
        cache.store(tokens, live, model="m", write_back_from=depth if write_back else None)
        cache.trim_to(cache.stats().ram_limit)
        made = cache.fetch(tokens, model="m", leave=0)[0]
        assert not any(differing(made, given_rows, depth))
        assert cache.stats().counters.recoded_tokens == 0


@given(data=st.data())
def test_prompts_stored_in_any_order_are_as_each_is_alone(data, monkeypatch):
    here = data.draw(st.booleans(), label="encoded as on the CPU")
    monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda: here)
    codec, layers = data.draw(st.sampled_from(CODECS)), data.draw(st.sampled_from(sorted(states.LAYERS)))
    step, prompts = data.draw(st.sampled_from([256, 512])), [FIRST]
    for other in range(data.draw(st.integers(1, 4), label="prompts")):
        begins = prompts[data.draw(st.integers(0, other), label="begins as prompt")]
        shared = data.draw(st.sampled_from([3, 20, 100, 234, 255, 256, 300, 511]), label="shared")
        total = data.draw(st.sampled_from([200, 256, 300, 512, 700]), label="total")
        prompts.append(branch(begins, shared, total, 1000 + other))
    order = [prompts[i] for i in data.draw(st.permutations(range(len(prompts))), label="order")]
    with opened(codec, layers) as cache:
        for tokens in order:
            live, at = states.LAYERS[layers](), 0
            if data.draw(st.booleans(), label="behind a hit"):
                made, rest = cache.fetch(cache.prompt(tokens, model="m", whole_blocks=True))
                at = len(tokens) - len(rest)
                live = made if made is not None else live
            states.stored_in_steps(cache, cache.prompt(tokens, model="m"), live, at, step)
            cache.check_integrity()
        for tokens in order:
            made, rest = cache.fetch(tokens, model="m", leave=0)
            assert rest == []
            whole = len(tokens) // 256 * 256  # a tail that others go on from is theirs: see `prompt(whole_blocks=)`
            bases = uneven_bases(states.windows_of(states.LAYERS[layers]()))
            alone = states.by_itself(tuple(tokens), codec, layers, step, bases)
            assert not any(differing(made, alone, whole))


def answered(cache: PrefixCache, model: Any, prompt: list[int], count: int = 12) -> list[int]:
    """As a server answers: behind a hit that ends with a block, in chunks of one, stored after each."""
    live, rest = cache.fetch(cache.prompt(prompt, model="m", whole_blocks=True))
    at = len(prompt) - len(rest)
    live = live if live is not None else make_prompt_cache(model)
    while at < len(prompt) - 1:
        end = min(at + 256, len(prompt) - 1)
        model(mx.array([prompt[at:end]]), cache=live)
        cache.store(prompt[:end], live, model="m", write_back_from=at)
        at = end
    return greedy(model, live, prompt[-1:], count)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "llama-sliding", "llama"])
def test_answers_do_not_depend_on_strangers_whose_prompts_begin_alike(family):
    """Chats of a model, most of whose layers have windows: on an empty cache, and on one that strangers filled."""
    rng, model = np.random.default_rng(0), FAMILIES[family].build()
    system = rng.integers(2, 100, 560).tolist()
    chats = [[*system[:shared], *rng.integers(2, 100, 300).tolist()] for shared in (20, 234, 300, 511)]
    codec = "turboquant:2"
    alone = []
    for chat in chats:
        with PrefixCache(ram="64MB", codec=codec, memory_reserve=0) as cache:
            alone.append(answered(cache, model, chat))
    with PrefixCache(ram="64MB", codec=codec, memory_reserve=0) as cache:
        answered(cache, model, system)
        for turn in range(2):  # cold, and from what is stored
            assert [answered(cache, model, chat) for chat in chats] == alone, turn
        cache.check_integrity()
