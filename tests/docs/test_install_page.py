"""docs/install.md names extras, commands and files that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from typer.testing import CliRunner

from prefixcache.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_its_extras_are_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for group in re.findall(r"(?:prefixcache|\.)\[([a-z,]+)\]", PAGE) for extra in group.split(",")}
    assert {"cpu", "cuda", "vlm"} <= named <= project["optional-dependencies"].keys()
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in PAGE


def test_its_commands_exist() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    for command in {*re.findall(r"prefixcache ([a-z]+)", PAGE)} - {"wrote"}:
        assert f" {command} " in shown, command
    assert "--install-completion" in shown
