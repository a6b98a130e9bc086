"""Memory of images: used again while the budget has room for it, and given back to the system when it is asked for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache import PrefixCache, image_memory
from prefixcache.blocks.budget import Budget
from prefixcache.image_memory import LEAST, Pool
from tests.models import states
from tests.models.states import prompt
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the C library gives memory back")
ROOT = Path(__file__).parent.parent
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def pool_of_this_test(monkeypatch):
    """Images of tests before this one may still be alive."""
    monkeypatch.setattr(image_memory, "_pool", Pool())


def pool_of(limit: int) -> tuple[Pool, Budget]:
    pool, budget = Pool(), Budget(limit)
    pool.keep_within(budget)
    return pool, budget


def taken(pool: Pool, nbytes: int) -> np.ndarray:
    memory = pool.take(nbytes)
    assert memory is not None
    return memory


def test_memory_is_as_large_as_asked_for_and_writable():
    for nbytes in (1, PAGE, 100_001, 3_000_000):
        memory = taken(pool_of(0)[0], nbytes)
        assert type(memory) is np.ndarray
        assert (memory.dtype, memory.shape) == (np.uint8, (nbytes,))
        memory[:] = 7
        assert memory.ctypes.data % PAGE == 0


def test_what_an_image_leaves_is_used_again():
    pool, _ = pool_of(10_000_000)
    memory = taken(pool, 1_000_000)
    at = memory.ctypes.data
    del memory
    assert pool.kept_bytes >= 1_000_000
    assert taken(pool, 999_000).ctypes.data == at


def test_neighbours_that_are_free_are_one():
    pool, _ = pool_of(10_000_000)
    parts = [taken(pool, 10 * PAGE) for _ in range(5)]
    first = parts[0].ctypes.data
    for number in (3, 0, 4, 1, 2):
        parts[number] = None
    whole = taken(pool, 50 * PAGE)
    assert whole.ctypes.data == first
    assert pool.kept_bytes == 0


def flags_of(memory: np.ndarray) -> set[str]:
    """The flags of the mapping that this memory is in, as Linux names them: "hg" asks for huge pages, "nh" for none."""
    inside = False
    for name, *rest in map(str.split, Path("/proc/self/smaps").read_text().splitlines()):
        if not name.endswith(":"):
            first, last = (int(bound, 16) for bound in name.split("-"))
            inside = first <= memory.ctypes.data < last
        elif inside and name == "VmFlags:":
            return set(rest)
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a Linux without huge pages")
def test_a_region_has_huge_pages_until_some_of_it_was_given_back():
    pool, budget = pool_of(10_000_000)
    parts = [taken(pool, 1_000_000) for _ in range(5)]
    assert "hg" in flags_of(parts[0])
    del parts[2]
    assert "hg" in flags_of(parts[0]), "what is kept is used again as it is"
    budget.resize(4_000_000)
    del parts[1]
    assert "nh" in flags_of(parts[0]), "the system would fill the gap again"
    assert "hg" in flags_of(taken(pool, image_memory.REGION))


def test_the_memory_lives_as_long_as_any_view_of_it():
    pool, _ = pool_of(10_000_000)
    view = taken(pool, 1_000_000)[5:10].view("u1").reshape(5, 1)
    assert pool.kept_bytes == 0
    raw = memoryview(view)
    del view
    assert pool.kept_bytes == 0
    del raw
    assert pool.kept_bytes >= 1_000_000


def test_no_more_is_kept_than_the_budget_has_room_for():
    pool, budget = pool_of(4_000_000)
    memory = [taken(pool, 1_000_000) for _ in range(8)]
    del memory
    assert pool.kept_bytes <= 4_000_000 * 17 // 16
    budget.resize(1_000_000)
    del budget
    taken(pool, LEAST)
    assert pool.kept_bytes == 0  # the budget is gone


def test_what_is_given_back_is_nobody_s():
    pool, _ = pool_of(10_000_000)
    memory = taken(pool, 1_000_000)
    memory[:] = 1
    del memory
    pool.release_kept()
    assert pool.kept_bytes == 0
    assert not pool._regions
    assert taken(pool, 1_000_000).sum() == 0


def test_images_may_die_while_the_pool_is_at_work(monkeypatch, new_objects_only):
    """The collector runs at any moment, in the thread that has the lock."""
    pool, _ = pool_of(50_000_000)

    class Dies:
        def __init__(self) -> None:
            self.memory, self.itself = taken(pool, 200_000), self

    real = pool._clean_extent

    def collecting(nbytes: int) -> int | None:
        gc.collect()
        return real(nbytes)

    monkeypatch.setattr(pool, "_clean_extent", collecting)
    for _ in range(20):
        Dies()
        taken(pool, 300_000)
    gc.collect()
    assert not pool._left


def test_threads_are_given_different_memory():
    pool, _ = pool_of(20_000_000)
    wrong = []

    def work(number: int) -> None:
        draw = np.random.default_rng(number)
        mine: list[np.ndarray] = []
        for _ in range(400):
            mine.append(taken(pool, int(draw.integers(1, 300_000))))
            mine[-1][:] = number
            if len(mine) > 5:
                gone = mine.pop(int(draw.integers(len(mine))))
                wrong.extend([number] * bool((gone != number).any()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_fork_begins_anew():
    code = """
import os, sys
import numpy as np
from prefixcache import image_memory
mine = image_memory.take(1_000_000)
mine[:] = 5
image_memory._pool._lock.acquire()  # as a thread would have it
pid = os.fork()
if pid == 0:
    new = image_memory.take(1_000_000)
    new[:] = 6
    os._exit(int(not ((mine == 5).all() and (new == 6).all())))
image_memory._pool._lock.release()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def wide(tokens: list[int]) -> list[Any]:
    return states.sliceable(tokens, layers=8)  # images of 131 kB


def test_promotions_use_what_evictions_leave(tmp_path):
    """A RAM that is full takes no more of the process, whatever passes through it."""
    image_memory.release_kept()
    with PrefixCache(ram="4MB", ssd_dir=tmp_path, ssd="200MB", codec="raw", memory_reserve=0) as cache:
        for seed in range(20):
            cache.store(prompt(seed, 1024), wide(prompt(seed, 1024)), model="m")
            assert cache.flush(60)
        pool = image_memory._pool
        for seed in [*range(20), *range(20)]:
            assert cache.promote(prompt(seed, 1024), model="m").result(60) == 1024
            # What was evicted for it is let go by the threads that read a moment after its result is there.
            until(lambda: pool._used + pool.kept_bytes <= 4_000_000 * 17 // 16 + LEAST)
        cache.clear()
        assert image_memory.kept_bytes() == 0
        assert image_memory._pool._used == 0


def test_what_was_written_and_evicted_is_not_held_by_the_writer(tmp_path):
    with PrefixCache(ram="40MB", ssd_dir=tmp_path, ssd="200MB", codec="raw", memory_reserve=0) as cache:
        cache.store(prompt(1, 1024), wide(prompt(1, 1024)), model="m")
        assert cache.flush(60)
        cache.trim_to(0)
        until(lambda: image_memory._pool._used == 0)


class Images(RuleBasedStateMachine):
    """Images come and go, the budget changes: no two share a byte, and the account is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.budget = pool_of(2_000_000)
        self.images: list[tuple[int, np.ndarray]] = []
        self.number = 0

    @rule(nbytes=st.integers(1, 400_000))
    def come(self, nbytes):
        self.number = (self.number + 1) % 256
        memory = taken(self.pool, nbytes)
        memory[:] = self.number
        self.images.append((self.number, memory))

    @rule(which=st.integers(0, 50))
    def go(self, which):
        if self.images:
            del self.images[which % len(self.images)]

    @rule(limit=st.sampled_from([0, 100_000, 2_000_000]))
    def resize(self, limit):
        self.budget.resize(limit)

    @rule()
    def release_kept(self):
        self.pool.release_kept()
        assert self.pool.kept_bytes == 0

    @invariant()
    def nothing_is_shared_or_lost(self):
        for number, memory in self.images:
            assert (memory == number).all()
        pool = self.pool
        used = sum(-(-memory.nbytes // PAGE) * PAGE for _, memory in self.images)
        assert pool._used == used
        assert used + pool._kept.nbytes + pool._clean.nbytes == sum(map(len, pool._regions.values()))


Images.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestImages = Images.TestCase
