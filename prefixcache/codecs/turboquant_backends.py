"""Which code does TurboQuant's work here: a GPU kernel, composed MLX operations, the C kernel, or NumPy.

All give the same codes and the same rows, so the choice is one of speed alone; it is made here and nowhere else.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from . import turboquant_c, turboquant_gpu, turboquant_mlx, turboquant_numpy
from .interchange import Array, on_cpu
from .levelling import Levels
from .turboquant_format import Form


class Host(Protocol):
    """A back end for arrays in the CPU's memory; see `turboquant_numpy`."""

    def encode(
        self, rows: Array, dtype: str, form: Form, levels: Levels | None, codes: Array, scales: Array, /
    ) -> None: ...

    def decode(
        self, codes: Array, scales: Array, dtype: str, form: Form, levels: Levels | None, rows: Array, /
    ) -> None: ...


class Device(Protocol):
    """A back end for MLX's default device; see `turboquant_mlx`."""

    def encode(self, rows: mx.array, form: Form, levels: Levels | None, /) -> tuple[Array, Array]: ...

    def decode(
        self, codes: Array, scales: Array, capacity: int, dtype: str, form: Form, levels: Levels | None, /
    ) -> mx.array: ...


def host(form: Form) -> Host:
    return turboquant_c if turboquant_c.available() and turboquant_c.takes(form) else turboquant_numpy


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
