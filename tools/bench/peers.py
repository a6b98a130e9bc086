"""prefixcache beside mlx-lm's LRUPromptCache, vllm-mlx's memory_cache and ssd_cache, and mlx-vlm's APC, at the same tasks.

Each does a task in a process of its own, one after the other, by the calls that its server makes (`tools/bench/peer/`). All
keep rows as they are: no codec takes part, `tools/bench/peer_codecs.py` has those. Rows in which a peer is ahead stay in.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.bench import report
from tools.bench.peer.contestants import (
    MLX_LM,
    MLX_VLM,
    OURS,
    VLLM_MLX,
    VLLM_MLX_SCHEDULED,
    Answer,
    Contestant,
    Task,
    ask,
)
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
    raw = {
        "values": values,
        "unit": unit,
        "more_is_better": more_is_better,
        "ours": ours,
        "theirs": {who.name: answer.found or answer.why for who, answer in theirs},
    }
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


Compared = tuple[Found, list[tuple[Contestant, Answer]]]


def every(peers: tuple[Contestant, ...], *tasks: Task) -> list[Compared]:
    """What ours and each peer found, by task. A plan with folder=True gives each an empty folder of its own."""
    ours, *theirs = [_with_folders(who, *tasks) for who in (OURS, *peers)]
    compared = []
    for i in range(len(tasks)):
        found = ours[i].found
        assert found is not None
        compared.append((found, [(who, answers[i]) for who, answers in zip(peers, theirs, strict=True)]))
    return compared


def _with_folders(who: Contestant, *tasks: Task) -> list[Answer]:
    with report.scratch() as folder:
        planned = []
        for i, task in enumerate(tasks):
            own = {"folder": str(folder / str(i))} if task.plan.get("folder") else {}
            planned.append(task._replace(plan={**task.plan, **own}))
            (folder / str(i)).mkdir()
        return ask(who, *planned)


# -- looking up --------------------------------------------------------------------------------------------------------

# Entries, the tokens of the longest, of these shared by all, lookups, and seconds after which lookups and filling end.
LOOKUPS = {
    "full": [(100, 8192, 512, 50, 8, 60), (10_000, 1024, 256, 50, 8, 60)],
    "quick": [(100, 4096, 512, 20, 3, 8), (2_000, 1024, 256, 20, 3, 8)],
    "tiny": [(4, 1024, 256, 2, 5, 5)],
}


def lookup(scale: str) -> Iterator[Figure]:
    """A prompt that goes its own way after what all entries share, until there is a prompt cache to go on with."""
    for entries, longest, shared, lookups, within, filling in LOOKUPS[scale]:
        plan = {"entries": entries, "longest": longest, "shared": shared, "lookups": lookups, "within": within}
        ((ours, theirs),) = every(PEERS, Task("lookup", {**plan, "filling": filling}))

        def said(found: Found, asked: int = entries, shared: int = shared) -> str:
            few = f" ({found['entries']:,} entries: storing took {1e3 * found['store_s']:.0f} ms each)"
            short = f" ({min(found['depths'])} of {shared} tokens)"
            return (
                duration(statistics.median(found["seconds"]))
                + (few if found["entries"] < asked else "")
                + (short if min(found["depths"]) < shared else "")
            )

        yield compared(
            f"lookup of a prompt that diverges after {shared}, among {entries:,} of {longest // 2:,} to {longest:,} tokens",
            ours,
            theirs,
            lambda found: statistics.median(found["seconds"]),
            said,
            unit="s",
        )


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


# -- conversations -----------------------------------------------------------------------------------------------------

CHATS = {"full": (20, 10, 512, 4096), "quick": (8, 5, 512, 4096), "tiny": (3, 2, 512, 512)}
SHARING_BAR = 1.05


def conversations(scale: str) -> Iterator[Figure]:
    """Chats by turns on one system prompt: with room for all in RAM, and with a quarter of it and an SSD."""
    chats, turns, length, system = CHATS[scale]
    unique = (system + chats * turns * length) << 10
    plan = {"chats": chats, "turns": turns, "length": length, "system": system}
    name = f"{chats} conversations x {turns} turns x {length} tokens on a shared prompt of {system:,}"
    with_room = Task("converse", {**plan, "ram": 32 * unique, "folder": ""})
    ((ours, theirs),) = every((MLX_LM, VLLM_MLX, VLLM_MLX_SCHEDULED, MLX_VLM), with_room)
    held = ours["held"] / ours["unique"]
    yield compared(
        f"{name}: bytes held over unique",
        ours,
        theirs,
        lambda found: found["held"] / found["unique"],
        lambda found: f"{found['held'] / found['unique']:.2f}",
        f"<= {SHARING_BAR}",
        held <= SHARING_BAR,
        unit="x unique",
    )
    with_ssd = Task("converse", {**plan, "ram": unique // 4, "folder": True})
    ((ours, theirs),) = every((VLLM_MLX, VLLM_MLX_SCHEDULED, MLX_VLM), with_ssd)
    written = ours["written"] / ours["unique"]
    yield compared(
        f"{name}, RAM a quarter of unique: bytes written to the SSD over unique",
        ours,
        theirs,
        lambda found: found["written"] / found["unique"],
        lambda found: f"{found['written'] / found['unique']:.2f}",
        f"<= {SHARING_BAR}",
        written <= SHARING_BAR,
        unit="x unique",
    )
    yield compared(
        f"{name}, RAM a quarter of unique: prompt tokens computed over unique",
        ours,
        theirs,
        lambda found: found["computed"] / found["unique_tokens"],
        lambda found: f"{found['computed'] / found['unique_tokens']:.2f}",
        unit="x unique",
    )


# -- the SSD -----------------------------------------------------------------------------------------------------------

PROMOTED = {"full": (24_576, 5), "quick": (8_192, 3), "tiny": (512, 1)}


def promotion(scale: str) -> Iterator[Figure]:
    """From the SSD after a restart, page cache empty, to a prompt cache that a model can use: promote and fetch."""
    tokens, rounds = PROMOTED[scale]
    ((ours, theirs),) = every(WITH_SSD, Task("promote", {"tokens": tokens, "rounds": rounds, "folder": True}))

    def rate(found: Found) -> float:
        return report.median_ratio(found["plain_s"], found["seconds"])

    def said(found: Found) -> str:
        whole = "" if min(found["depths"]) == tokens else f", {min(found['depths'])} of {tokens} tokens"
        return f"{rate(found):.2f} ({found['bytes'] / statistics.median(found['seconds']) / 1e6:,.0f} MB/s{whole})"

    yield compared(
        f"from the SSD to a usable prompt cache, {ours['bytes'] / 1e6:.0f} MB of rows, over a plain cold read",
        ours,
        theirs,
        rate,
        said,
        more_is_better=True,
        unit="x plain read",
    )


SMALL = {"full": 4096, "quick": 4096, "tiny": 1024}
TRIES = {"full": 32, "quick": 16, "tiny": 2}


def faults(scale: str) -> Iterator[Figure]:
    """What is served in the end: with RAM full, from a damaged file, to another model, and of what class."""
    plan, tries = {"tokens": SMALL[scale], "folder": True}, TRIES[scale]
    full, flips, models, window = every(
        WITH_SSD,
        Task("full", plan),
        Task("flips", {**plan, "tries": tries}),
        Task("models", plan),
        Task("window", plan),
    )
    yield outcomes(
        "a prompt on the SSD is asked for while RAM is full",
        *full,
        _served_or_refused,
        lambda found: found["depth"] == found["tokens"],
        "served",
    )
    yield outcomes(
        f"one bit of each file flipped, {tries} times: wrong rows served",
        *flips,
        _flipped,
        lambda found: found["untouched"] == "whole" and not found["wrong"] and not found["failed"],
        "none",
    )
    for what, name in (
        ("other", "another model opens the directory: the first one's state is"),
        ("retrained", "the model's weights change in place: the old ones' state is"),
    ):
        yield outcomes(
            name,
            *models,
            lambda found, what=what: _kept_apart(found, what),
            lambda found, what=what: not found[what],
            "kept apart",
        )
    yield outcomes(
        "a KVCache and a RotatingKVCache come back from the SSD as",
        *window,
        _classes,
        lambda found: found["classes"] == ["KVCache", "RotatingKVCache"],
        "the same",
    )


def _served_or_refused(found: Found) -> str:
    return "served" if found["depth"] == found["tokens"] else f"refused ({found['depth']} of {found['tokens']} tokens)"


def _flipped(found: Found) -> str:
    if found["untouched"] != "whole":
        return "not found on the SSD in the first place"
    missed = f", a miss {found['missed']} times" if found["missed"] else ""
    failed = f", {found['failed']} errors" if found["failed"] else ""
    return f"{found['wrong'] or 'none'}{missed}{failed}"


def _kept_apart(found: Found, what: str) -> str:
    if found["same"] != found["tokens"]:
        return "not found on the SSD in the first place"
    return "served" if found[what] else "kept apart"


def _classes(found: Found) -> str:
    return " and ".join(found["classes"]) or "nothing"


def restarts(scale: str) -> Iterator[Figure]:
    """A prompt that was stored and is asked for by the next process."""
    with report.scratch() as folder:
        ours, *theirs = [(who, _again(who, folder / who.side, SMALL[scale])) for who in (OURS, *PEERS)]
    names = (
        "after the server was stopped and started, a prompt is",
        "after a kill -9, two seconds after it was stored, a prompt is",
    )
    for i, name in enumerate(names):
        found = ours[1][i].found
        assert found is not None
        figure = outcomes(
            name,
            found,
            [(who, answers[i]) for who, answers in theirs],
            _found_or_lost,
            lambda found: found["depth"] == found["tokens"],
            "found",
        )
        yield figure if i == 0 else report.without_bar(figure)


def _again(who: Contestant, folder: Path, tokens: int) -> list[Answer]:
    """What is found again after a stop, and after a kill."""
    places = [folder / "stopped", folder / "killed"]
    for place in places:
        place.mkdir(parents=True)
        (before,) = ask(who, Task("stored", {"folder": str(place), "tokens": tokens, "kill": place.name == "killed"}))
        if before.found is None:
            return [before] * len(places)
    return ask(who, *(Task("found_again", {"folder": str(place), "tokens": tokens}) for place in places))


def _found_or_lost(found: Found) -> str:
    return "found" if found["depth"] == found["tokens"] else "lost"


FIGURES = {
    "peers-lookup": lookup,
    "peers-conversations": conversations,
    "peers-promotion": promotion,
    "peers-faults": faults,
    "peers-restarts": restarts,
}
