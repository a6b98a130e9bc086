"""What a soak came to: the counts, the slopes, the table, the exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tools.soak.truth import Truth

LEAST_SAMPLES = 12  # of one life, for a slope


class Sample(NamedTuple):
    """At request `number`: resident bytes, open descriptors, threads."""

    number: int
    resident: int
    files: int
    threads: int


class Slopes(NamedTuple):
    """By 1000 requests, over the last two thirds of the long lives."""

    resident_kb: float
    files: float
    threads: float
    requests: int


@dataclass
class Outcome:
    """With a remote tier: `machines`, `engine`, counts of what `remote` did, and how long, in seconds, a request `waited` for
    it at most.
    """

    seed: int
    machines: int = 1
    engine: str = ""
    lives: int = 0
    requests: int = 0
    tokens: int = 0
    asked: int = 0
    hit: int = 0
    wrong: int = 0
    rechecked: int = 0
    lost_told: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    acknowledged: int = 0
    checked: int = 0
    lost: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    remote: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    series: list[list[Sample]] = field(default_factory=list)

    def count(self, asked: int, hit: int, total: int) -> None:
        self.requests += 1
        self.asked += asked
        self.hit += hit
        self.tokens += total

    def end_life(self, long: bool, samples: list[Sample]) -> None:
        if long and len(samples) >= LEAST_SAMPLES:
            self.series.append(sorted(samples))

    def finish(self, truth: Truth, seconds: float) -> None:
        self.seconds, self.lost = seconds, len(truth.lost)
        self.acknowledged, self.checked, self.met = truth.acknowledged, truth.checked, truth.met

    def add(self, other: Outcome) -> None:
        """What one machine came to, to that of all."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, list):
                getattr(self, name).extend(value)
            elif isinstance(value, int) and name not in ("seed", "machines"):
                setattr(self, name, getattr(self, name) + value)
        self.waited = max(self.waited, other.waited)

    @property
    def exit_code(self) -> int:
        return 1 if self.wrong or self.lost or self.problems else 0

    @property
    def slopes(self) -> Slopes | None:
        """None when no life was long enough."""
        if not self.series:
            return None
        fits, weights = [], []
        for samples in self.series:
            late = np.array(samples[len(samples) // 3 :], np.float64)
            fits.append(_slope(late[:, 0] / 1000, late[:, 1:]))
            weights.append(late[-1, 0] - late[0, 0])
        mean = np.average(fits, axis=0, weights=weights)
        return Slopes(float(mean[0] / 1024), float(mean[1]), float(mean[2]), int(sum(weights)))

    def as_dict(self) -> dict[str, Any]:
        slopes = self.slopes
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "lives": self.lives,
            "requests": self.requests,
            "tokens": self.tokens,
            "hit_rate": self.hit / max(self.asked, 1),
            "faults": dict(self.faults),
            "injected": dict(self.injected),
            "met": dict(self.met),
            "checks": dict(self.checks),
            "answers_rechecked": self.rechecked,
            "images_acknowledged": self.acknowledged,
            "images_checked": self.checked,
            "wrong_answers": self.wrong,
            "images_lost": self.lost,
            "problems": self.problems,
            "slopes": slopes._asdict() if slopes else None,
            "series": self.series,
            "exit_code": self.exit_code,
            "machines": self.machines,
            "engine": self.engine,
            "remote": dict(self.remote),
            "waited": self.waited,
        }

    def table(self) -> str:
        kills = sum(n for kind, n in self.faults.items() if kind.endswith("kill"))
        lines = [
            ("seed", f"{self.seed}"),
            ("time", f"{self.seconds:.0f} s, {self.lives} lives of the server"),
            ("requests", f"{self.requests:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("hit rate", f"{self.hit / max(self.asked, 1):.3f}"),
            ("kills", f"{kills}"),
            ("faults survived", f"{sum(self.faults.values())}"),
            *((f"  {kind}", f"{n}") for kind, n in sorted(self.faults.items())),
            ("files made bad", f"{sum(self.injected.values())}: {_listed(self.injected)}"),
            ("bad files met", f"{sum(self.met.values())}: {_listed(self.met)}"),
            ("answers judged twice", f"{self.rechecked:,}"),
            ("images acknowledged", f"{self.acknowledged:,}; files read and compared after an end: {self.checked:,}"),
            ("idle checks", f"{sum(self.checks.values())}, {self.checks['exact']} of them with du equal to the ledger"),
            ("wrong answers", f"{self.wrong}"),
            ("bytes lost", "0" if not self.lost else f"{self.lost} images"),
            ("other violations", f"{len(self.problems) - self.wrong - self.lost}"),
        ]
        if self.engine:
            lines += [
                ("remote tier", f"{self.machines} machines, {self.engine}"),
                *((f"  {what}", f"{n:,}") for what, n in sorted(self.remote.items())),
                ("  longest wait", f"{self.waited:.2f} s"),
            ]
        slopes = self.slopes
        if slopes:
            over = f"per 1000 requests, over {slopes.requests:,}"
            lines += [
                ("RSS slope", f"{slopes.resident_kb:+.0f} kB {over}"),
                ("open files slope", f"{slopes.files:+.2f} {over}"),
                ("threads slope", f"{slopes.threads:+.2f} {over}"),
            ]
        else:
            lines.append(("slopes", "no life was long enough"))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _slope(at: np.ndarray, series: np.ndarray) -> np.ndarray:
    """The median of the slopes between all pairs of samples (Theil and Sen): a peak here and there does not move it."""
    one, other = np.triu_indices(len(at), 1)
    apart = at[other] > at[one]
    one, other = one[apart], other[apart]
    return np.median((series[other] - series[one]) / (at[other] - at[one])[:, None], axis=0)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "-"
