"""`prefixcache evaluate`: what a codec does to a model's output. This module reads the options; `measuring` does the work.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.evaluate.report import as_markdown, screen
from prefixcache.cli.evaluate.texts import EvaluationSize, default_text, read_texts
from prefixcache.cli.options import AdapterPath, AsJson, Float32, TrustRemoteCode, with_options
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, console, print_json, refusing

CONTROL = "raw"
DEFAULT = tuple(f"turboquant:{rest}" for rest in ("8", "4", "4:3", "4:2", "3:4", "3", "2", "4:plain", "3:plain"))


@dataclass(frozen=True)
class EvaluatedModel:
    """The model, with its adapter and its basis."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on Hugging Face.")]
    adapter: AdapterPath = None
    trust_remote_code: TrustRemoteCode = False
    float32: Float32 = False
    basis_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", envvar="PREFIXCACHE_BASIS_DIR", help="Where the basis of codec transform is."),
    ] = None


@with_options
def evaluate(
    subject: EvaluatedModel,
    size: EvaluationSize,
    as_json: AsJson = False,
    in_markdown: Annotated[bool, typer.Option("--markdown", help="The tables as Markdown.")] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Read this text; several are joined. Without it: the Python reference."),
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help='A codec, such as "turboquant:4:3"; may be given again.')
    ] = None,
) -> None:
    """Measure what codecs do to a model's output, through the cache itself: store, fetch, go on.

    The reference is the same model on its live cache. Raw is always measured too: it must give the reference.

    Exit code: 0 measured, 2 it could not be.
    """
    with refusing():
        if as_json and in_markdown:
            raise Refused("--json and --markdown: both go to the same place; give one of them")
        from prefixcache.cli.evaluate.measuring import codec_of, load, measure

        specs = list(dict.fromkeys((CONTROL, *(codec or DEFAULT))))
        for spec in specs:  # what can be refused early is refused before the model is loaded
            codec_of(spec)
        source = read_texts(text) if text else default_text()
        with bar("evaluating") as show:
            loaded = load(subject.model, subject.adapter, float32=subject.float32, trusted=subject.trust_remote_code)
            measured = measure(loaded, specs, source, size, show, subject.basis_dir)
    text_facts = {"files": [str(file) for file in text or ()], "python": None if text else platform.python_version()}
    given = {"model": subject.model, "adapter": subject.adapter, "float32": subject.float32}
    facts = {**given, "text": text_facts, **measured}
    if as_json:
        print_json(facts)
    elif in_markdown:
        typer.echo(as_markdown(facts))
    else:
        console().print(*screen(facts), sep="\n")
