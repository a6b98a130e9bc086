"""`prefixcache reconcile`: each finding, each exit code, and that it keeps its hands off what is not its own."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from directories import COMMAND, LONG, crash, fingerprint, images, spoil, tokens
from rich.console import Console

from prefixcache import PrefixCache
from prefixcache.cli.text import PIPE_WIDTH

progress = importlib.import_module("prefixcache.cli.progress")


def report(done):
    return json.loads(done.stdout)


def damage(root: Path) -> dict[str, str]:
    """One finding of each kind that a look at names and sizes finds: path -> kind."""
    lost, broken, orphan = images(root)[:3]
    lost.unlink()
    broken.write_bytes(b"short")
    (root / "tmp" / "12.safetensors").write_bytes(b"x" * 5000)
    (root / "rows" / "[red]notes\x1b[2J.txt").write_text("mine")
    connection = sqlite3.connect(root / "index.db", isolation_level=None)
    connection.execute("DELETE FROM image WHERE key = ?", [bytes.fromhex(orphan.stem)])
    connection.close()
    found = {lost: "lost file", broken: "broken", orphan: "orphan"}
    names = {str(path.relative_to(root)): kind for path, kind in found.items()}
    return {**names, "tmp/12.safetensors": "debris", "rows/[red]notes\x1b[2J.txt": "stray"}


def test_a_directory_in_order_gives_0(call, filled):
    n = sum(len(images(filled, folder)) for folder in ("rows", "windows", "snapshots"))
    for options in ((), ("--dry-run",), ("--deep",), ("--dry-run", "--deep")):
        done = call("reconcile", filled, *options)
        assert (done.exit_code, done.stderr) == (0, "")
        assert f"index and files agree: {n} whole images" in done.stdout
        assert report(call("reconcile", filled, *options, "--json"))["clean"]


def test_a_dry_run_with_findings_gives_1_and_changes_nothing(call, filled):
    expected = damage(filled)
    before = fingerprint(filled)
    done, again = call("reconcile", filled, "--dry-run"), call("reconcile", filled, "--dry-run", "--json")
    assert fingerprint(filled) == before
    assert (done.exit_code, again.exit_code) == (1, 1)
    found = report(again)
    assert {finding["path"]: finding["kind"] for finding in found["findings"]} == expected
    assert found["dry_run"]
    assert all(finding["action"].startswith("would be ") for finding in found["findings"])
    assert "Nothing was changed" in done.stdout


def test_a_repair_gives_1_and_the_next_one_0(call, filled):
    expected = damage(filled)
    done = call("reconcile", filled, columns=PIPE_WIDTH)
    assert done.exit_code == 1
    for path in expected:
        assert path.replace("\x1b", r"\x1b") in done.stdout
    for word in ("deleted", "quarantined", "forgotten", "adopted"):
        assert word in done.stdout
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= PIPE_WIDTH
    assert call("reconcile", filled, "--deep").exit_code == 0
    assert (filled / "quarantine").is_dir()
    assert not (filled / "tmp" / "12.safetensors").exists()


def test_a_flipped_bit_is_found_by_a_deep_run_only(call, filled):
    victim = images(filled)[1]
    spoil(victim)
    assert call("reconcile", filled).exit_code == 0
    done = call("reconcile", filled, "--deep", "--json")
    assert done.exit_code == 1
    (finding,) = report(done)["findings"]
    assert (finding["path"], finding["kind"]) == (str(victim.relative_to(filled)), "broken")
    assert finding["reason"] == "the checksum does not match"
    assert not victim.exists()


def test_a_lost_index_is_made_anew_and_the_cache_is_warm(call, filled):
    for path in filled.glob("index.db*"):
        path.unlink()
    done = call("reconcile", filled, "--json")
    assert done.exit_code == 1
    assert report(done)["counts"]["index"] == 1
    with PrefixCache(ram="20MB", ssd_dir=filled, ssd="100MB") as cache:
        assert cache.match(tokens(LONG), model="chat").ssd == LONG


def test_images_without_lock_and_index_are_taken_in_once_a_lock_says_so(call, filled, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(filled / "rows", moved / "rows")
    done = call("reconcile", moved)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "make an empty LOCK" in done.stderr
    (moved / "LOCK").touch()
    done = call("reconcile", moved, "--json")
    assert done.exit_code == 1
    assert report(done)["counts"]["orphan"] == len(images(filled))


def test_many_findings_are_summed_up_and_the_table_ends(call, filled):
    for i in range(300):
        (filled / "tmp" / f"{i:03}.safetensors").write_bytes(b"")
    done = call("reconcile", filled, "--dry-run")
    assert "100 more: --json has all" in done.stdout
    assert "debris  300  -  would be deleted" in done.stdout
    assert len(report(call("reconcile", filled, "--dry-run", "--json"))["findings"]) == 300


def test_a_directory_held_by_another_process_gives_2_and_names_it(call, live):
    path, process = live
    done = call("reconcile", path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"in use by pid {process.pid} on " in done.stderr
    again = call("reconcile", path, "--json")
    assert again.exit_code == 2
    assert f"pid {process.pid}" in report(again)["error"]


def test_a_dry_run_reads_a_live_directory(call, live):
    path, _ = live
    done = call("reconcile", path, "--dry-run", "--deep", "--json")
    assert done.exit_code == 0
    assert report(done)["images"] == 4


def test_a_directory_whose_holder_died_is_repaired(call, live):
    path, process = live
    crash(process)
    (path / "tmp" / "12.safetensors").write_bytes(b"x")
    assert call("reconcile", path).exit_code == 1
    assert json.loads(call("inspect", path, "--json").stdout)["clean"]
    assert call("reconcile", path).exit_code == 0


def test_no_such_directory_gives_2(call, tmp_path):
    done = call("reconcile", tmp_path / "nowhere")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no such directory" in done.stderr


def test_a_newer_format_gives_2_and_stays_as_it_is(call, filled):
    connection = sqlite3.connect(filled / "index.db", isolation_level=None)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    rows = fingerprint(filled / "rows")
    for options in ((), ("--dry-run",)):
        done = call("reconcile", filled, *options)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "format 2" in done.stderr
    assert fingerprint(filled / "rows") == rows


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--deep",)])
def test_a_directory_of_somebody_else_gives_2_and_stays_as_it_is(call, tmp_path, options):
    home = tmp_path / "home"
    for name in ("tmp/letter", "rows/boat", "LOCK", "notes/1"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    connection = sqlite3.connect(home / "index.db")
    connection.execute("CREATE TABLE image (of TEXT)")
    connection.close()
    before = fingerprint(home)
    done = call("reconcile", home, *options)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "not a prefixcache directory" in done.stderr
    assert fingerprint(home) == before


def test_a_file_that_can_not_be_read_gives_2(call, filled, monkeypatch):
    ours = importlib.import_module("prefixcache.ssd.repair")
    victim, whole, read = images(filled)[0], ours.Checker.is_whole, ours.read_image

    def fails(path, entry):
        if str(path) == str(victim):
            raise OSError(5, "Input/output error")
        return read(path, entry)

    monkeypatch.setattr(
        ours.Checker, "is_whole", lambda self, path, entry: path != str(victim) and whole(self, path, entry)
    )
    monkeypatch.setattr(ours, "read_image", fails)
    done = call("reconcile", filled, "--deep")
    assert done.exit_code == 2
    assert "unreadable" in done.stdout
    assert "Input/output error" in done.stdout


def test_an_index_of_nonsense_is_a_finding_and_is_made_anew(call, filled):
    connection = sqlite3.connect(filled / "index.db", isolation_level=None)
    connection.execute("PRAGMA user_version = -16")
    connection.execute("UPDATE image SET kind = 7 WHERE id = 1")
    connection.close()
    for command in (("inspect",), ("reconcile", "--dry-run"), ("reconcile",)):
        done = call(*command, filled)
        assert (done.exit_code, done.stderr) == (1, "")
        assert "its format is no number" in done.stdout
    assert call("reconcile", filled).exit_code == 0
    assert call("inspect", filled).exit_code == 0
    with PrefixCache(ram="20MB", ssd_dir=filled, ssd="100MB") as cache:
        assert cache.match(tokens(LONG), model="chat").ssd == LONG


def test_the_real_command_ends_with_the_same_codes(filled, tmp_path):
    def code(*args):
        return subprocess.run([*COMMAND, "reconcile", *map(str, args)], capture_output=True).returncode

    assert code(filled) == 0
    images(filled)[0].unlink()
    assert (code(filled, "--dry-run"), code(tmp_path / "nowhere")) == (1, 2)


def test_work_shows_a_bar_on_a_terminal_and_only_there(call, filled, monkeypatch):
    assert call("reconcile", filled, "--deep").stderr == ""
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=80)
        monkeypatch.setattr(progress, "console", lambda *, stderr=False, to=console: to)
        with progress.bar("checking") as show:
            for done in range(5):
                show(done, 5)
        assert ("checking" in screen.getvalue()) is terminal
