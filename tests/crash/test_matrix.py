"""A cut through the crash matrix: whatever befalls a process or its disk, what `flush` acknowledged is there afterwards,
bit for bit, all that is fetched is exact, and nothing is left lying about.

CRASH_SEED shifts which calls are met; `python -m tests.crash` does all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pytest

from tests.crash import matrix
from tests.crash.checks import promised
from tests.crash.matrix import MODES, Lab, Outcome
from tools.faults import power, shim

pytestmark = pytest.mark.skipif(bool(shim.unavailable()), reason=shim.unavailable() or "can be had")

SEED = int(os.environ.get("CRASH_SEED", "0"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


@pytest.fixture(scope="module")
def journal(lab) -> power.Journal:
    return matrix.recorded(lab)[0]


def spread(total: int, count: int, salt: int = 0) -> Iterator[int]:
    """`count` calls of `total`, evenly; which ones depends on the seed."""
    step = total / count
    return (1 + int((n + (SEED * 0.618 + salt * 0.2) % 1) * step) for n in range(count))


def sound(outcomes: Iterable[Outcome]) -> list[Outcome]:
    done = list(outcomes)
    failures = [f"{one.mode}, {one.title}: {one.failure}" for one in done if one.failure]
    assert not failures, f"CRASH_SEED={SEED}\n" + "\n".join(failures)
    return done


@pytest.mark.parametrize("name", MODES)
def test_a_fault_at_any_call_loses_nothing_that_was_acknowledged(lab, name):
    total = lab.calls(MODES[name].kinds)
    salt = list(MODES).index(name)
    outcomes = sound(matrix.met(lab, name, at) for at in spread(total - 20, 6, salt))
    assert all(one.hit for one in outcomes)
    assert sum(one.images for one in outcomes) > 0


def test_a_kill_while_an_opening_repairs_is_repaired_by_the_next(lab):
    for number, at in enumerate(spread(1200, 3)):
        sound(matrix.killed_twice(lab, at, again) for again in spread(90, 2, number))


def test_killed_at_any_time_again_and_again_on_one_directory(lab):
    assert len(sound(matrix.killed_any_time(lab, SEED, 0.4))) == matrix.CHAIN


def test_requests_go_on_while_the_disk_stands_still(lab):
    assert sound(matrix.stands_still(lab, at) for at in (1, 4, 40))[0].hit


def test_a_power_cut_takes_nothing_that_was_acknowledged(lab, journal):
    cuts = matrix.PowerCuts(journal)
    for salt, variant in enumerate(power.VARIANTS):
        sound(cuts.cut(lab, moment, variant, SEED) for moment in spread(journal.length, 6, salt))


def test_what_was_acknowledged_after_an_fsync_that_failed_survives_a_power_cut(lab):
    for at in spread(lab.calls(shim.SYNC), 3):
        sound(matrix.sync_failed(lab, at))


def test_what_a_killed_process_left_unsynced_is_durable_before_it_is_acknowledged(lab):
    sound(matrix.killed_then_cut(lab, at) for at in (1, 2, 3, 133, 136, 140))


def test_transformed_rows_are_as_safe_as_others():
    with Lab("transform:6") as lab:
        total = lab.calls()
        for salt, name in enumerate(("killed before", "killed after", "I/O error, once")):
            sound(matrix.met(lab, name, at) for at in spread(total - 20, 3, salt))
        journal = matrix.recorded(lab)[0]
        cuts = matrix.PowerCuts(journal)
        outcomes = sound(cuts.cut(lab, moment, "dropped", SEED) for moment in spread(journal.length, 4))
        assert sum(one.fetched for one in outcomes) > 0
        trees = [power.tree_after(journal, moment, power.EVERYTHING) for moment in spread(journal.length, 8)]
        assert any(b'"z0.heads"' in content for tree in trees for content in tree.values() if content)


def test_the_journal_knows_what_the_directory_holds(lab):
    path = lab.folder / "whole"
    with lab.room() as room:
        answer = lab.do("scenario", room, journal=str(path))
        journal = power.Journal(room, path)
        here = {str(at.relative_to(room)): at.read_bytes() if at.is_file() else None for at in room.rglob("*")}
        assert promised(answer["words"])["images"]
        assert power.tree_after(journal, journal.length, power.EVERYTHING) == here


def test_the_checks_notice_what_is_lost_and_what_is_wrong(lab):
    """The matrix would be worth nothing if these went through."""
    with lab.room() as room:
        promises = promised(lab.do("scenario", room)["words"])
        kind, key = next(address for address in promises["images"] if address.startswith("rows")).split()
        file = room / "ssd" / kind / key[:2] / f"{key}.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert lab.do("check", room, promises=promises)["end"]["error"].startswith("Wrong")
        file.unlink()
        (room / "ssd" / "tmp" / "12.safetensors").write_bytes(b"left")
        (room / "ssd" / "index.db").unlink()
        assert lab.do("check", room, promises=promises)["end"]["error"].startswith("Lost")
