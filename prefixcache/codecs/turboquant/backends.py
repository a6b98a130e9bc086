"""Which code does TurboQuant's work here: a GPU kernel, composed MLX operations, the C kernel, or NumPy.

All give the same codes and the same rows, so the choice is one of speed alone; it is made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.interchange import Array, on_cpu
from prefixcache.codecs.turboquant import c_rows as turboquant_c
from prefixcache.codecs.turboquant import gpu_rows as turboquant_gpu
from prefixcache.codecs.turboquant import mlx_rows as turboquant_mlx
from prefixcache.codecs.turboquant import numpy_rows as turboquant_numpy
from prefixcache.codecs.turboquant.format import Form
from prefixcache.codecs.turboquant.levelling import Levels


class Device(Protocol):
    """A back end for MLX's default device; see `turboquant_mlx`."""

    def encode(self, rows: mx.array, form: Form, levels: Levels | None, /) -> tuple[Array, Array]: ...

    def decode(
        self, codes: Array, scales: Array, capacity: int, dtype: str, form: Form, levels: Levels | None, /
    ) -> mx.array: ...


def encode_all(batch: Sequence[Encoding], dtype: str, form: Form) -> None:
    """On the CPU; in one call where the back end shares out a whole batch among threads."""
    if _in_c(form):
        turboquant_c.encode_all(batch, dtype, form)
    else:
        for rows, (codes, scales), levels in batch:
            turboquant_numpy.encode(rows, dtype, form, levels, codes, scales)


def decode_all(batch: Sequence[Decoding], dtype: str, form: Form) -> None:
    if _in_c(form):
        turboquant_c.decode_all(batch, dtype, form)
    else:
        for (codes, scales), rows, levels in batch:
            turboquant_numpy.decode(codes, scales, dtype, form, levels, rows)


def _in_c(form: Form) -> bool:
    return turboquant_c.available() and turboquant_c.takes(form)


def device(form: Form) -> Device:
    return turboquant_gpu if turboquant_gpu.available() and turboquant_gpu.takes(form) else turboquant_mlx


def describe() -> dict[str, str]:
    """What runs here, for people: "device", where MLX's default device is a GPU, and "cpu"."""
    said = {
        "cpu": turboquant_c.describe() if turboquant_c.available() else f"NumPy (C kernel: {turboquant_c.describe()})"
    }
    if not on_cpu():
        gpu = turboquant_gpu.describe()
        said["device"] = gpu if turboquant_gpu.available() else f"composed MLX operations (kernel: {gpu})"
    return said
