"""A file of the index is deleted, replaced or cut by another program while a cache has the directory open."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inside import directory_of
from tests.waiting import until
from tools.faults.evidence import du

from .images import SPACE, Opened, chain, make

FILES = ["index.db", "index.db-wal", "index.db-shm"]


pytestmark = pytest.mark.usefixtures("impatient")


def unlinked(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    """By its own copy, as a sync program does."""
    shutil.copy2(path, f"{path}.new")
    os.replace(f"{path}.new", path)


def cut(path: Path) -> None:
    os.truncate(path, 0)


LOST = [(name, lose) for name in FILES for lose in (unlinked, replaced, cut) if (name, lose) != (FILES[2], cut)]


@pytest.mark.parametrize(("name", "lose"), LOST)
def test_its_loss_is_noticed_with_the_next_batch_and_costs_no_image(ssd, root, name, lose, caplog):
    stored = ssd.put(*chain(5))
    lose(root / name)
    more = chain(5, first=50)
    until(lambda: all(ssd.write(entry, SPACE, image) for entry, image in more) and ssd.flush(5))
    assert {entry.address for entry in ssd.entries()} == {entry.address for entry, _ in chain(5) + more}
    assert all(ssd.holds(entry, image) for entry, (_, image) in zip(stored, chain(5), strict=True))
    ssd.check_integrity()
    assert f"another program deleted, replaced or cut {name}" in caplog.text or "the index was" in caplog.text


def test_what_a_new_opening_reads_of_the_index_is_not_kept_in_memory(ssd, root):
    ssd.put(*chain(5))
    unlinked(root / "index.db")
    until(lambda: ssd.write(make(50)[0], SPACE, make(50)[1]) and ssd.flush(5))
    assert directory_of(ssd).entries is None
    assert len(list(ssd.entries())) == 6


@pytest.mark.parametrize("lose", [unlinked, replaced, cut])
def test_a_lost_log_is_cut_as_any_other(open_tier, root, lose):
    ssd = open_tier(limit=4 << 20)
    ssd.put(make(999))
    lose(root / "index.db-wal")
    for round_ in range(30):
        pairs = chain(10, first=1000 + 10 * round_)
        stored = ssd.put(*pairs)
        ssd.delete(stored)
        assert ssd.flush(10)
        assert open_bytes(root) <= ssd.limit
    ssd.check_integrity()
    assert (root / "index.db-wal").stat().st_size <= directory_of(ssd).ledger.log_allowance


def open_bytes(root: Path) -> int:
    """What the directory takes, and what this process has open of files that were deleted from it."""
    total = du(root)
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(str(root)) and target.endswith(" (deleted)"):
                total += os.stat(f"/proc/self/fd/{number}").st_blocks * 512
        except OSError:
            continue
    return total


@pytest.mark.parametrize(("name", "lose"), LOST)
def test_a_loss_just_before_the_end_costs_no_image_either(open_tier, root, name, lose):
    ssd = open_tier()
    ssd.put(*chain(5))
    lose(root / name)
    ssd.close()
    again = open_tier()
    assert {entry.address for entry in again.entries()} == {entry.address for entry, _ in chain(5)}
    again.check_integrity()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.ssd.images import Opened, chain
from tests.ssd.test_lost_index_files import {lose}
root = Path(sys.argv[1])
ssd = Opened(root)
ssd.put(*chain(5))
{lose}(root / {name!r})
ssd.put(*chain(5, first=50))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("name", "lose"), [*LOST, (FILES[2], cut)])
def test_after_a_loss_and_a_kill_all_that_was_flushed_is_there(open_tier, quick, name, lose):
    """Of shared memory that is cut the system kills the process at once: SQLite maps it. The images are safe all the same."""
    script = KILLED.format(name=name, lose=lose.__name__)
    done = subprocess.run([sys.executable, "-c", script, str(quick / "ssd")], capture_output=True, text=True)
    assert -done.returncode in (signal.SIGKILL, signal.SIGBUS), done.stderr
    again: Opened = open_tier(quick / "ssd")
    there = {entry.address for entry in again.entries()}
    assert {entry.address for entry, _ in chain(5)} <= there
    if done.returncode == -signal.SIGKILL:
        assert {entry.address for entry, _ in chain(5, first=50)} <= there
    again.check_integrity()
