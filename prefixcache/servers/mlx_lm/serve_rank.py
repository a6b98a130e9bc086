"""One rank of a served model, from its start to its end: rank 0 answers over HTTP, the others follow. Whichever ends, ends
all.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import mlx.core as mx

from prefixcache.byte_sizes import size
from prefixcache.cache import PrefixCache
from prefixcache.metrics.stats import Stats
from prefixcache.ranks import Ranks
from prefixcache.ranks.launcher import when_launcher_ends
from prefixcache.ranks.watch import Watch
from prefixcache.servers.ending import Ending
from prefixcache.servers.errors import ServeError, ServeFailed
from prefixcache.servers.mlx_lm.arguments import check_model
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.http_server import HttpServer
from prefixcache.servers.mlx_lm.lifetime import POLL, died, end, is_ready, run, start_logging, tell
from prefixcache.servers.mlx_lm.options import ServeOptions
from prefixcache.servers.mlx_lm.provider import Provider
from prefixcache.servers.mlx_lm.rank_turns import RankTurns
from prefixcache.settings import Settings

log = logging.getLogger("prefixcache")

FLUSH_SECONDS = 6.0  # that a rank may write what RAM has, once another rank has died
NEWS_SECONDS = 3.0  # in which a rank hears of one that died, when its own part has failed because of that
LAST_STEPS_SECONDS = 10.0  # for the steps that all ranks still do together before they end
FOLLOWER_SECONDS = 15.0  # beyond the grace, that rank 0 has to end a rank that was asked to end


class EndWithOthers:
    """Called when another rank has ended: ends this rank, too, and first writes what only RAM has."""

    def __init__(self, rank: int, ending: Ending):
        self._rank, self._ending = rank, ending
        self.cache: PrefixCache | None = None

    def __call__(self, reason: str) -> None:
        if not reason:  # rank 0 ends in order
            self._ending.asked.set()
            return
        log.error(
            "%s: so rank %d ends, too; start all ranks again, what is on their SSDs is still there", reason, self._rank
        )
        if self.cache is not None:
            closing = threading.Thread(target=self.cache.close, daemon=True)
            closing.start()
            closing.join(FLUSH_SECONDS)
        os._exit(2)


class Rank(NamedTuple):
    """What a rank serves with; only rank 0 has a `server`. `stats_at_open`: what its directory had."""

    server: HttpServer | None
    cache: PrefixCache
    stats_at_open: Stats
    generator: Generator
    watch: Watch


def serve_rank(settings: Settings, args: argparse.Namespace, options: ServeOptions, ending: Ending) -> bool:
    """Serve as one rank of the group that `mlx.launch` has made, see `serve.serve`; False, and nothing is done, where there
    is none. Errors end the other ranks, which name this one.
    """
    grouped, begun = threading.Event(), Future[Rank | None]()

    def generate() -> None:
        # All of this on one thread: MLX's GPU back ends communicate only on the one on which the group was made.
        try:
            try:
                group = mx.distributed.init()
            finally:
                grouped.set()
            rank = _begin(group, settings, args, options, ending)
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(rank)
        if rank is not None:
            rank.generator.run()

    with ending.at_once():  # until its peers are there, MLX lets no other thread run, nor Python's signal handlers
        threading.Thread(target=generate, name="prefixcache-generate", daemon=True).start()
        grouped.wait()
    when_launcher_ends(lambda pid: _end_with_launcher(pid, ending))
    while not begun.done():
        if ending.asked.wait(POLL):
            os._exit(128 + ending.signum)
    try:
        rank = begun.result()
    except Exception as error:
        raise ServeFailed(str(error)) from error
    if rank is None:
        return False
    watch, server, generator = rank.watch, rank.server, rank.generator
    try:
        try:
            if server is not None:
                run(server, generator, ending, rank.stats_at_open, options)
            else:
                _serve_as_follower(generator, ending, rank.stats_at_open, options.grace, watch)
        finally:
            end(generator, ending, server.replying if server is not None else set(), LAST_STEPS_SECONDS)
            watch.step_may_take_long()
            log.info("flushing RAM: %s", size(rank.cache.stats().ram_images))
            rank.cache.close()
    except ServeFailed as error:
        time.sleep(NEWS_SECONDS)  # if a rank that died made this one fail, the news of it ends this process meanwhile
        watch.close(f"rank {watch.rank} could not go on: {error}")
        raise
    watch.close()
    return True


def _end_with_launcher(pid: int, ending: Ending) -> None:
    if not ending.asked.is_set():
        log.error("mlx.launch (pid %d) has ended: so its ranks end, too", pid)
    ending.ask(signal.SIGTERM)


def _begin(
    group: mx.distributed.Group, settings: Settings, args: argparse.Namespace, options: ServeOptions, ending: Ending
) -> Rank | None:
    """Return what a rank serves with; None where it would be the only one."""
    if group.size() == 1:
        return None
    start_logging(args, options, group.rank())
    ranks = Ranks(group)
    end_with_others = EndWithOthers(ranks.rank, ending)
    watch = Watch(ranks, end_with_others, ending.asked.set, hang=options.hang_timeout)
    try:
        check_model(args)
        if args.draft_model or args.adapter_path:
            given = "--draft-model" if args.draft_model else "--adapter-path"
            raise ServeError(
                f"{given} with several ranks: mlx-lm has neither there; leave it out, or serve from one process"
            )
        if different := ranks.differing(_decisive(settings, args, options)):
            raise ServeError(f"the ranks differ in {', '.join(different)}: give all the same flags and variables")
        server = None
        if ranks.is_first:
            server = HttpServer(args.host, args.port, options.allowed_hosts, args.allowed_origins)
        end_with_others.cache = cache = PrefixCache(settings, group=group)
        stats_at_open, turns = cache.stats(), RankTurns(ranks, watch)
        provider = Provider(args, options.max_context, turns)
        generator = Generator(
            provider,
            cache,
            options.before,
            exact_prefill=options.exact_prefill,
            canonical=options.canonical,
            turns=turns,
        )
        return Rank(server, cache, stats_at_open, generator, watch)
    except BaseException as error:
        watch.close(f"rank {ranks.rank} could not go on: {error}")
        raise


def _decisive(settings: Settings, args: argparse.Namespace, options: ServeOptions) -> dict[str, Any]:
    """Return what decides on the steps that a rank takes."""
    names = (
        "pipeline",
        "prefill_step_size",
        "prompt_concurrency",
        "decode_concurrency",
        "prompt_cache_bytes",
        "kv_bits",
    )
    return {
        **{f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names},  # mlx-lm 0.31 has not all
        "--exact-prefill": options.exact_prefill,
        "--max-context": options.max_context,
        "--codec": str(settings.codec),
        "--remote": settings.remote is not None,
    }


def _serve_as_follower(generator: Generator, ending: Ending, stats_at_open: Stats, grace: float, watch: Watch) -> None:
    """Take the steps that rank 0 takes, until it ends."""
    if not is_ready(generator, ending):
        return
    tell(generator, stats_at_open)
    while generator.thread.is_alive() and not ending.asked.wait(POLL):
        pass
    if not ending.asked.is_set() and not generator.stopped:
        raise ServeFailed(died(generator))
    watch.ask_to_end()
    generator.thread.join(grace + FOLLOWER_SECONDS)
