"""`prefixcache demo`: what the cache does for a handful of conversations, shown and checked on this machine.

This module starts the processes that work (`passes`), compares their answers and prints the tables. It needs no MLX itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefixcache.cli.demo.text import CALIBRATED, EXACT, LOSSY, TITLES
from prefixcache.cli.tables import Grid, table
from prefixcache.cli.text import Refused, complain, console, duration, print_json, refusing, safe, size

OWN_MODEL = Path(__file__).with_name("tiny-llama")

Result = dict[str, Any]  # of a pass
Turn = dict[str, Any]


def demo(
    conversations: Annotated[int, typer.Option(min=2, max=500, help="Conversations that share the system prompt.")] = 8,
    turns: Annotated[int, typer.Option(min=2, max=20, help="Answers in each; the last comes after the restart.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    keep: Annotated[
        Path | None, typer.Option(file_okay=False, help="Put the SSD tier in this new folder and leave it there.")
    ] = None,
) -> None:
    """Show what the cache saves: a small model answers cold, from RAM, and from SSD after a restart.

    Ends with 1 when an answer from the cache differs from the cold one, or is wrong, and with 2 when the demo could not run.
    """
    import mlx.core  # noqa: F401 - fails here, or else in each of the processes that do the work

    with refusing(), _ended_in_order(), _folder(keep) as directory:
        job = {"directory": str(directory), "model": str(OWN_MODEL), "conversations": conversations, "turns": turns}
        if not as_json:
            _introduce(console(), job)
        results = _work(job)
    problems, facts = check(results), describe(results)
    if as_json:
        print_json({**facts, "job": job, "problems": problems})
    else:
        _show(console(), facts, keep)
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(1)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the passes' process and deletes the folder, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="prefixcache-demo-") as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise Refused(f"--keep {keep}: this folder is not empty, and what it holds would be found; name a new one")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.absolute()


def _work(job: dict[str, Any]) -> dict[str, Result]:
    """Run all passes. The first process ends before the second begins: between them there is nothing but the files."""
    results = _process({**job, "passes": ["cold", "ram"]})
    cold: list[list[list[int]]] = [[] for _ in range(job["conversations"])]
    for turn in results["cold"]["turns"]:
        cold[turn["conversation"]].append(turn["answer"])
    return results | _process({**job, "passes": ["ssd", *LOSSY, CALIBRATED], "cold": cold})


def _process(job: dict[str, Any]) -> dict[str, Result]:
    """Run some passes in a process of their own. What the environment sets for the cache is not for the demo."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")}
    environment["MLX_ENABLE_TF32"] = "0"  # CUDA would round float32 to 11 bits: answers would depend on how work is cut
    command = [sys.executable, "-m", "prefixcache.cli.demo.passes"]
    ended = subprocess.run(
        command, input=json.dumps(job), stdout=subprocess.PIPE, encoding="utf-8", env=environment, check=False
    )
    if ended.returncode:
        raise Refused(f"the process for {' and '.join(job['passes'])} ended with {ended.returncode}; see above")
    results: dict[str, Result] = json.loads(ended.stdout)
    return results


# -- the check --------------------------------------------------------------------------------------------------------


def check(results: dict[str, Result]) -> list[str]:
    """Return what is wrong with the passes that must agree with the cold one; empty when nothing is."""
    problems = []
    cold = _by_place(results["cold"])
    for name in EXACT:
        for (conversation, number), turn in _by_place(results[name]).items():
            where = f"{TITLES[name]!r}: conversation {conversation + 1}, answer {number + 1}"
            if difference := _difference(turn, cold[conversation, number]):
                problems.append(f"{where} {difference}")
            # A later answer must have found the prompt before it, or the comparison would prove nothing.
            least = cold[conversation, number - 1]["prompt_tokens"] if number else 0
            if turn["reused_tokens"] < least:
                problems.append(f"{where} found {turn['reused_tokens']} tokens, where {least} at least had been stored")
            if turn["wanted"] and not turn["found"]:
                problems.append(f"{where} should say {turn['wanted']!r}, and says {turn['said']!r}")
    return problems


def _by_place(result: Result) -> dict[tuple[int, int], Turn]:
    """Return the turns of a pass by conversation and number, both from 0."""
    return {(turn["conversation"], turn["turn"]): turn for turn in result["turns"]}


def _difference(turn: Turn, cold: Turn) -> str:
    """Return how an answer differs from the cold one, "" when it doesn't."""
    answer, expected = turn["answer"], cold["answer"]
    if answer == expected:
        return ""
    at = next((i for i, (token, other) in enumerate(zip(answer, expected, strict=False)) if token != other), None)
    if at is None:
        return f"has {len(answer)} tokens, the cold one {len(expected)}"
    return f"differs from the cold one at token {at + 1}: {answer[at]}, not {expected[at]}"


# -- the facts --------------------------------------------------------------------------------------------------------


def describe(results: dict[str, Result]) -> dict[str, Any]:
    """Return the numbers of all passes, and one conversation, without the other answers. `sooner`: how many times sooner the
    first token came than in the cold pass, medians over the same answers.
    """
    cold = _by_place(results["cold"])
    facts: dict[str, Any] = {}
    for name, result in results.items():
        turns = result["turns"]
        hits = [turn for turn in turns if turn["reused_tokens"]]
        timed = hits or turns
        facts[name] = {
            "hits": len(hits),
            "first": median(turn["first"] for turn in timed),
            "store": median(turn["store"] for turn in turns),
            "needles": sum(bool(turn["wanted"]) for turn in turns),
            **{key: sum(turn[key] for turn in turns) for key in ("prompt_tokens", "reused_tokens", "found")},
            **{key: value for key, value in result.items() if key != "turns"},
            "count": len(turns),
        }
        if name != "cold":
            same = [cold[place] for place, turn in _by_place(result).items() if turn in timed]
            facts[name]["sooner"] = median(turn["first"] for turn in same) / facts[name]["first"]
            equal = (turn["answer"] == cold[place]["answer"] for place, turn in _by_place(result).items())
            facts[name]["equal"] = sum(equal)
    shown = ("question", "said", "wanted", "found", "prompt_tokens", "reused_tokens")
    facts["conversation"] = [  # the second one, the first to begin with a hit
        {"from": name, **{key: turn[key] for key in shown}}
        for name in EXACT
        for turn in results[name]["turns"]
        if turn["conversation"] == 1
    ]
    return facts


# -- on the screen ----------------------------------------------------------------------------------------------------


def _introduce(screen: Console, job: dict[str, Any]) -> None:
    screen.print(
        f"{safe(Path(job['model']).name)} answers {job['conversations']} conversations that share one system prompt, "
        f"{job['turns']} questions each. Most ask for a number or a line that the prompt holds (a needle), so an answer "
        f"can be right or wrong. The SSD tier is in {safe(job['directory'])}.\n"
    )


def _show(screen: Console, facts: dict[str, Any], keep: Path | None) -> None:
    screen.print("One conversation, answered from the cache:")
    for turn in facts["conversation"]:
        asked, said = (safe(turn[what].replace("\n", " ")) for what in ("question", "said"))
        screen.print(f"  user   {asked}\n  model  {said}", soft_wrap=True)
        screen.print(
            f"         ({turn['reused_tokens']} of {turn['prompt_tokens']} tokens from {turn['from'].upper()})"
        )
    headings = ["Codec Raw: what is kept is kept bit for bit", "cold", "from RAM", "from SSD,\nrestarted"]
    screen.print(_table(headings, [facts[name] for name in ("cold", *EXACT)]))
    headings = ["Codec TurboQuant, lossy: the RAM pass again, given cold's answers", "4 bits", "3 bits"]
    screen.print(_table(headings, [facts[name] for name in LOSSY]))
    screen.print(_calibrated(facts))
    screen.print("These are too few tokens to judge a codec by: prefixcache evaluate measures it.")
    if keep is not None:
        screen.print(f"\nThe files are still there: prefixcache inspect {safe(str(keep / 'raw'))}", soft_wrap=True)


def _calibrated(facts: dict[str, Any]) -> str:
    """Return a passage on codec transform beside TurboQuant."""
    said = [
        f"{size(result['ssd']['bytes'])} of files, {result['equal']} of {result['count']} answers equal to cold"
        for result in (facts[CALIBRATED], facts[LOSSY[0]])
    ]
    return (
        f"Codec transform, calibrated here with small numbers, the same pass: {said[0]} (TurboQuant, 4 bits: {said[1]}). "
        "This model is a toy, and half of what it stores are tails, which are kept as they are: how much smaller transform "
        "is here says nothing of real models.\n"
    )


def _table(headings: list[str], passes: list[Result]) -> Table:
    """Return a table with a column for each pass; the cold one leaves out what it takes a cache to have."""
    columns = [_cells(result) for result in passes]
    return table(Grid(headings, [[label, *(column.get(label, "") for column in columns)] for label in columns[-1]]))


def _cells(result: Result) -> dict[str, str]:
    """Return a pass's numbers by the label of their row."""
    reused = result["reused_tokens"]
    cells = {
        "answers": f"{result['count']}",
        "  of them with a hit": f"{result['hits']}",
        "needles found": f"{result['found']} of {result['needles']}",
        "tokens of all prompts": f"{result['prompt_tokens']:,}",
        "  of them reused": f"{reused:,} ({reused / result['prompt_tokens']:.1%})" if reused else "0",
        "time to first token, median of those with a hit": duration(result["first"]),
    }
    if "sooner" in result:
        cells |= {
            "  how much sooner than cold, same answers": f"{result['sooner']:.1f} x",
            "answers equal to cold, token for token": f"{result['equal']} of {result['count']}",
            "time to store an answer, median": duration(result["store"]),
            "RAM at most, of its budget": f"{size(result['ram_peak'])} of {size(result['ram_limit'])}",
            "images in RAM at the end": size(result["ram_images"]),
            "files on SSD at the end": f"{size(result['ssd']['bytes'])} in {result['ssd']['files']}",
            "unique tokens of these answers, plain float32": size(result["plain_bytes"]),
            "the conversations, each kept whole, plain float32": size(result["whole_bytes"]),
        }
    return cells
