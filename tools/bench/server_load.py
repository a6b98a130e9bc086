"""`prefixcache serve` under load, real processes asked over HTTP: what a store costs the others in the batch, and a thousand
requests of which many are given up, on small budgets. Beside it mlx_lm.server.
"""

from __future__ import annotations

import json
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench import report, serving
from tools.bench.report import Figure
from tools.bench.serving import Server, Span, Texts

# -- what a store costs the others -------------------------------------------------------------------------------------


class Load(NamedTuple):
    """`streams` clients that are answered all the while, and requests of `visitors` others, one after the other, whose
    prompts share `shared` tokens and have `own` more."""

    streams: int
    visitors: int
    shared: int
    own: int


LOAD = {"full": Load(4, 48, 384, 116), "quick": Load(4, 12, 384, 116), "tiny": Load(2, 2, 64, 32)}
ENOUGH = 100  # stores, for a p99 that is not their maximum
STREAMED, ANSWERED = 120, 8  # tokens of an answer that is streamed, and of a visitor's


def stall(scale: str) -> Iterator[Figure]:
    """The time between two steps of the batch when a prompt cache is stored in between, on the server's own clocks."""
    plan = LOAD[scale]
    with report.scratch() as folder:
        model, ssd = serving.trained_model(folder), ("--ssd-dir", str(folder / "cache"), "--ssd", "4GB")
        ours = gaps_of(_watched(model, folder, plan, "ours", "--ram", "1GB", *ssd))
        theirs = gaps_of(_watched(model, folder, plan, "theirs"))
    usual, around = _without(ours), _with(ours)
    step, encode = statistics.median(usual), _p99([gap.encode for gap in around])
    blocked, stalled = [gap.store for gap in around], _beyond(ours)
    enough = len(around) >= ENOUGH
    name = f"server: {plan.streams} streams, {plan.visitors} others come and go"
    allowed = f"<= {1e3 * (step + encode):.0f} ms: a step and the encoding"
    yield Figure(
        f"{name}: the loop stands still for a store, p50 / p99",
        _spread(blocked),
        allowed,
        f"of it, encoding {_spread([gap.encode for gap in around])}; "
        f"mlx_lm.server {_spread([gap.store for gap in _with(theirs)])}",
        _p99(blocked) <= step + encode,
        {"step": step},
    )
    yield Figure(
        f"{name}: p99 of the gap between steps around a store, beyond the usual p99",
        f"{1e3 * stalled:.0f} ms",
        allowed if enough else f"(too few for a bar: {len(around)})",
        f"gaps usually {_spread(usual)}, around {len(around)} stores {_spread([gap.seconds for gap in around])}; "
        f"mlx_lm.server: {1e3 * _beyond(theirs):.0f} ms",
        stalled <= step + encode if enough else None,
        {"usual": usual, "around": [gap._asdict() for gap in around], "theirs": [gap._asdict() for gap in theirs]},
    )


class Gap(NamedTuple):
    """From the end of one step to the end of the next, without what went into computing and looking up prompts; the stores
    in between, and seconds of these and of their encoding."""

    seconds: float
    stores: int
    store: float
    encode: float


def gaps_of(spans: list[Span]) -> list[Gap]:
    """The gaps between steps of a batch of two or more. `spans` are in order of their ends."""
    gaps: list[Gap] = []
    between: list[Span] = []
    last: Span | None = None
    for span in spans:
        if span.what != "step":
            between.append(span)
            continue
        if last is not None and last.size > 1:
            spent = {what: sum(one.end - one.begin for one in between if one.what == what) for what in serving.WHAT}
            seconds = span.end - last.end - spent["prefill"] - spent["fetch"]
            gaps.append(Gap(seconds, sum(one.what == "store" for one in between), spent["store"], spent["encode"]))
        last, between = span, []
    return gaps


def _without(gaps: list[Gap]) -> list[float]:
    return [gap.seconds for gap in gaps if not gap.stores]


def _with(gaps: list[Gap]) -> list[Gap]:
    return [gap for gap in gaps if gap.stores]


def _beyond(gaps: list[Gap]) -> float:
    return _p99([gap.seconds for gap in _with(gaps)]) - _p99(_without(gaps))


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def _spread(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} / {1e3 * _p99(seconds):.1f} ms"


def _watched(model: Path, folder: Path, plan: Load, which: str, *flags: str) -> list[Span]:
    """What the thread of such a server did under this load."""
    texts, out, over = Texts(), folder / f"spans-{which}.json", threading.Event()
    shared = texts.piece(plan.shared)
    asked = {"role": "system", "content": shared}
    with serving.serving([*serving.CLOCKED, str(out), which], model, folder, *flags) as server:

        def stream(start: str) -> Callable[[], None]:
            def go_on() -> None:
                client = serving.client_of(server)
                while not over.is_set():
                    serving.ask(client, [{"role": "user", "content": start}], STREAMED)

            return go_on

        def visit() -> None:
            client = serving.client_of(server)
            try:
                for question in questions:
                    serving.ask(client, [asked, {"role": "user", "content": question}], ANSWERED)
            finally:
                over.set()

        questions = [texts.piece(plan.own) for _ in range(plan.visitors)]
        serving.at_once([*(stream(texts.piece(64)) for _ in range(plan.streams)), visit])
        server.stop()
    return [Span(*span) for span in json.loads(out.read_text())]


# -- many requests, many given up --------------------------------------------------------------------------------------


class Many(NamedTuple):
    """`requests` from `clients`, of which a third is given up; prompts begin with one of `prefixes`, of `shared` tokens."""

    requests: int
    clients: int = 8
    prefixes: int = 5
    shared: tuple[int, int] = (60, 180)
    own: tuple[int, int] = (40, 120)
    answer: tuple[int, int] = (4, 8)


MANY = {"full": Many(1000), "quick": Many(200), "tiny": Many(12, clients=3)}
RAM, SSD = 2_000_000, 20_000_000
SLOPE_BAR = 1000  # kB for 100 requests: a tenth of what their prompt caches hold
EVERY = 10  # requests, between two looks at the process's memory


def cancels(scale: str) -> Iterator[Figure]:
    """Many requests, some given up before or while they are answered, on budgets that hold a few of them."""
    plan = MANY[scale]
    with report.scratch() as folder:
        model = serving.random_model(folder)
        limits = ["--ram", str(RAM), "--ssd-dir", str(folder / "cache"), "--ssd", str(SSD), "--codec", "raw"]
        with serving.serving(serving.OURS, model, folder, *limits) as server:
            ours = _crowd(server, plan, folder / "cache")
            metrics = server.metrics()
            server.stop()
            complaints = server.complaints()
        with serving.serving(serving.THEIRS, model, folder) as server:
            theirs = _crowd(server, plan, None)
            server.stop()
    name = f"server: {plan.requests} requests, {plan.clients} clients, {ours.left} given up"
    yield Figure(
        f"{name}: errors, lines of trouble in the log",
        f"{len(ours.errors)}, {len(complaints)}",
        "none",
        f"mlx_lm.server: {len(theirs.errors)} errors",
        not ours.errors and not complaints,
        {"errors": ours.errors, "complaints": complaints, "seconds": ours.seconds, "metrics": metrics},
    )
    peak = metrics["prefixcache_ram_peak_bytes"]
    kept = peak <= RAM and ours.disk <= SSD
    yield Figure(
        f"{name}: RAM held at its peak, SSD at its largest",
        f"{peak / 1e6:.2f} MB, {ours.disk / 1e6:.1f} MB",
        f"<= {RAM / 1e6:g} MB, {SSD / 1e6:g} MB",
        f"{metrics['prefixcache_stored_bytes_total'] / 1e6:.0f} MB were stored",
        kept,
        {"ram_peak": peak, "disk": ours.disk},
    )
    slope, reference, bars = slope_of(ours.rss), slope_of(theirs.rss), plan.requests >= 1000
    yield Figure(
        f"{name}: growth of the process over the last two thirds",
        f"{slope:.0f} kB for 100 requests",
        f"<= {SLOPE_BAR} kB" if bars else "(too few for a bar)",
        f"mlx_lm.server: {reference:.0f} kB",
        slope <= SLOPE_BAR if bars else None,
        {"slope": slope, "reference": reference, "rss": ours.rss, "theirs": theirs.rss},
    )


class Crowd(NamedTuple):
    """What clients saw: errors, requests given up, (requests, bytes of the process), the largest size of the directory."""

    errors: list[str]
    left: int
    rss: list[tuple[int, int]]
    disk: int
    seconds: float


def _crowd(server: Server, plan: Many, directory: Path | None) -> Crowd:
    texts, draw = Texts(), random.Random(3)
    prefixes = [texts.piece(draw.randint(*plan.shared)) for _ in range(plan.prefixes)]
    asked: queue.SimpleQueue[tuple[serving.Messages, int, int | None]] = queue.SimpleQueue()
    for _ in range(plan.requests):
        messages = [
            {"role": "system", "content": draw.choice(prefixes)},
            {"role": "user", "content": texts.piece(draw.randint(*plan.own))},
        ]
        answer = draw.randint(*plan.answer)
        asked.put((messages, answer, draw.randint(0, answer - 1) if draw.random() < 1 / 3 else None))
    errors: list[str] = []
    rss: list[tuple[int, int]] = []
    done, disk, left, lock = 0, 0, 0, threading.Lock()

    def client() -> None:
        nonlocal done, disk, left
        own = serving.client_of(server)
        while True:
            try:
                messages, answer, leave = asked.get_nowait()
            except queue.Empty:
                return
            try:
                if leave is None:
                    serving.ask(own, messages, answer)
                else:
                    serving.leave_early(own, messages, answer, leave)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            with lock:
                done += 1
                left += leave is not None
                if done % EVERY == 0:
                    rss.append((done, server.rss()))
                    disk = max(disk, serving.disk_usage(directory)) if directory is not None else 0

    begin = time.perf_counter()
    serving.at_once([client] * plan.clients)
    return Crowd(errors, left, rss, disk, time.perf_counter() - begin)


def slope_of(samples: list[tuple[int, int]]) -> float:
    """kB for 100 requests: a line through the last two thirds of (requests, bytes)."""
    last = samples[len(samples) // 3 :]
    if len(last) < 2:
        return 0.0
    return float(np.polyfit(*zip(*last, strict=True), 1)[0]) * 100 / 1e3


FIGURES = {"server-stall": stall, "server-cancels": cancels}
