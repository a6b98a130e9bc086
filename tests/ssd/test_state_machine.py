"""Any sequence of writes, deletions, touches, reads, damage and restarts, against a dictionary."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.ssd import Cancelled, Corrupt, Entry, queue, reconcile
from prefixcache.ssd.index import connect
from tests.inside import directory_of, queue_of
from tests.waiting import until
from tools.faults.evidence import du

from .images import SPACE, Opened, full, make, path_of

OTHERS = [SPACE._replace(root=bytes([n]) * 32) for n in (1, 2)]
POOL = [
    *(make(n, size=400 * n) for n in range(8)),
    *(make(10 + n, parent=space.root, space=space) for n, space in enumerate(OTHERS)),
    *(make(20 + n, kind="window", size=3000) for n in range(4)),
    *(make(30 + n, kind="snapshot", count=n) for n in range(4)),
]
SPACES = {space.root: space for space in (SPACE, *OTHERS)}
LOSSES = {
    "unlinked": os.unlink,
    "replaced": lambda path: os.replace(shutil.copy2(path, f"{path}.new"), path),
    "cut": lambda path: os.truncate(path, 0),
}
which = st.integers(0, len(POOL) - 1)


class Tier(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.root = Path(self.folder) / "ssd"
        self.impatient = patch.multiple(queue, FIRST_DELAY=0.005, LONGEST_DELAY=0.05)  # after a write that failed
        self.impatient.start()
        self.model: dict[int, Entry] = {}
        self.ticks: dict[int, tuple[int, int]] = {}
        self.clock = 0
        self.open()

    def open(self):
        self.ssd = Opened(self.root, limit=450_000)

    def settle(self):
        """All is done. A write that failed has left the disk as it was."""
        until(lambda: self.ssd.flush(20))
        # A write that a newer one took the place of may be reported after that one has failed.
        last = {entry.address: error for entry, error in self.ssd.reports if not isinstance(error, Cancelled)}
        failed = {address for address, error in last.items() if error}
        there = {entry.address: entry for entry in self.ssd.entries()} if failed else {}
        for number in [n for n in self.model if POOL[n][0].address in failed]:
            found = there.get(POOL[number][0].address)
            if found is None:
                del self.model[number]
            else:
                self.ticks[number] = found.used, found.hits
        reported = {entry.address: entry for entry, error in self.ssd.reports if error is None}
        for number, entry in self.model.items():
            self.model[number] = reported.get(entry.address, entry)

    @rule(numbers=st.lists(which, max_size=6))
    def write(self, numbers):
        for number in numbers:
            entry, image = POOL[number]
            space = SPACES[entry.namespace]
            if self.ssd.write(entry._replace(used=self.clock), space, image):
                if number not in self.model:
                    self.ticks[number] = (self.clock, 0)
                else:
                    self.ticks[number] = (max(self.ticks[number][0], self.clock), self.ticks[number][1])
                self.model[number] = self.model.get(number, entry)

    @rule(numbers=st.lists(which, max_size=6))
    def delete(self, numbers):
        for number in numbers:
            entry = self.model.pop(number, None)
            self.ssd.delete([entry or POOL[number][0]])

    # What is drawn must not depend on the model: on a busy machine other writes fail beside a reader at each replay.
    @rule(number=which, hits=st.integers(0, 5))
    def touch(self, number, hits):
        if number not in self.model:
            return
        self.clock += 1
        entry = POOL[number][0]
        self.ssd.touch([(entry.kind, entry.key, self.clock, hits)])
        self.ticks[number] = (self.clock, self.ticks[number][1] + hits)

    @rule()
    def flush(self):
        self.settle()

    @rule(numbers=st.lists(which, min_size=1, max_size=6), rounds=st.sampled_from([1, 6]))
    def work_beside_a_reader(self, numbers, rounds):
        """Somebody reads the index, and does not end meanwhile."""
        with closing(connect(self.root / "index.db")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM image").fetchone()
            for _ in range(rounds):
                self.write(numbers)
                self.ssd.flush(0.05)
                assert du(self.root) <= self.ssd.limit
                self.delete(numbers)
            self.write(numbers)
            self.ssd.flush(0.05)
            event(f"beside a reader: {self.ssd.stats().last_error[:7] or 'all was written'}")

    @rule(numbers=st.lists(which, max_size=6))
    def delete_while_the_index_can_t_be_written(self, numbers):
        with patch.object(directory_of(self.ssd).index, "transaction", full):
            self.delete(numbers)
            self.ssd.flush(5)
        for number in numbers:
            assert not path_of(self.root, POOL[number][0]).exists()

    @rule(number=which)
    def read(self, number):
        self.settle()
        if number in self.model:
            assert self.ssd.holds(self.model[number], POOL[number][1])

    @rule(number=which)
    def damage(self, number):
        self.settle()
        if number not in self.model:
            return
        entry = self.model.pop(number)
        os.truncate(path_of(self.root, entry), entry.nbytes - 1)
        try:
            self.ssd.read(entry).result(10)
            raise AssertionError("it was believed")
        except Corrupt:
            pass

    @rule(name=st.sampled_from(["index.db", "index.db-wal", "index.db-shm"]), how=st.sampled_from([*LOSSES]))
    def lose_a_file_of_the_index(self, name, how):
        """While it is open. Shared memory that is cut ends the process: see test_lost_index_files."""
        self.settle()
        if (name, how) == ("index.db-shm", "cut"):
            return
        LOSSES[how](self.root / name)
        self.ssd.delete([make(99)[0]])  # a batch: with it the loss is noticed
        self.settle()
        there = {entry.address: entry for entry in self.ssd.entries()}
        assert there.keys() == {POOL[number][0].address for number in self.model}
        for number in self.model:  # what the index alone knew may be lost
            found = there[POOL[number][0].address]
            assert found.hits <= self.ticks[number][1]
            self.ticks[number] = found.used, found.hits

    @rule(damage=st.sampled_from(["", "index", "reconcile"]))
    def restart(self, damage):
        self.settle()
        self.ssd.close()
        if damage == "index":
            (self.root / "index.db").unlink()
            self.ticks = dict.fromkeys(self.ticks, (0, 0))
        elif damage == "reconcile":
            assert reconcile(self.root, deep=True).clean
        self.open()
        self.clock = max(self.clock, self.ssd.max_tick())
        there = {entry.address: entry for entry in self.ssd.entries()}
        assert there.keys() == {POOL[number][0].address for number in self.model}
        for number in self.model:
            found = there[POOL[number][0].address]
            assert (found.used, found.hits) == self.ticks[number]
            assert found.tokens == POOL[number][0].tokens
            self.model[number] = found

    @invariant()
    def within_the_limit(self):
        assert du(self.root) <= self.ssd.limit

    @invariant()
    def exact_when_idle(self):
        if queue_of(self.ssd).drained and queue_of(self.ssd).counters().queued_bytes == 0:
            self.settle()
            self.ssd.check_integrity()
            assert self.ssd.stats().files == len(self.model)

    def teardown(self):
        self.settle()
        self.ssd.check_integrity()
        self.ssd.close()
        self.impatient.stop()
        shutil.rmtree(self.folder)


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=30, stateful_step_count=20, suppress_health_check=list(HealthCheck))
