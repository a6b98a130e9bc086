from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from roundtrip import FLOATS, bits_of, decoded, normal_rows, relative_error

from prefixcache.codecs import Affine, RawRows, RowCodec, Stream
from prefixcache.codecs.affine import AffineRows


def stream(width: int, dtype: str = "bfloat16") -> Stream:
    return Stream(0, 1, "keys", 4, width, width, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_rows_are_what_mlx_quantises_them_to(bits: int, dtype: str) -> None:
    rows = normal_rows(40, 128, dtype).reshape(20, 2, 128)
    codec = AffineRows(128, dtype, bits, 64)
    planes = codec.encode(rows)
    for plane, kept in zip(codec.planes, planes, strict=True):
        assert kept.shape == (20, 2, *plane.shape)
        assert kept.flags.c_contiguous
    expected = mx.dequantize(*mx.quantize(rows, 64, bits), group_size=64, bits=bits)
    back = decoded(codec, planes)
    assert back.dtype == rows.dtype
    assert np.array_equal(bits_of(back), bits_of(expected))
    assert relative_error(rows, back) < {2: 0.25, 3: 0.05, 4: 0.012, 5: 0.003, 6: 0.001, 8: 0.0001}[bits]


def test_room_behind_the_rows_is_zero_and_no_rows_are_fine() -> None:
    codec = AffineRows(64, "float16", 4, 32)
    planes = codec.encode(normal_rows(3, 64, "float16"))
    assert not np.array(codec.decode(planes, 8))[:, 3:].any()
    none = codec.encode(mx.zeros((0, 2, 64), mx.float16))
    assert [plane.shape[:2] for plane in none] == [(0, 2)] * 3
    assert np.array_equal(np.array(codec.decode(none, 5)), np.zeros((2, 5, 64)))
    assert codec.decode(none, 0).shape == (2, 0, 64)


@pytest.mark.parametrize(
    ("group_size", "width", "group"), [(64, 128, 64), (64, 96, 32), (128, 128, 128), (128, 192, 64), (32, 128, 32)]
)
def test_the_largest_group_that_divides_the_width_is_taken(group_size: int, width: int, group: int) -> None:
    codec = Affine(4, group_size).row_codec(stream(width))
    assert codec == AffineRows(width, "bfloat16", 4, group)
    assert isinstance(codec, RowCodec)


def test_what_mlx_cannot_quantise_is_kept_raw() -> None:
    assert Affine().row_codec(stream(80)) == RawRows(80, "bfloat16")
    assert Affine().row_codec(stream(0)) == RawRows(0, "bfloat16")
    assert Affine().row_codec(stream(128, "int32")) == RawRows(128, "int32")


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"bits=7.*choose 2, 3"):
        Affine(bits=7)
    with pytest.raises(ValueError, match=r"group_size=48.*choose 32"):
        Affine(group_size=48)
