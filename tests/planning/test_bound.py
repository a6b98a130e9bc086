"""Belady's bound: the known numbers, brute force on tiny traces, and that no policy beats it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.planning.bound import Bound, best_at
from prefixcache.trace.reading import Request, Trace

TRACES = Path(__file__).parents[1] / "fixtures" / "traces"


def asked(*ids: int, call: str = "request") -> Request:
    return Request(0.0, len(ids) * 10, 0, ids, call)


@cache
def real(name: str) -> list[Request]:
    return list(Trace(TRACES / f"{name}.jsonl.gz"))


@st.composite
def traces(draw, most: int, calls: tuple[str, ...] = ("request",)) -> list[Request]:
    """Up to `most` prompts down a tree whose nodes are the ids."""
    children: dict[tuple[int, int], int] = {}
    requests = []
    for _ in range(draw(st.integers(0, most))):
        node, ids = -1, []
        for turn in draw(st.lists(st.integers(0, 2), max_size=4)):
            node = children.setdefault((node, turn), len(children))
            ids.append(node)
        requests.append(asked(*ids, call=draw(st.sampled_from(calls))))
    return requests


def best_possible(requests: list[Request], capacity: int) -> Bound:
    return best_at(requests, [capacity])[0]


def endless(requests: Iterable[Request], block: int) -> int:
    """Tokens that a cache that keeps all would hit: a prompt's leading ids that were stored before."""
    stored: set[int] = set()
    hit = 0
    for request in requests:
        if request.call != "store":
            hit += min(run(request.ids, stored) * block, request.tokens)
        if request.call != "fetch":
            stored.update(request.ids)
    return hit


def run(ids: tuple[int, ...], held: Collection[int]) -> int:
    """How many of the first ids are held, up to the first that isn't."""
    return next((at for at, one in enumerate(ids) if one not in held), len(ids))


def by_trying_everything(requests: list[Request], capacity: int) -> int:
    """The most hits of any cache: after each prompt it may keep any `capacity` blocks of what it held and what came."""

    @cache
    def most(at: int, held: frozenset[int]) -> int:
        if at == len(requests):
            return 0
        request = requests[at]
        hit = run(request.ids, held) if request.call != "store" else 0
        there = held | set(request.ids) if request.call != "fetch" else held
        kept = combinations(sorted(there), min(capacity, len(there)))
        return hit + max(most(at + 1, frozenset(some)) for some in kept)

    return most(0, frozenset())


def lru(requests: list[Request], capacity: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hit = 0
    for request in requests:
        if request.call != "store":
            hit += run(request.ids, held)
        for one in reversed(request.ids):  # the tail first: a parent outlives its children
            if one in held or request.call != "fetch":
                held[one] = None
                held.move_to_end(one)
        while len(held) > capacity:
            held.popitem(last=False)
    return hit


@pytest.mark.parametrize(
    ("name", "capacities", "rates"),
    [
        ("chat", (0, 1_000, 5_000, 10_000, 50_000), (0, 0.1907, 0.3412, 0.3664, 0.3664)),
        ("coding_agents", (300, 1_000, 3_000, 10_000), (0.7123, 0.9576, 0.9662, 0.9662)),
    ],
)
def test_the_known_numbers_of_the_real_traces(name, capacities, rates):
    bounds = best_at(real(name), capacities)
    assert [round(bound.hit_rate, 4) for bound in bounds] == list(rates)
    assert [bound.capacity for bound in bounds] == list(capacities)
    assert {bound.asked for bound in bounds} == {288_500 if name == "chat" else 806_322}


def test_an_endless_cache_hits_what_was_there_before():
    trace = real("chat")
    assert endless(trace, 512) == 54_098_411  # tokens; in blocks .3664
    assert endless((request._replace(tokens=len(request.ids)) for request in trace), 1) == 105_710
    assert best_possible(trace, 182_790).hit == 105_710


@given(requests=traces(5), capacity=st.integers(0, 4))
def test_the_bound_of_a_tiny_trace_is_what_trying_everything_finds(requests, capacity):
    assert best_possible(requests, capacity).hit == by_trying_everything(requests, capacity)


@given(requests=traces(5, ("request", "fetch", "store")), capacity=st.integers(0, 4))
def test_no_cache_beats_the_bound_of_recorded_calls(requests, capacity):
    assert best_possible(requests, capacity).hit >= by_trying_everything(requests, capacity)


@given(requests=traces(30, ("request", "request", "fetch", "store")))
def test_lru_never_beats_the_bound_and_more_room_never_hits_less(requests):
    sizes = range(0, 40, 3)
    bounds = best_at(requests, sizes)
    for bound in bounds:
        assert lru(requests, bound.capacity) <= bound.hit <= bound.asked
    assert [bound.hit for bound in bounds] == sorted(bound.hit for bound in bounds)


@given(requests=traces(20, ("request", "fetch", "store")))
def test_with_room_for_all_the_bound_is_an_endless_cache(requests):
    assert best_possible(requests, 10**9).hit * 10 == endless(requests, 10)


def test_blocks_that_are_never_asked_for_again_take_no_room():
    requests = [asked(1, 2), asked(3), asked(4), asked(5), asked(1, 2)]
    assert best_possible(requests, 2) == Bound(2, 2, 7)


def test_the_block_that_is_needed_last_leaves_and_of_one_prompt_the_deepest():
    requests = [asked(1, 2, 3), asked(7, 8), asked(7, 8), asked(1, 2, 3)]
    assert [bound.hit for bound in best_at(requests, range(6))] == [0, 1, 2, 3, 4, 5]


def test_what_was_fetched_and_never_stored_is_not_hit():
    assert best_possible([asked(1, 2, call="fetch")] * 3, 9) == Bound(9, 0, 6)
    assert endless([asked(1, 2, call="fetch")] * 3, 10) == 0


def test_a_store_is_not_asked_for():
    requests = [asked(1, 2, call="fetch"), asked(1, 2, call="store"), asked(1, 2, 3, call="fetch")]
    assert best_possible(requests, 9) == Bound(9, 2, 5)
    assert endless(requests, 10) == 20


def test_a_tail_counts_the_tokens_that_it_has():
    requests = [Request(0.0, 17, 0, (1, 2)), Request(0.0, 17, 0, (1, 2)), Request(0.0, 25, 0, (1, 3))]
    assert endless(requests, 10) == 17 + 10


def test_an_empty_trace_has_no_hits():
    assert best_possible([], 5) == Bound(5, 0, 0)
    assert best_possible([asked()], 5).hit_rate == 0
    assert endless([], 512) == 0


def test_a_capacity_below_zero_is_refused():
    with pytest.raises(ValueError, match="capacity=-1: give a number of blocks, 0 or more"):
        best_possible([], -1)
