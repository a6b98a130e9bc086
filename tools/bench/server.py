"""`prefixcache serve` as its clients see it, real processes asked over HTTP: prompt tokens computed.
And its prompt cache alone, beside mlx-lm's. What it does under load is `server_load`'s, how long users wait `first_tokens`'.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

from prefixcache import PrefixCache
from prefixcache.keys import common_prefix
from prefixcache.servers.mlx_lm import TieredPromptCache
from tools.bench import report, serving
from tools.bench.report import Figure
from tools.bench.serving import Server, Texts, Turn


class Chats(NamedTuple):
    """`chats` chats of `turns` turns on system prompts of `system` tokens; a question has `question` tokens."""

    chats: int
    turns: int
    system: int
    question: int = 24
    answer: int = 16


COMPUTED_BAR, DIVERGENT_BAR = 1.05, 1000


# -- prompt tokens computed --------------------------------------------------------------------------------------------

USERS = {"full": Chats(8, 6, 3000), "quick": Chats(4, 2, 2200), "tiny": Chats(2, 2, 300)}
HEAD_START = 0.1  # seconds that another's request is ahead of the users'


def computed(scale: str) -> Iterator[Figure]:
    """Users at once, each in a chat of one's own, on one system prompt: tokens that went through the model, over unique."""
    plan = USERS[scale]
    with report.scratch() as folder:
        with serving.serving(serving.OURS, serving.trained_model(folder), folder, "--ram", "1GB") as server:
            ours = _together(server, plan, another=600)
            server.stop()
        # It computes the system prompt for nearly every user: minutes, on the whole model.
        with serving.serving(serving.THEIRS, serving.trained_model(folder, layers=1), folder) as server:
            theirs = _together(server, plan, another=3600)
            server.stop()
    users = f"{plan.chats} users at once x {plan.turns} turns, system prompt of {plan.system}"
    name, beside = f"server: {users}: prompt tokens computed", "mlx_lm.server, on the model's first layer"
    ratio = ours.computed / ours.unique
    yield Figure(
        f"{name}, over unique",
        f"{ratio:.3f} ({ours.computed} of {ours.prompt})",
        f"<= {COMPUTED_BAR}",
        f"{beside}: {theirs.computed / theirs.unique:.2f}",
        ratio <= COMPUTED_BAR,
        {"ours": ours._asdict(), "theirs": theirs._asdict()},
    )
    yield Figure(
        f"{name}, over unique ones that no answer had brought",
        f"{ours.computed / ours.asked:.3f}",
        "",
        f"{beside}: {theirs.computed / theirs.asked:.2f}",
        None,
    )


class Together(NamedTuple):
    """Tokens: of all prompts, of them computed, unique, unique without what had been generated before; and seconds."""

    prompt: int
    computed: int
    unique: int
    asked: int
    seconds: float


def _together(server: Server, plan: Chats, another: int) -> Together:
    """All users come while the server computes a prompt of `another` tokens: none of theirs is begun before all are there."""
    texts = Texts()
    system = texts.piece(plan.system)
    found: list[list[Turn]] = []

    def user() -> Callable[[], None]:
        client, questions = serving.client_of(server), [texts.piece(plan.question) for _ in range(plan.turns)]

        def talk() -> None:
            time.sleep(HEAD_START)
            found.append(serving.chat(client, texts, system, questions, plan.answer))

        return talk

    busy = partial(serving.ask, serving.client_of(server), [{"role": "user", "content": texts.piece(another)}], 1)
    users = [user() for _ in range(plan.chats)]
    begin = time.perf_counter()
    serving.at_once([busy, *users])
    seconds = time.perf_counter() - begin
    turns = [turn for chat in found for turn in chat]
    for turn in turns:
        if len(turn.prompt) != turn.reply.prompt_tokens:
            raise RuntimeError(
                f"{len(turn.prompt)} tokens here, {turn.reply.prompt_tokens} in the server, of one prompt"
            )
    unique = unique_tokens([turn.prompt for turn in turns])
    said = sum(_said(texts, one, other) for chat in found for one, other in pairwise(chat))
    return Together(
        sum(turn.reply.prompt_tokens for turn in turns),
        sum(turn.reply.computed for turn in turns),
        unique,
        unique - said,
        seconds,
    )


def unique_tokens(prompts: Sequence[list[int]]) -> int:
    """The size of the trie of all prompts. In sorted order, what a prompt shares with any before it its neighbour has."""
    ordered = sorted(prompts)
    shared = sum(common_prefix(one, other) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _said(texts: Texts, turn: Turn, following: Turn) -> int:
    """How many tokens of the following prompt the model has generated and seen: of what it says, the last one it has not."""
    answer = texts.answer(turn.reply.text)
    seen = turn.prompt + (answer if turn.reply.stopped else answer[:-1])
    return max(common_prefix(seen, following.prompt) - len(turn.prompt), 0)


# -- divergent prompts -------------------------------------------------------------------------------------------------

KEY = ("model", None, None)
SHARED, WIDTH = 512, 32
# Entries, their tokens, prompts looked up in ours, and in theirs, where a lookup takes seconds.
DIVERGENT = {"full": (100, 8192, 100, 2), "quick": (100, 4096, 100, 1), "tiny": (10, 1024, 10, 10)}


def divergent(scale: str) -> Iterator[Figure]:
    """Prompts that begin as all entries do and then go their own way: `fetch_nearest_cache` of ours and of mlx-lm's."""
    entries, length, count, walked = DIVERGENT[scale]
    draw = random.Random(1)

    def tokens(shared: list[int]) -> list[int]:
        return shared + [draw.randrange(150_000) for _ in range(length - len(shared))]

    shared = tokens([])[:SHARED]
    known = [tokens(shared) for _ in range(entries)]
    with PrefixCache(ram="4GB") as cache:
        ours, theirs = TieredPromptCache(cache, identify=str), LRUPromptCache(entries)
        for own in known:
            layer = _rows(length)
            ours.insert_cache(KEY, own, [layer])
            theirs.insert_cache(KEY, own, [layer])
        for what, bar, prompts in (
            ("after what all share", DIVERGENT_BAR, [tokens(shared) for _ in range(count)]),
            ("from one entry, in its middle", None, [tokens(own[: length // 2]) for own in known[:count]]),
        ):
            quick, slow = _lookups(ours, theirs, prompts, walked)
            ratio = statistics.mean(slow) / statistics.mean(quick)
            yield Figure(
                f"server: fetch_nearest_cache, {entries} entries x {length} tokens, {count} prompts that part {what}",
                f"{ratio:.0f} x faster ({1e3 * sum(quick):.0f} ms in all)",
                f">= {bar}" if bar else "",
                f"LRUPromptCache: {sum(slow):.1f} s for {len(slow)} of them, {count * statistics.mean(slow):.0f} s for all",
                ratio >= bar if bar else None,
                {"ours": quick, "theirs": slow},
            )


def _rows(tokens: int) -> KVCache:
    layer = KVCache()
    layer.update_and_fetch(*(mx.random.normal((1, 1, tokens, WIDTH)).astype(mx.float16) for _ in range(2)))
    mx.eval(layer.state)
    return layer


def _lookups(
    ours: TieredPromptCache, theirs: LRUPromptCache, prompts: list[list[int]], walked: int
) -> tuple[list[float], list[float]]:
    """Seconds of each lookup, of theirs for the first `walked` prompts only. Both must hit equally deep."""

    def lookup(prompt_cache: LRUPromptCache, prompt: list[int]) -> tuple[float, int]:
        begin = time.perf_counter()
        made, rest = prompt_cache.fetch_nearest_cache(KEY, prompt)
        mx.eval([layer.state for layer in made])
        return time.perf_counter() - begin, len(prompt) - len(rest)

    lookup(ours, prompts[0])
    quick = [lookup(ours, prompt) for prompt in prompts]
    slow = [lookup(theirs, prompt) for prompt in prompts[:walked]]
    if [depth for _, depth in quick[:walked]] != [depth for _, depth in slow]:
        raise RuntimeError(f"ours hit {quick[0][1]} tokens deep, theirs {slow[0][1]}")
    return [seconds for seconds, _ in quick], [seconds for seconds, _ in slow]


FIGURES = {"server-computed": computed, "server-divergent": divergent}
