"""How long a chat's user waits for the first token: cold, at the second turn, and after the server was started again.
mlx_lm.server, `prefixcache serve --codec raw` and `prefixcache serve`, by turns in one run, on a pretrained model.

    python -m tools.real_model && python -m tools.bench --only server-beside-stock

On Linux without a GPU preload OpenBLAS for it (docs/servers.md): all three are then many times faster.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from tools.bench import report, serving
from tools.bench.report import Beside, Figure
from tools.bench.serving import Reply, Texts
from tools.real_model.fetch import default_folder, prepare

STOCK, RAW, DEFAULT = "mlx_lm.server", "--codec raw", "default"
COMMANDS = {STOCK: (serving.THEIRS, ()), RAW: (serving.OURS, ("--codec", "raw")), DEFAULT: (serving.OURS, ())}
PHASES = ("cold", "turn 2", "turn 3, after a restart")


class Chats(NamedTuple):
    """`rounds` chats with each server; tokens of the system prompt, of a question and of an answer."""

    rounds: int
    system: int
    question: int = 40
    answer: int = 24


SCALES = {"full": Chats(5, 1500), "quick": Chats(3, 600), "tiny": Chats(1, 200)}


def beside_stock(scale: str) -> Iterator[Figure]:
    """Median times to the first token in each phase; every chat has a text of its own, and every server starts empty."""
    plan, texts = SCALES[scale], Texts()
    with report.scratch() as folder:
        model = serving.trained_model(folder) if scale == "tiny" else _pretrained(folder)
        found: dict[str, list[list[Reply]]] = {name: [] for name in COMMANDS}
        for number in range(plan.rounds):
            system, questions = texts.piece(plan.system), [texts.piece(plan.question) for _ in PHASES]
            for name in list(COMMANDS) if number % 2 == 0 else reversed(COMMANDS):
                place = folder / f"{number}-{len(found[name])}-{name.strip('-').replace(' ', '-')}"
                place.mkdir()
                found[name].append(_chat(name, model, place, system, questions, plan.answer))
                shutil.rmtree(place)
    for at, phase in enumerate(PHASES):
        replies = {name: [chat[at] for chat in chats] for name, chats in found.items()}
        stock = _median(replies[STOCK])
        prompt = round(statistics.median(reply.prompt_tokens for reply in replies[STOCK]))
        yield Figure(
            f"server: {model.name}, float32, {plan.rounds} chats: time to the first token, {phase}, {prompt:,} tokens",
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


def _chat(name: str, model: Path, place: Path, system: str, questions: Sequence[str], max_tokens: int) -> list[Reply]:
    """Two turns, a restart, and the third turn."""
    command, flags = COMMANDS[name]
    if command is serving.OURS:
        flags = (*flags, "--ram", "1GB", "--ssd-dir", str(place / "cache"), "--ssd", "4GB")
    messages: serving.Messages = [{"role": "system", "content": system}]
    replies: list[Reply] = []
    for turns in (questions[:2], questions[2:]):
        with serving.serving(command, model, place, *flags) as server:
            for question in turns:
                messages.append({"role": "user", "content": question})
                replies.append(serving.ask(serving.client_of(server), messages, max_tokens))
                messages.append({"role": "assistant", "content": replies[-1].text})
            server.stop()
    return replies


def _pretrained(folder: Path) -> Path:
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


FIGURES = {"server-beside-stock": beside_stock}
