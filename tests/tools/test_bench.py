"""Every bench runs, at a tiny scale, and what it counts (not what it times) is as it must be."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.servers import forked
from tools.bench import claims, page, peer_codecs, peers, remote_serving, report, server, server_load, serving
from tools.bench.__main__ import GROUPS
from tools.bench.peer import contestants, tasks, venv
from tools.bench.peer.contestants import MLX_LM, MLX_VLM, OURS, VLLM_MLX, Answer, Task
from tools.bench.serving import Span

ROOT = report.ROOT
BENCHES = report.load(GROUPS)
NAMES = [name for group in BENCHES.values() for name in group]
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
EMBEDDING = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
OFFLINE = "not installed: ERROR: no matching distribution"


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    """What a bench does in fresh processes is done in this one: their start is most of a tiny bench's time."""
    monkeypatch.setattr(report, "scratch_parent", str(tmp_path))
    monkeypatch.setattr(report, "in_child", _in_this_process)
    monkeypatch.setenv(
        "PREFIXCACHE_DECLINE_SLOW_HITS", "no"
    )  # a server's hits must not hang on how fast this machine is


def _in_this_process(module, function, *args):
    found = getattr(importlib.import_module(f"tools.bench.{module}"), function)(*args)
    return json.loads(json.dumps(found))


@pytest.fixture
def forked_servers(monkeypatch):
    """Servers need not import again what they are made of: most of what they take is spent on that."""

    def begin(command, *, env, stdout, **_):
        main = theirs if command[: len(serving.THEIRS)] == serving.THEIRS else ours
        flags = command[len(serving.THEIRS if main is theirs else serving.OURS) :]
        return forked.Forked(main, flags, Path(stdout.name), Path(stdout.name), env)

    if forked.FORKS:
        monkeypatch.setattr(serving, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": begin}))


def ours(flags):
    from prefixcache.cli import app

    app(["serve", *flags])


def theirs(flags):
    from mlx_lm import server

    sys.argv = ["mlx_lm.server", *flags]
    server.main()


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
        "slow-hits",
        "transform-cpu",
        "transform-fetch",
        "transform-lengths",
        "transform-basis",
        "remote-rates",
        "remote-lookup",
        "remote-fleet",
    ],
)
def test_a_bench_runs(name, tmp_path):
    found = figures(name)
    assert found
    assert all(figure.name and figure.measured for figure in found)
    assert not list(tmp_path.iterdir()), "a bench left files behind"
    report.table_of(found)
    json.dumps(report.as_json(found, "tiny"))


def test_agents_steps_and_turns_are_hit_to_the_last_shared_token():
    found = figures("agents")
    assert found[-1].name.endswith("tokens computed over necessary")
    assert [
        figure.measured for figure in found if not figure.met and ("step" in figure.name or "turn" in figure.name)
    ] == []


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


@pytest.mark.parametrize("bench", ["server-beside-stock", "server-at-once"])
def test_a_chat_beside_stock_is_hit_at_its_second_turn_and_after_a_restart(forked_servers, tmp_path, bench):
    cold, second, restarted = figures(bench)
    for name in ("mlx_lm.server", "--codec raw", "default"):
        assert cold.raw[name][0]["computed"] > 0.9 * cold.raw[name][0]["prompt"]  # others may share how it begins
        assert second.raw[name][0]["computed"] < second.raw[name][0]["prompt"] // 2
        assert restarted.raw["mlx_lm.server"][0]["computed"] > 0.9 * restarted.raw["mlx_lm.server"][0]["prompt"]
    assert restarted.raw["--codec raw"][0]["computed"] == restarted.raw["default"][0]["computed"] < 256
    assert not list(tmp_path.iterdir()), "a bench left files behind"


def test_a_next_turn_after_a_pause_has_fewer_tokens_to_compute(forked_servers, tmp_path):
    for figure in figures("next-turns"):
        assert figure.raw["computed"] >= figure.raw["hit"] > 0
        assert figure.raw["own"] < figure.raw["all"]
    assert not list(tmp_path.iterdir()), "a bench left files behind"


def test_unique_tokens_are_those_of_the_trie_of_all_prompts():
    prompts = [[1, 2, 3], [1, 2, 4, 5], [7], [1, 2], [1, 2, 3, 6], [1, 2, 3]]
    assert server.unique_tokens(prompts) == len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))}) == 7


def test_a_gap_between_steps_leaves_out_what_computes_prompts():
    spans = [
        Span("step", 0.0, 1.0, 3),
        Span("prefill", 1.0, 4.0, 500),
        Span("encode", 4.2, 4.4, 1),
        Span("store", 4.0, 4.5, 500),
        Span("step", 4.5, 5.5, 1),
        Span("step", 5.5, 6.5, 2),
        Span("fetch", 6.5, 6.75, 500),
        Span("step", 6.75, 7.75, 2),
    ]
    assert server_load.gaps_of(spans) == [pytest.approx((1.5, 1, 0.5, 0.2)), pytest.approx((1.0, 0, 0.0, 0.0))]


def test_a_tail_is_judged_beside_the_others():
    quick, slow = [0.1] * 300, [0.1] * 295 + [0.2] * 5
    assert remote_serving.tails("x", quick, quick).met
    assert remote_serving.tails("x", slow, slow[::-1]).met
    assert remote_serving.tails("x", [0.2] * 300, quick).met is False
    assert remote_serving.tails("x", slow, quick).met is False
    assert remote_serving.tails("x", quick[:50], quick[:50]).met is None


def test_every_figure_has_a_name_of_its_own():
    assert len(set(NAMES)) == len(NAMES)
    for name in set(NAMES) & set(BENCHES):
        assert list(BENCHES[name]) == [name], "a group of the same name must hold that figure alone"
    assert list(report.chosen(BENCHES, [])) == NAMES
    assert list(report.chosen(BENCHES, ["lookup", "bits"])) == ["bits", "match", "siblings", "picture_keys"]
    with pytest.raises(SystemExit, match="no such figure"):
        report.chosen(BENCHES, ["nothing"])
    assert list(report.load(GROUPS, ["lookup", "disk"])) == ["lookup", "disk"]
    assert report.load(GROUPS, ["lookup", "bits"]) == BENCHES


def test_the_command_prints_a_table_and_writes_the_numbers(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tools.bench", "--scale", "tiny", "--only", "hybrid"]
    done = subprocess.run(
        [*command, "--json", str(out), "--dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "hybrid" in done.stdout
    (figure,) = json.loads(out.read_text())["figures"]
    assert figure["met"] is True
    assert figure["raw"]["hits"] == 6


def test_what_needs_a_gpu_is_a_row_that_says_so_where_there_is_none():
    if report.has_a_gpu():
        pytest.skip("this machine has one")
    for name in ("kernels", "fetch", "attention-gpu", "attention-gpu-correct", "live-decoding", "prefill"):
        (group,) = [group for group in BENCHES.values() if name in group]
        (row,) = group[name]("quick")
        assert row.measured.startswith("needs a GPU"), row
        assert row.met is None


# -- what the pages claim ----------------------------------------------------------------------------------------------


def test_every_row_in_short_has_its_figure():
    cells = claims.first_cells(BENCHMARKS)
    assert {figure for cell in cells for figure in claims.figures_of(cell)} <= set(NAMES)
    unused = [begins for begins in claims.ROWS if not any(cell.startswith(begins) for cell in cells)]
    assert not unused, "docs/benchmarks.md has no such row any more: take it out of tools/bench/claims.py"


def test_every_sentence_with_a_number_is_still_there_and_has_its_figure():
    for words, names in claims.SENTENCES.items():
        assert words in EMBEDDING, f"docs/embedding.md no longer says {words!r}: change tools/bench/claims.py too"
        assert set(names) <= set(NAMES)


def test_a_row_without_a_figure_is_an_error_that_names_it():
    page = "# x\n\n## In short\n\n| | |\n|---|---|\n| faster than light | yes |\n\n## Next\n\n| not | this |\n"
    assert claims.first_cells(page) == ["faster than light"]
    with pytest.raises(ValueError, match="'faster than light' is not in ROWS"):
        claims.figures_of("faster than light")
    with pytest.raises(ValueError, match="no table"):
        claims.first_cells("# x\n")


# -- beside peers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Who is installed here does the tasks in this process; the others can't be had."""

    def ask(who, *asked, module="tasks"):
        if not who.installed:
            return [Answer(None, OFFLINE)] * len(asked)
        return [Answer(json.loads(json.dumps(found))) for found in tasks.run(who.side, json.loads(json.dumps(asked)))]

    for module in (peers, peer_codecs):
        monkeypatch.setattr(module, "ask", ask)


@pytest.mark.parametrize("name", ["peers-lookup", "peers-conversations", "peers-promotion", "peers-faults"])
def test_a_peer_that_cannot_be_installed_is_a_row_that_says_so(name, here, tmp_path):
    found = figures(name)
    assert all(figure.met is not False for figure in found), found
    for figure in found:
        missing = {beside.who.split()[0] for beside in figure.beside if beside.said == OFFLINE}
        assert missing == {"vllm-mlx", "mlx-vlm"}
    assert not list(tmp_path.iterdir()), "a bench left files behind"


def test_a_prompt_is_found_again_after_a_stop(tmp_path):
    place = {"folder": str(tmp_path / "one"), "tokens": 512}
    (tmp_path / "one").mkdir()
    tasks.run("ours", [("stored", {**place, "kill": False})])
    assert tasks.run("ours", [("found_again", place)]) == [{"depth": 512, "tokens": 512}]


def test_a_flipped_bit_counts_as_wrong_when_other_rows_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "_same", lambda one, other, depth: False)
    (found,) = tasks.run("ours", [("flips", {"folder": str(tmp_path), "tokens": 256, "tries": 0})])
    assert found["untouched"] == "wrong"
    assert peers._flipped(found) == "not found on the SSD in the first place"


def test_the_ratio_says_how_many_times_better_ours_is():
    def figure(more_is_better):
        theirs = [(MLX_LM, Answer({"n": 8.0})), (VLLM_MLX, Answer(None, OFFLINE))]
        return peers.compared("name", {"n": 2.0}, theirs, lambda found: found["n"], str, more_is_better=more_is_better)

    assert [beside.ratio for beside in figure(False).beside] == ["4.0 x", ""]
    assert figure(True).beside[0].ratio == "0.25 x"
    assert figure(True).raw["values"] == {"prefixcache": 2.0, MLX_LM.name: 8.0}
    assert [peers.times(a, b) for a, b in ((12345, 1), (1.018, 1), (1, 0))] == ["12,345 x", "1.02 x", ""]


def test_what_pip_says_is_why_a_peer_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(venv, "FOLDER", tmp_path / "venv")
    monkeypatch.setattr(venv, "CREATE", [sys.executable, "-c", "import sys; sys.exit('ERROR: no such thing')"])
    venv.python.cache_clear()
    try:
        assert contestants.ask(MLX_VLM, Task("lookup", {})) == [Answer(None, "not installed: ERROR: no such thing")]
    finally:
        venv.python.cache_clear()


def test_a_peer_that_fails_is_a_reason_and_ours_is_an_error(monkeypatch):
    class Failed:
        returncode, stdout, stderr = 1, "", "Traceback\nKeyError: 'keys'\n"

    monkeypatch.setattr(contestants.subprocess, "run", lambda *command, **how: Failed)
    assert contestants.ask(MLX_LM, Task("full", {})) == [Answer(None, "failed: KeyError: 'keys'")]
    with pytest.raises(RuntimeError, match="KeyError"):
        contestants.ask(OURS, Task("full", {}))


# -- the page ---------------------------------------------------------------------------------------------------------


def measured_beside():
    names = ["lookup", "bytes held"]
    everyone = [
        (who, Answer({"n": 3.0 + i}))
        for i, who in enumerate((MLX_LM, VLLM_MLX, contestants.VLLM_MLX_SCHEDULED, MLX_VLM))
    ]
    return [
        peers.compared(name, {"n": 2.0}, everyone, lambda found: found["n"], lambda found: f"{found['n']}")
        for name in names
    ]


def test_the_page_gets_the_figures_between_its_marks(tmp_path):
    results, target = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps(report.as_json(measured_beside(), "tiny")))
    target.write_text(f"# Before\n\n{page.BEGIN}\nout of date\n{page.END}\n\nAfter.\n")
    for _ in range(2):
        assert page.main([str(target), str(results)]) == 0
    text = target.read_text()
    assert "out of date" not in text
    assert text.startswith("# Before")
    assert text.endswith("After.\n")
    assert text.count(page.HEAD) == 1
    assert "| 2.0 | mlx-lm" in text
    with pytest.raises(ValueError, match="the page lacks"):
        page.replaced("# Before\n", [])


def test_the_page_of_benchmarks_has_its_marks():
    assert page.replaced((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), ["x"])
