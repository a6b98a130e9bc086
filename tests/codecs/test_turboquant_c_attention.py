"""Attention on codes in C gives what attention on decoded rows gives, on every code path of this machine."""

from __future__ import annotations

from typing import Any

import attention_oracle
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import BITS, FLOATS

from prefixcache.codecs.interchange import Array
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.threads import set_threads
from prefixcache.codecs.turboquant import c_attention as turboquant_c_attention
from prefixcache.codecs.turboquant import c_rows as turboquant_c
from prefixcache.codecs.turboquant.c_attention import attend
from prefixcache.codecs.turboquant.format import AttentionCall, CodedRows, form_of

WIDTHS = (32, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256)
WIDE = (320, 576)
CLOSE = 1e-4
NAN = 0x7FC0

pytestmark = pytest.mark.skipif(
    not turboquant_c_attention.available(), reason=f"C kernel with attention: {turboquant_c.describe()}"
)
every_path = pytest.mark.parametrize("path", turboquant_c.paths())


def scales_of(values: Array) -> Array:
    """Positive float32 -> bf16 bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def drawn_rows(
    rng: np.random.Generator,
    batch: int = 1,
    heads: int = 2,
    tokens: int = 100,
    bits: tuple[int, int] = (4, 4),
    widths: tuple[int, int] = (64, 64),
    **other: Any,
) -> CodedRows:
    """Any codes at all, whose scales are around 1."""
    keys, values = (form_of(width, depth, 7 + i) for i, (width, depth) in enumerate(zip(widths, bits, strict=True)))
    words = sum(words_of(width, depth) for width, depth in zip(widths, bits, strict=True))
    codes = rng.integers(0, 1 << 32, (batch, heads, tokens, words), np.uint64).astype(np.uint32)
    scales = scales_of(0.5 + rng.random((batch, heads, tokens, 2)))
    return CodedRows(mx.array(codes), mx.array(scales), keys, values, **other)


def levels_of(rng: np.random.Generator, sequences: int, heads: int, form: Any) -> mx.array:
    mean = rng.standard_normal((sequences, heads, form.width))
    spread = form.spread(None) * (0.5 + 2 * rng.random((sequences, heads, form.width)))
    return mx.array(np.stack([mean, spread]).astype(np.float32))


def queries_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(getattr(mx, dtype))


def scale_for(rows: CodedRows, queries: mx.array, deviation: float) -> float:
    """So that the scores have this standard deviation, about."""
    keys, _ = attention_oracle.decoded(rows)
    size = np.sqrt(rows.keys.width) * (keys.std() if keys.size else 1) * float(queries.astype(mx.float32).std())
    return deviation / size if size > 0 else 1.0


def assert_right(rows: CodedRows, queries: mx.array, scale: float, mask: mx.array | None, causal: bool) -> None:
    out, lse = attend(rows, AttentionCall(queries, scale, mask, causal))
    assert out.dtype == lse.dtype == mx.float32
    wanted, wanted_lse = attention_oracle.attention(rows, queries, scale, mask, causal)
    assert out.shape == wanted.shape
    assert lse.shape == wanted_lse.shape
    assert_close(np.array(out), wanted)
    none = np.isneginf(wanted_lse)
    assert np.array_equal(np.isneginf(np.array(lse)), none)
    assert not np.array(out)[none].any()
    np.testing.assert_allclose(np.array(lse)[~none], wanted_lse[~none], rtol=CLOSE, atol=CLOSE)


def assert_close(out: Array, wanted: Array, close: float = CLOSE) -> None:
    """Every query's output by itself; so their norms over all, too."""
    size = np.linalg.norm(wanted, axis=-1)
    assert np.isfinite(out).all()
    assert (np.linalg.norm(out.astype(np.float64) - wanted, axis=-1) <= close * size + 1e-44).all()


@st.composite
def cases(draw: Any) -> tuple[CodedRows, mx.array, float, mx.array | None, bool]:
    """Rows in any layout, queries, scale, mask, causal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 8)))
    tokens = draw(st.one_of(st.integers(1, 20), st.integers(1, 300), st.sampled_from((64, 128))))
    length = draw(st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 70)))
    bits, widths = ((draw(st.sampled_from(of)), draw(st.sampled_from(of))) for of in (BITS, WIDTHS))
    rows = drawn_rows(rng, batch, heads, tokens, bits, widths)
    if draw(st.booleans()):  # scales from the least to as large as decoded rows may have
        sizes = rng.integers(1, 247, rows.scales.shape[:3]) << 7
        sizes[rng.random(sizes.shape) < 0.1] = 0
        rows = rows._replace(scales=mx.array(np.stack([np.array(rows.scales)[..., 0], sizes], -1).astype(np.uint16)))
    levels = draw(st.sampled_from((0, 0, 1, batch)))
    if levels:
        rows = rows._replace(
            key_levels=levels_of(rng, levels, heads, rows.keys),
            value_levels=levels_of(rng, levels, heads, rows.values),
        )
    if draw(st.booleans()):
        rows = viewed(rows, rng)
    if draw(st.booleans()):
        rows = rows._replace(first=mx.array(rng.integers(0, tokens + 1, batch).astype(np.int32)))
    if draw(st.booleans()):
        rows = rows._replace(last=mx.array(rng.integers(0, tokens + 1, batch).astype(np.int32)))
    queries = queries_of(rng, (batch, length, heads * group, widths[0]), draw(st.sampled_from(FLOATS))).swapaxes(1, 2)
    mask = draw(masks(rng, (batch, heads * group, length, tokens)))
    return rows, queries, scale_for(rows, queries, draw(st.sampled_from((0.1, 1.0, 10.0)))), mask, draw(st.booleans())


def viewed(rows: CodedRows, rng: np.random.Generator) -> CodedRows:
    """The same rows as views of longer buffers, tokens before heads."""
    begin, behind = (int(n) for n in rng.integers(0, 5, 2))
    tokens = rows.codes.shape[2]

    def view(array: mx.array) -> mx.array:
        wide = np.pad(np.array(array).swapaxes(1, 2), ((0, 1), (begin, behind), (0, 1), (0, 2)))
        return mx.array(wide)[:-1, begin : begin + tokens, :-1, :-2].swapaxes(1, 2)

    return rows._replace(codes=view(rows.codes), scales=view(rows.scales))


@st.composite
def masks(draw: Any, rng: np.random.Generator, full: tuple[int, ...]) -> mx.array | None:
    kind = draw(st.sampled_from((None, "bool", *FLOATS)))
    if kind is None:
        return None
    shape = [size if draw(st.booleans()) else 1 for size in full][-draw(st.integers(1, 4)) :]
    seen = rng.random(shape) < draw(st.sampled_from((0.02, 0.5, 1.0)))
    if kind == "bool":
        mask = mx.array(seen)
    else:
        mask = mx.array(np.where(seen, rng.standard_normal(shape), -np.inf).astype(np.float32)).astype(
            getattr(mx, kind)
        )
    if len(shape) > 1 and draw(st.booleans()):  # columns that aren't side by side
        mask = mx.contiguous(mask.swapaxes(-1, -2)).swapaxes(-1, -2)
    return mask


@every_path
@given(case=cases())
def test_attention_on_codes_is_that_on_decoded_rows(path: str, case: Any) -> None:
    with turboquant_c.forced(path):
        assert_right(*case)


@every_path
@pytest.mark.parametrize("width", WIDE)
@pytest.mark.parametrize("bits", BITS)
def test_wide_rows(path: str, bits: int, width: int) -> None:
    """A latent with its positions; two rounds."""
    rng = np.random.default_rng(bits)
    rows = drawn_rows(rng, heads=1, tokens=150, bits=(bits, bits), widths=(width, 512))
    queries = queries_of(rng, (1, 20, 3, width))
    with turboquant_c.forced(path):
        assert_right(rows, queries, scale_for(rows, queries, 3), None, True)


@every_path
def test_rows_as_they_are_encoded(path: str) -> None:
    rng = np.random.default_rng(0)
    keys, values = form_of(128, 4, 0), form_of(128, 3, 0)
    rows = (rng.standard_normal((2, 2, 90, 128)).astype(np.float32) for _ in range(2))
    codes, scales = attention_oracle.encode_rows(*rows, keys, values)
    with turboquant_c.forced(path):
        assert_right(CodedRows(codes, scales, keys, values), queries_of(rng, (2, 8, 1, 128)), 0.09, None, True)


@every_path
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_and_scales_far_from_1(path: str, size: float) -> None:
    """Large keys and small queries, and the other way round."""
    rng = np.random.default_rng(1)
    rows = drawn_rows(rng)
    scales = np.array(rows.scales)
    scales[..., 0] = scales_of((0.5 + rng.random(scales.shape[:3])) / size)
    rows = rows._replace(scales=mx.array(scales))
    queries = queries_of(rng, (1, 4, 3, 64)) * size
    with turboquant_c.forced(path):
        assert_right(rows, queries, 0.2, None, False)
        assert_right(rows, queries / size, 0.2 * size, None, False)


@every_path
def test_values_far_apart_where_the_large_ones_do_not_count(path: str) -> None:
    """What one query doesn't attend to takes nothing from its result, though the next one does."""
    rng = np.random.default_rng(2)
    rows = drawn_rows(rng, tokens=200)
    scales = np.array(rows.scales)
    scales[..., 1] = np.where(np.arange(200) % 2, 0x0100, 0x7A00)
    rows = rows._replace(scales=mx.array(scales))
    mask = mx.array(np.stack([np.arange(200) % 2 == 1, np.ones(200, bool)]))
    with turboquant_c.forced(path):
        assert_right(rows, queries_of(rng, (1, 4, 2, 64)), 0.1, mask, False)
        for threads in (1, 3):
            set_threads(threads)
            many = rows._replace(codes=mx.tile(rows.codes, (1, 1, 20, 1)), scales=mx.tile(rows.scales, (1, 1, 20, 1)))
            assert_right(many, queries_of(rng, (1, 4, 2, 64)), 0.1, mx.tile(mask, (1, 20)), False)


@every_path
def test_only_who_attends_to_a_row_of_nan_gets_nan(path: str) -> None:
    rng = np.random.default_rng(3)
    rows = drawn_rows(rng, tokens=150)
    queries = queries_of(rng, (1, 4, 150, 64))
    scales = np.array(rows.scales)
    for part in (0, 1):
        broken = scales.copy()
        broken[:, :, 70, part] = NAN
        wanted, _ = attention_oracle.attention(rows, queries[:, :, :70], 0.1, mx.array(np.tri(70, 150, dtype=bool)))
        for mask, causal in ((None, True), (mx.array(np.tri(150, dtype=bool)), False)):
            with turboquant_c.forced(path):
                out, lse = attend(rows._replace(scales=mx.array(broken)), AttentionCall(queries, 0.1, mask, causal))
            assert_close(np.array(out)[:, :, :70], wanted)
            assert np.isnan(np.array(out)[:, :, 70:]).all()
            assert np.isnan(np.array(lse)[:, :, 70:]).all() == (part == 0)
            assert np.isfinite(np.array(lse)[:, :, :70]).all()


@every_path
def test_who_attends_to_nothing_gets_nothing(path: str) -> None:
    rng = np.random.default_rng(4)
    rows = drawn_rows(rng, batch=2, tokens=70, first=mx.array([0, 70], mx.int32))
    queries = queries_of(rng, (2, 4, 5, 64))
    nobody = mx.array(np.arange(5) != 2)[:, None]
    with turboquant_c.forced(path):
        out, lse = (np.array(array) for array in attend(rows, AttentionCall(queries, 0.1, nobody)))
    for part in (out[0, :, 2], out[1]):
        assert not part.any()
    assert np.isneginf(lse[0, :, 2]).all()
    assert np.isneginf(lse[1]).all()
    assert np.isfinite(lse[0, :, [0, 1, 3, 4]]).all()


@every_path
def test_a_row_that_is_masked_by_large_numbers_alone_is_attended_to(path: str) -> None:
    rng = np.random.default_rng(5)
    least = float(np.finfo(np.float32).min)
    with turboquant_c.forced(path):
        assert_right(drawn_rows(rng), queries_of(rng, (1, 2, 3, 64)), 0.1, mx.full((3, 100), least), False)


@pytest.mark.parametrize("shape", [(1, 2, 0, 3), (0, 2, 9, 3), (1, 2, 9, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_sequences_no_tokens_no_queries(shape: tuple[int, ...], causal: bool) -> None:
    batch, heads, tokens, length = shape
    rng = np.random.default_rng(0)
    out, lse = attend(
        drawn_rows(rng, batch, heads, tokens), AttentionCall(queries_of(rng, (batch, 4, length, 64)), 1.0, None, causal)
    )
    assert out.shape == (batch, 4, length, 64)
    assert not np.array(out).any()
    assert np.isneginf(np.array(lse)).all()


@every_path
@pytest.mark.parametrize("length", [1, 3, 100])
def test_the_result_does_not_depend_on_the_number_of_threads(path: str, length: int) -> None:
    rng = np.random.default_rng(6)
    rows = drawn_rows(
        rng, batch=2, tokens=3000, first=mx.array([0, 1900], mx.int32), last=mx.array([600, 3000], mx.int32)
    )
    rows = rows._replace(key_levels=levels_of(rng, 1, 2, rows.keys), value_levels=levels_of(rng, 2, 2, rows.values))
    queries = queries_of(rng, (2, 4, length, 64))
    made = []
    with turboquant_c.forced(path):
        for threads in (1, 2, 7):
            set_threads(threads)
            made.append(
                [np.array(array).astype(np.float64) for array in attend(rows, AttentionCall(queries, 0.3, None, True))]
            )
    for out, lse in made[1:]:
        assert_close(out, made[0][0], 1e-5)
        np.testing.assert_allclose(lse, made[0][1], rtol=1e-5, atol=1e-5)
    wanted, _ = attention_oracle.attention(rows, queries, 0.3, None, True)
    assert_close(made[2][0], wanted)


def test_codes_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    rows = viewed(drawn_rows(rng), rng)
    mask = mx.array(np.ones((1, 100), bool))

    def refuse(array: Array) -> Array:
        raise AssertionError(f"a copy of {array.shape}")

    monkeypatch.setattr(turboquant_c_attention.np, "ascontiguousarray", refuse)
    attend(rows, AttentionCall(queries_of(rng, (1, 4, 3, 64)), 0.1, mask, True))


# --- what is taken, what is refused


def test_which_rows_are_taken() -> None:
    rng = np.random.default_rng(0)
    assert turboquant_c_attention.takes(drawn_rows(rng))
    assert not turboquant_c_attention.takes(drawn_rows(rng, widths=(64, 100)))
    assert not turboquant_c_attention.takes(drawn_rows(rng, widths=(31, 64)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codes": mx.zeros((2, 2, 10, 15), mx.uint32)}, r"codes of shape \(2, 2, 10, 15\) and dtype uint32"),
        ({"codes": mx.zeros((2, 2, 10, 16), mx.int32)}, "codes of shape .* and dtype int32"),
        ({"codes": mx.zeros((2, 10, 16), mx.uint32)}, r"codes of shape \(2, 10, 16\)"),
        ({"scales": mx.zeros((2, 2, 9, 2), mx.uint16)}, r"scales of shape \(2, 2, 9, 2\)"),
        ({"scales": mx.zeros((2, 2, 10, 2), mx.bfloat16)}, "scales of shape .* and dtype bfloat16"),
        ({"key_levels": mx.zeros((2, 3, 2, 64))}, r"key_levels of shape \(2, 3, 2, 64\)"),
        ({"key_levels": mx.zeros((2, 2, 2, 64), mx.float16)}, "key_levels of shape .* and dtype float16"),
        ({"value_levels": mx.zeros((2, 1, 2, 32))}, r"value_levels of shape \(2, 1, 2, 32\)"),
        ({"first": mx.zeros((3,), mx.int32)}, r"first of shape \(3,\)"),
        ({"last": mx.zeros((2,), mx.int64)}, "last of shape .* and dtype int64"),
        ({"keys": form_of(121, 4, 0)}, "width=121"),
        ({"queries": mx.zeros((2, 4, 1, 65))}, r"queries of shape \(2, 4, 1, 65\)"),
        ({"queries": mx.zeros((1, 4, 1, 64))}, r"queries of shape \(1, 4, 1, 64\)"),
        ({"queries": mx.zeros((2, 4, 64))}, r"queries of shape \(2, 4, 64\)"),
        ({"queries": mx.zeros((2, 4, 1, 64), mx.int32)}, "queries of shape .* and dtype int32"),
        ({"queries": mx.zeros((2, 3, 1, 64))}, "3 query heads for keys of 2 heads"),
        ({"mask": mx.zeros((9,))}, r"mask of shape \(9,\)"),
        ({"mask": mx.zeros((1, 2, 4, 1, 10))}, r"mask of shape \(1, 2, 4, 1, 10\)"),
        ({"mask": mx.zeros((10,), mx.int32)}, "mask of shape .* and dtype int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict, said: str) -> None:
    rows = drawn_rows(np.random.default_rng(0), batch=2, tokens=10)
    given = {"queries": mx.zeros((2, 4, 1, 64)), "mask": None}
    given |= {name: change.pop(name) for name in given if name in change}
    with pytest.raises(ValueError, match=said):
        attend(rows._replace(**change), AttentionCall(given["queries"], 1.0, given["mask"]))
