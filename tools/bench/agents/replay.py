"""Sessions of agents, replayed against `prefixcache serve`, mlx_lm.server and vllm-mlx: what of each prompt is cached, of the
longest beginning that it shares with what was served before, and what is computed, over what is necessary.

Models are tiny and random, and say what a script says: which tokens are the same doesn't depend on what a model knows. What
is shared is counted in the tokens of `prefixcache serve`, after canonical text, for all of them.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mlx_lm.utils import load_tokenizer

from prefixcache.keys import as_tokens, common_prefix
from prefixcache.servers.apis.messages import Messages
from tools.bench import report, serving
from tools.bench.agents import models
from tools.bench.agents.clients import CHAT, CLIENTS, MESSAGES, Asked, Session
from tools.bench.peer import venv
from tools.bench.report import Beside, Figure
from tools.bench.serving import Server

OURS, STOCK, VLLM_MLX = "prefixcache", "mlx_lm.server", "vllm-mlx"
SPEAKING = Path(__file__).with_name("speaking.py")
FLAGS = {
    OURS: ("--ram", "2GB", "--no-decline-slow-hits"),
    STOCK: ("--prompt-cache-bytes", "2GB"),
    VLLM_MLX: (
        "--continuous-batching",
        "--cache-memory-mb",
        "2000",
        "--served-model-name",
        "default_model",
        "--offline",
    ),
}


class Plan(NamedTuple):
    """Tokens of a client's first prompt, kinds of models, servers, and whose sessions run with each order of the tools."""

    size: int
    kinds: tuple[str, ...] = models.KINDS
    servers: tuple[str, ...] = tuple(FLAGS)
    clients: tuple[tuple[str, tuple[str, ...]], ...] = (
        (models.BEHIND, tuple(CLIENTS)),
        (models.FIRST, ("Claude Code", "opencode")),  # in others it makes no difference where tools are
    )


PLANS = {
    "full": Plan(10_000),
    "quick": Plan(4_000),
    "tiny": Plan(600, ("plain", "hybrid"), (OURS,), ((models.FIRST, ("opencode", "llm")),)),
}
STEPS = ("step", "turn", "long call")


class Served(NamedTuple):
    """A prompt that was served: for whom and what, its tokens, how many of them were cached, and how many it shared with what
    was served before, answers included."""

    client: str
    what: str
    tokens: int
    cached: int
    shared: int


def served(which: str, model: Path, order: str, asked_by: dict[str, Session], folder: Path) -> list[Served]:
    """The sessions of clients with one server, one request after the other."""
    folder.mkdir()
    tokenizer = load_tokenizer(model)
    python = venv.python() if which == VLLM_MLX else Path(sys.executable)
    (folder / "answer.json").write_text("[1]")
    served: list[Served] = []
    with serving.serving([str(python), str(SPEAKING), which, str(folder)], model, folder, *FLAGS[which]) as server:
        known = [_prompts(folder)[-1].tokens]  # the request that `serving` makes
        for client, session in asked_by.items():
            for asked in session:
                answer = [
                    *tokenizer.encode(models.written(asked.answer, order), add_special_tokens=False),
                    tokenizer.eos_token_id,
                ]
                (folder / "answer.json").write_text(json.dumps(answer))
                _ask(server, which, asked)
                prompt, cached = _prompts(folder)[-1]
                shared = max(common_prefix(prompt, other) for other in known)
                served.append(Served(client, asked.what, len(prompt), cached, min(shared, len(prompt) - 1)))
                known.append(np.concatenate([prompt, as_tokens(answer)]))
    return served


class _Prompt(NamedTuple):
    tokens: np.ndarray
    cached: int


def _prompts(folder: Path) -> list[_Prompt]:
    lines = map(json.loads, (folder / "requests.jsonl").read_text().splitlines())
    return [_Prompt(as_tokens(line["prompt"]), line["cached"]) for line in lines]


def _ask(server: Server, which: str, asked: Asked) -> None:
    path, body = asked.path, asked.body
    if path == MESSAGES and which == STOCK:  # which has no such API: as a gateway asks it
        path, body = CHAT, Messages().chat_request(body)
    body = {"model": "default_model", "temperature": 0, **body}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=serving.PATIENCE) as answer:
        answer.read()


def replayed(plan: Plan) -> Iterator[Figure]:
    """All sessions with each kind of model, on one server after the other."""
    for order, clients in plan.clients:
        found: Found = {which: {} for which in plan.servers}
        missing: dict[str, str] = {}
        with report.scratch() as folder:
            for kind in plan.kinds:
                model = models.save(folder / kind, kind, order)
                for which in plan.servers:
                    sessions = {client: CLIENTS[client](plan.size) for client in clients}
                    try:
                        found[which][kind] = served(which, model, order, sessions, folder / f"{kind}-{which}")
                    except (venv.NotInstalled, RuntimeError, OSError) as error:
                        if which == OURS:
                            raise
                        missing[which] = str(error).splitlines()[0]
        yield from _figures(order, found, missing)


Found = dict[str, dict[str, list[Served]]]


def _figures(order: str, found: Found, missing: dict[str, str]) -> Iterator[Figure]:
    ours = found[OURS]
    some = next(iter(ours.values()))
    for client, what in dict.fromkeys((each.client, each.what) for each in some):
        if what == "first prompt":
            continue
        places = [place for place, each in enumerate(some) if (each.client, each.what) == (client, what)]
        ratios = {which: _over_shared(found[which], ours, places) for which in found}
        bar = _bar(client, what)
        yield Figure(
            f"agents, {order}: {client}, {what}, {_tokens(some, places)}",
            _said(ratios[OURS]),
            f">= {bar:.3g}",
            "",
            min(ratios[OURS].values()) >= bar,
            {
                which: {kind: [each[place]._asdict() for place in places] for kind, each in of.items()}
                for which, of in found.items()
            },
            tuple(Beside(which, missing.get(which) or _said(ratios[which])) for which in found if which != OURS),
        )
    computed = {which: _over_necessary(found[which], ours) for which in found}
    yield Figure(
        f"agents, {order}: all {len(some)} requests, tokens computed over necessary",
        _said(computed[OURS]),
        "",
        "",
        None,
        {},
        tuple(Beside(which, missing.get(which) or _said(computed[which])) for which in found if which != OURS),
    )


def _over_shared(of: dict[str, list[Served]], ours: dict[str, list[Served]], places: list[int]) -> dict[str, float]:
    """What was cached over what is shared, by kind of model; of several requests the least."""
    return {
        kind: min(each[place].cached / max(ours[kind][place].shared, 1) for place in places)
        for kind, each in of.items()
    }


def _over_necessary(of: dict[str, list[Served]], ours: dict[str, list[Served]]) -> dict[str, float]:
    return {
        kind: sum(each.tokens - each.cached for each in found) / sum(each.tokens - each.shared for each in ours[kind])
        for kind, found in of.items()
    }


def _tokens(of: list[Served], places: list[int]) -> str:
    return "; ".join(f"{of[place].tokens:,} tokens, {of[place].shared:,} shared" for place in places)


def _bar(client: str, what: str) -> float:
    if client == "llm":
        return 0.01
    return 0.995 if what in STEPS else 0.97


def _said(ratios: dict[str, float]) -> str:
    return ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items())


FIGURES = {"agents": lambda scale: replayed(PLANS[scale])}
