"""The files for systemd and launchd in docs/operating.md: well-formed, what they start exists, they wait for the end."""

from __future__ import annotations

import configparser
import plistlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from prefixcache.cli import app
from prefixcache.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
MLX_LM_S = {"--model", "--host", "--port"}
GRACE = 5  # serve's --grace


def fence(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return text


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str  # systemd's names have their case
    read.read_string(fence("ini"))
    return read


def agent() -> dict:
    return plistlib.loads(fence("xml").encode())


def commands() -> dict[str, list[str]]:
    return {"systemd": shlex.split(unit()["Service"]["ExecStart"]), "launchd": agent()["ProgramArguments"]}


@pytest.mark.parametrize("manager", ["systemd", "launchd"])
def test_the_command_is_serve_with_flags_that_exist(manager: str) -> None:
    program, command, *flags = commands()[manager]
    assert program.endswith("/bin/prefixcache")
    assert command == "serve"
    known = {name for parameter in get_command(app).get_command(None, "serve").params for name in parameter.opts}
    assert {flag for flag in flags if flag.startswith("--")} <= known | MLX_LM_S
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    Settings(ram=given["--ram"], ssd_dir=given["--ssd-dir"], ssd=given["--ssd"])


def test_both_start_the_same() -> None:
    systemd, launchd = ([re.sub("^(%h|/Users/YOU)/", "~/", word) for word in of] for of in commands().values())
    assert systemd == launchd


def test_they_start_it_again_after_a_failure_and_wait_until_ram_is_written() -> None:
    longest = Settings.model_fields["close_timeout"].default + GRACE
    service = unit()["Service"]
    assert service["Restart"] == "on-failure"
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > longest
    assert agent()["KeepAlive"] == {"SuccessfulExit": False}
    assert agent()["ExitTimeOut"] > longest


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "prefixcache"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    file = tmp_path / "prefixcache.service"
    file.write_text(fence("ini").replace("%h/.venv/bin/prefixcache", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "prefixcache.service" not in done.stderr, done.stderr
