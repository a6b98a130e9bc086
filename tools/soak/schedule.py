"""What happens when: drawn from the seed, life by life, so that the same seed gives the same schedule. No I/O."""

from __future__ import annotations

import random
from typing import NamedTuple

from prefixcache.blocks.policies import POLICIES

MB = 1 << 20

FILES = ("flip", "truncate", "delete", "swap")  # to some image files, alive or down
HARMLESS = (
    "disk stall",
    "clock",
    "second",
    "inspect",
    "look",
    "fork",
    "idle",
    "idle",
    "idle",
)  # to what is in the files
LIVE = (*FILES, *FILES, "disk ENOSPC", "disk EIO", "disk EROFS", "move", *HARMLESS)
DOWN = (*FILES, "index deleted", "index damaged", "debris", "reconcile")
OBJECTS = ("flip", "swap", "truncate", "delete")  # to a share of the objects of a remote tier's engine
ENGINE = ("kill", "stall", "stall", "empty", *OBJECTS)
ENDS = ("kill", "kill", "kill", "kill", "kill", "term", "term", "term, kill", "exit", "close")


class Fault(NamedTuple):
    """`at`: seconds after the server is ready; `kind`: a word of LIVE, DOWN or ENGINE; `size`: how long, how far,
    how many, or what share.
    """

    at: float
    kind: str
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:.1f}s {self.kind}" + (f" {self.size:g}" if self.size else "")


class Plan(NamedTuple):
    """One life of the server. `down`: what is done before it begins; `seconds`: how long it is, once it is ready; `remote`:
    what goes to the remote tier, "" where there is none.
    """

    life: int
    long: bool
    seconds: float
    ram: int
    ssd: int
    spill: str
    policy: str
    admission: str
    threads: int
    down: tuple[Fault, ...]
    faults: tuple[Fault, ...]
    end: str
    remote: str = ""

    def __str__(self) -> str:
        before = ", ".join(f"{f.kind} {f.size:g}" if f.size else f.kind for f in self.down)
        return (
            f"life {self.life}: {f'before: {before}; ' if before else ''}{self.threads} threads, ram {self.ram / MB:g} MiB, "
            f"ssd {self.ssd / MB:g} MiB, spill {self.spill}, {self.policy}, given {self.admission}; "
            f"{f'remote {self.remote}; ' if self.remote else ''}"
            f"{', '.join(map(str, self.faults))}"
            f"{'; ' if self.faults else ''}{self.end} at {self.seconds:.1f}s"
        )


def plan(seed: int, life: int, *, seconds: float, threads: int, remote: bool = False) -> Plan:
    """Life number `life` (from 0) of a soak of `seconds`. One in five is long, the others end soon, most by a kill. With a
    `remote` tier a machine may lose its directory before a life.
    """
    chance, rules = random.Random(f"{seed}:{life}"), random.Random(f"policy {seed}:{life}")
    long = life % 5 == 0
    lasts = min(max(seconds / 5, 12.0), 300.0, seconds / 2) if long else chance.uniform(0.2, 5.0)
    kinds = HARMLESS if chance.random() < 0.4 else LIVE
    faults: list[Fault] = []
    if long:
        at = 2.0
        while at < lasts - 6:
            faults.append(_live(chance, at, kinds))
            at += chance.uniform(1.0, 3.0)
        faults.append(Fault(max(lasts - 2, 1.0), "idle"))
    elif chance.random() < 0.5:
        faults.append(_live(chance, chance.uniform(0, lasts), kinds))
    down = [_down(chance, kind) for kind in chance.sample(DOWN, chance.choice((0, 0, 1, 1, 2)))] if life else []
    if long and life and "reconcile" not in [fault.kind for fault in down[-1:]]:
        down.append(Fault(0, "reconcile"))
    fleet = random.Random(f"fleet {seed}:{life}")
    if remote and life and fleet.random() < 0.25:
        down.append(Fault(0, "emptied"))
    return Plan(
        life,
        long,
        round(lasts, 2),
        chance.choice((2, 4, 6, 8, 12)) * MB,
        chance.choice((16, 24, 32, 48)) * MB,
        chance.choice(("drop", "drop", "wait")),
        rules.choice(tuple(POLICIES)),
        rules.choice(("always", "always", "second")),
        threads,
        tuple(down),
        tuple(sorted(faults)),
        "close" if long and chance.random() < 0.5 else chance.choice(ENDS),
        fleet.choice(("always", "second")) if remote else "",
    )


def _live(chance: random.Random, at: float, kinds: tuple[str, ...]) -> Fault:
    kind = chance.choice(kinds)
    if kind in FILES:
        size: float = chance.randint(1, 4)
    elif kind.startswith("disk"):
        size = round(chance.uniform(0.5, 4.0), 1)
    elif kind == "clock":
        size = chance.choice((-1, 1)) * chance.choice((60, 3600, 86400, 315360000))
    else:
        size = 0.0
    return Fault(round(at, 2), kind, size)


def _down(chance: random.Random, kind: str) -> Fault:
    return Fault(0.0, kind, chance.randint(1, 4) if kind in FILES else 0)


def engine_plan(seed: int, seconds: float, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    """What is done to the engine of a remote tier in a soak of `seconds`; `at` counts from its beginning."""
    chance = random.Random(f"engine {seed}")
    faults: list[Fault] = []
    at = 2.0
    while at < seconds - 2:
        kind = chance.choice(kinds)
        lasts = round(chance.uniform(0.5, 6.0), 1) if kind in ("kill", "stall") else 0.0
        share = round(chance.uniform(0.05, 0.5), 2) if kind in OBJECTS else 0.0
        faults.append(Fault(round(at, 2), kind, lasts or share))
        at += lasts + chance.uniform(2.0, 7.0)
    return tuple(faults)
