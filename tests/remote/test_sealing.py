"""Seals and names: what a key opens, and what nobody else can."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.image_format import FORMAT, KINDS, SNAPSHOT
from prefixcache.remote.client import Client
from prefixcache.remote.engine import PIECE
from prefixcache.remote.sealing import (
    OVERHEAD,
    VERSION,
    FleetKey,
    KeySeal,
    NoSeal,
    NotSealed,
    Seal,
    image_name,
    snapshot_folder,
)
from tests.remote.dict_engine import DictEngine

OURS, THEIRS = KeySeal(FleetKey(b"o" * 32)), KeySeal(FleetKey(b"t" * 32))
IMAGE = np.arange(1000, dtype=np.uint8)


def unsealed(seal: Seal, name: str, sealed: bytes, cuts: Sequence[int] = (), nbytes: int | None = None) -> np.ndarray:
    """What a seal makes of these bytes, cut into pieces. Each piece comes in the same memory."""
    unsealing = seal.unseal(name, len(sealed) if nbytes is None else nbytes)
    memory, taken = bytearray(len(sealed)), b""
    for start, end in pairwise([0, *sorted(cuts), len(sealed)]):
        memory[: end - start] = sealed[start:end]
        taken += unsealing.take(memoryview(memory)[: end - start])
    found = unsealing.finish()
    assert taken == found.tobytes()
    return found


@given(data=st.binary(max_size=300), name=st.text("abc/0-", min_size=1, max_size=40), chance=st.data())
def test_what_was_sealed_is_unsealed_however_it_comes(data, name, chance):
    image = np.frombuffer(data, np.uint8)
    for seal in (OURS, NoSeal()):
        sealed = seal.seal(name, image)
        assert sealed.nbytes == len(data) + seal.overhead
        cuts = chance.draw(st.lists(st.integers(0, sealed.nbytes), max_size=6))
        found = unsealed(seal, name, sealed.tobytes(), cuts)
        assert found.tobytes() == data
        assert found.flags.writeable
        assert not data or found.ctypes.data % 64 == 0


@pytest.mark.parametrize("nbytes", [1 << 16, (1 << 18) - 5, 1_600_003])
def test_large_images_are_unsealed_in_pieces(nbytes):
    image = np.resize(IMAGE, nbytes)
    sealed = OURS.seal("v1/a", image).tobytes()
    assert np.array_equal(unsealed(OURS, "v1/a", sealed, range(0, nbytes, PIECE)), image)


@given(at=st.integers(0, 1000 + OVERHEAD - 1), bit=st.integers(0, 7), cut=st.integers(0, 1000))
def test_every_bit_counts(at, bit, cut):
    sealed = OURS.seal("v1/a", IMAGE)
    sealed[at] ^= 1 << bit
    with pytest.raises(NotSealed):
        unsealed(OURS, "v1/a", sealed.tobytes(), [cut])


def test_the_name_the_key_and_the_length_count():
    sealed = OURS.seal("v1/a", IMAGE).tobytes()
    for seal, name, data in (
        (OURS, "v1/b", sealed),
        (THEIRS, "v1/a", sealed),
        (OURS, "v1/a", sealed[:-1]),
        (OURS, "v1/a", sealed + b"0"),
        (OURS, "v1/a", sealed[:OVERHEAD]),
        (OURS, "v1/a", sealed[:3]),
        (OURS, "v1/a", b""),
        (OURS, "v1/a", IMAGE.tobytes()),
    ):
        with pytest.raises(NotSealed):
            unsealed(seal, name, data)


@pytest.mark.parametrize("seal", [OURS, NoSeal()])
def test_fewer_bytes_than_were_announced_are_no_image(seal):
    sealed = seal.seal("v1/a", IMAGE).tobytes()
    for missing in (1, 20, len(sealed)):
        with pytest.raises(NotSealed):
            unsealed(seal, "v1/a", sealed[: len(sealed) - missing], nbytes=len(sealed))


def test_the_next_image_is_sealed_in_the_memory_of_the_one_before_or_that_is_free():
    taken = []

    class Watched(KeySeal):
        def seal(self, name, data, memory=None):
            if memory is None:
                assert not any(one() is not None for one in taken)
            sealed = super().seal(name, data, memory)
            assert memory is None or np.shares_memory(sealed, memory)
            taken.extend([weakref.ref(sealed)] if memory is None else [])
            return sealed

    client = Client(engine := DictEngine(), Watched(FleetKey(b"o" * 32)))
    for nbytes in (500, 20, 500, 501, 900, 3):
        client.write("v1/a", IMAGE[:nbytes])
        assert np.array_equal(unsealed(OURS, "v1/a", engine.images["v1/a"]), IMAGE[:nbytes])
    assert len(taken) == 3
    client.close()


def test_one_image_is_never_sealed_twice_to_the_same_bytes():
    assert OURS.seal("v1/a", IMAGE).tobytes() != OURS.seal("v1/a", IMAGE).tobytes()


def test_names_follow_from_the_keys_and_differ_between_fleets():
    root, key, parent = b"r" * 32, b"k" * 32, b"p" * 32
    names = [image_name(seal, root, kind, key, parent) for seal in (OURS, THEIRS, NoSeal()) for kind in KINDS]
    assert len(set(names)) == len(names)
    assert names == [image_name(seal, root, kind, key, parent) for seal in (OURS, THEIRS, NoSeal()) for kind in KINDS]
    assert f"v1/{root.hex()}/rows/{key.hex()}" in names
    assert image_name(OURS, root, SNAPSHOT, key, parent).startswith(snapshot_folder(OURS, root, parent) + "/")


def test_another_format_of_images_has_other_names():
    assert (VERSION, FORMAT) == ("v1", 1), "image_format.FORMAT has changed: give sealing.VERSION another number, too"


@pytest.mark.parametrize("content", ["5a" * 32, "5A" * 32 + "\n", bytes(range(200, 232))])
def test_a_key_is_64_hex_digits_or_32_bytes(tmp_path, content):
    file = tmp_path / "key"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    file.chmod(0o600)
    key = FleetKey.read(file)
    assert len(key.derive(b"one")) == 32
    assert key.derive(b"one") != key.derive(b"two")


@pytest.mark.parametrize("content", [b"", b"5a" * 31, b"zz" * 32, b"\xff" * 33, b"5a" * 16, b"\0" * 32, b"\n" * 32])
def test_what_is_no_key_is_refused_with_a_remedy(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ValueError, match=r"remote_key_file=.*key.*openssl rand -hex 32"):
        FleetKey.read(tmp_path / "key")
    with pytest.raises(ValueError, match=r"No such file.*openssl"):
        FleetKey.read(tmp_path / "none")


def test_a_key_in_the_place_of_its_file_is_not_shown(tmp_path):
    for name in ("5a" * 32, tmp_path / ("5A" * 32)):
        with pytest.raises(
            ValueError, match="remote_key_file is the key itself: write it to a file, and name that"
        ) as refused:
            FleetKey.read(name)
        assert "5a5a" not in str(refused.value).lower()


def test_a_key_that_others_may_read_is_warned_of(tmp_path, caplog):
    (tmp_path / "key").write_text("5a" * 32)
    (tmp_path / "key").chmod(0o644)
    FleetKey.read(tmp_path / "key")
    assert "chmod 600" in caplog.text
    assert "5a5a" not in caplog.text
    caplog.clear()
    FleetKey.read(tmp_path / "key", warn=False)
    assert not caplog.text
