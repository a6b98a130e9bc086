"""`prefixcache evaluate`: raw is the reference, more bits are nearer to it, what can't be measured is refused.

The models are random and tiny, so only what codecs change can be seen with them; that a hidden number is told is tested
with the trained model in tests/fixtures.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from prefixcache.cli.evaluate import measuring as evaluating
from prefixcache.cli.evaluate import trials
from prefixcache.cli.evaluate.measuring import Subject, measure
from prefixcache.cli.evaluate.report import as_markdown, main_grid
from prefixcache.cli.evaluate.texts import EvaluationSize, default_text
from prefixcache.cli.evaluate.trials import RowScores
from prefixcache.cli.text import Refused
from tests.models.calibrated import calibrate
from tests.models.families import FAMILIES, MLX_LM_0_31
from tests.servers.serving import save_model

ROOT = Path(__file__).parent.parent.parent
SPECS = ["raw", "turboquant:8", "turboquant:4", "turboquant:2"]
SMALL = ("--prefix", 300, "--tokens", 32, "--windows", 2, "--needles", 1, "--depths", 2)

TOP = {"model", "adapter", "float32", "text", "job", "versions", "depths", "reference", "codecs"}
REFERENCE = {"perplexity", "windows", "needles"}
CODEC = {
    "codec",
    "name",
    "spec",
    "identical",
    "bits_per_value",
    "values_per_token",
    "live_bytes_per_token",
    "payload_bytes_per_token",
    "stored_bytes_per_token",
    "ratio",
    "layers",
    "raw_layers",
    "perplexity",
    "perplexity_difference",
    "perplexity_difference_error",
    "perplexity_ratio",
    "perplexity_ratio_error",
    "kl_mean",
    "kl_error",
    "kl_p99",
    "top1",
    "top1_error",
    "windows",
    "needles",
}


class Bytes:
    """A tokenizer whose tokens are ASCII characters."""

    bos_token_id = None
    eos_token_ids: set[int] = set()
    has_chat_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte % 128 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("ascii")


def subject(family: str) -> Subject:
    return Subject(FAMILIES[family].build(), Bytes(), 4096)


def by_name(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {codec["codec"]: codec for codec in facts["codecs"]}


def shown(facts: dict[str, Any]) -> str:
    return as_markdown({"model": "m", "text": {"files": [], "python": "3"}, **facts})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds a random Llama under every name."""
    monkeypatch.setattr(evaluating, "load", lambda name, adapter, **more: subject("llama"))


# -- what is measured -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "llama-bf16", "gemma3_text", "qwen3_next"])
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A dense, a half-precision, a sliding-window and a hybrid model."""
    job = EvaluationSize(prefix=300, tokens=64, windows=2, needles=1, depths=2)
    return measure(subject(request.param), SPECS, default_text(), job)


def test_raw_is_the_reference_bit_for_bit(measured):
    raw, reference = by_name(measured)["raw"], measured["reference"]
    assert raw["identical"]
    assert (raw["kl_mean"], raw["kl_p99"], raw["top1"]) == (0, 0, 1)
    assert raw["perplexity"] == reference["perplexity"]
    assert [window["nll"] for window in raw["windows"]] == [window["nll"] for window in reference["windows"]]
    assert raw["needles"] == reference["needles"]
    assert (raw["ratio"], raw["raw_layers"]) == (1, [])


def test_more_bits_are_nearer_to_the_reference(measured):
    found = by_name(measured)
    assert 0 < found["turboquant:8"]["kl_mean"] < found["turboquant:4"]["kl_mean"] < found["turboquant:2"]["kl_mean"]
    assert found["turboquant:4"]["top1"] > found["turboquant:2"]["top1"]
    assert not found["turboquant:4"]["identical"]


def test_bits_and_bytes_are_those_of_the_format(measured):
    found = by_name(measured)
    levels = (16 + 8 + 8) / 2 / 256  # of a channel in a block: the mean of its keys, the roots of keys and of values
    assert found["turboquant:8"]["bits_per_value"] == 8 + 16 / 32 + levels
    assert found["turboquant:4"]["bits_per_value"] == 4 + 16 / 32 + levels  # rows of 32 values with a 16-bit scale
    assert found["turboquant:2"]["bits_per_value"] == 2 + 16 / 32 + levels
    raw = found["raw"]
    assert raw["live_bytes_per_token"] == raw["payload_bytes_per_token"]
    assert raw["bits_per_value"] == 8 * raw["live_bytes_per_token"] / raw["values_per_token"]
    for codec in found.values():
        assert codec["ratio"] == raw["live_bytes_per_token"] / codec["payload_bytes_per_token"]
    stored = [found[name]["stored_bytes_per_token"] for name in ("raw", "turboquant:8", "turboquant:4", "turboquant:2")]
    assert stored == sorted(stored, reverse=True)


def test_every_window_and_every_number_is_counted(measured):
    assert measured["depths"] == [0, 1]
    for of in (measured["reference"], *measured["codecs"]):
        assert len(of["windows"]) == 2
        assert of["needles"]["asked"] == 2
        assert [at["depth"] for at in of["needles"]["by_depth"]] == [0, 1]


def test_a_model_without_rows_has_no_bits_and_is_restored_exactly():
    facts = measure(subject("mamba"), ["raw", "turboquant:4"], default_text(), EvaluationSize(300, 40, 2, 0))
    for codec in facts["codecs"]:
        assert codec["identical"]
        assert (codec["bits_per_value"], codec["ratio"]) == (None, None)
    assert "| turboquant:4 | - |" in shown(facts)


def test_all_windows_of_a_codec_are_new_to_one_cache(monkeypatch):
    stored = []
    keep = trials.Trial.keep

    def noting(self, prompt, live):
        done = keep(self, prompt, live)
        stored.append((tuple(prompt), done.new_tokens, self.cache.stats().namespaces))
        return done

    monkeypatch.setattr(trials.Trial, "keep", noting)
    facts = measure(subject("llama"), ["turboquant:4"], default_text(), EvaluationSize(300, 20, 3, 0))
    assert len(facts["codecs"][0]["windows"]) == 3
    assert len({prompt for prompt, _, _ in stored}) == 4  # each was new to the one cache that the codec has
    assert [(new, spaces) for _, new, spaces in stored] == [(300, 1)] * 4


def test_layers_that_a_codec_leaves_raw_are_told():
    family = FAMILIES["deepseek_v3"]
    facts = measure(
        Subject(family.build(), Bytes(), None), ["raw", "turboquant:4"], default_text(), EvaluationSize(300, 20, 1, 0)
    )
    (raw, turbo) = facts["codecs"]
    assert raw["raw_layers"] == []
    expected = sorted(turbo["raw_layers"])
    told = shown(facts)
    assert ("turboquant:4: keys or values of" in told) == bool(expected)
    assert turbo["kl_error"] is None  # one text has no standard error


# -- the command ------------------------------------------------------------------------------------------------------


def test_json_has_everything_and_its_shape_is_stable(call, tiny):
    done = call("evaluate", "some/model", *SMALL, "--codec", "turboquant:8", "--codec", "turboquant:4:3", "--json")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    facts = json.loads(done.stdout)
    assert facts.keys() == TOP
    assert facts["reference"].keys() == REFERENCE
    assert [codec["codec"] for codec in facts["codecs"]] == ["raw", "turboquant:8", "turboquant:4:3"]
    assert {key for codec in facts["codecs"] for key in codec} == CODEC
    assert {key for codec in facts["codecs"] for window in codec["windows"] for key in window} == {"nll", "kl", "top1"}
    assert facts["job"] == {
        "prefix": 300,
        "tokens": 32,
        "windows": 2,
        "needles": 1,
        "depths": 2,
        "seed": 0,
        "text_tokens": len(Bytes().encode(default_text())),
        "prefill": 512,
    }
    assert facts["codecs"][2]["spec"]["name"] == "turboquant"


def test_the_table_shows_every_codec_of_the_default_selection(call, tiny):
    command = importlib.import_module("prefixcache.cli.evaluate.command")
    assert {f"turboquant:{bits}" for bits in ("8", "4", "4:2", "3", "2")} <= {*command.DEFAULT}
    done = call("evaluate", "some/model", *SMALL, "--windows", 1, "--depths", 1)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    for name in ("live cache", "raw", *command.DEFAULT):
        assert len([line for line in lines if line.split("  ")[0].strip() == name]) == 2, name
    assert "other text gives other numbers" in " ".join(done.stdout.split())
    assert "every logit is the live cache's bit for bit" in done.stdout


def test_weights_are_cast_to_float32_where_asked_for_and_it_is_told(call):
    small = (*SMALL, "--windows", 1, "--needles", 0)
    args = ("evaluate", ROOT / "tests/fixtures/tiny-qwen2", *small, "--codec", "turboquant:4")
    done = call(*args, "--float32", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["float32"]
    raw, coded = facts["codecs"]
    assert raw["bits_per_value"] == 32
    assert raw["identical"]
    assert coded["bits_per_value"] == 4 + 16 / 64 + 0.0625  # codes, scales, and what levels take in a whole block
    assert "The weights were cast to float32" in as_markdown(facts)
    assert not json.loads(call(*args, "--prefix", 40, "--json").stdout)["float32"]


def test_markdown_has_the_same_rows(call, tiny):
    done = call("evaluate", "some/model", *SMALL, "--codec", "turboquant:4", "--markdown", "--needles", 0)
    assert done.exit_code == 0, done.output
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["codec", "---", "live cache", "raw", "turboquant:4"]
    assert len({row.count("|") for row in rows}) == 1
    assert "numbers told" not in done.stdout


def test_a_text_of_ones_own_is_read_and_named(call, tiny, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("All happy families are alike. " * 100)
    done = call("evaluate", "some/model", *SMALL, "--codec", "turboquant:8", "--text", own, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["text"] == {"files": [str(own)], "python": None}
    assert facts["job"]["text_tokens"] == 3000


def test_an_infinite_divergence_is_null_and_shown_as_none(monkeypatch):
    def broken(reference, logits, targets):
        infinite = np.full(len(targets), np.inf)
        return RowScores(infinite, infinite, np.zeros(len(targets), bool))

    monkeypatch.setattr(trials, "compare", broken)
    facts = measure(subject("llama"), ["raw"], default_text(), EvaluationSize(300, 20, 2, 0))
    json.dumps(facts, allow_nan=False)
    assert facts["codecs"][0]["kl_mean"] is None
    grid = main_grid(facts)
    assert grid.rows[1][grid.headings.index("KL,\nnats")] == "-"


# -- what can't be measured -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--codec", "gzip"), "codec='gzip': not a codec; write"),
        (("--codec", "turboquant:9"), "key_bits=9: not a bit depth"),
        (("--text", "/nowhere/text.txt"), "--text /nowhere/text.txt: can't be read"),
        (("--json", "--markdown"), "give one of them"),
        (("--prefix", 4000, "--tokens", 200), "4096 positions (max_position_embeddings); give --prefix 3896 or less"),
        (("--windows", 5000, "--prefix", 300), "give more text (--text), or smaller --windows"),
        (("--prefix", 30, "--windows", 1), "--prefix 30: no room for 5 numbers"),
    ],
)
def test_what_can_not_be_measured_is_refused_with_the_remedy(call, tiny, args, told):
    done = call("evaluate", "some/model", *args)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert done.stderr.startswith("prefixcache: ")
    assert told in done.stderr


def test_a_model_that_is_not_there_or_is_none_is_refused(call, tmp_path):
    done = call("evaluate", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "no such folder; give a model's folder, or its name on Hugging Face" in done.stderr
    done = call("evaluate", tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path}: no config.json in it; give a model's folder" in done.stderr
    (tmp_path / "config.json").write_text("{}")
    done = call("evaluate", tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path}: mlx-lm can't load it: " in done.stderr
    done = call("evaluate", tmp_path, "--adapter-path", tmp_path / "none")
    assert done.exit_code == 2
    assert "--adapter-path" in done.stderr


@pytest.mark.skipif(MLX_LM_0_31, reason="it runs a model's own code unasked")
def test_code_that_comes_with_a_model_is_run_where_it_is_trusted(tmp_path):
    model = save_model(tmp_path / "own")
    (model / "model.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    with pytest.raises(Refused, match="--trust-remote-code"):
        evaluating.load(str(model))
    assert evaluating.load(str(model), trusted=True).model.layers


def test_a_cache_that_can_not_be_stored_is_refused(monkeypatch):
    monkeypatch.setattr(trials.Reference, "fill", lambda self, prompt: [BatchKVCache([0])])
    with pytest.raises(Refused, match="this model's prompt cache can't be stored: layer 0"):
        measure(subject("llama"), ["raw"], default_text(), EvaluationSize(300, 20, 1, 0))


def test_state_that_can_not_be_restored_is_refused(monkeypatch):
    monkeypatch.setattr(trials.PrefixCache, "lookup", lambda self, tokens, model: None)
    with pytest.raises(Refused, match="of 300 tokens that were stored 0 can be found"):
        measure(subject("llama"), ["raw"], default_text(), EvaluationSize(300, 20, 1, 0))


def test_a_servers_variables_do_not_lead_to_its_directory(call, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_SSD_DIR", str(tmp_path / "server"))
    monkeypatch.setenv("PREFIXCACHE_RAM", "1GB")
    done = call("evaluate", "some/model", *SMALL, "--codec", "turboquant:8", "--needles", 0)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "server").exists()


def test_a_servers_variables_do_not_send_the_texts_to_its_fleet(call, tiny, tmp_path, monkeypatch):
    fleet = tmp_path / "fleet"
    fleet.mkdir()
    monkeypatch.setenv("PREFIXCACHE_REMOTE", f"file://{fleet}")
    monkeypatch.setenv("PREFIXCACHE_REMOTE_ADMISSION", "always")
    done = call("evaluate", "some/model", *SMALL, "--codec", "turboquant:8", "--needles", 2)
    assert done.exit_code == 0, done.output
    assert not list(fleet.iterdir())


# -- the trained model ------------------------------------------------------------------------------------------------


def test_the_trained_model_tells_the_numbers_from_a_restored_cache(call):
    done = call(
        "evaluate",
        ROOT / "tests/fixtures/tiny-llama",
        "--prefix",
        400,
        "--tokens",
        64,
        "--windows",
        1,
        "--needles",
        1,
        "--depths",
        2,
        "--codec",
        "turboquant:4",
        "--json",
    )
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    found = by_name(facts)
    assert found["raw"]["identical"]
    assert found["raw"]["needles"] == facts["reference"]["needles"]
    asked = facts["reference"]["needles"]["asked"]
    assert asked == 2
    assert facts["reference"]["needles"]["right"] >= asked - 1
    assert found["turboquant:4"]["needles"]["right"] >= facts["reference"]["needles"]["right"] - 1
    assert found["turboquant:4"]["perplexity_ratio"] < 1.1
    assert found["turboquant:4"]["top1"] > 0.9


def test_a_transform_is_not_measured_without_a_basis_and_with_one_it_is(call, tmp_path):
    model = save_model(tmp_path / "model")
    wanted = (
        "evaluate",
        model,
        *SMALL,
        "--windows",
        1,
        "--needles",
        0,
        "--codec",
        "transform",
        "--basis-dir",
        tmp_path,
    )
    refused = call(*wanted)
    assert refused.exit_code == 2
    assert "codec transform: no basis of this model in " in refused.output
    calibrate(model, tmp_path)
    done = call(*wanted, "--json")
    assert done.exit_code == 0, done.output
    found = {codec["codec"]: codec for codec in json.loads(done.stdout)["codecs"]}
    assert found["transform"]["stored_bytes_per_token"] < found["raw"]["stored_bytes_per_token"]
