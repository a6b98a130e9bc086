"""What stands in a file's place and is no file, or a file of somebody else: links, pipes, sockets, folders, giants, notes.

A directory may come out of an archive that somebody else packed. Opening it reads and writes nothing outside, and waits
for nobody.
"""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from prefixcache import DirectoryError
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.quarantine import quarantined
from prefixcache.ssd.survey import survey
from tools.faults.evidence import du

from .directories import EXACT, PLAIN, depth, file_of, judge, opened, reasons, rows_of, store, uncleanly

PRECIOUS = b"precious" * 100


def bound_socket(path):
    here = os.open(path.parent, os.O_RDONLY)
    before = os.getcwd()
    try:
        os.fchdir(here)  # the whole path is longer than a socket's name may be
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)
        os.close(here)


def folder(path):
    path.mkdir()
    (path / "within").write_bytes(bytes(5000))


PLACED = {
    "a pipe": os.mkfifo,
    "a socket": bound_socket,
    "a folder": folder,
    "a dangling link": lambda path: path.symlink_to(path.parent / "nothing"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def put(path, what):
    if path.is_file():
        path.unlink()
    PLACED[what](path)


@pytest.mark.parametrize("what", PLACED)
@pytest.mark.parametrize("clean", [True, False])
def test_what_stands_in_an_images_place_is_moved_away(root, what, clean):
    put(file_of(root, rows_of(root, "plain")[-1]), what)
    if not clean:
        uncleanly(root)
    verdict = judge(root)
    assert len(verdict.reasons) == 1
    assert verdict.corrupt == clean


def test_a_link_to_the_very_file_is_not_followed(root, tmp_path):
    path = file_of(root, rows_of(root, "plain")[0])
    shutil.move(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    assert judge(root).corrupt == 1
    assert (tmp_path / "outside").read_bytes() == before


def test_two_names_of_one_file_are_one_image_and_one_stranger(root):
    one, other = (file_of(root, row) for row in rows_of(root, "plain")[:2])
    other.unlink()
    os.link(one, other)
    verdict = judge(root)
    assert verdict.corrupt == 1


def linked_folder(root, outside):
    path = file_of(root, rows_of(root, "plain")[0]).parent
    shutil.move(path, outside)
    path.symlink_to(outside)
    return path


def test_a_folder_of_images_that_is_a_link_is_not_followed_after_a_clean_close(root, tmp_path):
    linked_folder(root, tmp_path / "outside")
    before = sorted(os.listdir(tmp_path / "outside"))
    judge(root)
    assert sorted(os.listdir(tmp_path / "outside")) == before


def test_a_folder_of_images_that_is_a_link_is_moved_away_after_a_crash(root, tmp_path):
    linked_folder(root, tmp_path / "outside")
    uncleanly(root)
    before = sorted(os.listdir(tmp_path / "outside"))
    judge(root)
    assert reasons(root) == ["a link: images are written into folders of the cache alone"]
    assert sorted(os.listdir(tmp_path / "outside")) == before


@pytest.mark.parametrize("name", ["rows", "windows", "snapshots", "quarantine", "tmp"])
def test_a_folder_of_ours_that_is_a_link_or_a_file_is_refused(root, tmp_path, name):
    shutil.move(root / name, tmp_path / "outside")
    (root / name).symlink_to(tmp_path / "outside")
    before = du(tmp_path / "outside")
    with pytest.raises(DirectoryError, match=f"{name}.*move it away"):
        opened(root)
    assert du(tmp_path / "outside") == before
    (root / name).unlink()
    (root / name).write_bytes(b"")
    with pytest.raises(DirectoryError, match=f"{name}.*move it away"):
        opened(root)


@pytest.mark.parametrize("what", PLACED)
@pytest.mark.parametrize("name", ["LOCK", "index.db"])
def test_lock_and_index_that_are_no_files_are_refused_with_a_remedy(root, name, what):
    put(root / name, what)
    with pytest.raises(DirectoryError, match=r"ssd_dir|index\.db") as refused:
        opened(root)
    assert str(root) in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 5000,
        b"pid\nhost\n",
        b"\xff" * 300,
        b"format 99999999999999999999\n",
        b"pid 1\nhost a\nsince b\nformat -1\n",
    ],
)
def test_whatever_lock_says_the_directory_opens(root, content):
    (root / "LOCK").write_bytes(content)
    judge(root)


def test_a_lock_that_claims_a_terabyte_opens(root):
    os.truncate(root / "LOCK", 1 << 40)
    judge(root, ask=(PLAIN,))


def test_a_lock_that_is_another_name_of_a_foreign_file_leaves_that_alone(root, tmp_path):
    (tmp_path / "foreign").write_bytes(PRECIOUS)
    (root / "LOCK").unlink()
    os.link(tmp_path / "foreign", root / "LOCK")
    with suppress(DirectoryError):
        opened(root).close()
    assert (tmp_path / "foreign").read_bytes() == PRECIOUS


@pytest.mark.parametrize(
    ("end", "link"),
    [
        *((end, os.symlink) for end in ("-wal", "-shm", "-journal")),
        ("-journal", os.link),
        *((end, os.link) for end in ("-wal", "-shm")),
    ],
)
def test_what_the_index_keeps_beside_it_is_not_followed_outside(root, tmp_path, end, link):
    (tmp_path / "foreign").write_bytes(PRECIOUS)
    link(tmp_path / "foreign", root / f"index.db{end}")
    try:
        with opened(root) as cache:
            store(cache, PLAIN._replace(tokens=[1, 2, 3]))
    except DirectoryError as error:
        refused = str(error)
    else:
        refused = str(root)
    assert str(root) in refused
    assert (tmp_path / "foreign").read_bytes() == PRECIOUS


@pytest.mark.parametrize("end", ["-wal", "-shm"])
@pytest.mark.parametrize("what", ["junk", "a giant", "a folder"])
def test_what_stands_beside_the_index_is_no_harm(root, end, what):
    path = root / f"index.db{end}"
    if what == "a folder":
        path.mkdir()
        with pytest.raises(DirectoryError, match=r"index\.db"):
            opened(root)
        return
    path.write_bytes(os.urandom(20_000))
    if what == "a giant":
        os.truncate(path, 1 << 36)
    judge(root)


def test_an_index_with_a_giant_of_nothing_behind_it_is_no_harm(root):
    os.truncate(root / "index.db", 1 << 36)
    judge(root, ask=(PLAIN,))


HANGS = """
import signal, sys
signal.alarm(10)
from prefixcache.ssd.survey import survey
from prefixcache.ssd.reconcile import reconcile
from prefixcache.ssd import DirectoryError
try:
    reconcile(sys.argv[1], dry_run=True)
    survey(sys.argv[1])
    reconcile(sys.argv[1])
except DirectoryError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["LOCK", "index.db", "index.db-journal"])
def test_nothing_waits_for_a_pipe_that_stands_in_the_place_of(root, name):
    put(root / name, "a pipe")
    done = subprocess.run([sys.executable, "-c", HANGS, str(root)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]


NOTES = {
    "no JSON": b"\xff\xfe\x00",
    "empty": b"",
    "other types": b'{"reason":[1],"origin":{"a":1},"when":"x"}',
    "a surrogate": b'{"reason":"\\ud800","when":1}',
    "infinity": b'{"reason":"r","when":1e999}',
    "before time": b'{"reason":"r","when":-1e300}',
    "a number of 5000 digits": b"9" * 5000,
    "a list": b"[1]",
}
BAD_NOTES = {"deep": b"[" * 200_000, "a huge time": b'{"when":1' + b"0" * 400 + b"}"}


@pytest.mark.parametrize("what", [*NOTES, *BAD_NOTES])
def test_whatever_a_quarantine_note_says_the_directory_opens(root, what):
    (root / "quarantine" / "1-a").write_bytes(b"x" * 9000)
    (root / "quarantine" / "1-a.json").write_bytes({**NOTES, **BAD_NOTES}[what])
    assert [item.name for item in quarantined(Directory(root))] == ["1-a"]
    assert len(survey(root).quarantine) == 1
    judge(root, ask=(PLAIN,))


@pytest.mark.parametrize("what", ["a pipe", "a device"])
def test_a_quarantine_note_that_is_no_file_is_left_alone(root, what):
    (root / "quarantine" / "1-a").write_bytes(b"x")
    put(root / "quarantine" / "1-a.json", what)
    judge(root, ask=(PLAIN,))


def test_a_folder_with_the_name_of_a_quarantine_note_is_counted(root):
    (root / "quarantine" / "1-a").write_bytes(b"x")
    put(root / "quarantine" / "1-a.json", "a folder")
    judge(root, ask=(PLAIN,))


def test_a_note_without_its_file_and_things_in_quarantine_that_are_no_files_are_counted(root):
    (root / "quarantine" / "1-a.json").write_bytes(b"{}")
    for number, what in enumerate(PLACED):
        put(root / "quarantine" / f"2-{number}", what)
    judge(root)


def test_strange_things_in_tmp_are_left_or_deleted_but_never_followed(root, tmp_path):
    (tmp_path / "foreign").write_bytes(PRECIOUS)
    (root / "tmp" / "probe").symlink_to(tmp_path / "foreign")
    put(root / "tmp" / "1.safetensors", "a pipe")
    put(root / "tmp" / "2.safetensors", "a folder")
    judge(root)
    assert (tmp_path / "foreign").read_bytes() == PRECIOUS


def test_names_that_no_image_has_are_moved_away_after_a_crash(root):
    for name in ("a" * 200, "\udcff\udcfe", "..x", "ab\n\x1b[31m"):
        (root / "rows" / name).write_bytes(b"x")
    uncleanly(root)
    judge(root)
    assert reasons(root) == ["no image has such a name"] * 4


def test_every_prompt_is_there_when_nothing_was_damaged(root):
    with opened(root) as cache:
        assert [depth(cache, kept) for kept in EXACT] == [len(kept.tokens) for kept in EXACT]
