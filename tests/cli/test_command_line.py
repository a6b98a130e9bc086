"""The frame: help, version, and commands whose module may not be there."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest
import typer
from directories import COMMAND

import prefixcache
import prefixcache.cli
from prefixcache import PrefixCache

frame = importlib.import_module("prefixcache.cli.app")
OPERATORS = ("inspect", "reconcile", "prune", "clear", "remove", "pin")


def test_no_arguments_give_the_help(call):
    done = call()
    assert done.exit_code == 0
    assert done.stdout.strip() == call("--help").stdout.strip()
    for command in OPERATORS:
        assert command in done.stdout


def test_the_version_is_the_packages(call):
    done = call("--version")
    assert (done.exit_code, done.stdout) == (0, f"prefixcache {prefixcache.__version__}\n")


def test_an_unknown_command_or_option_gives_2(call):
    assert call("frobnicate").exit_code == 2
    assert call("inspect", ".", "--frobnicate").exit_code == 2
    assert call("inspect").exit_code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("evaluate", "~models/qwen: no such home"),
        ("calibrate", "~models/qwen: no such home"),
        ("calibrate --list --basis-dir", "--basis-dir ~models/qwen: no such home"),
        ("plan --model", "--model ~models/qwen: no such home"),
        ("plan --model qwen3-8b --codec transform --basis", "--basis ~models/qwen: no such home"),
        ("warm PROMPTS --ssd-dir DIR --model", "--model ~models/qwen: no such home"),
        ("explain PROMPTS PROMPTS --model", "--model ~models/qwen: no such home"),
        ("serve --admin-key-file", "--admin-key-file ~models/qwen: no such home"),
        ("serve --model", "--model ~models/qwen: no such folder"),
        ("pin --url http://127.0.0.1:1 --admin-key-file", "--admin-key-file ~models/qwen: no such home"),
        ("clear --yes --url http://127.0.0.1:1 --api-key-file", "--api-key-file ~models/qwen: no such home"),
    ],
)
def test_a_home_that_nobody_has_is_told_in_a_line(call, tmp_path, words, told):
    prompts = tmp_path / "prompts"
    prompts.write_text('{"prompt": "x"}')
    done = call(*words.replace("PROMPTS", str(prompts)).replace("DIR", str(tmp_path)).split(), "~models/qwen")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


@pytest.mark.parametrize("command", OPERATORS)
def test_the_help_of_a_command_tells_its_exit_codes(call, command):
    done = call(command, "--help")
    assert done.exit_code == 0
    assert "Exit code: 0" in done.stdout


@pytest.mark.parametrize("command", [*OPERATORS, *frame.LATER, ""])
def test_the_help_has_every_name_whole_on_80_columns(call, command):
    given = [command] if command else []
    said = call(*given, "--help", columns=80).stdout
    group = typer.main.get_command(frame.app)
    context = typer.Context(group, info_name="prefixcache")
    asked = group.get_command(context, command) if command else group
    for parameter in asked.params:
        for name in [*parameter.opts, *parameter.secondary_opts]:
            if name.startswith("-"):
                assert re.search(rf"(^  |[,/] ){re.escape(name)}\b", said, re.M), f"{name} is not whole:\n{said}"
    for name in group.list_commands(context) if not command else ():
        assert re.search(rf"^  {name} ", said, re.M)
    assert "..." not in said.partition("Commands:")[2]


def test_the_entry_point_is_the_app():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"prefixcache {prefixcache.__version__}\n"


@pytest.fixture
def later(tmp_path, monkeypatch):
    """A later command whose module has this text."""

    def give(text: str, name: str = "sometime") -> None:
        monkeypatch.setattr(frame, "LATER", {name: f"prefixcache.cli.{name}"})
        monkeypatch.setattr(prefixcache.cli, "__path__", [*prefixcache.cli.__path__, str(tmp_path)])
        monkeypatch.delitem(sys.modules, f"prefixcache.cli.{name}", raising=False)
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield give
    sys.modules.pop("prefixcache.cli.sometime", None)


WORKS = '''
import typer

def sometime(number: int = 3, loud: bool = typer.Option(False, "--loud")) -> None:
    """Show a number, one day."""
    typer.echo(f"number {number} {loud}")
'''


def test_a_later_command_is_listed_and_runs(call, later):
    later(WORKS)
    assert "Show a number" in call("--help").stdout
    done = call("sometime", "--number", "5", "--loud")
    assert (done.exit_code, done.stdout) == (0, "number 5 True\n")
    assert "--number" in call("sometime", "--help").stdout


def test_other_commands_do_not_import_a_later_one(call, later, tmp_path):
    later("raise SystemExit('imported')")
    assert call("inspect", tmp_path / "nowhere").exit_code == 2
    assert "prefixcache.cli.sometime" not in sys.modules


def test_a_later_command_that_can_not_be_imported_says_why(call, later):
    later("import a_library_that_is_not_here")
    assert "inspect" in call("--help").stdout
    done = call("sometime")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "sometime can't be loaded: No module named 'a_library_that_is_not_here'" in done.stderr


@pytest.mark.parametrize("command", [["inspect"], ["reconcile"]])
def test_a_standard_output_that_is_full_or_closed_is_told_in_a_line(tmp_path, command):
    with PrefixCache(ram="1MB", ssd_dir=tmp_path / "ssd", ssd="2MB", codec="raw"):
        pass
    line = [
        sys.executable,
        "-c",
        "from prefixcache.cli import app; app()",
        command[0],
        str(tmp_path / "ssd"),
        *command[1:],
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr
    out, into = os.pipe()
    os.close(out)
    done = subprocess.run(line, stdout=into, stderr=subprocess.PIPE, text=True)
    os.close(into)
    assert (done.returncode, done.stderr) == (141, "")


PROGRAM = [sys.executable, "-c", "from prefixcache.cli import app; app(prog_name='prefixcache')"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("prefixcache in", {"inspect"}), ("prefixcache serve --spill-w", {"--spill-wait"})],
)
def test_a_shell_completes_commands_and_their_flags(typed, offered):
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_PREFIXCACHE_COMPLETE": "complete_bash"}
    done = subprocess.run(PROGRAM, capture_output=True, text=True, env={**os.environ, **asked})
    assert (set(done.stdout.split()), done.stderr) == (offered, "")


def test_completion_can_be_installed(call):
    assert "--install-completion" in call("--help").stdout
