"""Index against files: every kind of damage is found by a dry run that changes nothing, and repaired by a real one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from prefixcache.ssd import Corrupt, Entry, reconcile, survey
from prefixcache.ssd.files import DamagedFile, from_header, read_header
from prefixcache.ssd.index import Index
from tools.faults.evidence import du

from .images import CODEC, LAYOUT, MODEL, ROOT, SPACE, Opened, chain, fingerprint, make, path_of


@pytest.fixture
def filled(root) -> tuple[Path, list[Entry]]:
    """A directory with ten images of all kinds, closed cleanly."""
    pairs = [*chain(7, used=5), make(70, kind="window"), make(71, kind="snapshot", count=9), make(72, kind="snapshot")]
    ssd = Opened(root)
    stored = ssd.put(*pairs)
    ssd.close()
    return root, stored


def rows(root: Path) -> sqlite3.Connection:
    return sqlite3.connect(root / "index.db", isolation_level=None)


def debris(root, stored):
    (root / "tmp" / "12.safetensors").write_bytes(b"x" * 5000)
    return "debris"


def lost_file(root, stored):
    path_of(root, stored[3]).unlink()
    return "lost file"


def orphan(root, stored):
    index = rows(root)
    index.execute("DELETE FROM image WHERE key = ?", [stored[2].key])
    index.close()
    return "orphan"


def short_file(root, stored):
    os.truncate(path_of(root, stored[7]), 400)
    return "broken"


def broken_orphan(root, stored):
    orphan(root, stored)
    os.truncate(path_of(root, stored[2]), 1000)
    return "broken"


def garbage_orphan(root, stored):
    orphan(root, stored)
    path_of(root, stored[2]).write_bytes(b"\xff" * 500)
    return "broken"


def misnamed_orphan(root, stored):
    orphan(root, stored)
    name = "ab" * 32
    path = root / "rows" / "ab" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    path_of(root, stored[2]).rename(path)
    return "broken"


def orphan_of_the_wrong_kind(root, stored):
    orphan(root, stored)
    path = path_of(root, stored[2]._replace(kind="window"))
    path.parent.mkdir(exist_ok=True)
    path_of(root, stored[2]).rename(path)
    return "broken"


def orphan_of_another_prompt(root, stored):
    """Whole by its own word, but its key is not the one of its tokens."""
    orphan(root, stored)
    path = path_of(root, stored[2])
    data = bytearray(path.read_bytes())
    at = data.index(stored[2].tokens)
    data[at] ^= 1
    path.write_bytes(data)
    return "broken"


def stray_file(root, stored):
    (root / "rows" / "notes.txt").write_text("mine")
    return "stray"


def stray_folder(root, stored):
    (root / "windows" / "zz").mkdir()
    (root / "windows" / "zz" / "file").write_text("mine")
    return "stray"


def link(root, stored):
    path = path_of(root, stored[1])
    path.unlink()
    path.symlink_to("/etc/hostname")
    return "stray"


def index_missing(root, stored):
    (root / "index.db").unlink()
    return "index"


def index_garbage(root, stored):
    (root / "index.db").write_bytes(os.urandom(20_000))
    return "index"


def index_torn(root, stored):
    data = bytearray((root / "index.db").read_bytes())
    data[4096:] = b"\x77" * (len(data) - 4096)
    (root / "index.db").write_bytes(data)
    return "index"


def index_of_another_program(root, stored):
    (root / "index.db").unlink()
    index = rows(root)
    index.execute("CREATE TABLE image (something TEXT)")
    index.close()
    return "index"


def index_of_other_columns(root, stored):
    index = rows(root)
    index.execute("ALTER TABLE image RENAME COLUMN used_at TO unused")
    index.close()
    return "index"


def odd(name, statement, *values):
    """A damage: values in the index that no cache writes."""

    def damage(root, stored):
        index = rows(root)
        index.execute("PRAGMA ignore_check_constraints = ON")
        assert index.execute(statement, values).rowcount  # -1 for what is no change of rows
        index.close()
        return "index"

    damage.__name__ = f"index_odd_{name}"
    return damage


NOT_UTF8 = "CAST(x'ff' AS TEXT)"
ODD = [
    odd("kind", "UPDATE image SET kind = 7"),
    odd("kind_text", "UPDATE image SET kind = 'rows' WHERE id = 3"),
    odd("kind_real", "UPDATE image SET kind = 0.5 WHERE id = 3"),
    odd("key", "UPDATE image SET key = x'01' WHERE id = 3"),
    odd("key_text", "UPDATE image SET key = '0123456789abcdef' WHERE id = 3"),
    odd("parent", "UPDATE image SET parent = 7 WHERE id = 3"),
    odd("of_no_namespace", "UPDATE image SET namespace = 9 WHERE id = 3"),
    odd("start", "UPDATE image SET start = -1 WHERE id = 3"),
    odd("start_huge", "UPDATE image SET start = 9223372036854775807 WHERE id = 3"),
    odd("length", "UPDATE image SET length = 'x' WHERE id = 3"),
    odd("length_wrong", "UPDATE image SET length = 255 WHERE id = 3"),
    odd("nbytes", "UPDATE image SET nbytes = 9e99 WHERE id = 3"),
    odd("disk", "UPDATE image SET disk = x'00' WHERE id = 3"),
    odd("used", "UPDATE image SET used = 9223372036854775807 WHERE id = 3"),
    odd("hits", "UPDATE image SET hits = 'x'"),
    odd("created", "UPDATE image SET created = 'abc'"),
    odd("created_infinite", "UPDATE image SET created = 9e999 WHERE id = 3"),
    odd("used_at", "UPDATE image SET used_at = x'01' WHERE id = 3"),
    odd("checksum", "UPDATE image SET checksum = 'zz' WHERE id = 3"),
    odd("extra", "UPDATE image SET extra = x'7b7d' WHERE id = 3"),
    odd("extra_bytes", f"UPDATE image SET extra = {NOT_UTF8} WHERE id = 3"),
    odd("tokens", "UPDATE tokens SET tokens = 'text' WHERE id = 3"),
    odd("tokens_short", "UPDATE tokens SET tokens = x'0102030405' WHERE id = 3"),
    odd("tokens_lost", "DELETE FROM tokens WHERE id = 3"),
    odd("root", "UPDATE namespace SET root = 'text'"),
    odd("root_short", "UPDATE namespace SET root = x'01'"),
    odd("model", "UPDATE namespace SET model = x'01'"),
    odd("model_bytes", f"UPDATE namespace SET model = {NOT_UTF8}"),
    odd("codec_bytes", f"UPDATE namespace SET codec = {NOT_UTF8}"),
    odd("namespace_created", "UPDATE namespace SET created = 'abc'"),
    odd("namespace_lost", "DELETE FROM namespace"),
    odd("format_negative", "PRAGMA user_version = -1"),
    odd("format_of_nothing", "PRAGMA user_version = 0"),
]

DAMAGES = [
    *ODD,
    index_of_other_columns,
    debris,
    lost_file,
    orphan,
    short_file,
    broken_orphan,
    garbage_orphan,
    misnamed_orphan,
    orphan_of_the_wrong_kind,
    orphan_of_another_prompt,
    stray_file,
    stray_folder,
    link,
    index_missing,
    index_garbage,
    index_torn,
    index_of_another_program,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_without_changing_anything_then_repaired(filled, damage):
    root, stored = filled
    kind = damage(root, stored)
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
    lost = {"broken": 1, "lost file": 1, "stray": int(damage is link) * 2}.get(kind, 0)
    assert ssd.stats().files == len(stored) - min(lost, 1)
    for entry in ssd.entries():
        assert ssd.read(entry).result(10)
    ssd.close()


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d.__name__.startswith("index")])
def test_an_opening_rebuilds_a_bad_index_from_the_files(filled, damage):
    root, stored = filled
    damage(root, stored)
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
    assert list((root / "quarantine").glob("*-index.db")) or damage is index_missing
    ssd.close()


@pytest.mark.parametrize("damage", ODD)
def test_a_survey_says_that_the_index_has_odd_values_and_quotes_none(filled, damage):
    root, stored = filled
    damage(root, stored)
    found = survey(root)
    if "tokens" not in damage.__name__ and "length_wrong" not in damage.__name__:  # it does not read the tokens
        assert found.problem
        assert found.namespaces == ()
    assert "abc" not in found.problem
    assert found.disk == du(root)


def test_tokens_left_over_in_the_index_do_not_stop_what_comes(filled):
    root, stored = filled
    index = rows(root)
    index.execute("DELETE FROM image WHERE id = (SELECT max(id) FROM image)")
    index.close()
    assert reconcile(root).counts == {"orphan": 1}
    ssd = Opened(root)
    assert {entry.address for entry in ssd.entries()} == {entry.address for entry in stored}
    ssd.close()


def test_every_damage_at_once(filled):
    root, stored = filled
    for damage in (debris, stray_file, lost_file, short_file, orphan):
        damage(root, stored)
    report = reconcile(root)
    assert report.counts == {"debris": 1, "stray": 1, "lost file": 1, "broken": 1, "orphan": 1}
    assert report.freed == 8192
    assert report.adopted == stored[2].disk
    assert report.images == len(stored) - 2
    assert json.loads(json.dumps(report.as_dict()))["exit_code"] == 1


def test_only_a_deep_run_finds_a_flipped_bit(filled):
    root, stored = filled
    data = bytearray(path_of(root, stored[5]).read_bytes())
    data[-1] ^= 1
    path_of(root, stored[5]).write_bytes(data)
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
    orphan(root, stored)
    path = path_of(root, stored[2])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
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
    import threading

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
    index = rows(root)
    index.execute("PRAGMA user_version = 7")
    index.close()
    before = fingerprint(root)
    for dry_run in (True, False):
        report = reconcile(root, dry_run=dry_run)
        assert report.exit_code == 2
        assert "newer release" in report.error
    assert fingerprint(root) == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_folder_that_is_no_cache_is_left_alone(tmp_path, dry_run):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "thesis.txt").write_text("mine")
    report = reconcile(tmp_path, dry_run=dry_run)
    assert report.exit_code == 2
    assert "not a prefixcache directory" in report.error
    assert (tmp_path / "tmp" / "thesis.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


HOSTILE = [
    b"{",
    b"[" * 100_000,
    b"[]",
    b"{}",
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
        for lie in (None, 7, "F99", [], {}, [-1], [2**70], [2**35], [True], ["1"], [256, 1], [[]]):
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
        index = rows(root)
        index.execute("UPDATE meta SET value = '0' WHERE name = 'clean'")
        index.close()
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
