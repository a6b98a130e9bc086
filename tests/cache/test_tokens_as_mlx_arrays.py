"""Token ids in an array of MLX are taken, or refused, as those of NumPy are (tests/test_keys.py)."""

import mlx.core as mx
import numpy as np
import pytest

from prefixcache.keys import as_tokens


@pytest.mark.parametrize("dtype", [mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64])
def test_every_integer_dtype_is_taken(dtype):
    for tokens in ([], [1, 2, 100]):
        taken = as_tokens(mx.array(tokens, dtype))
        assert taken.dtype == np.dtype("<i8")
        assert taken.tolist() == tokens


@pytest.mark.parametrize("tokens", [[-1, 2**32, 2**63 - 1, -(2**63)]])
def test_ids_of_64_bits_are_taken(tokens):
    assert as_tokens(mx.array(np.array(tokens))).tolist() == tokens


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([mx.array(1)], "array"),
        (mx.array([1.0]), "float"),
        (mx.array([1.0], mx.bfloat16), "float"),
        (mx.array([True]), "bool"),
    ],
)
def test_tokens_that_are_no_integers_are_a_type_error(tokens, named):
    with pytest.raises(TypeError, match=f"{named}.*: token ids are integers"):
        as_tokens(tokens)


@pytest.mark.parametrize("shape", [(), (1, 3), (3, 1), (1, 1, 1)])
def test_other_than_one_dimension_is_a_value_error(shape):
    with pytest.raises(ValueError, match=r"tokens of shape \(.*\): pass one sequence, an array of one dimension"):
        as_tokens(mx.zeros(shape, mx.int64))


@pytest.mark.parametrize("bad", [2**63, 2**64 - 1])
def test_unsigned_ids_beyond_the_limit_are_never_wrapped(bad):
    with pytest.raises(ValueError, match=f"token id {bad}: ids must fit in 64 bits"):
        as_tokens(mx.array(np.array([1, bad], np.uint64)))
