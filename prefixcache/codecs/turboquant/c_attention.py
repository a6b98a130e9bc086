"""Attention on coded rows in C, for the CPU: the decoded rows are never anywhere.

The kernel is `kernels/turboquant_attend.h`, in the library of `c_rows`, whose code paths and threads it shares. Here
every shape, dtype and stride is checked before a pointer goes there.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import threads
from prefixcache.codecs.c_library import address_of
from prefixcache.codecs.interchange import Array, borrow, bring_in, name_of
from prefixcache.codecs.turboquant import c_rows
from prefixcache.codecs.turboquant.c_rows import constants_of, path_number
from prefixcache.codecs.turboquant.format import AttentionCall, AttentionPart, CodedRows, Form

_ATTENTION = struct.Struct("=43qd")  # `struct attention` of kernels/turboquant.h: pointers and int64, then a double

MASK_DTYPES = (*c_rows.DTYPES, "bool")
LONGEST_VECTOR = 64  # bytes; where the kernel's own arrays begin

WORTH_A_THREAD = 100_000  # nanoseconds
PARTS_A_THREAD = 4  # so that no thread waits long for the last
LEAST_SPLIT = 512  # columns


# -- the library -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    library = c_rows.loaded().functions
    try:
        if library is None or library.turboquant_size_of_attention() != _ATTENTION.size:
            return None
    except AttributeError:  # built from older sources
        return None
    for function in (library.turboquant_attend, library.turboquant_attend_merge):
        function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
        function.restype = None
    for function in (library.turboquant_attention_scratch, library.turboquant_attention_state):
        function.argtypes = [ctypes.c_char_p, ctypes.c_int]
        function.restype = ctypes.c_int64
    return library


def available() -> bool:
    """Tell whether the kernel was built, with attention, and can be loaded here."""
    return _library() is not None


def takes(rows: CodedRows) -> bool:
    """Tell whether there is a kernel here, and it has rows of both forms."""
    return available() and c_rows.takes(rows.keys) and c_rows.takes(rows.values)


# -- what a call is given ----------------------------------------------------------------------------------------------


class _AttentionShape(NamedTuple):
    sequences: int
    heads: int
    group: int
    length: int
    tokens: int


def _sizes(rows: CodedRows, queries: mx.array) -> _AttentionShape:
    """Raise ValueError unless codes, scales and queries fit together."""
    codes, keys, values = rows.codes, constants_of(rows.keys), constants_of(rows.values)
    words = keys.words + values.words
    if codes.ndim != 4 or codes.shape[3] != words or codes.dtype != mx.uint32:
        raise _misfit("codes", codes, f"(sequences, heads, tokens, {words}) of uint32")
    sequences, heads, tokens, _ = codes.shape
    if rows.scales.shape != (sequences, heads, tokens, 2) or rows.scales.dtype != mx.uint16:
        raise _misfit("scales", rows.scales, f"{(sequences, heads, tokens, 2)} of uint16")
    if name_of(queries.dtype) not in c_rows.DTYPES:
        raise _misfit("queries", queries, f"one of {', '.join(c_rows.DTYPES)}")
    width = rows.keys.width
    if queries.ndim != 4 or queries.shape[0] != sequences or queries.shape[3] != width:
        raise _misfit("queries", queries, f"({sequences}, query heads, length, {width})")
    if heads == 0 or queries.shape[1] % heads:
        raise ValueError(f"{queries.shape[1]} query heads for keys of {heads} heads: give a multiple of those")
    return _AttentionShape(sequences, heads, queries.shape[1] // heads, queries.shape[2], tokens)


def _misfit(name: str, array: mx.array, wanted: str) -> ValueError:
    return ValueError(f"{name} of shape {tuple(array.shape)} and dtype {name_of(array.dtype)}: these take {wanted}")


def _borrowed(array: mx.array, alive: list[Any]) -> Array:
    """Return the array as it lies, or a copy of it whose last axis is contiguous; alive as long as `alive`."""
    view = borrow(array)
    if view.size and view.shape[-1] > 1 and view.strides[-1] != view.itemsize:
        view = np.ascontiguousarray(view)
    alive += (array, view)
    return view


def _levels(
    name: str, levels: mx.array | None, form: Form, sizes: _AttentionShape, alive: list[Any]
) -> tuple[int, int, int, int]:
    """Return where the mean and the spread are, and how far sequences and heads are apart."""
    if levels is None:
        plain = c_rows.plain_spread(form)
        alive.append(plain)
        return 0, plain.factor, 0, 0
    shape = (2, sizes.sequences, sizes.heads, form.width)
    if levels.shape not in (shape, (2, 1, *shape[2:])) or levels.dtype != mx.float32:
        raise _misfit(name, levels, f"{shape} of float32, or one sequence for all")
    view = _borrowed(levels, alive)
    of_sequence = view.strides[1] if levels.shape[1] > 1 else 0
    return address_of(view[0]), address_of(view[1]), of_sequence, view.strides[2]


def _mask(mask: mx.array | None, shape: tuple[int, ...], alive: list[Any]) -> tuple[int, int, int, int, int, int]:
    """Return where the mask is, its strides over (sequences, query heads, length, tokens), the number of its dtype."""
    if mask is None:
        return 0, 0, 0, 0, 0, 0
    if mask.dtype == mx.float64:
        mask = mask.astype(mx.float32)
    name = name_of(mask.dtype)
    fits = mask.ndim <= 4 and all(n in (1, full) for n, full in zip(mask.shape[::-1], shape[::-1], strict=False))
    if name not in MASK_DTYPES or not fits:
        raise _misfit("mask", mask, f"bool or floats that broadcast to {shape}")
    view = borrow(mask)
    alive += (mask, view)
    strides = [0] * (4 - mask.ndim)
    strides += [stride if n > 1 else 0 for n, stride in zip(view.shape, view.strides, strict=True)]
    a, b, c, d = strides
    return address_of(view), a, b, c, d, MASK_DTYPES.index(name)


def _bound(name: str, bound: mx.array | None, sequences: int, alive: list[Any]) -> int:
    if bound is None:
        return 0
    if bound.shape != (sequences,) or bound.dtype != mx.int32:
        raise _misfit(name, bound, f"({sequences},) of int32")
    return address_of(_borrowed(bound, alive))


# -- a call ------------------------------------------------------------------------------------------------------------


def attend(rows: CodedRows, call: AttentionCall) -> AttentionPart:
    """Return what attention to coded rows gives in float32, whatever `call.dtype`, and without `call.logits`.

    Queries may have any dtype that rows have; query head h attends to head h // group. Evaluates all that it is given; codes
    and scales are read where they lie. ValueError for arrays of other shapes or dtypes, and where `takes(rows)` is False.
    """
    queries = call.queries
    library = _library()
    if library is None:
        raise RuntimeError(f"TurboQuant's C kernel: {c_rows.describe()}, without attention; ask takes(rows)")
    sizes = _sizes(rows, queries)
    sequences, heads, group, length, tokens = sizes
    shape = (sequences, heads * group, length)
    alive: list[Any] = [rows]
    key_levels = _levels("key_levels", rows.key_levels, rows.keys, sizes, alive)
    value_levels = _levels("value_levels", rows.value_levels, rows.values, sizes, alive)
    masked = _mask(call.mask, (*shape, tokens), alive)
    first = _bound("first", rows.first, sequences, alive)
    last = _bound("last", rows.last, sequences, alive)

    out = np.zeros((*shape, rows.values.width), np.float32)
    top, total = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
    if out.size and tokens:
        asked, codes, scales = (_borrowed(array, alive) for array in (queries, rows.codes, rows.scales))
        splits, tokens_of_split = _splits(library, sizes)
        job = (
            constants_of(rows.keys).address,
            constants_of(rows.values).address,
            address_of(asked),
            *asked.strides[:3],
            c_rows.DTYPES.index(name_of(queries.dtype)),
            address_of(codes),
            *codes.strides[:3],
            address_of(scales),
            *scales.strides[:3],
            *key_levels,
            *value_levels,
            *masked,
            first,
            last,
            address_of(out),
            address_of(top),
            address_of(total),
        )
        rest = (sequences, heads, group, length, tokens, splits, tokens_of_split, call.causal, call.scale)
        _run(library, job, rest, sizes, rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        top += np.log(total)
    return AttentionPart(bring_in(out, "float32"), bring_in(top, "float32"))


def _blocks(library: ctypes.CDLL, sizes: _AttentionShape) -> int:
    return -(-sizes.group * sizes.length // library.turboquant_queries_of_block())


def _splits(library: ctypes.CDLL, sizes: _AttentionShape) -> tuple[int, int]:
    """Return how many ranges of columns there are, and how long they are: more than one where there is too little to share
    out."""
    number = threads.threads()
    parts = sizes.sequences * sizes.heads * _blocks(library, sizes)
    wanted = -(-PARTS_A_THREAD * number // parts) if number > 1 else 1
    splits = max(1, min(wanted, sizes.tokens // LEAST_SPLIT))
    tokens_of_split = -(-sizes.tokens // splits)
    return splits, tokens_of_split


def _run(
    library: ctypes.CDLL, job: tuple[int, ...], rest: tuple[Any, ...], sizes: _AttentionShape, rows: CodedRows
) -> None:
    path, splits = path_number(), rest[5]
    blocks = sizes.sequences * sizes.heads * _blocks(library, sizes)
    packed = _ATTENTION.pack(*job, 0, *rest)
    scratch = library.turboquant_attention_scratch(packed, path)
    if splits > 1:
        partial = _aligned(blocks * splits * library.turboquant_attention_state(packed, path))
        packed = _ATTENTION.pack(*job, address_of(partial), *rest)

    def attend(first: int, last: int) -> None:
        library.turboquant_attend(packed, first, last, _scratch(scratch), path)

    # A value of a row is unpacked once for each block and, for each query, multiplied twice: some 0.05 and 0.01 ns.
    queries = sizes.sequences * sizes.heads * sizes.group * sizes.length
    numbers = sizes.tokens * (rows.keys.width + rows.values.width)
    worth = int(numbers * (0.05 * blocks + 0.01 * queries)) // WORTH_A_THREAD
    threads.share_out(blocks * splits, 1, worth, attend)
    if splits > 1:
        library.turboquant_attend_merge(packed, 0, blocks, None, path)


# -- memory that the kernel works in -----------------------------------------------------------------------------------

_scratches = threading.local()


def _aligned(nbytes: int) -> Array:
    """Return bytes that begin where a vector may."""
    memory = np.empty(nbytes + LONGEST_VECTOR, np.uint8)
    begin = -address_of(memory) % LONGEST_VECTOR
    return memory[begin : begin + nbytes]


def _scratch(nbytes: int) -> int:
    """Return the address of this thread's working memory, which all of its calls share."""
    memory: Array | None = getattr(_scratches, "memory", None)
    if memory is None or memory.nbytes < nbytes:
        memory = _scratches.memory = _aligned(nbytes)
    return address_of(memory)
