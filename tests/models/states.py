"""Prompt caches whose contents are a function of the tokens, so that any restored one can be checked by itself.

Row i of every layer is made of a rolling hash of tokens 0 to i: a row that belongs to another prefix is never equal.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from prefixcache import Media, PrefixCache, Stored, chunks
from prefixcache.calibration.rows import window_of
from prefixcache.layers.reading import read
from prefixcache.tiers.prompt import Prompt
from tests.inside import inside

WIDTH = 8


def rolling(tokens: Sequence[int]) -> np.ndarray:
    """A hash of each prefix, below 2**20 so that float32 holds it. Not to be written to."""
    return _rolling(tuple(map(int, tokens)))


@lru_cache(256)  # made for the state, and again for each check of it
def _rolling(tokens: tuple[int, ...]) -> np.ndarray:
    hashes, h = np.empty(len(tokens), np.float32), 1
    for i, token in enumerate(tokens):
        h = (h * 31 + token + 7) % 1048573
        hashes[i] = h
    return hashes


def rows(tokens: Sequence[int], layer: int) -> tuple[mx.array, mx.array]:
    """(1, 1, tokens, WIDTH) keys and values."""
    base = rolling(tokens)[:, None] + np.arange(WIDTH, dtype=np.float32) * (layer + 1)
    return mx.array(base[None, None]), mx.array(-base[None, None])


def sliceable(tokens: Sequence[int], layers: int = 2) -> list[Any]:
    made = []
    for layer in range(layers):
        cache = KVCache()
        if len(tokens):
            cache.update_and_fetch(*rows(tokens, layer))
        made.append(cache)
    return made


def windowed(tokens: Sequence[int], size: int = 300, keep: int = 0, chunk: int = 100) -> list[Any]:
    """One full layer and one window, filled in prefill steps of `chunk`; what it has forgotten since came in one step."""
    made = sliceable(tokens, 1)
    ring = RotatingKVCache(size, keep)
    keys, values = rows(tokens, 5)
    first = max(len(tokens) // size - 2, 0) * size // chunk * chunk  # the ring turns as far as with all of them
    if first:
        ring.update_and_fetch(keys[:, :, :first], values[:, :, :first])
    for at in range(first, len(tokens), chunk):
        ring.update_and_fetch(keys[:, :, at : at + chunk], values[:, :, at : at + chunk])
    return [*made, ring]


def chunked(tokens: Sequence[int], size: int = 512, step: int = 50) -> list[Any]:
    """One full layer and one that attends within chunks, and drops what lies before its chunk as a model's mask does."""
    made = sliceable(tokens, 1)
    ring = ChunkedKVCache(size)
    keys, values = rows(tokens, 5)
    for at in range(0, len(tokens), step):
        ring.maybe_trim_front()
        ring.update_and_fetch(keys[:, :, at : at + step], values[:, :, at : at + step])
    return [*made, ring]


def hybrid(tokens: Sequence[int]) -> list[Any]:
    """One full layer and one whose state is the hash of all tokens."""
    state = ArraysCache(2)
    state[0] = mx.array(rolling(tokens)[-1:].reshape(1, 1))
    state[1] = mx.array([[len(tokens)]])
    return [*sliceable(tokens, 1), state]


def uneven_rows(tokens: Sequence[int], layer: int, first: int = 0) -> np.ndarray:
    """(1, 1, tokens from `first` on, 32): sines of the hash, on channels whose offsets and spreads are far apart."""
    channel = np.arange(1, 33)
    waves = np.sin(rolling(tokens)[first:, None].astype(np.float64) * channel * (0.37 + layer))
    return (waves * 1.2**channel + 100 * np.cos(channel)).astype(np.float32)[None, None]


def uneven(tokens: Sequence[int], layers: int = 2) -> list[Any]:
    """Dense layers for a codec that is not exact: where a row is coded with other levels than its own, it shows."""
    made = []
    for layer in range(layers):
        cache = KVCache()
        if len(tokens):
            cache.update_and_fetch(mx.array(uneven_rows(tokens, layer)), mx.array(uneven_rows(tokens, layer + 7)))
        made.append(cache)
    return made


def recurrent_state(tokens: Sequence[int]) -> np.ndarray:
    """(1, 2, 64, 32): sines of the hash of all tokens, rows and channels of spreads that are far apart."""
    row, channel = np.arange(1, 65)[:, None], np.arange(1, 33)
    waves = np.sin(np.float64(rolling(tokens)[-1]) * (row + 64 * channel) * np.array([0.37, 1.1])[:, None, None])
    return (waves * 1.05**row * 1.2**channel).astype(np.float32)[None]


def recurrent(tokens: Sequence[int]) -> list[Any]:
    """A dense layer for a codec that is not exact, and one whose state is coded, too."""
    state = ArraysCache(2)
    state[0] = mx.array(rolling(tokens)[-1] + np.arange(3 * 40, dtype=np.float32).reshape(1, 3, 40))
    state[1] = mx.array(recurrent_state(tokens))
    return [*uneven(tokens, 1), state]


def check_recurrent(prompt_cache: list[Any], tokens: Sequence[int]) -> None:
    """As `check_uneven`; what a convolution keeps is exact, and state near its own."""
    *dense, state = prompt_cache
    check_uneven(dense, tokens)
    own, expected = np.array(state[1]), recurrent_state(tokens)
    assert mx.array_equal(state[0], recurrent(tokens)[-1][0])
    assert np.abs(own - expected).mean() < 0.05 * np.abs(expected).mean()


def check_uneven(prompt_cache: list[Any], tokens: Sequence[int]) -> None:
    """AssertionError unless every row is near its own: another prefix's would be off by its whole spread."""
    for layer, cache in enumerate(prompt_cache):
        assert cache.offset == len(tokens)
        for rows, array in ((uneven_rows(tokens, layer), cache.keys), (uneven_rows(tokens, layer + 7), cache.values)):
            wrong = np.abs(np.array(array[:, :, : len(tokens)]) - rows).mean(-1)
            assert wrong.max(initial=0) < 15, wrong.max()


def held(layers: list[Any]) -> list[dict[str, dict[int, bytes]]]:
    """Of each layer, of keys and of values: the bits of the row of each token that it holds."""
    found = []
    for leaf in read(layers).leaves:
        of_leaf: dict[str, dict[int, bytes]] = {}
        for part, array in leaf.arrays.items():
            bits = np.array(array[0].view(mx.uint8))
            of_leaf[part] = {
                first + i: bits[:, row].tobytes()
                for first, last in leaf.held
                for i, row in enumerate(np.arange(bits.shape[1])[leaf.where(first, last)])
            }
        found.append(of_leaf)
    return found


def fed_uneven(layers: list[Any], tokens: Sequence[int], first: int, step: int | None = None) -> list[Any]:
    """Append the rows of the tokens from `first` on, in chunks of `step` tokens or in one, to layers of any class."""
    rows = [[mx.array(uneven_rows(tokens, number + part, first)) for part in (0, 7)] for number in range(len(layers))]
    for at in range(0, len(tokens) - first, step or len(tokens)):
        chunk = slice(at, at + step if step else None)
        for layer, parts in zip(layers, rows, strict=True):
            if isinstance(layer, ChunkedKVCache):
                layer.maybe_trim_front()
            layer.update_and_fetch(*(part[:, :, chunk] for part in parts))
        mx.eval([layer.keys for layer in layers])
    return layers


def uneven_windows(tokens: Sequence[int]) -> list[Any]:
    """A layer of every token between two of a window, filled in steps of 100: what lies before is forgotten."""
    return fed_uneven([RotatingKVCache(200), KVCache(), RotatingKVCache(200)], tokens, 0, step=100)


def check_held(layers: list[Any], tokens: Sequence[int]) -> None:
    """As `check_uneven`, of the rows that layers of any class hold."""
    for number, own in enumerate(held(layers)):
        for part, offset in (("keys", 0), ("values", 7)):
            rows = uneven_rows(tokens, number + offset)[0]
            for token, bits in own[part].items():
                got = np.frombuffer(bits, np.float32).reshape(rows.shape[0], -1)
                assert np.abs(got - rows[:, token]).mean() < 15


LAYERS = {
    "ring": lambda: [KVCache(), RotatingKVCache(300)],
    "ring with first tokens": lambda: [RotatingKVCache(300, 4), KVCache()],
    "ring of less than a block": lambda: [KVCache(), RotatingKVCache(40)],
    "ring that never fills": lambda: [KVCache(), RotatingKVCache(4000)],
    "chunks": lambda: [ChunkedKVCache(512), KVCache()],
    "every token": lambda: [KVCache(), KVCache()],
    "two rings": lambda: [RotatingKVCache(300), KVCache(), RotatingKVCache(300)],
}


def windows_of(layers: list[Any]) -> tuple[int | None, ...]:
    """Of each layer the window as a basis has it, 0 for none; None where a basis takes no such layer."""
    return tuple(map(window_of, layers))


@lru_cache(256)
def by_itself(
    tokens: tuple[int, ...],
    codec: str,
    layers: str,
    step: int,
    basis_dir: Path | None = None,
    pictures: tuple[Media, ...] = (),
) -> list[Any]:
    """The rows that an empty cache gives of a prompt once it was stored in these steps and at the ends of `pictures`: of each
    layer, part and token.
    """
    bases = {} if basis_dir is None else {"basis_dir": basis_dir}
    with PrefixCache(ram=5_000_000, codec=codec, **bases) as cache:
        prompt = cache.prompt(list(tokens), model="m", media=list(pictures))
        stored_in_steps(cache, prompt, LAYERS[layers](), 0, step)
        return held(cache.fetch(prompt, leave=0)[0])


def stored_in_steps(
    cache: PrefixCache, prompt: Prompt, live: list[Any], at: int, step: int, tokens: Sequence[int] | None = None
) -> list[Any]:
    """As a server does: computed from token `at` on, and stored after each chunk. `tokens`: what rows are made of."""
    tokens = list(prompt.given) if tokens is None else tokens
    for first, last in chunks(at, len(tokens), step, prompt.media):
        fed_uneven(live, tokens[:last], first)
        assert cache.store(prompt.first(last), live, write_back_from=first).tokens == last
    return live


def check(prompt_cache: list[Any], tokens: Sequence[int]) -> None:
    """AssertionError unless this is the state after exactly `tokens`."""
    n = len(tokens)
    for layer, cache in enumerate(prompt_cache):
        if isinstance(cache, KVCache):
            keys, values = rows(tokens, layer)
            assert cache.offset == n
            assert mx.array_equal(cache.keys[:, :, :n], keys)
            assert mx.array_equal(cache.values[:, :, :n], values)
        elif isinstance(cache, RotatingKVCache):
            keys, _ = rows(tokens, 5)
            (leaf,) = read([cache]).leaves
            assert leaf.positions == n
            assert sum(last - first for first, last in leaf.held) >= min(n, cache.max_size - 1)
            for first, last in leaf.held:
                assert mx.array_equal(cache.keys[:, :, mx.array(leaf.where(first, last))], keys[:, :, first:last])
        elif isinstance(cache, ChunkedKVCache):
            keys, values = rows(tokens, 5)
            first, held = cache.start_position, n - cache.start_position
            assert cache.offset == n
            assert first <= n // cache.chunk_size * cache.chunk_size
            assert mx.array_equal(cache.keys[:, :, :held], keys[:, :, first:])
            assert mx.array_equal(cache.values[:, :, :held], values[:, :, first:])
        else:
            assert cache[0].item() == rolling(tokens)[-1]
            assert cache[1].item() == n


def prompt(seed: int, count: int = 600) -> list[int]:
    """Tokens that begin with no other seed's."""
    return [(seed * 7919 + i * 13) % 50_000 for i in range(count)]


def put(cache: PrefixCache, tokens: Sequence[int], make: Callable[..., Any] = sliceable, **more: Any) -> Stored:
    return cache.store(tokens, make(tokens), model="m", **more)


def compressed(
    cache: PrefixCache, tokens: list[int] | Prompt, *, model: str | None = "m", leave: int = 1
) -> tuple[list[Any] | None, list[int]]:
    """Return what RAM has as live caches that keep codes, and the tokens that are left."""
    given = tokens.given if isinstance(tokens, Prompt) else tokens
    hit = cache.lookup(tokens, model=model, leave=leave)
    return (None, given) if hit is None else (hit.live(len(given) - hit.tokens), given[hit.tokens :])


def put_prompts(cache: PrefixCache, *seeds: int, count: int = 600) -> None:
    for seed in seeds:
        put(cache, prompt(seed, count))


def got(cache: PrefixCache, tokens: Sequence[int], **more: Any) -> int:
    """What a fetch gives, checked; the depth."""
    made, rest = cache.fetch(tokens, model="m", **more)
    depth = len(tokens) - len(rest)
    if made is not None:
        check(made, tokens[:depth])
    return depth


def whole_hit(cache: PrefixCache, tokens: Sequence[int]) -> list[Any]:
    """What a fetch gives that leaves nothing to compute."""
    made, rest = cache.fetch(tokens, model="m", leave=0)
    assert made is not None
    assert list(rest) == []
    return made


def fetched(cache: PrefixCache, seed: int, count: int = 600) -> int:
    """How deep RAM has this prompt; checked."""
    return got(cache, prompt(seed, count), leave=0)


def exact(cache: PrefixCache, tokens: Sequence[int]) -> bool:
    """Whether the prompt can be had whole, from either tier; it is then what was stored."""
    if cache.promote(tokens, model="m").result(20) < len(tokens):
        return False
    assert got(cache, tokens, leave=0) == len(tokens)
    return True


def check_integrity(cache: PrefixCache) -> None:
    """AssertionError unless the cache and its directory are sound. Nothing may wait for the SSD."""
    cache.check_integrity()
    if inside(cache).ssd is not None:
        inside(cache).ssd.check_integrity()
