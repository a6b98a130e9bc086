"""`prefixcache clear`: it asks, and it says what it did."""

import importlib
import json
import os

import pytest
from directories import LONG, fingerprint, images, kv, tokens

from prefixcache import PrefixCache

module = importlib.import_module("prefixcache.cli.directory.clear")


def test_with_yes_all_images_leave_and_the_cache_opens_empty(call, filled):
    n = sum(len(images(filled, folder)) for folder in ("rows", "windows", "snapshots"))
    done = call("clear", filled, "--yes")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"deleted {n} images" in done.stdout
    assert not list(filled.rglob("*.safetensors"))
    with PrefixCache(ram="20MB", ssd_dir=filled, ssd="100MB") as cache:
        assert cache.match(tokens(LONG), model="chat").ssd == 0
        cache.store(tokens(300), kv(300), model="chat")
    assert call("reconcile", filled, "--deep").exit_code == 0


def test_without_a_terminal_it_says_what_to_add(call, filled):
    before = fingerprint(filled)
    done = call("clear", filled)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "add --yes" in done.stderr
    assert fingerprint(filled) == before


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 1)])
def test_on_a_terminal_it_asks(call, filled, monkeypatch, answer, code):
    asked = []
    monkeypatch.setattr(module.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(module.typer, "confirm", lambda text, err: asked.append(text) or answer)
    before = fingerprint(filled)
    with pytest.raises(module.typer.Exit) as ended:
        module.clear(directory=filled)
    assert ended.value.exit_code == code
    assert "delete" in asked[0]
    assert "images" in asked[0]
    assert (fingerprint(filled) == before) is not answer


def test_a_dry_run_changes_nothing(call, filled):
    before = fingerprint(filled)
    done = call("clear", filled, "--dry-run")
    said = json.loads(call("clear", filled, "--dry-run", "--json").stdout)
    assert done.exit_code == 0
    assert f"would delete {said['images']} images" in done.stdout
    assert fingerprint(filled) == before


def test_files_that_are_not_its_own_stay_and_give_1(call, filled):
    (filled / "rows" / "[red]notes\x1b[2J.txt").write_text("mine")
    done = call("clear", filled, "--yes")
    assert done.exit_code == 1
    assert r"rows/[red]notes\x1b[2J.txt" in done.stdout
    assert "\x1b" not in done.stdout
    assert json.loads(call("clear", filled, "--yes", "--json").stdout)["left"] == ["rows/[red]notes\x1b[2J.txt"]


def test_a_live_directory_gives_2_and_names_the_holder(call, live_directory):
    done = call("clear", live_directory, "--yes")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"in use by pid {os.getpid()}" in done.stderr
    assert f"pid {os.getpid()}" in json.loads(call("clear", live_directory, "--yes", "--json").stdout)["error"]
    assert call("clear", live_directory, "--dry-run").exit_code == 0


def test_somebody_elses_directory_gives_2_and_stays(call, tmp_path):
    home = tmp_path / "home"
    (home / "rows").mkdir(parents=True)
    (home / "rows" / "boat").write_text("mine")
    before = fingerprint(home)
    for options in (("--yes",), ("--dry-run",), ("--yes", "--json")):
        assert call("clear", home, *options).exit_code == 2
    assert call("clear", tmp_path / "nowhere", "--yes").exit_code == 2
    assert fingerprint(home) == before
