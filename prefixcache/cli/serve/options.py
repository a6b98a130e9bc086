"""The options of `prefixcache serve` beside those of its cache: how it runs, which requests it takes, and who may
administer it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.running.admin_key import ADMIN_KEY, admin_key_of


@dataclass(frozen=True)
class RunOptions:
    """How the server begins, runs and ends."""

    warm: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Store these prompts before the first request; see `prefixcache warm`."),
    ] = None
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long requests under way may go on at the end.")
    ] = 5.0
    exact_prefill: Annotated[
        bool,
        typer.Option(
            "--exact-prefill",
            help="Compute prompts on exact rows, not on the decoded ones that a hit gives: the first answer is the "
            "uncompressed model's, and a repeated request may get another.",
        ),
    ] = False
    warm_next_turn: Annotated[
        bool,
        typer.Option(
            "--warm-next-turn/--no-warm-next-turn",
            help="While there is no request and the machine is not on its battery, compute what the next turn of each chat "
            "begins with: the last answer as the template has it in a history.",
        ),
    ] = True
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log as JSON, one object a line, with nothing of a prompt.")
    ] = False
    vlm: Annotated[
        bool,
        typer.Option(
            "--vlm", help="Run mlx_vlm.server, for models that take pictures; the other flags are then its flags."
        ),
    ] = False
    hang_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Of a model that spans processes: end all when a step takes longer than this.",
        ),
    ] = 300.0


@dataclass(frozen=True)
class RequestOptions:
    """Whose requests are taken, and what of them."""

    salt_from: Annotated[
        str | None,
        typer.Option(
            metavar="authorization",
            help="Make each request's salt from the API key in its Authorization header, so that each key is a tenant.",
        ),
    ] = None
    require_salt: Annotated[
        bool, typer.Option("--require-salt", help="Refuse requests that have no salt, which would share their prompts.")
    ] = False
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Names by which clients may call this server, beside those that --host stands for; * for any.",
        ),
    ] = None
    allow_chat_template: Annotated[
        bool,
        typer.Option(
            "--allow-chat-template",
            help="Render a chat template that a request brings along, in a process with limits.",
        ),
    ] = False
    max_context: Annotated[
        int | None,
        typer.Option(min=2, metavar="TOKENS", help="The longest prompt and answer together; default: the model's own."),
    ] = None
    any_model: Annotated[
        bool,
        typer.Option(
            "--any-model",
            help="Answer a request for a model that is not on this machine with the one that is served.",
        ),
    ] = False

    def hosts(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.allowed_hosts or "").split(",") if name.strip())


@dataclass(frozen=True)
class AdminOptions:
    """Who may administer the server."""

    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Who sends the key in this file may clear, prune, remove, pin and warm over HTTP; without a key, or "
            f"{ADMIN_KEY}, programs on this machine may.",
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The same key, for all to see who see this machine's processes."),
    ] = None

    def key(self) -> bytes:
        """Return the admin key, b"" for none. ValueError for a bad one, and for two."""
        return admin_key_of(self.admin_key, self.admin_key_file)
