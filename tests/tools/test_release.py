"""A release is refused until the tree, the tests, the version and the changelog are ready for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.release.__main__ import PASSED, reasons_against

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A checkout that may be released as 1.2.3."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-12-01)\n\nAll of it.\n")
    (tmp_path / ".gitignore").write_text("build/\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    passed(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=root, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "-q", "--message", "a change")


def passed(root: Path) -> None:
    (root / PASSED).parent.mkdir(exist_ok=True)
    (root / PASSED).write_text(git(root, "rev-parse", "HEAD"))


def test_a_commit_that_passed_is_released(ready: Path) -> None:
    assert reasons_against("1.2.3", ready) == []


def another_file(root: Path) -> None:
    (root / "forgotten.py").write_text("")


def another_commit(root: Path) -> None:
    another_file(root)
    commit(root)


def never_tested(root: Path) -> None:
    (root / PASSED).unlink()


def released(root: Path) -> None:
    git(root, "tag", "v1.2.3")


def no_date(root: Path) -> None:
    (root / "CHANGELOG.md").write_text("## 1.2.3 (unreleased)\n")
    commit(root)
    passed(root)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_file, "forgotten.py"),
        (another_commit, "run bash .ci/run"),
        (never_tested, "run bash .ci/run"),
        (released, "v1.2.3 was released"),
        (no_date, "write ## 1.2.3"),
    ],
)
def test_a_release_is_refused_by_name(ready: Path, change: Callable[[Path], None], reason: str) -> None:
    change(ready)
    (said,) = reasons_against("1.2.3", ready)
    assert reason in said
