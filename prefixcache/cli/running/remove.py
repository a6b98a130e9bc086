"""`prefixcache remove`: prompts, and all that begins with them, are deleted from a running server; so is what `clear` and
`prune` select with --url.
"""

from __future__ import annotations

from prefixcache.cli.options import AsJson
from prefixcache.cli.running.admin_client import AdminClient, Json, KeyFile, Url
from prefixcache.cli.running.prompts import Files, read_bodies
from prefixcache.cli.text import Refused, complain, console, foreign, many, print_json, refusing, size


def remove(
    url: Url,
    prompts: Files = None,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete prompts from a running server, RAM and SSD: each with all that begins with it, such as the further turns of its
    chat. Of a system prompt alone those are all chats that have it. What other prompts share stays.

    A prompt is the body of the request that was sent, with its "cache_salt", or "authorization" as its header had it.

    Exit code: 0 all are gone, 2 it could not be done.
    """
    with refusing():
        client, removed = AdminClient(url, admin_key_file), []
        for where, body in read_bodies(prompts or []):
            try:
                removed.append({"prompt": where, **client.ask("DELETE", "prompts", body)})
            except Refused as error:
                raise Refused(f"{where}: {error}") from None
    if as_json:
        print_json({"url": client.name, "removed": removed})
        return
    for result in removed:
        console().print(foreign(f"{result['prompt']}: {size(result['bytes'])} deleted"), soft_wrap=True)
        if not result["bytes"]:
            complain(f"{result['prompt']}: nothing was stored of it")
    show_now(client, removed[-1])


def show_deleted(client: AdminClient, deleted: Json, *, as_json: bool) -> None:
    """Print what was deleted, and what the server holds afterwards."""
    if as_json:
        print_json({"url": client.name, **deleted})
        return
    out = console()
    out.print(foreign(f"{client.name}: deleted {many(deleted['images'], 'image')}, {size(deleted['bytes'])}"))
    if deleted["held"]:
        out.print(f"{many(deleted['held'], 'image')} stayed: pinned, or needed by images that stay")
    show_now(client, deleted)


def show_now(client: AdminClient, now: Json) -> None:
    """Print what the server's RAM and SSD hold afterwards."""
    ssd = f"; SSD: {size(now['ssd_bytes'])} used" if now["ssd_bytes"] is not None else ""
    console().print(f"RAM: {size(now['ram_bytes'])} held{ssd}", soft_wrap=True)
