"""Transformed images that somebody changed and sealed anew: refused, or a miss when they are decoded, or other numbers; never
an error out of a fetch or a store, nor other shapes.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache import PrefixCache
from prefixcache.image_format import DTYPES, Blueprint, Image, Spec
from tests.models import states
from tests.models.transforming import Tiny, prompt, tiny

from .directories import copy, execute, file_of, remove, rows_of, settled

TOKENS = prompt(700, 0)
LENGTH = len(TOKENS)
NAMES = {dtype.newbyteorder("="): name for name, dtype in DTYPES.items() if name != "BF16"}


@pytest.fixture(scope="module")
def model() -> Tiny:
    return tiny("llama-bf16")


@pytest.fixture(scope="module")
def transformed(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one prompt: two whole blocks and a tail."""
    folder = tmp_path_factory.mktemp("transformed")
    model.saved(folder / "bases")
    with opened(folder / "ssd") as cache:
        cache.store(TOKENS, model.prefill(TOKENS), model=model.identity)
    return folder


@pytest.fixture
def root(transformed: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return copy(transformed, tmp_path / "copy") / "ssd"


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """NumPy's warnings of numbers that are none would reach a server's log."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def opened(root: Path) -> PrefixCache:
    return PrefixCache(
        ram="30MB", ssd_dir=root, ssd=50_000_000, codec="transform:4", basis_dir=root.parent / "bases", memory_reserve=0
    )


def changed(root: Path, model: Tiny, block: int, change) -> None:
    """Change the tensors of a block's rows image, seal it, and say so in the index."""
    row = rows_of(root, model.identity)[block]
    path = file_of(root, row)
    image = Image(np.frombuffer(bytearray(path.read_bytes()), np.uint8))
    meta, tensors = image.header()
    kinds = {name: said.dtype for name, said in specs_of(image).items()}
    tensors = {name: array.copy() for name, array in tensors.items()}
    tensors = change(tensors) or tensors
    specs = [
        Spec(name, kinds[name] if DTYPES[kinds[name]] == array.dtype else NAMES[array.dtype], array.shape)
        for name, array in tensors.items()
    ]
    draft = Blueprint(meta, specs).draft()
    for name, array in draft.tensors.items():
        array[...] = tensors[name]
    sealed = draft.seal()
    path.write_bytes(sealed.data.tobytes())
    execute(
        root,
        (
            "UPDATE image SET checksum = ?, nbytes = ?, disk = ? WHERE id = ?",
            [sealed.checksum, sealed.nbytes, path.stat().st_blocks * 512, row],
        ),
    )


def specs_of(image: Image) -> dict[str, Spec]:
    end = 8 + int(image.data[:8].view("<u8")[0])
    table = json.loads(bytes(image.data[8:end]))
    return {
        name: Spec(name, said["dtype"], tuple(said["shape"])) for name, said in table.items() if name != "__metadata__"
    }


# -- changes -------------------------------------------------------------------------------------------------------------

ROW = 100  # of the block: coded


def words_of(heads: np.ndarray) -> np.ndarray:
    return (heads & 4095).astype(int)


def more_words(tensors):
    tensors["z0.heads"][ROW] += 3


def more_words_that_are_there(tensors):
    tensors["z0.heads"][ROW] += 3
    tensors["z0.words"] = np.append(tensors["z0.words"], np.zeros(3, "<u2"))


def fewer_words(tensors):
    tensors["z0.words"] = tensors["z0.words"][:-3]


def no_words(tensors):
    tensors["z0.words"] = tensors["z0.words"][:0]


def one_word_a_row(tensors):
    tensors["z0.heads"][:] = 7 << 12 | 1
    tensors["z0.words"] = tensors["z0.words"][: len(tensors["z0.heads"])]


def rows_of_zeros(tensors):
    tensors["z0.heads"][:] = 7 << 12
    tensors["z0.words"] = tensors["z0.words"][:0]


def rows_as_they_are(tensors):
    heads = tensors["z0.heads"]
    heads[:] = 0xFFFF
    tensors["z0.words"] = np.random.default_rng(0).integers(0, 1 << 16, len(heads) * 256, "<u2")


def a_row_as_it_is_without_its_bits(tensors):
    tensors["z0.heads"][ROW] = 0xFFFF


def random_words(tensors):
    tensors["z0.words"][:] = np.random.default_rng(1).integers(0, 1 << 16, len(tensors["z0.words"]))


def zero_words(tensors):
    tensors["z0.words"][:] = 0


def rotated_words(tensors):
    tensors["z0.words"] = np.roll(tensors["z0.words"], 1)


def another_gain(tensors):
    tensors["z0.heads"][ROW] ^= 1 << 12


def swapped_groups(tensors):
    return {
        ("z1" if name[:2] == "z0" else "z0" if name[:2] == "z1" else name[:2]) + name[2:]: array
        for name, array in tensors.items()
    }


def swapped_words(tensors):
    tensors["z0.words"], tensors["z1.words"] = tensors["z1.words"], tensors["z0.words"]


def infinite_offsets(tensors):
    tensors["z0.offset_steps"][:] = 0x7F80


def offsets_that_are_no_numbers(tensors):
    tensors["z0.offset_steps"][3] = 0x7FC1


def largest_offsets(tensors):
    tensors["z0.offset_steps"][:] = 0x7F7F
    tensors["z0.offsets"][:] = 0


def offsets_of_another_shape(tensors):
    tensors["z0.offsets"] = tensors["z0.offsets"][:-1]


def words_of_another_kind(tensors):
    tensors["z0.words"] = tensors["z0.words"].view("<i2")


def heads_of_fewer_rows(tensors):
    kept = tensors["z0.heads"][:-1]
    tensors["z0.heads"], tensors["z0.words"] = kept, tensors["z0.words"][: words_of(kept).sum()]


def heads_in_two_dimensions(tensors):
    tensors["z0.heads"] = tensors["z0.heads"].reshape(2, -1)


def without_a_group(tensors):
    return {name: array for name, array in tensors.items() if not name.startswith("z1")}


MISS = [  # refused when it is read, or found when it is decoded
    more_words,
    more_words_that_are_there,
    fewer_words,
    no_words,
    one_word_a_row,
    a_row_as_it_is_without_its_bits,
    random_words,
    zero_words,
    rotated_words,
    swapped_words,
    infinite_offsets,
    offsets_that_are_no_numbers,
    offsets_of_another_shape,
    words_of_another_kind,
    heads_of_fewer_rows,
    heads_in_two_dimensions,
    without_a_group,
]
OTHER_NUMBERS = [rows_of_zeros, rows_as_they_are, largest_offsets]  # whoever writes the directory can write any
EITHER = [another_gain, swapped_groups]


def depth(
    cache: PrefixCache,
    model: Tiny,
    tokens: list[int] = TOKENS,
    *,
    promote: bool = False,
    whole_blocks: bool = False,
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


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("change", MISS, ids=lambda change: change.__name__)
def test_what_cannot_be_decoded_is_a_miss_that_is_counted_and_can_be_stored_anew(root, model, change, block):
    changed(root, model, block, change)
    with opened(root) as cache:
        assert depth(cache, model, promote=True) == 256 * block
        assert cache.stats().counters.corrupt == 1
        assert depth(cache, model, promote=True) == 256 * block
        settled(cache, root)
        restored(cache, model, root)
        assert cache.stats().counters.corrupt == 1


@pytest.mark.parametrize("change", [*OTHER_NUMBERS, *EITHER], ids=lambda change: change.__name__)
def test_what_can_be_decoded_has_the_right_shapes(root, model, change):
    changed(root, model, 1, change)
    with opened(root) as cache:
        wanted = {LENGTH} if change in OTHER_NUMBERS else {256, LENGTH}
        assert depth(cache, model, promote=True) in wanted
        assert depth(cache, model) in wanted
        assert states.compressed(cache, TOKENS, model=model.identity)[0] is not None


@pytest.mark.parametrize("change", [more_words_that_are_there, random_words, infinite_offsets])
@pytest.mark.parametrize("whole_blocks", [False, True])
def test_every_fetch_takes_damage_for_a_miss(root, model, change, whole_blocks):
    changed(root, model, 1, change)
    with opened(root) as cache:
        assert cache.promote(TOKENS, model=model.identity).result(30) == LENGTH
        assert depth(cache, model, whole_blocks=whole_blocks) == 256
        assert cache.stats().counters.corrupt == 1


@pytest.mark.parametrize("change", [more_words_that_are_there, random_words, infinite_offsets])
def test_a_lookup_says_which_block_is_damaged_and_a_fetch_deletes_it(root, model, change):
    changed(root, model, 1, change)
    with opened(root) as cache:
        cache.promote(TOKENS, model=model.identity).result(30)
        found = cache.lookup(TOKENS, model=model.identity)
        assert found is not None
        with pytest.raises(ValueError, match="the block at token 256 is damaged"):
            found.dequantize()
        assert cache.match(TOKENS, model=model.identity).ram == LENGTH
        assert depth(cache, model) == 256
        assert cache.match(TOKENS, model=model.identity).ssd == 256


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("change", [more_words_that_are_there, random_words, infinite_offsets])
def test_damaged_codes_are_not_taken_over_by_a_prompt_that_shares_them(root, model, change, write_back):
    changed(root, model, 0, change)
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


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), block=st.integers(0, 1))
def test_any_change_of_coded_rows_is_a_miss_or_other_numbers(transformed, copies, model, seed, block):
    chance = random.Random(seed)

    def change(tensors):
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
        if chance.random() < 0.7:  # and the heads agree with how many words there are
            for group in ("z0", "z1"):
                heads = tensors[f"{group}.heads"]
                heads[heads >> 12 == 15] = 7 << 12
                wanted = int(words_of(heads).sum())
                tensors[f"{group}.words"] = np.resize(tensors[f"{group}.words"], wanted)

    root = copy(transformed, copies) / "ssd"
    try:
        changed(root, model, block, change)
        with opened(root) as cache:
            assert depth(cache, model, promote=True) in (256 * block, LENGTH)
            assert depth(cache, model) in (256 * block, LENGTH)
    finally:
        remove(copies)
