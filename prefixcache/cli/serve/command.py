"""`prefixcache serve`: mlx_lm.server on a PrefixCache. This module is the command line; `servers.mlx_lm` does the work.

MLX and mlx-lm are imported when the command runs, so that asking for help and a wrong flag are quick.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from prefixcache.cli.options import CanonicalOptions, flag_of, flags_given, with_options
from prefixcache.cli.progress import bar
from prefixcache.cli.serve.cache_options import BITS, settings_from, with_settings
from prefixcache.cli.serve.options import AdminOptions, RequestOptions, RunOptions
from prefixcache.cli.text import complain, exit_without_mlx, one_line
from prefixcache.remote.sealing import FleetKey
from prefixcache.settings import Settings
from prefixcache.ssd import DirectoryError

if TYPE_CHECKING:
    from prefixcache.servers.mlx_lm.generator import Generator
    from prefixcache.servers.salts import Salts
    from prefixcache.servers.warm_prompts import WarmPrompt

log = logging.getLogger("prefixcache")

# In the place of those of `Settings`: a server outlives disks.
SERVER_DEFAULTS = {"ssd_missing": "wait", "decline_slow_hits": True}

VLM_FLAGS = {"--vlm", "--salt-from", "--require-salt", "--allowed-hosts"}  # of ours, those that --vlm knows

COMMAND = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "epilog": "All flags of mlx_lm.server are taken too, such as --model, --host, --port; `mlx_lm.server --help` lists them. "
    "With --vlm they are mlx_vlm.server's.",
}


@with_settings
@with_options
def serve(
    ctx: typer.Context,
    run: RunOptions,
    requests: RequestOptions,
    text: CanonicalOptions,
    admin: AdminOptions,
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
        _check_flags(ctx.args, [flag_of(name) for name in ("codec", *BITS) if flags[name]], run.warm or [])
        if not run.grace < float("inf"):
            raise ValueError(f"--grace {run.grace}: not a number of seconds")
        if requests.salt_from not in (None, "authorization"):
            raise ValueError(
                f"--salt-from {requests.salt_from}: salts are made of one header only; write authorization"
            )
        settings = settings_from(flags)
        defaults = {name: value for name, value in SERVER_DEFAULTS.items() if name not in settings.model_fields_set}
        settings = settings.model_copy(update=defaults)
        key, rules = admin.key(), text.rules()
        from prefixcache.servers.errors import ServeError, ServeFailed
        from prefixcache.servers.mlx_lm.options import ServeOptions
        from prefixcache.servers.mlx_lm.serve import serve as serve_until_ended
        from prefixcache.servers.salts import Salts
        from prefixcache.servers.warm_prompts import read_prompts

        salts = Salts(
            from_authorization=requests.salt_from is not None, required=requests.require_salt, key=_salt_key(settings)
        )
        prompts = [prompt for file in run.warm or [] for prompt in read_prompts(file)]
        if run.vlm:
            _check_vlm(run, requests, text, admin)
            from prefixcache.servers.mlx_vlm.serve import serve as serve_pictures
    except (ValueError, ImportError) as error:
        exit_without_mlx(error)
        _exit_with_error(error)
    try:
        if run.vlm:
            serve_pictures(settings, ctx.args, salts, requests.hosts())
            _exit_process(0)
        options = ServeOptions(
            before=partial(_warm, prompts, salts),
            grace=run.grace,
            exact_prefill=run.exact_prefill,
            warm_next_turn=run.warm_next_turn,
            log_json=run.log_json,
            salts=salts,
            allowed_hosts=requests.hosts(),
            allow_chat_template=requests.allow_chat_template,
            max_context=requests.max_context,
            any_model=requests.any_model,
            canonical=rules,
            admin_key=key,
            hang_timeout=run.hang_timeout,
        )
        serve_until_ended(settings, ctx.args, options)
    except ServeFailed as error:
        complain(one_line(error))
        _exit_process(2)
    except (ServeError, DirectoryError, ValueError) as error:
        _exit_with_error(error)
    _exit_process(0)


def _check_vlm(*given: Any) -> None:
    """Raise ValueError without mlx-vlm, and for an option that mlx_vlm.server's requests don't know."""
    if find_spec("mlx_vlm") is None:
        raise ValueError('--vlm without mlx-vlm: run pip install "prefixcache[vlm]"')
    for flag in flags_given(*given):
        if flag not in VLM_FLAGS:
            raise ValueError(f"{flag} with --vlm: not for mlx_vlm.server; leave it out")


def _salt_key(settings: Settings) -> bytes:
    """Return the key with which API keys are hashed to salts: one made of the fleet's key, b"" without a fleet."""
    if settings.remote_key_file is None:
        return b""
    # With a remote tier the cache reads it again, and warns.
    return FleetKey.read(settings.remote_key_file, warn=settings.remote is None).derive(b"prefixcache.salt")


def _warm(prompts: list[WarmPrompt], salts: Salts, generator: Generator) -> None:
    """Store the prompts, except those that no request could hit (--require-salt); on a terminal show a progress bar. Runs on
    the thread that generates.
    """
    from prefixcache.servers.errors import ServeError
    from prefixcache.servers.warm_prompts import BadPrompt, sequences_of
    from prefixcache.servers.warming import warm_sequences

    provider, prompt_cache = generator.model_provider, generator.prompts
    prompts = [prompt.canonical(generator.canonical.rules) for prompt in _hittable(prompts, salts)]
    if prompt_cache.cache.ranks is not None:
        prompts = prompt_cache.cache.ranks.from_first(prompts)
    if not prompts:
        return
    try:
        sequences = sequences_of(provider.tokenizer, prompts, provider.cli_args.chat_template_args)
    except BadPrompt as error:
        raise ServeError(f"--warm: {error}") from error
    total = sum(len(sequence.tokens) for sequence in sequences)
    log.info("warm-up: %d prompts of %d tokens in all", len(sequences), total)
    with bar("warm-up", total, "tokens") as show:
        done = warm_sequences(
            prompt_cache.cache,
            lambda: provider.nets,
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


def _hittable(prompts: list[WarmPrompt], salts: Salts) -> list[WarmPrompt]:
    """Return those of the prompts that a request may hit; warn of the others."""
    hittable = [prompt for prompt in prompts if prompt.salt or not salts.required]
    if len(hittable) < len(prompts):
        log.warning(
            '--warm with --require-salt: %d of %d prompts are left out, since no request could hit them; add "cache_salt"',
            len(prompts) - len(hittable),
            len(prompts),
        )
    if hittable and salts.from_authorization:
        log.warning("--warm with --salt-from: requests with an API key hit none of these prompts")
    return hittable


def _check_flags(flags: list[str], codec_flags: list[str], warm: list[Path]) -> None:
    """Raise ValueError where a flag of mlx-lm contradicts one that chooses a codec, and for --warm without --model."""
    given = {flag.partition("=")[0] for flag in flags if flag.startswith("-")}
    if "--kv-bits" in given and codec_flags:
        raise ValueError(
            f"--kv-bits with {codec_flags[0]}: rows that mlx-lm has quantized are kept as they are; give one of them"
        )
    if warm and "--model" not in given:
        raise ValueError("--warm without --model: there is no model to compute the prompts with; add --model")


def _exit_process(code: int) -> None:
    """End the process at once: all is written. Python may abort at shutdown if a thread used mx.compile
    (ml-explore/mlx#4110).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_with_error(error: Exception) -> None:
    complain(one_line(error))
    raise typer.Exit(2) from None
