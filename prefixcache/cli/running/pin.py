"""`prefixcache pin`: prompts that a running server keeps whatever is evicted, and the list of them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from prefixcache.cli.options import AsJson
from prefixcache.cli.running.admin_client import AdminClient, Json, KeyFile, Url
from prefixcache.cli.running.prompts import Files, read_bodies
from prefixcache.cli.tables import listing
from prefixcache.cli.text import Refused, console, foreign, many, print_json, refusing, size


def pin(
    url: Url,
    prompts: Files = None,
    undo: Annotated[bool, typer.Option("--undo", help="Undo one pin of each prompt.")] = False,
    end: Annotated[
        list[str] | None,
        typer.Option("--end", metavar="NAME", help="End all pins of the prompt that has this name in the list."),
    ] = None,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep prompts in a running server, in the tiers where they are, whatever is evicted; without prompts and --end, list
    what is pinned. `warm` stores what isn't yet.

    A prompt is the body of a chat request. Pins end with --undo, --end, `clear`, and with the server.

    Exit code: 0 done, 2 it could not be done.
    """
    with refusing():
        client = AdminClient(url, admin_key_file)
        if undo and not prompts:
            raise Refused("--undo without prompts: name the file of those that were pinned, or use --end NAME")
        done: list[Json] = [client.ask("DELETE", "pins", {"name": name}) for name in end or []]
        for where, body in read_bodies(prompts) if prompts else []:
            try:
                done.append({"prompt": where, **client.ask("DELETE" if undo else "POST", "pins", body)})
            except Refused as error:
                raise Refused(f"{where}: {error}") from None
        pins = client.ask("GET", "pins")["pins"]
    if as_json:
        print_json({"url": client.name, "done": done, "pins": pins})
        return
    out = console()
    for result in done:
        if "pinned_tokens" in result:
            text = f"{result['prompt']}: {result['pinned_tokens']:,} of {many(result['tokens'], 'token')} pinned"
        else:
            text = f"{result.get('prompt', 'ended')}: {many(result['ended'], 'pin')} ended"
        out.print(foreign(text), soft_wrap=True)
    if pins:
        out.print(_table(pins))
    else:
        out.print("nothing is pinned")


def _table(pins: list[Json]) -> Table:
    table = listing(["name", "model, namespace"], ["tokens", "bytes", "pins"])
    for pinned in pins:
        whose = foreign(f"{pinned['model']}, {pinned['namespace'][:8]}")
        table.add_row(
            foreign(pinned["name"]), whose, f"{pinned['tokens']:,}", size(pinned["nbytes"]), str(pinned["pins"])
        )
    return table
