"""`prefixcache serve` under load, real processes asked over HTTP: what a store costs the others in the batch. Beside it
mlx_lm.server.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tools.bench import report, serving
from tools.bench.report import Figure
from tools.bench.serving import Span, Texts

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


FIGURES = {"server-stall": stall}
