"""How many bytes conversations take against the bytes of their unique tokens, in RAM, on SSD and by kind of layer.

"Unique" is counted apart from the cache: unique tokens times the bytes that a token's encoded rows have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from prefixcache import PrefixCache, Raw, TurboQuant
from tools.bench import report
from tools.bench.prompts import MODEL, Shape, draw, filled, image_bytes, turn
from tools.bench.report import Figure


class Chats(NamedTuple):
    """`chats` conversations of `turns` turns of `length` tokens each, after a system prompt that all share."""

    chats: int
    turns: int
    length: int
    system: int

    @property
    def unique(self) -> int:
        return self.system + self.chats * self.turns * self.length


CHATS = {"full": Chats(20, 10, 512, 4096), "quick": Chats(8, 5, 512, 4096), "tiny": Chats(8, 2, 512, 512)}
OFF_GRID = 96  # tokens added to the system prompt, so that every turn ends inside a block
LLAMA = Shape(full=4, heads=1, width=64)  # 1 kB a token, 262 kB a block: headers weigh more than in any real model
BOUNDARIES = {"full": 20, "quick": 20, "tiny": 6}
HYBRID = Shape(full=2, heads=2, width=64, recurrent=6)
SLIDING = Shape(full=2, heads=2, width=64, sliding=10, window=512)
TURN = 300
BITS_BLOCKS = {"full": 4, "quick": 2, "tiny": 1}


def _converse(cache: PrefixCache, plan: Chats) -> int:
    """All conversations by turns, in rotation, as a busy server sees them. Returns the tokens that were not computed."""
    tokens = draw(1)
    system = tokens(plan.system)
    chats = [system for _ in range(plan.chats)]
    hit = 0
    for _ in range(plan.turns):
        for i in range(plan.chats):
            chats[i] = np.concatenate([chats[i], tokens(plan.length)])
            hit += turn(cache, LLAMA, chats[i])
    return hit


def conversations(scale: str) -> Iterator[Figure]:
    """Bytes held over bytes of unique tokens, with room for all."""
    for case, bar in _cases(scale):
        unique = case.unique * LLAMA.row_bytes(LLAMA.full)
        with (
            report.scratch() as folder,
            PrefixCache(ram=unique * 2, ssd_dir=folder, ssd="20GB", codec=Raw(), spill_on_close=False) as cache,
        ):
            known = _converse(cache, case)
            images, nodes = image_bytes(cache, "rows"), cache.stats().ram_nodes
        ratio = (images + nodes) / unique
        yield Figure(
            _name(case, "bytes held (RAM + SSD) over unique", bar),
            f"{ratio:.3f} (images {images / unique:.3f})",
            "<= 1.05" if bar else "",
            f"unique: {case.unique} tokens, {unique / 1e6:.0f} MB",
            ratio <= 1.05 if bar else None,
            {"ratio": ratio, "images": images, "nodes": nodes, "unique": unique, "tokens_not_computed": known},
        )


def spilled(scale: str) -> Iterator[Figure]:
    """The same with RAM at a quarter: bytes written to SSD over unique bytes."""
    yield from _spilled(scale, "wait")


def written_through(scale: str) -> Iterator[Figure]:
    """The same, each block written as soon as it is whole; tails when RAM evicts them."""
    yield from _spilled(scale, "through")


def _spilled(scale: str, spill: Literal["wait", "through"]) -> Iterator[Figure]:
    for case, bar in _cases(scale):
        unique = case.unique * LLAMA.row_bytes(LLAMA.full)
        with (
            report.scratch() as folder,
            PrefixCache(ram=unique // 4, ssd_dir=folder, ssd="20GB", codec=Raw(), spill=spill, spill_wait=10) as cache,
        ):
            known = _converse(cache, case)
            whole = cache.flush(120)
            stats, images = cache.stats(), image_bytes(cache, "rows")
            assert stats.ssd is not None
        ratio = stats.ssd.written_bytes / unique
        how = "" if spill == "wait" else f' with spill="{spill}"'
        complete = whole and not stats.counters.dropped and images >= unique
        yield Figure(
            _name(case, f"RAM a quarter: bytes written to SSD over unique{how}", bar),
            f"{ratio:.3f}",
            "<= 1.05" if bar else "",
            f"unique: {unique / 1e6:.0f} MB; {stats.counters.dropped} images dropped",
            ratio <= 1.05 and complete if bar else None,
            {
                "ratio": ratio,
                "written": stats.ssd.written_bytes,
                "held": images,
                "unique": unique,
                "dropped": stats.counters.dropped,
                "recoded_tokens": stats.counters.recoded_tokens,
                "tokens_not_computed": known,
            },
        )


def _cases(scale: str) -> Iterator[tuple[Chats, bool]]:
    """As the bar has it, every turn ending with a block; then, without a bar, each ending inside one."""
    plan = CHATS[scale]
    yield plan, True
    yield plan._replace(system=plan.system + OFF_GRID), False


def _name(case: Chats, what: str, on_grid: bool) -> str:
    end = "" if on_grid else f" (system prompt of {case.system}: every turn ends inside a block)"
    return f"{case.chats} conversations x {case.turns} turns x {case.length} tokens, {what}{end}"


def hybrid(scale: str) -> Iterator[Figure]:
    """Stored boundaries of one chat of a model with attention and recurrent layers."""
    turns, tokens = BOUNDARIES[scale], draw(2)
    with PrefixCache(ram="4GB", codec=Raw()) as cache:
        chat, boundaries = tokens(0), []
        for _ in range(turns):
            chat = np.concatenate([chat, tokens(TURN)])
            turn(cache, HYBRID, chat, decoded=1)
            boundaries.append(len(chat))
        hits = sum(cache.match(chat[: b + 1], model=MODEL).ram == b for b in boundaries)
        sliceable = image_bytes(cache, "rows")
        snapshots = image_bytes(cache, "snapshot")
    unique = len(chat) * HYBRID.row_bytes(HYBRID.full)
    ratio = sliceable / unique
    yield Figure(
        f"hybrid (2 attention, 6 recurrent), {turns} boundaries: sliceable bytes over unique",
        f"{ratio:.3f}",
        "<= 1.05",
        f"unique: {unique / 1e6:.1f} MB; {hits} of {turns} boundaries hit",
        ratio <= 1.05 and hits == turns,
        {"ratio": ratio, "sliceable": sliceable, "snapshots": snapshots, "unique": unique, "hits": hits},
    )


def sliding(scale: str) -> Iterator[Figure]:
    """Stored boundaries of one chat of a sliding-window model, and a prompt that leaves it midway."""
    turns, tokens = BOUNDARIES[scale], draw(3)
    with PrefixCache(ram="4GB", codec=Raw()) as cache:
        chat = tokens(0)
        for _ in range(turns):
            chat = np.concatenate([chat, tokens(TURN)])
            turn(cache, SLIDING, chat, decoded=1)
        full, windowed = image_bytes(cache, "rows"), image_bytes(cache, "window")
        shared = len(chat) * 3 // 5 + 21  # inside a block, at no boundary that was stored
        other = np.concatenate([chat[:shared], VOID, tokens(500)])
        depth = cache.match(other, model=MODEL).ram
        made, rest = cache.fetch(other, model=MODEL)
        usable = made is not None and len(rest) == len(other) - shared and {c.offset for c in made} == {shared}
    over_full = full / (len(chat) * SLIDING.row_bytes(SLIDING.full))
    over_windowed = windowed / (len(chat) * SLIDING.row_bytes(SLIDING.sliding))
    yield Figure(
        f"sliding window (2 full, 10 of {SLIDING.window}), {turns} boundaries x {TURN}: bytes over unique rows",
        f"full {over_full:.3f}, windowed {over_windowed:.3f}",
        "<= 1.10",
        f"unique: {len(chat)} tokens; copies of the window at each boundary: {_copies(turns):.2f}",
        max(over_full, over_windowed) <= 1.10,
        {"full": over_full, "windowed": over_windowed, "copies": _copies(turns)},
    )
    yield Figure(
        "the same: depth of a prompt that diverges inside the covered stretch",
        f"{depth}",
        f"= {shared}",
        f"diverges at {shared} of {len(chat)}",
        depth == shared and usable,
        {"depth": depth, "shared": shared, "tokens": len(chat)},
    )


VOID = np.array([-1])  # a token that no chat has


def _copies(turns: int) -> float:
    """Windowed rows over unique ones, were the whole window kept at every boundary."""
    return sum(min(TURN * (i + 1), SLIDING.window) for i in range(turns)) / (TURN * turns)


def bits(scale: str) -> Iterator[Figure]:
    """Bits a value on disk, headers and levels included, of blocks behind the first, which has the sinks, too."""
    shape = Shape(full=8, heads=8, width=128)
    tokens = 256 * BITS_BLOCKS[scale]
    prompt_cache, ids = filled(shape, tokens + 256), draw(4)(tokens + 256)
    on_disk = {}
    for name, codec in (("turboquant", TurboQuant(3, 3)), ("raw", Raw())):
        with report.scratch() as folder:
            with PrefixCache(ram="4GB", ssd_dir=folder, ssd="20GB", codec=codec) as cache:
                cache.store(ids, prompt_cache, model=MODEL)
            files = sorted((file.stat() for file in (folder / "rows").rglob("*.safetensors")), key=lambda f: f.st_size)
        assert len(files) == BITS_BLOCKS[scale] + 1
        del files[-1]
        values = tokens * shape.layers * shape.heads * shape.width * 2
        on_disk[name] = tuple(
            sum(sizes) * 8 / values for sizes in ([f.st_size for f in files], [f.st_blocks * 512 for f in files])
        )
    size, blocks = on_disk["turboquant"]
    yield Figure(
        "bits a value on disk: TurboQuant 3 bit, width 128, 8 layers x 8 heads",
        f"{size:.3f}",
        "<= 3.2",
        f"raw fp16: {on_disk['raw'][0]:.3f}; in whole disk blocks: {blocks:.3f}",
        size <= 3.2,
        {"bits": size, "bits_in_disk_blocks": blocks, "raw_bits": on_disk["raw"][0]},
    )


FIGURES = {
    "conversations": conversations,
    "spilled": spilled,
    "written-through": written_through,
    "hybrid": hybrid,
    "sliding": sliding,
    "bits": bits,
}
