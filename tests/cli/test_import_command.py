"""`prefixcache import`: a warm cache on another machine, and a plain word for all that did not go in."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import mlx.core as mx
import pytest
from directories import COMMAND, LONG, ODD, SALT, fingerprint, kv, tokens

from prefixcache import PrefixCache


def report(done):
    return json.loads(done.stdout)


@pytest.fixture
def archive(call, filled, tmp_path):
    path = tmp_path / "all.tar"
    assert call("export", filled, path, "--all").exit_code == 0
    return path


def test_a_cache_is_warm_after_it_bit_for_bit(call, filled, archive, tmp_path):
    target = tmp_path / "target"
    done = call("import", target, archive)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "they have a salt" in done.stdout
    assert "\x1b" not in done.stdout
    fetched = []
    for root in (filled, target):
        with PrefixCache(ram="20MB", ssd_dir=root, ssd="100MB") as cache:
            assert cache.match(tokens(600), model="chat", salt=SALT).ssd == 600
            assert cache.match(tokens(1000), model=ODD).ssd == 1000
            assert cache.match(tokens(700), model="state").ssd == 700
            cache.promote(tokens(LONG), model="chat").result(30)
            layers, rest = cache.fetch(tokens(LONG), model="chat")
            assert len(rest) == 1
            fetched.append([part for layer in layers for part in (layer.keys, layer.values)])
    assert all(mx.array_equal(one, other) for one, other in zip(*fetched, strict=True))
    (line,) = [json.loads(line) for line in (target / "audit.log").read_text().splitlines()]
    assert (line["command"], line["result"]) == ("import", "done")
    assert call("reconcile", target, "--deep").exit_code == 0


def test_what_the_cache_stores_then_hangs_on_what_came(call, archive, tmp_path):
    target = tmp_path / "target"
    call("import", target, archive)
    with PrefixCache(ram="20MB", ssd_dir=target, ssd="100MB") as cache:
        cache.promote(tokens(LONG), model="chat").result(30)
        stored = cache.store(tokens(LONG + 500), kv(LONG + 500), model="chat")
        assert 0 < stored.new_tokens <= 500 + 256
    assert call("reconcile", target, "--deep").exit_code == 0


def test_a_second_time_all_is_there_already(call, archive, tmp_path):
    call("import", tmp_path / "target", archive)
    done = call("import", tmp_path / "target", archive)
    assert done.exit_code == 0
    assert "were there already" in done.stdout
    assert report(call("import", tmp_path / "target", archive, "--json"))["images"] == 0


def test_a_dry_run_makes_nothing(call, archive, tmp_path):
    before = fingerprint(tmp_path)
    done = call("import", tmp_path / "target", archive, "--dry-run")
    assert done.exit_code == 0
    assert "would take in" in done.stdout
    assert fingerprint(tmp_path) == before


def test_a_torn_archive_gives_1_and_what_was_whole(call, archive, tmp_path):
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    done = call("import", tmp_path / "target", archive)
    assert done.exit_code == 1
    assert "torn" in done.stderr
    assert report(call("import", tmp_path / "target", archive, "--json"))["present"] > 3
    assert call("reconcile", tmp_path / "target", "--deep").exit_code == 0


def test_refusals_are_named_and_give_1(call, archive, tmp_path):
    data = bytearray(archive.read_bytes())
    at = data.index(b"snapshots/")
    data[at : at + 10] = b"sn\x1b[2Jots/"
    header = data[at : at + 512]
    header[148:156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(header)
    archive.write_bytes(data)
    done = call("import", tmp_path / "target", archive)
    assert done.exit_code == 1
    assert r"refused, unknown: sn\x1b[2Jots/" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_limit_holds(call, archive, tmp_path):
    done = call("import", tmp_path / "target", archive, "--limit", "700kB", "--json")
    assert done.exit_code == 1
    assert report(done)["counts"]["no room"] > 0
    assert report(done)["after"] <= 700_000 + 8192  # and the line in the audit log
    for value in ("0", "20QB"):
        assert call("import", tmp_path / "other", archive, "--limit", value).exit_code == 2
    assert not (tmp_path / "other").exists()


def test_what_is_no_archive_gives_2(call, filled, tmp_path):
    (tmp_path / "letter").write_text("Dear all,")
    for name in ("letter", "nowhere", "cache"):
        done = call("import", tmp_path / "target", tmp_path / name)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "target").exists()


def test_a_live_directory_and_somebody_elses_give_2(call, archive, opened, tmp_path):
    done = call("import", opened, archive)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"in use by pid {os.getpid()}" in done.stderr
    assert call("import", opened, archive, "--dry-run").exit_code == 0
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("mine")
    before = fingerprint(home)
    assert call("import", home, archive).exit_code == 2
    assert call("import", home, archive, "--dry-run").exit_code == 2
    assert fingerprint(home) == before


def test_a_stop_in_the_middle_keeps_what_came_and_the_next_run_goes_on(call, archive, tmp_path):
    target, data = tmp_path / "target", archive.read_bytes()
    with subprocess.Popen([*COMMAND, "import", str(target), "-"], stdin=-1, stdout=-1, stderr=-1) as process:
        process.stdin.write(data[: len(data) // 2])
        process.stdin.flush()
        while not list(target.glob("rows/*/*.safetensors")):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"stopped by SIGTERM" in said
    (line,) = [json.loads(line) for line in (target / "audit.log").read_text().splitlines()]
    assert line["result"] == "stopped by SIGTERM"
    assert report(call("import", target, archive, "--json"))["present"] > 0
    assert call("reconcile", target, "--deep").exit_code == 0


def test_a_dry_run_tells_what_has_no_room(call, archive, tmp_path):
    done = call("import", tmp_path / "target", archive, "--limit", "1kB", "--dry-run", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["counts"]["no room"] > 0
    assert not (tmp_path / "target").exists()
