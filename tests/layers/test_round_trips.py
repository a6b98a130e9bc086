"""Every family of mlx-lm, for real: stored, spilled, the cache closed, opened anew, promoted, fetched, generated on.

`Raw` keeps bits, so the greedy tokens after a fetch are those of the same model that went on without interruption.
"""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from tests.models.families import FAMILIES, greedy

PROMPT, MORE, ANSWER = 300, 41, 4
NEAR = 1e-3  # of the logits' deviation
TURNS = (90, 170, 30)  # with an answer each: a tail, a tail grown into a whole block and a tail, that tail grown


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 120, n).tolist()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family):
    return family.build()


@pytest.fixture(scope="module")
def prefilled(model):
    """The prompt's caches after 200 tokens and after all, fed in two pieces so that windows have turned over."""
    prompt, cache = tokens(PROMPT, 1), make_prompt_cache(model)
    feed(model, cache, prompt[:200])
    early = copy.deepcopy(cache)
    feed(model, cache, prompt[200:])
    return early, cache


def feed(model, cache, more):
    """The logits after each of these tokens."""
    logits = model(mx.array([more]), cache=cache)[0].astype(mx.float32)
    mx.eval(logits)
    return np.array(logits)


def goes_on(model, cache, more):
    """The logits after each of these tokens, and the greedy ones that follow."""
    logits = feed(model, cache, more)
    first = int(logits[-1].argmax())
    return logits, [first, *greedy(model, cache, [first], ANSWER - 1)]


def same(answer, expected):
    """The same greedy tokens; logits as near as sums in another order leave them (a ring comes back in temporal order)."""
    np.testing.assert_allclose(answer[0], expected[0], atol=NEAR * expected[0].std(), rtol=0)
    return answer[1] == expected[1]


def classes(layers):
    return [(type(c), classes(c.caches)) if hasattr(c, "caches") else type(c) for c in layers]


def test_a_prompt_goes_to_ssd_and_back_and_generation_goes_on_with_the_same_tokens(family, model, prefilled, tmp_path):
    prompt, more = tokens(PROMPT, 1), tokens(MORE, 2)
    live = copy.deepcopy(prefilled[-1])

    def open_cache():
        return PrefixCache(ram="64MB", ssd_dir=tmp_path / "ssd", ssd="1GB", codec="raw")

    with open_cache() as cache:
        stored = cache.store(prompt, live, model=family.name)
        assert stored.tokens == PROMPT
        assert stored.snapshot == ("snapshot" in family.kinds)
        cache.check_integrity()
    expected = goes_on(model, live, more)  # the original goes on, uninterrupted

    with open_cache() as cache:
        assert cache.match(prompt + more, model=family.name) == (0, PROMPT)
        assert cache.promote(prompt + more, model=family.name).result(30) == PROMPT
        restored, rest = cache.fetch(prompt + more, model=family.name)
        assert rest == more
        assert classes(restored) == classes(live)
        assert same(goes_on(model, restored, rest), expected)
        cache.check_integrity()

        # What was handed out is the caller's: generating on it leaves the next fetch as it was.
        again, rest = cache.fetch(prompt + more, model=family.name)
        assert same(goes_on(model, again, rest), expected)


def test_a_prompt_that_diverges_hits_where_rows_allow_and_goes_on_exactly(family, model, prefilled):
    """Sliceable layers can be hit at any token; windows wherever their rows were held at some store."""
    if "snapshot" in family.kinds:
        pytest.skip("hit at stored boundaries only")
    asked = tokens(PROMPT, 1)[:290] + tokens(60, 3)
    fresh, live = copy.deepcopy(prefilled)
    with PrefixCache(ram="64MB", codec="raw") as cache:
        cache.store(tokens(PROMPT, 1), live, model=family.name)
        restored, rest = cache.fetch(asked, model=family.name)
        assert restored is not None
        depth = len(asked) - len(rest)
        assert depth == 290 or (depth > 200 and "windowed" in family.kinds)
        feed(model, restored, asked[depth:-1])

        for piece in (asked[200:depth], asked[depth:-1]):
            feed(model, fresh, piece)
        if family.exact_chunks:
            assert same(goes_on(model, restored, asked[-1:]), goes_on(model, fresh, asked[-1:]))


def test_turns_of_a_chat_are_stored_at_each_boundary_and_found_again(family, model):
    """Fetch, compute the new tokens, store: turn by turn, on restored caches, against one that was never interrupted."""
    live = make_prompt_cache(model)
    with PrefixCache(ram="128MB", codec="raw") as cache:
        history: list[int] = []
        for turn, count in enumerate(TURNS):
            new = tokens(count, 10 + turn)
            expected = greedy(model, live, new, 2)
            restored, rest = cache.fetch(history + new, model=family.name)
            if turn:
                assert rest == new
            else:
                assert restored is None
                restored = make_prompt_cache(model)
            assert greedy(model, restored, rest, 2) == expected
            history += [*new, expected[0]]
            stored = cache.store(history, restored, model=family.name)
            assert (stored.tokens, stored.new_tokens) == (len(history), count + 1)
            cache.check_integrity()
        assert cache.stats().counters.recoded_tokens == 0
