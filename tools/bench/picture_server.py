"""How long the user of a model that sees waits for the first token: of a picture's first question, of another question about
it, and of the next turn with another picture. mlx_vlm.server with its own prefix cache (APC) and `prefixcache serve --vlm`,
by turns in one run, with a small random qwen2_5_vl. On Linux without a GPU preload OpenBLAS for it (docs/servers.md).
"""

from __future__ import annotations

import base64
import io
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.vlm import folders
from tools.bench import report, serving
from tools.bench.report import Beside, Figure
from tools.bench.serving import Reply, Texts

APC, RAW, DEFAULT = "mlx_vlm.server with APC", "--codec raw", "default"
THEIRS = ["env", "APC_ENABLED=1", "APC_DISK_ENABLED=0", sys.executable, "-m", "mlx_vlm.server", "--host", "127.0.0.1"]
COMMANDS = {
    APC: (THEIRS, ()),
    RAW: ([*serving.OURS, "--vlm"], ("--ram", "1GB", "--codec", "raw")),
    DEFAULT: ([*serving.OURS, "--vlm"], ("--ram", "1GB")),
}
PHASES = ("cold", "another question about the same picture", "the next turn, with another picture")
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
}


class Plan(NamedTuple):
    """Chats with each server, tokens of the system prompt, a picture's pixels a side."""

    chats: int
    system: int
    side: int


SCALES = {"full": Plan(5, 400, 448), "quick": Plan(3, 400, 448), "tiny": Plan(1, 100, 112)}


def first_tokens(scale: str) -> Iterator[Figure]:
    """Median times to the first token in each phase; each chat has texts and pictures of its own."""
    plan, texts = SCALES[scale], Texts()
    with report.scratch() as folder, ExitStack() as running:
        vision = {**folders.CONFIGS["qwen2_5_vl"]["vision_config"], "out_hidden_size": LARGER["hidden_size"]}
        model = folders.save("qwen2_5_vl", folder / "qwen2_5_vl", vision_config=vision, **LARGER)
        servers = {
            name: running.enter_context(serving.serving(command, model, folder, *flags, name=str(model)))
            for name, (command, flags) in COMMANDS.items()
        }
        clients = {name: serving.client_of(server) for name, server in servers.items()}
        found: dict[str, list[list[Reply]]] = {name: [] for name in COMMANDS}
        for number in range(plan.chats):
            turns = _turns(plan, number, texts.piece(plan.system))
            for name in list(COMMANDS) if number % 2 == 0 else reversed(COMMANDS):
                found[name].append([serving.ask(clients[name], messages, 8, str(model)) for messages in turns])
    for at, phase in enumerate(PHASES):
        yield _figure(phase, {name: [chat[at] for chat in replies] for name, replies in found.items()})


def _turns(plan: Plan, number: int, system: str) -> list[serving.Messages]:
    """The messages of each phase."""
    first, second = (_picture(2 * number + which, plan.side) for which in (0, 1))
    told = {"role": "system", "content": system}

    def asked(picture: Any, question: str) -> Any:
        return {"role": "user", "content": [picture, {"type": "text", "text": question}]}

    begun = [told, asked(first, "What do you see there?")]
    return [
        begun,
        [told, asked(first, "Who painted this one?")],
        [*begun, {"role": "assistant", "content": "A picture."}, asked(second, "And what is this?")],
    ]


def _picture(number: int, side: int) -> dict[str, Any]:
    pixels, data = np.random.default_rng(number).integers(0, 255, (side, side, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _figure(phase: str, replies: dict[str, list[Reply]]) -> Figure:
    apc = _median(replies[APC])
    return Figure(
        f"--vlm: {len(replies[APC])} chats, time to the first token, {phase}, {replies[APC][0].prompt_tokens:,} tokens",
        f"raw {_said(replies[RAW])}; default {_said(replies[DEFAULT])}",
        "",
        "",
        None,
        {name: [{"first": r.first, "hit": r.cached_tokens} for r in of] for name, of in replies.items()},
        (
            Beside(
                APC,
                _said(replies[APC]),
                f"{apc / _median(replies[RAW]):.2g} x, {apc / _median(replies[DEFAULT]):.2g} x",
            ),
        ),
    )


def _median(replies: list[Reply]) -> float:
    return statistics.median(reply.first for reply in replies)


def _said(replies: list[Reply]) -> str:
    hit = round(statistics.median(reply.cached_tokens for reply in replies))
    return f"{_median(replies):.2f} s ({hit:,} hit)"


FIGURES = {"picture-server": first_tokens}
