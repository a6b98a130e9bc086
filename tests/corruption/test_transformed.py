"""Transformed images that somebody changed and sealed anew: refused, or a miss when they are decoded, or other numbers; never
an error out of a fetch or a store, nor other shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache import PrefixCache
from prefixcache.image_format import DTYPES, Spec
from tests.models import states
from tests.models.transforming import Tiny, prompt, tiny

from .directories import Parts, copy, parts_of, put_image, remove, rows_of, settled

# NumPy's warnings of numbers that are none would reach a server's log.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], dict[str, np.ndarray | None]]
TOKENS = prompt(700, 0)
LENGTH = len(TOKENS)
NAMES = {dtype.newbyteorder("="): name for name, dtype in DTYPES.items() if name != "BF16"}


@pytest.fixture(scope="module")
def model() -> Tiny:
    return tiny("llama-bf16")


@pytest.fixture(scope="module")
def transformed(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one prompt: two whole blocks and a tail."""
    return stored(tmp_path_factory.mktemp("transformed"), model, TOKENS)


def stored(folder: Path, model: Tiny, tokens: list[int]) -> Path:
    model.saved(folder / "bases")
    with opened(folder / "ssd") as cache:
        cache.store(tokens, model.prefill(tokens), model=model.identity)
    return folder


@pytest.fixture
def root(transformed: Path, tmp_path: Path) -> Path:
    return copy(transformed, tmp_path / "copy") / "ssd"


def opened(root: Path) -> PrefixCache:
    return PrefixCache(
        ram="30MB", ssd_dir=root, ssd=50_000_000, codec="transform:4", basis_dir=root.parent / "bases", memory_reserve=0
    )


def changed(root: Path, model: Tiny, block: int, change: Change, kind: int = 0) -> None:
    """Change tensors of a block's image, seal it, and say so in the index. Those that are None then are left out."""
    row = rows_of(root, model.identity, kind)[block]
    meta, specs, tensors = parts_of(root, row)
    dtypes = {spec.name: spec.dtype for spec in specs}
    tensors = {name: array.copy() for name, array in tensors.items()}
    tensors = {name: array for name, array in {**tensors, **change(tensors)}.items() if array is not None}
    specs = [
        Spec(name, dtypes[name] if DTYPES[dtypes[name]] == array.dtype else NAMES[array.dtype], array.shape)
        for name, array in tensors.items()
    ]
    put_image(root, row, Parts(meta, specs, tensors))


# -- changes -------------------------------------------------------------------------------------------------------------

ROW = 100  # of the block: coded


def words_of(heads: np.ndarray) -> np.ndarray:
    return (heads & 4095).astype(int)


def with_head(heads: np.ndarray, change: Callable[[int], int]) -> np.ndarray:
    return np.concatenate([heads[:ROW], [change(int(heads[ROW]))], heads[ROW + 1 :]]).astype("<u2")


def random_words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, count).astype("<u2")


HEADS, WORDS, STEPS, OFFSETS = "z0.heads", "z0.words", "z0.offset_steps", "z0.offsets"
MISS: dict[str, Change] = {  # refused when it is read, or found when it is decoded
    "more words": lambda t: {HEADS: with_head(t[HEADS], lambda head: head + 3)},
    "more words that are there": lambda t: {
        HEADS: with_head(t[HEADS], lambda head: head + 3),
        WORDS: np.append(t[WORDS], np.zeros(3, "<u2")),
    },
    "fewer words": lambda t: {WORDS: t[WORDS][:-3]},
    "no words": lambda t: {WORDS: t[WORDS][:0]},
    "one word a row": lambda t: {HEADS: np.full_like(t[HEADS], 7 << 12 | 1), WORDS: t[WORDS][: len(t[HEADS])]},
    "a row as it is without its bits": lambda t: {HEADS: with_head(t[HEADS], lambda head: 0xFFFF)},
    "random words": lambda t: {WORDS: random_words(1, len(t[WORDS]))},
    "zero words": lambda t: {WORDS: np.zeros_like(t[WORDS])},
    "rotated words": lambda t: {WORDS: np.roll(t[WORDS], 1)},
    "swapped words": lambda t: {WORDS: t["z1.words"], "z1.words": t[WORDS]},
    "infinite offsets": lambda t: {STEPS: np.full_like(t[STEPS], 0x7F80)},
    "offsets that are no numbers": lambda t: {
        STEPS: np.where(np.arange(len(t[STEPS])) == 3, np.uint16(0x7FC1), t[STEPS])
    },
    "offsets of another shape": lambda t: {OFFSETS: t[OFFSETS][:-1]},
    "words of another kind": lambda t: {WORDS: t[WORDS].view("<i2")},
    "heads of fewer rows": lambda t: {HEADS: t[HEADS][:-1], WORDS: t[WORDS][: words_of(t[HEADS][:-1]).sum()]},
    "heads in two dimensions": lambda t: {HEADS: t[HEADS].reshape(2, -1)},
    "without a group": lambda t: dict.fromkeys(name for name in t if name.startswith("z1")),
}
OTHER_NUMBERS: dict[str, Change] = {  # whoever writes the directory can write any
    "rows of zeros": lambda t: {HEADS: np.full_like(t[HEADS], 7 << 12), WORDS: t[WORDS][:0]},
    "rows as they are": lambda t: {HEADS: np.full_like(t[HEADS], 0xFFFF), WORDS: random_words(0, len(t[HEADS]) * 256)},
    "largest offsets": lambda t: {STEPS: np.full_like(t[STEPS], 0x7F7F), OFFSETS: np.zeros_like(t[OFFSETS])},
}
EITHER: dict[str, Change] = {
    "another gain": lambda t: {HEADS: with_head(t[HEADS], lambda head: head ^ 1 << 12)},
    "swapped groups": lambda t: {
        {"z0": "z1", "z1": "z0"}[name[:2]] + name[2:]: t[name] for name in t if name[0] == "z"
    },
}
CHANGES = {**MISS, **OTHER_NUMBERS, **EITHER}
FEW = ("more words that are there", "random words", "infinite offsets")


def depth(
    cache: PrefixCache, model: Tiny, tokens: list[int] = TOKENS, *, promote: bool = False, whole_blocks: bool = False
) -> int:
    """What a fetch gives: its shapes are right."""
    made, rest = cache.fetch(
        cache.prompt(tokens, model=model.identity, whole_blocks=whole_blocks), leave=0, promote=promote
    )
    cache.check_integrity()
    found = len(tokens) - len(rest)
    if made is None:
        assert found == 0
        return 0
    for layer in made:
        assert layer.offset == found
        for array in (layer.keys, layer.values):
            assert array.dtype == mx.bfloat16
            assert array.shape[:2] == (1, 2)
            assert array.shape[2] >= found
            assert array.shape[3] == 32
    return found


def restored(cache: PrefixCache, model: Tiny, root: Path) -> None:
    """Stored anew it is all there, also from the SSD."""
    cache.store(TOKENS, model.prefill(TOKENS), model=model.identity)
    assert depth(cache, model) == LENGTH
    settled(cache, root)
    cache.trim_to(0)
    assert depth(cache, model, promote=True) == LENGTH


@pytest.mark.parametrize(("change", "block"), [(change, number % 2) for number, change in enumerate(MISS)])
def test_what_cannot_be_decoded_is_a_miss_that_is_counted_and_can_be_stored_anew(root, model, change, block):
    changed(root, model, block, CHANGES[change])
    with opened(root) as cache:
        assert depth(cache, model, promote=True) == 256 * block
        assert cache.stats().counters.corrupt == 1
        assert depth(cache, model, promote=True) == 256 * block
        settled(cache, root)
        restored(cache, model, root)
        assert cache.stats().counters.corrupt == 1


@pytest.mark.parametrize("change", [*OTHER_NUMBERS, *EITHER])
def test_what_can_be_decoded_has_the_right_shapes(root, model, change):
    changed(root, model, 1, CHANGES[change])
    with opened(root) as cache:
        wanted = {LENGTH} if change in OTHER_NUMBERS else {256, LENGTH}
        assert depth(cache, model, promote=True) in wanted
        assert depth(cache, model) in wanted
        assert states.compressed(cache, TOKENS, model=model.identity)[0] is not None


@pytest.mark.parametrize(("change", "whole_blocks"), [*zip(FEW, (False, True, False), strict=True)])
def test_every_fetch_takes_damage_for_a_miss(root, model, change, whole_blocks):
    changed(root, model, 1, CHANGES[change])
    with opened(root) as cache:
        assert cache.promote(TOKENS, model=model.identity).result(30) == LENGTH
        assert depth(cache, model, whole_blocks=whole_blocks) == 256
        assert cache.stats().counters.corrupt == 1


def test_damage_beside_a_block_that_shares_more_and_is_on_the_ssd_is_a_miss(root, model):
    changed(root, model, 1, CHANGES["random words"])
    other = TOKENS[:406] + prompt(106, 9)
    with opened(root) as cache:
        cache.store(other, model.prefill(other), model=model.identity)
        settled(cache, root)
        cache.trim_to(0)
        assert cache.promote(TOKENS, model=model.identity).result(30) == LENGTH
        assert cache.match(other[:450], model=model.identity) == (406, 450)
        assert depth(cache, model, other[:450]) == 256
        assert cache.stats().counters.corrupt == 1


@pytest.mark.parametrize("change", FEW)
def test_a_lookup_says_which_block_is_damaged_and_a_fetch_deletes_it(root, model, change):
    changed(root, model, 1, CHANGES[change])
    with opened(root) as cache:
        cache.promote(TOKENS, model=model.identity).result(30)
        found = cache.lookup(TOKENS, model=model.identity)
        assert found is not None
        with pytest.raises(ValueError, match="the block at token 256 is damaged"):
            found.dequantize()
        assert cache.match(TOKENS, model=model.identity).ram == LENGTH
        assert depth(cache, model) == 256
        assert cache.match(TOKENS, model=model.identity).ssd == 256


@pytest.mark.parametrize(("change", "write_back"), [*zip(FEW, (True, False, True), strict=True)])
def test_damaged_codes_are_not_taken_over_by_a_prompt_that_shares_them(root, model, change, write_back):
    changed(root, model, 0, CHANGES[change])
    other = TOKENS[:200] + prompt(400, 5)
    with opened(root) as cache:
        cache.promote(TOKENS, model=model.identity).result(30)
        cache.store(other, model.prefill(other), model=model.identity, write_back_from=0 if write_back else None)
        assert depth(cache, model, other) == len(other)
        assert cache.stats().counters.corrupt == 0
        cache.store(TOKENS, model.prefill(TOKENS), model=model.identity, write_back_from=0 if write_back else None)
        assert depth(cache, model, other) == len(other)
        assert depth(cache, model) == 0
        assert cache.stats().counters.corrupt == 1
        cache.store(TOKENS, model.prefill(TOKENS), model=model.identity, write_back_from=0 if write_back else None)
        assert depth(cache, model) == LENGTH


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed") / "copy"


def any_change(chance: random.Random, *, agreed: bool) -> Change:
    """Change some bytes of rows; where it is `agreed`, the heads say how many words there are."""

    def change(tensors: Tensors) -> dict[str, np.ndarray | None]:
        for _ in range(chance.randint(1, 4)):
            name = chance.choice([name for name in tensors if name[0] in "zs"])
            flat = tensors[name].reshape(-1).view(np.uint8)
            if not len(flat):
                continue
            at = chance.randrange(len(flat))
            if chance.random() < 0.5:
                flat[at] ^= 1 << chance.randrange(8)
            else:
                flat[at : at + chance.randint(1, 400)] = chance.randrange(256)
        if agreed:
            for group in ("z0", "z1"):
                heads = tensors[f"{group}.heads"]
                heads[heads >> 12 == 15] = 7 << 12
                wanted = int(words_of(heads).sum())
                tensors[f"{group}.words"] = np.resize(tensors[f"{group}.words"], wanted)
        return dict(tensors)

    return change


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), block=st.integers(0, 1), agreed=st.booleans())
def test_any_change_of_coded_rows_is_a_miss_or_other_numbers(transformed, copies, model, seed, block, agreed):
    root = copy(transformed, copies) / "ssd"
    try:
        changed(root, model, block, any_change(random.Random(seed), agreed=agreed))
        with opened(root) as cache:
            assert depth(cache, model, promote=True) in (256 * block, LENGTH)
            assert depth(cache, model) in (256 * block, LENGTH)
    finally:
        remove(copies)
