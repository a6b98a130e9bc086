"""Rows of whole steps as words and back, in NumPy: what is packed is unpacked, each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
from coded import TABLES, falling, first_of, laplacian, some_rows, tables_of, values_of
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.codecs.transform import entropy
from prefixcache.codecs.transform.tables import (
    COST,
    ESCAPE,
    GAINS,
    MOST,
    class_of,
    gains_of,
    quantised,
    shifted,
    symbol_of,
)


def packed(steps, classes, tables):
    heads, rows = entropy.pack(steps, classes, tables)
    return heads, np.concatenate([np.zeros(0, np.uint16), *rows])


def one_row(count: int = 40):
    """A sound row: heads, words, first, classes, tables."""
    spreads, tables = falling(count), tables_of("fitted")
    classes = class_of(spreads)
    heads, words = packed(quantised(laplacian(np.random.default_rng(3), 1, spreads)), classes, tables)
    return heads, words, np.zeros(1, np.int64), classes, tables


@given(**some_rows)
def test_what_is_packed_is_unpacked(kind, tables, rows, components, highest, seed):
    tables, spreads = tables_of(tables), falling(components, highest, highest / 500)
    classes = class_of(spreads)
    steps = quantised(values_of(kind, np.random.default_rng(seed), rows, spreads))
    heads, words = packed(steps, classes, tables)
    values = entropy.unpack(heads, words, first_of(heads), classes, tables)
    assert values.dtype == np.float32
    assert (np.sign(values) == np.sign(steps)).all()
    large = np.abs(steps) > 2
    assert (values[large] == steps[large]).all()
    of_rows = shifted(classes, entropy.gain_of(heads))
    for magnitude in (1, 2):
        there = np.abs(steps) == magnitude
        assert (np.abs(values[there]) == tables.points[of_rows[there], magnitude - 1]).all()
    assert np.array_equal(values.view(np.uint32), entropy.decoded(steps, heads, classes, tables).view(np.uint32))


@given(order=st.lists(st.integers(0, 10), max_size=12), cut=st.integers(0, 11), **some_rows)
def test_rows_stand_alone(order, cut, kind, tables, rows, components, highest, seed):
    tables, spreads = tables_of(tables), falling(components, highest, highest / 500)
    classes = class_of(spreads)
    steps = quantised(values_of(kind, np.random.default_rng(seed), rows, spreads))
    heads, words = packed(steps, classes, tables)
    first = first_of(heads)
    values = entropy.unpack(heads, words, first, classes, tables)
    chosen = np.array([row for row in order if row < rows], np.int64)
    assert np.array_equal(entropy.unpack(heads[chosen], words, first[chosen], classes, tables), values[chosen])
    cut = min(cut, rows)
    end = first[cut] if cut < rows else len(words)
    assert np.array_equal(entropy.unpack(heads[:cut], words[:end], first[:cut], classes, tables), values[:cut])
    for row in range(rows):
        alone, its_words = packed(steps[row : row + 1], classes, tables)
        assert alone[0] == heads[row]
        assert np.array_equal(its_words, words[first[row] :][: len(its_words)])


@given(
    tables=st.sampled_from(["guessed", "fitted"]),
    components=st.integers(1, 600),
    highest=st.floats(0.1, 300),
    gain=st.floats(-1.5, 1.5),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_takes_hardly_more_than_its_tables_say(tables, components, highest, gain, seed):
    tables, spreads = tables_of(tables), falling(components, highest, highest / 500)
    classes = class_of(spreads)
    steps = quantised(laplacian(np.random.default_rng(seed), 4, spreads * 2**gain))
    heads, _ = packed(steps, classes, tables)
    of_rows = shifted(classes, gains_of(steps, classes, tables))
    said = tables.costs[of_rows, symbol_of(np.abs(steps))].sum(axis=1) / COST / 8
    assert (2 * entropy.words_of(heads) <= 1.03 * said + 5).all()


@pytest.mark.parametrize("kind", TABLES)
def test_each_magnitude_passes_through_each_kind_of_tables(kind: str):
    magnitudes = np.concatenate([np.arange(300), 2 ** np.arange(8, 16) - 1, [MOST]])
    steps = np.stack([magnitudes, -magnitudes]).astype(np.int32)
    classes = np.tile(np.arange(61, dtype=np.int32), 10)[: steps.shape[1]]
    heads, words = packed(steps, classes, tables_of(kind))
    values = entropy.unpack(heads, words, first_of(heads), classes, tables_of(kind))
    assert (values[:, 3:] == steps[:, 3:]).all()


def test_a_0_that_its_class_has_no_slots_for_is_an_escape():
    tables = tables_of("odd")
    unseen = np.flatnonzero(tables.frequencies[:, 0] == 0).astype(np.int32)
    assert len(unseen)
    steps = np.zeros((1, 1), np.int32).repeat(len(unseen) + 1, axis=1)
    steps[0, -1] = 9
    classes = np.append(unseen, np.int32(30))
    heads, words = packed(steps, classes, tables)
    assert (entropy.unpack(heads, words, first_of(heads), classes, tables) == steps).all()


def test_a_row_of_zeros_has_no_words():
    heads, words = packed(np.zeros((2, 9000), np.int32), np.full(9000, 60, np.int32), tables_of("odd"))
    assert heads.tolist() == [GAINS // 2 << 12] * 2
    assert not len(words)
    assert not entropy.unpack(heads, words, np.zeros(2, np.int64), np.full(9000, 60, np.int32), tables_of("odd")).any()


def test_a_row_that_takes_too_many_words_is_kept_as_it_is():
    steps = np.zeros((3, 5000), np.int32)
    steps[1] = MOST
    steps[2, 0] = 5
    classes, tables = np.zeros(5000, np.int32), tables_of("guessed")
    heads, words = packed(steps, classes, tables)
    assert heads[1] == 0xFFFF
    assert len(words) == entropy.words_of(heads[[2]])[0] > 0
    values = entropy.unpack(heads, words, first_of(heads), classes, tables)
    assert (values == steps * [[1], [0], [1]]).all()
    assert (entropy.decoded(steps, heads, classes, tables) == values).all()


@pytest.mark.parametrize(
    ("first", "count"), [(-1, None), (1, None), (2**62, None), (2**63 - 1, None), (-(2**63), None), (0, 1), (0, 4095)]
)
def test_words_that_are_not_where_a_head_has_them_are_damage(first: int, count: int | None):
    heads, words, _, classes, tables = one_row()
    if count is not None:
        heads = heads & 0xF000 | np.uint16(count)
    with pytest.raises(entropy.DamagedCodes, match="where"):
        entropy.unpack(heads, words, np.array([first]), classes, tables)


def test_a_row_cut_short_is_damage():
    heads, words, first, classes, tables = one_row()
    for count in range(2, len(words)):
        with pytest.raises(entropy.DamagedCodes, match=r"too few|last component"):
            entropy.unpack(heads & 0xF000 | np.uint16(count), words, first, classes, tables)


def test_words_beyond_the_last_component_are_damage():
    heads, words, first, classes, tables = one_row()
    with pytest.raises(entropy.DamagedCodes, match="last component"):
        entropy.unpack(heads + np.uint16(1), np.append(words, np.uint16(0)), first, classes, tables)
    with pytest.raises(entropy.DamagedCodes, match="last component"):
        entropy.unpack(heads, words, first, classes[:-1], tables)


def test_the_largest_magnitude_passes_as_an_escape():
    tables = tables_of("guessed")
    heads, words = packed(np.array([[-MOST]], np.int32), np.zeros(1, np.int32), tables)
    assert tables.frequencies[0, ESCAPE - 1] == 0
    assert entropy.unpack(heads, words, first_of(heads), np.zeros(1, np.int32), tables).tolist() == [[-MOST]]
