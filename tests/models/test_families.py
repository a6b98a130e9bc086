"""What every test that uses `families` takes for granted about those models."""

import copy
import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from tests.models.families import FAMILIES, SLICEABLE, SNAPSHOT, WINDOWED, greedy

KINDS = {KVCache: SLICEABLE, RotatingKVCache: WINDOWED, ChunkedKVCache: WINDOWED, ArraysCache: SNAPSHOT}


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return family.build()


@pytest.fixture(scope="module")
def two_caches(model):
    return [prefilled(model, tokens(100, seed)) for seed in (1, 2)]


def tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


def prefilled(model, prompt: list[int]) -> list:
    prompt_cache = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=prompt_cache))
    return prompt_cache


def kinds(caches) -> set[str]:
    found = set()
    for cache in caches:
        found |= kinds(cache.caches) if isinstance(cache, CacheList) else {KINDS.get(type(cache), SNAPSHOT)}
    return found


def test_the_cache_is_made_of_the_kinds_that_are_listed(family, model):
    assert kinds(make_prompt_cache(model)) == family.kinds


def test_a_family_is_built_the_same_every_time(family, model):
    prompt = tokens(20)
    first, second = (greedy(m, make_prompt_cache(m), prompt, 4) for m in (model, family.build()))
    assert first == second


def test_the_next_tokens_depend_on_the_prompt_before_its_last_token(model, two_caches):
    first, second = (greedy(model, copy.deepcopy(cache), tokens(1), 12) for cache in two_caches)
    assert first != second
    assert len({*first, *second}) > 4


def test_the_next_token_depends_on_every_layers_cache(model, two_caches):
    def logits(prompt_cache: list) -> mx.array:
        return model(mx.array([tokens(1)]), cache=copy.deepcopy(prompt_cache))[0, -1].astype(mx.float32)

    cache, other = two_caches
    expected = logits(cache)
    for i, layer in enumerate(other):
        if not layer.empty():
            change = mx.abs(logits([*cache[:i], layer, *cache[i + 1 :]]) - expected)
            assert (mx.max(change) / mx.std(expected)).item() > 0.01, f"layer {i}"


def test_prefill_in_pieces_gives_the_tokens_of_prefill_at_once_where_that_is_said(family, model):
    prompt = tokens(400)
    expected = greedy(model, make_prompt_cache(model), prompt, 6)
    pieces = [greedy(model, prefilled(model, prompt[:cut]), prompt[cut:], 6) for cut in (100, 300)]
    assert (pieces == [expected, expected]) == family.exact_chunks
