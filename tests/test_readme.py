"""README.md is kept true: its program runs as it stands, its table is the settings', its commands exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefixcache import Settings
from prefixcache.cli import app

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "tests" / "fixtures" / "tiny-llama"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def settings_table() -> str:
    """The settings as README.md shows them."""
    rows = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        shown = {"codec": "TurboQuant()", "transit": f"{Settings.model_fields['transit'].default >> 20} MiB"}
        default = shown.get(name, "none" if field.default in (None, ()) else field.default)
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows)


def test_the_program_runs_as_it_stands_and_reuses_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    program: dict[str, Any] = {}
    (source,) = blocks("python")
    exec(compile(source.replace("mlx-community/Qwen3-4B-4bit", str(MODEL)), "README.md", "exec"), program)
    messages = [{"role": "user", "content": "How many books may I borrow at a time? " * 8}]
    first = program["answer"](messages, max_tokens=8)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And films?"}]
    try:
        program["answer"](messages, max_tokens=8)
        asked = len(program["tokenizer"].apply_chat_template(messages[:1], add_generation_prompt=True))
        assert program["cache"].stats().counters.hit_tokens >= asked
    finally:
        program["cache"].close()
    assert list((tmp_path / ".cache" / "prefixcache").rglob("*.safetensors"))


def test_the_table_is_that_of_the_settings() -> None:
    assert settings_table() in README, f"put this into README.md:\n{settings_table()}"


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^make (?:EXTRA=\w+ )?(\w+)", "\n".join(blocks("")), re.MULTILINE))
    assert targets == {"demo", "test"}
    for target in (*targets, "lint", "bench", "clean", "help"):
        ran = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


def test_the_commands_and_their_options_exist() -> None:
    lines = re.findall(r"^prefixcache (\w+) DIR ((?:--[\w-]+)?)", README, re.MULTILINE)
    assert {command for command, _ in lines} == {"inspect", "reconcile", "prune", "clear", "export", "import"}
    for command, option in lines:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
        assert shown.exit_code == 0
        assert option in shown.output
