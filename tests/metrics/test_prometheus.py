"""Metrics: the page says what `stats()` says, all of it, once; nothing goes down; a cache that is closed is no error. And
whose a hit is: RAM's or the SSD's.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

import prefixcache
from prefixcache import PrefixCache
from prefixcache.metrics.histogram import Histogram, Observed
from prefixcache.metrics.prometheus import CONTENT_TYPE, CacheCollector, render
from prefixcache.metrics.stats import Counters, Stats
from prefixcache.remote.stats import RemoteStats
from prefixcache.ssd import SsdStats
from tests.models import states
from tests.remote.fleet import sent

LONG = list(range(1000))
Samples = dict[tuple[str, str], float]  # by name and the value of the label, "" for none


def alike(names: str) -> dict[str, str]:
    """Metrics that are called as their fields."""
    return {name: name for name in names.split()}


# Metrics and the fields that they are. What a label tells apart adds up to what the fields say.
EVENTS = {
    **alike("fetches promoted_tokens promoted_bytes stores stored_bytes recoded_tokens dropped_bytes write_errors"),
    **alike("declined_hits declined_hit_tokens failed_hits hot_hit_tokens idle_bytes remote_promoted_images"),
    "dropped_images": "dropped",
    "forgotten_images": "forgotten",
    "corrupt_images": "corrupt",
    "denied_reservations": "denied",
    "not_finite_stores": "not_finite",
    "declined_images": "declined",
    "other_form_fetches": "of_other_form",
}
LABELLED = {
    ("fetch_tokens", "hit"): "hit_tokens",
    ("store_tokens", "new"): "stored_tokens",
    ("hit_tokens", "ram"): "ram_hit_tokens",
    ("hit_tokens", "ssd"): "ssd_hit_tokens",
    ("hit_tokens", "remote"): "remote_hit_tokens",
    ("store_tokens", "shared"): "shared_tokens",
    ("store_tokens", "unkept"): "unkept_tokens",
    ("evicted_images", "ram"): "evicted",
    ("evicted_images", "ssd"): "ssd_evicted",
}
STATE = {
    **alike("namespaces blocks hot_prompts hot_bytes leases leased_bytes"),
    "ram_limit_bytes": "ram_limit",
    "ram_configured_bytes": "ram_configured",
    "ram_peak_bytes": "ram_peak",
    "pinned_images": "pinned",
}
SSD_EVENTS = {
    **alike("written_files written_bytes read_files read_bytes"),
    "refused_writes": "dropped",
    "failed_batches": "errors",
    "unreadable_files": "unreadable",
    "quarantined_files": "quarantined",
}
SECONDS = {"store": "store", "fetch|hit": "fetch_hit", "fetch|miss": "fetch_miss", "promote": "promote"}
SSD_SECONDS = {"ssd_spill": "spill_seconds", "ssd_read": "read_seconds"}
SSD_STATE = {
    **alike("quarantine_bytes queued_files queued_bytes files"),
    **{f"{name}_bytes": name for name in ("used", "limit", "disk", "reserve")},
}

REMOTE_EVENTS = {
    **alike("asks read_images read_bytes written_images written_bytes timeouts errors"),
    **{f"{name}_images": name for name in ("known", "dropped", "refused")},
    "skipped_prompts": "skipped",
}
REMOTE_STATE = {"up": "reading", "writable": "writing", "queued_images": "queued"}
REMOTE_SECONDS = {"remote_ask": "ask_seconds", "remote_read": "read_seconds", "remote_write": "write_seconds"}


def scraped(*collectors: Any) -> tuple[Samples, dict[str, str]]:
    """The samples of a page, and the type of each metric, as a scraper reads them. Without histograms."""
    samples: Samples = {}
    types: dict[str, str] = {}
    for family in text_string_to_metric_families(render(*collectors).decode()):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            if sample.name == "prefixcache_info" or family.type == "histogram":
                continue
            ((_, label),) = sample.labels.items() or [("", "")]
            assert (sample.name, label) not in samples
            samples[sample.name, label] = sample.value
            types[sample.name] = family.type
    return samples, types


def timed(cache: PrefixCache) -> dict[str, Observed]:
    """The histograms of a page, by name and the value of the label."""
    found: dict[str, tuple[list[float], list[int], dict[str, float]]] = {}
    for family in text_string_to_metric_families(render(CacheCollector(cache)).decode()):
        if family.type != "histogram":
            continue
        name = family.name.removeprefix("prefixcache_").removesuffix("_seconds")
        for sample in family.samples:
            labels = dict(sample.labels)
            le = labels.pop("le", None)
            bounds, counts, ends = found.setdefault("|".join([name, *labels.values()]), ([], [], {}))
            if le is None:
                ends[sample.name.rpartition("_")[2]] = sample.value
            else:
                bounds.append(float(le))
                counts.append(int(sample.value))
    for bounds, counts, ends in found.values():
        assert bounds == sorted(bounds)
        assert bounds[-1] == float("inf")
        assert counts == sorted(counts)
        assert ends["count"] == counts[-1]
    return {
        name: Observed(tuple(bounds[:-1]), tuple(counts), ends["sum"]) for name, (bounds, counts, ends) in found.items()
    }


def use(cache: PrefixCache) -> None:
    """Something of everything: stores that share, hits, misses, evictions, promotions, a damaged file."""
    for tokens, label in ((LONG, "system"), ([*LONG[:500], *LONG[700:]], "user"), (LONG, "")):
        cache.store(cache.prompt(tokens, model="m").labelled(label), states.hybrid(tokens))
    cache.fetch([*LONG, 5], model="m")
    cache.fetch([7, 8, 9], model="m")
    assert cache.flush(30)
    cache.trim_to(0)
    cache.promote(LONG, model="m").result(30)
    cache.pin(LONG, model="m")
    cache.lease(LONG, model="m", ttl=3600)
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
        ("prefixcache_images", "ram"): stats.images_in_ram,
        ("prefixcache_images", "ssd"): stats.images_on_ssd,
        ("prefixcache_ram_bytes", "images"): stats.ram_images - stats.ram_queued,
        ("prefixcache_ram_bytes", "queued"): stats.ram_queued,
        ("prefixcache_ram_bytes", "nodes"): stats.ram_nodes,
        ("prefixcache_ram_bytes", "hot"): stats.ram_hot,
        ("prefixcache_ram_bytes", "reserved"): stats.ram_reserved,
    }
    for label, counted in stats.labels.items():
        found["prefixcache_sequences", label or "none"] = counted.sequences
        found["prefixcache_ram_image_bytes", label or "none"] = counted.ram_bytes
    if ssd is not None:
        found |= {(f"prefixcache_ssd_{name}_total", ""): getattr(ssd, field) for name, field in SSD_EVENTS.items()}
        found |= {(f"prefixcache_ssd_{name}", ""): getattr(ssd, field) for name, field in SSD_STATE.items()}
    if (remote := stats.remote) is not None:
        found |= {(f"prefixcache_remote_{n}_total", ""): getattr(remote, field) for n, field in REMOTE_EVENTS.items()}
        found |= {(f"prefixcache_remote_{n}", ""): float(getattr(remote, field)) for n, field in REMOTE_STATE.items()}
    return found


def test_the_page_says_what_stats_says_after_stores_fetches_promotions_and_damage(
    opened: Callable[..., PrefixCache],
) -> None:
    cache = opened()
    use(cache)
    assert cache.flush(20)  # else the writer changes what is counted in between
    stats = cache.stats()
    samples, _ = scraped(CacheCollector(cache))
    assert samples == expected(stats)
    for name in ("promoted_tokens", "evicted_images", "corrupt_images", "ssd_read_files", "ssd_written_files"):
        assert any(value for (metric, _), value in samples.items() if metric == f"prefixcache_{name}_total"), name
    assert samples["prefixcache_pinned_images", ""] > 0


def test_the_page_says_what_stats_says_of_a_remote_tier(opened: Callable[..., PrefixCache], tmp_path: Path) -> None:
    engine = f"file://{tmp_path / 'engine'}"
    (tmp_path / "engine").mkdir()
    cache, other = opened(remote=engine), opened(remote=engine, ssd_dir=None)
    cache.store(LONG, states.sliceable(LONG), model="m")
    cache.fetch(LONG, model="m")
    assert cache.flush(20)
    sent(cache)
    assert other.promote(LONG, model="m").result(20) == 768
    other.fetch(LONG, model="m")
    sent(other)
    for one in (cache, other):
        samples, _ = scraped(CacheCollector(one))
        assert samples == expected(one.stats())
        seconds, remote = timed(one), one.stats().remote
        assert remote is not None
        assert {name: seconds[name] for name in REMOTE_SECONDS} == {
            name: getattr(remote, field) for name, field in REMOTE_SECONDS.items()
        }
    assert samples["prefixcache_hit_tokens_total", "remote"] == 768
    assert samples["prefixcache_remote_up", ""] == 1


def test_stores_labelled_none_and_stores_without_a_label_are_counted_together(
    opened: Callable[..., PrefixCache],
) -> None:
    cache = opened()
    for tokens, label in ((LONG[:300], "none"), (LONG[300:600], "")):
        cache.store(cache.prompt(tokens, model="m").labelled(label), states.hybrid(tokens))
    samples, _ = scraped(CacheCollector(cache))
    assert samples["prefixcache_sequences", "none"] == cache.stats().sequences == 2


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
    shown = {
        "ram_images",
        "ram_queued",
        "ram_nodes",
        "ram_hot",
        "ram_reserved",
        "images_in_ram",
        "images_on_ssd",
        "labels",
    }
    summed, told = {"ram_held", "sequences"}, {"ram_setting", "codec", "kernels", "counters", "ssd", "remote"}
    assert {*STATE.values(), *shown, *summed, *told, "seconds"} == {field.name for field in fields(Stats)}
    ssd = {*SSD_EVENTS.values(), *SSD_STATE.values(), *SSD_SECONDS.values()}
    assert {*ssd, "corrupt", "last_error"} == set(SsdStats._fields)
    remote = {*REMOTE_EVENTS.values(), *REMOTE_STATE.values(), *REMOTE_SECONDS.values()}
    assert {*remote, "engine", "last_error"} == set(RemoteStats._fields)


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


# -- durations --------------------------------------------------------------------------------------------------------


def test_every_call_and_every_file_is_timed_once(opened: Callable[..., PrefixCache]) -> None:
    cache = opened()
    use(cache)
    stats, page = cache.stats(), timed(cache)
    assert stats.ssd is not None
    assert {name: found.number for name, found in page.items()} == {
        "store": stats.counters.stores,
        "fetch|hit": 1,
        "fetch|miss": 1,
        "promote": 2,
        "ssd_spill": stats.ssd.written_files,
        "ssd_read": stats.ssd.read_files,
    }
    assert page == {
        **{name: stats.seconds[field] for name, field in SECONDS.items()},
        **{name: getattr(stats.ssd, field) for name, field in SSD_SECONDS.items()},
    }
    assert all(found.total > 0 for found in page.values())


def test_a_cache_without_an_ssd_times_its_own_calls_only(opened: Callable[..., PrefixCache]) -> None:
    cache = opened(ssd_dir=None)
    cache.store(LONG, states.sliceable(LONG), model="m")
    assert timed(cache).keys() == SECONDS.keys()


def test_a_call_that_is_refused_is_not_timed(opened: Callable[..., PrefixCache]) -> None:
    cache = opened(ssd_dir=None)
    with pytest.raises(ValueError, match="empty"):
        cache.store([], states.sliceable([]), model="m")
    with pytest.raises(ValueError, match="leave"):
        cache.fetch(LONG, model="m", leave=-1)
    assert not any(found.number for found in timed(cache).values())


def test_stats_with_durations_are_plain_json(opened: Callable[..., PrefixCache]) -> None:
    cache = opened()
    use(cache)
    plain = json.loads(json.dumps(cache.stats().as_dict(), allow_nan=False))
    assert plain["seconds"]["store"]["count"] == 3
    assert plain["ssd"]["spill_seconds"]["count"] == plain["ssd"]["written_files"]


def test_a_histogram_forgets_nothing_that_threads_tell_it_at_once() -> None:
    histogram = Histogram((1.0, 2.0))
    threads = [
        threading.Thread(target=lambda: [histogram.observe(value) for value in (0.5, 1.0, 1.5, 9.0) * 500])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert histogram.read() == Observed((1.0, 2.0), (4000, 6000, 8000), 12.0 * 2000)


# -- whose a hit is ---------------------------------------------------------------------------------------------------


def by_tier(cache: PrefixCache) -> tuple[int, int]:
    """Tokens hit: RAM's and the SSD's."""
    counters = cache.stats().counters
    assert counters.ram_hit_tokens + counters.ssd_hit_tokens == counters.hit_tokens
    return counters.ram_hit_tokens, counters.ssd_hit_tokens


def keep_on_ssd(cache: PrefixCache, *prompts: list[int], make: Any = states.sliceable) -> None:
    """These prompts, and nothing in RAM."""
    for tokens in prompts:
        cache.store(tokens, make(tokens), model="m")
    assert cache.flush(30)
    cache.trim_to(0)


@pytest.mark.parametrize("make", [states.sliceable, states.windowed, states.hybrid])
def test_the_first_hit_of_what_was_promoted_is_the_ssds_and_the_next_is_rams(
    opened: Callable[..., PrefixCache], make: Any
) -> None:
    cache = opened()
    keep_on_ssd(cache, LONG, make=make)
    cache.fetch([*LONG, 5], model="m")
    assert by_tier(cache) == (0, 0)
    assert cache.promote(LONG, model="m").result(30) == 1000
    cache.fetch([*LONG, 5], model="m")
    assert by_tier(cache) == (0, 1000)
    cache.fetch([*LONG, 6], model="m")
    assert by_tier(cache) == (1000, 1000)


def test_what_ram_had_of_a_promoted_prompt_is_rams(opened: Callable[..., PrefixCache]) -> None:
    cache = opened()
    keep_on_ssd(cache, LONG)
    cache.promote(LONG[:512], model="m").result(30)
    cache.fetch([*LONG[:512], 5], model="m")
    cache.promote(LONG, model="m").result(30)
    cache.fetch([*LONG, 5], model="m")
    assert by_tier(cache) == (512, 512 + 488)


def test_a_prefix_that_two_promoted_prompts_share_is_the_ssds_once(opened: Callable[..., PrefixCache]) -> None:
    cache, other = opened(), [*LONG[:512], *range(5000, 5500)]
    keep_on_ssd(cache, LONG, other)
    for tokens in (LONG, other):
        assert cache.promote(tokens, model="m").result(30) == len(tokens)
    for tokens in (LONG, other):
        cache.fetch([*tokens, 5], model="m")
    assert by_tier(cache) == (512, 1000 + 500)


def test_what_leaves_ram_before_it_is_hit_is_not_the_ssds_until_it_is_brought_again(
    opened: Callable[..., PrefixCache],
) -> None:
    cache = opened()
    keep_on_ssd(cache, LONG)
    for _ in range(2):
        cache.promote(LONG, model="m").result(30)
        cache.trim_to(0)
        cache.fetch([*LONG, 5], model="m")
    assert by_tier(cache) == (0, 0)
    cache.promote(LONG, model="m").result(30)
    cache.fetch([*LONG, 5], model="m")
    assert by_tier(cache) == (0, 1000)


def test_no_token_is_hit_twice_by_the_ssd_for_one_promotion(opened: Callable[..., PrefixCache]) -> None:
    """Many prompts with shared beginnings, promoted, hit and evicted in any order; the SSD is owed no more than it gave."""
    chance, cache = random.Random(7), opened(ram="2MB")
    prompts = [[*LONG[: 256 * a], *range(9000 + 100 * a, 9000 + 100 * a + 300)] for a in range(4)]
    keep_on_ssd(cache, *prompts)
    for _ in range(40):
        tokens = chance.choice(prompts)
        if chance.random() < 0.6:
            cache.promote(tokens, model="m").result(30)
        if chance.random() < 0.7:
            cache.fetch([*tokens[: chance.randrange(1, len(tokens) + 1)], -1], model="m")
        if chance.random() < 0.2:
            cache.trim_to(0)
    ram, ssd = by_tier(cache)
    assert ram
    assert 0 < ssd <= cache.stats().counters.promoted_tokens


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_a_reservation_without_room_is_counted_and_survives_the_end_of_the_cache(
    opened: Callable[..., PrefixCache],
) -> None:
    cache = opened()
    assert cache.reserve(10**12) is None
    denied = cache.stats().counters.denied
    assert denied == 1
    cache.close()
    samples, _ = scraped(CacheCollector(cache))
    assert samples["prefixcache_denied_reservations_total", ""] == denied


def test_files_set_aside_are_counted_those_found_at_the_opening_too(
    opened: Callable[..., PrefixCache], tmp_path: Path
) -> None:
    cache = opened()
    keep_on_ssd(cache, LONG)
    files = sorted((tmp_path / "ssd" / "rows").rglob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    for start in range(2):
        cache.promote(LONG, model="m").result(30)
        samples, _ = scraped(CacheCollector(cache))
        assert samples["prefixcache_ssd_quarantined_files_total", ""] == 1, start
        if not start:
            cache.close()
            (tmp_path / "ssd" / "rows" / "stray").write_bytes(b"not an image")
            cache = opened()
