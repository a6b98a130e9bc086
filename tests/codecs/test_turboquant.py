from __future__ import annotations

import hashlib
import math
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import (
    BITS,
    FLOATS,
    ODD_WIDTHS,
    WIDTHS,
    as_float64,
    bits_of,
    decoded,
    normal_rows,
    relative_error,
    rows_of,
)

from prefixcache.codecs import Plane, RawRows, RowCodec, Stream, TurboQuant
from prefixcache.codecs.turboquant.codec import TurboQuantRows

LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095}


PEAK = {1: 1.0, 2: 1.0, 3: 0.98, 4: 0.9, 8: 1.0}  # what a grid that heeds the peak leaves of the error at width 128


def expected_error(bits: int, width: int) -> float:
    """Of a normal row whose length is kept, relative to its square.

    1 to 4 bits: 2 - 2 sqrt(1 - D), where D is the distortion at the best factor. 8 bits: that of a uniform step of
    1/127 of the row's maximum, step**2 / 12. Either has the rounding of the bf16 scale on top.
    """
    scale = 2**-14 / 12 / 2
    if bits == 8:
        rows = np.random.default_rng(5).standard_normal((4000, width))
        return float(np.mean(np.max(rows**2, axis=1) / np.mean(rows**2, axis=1))) / 127**2 / 12 + scale
    return 2 - 2 * math.sqrt(1 - LLOYD_MAX[bits]) + scale


def best_factor_error(rows: mx.array, back: mx.array) -> float:
    """1 - cos^2: the error left if each row were scaled for least squares."""
    x, y = as_float64(rows), as_float64(back)
    return float(np.mean(1 - np.sum(x * y, -1) ** 2 / (np.sum(x * x, -1) * np.sum(y * y, -1))))


# --- quality


@pytest.mark.parametrize("bits", BITS)
def test_normal_rows_of_128_reach_the_error_of_lloyd_max(bits: int) -> None:
    rows = normal_rows(20_000, 128)
    codec = TurboQuantRows(128, "float32", bits)
    back = decoded(codec, codec.encode(rows))
    if bits in (2, 3, 4):
        assert relative_error(rows, back) <= 1.015 * LLOYD_MAX[bits]
    if bits <= 4:
        assert best_factor_error(rows, back) <= LLOYD_MAX[bits]
    assert (
        0.93 * expected_error(bits, 128) <= relative_error(rows, back) / PEAK[bits] <= 1.01 * expected_error(bits, 128)
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_comes_near_the_bound(width: int, bits: int) -> None:
    rows = normal_rows(600, width, "float16")
    codec = TurboQuantRows(width, "float16", bits)
    error = relative_error(rows, decoded(codec, codec.encode(rows)))
    # Short rows are a little easier: fewer of their values lie far out, and more is gained by knowing how far.
    least = {3: 0.8, 4: 0.65}.get(bits, 0.85)
    assert least * expected_error(bits, width) <= error <= 1.05 * expected_error(bits, width)


@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_every_other_width_is_correct_too(width: int) -> None:
    for bits, most in ((1, 0.5), (2, 0.16), (3, 0.05), (4, 0.015), (8, 0.0002)):
        rows = normal_rows(200, width)
        codec = TurboQuantRows(width, "float32", bits)
        assert relative_error(rows, decoded(codec, codec.encode(rows))) < most


@pytest.mark.parametrize("width", WIDTHS)
def test_a_spike_of_fifty_does_not_cost_the_row(width: int) -> None:
    values = np.random.default_rng(1).standard_normal((400, 1, width))
    values[np.arange(400), 0, np.random.default_rng(2).integers(0, width, 400)] = 50
    rows = rows_of(values, "bfloat16")
    for bits in (1, 2):
        codec = TurboQuantRows(width, "bfloat16", bits)
        error = relative_error(rows, decoded(codec, codec.encode(rows)))
        assert error <= 1.15 * expected_error(bits, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_variance_in_one_stretch_of_the_row_costs_a_seventh_at_most(width: int) -> None:
    for hot in range(0, width, width // 4):
        values = np.random.default_rng(1).standard_normal((400, 1, width))
        values[..., hot : hot + width // 4] *= 10
        rows = rows_of(values, "float32")
        for bits in (2, 3, 4):
            codec = TurboQuantRows(width, "float32", bits)
            error = relative_error(rows, decoded(codec, codec.encode(rows)))
            assert error <= 1.15 * expected_error(bits, width)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_keep_their_length(width: int, bits: int) -> None:
    rows = normal_rows(100, width, "float32", seed=3)
    codec = TurboQuantRows(width, "float32", bits)
    lengths = [np.sqrt(np.sum(as_float64(r) ** 2, -1)) for r in (rows, decoded(codec, codec.encode(rows)))]
    # The scale is bf16: 8 significant bits, rounded.
    assert np.abs(lengths[1] / lengths[0] - 1).max() <= 2**-8 + 1e-5


@pytest.mark.parametrize(("bits", "most"), [(1, 1.13), (2, 2.13), (3, 3.13), (4, 4.13), (8, 8.13)])
def test_bits_a_value_at_width_128(bits: int, most: float) -> None:
    planes = TurboQuantRows(128, "float16", bits).encode(normal_rows(10, 128, "float16"))
    assert 8 * sum(plane.nbytes for plane in planes) / (10 * 128) <= most


# --- rows by themselves


@given(
    width=st.sampled_from(WIDTHS + ODD_WIDTHS),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(FLOATS),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_cut_permuted_and_joined_have_the_same_codes(
    width: int, bits: int, dtype: str, tokens: int, heads: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rows_of(rng.standard_normal((tokens, heads, width)) * 10 ** rng.uniform(-3, 3, (tokens, heads, 1)), dtype)
    codec = TurboQuantRows(width, dtype, bits)
    whole = codec.encode(rows)
    order, cut = rng.permutation(tokens), int(rng.integers(0, tokens + 1))
    permuted = codec.encode(rows[mx.array(order)])
    pieces = [codec.encode(rows[:cut]), codec.encode(rows[cut:])]
    per_head = [codec.encode(rows[:, head : head + 1]) for head in range(heads)]
    for i, plane in enumerate(whole):
        assert np.array_equal(permuted[i], plane[order])
        assert np.array_equal(np.concatenate([piece[i] for piece in pieces]), plane)
        assert np.array_equal(np.concatenate([piece[i] for piece in per_head], axis=1), plane)
    back = bits_of(decoded(codec, whole))
    assert np.array_equal(bits_of(decoded(codec, [plane[cut:] for plane in whole])), back[cut:])


def test_chunks_leave_no_seam() -> None:
    rows = normal_rows(3000, 128, "bfloat16").reshape(1000, 3, 128)
    codec = TurboQuantRows(128, "bfloat16", 4)
    whole = codec.encode(rows)
    singles = [codec.encode(rows[i : i + 1]) for i in (0, 170, 171, 511, 512, 999)]
    for i, single in zip((0, 170, 171, 511, 512, 999), singles, strict=True):
        assert all(np.array_equal(a[0], b[i]) for a, b in zip(single, whole, strict=True))
    back = bits_of(decoded(codec, whole))
    assert np.array_equal(bits_of(decoded(codec, [plane[500:530] for plane in whole])), back[500:530])


def test_a_transposed_cache_has_the_codes_of_its_copy() -> None:
    cache = normal_rows(60, 64, "bfloat16").reshape(3, 20, 64)
    codec = TurboQuantRows(64, "bfloat16", 3)
    turned = codec.encode(cache.swapaxes(0, 1))
    copied = codec.encode(mx.contiguous(cache.swapaxes(0, 1)))
    assert all(np.array_equal(a, b) for a, b in zip(turned, copied, strict=True))


def test_no_rows_are_fine() -> None:
    codec = TurboQuantRows(64, "float16", 3)
    for shape in ((0, 4, 64), (4, 0, 64)):
        planes = codec.encode(mx.zeros(shape, mx.float16))
        assert [plane.shape for plane in planes] == [(*shape[:2], 6), shape[:2]]
        assert codec.decode(planes).shape == (shape[1], shape[0], 64)


def test_temporaries_stay_small_beside_a_large_input() -> None:
    rows = mx.broadcast_to(normal_rows(512, 128, "bfloat16"), (512, 64, 128))
    codec = TurboQuantRows(128, "bfloat16", 4)
    mx.eval(rows)
    tracemalloc.start()
    planes = codec.encode(rows)
    encoding = tracemalloc.get_traced_memory()[1] - sum(plane.nbytes for plane in planes)
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    codec.decode(planes)
    decoding = tracemalloc.get_traced_memory()[1] - held - rows.nbytes
    tracemalloc.stop()
    assert max(encoding, decoding) < 8 << 20


# --- extreme rows


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_zeros_come_back_as_zeros(dtype: str, bits: int) -> None:
    codec = TurboQuantRows(80, dtype, bits)
    planes = codec.encode(rows_of(np.array([0.0, -0.0] * 40).reshape(1, 1, 80), dtype))
    assert not any(plane.any() for plane in planes)
    assert not bits_of(decoded(codec, planes)).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float16", 1e4), ("float16", 1e-6), *((d, s) for d in FLOATS[1:] for s in (7e4, 3e19, 5e37, 1e-30, 1e-36))],
)
def test_rows_of_extreme_size_keep_their_error(dtype: str, size: float, bits: int) -> None:
    values = np.random.default_rng(0).standard_normal((300, 1, 128))
    rows = rows_of(values * size, dtype)
    codec = TurboQuantRows(128, dtype, bits)
    back = decoded(codec, codec.encode(rows))
    x, y = as_float64(rows) / size, as_float64(back) / size
    assert np.isfinite(y).all()
    rounding = 1e-2 if size < 1e-5 and dtype == "float16" else 1e-5  # its subnormals have few bits
    assert np.sum((x - y) ** 2) <= (1.02 * expected_error(bits, 128) + rounding) * np.sum(x * x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_rows_come_back_finite(dtype: str) -> None:
    largest = float(mx.finfo(getattr(mx, dtype)).max)
    rows = mx.full((1, 1, 128), largest, getattr(mx, dtype)) * rows_of(
        np.random.default_rng(0).choice([-1, 1], 128), dtype
    )
    for bits in BITS:
        codec = TurboQuantRows(128, dtype, bits)
        made = decoded(codec, codec.encode(rows))
        assert made.dtype == rows.dtype
        back = as_float64(made)
        assert np.isfinite(back).all()
        assert np.sum(back * as_float64(rows) / largest**2) > 0.5 * 128


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_below_the_normal_numbers_come_back_as_zeros(dtype: str) -> None:
    codec = TurboQuantRows(64, dtype, 4)
    planes = codec.encode(mx.full((1, 1, 64), 2.0**-130, getattr(mx, dtype)))
    assert not any(plane.any() for plane in planes)
    assert not bits_of(decoded(codec, planes)).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_with_a_value_that_is_not_finite_becomes_nan_and_its_neighbours_do_not_notice(
    dtype: str, bad: float
) -> None:
    values = np.random.default_rng(0).standard_normal((3, 1, 64))
    codec = TurboQuantRows(64, dtype, 4)
    clean = codec.encode(rows_of(values, dtype))
    values[1, 0, 17] = bad
    planes = codec.encode(rows_of(values, dtype))
    back = as_float64(decoded(codec, planes))
    assert np.isnan(back[1]).all()
    assert not planes[0][1].any()
    for i in (0, 2):
        assert all(np.array_equal(a[i], b[i]) for a, b in zip(planes, clean, strict=True))


# --- which streams


def stream(width: int = 128, other: int | None = None, **changed: object) -> Stream:
    return Stream(0, 1, "keys", 4, width, width if other is None else other, "bfloat16")._replace(**changed)  # type: ignore[arg-type]


def test_keys_and_values_have_bits_of_their_own() -> None:
    """And keys alone are centred."""
    codec = TurboQuant(key_bits=4, value_bits=3, seed=9)
    assert codec.row_codec(stream()) == TurboQuantRows(128, "bfloat16", 4, 9, True, True)
    assert codec.row_codec(stream(part="values")) == TurboQuantRows(128, "bfloat16", 3, 9, True)
    assert isinstance(codec.row_codec(stream()), RowCodec)
    assert codec.row_codec(stream()).planes == (Plane("codes", "U32", (16,)), Plane("scale", "BF16", ()))


@pytest.mark.parametrize("kept", [stream(31), stream(16), stream(0), stream(dtype="int32"), stream(dtype="float64")])
def test_narrow_rows_and_other_dtypes_are_kept_raw(kept: Stream) -> None:
    assert TurboQuant().row_codec(kept) == RawRows(kept.width, kept.dtype)


def test_latents_are_kept_raw_unless_asked_otherwise() -> None:
    for part in (stream(512, 64, heads=1), stream(64, 512, heads=1, part="values"), stream(256, 32, heads=1)):
        assert TurboQuant().row_codec(part) == RawRows(part.width, part.dtype)
        taken = TurboQuantRows(part.width, part.dtype, 4, levelled=True, centred=part.part == "keys")
        assert TurboQuant(raw_latents=False).row_codec(part) == taken


@pytest.mark.parametrize("taken", [stream(512, 64), stream(512, heads=1), stream(192, 128, heads=1)])
def test_wide_heads_and_single_heads_are_no_latents(taken: Stream) -> None:
    assert TurboQuant().row_codec(taken) == TurboQuantRows(taken.width, taken.dtype, 4, levelled=True, centred=True)


def test_the_paper_s_plain_form_can_be_chosen() -> None:
    assert TurboQuant(levelling=False).row_codec(stream()) == TurboQuantRows(128, "bfloat16", 4)


def test_layers_at_the_ends_stay_as_they_are_and_single_layers_have_bits_of_their_own() -> None:
    codec = TurboQuant(4, 3, fp16_layers=2, layers={5: 8, -5: (2, 1), -1: 4, 6: None})

    def bits(layer: int, part: str) -> int | None:
        row = codec.row_codec(stream(layer=layer, layers=12, part=part))
        return row.bits if isinstance(row, TurboQuantRows) else None

    assert [bits(i, "keys") for i in range(12)] == [None, None, 4, 4, 4, 8, None, 2, 4, 4, None, 4]
    assert [bits(i, "values") for i in range(12)] == [None, None, 3, 3, 3, 8, None, 1, 3, 3, None, 4]


def test_bad_parameters_are_named() -> None:
    for bits in (0, 5, 6, 7, 16, True, "4", 4.0):
        with pytest.raises(ValueError, match=f"key_bits={bits!r}.*choose 1, 2, 3, 4 or 8"):
            TurboQuant(key_bits=bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="value_bits=5"):
        TurboQuant(value_bits=5)
    with pytest.raises(ValueError, match=r"seed=-1.*whole number"):
        TurboQuant(seed=-1)
    for bad, message in (
        ({"fp16_layers": -1}, "fp16_layers=-1: give the number of layers"),
        ({"sink_tokens": 257}, "sink_tokens=257: give a number of tokens, 0 to 256"),
        ({"levelling": 1}, "levelling=1: not a choice"),
        ({"layers": [4]}, r"layers=\[4\]: give a dict"),
        ({"layers": {"x": 4}}, "'x': ...}: not a layer"),
        ({"layers": {1: None, "1": 4}}, "layer 1 stands there twice; give it once"),
        ({"layers": {0: 5}}, r"layers\[0\]=5: not a bit depth"),
        ({"layers": {0: (4, 4, 4)}}, "0: .*give bits, a pair"),
    ):
        with pytest.raises(ValueError, match=message):
            TurboQuant(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="raw_latents=None"):
        TurboQuant(raw_latents=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype='int8'"):
        TurboQuantRows(64, "int8", 4)
    with pytest.raises(ValueError, match="width=0"):
        TurboQuantRows(0, "float16", 4)
    with pytest.raises(ValueError, match=r"\(tokens, heads, 64\) of float16"):
        TurboQuantRows(64, "float16", 4).encode(mx.zeros((1, 1, 32), mx.float16))


@pytest.mark.parametrize(
    ("bits", "digest"),
    [
        (1, "09b648244f77fb55"),
        (2, "69f98e56c252d19d"),
        (3, "9cbc1b390b561c72"),
        (4, "1322e8c918d0bca4"),
        (8, "1490774f795301b6"),
    ],
)
def test_the_format_has_not_moved(bits: int, digest: str) -> None:
    """Codes of fixed rows; a change here makes every stored block unreadable and needs a new format version."""
    whole = np.arange(40 * 96).reshape(40, 1, 96)
    rows = rows_of((whole * 7919 % 2003 - 1001) / 512, "float32")
    codes, scales = TurboQuantRows(96, "float32", bits).encode(rows)
    assert hashlib.sha256(codes.tobytes() + scales.tobytes()).hexdigest()[:16] == digest


def test_rows_that_have_no_kernel_on_a_gpu_are_coded_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(np.random.default_rng(0).standard_normal((5, 2, 72)), "bfloat16")
    codec = TurboQuantRows(72, "bfloat16", 3)
    planes = codec.encode(rows)
    back = codec.decode(planes)
    monkeypatch.setattr("prefixcache.codecs.turboquant.backends.on_cpu", lambda: False)
    monkeypatch.setattr("prefixcache.codecs.turboquant.gpu_rows.available", lambda: True)
    assert all(np.array_equal(a, b) for a, b in zip(codec.encode(rows), planes, strict=True))
    assert np.array_equal(bits_of(codec.decode(planes)), bits_of(back))
