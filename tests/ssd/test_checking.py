"""The quick look of `reconcile --deep`: it says yes to what is whole to the last bit, and to nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prefixcache import image_format
from prefixcache.image_format import Blueprint, Image, Spec, is_whole
from prefixcache.ssd import reconcile
from prefixcache.ssd.files import Checker

from .images import SPACE, Opened, chain, make, path_of


@pytest.fixture
def stored(quick):
    pairs = [make(n, size=200) for n in range(3)] + chain(4, first=10, size=300)
    with Opened(quick / "ssd") as ssd:
        ssd.put(*pairs)
    return [(str(path_of(quick / "ssd", entry)), entry._replace(checksum=image.checksum)) for entry, image in pairs]


def test_what_is_whole_is_whole(stored):
    checker = Checker()
    assert all(checker.is_whole(path, entry) for path, entry in stored)
    assert all(Checker().is_whole(path, entry) for path, entry in stored)


def test_any_flipped_bit_any_other_length_any_other_image_is_not(stored):
    checker = Checker()
    (path, entry), (other, _) = stored[:2]
    data = Path(path).read_bytes()
    assert checker.is_whole(path, entry)
    for at in [*range(0, 200, 3), *range(200, len(data), 53), len(data) - 1]:
        Path(path).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert not checker.is_whole(path, entry), at
    for wrong in (b"", data[:-1], data + b"x", Path(other).read_bytes()):
        Path(path).write_bytes(wrong)
        assert not checker.is_whole(path, entry)
    Path(path).write_bytes(data)
    assert checker.is_whole(path, entry)
    for changed in (
        {"key": bytes(32)},
        {"kind": "window"},
        {"namespace": bytes(32)},
        {"checksum": "0" * 32},
        {"parent": bytes(32)},
        {"start": 7},
        {"tokens": bytes(2048)},
    ):
        assert not checker.is_whole(path, entry._replace(**changed))


def test_what_is_no_plain_file_is_not(stored):
    checker = Checker()
    for number, put in enumerate((lambda p: os.symlink(stored[3][0], p), os.mkfifo, os.mkdir, lambda p: None)):
        path, entry = stored[number]
        os.rename(path, f"{path}.away")
        put(path)
        assert not checker.is_whole(path, entry)


def _plain(number: int):
    """An image without what the others say in `extra`."""
    entry, image = make(number, size=200)
    meta = image.header()[0]._replace(extra="{}")
    draft = Blueprint(meta, [Spec("tokens", "I64", (256,)), Spec("rows", "U8", (200,))]).draft()
    draft.tensors["tokens"].view("u1")[:] = memoryview(entry.tokens)
    draft.tensors["rows"][:] = number
    image = draft.seal()
    return entry._replace(checksum=image.checksum, extra="{}"), image


def test_a_header_is_parsed_once_for_all_that_are_like_it(quick, monkeypatch):
    with Opened(quick / "ssd") as ssd:
        pairs = [_plain(n) for n in range(5)]
        ssd.put(*pairs)
    parsed = []
    parse = image_format.parse_header
    monkeypatch.setattr(image_format, "parse_header", lambda *args: parsed.append(1) or parse(*args))
    checker = Checker()
    for entry, made in pairs:
        assert checker.is_whole(str(path_of(quick / "ssd", entry)), entry._replace(nbytes=made.nbytes))
    assert len(parsed) == 1


@pytest.mark.parametrize(
    ("find", "put"),
    [
        (b'"model":"tiny"', b'"kind":"rows" '),
        (b'"U8"', b'"U9"'),
        (b'"shape":[200]', b'"shape":[201]'),
        (b'"start":"0"', b'"start":"x"'),
    ],
)
def test_a_header_that_no_image_has_is_not_believed_though_its_checksum_holds(quick, find, put):
    entry, image = make(1, size=200)
    data = bytes(image.data).replace(find, put)
    fresh = np.frombuffer(data, np.uint8).copy()
    fresh[37:69] = ord("0")
    fresh[37:69] = np.frombuffer(xxhash.xxh3_128_hexdigest(fresh.tobytes()).encode(), np.uint8)
    assert is_whole(fresh)
    with Opened(quick / "ssd") as ssd:
        assert ssd.write(entry, SPACE, Image(fresh))
        assert ssd.flush(30)
    assert not Checker().is_whole(str(path_of(quick / "ssd", entry)), entry._replace(checksum=Image(fresh).checksum))
    (finding,) = reconcile(quick / "ssd", deep=True).findings
    assert finding.kind == "broken"
