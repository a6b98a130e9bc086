"""Bytes between the host's memory and an NVIDIA GPU's, through pinned memory that the GPU reads and writes by itself.

MLX takes bytes into memory whose pages go to the GPU one fault at a time, at 2 GB/s where the bus has 50; decision 0041. Here
threads copy to and from a few buffers of pinned memory while others are on their way. Those to the GPU are read by a kernel;
those to the host are brought by the GPU's copy engine, which doesn't wait for what the GPU computes. Called by
`interchange`, from any thread.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from prefixcache.codecs.threads import share_out
from prefixcache.kernels import host_copy
from prefixcache.kernels.dialects import Dialect, dialect_here

log = logging.getLogger("prefixcache")

Array = npt.NDArray[Any]

BUFFER = 32 << 20  # bytes; the bus is busy for .7 ms, a launch takes .05
BUFFERS = 3  # one that threads fill, one that the GPU reads, one that is about to be free
PIECE = 1 << 20  # bytes, about, that a thread copies at a time
LEAST = 1 << 15  # bytes: fewer are not worth a launch
WORD = 4
PORTABLE, MAPPED = 1, 2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Driver:
    """The calls of CUDA's driver that are needed here. OSError for one that fails; all let go of the interpreter."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        mx.eval(mx.zeros(1) + 1)  # MLX makes its device's context this thread's
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))

    def pinned(self, nbytes: int) -> Array:
        """Return pinned memory (uint8), which stays until the process ends."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), PORTABLE | MAPPED)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value or 0))

    def stream(self) -> ctypes.c_void_p:
        """Return an order of work of its own, beside all of MLX's."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        return stream

    def begin_copy(self, memory: Array, address: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        """Begin to copy bytes from an address on the GPU into pinned memory."""
        self._call("cuCtxSetCurrent", self._context)
        host, there = ctypes.c_void_p(memory.ctypes.data), ctypes.c_uint64(address)
        self._call("cuMemcpyDtoHAsync_v2", host, there, ctypes.c_size_t(nbytes), stream)

    def wait(self, stream: ctypes.c_void_p) -> None:
        self._call("cuStreamSynchronize", stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise OSError(f"CUDA's driver: {name} gives error {error}")


class BufferToGpu(NamedTuple):
    """Pinned memory: its address for a kernel, and its bytes for NumPy."""

    address: mx.array
    memory: Array


class BufferFromGpu(NamedTuple):
    """Pinned memory, and the order of work that fills it."""

    memory: Array
    stream: Any


class Landing(NamedTuple):
    """Bytes on their way from the GPU into a buffer, and where they go from there."""

    buffer: BufferFromGpu
    pieces: Sequence[Array]


class ToGpu:
    """The buffers of this direction. For one caller at a time, which holds `lock`."""

    def __init__(self, dialect: Dialect, buffers: Sequence[BufferToGpu]):
        self.lock = threading.Lock()
        self._dialect = dialect
        self._buffers = deque(buffers)
        self._read: dict[int, mx.array] = {}  # by the buffer's id, what is there once the GPU has read it

    def copy(self, sources: Sequence[Array]) -> mx.array:
        copied = []
        for pieces in _batches(sources):
            buffer = self._buffers[0]
            self._buffers.rotate(-1)
            if (done := self._read.pop(id(buffer), None)) is not None:
                mx.eval(done)
            _copy(_places(buffer.memory, pieces), pieces)
            words = sum(piece.nbytes for piece in pieces) // WORD
            part, self._read[id(buffer)] = host_copy.to_gpu(self._dialect, buffer.address, words)
            mx.async_eval(part, self._read[id(buffer)])
            copied.append(part)
        return copied[0] if len(copied) == 1 else mx.concatenate(copied)


class FromGpu:
    """The buffers of this direction. For one caller at a time, which holds `lock`."""

    def __init__(self, driver: Driver, buffers: Sequence[BufferFromGpu]):
        self.lock = threading.Lock()
        self._driver = driver
        self._buffers = deque(buffers)

    def copy(self, address: int, targets: Sequence[Array]) -> None:
        flying: deque[Landing] = deque()
        for pieces in _batches(targets):
            if len(flying) == BUFFERS - 1:
                self._land(flying.popleft())
            buffer = self._buffers[0]
            self._buffers.rotate(-1)
            nbytes = sum(piece.nbytes for piece in pieces)
            self._driver.begin_copy(buffer.memory, address, nbytes, buffer.stream)
            flying.append(Landing(buffer, pieces))
            address += nbytes
        while flying:
            self._land(flying.popleft())

    def _land(self, landing: Landing) -> None:
        self._driver.wait(landing.buffer.stream)
        _copy(landing.pieces, _places(landing.buffer.memory, landing.pieces))


class Lanes(NamedTuple):
    up: ToGpu
    down: FromGpu


def takes(nbytes: int, sources: Sequence[Array]) -> bool:
    """Tell whether so many bytes of these arrays are worth it, and can go by words."""
    return nbytes >= LEAST and all(map(_goes_by_words, sources)) and _lanes() is not None


def _goes_by_words(array: Array) -> bool:
    """Tell whether an array can be cut into pieces of whole words that fit a buffer."""
    return array.nbytes % WORD == 0 and (array.flags.c_contiguous or WORD * array[:1].nbytes <= BUFFER)


def to_gpu(sources: Sequence[Array]) -> mx.array:
    """Return the bytes of arrays, each in C order, one after the other: uint32 (words,), in the GPU's own memory. Ask
    `takes` first.
    """
    lanes = _lanes()
    assert lanes is not None
    with lanes.up.lock:
        return lanes.up.copy(sources)


def addresses_of(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return arrays that lie in one piece each -> where they lie on the GPU, uint64 (1,) of each: lazy, and there once the
    arrays are. For `from_gpu`, which another thread calls while the GPU computes something else.
    """
    dialect = dialect_here()
    assert dialect is not None
    addresses: list[mx.array] = []
    for first in range(0, len(arrays), host_copy.MOST):
        addresses += host_copy.addresses(dialect, arrays[first : first + host_copy.MOST])
    return addresses


def from_gpu(array: mx.array, targets: Sequence[Array], address: mx.array | None) -> None:
    """Copy an array's bytes into these arrays, one after the other, each in C order. Ask `takes` first. `address`: what
    `addresses_of` has given of the array, which nobody else reads.
    """
    lanes = _lanes()
    assert lanes is not None
    if address is None:
        array = mx.contiguous(array)
        (address,) = addresses_of([array])
    there = int(np.asarray(address)[0])  # waits until the array is there, too
    with lanes.down.lock:
        lanes.down.copy(there, targets)


def _batches(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    """Cut arrays into pieces of whole words that threads share, and those into what fits a buffer."""
    batch: list[Array] = []
    nbytes = 0
    for array in arrays:
        if array.nbytes:
            cut = array.reshape(-1) if array.flags.c_contiguous else array  # along the first axis
            rows = max(WORD, PIECE * len(cut) // array.nbytes // WORD * WORD)
            for first in range(0, len(cut), rows):
                piece = cut[first : first + rows]
                if nbytes + piece.nbytes > BUFFER:
                    yield batch
                    batch, nbytes = [], 0
                batch.append(piece)
                nbytes += piece.nbytes
    yield batch


def _places(memory: Array, pieces: Sequence[Array]) -> list[Array]:
    """Return where pieces lie in a buffer, one after the other, as arrays of their shapes."""
    places, at = [], 0
    for piece in pieces:
        places.append(memory[at : at + piece.nbytes].view(piece.dtype).reshape(piece.shape))
        at += piece.nbytes
    return places


def _copy(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    def copy(first: int, last: int) -> None:
        for target, source in zip(targets[first:last], sources[first:last], strict=True):
            target[...] = source

    share_out(len(targets), 1, len(targets), copy)


def _lanes() -> Lanes | None:
    with _once:
        return _lanes_of(dialect_here())


_once = threading.Lock()


@lru_cache(maxsize=2)
def _lanes_of(dialect: Dialect | None) -> Lanes | None:
    """Return the buffers of both directions; None where MLX's device is no NVIDIA GPU, or pinned memory can't be had."""
    if dialect is None or dialect.name != "cuda":
        return None
    try:
        driver = Driver()
        up = ToGpu(dialect, [_buffer_to_gpu(driver.pinned(BUFFER)) for _ in range(BUFFERS)])
        down = FromGpu(driver, [BufferFromGpu(driver.pinned(BUFFER), driver.stream()) for _ in range(BUFFERS)])
    except (OSError, AttributeError, MemoryError) as reason:
        log.warning("no pinned memory (%s): copies to and from the GPU are MLX's, which are slow", reason)
        return None
    return Lanes(up, down)


def _buffer_to_gpu(memory: Array) -> BufferToGpu:
    address = mx.array(np.array([memory.ctypes.data], np.uint64))
    mx.eval(address)
    return BufferToGpu(address, memory)
