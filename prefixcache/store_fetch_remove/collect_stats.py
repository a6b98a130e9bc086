"""`PrefixCache.stats()`: where everything is now, and what has happened since the cache was opened."""

from __future__ import annotations

from prefixcache.blocks.node import RAM
from prefixcache.metrics.stats import Labelled, Stats
from prefixcache.remote.tier import RemoteTier
from prefixcache.ssd import Ssd
from prefixcache.store_fetch_remove.leases import Leases
from prefixcache.tiers.storage import Storage


def collect_stats(
    storage: Storage, leases: Leases, ssd: Ssd | None, remote: RemoteTier | None, codec: str, kernels: dict[str, str]
) -> Stats:
    """Return the tiers' contents, counted now, and the counters of all calls so far."""
    with storage.lock:
        budget, graph, counters = storage.budget, storage.graph, storage.counters
        held, held_by_leases = budget.held(), leases.totals()
        return Stats(
            ram_limit=budget.bound,
            ram_configured=storage.ram.configured,
            ram_setting=str(storage.settings.ram),
            ram_held=held.total,
            ram_images=held.images,
            ram_queued=held.queued,
            ram_nodes=held.nodes,
            ram_hot=held.hot,
            ram_reserved=held.reserved,
            ram_peak=budget.peak,
            namespaces=len(storage.namespaces),
            blocks=graph.nodes,
            sequences=graph.leaves.total(),
            labels={
                label: Labelled(graph.leaves[label], graph.ram_by_label[label])
                for label in sorted({*+graph.leaves, *+graph.ram_by_label})
            },
            images_in_ram=len(graph.orders[RAM]),
            images_on_ssd=sum(graph.images[RAM + 1 :]),
            pinned=graph.pinned,
            leases=held_by_leases.leases,
            leased_bytes=held_by_leases.nbytes,
            hot_prompts=len(storage.hot),
            hot_bytes=storage.hot.nbytes,
            codec=codec,
            kernels=kernels,
            counters=counters.copy(denied=counters.denied + budget.denied),
            seconds=counters.durations.read(),
            ssd=ssd.stats() if ssd is not None else None,
            remote=remote.stats() if remote is not None else None,
        )
