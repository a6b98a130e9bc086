"""Image files that other tools copy into a directory: in any order, in part, while it is repaired or opened, over others.
What is whole is adopted, what is not is quarantined and may come again; nothing that was there is lost.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from prefixcache.image_format import Blueprint, Image, Spec
from prefixcache.ssd import Corrupt, DirectoryError, Entry, NamespaceRow, reconcile, survey
from tools.faults.evidence import du

from .images import LAYOUT, ROOT, SPACE, Opened, chain, make, path_of
from .test_prune_directory import OTHER, snapshot

Pair = tuple[Entry, Image]


@pytest.fixture
def root(quick):
    return quick / "ssd"


@pytest.fixture
def images() -> list[Pair]:
    """Six blocks in a row with a window and a snapshot, and two blocks of a salted namespace."""
    pairs = chain(6)
    pairs.append(make(50, kind="window", parent=pairs[2][0].key, start=512))
    pairs.append(snapshot(pairs[3][0], pairs[4][0], 60))
    pairs.append(make(70, parent=OTHER.root, space=OTHER, size=9000))
    pairs.append(make(71, parent=pairs[-1][0].key, start=256, space=OTHER))
    return pairs


def filled(root: Path, pairs: list[Pair]) -> Path:
    with Opened(root) as ssd:
        for entry, image in pairs:
            assert ssd.write(entry, OTHER if entry.namespace == OTHER.root else SPACE, image)
        assert ssd.flush(30)
    return root


@pytest.fixture
def source(quick, images) -> Path:
    return filled(quick / "source", images)


def files(root: Path) -> list[Path]:
    """Relative to the root."""
    return sorted(path.relative_to(root) for path in root.glob("[rsw]*/*/*.safetensors"))


def place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def copy(source: Path, target: Path, name: Path) -> None:
    """As rsync does: beside its place under a name of its own, with the file's time, then renamed."""
    partial = place(target / name).with_name(f".{name.name}.kq03Zx")
    shutil.copy2(source / name, partial)
    partial.rename(target / name)


def synchronise(source: Path, target: Path) -> None:
    """A pass of rsync: all that is not there in its size and of its time."""
    for name in files(source):
        there = target / name
        if not there.exists() or stamp(there) != stamp(source / name):
            copy(source, target, name)


def stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def differing(image: Image) -> Image:
    """Whole, of the same tokens, with other rows."""
    meta, tensors = image.header()
    draft = Blueprint(meta, [Spec("tokens", "I64", (256,)), Spec("rows", "U8", tensors["rows"].shape)]).draft()
    draft.tensors["tokens"][:] = tensors["tokens"]
    draft.tensors["rows"][:] = 255 - tensors["rows"]
    return draft.seal()


def begun(root: Path) -> Path:
    root.mkdir()
    (root / "LOCK").touch()
    return root


def check_has(root: Path, pairs: list[Pair]) -> None:
    """These images and no others, to the last byte; and the account is what the disk says."""
    with Opened(root) as ssd:
        ssd.check_integrity()
        entries = {entry.address: entry for entry in ssd.entries()}
        assert entries.keys() == {entry.address for entry, _ in pairs}
        for entry, image in pairs:
            assert entries[entry.address].parent == entry.parent
            assert ssd.holds(entries[entry.address], image)
        assert ssd.stats().disk == du(root)
    assert reconcile(root, dry_run=True, deep=True).clean


# -- whole copies -----------------------------------------------------------------------------------------------------


def looked_over(root: Path) -> None:
    assert reconcile(root).exit_code in (0, 1)


def opened(root: Path) -> None:
    Opened(root).close()


WAYS = pytest.mark.parametrize("way", [looked_over, opened], ids=["reconcile", "opening"])


@WAYS
@pytest.mark.parametrize("order", ["children first", "windows first", "any"])
@pytest.mark.parametrize("at_each", [False, True], ids=["at the end", "at each file"])
def test_files_may_come_in_any_order(source, root, images, way, order, at_each):
    starts = {str(path_of(Path(), entry)): entry.start for entry, _ in images}
    names = files(source)
    if order == "any":
        random.Random(5).shuffle(names)
    else:
        names.sort(key=lambda name: -starts[str(name)] if order == "children first" else name.parts[0] == "rows")
    begun(root)
    for name in names:
        copy(source, root, name)
        if at_each:
            way(root)
    way(root)
    check_has(root, images)
    assert not survey(root).quarantine


@WAYS
def test_copies_join_what_is_there(source, root, images, way):
    mine = [*chain(4, first=200), *chain(1)]  # of the last one the source has the same
    synchronise(source, filled(root, mine))
    way(root)
    check_has(root, [*mine[:4], *images])


def test_copies_into_a_live_directory_are_adopted_at_the_next_opening(source, root, images):
    with Opened(root) as ssd:
        synchronise(source, root)
        ssd.put(images[0], make(300))  # the first comes from both
    check_has(root, [*images, make(300)])


def test_an_image_that_differs_is_replaced_and_read(root, quick, images):
    """Another machine's state of the same tokens: the same key, the same size, other bytes."""
    filled(root, images[:3])
    other = differing(images[0][1])
    path_of(root, images[0][0]).write_bytes(other.data)
    kept = quick / "as it was"
    shutil.copytree(root, kept)
    assert reconcile(root, deep=True).counts == {"orphan": 1}
    with Opened(root) as ssd:
        entry = next(entry for entry in ssd.entries() if entry.key == images[0][0].key)
        assert ssd.holds(entry, other)
        assert ssd.stats().files == 3
    assert reconcile(kept).clean  # names and sizes agree
    with Opened(kept) as ssd:
        entry = next(entry for entry in ssd.entries() if entry.key == images[0][0].key)
        assert ssd.holds(entry, other)  # whole, and of these very tokens


def test_a_directory_of_images_alone_asks_for_a_lock(source, root, images):
    synchronise(source, root)
    with pytest.raises(DirectoryError, match="make an empty LOCK"):
        Opened(root)
    assert "make an empty LOCK" in reconcile(root).error
    (root / "LOCK").touch()
    assert reconcile(root).counts == {"index": 1, "orphan": len(images)}
    check_has(root, images)


def test_more_than_the_limit_holds_is_taken_in_and_the_limit_kept_afterwards(root, quick):
    pairs = [make(number, size=50_000) for number in range(40)]
    synchronise(filled(quick / "large", pairs), begun(root))
    assert reconcile(root).counts["orphan"] == 40
    with Opened(root, limit=1 << 20) as ssd:
        assert ssd.used > 1 << 20
        entry, image = make(100)
        assert not ssd.write(entry, SPACE, image)
        ssd.delete(list(ssd.entries())[:30])
        assert ssd.flush(30)
        assert du(root) <= ssd.used <= 1 << 20


# -- copies in part ---------------------------------------------------------------------------------------------------


def truncated(source: Path, target: Path, name: Path) -> None:
    data = (source / name).read_bytes()
    place(target / name).write_bytes(data[: random.Random(str(name)).randrange(len(data))])


def preallocated(source: Path, target: Path, name: Path) -> None:
    data = (source / name).read_bytes()
    place(target / name).write_bytes(data[: len(data) - 200] + bytes(200))


def temporary(source: Path, target: Path, name: Path) -> None:
    partial = place(target / name).with_name(f".{name.name}.Xy7a9Q")
    partial.write_bytes((source / name).read_bytes()[:777])


def in_a_folder(source: Path, target: Path, name: Path) -> None:
    place((target / name).parent / ".rsync-partial" / name.name).write_bytes((source / name).read_bytes()[:777])


PARTIAL: list[Callable[[Path, Path, Path], None]] = [truncated, preallocated, temporary, in_a_folder]


@WAYS
@pytest.mark.parametrize("partial", PARTIAL)
def test_a_copy_in_part_is_not_served_and_a_second_pass_completes_it(source, root, images, way, partial):
    mine = make(200)
    filled(root, [mine])
    for number, name in enumerate(files(source)):
        (partial if number % 3 else copy)(source, root, name)
    way(root)
    whole = {name.stem for name in files(source)[::3]}
    with Opened(root) as ssd:
        for entry in ssd.entries():
            if entry.key.hex() in whole or entry.key == mine[0].key:
                assert ssd.read(entry).result(30).checksum == entry.checksum
            else:  # adopted by the word of its header, and found out when it is read
                assert partial is preallocated
                with pytest.raises(Corrupt):
                    ssd.read(entry).result(30)
        assert ssd.flush(30)
        assert ssd.stats().disk == du(root)
    assert survey(root).quarantine
    synchronise(source, root)
    way(root)
    check_has(root, [mine, *images])


@pytest.mark.parametrize("partial", PARTIAL)
def test_a_deep_run_finds_every_copy_in_part(source, root, images, partial):
    opened(root)
    for name in files(source):
        partial(source, root, name)
    report = reconcile(root, deep=True)
    assert report.images == 0
    assert len(survey(root).quarantine) == len(
        {name.parent for name in files(source)} if partial is in_a_folder else images
    )
    synchronise(source, root)
    assert reconcile(root, deep=True).counts == {"orphan": len(images)}
    check_has(root, images)


def test_a_file_completed_in_its_place_is_whole(source, root, images):
    """`rsync --inplace`, `dd`: the name is there from the start. A look in between adopted it by its header."""
    begun(root)
    for name in files(source):
        preallocated(source, root, name)
    assert reconcile(root).counts == {"index": 1, "orphan": len(images)}
    for name in files(source):
        with open(root / name, "r+b") as file:
            file.write((source / name).read_bytes())
    assert reconcile(root, deep=True).clean
    check_has(root, images)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_while_it_is_copied_a_second_pass_brings_all(source, root, images, seed):
    """Files begin and end in any order, and between any two steps somebody may repair, open or look."""
    chance = random.Random(seed)
    mine = chain(3, first=200)
    filled(root, mine)
    names = files(source)
    waiting: list[tuple[Path, Path]] = []
    while names or waiting:
        if names and chance.random() < 0.5:
            name = names.pop(chance.randrange(len(names)))
            if chance.random() < 0.3:
                chance.choice(PARTIAL)(source, root, name)  # the copy broke off
            else:
                partial = place(root / name).with_name(f".{name.name}.{len(names):06}")
                partial.write_bytes((source / name).read_bytes()[: chance.choice([0, 5000])])
                waiting.append((partial, name))
        elif waiting:
            partial, name = waiting.pop(chance.randrange(len(waiting)))
            with suppress(FileNotFoundError):  # it was quarantined meanwhile
                os.truncate(partial, 0)
                shutil.copy2(source / name, partial)
                partial.rename(root / name)
        if chance.random() < 0.3:
            step = chance.randrange(4)
            if step < 2:
                reconcile(root, deep=bool(step))
            elif step == 2:
                with Opened(root) as ssd:
                    ssd.check_integrity()
                    for entry in list(ssd.entries())[::2]:
                        with suppress(Corrupt):
                            ssd.read(entry).result(30)
            else:
                reconcile(root, dry_run=True)
    synchronise(source, root)
    reconcile(root, deep=True)
    check_has(root, [*mine, *images])


# -- what is foreign --------------------------------------------------------------------------------------------------


def test_images_that_state_another_layout_are_quarantined(root, quick):
    """Of two statements of one root key, the one that the key proves is believed, whichever comes first."""
    liar = NamespaceRow(ROOT, "tiny", SPACE.codec, LAYOUT.replace("2", "3"), 0.0)
    entry, image = make(500, space=liar)
    filled(root, chain(2))
    place(path_of(root, entry)).write_bytes(image.data)
    assert reconcile(root).counts == {"broken": 1}
    check_has(root, chain(2))


def test_links_and_devices_are_not_followed(source, root, tmp_path):
    opened(root)
    (tmp_path / "victim").write_text("mine")
    first, second, third = files(source)[:3]
    place(root / first).symlink_to(tmp_path / "victim")
    os.mkfifo(place(root / second))
    place(root / third).mkdir()
    assert reconcile(root, deep=True).counts == {"stray": 3}
    assert (tmp_path / "victim").read_text() == "mine"
