"""The crash matrix: runs of the scenario, each with its fault, what the directory was afterwards, and the counts.

`Lab` keeps the process that forks the runs and the folder in memory where they work. Each kind of run is a function of
a lab that gives an `Outcome`; `Tally` adds them up for the table.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prefixcache.codecs.transform.bases import Bases
from tests.crash.checks import promised
from tests.models.transforming import uneven_basis
from tools.faults import power, shim

CHAIN = 5  # rounds of random kills on one directory


class Mode(NamedTuple):
    """What befalls the Nth of the calls of some kinds. `strict`: nothing may be set aside for it."""

    what: int
    kinds: int = shim.CHANGES
    error: int = 0
    strict: bool = True


MODES = {
    "killed before": Mode(shim.KILL_BEFORE),
    "killed after": Mode(shim.KILL_AFTER),
    "torn write": Mode(shim.TORN, shim.WRITE),
    "short write": Mode(shim.SHORT, shim.WRITE),
    "no room, once": Mode(shim.FAIL_ONCE, shim.NEEDS_ROOM, errno.ENOSPC),
    "no room from then on": Mode(shim.FAIL_FROM, shim.NEEDS_ROOM, errno.ENOSPC),
    "I/O error, once": Mode(shim.FAIL_ONCE, shim.EVERY, errno.EIO, strict=False),
    "I/O errors from then on": Mode(shim.FAIL_FROM, shim.EVERY, errno.EIO, strict=False),
}
KILLED_TWICE, KILLED_ANY_TIME, STALLED = "killed, then again", "killed at any time", "disk stands still"
POWER, SYNC_FAILED, KILLED_CUT = "power cut", "failed fsync, power cut", "killed, later power cut"
OTHERS = (KILLED_TWICE, STALLED, KILLED_ANY_TIME, POWER, SYNC_FAILED, KILLED_CUT)


class Outcome(NamedTuple):
    """One run. `title` says which, so that it can be had again; `failure` why it is one, "" for none."""

    mode: str
    title: str
    hit: bool = True
    images: int = 0
    nbytes: int = 0
    fetched: int = 0
    failure: str = ""


@dataclass
class Tally:
    """The outcomes of one mode, added up."""

    mode: str
    runs: int = 0
    hit: int = 0
    images: int = 0
    nbytes: int = 0
    fetched: int = 0
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.hit += outcome.hit
        self.images += outcome.images
        self.nbytes += outcome.nbytes
        self.fetched += outcome.fetched
        if outcome.failure:
            self.failures.append(outcome)

    def __str__(self) -> str:
        kinds = Counter(outcome.failure.split(":")[0] for outcome in self.failures)
        wrong, lost, findings = kinds.pop("Wrong", 0), kinds.pop("Lost", 0), kinds.pop("Debris", 0)
        return (
            f"{self.mode:24}{self.runs:7}{self.hit:7}{self.runs - len(self.failures):9}{self.images:9}"
            f"{self.nbytes / 1e6:9.1f}{self.fetched:9}{wrong:7}{lost:6}{findings:10}{sum(kinds.values()):7}"
        )


HEADER = (
    f"{'mode':24}{'runs':>7}{'hit':>7}{'sound':>9}{'images':>9}{'MB':>9}{'fetches':>9}{'wrong':>7}{'lost':>6}"
    f"{'findings':>10}{'other':>7}"
)


class Lab:
    """A folder in memory, and the process with the shim that forks one child a run. Use it as a context."""

    def __init__(self, codec: str = "") -> None:
        """`codec`: of the scenario's session with coded rows, "" for TurboQuant."""
        self.folder = Path(tempfile.mkdtemp(prefix="prefixcache-crash-", dir="/dev/shm"))
        environment = {**os.environ, "LD_PRELOAD": str(shim.build(self.folder)), "OPENBLAS_NUM_THREADS": "1"}
        if codec:
            bases = Bases(self.folder / "bases")
            bases.save(uneven_basis("coded", (0,)))
            environment |= {"CRASH_CODEC": codec, "PREFIXCACHE_BASIS_DIR": str(bases.folder)}
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=environment,
        )
        self._rooms = 0
        self._calls: dict[int, int] = {}

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._zygote.stdin
        self._zygote.stdin.close()
        self._zygote.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def room(self) -> Iterator[Path]:
        """A new folder for one run; the directory of the cache is `ssd` in it."""
        self._rooms += 1
        made = self.folder / f"run{self._rooms}"
        made.mkdir()
        try:
            yield made
        finally:
            shutil.rmtree(made)

    def do(self, what: str, room: Path, **job: Any) -> dict[str, Any]:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        print(json.dumps({"do": what, "root": str(room / "ssd"), **job}), file=self._zygote.stdin, flush=True)
        if not (line := self._zygote.stdout.readline()):
            raise RuntimeError("the process that forks the runs has ended; what it said is on stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def calls(self, kinds: int = shim.CHANGES) -> int:
        """How many calls of these kinds the unharmed scenario makes. It differs by a few: threads race."""
        if kinds not in self._calls:
            with self.room() as room:
                answer = self.do("scenario", room, mask=kinds)
                assert _well(answer), _why(answer)
                self._calls[kinds] = int(answer["end"]["calls"])
        return self._calls[kinds]


def met(lab: Lab, name: str, at: int) -> Outcome:
    """The scenario with the fault at its call `at`, and what is left."""
    mode = MODES[name]
    with lab.room() as room:
        answer = lab.do("scenario", room, mode=mode.what, at=at, mask=mode.kinds, errno=mode.error)
        outcome = Outcome(name, f"call {at}: {answer['fired'] or 'not reached'}", hit=bool(answer["fired"]))
        if not answer["died"] and not _well(answer):
            return outcome._replace(failure=_why(answer))
        return _judged(lab, room, outcome, answer["words"], strict=mode.strict)


def killed_twice(lab: Lab, at: int, again: int) -> Outcome:
    """Killed at call `at`, then at call `again` of the opening that repairs."""
    with lab.room() as room:
        first = lab.do("scenario", room, mode=shim.KILL_BEFORE, at=at)
        job = {"promises": promised(first["words"]), "mode": shim.KILL_BEFORE, "at": again}
        second = lab.do("check", room, **job)
        title = f"call {at}: {first['fired']}, then call {again}: {second['fired'] or 'not reached'}"
        outcome = Outcome(KILLED_TWICE, title, hit=first["died"] and second["died"])
        if not second["died"] and not _well(second):
            return outcome._replace(failure=_why(second))
        return _judged(lab, room, outcome, first["words"] + second["words"])


def killed_any_time(lab: Lab, seed: int, longest: float) -> Iterator[Outcome]:
    """`CHAIN` rounds on one directory, each killed within `longest` seconds."""
    chance, words = random.Random(seed), []
    with lab.room() as room:
        for number in range(CHAIN):
            delay = chance.random() * longest
            answer = lab.do("scenario", room, kill_after=delay)
            words += answer["words"]
            outcome = Outcome(KILLED_ANY_TIME, f"seed {seed}, round {number}, {delay:.3f} s", hit=answer["died"])
            if not answer["died"] and not _well(answer):
                yield outcome._replace(failure=_why(answer))
                return
            yield (judged := _judged(lab, room, outcome, words))
            if judged.failure:
                return


def stands_still(lab: Lab, at: int) -> Outcome:
    """From call `at` on nothing on the disk comes back, and the request path goes on."""
    with lab.room() as room:
        answer = lab.do("stalled", room, stall_at=at)
        outcome = Outcome(STALLED, f"call {at}: {answer['fired'] or 'not reached'}", hit=bool(answer["fired"]))
        if not _well(answer):
            return outcome._replace(failure=_why(answer))
        return _judged(lab, room, outcome, answer["words"])


def recorded(lab: Lab, **job: Any) -> tuple[power.Journal, dict[str, Any]]:
    """The journal of a whole scenario, and how it ended."""
    path = lab.folder / "journal"
    with lab.room() as room:
        answer = lab.do("scenario", room, journal=str(path), **job)
        return power.Journal(room, path), answer


class PowerCuts:
    """Power cuts of one journal. What a disk holds and what was promised may be the same for many: looked at once."""

    def __init__(self, journal: power.Journal, mode: str = POWER, title: str = ""):
        self.journal, self._mode, self._title = journal, mode, title
        self._seen: set[tuple[str, str]] = set()

    def cut(self, lab: Lab, moment: int, variant: str, seed: int = 0) -> Outcome:
        tree = power.tree_after(self.journal, moment, variant, seed)
        words = self.journal.said(moment)
        state = power.digest(tree), json.dumps(promised(words), sort_keys=True)
        outcome = Outcome(self._mode, f"{self._title}after call {moment}, unsynced: {variant}, seed {seed}")
        if state in self._seen:
            return outcome._replace(hit=False)
        self._seen.add(state)
        with lab.room() as room:
            power.lay_out(tree, room)
            return _judged(lab, room, outcome, words)


def sync_failed(lab: Lab, at: int) -> Iterator[Outcome]:
    """The fsync numbered `at` fails; the power goes at the next `have` after it, and at the end."""
    journal, answer = recorded(lab, mode=shim.FAIL_ONCE, at=at, mask=shim.SYNC, errno=errno.EIO)
    title = f"fsync {at}: {answer['fired'] or 'not reached'}; "
    if not _well(answer):
        yield Outcome(SYNC_FAILED, title, failure=_why(answer))
        return
    cuts = PowerCuts(journal, SYNC_FAILED, title)
    if journal.failed:
        for moment in [*journal.acknowledged(journal.failed[0])[:2], journal.length]:
            yield cuts.cut(lab, moment, "dropped")


def killed_then_cut(lab: Lab, at: int) -> Outcome:
    """Killed at call `at`; the next process goes on from there, and the power goes when it has been promised something."""
    paths = [lab.folder / f"journal{n}" for n in range(2)]
    with lab.room() as room:
        first = lab.do("scenario", room, mode=shim.KILL_BEFORE, at=at, journal=str(paths[0]))
        second = lab.do("scenario", room, journal=str(paths[1]))
        outcome = Outcome(KILLED_CUT, f"call {at}: {first['fired'] or 'not reached'}", hit=first["died"])
        if not _well(second):
            return outcome._replace(failure=_why(second))
        before = power.Journal(room, paths[0]).length
        journal = power.Journal(room, *paths)
    cut = PowerCuts(journal, KILLED_CUT).cut(lab, journal.acknowledged(before)[0], "dropped")
    return outcome._replace(**{name: getattr(cut, name) for name in ("images", "nbytes", "fetched", "failure")})


def _judged(lab: Lab, room: Path, outcome: Outcome, words: list[Any], *, strict: bool = True) -> Outcome:
    """Open what a run has left, and hold it to what was promised."""
    answer = lab.do("check", room, promises=promised(words), strict=strict)
    words.extend(answer["words"])  # what the opening let go of binds the next round no more
    if not _well(answer):
        return outcome._replace(failure=_why(answer))
    return outcome._replace(**{name: answer["end"][name] for name in ("images", "nbytes", "fetched")})


def _well(answer: dict[str, Any]) -> bool:
    return bool(answer["end"] and answer["end"]["ok"])


def _why(answer: dict[str, Any]) -> str:
    if answer["end"]:
        return f"{answer['end']['error']}\n{answer['end'].get('trace', '')}"
    return f"Hung: {answer['words'][-1:]}" if answer["hung"] else f"Ended: with status {answer['status']}"
