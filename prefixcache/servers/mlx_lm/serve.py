"""mlx_lm.server with a PrefixCache: what `prefixcache serve` runs.

Its flags (`arguments`) and its answers are mlx-lm's; `generator` has what is changed on the way of a request, `http_server`
what is changed between it and its client, `lifetime` its start and its end, `upstream` how mlx-lm's inside is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx

from prefixcache.byte_sizes import size
from prefixcache.cache import PrefixCache
from prefixcache.ranks.watch import HANG
from prefixcache.servers.mlx_lm.arguments import check_model, read_flags
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.http_server import NO_RULES, ClientRules, HttpServer
from prefixcache.servers.mlx_lm.lifetime import Ending, Options, end, run, start_logging
from prefixcache.servers.mlx_lm.provider import Provider
from prefixcache.servers.mlx_lm.serve_rank import serve_rank
from prefixcache.servers.salts import BY_CACHE_SALT, Salts
from prefixcache.settings import Settings

log = logging.getLogger("prefixcache")


def serve(
    settings: Settings,
    flags: Sequence[str],
    *,
    before: Callable[[Generator], None] = lambda generator: None,
    grace: float = 5.0,
    exact_prefill: bool = False,
    log_json: bool = False,
    salts: Salts = BY_CACHE_SALT,
    hang_timeout: float = HANG,
    rules: ClientRules = NO_RULES,
    admin_key: bytes = b"",
) -> None:
    """Run mlx_lm.server with these flags of its own until a signal ends it. Call it on the main thread.

    Under `mlx.launch` this is one rank of a model that spans processes: rank 0 answers requests.

    `before`: called on the thread that generates when the model is there, before the first request is taken. `grace`: seconds
    that requests under way may go on at the end. `exact_prefill`: prompts are computed on exact rows, not on those that a hit
    will give. `log_json`: all that is logged goes to standard error as JSON. `salts`: whose a request's prompts are.
    `hang_timeout`: seconds after which ranks that wait for each other end. `rules`: what is taken of clients.
    `admin_key`: what opens the admin path; with b"" programs on this machine may use it. Raises ServeError, ValueError or
    `ssd.DirectoryError` when it can't start.
    """
    args = read_flags(flags)
    if mx.metal.is_available():  # as mlx-lm does it: the weights stay in memory
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    bounded = any(flag.startswith("--prompt-cache-size") for flag in flags)
    how = Options(before, grace, exact_prefill, log_json, salts, bounded, rules, admin_key)
    with Ending() as ending:
        if serve_rank(settings, args, how, ending, hang_timeout):
            return
        start_logging(args.log_level, how)
        check_model(args)
        with (
            HttpServer(args.host, args.port, rules.allowed_hosts, args.allowed_origins) as server,
            PrefixCache(settings) as cache,
        ):
            opened = cache.stats()
            generator = Generator(Provider(args, rules.max_context), cache, before, exact_prefill)
            try:
                run(server, generator, ending, opened, how)
            finally:
                end(generator, ending, server.replying)
            log.info("flushing RAM: %s", size(cache.stats().ram_images))
