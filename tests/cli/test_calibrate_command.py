"""`prefixcache calibrate`: the same request gives the same file, interrupted or not; what gives no basis is refused."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.utils import linear_to_lora_layers

from prefixcache import model_identity
from prefixcache.calibration import checkpoint, layers, statistics, texts
from prefixcache.cli.calibrate.making import _ranges, make
from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.evaluate.measuring import load
from prefixcache.cli.evaluate.texts import opening_of
from prefixcache.cli.text import size
from prefixcache.codecs.transform import bases, basis
from prefixcache.codecs.transform.codec import Transform
from tests.servers.serving import save_model

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-llama"
TEXT = texts.CORPUS / "languages" / "english_dialogue.txt"
SIZE = ("--windows", 4, "--tokens", 96, "--draws", 3)
SMALL = ("--text", TEXT, *SIZE)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has bases of its own."""
    monkeypatch.setattr(bases, "_loaded", {})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random half-precision weights with few channels, whose bases are made in no time."""
    folder = save_model(tmp_path_factory.mktemp("models") / "small", num_hidden_layers=2)
    weights = folder / "model.safetensors"
    half = {name: weight.astype(mx.float16) for name, weight in mx.load(str(weights)).items()}
    mx.eval(half)
    mx.save_safetensors(str(weights), half, metadata={"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def job(small: Path) -> Calibration:
    return Calibration(str(small), texts=[TEXT], windows=4, tokens=96, draws=3)


@pytest.fixture(scope="module")
def calibrated(job: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(job, tmp_path_factory.mktemp("bases")).path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupt_after(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> list[int]:
    """A method of the statistics raises SIGINT when it was called so often; every window makes a checkpoint."""
    monkeypatch.setattr(checkpoint, "INTERVAL", 0)
    monkeypatch.setattr(checkpoint, "SHARE", 0)
    method, seen = getattr(statistics._Gathered, name), []

    def counted(*arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == calls + 1:
            signal.raise_signal(signal.SIGINT)
        return method(*arguments)

    monkeypatch.setattr(statistics._Gathered, name, counted)
    return seen


# -- what comes of it ---------------------------------------------------------------------------------------------------


def test_the_basis_of_a_model_is_found_by_its_identity_and_the_folder_holds_nothing_else(
    call, tmp_path, calibrated, small, monkeypatch
):
    folder = tmp_path / "not" / "there" / "yet"
    monkeypatch.setenv("PREFIXCACHE_BASIS_DIR", str(folder))
    done = call("calibrate", small, *SMALL, "--json")
    assert done.exit_code == 0, done.output
    assert files(folder) == [calibrated.name]
    assert (folder / calibrated.name).read_bytes() == calibrated.read_bytes()
    identity = model_identity(small)
    codec = Transform().for_model(identity, bases.Bases(folder))
    assert codec.spec()["basis"] == calibrated.stem[-32:]
    assert [layer.index for group in codec.basis.groups for layer in group.layers] == [0, 1]
    assert {layer.dtype for group in codec.basis.groups for layer in group.layers} == {"float16"}
    assert codec.basis.model == identity
    said, read = json.loads(done.stdout), basis.read(folder / calibrated.name)
    assert said["file"] == str(folder / calibrated.name)
    assert (said["hash"], said["model"], said["metric"]) == (read.hash, read.model, "fisher")
    assert (said["groups"], said["left_out"], said["was_there"]) == ([[0, 1]], {}, False)
    assert said["token_bytes"]["fp16"] == read.fp16_bytes == 2 * sum(group.channels for group in read.groups)
    assert said["token_bytes"]["coded"] == read.coded_bytes(4) > 0
    assert said["token_bytes"]["ratio"] == read.fp16_bytes / read.coded_bytes(4)
    assert said["ram_bytes"] == read.nbytes
    taken = {codec["codec"]: codec["token_bytes"] for codec in said["codecs"]}
    assert [*taken] == ["raw", "turboquant:4", "transform:5", "transform:4", "transform:3"]
    assert taken["raw"] == read.fp16_bytes > taken["turboquant:4"] > 0  # of a basis of random weights nothing is known
    assert taken["transform:4"] == read.coded_bytes(4)


def test_the_screen_says_what_is_transformed_and_what_to_write_next(call, tmp_path, calibrated, small):
    shutil.copy(calibrated, tmp_path)
    done = call("calibrate", small, *SMALL, "--basis-dir", tmp_path)
    assert f"{tmp_path / calibrated.name} (was there)" in done.stdout
    assert "transformed: 2 of 2 layers, in 1 group" in done.stdout
    assert "times smaller" in done.stdout
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()}
    assert rows["raw"].split()[:4] == ["raw", "512", "B", "0"]
    assert max(len(rows[name]) for name in ("raw", "turboquant:4", "transform:5", "transform:4", "transform:3")) <= 80
    assert f"prefixcache serve --model {small} --codec transform --basis-dir {tmp_path}" in done.stdout


def test_a_basis_of_the_same_request_is_found_again_and_nothing_is_read(call, tmp_path, calibrated, small, monkeypatch):
    shutil.copy(calibrated, tmp_path)
    monkeypatch.setattr(statistics, "prefilled", None)
    done = call("calibrate", small, *SMALL, "--basis-dir", tmp_path, "--json")
    assert (done.exit_code, files(tmp_path)) == (0, [calibrated.name])
    assert json.loads(done.stdout)["was_there"]


def test_another_request_gives_another_basis_and_the_one_that_was_asked_for_last_is_taken(tmp_path, calibrated, job):
    shutil.copy(calibrated, tmp_path)
    identity = model_identity(job.model)
    first = make(job, tmp_path)
    other = make(replace(job, draws=2), tmp_path)
    assert first.path != other.path
    assert bases.Bases(tmp_path).of_model(identity).hash == other.basis.hash
    again = make(job, tmp_path)
    assert again.path == first.path
    assert bases.Bases(tmp_path).of_model(identity).hash == first.basis.hash
    assert len(files(tmp_path)) == 2


def test_a_cast_models_basis_is_for_the_model_as_it_is_served(tmp_path, calibrated, job):
    cast = make(replace(job, float32=True), tmp_path).basis
    served = basis.read(calibrated)
    assert cast.hash != served.hash
    assert {layer.dtype for group in cast.groups for layer in group.layers} == {"float32"}  # as they were read
    dtype = served.groups[0].layers[0].dtype
    as_served = [tuple(layer._replace(dtype=dtype) for layer in group.layers) for group in cast.groups]
    assert as_served == [group.layers for group in served.groups]
    mine, theirs = cast.groups[0], served.groups[0]
    assert np.abs(mine.mean - theirs.mean).max() < 0.05 * np.abs(theirs.mean).max()


def test_an_adapters_basis_is_its_own(call, tmp_path, small):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shape = {"rank": 2, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.k_proj"]}
    (adapter / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": shape})
    )
    mx.random.seed(0)
    model = load(str(small)).model
    linear_to_lora_layers(model, 2, shape)
    weights = {name: mx.random.normal(w.shape) for name, w in tree_flatten(model.parameters()) if "lora" in name}
    assert weights
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    done = call("calibrate", small, *SMALL, "--basis-dir", tmp_path / "bases", "--adapter-path", adapter)
    assert done.exit_code == 0, done.output
    assert f"--adapter-path {adapter} --codec transform" in done.stdout
    found = bases.Bases(tmp_path / "bases")
    assert found.of_model(model_identity(small)) is None
    assert found.of_model(model_identity(small, adapter)) is not None


def test_layers_with_windows_are_told_and_those_that_are_left_out_with_the_reason(call, tmp_path):
    model = save_model(tmp_path / "model", "recurrent_gemma")
    done = call("calibrate", model, *SMALL, "--basis-dir", tmp_path / "bases")
    assert done.exit_code == 0, done.output
    assert "transformed: 1 of 4 layers, in 1 group" in done.stdout
    assert "layers 0-1, 3: recurrent state" in done.stdout
    assert "1 attends to the last 32 tokens" in done.stdout
    rows = {line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines() if line.split()}
    assert (rows["raw"], rows["turboquant:4"]) == (["256", "B"], ["36", "B"])


def test_a_basis_without_the_windows_is_made_again(tmp_path, monkeypatch):
    """As an earlier release made it of the same text."""
    model = save_model(tmp_path / "model", "gemma3_text")
    job, folder = Calibration(str(model), texts=[TEXT], windows=4, tokens=96, draws=3), tmp_path / "bases"
    folder.mkdir()
    with monkeypatch.context() as earlier:
        earlier.setattr(layers, "window_of", lambda cache: 0 if type(cache) is KVCache else None)
        assert make(job, folder).basis.layers == 1
    made = make(job, folder)
    assert (made.basis.layers, made.was_there) == (4, False)
    assert make(job, folder).was_there


def test_without_a_text_it_reads_a_mix_of_many_kinds(call, tmp_path, small):
    done = call("calibrate", small, *SIZE, "--basis-dir", tmp_path, "--json")
    assert json.loads(done.stdout)["texts"].startswith("default text, 4 windows of 96 tokens, 3 draws, request ")


# -- what is there ------------------------------------------------------------------------------------------------------


def test_the_list_has_each_basis_with_its_numbers(call, tmp_path, calibrated, job):
    shutil.copy(calibrated, tmp_path)
    other = make(replace(job, draws=2), tmp_path).path
    (tmp_path / ".calibrating-0.npz").write_bytes(b"")
    done = call("calibrate", "--list", "--basis-dir", tmp_path)
    assert done.exit_code == 0, done.output
    for path in (calibrated, other):
        found = basis.read(path)
        shown = " ".join(next(line for line in done.stdout.splitlines() if found.hash[:8] in line).split())
        ratio = found.fp16_bytes / found.coded_bytes(4)
        name, ram = found.model.partition("@")[0], size(found.nbytes)
        assert shown.startswith(
            f"{name} {found.hash[:8]} {found.layers} in 1 {ram} {ratio:.1f} x - - fisher "
        )  # too short for KL
    listed = json.loads(call("calibrate", "--list", "--basis-dir", tmp_path, "--json").stdout)
    assert {found["basis"]["hash"] for found in listed["bases"]} == {calibrated.stem[-32:], other.stem[-32:]}
    assert [found["error"] for found in listed["bases"]] == [None, None]
    assert all(found["written"] <= listed["now"] for found in listed["bases"])


def test_the_list_names_damaged_files_with_the_reason(call, tmp_path, calibrated):
    (tmp_path / calibrated.name).write_bytes(calibrated.read_bytes()[:-9])
    renamed = tmp_path / f"other-{'0' * 32}.safetensors"
    shutil.copy(calibrated, renamed)
    done = call("calibrate", "--list", "--basis-dir", tmp_path)
    assert done.exit_code == 1
    said = " ".join(done.stdout.split())
    assert f"{calibrated.name}: not a basis:" in said
    assert f"{renamed.name}: its content is not what its name says; delete it and calibrate again" in said


def test_the_list_of_an_empty_folder_says_how_to_make_one(call, tmp_path):
    for folder in (tmp_path, tmp_path / "not there"):
        done = call("calibrate", "--list", "--basis-dir", folder)
        assert done.exit_code == 0
        assert "no basis; prefixcache calibrate MODEL makes one" in " ".join(done.stdout.split())
    assert not (tmp_path / "not there").exists()


@pytest.mark.parametrize("given", [(), (TINY, "--list")])
def test_a_model_and_the_list_are_one_or_the_other(call, tmp_path, given):
    done = call("calibrate", *given, "--basis-dir", tmp_path)
    assert done.exit_code == 2
    assert "give either MODEL, a model's folder or name, or --list" in done.stderr


# -- interrupted --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(job: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(replace(job, draws=7), tmp_path_factory.mktemp("bases")).path


@pytest.mark.parametrize(("name", "calls"), [("read", 2), ("differentiate", 1)])
def test_an_interrupted_calibration_goes_on_where_it_was_and_gives_the_same_file(
    call, tmp_path, small, uninterrupted, monkeypatch, name, calls
):
    args = ("calibrate", small, "--text", TEXT, "--windows", 4, "--tokens", 96, "--draws", 7, "--basis-dir")
    with monkeypatch.context() as patched:
        interrupt_after(patched, name, calls)
        ended = call(*args, tmp_path / "cut")
    assert (ended.exit_code, ended.stdout) == (130, "")
    assert ended.stderr == "prefixcache: ended by SIGINT: the same command goes on where it was\n"
    (kept,) = files(tmp_path / "cut")
    assert kept.startswith(".calibrating-")
    assert (tmp_path / "cut" / kept).stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patched:
        seen = interrupt_after(patched, name, 100)
        done = call(*args, tmp_path / "cut")
    assert done.exit_code == 0, done.output
    assert len(seen) == {"read": 4, "differentiate": 2}[name] - calls
    assert files(tmp_path / "cut") == [uninterrupted.name]
    assert (tmp_path / "cut" / uninterrupted.name).read_bytes() == uninterrupted.read_bytes()


def test_interrupted_before_anything_was_kept_it_says_so(call, tmp_path, small, monkeypatch):
    interrupt_after(monkeypatch, "read", 0)
    ended = call("calibrate", small, *SMALL, "--basis-dir", tmp_path)
    assert ended.exit_code == 130
    assert "begins anew" in ended.stderr
    assert files(tmp_path) == []


# -- refused ------------------------------------------------------------------------------------------------------------


def test_a_model_without_eligible_layers_is_refused_with_the_reasons(call, tmp_path):
    model = save_model(tmp_path / "model", "mamba")
    done = call("calibrate", model, *SMALL, "--basis-dir", tmp_path / "bases")
    assert done.exit_code == 2
    assert "no layer can be transformed (layers 0-3: recurrent state)" in done.stderr
    assert files(tmp_path / "bases") == []


def test_a_text_that_is_too_short_is_refused_with_what_it_has(call, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("It was a dark and stormy night. " * 20)
    done = call("calibrate", TINY, *SIZE, "--basis-dir", tmp_path / "bases", "--text", text)
    assert done.exit_code == 2
    assert "4 windows of 96 tokens and one to hold back need 475 tokens of text; the text has" in done.stderr
    assert "ask for fewer or shorter windows, or give more text" in done.stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((TINY, "--text", "/nowhere/text"), "--text /nowhere/text: can't be read (No such file or directory)"),
        ((TINY, "--tokens", 5000), "--tokens 5,000: the model is made for 4,096; give --tokens 4096"),
        ((TINY, "--adapter-path", "/nowhere"), "--adapter-path /nowhere: no such folder"),
        (("/nowhere",), "/nowhere: no such folder"),
        ((TINY, "--windows", 0), "--windows"),
        ((TINY, "--basis-dir", __file__), "can't be written to (File exists); give a folder that can be"),
        ((TINY, "--basis-dir", "/proc/bases"), "--basis-dir /proc/bases: can't be written to"),
    ],
)
def test_what_can_not_be_calibrated_is_refused_with_the_remedy(call, tmp_path, args, told):
    given = () if "--basis-dir" in args else ("--basis-dir", tmp_path)
    done = call("calibrate", *args, *given)
    assert done.exit_code == 2
    assert told in done.stderr


# -- parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "draws", "shared"),
    [(64, 96, (16, 6)), (64, 1, (1, 1)), (8, 96, (8, 12)), (64, 10, (2, 5)), (2, 13, (2, 7))],
)
def test_draws_are_shared_out_over_windows_evenly(windows, draws, shared):
    job = Calibration("", windows=windows, draws=draws)
    assert (job.fisher_windows, job.draws_each) == shared


def test_the_opening_is_what_the_tokenizer_adds_before_a_text():
    class Opens:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [7, 8, *text.encode(), 9] if add_special_tokens else list(text.encode())

    assert opening_of(Opens()) == [7, 8]
    assert opening_of(load(str(TINY)).tokenizer) == [0]


def test_ranges_of_layers():
    assert _ranges([4, 0, 2, 1, 7, 8]) == "0-2, 4, 7-8"
