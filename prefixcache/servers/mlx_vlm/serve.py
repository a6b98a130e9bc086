"""mlx_vlm.server with a PrefixCache in the place of its own prefix cache (APC): what `prefixcache serve --vlm` runs."""

from __future__ import annotations

import argparse
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prefixcache.byte_sizes import size
from prefixcache.cache import PrefixCache
from prefixcache.codecs import Transform
from prefixcache.identity import identity_or_nameless, mlx_vlm_identity
from prefixcache.metrics.prometheus import CacheCollector, render
from prefixcache.servers.buffer_pool import pool_kept
from prefixcache.servers.causality import NotCausal, media_are_whole
from prefixcache.servers.ending import Ending
from prefixcache.servers.errors import ServeError, no_address
from prefixcache.servers.media_inputs import placeholders_of
from prefixcache.servers.mlx_lm.arguments import FOLDERS, Flags, check_model, with_homes
from prefixcache.servers.mlx_vlm import upstream
from prefixcache.servers.mlx_vlm.prompts import ModelPrompts
from prefixcache.servers.salts import Salts
from prefixcache.servers.web_access import WebAccess
from prefixcache.settings import Settings

log = logging.getLogger("prefixcache")

TENANT = "send the header `X-Tenant-Id: ...`"


def serve(settings: Settings, flags: Sequence[str], salts: Salts, allowed_hosts: Sequence[str] = ()) -> None:
    """Run mlx_vlm.server with these flags of its own until a signal ends it. Call it on the main thread.

    `salts`: whose a request's prompts are. `allowed_hosts`: names of the server beside those that it is bound to. Raises
    ServeError, ValueError or `ssd.DirectoryError` when it can't start.
    """
    ours, others = _read_ours(with_homes(flags))
    address = _checked_address(ours.host, others)
    access = WebAccess.of(ours.host, address, allowed_hosts, ours.allowed_origins.split(","))
    with Ending(), pool_kept(), PrefixCache(without_transform(settings)) as cache:
        manager = upstream.Manager(cache, partial(prompts_of, cache))
        rules = upstream.Rules(replace(salts, remedy=TENANT), access, lambda: render(CacheCollector(cache)))
        with upstream.serving_with(manager, rules):
            upstream.run(["--host", ours.host, *others])
        log.info("flushing RAM: %s", size(cache.stats().ram_images))


def without_transform(settings: Settings) -> Settings:
    """Return the settings with the codec that codes all rows here: a basis is of the prompt caches of mlx-lm."""
    if not isinstance(settings.codec, Transform):
        return settings
    codec = settings.codec.otherwise
    log.warning("--codec transform with --vlm: no basis is of mlx-vlm's prompt caches; all rows are coded by %s", codec)
    return settings.model_copy(update={"codec": codec})


def _read_ours(flags: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read what is not left to mlx-vlm: its default host is every address, and it answers the pages of every origin."""
    parser = argparse.ArgumentParser(prog="prefixcache serve --vlm", add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--allowed-origins", default="")
    return parser.parse_known_args(flags)


def _checked_address(host: str, flags: Sequence[str]) -> str:
    """Return the address of a host. ServeError where it can't be had, and for flags with which mlx-vlm could not start, or
    would in a process of its own.
    """
    parser = Flags()
    for flag in FOLDERS:
        parser.add_argument(flag)
    parser.add_argument("--port", type=int, default=upstream.PORT)
    parser.add_argument("--reload", action="store_true")
    asked, _ = parser.parse_known_args(flags)
    if asked.reload:
        raise ServeError("--reload with --vlm: the process that it starts would have no PrefixCache; leave it out")
    check_model(asked)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, asked.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address[0], asked.port, *address[2:]))  # getaddrinfo cuts a port that is too large
    except (OSError, OverflowError) as error:
        raise no_address(host, asked.port, error) from None
    return str(address[0])


def prompts_of(cache: PrefixCache, generator: Any) -> ModelPrompts | None:
    """Return what keeps the prompts of the model that a thread has just loaded; None where nothing of it is kept."""
    for flag, value in (("--kv-bits", generator.kv_bits), ("--draft-model", generator.draft_model)):
        if value is not None:
            log.warning("%s: prompts are neither kept nor hit with it", flag)
            return None
    try:
        prompts = _prompts_kept(cache, generator)
    except Exception as error:  # such as a model without a language model
        log.warning("prompts of this model are neither kept nor hit: %s", error)
        return None
    log.info("serving %s; RAM budget %s; codec %s", prompts.name, size(cache.stats().ram_limit), cache.codec)
    return prompts


def _prompts_kept(cache: PrefixCache, generator: Any) -> ModelPrompts:
    """Make it. Raises an exception for a model whose prompts can't be hit."""
    if not upstream.takes_chunks(generator.model):
        raise NotCausal(f"{generator.config.model_type}: it takes prompts as a whole")
    model, placeholders = generator.model, placeholders_of(generator.config)
    new_layers = upstream.new_layers_of(model)
    whole = bool(placeholders.kinds) and media_are_whole(model, min(placeholders.kinds), new_layers)
    thinks = "</think>" in generator.tokenizer.get_vocab()
    name = identity_or_nameless(partial(mlx_vlm_identity, generator.model_path, generator.adapter_path))
    return ModelPrompts(cache, name, new_layers, placeholders, whole=whole, thinks=thinks)
