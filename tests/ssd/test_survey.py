"""What `inspect` shows, of a live directory and of a dead one, without leaving a trace."""

import os
import subprocess
import sys
import time

import pytest

from prefixcache.ssd import DirectoryError, NamespaceRow, reconcile, survey, tables
from prefixcache.store_fetch_remove.prune_directory import prune
from prefixcache.store_fetch_remove.selection import Selection
from tools.faults.evidence import du

from .images import CODEC, LAYOUT, MODEL, ROOT, SPACE, chain, fingerprint, make, path_of

PAIRS = [*chain(7), make(70, kind="window"), make(71, kind="snapshot", count=9)]


def check(found, stored):
    (space,) = found.namespaces
    assert (space.root, space.model, space.codec, space.layout) == (ROOT.hex(), MODEL, CODEC, LAYOUT)
    assert (space.blocks.images, space.windows.images, space.snapshots.images) == (7, 1, 1)
    assert space.tokens == 7 * 256
    assert space.nbytes == sum(entry.nbytes for entry in stored)
    assert space.disk == sum(entry.disk for entry in stored)
    assert (space.oldest, space.newest) == (1.7e9, 1.7e9)
    assert (space.last_used, space.hits) == (9, 1)
    assert time.time() - 600 < space.last_used_at <= time.time()


def test_a_live_and_a_dead_directory_show_the_same(ssd, root):
    stored = ssd.put(*PAIRS)
    ssd.touch([("rows", stored[0].key, 9, 1)])
    ssd.flush(10)
    live = survey(root)
    check(live, stored)
    assert f"pid {os.getpid()}" in live.holder
    assert not live.clean
    assert live.disk == du(root)
    ssd.close()
    before = fingerprint(root)
    dead = survey(root)
    check(dead, stored)
    assert fingerprint(root) == before
    assert dead.holder == ""
    assert dead.clean
    assert dead.namespaces == live.namespaces


def surveyed(root):
    return survey(root).problem == ""


def reconciled(root):
    return reconcile(root, dry_run=True, deep=True).clean


def pruned(root):
    return prune(root, Selection(to_size=0), dry_run=True).images == len(PAIRS)


@pytest.mark.parametrize("look", [surveyed, reconciled, pruned])
def test_what_a_server_writes_meanwhile_is_no_damage(ssd, root, monkeypatch, look):
    ssd.put(*PAIRS)
    read_namespaces, numbers = tables._read_namespaces, iter(range(1, 9))

    def read_and_write(connection):
        namespaces = read_namespaces(connection)
        number = next(numbers)
        space = SPACE._replace(root=bytes([number]) * len(ROOT), model=f"model {number}")
        entry, image = make(100 + number, parent=space.root, space=space)
        assert ssd.write(entry, space, image)
        assert ssd.flush(10)
        return namespaces

    monkeypatch.setattr(tables, "_read_namespaces", read_and_write)
    assert look(root)


def test_another_process_sees_a_live_directory(ssd, root):
    ssd.put(*PAIRS)
    script = (
        f"from prefixcache.ssd import survey; s = survey({str(root)!r}); print(s.namespaces[0].blocks.images, s.holder)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("7 pid ")
    assert ssd.put(make(200))
    ssd.check_integrity()


def test_spans_are_those_of_the_kinds_asked_for(ssd, root):
    ssd.put(*PAIRS)
    stored = [(entry.kind, entry.start, len(entry.tokens) // 8, entry.extra) for entry in ssd.entries()]
    assert sorted(survey(root).spans(ROOT.hex())) == sorted(stored)
    assert list(survey(root).spans(ROOT.hex(), ["window"])) == [of for of in stored if of[0] == "window"]


def test_namespaces_are_told_apart(ssd, root):
    other = NamespaceRow(b"o" * 32, "other", "{}", "{}", 1.7e9)
    ssd.put(*PAIRS)
    entry, image = make(5, space=other, parent=other.root)
    ssd.write(entry, other, image)
    ssd.flush(10)
    assert [(space.model, space.blocks.images) for space in survey(root).namespaces] == [(MODEL, 7), ("other", 1)]


def test_quarantine_and_debris_are_shown(ssd, root):
    stored = ssd.put(*PAIRS)
    os.truncate(path_of(root, stored[0]), 5)
    assert ssd.read(stored[0]).exception(10)
    ssd.flush(10)
    (root / "tmp" / "7.safetensors").write_bytes(b"x")
    found = survey(root)
    (item,) = found.quarantine
    assert "5 bytes" in item.reason
    assert item.origin == str(path_of(root, stored[0]).relative_to(root))
    assert found.debris == ("7.safetensors",)
    assert found.index_bytes > 0


def test_a_broken_index_is_said_and_a_missing_directory_is_an_error(root, open_tier, tmp_path):
    open_tier().close()
    (root / "index.db").write_bytes(b"garbage" * 1000)
    assert "not a database" in survey(root).problem
    with pytest.raises(DirectoryError, match="no such directory"):
        survey(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DirectoryError, match="it is empty"):
        survey(tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())
    (root / "index.db").unlink()
    assert survey(root).problem == "missing"
    assert SPACE.root == ROOT
