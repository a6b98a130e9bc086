"""`prefixcache warm`, in processes of its own: what it stores a server finds, what it can't do it says in one line."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_tokenizer

from prefixcache import PrefixCache, model_identity
from prefixcache.cli import app
from prefixcache.servers.warm_prompts import WarmPrompt, tokens_of
from tests.servers import forked
from tests.servers.serving import wait_for

MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-llama"
SYSTEM = {"role": "system", "content": "You answer in one word. The secret number of Oscar is 7615."}
USER = {"role": "user", "content": "What is the secret number of Oscar?"}
CHAT, SALTED = {"messages": [SYSTEM]}, {"messages": [SYSTEM], "cache_salt": "tenant"}
SMALL = ("--ram", "50MB", "--ssd", "50MB", "--codec", "raw")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: the same tokenizer, random weights, much less to compute."""
    folder = tmp_path_factory.mktemp("models") / "quick"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    config = json.loads((MODEL / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any, name: str = "prompts.jsonl") -> Path:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    return write


def warm(arguments: list[str]) -> None:
    app(["warm", *arguments], prog_name="prefixcache")


def run(*more: Any) -> subprocess.CompletedProcess[str]:
    return forked.run(warm, *more)


def kept(directory: Path, wanted: list[int], salt: bytes = b"", model: Path = MODEL) -> int:
    """How many of these tokens another process finds in the directory."""
    with PrefixCache(ram="50MB", ssd_dir=directory, ssd="50MB", codec="raw") as cache:
        return cache.match(wanted, model=model_identity(model), salt=salt).ssd


def test_what_was_warmed_the_next_process_finds_and_a_second_run_computes_nothing(
    prompts: Callable[..., Path], tmp_path: Path, tokenizer: Any
) -> None:
    one, two = prompts(CHAT, {"messages": [SYSTEM, USER]}), prompts(SALTED, {"prompt": "A text."}, name="two.jsonl")
    first = run("--model", MODEL, "--ssd-dir", tmp_path / "ssd", *SMALL, one, two)
    assert (first.returncode, first.stderr) == (0, "")
    request = tokenizer.apply_chat_template([SYSTEM, USER], add_generation_prompt=True)
    shared = tokens_of(tokenizer, WarmPrompt("", (SYSTEM,)))
    text = tokens_of(tokenizer, WarmPrompt("", text="A text."))
    total, computed = 2 * len(shared) + len(request) - 1 + len(text), len(request) - 1 + len(shared) + len(text) - 1
    assert first.stdout == f"4 prompts; {computed} of {total} tokens computed\n"
    assert kept(tmp_path / "ssd", request) == len(request) - 1
    assert kept(tmp_path / "ssd", request, b"tenant") == len(shared)
    assert kept(tmp_path / "ssd", request, b"another") == 0

    again = run("--model", MODEL, "--ssd-dir", tmp_path / "ssd", *SMALL, one, two)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == f"4 prompts, 4 stored already; 0 of {total} tokens computed\n"


def test_a_directory_that_another_process_holds_is_named_with_that_process(
    live: tuple[Path, Any], prompts: Callable[..., Path]
) -> None:
    path, holder = live
    done = run("--model", MODEL, "--ssd-dir", path, *SMALL, prompts(CHAT))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert str(path) in done.stderr
    assert str(holder.pid) in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_what_was_computed_stays(
    prompts: Callable[..., Path], tmp_path: Path, tokenizer: Any, quick: Path, number: signal.Signals
) -> None:
    """With so little RAM the first images are written early: then it is at work."""
    lines = [{"prompt": f"{i} " + "The tide came in over the flat sand. " * 60} for i in range(150)]
    options = ("--ssd-dir", tmp_path / "ssd", "--ram", "4MB", "--ssd", "50MB", "--codec", "raw")
    command = ("--model", quick, *options, "--prefill-step-size", 8, prompts(*lines))
    out, err = tmp_path / "out", tmp_path / "err"
    process = forked.begin(warm, command, out, err)
    try:
        wait_for(
            lambda: process.poll() is not None or any((tmp_path / "ssd").glob("rows/*/*.safetensors")), "file", err
        )
        process.send_signal(number)
        assert process.wait(120) == 128 + number
    finally:
        process.kill()
    assert out.read_text() == ""
    assert err.read_text() == (
        f"prefixcache: ended by {number.name}: what was computed is stored; the same command goes on from there\n"
    )
    first = tokens_of(tokenizer, WarmPrompt("", text=lines[0]["prompt"]))
    assert kept(tmp_path / "ssd", first, model=quick) == len(first)


def test_prompts_that_find_no_room_are_told(
    call: Callable[..., Any], prompts: Callable[..., Path], tmp_path: Path, quick: Path
) -> None:
    lines = [{"prompt": f"{i} " + "The tide came in over the flat sand. " * 60} for i in range(8)]
    room = ("--ssd-dir", tmp_path / "ssd", "--ram", "50MB", "--ssd", "5MB", "--codec", "raw")
    done = call("warm", "--model", quick, *room, prompts(*lines))
    assert done.exit_code == 1
    assert done.stdout.startswith("8 prompts; ")
    assert done.stderr.splitlines()[-1].endswith(" of 8 prompts found no room: give more with --ssd and --ram")


# -- what it can't do, within this process ----------------------------------------------------------------------------


@pytest.fixture
def refused(call: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """The one line that the command ends with. It must leave no directory behind."""

    def one(*more: Any) -> str:
        done = call("warm", *more)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
        assert not (tmp_path / "ssd").exists()
        return str(done.stderr).removeprefix("prefixcache: ").rstrip("\n")

    return one


def test_what_is_missing_is_named(refused: Callable[..., str], prompts: Callable[..., Path], tmp_path: Path) -> None:
    file, ssd = prompts(CHAT), ("--ssd-dir", tmp_path / "ssd")
    assert refused(*ssd, file).startswith("--model is missing: give ")
    assert refused("--model", MODEL, *ssd).startswith("no prompts: name a file ")
    assert refused("--model", MODEL, file).startswith("--ssd-dir is missing: without an SSD tier all would be lost")
    assert refused("--model", MODEL, *ssd, "--ssd", 0, file).startswith("--ssd 0: without an SSD tier all ")
    assert refused("--model", tmp_path / "none", *ssd, file).startswith(
        f"--model {tmp_path / 'none'}: no such folder; "
    )
    assert refused("--model", tmp_path, *ssd, file).startswith(f"{tmp_path / 'config.json'} is missing; ")
    assert "nowhere" in refused("--model", MODEL, "--adapter-path", tmp_path / "nowhere", *ssd, file)
    assert refused("--model", MODEL, *ssd, tmp_path / "no.jsonl").startswith(f"{tmp_path / 'no.jsonl'}: No such file")


def test_what_is_bad_is_named(refused: Callable[..., str], prompts: Callable[..., Path], tmp_path: Path) -> None:
    file, ssd = prompts(CHAT), ("--ssd-dir", tmp_path / "ssd")
    assert refused("--model", MODEL, *ssd, "--codec", "raw", "--key-bits", 4, file).startswith(
        "--codec with --key-bits"
    )
    said = refused("--model", MODEL, *ssd, "--chat-template-args", "[1]", file)
    assert said.startswith("--chat-template-args [1]: not a JSON object; ")
    bad = prompts(CHAT, {"messages": [SYSTEM], "tool": []}, name="bad.jsonl")
    assert refused("--model", MODEL, *ssd, file, bad).startswith(f"{bad}:2: unknown key 'tool'; write tools")
    said = refused("--model", MODEL, *ssd, "--chat-template", "{{ raise_exception('no tools here') }}", file)
    assert said == f"{file}:1: the tokenizer or its chat template refuses it: no tools here"


def test_a_model_that_can_not_be_loaded_is_named(
    call: Callable[..., Any], prompts: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "never_heard_of"}))
    done = call("warm", "--model", folder, "--ssd-dir", tmp_path / "ssd", *SMALL, prompts(CHAT))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"prefixcache: --model {folder}: mlx-lm can't load it: ")


def test_the_directory_may_be_named_by_a_variable(
    call: Callable[..., Any], prompts: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_SSD_DIR", str(tmp_path / "ssd"))
    done = call("warm", "--model", MODEL, *SMALL, prompts(CHAT))
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("1 prompt; ")


def test_when_all_is_stored_the_weights_are_not_even_loaded(
    call: Callable[..., Any], prompts: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("warm", "--model", MODEL, "--ssd-dir", tmp_path / "ssd", *SMALL, prompts(CHAT, SALTED))
    assert call(*command).exit_code == 0
    monkeypatch.delattr("mlx_lm.utils.load_model")
    again = call(*command)
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout.startswith("2 prompts, 2 stored already; 0 of ")


def test_the_chat_template_and_its_arguments_are_the_callers(
    call: Callable[..., Any], prompts: Callable[..., Path], tmp_path: Path, tokenizer: Any
) -> None:
    template = "{% for m in messages %}{{ day }}: {{ m.content }}\n{% endfor %}"
    done = call(
        "warm",
        "--model",
        MODEL,
        "--ssd-dir",
        tmp_path / "ssd",
        *SMALL,
        "--chat-template",
        template,
        "--chat-template-args",
        '{"day": "Monday"}',
        prompts(CHAT),
    )
    assert (done.exit_code, done.stderr) == (0, "")
    request = tokenizer.encode(f"Monday: {SYSTEM['content']}\nMonday: hello\n", add_special_tokens=False)
    assert kept(tmp_path / "ssd", request) >= len(tokenizer.encode(f"Monday: {SYSTEM['content']}")) - 1


def test_the_help_tells_what_it_needs_and_the_exit_codes(call: Callable[..., Any]) -> None:
    done = call("warm", "--help")
    said = " ".join(done.stdout.split())
    assert done.exit_code == 0
    assert "prefixcache warm [OPTIONS]" in said
    assert "Without --url it needs --model, --ssd-dir and a file of prompts" in said
    assert "prefixcache warm --model MODEL --ssd-dir DIR prompts.jsonl" in said
    assert "Exit code: 0" in said
