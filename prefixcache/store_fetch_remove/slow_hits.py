"""Which hits are declined since computing is quicker, by the rates that were measured here (decision 0042)."""

from __future__ import annotations

import logging

from prefixcache.blocks.node import RAM
from prefixcache.metrics.rates import MeasuredRates
from prefixcache.store_fetch_remove.hot import deepest_hot, hot_blocks
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")


def decline_slow(storage: Storage, rates: MeasuredRates, prompt: Prompt, leave: int) -> int:
    """Return how many tokens a fetch is to leave: `leave`, where the hit is quicker than computing; else all but those that
    are hot, and what is declined is counted.
    """
    with storage.lock:
        deepest = prompt.deepest(RAM, leave)
        if deepest is None or not rates.fetching(prompt.model, deepest.depth):
            return leave
        depth = deepest.depth
        hot = deepest_hot(storage, prompt, leave)[1]
        if depth <= hot:
            return leave
        begins = hot_blocks(storage, prompt, deepest.namespace, depth)
        decoded = depth - (begins.depth if begins is not None else 0)
        if not rates.declines(prompt.model, decoded, depth - hot):
            return leave
        counters = storage.counters
        counters.declined_hits += 1
        counters.declined_hit_tokens += depth - hot
        is_first = counters.declined_hits == 1
    if is_first:
        log.info(
            "a hit of %d tokens is declined: fetching takes %.3f s, computing what is not hot of it %.3f s (setting "
            "decline_slow_hits). Said once; prefixcache_declined_hits_total counts",
            depth,
            rates.fetching(prompt.model, decoded),
            rates.computing(prompt.model, depth - hot),
        )
    return len(prompt) - hot
