"""What a PrefixCache counts, for Prometheus: `CacheCollector` reads `stats()` when it is scraped, and at no other time.

A new number is a field of `Counters` where it is counted, or of `Stats` where `collect_stats` finds it, and a `Series` here.
Nothing is counted here and nothing is remembered, so between scrapes it costs nothing. A server registers the collector
with prometheus-client, or answers /metrics with what `render` gives. The same names are in dashboards/grafana.json,
`prefixcache top` and docs/operating.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
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

__all__ = ["CONTENT_TYPE", "CacheCollector", "ServerCollector", "render"]

NO_LABEL = "none"
ByLabel = dict[str, float]  # a metric's values by the value of its one label


class Series(NamedTuple):
    """A metric. `name` lacks "prefixcache_" and the ending ("_total"; of histograms "_seconds"); `text` is its help. `value`
    is the field of a snapshot that has the value; of a metric with a `label` the fields by the label's value, or a function
    that gives the values.
    """

    name: str
    text: str
    value: str | dict[str, str] | Callable[[Any], ByLabel]
    label: str = ""

    def values(self, snapshot: Any) -> dict[str, Any]:
        """Return the values in a snapshot, by the label's value."""
        if callable(self.value):
            return self.value(snapshot)
        fields = {"": self.value} if isinstance(self.value, str) else self.value
        return {label: getattr(snapshot, field) for label, field in fields.items()}


def _fetched(counters: Counters) -> ByLabel:
    return {"hit": counters.hit_tokens, "miss": counters.asked_tokens - counters.hit_tokens}


def _ram(stats: Stats) -> ByLabel:
    """Return what RAM is held for. What waits for the SSD is part of the images in `Stats`."""
    images = {"images": stats.ram_images - stats.ram_queued, "queued": stats.ram_queued}
    return {**images, "nodes": stats.ram_nodes, "hot": stats.ram_hot, "reserved": stats.ram_reserved}


def _labelled(field: str) -> Callable[[Stats], ByLabel]:
    def values(stats: Stats) -> ByLabel:
        counts: ByLabel = {}
        for label, counted in stats.labels.items():
            shown = label or NO_LABEL  # which may be a store's label, too
            counts[shown] = counts.get(shown, 0) + getattr(counted, field)
        return counts

    return values


EVENTS = (  # since the cache was opened, of `Counters`
    Series("fetches", "Prompts that were looked up.", "fetches"),
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
        {"ram": "ram_hit_tokens", "ssd": "ssd_hit_tokens", "remote": "remote_hit_tokens"},
        "tier",
    ),
    Series("hot_hit_tokens", "Tokens of hits that were there decoded (setting hot).", "hot_hit_tokens"),
    Series(
        "other_form_fetches",
        "Prompts of which something was stored as a prompt cache of another form than the caller "
        "makes, and left alone.",
        "of_other_form",
    ),
    Series(
        "declined_hits",
        "Hits that were not given, or only what was hot of them, since computing is quicker (setting decline_slow_hits).",
        "declined_hits",
    ),
    Series("declined_hit_tokens", "Tokens that RAM had and declined hits did not give.", "declined_hit_tokens"),
    Series("failed_hits", "Hits that were deleted, since the model could not go on from them.", "failed_hits"),
    Series("promoted_tokens", "Tokens brought from SSD to RAM.", "promoted_tokens"),
    Series("promoted_bytes", "Bytes brought from SSD to RAM.", "promoted_bytes"),
    Series("remote_promoted_images", "Images promoted from the remote tier to RAM.", "remote_promoted_images"),
    Series("stores", "Prompt caches that were given to be stored.", "stores"),
    Series(
        "store_tokens",
        "Their tokens: new, kept already (shared), without room or not finite (unkept).",
        {"new": "stored_tokens", "shared": "shared_tokens", "unkept": "unkept_tokens"},
        "result",
    ),
    Series("stored_bytes", "Bytes of what was new, compressed.", "stored_bytes"),
    Series("recoded_tokens", "Tokens that were coded again.", "recoded_tokens"),
    Series("not_finite_stores", "Prompt caches kept only before the first NaN or infinity in them.", "not_finite"),
    Series("evicted_images", "Images evicted to make room.", {"ram": "evicted", "ssd": "ssd_evicted"}, "tier"),
    Series("dropped_images", "Images evicted from RAM that the SSD was to get and did not.", "dropped"),
    Series("dropped_bytes", "Bytes of the dropped images.", "dropped_bytes"),
    Series("idle_bytes", "Bytes of images queued for the SSD while nobody asked (setting spill_idle).", "idle_bytes"),
    Series("declined_images", "Images evicted from RAM that the SSD did not admit at first sight.", "declined"),
    Series("forgotten_images", "Images deleted from the SSD because RAM had no room to index them.", "forgotten"),
    Series("corrupt_images", "Files found damaged when they were read, and quarantined.", "corrupt"),
    Series("write_errors", "Images that could not be written to the SSD.", "write_errors"),
    Series("denied_reservations", "Reservations of RAM that found no room.", "denied"),
)

STATE = (  # now, of `Stats`
    Series("ram_bytes", "RAM held, by what for. Images that wait for the SSD are queued.", _ram, "state"),
    Series("ram_limit_bytes", "The RAM budget; lower while the machine is short of memory.", "ram_limit"),
    Series("ram_configured_bytes", "The RAM budget that was asked for.", "ram_configured"),
    Series("ram_peak_bytes", "The most RAM that was held at once.", "ram_peak"),
    Series("images", "Images by tier; many are in both.", {"ram": "images_in_ram", "ssd": "images_on_ssd"}, "tier"),
    Series("hot_bytes", "What hot prompts take, in RAM or on the device (setting hot).", "hot_bytes"),
    Series("hot_prompts", "Prompts whose decoded state is kept (setting hot).", "hot_prompts"),
    Series("leases", "Prompts that were asked to be kept for a time.", "leases"),
    Series("leased_bytes", "Bytes of images that leases keep, on whichever tier.", "leased_bytes"),
    Series("pinned_images", "Images pinned against eviction.", "pinned"),
    Series("blocks", "Blocks of tokens that are known, in any tier.", "blocks"),
    Series(
        "sequences",
        "Stored prompts that no other goes on from, by the label of their store.",
        _labelled("sequences"),
        "label",
    ),
    Series("ram_image_bytes", "RAM held by images, by the label of their store.", _labelled("ram_bytes"), "label"),
    Series("namespaces", "Namespaces: models, codecs, layouts, tenants.", "namespaces"),
)

SSD_EVENTS = (  # of `SsdStats`
    Series("ssd_written_files", "Files written.", "written_files"),
    Series("ssd_written_bytes", "Bytes written.", "written_bytes"),
    Series("ssd_read_files", "Files read.", "read_files"),
    Series("ssd_read_bytes", "Bytes read.", "read_bytes"),
    Series("ssd_refused_writes", "Writes that found queue or SSD full; most are tried again.", "dropped"),
    Series("ssd_failed_batches", "Batches of writes that failed.", "errors"),
    Series("ssd_unreadable_files", "Files that could not be read for now.", "unreadable"),
    Series("ssd_quarantined_files", "Files moved to quarantine/, at the opening too.", "quarantined"),
)

DURATIONS = (  # since the cache was opened, of `Stats.seconds`
    Series("store", "What a store took.", "store"),
    Series(
        "fetch",
        "What a fetch took, by whether RAM had anything of the prompt.",
        {"hit": "fetch_hit", "miss": "fetch_miss"},
        "result",
    ),
    Series("promote", "What a promotion took from its start to its last image.", "promote"),
)

SSD_DURATIONS = (  # of `SsdStats`
    Series("ssd_spill", "From the queue to a file that is durable and indexed.", "spill_seconds"),
    Series("ssd_read", "What it took to read and check a file.", "read_seconds"),
)

SSD_STATE = (  # of `SsdStats`
    Series("ssd_used_bytes", "What the directory holds, with what is queued for it.", "used"),
    Series("ssd_limit_bytes", "What the directory may take.", "limit"),
    Series("ssd_disk_bytes", "What the directory takes on the disk.", "disk"),
    Series("ssd_reserve_bytes", "Room of the limit that is kept for the index to grow.", "reserve"),
    Series("ssd_quarantine_bytes", "What the files in quarantine/ take.", "quarantine_bytes"),
    Series("ssd_queued_files", "Files that wait to be written.", "queued_files"),
    Series("ssd_queued_bytes", "Bytes that wait to be written.", "queued_bytes"),
    Series("ssd_files", "Files of images.", "files"),
)

REMOTE_EVENTS = (  # of `RemoteStats`
    Series("remote_asks", "Round trips in which the engine was asked what it has.", "asks"),
    Series("remote_read_images", "Images read.", "read_images"),
    Series("remote_read_bytes", "Bytes read.", "read_bytes"),
    Series("remote_written_images", "Images sent.", "written_images"),
    Series("remote_written_bytes", "Bytes sent.", "written_bytes"),
    Series("remote_known_images", "Images that were not sent because the engine had them.", "known"),
    Series("remote_dropped_images", "Images that were to be sent and were not.", "dropped"),
    Series(
        "remote_refused_images", "Images that were not what their names say: another key's, damaged, forged.", "refused"
    ),
    Series("remote_timeouts", "Questions and reads that were given up because they took too long.", "timeouts"),
    Series("remote_skipped_prompts", "Prompts that were not read because computing them is quicker.", "skipped"),
    Series("remote_errors", "Calls of the engine that failed.", "errors"),
)

REMOTE_DURATIONS = (  # of `RemoteStats`
    Series("remote_ask", "What it took to ask the engine what it has.", "ask_seconds"),
    Series("remote_read", "What it took to read and unseal an image.", "read_seconds"),
    Series("remote_write", "What it took to seal and send an image.", "write_seconds"),
)

REMOTE_STATE = (  # of `RemoteStats`
    Series("remote_up", "1 while the engine answers; 0 while it is left alone because it failed.", "reading"),
    Series("remote_writable", "1 while the engine takes images.", "writing"),
    Series("remote_queued_images", "Images that wait to be sent.", "queued"),
)

SERVER_EVENTS = (  # since the server started, of a `ServerCollector`
    Series(
        "canonical_prompts",
        "Prompts that a rule of canonical text has changed.",
        lambda server: server.changed(),
        "rule",
    ),
    Series(
        "next_turn_tokens",
        "Tokens that a chat's next turn begins with: computed while there was no request, and how many of these a request "
        "has hit since.",
        lambda server: server.next_turns(),
        "what",
    ),
)


class CacheCollector(Collector):
    """A PrefixCache's metrics, read when they are asked for. One for each process: metrics don't say of which cache.

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
        yield from _metrics(HistogramMetricFamily, DURATIONS, SimpleNamespace(**stats.seconds))
        if stats.ssd is not None:
            yield from _metrics(CounterMetricFamily, SSD_EVENTS, stats.ssd)
            yield from _metrics(GaugeMetricFamily, SSD_STATE, stats.ssd)
            yield from _metrics(HistogramMetricFamily, SSD_DURATIONS, stats.ssd)
        if stats.remote is not None:
            yield from _metrics(CounterMetricFamily, REMOTE_EVENTS, stats.remote)
            yield from _metrics(GaugeMetricFamily, REMOTE_STATE, stats.remote)
            yield from _metrics(HistogramMetricFamily, REMOTE_DURATIONS, stats.remote)


class ServerCollector(Collector):
    """What `prefixcache serve` counts beside its cache, read when it is asked for: prompts that each rule of canonical text
    changed, and tokens of next turns that were computed ahead, and hit.
    """

    def __init__(self, changed: Callable[[], ByLabel], next_turns: Callable[[], ByLabel]):
        self.changed, self.next_turns = changed, next_turns

    def collect(self) -> Iterator[Metric]:
        yield from _metrics(CounterMetricFamily, SERVER_EVENTS, self)


def render(*collectors: Collector) -> bytes:
    """Return the page that /metrics answers with; its content type is CONTENT_TYPE."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def _metrics(family: Any, table: tuple[Series, ...], snapshot: Any) -> Iterator[Metric]:
    for series in table:
        labels = [series.label] if series.label else []
        unit = "_seconds" if family is HistogramMetricFamily else ""
        metric = family(f"prefixcache_{series.name}{unit}", series.text, labels=labels)
        for label, value in series.values(snapshot).items():
            numbers = (_buckets(value), value.total) if isinstance(value, Observed) else (float(value),)
            metric.add_metric([label] if labels else [], *numbers)
        yield metric


def _buckets(observed: Observed) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, observed.bounds), "+Inf"]
    return list(zip(bounds, map(float, observed.counts), strict=True))
