"""What the tests of the codecs share: widths worth testing, rows to code, the way from planes back to rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import ELEMENTS, borrow, on_cpu

WIDTHS = (32, 48, 64, 72, 80, 96, 100, 112, 120, 128, 160, 192, 256, 512, 576)
ODD_WIDTHS = (1, 2, 3, 7, 11, 31, 33, 42, 67, 77, 121)
BITS = (1, 2, 3, 4, 8)
FLOATS = ("float16", "bfloat16", "float32")
MLX_DTYPES = [dtype for dtype in ELEMENTS if dtype != "float64" or on_cpu()]  # MLX has no float64 on a GPU


def rows_of(values: np.ndarray, dtype: str) -> mx.array:
    return mx.array(np.asarray(values, np.float32)).astype(getattr(mx, dtype))


def normal_rows(n: int, width: int, dtype: str = "float32", seed: int = 0) -> mx.array:
    """N(0,1): (n, 1, width)."""
    return rows_of(np.random.default_rng(seed).standard_normal((n, 1, width)), dtype)


def decoded(codec: Any, planes: list[np.ndarray]) -> mx.array:
    """Planes as encoded -> rows (tokens, heads, width)."""
    return codec.decode(planes).swapaxes(0, 1)


def as_float64(rows: mx.array) -> np.ndarray:
    return np.array(rows.astype(mx.float32)).astype(np.float64)


def bits_of(rows: mx.array) -> np.ndarray:
    view = borrow(rows)
    return np.array(view, order="C").view(f"u{view.itemsize}") if view.dtype != np.bool_ else np.array(view)


def relative_error(rows: mx.array, back: mx.array) -> float:
    """Mean over the rows of |x - y|^2 / |x|^2."""
    x, y = as_float64(rows), as_float64(back)
    return float(np.mean(np.sum((x - y) ** 2, -1) / np.sum(x**2, -1)))
