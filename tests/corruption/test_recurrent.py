"""Snapshots with coded state that somebody changed and sealed anew: refused, or other numbers; never an error out of a fetch
or a store, nor other shapes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache import PrefixCache
from prefixcache.image_format import Spec
from tests.models import states

from .directories import LIMIT, Parts, copy, parts_of, put_image, remove, rows_of, settled

# NumPy's warnings of numbers that are none would reach a server's log.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]  # of what the header says, and of tensors
TOKENS = [5000 + i for i in range(300)]
SNAPSHOT = 2
NAMES = {"<i8": "I64", "<u4": "U32", "<u2": "BF16", "|u1": "U8", "<f4": "F32", "<i4": "I32"}


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recurrent") / "ssd"
    with opened(root) as cache:
        cache.store(TOKENS, states.recurrent(TOKENS), model="m")
    return root


@pytest.fixture
def root(coded: Path, tmp_path: Path) -> Path:
    return copy(coded, tmp_path / "copy")


def opened(root: Path) -> PrefixCache:
    return PrefixCache(ram="10MB", ssd_dir=root, ssd=LIMIT, codec="turboquant", memory_reserve=0)


def changed(root: Path, change: Change) -> None:
    """Change the snapshot, seal it, and say so in the index. Tensors that are None then are left out."""
    (row,) = rows_of(root, "m", SNAPSHOT)
    meta, _, tensors = parts_of(root, row)
    said, arrays = json.loads(meta.extra), {name: array.copy() for name, array in tensors.items()}
    change(said, arrays)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    specs = [Spec(name, NAMES[array.dtype.str], array.shape) for name, array in arrays.items()]
    put_image(root, row, Parts(meta._replace(extra=json.dumps(said)), specs, arrays))


def depth(cache: PrefixCache, *, promote: bool = True) -> int:
    """What a fetch gives: its shapes are right."""
    made, rest = cache.fetch(TOKENS, model="m", leave=0, promote=promote)
    cache.check_integrity()
    if made is not None:
        convolution, state = made[-1].cache
        assert (convolution.shape, convolution.dtype) == ((1, 3, 40), mx.float32)
        assert (state.shape, state.dtype) == ((1, 2, 64, 32), mx.float32)
        assert not mx.isinf(state).any()
    return len(TOKENS) - len(rest)


def restored(cache: PrefixCache, root: Path) -> None:
    """Stored anew it is all there, also from the SSD."""
    cache.store(TOKENS, states.recurrent(TOKENS), model="m", write_back_from=0)
    assert depth(cache) == len(TOKENS)
    settled(cache, root)
    cache.trim_to(0)
    made, _ = cache.fetch(TOKENS, model="m", leave=0, promote=True)
    states.check_recurrent(made or [], TOKENS)


# -- changes -------------------------------------------------------------------------------------------------------------

CODES, SCALE, ROOT = "s1.codes", "s1.scale", "s1.root"


def shape(to: Any) -> Change:
    return lambda said, tensors: said.update(coded=[None, to])


def tensor(name: str, to: Callable[[np.ndarray], np.ndarray | None]) -> Change:
    return lambda said, tensors: tensors.update({name: to(tensors[name])})  # type: ignore[dict-item]


REFUSED: dict[str, Change] = {
    "another shape of as many values": shape([1, 4, 32, 32]),
    "fewer rows": shape([1, 2, 63, 32]),
    "wider rows": shape([1, 2, 64, 33]),
    "several sequences": shape([2, 1, 64, 32]),
    "no rows": shape([1, 2, 0, 32]),
    "a negative side": shape([1, -2, -64, 32]),
    "a huge side": shape([1, 2, 64, 1 << 62]),
    "a side that is no number": shape([1, 2, 64, "32"]),
    "a side that is half a number": shape([1, 2, 64, 32.0]),
    "sides that are true": shape([True, 2, 64, 32]),
    "three sides": shape([2, 64, 32]),
    "a shape that is no list": shape({"0": 1}),
    "a shape that is text": shape("1,2,64,32"),
    "no shape": shape(None),
    "a shape too many": lambda said, tensors: said["coded"].append(None),
    "no list of shapes": lambda said, tensors: said.update(coded=3),
    "a shape for what is not coded": lambda said, tensors: said.update(coded=[[1, 3, 40], said["coded"][1]]),
    "the convolution's inputs as codes": lambda said, tensors: said.update(coded=[said["coded"][1]] * 2),
    "another dtype": lambda said, tensors: said.update(dtypes=["float32", "int32"]),
    "no such dtype": lambda said, tensors: said.update(dtypes=["float32", ["float32"]]),
    "without scales": tensor(SCALE, lambda array: None),
    "without levels": tensor(ROOT, lambda array: None),
    "codes of fewer bits": tensor(CODES, lambda array: array[..., :4]),
    "fewer codes": tensor(CODES, lambda array: array[:-1]),
    "codes of another kind": tensor(CODES, lambda array: array.view("<i4")),
    "levels of one head": tensor(ROOT, lambda array: array[:1]),
    "the state beside its codes": lambda said, tensors: tensors.update(s1=np.zeros((1, 2, 64, 32), "<f4")),
    "an array that is not there": lambda said, tensors: said["state"][0].update(cache=["list", [["array", 2]]]),
}
OTHER_NUMBERS: dict[str, Change] = {  # whoever writes the directory can write any
    "codes of zeros": tensor(CODES, np.zeros_like),
    "largest scales": tensor(SCALE, lambda array: np.full_like(array, 0x7F7F)),
    "scales that are no numbers": tensor(SCALE, lambda array: np.full_like(array, 0x7FC1)),
    "smallest scales": tensor(SCALE, lambda array: np.full_like(array, 1)),
    "largest levels": tensor(ROOT, lambda array: np.full_like(array, 255)),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_snapshot_that_no_store_makes_is_a_miss_and_can_be_stored_anew(root: Path, change: str) -> None:
    changed(root, REFUSED[change])
    with opened(root) as cache:
        assert depth(cache) == 0
        settled(cache, root)
        restored(cache, root)
        assert cache.stats().counters.corrupt == 1


@pytest.mark.parametrize("change", OTHER_NUMBERS)
@pytest.mark.parametrize("write_back", [True, False])
def test_a_snapshot_with_other_numbers_has_the_right_shapes(root: Path, change: str, write_back: bool) -> None:
    changed(root, OTHER_NUMBERS[change])
    with opened(root) as cache:
        assert depth(cache) == len(TOKENS)
        live = states.recurrent(TOKENS)
        cache.store(TOKENS, live, model="m", write_back_from=0 if write_back else None)
        assert depth(cache, promote=False) == len(TOKENS)
        settled(cache, root)


def test_state_that_is_stored_as_another_is_not_put_into_a_live_cache(root: Path) -> None:
    """The header describes a layer cache with other attributes: what was computed stays."""
    changed(root, lambda said, tensors: said["state"][0].update(lengths=3))
    with opened(root) as cache:
        assert depth(cache) == len(TOKENS)
        live = states.recurrent(TOKENS)
        cache.store(TOKENS, live, model="m", write_back_from=0)
        assert mx.array_equal(live[-1][1], mx.array(states.recurrent_state(TOKENS)))


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed") / "copy"


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_change_of_coded_state_is_a_miss_or_other_numbers(coded: Path, copies: Path, seed: int) -> None:
    chance = random.Random(seed)

    def change(said: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for _ in range(chance.randint(1, 4)):
            flat = tensors[chance.choice([CODES, SCALE, ROOT])].reshape(-1).view(np.uint8)
            at = chance.randrange(len(flat))
            flat[at : at + chance.randint(1, 400)] = chance.randrange(256)
        if chance.random() < 0.5:
            sides = said["coded"][1]
            sides[chance.randrange(4)] += chance.choice([-1, 1, 31, -32])

    root = copy(coded, copies)
    try:
        changed(root, change)
        with opened(root) as cache:
            assert depth(cache) in (0, len(TOKENS))
            restored_or_kept = states.recurrent(TOKENS)
            cache.store(TOKENS, restored_or_kept, model="m", write_back_from=0)
            assert depth(cache) == len(TOKENS)
            settled(cache, root)
    finally:
        remove(root)
