"""Crashes: whatever was acknowledged is there afterwards, bit for bit, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from prefixcache.ssd import queue, reconcile
from prefixcache.ssd.index import Index
from tools.faults.evidence import du

from .images import SPACE, Opened, chain, hold, make

# Every call that changes the disk, by the name under which the package calls it.
CALLS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "ftruncate")
PAIRS = [*chain(7, used=3), make(70, kind="window"), make(71, kind="snapshot", count=9)]


@pytest.fixture
def fast_root(quick: Path) -> Path:
    """Real files, without waiting for a real disk."""
    return quick / "ssd"


def recorded(monkeypatch, events):
    """The order in which names, bytes and rows reach the disk."""
    for name in ("fsync", "rename", "unlink"):
        original = getattr(os, name)

        def call(first, *rest, name=name, original=original, **more):
            if name == "fsync":
                target = os.readlink(f"/proc/self/fd/{first}")
            else:
                target = str(rest[0] if name == "rename" else first)
            result = original(first, *rest, **more)
            events.append((name, target))
            return result

        monkeypatch.setattr(os, name, call)
    original = Index.transaction

    @contextlib.contextmanager
    def transaction(self):
        with original(self):
            yield
        events.append(("commit", ""))

    monkeypatch.setattr(Index, "transaction", transaction)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names descriptors by /proc")
def test_an_entry_is_never_older_than_its_file(ssd, root, monkeypatch):
    event = hold(monkeypatch, ssd)
    for entry, image in chain(30):
        assert ssd.write(entry, SPACE, image)
    events: list[tuple[str, str]] = []
    recorded(monkeypatch, events)
    event.set()
    assert ssd.flush(60)
    first = events.index(("commit", ""))  # the batch that was held
    events = events[first + 1 :]
    commit = events.index(("commit", ""))
    renamed = [target for name, target in events if name == "rename"]
    assert len(renamed) == 30
    for target in renamed:
        at = events.index(("rename", target))
        folder = events.index(("fsync", os.path.dirname(target)), at)
        assert at < folder < commit
        assert any(name == "fsync" and "/tmp/" in path for name, path in events[:at])
    before = events[: events.index(("rename", renamed[0]))]
    assert sum(name == "fsync" and "/tmp/" in path for name, path in before) == 30
    assert [name for name, _ in events].count("commit") == 1  # one transaction for all


def test_a_deleted_row_is_gone_before_its_file(ssd, monkeypatch):
    stored = ssd.put(*chain(5))
    events: list[tuple[str, str]] = []
    recorded(monkeypatch, events)
    ssd.delete(stored)
    ssd.flush(60)
    names = [name for name, _ in events if name in ("commit", "unlink")]
    assert names == ["commit", *["unlink"] * 5]


def scenario(root: Path, say) -> None:
    """Writes, deletions and touches; says what has been acknowledged, and what it is about to delete."""
    ssd = Opened(root, limit=3 << 20)
    for entry, image in PAIRS:
        ssd.write(entry, SPACE, image)
    if ssd.flush(60):
        say("have", range(9))
    say("leaving", [0, 7])
    doomed = {PAIRS[0][0].key, PAIRS[7][0].key}
    ssd.delete([entry for entry, error in ssd.reports if error is None and entry.key in doomed])
    ssd.touch([("rows", PAIRS[1][0].key, 44, 1)])
    late = make(100)
    ssd.write(late[0], SPACE, late[1])
    if ssd.flush(60):
        say("gone", [0, 7])
    ssd.close()
    say("closed", [])


class Steps:
    """Dies after the Nth call that changes the disk; `torn`: every write writes the half of what it is given."""

    def __init__(self, at: int, torn: bool):
        self.at, self.torn, self.count = at, torn, 0

    def install(self) -> None:
        if self.torn:
            write = os.write
            os.write = lambda fd, data: write(fd, data[: max(1, len(data) // 2)])
        for name in CALLS:
            setattr(os, name, self.stepped(getattr(os, name)))
        execute = Index.transaction

        @contextlib.contextmanager
        def transaction(index):
            with execute(index):
                yield
                self.step()
            self.step()

        Index.transaction = transaction
        for name in ("checkpoint", "mark", "shrink"):
            setattr(Index, name, self.stepped(getattr(Index, name)))

    def stepped(self, original):
        def call(*args, **more):
            result = original(*args, **more)
            self.step()
            return result

        return call

    def step(self) -> None:
        self.count += 1
        if self.count == self.at:
            os._exit(3)


class ChildRun(NamedTuple):
    """What a child said before it ended, how many steps it took if it ended by itself, and whether it died at a step."""

    said: dict[str, list[int]]
    steps: int
    died: bool


def run_child(
    work: Callable[[Callable[[str, Iterable[int]], None]], None], at: int = 0, torn: bool = False
) -> ChildRun:
    """Run `work(say)` in a child that dies at step `at`; 0: at none."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(out)
            real_write = os.write
            steps = Steps(at, torn)
            steps.install()

            def say(word: str, numbers: Iterable[int]) -> None:
                real_write(into, f"{word} {' '.join(map(str, numbers))}\n".encode())

            work(say)
            say("steps", [steps.count])
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        lines = [line.split() for line in pipe.read().splitlines()]
    died = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    said = {word: list(map(int, numbers)) for word, *numbers in lines}
    return ChildRun(said, said.get("steps", [0])[0], died)


def check_after(root: Path, words: dict[str, list[int]]) -> None:
    ssd = Opened(root, limit=3 << 20)
    try:
        ssd.check_integrity()
        assert ssd.stats().disk == du(root)
        assert list((root / "tmp").iterdir()) == []
        there = {entry.address: entry for entry in ssd.entries()}
        for number in set(words.get("have", [])) - set(words.get("leaving", [])):
            entry, image = PAIRS[number]
            assert ssd.holds(there[entry.address], image)
        for number in words.get("gone", []):
            assert PAIRS[number][0].address not in there
        for entry in there.values():
            assert ssd.read(entry).result(60).checksum == entry.checksum
        for entry, image in PAIRS:
            assert ssd.write(entry, SPACE, image)
        assert ssd.flush(60)
        ssd.check_integrity()
    finally:
        ssd.close()
    assert reconcile(root, dry_run=True, deep=True).clean


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_at_any_step_loses_nothing_that_was_acknowledged(fast_root, torn):
    whole = run_child(partial(scenario, fast_root.with_name("whole")), 0, torn)
    total = whole.steps
    assert total > 60
    assert not whole.died
    for at in range(1, total + 1, 9):  # tests/crash has every one, by a library before the C library's calls
        root = fast_root.with_name(f"ssd{at}")
        run = run_child(partial(scenario, root), at, torn)
        assert run.died or 0 < run.steps < at, (
            at
        )  # how the writer batches, and so the number of steps, is a matter of timing
        check_after(root, run.said)


def test_a_crash_while_recovering_is_recovered_from(fast_root):
    """Kill in mid-write, then at steps of the next opening, again and again on one directory."""
    killed = run_child(partial(scenario, fast_root), 75, True)
    for at in (3, 8, 12, 16, 20, 24):
        run_child(partial(scenario, fast_root), at)
    check_after(fast_root, killed.said)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_all_that_was_acknowledged_is_there(fast_root, seed):
    chance = random.Random(seed)
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(out)
            ssd = Opened(fast_root, limit=40 << 20)
            for number in range(10_000):
                entry, image = make(number, used=number + 1)
                if not ssd.write(entry, SPACE, image):
                    break
                if number % 5 == 4 and ssd.flush(60):
                    os.write(into, b"%d\n" % number)
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        first = pipe.readline()
        time.sleep(chance.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        acknowledged = [int(line) for line in (first + pipe.read()).splitlines()][-1]
    os.waitpid(pid, 0)
    ssd = Opened(fast_root, limit=40 << 20)
    ssd.check_integrity()
    there = {entry.address: entry for entry in ssd.entries()}
    for number in range(acknowledged + 1):
        entry, image = make(number)
        assert ssd.holds(there[entry.address], image)
    ssd.close()


def test_batches_of_one_lose_nothing_either(fast_root, monkeypatch):
    monkeypatch.setattr(queue, "BATCH_FILES", 1)
    total = run_child(partial(scenario, fast_root.with_name("whole")), 0, True).steps
    for at in range(40, total + 1, 15):
        root = fast_root.with_name(f"ssd{at}")
        check_after(root, run_child(partial(scenario, root), at, True).said)
