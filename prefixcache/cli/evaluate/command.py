"""`prefixcache evaluate`: what a codec does to a model's output. This module reads the options; `measuring` does the work.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli import output
from prefixcache.cli.evaluate.report import as_markdown, divergence, screen
from prefixcache.cli.evaluate.texts import NAMES, default_text, read_texts
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, console, print_json, refusing

CONTROL = "raw"
DEFAULT = tuple(f"turboquant:{rest}" for rest in ("8", "4", "4:3", "4:2", "3:4", "3", "2", "4:plain", "3:plain"))


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
    depths: Annotated[
        int, typer.Option(min=1, max=len(NAMES), help="Numbers hidden in each, from beginning to end.")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the hidden numbers.")] = 0,
    adapter: Annotated[str | None, typer.Option(metavar="PATH", help="The folder of a LoRA adapter.")] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Cast the weights: a CPU multiplies float32 faster than half precision.")
    ] = False,
    basis_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", envvar="PREFIXCACHE_BASIS_DIR", help="Where the basis of codec transform is."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as one JSON object.")] = False,
    in_markdown: Annotated[bool, typer.Option("--markdown", help="The tables as Markdown.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Draw it: OUT.png, OUT.svg, or both without a suffix.")
    ] = None,
) -> None:
    """Measure what codecs do to a model's output, through the cache itself: store, fetch, go on.

    The reference is the same model on its live cache. Raw is always measured too: it must give the reference.

    Exit code: 0 measured, 2 it could not be.
    """
    with refusing():
        if as_json and in_markdown:
            raise Refused("--json and --markdown: both go to the same place; give one of them")
        pictures = output.pictures("--plot", plot)
        from prefixcache.cli.evaluate.measuring import EvaluationSize, codec_of, load, measure

        specs = list(dict.fromkeys((CONTROL, *(codec or DEFAULT))))
        for spec in specs:  # what can be refused early is refused before the model is loaded
            codec_of(spec)
        source = read_texts(text) if text else default_text()
        job = EvaluationSize(prefix, tokens, windows, needles, depths, seed)
        with bar("evaluating") as show:
            measured = measure(load(model, adapter, float32), specs, source, job, show, basis_dir)
    text_facts = {"files": [str(file) for file in text or ()], "python": None if text else platform.python_version()}
    facts = {"model": model, "adapter": adapter, "float32": float32, "text": text_facts, **measured}
    if as_json:
        print_json(facts)
    elif in_markdown:
        typer.echo(as_markdown(facts))
    else:
        console().print(*screen(facts), sep="\n")
    with refusing():  # after the numbers: they took minutes
        for file in pictures:
            picture = output.draw(Path(model).name, [partial(divergence, facts=facts)], file.suffix)
            output.write("--plot", file, picture)
