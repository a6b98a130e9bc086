"""From a server's start to its end, one process or one rank of several: its log, its signals, requests, the end."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from importlib.metadata import version

import prefixcache
from prefixcache.byte_sizes import size
from prefixcache.metrics.logs import JsonFormatter, quotes_nothing
from prefixcache.metrics.stats import Stats
from prefixcache.servers.ending import Ending
from prefixcache.servers.errors import RankFailed, ServeError, ServeFailed
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.http_server import Handler, HttpServer, Site
from prefixcache.servers.mlx_lm.options import ServeOptions

log = logging.getLogger("prefixcache")

LINGER = 1.0  # seconds, beyond the grace, for the thread that generates to end
POLL = 0.05  # seconds between two looks at what ends


def start_logging(args: argparse.Namespace, options: ServeOptions, rank: int | None = None) -> None:
    """Log as mlx-lm does it, or as JSON, with the rank where there are several; without the requests that mlx-lm quotes in
    its errors. Who asks for DEBUG asks for what it quotes there, but not in JSON.
    """
    root = logging.getLogger()
    if options.log_json:
        stderr = logging.StreamHandler()
        stderr.setFormatter(JsonFormatter())
        stderr.addFilter(quotes_nothing)
        if rank is not None:
            stderr.addFilter(lambda record: vars(record).update(rank=rank) is None)
        logging.captureWarnings(True)
        root.handlers[:] = [stderr]
        root.setLevel(args.log_level)
    transformers = logging.getLogger("transformers")  # it has a handler of its own
    transformers.handlers.clear()
    transformers.propagate = True
    transformers.setLevel(logging.ERROR)  # it would warn that a prompt is longer than the tokenizer's own limit
    whose = "" if rank is None else f"rank {rank} - "
    logging.basicConfig(level=args.log_level, format=f"%(asctime)s - {whose}%(levelname)s - %(message)s")
    for handler in root.handlers:
        handler.addFilter(lambda record: record.levelno <= logging.DEBUG or quotes_nothing(record))
    if args.prompt_cache_size is not None and not rank:
        log.warning("--prompt-cache-size is not used: this cache is bounded in bytes, by --ram and --ssd")


def run(server: HttpServer, generator: Generator, ending: Ending, stats_at_open: Stats, options: ServeOptions) -> None:
    """Answer requests until the end is asked for, then let those under way end."""
    if not is_ready(generator, ending):
        return
    tell(generator, stats_at_open)
    server.site = Site.of(generator, options)
    thread = threading.Thread(target=server.serve_forever, args=(POLL,), name="prefixcache-http", daemon=True)
    thread.start()
    host, port = server.server_address[:2]
    log.info("serving at %s", url_of(str(host), port))
    while not ending.asked.wait(POLL):
        if not generator.thread.is_alive():
            raise ServeFailed(died(generator))
    log.info("ending: no new requests; those under way have %g s; a second signal ends at once", options.grace)
    server.shutdown()
    until = time.monotonic() + options.grace
    while time.monotonic() < until and server.replying:
        time.sleep(POLL)


def url_of(host: str, port: int) -> str:
    """Return the URL of a server at this address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_ready(generator: Generator, ending: Ending) -> bool:
    """Wait until requests can be taken. False where the end was asked for before; ServeFailed where that can't be."""
    while not generator.ready.wait(POLL):
        if ending.asked.is_set():
            return False
    if isinstance(generator.failure, (ServeError, RankFailed)):
        raise ServeFailed(str(generator.failure))
    if generator.failure is not None:
        raise ServeFailed(f"the model can't be loaded: {_one_line(generator.failure)}")
    return True


def died(generator: Generator) -> str:
    """Return why the thread that generates ended by itself."""
    return (
        _one_line(generator.failure) if generator.failure is not None else "the thread that generates died; see the log"
    )


def tell(generator: Generator, stats: Stats) -> None:
    """Log what is served, with what, and what the directory had when it was opened."""
    kernels = "; ".join(f"{where}: {what}" for where, what in stats.kernels.items())
    log.info(
        "prefixcache %s, mlx-lm %s, MLX %s; kernels: %s; codec %s",
        prefixcache.__version__,
        version("mlx-lm"),
        version("mlx"),
        kernels,
        stats.codec,
    )
    none = f"no model yet; RAM budget {size(stats.ram_limit)} (ram={stats.ram_setting})"
    log.info("%s", generator.model or none)
    if stats.ssd is None and generator.prompts.cache.settings.ssd_dir is not None:
        log.info("the SSD's directory is not there yet, or has no size: RAM only")
    elif stats.ssd is None:
        log.info("no SSD directory: RAM only")
    else:
        directory, used, limit = generator.prompts.cache.settings.ssd_dir, size(stats.ssd.used), size(stats.ssd.limit)
        log.info("SSD %s: %d images found; %s of %s used", directory, stats.images_on_ssd, used, limit)
    if stats.remote is not None:
        settings = generator.prompts.cache.settings
        sealed = "sealed" if settings.remote_key_file is not None else "not sealed"
        log.info("remote %s: images are %s; admission %s", stats.remote.engine, sealed, settings.remote_admission)


def end(generator: Generator, ending: Ending, replying: set[Handler], linger: float = LINGER) -> None:
    """Stop the thread that generates, and tell clients that wait (`replying`). While it loads a model it can't be stopped:
    then the process ends without it. A step of a prefill can't either: it gets `linger` seconds, and RAM is flushed beside
    it.
    """
    generator.stop()
    thread, until = generator.thread, time.monotonic() + linger
    while (thread.is_alive() or replying) and (time.monotonic() < until or not generator.ready.is_set()):
        generator.stop_answering()
        time.sleep(POLL)
        if not generator.ready.is_set() and ending.asked.is_set():
            try:
                generator.turns.leave()
                generator.prompts.cache.close()
            finally:
                os._exit(128 + (ending.signum or signal.SIGTERM))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
