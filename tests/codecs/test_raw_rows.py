from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import MLX_DTYPES, bits_of, decoded

from prefixcache.codecs import Plane, Raw, RawRows, RowCodec, Stream
from prefixcache.codecs.interchange import ELEMENTS, bring_in


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> mx.array:
    """Any bit pattern of the type: NaNs with payloads, infinities, subnormals."""
    kind = ELEMENTS[dtype].numpy
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return mx.array(rng.integers(0, 2, shape).astype(np.bool_))
    octets = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
    return bring_in(octets.view(kind).reshape(shape), dtype)


@pytest.mark.parametrize("dtype", MLX_DTYPES)
def test_every_bit_of_every_dtype_comes_back(dtype: str) -> None:
    rows = random_bits(dtype, (7, 3, 20))
    codec = RawRows(20, dtype)
    back = decoded(codec, codec.encode(rows))
    assert back.dtype == rows.dtype
    assert np.array_equal(bits_of(back), bits_of(rows))


@given(
    dtype=st.sampled_from(sorted(MLX_DTYPES)),
    shape=st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 9)),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_any_shape_come_back(dtype: str, shape: tuple[int, int, int], seed: int) -> None:
    rows = random_bits(dtype, shape, seed)
    codec = RawRows(shape[2], dtype)
    back = decoded(codec, codec.encode(rows))
    assert back.shape == shape
    assert np.array_equal(bits_of(back), bits_of(rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_transposed_array_is_kept_in_its_own_order(dtype: str) -> None:
    cache = random_bits(dtype, (2, 9, 8))
    (kept,) = RawRows(8, dtype).encode(cache.swapaxes(0, 1))
    assert kept.flags.c_contiguous
    assert np.array_equal(kept.view(np.uint16), bits_of(cache).swapaxes(0, 1))


def test_blocks_are_cut_and_come_back_as_they_were() -> None:
    rows, codec = random_bits("bfloat16", (3, 4 * 5, 8)), RawRows(8, "bfloat16")
    ((plane,), levels, back) = codec.encode_blocks(rows, 4, (), (), True)
    assert plane.shape == (4, 5, 3, 8)
    assert levels is None
    assert back is rows
    for i in range(4):
        assert np.array_equal(plane[i], bits_of(rows)[:, 5 * i : 5 * i + 5].swapaxes(0, 1))
    assert np.array_equal(bits_of(codec.decode_blocks([mx.array(plane)], None)), bits_of(rows))


def test_what_encode_returns_is_a_copy() -> None:
    rows = mx.zeros((2, 1, 4), mx.float16)
    (kept,) = RawRows(4, "float16").encode(rows)
    kept[:] = 1
    assert not np.array(rows).any()


def test_raw_rows_name_one_plane() -> None:
    codec = Raw().row_codec(Stream(0, 1, "keys", 2, 64, 64, "bfloat16"))
    assert codec == RawRows(64, "bfloat16")
    assert isinstance(codec, RowCodec)
    assert codec.planes == (Plane("rows", "BF16", (64,)),)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"dtype='int4'.*use one of"):
        RawRows(8, "int4")
    with pytest.raises(ValueError, match=r"\(2, 1, 8\) and dtype float32.*\(tokens, heads, 8\) of float16"):
        RawRows(8, "float16").encode(mx.zeros((2, 1, 8)))
