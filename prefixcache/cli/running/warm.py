"""`warm` with --url: a running server computes and stores prompts while it has no request."""

from __future__ import annotations

from pathlib import Path

import typer

from prefixcache.cli.progress import bar
from prefixcache.cli.running.admin_client import AdminClient
from prefixcache.cli.running.prompts import read_bodies
from prefixcache.cli.text import Refused, complain, many, refusing


def warm_live(url: str, key_file: Path | None, files: list[Path]) -> None:
    """Have the prompts of these files warmed, with a bar on a terminal, and exit with `warm`'s code."""
    with refusing():
        client, bodies = AdminClient(url, key_file), [body for _, body in read_bodies(files)]
        last = {}
        with bar("warming", None, "tokens") as show:
            for last in client.follow("POST", "prompts", {"prompts": bodies}):
                if "done" in last:
                    show(last["done"], last["total"], what=f"prompt {last['prompt']} of {last['prompts']}")
        if "unkept" not in last:
            raise Refused(f"{client.name}: {last.get('error', 'it ended; what was computed is stored')}")
    whole = f", {last['stored_before']:,} stored already" if last["stored_before"] else ""
    typer.echo(f"{many(last['prompts'], 'prompt')} of {many(last['tokens'], 'token')}{whole}")
    if last["unkept"]:
        complain(
            f"{last['unkept']} of {many(last['prompts'], 'prompt')} found no room: the server needs more --ssd or --ram"
        )
        raise typer.Exit(1)
