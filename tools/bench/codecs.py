"""How fast rows are coded and come back, in GB/s of float16 rows, beside what MLX's own quantisation does on the same device.

First the CPU: the C kernel of TurboQuant, with NumPy's back end beside it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.threads import set_threads
from prefixcache.codecs.threads import threads as most_threads
from prefixcache.codecs.turboquant import c_rows as turboquant_c
from prefixcache.codecs.turboquant import numpy_rows as turboquant_numpy
from prefixcache.codecs.turboquant.format import Form, form_of
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from tools.bench import report
from tools.bench.report import Figure

HEADS, WIDTH, PIECE = 8, 128, 256  # a block of tokens is a piece
DTYPE = "float16"
PIECES_A_STREAM = 8
STREAMS = {"full": 64, "quick": 16, "tiny": 1}  # of 4 MB: 256 MB of rows, which no cache of a CPU holds
ROUNDS = {"full": 5, "quick": 5, "tiny": 1}
CASES = [(bits, levelled) for bits in (4, 3) for levelled in (True, False)]
MLX_BITS, MLX_GROUP = 4, 64


class Rows(NamedTuple):
    """Streams of float16 rows (heads, tokens, width), as live caches hold them."""

    streams: list[np.ndarray]
    levels: Levels

    @property
    def nbytes(self) -> int:
        return sum(stream.nbytes for stream in self.streams)


def drawn(scale: str) -> Rows:
    """Keys with an offset and a spread for each channel. Streams are alike: nothing here looks at more than a row."""
    rng = np.random.default_rng(7)
    offset, spread = rng.standard_normal((2, HEADS, 1, WIDTH))
    one = rng.standard_normal((HEADS, PIECES_A_STREAM * PIECE, WIDTH)) * (1 + spread**2) + 4 * offset
    stream = one.astype(np.float16)
    levels = measure_levels(stream.swapaxes(0, 1).astype(np.float32), True)
    return Rows([stream.copy() for _ in range(STREAMS[scale])], levels)


def _told(nbytes: int, times: list[float]) -> str:
    return f"{nbytes / statistics.median(times) / 1e9:.2f} GB/s"


# -- the CPU -----------------------------------------------------------------------------------------------------------

CPU_THREADS = 2
NUMPY_STREAMS = 4  # at most, because it takes its time
DECODE_BAR, ENCODE_BAR = 10, 3


def decode_cpu(scale: str) -> Iterator[Figure]:
    """From codes in pieces of 256 tokens to buffers that were there before; `mx.dequantize` allocates from MLX's pool."""
    rows = drawn(scale)
    whole = mx.array(np.concatenate(rows.streams).reshape(-1, WIDTH))
    with mx.stream(mx.cpu):
        coded = mx.quantize(whole, group_size=MLX_GROUP, bits=MLX_BITS)
        mx.eval(coded)
        del whole

        def theirs() -> None:
            mx.eval(mx.dequantize(*coded, group_size=MLX_GROUP, bits=MLX_BITS))

        yield from _cpu("decode", "mx.dequantize", DECODE_BAR, scale, rows, theirs, decoders)


def encode_cpu(scale: str) -> Iterator[Figure]:
    """From rows as they lie in a live cache to codes in pieces of 256 tokens."""
    rows = drawn(scale)
    whole = mx.array(np.concatenate(rows.streams).reshape(-1, WIDTH))
    with mx.stream(mx.cpu):

        def theirs() -> None:
            mx.eval(mx.quantize(whole, group_size=MLX_GROUP, bits=MLX_BITS))

        yield from _cpu("encode", "mx.quantize", ENCODE_BAR, scale, rows, theirs, encoders)


Works = tuple[Callable[[], None], Callable[[], None]]


def _cpu(
    what: str,
    reference: str,
    bar: int,
    scale: str,
    rows: Rows,
    theirs: Callable[[], None],
    works: Callable[[Rows, Form, Levels | None], Works],
) -> Iterator[Figure]:
    """`works` gives the same work twice: of all streams in C, and of the first few in NumPy."""
    some = min(NUMPY_STREAMS, len(rows.streams)) / len(rows.streams)
    for bits, levelled in CASES[: 1 if scale == "tiny" else None]:
        name = f"{what}, CPU, {bits} bits, {'levelled' if levelled else 'plain'}"
        if not turboquant_c.available():
            yield Figure(name, f"C kernel: {turboquant_c.describe()}", f">= {bar} x", reference, False)
            continue
        ours, numpy = works(rows, form_of(WIDTH, bits, 0), rows.levels if levelled else None)
        with threads(CPU_THREADS):
            for warm in (ours, theirs):
                warm()
            in_c, in_mlx = report.in_turns(
                ROUNDS[scale], lambda _, ours=ours: report.seconds(ours), lambda _: report.seconds(theirs)
            )
        in_numpy = [report.seconds(numpy) / some]
        ratio = report.median_ratio(in_mlx, in_c)
        yield Figure(
            name,
            f"{_told(rows.nbytes, in_c)}, {ratio:.1f} x ({turboquant_c.describe()}, {CPU_THREADS} threads)",
            f">= {bar} x {reference}",
            f"{reference} {MLX_BITS} bits: {_told(rows.nbytes, in_mlx)}; NumPy: {_told(rows.nbytes, in_numpy)}",
            ratio >= bar,
            {"bytes": rows.nbytes, "ours_s": in_c, "mlx_s": in_mlx, "numpy_s": in_numpy},
        )


def _pieces(form: Form, levels: Levels | None, buffers: list[np.ndarray]) -> list[list[Decoding]]:
    """For each stream, pieces whose codes and scales are still empty."""
    words = words_of(form.width, form.codebook.bits)
    return [
        [
            Decoding(
                (np.zeros((PIECE, HEADS, words), np.uint32), np.zeros((PIECE, HEADS), np.uint16)),
                buffer[:, at : at + PIECE],
                levels,
            )
            for at in range(0, buffer.shape[1], PIECE)
        ]
        for buffer in buffers
    ]


def _to_encode(piece: Decoding) -> Encoding:
    return Encoding(piece.rows.swapaxes(0, 1), piece.planes, piece.levels)


def encoders(rows: Rows, form: Form, levels: Levels | None) -> Works:
    streams = [[_to_encode(piece) for piece in stream] for stream in _pieces(form, levels, rows.streams)]

    def in_c() -> None:
        for stream in streams:
            turboquant_c.encode_all(stream, DTYPE, form)

    def in_numpy() -> None:
        for piece in (piece for stream in streams[:NUMPY_STREAMS] for piece in stream):
            turboquant_numpy.encode(piece.rows, DTYPE, form, levels, *piece.planes)

    return in_c, in_numpy


def decoders(rows: Rows, form: Form, levels: Levels | None) -> Works:
    streams = _pieces(form, levels, [np.zeros_like(stream) for stream in rows.streams])
    for buffer, stream in zip(rows.streams, streams, strict=True):
        sources = [piece._replace(rows=buffer[:, i * PIECE : (i + 1) * PIECE]) for i, piece in enumerate(stream)]
        turboquant_c.encode_all([_to_encode(source) for source in sources], DTYPE, form)

    def in_c() -> None:
        for stream in streams:
            turboquant_c.decode_all(stream, DTYPE, form)

    def in_numpy() -> None:
        for piece in (piece for stream in streams[:NUMPY_STREAMS] for piece in stream):
            codes, scales = piece.planes
            turboquant_numpy.decode(codes, scales, DTYPE, form, levels, piece.rows)

    return in_c, in_numpy


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = most_threads()
    set_threads(number)
    try:
        yield
    finally:
        set_threads(before)


FIGURES = {"decode-cpu": decode_cpu, "encode-cpu": encode_cpu}
