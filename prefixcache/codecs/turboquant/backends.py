"""Which code does TurboQuant's work here: a GPU kernel, the C kernel, or NumPy.

All give the same codes and the same rows, so the choice is one of speed alone; it is made here and nowhere else. Rows on
a GPU that have no kernel there are brought to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.c_library import warn_that_numpy_serves
from prefixcache.codecs.interchange import on_cpu
from prefixcache.codecs.turboquant import c_rows, gpu_rows, numpy_rows
from prefixcache.codecs.turboquant.format import Form


def encode_all(batch: Sequence[Encoding], dtype: str, form: Form) -> None:
    """Encode a batch on the CPU; in one call where the back end shares out a whole batch among threads."""
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


def on_gpu(form: Form) -> bool:
    """Tell whether MLX's default device is a GPU with a kernel for such rows: then `gpu_rows` codes them."""
    return not on_cpu() and gpu_rows.available() and gpu_rows.takes(form)


def describe() -> dict[str, str]:
    """Return what runs here, for people: "device", where MLX's default device is a GPU, and "cpu"."""
    described = {"cpu": c_rows.describe() if c_rows.available() else f"NumPy (C kernel: {c_rows.describe()})"}
    if not on_cpu():
        described["device"] = gpu_rows.describe()
    return described
