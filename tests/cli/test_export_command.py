"""`prefixcache export`: the file is whole or absent and nobody else's to read, and a pipe takes the archive as well."""

from __future__ import annotations

import importlib
import json
import os
import stat
import subprocess
import tarfile

import pytest
from directories import COMMAND, LONG, SALT, fingerprint, images, spoil, tokens

from prefixcache import PrefixCache

module = importlib.import_module("prefixcache.cli.directory.export")


def report(done):
    return json.loads(done.stdout)


def test_a_model_goes_into_a_file_of_the_owners_alone(call, filled, tmp_path):
    archive = tmp_path / "chat.tar"
    before = os.umask(0)
    try:
        done = call("export", filled, archive, "--model", "chat")
    finally:
        os.umask(before)
    assert done.exit_code == 0
    assert "whoever has it can read them" in done.stderr
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    assert names[0] == "manifest.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "chat.tar"]
    (line,) = [json.loads(line) for line in (filled / "audit.log").read_text().splitlines()]
    assert line["arguments"] == {"directory": str(filled), "file": str(archive), "model": "chat"}
    assert line["did"]["images"] == sum("/" in name for name in names)
    text = (filled / "audit.log").read_text() + done.stdout + done.stderr
    assert str(tokens(1)[0])[:7] not in text
    assert SALT.decode() not in text


def test_a_dry_run_writes_nothing_anywhere(call, filled, tmp_path):
    before = fingerprint(tmp_path)
    said = report(call("export", filled, "--all", "--dry-run", "--json"))
    assert call("export", filled, tmp_path / "a.tar", "--all", "--dry-run").exit_code == 0
    assert fingerprint(tmp_path) == before
    assert said["images"] == sum(len(images(filled, folder)) for folder in ("rows", "windows", "snapshots"))


def test_what_to_export_and_where_to_must_be_said(call, filled, tmp_path):
    for options in ((tmp_path / "a.tar",), ("--all",), (tmp_path / "a.tar", "--all", "--model", "chat")):
        done = call("export", filled, *options)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert call("export", filled, tmp_path / "a.tar", "--model", "nobody").exit_code == 2
    assert not (tmp_path / "a.tar").exists()


def test_an_older_archive_is_replaced_at_the_end_only(call, filled, tmp_path, monkeypatch):
    archive = tmp_path / "a.tar"
    archive.write_text("the one before")

    def fails(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", fails)
        done = call("export", filled, archive, "--all")
    assert done.exit_code == 2
    assert "No space left" in done.stderr
    assert archive.read_text() == "the one before"
    assert call("export", filled, archive, "--all").exit_code == 0
    assert tarfile.is_tarfile(archive)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "cache"]


@pytest.mark.parametrize("place", ["folder", "pipe", "inside", "nowhere/a.tar", "link"])
def test_where_no_archive_belongs_none_is_written(call, filled, tmp_path, place):
    path = filled / "a.tar" if place == "inside" else tmp_path / place
    if place == "folder":
        path.mkdir()
    elif place == "pipe":
        os.mkfifo(path)
    elif place == "link":
        path.symlink_to("/dev/null")
    done = call("export", filled, path, "--all")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not list(tmp_path.rglob("*.part"))


def test_a_damaged_image_is_left_out_and_gives_1(call, filled, tmp_path):
    spoil(images(filled, "snapshots")[0])
    done = call("export", filled, tmp_path / "a.tar", "--model", "state")
    assert done.exit_code == 1
    assert "the checksum does not match" in done.stdout
    assert (tmp_path / "a.tar").exists()


def test_one_machine_exports_into_the_import_of_another(filled, tmp_path):
    export = subprocess.Popen(
        [*COMMAND, "export", str(filled), "-", "--model", "chat", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    target = tmp_path / "target"
    done = subprocess.run([*COMMAND, "import", str(target), "-", "--json"], stdin=export.stdout, capture_output=True)
    assert export.stdout is not None
    export.stdout.close()
    said = export.stderr.read().decode()
    assert (export.wait(), done.returncode) == (0, 0), (said, done.stderr)
    assert json.loads(said[: said.rindex("}") + 1])["images"] == json.loads(done.stdout)["images"]
    with PrefixCache(ram="20MB", ssd_dir=target, ssd="100MB") as cache:
        assert cache.match(tokens(LONG), model="chat").ssd == LONG
        assert cache.match(tokens(600), model="chat", salt=SALT).ssd == 600


def test_a_reader_that_leaves_early_gives_2(filled):
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -c 100 >/dev/null; exit ${PIPESTATUS[0]}', "-", *COMMAND, "export", str(filled), "-",
         "--all"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "closed" in done.stderr


def test_a_live_directory_is_exported_and_stays_in_order(call, opened, tmp_path):
    done = call("export", opened, tmp_path / "a.tar", "--all")
    assert done.exit_code == 0
    assert "which is open" in done.stdout
    assert call("reconcile", opened, "--deep", "--dry-run").exit_code == 0
