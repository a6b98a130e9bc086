"""How the elements of an MLX array become NumPy's and come back, bit for bit, for every dtype that safetensors names.

NumPy has no bfloat16, so those travel as uint16; every other dtype is NumPy's own. Nothing here changes a value, and
nothing here knows rows or codes. The only module where arrays cross: called by codecs and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from prefixcache.codecs import pinned
from prefixcache.codecs.threads import SHARE, WORTH_A_THREAD, share_out

Array = npt.NDArray[Any]


class Element(NamedTuple):
    """One element type: safetensors' name of it, the NumPy dtype that carries its bits, MLX's dtype."""

    safetensors: str
    numpy: np.dtype[Any]
    mlx: mx.Dtype


ELEMENTS: dict[str, Element] = {
    "bool": Element("BOOL", np.dtype(np.bool_), mx.bool_),
    "uint8": Element("U8", np.dtype(np.uint8), mx.uint8),
    "uint16": Element("U16", np.dtype(np.uint16), mx.uint16),
    "uint32": Element("U32", np.dtype(np.uint32), mx.uint32),
    "uint64": Element("U64", np.dtype(np.uint64), mx.uint64),
    "int8": Element("I8", np.dtype(np.int8), mx.int8),
    "int16": Element("I16", np.dtype(np.int16), mx.int16),
    "int32": Element("I32", np.dtype(np.int32), mx.int32),
    "int64": Element("I64", np.dtype(np.int64), mx.int64),
    "float16": Element("F16", np.dtype(np.float16), mx.float16),
    "bfloat16": Element("BF16", np.dtype(np.uint16), mx.bfloat16),
    "float32": Element("F32", np.dtype(np.float32), mx.float32),
    "float64": Element("F64", np.dtype(np.float64), mx.float64),
    "complex64": Element("C64", np.dtype(np.complex64), mx.complex64),
}
FLOATS = ("float16", "bfloat16", "float32")

# Arrays cross as unsigned integers of the same size: NumPy refuses bfloat16, and mx.array narrows float64.
_CARRIERS: dict[int, tuple[mx.Dtype, np.dtype[Any]]] = {
    1: (mx.uint8, np.dtype(np.uint8)),
    2: (mx.uint16, np.dtype(np.uint16)),
    4: (mx.uint32, np.dtype(np.uint32)),
    8: (mx.uint64, np.dtype(np.uint64)),
}


def element(dtype: str) -> Element:
    """Return the element type that MLX calls `dtype`, such as "bfloat16". ValueError for one that safetensors can't name."""
    try:
        return ELEMENTS[dtype]
    except KeyError:
        raise ValueError(
            f"dtype={dtype!r}: not an element type that is kept; use one of {', '.join(ELEMENTS)}"
        ) from None


@cache
def name_of(dtype: mx.Dtype) -> str:
    """Return MLX's own name of a dtype without its module: "float16"."""
    return str(dtype).rpartition(".")[2]


def borrow(array: mx.array) -> Array:
    """Evaluate `array` and return a read-only NumPy view of it, same shape; good while `array` lives.

    The view may be strided: a transposed MLX array is not copied. Where `array` is evaluated already, MLX is asked for
    nothing: an operation would wait for all that its stream has under way, the next step of a batch.
    """
    kind = element(name_of(array.dtype))
    if array.size == 0:
        return np.zeros(array.shape, kind.numpy)
    view: Array
    if array.dtype != mx.bfloat16:
        view = np.asarray(array)
    elif (bits := memoryview(array)).c_contiguous:  # type: ignore[arg-type]
        view = np.frombuffer(bits.cast("B"), kind.numpy).reshape(array.shape)
    else:  # an operation of its own, and it waits for what is under way
        view = np.asarray(array.view(mx.uint16))
    view.flags.writeable = False
    return view


def copy_into(array: mx.array | Array, targets: Sequence[Array], address: mx.array | None = None) -> None:
    """Copy an array's elements, in C order, into arrays of its element type that take them one after the other. `address`:
    where it lies on a GPU, as far as that is known.
    """
    if isinstance(array, mx.array) and pinned.takes(array.nbytes, targets):
        pinned.from_gpu(array, targets, address)
        return
    elements = (borrow(array) if isinstance(array, mx.array) else array).reshape(-1)
    ends = list(accumulate(target.size for target in targets))

    def copy(first: int, last: int) -> None:
        for target, end in zip(targets[first:last], ends[first:last], strict=True):
            target[...] = elements[end - target.size : end].reshape(target.shape)

    share_out(len(targets), 1, elements.nbytes // WORTH_A_THREAD, copy)


class CopyOut(NamedTuple):
    """Encoded rows or levels, and the parts of an image's tensors that take them one after the other. `address`: where they
    lie on a GPU, as far as that is known.
    """

    array: mx.array | Array
    targets: list[Array]
    address: mx.array | None = None

    def run(self) -> None:
        """Copy, once they are encoded. On any thread."""
        copy_into(self.array, self.targets, self.address)


def located(copies: Sequence[CopyOut]) -> list[CopyOut]:
    """Return the copies with the addresses that a GPU will tell, of arrays in one piece. Another thread that makes them then
    launches nothing, which would wait for what is computed by then.
    """
    crossing = {i: copy.array for i, copy in enumerate(copies) if isinstance(copy.array, mx.array) and _by_engine(copy)}
    whole = [mx.contiguous(array) for array in crossing.values()]
    addresses = pinned.addresses_of(whole) if whole else []
    mx.async_eval(addresses)
    ready = list(copies)
    for i, array, address in zip(crossing, whole, addresses, strict=True):
        ready[i] = CopyOut(array, copies[i].targets, address)
    return ready


def _by_engine(copy: CopyOut) -> bool:
    return pinned.takes(copy.array.nbytes, copy.targets)


class CopiesUnderWay(NamedTuple):
    """Contiguous NumPy arrays, owned by the caller, that have what MLX's arrays have once `wait` was called."""

    arrays: list[Array]
    copies: Sequence[CopyOut]

    def wait(self) -> list[Array]:
        for copy in self.copies:
            copy.run()
        return self.arrays


def begin_copies(arrays: Sequence[mx.array]) -> CopiesUnderWay:
    """Launch `arrays`, and what copies them to the host. To wait for them is to wait for nothing that is launched later."""
    mx.async_eval(arrays)
    copies = [np.empty(array.shape, element(name_of(array.dtype)).numpy) for array in arrays]
    pairs = zip(arrays, copies, strict=True)
    return CopiesUnderWay(copies, located([CopyOut(array, [copy.reshape(-1)]) for array, copy in pairs]))


def copy_out(array: mx.array) -> Array:
    """Evaluate `array` and return a contiguous NumPy copy of it, owned by the caller."""
    return begin_copies([array]).wait()[0]


def bring_in(array: Array, dtype: str) -> mx.array:
    """Return a NumPy array of the bits of `dtype` as an MLX array: a copy, same shape."""
    kind = element(dtype)
    if array.size == 0:
        return mx.zeros(array.shape, kind.mlx)
    if pinned.takes(array.nbytes, [array]):
        return pinned.to_gpu([array]).view(kind.mlx).reshape(array.shape)
    _, carrier = _CARRIERS[kind.numpy.itemsize]
    return mx.array(np.asarray(array, order="C").view(carrier)).view(kind.mlx)


def bring_in_stacked(arrays: Sequence[Array]) -> mx.array:
    """Return arrays of one shape and element type as one, (arrays, *shape) of unsigned integers of that size: a copy."""
    shape = (len(arrays), *arrays[0].shape)
    carrier, carried = _CARRIERS[arrays[0].itemsize]
    nbytes = sum(array.nbytes for array in arrays)
    if not nbytes:
        return mx.zeros(shape, carrier)
    if pinned.takes(nbytes, arrays):
        return pinned.to_gpu(arrays).view(carrier).reshape(shape)
    stacked = np.empty(shape, arrays[0].dtype)

    def copy(first: int, last: int) -> None:
        for number in range(first, last):
            stacked[number] = arrays[number]

    share_out(len(arrays), max(1, SHARE * len(arrays) // nbytes), nbytes // WORTH_A_THREAD, copy)
    return mx.array(stacked.view(carried))


def writable(shape: tuple[int, ...], dtype: str) -> tuple[mx.array, Array]:
    """Return zeros in MLX's memory, an unsigned integer of `dtype`'s size each, and NumPy's view of them as the bits of
    `dtype`, to be written before MLX is given anything to do with the array. On the CPU.
    """
    kind = element(dtype)
    carrier, _ = _CARRIERS[kind.numpy.itemsize]
    array = mx.zeros(shape, carrier)
    if array.size == 0:
        return array, np.zeros(shape, kind.numpy)
    return array, np.asarray(array).view(kind.numpy)


def as_float32(rows: Array, dtype: str) -> Array:
    """Return rows of a float dtype, bf16 as uint16, as float32."""
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


def on_cpu() -> bool:
    """Tell whether MLX's default device is the CPU."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def device_memory() -> int | None:
    """Return the bytes of memory that MLX's device has of its own, as an NVIDIA GPU; None where it computes in RAM."""
    if not mx.cuda.is_available() or mx.default_device().type != mx.DeviceType.gpu:
        return None
    told = mx.device_info()
    return int(told.get("total_memory") or told.get("memory_size") or 0)


def check_rows(rows: mx.array, width: int, dtype: str) -> None:
    """Raise ValueError unless `rows` is (tokens, heads, `width`) of `dtype`."""
    if rows.ndim != 3 or rows.shape[-1] != width or name_of(rows.dtype) != dtype:
        raise ValueError(
            f"rows of shape {tuple(rows.shape)} and dtype {name_of(rows.dtype)}: "
            f"this codec takes (tokens, heads, {width}) of {dtype}; ask for a row codec of that stream"
        )
