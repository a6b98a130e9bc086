"""Who waits for whom."""

import numpy as np

from prefixcache.keys import common_prefix
from prefixcache.servers import in_flight
from prefixcache.servers.in_flight import LEAST, PromptsUnderWay, PromptUnderWay, Space

SPACE = Space("model", b"")
SYSTEM = np.arange(3000)


def prompt(*tail):
    return np.array([*SYSTEM, *tail])


def begin(under_way, ids, boundaries):
    alive = [True]
    under_way.enter(PromptUnderWay(ids, SPACE, boundaries, lambda: alive[0]))
    return alive


def test_nobody_waits_when_nobody_computes():
    assert PromptsUnderWay().wait_for(prompt(1), SPACE, 0, sliceable=True) is None


def test_a_prompt_waits_for_the_system_prompt_that_another_computes():
    under_way = PromptsUnderWay()
    begin(under_way, prompt(1, 1), (3000, 3001))
    awaited = under_way.wait_for(prompt(2, 2), SPACE, 0, sliceable=True)
    assert not awaited.over()
    under_way.stored(SYSTEM[:2000], SPACE, 2000)
    assert not awaited.over()
    under_way.stored(prompt(9, 9), SPACE, 3002)  # another's store with the same 3000 tokens is as good
    assert not awaited.over()
    under_way.stored(SYSTEM, SPACE, 3000)
    assert awaited.over()


def test_the_same_prompt_again_waits_for_its_end():
    under_way = PromptsUnderWay()
    begin(under_way, prompt(1, 2, 3), (3000, 3002))
    awaited = under_way.wait_for(prompt(1, 2, 3), SPACE, 0, sliceable=True)
    under_way.stored(prompt(1), SPACE, 3001)
    assert not awaited.over()
    under_way.stored(prompt(1, 2), SPACE, 3002)
    assert awaited.over()


def test_models_and_salts_do_not_wait_for_each_other():
    under_way = PromptsUnderWay()
    begin(under_way, prompt(1), (3000,))
    for space in (Space("other", b""), Space("model", b"tenant")):
        assert under_way.wait_for(prompt(2), space, 0, sliceable=True) is None
    awaited = under_way.wait_for(prompt(2), SPACE, 0, sliceable=True)
    under_way.stored(SYSTEM, Space("model", b"tenant"), 3000)
    assert not awaited.over()


def test_nobody_waits_for_one_that_ended_or_was_given_up():
    under_way = PromptsUnderWay()
    alive = begin(under_way, prompt(1), (3000,))
    awaited = under_way.wait_for(prompt(2), SPACE, 0, sliceable=True)
    alive[0] = False
    assert awaited.over()
    assert under_way.wait_for(prompt(2), SPACE, 0, sliceable=True) is None


def test_nobody_waits_for_little_or_for_long():
    under_way = PromptsUnderWay()
    begin(under_way, np.arange(10_000), (9_999,))
    shares_little = np.array([*range(LEAST - 1), *[7] * 5000])
    shares_a_third = np.array([*range(3_000), *[7] * 5000])
    shares_half = np.array([*range(5_100), *[7] * 5000])
    waits = [under_way.wait_for(ids, SPACE, 0, sliceable=True) for ids in (shares_little, shares_a_third, shares_half)]
    assert [wait is not None for wait in waits] == [False, False, True]
    assert under_way.wait_for(shares_half, SPACE, 5_000, sliceable=True) is None  # it has nearly all of it


def test_a_model_that_is_not_sliceable_waits_for_boundaries_it_can_use():
    under_way = PromptsUnderWay()
    begin(under_way, prompt(1, 1, 1), (2000, 3002))
    other = prompt(2, 2, 2)
    waits = [under_way.wait_for(other, SPACE, 0, sliceable=sliceable) for sliceable in (False, True)]
    under_way.stored(SYSTEM[:2000], SPACE, 2000)
    assert [wait.over() for wait in waits] == [True, False]
    under_way.stored(prompt(1, 1), SPACE, 3002)
    assert waits[1].over()


def test_nobody_waits_in_vain_when_stores_find_no_room():
    under_way = PromptsUnderWay()
    begin(under_way, prompt(1), (3000,))
    awaited = under_way.wait_for(prompt(2), SPACE, 0, sliceable=True)
    under_way.stored(SYSTEM, SPACE, 0)
    assert awaited.over()
    begin(under_way, prompt(2), (3000,))
    assert under_way.wait_for(prompt(3), SPACE, 0, sliceable=True) is None


def test_a_wait_ends_by_itself(monkeypatch):
    monkeypatch.setattr(in_flight, "LONGEST", 0)
    under_way = PromptsUnderWay()
    begin(under_way, prompt(1), (3000,))
    assert under_way.wait_for(prompt(2), SPACE, 0, sliceable=True).over()


def test_what_a_prompt_shares_with_others_under_way_is_known():
    under_way, ids = PromptsUnderWay(), prompt(1, 2)
    under_way.enter(PromptUnderWay(ids, SPACE, [len(ids)], lambda: True))
    assert under_way.shared(ids, SPACE) == 0  # with itself
    assert under_way.shared(prompt(1, 2), Space("other", b"")) == 0
    for other in (prompt(9), prompt(1), prompt(1, 3), prompt(1, 2), prompt(1, 2, 3)):
        assert under_way.shared(other, SPACE) == min(common_prefix(other, ids), len(other) - 1)


def test_what_has_ended_shares_nothing():
    under_way = PromptsUnderWay()
    alive = begin(under_way, prompt(1), (3000,))
    assert under_way.shared(prompt(2), SPACE) == 3000
    alive[0] = False
    assert under_way.shared(prompt(2), SPACE) == 0
