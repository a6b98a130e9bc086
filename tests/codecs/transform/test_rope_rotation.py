"""RoPE undone and redone; the judge is mx.fast.rope, in float32 on the CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.codecs.transform.rope import NO_ROPE, Rope


@st.composite
def rotations(draw: st.DrawFn) -> Rope:
    pairs = draw(st.integers(0, 12))
    frequencies = draw(st.lists(st.floats(0, 2), min_size=pairs, max_size=pairs))
    scale = draw(st.sampled_from([1.0, 1.0, 1.21, 0.5]))
    return Rope(np.array(frequencies, np.float64), draw(st.booleans()), scale)


def rows_of(seed: int, tokens: int, heads: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, heads, width)).astype(np.float32)


def rope(rows: np.ndarray, first: int, dims: int, **arguments: object) -> np.ndarray:
    with mx.stream(mx.cpu):
        turned = mx.fast.rope(mx.array(rows.swapaxes(0, 1)[None]), dims, scale=1.0, offset=first, **arguments)
        return np.array(turned)[0].swapaxes(0, 1)


@given(
    rotation=rotations(),
    seed=st.integers(0, 2**32 - 1),
    first=st.integers(0, 200_000),
    tokens=st.integers(0, 40),
    heads=st.integers(0, 3),
    spare=st.integers(0, 9),
)
def test_what_is_redone_is_undone_and_keeps_its_length(rotation, seed, first, tokens, heads, spare):
    turning = 2 * len(rotation.frequencies)
    rows = rows_of(seed, tokens, heads, turning + spare)
    turned = rotation.redo(rows, first)
    np.testing.assert_allclose(rotation.undo(turned, first), rows, rtol=0, atol=3e-6)
    np.testing.assert_allclose(rotation.redo(rotation.undo(rows, first), first), rows, rtol=0, atol=3e-6)
    lengths = [np.linalg.norm(x[..., :turning].astype(np.float64), axis=-1) for x in (rows, turned)]
    np.testing.assert_allclose(lengths[1], rotation.scale * lengths[0], rtol=1e-5, atol=1e-6)
    assert np.array_equal(turned[..., turning:], rows[..., turning:])
    assert turned.dtype == np.float32


@given(
    pairs=st.integers(1, 32),
    interleaved=st.booleans(),
    spare=st.integers(0, 9),
    base=st.sampled_from([1e2, 1e4, 5e5]),
    first=st.integers(0, 500),
    custom=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_redo_is_what_rope_does(pairs, interleaved, spare, base, first, custom, seed):
    rows = rows_of(seed, 5, 2, 2 * pairs + spare)
    if custom:
        periods = np.random.default_rng(seed).uniform(1, 1000, pairs).astype(np.float32)
        arguments, frequencies = {"base": None, "freqs": mx.array(periods)}, 1.0 / periods.astype(np.float64)
    else:
        arguments, frequencies = {"base": base}, base ** -(np.arange(pairs) / pairs)
    expected = rope(rows, first, 2 * pairs, traditional=interleaved, **arguments)
    np.testing.assert_allclose(Rope(frequencies, interleaved).redo(rows, first), expected, rtol=0, atol=2e-3)


def test_a_scaled_rotation_lengthens_what_turns_and_leaves_the_rest():
    rows = rows_of(0, 5, 2, 12)
    longer = rows.copy()
    longer[..., :8] *= np.float32(1.25)
    frequencies = 100.0 ** -(np.arange(4) / 4)
    expected = rope(longer, 30, 8, traditional=False, base=100.0)
    np.testing.assert_allclose(Rope(frequencies, False, 1.25).redo(rows, 30), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_turn_in_place_into_another_array_and_in_many_chunks_alike(interleaved):
    rotation = Rope(10.0 ** -np.arange(4.0), interleaved, 1.5)
    rows = rows_of(1, 30_000, 2, 10)
    before = rows.copy()
    turned, out = rotation.redo(rows, 3), np.empty_like(rows)
    assert np.array_equal(rows, before)
    assert rotation.redo(rows, 3, out) is out
    assert rotation.redo(rows, 3, rows) is rows
    assert np.array_equal(out, turned)
    assert np.array_equal(rows, turned)
    assert np.array_equal(rotation.redo(before[20_000:], 20_003), turned[20_000:])


def test_no_rotation_changes_nothing():
    rows = rows_of(2, 3, 2, 8)
    assert np.array_equal(NO_ROPE.undo(rows, 5), rows)
    assert NO_ROPE.undo(rows, 5) is not rows


def test_rows_that_are_too_narrow_are_refused():
    with pytest.raises(ValueError, match="rows of 6 values: the rotation turns 8"):
        Rope(np.ones(4)).redo(rows_of(0, 1, 1, 6), 0)


def test_rotations_compare_by_what_they_do():
    assert Rope(np.ones(4)) == Rope(np.ones(4))
    assert hash(Rope(np.ones(4))) == hash(Rope(np.ones(4)))
    assert Rope(np.ones(4)) != Rope(np.ones(4), True)
    assert Rope(np.ones(4)) != Rope(np.ones(3))
