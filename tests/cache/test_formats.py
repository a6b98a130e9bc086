"""An index of an earlier schema is brought forward, and what a newer release wrote is refused untouched."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from prefixcache import image_format
from prefixcache.ssd import DirectoryError, NewerFormat, reconcile, survey, tables
from prefixcache.ssd.entries import FOLDERS
from tests.cache.format_directory import CODECS, FIXTURES, KEPT, fill, open_on, prompt
from tests.models import states
from tests.ssd.images import fingerprint

FORMAT = image_format.FORMAT
NEWER = str(FORMAT + 1)


def check_all(root: Path) -> None:
    """It serves the prompts that it has."""
    for codec in CODECS:
        with open_on(root, codec) as cache:
            for kept in (kept for kept in KEPT if kept.codec == codec):
                assert cache.promote(kept.tokens, **kept.where).result(20) == len(kept.tokens)
                made, rest = cache.fetch(kept.tokens, leave=0, **kept.where)
                assert list(rest) == []
                kept.check(made, kept.tokens)
            assert cache.stats().counters.corrupt == 0
            states.check_integrity(cache)
    assert reconcile(root, deep=True).clean


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_a_directory_of_each_format_there_was_is_read(tmp_path, number, caplog):
    root = shutil.copytree(FIXTURES / f"format-{number}", tmp_path / "ssd")
    check_all(root)
    assert not list((root / "quarantine").iterdir())
    assert not caplog.records


def version(root: Path) -> int:
    index = sqlite3.connect(root / "index.db")
    try:
        return index.execute("PRAGMA user_version").fetchone()[0]
    finally:
        index.close()


@pytest.fixture
def next_step(monkeypatch):
    """The release after this one: its schema has a second step."""
    step = ("CREATE TABLE later (id INTEGER PRIMARY KEY)", "ALTER TABLE image ADD COLUMN later INTEGER")
    monkeypatch.setattr(tables, "STEPS", (*tables.STEPS, step))
    tables._expected_tables.cache_clear()
    yield
    tables._expected_tables.cache_clear()


def test_a_directory_of_an_earlier_schema_is_brought_forward_and_keeps_its_images(tmp_path, request, caplog):
    root = tmp_path / "ssd"
    fill(root)
    assert version(root) == 1
    request.getfixturevalue("next_step")
    with caplog.at_level("WARNING"):
        check_all(root)
    assert version(root) == 2
    assert not caplog.records


def test_looking_at_a_directory_of_an_earlier_schema_changes_nothing(tmp_path, request):
    root = filled(tmp_path / "ssd")
    request.getfixturevalue("next_step")
    before = fingerprint(root)
    assert survey(root).problem == "its tables are not those that this release writes"
    assert reconcile(root, dry_run=True).counts == {"index": 1, "orphan": 2}
    assert fingerprint(root) == before


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
    assert version(tmp_path / "new") == 0
    fill(tmp_path / "new")
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
    fill(tmp_path / "new")
    check_all(tmp_path / "new")


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
    changed = file.read_bytes().replace(b'"format":"%d"' % FORMAT, b'"format":"%s"' % said)
    data = np.frombuffer(bytearray(changed), np.uint8)
    if whole:
        data[image_format._CHECKSUM] = np.frombuffer(image_format._digest(data).encode(), np.uint8)
    file.write_bytes(data.tobytes())
    return image_format.Image(data).checksum


@pytest.mark.parametrize("said", [b"0", b"x", b"11", b"-1", b""])
def test_a_file_of_a_format_that_never_was_is_set_aside(tmp_path, said):
    root = filled(tmp_path / "ssd")
    of_format(said, images(root)[0], whole=False)
    (root / "index.db").unlink()
    assert reconcile(root).counts["broken"] == 1
    assert len(list((root / "quarantine").glob("*.safetensors"))) == 1


@pytest.mark.parametrize("said", [FORMAT + 1, 3])
def test_a_lock_of_another_release_is_heeded_even_where_the_index_is_lost(tmp_path, said):
    """Versions before the first release wrote format 3."""
    root = filled(tmp_path / "ssd")
    (root / "LOCK").write_text((root / "LOCK").read_text().replace(f"format {FORMAT}", f"format {said}"))
    (root / "index.db").unlink()
    before = fingerprint(root)
    with pytest.raises(NewerFormat, match=rf"format {said}.*upgrade prefixcache"):
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
    assert version(root) == len(tables.STEPS)
    for file in images(root):
        header = file.read_bytes()
        length = int.from_bytes(header[:8], "little")
        assert json.loads(header[8 : 8 + length])["__metadata__"]["format"] == str(FORMAT)


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
        states.check_integrity(cache)
