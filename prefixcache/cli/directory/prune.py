"""`prefixcache prune`: the images of a selection are deleted, of a directory or a running server. The work is
`prune_directory`'s, and the server's.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from prefixcache.byte_sizes import parse_size
from prefixcache.cli.directory.argument import Target, errors_told
from prefixcache.cli.options import AsJson, DryRun, flags_of, with_options
from prefixcache.cli.progress import bar
from prefixcache.cli.running.admin_client import AdminClient
from prefixcache.cli.running.remove import show_deleted, show_now
from prefixcache.cli.running.tenant import TenantOptions
from prefixcache.cli.tables import listing
from prefixcache.cli.text import Refused, complain, console, foreign, many, print_json, refusing, size
from prefixcache.store_fetch_remove.prune_directory import Pruned
from prefixcache.store_fetch_remove.prune_directory import prune as delete
from prefixcache.store_fetch_remove.selection import Selection

ROWS = 200  # namespaces in the table; --json has all
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class PruneOptions:
    """Which images."""

    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Last used at least so long ago, such as 7d; units: s, min, h, d, w."),
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this model only; the name before @ will do.")
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="ROOT", help="Of this namespace only: the beginning of its root key, as inspect shows it."
        ),
    ] = None
    to_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The least recently used, until the SSD takes at most this, such as 100GB."),
    ] = None
    ram_to_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --url: the coldest leave RAM, to the SSD where there is one, until it holds this.",
        ),
    ] = None
    quarantine: Annotated[
        bool,
        typer.Option("--quarantine", help="Quarantined files, too; with --older-than those quarantined so long ago."),
    ] = False

    def age(self) -> float | None:
        """Return the seconds since the last use at least, None for any. ValueError for what is no age."""
        if self.older_than is None:
            return None
        age = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d|w)", self.older_than)
        if not age:
            raise ValueError(
                f'--older-than {self.older_than!r}: not an age; write "7d", "12h", "30min": units are s, min, h, d and w'
            )
        return float(age[1]) * UNITS[age[2]]

    def of_directory(self) -> Selection:
        """Return the selection. ValueError for a bad value, and where nothing is selected."""
        age, to_size = self.age(), _bytes("--to-size", self.to_size)
        used_before = None if age is None else time.time() - age
        selection = Selection(self.model, self.namespace, used_before, to_size, self.quarantine)
        if not (selection.of_images or self.quarantine):
            raise Refused(
                "nothing is selected: give --older-than, --model, --namespace, --to-size or --quarantine; clear deletes all"
            )
        return selection

    def of_server(self) -> dict[str, Any]:
        """Return the fields of a server's operation that select. ValueError for a bad value."""
        to_size = _bytes("--to-size", self.to_size)
        fields = {"model": self.model, "namespace": self.namespace, "older_than": self.age(), "to_size": to_size}
        return {name: value for name, value in fields.items() if value is not None}


@with_options
def prune(
    target: Target, selected: PruneOptions, tenant: TenantOptions, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Delete the images that all options select. An image stays as long as one that depends on it does.

    Nobody else may have the directory open; a dry run looks at a live one too, and guesses the index's share. With --url a
    running server does it, in RAM and on its SSD; --to-size is of its SSD, and what is pinned stays.

    Exit code: 0 done, 1 the SSD takes more than --to-size even so, 2 it could not be done.
    """
    of_directory = {"--quarantine": selected.quarantine, "--dry-run": dry_run}
    with refusing((ValueError,)):
        target.check(of_directory, {"--ram-to-size": selected.ram_to_size, **flags_of(tenant)})
        if target.url is not None:
            fields = {**selected.of_server(), **tenant.fields()}
            _prune_live(AdminClient(target.url, target.admin_key_file), fields, selected.ram_to_size, as_json=as_json)
            return
        selection = selected.of_directory()
    assert target.directory is not None
    with errors_told(target.directory, as_json=as_json), bar("deleting") as show:
        pruned = delete(target.directory, selection, dry_run=dry_run, progress=show)
    if as_json:
        print_json(pruned.as_dict())
    else:
        _show(pruned)
    if not pruned.reached:
        complain(f"{pruned.directory}: takes {size(pruned.after)} even so: nothing is left that may be deleted")
    raise typer.Exit(0 if pruned.reached else 1)


def _prune_live(client: AdminClient, selection: dict[str, Any], ram_to_size: str | None, *, as_json: bool) -> None:
    ram = _bytes("--ram-to-size", ram_to_size)
    if not selection and ram is None:
        raise Refused(
            "nothing is selected: give --older-than, --model, --namespace, --to-size, --ram-to-size or a tenant; clear "
            "deletes all"
        )
    deleted: dict[str, Any] = {}
    if selection:
        if not set(selection) & {"older_than", "namespace", "to_size"}:
            selection["older_than"] = 0  # what is pinned stays, as with the others
        deleted = client.ask("DELETE", "images", selection)
    now = client.ask("POST", "ram", {"to_size": ram}) if ram is not None else {}
    if selection:
        show_deleted(client, {**deleted, **now}, as_json=as_json)
    elif as_json:
        print_json({"url": client.name, **now})
    else:
        show_now(client, now)
    to_size = selection.get("to_size")
    if to_size is not None and deleted["ssd_bytes"] > to_size:
        complain(
            f"{client.name}: its SSD takes {size(deleted['ssd_bytes'])} even so: nothing is left that may be deleted"
        )
        raise typer.Exit(1)


def _bytes(option: str, text: str | None) -> int | None:
    return None if text is None else parse_size(text, option)


def _show(pruned: Pruned) -> None:
    out = console()
    did = "would delete" if pruned.dry_run else "deleted"
    parts = [f"{many(pruned.images, 'image')}, {size(pruned.disk)}"]
    if pruned.quarantine:
        parts.append(f"{many(pruned.quarantine, 'quarantined file')}, {size(pruned.quarantine_disk)}")
    out.print(foreign(f"{pruned.directory}: {did} {'; '.join(parts)}"), soft_wrap=True)
    if pruned.shares:
        out.print(_by_namespace(pruned))
    if pruned.held:
        out.print(f"{many(pruned.held, 'image')} stayed: images that stay depend on them", soft_wrap=True)
    about = "about " if pruned.dry_run else ""
    out.print(f"on disk: {size(pruned.before)} before, {about}{size(pruned.after)} after", soft_wrap=True)


def _by_namespace(pruned: Pruned) -> Table:
    table = listing(["model, namespace"], ["images", "on disk"])
    for share in pruned.shares[:ROWS]:
        name = Text.assemble(foreign(share.model, "bold"), foreign(f", {share.root[:8]}", "dim"))
        table.add_row(name, f"{share.images:,}", size(share.disk))
    if len(pruned.shares) > ROWS:
        table.add_row(foreign(f"... {many(len(pruned.shares) - ROWS, 'namespace')} more: --json has all", "dim"))
    return table
