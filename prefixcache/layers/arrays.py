"""Bytes in and out of MLX. The only module that turns MLX arrays into NumPy ones and back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from prefixcache.image import DTYPES

SAFETENSORS = {
    "bool": "BOOL", "bool_": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "complex64": "C64",
}  # fmt: skip


def dtype_name(array: mx.array) -> str:
    """MLX's name of an array's element type: "bfloat16"."""
    return str(array.dtype).rsplit(".", 1)[-1]


def host(array: mx.array) -> np.ndarray:
    """An evaluated array's own memory as NumPy sees it (bf16 as uint16), strides kept. Read it, copy it, never keep it."""
    if array.size == 0:
        return np.empty(array.shape, DTYPES[SAFETENSORS[dtype_name(array)]])
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
        mx.eval(array)
    return np.asarray(memoryview(array)) if array.ndim else np.array(array.item(), DTYPES[SAFETENSORS[dtype_name(array)]])


def device(array: np.ndarray, dtype: str) -> mx.array:
    """A new MLX array of this type with a copy of these elements (bf16 from uint16)."""
    if dtype == "bfloat16":
        return mx.array(array).view(mx.bfloat16)
    if dtype in ("bool", "bool_"):
        return mx.array(array.astype(np.bool_))
    return mx.array(array, getattr(mx, dtype))
