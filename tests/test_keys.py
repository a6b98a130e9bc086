import hashlib
from array import array
from collections import UserList, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache import keys
from prefixcache.keys import (
    BLOCK,
    KEY_BYTES,
    MODEL_BYTES,
    TOKEN_BYTES,
    as_model,
    as_salt,
    as_tokens,
    canonical,
    chain,
    common_prefix,
    root_key,
)

ids = st.integers(-(2**63), 2**63 - 1)
BEYOND = "ids must fit in 64 bits, -2\\*\\*63 to 2\\*\\*63 - 1"

# -- tokens that are taken --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_the_common_prefix_ends_where_two_prompts_differ(a, b):
    n = common_prefix(np.array(a, np.int64), np.array(b, np.int64))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.lists(ids, max_size=50))
def test_every_form_of_the_same_tokens_gives_the_same_array(tokens):
    wanted = np.array(tokens, "<i8")
    forms = [
        tokens,
        tuple(tokens),
        UserList(tokens),
        deque(tokens),
        array("q", tokens),
        memoryview(array("q", tokens)),
        wanted,
        wanted.astype(">i8"),
        np.repeat(wanted, 2)[::2],
        wanted[::-1][::-1],
        list(wanted),
    ]
    for form in forms:
        made = as_tokens(form)
        assert made.dtype == np.dtype("<i8")
        assert made.ndim == 1
        assert made.flags.c_contiguous
        assert made.tolist() == tokens


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u4", ">u8"])
def test_arrays_of_every_integer_dtype_are_taken(dtype):
    limits = np.iinfo(dtype)
    tokens = [0, 1, 100, max(limits.min, -5), min(limits.max, 2**63 - 1)]
    for form in (np.array(tokens, dtype), memoryview(np.array(tokens, dtype)), list(np.array(tokens, dtype))):
        assert as_tokens(form).tolist() == tokens


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_arrays_of_the_standard_library_are_taken(code):
    assert as_tokens(array(code, [1, 2, 100])).tolist() == [1, 2, 100]
    assert as_tokens(memoryview(array(code, [1, 2, 100]))[::2]).tolist() == [1, 100]


def test_an_array_of_the_right_form_is_not_copied():
    tokens = np.arange(1000)
    assert np.shares_memory(as_tokens(tokens), tokens)
    assert not np.shares_memory(as_tokens(tokens[::2]), tokens)


@pytest.mark.parametrize("empty", [[], (), range(0), array("i"), np.array([], int), np.array([])])
def test_no_tokens_are_no_tokens(empty):
    made = as_tokens(empty)
    assert made.shape == (0,)
    assert made.dtype == np.dtype("<i8")


def test_negative_ids_and_ids_beyond_32_bits_are_taken():
    tokens = [-1, -(2**31) - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63)]
    assert as_tokens(tokens).tolist() == tokens


def test_numpy_scalars_and_ints_may_be_mixed():
    tokens = [1, np.int8(-2), np.uint16(3), np.int64(2**40), np.uint64(5)]
    assert as_tokens(tokens).tolist() == [1, -2, 3, 2**40, 5]


def test_a_range_is_taken():
    assert as_tokens(range(3, 30, 4)).tolist() == list(range(3, 30, 4))


# -- tokens that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1.0], "float"),
        ([1, 2.5], "float"),
        ([float("nan")], "float"),
        ([np.float32(2)], "float32"),
        ([True], "bool"),
        ([1, False], "bool"),
        ([np.bool_(True)], "bool"),
        ([None], "NoneType"),
        (["1"], "str"),
        ([b"1"], "bytes"),
        ([{}], "dict"),
        ([1j], "complex"),
        ([range(2)], "range"),
        (np.array([1.0]), "float64"),
        (np.array([1, 2], object), "object"),
        (np.array([True]), "bool"),
        (np.array(["1"]), "U1"),
        (np.array([1], "m8[s]"), "timedelta64"),
        (np.array([1j]), "complex128"),
        (array("d", [1.0]), "float64"),
        (memoryview(np.array([1.0])), "float64"),
    ],
)
def test_tokens_that_are_no_integers_are_a_type_error(tokens, named):
    with pytest.raises(TypeError, match=f"{named}.*: token ids are integers"):
        as_tokens(tokens)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ("123", "str"),
        (b"123", "bytes"),
        (bytearray(b"12"), "bytearray"),
        ({1, 2}, "set"),
        ({1: 2}, "dict"),
        (iter([1]), "list_iterator"),
        ((i for i in [1]), "generator"),
        (5, "int"),
        (None, "NoneType"),
        (1.5, "float"),
        (frozenset([1]), "frozenset"),
        (object(), "object"),
    ],
)
def test_what_is_no_sequence_is_a_type_error(tokens, named):
    with pytest.raises(TypeError, match=f"tokens of type {named}: pass a list, tuple or integer array of token ids"):
        as_tokens(tokens)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [([[1, 2]], "list"), ([1, (2,)], "tuple"), ([np.array([1])], "ndarray"), ([[1], [2, 3]], "list"), (([],), "list")],
)
def test_nested_tokens_are_a_value_error(tokens, named):
    with pytest.raises(ValueError, match=f"nested {named}: pass one flat sequence of token ids"):
        as_tokens(tokens)


@pytest.mark.parametrize("shape", [(), (1, 3), (3, 1), (0, 3), (1, 1, 1)])
@pytest.mark.parametrize("form", [np.asarray, memoryview])
def test_arrays_of_other_than_one_dimension_are_a_value_error(shape, form):
    if 0 in shape and form is not np.asarray:
        return
    with pytest.raises(ValueError, match=r"tokens of shape \(.*\): pass one sequence, an array of one dimension"):
        as_tokens(form(np.zeros(shape, np.int64)))


@pytest.mark.parametrize("bad", [2**63, 2**63 + 7, 2**64, 2**200, -(2**63) - 1, -(2**64)])
@pytest.mark.parametrize("others", [[], [1, 2], [-(2**63)], [2**63 - 1], [np.int64(-(2**63))]])
def test_ids_beyond_64_bits_are_a_value_error_that_names_the_id(bad, others):
    for tokens in ([bad, *others], (*others, bad)):
        with pytest.raises(ValueError, match=f"token id {bad}: {BEYOND}"):
            as_tokens(tokens)


def test_an_id_too_long_to_print_is_a_value_error():
    with pytest.raises(ValueError, match=f"token id of 33220 bits: {BEYOND}"):
        as_tokens([10**10000])


@pytest.mark.parametrize("bad", [2**63, 2**64 - 1])
def test_unsigned_ids_beyond_the_limit_are_never_wrapped(bad):
    whole = np.array([1, bad], np.uint64)
    for form in (whole, whole.astype(">u8"), list(whole), array("Q", [1, bad]), memoryview(whole)):
        with pytest.raises(ValueError, match=f"token id {bad}: {BEYOND}"):
            as_tokens(form)


# -- keys -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.lists(ids, max_size=8)), unique_by=repr, min_size=2))
def test_keys_of_different_blocks_differ(pairs):
    keys = [chain(parent, as_tokens(tokens).tobytes()) for parent, tokens in pairs]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}


@given(st.lists(ids, min_size=1, max_size=6), st.data())
def test_a_key_depends_on_every_token_before(tokens, data):
    def key(path):
        made = bytes(KEY_BYTES)
        for token in path:
            made = chain(made, as_tokens([token]).tobytes())
        return made

    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(ids.filter(lambda token: token != tokens[place]))
    assert key(tokens) == key(list(tokens))
    assert key(tokens) != key([*tokens[:place], other, *tokens[place + 1 :]])
    assert key(tokens) != key(tokens[:place] + tokens[place + 1 :]) or len(set(tokens)) < len(tokens)


def test_where_blocks_are_cut_is_part_of_the_key():
    whole = as_tokens(range(2 * BLOCK)).tobytes()
    cut = BLOCK * TOKEN_BYTES
    assert chain(chain(bytes(32), whole[:cut]), whole[cut:]) != chain(bytes(32), whole)


def test_keys_are_sha_256_of_the_parent_and_the_tokens():
    for tokens in ([], [1, 2, 3], range(BLOCK)):
        block = as_tokens(tokens).tobytes()
        assert chain(b"p" * 32, block) == hashlib.sha256(b"p" * 32 + block).digest()


def test_hashing_a_block_keeps_the_interpreters_lock(monkeypatch):
    """What hashlib is given in pieces of less than 2,048 bytes, it hashes without giving up the lock."""
    pieces = []

    class Recorded:
        def __init__(self, data):
            pieces.append(len(data))

        def update(self, data):
            pieces.append(len(data))

        def digest(self):
            return bytes(32)

    monkeypatch.setattr(keys.hashlib, "sha256", Recorded)
    chain(bytes(32), bytes(BLOCK * TOKEN_BYTES))
    assert sum(pieces) == 32 + BLOCK * TOKEN_BYTES
    assert max(pieces) < 2048


def test_keys_are_the_same_in_every_process_and_release():
    key = chain(bytes(32), as_tokens([1, 2, 3]).tobytes())
    assert key.hex() == "5a71aa9dad35ec6bea3a3484d02bdb852d7f5c95098a2991b3db87560fc05379"
    made = root_key("model", {"name": "raw"}, {"layers": [0]}, b"salt")
    assert made.hex() == "031094a4f1d74ebbabb57259f73d68e17be91386f3abdabf565a9cff19dae6ba"


# -- namespaces -------------------------------------------------------------------------------------------------------


def test_root_keys_differ_in_each_part():
    base = {"model": "m", "codec": {"name": "raw", "bits": 4}, "layout": {"layers": [0, 1]}, "salt": b"s"}
    others = [
        {"model": "M"},
        {"model": "m "},
        {"codec": {"name": "raw", "bits": 3}},
        {"codec": {"name": "raw"}},
        {"codec": {}},
        {"layout": {"layers": [1, 0]}},
        {"layout": {"layers": [0]}},
        {"layout": {}},
        {"salt": b""},
        {"salt": b"S"},
        {"salt": b"s\0"},
        {"salt": b"s" * 64},
        {"salt": b"s" * 65},
        {"salt": b"s" * 10**6},
    ]
    keys = [root_key(**base), *(root_key(**{**base, **other}) for other in others)]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}


@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), min_size=2, unique=True))
def test_models_and_salts_do_not_run_into_each_other(pairs):
    keys = [root_key(model, {}, {}, salt) for model, salt in pairs]
    assert len(set(keys)) == len(keys)


def test_a_root_key_does_not_depend_on_the_order_of_fields():
    assert root_key("m", {"a": 1, "b": 2}, {}, b"") == root_key("m", {"b": 2, "a": 1}, {}, b"")


def test_codec_and_layout_are_not_exchangeable():
    assert root_key("m", {"a": 1}, {}, b"") != root_key("m", {}, {"a": 1}, b"")


@given(st.binary(max_size=2000))
def test_salts_of_any_length_are_taken(salt):
    assert as_salt(salt) == as_salt(bytearray(salt)) == salt
    assert len(root_key("m", {}, {}, salt)) == KEY_BYTES


def test_a_changed_bytearray_does_not_change_the_salt():
    salt = bytearray(b"secret")
    taken = as_salt(salt)
    salt[0] = 0
    assert taken == b"secret"


@pytest.mark.parametrize(
    "salt", ["hunter2-the-secret", None, 5, ["hunter2-the-secret"], memoryview(b"hunter2-the-secret")]
)
def test_a_salt_of_another_type_is_refused_without_repeating_it(salt):
    with pytest.raises(TypeError, match=r"salt of type .*: pass bytes, such as tenant_id.encode\(\)") as caught:
        as_salt(salt)
    assert "hunter2" not in str(caught.value)


def test_nothing_of_the_salt_shows_in_what_is_made_of_it():
    salt = b"hunter2-the-secret"
    key = root_key("m", {}, {}, salt)
    for shown in (repr(key), key.hex(), str(key)):
        assert "hunter2" not in shown
        assert salt.hex() not in shown
    assert not any(salt[i : i + 4] in key for i in range(len(salt) - 3))


@given(st.text(min_size=1, max_size=100))
def test_a_models_name_is_taken_as_it_is(model):
    assert as_model(model) == model


@pytest.mark.parametrize("model", ["x" * MODEL_BYTES, "é" * (MODEL_BYTES // 2), "a b\n/../\0"])
def test_odd_names_of_models_are_taken(model):
    assert as_model(model) == model


@pytest.mark.parametrize(("model", "size"), [("", 0), ("x" * 10_000, 10_000), ("é" * 257, 514), ("x" * 513, 513)])
def test_a_models_name_of_a_bad_length_is_named_by_its_length(model, size):
    with pytest.raises(ValueError, match=f"model name of {size} bytes: give one of 1 to {MODEL_BYTES} bytes"):
        as_model(model)


@pytest.mark.parametrize("model", ["\ud800", "name \udfff of 40 characters and more, much more than that"])
def test_a_models_name_with_surrogates_is_refused(model):
    with pytest.raises(ValueError, match="holds characters that UTF-8 can't"):
        as_model(model)


@pytest.mark.parametrize("model", [None, b"m", 5, ["m"], ("m",)])
def test_a_models_name_of_another_type_is_refused(model):
    with pytest.raises(TypeError, match=f"model of type {type(model).__name__}: pass the model's name as a str"):
        as_model(model)


def test_canonical_text_is_one_text_for_equal_values():
    assert canonical({"b": [1, True, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,true,null]}'
    with pytest.raises(ValueError, match="JSON"):
        canonical({"a": float("nan")})
