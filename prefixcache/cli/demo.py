"""`prefixcache demo`: what the cache does for a dozen conversations, shown and checked on this machine.

This module is the screen: it starts the processes that work (`demo_passes`), shows their progress, compares their
answers and prints the table. It needs no MLX itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prefixcache.cli.text import complain, console, print_json, size

TITLES = {
    "cold": "Raw: cold, every prompt computed whole",
    "ram": "Raw: from RAM, as the conversations go",
    "ssd": "Raw: a new process goes on from SSD",
    "turboquant": "TurboQuant, 4 bits: from RAM",
}

Result = dict[str, Any]


class Failed(Exception):
    """A process of the demo ended badly."""


def demo(
    conversations: Annotated[
        int, typer.Option(min=2, max=500, help="Conversations that share the system prompt.")
    ] = 12,
    turns: Annotated[int, typer.Option(min=2, max=20, help="Answers in each; the last comes after the restart.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model's random weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    keep: Annotated[
        Path | None, typer.Option(file_okay=False, help="Put the SSD tier in this new folder and leave it there.")
    ] = None,
) -> None:
    """Show what the cache saves: a tiny model with random weights answers cold, from RAM, and from SSD after a restart.

    Ends with 1 when an answer from the cache differs from the cold one, 2 when the demo could not run.
    """
    try:
        with _folder(keep) as directory:
            job = {"directory": str(directory), "seed": seed, "conversations": conversations, "turns": turns}
            if not as_json:
                _introduce(console(), job)
            results = _work(job)
            problems = check(results)
            if as_json:
                print_json({**_summary(results), "job": job, "problems": problems})
            else:
                _show(console(), results, keep)
    except Failed as error:
        complain(str(error))
        raise typer.Exit(2) from error
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(1)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="prefixcache-demo-") as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise Failed(f"--keep {keep}: this folder is not empty, and what it holds would be found; name a new one")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.absolute()


# -- the processes ----------------------------------------------------------------------------------------------------


def _work(job: dict[str, Any]) -> dict[str, Result]:
    """All passes. The first process ends before the second begins: between them there is nothing but the files."""
    answers = {"cold": job["turns"], "ram": job["turns"] - 1, "ssd": 1, "turboquant": job["turns"] - 1}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=True)) as progress:
        tasks = {
            name: progress.add_task(TITLES[name], start=False, total=job["conversations"] * each)
            for name, each in answers.items()
        }

        def done(name: str, number: int) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=number)

        def ended(name: str) -> None:
            progress.stop_task(tasks[name])

        results = _process({**job, "passes": ["cold", "ram"]}, done, ended)
        cold = results["cold"]["answers"]
        results |= _process({**job, "passes": ["ssd", "turboquant"], "cold": cold}, done, ended)
    return results


def _process(job: dict[str, Any], done: Callable[[str, int], None], ended: Callable[[str], None]) -> dict[str, Result]:
    """Run some passes in a process of their own. What the environment sets for the cache is not for the demo."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")}
    environment["MLX_ENABLE_TF32"] = (
        "0"  # CUDA would round float32 to 11 bits, and answers would hang on how work is cut
    )
    command = [sys.executable, "-m", "prefixcache.cli.demo_passes"]
    results: dict[str, Result] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            done(job["passes"][0], 0)
            process.stdin.write(json.dumps(job))
            process.stdin.close()
            for line in process.stdout:
                event = json.loads(line)
                name = event["pass"]
                if "result" in event:
                    results[name] = event["result"]
                    ended(name)
                else:
                    done(name, event["done"])
        except BrokenPipeError:  # it ended before it had read its job; its exit code tells
            pass
        except BaseException:
            process.terminate()
            raise
    if process.returncode or set(results) != set(job["passes"]):
        raise Failed(f"the process for {' and '.join(job['passes'])} ended with {process.returncode}; see above")
    return results


# -- the check --------------------------------------------------------------------------------------------------------


def check(results: dict[str, Result]) -> list[str]:
    """What is wrong with the passes that must agree with the cold one; empty when nothing is."""
    return [
        problem
        for name in ("ram", "ssd")
        for turn in results[name]["turns"]
        for problem in (difference(results, name, turn), _forgotten(results, name, turn))
        if problem
    ]


def difference(results: dict[str, Result], name: str, turn: dict[str, Any]) -> str:
    """How an answer differs from the cold one, "" when it doesn't."""
    reference = _cold(results, turn)
    if turn["answer"] == reference["answer"]:
        return ""
    pairs = zip(turn["answer"], reference["answer"], strict=False)
    at = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), -1)
    where = f"{TITLES[name]!r}: conversation {turn['conversation'] + 1}, answer {turn['turn'] + 1}"
    if at < 0:
        return f"{where} has {len(turn['answer'])} tokens, the cold one {len(reference['answer'])}"
    return (
        f"{where} differs from the cold one at token {at + 1}: {turn['answer'][at]}, not {reference['answer'][at]}, "
        f"which led by {reference['gaps'][at]:.3g} nats"
    )


def _forgotten(results: dict[str, Result], name: str, turn: dict[str, Any]) -> str:
    """A later answer must have found the prompt before it, or the comparison would prove nothing."""
    if turn["turn"] == 0:
        return ""
    least = _cold(results, {**turn, "turn": turn["turn"] - 1})["prompt_tokens"]
    if turn["reused_tokens"] >= least:
        return ""
    where = f"{TITLES[name]!r}: conversation {turn['conversation'] + 1}, answer {turn['turn'] + 1}"
    return f"{where} found {turn['reused_tokens']} tokens, where {least} at least had been stored"


def _cold(results: dict[str, Result], turn: dict[str, Any]) -> dict[str, Any]:
    """The cold pass's turn for a turn of another pass."""
    each = len(results["cold"]["answers"][0])
    found: dict[str, Any] = results["cold"]["turns"][turn["conversation"] * each + turn["turn"]]
    return found


def _equal(results: dict[str, Result], name: str) -> tuple[int, int]:
    """Answers that are cold's token for token, and of how many."""
    turns = results[name]["turns"]
    return sum(turn["answer"] == _cold(results, turn)["answer"] for turn in turns), len(turns)


def _agreement(results: dict[str, Result], name: str) -> tuple[int, int]:
    """Tokens that are cold's, and of how many. Of use where the pass was given cold's answer as it went."""
    pairs = [
        pair
        for turn in results[name]["turns"]
        for pair in zip(turn["answer"], _cold(results, turn)["answer"], strict=True)
    ]
    return sum(got == wanted for got, wanted in pairs), len(pairs)


def _sooner(results: dict[str, Result], name: str) -> float:
    """How many times sooner the first token came than in the cold pass: medians over the same answers."""
    reference = median(_cold(results, turn)["first"] for turn in _hits(results, name))
    return reference / median(turn["first"] for turn in _hits(results, name))


def _hits(results: dict[str, Result], name: str) -> list[dict[str, Any]]:
    """The answers that found something in the cache; all, when none did."""
    turns: list[dict[str, Any]] = results[name]["turns"]
    return [turn for turn in turns if turn["reused_tokens"]] or turns


# -- the screen -------------------------------------------------------------------------------------------------------


def _introduce(screen: Console, job: dict[str, Any]) -> None:
    screen.print(
        f"A tiny Llama with random weights (seed {job['seed']}); its tokens are bytes, its answers are noise. "
        f"{job['conversations']} conversations share one system prompt; each has {job['turns']} answers. "
        f"The SSD tier is in {job['directory']}.\n"
    )


def _show(screen: Console, results: dict[str, Result], keep: Path | None) -> None:
    cold, ram, ssd = (results[name] for name in ("cold", "ram", "ssd"))
    table = Table(title="Codec Raw: what is kept is kept bit for bit", title_justify="left")
    for heading in ("", "cold", "from RAM", "from SSD, after a restart"):
        table.add_column(heading, justify="right" if heading else "left")
    warm = (("ram", ram), ("ssd", ssd))
    cells: list[tuple[str, str, Callable[[str, Result], str]]] = [
        ("answers", str(len(cold["turns"])), lambda _, r: str(len(r["turns"]))),
        ("  of them with a hit", "0", lambda _, r: str(r["hits"])),
        ("time to first token, median of those with a hit", _time(cold["first"]), lambda _, r: _time(r["first"])),
        ("  how much sooner than cold, same answers", "", lambda name, _: f"{_sooner(results, name):.1f} x"),
        ("tokens of all prompts", f"{cold['prompt_tokens']:,}", lambda _, r: f"{r['prompt_tokens']:,}"),
        (
            "  of them reused",
            "0",
            lambda _, r: f"{r['reused_tokens']:,} ({r['reused_tokens'] / r['prompt_tokens']:.1%})",
        ),
        ("time to store an answer, median", "", lambda _, r: _time(r["store"])),
        ("RAM at most, of its budget", "", lambda _, r: f"{size(r['ram_peak'])} of {size(r['ram_limit'])}"),
        ("images in RAM at the end", "", lambda _, r: size(r["ram_images"])),
        ("files on SSD at the end", "", lambda _, r: f"{size(r['ssd']['bytes'])} in {r['ssd']['files']}"),
        ("unique tokens of these answers, plain float32", "", lambda _, r: size(r["plain_bytes"])),
        ("the conversations, each kept whole, plain float32", "", lambda _, r: size(r["whole_bytes"])),
        ("answers equal to cold, token for token", "", lambda name, _: "{} of {}".format(*_equal(results, name))),
    ]
    for label, reference, cell in cells:
        table.add_row(label, reference, *(cell(name, result) for name, result in warm))
    screen.print(table)
    screen.print(f"\n{_turboquant(results)}")
    if keep is not None:
        screen.print(f"\nThe files are still there: prefixcache inspect {keep / 'raw'}")


def _turboquant(results: dict[str, Result]) -> str:
    turbo = results["turboquant"]
    smaller = results["ram"]["ssd"]["bytes"] / turbo["ssd"]["bytes"]
    same, of = _agreement(results, "turboquant")
    return (
        f"TurboQuant(key_bits=4, value_bits=4) holds the same {turbo['unique_tokens']:,} tokens in "
        f"{size(turbo['ssd']['bytes'])} on SSD, {smaller:.2f} times smaller than Raw does in float32; of float16 it "
        f"would be about half of that. From RAM the first token came after {_time(turbo['first'])} (median), "
        f"{_sooner(results, 'turboquant'):.1f} x sooner than cold. Given cold's answers as they went, it chose cold's "
        f"next token in {same:,} of {of:,} cases. The weights are random: that count says nothing about quality."
    )


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1000:.1f} ms"
        if seconds < 0.01
        else f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def _summary(results: dict[str, Result]) -> dict[str, Any]:
    """The numbers of all passes, without the answers themselves."""
    summary: dict[str, Any] = {}
    for name, result in results.items():
        summary[name] = {key: value for key, value in result.items() if key not in ("turns", "answers")}
        summary[name]["count"] = len(result["turns"])
        if name != "cold":
            summary[name]["sooner"] = _sooner(results, name)
        if name in ("ram", "ssd"):
            summary[name]["equal"] = _equal(results, name)[0]
    same, of = _agreement(results, "turboquant")
    summary["turboquant"] |= {
        "agreeing_tokens": same, "tokens": of,
        "smaller": results["ram"]["ssd"]["bytes"] / results["turboquant"]["ssd"]["bytes"],
    }  # fmt: skip
    return summary


if __name__ == "__main__":
    typer.run(demo)
