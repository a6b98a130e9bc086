"""Files of images, damaged in every way that a disk or a careless hand knows: a miss, set aside, made anew."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from prefixcache.ssd.entries import Entry
from prefixcache.ssd.files import DamagedFile, read_header, read_image
from prefixcache.ssd.index import connect
from prefixcache.ssd.tables import read_entries

from .directories import CODED, PLAIN, STATE, WINDOW, copy, file_of, images, judge, reasons, rows_of, uncleanly


def damage(path, change):
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content) or content)


def flip(at, bit=0):
    def change(content):
        content[at % len(content)] ^= 1 << bit

    return change


def end_of_header(content):
    return 8 + int.from_bytes(content[:8], "little")


def in_tensors(content):
    content[(end_of_header(content) + len(content)) // 2] ^= 4


def zero_tail(content):
    content[-100:] = bytes(100)


def zero_page(content):
    content[:4096] = bytes(min(4096, len(content)))


def claim(nbytes):
    def change(content):
        content[:8] = nbytes.to_bytes(8, "little")

    return change


DAMAGE = {
    "the length of the header": flip(0),
    "the highest byte of that length": flip(7, 7),
    "the header's checksum": flip(40),
    "the header's text": flip(120),
    "the header's end": lambda content: flip(end_of_header(content) - 1)(content),
    "a tensor": in_tensors,
    "the last byte": flip(-1, 7),
    "zeros at the end": zero_tail,
    "zeros at the beginning": zero_page,
    "nothing left": lambda content: content.clear(),
    "seven bytes left": lambda content: content.__delitem__(slice(7, None)),
    "half of it left": lambda content: content.__delitem__(slice(len(content) // 2, None)),
    "a byte less": lambda content: content.pop() and None,
    "a byte more": lambda content: content.append(0),
    "a page more": lambda content: content.extend(os.urandom(4096)),
    "a header of 2^63 bytes": claim(1 << 63),
    "a header of 2^64 - 1 bytes": claim((1 << 64) - 1),
    "a header as long as the file": lambda content: claim(len(content) - 8)(content),
    "other bytes altogether": lambda content: content.__setitem__(slice(None), os.urandom(len(content))),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_image_of_each_kind_is_a_miss_and_made_anew(root, what):
    for model, kind in (("plain", 0), ("window", 1), ("state", 2)):
        damage(file_of(root, rows_of(root, model, kind)[-1]), DAMAGE[what])
    verdict = judge(root)
    assert verdict.corrupt == len(verdict.reasons) == 3
    assert verdict.depths[PLAIN.name] < 600
    assert verdict.depths[WINDOW.name] < 600
    assert verdict.depths[STATE.name] == 0


@pytest.mark.parametrize("what", ["the header's text", "a tensor", "half of it left"])
def test_a_damaged_image_of_levelled_rows_is_a_miss_and_made_anew(root, what):
    damage(file_of(root, rows_of(root, "coded")[-1]), DAMAGE[what])
    verdict = judge(root, "turboquant")
    assert verdict.corrupt == len(verdict.reasons) == 1
    assert verdict.depths[CODED.name] == 256


@pytest.mark.parametrize("what", ["the header's text", "half of it left", "a page more", "a header of 2^63 bytes"])
def test_without_an_index_a_damaged_image_is_found_at_the_opening_or_on_reading(root, what):
    for model, kind in (("plain", 0), ("window", 1), ("state", 2)):
        damage(file_of(root, rows_of(root, model, kind)[-1]), DAMAGE[what])
    (root / "index.db").unlink()
    judge(root)
    assert len(reasons(root)) == 3


@pytest.fixture(scope="module")
def entries(made, tmp_path_factory) -> list[tuple[Path, Entry]]:
    root = copy(made, tmp_path_factory.mktemp("entries") / "ssd")
    connection = connect(root / "index.db")
    try:
        found = list(read_entries(connection))
    finally:
        connection.close()
    folder = {"rows": "rows", "window": "windows", "snapshot": "snapshots"}
    return [(root / folder[e.kind] / e.key.hex()[:2] / f"{e.key.hex()}.safetensors", e) for e in found]


def one_of_each(entries):
    smallest = {}
    for path, entry in sorted(entries, key=lambda pair: pair[1].nbytes):
        smallest.setdefault((entry.kind, entry.namespace), (path, entry))
    return list(smallest.values())


def test_no_bit_of_an_image_can_flip_unseen(entries, tmp_path):
    target = str(tmp_path / "image")
    for path, entry in one_of_each(entries):
        sound = path.read_bytes()
        with open(target, "wb") as file:
            file.write(sound)
        assert read_image(target, entry).nbytes == len(sound)
        fd = os.open(target, os.O_RDWR)
        try:
            for at in [*range(600), *range(600, len(sound), 11), len(sound) - 1]:
                at %= len(sound)
                os.pwrite(fd, bytes([sound[at] ^ (1 << at % 8)]), at)
                with pytest.raises(DamagedFile):
                    read_image(target, entry)
                os.pwrite(fd, sound[at : at + 1], at)
        finally:
            os.close(fd)
        assert read_image(target, entry).nbytes == len(sound)


def test_no_length_of_an_image_but_its_own_is_believed(entries, tmp_path):
    target = tmp_path / "image"
    for path, entry in one_of_each(entries):
        sound = path.read_bytes()
        target.write_bytes(sound)
        for length in [
            *range(len(sound) + 100, len(sound), -9),
            *range(len(sound) - 1, -1, -max(1, len(sound) // 300)),
        ]:
            os.truncate(target, length)
            with pytest.raises(DamagedFile):
                read_image(str(target), entry)
            with pytest.raises(DamagedFile):
                read_header(str(target))


def test_images_that_changed_places_are_all_set_aside(root):
    for a, b in [("plain", "window"), ("plain", "state")]:
        one, other = (file_of(root, rows_of(root, model)[0]) for model in (a, b))
        os.rename(one, root / "aside")
        os.rename(other, one)
        os.rename(root / "aside", other)
    verdict = judge(root)
    assert verdict.corrupt == len(verdict.reasons) == 3


def test_another_models_image_of_the_same_size_under_this_name_is_set_aside(root):
    block, tenants = rows_of(root, "plain")[:2]  # two namespaces, equal shapes
    mine, theirs = file_of(root, block), file_of(root, tenants)
    assert mine.stat().st_size == theirs.stat().st_size
    shutil.copy(theirs, mine)
    verdict = judge(root)
    assert verdict.corrupt == 1
    assert verdict.reasons == ["the file is another image's"]


@pytest.mark.parametrize("folder", ["windows", "snapshots"])
def test_an_image_in_another_kinds_folder_is_set_aside(root, folder):
    for path in images(root, "rows")[:3]:
        (root / folder / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, root / folder / path.parent.name / path.name)
    uncleanly(root)
    judge(root)
    assert reasons(root).count("the file is another image's") == 3


def test_a_sparse_giant_is_never_read(root):
    os.truncate(file_of(root, rows_of(root, "plain")[0]), 1 << 40)
    verdict = judge(root)
    assert verdict.corrupt == 1
    assert "1099511627776 bytes" in verdict.reasons[0]


def test_a_sparse_giant_without_a_row_is_not_adopted(root):
    path = file_of(root, rows_of(root, "plain")[0])
    os.truncate(path, 1 << 40)
    (root / "index.db").unlink()
    judge(root)
    assert len(reasons(root)) == 1
