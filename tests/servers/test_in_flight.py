"""Who waits for whom."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.servers.in_flight import LEAST, Admission, Computing, common_prefix

SPACE = ("model", b"")
SYSTEM = np.arange(3000)


def prompt(*tail, system=SYSTEM):
    return np.array([*system, *tail])


def under_way(admission, ids, boundaries, space=SPACE, stored=0):
    alive = [True]
    one = Computing(ids, space, boundaries, lambda: alive[0], stored)
    admission.enter(one)
    return one, alive


def test_nobody_waits_when_nobody_computes():
    assert Admission().wait_for(prompt(1), SPACE, 0, sliceable=True) is None


def test_a_prompt_waits_for_the_system_prompt_that_another_computes():
    admission = Admission()
    under_way(admission, prompt(1, 1), (3000, 3001))
    awaited = admission.wait_for(prompt(2, 2), SPACE, 0, sliceable=True)
    assert awaited.boundary == 3000
    assert not awaited.over()
    admission.stored(SYSTEM[:2000], SPACE)
    assert not awaited.over()
    admission.stored(prompt(9, 9), SPACE)  # another's store with the same 3000 tokens is as good
    assert not awaited.over()
    admission.stored(SYSTEM, SPACE)
    assert awaited.over()


def test_the_same_prompt_again_waits_for_its_end():
    admission = Admission()
    under_way(admission, prompt(1, 2, 3), (3000, 3002))
    assert admission.wait_for(prompt(1, 2, 3), SPACE, 0, sliceable=True).boundary == 3002


def test_models_and_salts_do_not_wait_for_each_other():
    admission = Admission()
    under_way(admission, prompt(1), (3000,))
    for space in (("other", b""), ("model", b"tenant")):
        assert admission.wait_for(prompt(2), space, 0, sliceable=True) is None
    awaited = admission.wait_for(prompt(2), SPACE, 0, sliceable=True)
    admission.stored(SYSTEM, ("model", b"tenant"))
    assert not awaited.over()


def test_nobody_waits_for_one_that_ended_or_was_given_up():
    admission = Admission()
    _, alive = under_way(admission, prompt(1), (3000,))
    awaited = admission.wait_for(prompt(2), SPACE, 0, sliceable=True)
    alive[0] = False
    assert awaited.over()
    assert admission.wait_for(prompt(2), SPACE, 0, sliceable=True) is None


def test_nobody_waits_for_little_or_for_long():
    admission = Admission()
    under_way(admission, np.arange(10_000), (9_999,))
    shares_little = np.array([*range(LEAST - 1), *[7] * 5000])
    shares_a_third = np.array([*range(3_000), *[7] * 5000])
    shares_half = np.array([*range(5_100), *[7] * 5000])
    waits = [admission.wait_for(ids, SPACE, 0, sliceable=True) for ids in (shares_little, shares_a_third, shares_half)]
    assert [wait is not None for wait in waits] == [False, False, True]
    assert admission.wait_for(shares_half, SPACE, 5_000, sliceable=True) is None  # it has nearly all of it


def test_a_model_that_is_not_sliceable_waits_for_boundaries_it_can_use():
    admission = Admission()
    under_way(admission, prompt(1, 1, 1), (2000, 3002))
    other = prompt(2, 2, 2)
    assert admission.wait_for(other, SPACE, 0, sliceable=False).boundary == 2000
    assert admission.wait_for(other, SPACE, 0, sliceable=True).boundary == 3002


def test_nobody_waits_in_vain_when_stores_find_no_room():
    admission = Admission()
    under_way(admission, prompt(1), (3000,))
    awaited = admission.wait_for(prompt(2), SPACE, 0, sliceable=True)
    admission.stored(SYSTEM, SPACE, 0)
    assert awaited.over()
    under_way(admission, prompt(2), (3000,))
    assert admission.wait_for(prompt(3), SPACE, 0, sliceable=True) is None


def test_a_wait_ends_by_itself():
    admission = Admission(longest=0)
    under_way(admission, prompt(1), (3000,))
    assert admission.wait_for(prompt(2), SPACE, 0, sliceable=True).over()


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_common_prefix(a, b):
    n = common_prefix(np.array(a, np.int64), np.array(b, np.int64))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_what_a_prompt_shares_with_others_under_way_is_known():
    admission, ids = Admission(), prompt(1, 2)
    admission.enter(Computing(ids, SPACE, [len(ids)], lambda: True))
    assert admission.shared(ids, SPACE) == 0  # with itself
    assert admission.shared(prompt(1, 2), ("other", b"")) == 0
    for other in (prompt(9), prompt(1), prompt(1, 3), prompt(1, 2), prompt(1, 2, 3)):
        assert admission.shared(other, SPACE) == min(common_prefix(other, ids), len(other) - 1)
