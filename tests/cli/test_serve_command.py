"""`prefixcache serve`: what can't be served is told in one line, by a process that then ends; and the help."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlx_lm import server as upstream

from prefixcache import PrefixCache, Settings
from prefixcache.servers.errors import ServeError
from prefixcache.servers.mlx_lm.arguments import check_model, read_flags
from tests.models.families import MLX_LM_0_31
from tests.servers.forked import run
from tests.servers.serving import save_adapter, save_model, serve, starting, text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def bound() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refused(*flags: object) -> str:
    """The one line that a process says which can't serve."""
    done = run(serve, "--port", 0, "--ram", "100MB", *flags)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("prefixcache: ")
    return lines[0]


def refused_here(call, *flags: object) -> str:
    """The same of a command that ends before it has threads: called within this process, which is quicker."""
    done = call("serve", "--port", 0, "--ram", "100MB", *flags)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert isinstance(done.exception, SystemExit)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_the_help_names_its_own_flags_and_leads_to_mlx_lms(call):
    done = call("serve", "--help")
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    for flag in (
        "--ram",
        "--ssd-dir",
        "--ssd",
        "--codec",
        "--key-bits",
        "--value-bits",
        "--warm",
        "--grace",
        "--salt-from",
    ):
        assert flag in said
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')} " in said
    assert "PREFIXCACHE_RAM is --ram" in said
    assert "TOML file that PREFIXCACHE_CONFIG names" in said
    assert "All flags of mlx_lm.server are taken too" in said
    assert "Exit code: 0" in said


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--key-bits", 5], "--key-bits=5: not a bit depth of TurboQuant; choose 1, 2, 3, 4 or 8"),
        (["--codec", "raw", "--key-bits", 4], "--codec with --key-bits: both choose the codec"),
        (["--codec", "zip"], "--codec='zip': not a codec"),
        (["--kv-bits", 8, "--key-bits", 4], "--kv-bits with --key-bits: "),
        (["--kv-bits=8", "--codec", "raw"], "--kv-bits with --codec: "),
        (["--ssd", "5GB"], 'ssd="5GB" without ssd_dir: '),
        (["--ram", "0"], "--ram=0: "),
        (["--ram", "much"], "--ram='much': not a size"),
        (["--readers", 100], "--readers '100': Input should be less than or equal to 64"),
        (["--policy", "mru"], "--policy 'mru': Input should be 'lru' or 'adaptive'"),
        (["--salt-from", "cookie"], "--salt-from cookie: salts are made of one header only; write authorization"),
        (["--nonsense"], "unrecognized arguments: --nonsense; see "),
        (["--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'; see "),
        (["--chat-template-args", "{"], "argument --chat-template-args: "),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 0: "),
        (["--host", "nowhere.invalid"], "--host nowhere.invalid --port 0: "),
        (["--port", 99999], "--host 127.0.0.1 --port 99999: "),
        (["--warm", "prompts.jsonl"], "prompts.jsonl: No such file or directory"),
        (["--model", "/no/model"], "--model /no/model: no such folder"),
        (["--model", "no-model"], "--model no-model: no such folder"),
        (["--adapter-path", "/no/adapter"], "--adapter-path /no/adapter: no such folder"),
        (["--draft-model", "/no/draft"], "--draft-model /no/draft: no such folder"),
        (["--ssd-dir", "pyproject.toml/x"], "pyproject.toml/x': Not a directory"),
        (["--vlm", "--exact-prefill"], "--exact-prefill with --vlm: not for mlx_vlm.server; leave it out"),
        (
            ["--canonical-rules", "tools"],
            "--canonical-rules 'tools': no rule of that name; write headers, schemas, answers",
        ),
        (["--vlm", "--no-canonical"], "--no-canonical with --vlm: not for mlx_vlm.server; leave it out"),
        (
            ["--vlm", "--reload"],
            "--reload with --vlm: the process that it starts would have no PrefixCache; leave it out",
        ),
        (["--vlm", "--port", "99999"], "--host 127.0.0.1 --port 99999: "),
        (["--vlm", "--host", "no.invalid"], "--host no.invalid --port 0: "),
        (["--vlm", "--model", "/tmp/no"], "--model /tmp/no: no such folder; give one or a Hugging Face name"),
        (
            ["--vlm", "--model=~/no"],
            f"--model {os.path.expanduser('~/no')}: no such folder; give one or a Hugging Face name",
        ),
        (["--vlm", "--grace", "1"], "--grace with --vlm: not for mlx_vlm.server; leave it out"),
    ],
)
def test_what_cant_be_served_is_told_in_one_line(call, model, flags, told):
    assert told in refused_here(call, "--model", model, *flags)


def test_a_folder_in_a_home_is_loaded_by_its_whole_path(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    for flags in (
        [f"--model=~/{model.name}"],
        ["--model", f"~/{model.name}"],
    ):  # as a unit of systemd or a shell leaves it
        args = read_flags(flags)
        check_model(args)
        assert args.model == str(model)


@pytest.mark.parametrize(
    ("flags", "variable", "declines"),
    [
        ((), "", True),
        (("--no-decline-slow-hits",), "", False),
        ((), "no", False),
        (("--decline-slow-hits",), "no", True),
    ],
)
def test_a_server_declines_slow_hits_unless_told_otherwise(call, model, monkeypatch, flags, variable, declines):
    def serve(settings: Settings, *others: object) -> None:
        raise ServeError(f"declines: {settings.decline_slow_hits}")

    monkeypatch.setattr("prefixcache.servers.mlx_lm.serve.serve", serve)
    if variable:
        monkeypatch.setenv("PREFIXCACHE_DECLINE_SLOW_HITS", variable)
    assert f"declines: {declines}" in refused_here(call, "--model", model, *flags)


def test_folders_that_lack_their_config_are_told(call, model, tmp_path):
    assert f"--model {tmp_path}: the folder has no config.json" in refused_here(call, "--model", tmp_path)
    told = refused_here(call, "--model", model, "--adapter-path", model)
    assert f"--adapter-path {model}: the folder has no adapter_config.json" in told
    assert "the folder has no config.json" in refused_here(call, "--model", model, "--draft-model", tmp_path)


def test_warming_without_a_model_is_told(call, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": text(10)}))
    assert "--warm without --model" in refused_here(call, "--warm", prompts)
    prompts.write_text("[")
    assert f"{prompts}:1: not JSON" in refused_here(call, "--warm", prompts, "--model", tmp_path)


def test_a_port_in_use_is_told(call, model, bound):
    told = refused_here(call, "--model", model, "--port", bound)
    assert f"--host 127.0.0.1 --port {bound}: Address already in use; give another, or stop" in told


def test_a_model_that_cant_be_loaded_is_told(model, tmp_path):
    damaged = save_model(tmp_path / "damaged")
    (damaged / "config.json").write_text('{"model_type": "no-such-family"}')
    assert "the model can't be loaded: ValueError: Model type no-such-family" in refused("--model", damaged)
    save_model(damaged)
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "the model can't be loaded: RuntimeError: " in refused("--model", damaged, "--ssd-dir", tmp_path / "ssd")
    PrefixCache(ram="100MB", ssd_dir=tmp_path / "ssd").close()


@pytest.mark.skipif(MLX_LM_0_31, reason="mlx-lm 0.31's server doesn't load the adapter of --adapter-path")
def test_an_adapter_that_cant_be_loaded_is_told(model, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", model)
    (adapter / "adapters.safetensors").unlink()
    assert "the model can't be loaded: " in refused("--model", model, "--adapter-path", adapter)


def test_prompts_to_warm_that_the_template_refuses_are_told(model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "system", "content": "a"}, {"role": "user"}]}))
    template = "{{ raise_exception('no such turn') }}"
    told = refused("--model", model, "--warm", prompts, "--chat-template", template)
    assert f"--warm: {prompts}:1: the tokenizer or its chat template refuses it: no such turn" in told


def test_a_directory_that_another_server_has_is_told(model, tmp_path):
    ssd = tmp_path / "ssd"
    with starting(serve, tmp_path / "log", "--model", model, "--ram", "100MB", "--ssd-dir", ssd) as server:
        server.ready()
        told = refused("--model", model, "--ssd-dir", ssd)
        assert str(ssd) in told
        assert f"in use by pid {server.process.pid}" in told
        assert server.end() == 0
    PrefixCache(ram="100MB", ssd_dir=ssd).close()


def test_mlx_lms_server_is_as_it_was_after_flags_were_read(call, model):
    before = {name: getattr(upstream, name) for name in ("ModelProvider", "run", "argparse")}
    refused_here(call, "--model", model, "--nonsense")
    assert {name: getattr(upstream, name) for name in before} == before
