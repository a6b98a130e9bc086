"""mlx_lm.server with a PrefixCache: what `prefixcache serve` runs.

Its flags (`arguments`) and its answers are mlx-lm's; `generator` has what is changed on the way of a request, `http_server`
what is changed between it and its client, `lifetime` its start and its end, `upstream` how mlx-lm's inside is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from prefixcache.byte_sizes import size
from prefixcache.cache import PrefixCache
from prefixcache.servers.buffer_pool import pool_kept
from prefixcache.servers.ending import Ending
from prefixcache.servers.mlx_lm.arguments import check_model, read_flags
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.http_server import HttpServer
from prefixcache.servers.mlx_lm.lifetime import end, run, start_logging
from prefixcache.servers.mlx_lm.options import ServeOptions
from prefixcache.servers.mlx_lm.provider import Provider
from prefixcache.servers.mlx_lm.serve_rank import serve_rank
from prefixcache.settings import Settings

log = logging.getLogger("prefixcache")


def serve(settings: Settings, flags: Sequence[str], options: ServeOptions) -> None:
    """Run mlx_lm.server with these flags of its own until a signal ends it. Call it on the main thread.

    Under `mlx.launch` this is one rank of a model that spans processes: rank 0 answers requests. Raises ServeError,
    ValueError or `ssd.DirectoryError` when it can't start.
    """
    args = read_flags(flags)
    if mx.metal.is_available():  # as mlx-lm does it: the weights stay in memory
        mx.set_wired_limit(int(mx.device_info(mx.gpu)["max_recommended_working_set_size"]))
    with Ending() as ending, pool_kept():
        if serve_rank(settings, args, options, ending):
            return
        start_logging(args, options)
        check_model(args)
        with (
            HttpServer(args.host, args.port, options.allowed_hosts, args.allowed_origins) as server,
            PrefixCache(settings) as cache,
        ):
            stats_at_open = cache.stats()
            provider = Provider(args, options.max_context)
            generator = Generator(
                provider, cache, options.before, exact_prefill=options.exact_prefill, canonical=options.canonical
            )
            try:
                run(server, generator, ending, stats_at_open, options)
            finally:
                end(generator, ending, server.replying)
            log.info("flushing RAM: %s", size(cache.stats().ram_images))
