"""`clear` and `prune`: who leaves, who stays because others hang on it, and that a kill loses nothing that was to stay."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from prefixcache import keys
from prefixcache.image_format import Blueprint, HeaderFields, Spec
from prefixcache.ssd import DirectoryError, DirectoryHeld, Entry, NamespaceRow, clear, reconcile
from prefixcache.ssd.directory import Directory
from prefixcache.store_fetch_remove.prune_directory import prune
from prefixcache.store_fetch_remove.selection import NoSuchNamespace, Selection
from tools.faults.evidence import du

from .images import CODEC, LAYOUT, ROOT, SPACE, Opened, chain, execute, fingerprint, make, path_of
from .test_durability import run_child

DAY = 86400.0
OTHER = NamespaceRow(keys.root_key("other", {"name": "raw"}, {"layers": 2}, b"x"), "other", CODEC, LAYOUT, 1.7e9)


def snapshot(parent: Entry, rows: Entry, seed: int, count: int = 9):
    """A snapshot within the rows that follow `parent`."""
    suffix = rows.tokens[: 8 * count]
    meta = HeaderFields(
        "snapshot",
        keys.chain(parent.key, suffix).hex(),
        parent.key.hex(),
        ROOT.hex(),
        SPACE.model,
        CODEC,
        LAYOUT,
        parent.start + 256,
        extra=f'{{"seed":{seed}}}',
    )
    draft = Blueprint(meta, [Spec("tokens", "I64", (count,)), Spec("s0", "U8", (3000,))]).draft()
    draft.tensors["tokens"].view("u1")[:] = memoryview(suffix)
    draft.tensors["s0"][:] = seed % 256
    image = draft.seal()
    return Entry(
        "snapshot",
        bytes.fromhex(meta.key),
        ROOT,
        parent.key,
        meta.start,
        suffix,
        image.nbytes,
        image.checksum,
        extra=meta.extra,
    ), image


def aged(root: Path, ages: dict[bytes, float]) -> None:
    """Images, by key, were last used so many days ago; the others now."""
    now = time.time()
    execute(root, "UPDATE image SET used_at = ?", now)
    for key, days in ages.items():
        execute(root, "UPDATE image SET used_at = ? WHERE key = ?", now - days * DAY, key)
    for path in root.rglob("*.safetensors"):  # what an adopted image is said to have been used
        os.utime(path, (now - 99 * DAY,) * 2)


def days(number: float) -> Selection:
    return Selection(used_before=time.time() - number * DAY)


def held(root: Path) -> dict[tuple[str, bytes], Entry]:
    """What is there, by a cache that opens it; all of it agrees."""
    with Opened(root) as ssd:
        ssd.check_integrity()
        assert ssd.stats().disk == du(root)
        return {entry.address: entry for entry in ssd.entries()}


@pytest.fixture
def root(quick):
    return quick / "ssd"


@pytest.fixture
def stored(root):
    """Six blocks in a row, a window on the third, a snapshot in the fifth, and another model's two blocks."""
    pairs = chain(6)
    pairs.append(make(50, kind="window", parent=pairs[2][0].key, start=512))
    pairs.append(snapshot(pairs[3][0], pairs[4][0], 60))
    others = [make(70, parent=OTHER.root, space=OTHER, size=9000)]
    others.append(make(71, parent=others[0][0].key, start=256, space=OTHER))
    with Opened(root) as ssd:
        for entry, image in pairs:
            assert ssd.write(entry, SPACE, image)
        for entry, image in others:
            assert ssd.write(entry, OTHER, image)
        assert ssd.flush(30)
    return [entry for entry, _ in (*pairs, *others)]


def test_what_was_not_used_for_long_leaves_and_the_rest_stays(root, stored):
    aged(root, {stored[4].key: 9, stored[5].key: 9, stored[7].key: 9, stored[6].key: 2})
    done = prune(root, days(7))
    assert (done.images, done.held) == (3, 0)
    assert held(root).keys() == {entry.address for entry in stored} - {stored[i].address for i in (4, 5, 7)}


def test_a_block_stays_as_long_as_anything_that_hangs_on_it(root, stored):
    aged(root, {entry.key: 9 for entry in stored if entry is not stored[7]})
    done = prune(root, days(7))
    left = held(root)
    # The snapshot hangs on four blocks, and on the fifth, whose rows reach up to its boundary.
    assert left.keys() == {stored[i].address for i in (0, 1, 2, 3, 4, 7)}
    assert (done.images, done.held) == (4, 5)


def test_a_window_keeps_its_block(root, stored):
    aged(root, {entry.key: 9 for entry in stored if entry is not stored[6]})
    prune(root, days(7))
    assert held(root).keys() == {stored[i].address for i in (0, 1, 2, 6)}


def test_of_several_tails_that_cover_a_snapshot_one_stays(root):
    (block,) = chain(1)
    tail = make(10, parent=block[0].key, start=256, count=40)
    longer, _ = make(11, parent=block[0].key, start=256, count=60)
    tokens = tail[0].tokens + longer.tokens[8 * 40 :]
    meta = HeaderFields(
        "rows", keys.chain(block[0].key, tokens).hex(), block[0].key.hex(), ROOT.hex(), SPACE.model, CODEC, LAYOUT, 256
    )
    draft = Blueprint(meta, [Spec("tokens", "I64", (60,))]).draft()
    draft.tensors["tokens"].view("u1")[:] = memoryview(tokens)
    grown = draft.seal()
    entry = Entry(
        "rows", bytes.fromhex(meta.key), ROOT, block[0].key, 256, tokens, grown.nbytes, grown.checksum, used=5
    )
    state = snapshot(block[0], tail[0], 3, count=30)
    with Opened(root) as ssd:
        ssd.put(block, tail, (entry, grown), state)
    aged(root, {one.key: 9 for one in (block[0], tail[0], entry)})
    prune(root, days(7))
    assert held(root).keys() == {block[0].address, entry.address, state[0].address}


def test_a_model_a_namespace_and_an_age_combine(root, stored):
    aged(root, {stored[9].key: 9, stored[5].key: 9})
    with pytest.raises(NoSuchNamespace, match="nothing is of that model"):
        prune(root, Selection(model="nobody"))
    with pytest.raises(NoSuchNamespace, match="no namespace"):
        prune(root, Selection(namespace="ffffffffff" if ROOT.hex()[0] != "f" else "0000000"))
    with pytest.raises(NoSuchNamespace, match="no namespace"):
        prune(root, Selection(namespace=""))
    done = prune(root, Selection(model="other", used_before=time.time() - 7 * DAY))
    assert [(share.model, share.images) for share in done.shares] == [("other", 1)]
    assert held(root).keys() == {entry.address for entry in stored} - {stored[9].address}
    prune(root, Selection(namespace=ROOT.hex()[:10].upper()))
    assert held(root).keys() == {stored[8].address}


@pytest.mark.parametrize("seed", range(6))
def test_in_any_tree_what_leaves_is_old_and_nothing_that_stays_hangs_on_it(root, seed):
    chance = random.Random(seed)
    blocks, pairs = [], []
    for number in range(40):
        above = chance.choice([None, *blocks[-12:]])
        at = {"parent": above[0].key, "start": above[0].start + 256} if above else {}
        blocks.append(make(number, size=400, **at))
        pairs.append(blocks[-1])
        if chance.random() < 0.3:
            pairs.append(
                make(100 + number, kind="window", parent=blocks[-1][0].key, start=blocks[-1][0].start, size=300)
            )
        if above and chance.random() < 0.3:
            pairs.append(snapshot(above[0], blocks[-1][0], number))
    with Opened(root) as ssd:
        ssd.put(*pairs)
    old = {entry.key: 9 for entry, _ in pairs if chance.random() < 0.7}
    aged(root, old)
    foreseen = prune(root, days(7), dry_run=True)
    done = prune(root, days(7))
    assert (foreseen.images, foreseen.held, foreseen.disk) == (done.images, done.held, done.disk)
    left = held(root)
    rows = {key for kind, key in left if kind == "rows"}
    needed = {entry.parent for entry in left.values()}
    for entry, _ in pairs:
        if entry.key not in old:
            assert entry.address in left
        elif entry.address in left:  # something that stays needs it
            covered = [e for e in left.values() if e.kind == "snapshot" and e.parent == entry.parent]
            assert entry.kind == "rows"
            assert entry.key in needed or any(entry.tokens.startswith(one.tokens) for one in covered)
    for entry in left.values():
        assert entry.parent in rows | {ROOT}
        if entry.kind == "snapshot":
            assert any(
                e.kind == "rows" and e.parent == entry.parent and e.tokens.startswith(entry.tokens)
                for e in left.values()
            )


def test_to_a_size_the_coldest_leave_and_no_more_than_need_be(root):
    chains = [chain(5, first=10 * n, used=n + 1, size=50_000) for n in range(6)]
    with Opened(root) as ssd:
        ssd.put(*(pair for one in chains for pair in one))
    target = du(root) * 2 // 3
    foreseen = prune(root, Selection(to_size=target), dry_run=True)
    done = prune(root, Selection(to_size=target))
    assert done.reached
    assert target - 120_000 < du(root) <= target
    assert abs(foreseen.images - done.images) <= 1
    left = held(root)
    ticks = [entry.used for entry in left.values()]
    assert len(left) == 30 - done.images
    assert min(ticks) >= 2
    assert sorted(ticks).count(min(ticks)) <= 5
    for entry in left.values():
        assert entry.parent == ROOT or ("rows", entry.parent) in left


def test_to_a_size_nothing_is_deleted_before_what_depends_on_it(root):
    needed, other = chain(2, used=1, size=50_000), chain(2, first=10, used=3, size=50_000)
    state = snapshot(*(entry for entry, _ in needed), 60)
    with Opened(root) as ssd:
        ssd.put(*needed, (state[0]._replace(used=5), state[1]), *other)
    prune(root, Selection(to_size=du(root) - 90_000))
    assert held(root).keys() == {entry.address for entry, _ in (*needed, state)}
    prune(root, Selection(to_size=du(root) - 1000))
    assert held(root).keys() == {entry.address for entry, _ in needed}
    prune(root, Selection(to_size=du(root) - 30_000))
    assert held(root).keys() == {needed[0][0].address}


def test_images_whose_block_is_gone_are_deleted_like_others(root, stored):
    gone, *below = stored[2:6]
    execute(root, "DELETE FROM image WHERE key = ?", gone.key)
    path_of(root, gone).unlink()
    aged(root, {below[0].key: 9, below[2].key: 9, stored[6].key: 9})
    done = prune(root, days(7))
    assert (done.images, done.held) == (2, 1)
    assert [(share.model, share.images) for share in done.shares] == [("tiny", 2)]
    assert held(root).keys() == {entry.address for entry in stored} - {e.address for e in (gone, below[2], stored[6])}
    prune(root, Selection(model="tiny"))
    assert held(root).keys() == {entry.address for entry in stored[8:]}


def test_a_size_that_can_not_be_reached_is_told(root, stored):
    done = prune(root, Selection(to_size=10_000, model="other"))
    assert not done.reached
    assert done.images == 2
    assert done.after == du(root)
    assert held(root).keys() == {entry.address for entry in stored[:8]}


def test_quarantine_alone_touches_no_image(root, stored):
    path_of(root, stored[0]).write_bytes(b"x")
    (root / "rows" / "notes").write_text("mine")
    reconcile(root)
    left = held(root)
    assert prune(root, Selection(quarantine=True, used_before=time.time() - DAY)).quarantine == 0
    done = prune(root, Selection(quarantine=True))
    assert (done.images, done.quarantine) == (0, 2)
    assert not list((root / "quarantine").iterdir())
    assert held(root).keys() == left.keys()


def test_what_was_quarantined_on_a_full_disk_and_has_no_note_is_no_older_for_it(root, stored):
    for entry in stored[:2]:
        path_of(root, entry).write_bytes(b"x")
    reconcile(root)
    files = sorted((root / "quarantine").glob("*.safetensors"))
    Path(f"{files[1]}.json").unlink()
    assert prune(root, Selection(quarantine=True, used_before=time.time() - DAY)).quarantine == 0
    assert sorted((root / "quarantine").glob("*.safetensors")) == files
    assert prune(root, Selection(quarantine=True, used_before=time.time() + DAY)).quarantine == 2


def test_clear_leaves_an_empty_directory_that_opens(root, stored):
    (root / "tmp" / "12.safetensors").write_bytes(b"x" * 5000)
    path_of(root, stored[0]).write_bytes(b"x")
    reconcile(root)
    (root / "tmp" / "12.safetensors").write_bytes(b"x" * 5000)
    before, foreseen = du(root), clear(root, dry_run=True)
    done = clear(root)
    assert (done.images, done.quarantine, done.debris) == (9, 1, 1)
    assert (foreseen.images, foreseen.quarantine, foreseen.debris) == (9, 1, 1)
    assert done.freed == before - du(root)
    files = [path.name for path in root.rglob("*") if path.is_file()]
    assert sorted(files) == ["CACHEDIR.TAG", "LOCK", "index.db"]
    assert held(root) == {}
    assert reconcile(root, dry_run=True, deep=True).clean


def test_a_dry_clear_of_a_live_directory_passes_over_what_is_deleted_meanwhile(root, stored, monkeypatch):
    files = Directory.files

    def deleting(there):
        for address, item in files(there):
            if address == stored[1].address:
                os.unlink(item.path)
            yield address, item

    monkeypatch.setattr(Directory, "files", deleting)
    assert clear(root, dry_run=True).images == len(stored)


def test_clear_spares_what_no_image_is_called(root, stored):
    (root / "rows" / "notes").write_text("mine")
    (root / "tmp" / "letter").write_text("mine")
    assert clear(root).left == ("rows/notes",)
    assert (root / "rows" / "notes").exists()
    assert (root / "tmp" / "letter").exists()


def test_clear_needs_no_index_that_can_be_read(root, stored):
    (root / "index.db").write_bytes(b"no database" * 1000)
    assert clear(root).images == 10
    assert held(root) == {}


@pytest.mark.parametrize("work", [clear, lambda root, **more: prune(root, days(0), **more)])
def test_a_dry_run_changes_nothing_and_a_held_directory_is_refused(root, stored, work):
    aged(root, {})
    before = fingerprint(root)
    work(root, dry_run=True)
    assert fingerprint(root) == before
    with Opened(root) as ssd:
        work(root, dry_run=True)
        with pytest.raises(DirectoryHeld, match=f"pid {os.getpid()}"):
            work(root)
        ssd.check_integrity()
    with pytest.raises(DirectoryError, match="no such directory"):
        work(root.with_name("nowhere"))
    home = root.with_name("home")
    home.mkdir()
    (home / "letter").write_text("mine")
    with pytest.raises(DirectoryError, match="not a prefixcache directory"):
        work(home)
    assert [path.name for path in home.iterdir()] == ["letter"]


@pytest.mark.parametrize("work", ["clear", "prune"])
def test_killed_at_any_step_it_opens_and_has_all_that_was_to_stay(quick, stored, root, work):
    aged(root, {entry.key: 9 for entry in stored if entry is not stored[7]})
    stays = {stored[i].address for i in (0, 1, 2, 3, 4, 7)} if work == "prune" else set()

    def do(folder: Path) -> None:
        _ = clear(folder) if work == "clear" else prune(folder, days(7))

    shutil.copytree(root, quick / "whole")
    total = run_child(lambda say: do(quick / "whole")).steps
    assert total > 25
    for at in range(1, total + 1, 2):
        folder = quick / str(at)
        shutil.copytree(root, folder)
        run_child(lambda say, folder=folder: do(folder), at)
        if at % 4 < 2:
            assert held(folder).keys() >= stays
        else:  # run again, it goes on from there
            do(folder)
            assert held(folder).keys() == stays
        assert reconcile(folder, dry_run=True, deep=True).clean
        shutil.rmtree(folder)


def test_the_index_gives_back_what_its_rows_took(root):
    with Opened(root) as ssd:
        ssd.put(*(make(n, size=10, used=n + 1) for n in range(600)))
    before = (root / "index.db").stat().st_size
    prune(root, Selection(model="tiny"))
    assert (root / "index.db").stat().st_size < before // 4
