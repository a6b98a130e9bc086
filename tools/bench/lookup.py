"""How long `match` takes and how many nodes it looks at: among 10k and 100k blocks, and among 10k near twins.

All through `PrefixCache` with what it really holds in RAM. The blocks are small (one layer, one head, rows of one value),
because a lookup never looks into an image; their tokens and their places in the tree are as large as any.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from prefixcache import Media, PrefixCache, Raw, media_digest
from prefixcache.blocks.node import BLOCK_BYTES, Tree
from prefixcache.keys import BLOCK
from prefixcache.trace.format import block_keys
from tools.bench.prompts import MODEL, Shape, draw, filled
from tools.bench.report import Figure

SMALL = Shape(full=1, heads=1, width=1)
LONG = 128 * BLOCK  # 32k tokens
BLOCKS = {"full": (10_000, 100_000), "quick": (2_000, 20_000), "tiny": (256, 1024)}
SIBLINGS = {"full": 10_000, "quick": 2_000, "tiny": 64}
PROMPTS = {"full": 400, "quick": 200, "tiny": 8}
LIMIT = 200e-6
PLACEHOLDER = 151_655


def fill(cache: PrefixCache, blocks: int, seed: int) -> list[np.ndarray]:
    """Store prompts of 32k tokens that share nothing, until there are so many blocks. Returns those of full length."""
    tokens, prompt_cache = draw(seed), filled(SMALL, LONG)
    prompts = [tokens(min(LONG, (blocks - at) * BLOCK)) for at in range(0, blocks, LONG // BLOCK)]
    gc.disable()  # collections of so many new objects take as long again
    try:
        for prompt in prompts:
            cache.store(prompt, prompt_cache, model=MODEL)
    finally:
        gc.enable()
    assert cache.stats().blocks == blocks
    return [prompt for prompt in prompts if len(prompt) == LONG]


def match(scale: str) -> Iterator[Figure]:
    """Lookups of 32k tokens, whole hits and diverging ones, in a small tree and in one ten times as large, in turns."""
    small, large = BLOCKS[scale]
    with PrefixCache(ram="8GB", codec=Raw()) as few, PrefixCache(ram="8GB", codec=Raw()) as many:
        caches = (few, many)
        prompts = [fill(few, small, 0), fill(many, large, 1)]
        chance = np.random.default_rng(0)
        taken: dict[str, tuple[list[float], list[float]]] = {"whole": ([], []), "diverging": ([], [])}
        hashing: list[float] = []
        for _ in range(PROMPTS[scale]):
            for which, cache in enumerate(caches):
                prompt = prompts[which][chance.integers(len(prompts[which]))].copy()  # a server's tokens are fresh
                diverging, at = prompt.copy(), int(chance.integers(1, LONG))
                diverging[at:] = chance.integers(0, 150_000, LONG - at)
                diverging[at] = -1
                for kind, tokens, depth in (("whole", prompt, LONG), ("diverging", diverging, at)):
                    begin = time.perf_counter()
                    found = cache.match(tokens, model=MODEL)
                    taken[kind][which].append(time.perf_counter() - begin)
                    assert found.ram == depth, (found, depth)
            begin = time.perf_counter()
            block_keys(bytes(32), prompt.tobytes())
            hashing.append(time.perf_counter() - begin)
        visits = _visits(many, prompts[1], chance)
    kinds = {kind: [statistics.median(times) for times in both] for kind, both in taken.items()}
    medians = [max(both[i] for both in kinds.values()) for i in (0, 1)]  # the bar is for the slower kind
    reference = f"the keys (SHA-256) of as many tokens: {statistics.median(hashing) * 1e6:.0f} us"
    raw = {
        "blocks": [small, large],
        "median_s": medians,
        "by_kind_s": kinds,
        "p99_s": [float(np.quantile([*taken["whole"][i], *taken["diverging"][i]], 0.99)) for i in (0, 1)],
    }
    for i, blocks in enumerate(BLOCKS[scale]):
        yield Figure(
            f"match, 32k tokens, {blocks // 1000}k blocks: median",
            f"{kinds['whole'][i] * 1e6:.0f} us; diverging anywhere {kinds['diverging'][i] * 1e6:.0f} us",
            "<= 200 us",
            reference,
            medians[i] <= LIMIT,
            raw,
        )
    ratio = medians[1] / medians[0]
    yield Figure(
        f"match, {large // 1000}k blocks over {small // 1000}k",
        f"{ratio:.2f}x",
        "<= 2x",
        f"{small // 1000}k: {medians[0] * 1e6:.0f} us",
        ratio <= 2,
        raw,
    )
    yield visits


class _Watched(list[Any]):
    """A node's list of its children, or of their tokens, that remembers which of them were looked at."""

    def __init__(self, items: list[Any], seen: set[int]):
        super().__init__(items)
        self.seen = seen

    def __getitem__(self, index: Any) -> Any:
        self.seen.add(index)
        return super().__getitem__(index)


def visited(cache: PrefixCache, tokens: np.ndarray, look: Callable[[], object]) -> tuple[int, int, float]:
    """Nodes that a lookup counts, nodes that it really looked at (bisection's too), and what it may: 130 + log2(siblings)."""
    graph = cache._storage.graph
    (tree,) = graph.trees.values()
    watched = _watch(tree, tokens.tobytes())
    before = graph.visits
    look()
    counted, seen = graph.visits - before, sum(len(w.seen) for w in watched)
    return counted, seen, 130 + sum(math.log2(len(w)) for w in watched)


def _watch(tree: Tree, raw: bytes) -> list[_Watched]:
    """Watch the children of every node on the tokens' path. They stay watched: what comes later is slower."""
    watched, node, at = [], tree.root, 0
    while node.children:
        seen: set[int] = set()
        children = _Watched(list(node.children), seen)
        node.children, node.child_tokens = children, _Watched(list(node.child_tokens), seen)
        watched.append(children)
        child = next((child for child in children if child.tokens == raw[at : at + BLOCK_BYTES]), None)
        if child is None:
            break
        node, at = child, at + BLOCK_BYTES
    return watched


def _visits(cache: PrefixCache, prompts: list[np.ndarray], chance: np.random.Generator) -> Figure:
    worst = (0.0, 0, 0, 0.0)
    for i in range(24):
        prompt = prompts[int(chance.integers(len(prompts)))].copy()
        if i % 2:
            prompt[int(chance.integers(LONG - BLOCK, LONG))] = -1
        counted, seen, bar = visited(cache, prompt, lambda p=prompt: cache.match(p, model=MODEL))
        worst = max(worst, (max(counted, seen) / bar, counted, seen, bar))
    _, counted, seen, bar = worst
    return Figure(
        "nodes visited by a 32k-token lookup, the worst of 24",
        f"{counted} counted, {seen} looked at",
        f"<= 130 + log2(siblings) = {bar:.0f}",
        f"blocks of the prompt: {LONG // BLOCK}",
        max(counted, seen) <= bar,
        {"counted": counted, "seen": seen, "bar": bar},
    )


def siblings(scale: str) -> Iterator[Figure]:
    """A block among many that share all but its last token, against a plain hit of as many tokens."""
    count = SIBLINGS[scale]
    tokens, chance = draw(7), np.random.default_rng(7)
    twin, lonely, rows = tokens(BLOCK), tokens(BLOCK), filled(SMALL, BLOCK)
    plain, missed = [], []
    with PrefixCache(ram="4GB", codec=Raw()) as crowded, PrefixCache(ram="4GB", codec=Raw()) as quiet:
        quiet.store(lonely, rows, model=MODEL)
        for i in range(count):
            twin[-1] = 2 * i
            crowded.store(twin, rows, model=MODEL)
        assert crowded.stats().blocks == count
        for _ in range(PROMPTS[scale] * 5):
            twin[-1] = 2 * int(chance.integers(count)) + 1  # between two of them: shares 255 of 256
            missed.append(_time(crowded, twin, BLOCK - 1))
            plain.append(_time(quiet, lonely, BLOCK))
        counted, seen, bar = visited(crowded, twin, lambda: crowded.match(twin, model=MODEL))
    ratio = statistics.median(missed) / statistics.median(plain)
    yield Figure(
        f"match of 256 tokens that share 255 with {count} siblings, over a plain hit",
        f"{ratio:.2f}x",
        "<= 3x",
        f"plain hit of 256 tokens: {statistics.median(plain) * 1e6:.1f} us",
        ratio <= 3,
        {
            "ratio": ratio,
            "siblings_s": statistics.median(missed),
            "plain_s": statistics.median(plain),
            "counted": counted,
            "seen": seen,
            "bar": bar,
        },
    )


def picture_keys(scale: str) -> Iterator[Figure]:
    """What keys of a prompt of 32k tokens cost more where 16 pictures are half of it."""
    length = LONG // 32
    tokens = np.random.default_rng(3).integers(0, 150_000, LONG)
    media = [Media(2 * n * length, length, media_digest("image", bytes([n]))) for n in range(16)]
    for medium in media:
        tokens[medium.start : medium.end] = PLACEHOLDER
    taken: dict[str, list[float]] = {"with": [], "without": []}
    with PrefixCache(ram="1GB", codec=Raw()) as cache:
        cache.set_placeholders([PLACEHOLDER], model="pictures")
        for _ in range(PROMPTS[scale]):
            for kind, model, spans in (("without", MODEL, []), ("with", "pictures", media)):
                begin = time.perf_counter()
                prompt = cache.prompt(tokens, model=model, media=spans)
                block_keys(bytes(32), prompt.token_bytes)
                taken[kind].append(time.perf_counter() - begin)
    medians = {kind: statistics.median(times) for kind, times in taken.items()}
    more = medians["with"] - medians["without"]
    yield Figure(
        "keys of 32k tokens with 16 pictures, over the same without",
        f"{more * 1e3:.2f} ms more",
        "<= 1 ms",
        f"without: {medians['without'] * 1e3:.2f} ms",
        more <= 1e-3,
        {"median_s": medians},
    )


def _time(cache: PrefixCache, tokens: np.ndarray, depth: int) -> float:
    begin = time.perf_counter()
    found = cache.match(tokens, model=MODEL)
    taken = time.perf_counter() - begin
    assert found.ram == depth, (found, depth)
    return taken


FIGURES = {"match": match, "siblings": siblings, "picture_keys": picture_keys}
