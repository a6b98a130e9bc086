"""What ranks agree on, with ranks that are threads: the deepest boundary of all, and what becomes of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.ranks import OutOfStep, Ranks


class Table:
    """Where the ranks of a group meet."""

    def __init__(self, size: int):
        self.size = size
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=10)

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class ThreadRanks(Ranks):
    """A rank whose collectives are a table in this process. `collectives`: how many it has made."""

    def __init__(self, table: Table, rank: int):
        self._table, self.rank, self.size, self.collectives = table, rank, table.size, 0

    def _meet(self, value: Any) -> list[Any]:
        self.collectives += 1
        return self._table.meet(self.rank, value)

    def least(self, *values: int) -> list[int]:
        return [min(column) for column in zip(*self._meet(values), strict=True)]

    def most(self, *values: int) -> list[int]:
        return [max(column) for column in zip(*self._meet(values), strict=True)]

    def each(self, value: int) -> list[int]:
        return self._meet(value)

    def from_first(self, value: Any) -> Any:
        return self._meet(value)[0]


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What each rank's work gives, or its error."""
    table = Table(size)

    def one(rank: int) -> Any:
        try:
            return work(ThreadRanks(table, rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


boundaries = st.lists(st.sets(st.integers(1, 40)), min_size=2, max_size=4)


@given(boundaries, st.integers(0, 40))
def test_the_agreed_depth_is_the_deepest_boundary_that_all_ranks_have(each: Sequence[set[int]], limit: int):
    def work(ranks: ThreadRanks) -> tuple[int, int]:
        own = each[ranks.rank] | {0}
        agreed = ranks.agree(lambda limits: [max(b for b in own if b <= limits[0])], [limit])[0]
        return agreed, ranks.collectives

    told = on_ranks(len(each), work)
    common = set.intersection(*each) | {0}
    assert {agreed for agreed, _ in told} == {max(b for b in common if b <= limit)}
    assert len({collectives for _, collectives in told}) == 1  # in step


@given(boundaries, st.integers(0, 40), st.integers(0, 40))
def test_several_questions_are_one_agreement(each: Sequence[set[int]], first: int, second: int):
    def work(ranks: ThreadRanks) -> list[int]:
        own = each[ranks.rank] | {0}
        return ranks.agree(lambda limits: [max(b for b in own if b <= limit) for limit in limits], [first, second])

    common = set.intersection(*each) | {0}
    expected = [max(b for b in common if b <= limit) for limit in (first, second)]
    assert all(told == expected for told in on_ranks(len(each), work))


def test_ranks_that_are_as_deep_need_one_collective():
    def work(ranks: ThreadRanks) -> int:
        ranks.agree(lambda limits: [512], [600])
        return ranks.collectives

    assert on_ranks(3, work) == [1, 1, 1]


def test_ranks_that_ask_different_questions_are_told_so():
    told = on_ranks(2, lambda ranks: ranks.agree(lambda limits: [5], [9], about=ranks.rank))
    assert all(isinstance(error, OutOfStep) for error in told)


def test_what_ranks_differ_in_is_named():
    told = on_ranks(
        3, lambda ranks: ranks.differing({"--codec": "raw", "--remote": ranks.rank == 1, "--pipeline": None})
    )
    assert told == [["--remote"]] * 3


def test_what_rank_0_fails_at_is_an_error_on_all():
    told = on_ranks(2, lambda ranks: ranks.done_by_first(lambda: str(1 // 0)))
    assert [str(error) for error in told] == ["integer division or modulo by zero"] * 2
    assert on_ranks(2, lambda ranks: ranks.done_by_first(lambda: ranks.rank)) == [0, 0]


def test_what_fails_on_one_rank_fails_on_all():
    def work(ranks: ThreadRanks) -> str:
        return ranks.done_by_all(lambda: "done" if ranks.rank != 1 else str(1 // 0), "divide")

    told = on_ranks(3, work)
    assert isinstance(told[1], ZeroDivisionError)
    assert [str(told[rank]) for rank in (0, 2)] == ["rank 1 could not divide"] * 2
    assert on_ranks(3, lambda ranks: ranks.done_by_all(lambda: ranks.rank, "count")) == [0, 1, 2]
