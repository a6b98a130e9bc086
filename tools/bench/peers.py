"""prefixcache beside mlx-lm's LRUPromptCache, vllm-mlx's memory_cache and ssd_cache, and mlx-vlm's APC, at the same tasks.

Each does a task in a process of its own, one after the other, by the calls that its server makes (`tools/bench/peer/`). All
keep rows as they are: no codec takes part, `tools/bench/peer_codecs.py` has those. Rows in which a peer is ahead stay in.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import report
from tools.bench.peer.contestants import MLX_LM, MLX_VLM, OURS, VLLM_MLX, VLLM_MLX_SCHEDULED, Answer, Contestant, ask
from tools.bench.report import Beside, Figure

PEERS = (MLX_LM, VLLM_MLX, MLX_VLM)
WITH_SSD = (VLLM_MLX, MLX_VLM)
Found = dict[str, Any]


def compared(
    name: str,
    ours: Found,
    theirs: list[tuple[Contestant, Answer]],
    value: Callable[[Found], float],
    said: Callable[[Found], str],
    bar: str = "",
    met: bool | None = None,
    more_is_better: bool = False,
    unit: str = "",
) -> Figure:
    """A figure with a peer a line. The ratio says how many times better ours is: under 1, the peer is ahead."""
    rows, values = [], {OURS.name: value(ours)}
    for who, answer in theirs:
        if answer.found is None:
            rows.append(Beside(who.name, answer.why))
            continue
        values[who.name] = value(answer.found)
        pair = (value(ours), values[who.name]) if more_is_better else (values[who.name], value(ours))
        rows.append(Beside(who.name, said(answer.found), times(*pair)))
    raw = {"values": values, "unit": unit, "more_is_better": more_is_better, "ours": ours,
           "theirs": {who.name: answer.found or answer.why for who, answer in theirs}}  # fmt: skip
    return Figure(name, said(ours), bar, "", met, raw, tuple(rows))


def times(over: float, under: float) -> str:
    if not under:
        return ""
    ratio = over / under
    return f"{ratio:,.0f} x" if ratio >= 10 else f"{ratio:.1f} x" if ratio >= 1.95 else f"{ratio:.2f} x"


def outcomes(
    name: str,
    ours: Found,
    theirs: list[tuple[Contestant, Answer]],
    said: Callable[[Found], str],
    met: Callable[[Found], bool],
    bar: str,
) -> Figure:
    """A figure that is an outcome, not a number."""
    rows = [Beside(who.name, said(answer.found) if answer.found is not None else answer.why) for who, answer in theirs]
    raw = {"ours": ours, "theirs": {who.name: answer.found or answer.why for who, answer in theirs}}
    return Figure(name, said(ours), bar, "", met(ours), raw, tuple(rows))


def every(peers: tuple[Contestant, ...], task: str, **plan: Any) -> tuple[Found, list[tuple[Contestant, Answer]]]:
    """The task by ours and by each peer. A plan with folder=True gives each an empty folder of its own."""

    def one(who: Contestant) -> Answer:
        if not plan.get("folder"):
            return ask(who, task, **plan)
        with report.scratch() as folder:
            return ask(who, task, **{**plan, "folder": str(folder)})

    ours = one(OURS).found
    assert ours is not None
    return ours, [(who, one(who)) for who in peers]


# -- looking up --------------------------------------------------------------------------------------------------------

# Entries, their tokens, of these shared by all, lookups, and seconds after which lookups and filling end.
LOOKUPS = {
    "full": [(100, 8192, 512, 50, 20, 60), (10_000, 512, 256, 50, 20, 60)],
    "quick": [(100, 4096, 512, 20, 6, 20), (2_000, 512, 256, 20, 6, 20)],
    "tiny": [(4, 512, 256, 2, 5, 5)],
}


def lookup(scale: str) -> Iterator[Figure]:
    """A prompt that goes its own way after what all entries share, until there is a prompt cache to go on with."""
    for entries, length, shared, lookups, within, filling in LOOKUPS[scale]:
        ours, theirs = every(
            PEERS, "lookup", entries=entries, length=length, shared=shared, lookups=lookups, within=within, filling=filling
        )

        def said(found: Found, asked: int = entries) -> str:
            fewer = f" ({found['entries']:,} entries: storing took {1e3 * found['store_s']:.0f} ms each)"
            return _duration(statistics.median(found["seconds"])) + (fewer if found["entries"] < asked else "")

        yield compared(
            f"lookup of a prompt that diverges after {shared}, among {entries:,} entries of {length:,} tokens", ours, theirs,
            lambda found: statistics.median(found["seconds"]), said, unit="s",
        )  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


# -- conversations -----------------------------------------------------------------------------------------------------

CHATS = {"full": (20, 10, 512, 4096), "quick": (8, 5, 512, 4096), "tiny": (3, 2, 512, 512)}
SHARING_BAR = 1.05


def conversations(scale: str) -> Iterator[Figure]:
    """Chats by turns on one system prompt: with room for all in RAM, and with a quarter of it and an SSD."""
    chats, turns, length, system = CHATS[scale]
    unique = (system + chats * turns * length) << 10
    plan = {"chats": chats, "turns": turns, "length": length, "system": system}
    name = f"{chats} conversations x {turns} turns x {length} tokens on a shared prompt of {system:,}"
    ours, theirs = every(PEERS, "converse", **plan, ram=32 * unique, folder="", options=[])
    theirs.insert(2, (VLLM_MLX_SCHEDULED, ask(VLLM_MLX_SCHEDULED, "converse", **plan, ram=32 * unique, folder="",
                                              options=["as-scheduled"])))  # fmt: skip
    held = ours["held"] / ours["unique"]
    yield compared(
        f"{name}: bytes held over unique", ours, theirs, lambda found: found["held"] / found["unique"],
        lambda found: f"{found['held'] / found['unique']:.2f}", f"<= {SHARING_BAR}", held <= SHARING_BAR, unit="x unique",
    )  # fmt: skip
    ours, theirs = every(WITH_SSD, "converse", **plan, ram=unique // 4, folder=True, options=[])
    with report.scratch() as folder:
        theirs.insert(1, (VLLM_MLX_SCHEDULED, ask(VLLM_MLX_SCHEDULED, "converse", **plan, ram=unique // 4,
                                                  folder=str(folder), options=["as-scheduled"])))  # fmt: skip
    written = ours["written"] / ours["unique"]
    yield compared(
        f"{name}, RAM a quarter of unique: bytes written to the SSD over unique", ours, theirs,
        lambda found: found["written"] / found["unique"], lambda found: f"{found['written'] / found['unique']:.2f}",
        f"<= {SHARING_BAR}", written <= SHARING_BAR, unit="x unique",
    )  # fmt: skip
    yield compared(
        f"{name}, RAM a quarter of unique: prompt tokens computed over unique", ours, theirs,
        lambda found: found["computed"] / found["unique_tokens"],
        lambda found: f"{found['computed'] / found['unique_tokens']:.2f}", unit="x unique",
    )  # fmt: skip


# -- the SSD -----------------------------------------------------------------------------------------------------------

PROMOTED = {"full": (24_576, 5), "quick": (8_192, 3), "tiny": (512, 1)}


def promotion(scale: str) -> Iterator[Figure]:
    """From the SSD after a restart, page cache empty, to a prompt cache that a model can use: promote and fetch."""
    tokens, rounds = PROMOTED[scale]
    ours, theirs = every(WITH_SSD, "promote", tokens=tokens, rounds=rounds, folder=True)

    def rate(found: Found) -> float:
        return report.median_ratio(found["plain_s"], found["seconds"])

    def said(found: Found) -> str:
        whole = "" if min(found["depths"]) == tokens else f", {min(found['depths'])} of {tokens} tokens"
        return f"{rate(found):.2f} ({found['bytes'] / statistics.median(found['seconds']) / 1e6:,.0f} MB/s{whole})"

    yield compared(
        f"from the SSD to a usable prompt cache, {ours['bytes'] / 1e6:.0f} MB of rows, over a plain cold read", ours, theirs,
        rate, said, more_is_better=True, unit="x plain read",
    )  # fmt: skip


SMALL = {"full": 4096, "quick": 4096, "tiny": 512}
TRIES = {"full": 33, "quick": 17, "tiny": 3}  # the first one without a fault


def faults(scale: str) -> Iterator[Figure]:
    """What is served in the end: with RAM full, from a damaged file, to another model, after a restart."""
    tokens = SMALL[scale]
    depth = lambda found: "served" if found["depth"] == tokens else f"refused ({found['depth']} of {tokens} tokens)"  # noqa: E731
    ours, theirs = every(WITH_SSD, "full", tokens=tokens, folder=True)
    yield outcomes("a prompt on the SSD is asked for while RAM is full", ours, theirs, depth,
                   lambda found: found["depth"] == tokens, "served")  # fmt: skip

    tries = TRIES[scale] - 1
    ours, theirs = every(WITH_SSD, "flips", tokens=tokens, tries=tries + 1, folder=True)
    yield outcomes(
        f"one bit of each file flipped, {tries} times: wrong rows served", ours, theirs, _flipped,
        lambda found: not found["wrong"] and not found["failed"], "none",
    )  # fmt: skip

    ours, theirs = every(WITH_SSD, "models", tokens=tokens, folder=True)
    for what, name in (("other", "another model opens the directory: the first one's state is"),
                       ("retrained", "the model's weights change in place: the old ones' state is")):  # fmt: skip
        yield outcomes(
            name, ours, theirs, lambda found, what=what: "served" if found[what] else "kept apart",
            lambda found, what=what: not found[what], "kept apart",
        )  # fmt: skip

    ours, theirs = every(WITH_SSD, "window", tokens=tokens, folder=True)
    yield outcomes("a KVCache and a RotatingKVCache come back from the SSD as", ours, theirs, _classes,
                   lambda found: found["classes"] == ["KVCache", "RotatingKVCache"], "the same")  # fmt: skip


def restarts(scale: str) -> Iterator[Figure]:
    """A prompt that was stored and is asked for by the next process."""
    tokens = SMALL[scale]

    def again(who: Contestant, kill: bool) -> Answer:
        with report.scratch() as folder:
            before = ask(who, "stored", folder=str(folder), tokens=tokens, kill=kill)
            return before if before.found is None else ask(who, "found_again", folder=str(folder), tokens=tokens)

    for kill, name in ((False, "after the server was stopped and started, a prompt is"),
                       (True, "after a kill -9, two seconds after it was stored, a prompt is")):  # fmt: skip
        ours = again(OURS, kill).found
        assert ours is not None
        theirs = [(who, again(who, kill)) for who in PEERS]
        said = lambda found: "found" if found["depth"] == tokens else "lost"  # noqa: E731
        figure = outcomes(name, ours, theirs, said, lambda found: found["depth"] == tokens, "" if kill else "found")
        yield figure if not kill else report.without_bar(figure)


def _flipped(found: Found) -> str:
    missed = f", a miss {found['missed']} times" if found["missed"] else ""
    failed = f", {found['failed']} errors" if found["failed"] else ""
    return f"{found['wrong']} times{missed}{failed}" if found["wrong"] or missed or failed else "none"


def _classes(found: Found) -> str:
    return " and ".join(found["classes"]) or "nothing"


FIGURES = {
    "peers-lookup": lookup, "peers-conversations": conversations, "peers-promotion": promotion, "peers-faults": faults,
    "peers-restarts": restarts,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(report.main({"peers": FIGURES}))
