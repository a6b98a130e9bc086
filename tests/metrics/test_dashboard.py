"""dashboards/grafana.json: a dashboard that Grafana 10 imports, and every query asks for what `CacheCollector` exports. The
manual names the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache import PrefixCache
from prefixcache.metrics.prometheus import CacheCollector, ServerCollector, render
from prefixcache.servers.canonical import CanonicalText
from prefixcache.servers.cold_requests import ColdRequests
from prefixcache.servers.prompt_parts import Part
from prefixcache.tiers.parting import NOTHING_STORED, Parting
from tests.models import states

ROOT = Path(__file__).parents[2]
FILE = ROOT / "dashboards" / "grafana.json"
COLUMNS = 24
COUNTS = dict.fromkeys(("computed", "hit"), 0.0)
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
NAME = re.compile(r"prefixcache_\w+")
SELECTOR = re.compile(r"(prefixcache_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)=~?"([^"]*)"')
GROUPING = re.compile(r"by \(([^)]*)\)")
SCRAPED = {"instance", "job"}  # labels that the scrape adds


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, set[str]]]]:
    """What a page has: names of samples -> the metric's type, and its labels with their values."""
    found: dict[str, tuple[str, dict[str, set[str]]]] = {}
    folder = tmp_path_factory.mktemp("dashboard") / "ssd"
    engine = f"file://{folder.parent / 'engine'}"
    (folder.parent / "engine").mkdir()
    with PrefixCache(ram="10MB", codec="raw", ssd_dir=folder, ssd="50MB", remote=engine) as cache:
        tokens = list(range(300))
        cache.store(tokens, states.sliceable(tokens), model="m")
        cold = ColdRequests()
        cold.tell("a", Parting(300, 0, 0, NOTHING_STORED), lambda: Part("text"))
        page = render(CacheCollector(cache), ServerCollector(CanonicalText().changed, COUNTS.copy), cold).decode()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            _, labels = found.setdefault(sample.name, (family.type, {}))
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def shown(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every panel, those in a folded row too."""
    for panel in panels:
        yield panel
        yield from shown(panel.get("panels", []))


def queries(board: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, PromQL) of every query."""
    return [(panel["title"], one["expr"]) for panel in shown(board["panels"]) for one in panel.get("targets", [])]


def test_it_can_be_imported_into_any_grafana_from_10_on(board):
    assert board["schemaVersion"] == 39
    assert board["id"] is None
    (source,) = board["__inputs"]
    assert (source["name"], source["type"], source["pluginId"]) == ("DS_PROMETHEUS", "datasource", "prometheus")
    needed = {(one["type"], one["id"]): one["version"] for one in board["__requires"]}
    assert needed["grafana", "grafana"] == "10.0.0"
    kinds = {panel["type"] for panel in shown(board["panels"])} - {"row"}
    assert {("panel", kind) for kind in kinds} <= needed.keys()
    assert {one["name"] for one in board["templating"]["list"]} == {"DS_PROMETHEUS", "instance"}


def test_every_panel_and_query_takes_the_chosen_data_source(board):
    for panel in shown(board["panels"]):
        if panel["type"] != "row":
            assert panel["datasource"] == SOURCE, panel["title"]
            assert panel["targets"], panel["title"]
            assert panel["description"].endswith("."), panel["title"]
            assert all(one["datasource"] == SOURCE for one in panel["targets"])
            assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])


def test_ids_and_titles_are_unique(board):
    panels = list(shown(board["panels"]))
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_no_panel_lies_on_another_or_beyond_the_edge(board):
    places = [(panel["title"], panel["gridPos"]) for panel in board["panels"]]
    for title, at in places:
        assert at["x"] >= 0, title
        assert at["w"] > 0, title
        assert at["x"] + at["w"] <= COLUMNS, title
        assert at["h"] > 0, title
    for (one, a), (other, b) in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one, other)


def test_every_metric_that_is_asked_for_is_exported_with_its_labels(board, exported):
    asked = set()
    for title, query in queries(board):
        labels = {"le"} | SCRAPED
        for name, inside in SELECTOR.findall(query):
            asked.add(name)
            assert name in exported, (title, name)
            of = exported[name][1]
            labels |= of.keys()
            for label, value in MATCHER.findall(inside):
                assert label in SCRAPED or value in of[label], (title, name, label, value)
        for names in GROUPING.findall(query):
            assert {label.strip() for label in names.split(",")} <= labels, (title, names)
        plain = re.sub(r'"[^"]*"', "", query)
        assert set(NAME.findall(plain)) == {name for name, _ in SELECTOR.findall(query)}, title
    assert len(asked) > 30


def test_every_query_is_of_the_chosen_server(board):
    for title, query in queries(board):
        for _, inside in SELECTOR.findall(query):
            assert 'instance=~"$instance"' in inside, title


def test_counters_are_rates_over_a_sensible_time_and_gauges_are_not(board, exported):
    for title, query in queries(board):
        for name, _ in SELECTOR.findall(query):
            counting = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert counting == (exported[name][0] in ("counter", "histogram")), name
            wrapped = re.findall(rf"(rate|increase)\({name}\{{[^}}]*\}}\[([^\]]*)\]\)", query)
            assert bool(wrapped) == counting, (title, name)
            for function, window in wrapped:
                assert window == "$__rate_interval" or (function == "increase" and window in ("1h", "1d")), (
                    title,
                    window,
                )


def test_brackets_match(board):
    pairs = {")": "(", "]": "[", "}": "{"}
    for title, query in queries(board):
        opened: list[str] = []
        for character in re.sub(r'"[^"]*"', "", query):
            if character in pairs.values():
                opened.append(character)
            elif character in pairs:
                assert opened, title
                assert opened.pop() == pairs[character], title
        assert not opened, title


def test_what_operators_must_see_is_there(board):
    asked = " ".join(query for _, query in queries(board))
    for metric in (
        "hit_tokens_total",
        "fetch_tokens_total",
        "ram_bytes",
        "ram_limit_bytes",
        "ssd_used_bytes",
        "ssd_limit_bytes",
        "ssd_spill_seconds_bucket",
        "promote_seconds_bucket",
        "ssd_read_seconds_bucket",
        "store_seconds_bucket",
        "fetch_seconds_bucket",
        "ssd_written_bytes_total",
        "dropped_images_total",
        "ssd_quarantined_files_total",
        "denied_reservations_total",
        "write_errors_total",
        "evicted_images_total",
        "ssd_queued_bytes",
        "remote_up",
        "remote_refused_images_total",
        "remote_written_bytes_total",
        "remote_read_bytes_total",
    ):
        assert f"prefixcache_{metric}" in asked, metric


def test_the_manual_names_every_metric_and_no_other(exported):
    ends = re.compile(r"_(bucket|sum|count)$")
    timed = {ends.sub("", name) for name, (kind, _) in exported.items() if kind == "histogram"}
    counted = {name for name, (kind, _) in exported.items() if kind != "histogram"}
    told = set(NAME.findall((ROOT / "docs" / "operating.md").read_text()))
    assert (timed | counted) - told == set()
    assert {name if ends.sub("", name) not in timed else ends.sub("", name) for name in told} <= timed | counted
