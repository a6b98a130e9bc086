"""What every contestant is asked to do, in a process of its own: `python -m tools.bench.peer.tasks SIDE '[[NAME, PLAN]]'`.

A task gets a function that opens the side, and its plan; what they found is printed as one line of JSON. Prompts come from
fixed seeds, so all sides see the same.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tools.bench import prompts, report
from tools.bench.peer.side import Place, Side
from tools.bench.prompts import Shape

Open = Callable[[Place, Shape], Side]


def opener(side: str) -> Open:
    """Opens a side by the name of its module, after which options may follow: "vllm_mlx:as-scheduled"."""
    name, *options = side.split(":")
    made = importlib.import_module(f"tools.bench.peer.{name}").Side
    return lambda place, shape: made(replace(place, options=tuple(options)), prompts.empty(shape, made.classes))


def _evaluate(prompt_cache: list[Any] | None) -> None:
    mx.eval([[layer.keys, layer.values] for layer in prompt_cache or ()])


def _ids(draw: Callable[[int], np.ndarray], count: int) -> list[int]:
    return draw(count).tolist()  # a server has lists


# -- looking up --------------------------------------------------------------------------------------------------------

TINY = Shape(full=1, heads=1, width=8)  # a lookup doesn't look at rows


LENGTHS = 8  # of entries


def lookup(
    open_side: Open, entries: int, longest: int, shared: int, lookups: int, within: float, filling: float
) -> dict[str, Any]:
    """Prompts that begin as all entries do, for `shared` tokens, and then go their own way: until there is a prompt cache.

    Entries and prompts have half of `longest` tokens up to all. Ends early after `within` seconds of lookups, or of filling
    after `filling` seconds.
    """
    draw, chance = prompts.draw(21), random.Random(21)
    side = open_side(Place(ram=8 << 30, tokens=shared + entries * (longest - shared)), TINY)
    lengths = [longest - i * longest // 2 // LENGTHS for i in range(LENGTHS)]
    rows = {length: prompts.filled(TINY, length, side.classes) for length in lengths}
    begin = _ids(draw, shared)
    gc.disable()
    stored, start = 0, time.perf_counter()
    while stored < entries and time.perf_counter() - start < filling:
        length = chance.choice(lengths)
        side.store(begin + _ids(draw, length - shared), rows[length])
        stored += 1
    storing = (time.perf_counter() - start) / stored
    taken: list[float] = []
    depths: list[int] = []
    while len(taken) <= lookups and sum(taken) < within:
        prompt = begin + _ids(draw, chance.choice(lengths) - shared)
        start = time.perf_counter()
        made, depth = side.fetch(prompt)
        _evaluate(made)
        taken.append(time.perf_counter() - start)
        depths.append(depth)
    first = 1 if len(taken) > 1 else 0  # the first one warms up
    side.close()
    return {"entries": stored, "seconds": taken[first:], "depths": depths[first:], "store_s": storing}


# -- conversations -----------------------------------------------------------------------------------------------------

LLAMA = Shape(full=4, heads=1, width=64)  # 1 kB a token


def converse(
    open_side: Open, chats: int, turns: int, length: int, system: int, ram: int, folder: str
) -> dict[str, Any]:
    """Conversations by turns, in rotation, on one system prompt: bytes held and written, and tokens computed."""
    unique = system + chats * turns * length
    draw, computed, asked = prompts.draw(1), 0, 0
    side = open_side(Place(ram, folder or None, tokens=unique), LLAMA)
    start = _ids(draw, system)
    talks = [start for _ in range(chats)]
    begun = time.perf_counter()
    for _ in range(turns):
        for i in range(chats):
            talks[i] = talks[i] + _ids(draw, length)
            prompt_cache, depth = side.fetch(talks[i])
            prompt_cache = prompt_cache or prompts.empty(LLAMA, side.classes)
            prompts.extend(LLAMA, prompt_cache, len(talks[i]) - depth)
            computed, asked = computed + len(talks[i]) - depth, asked + len(talks[i])
            side.store(talks[i], prompt_cache)
    held = side.held()
    side.settle()
    found = {
        "unique": unique * LLAMA.row_bytes(LLAMA.full),
        "held": held,
        "written": side.written(),
        "computed": computed,
        "asked": asked,
        "unique_tokens": unique,
        "seconds": time.perf_counter() - begun,
    }
    side.close()
    return found


# -- from the SSD ------------------------------------------------------------------------------------------------------

CHUNK = 512  # tokens that go through a model at once
WIDE = Shape(full=4, heads=3, width=128)  # 6 kB a token, 1.6 MB a block


def _on_ssd(side: Side, shape: Shape, prompts_of: list[list[int]]) -> None:
    """Store these, one after the other, in RAM that holds one and a half: all but the last are on the SSD then."""
    for prompt in prompts_of:
        prompt_cache = prompts.empty(shape, side.classes)
        for at in range(0, len(prompt), CHUNK):
            prompts.extend(shape, prompt_cache, min(CHUNK, len(prompt) - at))
        side.store(prompt, prompt_cache)
    side.settle()


def promote(open_side: Open, folder: str, tokens: int, rounds: int) -> dict[str, Any]:
    """A prompt from the SSD after a restart, until a model could use it, in turns with a cold read of one plain file of as
    many bytes as its rows have."""
    draw, nbytes = prompts.draw(31), tokens * WIDE.row_bytes(WIDE.full)
    first, second = _ids(draw, tokens), _ids(draw, tokens)
    side = open_side(Place(nbytes * 3 // 2, folder), WIDE)
    _on_ssd(side, WIDE, [first, second])
    side.close()
    plain = Path(folder) / "plain"
    plain.write_bytes(os.urandom(nbytes))
    depths: list[int] = []

    def cold() -> None:
        os.sync()
        report.forget_pages(path for path in Path(folder).rglob("*") if path.is_file())
        mx.clear_cache()

    def product(_: int) -> float:
        side = open_side(Place(nbytes * 4, folder), WIDE)
        cold()
        start = time.perf_counter()
        made, depth = side.fetch([*first, 1])
        _evaluate(made)
        taken = time.perf_counter() - start
        depths.append(depth)
        side.close()
        return taken

    def read(_: int) -> float:
        cold()
        return report.seconds(lambda: len(plain.read_bytes()))

    ours, plain_s = report.in_turns(rounds, product, read)
    return {"bytes": nbytes, "seconds": ours, "plain_s": plain_s, "depths": depths, "tokens": tokens}


def full(open_side: Open, folder: str, tokens: int) -> dict[str, Any]:
    """How deep a prompt is served that the SSD has, while RAM is full of others."""
    draw = prompts.draw(32)
    stored = [_ids(draw, tokens) for _ in range(4)]
    side = open_side(Place((tokens * LLAMA.row_bytes(LLAMA.full) * 5) // 2, folder), LLAMA)
    _on_ssd(side, LLAMA, stored)
    _, depth = side.fetch([*stored[0], 1])
    side.close()
    return {"depth": depth, "tokens": tokens}


def flips(open_side: Open, folder: str, tokens: int, tries: int) -> dict[str, Any]:
    """One bit of every file of tensors is turned over, in many copies of a directory: is what comes back what was stored?"""
    draw, chance = prompts.draw(33), random.Random(33)
    first, second = _ids(draw, tokens), _ids(draw, tokens)
    kept, ram = Path(folder) / "kept", tokens * LLAMA.row_bytes(LLAMA.full) * 3 // 2
    kept.mkdir()
    side = open_side(Place(ram, str(kept)), LLAMA)
    rows = prompts.filled(LLAMA, tokens, side.classes)
    side.store(first, rows)
    side.store(second, prompts.filled(LLAMA, tokens, side.classes))
    side.settle()
    side.close()
    found: dict[str, Any] = {"wrong": 0, "missed": 0, "whole": 0, "failed": 0}
    found["untouched"] = _served(open_side, Place(ram * 2, str(kept)), first, rows)
    for _ in range(tries):
        copied = Path(folder) / "copied"
        shutil.copytree(kept, copied)
        for file in sorted(copied.rglob("*.safetensors")):
            data = bytearray(file.read_bytes())
            data[chance.randrange(len(data) // 20, len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
        found[_served(open_side, Place(ram * 2, str(copied)), first, rows)] += 1
        shutil.rmtree(copied)
    return found


def _served(open_side: Open, place: Place, tokens: list[int], rows: list[Any]) -> str:
    try:
        side = open_side(place, LLAMA)
        made, depth = side.fetch([*tokens, 1])
        right = made is None or all(_same(a, b, depth) for a, b in zip(made, rows, strict=True))
        side.close()
    except Exception:
        return "failed"
    return "wrong" if not right else "whole" if depth == len(tokens) else "missed"


def _same(one: Any, other: Any, depth: int) -> bool:
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return all(bool(mx.array_equal(a[..., :depth, :], b[..., :depth, :]).item()) for a, b in pairs)


def write_model(folder: str, seed: int) -> None:
    """A model's folder: a config, and weights of this seed."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    weights = mx.array(np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32))
    mx.save_safetensors(str(Path(folder, "model.safetensors")), {"model.embed_tokens.weight": weights})


def models(open_side: Open, folder: str, tokens: int) -> dict[str, Any]:
    """How deep a prompt is served to another model, and to other weights in the same folder, from one's directory."""
    draw, ram = prompts.draw(34), tokens * LLAMA.row_bytes(LLAMA.full) * 3 // 2
    first, second = _ids(draw, tokens), _ids(draw, tokens)
    one, other, disk = (str(Path(folder) / name) for name in ("one", "other", "disk"))
    write_model(one, 1)
    write_model(other, 2)

    def depth(model: str) -> int:
        side = open_side(Place(ram * 2, disk, model), LLAMA)
        _, found = side.fetch([*first, 1])
        side.close()
        return found

    side = open_side(Place(ram, disk, one), LLAMA)
    _on_ssd(side, LLAMA, [first, second])
    side.close()
    found = {"same": depth(one), "other": depth(other)}
    write_model(one, 3)
    return {**found, "retrained": depth(one), "tokens": tokens}


SLIDING = Shape(full=1, heads=2, width=128, sliding=1, window=256)


def window(open_side: Open, folder: str, tokens: int) -> dict[str, Any]:
    """The classes of a full and a sliding layer after a restart, from the SSD."""
    draw = prompts.draw(35)
    first, second = _ids(draw, tokens), _ids(draw, tokens)
    side = open_side(Place(tokens * SLIDING.row_bytes(1) * 3 // 2, folder), SLIDING)
    _on_ssd(side, SLIDING, [first, second])
    side.close()
    side = open_side(Place(tokens * SLIDING.row_bytes(2) * 8, folder), SLIDING)
    made, depth = side.fetch([*first, 1])
    side.close()
    return {"classes": [type(layer).__name__ for layer in made or ()], "depth": depth, "tokens": tokens}


def stored(open_side: Open, folder: str, tokens: int, kill: bool) -> dict[str, Any]:
    """Store a prompt; then stop, or be killed two seconds later."""
    side = open_side(Place(1 << 28, folder, restarts=True), LLAMA)
    prompt = _ids(prompts.draw(36), tokens)
    side.store(prompt, prompts.filled(LLAMA, tokens, side.classes))
    if kill:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    side.close()
    return {}


def found_again(open_side: Open, folder: str, tokens: int) -> dict[str, Any]:
    """How deep the prompt that `stored` stored is served in another process."""
    side = open_side(Place(1 << 28, folder, restarts=True), LLAMA)
    _, depth = side.fetch([*_ids(prompts.draw(36), tokens), 1])
    side.close()
    return {"depth": depth, "tokens": tokens}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    task.__name__: task for task in (lookup, converse, promote, full, flips, models, window, stored, found_again)
}


def run(side: str, tasks: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """These tasks with one side, in this process."""
    open_side = opener(side)
    return [TASKS[name](open_side, **plan) for name, plan in tasks]


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]))))
