"""What a PrefixCache counts, for Prometheus: `CacheCollector` reads `stats()` when it is scraped, and at no other time.

Nothing is counted here and nothing is remembered, so between scrapes it costs nothing. A server registers the collector
with prometheus-client, or answers /metrics with what `render` gives. The same names are in dashboards/grafana.json,
`prefixcache top` and docs/operating.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import prefixcache
from prefixcache.metrics.histogram import Observed
from prefixcache.metrics.stats import Counters, Stats

if TYPE_CHECKING:
    from prefixcache.cache import PrefixCache
    from prefixcache.remote.stats import RemoteStats
    from prefixcache.ssd import SsdStats

__all__ = ["CONTENT_TYPE", "CacheCollector", "render"]

# A number, or numbers by the value of the metric's one label. Summed over the label they mean something.
Value = float | dict[str, float]


NO_LABEL = "none"


class Series(NamedTuple):
    """A metric: its name without "prefixcache_" and its unit's or kind's ending ("_total"; of histograms "_seconds"), what it
    says, its value, and its label if it has one. A histogram's value is an `Observed` by the label's value.
    """

    name: str
    text: str
    value: Callable[[Any], Any]
    label: str = ""


def _fetched(c: Counters) -> Value:
    return {"hit": c.hit_tokens, "miss": c.asked_tokens - c.hit_tokens}


def _hit(c: Counters) -> Value:
    return {"ram": c.ram_hit_tokens, "ssd": c.ssd_hit_tokens, "remote": c.remote_hit_tokens}


def _stored(c: Counters) -> Value:
    return {"new": c.stored_tokens, "shared": c.shared_tokens, "unkept": c.unkept_tokens}


def _evicted(c: Counters) -> Value:
    return {"ram": c.evicted, "ssd": c.ssd_evicted}


def _ram(s: Stats) -> Value:
    """What waits for the SSD is part of the images in `Stats`."""
    images = {"images": s.ram_images - s.ram_queued, "queued": s.ram_queued}
    return {**images, "nodes": s.ram_nodes, "reserved": s.ram_reserved}


def _images(s: Stats) -> Value:
    return {"ram": s.images_in_ram, "ssd": s.images_on_ssd}


def _sequences(s: Stats) -> Value:
    return {label or NO_LABEL: counted.sequences for label, counted in s.labels.items()}


def _by_label(s: Stats) -> Value:
    return {label or NO_LABEL: counted.ram_bytes for label, counted in s.labels.items()}


EVENTS = (  # since the cache was opened, of `Counters`
    Series("fetches", "Prompts that were looked up.", lambda c: c.fetches),
    Series(
        "fetch_tokens",
        "Tokens that were looked up, by whether RAM had them. Their sum over result is the denominator of "
        "the hit rate; of a prompt that is all known, at least the last token is a miss.",
        _fetched,
        "result",
    ),
    Series(
        "hit_tokens",
        "Tokens that fetches gave: ssd and remote those that a promotion had brought from there and no fetch "
        "had given since, ram all others. Hit rate by tier: sum by (tier) (rate(prefixcache_hit_tokens_total[5m])) / "
        "ignoring (tier) group_left () sum (rate(prefixcache_fetch_tokens_total[5m])).",
        _hit,
        "tier",
    ),
    Series(
        "other_form_fetches",
        "Prompts of which something was stored as a prompt cache of another form than the caller "
        "makes, and left alone.",
        lambda c: c.of_other_form,
    ),
    Series(
        "failed_hits", "Hits that were deleted, since the model could not go on from them.", lambda c: c.failed_hits
    ),
    Series("promoted_tokens", "Tokens brought from SSD to RAM.", lambda c: c.promoted_tokens),
    Series("promoted_bytes", "Bytes brought from SSD to RAM.", lambda c: c.promoted_bytes),
    Series(
        "remote_promoted_images", "Images promoted from the remote tier to RAM.", lambda c: c.remote_promoted_images
    ),
    Series("stores", "Prompt caches that were given to be stored.", lambda c: c.stores),
    Series(
        "store_tokens",
        "Their tokens: new, kept already (shared), without room or not finite (unkept).",
        _stored,
        "result",
    ),
    Series("stored_bytes", "Bytes of what was new, compressed.", lambda c: c.stored_bytes),
    Series("recoded_tokens", "Tokens that were coded again.", lambda c: c.recoded_tokens),
    Series(
        "not_finite_stores", "Prompt caches kept only before the first NaN or infinity in them.", lambda c: c.not_finite
    ),
    Series("evicted_images", "Images evicted to make room.", _evicted, "tier"),
    Series("dropped_images", "Images evicted from RAM that the SSD was to get and did not.", lambda c: c.dropped),
    Series("dropped_bytes", "Bytes of the dropped images.", lambda c: c.dropped_bytes),
    Series(
        "idle_bytes",
        "Bytes of images that were queued for the SSD while nobody asked (setting spill_idle).",
        lambda c: c.idle_bytes,
    ),
    Series(
        "declined_images", "Images evicted from RAM that the SSD did not admit at first sight.", lambda c: c.declined
    ),
    Series(
        "forgotten_images", "Images deleted from the SSD because RAM had no room to index them.", lambda c: c.forgotten
    ),
    Series("corrupt_images", "Files found damaged when they were read, and quarantined.", lambda c: c.corrupt),
    Series("write_errors", "Images that could not be written to the SSD.", lambda c: c.write_errors),
    Series("denied_reservations", "Reservations of RAM that found no room.", lambda c: c.denied),
)

STATE = (  # now, of `Stats`
    Series("ram_bytes", "RAM held, by what for. Images that wait for the SSD are queued.", _ram, "state"),
    Series("ram_limit_bytes", "The RAM budget; lower while the machine is short of memory.", lambda s: s.ram_limit),
    Series("ram_configured_bytes", "The RAM budget that was asked for.", lambda s: s.ram_configured),
    Series("ram_peak_bytes", "The most RAM that was held at once.", lambda s: s.ram_peak),
    Series("images", "Images by tier; many are in both.", _images, "tier"),
    Series("pinned_images", "Images pinned against eviction.", lambda s: s.pinned),
    Series("blocks", "Blocks of tokens that are known, in any tier.", lambda s: s.blocks),
    Series("sequences", "Stored prompts that no other goes on from, by the label of their store.", _sequences, "label"),
    Series("ram_image_bytes", "RAM held by images, by the label of their store.", _by_label, "label"),
    Series("namespaces", "Namespaces: models, codecs, layouts, tenants.", lambda s: s.namespaces),
)

SSD_EVENTS = (  # of `SsdStats`
    Series("ssd_written_files", "Files written.", lambda s: s.written_files),
    Series("ssd_written_bytes", "Bytes written.", lambda s: s.written_bytes),
    Series("ssd_read_files", "Files read.", lambda s: s.read_files),
    Series("ssd_read_bytes", "Bytes read.", lambda s: s.read_bytes),
    Series("ssd_refused_writes", "Writes that found queue or SSD full; most are tried again.", lambda s: s.dropped),
    Series("ssd_failed_batches", "Batches of writes that failed.", lambda s: s.errors),
    Series("ssd_unreadable_files", "Files that could not be read for now.", lambda s: s.unreadable),
    Series("ssd_quarantined_files", "Files moved to quarantine/, at the opening too.", lambda s: s.quarantined),
)

DURATIONS = (  # since the cache was opened, of `Stats`, in seconds
    Series("store", "What a store took.", lambda s: {"": s.seconds["store"]}),
    Series(
        "fetch",
        "What a fetch took, by whether RAM had anything of the prompt.",
        lambda s: {"hit": s.seconds["fetch_hit"], "miss": s.seconds["fetch_miss"]},
        "result",
    ),
    Series("promote", "What a promotion took from its start to its last image.", lambda s: {"": s.seconds["promote"]}),
)

SSD_DURATIONS = (  # of `SsdStats`
    Series("ssd_spill", "From the queue to a file that is durable and indexed.", lambda s: {"": s.spill_seconds}),
    Series("ssd_read", "What it took to read and check a file.", lambda s: {"": s.read_seconds}),
)

SSD_STATE = (
    Series("ssd_used_bytes", "What the directory holds, with what is queued for it.", lambda s: s.used),
    Series("ssd_limit_bytes", "What the directory may take.", lambda s: s.limit),
    Series("ssd_disk_bytes", "What the directory takes on the disk.", lambda s: s.disk),
    Series("ssd_reserve_bytes", "Room of the limit that is kept for the index to grow.", lambda s: s.reserve),
    Series("ssd_quarantine_bytes", "What the files in quarantine/ take.", lambda s: s.quarantine_bytes),
    Series("ssd_queued_files", "Files that wait to be written.", lambda s: s.queued_files),
    Series("ssd_queued_bytes", "Bytes that wait to be written.", lambda s: s.queued_bytes),
    Series("ssd_files", "Files of images.", lambda s: s.files),
)

REMOTE_EVENTS = (  # of `RemoteStats`
    Series("remote_asks", "Round trips in which the engine was asked what it has.", lambda s: s.asks),
    Series("remote_read_images", "Images read.", lambda s: s.read_images),
    Series("remote_read_bytes", "Bytes read.", lambda s: s.read_bytes),
    Series("remote_written_images", "Images sent.", lambda s: s.written_images),
    Series("remote_written_bytes", "Bytes sent.", lambda s: s.written_bytes),
    Series("remote_known_images", "Images that were not sent because the engine had them.", lambda s: s.known),
    Series("remote_dropped_images", "Images that were to be sent and were not.", lambda s: s.dropped),
    Series(
        "remote_refused_images",
        "Images that were not what their names say: another key's, damaged, forged.",
        lambda s: s.refused,
    ),
    Series(
        "remote_timeouts", "Questions and reads that were given up because they took too long.", lambda s: s.timeouts
    ),
    Series(
        "remote_skipped_prompts", "Prompts that were not read because computing them is quicker.", lambda s: s.skipped
    ),
    Series("remote_errors", "Calls of the engine that failed.", lambda s: s.errors),
)

REMOTE_DURATIONS = (  # of `RemoteStats`
    Series("remote_ask", "What it took to ask the engine what it has.", lambda s: {"": s.ask_seconds}),
    Series("remote_read", "What it took to read and unseal an image.", lambda s: {"": s.read_seconds}),
    Series("remote_write", "What it took to seal and send an image.", lambda s: {"": s.write_seconds}),
)

REMOTE_STATE = (
    Series(
        "remote_up",
        "1 while the engine answers; 0 while it is left alone because it failed.",
        lambda s: float(s.reading),
    ),
    Series("remote_writable", "1 while the engine takes images.", lambda s: float(s.writing)),
    Series("remote_queued_images", "Images that wait to be sent.", lambda s: s.queued),
)


class CacheCollector(Collector):
    """A PrefixCache's numbers, read when they are asked for. One for each process: metrics don't say of which cache.

    Counters begin with the opening of the cache and only go up. Of a cache that is closed meanwhile the last counts are
    given, and RAM is empty.
    """

    def __init__(self, cache: PrefixCache):
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        stats = self._cache.stats()
        about = {"version": prefixcache.__version__, "codec": stats.codec}
        kernels = {f"kernels_{where}": what for where, what in stats.kernels.items()}
        yield InfoMetricFamily("prefixcache", "The cache that is at work.", {**about, **kernels})
        yield from _metrics(CounterMetricFamily, EVENTS, stats.counters)
        yield from _metrics(GaugeMetricFamily, STATE, stats)
        yield from _histograms(DURATIONS, stats)
        if stats.ssd is not None:
            yield from _metrics(CounterMetricFamily, SSD_EVENTS, stats.ssd)
            yield from _metrics(GaugeMetricFamily, SSD_STATE, stats.ssd)
            yield from _histograms(SSD_DURATIONS, stats.ssd)
        if stats.remote is not None:
            yield from _metrics(CounterMetricFamily, REMOTE_EVENTS, stats.remote)
            yield from _metrics(GaugeMetricFamily, REMOTE_STATE, stats.remote)
            yield from _histograms(REMOTE_DURATIONS, stats.remote)


def render(*collectors: Collector) -> bytes:
    """The page that /metrics answers with; its content type is CONTENT_TYPE."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def _metrics(family: Any, every: tuple[Series, ...], of: Counters | Stats | SsdStats | RemoteStats) -> Iterator[Metric]:
    for series in every:
        metric = family(f"prefixcache_{series.name}", series.text, labels=[series.label] if series.label else [])
        value = series.value(of)
        for label, number in value.items() if isinstance(value, dict) else [("", value)]:
            metric.add_metric([label] if series.label else [], number)
        yield metric


def _histograms(every: tuple[Series, ...], of: Stats | SsdStats | RemoteStats) -> Iterator[Metric]:
    for series in every:
        metric = HistogramMetricFamily(
            f"prefixcache_{series.name}_seconds", series.text, labels=[series.label] if series.label else []
        )
        for label, observed in series.value(of).items():
            metric.add_metric([label] if series.label else [], _buckets(observed), observed.total)
        yield metric


def _buckets(observed: Observed) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, observed.bounds), "+Inf"]
    return list(zip(bounds, map(float, observed.counts), strict=True))
