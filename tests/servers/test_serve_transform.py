"""`prefixcache serve --codec transform` and `warm` as processes: with a basis of the model, and without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from prefixcache import model_identity
from prefixcache.cli import app
from prefixcache.codecs.transform import bases
from prefixcache.codecs.transform.basis import read
from tests.models.calibrated import calibrate
from tests.models.families import MLX_LM_0_31
from tests.servers import forked
from tests.servers.serving import TINY, Server, ask, chat, save_adapter, save_model, serve, serving, starting, text

LIMITS = ("--ram", "200MB", "--codec", "transform")
SYSTEM, QUESTIONS = text(600, "transform"), [text(20, f"question {turn}") for turn in range(2)]


@pytest.fixture(scope="module")
def basis(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, alone in its folder."""
    return calibrate(model, tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "_loaded", {})


def model_line(server: Server) -> str:
    (line,) = [line for line in server.said().splitlines() if " - model " in line]
    return line


def warnings_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if "no basis of model" in line]


def images(directory: Path) -> int:
    return sum(file.stat().st_size for file in (directory / "rows").rglob("*.safetensors"))


def test_answers_are_the_same_from_ram_and_after_a_restart_from_ssd(model, basis, tmp_path):
    flags = ["--model", model, "--basis-dir", basis.parent, "--ssd-dir", tmp_path / "ssd"]
    with serving(tmp_path / "first.log", *flags, limits=LIMITS) as first:
        cold = chat(first, SYSTEM, QUESTIONS)
        again = chat(first, SYSTEM, QUESTIONS)
        said = model_line(first)
    coded = read(basis)
    ratio = coded.fp16_bytes / coded.coded_bytes(4)
    assert f"codec transform quality 4 basis {coded.hash[:8]}: 4 layers transformed, {ratio:.1f} times smaller" in said
    assert cold[0].cached == 0
    assert cold[1].cached >= 256
    assert [answer.text for answer in again] == [answer.text for answer in cold]
    assert again[0].cached >= 512  # its tail has grown into the second turn's block
    assert again[1].computed == 1
    with serving(tmp_path / "second.log", *flags, limits=LIMITS) as second:
        restarted = chat(second, SYSTEM, QUESTIONS)
    assert [answer.text for answer in restarted] == [answer.text for answer in cold]
    assert restarted[0].cached >= 512
    assert restarted[1].computed == 1


def test_what_is_stored_is_smaller_than_with_turboquant(model, basis, tmp_path):
    stored = {}
    for codec in ("transform:3", "turboquant:4"):
        directory = tmp_path / codec.replace(":", "-")
        flags = ["--model", model, "--basis-dir", basis.parent, "--ssd-dir", directory]
        with serving(tmp_path / "log", *flags, limits=("--ram", "200MB", "--codec", codec)) as server:
            assert ask(server, [{"role": "user", "content": text(620, "stored")}]).prompt > 512
        stored[codec] = images(directory)
    assert 0 < stored["transform:3"] < 0.8 * stored["turboquant:4"]


@pytest.mark.parametrize("with_adapter", [False, True])
def test_without_a_basis_one_line_says_what_to_run_and_rows_are_turboquants(tmp_path, with_adapter):
    model, folder = save_model(tmp_path / "a model"), tmp_path / "bases"
    adapter = save_adapter(tmp_path / "adapter", model) if with_adapter else None
    more = ["--adapter-path", adapter] if adapter else []
    with starting(serve, tmp_path / "log", *LIMITS, "--model", model, "--basis-dir", folder, *more) as server:
        server.ready()
        prompt = [{"role": "user", "content": text(300, "without")}]
        first = ask(server, prompt)
        assert ask(server, prompt) == first._replace(cached=first.prompt - 1)
        line, said = model_line(server), server.said()
        assert server.end() == 0
    (warning,) = warnings_of(said)
    adapted = f" --adapter-path {adapter}" if adapter else ""
    assert f"no basis of model {model_identity(model, adapter)} in {folder}" in warning
    assert f"run `prefixcache calibrate '{model}'{adapted} --basis-dir {folder}`" in warning
    assert "coded by turboquant k4 v4" in warning
    assert "codec turboquant k4 v4" in line


def test_a_basis_that_is_made_while_the_server_runs_codes_the_next_prompt(tmp_path):
    """Of a trained model: the next token that one of random weights gives may be another with TurboQuant's rows."""
    model, folder = tmp_path / "tiny-llama", tmp_path / "bases"
    shutil.copytree(TINY, model)
    weights = mx.load(str(TINY / "model.safetensors"))
    assert isinstance(weights, dict)
    single = {name: weight.astype(mx.float32) for name, weight in weights.items()}  # a CPU multiplies them faster
    mx.save_safetensors(str(model / "model.safetensors"), single, metadata={"format": "mlx"})
    basis = calibrate(model, tmp_path / "made")
    with starting(serve, tmp_path / "log", *LIMITS, "--model", model, "--basis-dir", folder) as server:
        server.ready()
        chat(server, SYSTEM, QUESTIONS[:1])
        folder.mkdir()
        shutil.copy(basis, folder)
        turned, again = (chat(server, SYSTEM, QUESTIONS) for _ in range(2))
        assert "a basis was made, and codes its rows from now on: transform quality 4" in server.said()
    assert turned[0].computed == 1  # what TurboQuant stored is hit
    assert again[1].computed == 1
    assert [answer.text for answer in again] == [answer.text for answer in turned]


@pytest.mark.skipif(MLX_LM_0_31, reason="its server forgets the adapter of the command line")
def test_an_adapters_basis_is_used_with_it_and_not_without(tmp_path):
    model = save_model(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model)
    adapted = calibrate(model, tmp_path / "bases", adapter)
    flags = ["--model", model, "--basis-dir", adapted.parent]
    with serving(tmp_path / "with.log", *flags, "--adapter-path", adapter, limits=LIMITS) as server:
        assert f"basis {adapted.stem[-32:][:8]}" in model_line(server)
    with starting(serve, tmp_path / "without.log", *LIMITS, *flags) as server:
        assert len(warnings_of(server.ready().said())) == 1


def test_a_basis_that_ram_has_no_room_for_is_left_and_said(model, basis, tmp_path):
    flags = ["--ram", "150kB", "--codec", "transform", "--model", model, "--basis-dir", basis.parent]
    with starting(serve, tmp_path / "log", *flags) as server:
        server.ready()
        assert (
            f"takes {read(basis).nbytes} bytes of RAM, and all bases in use may take 1/4 of its 150000 bytes"
            in server.said()
        )
        assert "codec turboquant k4 v4" in model_line(server)
        assert warnings_of(server.said()) == []
        assert server.end() == 0


def warm(arguments: list[str]) -> None:
    app(["warm", *arguments], prog_name="prefixcache")


def test_what_was_warmed_with_a_basis_a_server_hits(model, basis, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    system: dict[str, Any] = {"role": "system", "content": SYSTEM}
    prompts.write_text(json.dumps({"messages": [system]}))
    flags = ["--model", model, "--basis-dir", basis.parent, "--ssd-dir", tmp_path / "ssd", *LIMITS]
    done = forked.run(warm, *flags, "--ssd", "200MB", prompts)
    assert (done.returncode, done.stderr) == (0, "")
    with serving(tmp_path / "log", *flags, limits=()) as server:
        assert ask(server, [system, {"role": "user", "content": "Begin."}]).cached >= 512


def test_warm_without_a_basis_says_what_to_run(tmp_path):
    model, prompts = save_model(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": text(300)}))
    flags = ["--model", model, "--basis-dir", tmp_path / "bases", "--ssd-dir", tmp_path / "ssd", *LIMITS]
    done = forked.run(warm, *flags, "--ssd", "200MB", prompts)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"run `prefixcache calibrate {model} --basis-dir {tmp_path / 'bases'}`" in line
