"""TurboQuant in C, for the CPU: the codes and rows of `numpy_rows` bit for bit, at the speed of memory.

The kernel is `kernels/turboquant.c`, built with the package where there is a C compiler, and called through ctypes, which
lets other threads run meanwhile. Here every shape, dtype and stride is checked before a pointer goes there, and long work
is shared out among threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.c_library import Library, address_of, load
from prefixcache.codecs.interchange import FLOATS, Array, element
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.threads import SHARE, WORTH_A_THREAD, share_out
from prefixcache.codecs.turboquant.format import Form
from prefixcache.codecs.turboquant.rotation import table_of

PATHS = ("portable", "avx2", "avx512")  # in the order of the kernel's own numbers, slowest first
SPOKEN = {
    "portable": "NEON" if platform.machine() in ("arm64", "aarch64") else "portable",
    "avx2": "AVX2",
    "avx512": "AVX-512",
}
DTYPES = FLOATS  # in the order of the kernel's own numbers

LEAST_WIDTH, MOST_WIDTH, WIDTH_STEP = 32, 1024, 8
FACTORS = (2, 3, 5, 7)
MOST_BORDERS = 7
INT16_MAX = 32767

ROWS_AT_ONCE = 64  # a multiple of what any path takes at once


class _FormStruct(ctypes.Structure):
    """`struct form` of kernels/turboquant.h."""

    _fields_ = [
        ("width", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("words", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
        ("twos", ctypes.c_int32),
        ("odd_factors", ctypes.c_int32),
        ("odd_factor", ctypes.c_int32 * 8),
        ("narrow", ctypes.c_int32),
        ("first_narrow", ctypes.c_int32),
        ("shift", ctypes.c_int32),
        ("borders", ctypes.c_int32),
        ("per_length", ctypes.c_float),
        ("per_peak", ctypes.c_float),
        ("seven", ctypes.c_float * 49),
        ("border", ctypes.c_uint8 * (MOST_BORDERS + 1)),
        ("magnitude", ctypes.c_uint8 * 16),
        ("centroid", ctypes.c_int8 * 16),
        ("flip", ctypes.c_uint32 * (2 * MOST_WIDTH)),
    ]


# `struct job` and `struct measuring` of kernels/turboquant.h: pointers and int64 alone
_JOB, MEASURING = struct.Struct("=16q"), struct.Struct("=11q")


# -- the library -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def loaded() -> Library:
    sizes = (("form", ctypes.sizeof(_FormStruct)), ("job", _JOB.size), ("measuring", MEASURING.size))
    library = load("_turboquant", [(f"turboquant_size_of_{name}", size) for name, size in sizes])
    for name in ("encode", "decode", "measure") if library.functions is not None else ():
        function = getattr(library.functions, f"turboquant_{name}")
        function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
        function.restype = None
    return library


def available() -> bool:
    """Tell whether the kernel was built and can be loaded here."""
    return loaded().functions is not None


def describe() -> str:
    """Return "C, AVX2", "C, NEON", "C, portable", or why there is no kernel: "not built"."""
    library, reason = loaded()
    return reason if library is None else f"C, {SPOKEN[PATHS[path_number()]]}"


@lru_cache(maxsize=1)
def paths() -> tuple[str, ...]:
    """Return the code paths that this processor can run, slowest first; none where there is no kernel."""
    library = loaded().functions
    runnable = 0 if library is None else library.turboquant_paths()
    return tuple(path for i, path in enumerate(PATHS) if runnable >> i & 1)


_forced: str | None = None


@contextlib.contextmanager
def forced(path: str) -> Iterator[None]:
    """Have, for tests and measurements, every call of any thread take this one of `paths`."""
    global _forced
    if path not in paths():
        raise ValueError(f"path={path!r}: not one that this processor can run; choose from {', '.join(paths())}")
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before


def path_number() -> int:
    """Return the kernel's number of the path that calls take."""
    return PATHS.index(_forced or paths()[-1])


# -- forms and levels as the kernel reads them ---------------------------------------------------------------------------


def takes(form: Form) -> bool:
    """Tell whether the kernel has rows of this form: widths of 32 to 1024 that 8 divides and no prime above 7."""
    width, codebook = form.width, form.codebook
    return (
        LEAST_WIDTH <= width <= MOST_WIDTH
        and width % WIDTH_STEP == 0
        and set(form.rotation.factors) <= set(FACTORS)
        and (codebook.bits == 8 or len(codebook.borders) == codebook.half - 1 <= MOST_BORDERS)
    )


class _Constants(NamedTuple):
    address: int
    words: int
    struct: _FormStruct
    """What the address is of: it lives as long."""


class _Leveller(NamedTuple):
    """Where two float32 arrays (heads, width) are, and how far a head is from the next; `heads` 0: one for all heads."""

    heads: int
    mean: int
    factor: int
    of_head: int
    arrays: tuple[Array, ...]


_NOT_LEVELLED = _Leveller(0, 0, 0, 0, ())


@lru_cache(maxsize=64)
def constants_of(form: Form) -> _Constants:
    """Return `struct form` of a form. ValueError where `takes(form)` is False."""
    if not takes(form):
        raise ValueError(f"width={form.width}: not one that the C kernel takes; ask takes(form), and use numpy_rows")
    codebook, rotation = form.codebook, form.rotation
    odd = [factor for factor in rotation.factors if factor != 2]
    narrow = [
        rotation.integral and form.longest * rotation.gain ** (turn + 1) <= INT16_MAX for turn in range(rotation.rounds)
    ]
    constants = _FormStruct(
        width=form.width,
        bits=codebook.bits,
        words=words_of(form.width, codebook.bits),
        rounds=rotation.rounds,
        twos=rotation.factors.count(2),
        odd_factors=len(odd),
        odd_factor=tuple(odd),
        narrow=narrow[-1],
        first_narrow=narrow[0],
        shift=codebook.shift,
        per_length=float(form.per_length),
        per_peak=float(form.per_peak),
        seven=tuple(table_of(7).ravel().tolist()),
    )
    if codebook.bits < 8:
        constants.borders = len(codebook.borders)
        constants.border[: constants.borders] = [int(2 * border) for border in codebook.borders]
        constants.magnitude[: codebook.half] = codebook.magnitudes
        constants.centroid[: 2 * codebook.half] = form.centroids.tolist()
    flips = (rotation.signs < 0).astype(np.uint32) << np.uint32(31)
    for turn in range(rotation.rounds):
        constants.flip[turn * MOST_WIDTH : turn * MOST_WIDTH + form.width] = flips[turn].tolist()
    return _Constants(ctypes.addressof(constants), constants.words, constants)


@lru_cache(maxsize=64)
def plain_spread(form: Form) -> _Leveller:
    """Return the leveller for rows that aren't levelled."""
    spread = np.ascontiguousarray(form.spread(None), np.float32)
    return _Leveller(0, 0, address_of(spread), 0, (spread,))


_levellers: WeakKeyDictionary[Levels, dict[Form | int, _Leveller]] = WeakKeyDictionary()  # gone with their levels


def _encoding_levels(levels: Levels, width: int) -> _Leveller:
    levellers = _levellers.setdefault(levels, {})
    if width not in levellers:
        levellers[width] = _leveller(levels, levels.weight, width)
    return levellers[width]


def _decoding_levels(levels: Levels, form: Form) -> _Leveller:
    levellers = _levellers.setdefault(levels, {})
    if form not in levellers:
        levellers[form] = _leveller(levels, form.spread(levels), form.width)
    return levellers[form]


def _leveller(levels: Levels, factor: Array, width: int) -> _Leveller:
    heads = len(levels.mean)
    mean, factor = (np.ascontiguousarray(array, np.float32) for array in (levels.mean, factor))
    for array in (mean, factor):
        if array.shape != (heads, width):
            raise ValueError(f"levels of shape {array.shape} for rows {width} wide; they take ({heads}, {width})")
    return _Leveller(heads, address_of(mean), address_of(factor), 4 * width, (mean, factor))


# -- calls -----------------------------------------------------------------------------------------------------------------


def encode_all(batch: Sequence[Encoding], dtype: str, form: Form) -> None:
    """Encode rows, bf16 as uint16, into codes uint32 (tokens, heads, words) and scales uint16 (tokens, heads), each of the
    batch; in one call, because threads share out the whole of it.

    All arrays may be strided. ValueError for arrays of other shapes or dtypes, and where `takes(form)` is False.
    """
    work = _Work("turboquant_encode")
    for rows, (codes, scales), levels in batch:
        leveller = _NOT_LEVELLED if levels is None else _encoding_levels(levels, form.width)
        planes = work.target(codes), work.target(scales)
        work.add(form, leveller, dtype, work.source(rows), planes, token_axis=0)
    work.run()


def decode_all(batch: Sequence[Decoding], dtype: str, form: Form) -> None:
    """Decode what `encode_all` gives into rows (heads, tokens, width), each of the batch. ValueError as there."""
    work = _Work("turboquant_decode")
    for (codes, scales), rows, levels in batch:
        leveller = plain_spread(form) if levels is None else _decoding_levels(levels, form)
        planes = work.source(codes), work.source(scales)
        work.add(form, leveller, dtype, work.target(rows), planes, token_axis=1)
    work.run()


class _Work:
    """Pieces for one function of the library, checked. It keeps every array alive, even where the caller is interrupted."""

    def __init__(self, function: str) -> None:
        library, reason = loaded()
        if library is None:
            raise RuntimeError(f"TurboQuant's C kernel: {reason}; ask available(), and use numpy_rows")
        self._function = getattr(library, function)
        self._jobs: list[bytes] = []
        self._rows = self._nbytes = 0
        self._alive: list[Any] = []
        self._copies: list[tuple[Array, Array]] = []

    def source(self, array: Array) -> Array:
        """Return `array`, or a copy of it whose last axis is contiguous."""
        if array.ndim == 3 and array.strides[2] != array.itemsize:
            return np.ascontiguousarray(array)
        return array

    def target(self, array: Array) -> Array:
        """Return `array`, or an array whose last axis is contiguous, and which `run` will copy there."""
        if not array.flags.writeable:
            raise ValueError("an output is a read-only array; give one that can be written")
        if array.ndim == 3 and array.strides[2] != array.itemsize:
            apart = np.empty(array.shape, array.dtype)
            self._copies.append((array, apart))
            return apart
        return array

    def add(
        self, form: Form, levels: _Leveller, dtype: str, rows: Array, planes: tuple[Array, Array], *, token_axis: int
    ) -> None:
        """Add rows and their codes and scales. ValueError for arrays of other shapes or dtypes."""
        constants, (codes, scales) = constants_of(form), planes
        tokens, heads = scales.shape if scales.ndim == 2 else (-1, -1)
        shape = (tokens, heads, form.width) if token_axis == 0 else (heads, tokens, form.width)
        _check("rows", rows, _dtype_of(dtype), shape)
        _check("codes", codes, _UINT32, (tokens, heads, constants.words))
        _check("scales", scales, _UINT16, (tokens, heads))
        if levels.heads not in (0, heads):
            raise ValueError(f"levels of {levels.heads} heads for rows of {heads}: take `Levels.of` those heads")
        if tokens * heads == 0:
            return
        self._alive += (constants, levels, rows, codes, scales)
        self._rows += tokens * heads
        self._nbytes += rows.nbytes
        self._jobs.append(
            _JOB.pack(
                constants.address,
                address_of(rows),
                rows.strides[token_axis],
                rows.strides[1 - token_axis],
                address_of(codes),
                codes.strides[0],
                codes.strides[1],
                address_of(scales),
                scales.strides[0],
                scales.strides[1],
                levels.mean,
                levels.factor,
                levels.of_head,
                tokens,
                heads,
                DTYPES.index(dtype),
            )
        )

    def run(self) -> None:
        jobs, path = b"".join(self._jobs), path_number()
        share = -(-self._rows // max(1, self._nbytes // SHARE))
        share = -(-share // ROWS_AT_ONCE) * ROWS_AT_ONCE
        worth = self._nbytes // WORTH_A_THREAD
        share_out(self._rows, share, worth, lambda first, last: self._function(jobs, first, last, path))
        for target, copied in self._copies:
            target[...] = copied


_UINT16, _UINT32 = np.dtype(np.uint16), np.dtype(np.uint32)


def _dtype_of(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}: not one of TurboQuant's rows; use one of {', '.join(DTYPES)}")
    return element(name).numpy


def _check(name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} of shape {array.shape} and dtype {array.dtype}: these take {shape} of {dtype}")
