"""How long a chat's user waits for the first token: cold, at the second turn, and after the server was started again.
mlx_lm.server, `prefixcache serve --codec raw` and `prefixcache serve`, by turns in one run, on a pretrained model; one chat
alone, or eight at once.

    python -m tools.real_model && python -m tools.bench --only server-beside-stock,server-at-once

On Linux without a GPU preload OpenBLAS for it (docs/servers.md): all three are then many times faster.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import on_cpu
from tools.bench import report, serving
from tools.bench.report import Beside, Figure
from tools.bench.serving import Reply, Texts
from tools.real_model.fetch import default_folder, prepare

STOCK, RAW, DEFAULT = "mlx_lm.server", "--codec raw", "default"
COMMANDS = {STOCK: (serving.THEIRS, ()), RAW: (serving.OURS, ("--codec", "raw")), DEFAULT: (serving.OURS, ())}
PHASES = ("cold", "turn 2", "turn 3, after a restart")


class Chats(NamedTuple):
    """`rounds` times `at_once` chats with each server; tokens of the system prompt, of a question and of an answer."""

    rounds: int
    system: int
    at_once: int = 1
    question: int = 40
    answer: int = 24


ALONE = {"full": Chats(5, 1500), "quick": Chats(3, 600), "tiny": Chats(1, 200)}
ON_A_GPU = {"full": Chats(3, 20_000), "quick": Chats(2, 8000), "tiny": Chats(1, 200)}
AT_ONCE = {"full": Chats(2, 750, 8), "quick": Chats(1, 400, 8), "tiny": Chats(1, 200, 2)}


def beside_stock(plan: Chats, make_model: Callable[[Path], Path], ram: str = "1GB") -> Iterator[Figure]:
    """Median times to the first token in each phase; every chat has a text of its own, and every server starts empty."""
    texts = Texts()
    with report.scratch() as folder:
        model = make_model(folder)
        found: dict[str, list[list[Reply]]] = {name: [] for name in COMMANDS}
        for number in range(plan.rounds):
            systems = [texts.piece(plan.system) for _ in range(plan.at_once)]
            questions = [texts.piece(plan.question) for _ in PHASES]
            for name in list(COMMANDS) if number % 2 == 0 else reversed(COMMANDS):
                place = folder / f"{number}-{len(found[name])}-{name.strip('-').replace(' ', '-')}"
                place.mkdir()
                found[name] += _chats(Command(name, model, ram), place, systems, questions, plan.answer)
                shutil.rmtree(place)
    for at, phase in enumerate(PHASES):
        replies = {name: [chat[at] for chat in chats] for name, chats in found.items()}
        stock = _median(replies[STOCK])
        prompt = round(statistics.median(reply.prompt_tokens for reply in replies[STOCK]))
        each = f"{plan.rounds} chats" if plan.at_once == 1 else f"{plan.rounds} times {plan.at_once} chats at once"
        yield Figure(
            f"server: {model.name}, {each}: time to the first token, {phase}, {prompt:,} tokens",
            f"raw {_said(replies[RAW])}; default {_said(replies[DEFAULT])}",
            "",
            "",
            None,
            {
                name: [{"first": r.first, "computed": r.computed, "prompt": r.prompt_tokens} for r in of]
                for name, of in replies.items()
            },
            (
                Beside(
                    STOCK,
                    _said(replies[STOCK]),
                    f"{stock / _median(replies[RAW]):.2g} x, {stock / _median(replies[DEFAULT]):.2g} x",
                ),
            ),
        )


class Command(NamedTuple):
    """One of COMMANDS, its model, and the RAM that ours may take."""

    name: str
    model: Path
    ram: str


def _chats(
    command: Command, place: Path, systems: Sequence[str], questions: Sequence[str], max_tokens: int
) -> list[list[Reply]]:
    """The replies of each chat: all take two turns at once, then comes a restart, and the third turn."""
    server_command, flags = COMMANDS[command.name]
    if server_command is serving.OURS:
        flags = (*flags, "--ram", command.ram, "--ssd-dir", str(place / "cache"), "--ssd", "40GB")
    chats: list[serving.Messages] = [[{"role": "system", "content": system}] for system in systems]
    replies: list[list[Reply]] = [[] for _ in systems]
    for turns in (questions[:2], questions[2:]):
        with (
            serving.serving(server_command, command.model, place, *flags) as server,
            ThreadPoolExecutor(len(systems)) as pool,
        ):
            ask = partial(serving.ask, serving.client_of(server), max_tokens=max_tokens)
            for question in turns:
                for messages in chats:
                    messages.append({"role": "user", "content": question})
                for number, reply in enumerate(pool.map(ask, chats)):
                    replies[number].append(reply)
                    chats[number].append({"role": "assistant", "content": reply.text})
            server.stop()
    return replies


def pretrained(folder: Path) -> Path:
    """SmolLM2 as `make real-model` left it, its weights cast to float32: MLX has no fast half precision on a CPU."""
    source, target = default_folder(), folder / "SmolLM2-135M"
    prepare(source)
    shutil.copytree(source, target)
    weights = mx.load(str(source / "model.safetensors"))
    cast = {name: value.astype(mx.float32) for name, value in weights.items()}
    mx.save_safetensors(str(target / "model.safetensors"), cast, metadata={"format": "mlx"})
    config = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))
    return target


def _median(replies: list[Reply]) -> float:
    return statistics.median(reply.first for reply in replies)


def _said(replies: list[Reply]) -> str:
    computed = round(statistics.median(reply.computed for reply in replies))
    return f"{_median(replies):.2f} s ({computed:,} computed)"


def _of_scale(plans: dict[str, Chats]) -> Callable[[str], Iterator[Figure]]:
    return lambda scale: beside_stock(plans[scale], _two_layers if scale == "tiny" else pretrained)


def _two_layers(folder: Path) -> Path:
    return serving.trained_model(folder, layers=2)


def on_a_gpu(scale: str) -> Iterator[Figure]:
    """The same with a model of Llama 3.2 3B's shape and random weights."""
    if scale == "tiny":
        yield from beside_stock(ON_A_GPU[scale], _two_layers)
    elif on_cpu():
        yield report.needs_a_gpu("time to the first token beside mlx_lm.server")
    else:
        yield from beside_stock(ON_A_GPU[scale], serving.random_large, "16GB")


FIGURES = {
    "server-beside-stock": _of_scale(ALONE),
    "server-at-once": _of_scale(AT_ONCE),
    "server-beside-stock-gpu": on_a_gpu,
}
