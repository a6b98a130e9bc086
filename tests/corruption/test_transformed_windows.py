"""Transformed windows that somebody changed and sealed anew: refused, or a miss when they are decoded, or other numbers;
never an error out of a fetch or a store.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache import PrefixCache
from tests.models.transforming import Tiny, prompt, tiny

from . import test_transformed
from .directories import copy, remove, settled
from .test_transformed import EITHER, FEW, HEADS, MISS, OTHER_NUMBERS, WORDS, Change, Tensors, opened, random_words

TOKENS = prompt(512, 0)  # two blocks, and the window before their end is the second one's
WINDOWS = 1  # the kind of the rows in the index
GROUPS = {"z0": "z0", "z2": "z1"}  # of windows, and what changes call them
CHANGES = {**MISS, **OTHER_NUMBERS, **EITHER}
CHANGES["rows as they are"] = lambda t: {  # of 256 channels of float32
    HEADS: np.full_like(t[HEADS], 0xFFFF),
    WORDS: random_words(0, len(t[HEADS]) * 512),
}
pytestmark, root, copies = test_transformed.pytestmark, test_transformed.root, test_transformed.copies


@pytest.fixture(scope="module")
def model() -> Tiny:
    made = tiny("gemma3_text")
    assert made.groups == [[0, 1], [2], [3]]
    return made


@pytest.fixture(scope="module")
def transformed(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return test_transformed.stored(tmp_path_factory.mktemp("windows"), model, TOKENS)


def changed(root: Path, model: Tiny, block: int, change: Change) -> None:
    """Change tensors of a block's window image, whose groups are named as in `test_transformed`."""

    def named(tensors: Tensors, names: dict[str, str]) -> dict[str, Any]:
        return {names.get(name[:2], name[:2]) + name[2:]: array for name, array in tensors.items()}

    def renamed(tensors: Tensors) -> dict[str, Any]:
        return named(change(named(tensors, GROUPS)), {name: group for group, name in GROUPS.items()})

    test_transformed.changed(root, model, block, renamed, WINDOWS)


def depth(cache: PrefixCache, model: Tiny, tokens: list[int] = TOKENS) -> int:
    made, rest = cache.fetch(cache.prompt(tokens, model=model.identity), leave=0, promote=True)
    cache.check_integrity()
    found = len(tokens) - len(rest)
    assert (made is None) == (found == 0)
    assert all(layer.offset == found for layer in made or ())
    return found


@pytest.mark.parametrize("change", MISS)
def test_what_cannot_be_decoded_is_a_miss_that_is_counted_and_can_be_stored_anew(root, model, change):
    changed(root, model, 1, MISS[change])
    with opened(root) as cache:
        assert depth(cache, model) in (0, 256)  # the first block's window is read when it is asked for
        assert cache.stats().counters.corrupt == 1
        assert depth(cache, model) == 256
        settled(cache, root)
        cache.store(TOKENS, model.prefill(TOKENS), model=model.identity)
        assert depth(cache, model) == len(TOKENS)
        settled(cache, root)
        cache.trim_to(0)
        assert depth(cache, model) == len(TOKENS)
        assert cache.stats().counters.corrupt == 1


@pytest.mark.parametrize("change", [*OTHER_NUMBERS, *EITHER])
def test_what_can_be_decoded_is_a_hit(root, model, change):
    changed(root, model, 1, CHANGES[change])
    with opened(root) as cache:
        assert depth(cache, model) in ({len(TOKENS)} if change in OTHER_NUMBERS else {0, 256, len(TOKENS)})


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("end", [300, 400, 512, 600])
@pytest.mark.parametrize("change", FEW)
def test_damaged_codes_are_not_taken_over_by_a_prompt_that_shares_them(root, model, change, end, write_back):
    """As a tail's rows, or a whole block's, of which the live cache has forgotten those that are shared."""
    changed(root, model, 1, MISS[change])
    other = TOKENS[:290] + prompt(400, 5)[: end - 290]
    since = 0 if write_back else None
    with opened(root) as cache:
        cache.promote(TOKENS, model=model.identity).result(30)
        cache.store(other, model.prefill(other, step=20), model=model.identity, write_back_from=since)
        cache.check_integrity()
        assert depth(cache, model, other) == len(other)
        assert depth(cache, model) in (0, 256, 290)
        assert depth(cache, model, other) == len(other)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), agreed=st.booleans())
def test_any_change_of_coded_rows_is_a_miss_or_other_numbers(transformed, copies, model, seed, agreed):
    root = copy(transformed, copies) / "ssd"
    try:
        changed(root, model, 1, test_transformed.any_change(random.Random(seed), agreed=agreed))
        with opened(root) as cache:
            depth(cache, model)
            assert depth(cache, model) in (256, len(TOKENS))
    finally:
        remove(copies)
