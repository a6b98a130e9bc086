"""What it saves and costs that a chat's next turn is warmed while nobody asks: `prefixcache serve` with and without, random
models with a template that drops thoughts, plain and hybrid. A turn has steps with thoughts and results of tools; then the
user goes on.

    python -m tools.bench --only next-turns
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from tests.servers.serving import save_model
from tools.bench import report, serving
from tools.bench.report import Figure
from tools.bench.serving import Reply, Server, Texts

TEMPLATE = (  # as Qwen3's: thoughts before the last message of the user are dropped
    "{{ bos_token }}{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.reasoning_content and loop.index0 > last.user %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}{{ (m.content or '') + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
KINDS = {"plain": "llama", "hybrid": "qwen3_next"}
SIZES = {"full": (512, 8), "quick": (512, 8), "tiny": (64, 4)}  # width and layers
COMPUTED, HIT = (f'prefixcache_next_turn_tokens_total{{what="{what}"}}' for what in ("computed", "hit"))


class Plan(NamedTuple):
    """Chats, and the tokens of the system text, of a step's thought and result, and of an answer; steps before it."""

    chats: int
    system: int
    steps: int
    thought: int
    result: int
    answer: int = 48


PLANS = {"full": Plan(6, 1500, 6, 80, 300), "quick": Plan(3, 1000, 4, 60, 150), "tiny": Plan(1, 200, 1, 40, 60)}


class Measured(NamedTuple):
    """The second turn of a chat, and what another chat was answered that came in the middle of the pause before it."""

    second: Reply
    other: Reply


def next_turns(scale: str) -> Iterator[Figure]:
    plan = PLANS[scale]
    width, layers = SIZES[scale]
    for kind, family in KINDS.items():
        texts = Texts()
        with report.scratch() as folder, ExitStack() as stack:
            model = save_model(
                folder / kind,
                family,
                template=TEMPLATE,
                hidden_size=width,
                num_hidden_layers=layers,
                max_position_embeddings=1 << 15,
            )
            servers = {}
            for name in ("with", "without"):
                (folder / name).mkdir()
                flags = ["--ram", "2GB", "--codec", "raw", *(["--no-warm-next-turn"] if name == "without" else [])]
                servers[name] = stack.enter_context(serving.serving(serving.OURS, model, folder / name, *flags))
            found: dict[str, list[Measured]] = {name: [] for name in servers}
            for number in range(plan.chats):
                turn, question, other = _turn(texts, plan), texts.piece(20), texts.piece(40)
                for name in list(servers) if number % 2 == 0 else reversed(servers):
                    found[name].append(_chat(servers[name], turn, question, other, plan.answer))
            counts = servers["with"].metrics()
        yield _figure(kind, found["with"], found["without"], counts)


def _turn(texts: Texts, plan: Plan) -> list[dict[str, Any]]:
    """A chat in the middle of its first turn: the user's wish, and what the model thought, said and heard."""
    chat = [{"role": "system", "content": texts.piece(plan.system)}, {"role": "user", "content": texts.piece(30)}]
    for _ in range(plan.steps):
        thought, said, result = (texts.piece(tokens) for tokens in (plan.thought, 20, plan.result))
        chat.append({"role": "assistant", "reasoning_content": thought, "content": said})
        chat.append({"role": "tool", "content": result})
    return chat


def _chat(server: Server, turn: list[dict[str, Any]], question: str, other: str, answer: int) -> Measured:
    client = serving.client_of(server)
    serving.ask(client, turn[:2], 1)  # its first step, which leaves recurrent state before the first thought
    before = server.metrics()[COMPUTED]
    first = serving.ask(client, turn, answer)
    time.sleep(0.3)  # what begins in a pause has begun
    between = serving.ask(client, [{"role": "user", "content": other}], 1)
    _pause(server, before)
    said = {"role": "assistant", "content": first.text}
    return Measured(serving.ask(client, [*turn, said, {"role": "user", "content": question}], 1), between)


def _pause(server: Server, before: float) -> None:
    """Wait, as a user does, until the server computes nothing more ahead."""
    seen, still = before, 0
    while still < 10:
        time.sleep(0.2)
        now = server.metrics()[COMPUTED]
        still, seen = (still + 1 if now == seen else 0), now


def _figure(kind: str, on: list[Measured], off: list[Measured], counts: dict[str, float]) -> Figure:
    first, plain = (statistics.median(each.second.first for each in of) for of in (on, off))
    tokens, without = (statistics.median(each.second.computed for each in of) for of in (on, off))
    waited, usual = (statistics.median(each.other.first for each in of) for of in (on, off))
    prompt = on[0].second.prompt_tokens
    return Figure(
        f"{kind}, {len(on)} chats, turn 2 of {prompt:,} tokens after thoughts: time to the first token",
        f"{first:.2f} s ({tokens:,.0f} computed); ahead {counts[COMPUTED]:,.0f} tokens, {counts[HIT]:,.0f} of them hit; "
        f"another chat in the pause: {waited:.2f} s",
        "",
        f"without: {plain:.2f} s ({without:,.0f} computed); another chat: {usual:.2f} s",
        None,
        {"computed": counts[COMPUTED], "hit": counts[HIT], "own": tokens, "all": without},
    )


FIGURES = {"next-turns": next_turns}
