"""`prefixcache end-session`: what a running server stored under one session alone is deleted."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixcache.cli.options import AsJson, with_options
from prefixcache.cli.running.admin_client import AdminClient, KeyFile, Url
from prefixcache.cli.running.remove import show_deleted
from prefixcache.cli.running.tenant import TenantOptions
from prefixcache.cli.text import refusing


@with_options
def end_session(
    session: Annotated[str, typer.Argument(metavar="NAME", help="The session, as requests name it in `cache`.")],
    url: Url,
    tenant: TenantOptions,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete what a running server stored under a session alone, RAM and SSD, and end its leases. What others have used since
    stays, and what is pinned.

    Exit code: 0 done, 2 it could not be done.
    """
    with refusing():
        client = AdminClient(url, admin_key_file)
        deleted = client.ask("DELETE", "sessions", {"session": session, **tenant.fields()})
    show_deleted(client, deleted, as_json=as_json)
