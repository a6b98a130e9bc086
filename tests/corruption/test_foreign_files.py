"""What the system and other programs put beside our files: ._NAME of macOS on exFAT and SMB, .DS_Store, a tag. No damage."""

from __future__ import annotations

import os
import plistlib
from pathlib import Path

import pytest

from prefixcache import DirectoryError
from prefixcache.ssd import clear, directory, reconcile, survey
from prefixcache.ssd.directory import TAG, Directory
from prefixcache.store_fetch_remove.prune_directory import prune
from prefixcache.store_fetch_remove.selection import Selection
from tests.models import states

from .directories import EXACT, PLAIN, depth, file_of, opened, reasons, rows_of, store, uncleanly

FILES = [".DS_Store", "._index.db", ".metadata_never_index", TAG, "Thumbs.db", "desktop.ini", "Icon\r", ".localized"]
FOLDERS = [
    ".TemporaryItems",
    ".DocumentRevisions-V100",
    ".Trashes",
    ".Spotlight-V100",
    ".fseventsd",
    "lost+found",
    "System Volume Information",
]
APPLE_DOUBLE = b"\0\5\x16\7" + bytes(4092)


def strew(root: Path) -> list[Path]:
    """Foreign files in each folder, a ._NAME beside each file. What was made."""
    made = []
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        for name in FILES:
            if not (folder / name).exists():
                (folder / name).write_bytes(APPLE_DOUBLE)
                made.append(folder / name)
        for name in FOLDERS:
            (folder / name).mkdir()
            (folder / name / "inside").write_bytes(bytes(5000))
            made.append(folder / name)
    for path in (*root.rglob("*.safetensors"), root / "LOCK", root / "index.db"):
        path.with_name(f"._{path.name}").write_bytes(APPLE_DOUBLE)
        made.append(path.with_name(f"._{path.name}"))
    return made


@pytest.mark.parametrize("how", ["closed", "crashed", "index lost"])
def test_three_starts_leave_them_alone_and_quarantine_nothing(root, how):
    made = strew(root)
    for _ in range(3):
        if how == "crashed":
            uncleanly(root)
        elif how == "index lost":
            (root / "index.db").unlink()
        with opened(root) as cache:
            assert [depth(cache, kept) for kept in EXACT] == [len(kept.tokens) for kept in EXACT]
            states.check_integrity(cache)
            assert cache.stats().ssd.quarantined == 0
    assert reasons(root) == []
    assert [path for path in made if not path.exists()] == []


def test_they_cost_no_pass_over_the_files_after_a_clean_close(root, caplog):
    strew(root)
    opened(root).close()
    assert not caplog.records


def test_no_command_counts_them_or_finds_fault_with_them(root):
    before = survey(root)
    strew(root)
    after = survey(root)
    assert (after.disk, after.quarantine, after.debris) == (before.disk, (), ())
    assert reconcile(root, dry_run=True, deep=True).clean
    assert reconcile(root, deep=True).clean
    assert prune(root, Selection(to_size=before.disk // 2), dry_run=True).before == before.disk


def test_they_come_while_it_runs(root):
    with opened(root) as cache:
        strew(root)
        store(cache, PLAIN._replace(tokens=[7 * i for i in range(900)]))
        assert cache.flush(20)
        states.check_integrity(cache)


def test_a_folder_that_only_the_system_has_looked_into_is_blank(tmp_path):
    (tmp_path / "disk").mkdir()
    strew(tmp_path / "disk")
    assert Directory(tmp_path / "disk").blank
    opened(tmp_path / "disk").close()
    assert Directory(tmp_path / "disk").ours


def test_a_folder_with_a_file_of_a_user_is_refused_as_before(tmp_path):
    (tmp_path / "disk").mkdir()
    strew(tmp_path / "disk")
    (tmp_path / "disk" / "thesis.txt").write_text("x")
    with pytest.raises(DirectoryError, match=r"thesis\.txt"):
        opened(tmp_path / "disk")


def test_cleared_folders_go_with_what_the_system_left_in_them(root):
    for path in root.rglob("*.safetensors"):
        path.with_name(f"._{path.name}").write_bytes(APPLE_DOUBLE)
    (root / ".DS_Store").write_bytes(b"x")
    clear(root)
    assert not any((root / "rows").iterdir())
    assert (root / ".DS_Store").exists()


def test_a_folder_whose_last_image_is_deleted_goes_with_them_too(root):
    folder = file_of(root, rows_of(root, "plain")[0]).parent
    (folder / "._x").write_bytes(APPLE_DOUBLE)
    with opened(root) as cache:
        cache.clear()
        assert cache.flush(20)
        assert not any((root / "rows").iterdir())
        states.check_integrity(cache)


# -- what it marks itself with ----------------------------------------------------------------------------------------


def test_a_directory_has_the_tag_of_a_cache_and_an_older_one_gets_it(root):
    (root / TAG).unlink()
    opened(root).close()
    assert (root / TAG).read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
    assert not (root / ".metadata_never_index").exists() or os.uname().sysname == "Darwin"


def test_on_a_mac_it_is_left_out_of_time_machine_and_spotlight(tmp_path, monkeypatch):
    attributes = {}
    monkeypatch.setattr(directory.sys, "platform", "darwin")
    monkeypatch.setattr(directory, "_set_attribute", lambda path, name, value: attributes.update({(path, name): value}))
    directory.mark_as_cache(tmp_path)
    assert (tmp_path / ".metadata_never_index").read_bytes() == b""
    (((where, name), value),) = attributes.items()
    assert (where, name) == (tmp_path, "com.apple.metadata:com_apple_backup_excludeItem")
    assert plistlib.loads(value) == "com.apple.backupd"


@pytest.mark.parametrize("what", ["a link", "a folder", "a file"])
def test_what_stands_in_the_place_of_the_tag_stays(tmp_path, what):
    (tmp_path / "outside").write_bytes(b"precious")
    place = tmp_path / "ssd"
    place.mkdir()
    if what == "a link":
        (place / TAG).symlink_to(tmp_path / "outside")
    elif what == "a folder":
        (place / TAG).mkdir()
    else:
        (place / TAG).write_bytes(b"other")
    before = os.lstat(place / TAG)
    opened(place).close()
    assert os.lstat(place / TAG) == before
    assert (tmp_path / "outside").read_bytes() == b"precious"
