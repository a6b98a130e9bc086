"""What coded recurrent state does to a hybrid model's output: `python -m tools.snapshot_quality FOLDER`, a folder of
`tools.tiny_hybrid`'s or any other hybrid that mlx-lm loads.

Of each window of text one position is looked at. The state there was made of hits: N times a prompt cache was fetched, given
STEP tokens and stored again. KL(live cache || that) of the next tokens, in float32, says what became of it after 1, 10 and
100 such reuses. The rows of attention stay exact, so that state alone is seen, but in the lines with "rows". State of zeros
says how much of the output is in it at all.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from prefixcache import PrefixCache, TurboQuant
from prefixcache.codecs import Codec
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.reading import read
from tools.tiny_hybrid import texts

STEP, READ = 16, 64  # tokens between two reuses, and those that are read behind the last
CHUNK = 256


def compute(model: Any, layers: list[Any], tokens: Sequence[int]) -> mx.array:
    """Feed tokens; return the logits behind each (tokens, vocabulary) of the last chunk."""
    for at in range(0, len(tokens), CHUNK):
        logits = model(mx.array([tokens[at : at + CHUNK]]), cache=layers)
        mx.eval(logits, [layer.state for layer in layers])
    return logits[0].astype(mx.float32)


def divergence(reference: mx.array, other: mx.array) -> tuple[float, float]:
    """Return the mean KL in nats, and how often both have the same likeliest token."""
    p, q = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (reference, other))
    same = mx.mean(mx.argmax(p, -1) == mx.argmax(q, -1))
    return float(mx.mean(mx.sum(mx.exp(p) * (p - q), axis=-1)).item()), float(same.item())


def reused(model: Any, codec: Codec, tokens: list[int], times: int) -> tuple[list[Any], int]:
    """Return the prompt cache of these tokens, whose state was reused so often, and the bytes of its last snapshot."""
    from mlx_lm.models.cache import make_prompt_cache

    layers = make_prompt_cache(model)
    at = len(tokens) - STEP * (times - 1)
    compute(model, layers, tokens[:at])
    with PrefixCache(ram="1GB", codec=codec) as cache:
        while True:
            cache.store(tokens[:at], layers, model="m", write_back_from=0)
            stored = cache.lookup(tokens[:at], model="m", leave=0)
            made, _ = cache.fetch(tokens[:at], model="m", leave=0)
            assert stored is not None
            assert made is not None
            layers = made
            if at == len(tokens):
                return layers, stored.snapshot.nbytes if stored.snapshot is not None else 0
            compute(model, layers, tokens[at : at + STEP])
            at += STEP


def main() -> None:
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    parser = argparse.ArgumentParser(
        prog="python -m tools.snapshot_quality", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 3])
    parser.add_argument("--reuses", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--windows", type=int, default=8)
    given = parser.parse_args()
    model, tokenizer = load(str(given.folder))
    model.set_dtype(mx.float32)
    length = STEP * max(given.reuses) + 2 * CHUNK
    ids = [id for text in texts(held_back=True) for id in tokenizer.encode(text)]
    starts = np.linspace(0, len(ids) - length - READ, given.windows).astype(int)

    layers = make_prompt_cache(model)
    compute(model, layers, ids[:8])
    plan = Plan(read(layers).layout, TurboQuant())
    attention = {layer: None for leaf, layer in enumerate(plan.layer_of) if leaf not in plan.snapshots}
    codecs: dict[str, Codec] = {f"state {bits}": TurboQuant(layers=attention, state_bits=bits) for bits in given.bits}
    codecs |= {
        f"state {bits} plain": TurboQuant(layers=attention, state_bits=bits, levelling=False) for bits in given.bits
    }
    codecs |= {"rows 4": TurboQuant(state_bits=None), "rows 4, state 8": TurboQuant()}
    found: dict[tuple[str, int], list[tuple[float, float, int]]] = {}
    zeros = []
    for start in starts:
        window = ids[start : start + length + READ]
        live = make_prompt_cache(model)
        compute(model, live, window[:length])
        emptied = make_prompt_cache(model)
        compute(model, emptied, window[:length])
        for i in {plan.layer_of[leaf] for leaf in plan.snapshots}:
            emptied[i][1] = mx.zeros_like(emptied[i][1])
        reference = compute(model, live, window[length:])
        zeros.append(divergence(reference, compute(model, emptied, window[length:]))[0])
        for name, codec in codecs.items():
            for times in given.reuses:
                layers, nbytes = reused(model, codec, window[:length], times)
                kl, same = divergence(reference, compute(model, layers, window[length:]))
                found.setdefault((name, times), []).append((kl, same, nbytes))
    print(
        f"{given.windows} windows, {READ} tokens behind token {length}; state of zeros: KL {statistics.mean(zeros):.4f}"
    )
    print("| | snapshot, bytes | " + " | ".join(f"{times} x" for times in given.reuses) + " |")
    print("|---" * (2 + len(given.reuses)) + "|")
    for name in codecs:
        of_times = [found[name, times] for times in given.reuses]
        kls = [f"{statistics.mean(kl for kl, _, _ in each):.6f}" for each in of_times]
        print(f"| {name} | {of_times[0][0][2]} | " + " | ".join(kls) + " |")


if __name__ == "__main__":
    main()
