"""`prefixcache demo`: what the cache does for a handful of conversations, shown and checked on this machine.

This module starts the processes that work (`passes`), compares their answers and prints the tables. It needs no MLX itself.
"""

from __future__ import annotations

import json
import os
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

from prefixcache.cli.demo.text import EXACT, LOSSY, TITLES
from prefixcache.cli.tables import Grid, table
from prefixcache.cli.text import Refused, complain, console, print_json, refusing, safe, size

OWN_MODEL = Path(__file__).parents[3] / "tests" / "fixtures" / "tiny-llama"  # only a checkout has it

# Nats by which a token may lead and yet lose when the same sum is made in another order. With float32 none of the few
# hundred tokens here is that close, so every difference counts.
ROUNDING = {"float16": 1 / 16, "bfloat16": 1 / 2}

Result = dict[str, Any]


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

    with refusing():
        folder = _model(model)
        with _folder(keep) as directory:
            job = {"directory": str(directory), "model": str(folder), "conversations": conversations, "turns": turns}
            if not as_json:
                _introduce(console(), job)
            results = _work(job)
    problems, facts = check(results, sure=model is None), summary(results)
    if as_json:
        print_json({**facts, "job": job, "problems": problems})
    else:
        _show(console(), facts, keep)
    for problem in problems:
        complain(problem)
    if problems:
        raise typer.Exit(1)


def _model(asked: Path | None) -> Path:
    """The model's folder. What is inside it is mlx-lm's to judge, in the process that loads it."""
    folder = asked or OWN_MODEL
    if (folder / "config.json").is_file():
        return folder.resolve()
    if asked is None:
        raise Refused("the demo's own model is only in the repository: give another one's folder with --model PATH")
    wrong = "no config.json in it, so it is no model's" if folder.is_dir() else "no such folder"
    raise Refused(f"--model {folder}: {wrong}; give the folder of a model that mlx-lm can load")


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
    """All passes. The first process ends before the second begins: between them there is nothing but the files."""
    results = _process({**job, "passes": ["cold", "ram"]})
    return results | _process({**job, "passes": ["ssd", *LOSSY], "cold": results["cold"]["answers"]})


def _process(job: dict[str, Any]) -> dict[str, Result]:
    """Run some passes in a process of their own. What the environment sets for the cache is not for the demo."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")}
    environment["MLX_ENABLE_TF32"] = "0"  # CUDA would round float32 to 11 bits: answers would hang on how work is cut
    command = [sys.executable, "-m", "prefixcache.cli.demo.passes"]
    ended = subprocess.run(
        command, input=json.dumps(job), stdout=subprocess.PIPE, encoding="utf-8", env=environment, check=False
    )
    if ended.returncode:
        raise Refused(f"the process for {' and '.join(job['passes'])} ended with {ended.returncode}; see above")
    results: dict[str, Result] = json.loads(ended.stdout)
    return results


# -- the check --------------------------------------------------------------------------------------------------------


def check(results: dict[str, Result], *, sure: bool) -> list[str]:
    """What is wrong with the passes that must agree with the cold one; empty when nothing is.

    `sure`: the model is known to find the numbers. Another model may miss one, cold too, and the cache is not to blame.
    """
    problems = []
    for name in EXACT:
        for turn in results[name]["turns"]:
            where = f"{TITLES[name]!r}: conversation {turn['conversation'] + 1}, answer {turn['turn'] + 1}"
            if difference := _difference(turn, _cold(results, turn), results["cold"]["dtype"]):
                problems.append(f"{where} {difference}")
            # A later answer must have found the prompt before it, or the comparison would prove nothing.
            least = _cold(results, turn, before=1)["prompt_tokens"] if turn["turn"] else 0
            if turn["reused_tokens"] < least:
                problems.append(f"{where} found {turn['reused_tokens']} tokens, where {least} at least had been stored")
            if sure and turn["wanted"] and not turn["found"]:
                problems.append(f"{where} should say {turn['wanted']!r}, and says {turn['said']!r}")
    return problems


def _difference(turn: dict[str, Any], cold: dict[str, Any], dtype: str) -> str:
    """How an answer differs from the cold one, "" when it doesn't, or only from a token on that rounding may decide."""
    got, wanted = turn["answer"], cold["answer"]
    if got == wanted:
        return ""
    at = next((i for i, (token, other) in enumerate(zip(got, wanted, strict=False)) if token != other), None)
    if at is None:
        return f"has {len(got)} tokens, the cold one {len(wanted)}"
    lead = cold["gaps"][at]
    if lead < ROUNDING.get(dtype, 0.0):
        return ""
    return f"differs from the cold one at token {at + 1}: {got[at]}, not {wanted[at]}, which led by {lead:.3g} nats"


def _cold(results: dict[str, Result], turn: dict[str, Any], before: int = 0) -> dict[str, Any]:
    """The cold pass's turn for a turn of another pass, or one `before` it."""
    each = len(results["cold"]["answers"][0])
    found: dict[str, Any] = results["cold"]["turns"][turn["conversation"] * each + turn["turn"] - before]
    return found


# -- what came of it --------------------------------------------------------------------------------------------------


def summary(results: dict[str, Result]) -> dict[str, Any]:
    """The numbers of all passes, and one conversation, without the other answers. `sooner`: how many times sooner the first
    token came than in the cold pass, medians over the same answers.
    """
    facts: dict[str, Any] = {}
    for name, result in results.items():
        turns = result["turns"]
        told = facts[name] = {key: value for key, value in result.items() if key not in ("turns", "answers")}
        told["count"] = len(turns)
        if name == "cold":
            continue
        hits = [turn for turn in turns if turn["reused_tokens"]] or turns
        cold = median(_cold(results, turn)["first"] for turn in hits)
        told["sooner"] = cold / median(turn["first"] for turn in hits)
        answers = [(turn["answer"], _cold(results, turn)["answer"]) for turn in turns]
        if name in EXACT:
            told["equal"] = sum(answer == other for answer, other in answers)
        else:  # the pass was given cold's answer as it went
            same = [token == of for pair in answers for token, of in zip(*pair, strict=True)]
            told |= {"agreeing_tokens": sum(same), "tokens": len(same)}
            told["smaller"] = results["ram"]["ssd"]["bytes"] / result["ssd"]["bytes"]
    shown = ("question", "said", "wanted", "found", "prompt_tokens", "reused_tokens")
    facts["conversation"] = [  # the second one, the first to begin with a hit
        {"from": name, **{key: turn[key] for key in shown}}
        for name in EXACT
        for turn in results[name]["turns"]
        if turn["conversation"] == 1
    ]
    return facts


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
    screen.print(_exact(facts), _lossy(facts), sep="\n")
    screen.print("These are too few tokens to judge a codec by: prefixcache evaluate measures it.")
    if keep is not None:
        screen.print(f"\nThe files are still there: prefixcache inspect {safe(str(keep / 'raw'))}", soft_wrap=True)


def _exact(facts: dict[str, Any]) -> Table:
    cold, passes, dtype = facts["cold"], [facts[name] for name in EXACT], facts["cold"]["dtype"]
    rows = [
        ["answers", f"{cold['count']}", *(f"{r['count']}" for r in passes)],
        ["  of them with a hit", "0", *(f"{r['hits']}" for r in passes)],
        ["time to first token, median of those with a hit", *(_time(r["first"]) for r in (cold, *passes))],
        ["  how much sooner than cold, same answers", "", *(f"{r['sooner']:.1f} x" for r in passes)],
        ["tokens of all prompts", *(f"{r['prompt_tokens']:,}" for r in (cold, *passes))],
        ["  of them reused", "0", *(_part(r["reused_tokens"], r["prompt_tokens"]) for r in passes)],
        ["time to store an answer, median", "", *(_time(r["store"]) for r in passes)],
        ["RAM at most, of its budget", "", *(f"{size(r['ram_peak'])} of {size(r['ram_limit'])}" for r in passes)],
        ["images in RAM at the end", "", *(size(r["ram_images"]) for r in passes)],
        ["files on SSD at the end", "", *map(_files, passes)],
        [f"unique tokens of these answers, plain {dtype}", "", *(size(r["plain_bytes"]) for r in passes)],
        [f"the conversations, each kept whole, plain {dtype}", "", *(size(r["whole_bytes"]) for r in passes)],
        ["answers equal to cold, token for token", "", *(f"{r['equal']} of {r['count']}" for r in passes)],
        ["needles found", *map(_needles, (cold, *passes))],
    ]
    return table(
        Grid(["Codec Raw: what is kept is kept bit for bit", "cold", "from RAM", "from SSD,\nrestarted"], rows)
    )


def _lossy(facts: dict[str, Any]) -> Table:
    passes, dtype = [facts[name] for name in LOSSY], facts["cold"]["dtype"]
    half = " (float16: half of it)" if dtype == "float32" else ""
    agreeing = (f"{r['agreeing_tokens']} of {r['tokens']}" for r in passes)
    rows = [
        ["time to first token, median of those with a hit", *(_time(r["first"]) for r in passes)],
        ["  how much sooner than cold, same answers", *(f"{r['sooner']:.1f} x" for r in passes)],
        ["time to store an answer, median", *(_time(r["store"]) for r in passes)],
        ["files on SSD at the end", *map(_files, passes)],
        [f"  times smaller than Raw's, which are {dtype}{half}", *(f"{r['smaller']:.2f}" for r in passes)],
        ["tokens that are cold's, given cold's answer so far", *agreeing],
        ["needles found, given cold's answer so far", *map(_needles, passes)],
    ]
    return table(Grid(["Codec TurboQuant, lossy: the answers of the RAM pass again", "4 bits", "3 bits"], rows))


def _files(result: Result) -> str:
    return f"{size(result['ssd']['bytes'])} in {result['ssd']['files']}"


def _needles(result: Result) -> str:
    return f"{result['found']} of {result['needles']}"


def _part(number: int, of: int) -> str:
    return f"{number:,} ({number / of:.1%})"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


if __name__ == "__main__":
    typer.run(demo)
