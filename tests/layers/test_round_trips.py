"""Every family of mlx-lm, for real: stored, spilled, the cache closed, opened anew, promoted, fetched, generated on.

`Raw` keeps bits, so the greedy tokens after a fetch are those of the same model that went on without interruption.
"""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from tests.families import FAMILIES, greedy

PROMPT, MORE, ANSWER = 300, 41, 12


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 120, n).tolist()


def prefilled(family, prompt):
    """A model and its prompt cache after `prompt`, fed in two pieces so that windows have turned over."""
    model = family.build()
    cache = make_prompt_cache(model)
    for piece in (prompt[:200], prompt[200:]):
        mx.eval(model(mx.array([piece]), cache=cache))
    return model, cache


def classes(layers):
    return [(type(c), classes(c.caches)) if hasattr(c, "caches") else type(c) for c in layers]


def open_cache(tmp_path, ram="64MB"):
    return PrefixCache(ram=ram, ssd_dir=tmp_path / "ssd", ssd="1GB", codec="raw")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_prompt_goes_to_ssd_and_back_and_generation_goes_on_with_the_same_tokens(name, tmp_path):
    family = FAMILIES[name]
    prompt, more = tokens(PROMPT, 1), tokens(MORE, 2)
    model, live = prefilled(family, prompt)

    with open_cache(tmp_path) as cache:
        stored = cache.store(prompt, live, model=name)
        assert stored.tokens == PROMPT
        assert stored.snapshot == ("snapshot" in family.kinds)
        cache.check_integrity()
    expected = greedy(model, live, more, ANSWER)  # the original goes on, uninterrupted

    with open_cache(tmp_path) as cache:
        assert cache.match(prompt + more, model=name) == (0, PROMPT)
        assert cache.promote(prompt + more, model=name).result(30) == PROMPT
        restored, rest = cache.fetch(prompt + more, model=name)
        assert rest == more
        assert classes(restored) == classes(live)
        assert greedy(model, restored, rest, ANSWER) == expected
        cache.check_integrity()

        # What was handed out is the caller's: generating on it leaves the next fetch as it was.
        again, rest = cache.fetch(prompt + more, model=name)
        assert greedy(model, again, rest, ANSWER) == expected


@pytest.mark.parametrize("name", sorted(n for n, f in FAMILIES.items() if "snapshot" not in f.kinds))
def test_a_prompt_that_diverges_hits_where_rows_allow_and_goes_on_exactly(name, tmp_path):
    """Sliceable layers can be hit at any token; windows wherever their rows were held at some store."""
    family = FAMILIES[name]
    prompt, other = tokens(PROMPT, 1), tokens(60, 3)
    model, live = prefilled(family, prompt)
    with PrefixCache(ram="64MB", codec="raw") as cache:
        cache.store(prompt, live, model=name)
        asked = prompt[:290] + other
        restored, rest = cache.fetch(asked, model=name)
        assert restored is not None
        depth = len(asked) - len(rest)
        assert depth == 290 or (depth > 200 and "windowed" in family.kinds)
        mx.eval(model(mx.array([asked[depth:-1]]), cache=restored))

        fresh = make_prompt_cache(model)
        for piece in (asked[:200], asked[200:depth], asked[depth:-1]):
            mx.eval(model(mx.array([piece]), cache=fresh))
        if family.exact_chunks:
            assert greedy(model, restored, asked[-1:], ANSWER) == greedy(model, fresh, asked[-1:], ANSWER)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_turns_of_a_chat_are_stored_at_each_boundary_and_found_again(name):
    """Fetch, compute the new tokens, store: turn by turn, on restored caches, against one that was never interrupted."""
    family = FAMILIES[name]
    model = family.build()
    live = make_prompt_cache(model)
    with PrefixCache(ram="128MB", codec="raw") as cache:
        history: list[int] = []
        for turn in range(4):
            new = tokens(90, 10 + turn)
            expected = greedy(model, live, new, 2)
            restored, rest = cache.fetch(history + new, model=name)
            if turn:
                assert rest == new
            else:
                assert restored is None
                restored = make_prompt_cache(model)
            assert greedy(model, restored, rest, 2) == expected
            history += [*new, expected[0]]
            stored = cache.store(history, restored, model=name)
            assert (stored.tokens, stored.new_tokens) == (len(history), 91)
            cache.check_integrity()
        assert cache.stats().counters.recoded_tokens == 0
    gc.collect()
