"""Copies through buffers of pinned memory, with a GPU that is a copy by address: whatever the arrays' sizes, none is lost."""

from __future__ import annotations

import ctypes

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.codecs import interchange, pinned
from prefixcache.codecs.interchange import CopyOut, bring_in, bring_in_stacked, copy_into, copy_out, located
from prefixcache.kernels.dialects import DIALECTS

BUFFER, PIECE = 1 << 12, 1 << 8


def address_of(array: mx.array) -> int:
    return int(np.asarray(array)[0])


def to_gpu(dialect, address, words):
    memory = (ctypes.c_char * (4 * words)).from_address(address_of(address))
    return mx.array(np.frombuffer(memory, np.uint32)), mx.zeros((1,), mx.uint32)


def addresses(dialect, arrays):
    lying = [interchange.borrow(array) for array in arrays]
    assert all(array.flags.c_contiguous for array in lying)
    return [mx.array(np.array([array.ctypes.data], np.uint64)) for array in lying]


class Driver:
    """Copies when it is waited for, as late as a GPU may."""

    def __init__(self):
        self.begun = {}

    def pinned(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def stream(self):
        return object()

    def begin_copy(self, memory, address, nbytes, stream):
        assert stream not in self.begun, "a buffer is filled again before it was emptied"
        self.begun[stream] = memory.ctypes.data, address, nbytes

    def wait(self, stream):
        ctypes.memmove(*self.begun.pop(stream))


@pytest.fixture(scope="module", autouse=True)
def small_buffers():
    """Small buffers in the heap, for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BUFFER", BUFFER), ("PIECE", PIECE), ("LEAST", 1)):
            patch.setattr(pinned, name, value)
        patch.setattr(pinned, "Driver", Driver)
        patch.setattr(pinned, "dialect_here", lambda: DIALECTS["cuda"])
        patch.setattr(pinned.host_copy, "to_gpu", to_gpu)
        patch.setattr(pinned.host_copy, "addresses", addresses)
        lanes = pinned._lanes_of.__wrapped__(DIALECTS["cuda"])
        patch.setattr(pinned, "_lanes", lambda: lanes)
        yield


SHAPES = st.tuples(st.integers(0, 40), st.integers(1, 5), st.sampled_from([4, 8, 64]))


@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "uint8", "uint64"]),
    shapes=st.lists(SHAPES, min_size=1, max_size=9),
    strided=st.booleans(),
)
def test_arrays_leave_and_arrive_bit_for_bit(seed, dtype, shapes, strided):
    numpy_dtype, rng = interchange.element(dtype).numpy, np.random.default_rng(seed)
    arrays = []
    for shape in shapes:
        wide = rng.integers(0, 256, (shape[0], 2 * shape[1], shape[2] * numpy_dtype.itemsize), np.uint8).view(
            numpy_dtype
        )
        arrays.append(wide[:, : shape[1]] if strided else np.ascontiguousarray(wide[:, : shape[1]]))
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    there = bring_in(flat, dtype)
    assert there.shape == flat.shape
    assert copy_out(there).tobytes() == flat.tobytes()
    targets = [np.zeros_like(np.repeat(array, 2, axis=1))[:, : array.shape[1]] for array in arrays]
    copy_into(there, targets)
    assert [target.tobytes() for target in targets] == [array.tobytes() for array in arrays]

    turned = mx.array(rng.integers(0, 256, (3, 4, 8), np.uint8))
    copies = [CopyOut(mx.swapaxes(turned, 0, 1), [np.zeros((4, 3, 8), np.uint8)]), CopyOut(flat, [np.zeros_like(flat)])]
    for copy in located(copies):
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(pinned.host_copy, "addresses")  # nothing is launched where copies are made
            copy.run()
    assert np.array_equal(copies[0].targets[0], np.asarray(turned).swapaxes(0, 1))
    assert copies[1].targets[0].tobytes() == flat.tobytes()

    stacked = bring_in_stacked([arrays[0], arrays[0][::-1]])
    assert np.array_equal(np.asarray(stacked), np.stack([arrays[0], arrays[0][::-1]]).view(np.asarray(stacked).dtype))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [(1, 3 * BUFFER), (1, 2, BUFFER), (3, BUFFER), (32, 150), (52, 251), (7, 1, 4)])
def test_rows_of_any_length_arrive_whatever_fits_a_buffer(shape, strided):
    """Rows of few tokens may be long, as those of a state are; and a row may end within a word."""
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 256, (*shape[:-1], 2 * shape[-1]), np.uint8)
    array = wide[..., : shape[-1]] if strided else np.ascontiguousarray(wide[..., : shape[-1]])
    assert np.array_equal(np.asarray(bring_in(array, "uint8")), array)
    assert np.array_equal(np.asarray(bring_in_stacked([array, array[::-1]])), np.stack([array, array[::-1]]))
    target = np.zeros_like(wide)[..., : shape[-1]]
    copy_into(mx.array(np.ascontiguousarray(array)), [target])
    assert np.array_equal(target, array)


def test_a_slot_is_written_again_only_once_the_gpu_has_read_it(monkeypatch):
    waited, evaluate = [], mx.eval
    monkeypatch.setattr(pinned.mx, "eval", lambda *arrays: waited.append(1) or evaluate(*arrays))
    words = np.arange(10 * BUFFER // 4, dtype=np.uint32)
    assert np.array_equal(np.asarray(bring_in(words, "uint32")), words)
    assert len(waited) >= 10 - pinned.BUFFERS


def test_bytes_that_are_few_or_no_words_go_as_mlx_takes_them():
    assert not pinned.takes(6, [np.zeros(3, np.uint16)])
    odd = np.arange(3, dtype=np.uint16)
    assert np.array_equal(np.asarray(bring_in(odd, "uint16")), odd)
    copy_into(mx.array(odd), [target := np.zeros(3, np.uint16)])
    assert np.array_equal(target, odd)
