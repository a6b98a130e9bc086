"""`prefixcache serve` with a remote tier, real processes asked over HTTP: the time to first token of a prompt that another
machine has stored, and of short requests while the engine is stopped. Beside it the same server without a remote tier.

Where OpenBLAS is installed the servers multiply with it, many times faster than with what MLX's wheel brings: against a slow
prefill a network would look too good.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.remote.servers import proxy
from tests.servers.forked import BLAS
from tools.bench import engines, report, serving
from tools.bench.report import Figure
from tools.bench.serving import Server, Texts


class Plan(NamedTuple):
    """Prompts of `tokens` at each latency; and `requests` of `short` tokens to each server while the engine is stopped."""

    tokens: int
    prompts: int
    latencies: tuple[float, ...]
    requests: int
    short: int


PLANS = {
    "full": Plan(4000, 3, (0, 0.01, 0.05), 480, 300),
    "quick": Plan(2000, 2, (0, 0.05), 60, 300),
    "tiny": Plan(600, 1, (0,), 3, 100),
}
STOPPED_BAR = 1.05
ENOUGH = 200  # requests, for a p99 that is not their maximum
SHUFFLES = 2000
LIMITS = ("--ram", "1GB")
PATIENCE = 60.0  # seconds until what was stored has been sent
SENT = "prefixcache_remote_written_images_total"


def first_token(scale: str) -> Iterator[Figure]:
    """One machine stores prompts; another, whose way to the engine is longer, is asked for them; and a third, that has no
    remote tier. By turns, each prompt once."""
    plan = PLANS[scale]
    for kind in ("Valkey", "S3"):
        try:
            with engines.running(kind) as running, mock.patch.dict(os.environ, BLAS):
                yield from _first_token(running, plan)
        except engines.Missing as missing:
            yield engines.not_measured(f"server, remote {kind}: time to first token", missing)


def _first_token(running: engines.Running, plan: Plan) -> Iterator[Figure]:
    assert running.server is not None
    folder, texts = running.folder, Texts()
    model, key = serving.trained_model(folder), _key_file(folder)
    with ExitStack() as stack, proxy(running.server.port) as network:
        author, reader, alone = (
            stack.enter_context(serving.serving(serving.OURS, model, folder, *LIMITS, *flags))
            for flags in (
                ("--remote", running.url(), *key, "--remote-admission", "always"),
                ("--remote", running.url(network.port), *key, "--remote-admission", "never"),
                (),
            )
        )
        _in_turns(author, reader, alone, [texts.piece(plan.tokens)])  # what each learns of its model's layout and rates
        for latency in plan.latencies:
            network.latency = latency / 2
            before = _given_up(reader)
            brought, cold, hit, length = _in_turns(
                author, reader, alone, [texts.piece(plan.tokens) for _ in range(plan.prompts)]
            )
            ratio = statistics.median(a / b for a, b in zip(brought, cold, strict=True))
            yield Figure(
                f"server, remote {running.kind}: time to first token, {length:,} tokens that another machine stored, "
                f"{1e3 * latency:.0f} ms added to a round trip, over a cold one's",
                f"{ratio:.3f} ({_spread(brought)})",
                "",
                f"cold: {_spread(cold)}; of the prompt {hit:.0%} was hit",
                None,
                {"ratio": ratio, "brought": brought, "cold": cold, "hit": hit, "given_up": _given_up(reader) - before},
            )


def _in_turns(
    author: Server, reader: Server, alone: Server, prompts: list[str]
) -> tuple[list[float], list[float], float, int]:
    """Seconds to the first token at the reader and at who is alone; the share that the reader hit, and a prompt's tokens."""
    clients = [serving.client_of(server) for server in (author, reader, alone)]
    brought, cold, hits, length = [], [], [], 0
    for number, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        serving.ask(clients[0], messages, 4)
        _until_sent(author)
        replies: dict[int, Any] = {}
        for which in (1, 2) if number % 2 else (2, 1):
            replies[which] = serving.ask(clients[which], messages, 4)
        brought.append(replies[1].first)
        cold.append(replies[2].first)
        hits.append(replies[1].cached_tokens / replies[1].prompt_tokens)
        length = replies[1].prompt_tokens
    return brought, cold, statistics.median(hits), length


def _given_up(server: Server) -> float:
    """Calls of the engine that failed or came too late, and prompts that were not worth reading, so far."""
    metrics = server.metrics()
    return sum(metrics[f"prefixcache_remote_{what}_total"] for what in ("errors", "timeouts", "skipped_prompts"))


def _until_sent(server: Server) -> None:
    """Until nothing more has been sent for half a second."""
    before, until, quiet = -1.0, time.monotonic() + PATIENCE, 0
    while time.monotonic() < until and quiet < 5:
        time.sleep(0.1)
        now = server.metrics()[SENT]
        quiet, before = (quiet + 1, before) if now == before and now > 0 else (0, now)


def stopped(scale: str) -> Iterator[Figure]:
    """Short prompts, never the same, to a server whose engine was stopped, and to one without a remote tier, by turns."""
    plan = PLANS[scale]
    for kind in ("Valkey", "S3"):
        name = f"server, remote {kind} stopped: time to first token of {plan.requests} short requests, p50 / p99"
        try:
            with engines.running(kind) as running, mock.patch.dict(os.environ, BLAS):
                yield _stopped(name, running, plan)
        except engines.Missing as missing:
            yield engines.not_measured(name, missing)


def _stopped(name: str, running: engines.Running, plan: Plan) -> Figure:
    assert running.server is not None
    folder, texts = running.folder, Texts()
    model, key = serving.trained_model(folder), _key_file(folder)
    with (
        serving.serving(serving.OURS, model, folder, *LIMITS, "--remote", running.url(), *key) as shared,
        serving.serving(serving.OURS, model, folder, *LIMITS) as alone,
    ):
        clients = [serving.client_of(server) for server in (shared, alone)]
        for client in clients * 3:  # while the engine answers
            serving.ask(client, [{"role": "user", "content": texts.piece(plan.short)}], 2)
        running.server.freeze()
        try:

            def first(which: int, number: int) -> float:
                text = prompts[number]
                return serving.ask(clients[which], [{"role": "user", "content": text}], 2).first

            prompts = [texts.piece(plan.short) for _ in range(plan.requests)]
            ours, theirs = report.in_turns(plan.requests, lambda n: first(0, n), lambda n: first(1, n))
        finally:
            running.server.thaw()
    return tails(name, ours, theirs)


def tails(name: str, ours: list[float], theirs: list[float]) -> Figure:
    """The p99 of one over the other's, and what chance alone would give."""
    ratio, chance = _p99(ours) / _p99(theirs), by_chance(ours, theirs)
    met = ratio <= STOPPED_BAR if len(ours) >= ENOUGH else None
    pairs = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Figure(
        name,
        f"{_tail(ours)}; p99 {ratio:.2f} of the other's, the median of pairs {pairs:.2f}",
        f"p99 <= {STOPPED_BAR}",
        f"without a remote tier: {_tail(theirs)}; by chance p99 is {chance[0]:.2f} to {chance[1]:.2f}",
        met,
        {"ratio": ratio, "stopped": ours, "alone": theirs, "chance": chance},
    )


def by_chance(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Between what the ratio of the p99s is in 9 of 10 cases, were there no difference: the two of a pair are swapped at
    random."""
    draw, ratios = random.Random(0), []
    for _ in range(SHUFFLES):
        pairs = [(a, b) if draw.random() < 0.5 else (b, a) for a, b in zip(ours, theirs, strict=True)]
        ratios.append(_p99([a for a, _ in pairs]) / _p99([b for _, b in pairs]))
    ratios.sort()
    return ratios[SHUFFLES // 20], ratios[-1 - SHUFFLES // 20]


def _key_file(folder: Path) -> tuple[str, str]:
    path = folder / "fleet.key"
    path.write_text(engines.KEY.hex())
    path.chmod(0o600)
    return "--remote-key-file", str(path)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def _tail(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} / {1e3 * _p99(seconds):.0f} ms"


def _spread(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}"


FIGURES = {"remote-first-token": first_token, "remote-stopped": stopped}
