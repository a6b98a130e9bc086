"""Index against files: every kind of damage is found by a dry run that changes nothing, and repaired by a real one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from prefixcache.ssd import Corrupt, Entry, reconcile, repair, survey
from prefixcache.ssd.directory import disk_at
from prefixcache.ssd.files import DamagedFile, from_header, read_header
from prefixcache.ssd.index import PAGE, Index, IndexFiles
from tools.faults.evidence import du

from .images import CODEC, LAYOUT, MODEL, ROOT, SPACE, Opened, chain, execute, fingerprint, flip, make, path_of


@pytest.fixture
def filled(root) -> tuple[Path, list[Entry]]:
    """A directory with ten images of all kinds, closed cleanly."""
    pairs = [*chain(7, used=5), make(70, kind="window"), make(71, kind="snapshot", count=9), make(72, kind="snapshot")]
    ssd = Opened(root)
    stored = ssd.put(*pairs)
    ssd.close()
    return root, stored


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def move(path: Path, to: Path) -> None:
    to.parent.mkdir(exist_ok=True)
    path.rename(to)


def link(root: Path, stored: list[Entry]) -> None:
    path_of(root, stored[1]).unlink()
    path_of(root, stored[1]).symlink_to("/etc/hostname")


def orphan(root: Path, stored: list[Entry], change: Callable[[Path], object] = lambda path: None) -> None:
    """A file that has no row, and was changed."""
    assert execute(root, "DELETE FROM image WHERE key = ?", stored[2].key) == 1
    change(path_of(root, stored[2]))


def index_of_another_program(root: Path, stored: list[Entry]) -> None:
    (root / "index.db").unlink()
    execute(root, "CREATE TABLE image (something TEXT)")


def index_torn(root: Path, stored: list[Entry]) -> None:
    data = (root / "index.db").read_bytes()
    (root / "index.db").write_bytes(data[:4096] + b"\x77" * (len(data) - 4096))


NOT_UTF8 = "CAST(x'ff' AS TEXT)"
ODD = {  # values that no cache writes
    "kind": "UPDATE image SET kind = 7",
    "kind_text": "UPDATE image SET kind = 'rows' WHERE id = 3",
    "kind_real": "UPDATE image SET kind = 0.5 WHERE id = 3",
    "key": "UPDATE image SET key = x'01' WHERE id = 3",
    "key_text": "UPDATE image SET key = '0123456789abcdef' WHERE id = 3",
    "parent": "UPDATE image SET parent = 7 WHERE id = 3",
    "of_no_namespace": "UPDATE image SET namespace = 9 WHERE id = 3",
    "start": "UPDATE image SET start = -1 WHERE id = 3",
    "start_huge": "UPDATE image SET start = 9223372036854775807 WHERE id = 3",
    "length": "UPDATE image SET length = 'x' WHERE id = 3",
    "length_wrong": "UPDATE image SET length = 255 WHERE id = 3",
    "nbytes": "UPDATE image SET nbytes = 9e99 WHERE id = 3",
    "disk": "UPDATE image SET disk = x'00' WHERE id = 3",
    "used": "UPDATE image SET used = 9223372036854775807 WHERE id = 3",
    "hits": "UPDATE image SET hits = 'x'",
    "created": "UPDATE image SET created = 'abc'",
    "created_infinite": "UPDATE image SET created = 9e999 WHERE id = 3",
    "used_at": "UPDATE image SET used_at = x'01' WHERE id = 3",
    "checksum": "UPDATE image SET checksum = 'zz' WHERE id = 3",
    "extra": "UPDATE image SET extra = x'7b7d' WHERE id = 3",
    "extra_bytes": f"UPDATE image SET extra = {NOT_UTF8} WHERE id = 3",
    "tokens": "UPDATE tokens SET tokens = 'text' WHERE id = 3",
    "tokens_short": "UPDATE tokens SET tokens = x'0102030405' WHERE id = 3",
    "tokens_lost": "DELETE FROM tokens WHERE id = 3",
    "root": "UPDATE namespace SET root = 'text'",
    "root_short": "UPDATE namespace SET root = x'01'",
    "model": "UPDATE namespace SET model = x'01'",
    "model_bytes": f"UPDATE namespace SET model = {NOT_UTF8}",
    "codec_bytes": f"UPDATE namespace SET codec = {NOT_UTF8}",
    "namespace_created": "UPDATE namespace SET created = 'abc'",
    "namespace_lost": "DELETE FROM namespace",
    "format_negative": "PRAGMA user_version = -1",
    "format_of_nothing": "PRAGMA user_version = 0",
}
INDEXES: dict[str, Callable[[Path, list[Entry]], object]] = {
    **{name: partial(lambda statement, root, stored: execute(root, statement), text) for name, text in ODD.items()},
    "of other columns": lambda root, stored: execute(root, "ALTER TABLE image RENAME COLUMN used_at TO unused"),
    "missing": lambda root, stored: (root / "index.db").unlink(),
    "garbage": lambda root, stored: write(root / "index.db", os.urandom(20_000)),
    "torn": index_torn,
    "of another program": index_of_another_program,
}
DAMAGES: dict[
    str, tuple[str, Callable[[Path, list[Entry]], object]]
] = {  # what `reconcile` calls it, and how it is done
    **{f"index {name}": ("index", damage) for name, damage in INDEXES.items()},
    "debris": ("debris", lambda root, stored: write(root / "tmp" / "12.safetensors", b"x" * 5000)),
    "lost file": ("lost file", lambda root, stored: path_of(root, stored[3]).unlink()),
    "orphan": ("orphan", orphan),
    "short file": ("broken", lambda root, stored: os.truncate(path_of(root, stored[7]), 400)),
    "broken orphan": ("broken", partial(orphan, change=lambda path: os.truncate(path, 1000))),
    "garbage orphan": ("broken", partial(orphan, change=lambda path: write(path, b"\xff" * 500))),
    "misnamed orphan": (
        "broken",
        partial(orphan, change=lambda path: move(path, path.parents[1] / "ab" / f"{'ab' * 32}.safetensors")),
    ),
    "orphan of the wrong kind": (
        "broken",
        partial(orphan, change=lambda path: move(path, path.parents[2] / "windows" / path.parent.name / path.name)),
    ),
    # Whole by its own word, but its key is not the one of its tokens.
    "orphan of another prompt": (
        "broken",
        lambda root, stored: orphan(root, stored, lambda path: flip(path, path.read_bytes().index(stored[2].tokens))),
    ),
    "stray file": ("stray", lambda root, stored: write(root / "rows" / "notes.txt", b"mine")),
    "stray folder": ("stray", lambda root, stored: write(root / "windows" / "zz" / "file", b"mine")),
    "link": ("stray", link),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_without_changing_anything_then_repaired(filled, what):
    root, stored = filled
    kind, damage = DAMAGES[what]
    assert damage(root, stored) != 0  # rows that were changed
    before = fingerprint(root)
    found = reconcile(root, dry_run=True)
    assert fingerprint(root) == before
    assert kind in found.counts, found
    assert found.exit_code == 1
    assert not found.clean
    assert all(finding.action.startswith("would be") for finding in found.findings)
    repaired = reconcile(root)
    assert repaired.counts == found.counts
    assert repaired.exit_code == 1
    again = reconcile(root, deep=True)
    assert again.clean, again
    assert again.exit_code == 0
    ssd = Opened(root)
    ssd.check_integrity()
    assert ssd.stats().disk == du(root)
    lost = {"broken": 1, "lost file": 1, "stray": int(what == "link") * 2}.get(kind, 0)
    assert ssd.stats().files == len(stored) - min(lost, 1)
    for entry in ssd.entries():
        assert ssd.read(entry).result(10)
    ssd.close()


@pytest.mark.parametrize("what", INDEXES)
def test_an_opening_rebuilds_a_bad_index_from_the_files(filled, what):
    root, stored = filled
    INDEXES[what](root, stored)
    ssd = Opened(root)
    ssd.check_integrity()
    rebuilt = {entry.address: entry for entry in ssd.entries()}
    assert rebuilt.keys() == {entry.address for entry in stored}
    for entry in stored:
        found = rebuilt[entry.address]
        same = ("namespace", "parent", "start", "tokens", "nbytes", "checksum", "disk", "extra")
        assert all(getattr(found, name) == getattr(entry, name) for name in same)
    (space,) = ssd.namespaces()
    assert space[:4] == (ROOT, MODEL, CODEC, LAYOUT)
    assert list((root / "quarantine").glob("*-index.db")) or what == "missing"
    ssd.close()


@pytest.mark.parametrize("what", ODD)
def test_a_survey_says_that_the_index_has_odd_values_and_quotes_none(filled, what):
    root, stored = filled
    INDEXES[what](root, stored)
    found = survey(root)
    if "tokens" not in what and what != "length_wrong":  # it does not read the tokens
        assert found.problem
        assert found.namespaces == ()
    assert "abc" not in found.problem
    assert found.disk == du(root)


def test_tokens_left_over_in_the_index_do_not_stop_what_comes(filled):
    root, stored = filled
    execute(root, "DELETE FROM image WHERE id = (SELECT max(id) FROM image)")
    assert reconcile(root).counts == {"orphan": 1}
    ssd = Opened(root)
    assert {entry.address for entry in ssd.entries()} == {entry.address for entry in stored}
    ssd.close()


def test_every_damage_at_once(filled):
    root, stored = filled
    for what in ("debris", "stray file", "lost file", "short file", "orphan"):
        DAMAGES[what][1](root, stored)
    report = reconcile(root)
    assert report.counts == {"debris": 1, "stray": 1, "lost file": 1, "broken": 1, "orphan": 1}
    assert report.freed == 8192
    assert report.adopted == stored[2].disk
    assert report.images == len(stored) - 2
    assert json.loads(json.dumps(report.as_dict()))["exit_code"] == 1


def test_only_a_deep_run_finds_a_flipped_bit(filled):
    root, stored = filled
    flip(path_of(root, stored[5]), -1)
    assert reconcile(root).clean
    seen: list[tuple[int, int]] = []
    assert reconcile(root, dry_run=True, deep=True).counts == {"broken": 1}
    report = reconcile(root, deep=True, progress=lambda done, total: seen.append((done, total)))
    assert report.counts == {"broken": 1}
    assert report.quarantined == stored[5].disk
    assert seen[-1] == (10, 10)
    assert len(survey(root).quarantine) == 1
    ssd = Opened(root)
    ssd.check_integrity()
    assert ssd.stats().files == 9
    ssd.close()


def test_a_deep_run_checks_orphans_too(filled):
    root, stored = filled
    orphan(root, stored, lambda path: flip(path, -1))
    assert reconcile(root, dry_run=True).counts == {"orphan": 1}
    assert reconcile(root, deep=True).counts == {"broken": 1}


def test_a_crashed_directory_is_looked_at_with_its_log(root, tmp_path):
    ssd = Opened(root)
    ssd.put(*chain(5))
    copy = tmp_path / "crashed"
    shutil.copytree(root, copy, ignore=lambda folder, names: [n for n in names if n.startswith("index.db")])
    # What a crash leaves, taken by another process: this one has the index open.
    os.system(f"cp {root}/index.db* {copy}/")
    before = fingerprint(copy)
    assert reconcile(copy, dry_run=True).clean
    assert survey(copy).namespaces[0].blocks.images == 5
    assert fingerprint(copy) == before
    ssd.close()
    again = Opened(copy)
    again.check_integrity()
    assert again.stats().files == 5
    again.close()


def test_the_log_stays_short_where_all_files_take_other_bytes_than_on_the_disk_they_came_from(root, monkeypatch):
    with Opened(root) as ssd:
        ssd.put(*chain(60))
    execute(root, "UPDATE image SET disk = 2 * disk")
    monkeypatch.setattr(repair, "_BATCH", 10)
    monkeypatch.setattr(repair, "_LOG", 10 * PAGE)
    lengths, checkpoint = [], Index.checkpoint

    def looking(index):
        lengths.append(disk_at(IndexFiles.of(index.path).log))
        return checkpoint(index)

    monkeypatch.setattr(Index, "checkpoint", looking)
    assert reconcile(root).clean
    assert max(lengths) < 40 * PAGE
    with Opened(root) as ssd:
        ssd.check_integrity()


def test_a_stray_whose_name_is_as_long_as_names_can_be_is_quarantined(filled, open_tier):
    root, stored = filled
    write(root / "rows" / ("n" * 255), b"mine")
    ssd = open_tier()
    assert len(list(ssd.entries())) == len(stored)
    (item,) = survey(root).quarantine
    assert item.origin == f"rows/{'n' * 255}"


def test_a_live_directory_can_be_looked_at_but_not_repaired(ssd, root):
    ssd.put(*chain(5))
    assert reconcile(root, dry_run=True, deep=True).clean
    held = reconcile(root)
    assert held.exit_code == 2
    assert f"pid {os.getpid()}" in held.error
    path_of(root, chain(5)[4][0]).unlink()
    assert reconcile(root, dry_run=True).counts == {"lost file": 1}
    assert ssd.put(make(9))


def test_looking_at_a_live_directory_under_load_finds_nothing(ssd, root):
    stop = threading.Event()
    reports = []

    def look():
        while not stop.is_set():
            reports.append(reconcile(root, dry_run=True, deep=True))
            survey(root)

    looker = threading.Thread(target=look)
    looker.start()
    for round_ in range(12):
        stored = ssd.put(*chain(15, first=100 * round_))
        ssd.delete(stored[5:])
        for entry, image in chain(6, first=100 * round_ + 50):
            ssd.write(entry, SPACE, image)
    ssd.flush(10)
    while len(reports) < 2:
        time.sleep(0.01)
    stop.set()
    looker.join()
    assert [report for report in reports if not report.clean] == []
    ssd.check_integrity()


def test_what_can_t_be_done_is_a_report_with_code_2(root, filled, monkeypatch):
    assert reconcile(root / "none").exit_code == 2
    assert "no such directory" in reconcile(root / "none").error
    assert not (root / "none").exists()
    execute(root, "PRAGMA user_version = 7")
    before = fingerprint(root)
    for dry_run in (True, False):
        report = reconcile(root, dry_run=dry_run)
        assert report.exit_code == 2
        assert "newer release" in report.error
    assert fingerprint(root) == before


HOSTILE = [
    b"{",
    b"[" * 100_000,
    b"[]",
    b"{}",
    b"null",
    b"9" * 100_000,
    b'{"__metadata__":null}',
    b'{"__metadata__":{}}',
    b'{"__metadata__":' * 100_000,
    b'{"__metadata__":{"format":1}}',
    b'{"__metadata__":{"format":"3","kind":"rows","start":"0","checksum":"%s"},"x":1}' % (b"0" * 32),
    b'{"\xff":1}',
]


def lying_headers():
    """Headers that parse and lie: each field in turn, with what a hostile or careless writer could put there."""
    _, image = make(500)
    data = image.data.tobytes()
    end = 8 + int.from_bytes(data[:8], "little")
    told = json.loads(data[8:end])
    tokens = told["tokens"]
    for name in told["__metadata__"]:
        for lie in ("", "\ud800", "x" * 5000, "../../etc", "-1", "9" * 30, "9" * 6000, None, 7, [], {}, "\u0663"):
            yield json.dumps({**told, "__metadata__": {**told["__metadata__"], name: lie}}).encode(), data[end:]
    for name in ("dtype", "shape", "data_offsets"):
        for lie in (
            None,
            7,
            "F99",
            [],
            {},
            [-1],
            [2**70],
            [2**35],
            [True],
            ["1"],
            [256, 1],
            [[]],
            [9] * 10**6,
            [2**39] * 33,
        ):
            yield json.dumps({**told, "tokens": {**tokens, name: lie}}).encode(), data[end:]


def test_no_header_can_do_more_than_be_refused(tmp_path):
    """Whatever it says, it is refused with one of two errors, or the index can hold it."""
    index = Index(tmp_path / "index.db")
    for header, rest in [*((text, b"") for text in HOSTILE), *lying_headers()]:
        (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + rest)
        with contextlib.suppress(DamagedFile, ValueError):
            entry, space = from_header(read_header(str(tmp_path / "file")), 0)
            with contextlib.suppress(KeyError), index.transaction():
                index.insert(entry, space)
                raise KeyError  # roll it back
    index.close()


def test_hostile_files_never_stop_an_opening(root):
    Opened(root).close()
    path = path_of(root, make(500)[0])
    for header, rest in [*((text, b"") for text in HOSTILE), *list(lying_headers())[::12]]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(len(header).to_bytes(8, "little") + header + rest)
        execute(root, "UPDATE meta SET value = '0' WHERE name = 'clean'")
        ssd = Opened(root)
        ssd.check_integrity()
        for found in ssd.entries():  # taken in by its header's word, and found out when it is read
            with pytest.raises(Corrupt):
                ssd.read(found).result(10)
        assert ssd.flush(10)
        assert ssd.stats().files == 0
        ssd.close()


def test_a_dead_directory_after_a_reconcile_opens_without_another(filled, monkeypatch):
    root, stored = filled
    orphan(root, stored)
    reconcile(root)
    monkeypatch.setattr("prefixcache.ssd.open_directory.mend", lambda *args, **more: pytest.fail("it reconciled"))
    ssd = Opened(root)
    assert ssd.stats().files == 10
    ssd.close()
