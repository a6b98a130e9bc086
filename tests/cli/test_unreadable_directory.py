"""A DIR that this user may not read: every command that takes one says so in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LINES = (
    ("inspect", "DIR"),
    ("inspect", "DIR", "--json"),
    ("reconcile", "DIR"),
    ("reconcile", "DIR", "--dry-run"),
    ("prune", "DIR", "--older-than", "0s"),
    ("prune", "DIR", "--older-than", "0s", "--dry-run"),
    ("clear", "DIR", "--yes"),
    ("clear", "DIR", "--dry-run"),
)

# As nobody where it may change its user. Nobody may not read Python's own files: each command runs before on a directory that
# is not there, and imports what it needs.
SCRIPT = """
import json, os, sys
import encodings.unicode_escape, rich.markdown
from typer.testing import CliRunner
from prefixcache.cli import app
lines = json.loads(sys.argv[1])
for command, _, *options in lines:
    CliRunner().invoke(app, [command, "/nowhere", *options])
if not os.geteuid():
    os.setuid(65534)
told = []
for line in lines:
    done = CliRunner().invoke(app, line)
    told.append([line, done.exit_code, done.stderr])
print(json.dumps(told))
"""


@pytest.mark.parametrize("closed", ["the directory", "the one above"])
def test_every_command_says_in_one_line_that_it_may_not_be_read(filled, tmp_path_factory, closed) -> None:
    shut = filled if closed == "the directory" else filled.parent
    base = tmp_path_factory.getbasetemp()  # pytest's folders are the user's own, too
    mine = [folder for folder in (base, *base.parents) if folder.name.startswith(("pytest-", "popen-"))]
    for folder in (*mine, filled.parent, filled):
        os.chmod(folder, 0o755)
    os.chmod(shut, 0)
    try:
        lines = json.dumps([[str(filled) if arg == "DIR" else arg for arg in line] for line in LINES])
        done = subprocess.run([sys.executable, "-c", SCRIPT, lines], capture_output=True, text=True, cwd="/")
    finally:
        os.chmod(shut, 0o700)
    assert done.returncode == 0, done.stderr
    for line, code, said in json.loads(done.stdout):
        assert (code, said.count("\n")) == (2, 1), (line, said)
        assert said.startswith(f"prefixcache: ssd_dir: {str(filled)!r}: Permission denied: user "), line
        assert "may not read or write it; change its owner or mode, or name another directory" in said
