"""`prefixcache explain`: where two requests of one's own part, with their text. `servers.compared_prompts` compares them.

mlx-lm is imported when the command runs, so that asking for help and a wrong file are quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixcache.cli.model_files import load_tokenizer, model_folder
from prefixcache.cli.options import AsJson, CanonicalOptions, TokenizerOptions, with_options
from prefixcache.cli.running.prompts import read_bodies
from prefixcache.cli.text import Refused, many, print_json, refusing, safe

if TYPE_CHECKING:
    from prefixcache.servers.compared_prompts import Comparison, Side

Model = Annotated[str, typer.Option(metavar="MODEL", help="The model's folder, or its name on Hugging Face.")]
Request = Annotated[Path, typer.Argument(help="The body of a chat, messages or responses request, as JSON.")]


@with_options
def explain(
    model: Model,
    tokenizer: TokenizerOptions,
    text: CanonicalOptions,
    first: Request,
    second: Request,
    as_json: AsJson = False,
) -> None:
    """Show where the prompts of two requests part: how many tokens they begin with alike, in which part of each (the system
    text, the tools, a message), the text around it, and which rules of canonical text make a difference. The model is not
    loaded, and no server is asked.

    Exit code: 0 shown, 2 it could not be.
    """
    with refusing():
        bodies = [_body(file) for file in (first, second)]
        arguments, rules = tokenizer.template_arguments(), text.rules()
        from prefixcache.servers.chat_messages import template_roles
        from prefixcache.servers.compared_prompts import RequestReader, compare
        from prefixcache.servers.request_schema import RequestRefused

        loaded = load_tokenizer(model, model_folder(model), tokenizer.config())
        reader = RequestReader(loaded, template_roles(loaded), arguments)
        try:
            compared = compare(reader, *bodies, rules=rules)
        except (ValueError, RecursionError) as error:
            raise Refused(str(error) if isinstance(error, RequestRefused) else f"a request: {error}") from None
    if as_json:
        print_json(_facts(compared))
    else:
        typer.echo("\n".join(_lines(compared, (first.name, second.name), rules)))


def _body(file: Path) -> dict[str, Any]:
    bodies = read_bodies([file])
    if len(bodies) != 1:
        raise Refused(f"{file}: {len(bodies)} requests; give a file with one")
    return bodies[0][1]


def _facts(compared: Comparison) -> dict[str, Any]:
    sides = [
        {"tokens": side.tokens, "part": side.part._asdict(), "before": side.before, "behind": side.behind}
        for side in (compared.first, compared.second)
    ]
    return {"common": compared.common, "first": sides[0], "second": sides[1], "rules": compared.switched}


def _lines(compared: Comparison, names: tuple[str, str], rules: Sequence[str]) -> list[str]:
    sides, width = (compared.first, compared.second), max(len(safe(name)) for name in names)
    lines = [f"{many(compared.common, 'token')} in common"]
    for name, side in zip(names, sides, strict=True):
        lines.append(f"  {safe(name):{width}}  {many(side.tokens, 'token')}{_where(side, compared)}")
    if not compared.are_same:
        for name, side in zip(names, sides, strict=True):
            lines += ["", f"{safe(name)}:", f"  {safe(side.before)}", f"  -> {safe(side.behind) or '(it ends here)'}"]
        lines.append("")
    for rule, tokens in compared.switched.items():
        how = "without" if rule in rules else "with"
        lines.append(f"{how} rule {rule} of canonical text: {many(tokens, 'token')} in common")
    return lines


def _where(side: Side, compared: Comparison) -> str:
    if compared.are_same:
        return ""
    return f"; parts in {side.part.in_words()}" if compared.common < side.tokens else "; all of it is in common"
