"""The soak with a remote tier: machines, each with a directory, a server and a judge of its own, that share one engine.

Each machine is judged as a machine alone is. Requests go around, so that a chat's next turn comes to another machine.
"""

from __future__ import annotations

import random
import secrets
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.soak.engines import Engine
from tools.soak.judge import Judge, Member
from tools.soak.report import Outcome
from tools.soak.schedule import engine_plan

HITS_AFTER = 10.0  # seconds of a run, after which there must have been hits from the remote tier


class Fleet:
    """`options` are the judges'."""

    def __init__(self, engine: Engine, *, machines: int, seed: int, seconds: float, where: Path, **options: Any):
        self.engine, self.seed, self.seconds = engine, seed, seconds
        self._chance = random.Random(f"{seed}:objects")
        key = where / "fleet.key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        self.judges: list[Judge] = []
        for number in range(machines):
            folder = where / f"machine-{number}"
            folder.mkdir(exist_ok=True)
            member = Member(engine.url, key, number, machines, self.judges)
            self.judges.append(Judge(seed=seed + number, seconds=seconds, where=folder, member=member, **options))
        self.outcome = Outcome(seed, machines=machines, engine=engine.url.partition("://")[0])
        self.log = f"machine-*/server.log in {where}"

    def run(self) -> Outcome:
        began = time.monotonic()
        with ThreadPoolExecutor(len(self.judges)) as threads:
            running = [threads.submit(judge.run) for judge in self.judges]
            try:
                self._harm(running, began)
                wait(running, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            finally:
                for judge in self.judges:
                    judge.interrupted = True
        for done in running:
            self.outcome.add(done.result())
        self.outcome.seconds = time.monotonic() - began
        self._last_look()
        return self.outcome

    def _harm(self, running: list[Future[Outcome]], began: float) -> None:
        """What is planned for the engine."""

        def over(until: float) -> bool:
            """Wait until then, in seconds since the beginning, or until one machine is over: then all are."""
            while time.monotonic() - began < until and not any(future.done() for future in running):
                time.sleep(0.05)
            return any(future.done() for future in running)

        for fault in engine_plan(self.seed, self.seconds, self.engine.kinds):
            if over(fault.at):
                return
            self.outcome.faults[f"engine {fault.kind}"] += 1
            if fault.kind in ("kill", "stall"):
                self.engine.stop(fault.kind)
                try:
                    over(fault.at + fault.size)
                finally:
                    self.engine.go_on(fault.kind)
            elif fault.kind == "empty":
                self.engine.objects.clear()
            else:
                self.outcome.injected[f"objects: {fault.kind}"] += self.engine.harm(
                    fault.kind, fault.size, self._chance
                )

    def _last_look(self) -> None:
        """Hits did come from the engine, and who has it can read nothing there."""
        outcome, objects = self.outcome, self.engine.objects
        with suppress(ConnectionError):  # Ctrl-C was the engine's, too
            self.engine.count_evicted()
            names = objects.names()
            outcome.remote.update({"evicted": self.engine.evicted, "objects at the end": len(names)})
            for name in names:
                data = objects.get(name) or b""
                if b"soak-" in data or b"__metadata__" in data:
                    outcome.problems.append(f"engine: {name} can be read without the key")
        if outcome.seconds > HITS_AFTER and not outcome.remote["hit tokens"]:
            outcome.problems.append("remote: no hit came from the remote tier")
