"""`prefixcache plan`: what it tells of models and traces, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from prefixcache import PrefixCache
from prefixcache.cli.plan import facts as plan_facts
from prefixcache.cli.plan import planner
from prefixcache.cli.plan import text as plan_text
from prefixcache.cli.plan.known_models import KNOWN_MODELS
from prefixcache.cli.plan.options import DEFAULT_CODEC
from prefixcache.codecs.choice import as_codec
from prefixcache.codecs.transform.basis import read
from prefixcache.planning.model import ModelState
from prefixcache.planning.sizes import StateSizes
from tests.models.calibrated import calibrate
from tests.servers.serving import save_model

TINY = Path(__file__).parent.parent / "fixtures" / "tiny-llama"
TOP = {"prefixcache", "model", "codecs", "macs", "trace", "codec", "assumed", "sizes", "fleet"}
SIZES = {
    "working_set",
    "possible",
    "without",
    "reading_pays",
    "cells",
    "front",
    "cheapest",
    "recommendation",
    "hot",
    "leases",
}
HITS = {
    "ram",
    "ssd",
    "policy",
    "ssd_admission",
    "hot",
    "hot_bytes",
    "hit_rate",
    "ram_hit_rate",
    "hot_hit_rate",
    "ssd_hit_rate",
    "hit_tokens",
}
CELL = HITS | {
    "cost",
    "on_front",
    "bound",
    "hot_hits",
    "decode_seconds_saved",
    "of_possible",
    "prefill_seconds_saved",
    "ttft",
    "written_bytes_per_day",
    "tbw_years",
    "requests",
    "seconds",
    "asked_tokens",
    "ram_tokens",
    "hot_tokens",
    "ssd_tokens",
    "stored_tokens",
    "stored_bytes",
    "written_files",
    "written_bytes",
    "read_files",
    "read_bytes",
    "evicted",
    "ssd_evicted",
    "dropped",
    "declined",
    "unkept_tokens",
    "ram_peak",
    "ssd_peak",
}
FLEET = {"machines", "remote", "rtt", "rate", "reading_pays", "sessions", "largest_session", "sizes"}
FLEET_ROW = (
    HITS
    | {*plan_facts.REMOTE_COUNTS}
    | {
        "machines",
        "routing",
        "remote_admission",
        "remote_hit_rate",
        "requests",
        "ttft",
        "sent_per_reused_token",
        "trips",
    }
)


def chats(path: Path, chats: int = 5, turns: int = 4, **more: Any) -> Path:
    """A trace of chats side by side over an hour, each turn two blocks of 256 longer than the one before."""
    own: dict[int, list[int]] = {chat: [0] for chat in range(chats)}
    lines = []
    for turn in range(turns):
        for chat, ids in own.items():
            ids += [1000 * (chat + 1) + 2 * turn, 1000 * (chat + 1) + 2 * turn + 1]
            at = 3_600_000 * (turn * chats + chat) // (turns * chats - 1)
            lines.append({"timestamp": at, "input_length": 256 * len(ids), "output_length": 9, "hash_ids": list(ids)})
    path.write_text("".join(json.dumps({**line, **more}) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return chats(tmp_path / "chats.jsonl")


@pytest.fixture
def planned(call, trace):
    """Facts of the trace with the tiny model, and options."""

    def give(*more: object) -> dict[str, Any]:
        done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, *more, "--json")
        assert done.exit_code == 0, done.output
        assert done.stderr == ""
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    return give


# -- of a model -------------------------------------------------------------------------------------------------------


def test_a_name_that_is_no_path_is_one_of_the_known_models(call):
    done = call("plan", "--model", "qwen3-8b", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts.keys() == TOP
    assert facts["model"]["parameters"] == pytest.approx(8.19e9, rel=0.001)
    assert [c["codec"] for c in facts["codecs"]] == list(planner.CODECS)
    raw, turbo, *_ = facts["codecs"]
    assert raw["live_bytes_per_token"] == 36 * 8 * 128 * 2 * 2
    assert 3.8 < turbo["ratio"] < 4
    assert facts["trace"] is facts["sizes"] is None


@pytest.mark.parametrize(
    ("name", "billions", "live"),
    [
        ("gpt-oss-20b", 20.9, 24_576),
        ("llama-3.1-8b", 8.03, 131_072),
        ("llama-3.3-70b", 70.6, 327_680),
        ("qwen3-30b-a3b", 30.5, 98_304),
    ],
)
def test_the_known_models_are_those_of_their_makers(name, billions, live):
    state = ModelState.of(KNOWN_MODELS[name], name)
    assert state.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert StateSizes(state, as_codec("raw")).raw_bytes_per_token == live


def test_a_name_on_hugging_face_is_looked_up_in_the_local_cache(call, tmp_path, monkeypatch):
    from huggingface_hub import constants

    repo = tmp_path / "hub" / "models--some-org--Tiny-4bit"
    (repo / "snapshots" / "c0ffee").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c0ffee")
    (repo / "snapshots" / "c0ffee" / "config.json").write_bytes((TINY / "config.json").read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    done = call("plan", "--model", "some-org/Tiny-4bit", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"]["name"] == "Tiny-4bit"
    done = call("plan", "--model", "some-org/other")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "--model 'some-org/other': no such file or folder, and the Hugging Face cache in " in done.stderr


def test_the_bytes_are_those_that_a_store_takes(call):
    facts = json.loads(call("plan", "--model", TINY, "--codec", "turboquant:4:3, raw", "--json").stdout)
    assert [c["codec"] for c in facts["codecs"]] == ["turboquant:4:3", "raw"]
    for c in facts["codecs"]:
        assert [p["tokens"] for p in c["prompts"]] == [8192, 32768, 131072]
        assert c["prompts"][1]["bytes"] == pytest.approx(32768 * c["bytes_per_token"], rel=0.02)
        assert c["tokens_per_gb"] < 1e9 / c["bytes_per_token"]


def test_a_mac_keeps_what_the_weights_leave(call):
    facts = json.loads(call("plan", "--model", "llama-3.3-70b", "--codec", "raw", "--json").stdout)
    macs = {mac["memory"] >> 30: mac for mac in facts["macs"]}
    assert (macs[32]["room"], macs[32]["tokens"]) == (0, [{"codec": "raw", "tokens": 0}])
    assert macs[64]["room"] == (48 << 30) - facts["model"]["weights_at_4_bits"]
    assert macs[96]["auto"] == 18 << 30
    assert macs[32]["auto"] == 0
    assert all(mac["auto"] <= mac["room"] for mac in facts["macs"])


def test_a_hybrid_model_tells_what_each_boundary_takes(call):
    done = call("plan", "--model", "gpt-oss-20b")
    assert done.exit_code == 0, done.output
    assert "12 windowed of 128" in done.stdout
    assert "boundary" in done.stdout
    assert "boundary" not in call("plan", "--model", TINY).stdout


# -- with a calibration -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with few channels, whose basis is made in no time."""
    return save_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def basis(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's, alone in its folder."""
    return calibrate(small, tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def no_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own are not for these tests."""
    monkeypatch.setenv("PREFIXCACHE_BASIS_DIR", str(tmp_path / "no bases"))


def of_codecs(call: Any, *options: object) -> dict[str, dict[str, Any]]:
    done = call("plan", *options, "--json")
    assert done.exit_code == 0, done.output
    return {codec["codec"]: codec for codec in json.loads(done.stdout)["codecs"]}


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.3-70b"])
def test_without_a_basis_a_transformed_models_sizes_are_estimated_and_marked(call, name):
    told = of_codecs(call, "--model", name, "--codec", "turboquant:4,transform,transform:3,transform:3.25,raw")
    assert told["raw"]["transform"] is told["turboquant:4"]["transform"] is None
    said = told["transform"]["transform"]
    assert (said["estimate"], said["basis"]) == (True, None)
    groups = said["layers"]  # of 2,048 channels each
    assert groups * 2 * 2048**2 < said["basis_bytes"] < groups * 2 * 2048**2 * 1.4
    assert said["layers"] == ModelState.of(KNOWN_MODELS[name]).layers[0].caches
    assert told["transform"]["spec"]["basis"] is None
    for spec, bits in {"transform": 1.34, "transform:3": 0.83}.items():
        assert told[spec]["ratio"] == pytest.approx(16 / bits, rel=0.04)
    between = [told[spec]["bytes_per_token"] for spec in ("transform:3", "transform:3.25", "transform")]
    assert between == sorted(between)
    done = call("plan", "--model", name)
    assert re.search(
        r"transform:4 keeps 3\.\d times as many tokens in a GB as turboquant:4 \(an estimate\)", done.stdout
    )
    assert "transform:4: an estimate, as there is no basis of this model" in done.stdout


def test_layers_with_windows_are_estimated_as_transformed_too(call):
    told = of_codecs(call, "--model", "gpt-oss-20b", "--codec", "turboquant:4,transform:4")
    assert told["transform:4"]["transform"]["layers"] == 24
    # Of one boundary at most: a window of 128 tokens is within a tail then, whose rows are as they are.
    assert told["transform:4"]["windows_bytes"] == pytest.approx(told["turboquant:4"]["windows_bytes"], rel=0.01)
    assert told["transform:4"]["bytes_per_token"] < told["turboquant:4"]["bytes_per_token"] / 2.8


def test_a_model_that_no_calibration_could_take_has_turboquants_sizes(call, tmp_path):
    model = save_model(tmp_path / "model", "mamba")
    told = of_codecs(call, "--model", model, "--codec", "turboquant:4,transform:4")
    assert told["transform:4"]["transform"] == {"layers": 0, "estimate": False, "basis": None, "basis_bytes": 0}
    assert told["transform:4"]["bytes_per_token"] == told["turboquant:4"]["bytes_per_token"]
    done = call("plan", "--model", model)
    assert "no layer of this model can be transformed, so the sizes are turboquant:4's" in done.stdout
    assert "times as many tokens" not in done.stdout


@pytest.mark.parametrize("where", ["file", "folder", "variable"])
def test_with_a_basis_the_sizes_are_what_it_expects(call, small, basis, where, monkeypatch):
    options: tuple[object, ...] = {"file": ("--basis", basis), "folder": ("--basis-dir", basis.parent)}.get(where, ())
    if where == "variable":
        monkeypatch.setenv("PREFIXCACHE_BASIS_DIR", str(basis.parent))
    told = of_codecs(call, "--model", small, "--codec", "transform:4,transform:3,raw", *options)
    read_back = read(basis)
    for spec, quality in {"transform:4": 4, "transform:3": 3}.items():
        assert told[spec]["transform"] == {
            "layers": 4,
            "estimate": False,
            "basis": read_back.hash,
            "basis_bytes": read_back.nbytes,
        }
        headers = 40  # bytes a token of a block: those of a small model's, and its tokens
        assert 0 < told[spec]["bytes_per_token"] - read_back.coded_bytes(quality) < headers
    done = call("plan", "--model", small, *options)
    assert f"transform:4: by basis {read_back.hash[:8]}, which takes" in done.stdout
    assert "estimate" not in done.stdout


def test_a_config_alone_has_no_basis_in_the_folder(call, small, basis, tmp_path):
    told = of_codecs(call, "--model", small / "config.json", "--codec", "transform", "--basis-dir", basis.parent)
    assert told["transform"]["transform"]["estimate"]


def test_a_trace_is_run_with_a_transformed_model(planned, small, basis):
    turboquant, estimated = (
        planned("--model", small, "--codec", "turboquant:4"),
        planned("--model", small, "--codec", "transform"),
    )
    calibrated = planned("--model", small, "--codec", "transform", "--basis", basis)
    for facts in (estimated, calibrated):
        assert facts["sizes"]["possible"]["hit_rate"] == turboquant["sizes"]["possible"]["hit_rate"]
        assert facts["sizes"]["working_set"] < turboquant["sizes"]["working_set"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--codec", "raw", "--basis", "/nowhere"), "--basis /nowhere: no codec needs one; add --codec transform"),
        (("--basis", "/nowhere"), "--basis /nowhere: can't be read (No such file or directory)"),
        (("--basis", TINY / "config.json"), "not a basis"),
    ],
)
def test_a_basis_that_is_none_is_refused(call, options, told):
    done = call("plan", "--model", TINY, *options)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


def test_a_basis_of_another_model_is_refused_by_its_name(call, basis):
    done = call("plan", "--model", "qwen3-8b", "--basis", basis)
    assert done.exit_code == 2
    assert f"--basis {basis}: of {read(basis).model}, whose layers this model doesn't have" in done.stderr


# -- of a trace -------------------------------------------------------------------------------------------------------


def test_json_has_everything_and_its_shape_is_stable(planned):
    facts = planned("--ram", "1MB,4MB", "--ssd", "0,8MB", "--ssd-rate", "1GB,3GB")
    assert facts.keys() == TOP
    assert facts["sizes"].keys() == SIZES
    assert [set(cell) for cell in facts["sizes"]["cells"]] == [CELL] * 4
    assert [[t["ssd_rate"] for t in cell["ttft"]] for cell in facts["sizes"]["cells"]] == [[10**9, 3 * 10**9]] * 4
    assert {frozenset(cell) for cell in facts["sizes"]["hot"]["cells"]} == {
        frozenset(CELL - {"cost", "on_front", "bound"})
    }
    assert (facts["trace"]["requests"], facts["trace"]["block"], facts["codec"]) == (20, 256, "turboquant:4")
    assert facts["assumed"]["tbw"] == 600 * 10**12


def test_hot_prompts_have_shares_of_the_ram_that_is_advised(planned):
    sizes = planned("--ram", "40MB", "--ssd", "0", "--decode-rate", "1MB")["sizes"]
    cells, best = sizes["hot"]["cells"], sizes["hot"]["best"]
    assert [cell["hot"] for cell in cells] == [0, 5_000_000, "auto", 20_000_000]
    assert [cell["hot_bytes"] for cell in cells] == [0, 5_000_000, 10_000_000, 20_000_000]
    rates = [cell["hot_hit_rate"] for cell in cells]
    assert 0 == rates[0] < min(rates[1:])  # a share that long prompts don't fit may keep more of short ones
    assert max(rates) == rates[-1] == cells[best]["hot_hit_rate"] <= cells[best]["ram_hit_rate"]
    assert len({cell["hit_rate"] for cell in cells}) == 1
    means = [cell["ttft"][0]["mean"] for cell in cells]
    assert means[best] == min(means)


def test_what_leases_cost_is_told_at_the_advised_size(call, trace, planned):
    options = ("--ram", "4MB", "--ssd", "0", "--lease", "3600", "--lease-tokens", "300")
    leases = planned(*options)["sizes"]["leases"]
    best = planned(*options[:4])["sizes"]
    cell = best["cells"][best["recommendation"]["cell"]]
    assert best["leases"] is None
    assert leases["prefilled_tokens_without"] == cell["asked_tokens"] - cell["hit_tokens"]
    assert (leases["seconds"], leases["tokens"]) == (3600, 300)
    told = call("plan", "--model", TINY, "--trace", trace, "--block", 256, *options).stdout
    assert f"{leases['prefilled_tokens']:,} tokens are prefilled" in " ".join(told.split())


def test_shares_for_hot_prompts_are_compared_as_given(call, trace, planned):
    sizes = planned("--ram", "4MB,40MB", "--ssd", "0", "--hot", "0,auto,1MB")["sizes"]
    assert [(cell["ram"], cell["hot"]) for cell in sizes["cells"]] == [
        (ram, hot) for ram in (4_000_000, 40_000_000) for hot in (0, "auto", 1_000_000)
    ]
    assert [cell["hot"] for cell in sizes["hot"]["cells"]] in ([0, "auto", 1_000_000], [0, 1_000_000, "auto"])
    shown = call("plan", "--model", TINY, "--trace", trace, "--block", 256, "--ram", "40MB", "--hot", "0,10MB").stdout
    assert "lru, always, hot 10MB" in shown
    assert 'hot="0"' in shown


def test_images_of_transform_are_decoded_slower_unless_a_rate_is_given(planned):
    sizes = ("--ram", "4MB", "--ssd", "0")
    rates = [
        planned(*sizes, *more)["assumed"]["decode_rate"]
        for more in ((), ("--codec", "transform:3"), ("--codec", "transform", "--decode-rate", "3MB"))
    ]
    assert rates == [10 * 10**9, 10**9, 3 * 10**6]


def test_more_hits_more_and_an_endless_cache_most(planned):
    facts = planned()
    sizes, cells = facts["sizes"], facts["sizes"]["cells"]
    assert {c["ram"] for c in cells} == set(plan_facts.ram_ladder(sizes["working_set"] * 3 // 2))
    assert len(cells) == len({c["ram"] for c in cells}) * len({c["ssd"] for c in cells})  # each with each
    alone = [c["hit_rate"] for c in sorted(cells, key=lambda c: c["ram"]) if not c["ssd"]]
    assert alone == sorted(alone)
    assert alone[0] < alone[-1] == sizes["possible"]["hit_rate"]
    assert all(c["hit_rate"] <= c["bound"] + 0.01 for c in cells)
    chosen = sizes["recommendation"]["cell"]
    assert chosen in sizes["front"]
    assert cells[chosen]["on_front"]
    for target in sizes["cheapest"]:
        assert cells[target["cell"]]["of_possible"] >= target["of_possible"]


def asked(path: Path, prompts: str, blocks: int = 40) -> Path:
    """A trace that asks for these prompts, a letter each, one after the other; they share nothing."""
    lines = [
        {
            "timestamp": 1000 * i,
            "input_length": 256 * blocks,
            "output_length": 1,
            "hash_ids": [1000 * ord(letter) + n for n in range(blocks)],
        }
        for i, letter in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_largest_size_is_advised_where_it_is_worth_its_price(call, tmp_path):
    trace = asked(tmp_path / "eleven.jsonl", "AAABCDBCDBC")
    done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, "--ram", "9MB,36MB", "--ssd", 0, "--json")
    sizes = json.loads(done.stdout)["sizes"]
    assert [round(c["of_possible"], 2) for c in sizes["cells"]] == [0.29, 1]
    assert sizes["recommendation"]["says"] == 'ram="36MB": 100 % of what is possible'


def test_the_advice_names_the_mac_that_has_room_for_it(call, tmp_path):
    trace = asked(tmp_path / "long.jsonl", "AABB", blocks=200)
    more = "--trace", trace, "--block", 256, "--ssd", 0, "--codec", "raw"
    (facts, large, none) = (
        json.loads(call("plan", "--model", "llama-3.1-8b", *more, "--ram", ram, "--json").stdout)
        for ram in ("8GB", "40GB", "900GB")
    )
    machine = facts["sizes"]["recommendation"]["machine"]
    assert machine["live_tokens"] == 200 * 256
    assert machine["live"] == 200 * 256 * 131_072
    assert machine["weights"] == facts["model"]["weights_at_4_bits"]
    needed = machine["weights"] + machine["live"] + 8 * 10**9
    macs = {mac["memory"]: mac["gpu"] for mac in facts["macs"]}
    assert machine["memory"] == min(memory for memory, gpu in macs.items() if gpu >= needed)
    assert large["sizes"]["recommendation"]["machine"]["memory"] > machine["memory"]
    assert none["sizes"]["recommendation"]["machine"]["memory"] is None
    shown = " ".join(call("plan", "--model", "llama-3.1-8b", *more, "--ram", "8GB").stdout.split())
    assert shown.startswith('ram="8GB": 100 % of what is possible')
    assert f"It needs a Mac with {machine['memory'] >> 30} GB" in shown
    assert "No Mac has room" in call("plan", "--model", "llama-3.1-8b", *more, "--ram", "900GB").stdout


def recommended(call, *options: object) -> tuple[dict[str, Any], str]:
    shown = " ".join(call("plan", *options).stdout.split())
    return json.loads(call("plan", *options, "--json").stdout)["sizes"]["recommendation"], shown


def test_a_size_that_wears_its_ssd_out_within_a_year_is_not_advised(call, trace):
    options = "--model", TINY, "--trace", trace, "--block", 256, "--ram", "2MB", "--ssd", "0,20MB"
    lasting, _ = recommended(call, *options)
    worn, shown = recommended(call, *options, "--tbw", "1GB")
    assert lasting["says"].startswith('ram="2MB", ssd="20MB": ')
    assert (lasting["obstacles"], lasting["beyond"]) == ([], None)
    assert worn["says"].startswith('ram="2MB": ')
    assert worn["obstacles"] == []
    assert (worn["beyond"]["cell"], worn["beyond"]["obstacles"]) == (lasting["cell"], ["wear"])
    assert shown.startswith(worn["says"])
    assert f"Not advised: {lasting['says']}, but 1 GB of writes last" in shown
    for remedy in ("ssd_admission", "less SSD or none", 'spill="drop"'):
        assert remedy in shown


def test_a_ram_that_the_longest_prompt_does_not_fit_into_is_not_advised(call, tmp_path):
    trace = asked(tmp_path / "long.jsonl", "AABB", blocks=200)
    options = "--model", "llama-3.1-8b", "--trace", trace, "--block", 256, "--codec", "raw", "--ssd", 0
    advised, _ = recommended(call, *options, "--ram", "4GB,8GB", "--ram-price", 1000)
    assert advised["says"].startswith('ram="8GB"')
    small, shown = recommended(call, *options, "--ram", "4GB")
    assert (small["obstacles"], small["beyond"]) == (["prompt"], None)
    assert shown.startswith("None of these sizes can be lived with.")
    assert "the longest prompt takes 6.71 GB, more than this RAM" in shown
    assert "give more RAM, or a codec that takes less" in shown


def test_a_ram_that_no_mac_has_is_not_advised(call, tmp_path):
    trace = asked(tmp_path / "long.jsonl", "ABAB", blocks=200)
    options = "--model", "llama-3.1-8b", "--trace", trace, "--block", 256, "--codec", "raw", "--ssd", 0
    alone, shown = recommended(call, *options, "--ram", "900GB")
    assert (alone["machine"]["memory"], alone["obstacles"]) == (None, ["memory"])
    assert shown.startswith("None of these sizes can be lived with.")
    assert "no Mac has room for it" in shown
    advised, shown = recommended(call, *options, "--ram", "8GB,900GB", "--ram-price", 0)
    assert advised["says"].startswith('ram="8GB": ')
    assert advised["beyond"]["obstacles"] == ["memory"]
    assert shown.startswith(advised["says"])


def test_what_is_advised_stands_in_the_tables_though_something_else_beats_it(call, trace):
    options = "--model", TINY, "--trace", trace, "--block", 256, "--ram", "1MB,16MB", "--ssd", "0,20MB", "--tbw", "1GB"
    facts = json.loads(call("plan", *options, "--json").stdout)
    cell = facts["sizes"]["cells"][facts["sizes"]["recommendation"]["cell"]]
    assert cell in plan_text.front(facts)
    assert not cell["ssd"]


def test_prompts_that_are_longer_than_the_models_context_are_told(call, tmp_path):
    trace = asked(tmp_path / "long.jsonl", "AAB", blocks=200)  # 51,200 tokens; qwen3-8b is made for 40,960
    lines = trace.read_text().splitlines()
    short = {"timestamp": 9000, "input_length": 256, "output_length": 1, "hash_ids": [7]}
    trace.write_text("\n".join([*lines, json.dumps(short)]))
    more = "--trace", trace, "--block", 256, "--ram", "8GB", "--ssd", 0
    facts = json.loads(call("plan", "--model", "qwen3-8b", *more, "--json").stdout)
    assert (facts["model"]["context"], facts["trace"]["beyond_context"]) == (40_960, 3)
    assert facts["sizes"]["recommendation"]["machine"]["live_tokens"] == 40_960
    shown = " ".join(call("plan", "--model", "qwen3-8b", *more).stdout.split())
    assert "3 of 4 prompts are longer than the model's context of 40,960 tokens (the longest has 51,200)" in shown
    assert "context of" not in call("plan", "--model", "llama-3.1-8b", *more).stdout


def test_seconds_saved_waiting_and_wear_follow_from_the_rates(planned):
    more = "--ram", "2MB", "--ssd", "20MB"
    facts = planned(*more, "--prefill-rate", 500, "--tbw", "1TB")
    (cell,) = facts["sizes"]["cells"]
    assert cell["prefill_seconds_saved"] == cell["hit_tokens"] / 500
    assert cell["written_bytes_per_day"] == pytest.approx(24 * cell["written_bytes"])
    assert cell["tbw_years"] == pytest.approx(1e12 / cell["written_bytes_per_day"] / 365.25)
    (twice,) = planned(*more, "--prefill-rate", 1000, "--tbw", "2TB")["sizes"]["cells"]
    assert twice["tbw_years"] == pytest.approx(2 * cell["tbw_years"])
    assert twice["ttft"][0]["p99"] < cell["ttft"][0]["p99"]


def test_the_price_of_ram_moves_the_advice(planned):
    more = "--ram", "1MB,2MB,4MB,8MB,16MB", "--ssd", "0,16MB"
    dear, cheap = (planned(*more, "--ram-price", price)["sizes"] for price in (1000, 0.0001))
    assert dear["cells"][dear["recommendation"]["cell"]]["ssd"] == 16_000_000
    assert cheap["cells"][cheap["recommendation"]["cell"]]["ssd"] == 0


def test_policies_and_admissions_are_compared(call, trace, planned):
    more = "--ram", "2MB", "--ssd", "0,8MB", "--policy", "lru,adaptive", "--ssd-admission", "always,second"
    cells = planned(*more)["sizes"]["cells"]
    assert [(c["policy"], c["ssd"], c["ssd_admission"]) for c in cells] == [
        ("lru", 0, "always"),
        ("adaptive", 0, "always"),
        ("lru", 8_000_000, "always"),
        ("lru", 8_000_000, "second"),
        ("adaptive", 8_000_000, "always"),
        ("adaptive", 8_000_000, "second"),
    ]
    done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, *more)
    assert "adaptive, second" in done.stdout


def test_a_recording_and_a_part_of_a_trace_are_read(call, tmp_path):
    chats(tmp_path / "own.jsonl", call="fetch", block_size=256)
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    both = [json.dumps({**line, "call": name}) for line in lines for name in ("fetch", "store")]
    packed = tmp_path / "own.gz"
    packed.write_bytes(gzip.compress("\n".join(both).encode()))
    done = call("plan", "--model", TINY, "--trace", packed, "--ram", "50MB", "--ssd", 0, "--first", 30, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["trace"]["requests"], facts["trace"]["stores"], facts["trace"]["block"]) == (15, 15, 256)
    assert facts["sizes"]["cells"][0]["requests"] == 15
    assert facts["sizes"]["cells"][0]["hit_rate"] > 0.3


def test_a_trace_in_which_nothing_comes_back_is_told_so(call, tmp_path):
    path = tmp_path / "unlike.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [2 * i, 2 * i + 1]} for i in range(5)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    more = "--block", 256, "--ram", "1MB", "--ssd", 0
    done = call("plan", "--model", TINY, "--trace", path, *more)
    assert done.exit_code == 0, done.output
    assert "No prompt comes back" in done.stdout
    assert "bytes a day can't be told" in " ".join(done.stdout.split())


def test_sizes_that_keep_nothing_are_told_apart_from_a_trace_without_hits(call, trace):
    done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, "--ram", "1kB", "--ssd", 0)
    assert done.exit_code == 0, done.output
    assert "None of these sizes keeps a prompt until it comes back" in done.stdout


def test_a_torn_trace_is_told_of(call, trace):
    trace.write_text(trace.read_text()[:-30])
    done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, "--ram", "1MB", "--ssd", 0)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "19 requests" in done.stdout
    assert "what was cut off is left out" in " ".join(done.stdout.split())


# -- of a fleet -------------------------------------------------------------------------------------------------------

SIZED = ("--ram", "4MB", "--ssd", "0,8MB", "--machines", 3)


def test_a_fleet_stands_beside_one_machine_and_one_with_all_of_it(planned):
    facts = planned(*SIZED)
    assert facts["fleet"].keys() == FLEET
    assert [[set(row) for row in rows] for rows in facts["fleet"]["sizes"]] == [[FLEET_ROW] * 4] * 2
    alone, twelve = facts["sizes"]["cells"], planned("--ram", "12MB", "--ssd", "0,24MB")["sizes"]["cells"]
    for rows, one, with_all in zip(facts["fleet"]["sizes"], alone, twelve, strict=True):
        assert [(row["machines"], row["routing"], row["remote_admission"]) for row in rows] == [
            (1, None, None),
            (1, None, None),
            (3, "sticky", None),
            (3, "sticky", "second"),
        ]
        for row, cell in zip(rows, (one, with_all), strict=False):
            assert all(row[name] == cell[name] for name in ("ram", "ssd", "hit_rate", "ram_hit_rate", "ttft"))
        assert {row["ram"] for row in rows[2:]} == {one["ram"]}
        assert all(sum(row["requests"]) == 20 for row in rows)
    assert {**facts, "fleet": None} == planned(*SIZED[:-2])


def test_routings_and_admissions_to_the_remote_tier_are_compared(planned):
    (_, rows) = planned(*SIZED, "--routing", "sticky,random", "--remote-admission", "second,always")["fleet"]["sizes"]
    assert [(row["routing"], row["remote_admission"]) for row in rows[2:]] == [
        (routing, admission) for routing in ("sticky", "random") for admission in (None, "second", "always")
    ]
    none, second, always = rows[5:]
    assert none["sent_bytes"] == none["trips"] == none["remote_hit_rate"] == 0
    assert none["hit_rate"] < always["hit_rate"]
    assert 0 < second["sent_bytes"] <= always["sent_bytes"]
    assert always["remote_read_bytes"] > 0
    assert always["sent_per_reused_token"] == always["sent_bytes"] / always["reused_tokens"]
    parts = ("ram_hit_rate", "ssd_hit_rate", "remote_hit_rate")
    assert all(row["hit_rate"] == pytest.approx(sum(row[part] for part in parts)) for row in rows)


def test_the_way_to_the_remote_tier_is_in_the_times_to_first_token(planned):
    def times(*link: object) -> list[float]:
        more = ("--routing", "random", "--remote-admission", "always", *link)
        return [row["ttft"][0]["mean"] for row in planned(*SIZED, *more)["fleet"]["sizes"][0]]

    near, far = times("--remote-rtt", 0, "--remote-rate", "1TB"), times("--remote-rtt", 0.05, "--remote-rate", "1GB/s")
    assert near[:3] == far[:3]
    assert far[3] > near[3] + 0.02


def test_a_remote_tier_that_is_too_slow_is_not_read(call, trace, planned):
    (rows, _) = planned(*SIZED, "--routing", "random", "--remote-rate", "1kB")["fleet"]["sizes"]
    assert rows[3]["hit_rate"] == rows[2]["hit_rate"]
    assert rows[3]["remote_read_bytes"] == 0
    done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, *SIZED, "--remote-rate", "1kB")
    assert "sooner than it comes from the remote tier" in " ".join(done.stdout.split())


def test_a_limit_of_the_remote_tier_holds(planned):
    (rows, _) = planned(*SIZED, "--routing", "random", "--remote-admission", "always", "--remote", "2MB")["fleet"][
        "sizes"
    ]
    assert 0 < rows[3]["remote_peak"] <= 2_000_000
    assert rows[3]["remote_evicted"] > 0


def test_a_fleet_is_told_on_the_screen(call, trace):
    more = "--routing", "sticky,random"
    done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, *SIZED, *more, columns=80)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    for name in ("one with all of it", "sticky, no remote", "random, second", "the remote tier"):
        assert name in done.stdout
    assert "By its blocks the trace has 5 sessions" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("--machines", 3),
            "--machines 3: add --trace with the requests, --ram with what each machine has, --ssd with what each",
        ),
        (("--trace", "T", "--machines", 3, "--ram", "4MB"), "3: add --ssd with what each machine has (0: none)"),
        (("--machines", 3, "--ram", "4MB", "--ssd", "0"), "--machines 3: add --trace with the requests\n"),
        (("--trace", "T", *SIZED[:-1], 1001), "--machines 1001: too many to simulate; give 1 to 1000"),
        (("--trace", "T", "--routing", "random"), "--routing: this is for a fleet; add --machines"),
        (("--trace", "T", "--remote-rtt", 1), "--remote-rtt: this is for a fleet; add --machines"),
        (
            ("--trace", "T", *SIZED, "--routing", "near"),
            "--routing 'near': none of those there are; write sticky, random",
        ),
        (("--trace", "T", *SIZED, "--remote-admission", "no"), "--remote-admission 'no': none of those there are"),
        (("--trace", "T", *SIZED, "--remote", "0"), "--remote 0: nothing could be sent there; give a size"),
        (("--trace", "T", *SIZED, "--remote-rtt", -1), "--remote-rtt -1: not possible"),
        (("--trace", "T", *SIZED, "--remote-rate", "0"), "--remote-rate 0: nothing would ever arrive"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(call, trace, options, told):
    options = tuple(trace if option == "T" else option for option in options)
    done = call("plan", "--model", TINY, *options)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


# -- how it looks -----------------------------------------------------------------------------------------------------


def test_the_advice_stands_first_and_fits_80_columns(call, trace):
    done = call("plan", "--model", TINY, "--trace", trace, "--block", 256, "--ssd-rate", "1GB,7GB", columns=80)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert re.fullmatch(r'ram="[\d.]+[kM]B"(, ssd="[\d.]+[kM]B")?: \d+ % of what is possible', lines[0])
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert sum(" *" in line for line in lines) >= 2  # the size that is chosen, where it stands


def test_short_sizes_and_years_say_no_more_than_they_know():
    assert [plan_text.short(n) for n in (0, 24 * 10**9, 1_500_000_000, 10**12, 256_000)] == [
        "0",
        "24 GB",
        "1.5 GB",
        "1 TB",
        "256 kB",
    ]
    assert [plan_text.years(y, 1) for y in (0.01, 5.13, 700)] == ["< 0.1", "5.1", "> 100"]
    assert (plan_text.years(None, 0), plan_text.years(None, None)) == ("never", "-")
    assert [plan_text.count(n) for n in (999, 6780, 2_520_000)] == ["999", "6.78 k", "2.52 M"]


def test_ladders_are_of_sizes_that_things_are_sold_in():
    assert [plan_facts.step_up(n) for n in (1, 700, 10**6, 10**6 + 1, 90 * 10**9, 97 * 10**9)] == [
        1000,
        1000,
        10**6,
        1_500_000,
        96 * 10**9,
        128 * 10**9,
    ]
    assert plan_facts.ram_ladder(90 * 10**9) == [of * 375 * 10**6 for of in (1, 2, 4, 8, 16, 64, 256)]
    assert plan_facts.ssd_ladder(90 * 10**9) == [24 * 10**9, 96 * 10**9]


# -- what can't be planned --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ("--trace", "{trace}"),
            "--model is missing: give a model's folder, its name on Hugging Face, or one of gpt-oss-20b",
        ),
        (("--model", "no-such"), "--model 'no-such': no such file or folder, and the Hugging Face cache in "),
        (("--model", ""), "--model '': no such file or folder"),
        (("--model", "{trace}"), "not JSON"),
        (("--model", "{strange}"), "model_type='strange': mlx-lm"),
        (("--model", TINY, "--codec", "gzip"), "codec='gzip': not a codec; write"),
        (("--model", TINY, "--trace", "/nowhere"), "/nowhere: can't be read"),
        (("--model", TINY, "--trace", "{empty}"), "no request in it"),
        (("--model", TINY, "--trace", "{wrong}", "--block", 256), "line 1: input_length is missing"),
        (("--model", TINY, "--trace", "{trace}", "--block", 99), "stands for with --block"),
        (("--model", TINY, "--trace", "{trace}", "--ram", "20QB"), "--ram='20QB': not a size; write"),
        (("--model", TINY, "--trace", "{trace}", "--ram", "0,1GB"), "--ram 0: nothing could be kept"),
        (("--model", TINY, "--trace", "{trace}", "--policy", "mru"), "--policy 'mru': none of those there are"),
        (("--model", TINY, "--trace", "{trace}", "--ssd-admission", "never"), "write always, second"),
        (("--model", TINY, "--ram", "8GB"), "--ram without --trace: nothing is simulated; add --trace FILE"),
        (("--model", TINY, "--lease-tokens", 5), "--lease-tokens without --trace"),
        (("--model", TINY, "--trace", "{trace}", "--lease", "inf", "--json"), "--lease inf: not possible; give 0, or"),
        (("--model", TINY, "--ssd-rate", "0"), "--ssd-rate 0: nothing would ever arrive; give a size"),
        (("--model", TINY, "--decode-rate", "-1GB"), "not a size"),
        (("--model", TINY, "--tbw", "0"), "--tbw 0: "),
        (("--model", TINY, "--prefill-rate", "0"), "--prefill-rate 0: not possible; give a number from 1e-06 to 1e+12"),
        (("--model", TINY, "--prefill-rate", "nan"), "--prefill-rate nan: not possible"),
        (("--model", TINY, "--ram-price", "-1"), "--ram-price -1: not possible; give 0, or a number from"),
    ],
)
def test_what_can_not_be_planned_is_refused_with_the_remedy(call, trace, tmp_path, args, told):
    files = {name: tmp_path / name for name in ("strange", "empty", "wrong")}
    files["strange"].write_text('{"model_type": "strange"}')
    files["empty"].write_text("")
    files["wrong"].write_text('{"timestamp": 0}\n' * 2)
    done = call("plan", *(str(arg).format(trace=trace, **files) for arg in args))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert done.stderr.startswith("prefixcache: ")
    assert told in done.stderr


def test_ctrl_c_ends_with_130(call, monkeypatch):
    def stop(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "_model", stop)
    done = call("plan", "--model", TINY)
    assert (done.exit_code, done.stderr) == (130, "prefixcache: plan: stopped by SIGINT\n")


def test_the_help_tells_the_exit_codes(call):
    done = call("plan", "--help")
    assert done.exit_code == 0
    assert "Exit code: 0 planned" in done.stdout


def test_a_servers_variables_change_nothing(planned, monkeypatch, tmp_path):
    before = planned("--ram", "1MB", "--ssd", "8MB")
    monkeypatch.setenv("PREFIXCACHE_SSD_DIR", str(tmp_path / "server"))
    monkeypatch.setenv("PREFIXCACHE_RAM", "1GB")
    assert planned("--ram", "1MB", "--ssd", "8MB") == before
    assert not (tmp_path / "server").exists()


def test_the_usual_codec_is_the_settings():
    with PrefixCache(ram="1MB") as cache:
        assert cache.codec.spec() == as_codec(DEFAULT_CODEC).spec()
