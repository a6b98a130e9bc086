"""`clear` and `prune` with --url: what was selected is deleted from a running server's RAM and SSD."""

from __future__ import annotations

from typing import Any

from prefixcache.cli.running.admin_client import AdminClient
from prefixcache.cli.text import console, foreign, many, print_json, size

Json = dict[str, Any]


def delete_images(client: AdminClient, selection: Json, *, as_json: bool) -> Json:
    """Delete what the fields select, show it, and return the server's answer."""
    deleted = client.ask("DELETE", "images", selection)
    if as_json:
        print_json({"url": client.name, **deleted})
        return deleted
    out = console()
    out.print(foreign(f"{client.name}: deleted {many(deleted['images'], 'image')}, {size(deleted['bytes'])}"))
    if deleted["held"]:
        out.print(f"{many(deleted['held'], 'image')} stayed: pinned, or needed by images that stay")
    show_now(client, deleted)
    return deleted


def show_now(client: AdminClient, now: Json) -> None:
    """What the server's RAM and SSD hold afterwards."""
    ssd = f"; SSD: {size(now['ssd_bytes'])} used" if now["ssd_bytes"] is not None else ""
    console().print(f"RAM: {size(now['ram_bytes'])} held{ssd}", soft_wrap=True)
