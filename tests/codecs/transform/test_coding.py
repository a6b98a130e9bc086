"""Rows of a group of layers to codes and back: how far they are, what a row depends on, and what damaged codes do."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_basis import INTERLEAVED, ROPE, group_of, layer, of_dtype, rows_of

from prefixcache.codecs.interchange import as_float32, element
from prefixcache.codecs.transform.basis import LayerGroup
from prefixcache.codecs.transform.coding import Codes, GroupCoder
from prefixcache.codecs.transform.entropy import AS_IT_IS, DamagedCodes, gain_of
from prefixcache.codecs.transform.rope import NO_ROPE
from prefixcache.codecs.transform.tables import first_guess

DTYPES = ("float32", "float16", "bfloat16")
KINDS = {
    "one layer": [layer()],
    "an odd number of channels": [layer(heads=1)],
    "without RoPE": [layer(rotation=NO_ROPE)],
    "interleaved": [layer(rotation=INTERLEAVED)],
    "several": [layer(0), layer(1, rotation=INTERLEAVED, heads=1), layer(4, rotation=NO_ROPE)],
}
TABLES = first_guess()


@cache
def group(kind: str = "several", dtype: str = "float16") -> LayerGroup:
    return group_of([of._replace(dtype=dtype) for of in KINDS[kind]])


def coder_of(kind: str = "several", dtype: str = "float16", quality: float = 4.0) -> GroupCoder:
    return GroupCoder(group(kind, dtype), TABLES, quality, dtype)


def part(streams: list[np.ndarray], rows: slice) -> list[np.ndarray]:
    return [stream[rows] for stream in streams]


def cut(coder: GroupCoder, codes: Codes, start: int, end: int) -> Codes:
    ends = np.append(0, np.cumsum(coder.row_words(codes.heads)))
    return codes._replace(heads=codes.heads[start:end], words=codes.words[ends[start] : ends[end]])


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Bit for bit."""

    def described(stream: np.ndarray) -> tuple[np.dtype, tuple[int, ...], bytes]:
        return stream.dtype, stream.shape, stream.tobytes()

    return list(map(described, one)) == list(map(described, other))


def floats(coder: GroupCoder, streams: list[np.ndarray]) -> list[np.ndarray]:
    return [as_float32(stream, coder.dtype) for stream in streams]


def error(coder: GroupCoder, streams: list[np.ndarray], first: int = 0) -> float:
    """The mean square of what decoded rows err by, in the metric: in steps at quality 4."""
    back = floats(coder, coder.decode(coder.encode(streams, first), first))
    factors = [factor for pair in coder.group.factors for factor in pair]
    squares = 0.0
    for i, (mine, theirs, factor) in enumerate(zip(floats(coder, streams), back, factors, strict=True)):
        lost = theirs - mine
        if i % 2 == 0:
            lost = coder.group.layers[i // 2].rotation.undo(np.array(lost), first)
        squares += np.square(np.einsum("thw,hwv->thv", lost, factor)).sum()
    return squares / len(streams[0]) / coder.group.channels


# -- how far rows come back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_falls_by_four_with_each_quality(kind):
    wide = group_of([of._replace(dtype="float32") for of in KINDS[kind]], widest=400, narrowest=30)
    rows = rows_of(wide, 300)
    errors = [error(GroupCoder(wide, TABLES, quality, wide.layers[0].dtype), rows) for quality in (2, 3, 4, 5)]
    ratios = np.divide(errors[:-1], errors[1:])
    assert (ratios > 3.5).all()
    assert (ratios < 4.5).all()
    assert 0.5 < errors[2] / (1 / 12) < 1.5  # of a whole step's, evenly distributed


def test_between_two_qualities_the_error_is_between_theirs():
    wide = group_of(KINDS["several"], widest=400, narrowest=30)
    errors = [
        error(GroupCoder(wide, TABLES, quality, wide.layers[0].dtype), rows_of(wide, 100)) for quality in (3, 3.5, 4)
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_take_the_words_that_their_heads_say_and_fewer_at_lower_quality(dtype):
    rows, lengths = rows_of(group("several", dtype), 80), []
    for quality in (2, 4, 6):
        coder = coder_of("several", dtype, quality)
        codes = coder.encode(rows, 0)
        assert coder.row_words(codes.heads).sum() == len(codes.words)
        assert (codes.heads.dtype, codes.words.dtype, codes.offsets.dtype) == (np.uint16, np.uint16, np.uint8)
        assert len(codes.offsets) == (coder.group.channels + 1) // 2
        assert len(codes.offset_steps) == coder.heads
        lengths.append(len(codes.words))
    assert lengths == sorted(set(lengths))


def test_an_offset_is_what_the_rows_of_a_block_lack_on_average():
    coarse = group_of(KINDS["several"], widest=40, narrowest=0.02)
    coder = GroupCoder(coarse, TABLES, 3.0, coarse.layers[0].dtype)
    rows = [stream + np.float16(0.04) for stream in rows_of(coarse, 256)]
    codes = coder.encode(rows, 0)
    without = codes._replace(offset_steps=np.zeros_like(codes.offset_steps))
    biases = []
    for offset in (codes, without):
        back = coder.decode(offset, 0)
        values = [
            np.float32(b - a).mean(axis=0) for a, b in zip(rows[1::2], back[1::2], strict=True)
        ]  # RoPE turns keys
        biases.append(float(np.sum([np.square(value).sum() for value in values])))
    assert biases[0] < biases[1] / 10


# -- what a row depends on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_decoded_alone_are_those_decoded_with_others(kind, dtype):
    coder, first = coder_of(kind, dtype), 512
    codes = coder.encode(rows_of(coder.group, 300, first), first)
    whole = coder.decode(codes, first)
    for count in (0, 1, 7, 255, 256, 257, 299):
        assert same(coder.decode(cut(coder, codes, 0, count), first), part(whole, slice(count)))


@given(data=st.data(), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 99))
def test_rows_cut_anywhere_are_those_of_the_whole(data, dtype, kind, seed):
    coder = coder_of(kind, dtype)
    codes = coder.encode(rows_of(coder.group, 60, 100, seed), 100)
    start = data.draw(st.integers(0, 60))
    end = data.draw(st.integers(start, 60))
    whole = coder.decode(codes, 100)
    alone = coder.decode(cut(coder, codes, start, end), 100 + start)
    assert same(part(alone, slice(0, None)), part(whole, slice(start, end)))


@given(at=st.integers(0, 50), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(sorted(KINDS)))
def test_rows_have_the_same_codes_whichever_others_are_coded_with_them(at, dtype, kind):
    coder = coder_of(kind, dtype)
    rows = rows_of(coder.group, 50, 30)
    whole = coder.encode(rows, 30)
    one, other = coder.encode(part(rows, slice(at)), 30), coder.encode(part(rows, slice(at, None)), 30 + at)
    assert np.array_equal(np.concatenate([one.heads, other.heads]), whole.heads)
    assert np.array_equal(np.concatenate([one.words, other.words]), whole.words)


def test_keys_are_those_of_their_positions_and_values_of_none():
    coder = coder_of("one layer", "float32")
    rows = rows_of(coder.group, 40, 1000)
    codes = coder.encode(rows, 1000)
    there, elsewhere = coder.decode(codes, 1000), coder.decode(codes, 1256)  # in the same place of the next block
    assert np.abs(there[0] - rows[0]).max() < 0.5 < np.abs(elsewhere[0] - rows[0]).max()
    assert np.array_equal(there[1], elsewhere[1])
    turned = ROPE.redo(ROPE.undo(there[0].copy(), 1000), 1256)
    np.testing.assert_allclose(elsewhere[0], turned, atol=1e-5)


def test_the_same_text_elsewhere_has_nearly_the_same_codes():
    coder = coder_of("several", "float32")
    near, far = (coder.encode(rows_of(coder.group, 60, first), first) for first in (0, 70_000))
    assert abs(len(near.words) - len(far.words)) < 0.02 * len(near.words)


def test_settled_offsets_stay():
    coder = coder_of()
    rows = rows_of(coder.group, 100)
    settled = coder.encode(part(rows, slice(40)), 0)
    more = coder.encode(part(rows, slice(40, None)), 40, settled=settled)
    assert more.offsets is settled.offsets
    assert more.offset_steps is settled.offset_steps
    joined = Codes(*(np.concatenate([a, b]) for a, b in zip(settled[:2], more[:2], strict=True)), *settled[2:])
    back = coder.decode(joined, 0)
    assert same(part(back, slice(40)), coder.decode(settled, 0))
    assert same(part(back, slice(40, None)), coder.decode(more, 40))


# -- rows that have no codes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_skipped_have_no_words_and_change_no_others(dtype):
    coder = coder_of("several", dtype)
    rows = rows_of(coder.group, 60)
    wild = [np.concatenate([of_dtype(np.full((4, *stream.shape[1:]), np.nan), dtype), stream[4:]]) for stream in rows]
    codes, alone = coder.encode(wild, 0, skip=4), coder.encode(part(rows, slice(4, None)), 4)
    assert not coder.row_words(codes.heads)[:4].any()
    assert np.array_equal(codes.heads[4:], alone.heads)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(codes[1:], alone[1:], strict=True))
    back = coder.decode(codes, 0)
    assert same(part(back, slice(4, None)), coder.decode(alone, 4))
    values = floats(coder, back)[1][:4]
    assert np.abs(values - coder.group.mean[16:26].reshape(2, 5)).max() < 1  # the mean, and the block's offset


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_can_not_be_coded_come_back_bit_for_bit(kind, dtype):
    coder, first = coder_of(kind, dtype), 90
    rows = [stream.copy() for stream in rows_of(coder.group, 40, first)]
    bits = [stream.view(np.uint32 if dtype == "float32" else np.uint16) for stream in rows]
    nan, infinity = {"float32": (0x7FC01234, 0xFF800000), "float16": (0x7E34, 0xFC00), "bfloat16": (0x7FD3, 0xFF80)}[
        dtype
    ]
    bits[0][3, 0, 2], bits[1][17, 0, 1] = nan, infinity
    bits[1][39, 0, 0] = {"float32": 0x7F7FFFFF, "float16": 0x7BFF, "bfloat16": 0x7F7F}[dtype]  # finite, and far away
    codes = coder.encode(rows, first)
    lost = np.flatnonzero(gain_of(codes.heads) == AS_IT_IS)
    assert {3, 17, 39} >= set(lost) >= {3, 17}
    assert (39 in lost) or dtype == "float16"  # 65,504 times 8 are steps enough to be coded, or not, as spreads have it
    back = coder.decode(codes, first)
    for row in lost:
        assert same(part(back, slice(row, row + 1)), part(rows, slice(row, row + 1)))
    kept = [np.delete(stream, [3, 17, 39], axis=0) for stream in rows]
    others = [np.delete(stream, [3, 17, 39], axis=0) for stream in floats(coder, back)]
    assert max(np.abs(a - b).max() for a, b in zip(floats(coder, kept), others, strict=True)) < 2
    for count in (3, 4, 18, 39):
        assert same(coder.decode(cut(coder, codes, 0, count), first), part(back, slice(count)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_without_a_row_that_can_be_coded_comes_back_bit_for_bit(dtype):
    coder = coder_of("several", dtype)
    rows = [of_dtype(np.full((5, heads, width), np.inf), dtype) for heads, width in coder.streams]
    codes = coder.encode(rows, 0)
    assert (codes.heads == 0xFFFF).all()
    assert len(codes.words) == 5 * coder.raw_words
    assert not codes.offset_steps.any()
    assert same(coder.decode(codes, 0), rows)


@pytest.mark.usefixtures("new_objects_only")
def test_nothing_of_a_group_stays_in_memory_once_nobody_codes_with_it():
    coder = GroupCoder(group_of(KINDS["several"]), TABLES, 4.0, "float16")
    coder.decode(coder.encode(rows_of(coder.group, 5), 0), 0)
    group = weakref.ref(coder.group)
    del coder
    gc.collect()
    assert group() is None


def test_no_rows_are_no_codes():
    coder = coder_of()
    codes = coder.encode(part(rows_of(coder.group, 1), slice(0)), 7)
    assert (len(codes.heads), len(codes.words)) == (0, 0)
    assert [stream.shape for stream in coder.decode(codes, 7)] == [(0, *shape) for shape in coder.streams]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_decodes_beyond_the_range_is_cut_to_the_largest_finite_number(dtype):
    huge = group("one layer", dtype)
    huge = replace(huge, mean=np.full_like(huge.mean, 3.4e38))
    coder = GroupCoder(huge, TABLES, 4.0, huge.layers[0].dtype)
    codes = Codes(np.zeros(2, np.uint16), np.zeros(0, np.uint16), np.full(13, 0x88, np.uint8), np.zeros(4, np.uint16))
    steps = np.full(4, 0x7F00, np.uint16)  # 1.7e38
    beyond = coder.decode(codes._replace(offsets=np.full(13, 0xFF, np.uint8), offset_steps=steps), 0)
    assert np.isfinite(floats(coder, beyond)[1]).all()
    most = {"float32": np.float32(3.4e38), "float16": 65504, "bfloat16": np.float32(2.0**128 - 2.0**120)}[dtype]
    with np.errstate(over="ignore"):
        assert floats(coder, coder.decode(codes, 0))[1].max() == most


# -- damaged --------------------------------------------------------------------------------------------------------------


def decoded_or_damaged(coder: GroupCoder, codes: Codes) -> bool:
    """Whether there were values. Anything but DamagedCodes is a failure."""
    try:
        with np.errstate(all="ignore"):
            back = coder.decode(codes, 0)
    except DamagedCodes as error:
        return not str(error)
    kind = element(coder.dtype).numpy
    return all(stream.dtype == kind and len(stream) == len(codes.heads) for stream in back)


@settings(max_examples=100)
@given(data=st.data(), seed=st.integers(0, 3))
def test_damaged_codes_are_damaged_or_values(data, seed):
    coder = coder_of("several", data.draw(st.sampled_from(DTYPES)))
    rows = rows_of(coder.group, 12, seed=seed)
    rows[0] = rows[0].copy()
    rows[0][5] = of_dtype(np.full(rows[0].shape[1:], np.inf), coder.dtype)
    codes = Codes(*(array.copy() for array in coder.encode(rows, 0)))
    for _ in range(data.draw(st.integers(1, 5))):
        array = codes[data.draw(st.integers(0, 3))].view(np.uint8)
        array[data.draw(st.integers(0, array.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    decoded_or_damaged(coder, codes)


@settings(max_examples=100)
@given(
    heads=st.lists(st.integers(0, 0xFFFF), max_size=6),
    words=st.binary(max_size=400),
    steps=st.integers(0, 0xFFFF),
    nibbles=st.integers(0, 255),
)
def test_random_codes_are_damaged_or_values(heads, words, steps, nibbles):
    coder = coder_of("several")
    codes = Codes(
        np.array(heads, np.uint16),
        np.frombuffer(words[: len(words) // 2 * 2], np.uint16),
        np.full((coder.group.channels + 1) // 2, nibbles, np.uint8),
        np.full(coder.heads, steps, np.uint16),
    )
    decoded_or_damaged(coder, codes)


@given(missing=st.integers(1, 200))
def test_missing_words_are_damaged(missing):
    coder = coder_of()
    codes = coder.encode(rows_of(coder.group, 12), 0)
    with pytest.raises(DamagedCodes, match="claim more words than there are"):
        coder.decode(codes._replace(words=codes.words[:-missing]), 0)


@pytest.mark.parametrize("name", ["offsets", "offset_steps"])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_offsets_of_another_length_are_damaged(name, length):
    coder = coder_of()
    codes = coder.encode(rows_of(coder.group, 3), 0)
    with pytest.raises(DamagedCodes, match="offsets"):
        coder.decode(codes._replace(**{name: np.zeros(length, getattr(codes, name).dtype)}), 0)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_offset_steps_that_are_not_finite_are_damaged(bits):
    coder = coder_of()
    codes = coder.encode(rows_of(coder.group, 3), 0)
    with pytest.raises(DamagedCodes, match="not finite"):
        coder.decode(codes._replace(offset_steps=np.full(coder.heads, bits, np.uint16)), 0)
