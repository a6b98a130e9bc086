from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roundtrip import BITS, FLOATS, ODD_WIDTHS, WIDTHS, as_float64, bits_of, rows_of

from prefixcache.codecs.interchange import borrow, bring_in, element
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant import backends as turboquant_backends
from prefixcache.codecs.turboquant import codec as turboquant
from prefixcache.codecs.turboquant import mlx_rows as turboquant_mlx
from prefixcache.codecs.turboquant import numpy_rows as turboquant_numpy
from prefixcache.codecs.turboquant.codec import TurboQuantRows
from prefixcache.codecs.turboquant.levelling import Levels


def assert_back_ends_agree(codec: TurboQuantRows, rows: mx.array, levels: Levels | None = None) -> None:
    tokens, heads, width = rows.shape
    codes = np.empty((tokens, heads, words_of(width, codec.bits)), np.uint32)
    scales = np.empty((tokens, heads), np.uint16)
    turboquant_numpy.encode(borrow(rows), codec.dtype, codec.form, levels, codes, scales)
    theirs = turboquant_mlx.encode(rows, codec.form, levels)
    assert all(np.array_equal(a, b) for a, b in zip((codes, scales), theirs, strict=True))
    by_numpy = np.empty((heads, tokens, width), element(codec.dtype).numpy)
    turboquant_numpy.decode(codes, scales, codec.dtype, codec.form, levels, by_numpy)
    by_mlx = turboquant_mlx.decode(codes, scales, tokens + 2, codec.dtype, codec.form, levels)
    assert not borrow(by_mlx)[:, tokens:].any()
    by_numpy, by_mlx = bring_in(by_numpy, codec.dtype), by_mlx[:, :tokens]
    lost = np.isnan(as_float64(by_numpy))
    assert np.array_equal(lost, np.isnan(as_float64(by_mlx)))
    assert np.array_equal(bits_of(by_numpy)[~lost], bits_of(by_mlx)[~lost])


def some_levels(heads: int, width: int, seed: int) -> Levels:
    """Means and roots over many magnitudes, some of them none."""
    rng = np.random.default_rng(seed)
    mean = rng.choice([0.0, 0.1, 1.0, 300.0], (heads, width)) * rng.standard_normal((heads, width))
    root = np.exp(rng.choice([0.0, 1.0, 3.0], (heads, width)) * np.abs(rng.standard_normal((heads, width))))
    return Levels(mean.astype(np.float32), root.astype(np.float32))


some_codec = st.builds(
    TurboQuantRows,
    width=st.sampled_from(WIDTHS + ODD_WIDTHS),
    dtype=st.sampled_from(FLOATS),
    bits=st.sampled_from(BITS),
    seed=st.integers(0, 3),
)
some_seed = st.integers(0, 2**32 - 1)


@settings(max_examples=150)
@given(codec=some_codec, seed=some_seed, scale=st.integers(-140, 127), spread=st.integers(0, 60))
def test_rows_of_any_size_have_the_same_codes_on_both_back_ends(
    codec: TurboQuantRows, seed: int, scale: int, spread: int
) -> None:
    rng = np.random.default_rng(seed)
    exponents = scale + rng.integers(-spread, spread + 1, (4, 2, codec.width))
    values = np.ldexp(rng.standard_normal(exponents.shape), exponents)
    with np.errstate(over="ignore"):
        rows = rows_of(values, codec.dtype)
    assert_back_ends_agree(codec, rows)
    assert_back_ends_agree(codec, rows, some_levels(2, codec.width, seed))


@settings(max_examples=80)
@given(codec=some_codec, seed=some_seed)
def test_any_bit_pattern_has_the_same_codes_on_both_back_ends(codec: TurboQuantRows, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind = np.dtype(np.uint32 if codec.dtype == "float32" else np.uint16)
    patterns = rng.integers(0, 1 << (8 * kind.itemsize), (6, 1, codec.width), np.uint64).astype(kind)
    patterns[1:] &= kind.type((1 << (8 * kind.itemsize)) - 1 - (1 << (8 * kind.itemsize - 2)))  # finite
    rows = mx.array(patterns).view(getattr(mx, codec.dtype))
    assert_back_ends_agree(codec, rows)
    assert_back_ends_agree(codec, rows, some_levels(1, codec.width, seed))


@settings(max_examples=60)
@given(codec=some_codec, seed=some_seed, spikes=st.integers(0, 4))
def test_sparse_rows_and_ties_have_the_same_codes_on_both_back_ends(
    codec: TurboQuantRows, seed: int, spikes: int
) -> None:
    rng = np.random.default_rng(seed)
    values = np.zeros((4, 1, codec.width))
    for row in values[:, 0]:
        row[rng.integers(0, codec.width, spikes)] = rng.integers(-2, 3, spikes)
    assert_back_ends_agree(codec, rows_of(values, codec.dtype))


def test_another_device_than_the_cpu_takes_the_mlx_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(np.random.default_rng(0).standard_normal((5, 2, 128)), "bfloat16")
    codec = TurboQuantRows(128, "bfloat16", 3)
    planes = codec.encode(rows)
    back = codec.decode(planes, 8)
    monkeypatch.setattr(turboquant, "on_cpu", lambda: False)
    monkeypatch.setattr(turboquant_backends, "encode_all", None)
    monkeypatch.setattr(turboquant_backends, "decode_all", None)
    assert all(np.array_equal(a, b) for a, b in zip(codec.encode(rows), planes, strict=True))
    assert np.array_equal(bits_of(codec.decode(planes, 8)), bits_of(back))


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
