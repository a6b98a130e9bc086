"""The C kernel gives what NumPy gives, bit for bit, reads no word that isn't a row's, and writes nothing but its own."""

from __future__ import annotations

import numpy as np
import pytest
from coded import falling, first_of, laplacian, some_rows, tables_of, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.codecs import c_library
from prefixcache.codecs.threads import set_threads
from prefixcache.codecs.transform import backends, c_entropy, entropy
from prefixcache.codecs.transform.tables import Tables, class_of, quantised

needs_c = pytest.mark.skipif(not c_entropy.available(), reason=f"C kernel: {c_entropy.describe()}")


def numpy_encode(values: np.ndarray, classes: np.ndarray, tables: Tables) -> tuple[np.ndarray, ...]:
    steps = quantised(values)
    heads, rows = entropy.pack(steps, classes, tables)
    words = np.concatenate([np.zeros(0, np.uint16), *rows])
    return heads, words, entropy.decoded(steps, heads, classes, tables)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def within(array: np.ndarray, before: int, behind: int, fill: int = 0xA5) -> tuple[np.ndarray, np.ndarray]:
    """A copy of rows inside a larger array, and the whole of that."""
    rows, components = array.shape
    whole = np.full((rows + 2, before + components + behind), fill, np.uint8).astype(array.dtype)
    whole[1:-1, before : before + components] = array
    return whole[1:-1, before : before + components], whole


@needs_c
@settings(max_examples=100)
@given(before=st.integers(0, 3), behind=st.integers(0, 3), in_place=st.booleans(), **some_rows)
def test_heads_words_and_values_are_those_of_numpy(
    before, behind, in_place, kind, tables, rows, components, highest, seed
):
    tables, spreads = tables_of(tables), falling(components, highest, highest / 500)
    classes = class_of(spreads)
    values = values_of(kind, np.random.default_rng(seed), rows, spreads)
    wanted_heads, wanted_words, wanted = numpy_encode(values, classes, tables)

    given_values, _ = within(values, before, behind)
    decoded, whole = within(values if in_place else np.zeros_like(values), behind, before)
    heads, words = c_entropy.encode(decoded if in_place else given_values, classes, tables, decoded)
    assert_same_bits(heads, wanted_heads)
    assert_same_bits(words, wanted_words)
    assert_same_bits(np.ascontiguousarray(decoded), wanted)
    decoded[...] = 0xA5
    assert (whole == 0xA5).all()

    out, whole = within(np.zeros_like(values), before, behind)
    c_entropy.decode(heads, words, first_of(heads), classes, tables, out)
    assert_same_bits(np.ascontiguousarray(out), wanted)
    out[...] = 0xA5
    assert (whole == 0xA5).all()


@needs_c
@pytest.mark.parametrize("number", [1, 2, 5])
def test_threads_share_out_the_rows_and_the_words_keep_their_order(number: int):
    set_threads(number)
    spreads, tables = falling(900), tables_of("fitted")
    classes = class_of(spreads)
    values = laplacian(np.random.default_rng(0), 501, spreads)
    values[100:180] = 0
    values[300:310] = 1e9
    wanted_heads, wanted_words, wanted = numpy_encode(values, classes, tables)
    heads, words, decoded = backends.encode(values, classes, tables)
    assert_same_bits(heads, wanted_heads)
    assert_same_bits(words, wanted_words)
    assert_same_bits(decoded, wanted)
    assert_same_bits(backends.decode(heads, words, first_of(heads), classes, tables), wanted)
    shuffled = np.random.default_rng(1).permutation(501)
    out = np.empty((501, 901), np.float32)[:, 1:]
    c_entropy.decode(heads[shuffled], words, first_of(heads)[shuffled], classes, tables, out)
    assert_same_bits(np.ascontiguousarray(out), wanted[shuffled])


@needs_c
def test_a_row_of_many_words_is_kept_as_it_is():
    classes, tables = np.zeros(5000, np.int32), tables_of("guessed")
    values = np.zeros((9, 5000), np.float32)
    values[4], values[6] = 1e9, np.nan
    values[7, :2000] = 3
    wanted_heads, wanted_words, wanted = numpy_encode(values, classes, tables)
    heads, words, decoded = backends.encode(values, classes, tables)
    assert heads[4] == 0xFFFF
    assert_same_bits(heads, wanted_heads)
    assert_same_bits(words, wanted_words)
    assert_same_bits(decoded, wanted)


def test_quotients_are_exact_up_to_the_largest_state():
    """The kernel divides a state by multiplying it: of each frequency, at multiples of it up to where a word is due."""
    frequencies = np.arange(1, 4097, dtype=object)
    reciprocals = -(-(1 << 44) // frequencies)
    for whole in (1, 2, 3, 1 << 10, (1 << 19) + 1, (1 << 20) - 1):
        for state, quotient in ((frequencies * whole, whole), (frequencies * (whole + 1) - 1, whole)):
            assert (state * reciprocals < 1 << 64).all()
            assert ((state * reciprocals) >> 44 == quotient).all()


# -- foreign words -----------------------------------------------------------------------------------------------------


def outcome(decode, *arguments) -> bytes | str:
    try:
        return decode(*arguments).tobytes()
    except entropy.DamagedCodes:
        return "damaged"


def assert_judged_alike(heads, words, first, classes, tables) -> bytes | str:
    """Values, or "damaged"."""
    judged = outcome(backends.decode, heads, words, first, classes, tables)
    assert judged == outcome(entropy.unpack, heads, words, first, classes, tables)
    return judged


@needs_c
@settings(max_examples=100)
@given(
    heads=st.lists(st.integers(0, 0xFFFF) | st.integers(0x7000, 0x7008), max_size=9),
    words=st.binary(max_size=60),
    spread=st.integers(-3, 12),
    components=st.integers(0, 20),
    first=st.lists(st.integers(-3, 40) | st.sampled_from([-(2**63), 2**63 - 1, 2**32, 2**62]), min_size=9, max_size=9),
    tables=st.sampled_from(["guessed", "fitted", "odd"]),
)
def test_any_heads_words_and_offsets_are_damage_or_values(heads, words, first, spread, components, tables):
    classes = class_of(falling(components, 8, 0.1))
    words = np.frombuffer(words[: len(words) & ~1], np.uint16)
    heads = np.array(heads, np.uint16)
    assert_judged_alike(heads, words, np.array(first[: len(heads)], np.int64), classes, tables_of(tables))


@needs_c
@settings(max_examples=100)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 0xFFFF)), min_size=1, max_size=4),
    cut=st.integers(0, 30),
    odd=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_sound_words_with_changes_are_damage_or_values(changes, cut, odd, seed):
    spreads, tables = falling(50), tables_of("fitted")
    classes = class_of(spreads)
    heads, words, _ = numpy_encode(laplacian(np.random.default_rng(seed), 6, spreads), classes, tables)
    first = first_of(heads)
    assert assert_judged_alike(heads, words, first, classes, tables) != "damaged"
    words = words.copy()
    for at, flipped in changes:
        words[at % len(words)] ^= flipped
    words = words[: len(words) - cut]
    if odd:  # at an odd address, as in a file
        words = np.frombuffer(b"?" + words.tobytes(), np.uint16, len(words), 1)
    assert_judged_alike(heads, words, first, classes, tables)


@needs_c
def test_a_state_that_no_encoder_begins_with_is_damage_or_values():
    classes = class_of(falling(9))
    for words in ([0, 0], [0, 0, 0, 0], [0, 1, 2], [0xFFFF] * 6, [0, 0xFFFF, 0, 0], [1, 0], [1, 1]):
        heads = np.array([0x7000 + len(words)], np.uint16)
        array = np.array(words, np.uint16)
        assert_judged_alike(heads, array, np.zeros(1, np.int64), classes, tables_of("odd"))
    assert_judged_alike(
        np.array([0x7002], np.uint16), np.array([1, 0], np.uint16), np.zeros(1, np.int64), classes[:0], tables_of("odd")
    )


# -- what is refused ---------------------------------------------------------------------------------------------------


CLASSES_OF_4 = np.full(4, 20, np.int32)
VALUES = np.ones((3, 4), np.float32)


@needs_c
@pytest.mark.parametrize(
    ("values", "classes", "decoded", "name"),
    [
        (VALUES.astype(np.float64), CLASSES_OF_4, VALUES.copy(), "values"),
        (VALUES[0], CLASSES_OF_4, VALUES.copy(), "values"),
        (np.ones((3, 8), np.float32)[:, ::2], CLASSES_OF_4, VALUES.copy(), "values"),
        (VALUES, CLASSES_OF_4[:3], VALUES.copy(), "classes"),
        (VALUES, CLASSES_OF_4.astype(np.int64), VALUES.copy(), "classes"),
        (VALUES, CLASSES_OF_4 + 41, VALUES.copy(), "classes"),
        (VALUES, CLASSES_OF_4 - 21, VALUES.copy(), "classes"),
        (VALUES, CLASSES_OF_4, VALUES[:2].copy(), "decoded"),
        (VALUES, CLASSES_OF_4, np.broadcast_to(np.float32(1), (3, 4)), "decoded"),
        (np.ones((1, 65537), np.float32), np.zeros(65537, np.int32), np.ones((1, 65537), np.float32), "components"),
    ],
)
def test_other_arrays_are_refused(values, classes, decoded, name: str):
    with pytest.raises(ValueError, match=name):
        c_entropy.encode(values, classes, tables_of("guessed"), decoded)


@needs_c
@pytest.mark.parametrize("changed", ["heads", "words", "first", "classes", "values"])
def test_other_arrays_are_refused_by_a_decoder(changed: str):
    arrays = {
        "heads": np.zeros(3, np.uint16),
        "words": np.zeros(0, np.uint16),
        "first": np.zeros(3, np.int64),
        "classes": CLASSES_OF_4,
        "tables": tables_of("guessed"),
        "values": VALUES.copy(),
    }
    c_entropy.decode(**arrays)
    with pytest.raises(ValueError, match=changed):
        c_entropy.decode(**{**arrays, changed: arrays[changed].astype(np.int8)})


# -- the choice --------------------------------------------------------------------------------------------------------


def test_numpy_serves_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(c_entropy, "loaded", lambda: c_library.Library(None, "not built"))
    assert backends.describe() == "NumPy (C kernel: not built)"
    spreads, tables = falling(60), tables_of("fitted")
    classes = class_of(spreads)
    values = laplacian(np.random.default_rng(0), 7, spreads)
    heads, words, decoded = backends.encode(values, classes, tables)
    assert_same_bits(decoded, backends.decode(heads, words, first_of(heads), classes, tables))
    with pytest.raises(RuntimeError, match="not built"):
        c_entropy.encode(values, classes, tables, decoded)


@needs_c
def test_more_components_than_the_kernel_takes_are_numpys():
    classes, tables = np.zeros(65537, np.int32), tables_of("guessed")
    values = np.zeros((2, 65537), np.float32)
    values[0, 5] = -3
    heads, words, decoded = backends.encode(values, classes, tables)
    assert_same_bits(decoded, backends.decode(heads, words, first_of(heads), classes, tables))
    assert (decoded == values).all()
