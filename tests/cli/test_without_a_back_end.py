"""MLX without a back end, as a plain `pip install prefixcache` leaves it on Linux: what needs MLX says which extra to
install, and what does not works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from directories import COMMAND

import prefixcache

ROOT = Path(prefixcache.__file__).parents[1]
TINY = Path(__file__).parent.parent / "fixtures" / "tiny-llama"
SAYS = 'prefixcache: MLX has no back end here: on Linux run pip install "prefixcache[cpu]", or "prefixcache[cuda]"'


@pytest.fixture
def run(tmp_path):
    """Runs the command where `mlx.core` is there and its library is not."""
    (tmp_path / "without" / "mlx").mkdir(parents=True)
    (tmp_path / "without" / "mlx" / "__init__.py").touch()
    (tmp_path / "without" / "mlx" / "core.py").write_text(
        'raise ImportError("libmlx.so: cannot open shared object file: No such file or directory", name="mlx.core")\n'
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'without'}:{ROOT}", "COLUMNS": "100"}

    def give(*args: object, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
        line = [*command, *map(str, args)]
        return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)

    return give


@pytest.mark.parametrize(
    "line",
    [
        ("demo",),
        ("serve", "--model", TINY, "--port", 0),
        ("warm", "x.jsonl", "--model", TINY, "--ssd-dir", "x"),
        ("evaluate", TINY),
        ("plan", "--model", "qwen3-8b"),
        ("inspect", "--kernels"),
    ],
)
def test_a_command_that_needs_mlx_names_the_extra_in_one_line(run, line):
    done = run(*line)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith(SAYS)
    assert done.stderr.count("\n") == 1


EACH = """
import json, sys
from prefixcache.cli import app
for line in json.loads(sys.argv[1]):
    try: app(line)
    except SystemExit as end: assert end.code == 0, (line, end.code)
print("all done")
"""


def test_what_operators_run_needs_no_mlx(run, filled):
    lines = (
        ("--version",),
        ("--help",),
        ("inspect", filled),
        ("reconcile", filled),
        ("prune", filled, "--model", "chat"),
        ("clear", filled, "--yes"),
    )
    text = json.dumps([[str(arg) for arg in line] for line in lines])
    done = run(text, command=[sys.executable, "-c", EACH])
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all done\n")
    done = run("top", "http://127.0.0.1:1", "--once")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "refused" in done.stderr


def test_another_import_that_fails_is_not_taken_for_a_missing_back_end(run, tmp_path):
    (tmp_path / "without" / "mlx" / "core.py").write_text("import a_library_that_is_not_here\n")
    done = run("evaluate", TINY)
    assert SAYS not in done.stderr
    assert "a_library_that_is_not_here" in done.stderr
