"""README.md is kept true: its program runs as it stands, its table is the settings', its commands exist."""

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from prefixcache import Settings
from prefixcache.cli import app
from prefixcache.keys import BLOCK
from tests.families import FAMILIES

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "tests" / "fixtures" / "tiny-llama"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [source for of, source in fences if of == language]


def settings_table() -> str:
    """The settings as README.md shows them."""
    rows = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        shown = {"codec": "TurboQuant()", "transit": f"{Settings.model_fields['transit'].default >> 20} MiB"}
        default = shown.get(name, "none" if field.default in (None, ()) else field.default)
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What README.md's first program defines, its cache under a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict[str, Any] = {}
    run(blocks("python")[0], names)
    yield names
    names["cache"].close()


def run(source: str, names: dict[str, Any]) -> None:
    exec(compile(source.replace("mlx-community/Qwen3-4B-4bit", str(MODEL)), "README.md", "exec"), names)


def test_the_program_runs_as_it_stands_and_reuses_what_was_said(program: dict[str, Any], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "How many books may I borrow at a time? " * 24}]
    first = program["answer"](messages, max_tokens=8)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And films?"}]
    program["answer"](messages, max_tokens=8)
    asked = len(program["tokenizer"].apply_chat_template(messages[:1], add_generation_prompt=True))
    assert program["cache"].stats().counters.hit_tokens >= asked // BLOCK * BLOCK > 0
    program["cache"].close()
    assert list((tmp_path / ".cache" / "prefixcache").rglob("*.safetensors"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("length", [100, 600, 1581])
def test_a_prompt_that_is_asked_again_is_hit_and_answered_alike_whatever_the_layers(
    program: dict[str, Any], family: str, length: int
) -> None:
    """With sliding windows, too, which an answer longer than the window leaves no rows of the prompt in."""
    prompt = random.Random(length).choices(range(128), k=length)
    program |= {"model": FAMILIES[family].build(), "NAME": family}
    program["tokenizer"] = SimpleNamespace(
        apply_chat_template=lambda messages, **_: messages, eos_token_ids=(), decode=list
    )
    counters = program["cache"].stats
    said = program["answer"](prompt, max_tokens=60)
    assert counters().counters.hit_tokens == 0
    assert program["answer"](prompt, max_tokens=60) == said
    assert counters().counters.hit_tokens == length - 1


def test_each_of_the_three_live_caches_is_made_and_the_last_has_the_prompt(program: dict[str, Any]) -> None:
    model, prompt = program["model"], program["tokenizer"].encode("How many books may I borrow? " * 60)
    plain = program["make_prompt_cache"](model)
    mx.eval(model(mx.array([prompt]), cache=plain))
    program["cache"].store(prompt, plain, model=program["NAME"])
    program |= {"prompt": prompt, "prompt_cache": plain}
    run(blocks("python")[1], program)
    assert len(prompt) > BLOCK
    assert len(program["rest"]) == 1
    assert {type(layer).__name__ for layer in program["live"]} == {"TurboQuantKVCache"}


def test_every_fence_is_one_that_a_test_runs_or_a_shell_s() -> None:
    assert re.findall(r"^```(\w+)$", README, re.MULTILINE) == ["python", "python"]


def test_the_table_is_that_of_the_settings() -> None:
    assert settings_table() in README, f"put this into README.md:\n{settings_table()}"


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^make (?:EXTRA=\w+ )?(\w+)", "\n".join(blocks("")), re.MULTILINE))
    assert targets == {"demo", "test"}
    for target in (*targets, "lint", "bench", "clean", "help"):
        ran = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


def test_the_commands_and_their_options_exist() -> None:
    lines = re.findall(r"^(?:\w+=\S+ )?prefixcache (\w+)(.*)", "\n".join(blocks("")), re.MULTILINE)
    assert {
        "serve",
        "warm",
        "top",
        "plan",
        "evaluate",
        "inspect",
        "reconcile",
        "prune",
        "clear",
    } == {command for command, _ in lines}
    for command, rest in lines:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "240", "NO_COLOR": "1", "TERM": "dumb"})
        assert shown.exit_code == 0
        options = set(re.findall(r"(?<!\S)--[\w-]+", rest)) - ({"--model"} if command == "serve" else set())  # mlx-lm's
        assert all(option in shown.output for option in options), (command, options)
