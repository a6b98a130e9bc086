"""Metrics: the page says what `stats()` says, all of it, once; nothing goes down; a cache that is closed is no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

import prefixcache
from prefixcache import PrefixCache
from prefixcache.integrations.prometheus import CONTENT_TYPE, CacheCollector, render
from prefixcache.ssd import SsdStats
from prefixcache.stats import Counters, Stats
from tests import states

LONG = list(range(1000))
Samples = dict[tuple[str, str], float]  # by name and the value of the label, "" for none

# Metrics and the fields that they are. What a label tells apart adds up to what the fields say.
EVENTS = {
    "fetches": "fetches", "promoted_tokens": "promoted_tokens", "promoted_bytes": "promoted_bytes", "stores": "stores",
    "stored_bytes": "stored_bytes", "recoded_tokens": "recoded_tokens", "dropped_images": "dropped",
    "dropped_bytes": "dropped_bytes", "forgotten_images": "forgotten", "corrupt_images": "corrupt",
    "write_errors": "write_errors", "collisions": "collisions",
}  # fmt: skip
LABELLED = {
    ("fetch_tokens", "hit"): "hit_tokens", ("store_tokens", "new"): "stored_tokens",
    ("store_tokens", "shared"): "shared_tokens", ("store_tokens", "unkept"): "unkept_tokens",
    ("evicted_images", "ram"): "evicted", ("evicted_images", "ssd"): "ssd_evicted",
}  # fmt: skip
STATE = {
    "ram_limit_bytes": "ram_limit", "ram_configured_bytes": "ram_configured",
    "ram_peak_bytes": "ram_peak", "namespaces": "namespaces", "blocks": "blocks",
    "pinned_images": "pinned",
}  # fmt: skip
SSD_EVENTS = {
    "written_files": "written_files", "written_bytes": "written_bytes", "read_files": "read_files",
    "read_bytes": "read_bytes", "refused_writes": "dropped", "failed_batches": "errors",
    "unreadable_files": "unreadable",
}  # fmt: skip
SSD_STATE = {
    "used_bytes": "used", "limit_bytes": "limit", "disk_bytes": "disk", "reserve_bytes": "reserve",
    "quarantine_bytes": "quarantine_bytes", "queued_files": "queued_files", "queued_bytes": "queued_bytes",
    "files": "files",
}  # fmt: skip


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., PrefixCache]]:
    caches = []

    def open_one(**values: Any) -> PrefixCache:
        caches.append(
            PrefixCache(**{"ram": "10MB", "codec": "raw", "ssd_dir": tmp_path / "ssd", "ssd": "50MB"} | values)
        )
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close()


def scraped(*collectors: Any) -> tuple[Samples, dict[str, str]]:
    """The samples of a page, and the type of each metric, as a scraper reads them."""
    samples: Samples = {}
    types: dict[str, str] = {}
    for family in text_string_to_metric_families(render(*collectors).decode()):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            if sample.name == "prefixcache_info":
                continue
            ((_, label),) = sample.labels.items() or [("", "")]
            assert (sample.name, label) not in samples
            samples[sample.name, label] = sample.value
            types[sample.name] = family.type
    return samples, types


def use(cache: PrefixCache) -> None:
    """Something of everything: stores that share, hits, misses, evictions, promotions, a damaged file."""
    for tokens, label in ((LONG, "system"), ([*LONG[:500], *LONG[700:]], "user"), (LONG, "")):
        cache.store(tokens, states.hybrid(tokens), model="m", label=label)
    cache.fetch([*LONG, 5], model="m")
    cache.fetch([7, 8, 9], model="m")
    assert cache.flush(30)
    cache.trim_to(0)
    cache.promote(LONG, model="m").result(30)
    cache.pin(LONG, model="m")
    cache.trim_to(0)
    for spoilt in (cache.settings.ssd_dir / "snapshots").rglob("*.safetensors"):  # type: ignore[operator]
        spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
    cache.promote([*LONG[:500], *LONG[700:]], model="m").result(30)


def expected(stats: Stats) -> Samples:
    counters, ssd = stats.counters, stats.ssd
    found = {(f"prefixcache_{name}_total", ""): getattr(counters, field) for name, field in EVENTS.items()}
    found |= {(f"prefixcache_{name}_total", of): getattr(counters, field) for (name, of), field in LABELLED.items()}
    found["prefixcache_fetch_tokens_total", "miss"] = counters.asked_tokens - counters.hit_tokens
    found |= {(f"prefixcache_{name}", ""): getattr(stats, field) for name, field in STATE.items()}
    found |= {
        ("prefixcache_images", "ram"): stats.images_in_ram, ("prefixcache_images", "ssd"): stats.images_on_ssd,
        ("prefixcache_ram_bytes", "images"): stats.ram_images - stats.ram_queued,
        ("prefixcache_ram_bytes", "queued"): stats.ram_queued, ("prefixcache_ram_bytes", "nodes"): stats.ram_nodes,
        ("prefixcache_ram_bytes", "reserved"): stats.ram_reserved,
    }  # fmt: skip
    for label, counted in stats.labels.items():
        found["prefixcache_sequences", label or "none"] = counted.sequences
        found["prefixcache_ram_image_bytes", label or "none"] = counted.ram_bytes
    if ssd is not None:
        found |= {(f"prefixcache_ssd_{name}_total", ""): getattr(ssd, field) for name, field in SSD_EVENTS.items()}
        found |= {(f"prefixcache_ssd_{name}", ""): getattr(ssd, field) for name, field in SSD_STATE.items()}
    return found


def test_the_page_says_what_stats_says_after_stores_fetches_promotions_and_damage(
    opened: Callable[..., PrefixCache],
) -> None:
    cache = opened()
    use(cache)
    stats = cache.stats()
    samples, _ = scraped(CacheCollector(cache))
    assert samples == expected(stats)
    for name in ("promoted_tokens", "evicted_images", "corrupt_images", "ssd_read_files", "ssd_written_files"):
        assert any(value for (metric, _), value in samples.items() if metric == f"prefixcache_{name}_total"), name
    assert samples["prefixcache_pinned_images", ""] > 0


def test_labels_add_up(opened: Callable[..., PrefixCache]) -> None:
    cache = opened()
    use(cache)
    samples, _ = scraped(CacheCollector(cache))
    stats = cache.stats()

    def total(name: str) -> float:
        return sum(value for (metric, _), value in samples.items() if metric == f"prefixcache_{name}")

    assert total("ram_bytes") == stats.ram_held
    assert total("fetch_tokens_total") == stats.counters.asked_tokens
    assert total("store_tokens_total") == 1000 + 800 + 1000
    assert total("sequences") == stats.sequences
    assert total("ram_image_bytes") == stats.ram_images


def test_a_cache_without_an_ssd_has_no_ssd_metrics(opened: Callable[..., PrefixCache]) -> None:
    cache = opened(ssd_dir=None)
    cache.store(LONG, states.sliceable(LONG), model="m")
    samples, _ = scraped(CacheCollector(cache))
    assert samples == expected(cache.stats())
    assert not [name for name, _ in samples if "_ssd_" in name]


def test_no_field_of_stats_is_forgotten() -> None:
    """What is no metric: sums of others, texts, what is counted elsewhere."""
    counters = {*EVENTS.values(), *LABELLED.values(), "asked_tokens"}
    assert counters == {field.name for field in fields(Counters)}
    shown = {"ram_images", "ram_queued", "ram_nodes", "ram_reserved", "images_in_ram", "images_on_ssd", "labels"}
    summed, told = {"ram_held", "sequences"}, {"ram_setting", "codec", "kernels", "counters", "ssd"}
    assert {*STATE.values(), *shown, *summed, *told} == {field.name for field in fields(Stats)}
    assert {*SSD_EVENTS.values(), *SSD_STATE.values(), "corrupt", "last_error"} == set(SsdStats._fields)


def test_counters_only_go_up_and_are_counters(opened: Callable[..., PrefixCache]) -> None:
    cache, before = opened(ram="150KB"), Samples()
    collector = CacheCollector(cache)
    for turn in range(6):
        tokens = [*LONG[:300], *[turn] * 400]
        cache.store(tokens, states.hybrid(tokens), model="m")
        cache.promote(LONG[:700], model="m").result(30)
        cache.fetch(tokens, model="m")
        if turn == 4:
            cache.clear()
        samples, types = scraped(collector)
        assert {types[name] for name, _ in samples if name.endswith("_total")} == {"counter"}
        assert {types[name] for name, _ in samples if not name.endswith("_total")} == {"gauge"}
        for key, value in before.items():
            assert not key[0].endswith("_total") or samples[key] >= value, key
        before = samples
    cache.close()
    samples, _ = scraped(collector)
    assert all(samples[key] >= value for key, value in before.items() if key[0].endswith("_total"))


def test_a_closed_cache_gives_its_last_counts_and_no_ram(opened: Callable[..., PrefixCache]) -> None:
    cache = opened()
    use(cache)
    collector = CacheCollector(cache)
    counted = cache.stats().counters
    cache.close()
    samples, _ = scraped(collector)
    assert samples["prefixcache_fetch_tokens_total", "hit"] == counted.hit_tokens
    assert not any(value for (name, _), value in samples.items() if name == "prefixcache_ram_bytes")
    assert samples["prefixcache_ssd_files", ""] > 0


def test_the_info_names_version_and_codec(opened: Callable[..., PrefixCache]) -> None:
    cache = opened(codec="turboquant:4:3")
    (info,) = (
        sample
        for family in text_string_to_metric_families(render(CacheCollector(cache)).decode())
        for sample in family.samples
        if sample.name == "prefixcache_info"
    )
    assert info.value == 1
    assert (info.labels["version"], info.labels["codec"]) == (prefixcache.__version__, "turboquant k4 v3")
    assert info.labels["kernels_cpu"] == cache.stats().kernels["cpu"]


def test_a_page_joins_collectors_and_names_its_format(opened: Callable[..., PrefixCache]) -> None:
    other = Counter("requests", "Requests that came.", registry=None)
    other.inc(3)
    samples, _ = scraped(CacheCollector(opened()), other)
    assert samples["requests_total", ""] == 3
    assert ("prefixcache_blocks", "") in samples
    assert CONTENT_TYPE.startswith("text/plain; version=")


def test_it_can_be_registered_beside_a_servers_own_metrics(opened: Callable[..., PrefixCache]) -> None:
    cache, registry = opened(), CollectorRegistry(auto_describe=True)
    registry.register(CacheCollector(cache))
    cache.store(LONG, states.sliceable(LONG), model="m")
    assert registry.get_sample_value("prefixcache_store_tokens_total", {"result": "new"}) == 1000
