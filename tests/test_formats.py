"""What earlier and later releases write: the one is brought forward, step by step, the other refused untouched."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tarfile
from pathlib import Path

import numpy as np
import pytest
from prefixcache.migrations import index as migrations
from sqlite_utils import Database

from prefixcache import PrefixCache, image
from prefixcache.ssd import DirectoryError, NewerFormat, reconcile, survey

from . import states
from .ssd.images import fingerprint

FIXTURES = Path(__file__).parent / "fixtures" / "directories"
STEPS = ["m001_images", "m002_digests"]


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 977 + i * 31) % 5000 + 10 for i in range(count)]


KEPT = [  # what the directories of earlier releases hold
    ("dense", prompt(1, 300), b"", "raw", states.check),
    ("dense", prompt(2, 300), b"tenant", "raw", states.check),
    ("windowed", prompt(3, 400), b"", "raw", states.check),
    ("hybrid", prompt(4, 270), b"", "raw", states.check),
    ("levelled", prompt(5, 300), b"", "turboquant:4", None),  # by a version of the codec that isn't read any more
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
    for codec in ("raw", "turboquant:4"):
        with open_on(root, codec) as cache:
            for model, tokens, salt, of, check in KEPT:
                if of == codec and check is None:
                    assert cache.match(tokens, model=model, salt=salt) == (0, 0)
                elif of == codec:
                    assert cache.promote(tokens, model=model, salt=salt).result(20) == len(tokens)
                    made, rest = cache.fetch(tokens, model=model, salt=salt, leave=0)
                    assert list(rest) == []
                    check(made, tokens)
            assert cache.stats().counters.corrupt == 0
    assert reconcile(root, deep=True).clean


def steps(root: Path) -> list[str]:
    index = sqlite3.connect(root / "index.db")
    try:
        return [name for (name,) in index.execute("SELECT name FROM _sqlite_migrations ORDER BY id")]
    finally:
        index.close()


def test_a_directory_of_an_earlier_release_opens_with_all_that_is_in_it(earlier):
    assert steps(earlier) != STEPS
    check_all(earlier)
    assert steps(earlier) == STEPS


def test_looking_at_a_directory_of_an_earlier_release_changes_nothing(earlier):
    before = fingerprint(earlier)
    found = survey(earlier)
    assert (found.problem, len(found.namespaces)) == ("", 5)
    assert reconcile(earlier, dry_run=True, deep=True).clean
    assert fingerprint(earlier) == before


def test_a_step_that_fails_half_way_changes_nothing_and_is_done_at_the_next_opening(earlier, monkeypatch):
    def failing(connection, *rest):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "namespace_digest", failing)  # the column is there by then
        with pytest.raises(DirectoryError, match="disk is full: check the disk"):
            open_on(earlier)
    index = sqlite3.connect(earlier / "index.db")
    assert "digest" not in [name for _, name, *_ in index.execute("PRAGMA table_info(namespace)")]
    index.close()
    check_all(earlier)


def test_a_process_that_dies_half_way_through_a_step_leaves_what_the_next_brings_forward(earlier):
    pid = os.fork()
    if not pid:
        migrations.namespace_digest = lambda *said: os._exit(7)
        try:
            open_on(earlier)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    check_all(earlier)


def test_every_step_leads_to_the_schema_of_a_new_directory(tmp_path):
    def shape(database: Database) -> dict[str, str]:
        return dict(database.execute("SELECT name, sql FROM sqlite_master"))

    with open_on(tmp_path / "new"):
        pass
    new = Database(tmp_path / "new" / "index.db")
    stepped = Database(memory=True)
    for step in STEPS[1:]:
        migrations.schema.apply(stepped, stop_before=step)
    migrations.schema.apply(stepped)
    assert [step.name for step in migrations.schema.applied(new)] == STEPS
    assert shape(stepped) == shape(new)
    migrations.schema.apply(stepped)
    assert [step.name for step in migrations.schema.applied(stepped)] == STEPS


# -- later releases ---------------------------------------------------------------------------------------------------


def filled(root: Path) -> Path:
    tokens = prompt(1, 300)
    with open_on(root) as cache:
        cache.store(tokens, states.sliceable(tokens), model="dense")
    return root


def images(root: Path) -> list[Path]:
    return sorted(root.glob("rows/*/*"))


def of_format_two(file: Path, *, whole: bool) -> None:
    data = np.frombuffer(bytearray(file.read_bytes().replace(b'"format":"1"', b'"format":"2"')), np.uint8)
    if whole:
        data[image._CHECKSUM] = np.frombuffer(image._digest(data).encode(), np.uint8)
    file.write_bytes(data.tobytes())


def test_a_lock_of_a_newer_release_is_heeded_even_where_the_index_is_lost(tmp_path):
    root = filled(tmp_path / "ssd")
    (root / "LOCK").write_text((root / "LOCK").read_text().replace("format 1", "format 2"))
    (root / "index.db").unlink()
    before = fingerprint(root)
    with pytest.raises(NewerFormat, match=r"format 2.*upgrade prefixcache"):
        open_on(root)
    assert "upgrade prefixcache" in reconcile(root).error
    assert fingerprint(root) == before


def test_images_of_a_newer_release_are_refused_untouched_where_nothing_else_says_so(tmp_path):
    root = filled(tmp_path / "ssd")
    for file in images(root):
        of_format_two(file, whole=True)
    (root / "index.db").unlink()
    before = fingerprint(root)
    with pytest.raises(NewerFormat, match="an image in it is of format 2"):
        open_on(root)
    assert fingerprint(root) == before


def test_a_flipped_bit_is_not_taken_for_a_newer_release(tmp_path):
    root = filled(tmp_path / "ssd")
    of_format_two(images(root)[0], whole=False)
    (root / "index.db").unlink()
    with open_on(root) as cache:
        assert cache.stats().ssd.files == 1
        assert len(list((root / "quarantine").glob("*.safetensors"))) == 1


def test_every_file_says_its_format(tmp_path):
    tokens = prompt(5, 300)
    with open_on(tmp_path / "ssd", "turboquant:4") as cache:
        cache.store(tokens, states.uneven(tokens), model="m")
    root = tmp_path / "ssd"
    assert "format 1\n" in (root / "LOCK").read_text()
    index = sqlite3.connect(root / "index.db")
    assert index.execute("SELECT value FROM meta WHERE name = 'format'").fetchall() == [("1",)]
    index.close()
    for file in images(root):
        header = file.read_bytes()
        length = int.from_bytes(header[:8], "little")
        assert json.loads(header[8 : 8 + length])["__metadata__"]["format"] == "1"


# -- an index that lies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["model", "codec", "layout", "root"])
def test_a_namespace_that_is_not_what_its_digest_says_is_read_from_the_files_again(tmp_path, column):
    root = filled(tmp_path / "ssd")
    index = sqlite3.connect(root / "index.db")
    if column == "root":
        index.execute("UPDATE namespace SET root = zeroblob(16)")
    else:
        index.execute(f"UPDATE namespace SET {column} = replace({column}, substr({column}, 5, 1), '7')")
    index.commit()
    index.close()
    assert survey(root).problem == "a namespace is not what its digest says"
    shutil.copytree(root, tmp_path / "copy")
    assert reconcile(tmp_path / "copy").counts["index"] == 1
    for where in (root, tmp_path / "copy"):
        with open_on(where) as cache:
            assert cache.promote(prompt(1, 300), model="dense").result(20) == 300
            states.check(cache.fetch(prompt(1, 300), model="dense", leave=0)[0], prompt(1, 300))


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
