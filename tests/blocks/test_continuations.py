"""How stored sequences go on: `blocks/continuations.py` beside a list of the sequences that were stored."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.blocks.continuations import continuations
from tests.blocks.planting import Planting, raw, runs

RUNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 100, 156, 256, 300])), min_size=1, max_size=4)
SEQUENCES = st.lists(RUNS.map(lambda pairs: runs(*pairs)), min_size=1, max_size=5)


def going_on(
    planting: Planting, tokens: list[int], start: int, limit: int = 1 << 20, most: int = 99
) -> set[tuple[int, ...]]:
    walk = planting.graph.walk(planting.tree, raw(tokens))
    return {tuple(np.frombuffer(found, "<i8").tolist()) for found in continuations(walk, start, limit, most)}


@given(SEQUENCES, st.data())
def test_all_stored_sequences_that_begin_so_are_given_and_no_other(sequences, data):
    planting = Planting()
    for sequence in sequences:
        planting.store(sequence)
    tokens = data.draw(st.sampled_from(sequences))
    start = data.draw(st.integers(0, len(tokens)))
    limit = data.draw(st.sampled_from([1, 99, 256, 1 << 20]))
    behind = {tuple(other[start:][:limit]) for other in sequences if other[:start] == tokens[:start]} - {()}
    found = going_on(planting, tokens, start, limit)
    assert found <= behind
    for going in behind:  # a sequence with which another one begins is a part of that
        assert any(other[: len(going)] == going for other in found)
    planting.graph.check_integrity()


def test_no_more_are_looked_at_than_asked_for():
    planting = Planting()
    for token in range(2, 22):
        planting.store(runs((1, 300), (token, 10)))
    assert len(going_on(planting, runs((1, 300)), 300, most=5)) == 5
    assert len(going_on(planting, runs((1, 300)), 300)) == 20
