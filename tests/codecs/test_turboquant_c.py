"""The C kernel gives what NumPy gives, bit for bit, on every code path of this machine, and touches nothing else."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roundtrip import BITS, FLOATS

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.interchange import Array, element
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.threads import set_threads
from prefixcache.codecs.turboquant import c_rows as turboquant_c
from prefixcache.codecs.turboquant import numpy_rows as turboquant_numpy
from prefixcache.codecs.turboquant.format import Form, form_of

WIDTHS = (32, 48, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256, 512, 576, 1024)
FORM = form_of(128, 4, 0)
REFUSED = (1, 8, 24, 31, 88, 100, 104, 129, 1032, 2048)

pytestmark = pytest.mark.skipif(not turboquant_c.available(), reason=f"C kernel: {turboquant_c.describe()}")


def encode(rows: Array, dtype: str, form: Form, levels: Levels | None, codes: Array, scales: Array) -> None:
    turboquant_c.encode_all([Encoding(rows, (codes, scales), levels)], dtype, form)


def decode(codes: Array, scales: Array, dtype: str, form: Form, levels: Levels | None, rows: Array) -> None:
    turboquant_c.decode_all([Decoding((codes, scales), rows, levels)], dtype, form)


def cast(values: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        single = values.astype(np.float32)
        if dtype == "bfloat16":
            return (single.view(np.uint32) >> 16).astype(np.uint16)
        return single.astype(element(dtype).numpy)


def rows_of(kind: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Array:
    """Rows of one kind. "patterns": any bits, in three rows of four no infinity or NaN."""
    if kind == "normal":
        return cast(rng.standard_normal(shape) * 10.0 ** rng.uniform(-30, 30), dtype)
    if kind == "sizes":
        return cast(np.ldexp(rng.standard_normal(shape), rng.integers(-150, 128, shape)), dtype)
    if kind == "ties":  # few values, small integers, either zero
        values = rng.integers(-2, 3, shape) * (rng.random(shape) < rng.choice([0.02, 0.2, 1.0]))
        return cast(np.copysign(values, rng.choice([-1.0, 1.0], shape)), dtype)
    of = element(dtype).numpy
    bits = rng.integers(0, 1 << (8 * of.itemsize), shape, np.uint64).astype(f"u{of.itemsize}")
    finite = rng.random((*shape[:-1], 1)) < 0.75
    return np.where(finite, bits & ~(bits.dtype.type(1) << (8 * of.itemsize - 2)), bits).view(of)


def strided(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> tuple[Array, Array]:
    """A buffer of random bytes and a view into its middle, whose first two axes may be swapped and have gaps."""
    outer = [int(size + rng.integers(0, 4)) for size in shape]
    swapped = bool(rng.integers(0, 2))
    if swapped and len(shape) > 1:
        outer[0], outer[1] = int(shape[1] + rng.integers(0, 4)), int(shape[0] + rng.integers(0, 4))
    buffer = rng.integers(0, 256, int(np.prod(outer)) * dtype.itemsize + 16, np.uint8)
    at = int(rng.integers(0, 9))  # rarely aligned
    view = buffer[at : at + int(np.prod(outer)) * dtype.itemsize].view(dtype).reshape(outer)
    view = view.swapaxes(0, 1) if swapped and len(shape) > 1 else view
    view = view[tuple(slice(full - size, full) for full, size in zip(view.shape, shape, strict=True))]
    return buffer, view


def twin(buffer: Array, view: Array) -> tuple[Array, Array]:
    copy = buffer.copy()
    if view.size == 0:
        return copy, view.copy()
    at = view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
    return copy, np.ndarray(view.shape, view.dtype, copy, at, view.strides)


def levels_of(heads: int, width: int, rng: np.random.Generator) -> Levels:
    mean = (
        rng.standard_normal((heads, width))
        * 10.0 ** rng.integers(-3, 6, (heads, 1))
        * (rng.random((heads, width)) < 0.8)
    )
    return Levels(mean.astype(np.float32), (1 + 5 * rng.random((heads, width))).astype(np.float32))


def assert_same_codes(rows: Array, dtype: str, form: Form, levels: Levels | None, rng: np.random.Generator) -> None:
    tokens, heads, width = rows.shape
    of_codes = strided((tokens, heads, words_of(width, form.codebook.bits)), np.dtype(np.uint32), rng)
    of_scales = strided((tokens, heads), np.dtype(np.uint16), rng)
    wanted_codes, wanted_scales = twin(*of_codes), twin(*of_scales)
    encode(rows, dtype, form, levels, of_codes[1], of_scales[1])
    turboquant_numpy.encode(rows, dtype, form, levels, wanted_codes[1], wanted_scales[1])
    assert np.array_equal(of_codes[0], wanted_codes[0])
    assert np.array_equal(of_scales[0], wanted_scales[0])


def assert_same_rows(
    codes: Array, scales: Array, dtype: str, form: Form, levels: Levels | None, rng: np.random.Generator
) -> None:
    tokens, heads = scales.shape
    buffer, rows = strided((heads, tokens, form.width), element(dtype).numpy, rng)
    wanted, wanted_rows = twin(buffer, rows)
    decode(codes, scales, dtype, form, levels, rows)
    turboquant_numpy.decode(codes, scales, dtype, form, levels, wanted_rows)
    assert np.array_equal(buffer, wanted)


some_rows = {
    "width": st.sampled_from(WIDTHS),
    "bits": st.sampled_from(BITS),
    "dtype": st.sampled_from(FLOATS),
    "tokens": st.integers(0, 70),
    "heads": st.integers(0, 4),
    "levelled": st.booleans(),
    "seed": st.integers(0, 2**32 - 1),
}


@pytest.mark.parametrize("path", turboquant_c.paths())
@settings(max_examples=100)
@given(kind=st.sampled_from(["normal", "sizes", "ties", "patterns"]), **some_rows)
def test_codes_are_those_of_numpy(
    path: str, kind: str, width: int, bits: int, dtype: str, tokens: int, heads: int, levelled: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    _, rows = strided((tokens, heads, width), element(dtype).numpy, rng)
    rows[...] = rows_of(kind, rows.shape, dtype, rng)
    with turboquant_c.forced(path):
        assert_same_codes(rows, dtype, form_of(width, bits, 5), levels_of(heads, width, rng) if levelled else None, rng)


@pytest.mark.parametrize("path", turboquant_c.paths())
@settings(max_examples=100)
@given(made_up=st.booleans(), **some_rows)
def test_decoded_rows_are_those_of_numpy(
    path: str, made_up: bool, width: int, bits: int, dtype: str, tokens: int, heads: int, levelled: bool, seed: int
) -> None:
    """Of codes that were encoded, and of any bits at all."""
    rng = np.random.default_rng(seed)
    form, levels = form_of(width, bits, 5), levels_of(heads, width, rng) if levelled else None
    _, codes = strided((tokens, heads, words_of(width, bits)), np.dtype(np.uint32), rng)
    _, scales = strided((tokens, heads), np.dtype(np.uint16), rng)
    if not made_up:
        rows = rows_of("normal", (tokens, heads, width), dtype, rng)
        turboquant_numpy.encode(rows, dtype, form, levels, codes, scales)
    with turboquant_c.forced(path):
        assert_same_rows(codes, scales, dtype, form, levels, rng)


ODD_ROWS = {
    "zeros": 0.0,
    "minus zeros": -0.0,
    "huge": 1e30,
    "tiny": 1e-30,
    "the largest": np.finfo(np.float32).max,
    "the smallest normal": np.finfo(np.float32).tiny,
    "subnormal": 1e-44,
    "infinity": np.inf,
    "NaN": np.nan,
}


@pytest.mark.parametrize("path", turboquant_c.paths())
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("odd", ODD_ROWS)
def test_odd_rows(path: str, dtype: str, odd: str) -> None:
    """One value throughout; alone among zeros; alone among ordinary values."""
    rng = np.random.default_rng(3)
    values = np.zeros((3, 5, 128))
    values[0], values[2] = ODD_ROWS[odd], rng.standard_normal((5, 128))
    values[1:, :, 7] = ODD_ROWS[odd]
    rows = cast(values, dtype)
    for bits in BITS:
        form = form_of(128, bits, 0)
        for levels in (None, levels_of(5, 128, rng)):
            codes, scales = np.empty((3, 5, words_of(128, bits)), np.uint32), np.empty((3, 5), np.uint16)
            turboquant_numpy.encode(rows, dtype, form, levels, codes, scales)
            with turboquant_c.forced(path):
                assert_same_codes(rows, dtype, form, levels, rng)
                assert_same_rows(codes, scales, dtype, form, levels, rng)


@pytest.mark.parametrize("path", turboquant_c.paths())
def test_every_float16_and_every_scale(path: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    rng = np.random.default_rng(0)
    form = form_of(32, 4, 0)
    with turboquant_c.forced(path):
        rows = np.zeros((1 << 16, 1, 32), np.uint16)
        rows[:, 0, 3:4] = every
        assert_same_codes(rows.view(np.float16), "float16", form, None, rng)
        codes = rng.integers(0, 1 << 32, (1 << 16, 1, 4), np.uint64).astype(np.uint32)
        for dtype in FLOATS:
            assert_same_rows(codes, every, dtype, form, None, rng)


def test_a_last_axis_with_gaps_is_copied() -> None:
    rng = np.random.default_rng(0)
    form = form_of(64, 3, 0)
    rows = rng.standard_normal((9, 2, 128)).astype(np.float16)[..., ::2]
    codes, scales = np.zeros((9, 2, 12), np.uint32)[..., ::2], np.zeros((9, 4), np.uint16)[:, ::2]
    wanted = np.empty((9, 2, 6), np.uint32), np.empty((9, 2), np.uint16)
    encode(rows, "float16", form, None, codes, scales)
    turboquant_numpy.encode(rows, "float16", form, None, *wanted)
    assert np.array_equal(codes, wanted[0])
    assert np.array_equal(scales, wanted[1])
    back, wanted_back = np.zeros((2, 9, 128), np.float16)[..., ::2], np.empty((2, 9, 64), np.float16)
    decode(codes, scales, "float16", form, None, back)
    turboquant_numpy.decode(codes, scales, "float16", form, None, wanted_back)
    assert np.array_equal(back, wanted_back)


# --- what is taken, what is refused


def test_which_widths_are_taken() -> None:
    for bits in BITS:
        assert all(turboquant_c.takes(form_of(width, bits, 0)) for width in WIDTHS)
        assert not any(turboquant_c.takes(form_of(width, bits, 0)) for width in REFUSED)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codes": np.zeros((4, 2, 15), np.uint32)}, r"codes of shape \(4, 2, 15\) and dtype uint32"),
        ({"codes": np.zeros((4, 2, 16), np.int32)}, "codes of shape .* and dtype int32"),
        ({"codes": np.zeros((4, 32), np.uint32)}, r"codes of shape \(4, 32\)"),
        ({"scales": np.zeros((4, 3), np.uint16)}, "these take"),
        ({"scales": np.zeros(8, np.uint16)}, "these take"),
        ({"scales": np.zeros((4, 2), np.float16)}, "scales of shape .* and dtype float16"),
        ({"rows": np.zeros((2, 4, 127), np.float16)}, "rows of shape"),
        ({"rows": np.zeros((2, 5, 128), np.float16)}, "rows of shape"),
        ({"rows": np.zeros((2, 4, 128), np.float32)}, "rows of shape .* and dtype float32"),
        ({"rows": np.zeros((2, 4, 128), ">f2")}, "rows of shape"),
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"form": form_of(121, 4, 0)}, "width=121"),
        ({"levels": Levels(np.zeros((3, 128), np.float32), np.ones((3, 128), np.float32))}, "levels of 3 heads"),
        ({"levels": Levels(np.zeros((2, 64), np.float32), np.ones((2, 128), np.float32))}, "levels of shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict, said: str) -> None:
    given = {
        "codes": np.zeros((4, 2, 16), np.uint32),
        "scales": np.zeros((4, 2), np.uint16),
        "dtype": "float16",
        "form": form_of(128, 4, 0),
        "levels": None,
        "rows": np.zeros((2, 4, 128), np.float16),
    } | change
    with pytest.raises(ValueError, match=said):
        decode(**given)
    given["rows"] = given["rows"].swapaxes(0, 1)
    with pytest.raises(ValueError, match=said):
        encode(**given)


def test_outputs_that_cannot_be_written_are_refused() -> None:
    rows, codes, scales = (
        np.zeros((4, 4, 128), np.float16),
        np.zeros((4, 4, 16), np.uint32),
        np.zeros((4, 4), np.uint16),
    )
    for output in (rows, codes, scales):
        output.flags.writeable = False
        if output is rows:
            with pytest.raises(ValueError, match="read-only"):
                decode(codes, scales, "float16", FORM, None, rows)
        else:
            with pytest.raises(ValueError, match="read-only"):
                encode(rows, "float16", FORM, None, codes, scales)
        output.flags.writeable = True


def test_only_paths_of_this_machine_can_be_forced() -> None:
    with pytest.raises(ValueError, match="choose from portable"), turboquant_c.forced("vax"):
        pass
    spoken = set()
    for path in turboquant_c.paths():
        with turboquant_c.forced(path):
            spoken.add(turboquant_c.describe())
    assert len(spoken) == len(turboquant_c.paths())
    assert all(name.startswith("C, ") for name in spoken)


# --- threads

MANY = 40


def many_pieces() -> tuple[list[Encoding], list[Decoding], Array]:
    """Enough rows to be shared out, in pieces of different sizes, some of them of none."""
    rng = np.random.default_rng(1)
    tokens = [int(n) for n in rng.integers(0, 300, MANY)] + [0]
    rows = rng.standard_normal((4, sum(tokens), 128)).astype(np.float16)
    buffer = np.zeros_like(rows)
    to_encode, to_decode, at = [], [], 0
    for n in tokens:
        levels = levels_of(4, 128, rng) if n % 2 else None
        codes, scales = np.zeros((n, 4, 16), np.uint32), np.zeros((n, 4), np.uint16)
        here = slice(at, at + n)
        to_encode.append(Encoding(rows[:, here].swapaxes(0, 1), (codes, scales), levels))
        to_decode.append(Decoding((codes, scales), buffer[:, here], levels))
        at += n
    return to_encode, to_decode, buffer


def assert_many_right(to_encode: list[Encoding], to_decode: list[Decoding]) -> None:
    for ours, back in zip(to_encode, to_decode, strict=True):
        codes, scales = map(np.empty_like, ours.planes)
        rows = np.empty_like(back.rows)
        turboquant_numpy.encode(ours.rows, "float16", FORM, ours.levels, codes, scales)
        assert np.array_equal(codes, ours.planes[0])
        assert np.array_equal(scales, ours.planes[1])
        turboquant_numpy.decode(codes, scales, "float16", FORM, back.levels, rows)
        assert np.array_equal(rows, back.rows)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_pieces_by_several_threads(threads: int) -> None:
    set_threads(threads)
    to_encode, to_decode, _ = many_pieces()
    turboquant_c.encode_all(to_encode, "float16", FORM)
    turboquant_c.decode_all(to_decode, "float16", FORM)
    assert_many_right(to_encode, to_decode)
    turboquant_c.decode_all([], "float16", FORM)


def test_calls_from_many_threads_at_once() -> None:
    set_threads(3)
    works = [many_pieces() for _ in range(6)]

    def call(to_encode: list[Encoding], to_decode: list[Decoding]) -> None:
        turboquant_c.encode_all(to_encode, "float16", FORM)
        turboquant_c.decode_all(to_decode, "float16", FORM)

    callers = [threading.Thread(target=call, args=work[:2]) for work in works]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    for to_encode, to_decode, _ in works:
        assert_many_right(to_encode, to_decode)


def test_the_number_of_threads_is_checked() -> None:
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="threads="):
            set_threads(wrong)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    set_threads(3)
    to_encode, to_decode, buffer = many_pieces()
    turboquant_c.encode_all(to_encode, "float16", FORM)
    turboquant_c.decode_all(to_decode, "float16", FORM)
    wanted = buffer.copy()
    child = os.fork()
    if child == 0:
        buffer[...] = 0
        turboquant_c.decode_all(to_decode, "float16", FORM)
        os._exit(0 if np.array_equal(buffer, wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
