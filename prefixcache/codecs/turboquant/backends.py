"""Which code does TurboQuant's work here: a GPU kernel, composed MLX operations, the C kernel, or NumPy.

All give the same codes and the same rows, so the choice is one of speed alone; it is made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.c_library import warn_that_numpy_serves
from prefixcache.codecs.interchange import Array, on_cpu
from prefixcache.codecs.turboquant import c_rows, gpu_rows, mlx_rows, numpy_rows
from prefixcache.codecs.turboquant.format import Form
from prefixcache.codecs.turboquant.levelling import Levels


class Device(Protocol):
    """A back end for MLX's default device; see `mlx_rows`."""

    def encode(self, rows: mx.array, form: Form, levels: Levels | None, /) -> tuple[Array, Array]: ...

    def decode(
        self, codes: Array, scales: Array, capacity: int, dtype: str, form: Form, levels: Levels | None, /
    ) -> mx.array: ...


def encode_all(batch: Sequence[Encoding], dtype: str, form: Form) -> None:
    """On the CPU; in one call where the back end shares out a whole batch among threads."""
    if _in_c(form):
        c_rows.encode_all(batch, dtype, form)
    else:
        for rows, (codes, scales), levels in batch:
            numpy_rows.encode(rows, dtype, form, levels, codes, scales)


def decode_all(batch: Sequence[Decoding], dtype: str, form: Form) -> None:
    if _in_c(form):
        c_rows.decode_all(batch, dtype, form)
    else:
        for (codes, scales), rows, levels in batch:
            numpy_rows.decode(codes, scales, dtype, form, levels, rows)


def _in_c(form: Form) -> bool:
    if not c_rows.available():
        warn_that_numpy_serves(c_rows.describe())
        return False
    return c_rows.takes(form)


def device(form: Form) -> Device:
    return gpu_rows if gpu_rows.available() and gpu_rows.takes(form) else mlx_rows


def describe() -> dict[str, str]:
    """What runs here, for people: "device", where MLX's default device is a GPU, and "cpu"."""
    said = {"cpu": c_rows.describe() if c_rows.available() else f"NumPy (C kernel: {c_rows.describe()})"}
    if not on_cpu():
        gpu = gpu_rows.describe()
        said["device"] = gpu if gpu_rows.available() else f"composed MLX operations (kernel: {gpu})"
    return said
