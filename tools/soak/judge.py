"""Runs the soak: starts the server, does to it what the plan of its life says, and judges what it tells and leaves.

One thread judges; another only reads what the server tells, so that neither ever waits for the other.
"""

from __future__ import annotations

import json
import os
import queue
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from prefixcache.ssd import DirectoryHeld, Ssd, WriterEvents, reconcile, survey
from prefixcache.ssd.directory import Directory
from tools.faults import tamper
from tools.faults.evidence import du
from tools.soak.prompts import SALT_TEXT, TOKEN_TEXT, Trace, digest, prefixes, rows
from tools.soak.report import Outcome, Sample
from tools.soak.schedule import FILES, Fault, Plan, plan
from tools.soak.server import Orders
from tools.soak.truth import Truth, as_calls

ROOT = Path(__file__).resolve().parents[2]
HUNG = 300.0  # seconds without a sign of life after which the server counts as hung
ENDING = 180.0  # seconds after which a server that was asked to end is taken for hung
LOOK = 1.0  # seconds between two looks at the directory's size
SEEN = 8  # problems of one kind that are told in full
FORK = sys.platform == "linux"


class Member(NamedTuple):
    """A machine of a fleet: number `number` of `machines`, whose judges are in `judges`."""

    url: str
    key: Path
    number: int
    machines: int
    judges: list[Judge]


class Starter:
    """The process that the servers come from, and what comes from them: (what, values) in `told`, in order."""

    def __init__(self, log: Path):
        self._log = log
        self.told: queue.Queue[tuple[int, str, list[Any]]] = queue.Queue()
        self._telling, telling = os.pipe()
        ordered, self._orders = os.pipe()
        os.set_blocking(self._telling, False)
        self._ends = (telling, ordered)
        self._process: subprocess.Popen[str] | None = None
        self._rest = b""

    def start(self, orders: Orders) -> int:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.soak.server", *map(str, self._ends)],
                cwd=ROOT,
                pass_fds=self._ends,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**orders._asdict(), "log": str(self._log)}) + "\n")
        process.stdin.flush()
        pid = json.loads(process.stdout.readline())["pid"] if FORK else process.pid
        threading.Thread(target=self._read, args=(process, orders.life), daemon=True).start()
        return pid

    def order(self, life: int, *words: Any) -> None:
        os.write(self._orders, f"{life} {' '.join(map(str, words))}\n".encode())

    def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(30)

    def _read(self, process: subprocess.Popen[str], life: int) -> None:
        """Until the server has ended and all that it told has been read."""
        assert process.stdout is not None
        ends: list[Any] = [self._telling, *([process.stdout] if FORK else [])]
        status: int | None = None
        while status is None:
            ready, _, _ = select.select(ends, [], [], 0.2)
            if process.stdout in ready:
                line = process.stdout.readline()
                status = json.loads(line)["status"] if line else -999
            elif not FORK:
                status = process.poll()
            self._drain()
        self.told.put((life, "status", [status]))

    def _drain(self) -> None:
        while True:
            try:
                chunk = os.read(self._telling, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                life, what, *values = json.loads(line)
                self.told.put((life, what, values))


class Judge:
    """`run`: tokens that a block of the trace becomes; `plant`: a fault that must be found; `stop`: at the first
    violation; `member`: of a fleet, where there is a remote tier.
    """

    def __init__(
        self,
        *,
        seed: int,
        seconds: float,
        threads: int,
        where: Path,
        run: int = 24,
        plant: str = "",
        stop: bool = False,
        codec: str = "raw",
        member: Member | None = None,
    ):
        self.member, self.interrupted = member, False
        self._name = f"machine {member.number}, " if member is not None else ""
        self.seed, self.seconds, self.threads, self.where = seed, seconds, threads, where
        self.directory = Directory(where / "cache")
        self.log = where / "server.log"
        self.trace = Trace(run=run)
        self.truth = Truth(self.directory)
        self.outcome = Outcome(seed)
        self.plant, self.stop, self.codec = plant, stop, codec
        self._bases = where / "bases"
        if codec != "raw":
            from tools.soak.bases import save_bases  # calibration takes a while to import

            save_bases(self._bases)
        self._starter = Starter(self.log)
        self._calls = as_calls(self.truth)
        self._chance = random.Random(f"{seed}:files")
        self._first = member.number if member is not None else 0  # the next request
        self._remote: dict[str, int] = {}
        self._exact = True  # rows and files agree but for what the cache itself does
        self._read_log = 0
        self._said: Counter[str] = Counter()
        self._commands = 0
        self._life, self._pid = -1, 0
        self._status: int | None = None
        self._settled = self._ready = False

    # -- from the first life to the table -----------------------------------------------------------------------------

    def run(self) -> Outcome:
        began = time.monotonic()
        life = 0
        try:
            while (left := self.seconds - (time.monotonic() - began)) > 0 and not self._stopped:
                fleet = self.member is not None
                now = plan(self.seed, life, seconds=self.seconds, threads=self.threads, remote=fleet)
                print(f"{self._name}{now}", flush=True)
                self._live(now, min(now.seconds, left))
                life += 1
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            self._end_now()
            self._starter.stop()
        self._last_look()
        self.outcome.finish(self.truth, time.monotonic() - began)
        return self.outcome

    @property
    def _stopped(self) -> bool:
        return self.interrupted or (self.stop and bool(self.outcome.problems))

    def problem(self, kind: str, text: str) -> None:
        self.outcome.problems.append(f"{self._name}{kind}: {text}")
        self._said[kind] += 1
        if self._said[kind] <= SEEN:
            print(f"  ! {self._name}life {self._life}: {kind}: {text}", flush=True)

    def _last_look(self) -> None:
        """Nobody is left: what must be there is there, and what reconcile leaves is clean."""
        self._check_dead()
        if self.directory.root.exists():
            self._reconcile()

    # -- one life -----------------------------------------------------------------------------------------------------

    def _live(self, now: Plan, seconds: float) -> None:
        self._life = now.life
        for fault in now.down:
            self._harm_dead(fault)
        if self.plant == "file" and self.truth.durable:
            os.unlink(self.directory.file(next(iter(self.truth.durable))))
        self._ready = self._settled = False
        self._status = None
        self._samples: list[Sample] = []
        self._catch_up()
        self._limit, self._heard = now.ssd, time.monotonic()
        self._ended = ""
        self._pid = self._starter.start(
            Orders(
                now.life,
                self.seed,
                str(self.directory.root),
                now.ram,
                now.ssd,
                now.spill,
                now.policy,
                now.admission,
                now.threads,
                self._first,
                self.trace.run,
                self.plant,
                self.codec,
                str(self._bases),
                *self._fleet_orders(now),
            )
        )
        self.outcome.lives += 1
        while not self._ready and self._status is None:
            self._hear(0.2)
        if self._status is None and not self._exact:
            self._order("tampered")
        since, disk_until = time.monotonic(), 0.0
        faults, looked = list(now.faults), 0.0
        while self._status is None and (at := time.monotonic() - since) < seconds and not self._stopped:
            if disk_until and at >= disk_until:
                self._order("disk")
                disk_until = 0.0
            if faults and faults[0].at <= at and not (disk_until and faults[0].kind.startswith(("disk", "move"))):
                fault = faults.pop(0)
                self._harm(fault)
                if fault.kind.startswith("disk"):
                    disk_until = at + fault.size
            if self._settled and time.monotonic() > looked + LOOK:
                self._check_size()
                looked = time.monotonic()
            self._hear(0.05)
        self._end(now)
        self.outcome.end_life(now.long, self._samples)
        self.outcome.remote.update(self._remote)
        self._remote = {}
        self._check_dead()

    def _fleet_orders(self, now: Plan) -> tuple[Any, ...]:
        member = self.member
        return () if member is None else (member.url, str(member.key), now.remote, member.machines)

    def _catch_up(self) -> None:
        """With the machine that is ahead: all are at about the same requests."""
        if self.member is not None:
            ahead = max(judge._first for judge in self.member.judges)
            self._first = ahead + (self.member.number - ahead) % self.member.machines

    def _hear(self, wait: float) -> None:
        """Deal with all that has been told; wait for it at most so long."""
        try:
            life, what, values = self._starter.told.get(timeout=wait)
            while True:
                if life == self._life:
                    self._heard = time.monotonic()
                    self._take(what, values)
                life, what, values = self._starter.told.get_nowait()
        except queue.Empty:
            pass
        if self._status is None and time.monotonic() > self._heard + HUNG:
            os.kill(self._pid, signal.SIGUSR1)  # its threads' stacks, to the log
            time.sleep(2)
            os.kill(self._pid, signal.SIGKILL)
            self.problem("hung", f"no sign of life for {HUNG:.0f} s; the stacks of its threads are in {self.log}")
            self._heard = time.monotonic()

    def _take(self, what: str, values: list[Any]) -> None:
        outcome = self.outcome
        if what in self._calls:
            self._calls[what](*values)
            for text in self.truth.lost[outcome.lost_told :]:
                self.problem("lost", text)
            outcome.lost_told = len(self.truth.lost)
        elif what == "done":
            number, asked, hit, total = values
            outcome.count(asked, hit, total)
            self._first = max(self._first, number + (self.member.machines if self.member is not None else 1))
        elif what == "answer":
            self._check_answer(*values)
        elif what == "wrong":
            outcome.wrong += 1
            self.problem("wrong answer", f"request {values[0]}: {values[1]}")
        elif what == "problem":
            self.problem(*values)
        elif what == "sample":
            number, resident, files, threads = values
            self._samples.append(Sample(number, resident, files, threads))
        elif what == "remote":
            self._remote, waited = values
            outcome.waited = max(outcome.waited, waited)
        elif what == "ready":
            self._ready = True
        elif what == "settled":
            self._settled = True
        elif what == "idle":
            outcome.checks["exact" if values[0] else "plain"] += 1
        elif what == "mended":
            found = values[0]
            for kind in ("broken", "lost file", "index"):
                self.truth.met["on opening"] += found.get(kind, 0)
        elif what == "ended":
            self._ended = values[0]
        elif what == "status":
            self._status = values[0]

    def _check_answer(self, number: int, depth: int, said: str) -> None:
        request = self.trace.request(number)
        self.outcome.rechecked += 1
        if digest(rows(prefixes(request.prompt[:depth], request.tenant), 0)) != said:
            self.outcome.wrong += 1
            self.problem("wrong answer", f"request {number}: {depth} tokens are others' in the judge's eyes")

    # -- endings ------------------------------------------------------------------------------------------------------

    def _end(self, now: Plan) -> None:
        if self._status is None:
            self.outcome.faults[f"end: {now.end}"] += 1
            if now.end == "kill":
                os.kill(self._pid, signal.SIGKILL)
            elif now.end.startswith("term"):
                os.kill(self._pid, signal.SIGTERM)
                if now.end.endswith("kill"):
                    self._hear(0.05)
                    time.sleep(self._chance.random() * 0.3)
                    self._kill()
            else:
                self._order("disk")
                self._order(now.end)
            asked = time.monotonic()
            while self._status is None:
                self._hear(0.2)
                if time.monotonic() > asked + ENDING:
                    self.problem("end", f"{now.end}: it did not end in {ENDING:.0f} s; see {self.log}")
                    self._kill()
                    asked = time.monotonic()
            wanted = {"kill": (-9,), "term, kill": (-9, 0)}.get(now.end, (0,))
            if self._status not in wanted:
                self.problem("end", f"{now.end} ended with status {self._status}; see {self.log}")
        else:
            self.problem("end", f"it ended by itself with status {self._status}; see {self.log}")

    def _end_now(self) -> None:
        if self._pid and self._status is None:
            self._kill()
            while self._status is None:
                self._hear(0.2)

    def _kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _order(self, *words: Any) -> None:
        self._starter.order(self._life, *words)

    # -- what is done to it -------------------------------------------------------------------------------------------

    def _harm(self, fault: Fault) -> None:
        """While the server runs."""
        kind = fault.kind
        self.outcome.faults[kind] += 1
        if kind in FILES:
            self._exact = False
            self._order("tampered")
            self._damage(fault)
        elif kind.startswith("disk"):
            self._exact = self._exact and kind == "disk stall"
            self._order("disk" if kind == "disk stall" else "tampered")
            self._order(*kind.split())
        elif kind == "clock":
            self._order("clock", fault.size)
        elif kind in ("fork", "idle"):
            self._order(kind)
        elif kind == "move":
            self._exact = False
            self._order("tampered")
            self._move()
        elif not self.truth.vanished:
            {"second": self._second, "inspect": self._inspect, "look": self._look}[kind]()

    def _harm_dead(self, fault: Fault) -> None:
        """While none runs."""
        if not self.directory.root.exists():
            return
        kind = fault.kind
        self.outcome.faults[f"down: {kind}"] += 1
        if kind in FILES:
            self._exact = False
            self._damage(fault)
        elif kind == "index deleted":
            tamper.delete_index(self.directory, self._chance)
        elif kind == "index damaged":
            tamper.damage_index(self.directory, self._chance)
        elif kind == "debris":
            tamper.leave_debris(self.directory, self._chance)
        elif kind == "reconcile":
            self._reconcile()
        elif kind == "emptied":
            self._move()

    def _damage(self, fault: Fault) -> None:
        done = tamper.damage(self.directory, fault.kind, int(fault.size), self._chance, self.truth.mark)
        self.outcome.injected[fault.kind] += done

    def _move(self) -> None:
        self.truth.vanish()
        away = self.where / f"away-{self._life}-{self.outcome.faults['move']}"
        try:
            os.rename(self.directory.root, away)
        except FileNotFoundError:
            return
        shutil.rmtree(away, ignore_errors=True)

    def _second(self) -> None:
        """Another process may not open it."""
        try:
            with Ssd(
                self.directory.root, limit=1 << 20, queue_bytes=1 << 20, events=WriterEvents(lambda entry, error: None)
            ):
                pass
        except DirectoryHeld:
            return
        except Exception as error:
            self.problem("second", f"a second opener met {type(error).__name__}: {error}")
            return
        self.problem("second", "a second process opened the directory")

    def _inspect(self) -> None:
        if self._by_command("inspect", "--json") is not None:
            return
        found = survey(self.directory.root)
        if not found.holder or found.problem:
            self.problem("inspect", f"holder {found.holder!r}, problem {found.problem!r}")

    def _look(self) -> None:
        said = self._by_command("reconcile", "--dry-run", "--deep", "--json")
        report = said if said is not None else reconcile(self.directory.root, dry_run=True, deep=True).as_dict()
        if report["error"]:
            self.problem("reconcile --dry-run", report["error"])
        elif report["findings"] and self._exact:
            self.problem("reconcile --dry-run", f"found {report['findings'][:2]} in a directory that nobody touched")

    def _by_command(self, *words: str) -> dict[str, Any] | None:
        """What the real command says, each fifth time; its start takes seconds."""
        self._commands += 1
        if self._commands % 5 != 1:
            return None
        code = "import sys; from prefixcache.cli import app; sys.exit(app())"
        done = subprocess.run(
            [sys.executable, "-c", code, words[0], str(self.directory.root), *words[1:]],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        self._heard = time.monotonic()
        if done.returncode > 2 or "Traceback" in done.stderr:
            self.problem("command", f"prefixcache {words[0]} ended with {done.returncode}: {done.stderr[-600:]}")
            return None
        try:
            return json.loads(done.stdout)
        except ValueError:
            self.problem("command", f"prefixcache {words[0]}: no JSON: {done.stdout[:200]!r} {done.stderr[-300:]!r}")
            return None

    def _reconcile(self) -> None:
        """Repairs, and then has nothing more to find."""
        report = reconcile(self.directory.root, deep=True)
        if report.error:
            self.problem("reconcile", report.error)
            return
        for kind in ("broken", "lost file", "index"):
            self.truth.met["on reconciling"] += report.counts.get(kind, 0)
        again = reconcile(self.directory.root, dry_run=True, deep=True)
        if not again.clean:
            self.problem("reconcile", f"left something to find: {again.findings[:3]} {again.error}")
        self.truth.mended()
        self._exact = True
        self._check_files()

    # -- looking at it ------------------------------------------------------------------------------------------------

    def _check_size(self) -> None:
        """A walk while files come and go is no snapshot: more than the limit counts when it is seen again and again."""
        for _ in range(5):
            held = du(self.directory.root)
            if held <= self._limit:
                return
            time.sleep(0.05)
        self.problem("limit", f"the directory takes {held} bytes of {self._limit}")

    def _check_dead(self) -> None:
        """The server is dead: this is what it leaves."""
        if self.directory.root.exists():
            held = du(self.directory.root)
            if self._life >= 0 and self._settled and held > self._limit:
                self.problem("limit", f"dead, the directory takes {held} bytes of {self._limit}")
        self._check_files()
        self._check_log()

    def _check_files(self) -> None:
        self.truth.check_files()
        for text in self.truth.lost[self.outcome.lost_told :]:
            self.problem("lost", text)
        self.outcome.lost_told = len(self.truth.lost)

    def _check_log(self) -> None:
        if not self.log.exists():
            return
        with open(self.log, encoding="utf-8", errors="replace") as file:
            file.seek(self._read_log)
            text = file.read()
            self._read_log = file.tell()
        for sign in ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error"):
            if (at := text.find(sign)) >= 0:
                self.problem("log", text[max(0, at - 200) : at + 1800])
        if TOKEN_TEXT.search(text) or SALT_TEXT in text:
            self.problem("log", f"tokens of a prompt, or a salt, stand in {self.log}")
