"""`prefixcache demo`: what the cache does for a handful of conversations, shown and checked on this machine.

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

from prefixcache.cli.text import complain, console, print_json, safe, size

TITLES = {
    "cold": "Raw: cold, every prompt computed whole",
    "ram": "Raw: from RAM, as the conversations go",
    "ssd": "Raw: a new process goes on from SSD",
    "turboquant4": "TurboQuant, 4 bits: from RAM",
    "turboquant3": "TurboQuant, 3 bits: from RAM",
}
EXACT, LOSSY = ("ram", "ssd"), ("turboquant4", "turboquant3")
OWN_MODEL = Path(__file__).parents[2] / "tests" / "fixtures" / "tiny-llama"  # only a checkout has it

# Nats by which a token may lead and yet lose when the same sum is made in another order. With float32 none of the few
# hundred tokens here is that close, so every difference counts.
ROUNDING = {"float16": 1 / 16, "bfloat16": 1 / 2}

Result = dict[str, Any]


class Failed(Exception):
    """A process of the demo ended badly."""


def demo(
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="An mlx-lm model's folder. Without it: the repository's own.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=2, max=500, help="Conversations that share the system prompt.")] = 8,
    turns: Annotated[int, typer.Option(min=2, max=20, help="Answers in each; the last comes after the restart.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    keep: Annotated[
        Path | None, typer.Option(file_okay=False, help="Put the SSD tier in this new folder and leave it there.")
    ] = None,
) -> None:
    """Show what the cache saves: a small model answers cold, from RAM, and from SSD after a restart.

    Ends with 1 when an answer from the cache differs from the cold one, or is wrong with the repository's own model, and
    with 2 when the demo could not run.
    """
    import mlx.core  # noqa: F401 - here, or each of the processes that do the work would fail by itself

    try:
        folder = _model(model)
        with _folder(keep) as directory:
            job = {"directory": str(directory), "model": str(folder), "conversations": conversations, "turns": turns}
            if not as_json:
                _introduce(console(), job)
            results = _work(job)
            problems = check(results, sure=model is None)
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


def _model(asked: Path | None) -> Path:
    """The model's folder. What is inside it is mlx-lm's to judge, in the process that loads it."""
    folder = asked or OWN_MODEL
    if (folder / "config.json").is_file():
        return folder.resolve() if asked else folder
    if asked is None:
        raise Failed("the demo's own model is only in the repository: give another one's folder with --model PATH")
    wrong = "no config.json in it, so it is no model's" if folder.is_dir() else "no such folder"
    raise Failed(f"--model {folder}: {wrong}; give the folder of a model that mlx-lm can load")


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
    answers = {"cold": job["turns"], "ssd": 1}  # in each conversation; the other passes leave the last one out
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=True)) as progress:
        tasks = {
            name: progress.add_task(
                title, start=False, total=job["conversations"] * answers.get(name, job["turns"] - 1)
            )
            for name, title in TITLES.items()
        }

        def done(name: str, number: int) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=number)

        def ended(name: str) -> None:
            progress.stop_task(tasks[name])

        results = _process({**job, "passes": ["cold", "ram"]}, done, ended)
        cold = results["cold"]["answers"]
        results |= _process({**job, "passes": ["ssd", *LOSSY], "cold": cold}, done, ended)
    return results


def _process(job: dict[str, Any], done: Callable[[str, int], None], ended: Callable[[str], None]) -> dict[str, Result]:
    """Run some passes in a process of their own. What the environment sets for the cache is not for the demo."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")}
    environment["MLX_ENABLE_TF32"] = (
        "0"  # CUDA would round float32 to 11 bits, and answers would hang on how work is cut
    )
    command = [sys.executable, "-m", "prefixcache.cli.demo.passes"]
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


def check(results: dict[str, Result], *, sure: bool) -> list[str]:
    """What is wrong with the passes that must agree with the cold one; empty when nothing is.

    `sure`: the model is known to find the numbers. Another model may miss one, cold too, and the cache is not to blame.
    """
    return [
        problem
        for name in EXACT
        for turn in results[name]["turns"]
        for problem in (difference(results, name, turn), _forgotten(results, name, turn), sure and _wrong(name, turn))
        if problem
    ]


def difference(results: dict[str, Result], name: str, turn: dict[str, Any]) -> str:
    """How an answer differs from the cold one, "" when it doesn't, or only from a token on that rounding may decide."""
    reference = _cold(results, turn)
    if turn["answer"] == reference["answer"]:
        return ""
    pairs = zip(turn["answer"], reference["answer"], strict=False)
    at = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), -1)
    where = _where(name, turn)
    if at < 0:
        return f"{where} has {len(turn['answer'])} tokens, the cold one {len(reference['answer'])}"
    if reference["gaps"][at] < ROUNDING.get(results["cold"]["dtype"], 0.0):
        return ""
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
    return f"{_where(name, turn)} found {turn['reused_tokens']} tokens, where {least} at least had been stored"


def _wrong(name: str, turn: dict[str, Any]) -> str:
    """What an answer should have said, "" when it does or nothing is right or wrong."""
    if turn["found"] or not turn["wanted"]:
        return ""
    return f"{_where(name, turn)} should say {turn['wanted']!r}, and says {turn['said']!r}"


def _where(name: str, turn: dict[str, Any]) -> str:
    return f"{TITLES[name]!r}: conversation {turn['conversation'] + 1}, answer {turn['turn'] + 1}"


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

Cell = Callable[[str, Result], str]  # from a pass's name and result


def _introduce(screen: Console, job: dict[str, Any]) -> None:
    screen.print(
        f"{safe(Path(job['model']).name)} answers {job['conversations']} conversations that share one system prompt, "
        f"{job['turns']} questions each. Most ask for a number or a line that the prompt holds (a needle), so an answer "
        f"can be right or wrong. The SSD tier is in {safe(job['directory'])}.\n"
    )


def _show(screen: Console, results: dict[str, Result], keep: Path | None) -> None:
    screen.print("One conversation, answered from the cache:")
    for turn in _conversation(results):
        asked, said = (safe(turn[what].replace("\n", " ")) for what in ("question", "said"))
        screen.print(f"  user   {asked}\n  model  {said}", soft_wrap=True)
        screen.print(
            f"         ({turn['reused_tokens']} of {turn['prompt_tokens']} tokens from {turn['from'].upper()})"
        )
    screen.print()
    screen.print(_exact(results))
    screen.print()
    screen.print(_lossy(results))
    screen.print("These are too few tokens to judge a codec by: prefixcache evaluate measures it.")
    if keep is not None:
        screen.print(f"\nThe files are still there: prefixcache inspect {safe(str(keep / 'raw'))}", soft_wrap=True)


def _conversation(results: dict[str, Result]) -> list[dict[str, Any]]:
    """The second one, the first to begin with a hit: its answers from RAM, and the last one from SSD."""
    shown = ("question", "said", "wanted", "found", "prompt_tokens", "reused_tokens")
    return [
        {"from": name, **{key: turn[key] for key in shown}}
        for name in EXACT
        for turn in results[name]["turns"]
        if turn["conversation"] == 1
    ]


def _exact(results: dict[str, Result]) -> Table:
    cold = results["cold"]
    cells: list[tuple[str, str, Cell]] = [
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
        (f"unique tokens of these answers, plain {cold['dtype']}", "", lambda _, r: size(r["plain_bytes"])),
        (f"the conversations, each kept whole, plain {cold['dtype']}", "", lambda _, r: size(r["whole_bytes"])),
        ("answers equal to cold, token for token", "", lambda name, _: "{} of {}".format(*_equal(results, name))),
        ("needles found", _needles(cold), lambda _, r: _needles(r)),
    ]
    table = _table("Codec Raw: what is kept is kept bit for bit", "cold", "from RAM", "from SSD, after a restart")
    for label, reference, cell in cells:
        table.add_row(label, reference, *(cell(name, results[name]) for name in EXACT))
    return table


def _lossy(results: dict[str, Result]) -> Table:
    half = " (float16: half of it)" if results["cold"]["dtype"] == "float32" else ""
    cells: list[tuple[str, Cell]] = [
        ("time to first token, median of those with a hit", lambda _, r: _time(r["first"])),
        ("  how much sooner than cold, same answers", lambda name, _: f"{_sooner(results, name):.1f} x"),
        ("time to store an answer, median", lambda _, r: _time(r["store"])),
        ("files on SSD at the end", lambda _, r: f"{size(r['ssd']['bytes'])} in {r['ssd']['files']}"),
        (
            f"  times smaller than Raw's, which are {results['cold']['dtype']}{half}",
            lambda name, _: f"{_smaller(results, name):.2f}",
        ),
        (
            "tokens that are cold's, given cold's answer so far",
            lambda name, _: "{} of {}".format(*_agreement(results, name)),
        ),
        ("needles found, given cold's answer so far", lambda _, r: _needles(r)),
    ]
    table = _table("Codec TurboQuant, lossy: the answers of the RAM pass again", "4 bits", "3 bits")
    for label, cell in cells:
        table.add_row(label, *(cell(name, results[name]) for name in LOSSY))
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _smaller(results: dict[str, Result], name: str) -> float:
    """How many times smaller a pass's files are than those of Raw, which hold the same tokens."""
    return float(results["ram"]["ssd"]["bytes"] / results[name]["ssd"]["bytes"])


def _needles(result: Result) -> str:
    return f"{result['found']} of {result['needles']}"


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1000:.1f} ms"
        if seconds < 0.01
        else f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def _summary(results: dict[str, Result]) -> dict[str, Any]:
    """The numbers of all passes, and one conversation, without the other answers."""
    summary: dict[str, Any] = {}
    for name, result in results.items():
        summary[name] = {key: value for key, value in result.items() if key not in ("turns", "answers")}
        summary[name]["count"] = len(result["turns"])
        if name != "cold":
            summary[name]["sooner"] = _sooner(results, name)
        if name in EXACT:
            summary[name]["equal"] = _equal(results, name)[0]
        if name in LOSSY:
            same, of = _agreement(results, name)
            summary[name] |= {"agreeing_tokens": same, "tokens": of, "smaller": _smaller(results, name)}
    return {**summary, "conversation": _conversation(results)}


if __name__ == "__main__":
    typer.run(demo)
