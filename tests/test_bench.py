"""Every bench runs, at a tiny scale, and what it counts (not what it times) is as it must be."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench import report, server, server_load
from tools.bench.__main__ import BENCHES
from tools.bench.serving import Span

ROOT = report.ROOT
NAMES = [name for group in BENCHES.values() for name in group]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    """What a bench does in fresh processes is done in this one: their start is most of a tiny bench's time."""
    monkeypatch.setattr(report, "scratch_parent", str(tmp_path))
    monkeypatch.setattr(report, "in_child", _in_this_process)


def _in_this_process(module, function, *args):
    found = getattr(importlib.import_module(f"tools.bench.{module}"), function)(*args)
    return json.loads(json.dumps(found))


def figures(name):
    (bench,) = [group[name] for group in BENCHES.values() if name in group]
    return list(bench("tiny"))


@pytest.mark.parametrize(
    "name",
    [
        "spilled",
        "spill",
        "promote",
        "opening",
        "verify",
        "resident",
        "nodes",
        "decode-cpu",
        "encode-cpu",
        "server-divergent",
    ],
)
def test_a_bench_runs(name, tmp_path):
    found = figures(name)
    assert found
    assert all(figure.name and figure.measured for figure in found)
    assert not list(tmp_path.iterdir()), "a bench left files behind"
    report.table_of(found)
    json.dumps(report.as_json(found, "tiny"))


def test_a_lookup_visits_its_own_blocks_and_a_bisection_more():
    (visits,) = [figure for figure in figures("match") if figure.name.startswith("nodes visited")]
    assert visits.met, visits
    assert visits.raw["seen"] >= 127


def test_a_lookup_among_twins_visits_a_bisection_of_them():
    (twins,) = figures("siblings")
    assert max(twins.raw["counted"], twins.raw["seen"]) <= 3 + 2 * 6 < 64, twins  # 64 twins


def test_conversations_keep_what_they_share_once():
    aligned, inside = figures("conversations")
    assert aligned.met, aligned
    assert inside.raw["images"] / inside.raw["unique"] < 1.10  # the block in which the chats part is each one's own


@pytest.mark.parametrize("name", ["hybrid", "sliding", "bits"])
def test_bytes_counted_meet_their_bar(name):
    assert all(figure.met for figure in figures(name))


def test_requests_that_are_given_up_cost_no_error_and_no_budget():
    errors, budget, growth = figures("server-cancels")
    assert errors.met, errors
    assert budget.met, budget
    assert growth.raw["rss"]


def test_unique_tokens_are_those_of_the_trie_of_all_prompts():
    prompts = [[1, 2, 3], [1, 2, 4, 5], [7], [1, 2], [1, 2, 3, 6], [1, 2, 3]]
    assert server.unique_tokens(prompts) == len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))}) == 7


def test_a_gap_between_steps_leaves_out_what_computes_prompts():
    spans = [
        Span("step", 0.0, 1.0, 3), Span("prefill", 1.0, 4.0, 500), Span("encode", 4.2, 4.4, 1), Span("store", 4.0, 4.5, 500),
        Span("step", 4.5, 5.5, 1), Span("step", 5.5, 6.5, 2), Span("fetch", 6.5, 6.75, 500), Span("step", 6.75, 7.75, 2),
    ]  # fmt: skip
    assert server_load.gaps_of(spans) == [pytest.approx((1.5, 1, 0.5, 0.2)), pytest.approx((1.0, 0, 0.0, 0.0))]


def test_every_figure_has_a_name_of_its_own():
    assert len(set(NAMES)) == len(NAMES)
    assert not set(NAMES) & set(BENCHES) - {"opening"}, "a group of the same name must hold that figure alone"
    assert list(report.chosen(BENCHES, [])) == NAMES
    assert list(report.chosen(BENCHES, ["lookup", "bits"])) == ["bits", "match", "siblings"]
    with pytest.raises(SystemExit, match="no such figure"):
        report.chosen(BENCHES, ["nothing"])


@pytest.mark.parametrize("command", [["-m", "tools.bench"], ["tools/bench/sharing.py"]])
def test_the_command_prints_a_table_and_writes_the_numbers(command, tmp_path):
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, *command, "--scale", "tiny", "--only", "hybrid", "--json", str(out), "--dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "hybrid" in done.stdout
    (figure,) = json.loads(out.read_text())["figures"]
    assert figure["met"] is True
    assert figure["raw"]["hits"] == 6
