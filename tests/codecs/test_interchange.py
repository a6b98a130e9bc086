"""Arrays between MLX and NumPy: the bits of every dtype, and no waiting for what has nothing to do with them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from roundtrip import MLX_DTYPES

from prefixcache.codecs.interchange import ELEMENTS, borrow, bring_in


@pytest.mark.parametrize("dtype", MLX_DTYPES)
def test_bits_go_out_and_come_back(dtype: str) -> None:
    kind = ELEMENTS[dtype]
    bits = np.random.default_rng(1).integers(0, 2, (3, 5, 4 * kind.numpy.itemsize), np.uint8)
    array = bring_in(bits.view(kind.numpy), dtype)
    assert array.dtype == kind.mlx
    assert borrow(array).dtype == kind.numpy
    assert borrow(array).tobytes() == bits.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_borrowed_is_a_read_only_view_also_of_a_transposed_array(dtype: str) -> None:
    array = mx.arange(24).reshape(2, 3, 4).astype(ELEMENTS[dtype].mlx)
    mx.eval(array)
    assert np.shares_memory(borrow(array), borrow(array))
    turned = mx.swapaxes(array, 0, 1)
    np.testing.assert_array_equal(borrow(turned), borrow(array).swapaxes(0, 1))
    with pytest.raises(ValueError, match="read-only"):
        borrow(array)[0, 0, 0] = 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_borrowing_what_is_evaluated_asks_mlx_for_nothing(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation would wait for all that its stream has under way: the next step of a batch."""
    array = mx.ones((2, 3, 4)).astype(ELEMENTS[dtype].mlx)
    mx.eval(array)
    for operation in ("view", "astype", "reshape", "flatten"):
        monkeypatch.delattr(mx.array, operation)
    assert borrow(array).shape == (2, 3, 4)
