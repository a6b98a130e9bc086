"""A model that spans processes: what its ranks' agreement costs, and the time to first token of `prefixcache serve` on two
ranks, beside mlx_lm.server on two ranks with its own prompt cache. The ranks are processes of this machine, tensor-parallel.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.servers.forked import BLAS
from tools.bench import report, serving
from tools.bench.report import Figure
from tools.bench.serving import Reply, Server, Texts
from tools.ranks.launch import free_ports, gpus, nccl, ring

RANKS = 2
# mlx_lm.server, whose ranks can't load a model under NCCL by themselves.
THEIRS = [
    sys.executable,
    "-c",
    "from mlx_lm.server import main\nfrom prefixcache.upstream import any_backend\nwith any_backend():\n    main()",
]
Launch = Callable[..., list["subprocess.Popen[Any]"]]
AGREEMENT_BAR = 1e-3  # seconds


class Plan(NamedTuple):
    """Chats of `turns` on a system prompt of `tokens`; and `requests` whose agreement is timed."""

    tokens: int
    chats: int
    requests: int


PLANS = {"full": Plan(3000, 5, 400), "quick": Plan(1500, 2, 100), "tiny": Plan(300, 1, 5)}


def agreement(scale: str) -> Iterator[Figure]:
    plan, out = PLANS[scale], Path(tempfile.mkdtemp(dir=report.scratch_parent)) / "cost"
    launch = nccl if gpus() >= RANKS else ring
    with out.open("wb") as to:
        command = [sys.executable, "-m", "tools.ranks.cost", "8192", str(plan.requests)]
        processes = launch(command, RANKS, [to, subprocess.DEVNULL], cwd=report.ROOT)
        for process in processes:
            process.wait(serving.PATIENCE)
    told = json.loads(next(line for line in out.read_text().splitlines() if line.startswith("{")))
    shutil.rmtree(out.parent)
    agreed, alone = (statistics.median(told[name]) for name in ("agreed", "alone"))
    cost = statistics.median(a - b for a, b in zip(told["agreed"], told["alone"], strict=True))
    yield Figure(
        f"{RANKS} ranks on one machine ({launch.__name__}): what agreement adds to the lookups of a hit of 8,192 tokens",
        f"{1e3 * cost:.2f} ms",
        f"<= {1e3 * AGREEMENT_BAR:.0f} ms",
        f"{told['collectives']} collectives; with them {1e3 * agreed:.2f} ms, without {1e3 * alone:.2f} ms",
        cost <= AGREEMENT_BAR,
        {"cost": cost, "agreed": agreed, "alone": alone, "collectives": told["collectives"]},
    )


def first_token(scale: str) -> Iterator[Figure]:
    """Chats of two turns at both servers; after a restart each chat's first turn again. A chat begins cold."""
    folder = Path(tempfile.mkdtemp(dir=report.scratch_parent))
    yield from _first_token(scale, ring, folder, serving.trained_model(folder), PLANS[scale].tokens, "1GB")
    shutil.rmtree(folder)


def first_token_gpu(scale: str) -> Iterator[Figure]:
    """The same on GPUs, with a model of Llama 3.2 3B's shape and random weights."""
    name = "rank-first-token-gpu"
    if gpus() < RANKS:
        yield Figure(f"{RANKS} GPUs: time to first token ({name})", "not measured", "", "needs two NVIDIA GPUs", None)
        return
    folder = Path(tempfile.mkdtemp(dir=report.scratch_parent))
    tokens = {"full": 20_000, "quick": 8000, "tiny": 300}[scale]
    yield from _first_token(scale, nccl, folder, serving.random_large(folder), tokens, "8GB")
    shutil.rmtree(folder)


def _first_token(scale: str, launch: Launch, folder: Path, model: Path, tokens: int, ram: str) -> Iterator[Figure]:
    plan, texts = PLANS[scale], Texts()
    chats = [[texts.piece(tokens), texts.piece(40), texts.piece(40)] for _ in range(plan.chats)]
    limits = ("--ram", ram, "--ssd-dir", str(folder / "ssd"), "--ssd", "20GB")
    ours = _asked(launch, serving.OURS, model, folder, chats, limits)
    theirs = _asked(launch, THEIRS, model, folder, chats, ())
    where, length = "GPUs" if launch is nccl else "ranks", ours[0]["first"].prompt_tokens
    for at, name in (("second", "turn 2"), ("restarted", "the first turn after a restart")):
        ratio, beside = _over_cold(ours, at), _over_cold(theirs, at)
        cold, their_cold = (statistics.median(chat["first"].first for chat in chats) for chats in (ours, theirs))
        yield Figure(
            f"{RANKS} {where}, tensor-parallel: time to first token of {name}, {length:,} tokens, over a cold one's",
            f"{ratio:.3f}",
            "",
            f"mlx_lm.server with its own prompt cache: {beside:.3f}; cold: {cold:.2f} and {their_cold:.2f} s",
            None,
            {"ratio": ratio, "mlx_lm.server": beside, "cold": cold, "mlx_lm.server's cold": their_cold},
        )
    others = [sum(chat["restarted"].text != chat["first"].text for chat in chats) for chats in (ours, theirs)]
    yield Figure(
        f"{RANKS} {where}: answers after the restart that are not the cold one's",
        f"{others[0]} of {plan.chats}",
        "0",
        f"mlx_lm.server: {others[1]}",
        not others[0],
        {"others": others},
    )


def _over_cold(chats: list[dict[str, Reply]], at: str) -> float:
    return statistics.median(chat[at].first / chat["first"].first for chat in chats)


def _asked(
    launch: Launch, command: Sequence[str], model: Path, folder: Path, chats: list[list[str]], flags: Sequence[str]
) -> list[dict[str, Reply]]:
    """What each chat's turns were answered."""
    replies: list[dict[str, Reply]] = []
    with rank_serving(launch, command, model, folder, *flags) as server:
        for system, *questions in chats:
            messages, told = [{"role": "system", "content": system}], {}
            for turn, question in zip(("first", "second"), questions, strict=True):
                messages.append({"role": "user", "content": question})
                told[turn] = _ask(server, messages)
                messages.append({"role": "assistant", "content": told[turn].text})
            replies.append(told)
    with rank_serving(launch, command, model, folder, *flags) as server:
        for (system, question, _), told in zip(chats, replies, strict=True):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            told["restarted"] = _ask(server, messages)
    return replies


def _ask(server: Server, messages: serving.Messages) -> Reply:
    """One greedy request, streamed: without the openai client, which a machine with GPUs may lack."""
    body = {
        "messages": messages,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    usage: dict[str, Any] = {}
    begin, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(asked, timeout=serving.PATIENCE) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices", ()):
                first = first or time.perf_counter() - begin
                text += choice.get("delta", {}).get("content") or ""
            usage = chunk.get("usage") or usage
    seconds = time.perf_counter() - begin
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Reply(text, usage["prompt_tokens"], cached, usage["completion_tokens"], True, first or seconds, seconds)


@contextmanager
def rank_serving(launch: Launch, command: Sequence[str], model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    """Ranks that serve a model, ready for requests. They are told to end at the end, and killed where they don't."""
    port = free_ports(1)[0]
    logs = [folder / f"rank-{port}-{rank}.log" for rank in range(RANKS)]
    environment = {
        **BLAS,
        "PYTHONPATH": os.pathsep.join([str(report.ROOT), *sys.path]),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    outputs = [log.open("wb") for log in logs]
    processes = launch(
        [*command, "--model", str(model), "--port", str(port), *flags], RANKS, outputs, cwd=report.ROOT, env=environment
    )
    server = Server(processes[0], port, logs[0])
    try:
        server.wait_until_ready()
        _ask(server, [{"role": "user", "content": "Hello?"}])
        yield server
        processes[0].terminate()
        for process in processes if command == serving.OURS else ():
            process.wait(60)
    finally:
        for process, output in zip(processes, outputs, strict=True):
            process.kill()
            process.wait()
            output.close()


FIGURES = {"rank-agreement": agreement, "rank-first-token": first_token, "rank-first-token-gpu": first_token_gpu}
