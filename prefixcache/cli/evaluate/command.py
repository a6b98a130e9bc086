"""`prefixcache evaluate`: what a codec does to a model's output. This module is the screen; the work is `evaluating`'s.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prefixcache.cli.evaluate import plot as evaluate_plot
from prefixcache.cli.evaluate.report import markdown, screen
from prefixcache.cli.evaluate.texts import NAMES, NotMeasured, default_text, read_texts
from prefixcache.cli.text import complain, console, print_json

if TYPE_CHECKING:
    from prefixcache.cli.evaluate.measuring import Job

CONTROL = "raw"
DEFAULT = (
    "affine:8", "affine:4", "turboquant:8", "turboquant:4", "turboquant:4:3", "turboquant:4:2", "turboquant:3:4",
    "turboquant:3", "turboquant:2", "turboquant:4:plain", "turboquant:3:plain",
)  # fmt: skip

Facts = dict[str, Any]


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on Hugging Face.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Read this text; several are joined. Without it: the Python reference."),
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help='A codec, such as "turboquant:4:3"; may be given again.')
    ] = None,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens that are stored and restored.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are read after them.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Places in the text where that is done.")] = 8,
    needles: Annotated[int, typer.Option(min=0, help="Texts in which numbers are hidden; 0: none.")] = 8,
    depths: Annotated[int, typer.Option(min=1, max=len(NAMES), help="Numbers in each, from beginning to end.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the hidden numbers.")] = 0,
    adapter: Annotated[str | None, typer.Option(metavar="PATH", help="The folder of a LoRA adapter.")] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Cast the weights: a CPU multiplies float32 faster than half precision.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as one JSON object.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The tables as Markdown.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Draw it: OUT.png, OUT.svg, or both without a suffix.")
    ] = None,
) -> None:
    """Measure what codecs do to a model's output, through the cache itself: store, fetch, go on.

    The reference is the same model on its live cache. Raw is always measured too: it must give the reference.

    Exit code: 0 measured, 2 it could not be.
    """
    job = {
        "prefix": prefix, "tokens": tokens, "windows": windows, "needles": needles, "depths": depths, "seed": seed,
    }  # fmt: skip
    specs = list(dict.fromkeys((CONTROL, *(codec or DEFAULT))))
    try:
        if as_json and as_markdown:
            raise NotMeasured("--json and --markdown: both go to the same place; give one of them")
        files = evaluate_plot.targets(plot) if plot is not None else []
        facts = _measure(model, adapter, float32, specs, text or [], job, quiet=as_json)
    except (NotMeasured, OSError) as error:
        complain(str(error))
        raise typer.Exit(2) from error
    if as_json:
        print_json(facts)
    elif as_markdown:
        typer.echo(markdown(facts))
    else:
        out = console()
        for part in screen(facts):
            out.print(part)
    try:
        if files:
            evaluate_plot.draw(facts, files)
    except OSError as error:  # after the numbers: they took minutes
        complain(f"--plot {plot}: {error.strerror}")
        raise typer.Exit(2) from error


def _measure(
    model: str,
    adapter: str | None,
    float32: bool,
    specs: list[str],
    files: list[Path],
    job: dict[str, Any],
    *,
    quiet: bool,
) -> Facts:
    """What can be refused early is refused before the model is loaded."""
    from prefixcache.cli.evaluate.measuring import Job, codec_of, load, measure

    for spec in specs:
        codec_of(spec)
    text = read_texts(files) if files else default_text()
    asked = Job(**job)
    with _steps(asked, len(specs), quiet) as step:
        step("loading", 0)
        facts = measure(load(model, adapter, float32), specs, text, asked, step)
    source = {"files": [str(file) for file in files], "python": None if files else platform.python_version()}
    return {"model": model, "adapter": adapter, "float32": float32, "text": source, **facts}


@contextmanager
def _steps(job: Job, codecs: int, quiet: bool) -> Iterator[Callable[..., None]]:
    """A function that is told what was done; on a terminal it moves a bar."""
    err = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as progress:
        task = progress.add_task("", total=job.steps(codecs))
        yield lambda what, done=1: progress.update(task, description=what, advance=done)
