"""Who may open a directory, what it looks like, and what is said when it can't be had."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.ssd import DirectoryError, DirectoryHeld, NewerFormat, reconcile, survey
from prefixcache.ssd.directory import Directory

from .images import SPACE, Opened, chain, execute, fingerprint, make, path_of


def in_child(work) -> int:
    """The exit status of a forked child that runs `work`."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(work() or 0)
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_second_opener_is_told_who_has_it(ssd, root):
    with pytest.raises(DirectoryHeld, match=rf"pid {os.getpid()} on .+ since 20\d\d-") as refused:
        Opened(root)
    assert str(root) in str(refused.value)
    assert ssd.put(make(1))


def test_a_host_whose_name_is_no_utf8_can_open_and_is_named(root, open_tier, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "m\udce4c")
    open_tier()
    with pytest.raises(DirectoryHeld, match=rf"pid {os.getpid()} on m\?c since"):
        open_tier()


def test_a_second_process_is_refused(ssd, root):
    script = f"""
from prefixcache.ssd import Ssd, DirectoryHeld, WriterEvents
try:
    Ssd({str(root)!r}, limit=1 << 30, queue_bytes=1, events=WriterEvents(print))
except DirectoryHeld as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"pid {os.getpid()}" in done.stdout


def test_a_closed_directory_can_be_opened_again(ssd, open_tier):
    ssd.close()
    assert open_tier().put(make(1))


def test_a_refused_opening_lets_go_of_the_lock(root, open_tier, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("prefixcache.ssd.open_directory.mend", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Opened(root)
    assert open_tier().put(make(1))


def test_in_a_forked_child_the_tier_is_dead_and_the_directory_held(ssd, root):
    stored = ssd.put(*chain(3))

    def child():
        assert not ssd.write(make(9)[0], SPACE, make(9)[1])
        ssd.delete(stored)
        ssd.touch([("rows", stored[0].key, 5, 1)])
        assert not ssd.flush(1)
        assert ssd.read(stored[0]).exception(1)
        ssd.close()
        try:
            Opened(root)
        except DirectoryHeld:
            return 7

    assert in_child(child) == 7
    ssd.put(make(4))
    ssd.check_integrity()
    assert ssd.stats().files == 4


def test_a_child_that_lives_on_does_not_keep_the_directory(root, open_tier):
    ssd = open_tier()
    ready, gone = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.write(ready[1], b"x")
        os.read(gone[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        ssd.close()
        assert open_tier().put(make(1))
    finally:
        os.write(gone[1], b"x")
        os.waitpid(pid, 0)


def test_folders_and_files_are_private_under_any_umask(tmp_path, open_tier):
    before = os.umask(0)
    try:
        ssd = open_tier(tmp_path / "new" / "ssd")
        ssd.put(make(1))
        stored = ssd.put(make(2))
        path_of(tmp_path / "new" / "ssd", stored[0]).write_bytes(b"broken")
        assert ssd.read(stored[0]).exception(10)
        ssd.flush(10)
        for folder, _, files in os.walk(tmp_path / "new"):
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700, folder
            for name in files:
                assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600, name
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o777, 0o027])
def test_a_narrow_umask_does_not_lock_us_out(tmp_path, open_tier, mask):
    before = os.umask(mask)
    try:
        ssd = open_tier(tmp_path / "new" / "ssd")
        ssd.put(make(1))
        assert stat.S_IMODE(os.stat(tmp_path / "new" / "ssd" / "rows").st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_path_of_the_directory_is_an_error_that_names_it(root, below):
    root.write_text("mine")
    with pytest.raises(DirectoryError, match=re.escape(str(root / below)) + ".*another directory"):
        Opened(root / below)
    assert root.read_text() == "mine"


def of_files(**contents):
    """Makes files of these contents, by their paths with __ for each /."""

    def make_files(root):
        for name, content in contents.items():
            path = root / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)

    return make_files


def of_another_index(root):
    (root / "LOCK").touch()
    execute(root, "CREATE TABLE image (of TEXT)")


FOREIGN = {
    "a folder named tmp": of_files(tmp__thesis="mine"),
    "what LevelDB leaves": of_files(LOCK="", CURRENT="MANIFEST-000004\n", data="x" * 100),
    "an empty LOCK and a folder named tmp": of_files(LOCK="", tmp__file="x"),
    "another LOCK": of_files(LOCK="4711\n"),
    "another index": of_another_index,
    "a folder of numbers": of_files(LOCK="", stats__2026="1,2"),
    "a link": lambda root: (root / "rows").symlink_to(root.parent),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("do", [Opened, reconcile, lambda root: reconcile(root, dry_run=True), survey])
def test_a_directory_of_another_program_is_refused_untouched(root, what, do):
    root.mkdir()
    FOREIGN[what](root)
    before = fingerprint(root)
    try:
        said = do(root).error
    except DirectoryError as error:
        said = str(error)
    assert fingerprint(root) == before
    assert str(root) in said
    assert "name another directory" in said


BLANK = {
    "no folder": lambda root: root.rmdir(),
    "an empty folder": lambda root: None,
    "a fresh disk": lambda root: (root / "lost+found").mkdir(),
    "a crash before the lock was signed": lambda root: (root / "LOCK").touch(),
    "empty folders": lambda root: (root / "tmp").mkdir(),
}


@pytest.mark.parametrize("what", BLANK)
def test_where_nothing_could_be_lost_a_cache_begins_and_says_nothing(root, open_tier, caplog, what):
    root.mkdir()
    BLANK[what](root)
    ssd = open_tier()
    assert ssd.put(make(1))
    ssd.close()
    open_tier().close()
    assert caplog.records == []


def test_images_beside_a_lock_are_a_cache_whose_index_is_lost(root, open_tier):
    ssd = open_tier()
    stored = ssd.put(*chain(3))
    ssd.close()
    for path in (*root.glob("index.db*"), root / "LOCK"):
        path.unlink()
    with pytest.raises(DirectoryError, match="make an empty LOCK in it"):
        Opened(root)
    (root / "LOCK").touch()
    assert {entry.address for entry in open_tier().entries()} == {entry.address for entry in stored}


def test_a_signed_lock_stays_signed_while_it_is_signed_again(root, open_tier, monkeypatch):
    open_tier().close()
    whole = (root / "LOCK").read_bytes()
    seen = []
    cut = os.ftruncate

    def watched(fd, size):
        seen.append((root / "LOCK").read_bytes())
        cut(fd, size)

    monkeypatch.setattr(os, "ftruncate", watched)
    open_tier().close()
    assert seen
    assert all(text[:4] == whole[:4] == b"pid " and b"since" in text for text in seen)


def test_what_is_in_tmp_and_not_named_by_us_stays(root, open_tier):
    open_tier().close()
    ours, theirs = ["12.safetensors", "probe"], ["thesis.txt", "x.safetensors", "12.safetensors.bak"]
    for name in (*ours, *theirs):
        (root / "tmp" / name).write_text("x")
    (root / "tmp" / "13.safetensors").mkdir()
    assert reconcile(root).counts == {"debris": 2}
    open_tier().close()
    assert {path.name for path in (root / "tmp").iterdir()} == {*theirs, "13.safetensors"}


@pytest.mark.parametrize("wrong", [{"readers": 0}, {"queue_bytes": -1}, {"limit": 0}])
def test_bad_arguments_are_errors_and_take_no_lock(root, open_tier, wrong):
    with pytest.raises(ValueError, match="give"):
        Opened(root, **wrong)
    assert open_tier().put(make(1))


def test_a_link_in_the_place_of_a_folder_is_an_error(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    root.mkdir()
    (root / "LOCK").touch()
    (root / "rows").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirectoryError, match="has 'rows'"):
        Opened(root)
    (root / "LOCK").write_text("pid 1\nhost a\nsince 2026\n")
    with pytest.raises(DirectoryError, match="move it away"):
        Opened(root)


def test_a_link_in_the_place_of_the_lock_is_not_followed(root, tmp_path):
    root.mkdir()
    (tmp_path / "precious").write_text("mine")
    (root / "LOCK").symlink_to(tmp_path / "precious")
    with pytest.raises(DirectoryError, match="LOCK"):
        Opened(root)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")
def test_a_directory_of_another_user_is_an_error_with_a_remedy(tmp_path):
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and str(parent) not in ("/", "/tmp"):
            os.chmod(parent, 0o755)
    (tmp_path / "ssd").mkdir(0o755)

    def child():
        os.setuid(65534)
        try:
            Opened(tmp_path / "ssd")
        except DirectoryError as error:
            return 7 if "user 65534 may not read or write it" in str(error) else 8

    assert in_child(child) == 7


def test_a_directory_that_may_not_be_looked_at_is_no_missing_one(tmp_path, monkeypatch):
    def refused(path, *args, **options):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "is_dir", os.path.isdir)  # as in Python 3.14: it raises nothing
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        with pytest.raises(DirectoryError, match="may not read or write it"):
            Directory(tmp_path / "ssd").require()


@pytest.mark.parametrize("crashed", [False, True])
def test_what_a_newer_release_wrote_is_refused_untouched(open_tier, root, crashed):
    ssd = open_tier()
    ssd.put(*chain(3))
    ssd.close()
    execute(root, "PRAGMA user_version = 2")
    if crashed:
        execute(root, "UPDATE meta SET value = '0' WHERE name = 'clean'")
    before = fingerprint(root)
    with pytest.raises(NewerFormat, match="upgrade prefixcache"):
        Opened(root)
    assert fingerprint(root) == before


def test_a_clean_closing_leaves_no_log_and_needs_no_repair(ssd, root, open_tier, monkeypatch):
    ssd.put(*chain(3))
    ssd.close()
    assert not (root / "index.db-wal").exists()
    monkeypatch.setattr("prefixcache.ssd.open_directory.mend", lambda *args, **more: pytest.fail("it reconciled"))
    assert open_tier().stats().files == 3
