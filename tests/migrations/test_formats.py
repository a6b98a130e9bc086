"""What earlier and later versions write: an index of a schema that was never released is rebuilt from the files, images that
aren't read any more are deleted, and what a newer release wrote is refused untouched.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sqlite_utils import Database

from prefixcache import PrefixCache, image_format
from prefixcache.migrations import index as migrations
from prefixcache.ssd import DirectoryError, NewerFormat, clear, reconcile, survey
from prefixcache.ssd.entries import FOLDERS
from tests.models import states
from tests.ssd.images import fingerprint

FIXTURES = Path(__file__).parents[1] / "fixtures" / "directories"
STEPS = ["m001_images"]
FORMAT = image_format.FORMAT
NEWER = str(int(FORMAT) + 1)


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 977 + i * 31) % 5000 + 10 for i in range(count)]


KEPT = [  # what the directories of earlier releases hold
    ("dense", prompt(1, 300), b"", "raw", states.sliceable, states.check),
    ("dense", prompt(2, 300), b"tenant", "raw", states.sliceable, states.check),
    ("windowed", prompt(3, 400), b"", "raw", states.windowed, states.check),
    ("hybrid", prompt(4, 270), b"", "raw", states.hybrid, states.check),
    ("levelled", prompt(5, 300), b"", "turboquant:4", states.uneven, states.check_uneven),
]


@pytest.fixture(params=sorted(path.name for path in FIXTURES.glob("*.tar.gz")))
def earlier(request, tmp_path) -> Path:
    """A directory as an earlier release left it."""
    with tarfile.open(FIXTURES / request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param.removesuffix(".tar.gz")


def open_on(root: Path, codec: str = "raw") -> PrefixCache:
    return PrefixCache(ram="50MB", ssd_dir=root, ssd="50MB", codec=codec)


def check_all(root: Path) -> None:
    """It opens, serves none of its images, and takes the same prompts again."""
    for codec in ("raw", "turboquant:4"):
        kept = [one for one in KEPT if one[3] == codec]
        with open_on(root, codec) as cache:
            for model, tokens, salt, _, make, _ in kept:
                assert cache.match(tokens, model=model, salt=salt) == (0, 0)
                assert cache.promote(tokens, model=model, salt=salt).result(20) == 0
                cache.store(tokens, make(tokens), model=model, salt=salt)
        with open_on(root, codec) as cache:
            for model, tokens, salt, _, _, check in kept:
                assert cache.promote(tokens, model=model, salt=salt).result(20) == len(tokens)
                made, rest = cache.fetch(tokens, model=model, salt=salt, leave=0)
                assert list(rest) == []
                check(made, tokens)
            assert cache.stats().counters.corrupt == 0
            cache._ssd.check_integrity()
    assert reconcile(root, deep=True).clean
    assert not list((root / "quarantine").glob("*.safetensors"))
    assert not (root / "stats").exists()


def steps(root: Path) -> list[str]:
    index = sqlite3.connect(root / "index.db")
    try:
        return [name for (name,) in index.execute("SELECT name FROM _sqlite_migrations ORDER BY id")]
    finally:
        index.close()


def shape(index: Database) -> dict[str, str]:
    return dict(index.execute("SELECT name, sql FROM sqlite_master"))


def undone(root: Path) -> dict[str, int]:
    """What a look at a directory of an earlier version finds: its index, its images, and its files of levels."""
    found = {"index": 1, "older format": len(images(root)), "debris": len(list(root.glob("stats/*")))}
    return {kind: count for kind, count in found.items() if count}


def test_a_directory_of_an_earlier_version_opens_without_the_images_that_are_not_read_any_more(earlier, caplog):
    count = undone(earlier)["older format"]
    with caplog.at_level("WARNING"):
        check_all(earlier)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"1 x index, {count} x older format" in line
    assert steps(earlier) == STEPS


def test_a_directory_of_an_earlier_version_is_mended_and_cleared(earlier, tmp_path):
    shutil.copytree(earlier, tmp_path / "copy")
    found = undone(earlier)
    report = reconcile(earlier, deep=True)
    assert report.counts == found
    assert {f.action for f in report.findings} == {"deleted", "rebuilt from the files"}
    assert report.freed > 50_000
    check_all(earlier)
    assert clear(tmp_path / "copy").images == found["older format"]
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()) == [
        "CACHEDIR.TAG",
        "LOCK",
        "index.db",
    ]
    check_all(tmp_path / "copy")


def test_a_directory_of_an_earlier_version_that_lost_its_index_is_brought_forward(earlier):
    (earlier / "index.db").unlink()
    check_all(earlier)


PROBLEMS = ("its tables are not those that this release writes", "an image has a value that no cache writes",
            "a namespace has a value that no cache writes")  # fmt: skip


def test_looking_at_a_directory_of_an_earlier_version_changes_nothing(earlier):
    before = fingerprint(earlier)
    found = survey(earlier)
    assert found.problem in PROBLEMS
    assert found.namespaces == ()
    for deep in (False, True):
        assert reconcile(earlier, dry_run=True, deep=deep).counts == undone(earlier)
    assert fingerprint(earlier) == before


def cut(monkeypatch, happens: Callable[[], None]) -> None:
    """What `happens` does comes in the place of the schema's last statement."""

    class Connection(sqlite3.Connection):
        def execute(self, sql, *rest):
            if sql.startswith("CREATE TABLE tokens"):
                happens()
            return super().execute(sql, *rest)

    monkeypatch.setattr("prefixcache.ssd.index.sqlite3.connect", partial(sqlite3.connect, factory=Connection))


def test_a_step_that_fails_half_way_changes_nothing_and_is_done_at_the_next_opening(tmp_path, monkeypatch):
    def failing():
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        cut(patch, failing)
        with pytest.raises(DirectoryError, match="disk is full: check the disk"):
            open_on(tmp_path / "new")
    index = Database(tmp_path / "new" / "index.db")
    assert not [name for name in shape(index) if "_sqlite_migrations" not in name]
    index.close()
    check_all(tmp_path / "new")


def test_a_process_that_dies_half_way_through_a_step_leaves_what_the_next_brings_forward(tmp_path, monkeypatch):
    pid = os.fork()
    if not pid:
        try:
            cut(monkeypatch, lambda: os._exit(7))
            open_on(tmp_path / "new")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    check_all(tmp_path / "new")


def stepped() -> Database:
    index = Database(memory=True)
    migrations.schema.apply(index)
    return index


def test_the_steps_lead_to_the_schema_of_a_new_directory_and_change_nothing_the_second_time(tmp_path):
    with open_on(tmp_path / "new"):
        pass
    new, index = Database(tmp_path / "new" / "index.db"), stepped()
    assert [step.name for step in migrations.schema.applied(new)] == STEPS
    assert shape(index) == shape(new)
    migrations.schema.apply(index)
    assert [step.name for step in migrations.schema.applied(index)] == STEPS


# -- other releases ---------------------------------------------------------------------------------------------------


def filled(root: Path) -> Path:
    tokens = prompt(1, 300)
    with open_on(root) as cache:
        cache.store(tokens, states.sliceable(tokens), model="dense")
    return root


def images(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS.values() for path in root.glob(f"{folder}/*/*"))


def of_format(said: bytes, file: Path, *, whole: bool) -> str:
    """The file says another format; its checksum."""
    changed = file.read_bytes().replace(b'"format":"%s"' % FORMAT.encode(), b'"format":"%s"' % said)
    data = np.frombuffer(bytearray(changed), np.uint8)
    if whole:
        data[image_format._CHECKSUM] = np.frombuffer(image_format._digest(data).encode(), np.uint8)
    file.write_bytes(data.tobytes())
    return image_format.Image(data).checksum


def test_a_file_of_an_earlier_format_is_never_believed_though_the_index_and_its_checksum_say_so(tmp_path):
    root = filled(tmp_path / "ssd")
    for file in images(root):
        checksum = of_format(b"1", file, whole=True)
        index = sqlite3.connect(root / "index.db")
        index.execute("UPDATE image SET checksum = ? WHERE hex(key) = upper(?)", [checksum, file.stem])
        index.commit()
        index.close()
    shutil.copytree(root, tmp_path / "copy")
    with open_on(root) as cache:
        assert cache.promote(prompt(1, 300), model="dense").result(20) == 0
        assert cache.stats().counters.corrupt > 0
    report = reconcile(tmp_path / "copy", deep=True)
    assert report.counts == {"older format": 2}
    assert {finding.reason for finding in report.findings} == {f"format '1', this release reads '{FORMAT}'"}


@pytest.mark.parametrize("said", [b"0", b"x", b"11", b"-1", b""])
def test_a_file_of_a_format_that_never_was_is_set_aside(tmp_path, said):
    root = filled(tmp_path / "ssd")
    of_format(said, images(root)[0], whole=False)
    (root / "index.db").unlink()
    assert reconcile(root).counts["broken"] == 1
    assert len(list((root / "quarantine").glob("*.safetensors"))) == 1


def test_a_lock_of_a_newer_release_is_heeded_even_where_the_index_is_lost(tmp_path):
    root = filled(tmp_path / "ssd")
    (root / "LOCK").write_text((root / "LOCK").read_text().replace(f"format {FORMAT}", f"format {NEWER}"))
    (root / "index.db").unlink()
    before = fingerprint(root)
    with pytest.raises(NewerFormat, match=rf"format {NEWER}.*upgrade prefixcache"):
        open_on(root)
    assert "upgrade prefixcache" in reconcile(root).error
    assert fingerprint(root) == before


def test_images_of_a_newer_release_are_refused_untouched_where_nothing_else_says_so(tmp_path):
    root = filled(tmp_path / "ssd")
    for file in images(root):
        of_format(NEWER.encode(), file, whole=True)
    (root / "index.db").unlink()
    before = fingerprint(root)
    with pytest.raises(NewerFormat, match=f"an image in it is of format {NEWER}"):
        open_on(root)
    assert fingerprint(root) == before


def test_a_flipped_bit_is_not_taken_for_a_newer_release(tmp_path):
    root = filled(tmp_path / "ssd")
    of_format(NEWER.encode(), images(root)[0], whole=False)
    (root / "index.db").unlink()
    with open_on(root) as cache:
        assert cache.stats().ssd.files == 1
        assert len(list((root / "quarantine").glob("*.safetensors"))) == 1


def test_every_file_says_its_format(tmp_path):
    tokens = prompt(5, 300)
    with open_on(tmp_path / "ssd", "turboquant:4") as cache:
        cache.store(tokens, states.uneven(tokens), model="m")
    root = tmp_path / "ssd"
    assert f"format {FORMAT}\n" in (root / "LOCK").read_text()
    index = sqlite3.connect(root / "index.db")
    assert index.execute("SELECT value FROM meta WHERE name = 'format'").fetchall() == [("1",)]
    index.close()
    for file in images(root):
        header = file.read_bytes()
        length = int.from_bytes(header[:8], "little")
        assert json.loads(header[8 : 8 + length])["__metadata__"]["format"] == FORMAT


# -- an index that lies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [b"", b"tenant"])
@pytest.mark.parametrize("column", ["model", "codec", "layout", "root"])
def test_a_namespace_that_is_not_what_its_images_say_is_read_from_the_files_again(tmp_path, column, salt):
    root, tokens = tmp_path / "ssd", prompt(1, 300)
    with open_on(root) as cache:
        cache.store(tokens, states.sliceable(tokens), model="dense", salt=salt)
    index = sqlite3.connect(root / "index.db")
    if column == "root":
        index.execute("UPDATE namespace SET root = zeroblob(32)")
    else:
        index.execute(f"UPDATE namespace SET {column} = replace({column}, substr({column}, 5, 1), '7')")
    index.commit()
    index.close()
    shutil.copytree(root, tmp_path / "copy")
    assert reconcile(tmp_path / "copy", dry_run=True).counts["index"] == 1
    assert reconcile(tmp_path / "copy").counts["index"] == 1
    for where in (root, tmp_path / "copy"):
        with open_on(where) as cache:
            assert cache.promote(tokens, model="dense", salt=salt).result(20) == 300
            states.check(cache.fetch(tokens, model="dense", salt=salt, leave=0)[0], tokens)


@pytest.mark.parametrize("disk", [0, 1 << 30])
def test_what_the_index_says_of_a_files_size_on_the_disk_is_measured_where_it_is_odd(tmp_path, disk):
    root = filled(tmp_path / "ssd")
    index = sqlite3.connect(root / "index.db")
    index.execute("UPDATE image SET disk = ?", [disk])
    index.commit()
    index.close()
    with open_on(root) as cache:
        assert cache.promote(prompt(1, 300), model="dense").result(20) == 300
        cache._ssd.check_integrity()
