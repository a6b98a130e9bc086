"""`export` and `import_archive`: what goes in comes out, and nothing else does, whatever the archive says."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache.image import Blueprint, Spec
from prefixcache.ssd import (
    ArchiveError,
    DirectoryHeld,
    Entry,
    ImportFailed,
    Namespace,
    archive,
    export,
    exporting,
    import_archive,
    importing,
    reconcile,
)

from .images import CODEC, ROOT, SPACE, Opened, chain, du, fingerprint, make, path_of
from .test_removing import OTHER, killed, snapshot

MOST = 10 << 20


def packed(root: Path, **more) -> bytes:
    stream = io.BytesIO()
    export(root, stream, **more)
    return stream.getvalue()


def taken(root: Path, data: bytes, **more):
    return import_archive(root, io.BytesIO(data), **{"most": MOST, "limit": 1 << 30, **more})


def members(data: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(item, tar.extractfile(item).read()) for item in tar]


def tarred(*items: tuple[tarfile.TarInfo | str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for item, data in items:
            info = tarfile.TarInfo(item) if isinstance(item, str) else item
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def manifest(images: int = 0) -> tuple[str, bytes]:
    return "manifest.json", archive.manifest_bytes({"images": images, "namespaces": []})


def named(entry: Entry) -> str:
    return str(path_of(Path(), entry).parent.parent / f"{entry.key.hex()}.safetensors")


def there(root: Path) -> dict[tuple[str, bytes], Entry]:
    with Opened(root) as ssd:
        ssd.check_integrity()
        assert ssd._store.ledger.held().real == du(root)
        found = {entry.address: entry for entry in ssd.entries()}
        for entry in found.values():
            assert ssd.read(entry).result(30).checksum == entry.checksum
        return found


@pytest.fixture
def pairs():
    found = chain(6, used=5)
    found.append(make(50, kind="window", parent=found[2][0].key, start=512, used=5))
    entry, image = snapshot(found[3][0], found[4][0], 60)
    found.append((entry._replace(used=5), image))
    found += [make(80 + n, used=9 - n) for n in range(3)]
    return found


@pytest.fixture
def stored(root, pairs):
    others = [make(70, parent=OTHER.root, space=OTHER, size=9000)]
    others.append(make(71, parent=others[0][0].key, start=256, space=OTHER))
    with Opened(root) as ssd:
        for entry, image in pairs:
            assert ssd.write(entry, SPACE, image)
        for entry, image in others:
            assert ssd.write(entry, OTHER, image)
        assert ssd.flush(30)
    return [*pairs, *others]


@pytest.fixture
def root(quick):
    return quick / "ssd"


@pytest.fixture
def target(quick):
    return quick / "target"


def test_all_that_is_exported_is_there_after_an_import(root, target, stored):
    before = fingerprint(root)
    data = packed(root)
    assert fingerprint(root) == before
    done = taken(target, data)
    assert (done.images, done.present, done.counts, done.torn) == (13, 0, {}, "")
    assert done.models == ["other", "tiny"]
    assert done.unverified == [OTHER.root.hex()]
    left = there(target)
    assert left.keys() == {entry.address for entry, _ in stored}
    with Opened(target) as ssd:
        for entry, image in stored:
            assert ssd.holds(left[entry.address], image)
        assert [space[:4] for space in sorted(ssd.namespaces())] == [tuple(s[:4]) for s in sorted((SPACE, OTHER))]
    assert reconcile(target, dry_run=True, deep=True).clean


def test_the_archive_is_a_plain_tar_with_parents_first_and_no_secrets(root, stored):
    items = members(packed(root, release="9.9"))
    said = json.loads(items[0][1])
    assert (items[0][0].name, said["release"], said["images"]) == ("manifest.json", "9.9", 13)
    assert {space["model"] for space in said["namespaces"]} == {"tiny", "other"}
    names = [item.name for item, _ in items[1:]]
    by_name = {named(entry): entry for entry, _ in stored}
    assert set(names) == by_name.keys()
    for name in names:
        entry = by_name.get(name)
        if entry is not None and entry.parent not in (ROOT, OTHER.root):
            assert names.index(f"rows/{entry.parent.hex()}.safetensors") < names.index(name)
    assert {item.mode for item, _ in items} == {0o600}


def test_images_keep_their_order_of_use_and_count_as_used_now(root, target, stored):
    with Opened(target) as ssd:
        (old,) = ssd.put(make(99, used=1000))
    taken(target, packed(root, model="tiny"))
    left = there(target)
    ticks = {entry.key: entry.used for entry in left.values()}
    assert ticks[old.key] == 1000 == min(ticks.values())
    assert ticks[stored[8][0].key] > ticks[stored[9][0].key] > ticks[stored[10][0].key] > ticks[stored[0][0].key]
    for entry in left.values():
        assert entry.parent == ROOT or ticks[entry.parent] >= entry.used


def test_a_model_or_a_namespace_alone_is_exported(root, target, stored):
    assert taken(target, packed(root, namespace=OTHER.root.hex()[:8])).images == 2
    assert {entry.namespace for entry in there(target).values()} == {OTHER.root}
    assert taken(target, packed(root, model="tiny")).images == 11


def test_what_is_there_is_not_written_again(root, target, stored):
    data = packed(root)
    taken(target, data)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*.safetensors")}
    done = taken(target, data)
    assert (done.images, done.present) == (0, 13)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*.safetensors")} == before


def test_a_dry_run_writes_nothing_and_says_the_same(root, target, stored):
    data = packed(root)
    done = taken(target, data, dry_run=True)
    assert not target.exists()
    real = taken(target, data)
    assert (done.images, done.nbytes) == (real.images, real.nbytes)
    before = fingerprint(target)
    assert taken(target, data, dry_run=True).present == 13
    assert fingerprint(target) == before
    assert export(root, None).images == 13


def test_a_live_directory_is_exported_and_not_imported_into(root, target, stored):
    with Opened(root) as ssd:
        data = packed(root)
        with pytest.raises(DirectoryHeld, match="in use by pid"):
            taken(root, data)
        assert taken(root, data, dry_run=True).present == 13
        ssd.check_integrity()
    assert taken(target, data).images == 13


def test_what_leaves_meanwhile_is_left_out_with_all_that_hangs_on_it(root, target, stored, monkeypatch):
    victim, read = stored[3][0], exporting.read_image

    def reading(path, entry):
        if entry.address == victim.address:
            os.unlink(path)
        return read(path, entry)

    monkeypatch.setattr(exporting, "read_image", reading)
    stream = io.BytesIO()
    with Opened(root):
        done = export(root, stream)
    assert (done.images, len(done.left_out), done.damaged) == (9, 4, 0)  # the block, two behind it and the snapshot
    assert taken(target, stream.getvalue()).images == 9


def test_what_is_damaged_does_not_go_in(root, target, stored):
    for which in (3, 9):
        path = path_of(root, stored[which][0])
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    stream = io.BytesIO()
    done = export(root, stream)
    assert (done.images, done.damaged) == (8, 5)
    assert {one.reason for one in done.left_out} >= {"the checksum does not match"}
    assert taken(target, stream.getvalue()).counts == {}


def test_an_archive_without_an_end_gives_what_was_whole(root, target, stored):
    data = packed(root)
    whole = len(data) - 10240
    for cut in (whole, whole - 1, len(data) // 2, 9000, 1600):
        shutil.rmtree(target, ignore_errors=True)
        done = taken(target, data[:cut])
        assert "ends in the middle" in done.torn
        assert there(target).keys() <= {entry.address for entry, _ in stored}
        assert done.images == len(there(target))
    for cut in (0, 5, 512, 700):
        with pytest.raises(ArchiveError):
            taken(target.with_name("never"), data[:cut])
    assert not target.with_name("never").exists()


def test_what_is_no_archive_of_ours_makes_no_directory(target):
    newer = json.dumps({"prefixcache": "archive", "format": archive.FORMAT + 1}).encode()
    for data in (
        b"", b"x" * 5000, bytes(2000), tarred(("rows/x", b"")), tarred(("manifest.json", b"[]")),
        tarred(("manifest.json", b"{")), tarred(("manifest.json", b"[" * 100_000)),
        tarred(("manifest.json", b'{"prefixcache": "archive", "format": true}')),
    ):  # fmt: skip
        with pytest.raises(ArchiveError):
            taken(target, data)
    with pytest.raises(ArchiveError, match="a newer release wrote it"):
        taken(target, tarred(("manifest.json", newer)))
    with pytest.raises(ArchiveError, match=r"of format 1.* its images are not read any more"):
        taken(target, tarred(("manifest.json", b'{"prefixcache": "archive", "format": 1}')))
    assert not target.exists()


def refused(target: Path, *items) -> list[str]:
    """The kinds of the refusals; whatever else came is whole."""
    done = taken(target, tarred(manifest(len(items)), *items))
    counts = taken(target.with_name("foreseen"), tarred(manifest(), *items), dry_run=True).counts
    assert counts == done.counts
    there(target)
    return [refusal.kind for refusal in done.refused]


def special(name: str, kind: bytes, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, b""


def test_members_that_are_no_images_are_refused_one_by_one(target, tmp_path):
    entry, image = make(1)
    good = named(entry), bytes(image.data)
    (tmp_path / "victim").write_text("mine")
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
    odd = [special(f"rows/{n:032x}.safetensors", kind, str(tmp_path / "victim")) for n, kind in enumerate(kinds)]
    unknown = [
        "../victim", "/etc/passwd", "rows/../../x.safetensors", "rows/ab/x", "rows/" + "AB" * 16 + ".safetensors", "index.db",
        "LOCK", "a" * 300, "rows/\u202e.safetensors", "manifest.json", f"rows/{entry.key.hex()}.safetensors/x",
    ]  # fmt: skip
    found = refused(target, *odd, *((name, b"x") for name in unknown), good)
    assert found[:6] == ["not a file"] * 6
    assert set(found[6:]) <= {"unknown", "not a file"}
    assert there(target).keys() == {entry.address}
    assert (tmp_path / "victim").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} <= {"victim", "target"}


def other_image(**changes):
    """A whole image whose header says this."""
    entry, image = make(5)
    meta, _ = image.header()
    draft = Blueprint(meta._replace(**changes), [Spec("tokens", "I64", (256,))]).draft()
    draft.tensors["tokens"].view("u1")[:] = memoryview(entry.tokens)
    return f"rows/{changes.get('key', entry.key.hex())}.safetensors", bytes(draft.seal().data)


def test_images_that_are_not_what_they_say_are_refused(target):
    (first, image), (second, child) = chain(2)
    spoiled = bytearray(image.data)
    spoiled[-1] ^= 1
    entry, other = make(9)
    cases = {
        "invalid": [
            (named(first), bytes(spoiled)), (named(first), bytes(child.data)), (named(first), b""),
            (named(first), b"x" * 600), (named(first).replace("rows", "windows"), bytes(image.data)),
            other_image(key="0" * 32), other_image(namespace="ab"), other_image(model="x" * 600), other_image(model=""),
            other_image(codec="[1"), other_image(layout='"text"'),
            other_image(extra="[" * 5000),
        ],
        "misplaced": [(named(second), bytes(child.data)), other_image(start=256), other_image(start=2**39)],
    }  # fmt: skip
    for kind, items in cases.items():
        for item in items:
            assert refused(target, item) == [kind], item[0]
    assert there(target) == {}
    twice = tarred(manifest(2), *[(named(entry), bytes(other.data))] * 2)
    assert taken(target, twice).counts == {"twice": 1}
    assert taken(target, twice, dry_run=True).present == 2


def test_what_hangs_on_the_wrong_block_is_refused(target):
    (block, image), (tail, short) = make(1), make(2, count=40)
    on_tail = make(3, parent=tail.key, start=40)
    window = make(4, kind="window", parent=block.key, start=256)
    stranger = make(5, parent=block.key, start=256, space=OTHER)
    items = [
        (named(entry), bytes(one.data)) for entry, one in ((block, image), (tail, short), on_tail, window, stranger)
    ]
    assert refused(target, *items) == ["misplaced"] * 3


def test_a_namespace_keeps_its_meaning(root, target, stored):
    liar = Namespace(OTHER.root, "other", CODEC, '{"layers":3}', 0.0)
    entry, image = make(500, parent=OTHER.root, space=liar)
    taken(target, packed(root))
    before = there(target)
    done = taken(target, tarred(manifest(1), (named(entry), bytes(image.data))))
    assert done.counts == {"namespace": 1}
    assert there(target).keys() == before.keys()
    with Opened(target) as ssd:
        assert {space[:4] for space in ssd.namespaces()} == {tuple(SPACE[:4]), tuple(OTHER[:4])}


def test_an_image_that_is_too_large_is_passed_over_unread(root, target, stored):
    done = taken(target, packed(root), most=9000)  # the first block of the other model has 9000 bytes of rows
    assert done.counts == {"too large": 1, "misplaced": 1}
    assert len(there(target)) == 11
    claim = tarfile.TarInfo(named(make(1)[0]))
    claim.size = 1 << 38
    data = tarred(manifest(1)).rstrip(b"\0").ljust(1024 + 512, b"\0")[:1024] + claim.tobuf(tarfile.GNU_FORMAT)
    done = taken(target.with_name("claim"), data)
    assert (done.counts, bool(done.torn)) == ({"too large": 1}, True)


def test_the_limit_holds_and_what_finds_no_room_is_counted(root, target, stored):
    with Opened(root) as ssd:
        ssd.put(*(make(1000 + n, size=60_000) for n in range(40)))
    done = taken(target, packed(root), limit=1_500_000)
    assert done.counts["no room"] > 5
    assert done.images > 5
    assert du(target) <= 1_500_000
    there(target)


def test_a_disk_that_fails_ends_it_and_the_next_run_goes_on(root, target, stored, monkeypatch):
    data = packed(root)
    rename, count = os.rename, [0]

    def failing(source, place, **more):
        count[0] += 1
        if count[0] > 4:
            raise OSError(28, "No space left on device")
        rename(source, place, **more)

    with monkeypatch.context() as patch:
        patch.setattr(importing, "_QUEUE", 1)  # one image at a time
        patch.setattr(os, "rename", failing)
        with pytest.raises(ImportFailed, match="No space left"):
            taken(target, data)
    left = there(target)
    assert 0 < len(left) < 13
    done = taken(target, data)
    assert (done.present, done.images) == (len(left), 13 - len(left))
    assert len(there(target)) == 13


def test_killed_at_any_step_it_opens_and_the_next_run_goes_on(quick, root, stored):
    data = packed(root)
    total = killed(0, lambda: taken(quick / "whole", data))
    assert total > 60
    for at in [*range(1, 20, 3), *range(20, total, 11)]:
        folder = quick / str(at)
        killed(at, lambda folder=folder: taken(folder, data))
        if folder.exists() and any(folder.iterdir()):
            with Opened(folder) as ssd:
                ssd.check_integrity()
        assert taken(folder, data).torn == ""
        assert len(there(folder)) == 13
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("small") / "ssd"
    with Opened(root) as ssd:
        ssd.put(*chain(3, size=100), make(50, kind="window", size=50))
    return packed(root)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 30))
def test_no_archive_makes_it_fail_in_another_way(small, quick, seed, flips):
    chance = random.Random(seed)
    data = bytearray(small)
    for _ in range(flips):
        at = (
            chance.randrange(len(data))
            if chance.random() < 0.5
            else 512 * chance.randrange(len(data) // 512) + chance.randrange(160)
        )
        data[at] = chance.choice((0, 48, 55, 255, chance.randrange(256)))
    with tempfile.TemporaryDirectory(dir=quick) as folder:
        root = Path(folder, "ssd")
        try:
            taken(root, bytes(data), dry_run=True)
        except ArchiveError:
            with pytest.raises(ArchiveError):
                taken(root, bytes(data))
            assert not root.exists()
            return
        done = taken(root, bytes(data))
        assert len(there(root)) == done.images
