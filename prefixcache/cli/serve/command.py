"""`prefixcache serve`: mlx_lm.server on a PrefixCache. This module is the command line; `servers.mlx_lm` does the work.

MLX and mlx-lm are imported when the command runs, so that asking for help and a wrong flag are quick.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixcache.cli.back_end import refuse_without
from prefixcache.cli.progress import bar
from prefixcache.cli.running.admin_key import ADMIN_KEY, admin_key_of
from prefixcache.cli.serve.cache_options import BITS, flag_of, settings_from, with_settings
from prefixcache.cli.text import complain
from prefixcache.remote.sealing import FleetKey
from prefixcache.settings import Settings
from prefixcache.ssd import DirectoryError

if TYPE_CHECKING:
    from prefixcache.servers.mlx_lm.generator import Generator
    from prefixcache.servers.salts import Salts
    from prefixcache.servers.warm_prompts import WarmPrompt

log = logging.getLogger("prefixcache")

OTHERS = "All flags of mlx_lm.server are taken too, such as --model, --host, --port; `mlx_lm.server --help` lists them."

COMMAND = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}, "epilog": OTHERS}


@with_settings
def serve(
    ctx: typer.Context,
    warm: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Store these prompts before the first request; see `prefixcache warm`."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long requests under way may go on at the end.")
    ] = 5.0,
    exact_prefill: Annotated[
        bool,
        typer.Option(
            "--exact-prefill",
            help="Compute prompts on exact rows, not on the decoded ones that a hit gives: the first answer is the "
            "uncompressed model's, and a repeated request may get another.",
        ),
    ] = False,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log as JSON, one object a line, with nothing of a prompt.")
    ] = False,
    salt_from: Annotated[
        str | None,
        typer.Option(
            metavar="authorization",
            help="Make each request's salt from the API key in its Authorization header, so that each key is a tenant.",
        ),
    ] = None,
    require_salt: Annotated[
        bool, typer.Option("--require-salt", help="Refuse requests that have no salt, which would share their prompts.")
    ] = False,
    hang_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Of a model that spans processes: end all when a step takes longer than this.",
        ),
    ] = 300.0,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Names by which clients may call this server, beside those that --host stands for; * for any.",
        ),
    ] = None,
    allow_chat_template: Annotated[
        bool,
        typer.Option(
            "--allow-chat-template",
            help="Render a chat template that a request brings along, in a process with limits.",
        ),
    ] = False,
    max_context: Annotated[
        int | None,
        typer.Option(min=2, metavar="TOKENS", help="The longest prompt and answer together; default: the model's own."),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Who sends the key in this file may clear, prune, remove, pin and warm over HTTP; without a key, or "
            f"{ADMIN_KEY}, programs on this machine may.",
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The same key, for all to see who see this machine's processes."),
    ] = None,
    **flags: Any,
) -> None:
    """Run mlx_lm.server with a prefix cache that is bounded in bytes and survives restarts.

    SIGTERM or Ctrl-C ends it and flushes RAM to the SSD; a second one ends it at once. Metrics are at /metrics. A request's
    "cache_salt" keeps its tenant's prompts apart, and so does its API key with --salt-from authorization.

    Every setting of the cache is a flag, a variable (PREFIXCACHE_RAM is --ram) and a key of the TOML file that
    PREFIXCACHE_CONFIG names (ram = "8GB"); a flag overrides a variable, a variable overrides the file.

    Exit code: 0 ended, 2 it could not start or go on, 128 + the signal that ended it at once or before it was ready.
    """
    try:
        _check(ctx.args, [flag_of(name) for name in ("codec", *BITS) if flags[name]], warm or [])
        if not grace < float("inf"):
            raise ValueError(f"--grace {grace}: not a number of seconds")
        if salt_from not in (None, "authorization"):
            raise ValueError(f"--salt-from {salt_from}: salts are made of one header only; write authorization")
        settings = settings_from(flags)
        if "ssd_missing" not in settings.model_fields_set:  # a server outlives disks
            settings = settings.model_copy(update={"ssd_missing": "wait"})
        key = admin_key_of(admin_key, admin_key_file)
        from prefixcache.servers.mlx_lm.errors import ServeError, ServeFailed
        from prefixcache.servers.mlx_lm.http_server import ClientRules
        from prefixcache.servers.mlx_lm.serve import serve as serve_until_ended
        from prefixcache.servers.salts import Salts
        from prefixcache.servers.warm_prompts import read_prompts

        salts = Salts(from_authorization=salt_from is not None, required=require_salt, key=_salt_key(settings))
        prompts = [prompt for file in warm or [] for prompt in read_prompts(file)]
    except (ValueError, ImportError) as error:
        refuse_without(error)
        _end(error)
    try:
        serve_until_ended(
            settings,
            ctx.args,
            before=partial(_warm, prompts, salts),
            grace=grace,
            exact_prefill=exact_prefill,
            log_json=log_json,
            salts=salts,
            hang_timeout=hang_timeout,
            rules=ClientRules(_names(allowed_hosts), allow_chat_template, max_context),
            admin_key=key,
        )
    except ServeFailed as error:
        complain(" ".join(str(error).split()))
        _leave(2)
    except (ServeError, DirectoryError, ValueError) as error:
        _end(error)
    _leave(0)


def _names(given: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (given or "").split(",") if name.strip())


def _salt_key(settings: Settings) -> bytes:
    """What keys the hashes of API keys: of a fleet, a key of its own."""
    file = settings.remote_key_file
    if file is None:
        return b""
    # With a remote tier the cache reads it again, and warns.
    return FleetKey.read(file, warn=settings.remote is None).derive(b"prefixcache.salt")


def _warm(prompts: list[WarmPrompt], salts: Salts, generator: Generator) -> None:
    """Store the prompts, on the thread that generates, with a bar on a terminal; but those that no request could hit."""
    from prefixcache.servers.mlx_lm.errors import ServeError
    from prefixcache.servers.warm_prompts import BadPrompt, sequences_of
    from prefixcache.servers.warming import warm_sequences

    provider, prompt_cache = generator.model_provider, generator.prompts
    prompts = _of_use(prompts, salts)
    if prompt_cache.cache.ranks is not None:
        prompts = prompt_cache.cache.ranks.from_first(prompts)
    if not prompts:
        return
    try:
        sequences = sequences_of(provider.tokenizer, prompts, provider.cli_args.chat_template_args)
    except BadPrompt as error:
        raise ServeError(f"--warm: {error}") from error
    nets = provider.model if provider.draft_model is None else (provider.model, provider.draft_model)
    total = sum(len(sequence.tokens) for sequence in sequences)
    log.info("warm-up: %d prompts of %d tokens in all", len(sequences), total)
    with bar("warm-up", total, "tokens") as show:
        done = warm_sequences(
            prompt_cache.cache,
            lambda: nets,
            sequences,
            model=prompt_cache.name_of(provider.model_key),
            prefill_step_size=provider.cli_args.prefill_step_size,
            progress=lambda step: show(step.done, what=f"warm-up: prompt {step.prompt} of {step.prompts}"),
        )
    log.info("warm-up: %d prompts, %d of %d tokens computed", done.prompts, done.computed, done.tokens)
    if done.unkept:
        log.warning(
            "warm-up: %d of %d prompts found no room: give more with --ssd and --ram", done.unkept, done.prompts
        )


def _of_use(prompts: list[WarmPrompt], salts: Salts) -> list[WarmPrompt]:
    """Those of the prompts that a request may hit."""
    hit = [prompt for prompt in prompts if prompt.salt or not salts.required]
    if len(hit) < len(prompts):
        log.warning(
            '--warm with --require-salt: %d of %d prompts are left out, since no request could hit them; add "cache_salt"',
            len(prompts) - len(hit),
            len(prompts),
        )
    if hit and salts.from_authorization:
        log.warning("--warm with --salt-from: requests with an API key hit none of these prompts")
    return hit


def _check(flags: list[str], ours: list[str], warm: list[Path]) -> None:
    """ValueError for flags that contradict each other or need another: mlx-lm's, and of ours those that choose a codec."""
    given = {flag.partition("=")[0] for flag in flags if flag.startswith("-")}
    if "--kv-bits" in given and ours:
        raise ValueError(
            f"--kv-bits with {ours[0]}: rows that mlx-lm has quantized are kept as they are; give one of them"
        )
    if warm and "--model" not in given:
        raise ValueError("--warm without --model: there is no model to compute the prompts with; add --model")


def _leave(code: int) -> None:
    """End the process at once: all is written. MLX aborts many a Python that shuts down after a thread of its has used
    mx.compile (ml-explore/mlx#4110).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(error: Exception) -> None:
    complain(" ".join(str(error).split()))
    raise typer.Exit(2) from None
