"""What the fuzzers throw bytes at: each function takes any bytes, and raises only where a promise is broken.

`test_parsers.py` runs them with Hypothesis, `atheris_run.py` guided by coverage. Seeds are made here, too: sound bytes, from
which most of what is hostile is a few changes away.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache import PrefixCache, TurboQuant
from prefixcache import image_format as images
from prefixcache.blocks.window_masks import mask_from
from prefixcache.codecs.transform import backends, entropy
from prefixcache.codecs.transform.basis import Basis, BasisError
from prefixcache.codecs.transform.codec import Calibrated
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.codecs.transform.tables import class_of, first_guess
from prefixcache.image_format import Blueprint, HeaderFields, Image, ImageError, Spec, examine
from prefixcache.keys import BLOCK, PSEUDO_IDS, chain
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.reading import read
from prefixcache.layers.transformed import DamagedBlock, decode_joined
from prefixcache.layers.transformed_windows import CodedWindow
from prefixcache.layers.transformed_windows import coded_window as coded_window_of
from prefixcache.media import Media, as_media, check_placeholders, chunks, outside_media, with_pseudo_ids
from prefixcache.ssd import Entry
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.errors import DirectoryError, IndexBroken
from prefixcache.ssd.files import DamagedFile, from_header, read_header, read_image
from prefixcache.ssd.index import Index
from prefixcache.ssd.lock import holder, lock_format
from prefixcache.ssd.quarantine import quarantined
from prefixcache.ssd.reconcile import reconcile
from prefixcache.ssd.survey import survey
from tests.models import states
from tests.models.transforming import uneven_bases, uneven_basis

ROOT = bytes(range(32))
RUNS_IN = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


@cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="prefixcache-fuzz-", dir=RUNS_IN))


def clear() -> None:
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


# -- seeds --------------------------------------------------------------------------------------------------------------


@cache
def sound_image(kind: str = "rows", count: int = 3) -> bytes:
    tokens = np.arange(count, dtype="<i8")
    key = chain(ROOT, tokens.tobytes())
    extra = '{"ranges":[[[0,2]]]}' if kind == "window" else "{}"
    meta = HeaderFields(kind, key.hex(), ROOT.hex(), ROOT.hex(), "m", "{}", "{}", 0, extra)
    draft = Blueprint(meta, [Spec("tokens", "I64", (count,)), Spec("r0.rows", "F16", (count, 2, 4))]).draft()
    draft.tensors["tokens"][:] = tokens
    draft.tensors["r0.rows"][:] = 1
    return draft.seal().data.tobytes()


@cache
def sound_directory() -> Path:
    from tests.ssd.images import Opened
    from tests.ssd.images import chain as chained

    root = scratch() / "sound"
    with Opened(root) as ssd:
        ssd.put(*chained(3, size=100))
    return root


@cache
def sound_index() -> bytes:
    return (sound_directory() / "index.db").read_bytes()


NOTE = b'{"reason": "the checksum does not match", "origin": "rows/ab/x", "when": 1.7e9}'
LOCK_TEXT = b"pid 12\nhost a\nsince 2026-01-01T00:00:00Z\nformat 1\n"


# -- targets ------------------------------------------------------------------------------------------------------------


def image(data: bytes) -> None:
    """`examine`, of the bytes as they are and with the checksum that they ought to have."""
    for array in (np.frombuffer(bytearray(data), np.uint8), sealed_anew(data)):
        try:
            examine(array)
        except ImageError:
            continue
        meta, tensors = Image(array).header()
        assert isinstance(meta, HeaderFields)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= len(data)
        for tensor in tensors.values():
            tensor.tobytes()


def sealed_anew(data: bytes) -> np.ndarray:
    """The bytes with the checksum that they ought to have, where there is a place for one."""
    array = np.frombuffer(bytearray(data), np.uint8)
    if array.nbytes >= images._CHECKSUM.stop:
        array[images._CHECKSUM] = np.frombuffer(images._digest(array).encode(), np.uint8)
    return array


def header(data: bytes) -> None:
    """A file's own word, as `reconcile` takes it in; and what is taken in can be read, or is found to be damaged."""
    path = scratch() / "image"
    for content in (data, sealed_anew(data).tobytes()):
        path.write_bytes(content)
        try:
            entry, namespace = from_header(read_header(str(path)), 5)
        except (DamagedFile, ValueError, DirectoryError):
            entry = Entry("rows", ROOT, ROOT, ROOT, 0, b"", len(content), content[37:69].decode("ascii", "replace"))
        else:
            assert entry.nbytes == len(content)
            assert namespace.root == entry.namespace
            assert entry.kind == "window" or chain(entry.parent, entry.tokens) == entry.key
        try:
            read_image(str(path), entry).header()
        except DamagedFile:
            continue


def index(data: bytes) -> None:
    """A database: opened and read, or broken; looked at by `survey`; and mended by `reconcile`."""
    root = scratch() / "directory"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(sound_directory(), root)
    (root / "index.db").write_bytes(data)
    try:
        found = survey(root)
        for space in found.namespaces:
            list(found.spans(space.root))
    except (DirectoryError, IndexBroken):
        pass
    try:
        with closing(Index(root / "index.db")) as opened:
            opened.check()
            known = {space.root for space in opened.namespaces()}
            for entry in opened.entries():
                assert entry.namespace in known
                assert entry.kind == "window" or chain(entry.parent, entry.tokens) == entry.key
    except (DirectoryError, IndexBroken):
        pass
    report = reconcile(root)
    if not report.error:
        again = reconcile(root)
        assert again.clean, again.summary()


def edited_index(data: bytes) -> None:
    """The same, of a sound database with changes: each of two bytes place, one of length, and what is written there."""
    content, at = bytearray(sound_index()), 0
    while at + 3 < len(data):
        place, length = int.from_bytes(data[at : at + 2], "little"), 1 + data[at + 2] % 16
        new = data[at + 3 : at + 3 + length]
        content[place % len(content) : place % len(content) + len(new)] = new
        at += 3 + length
    index(bytes(content))


def note(data: bytes) -> None:
    directory = Directory(scratch() / "quarantine")
    directory.quarantine.mkdir(parents=True, exist_ok=True)
    (directory.quarantine / "1-a").write_bytes(b"x")
    (directory.quarantine / "1-a.json").write_bytes(data)
    (item,) = quarantined(directory)
    json.dumps(item._asdict())


def lock(data: bytes) -> None:
    directory = Directory(scratch() / "lock")
    directory.root.mkdir(exist_ok=True)
    directory.lock.write_bytes(data)
    assert holder(directory) is None
    assert 0 <= lock_format(directory) < 10**9
    assert directory.ours in (True, False)


def ranges(data: bytes) -> None:
    try:
        masks = mask_from(data.decode("utf-8", "replace"))
    except ValueError:
        return
    assert all(0 <= mask < 1 << 256 for mask in masks)


@cache
def sound_state() -> tuple[Any, Blueprint, dict[str, np.ndarray]]:
    """A plan, and a snapshot with coded state: its blueprint and its tensors."""
    from prefixcache import TurboQuant
    from prefixcache.layers.image_layout import Plan
    from prefixcache.layers.reading import read
    from prefixcache.layers.snapshots import encode_state
    from tests.models import states

    reading = read(states.recurrent(range(3)))
    plan = Plan(reading.layout, TurboQuant())
    encoded = plan.describe_state(reading.leaves)
    meta = HeaderFields("snapshot", "0" * 64, ROOT.hex(), ROOT.hex(), "m", "{}", "{}", 0, encoded.extra)
    blueprint = Blueprint(meta, [*encoded.specs(), Spec("tokens", "I64", (3,))])
    draft = blueprint.draft()
    draft.tensors["tokens"][:] = range(3)
    for copy in encode_state(encoded, draft.tensors, decoded=False).copies:
        copy.run()
    return plan, blueprint, draft.seal().tensors()


def state(data: bytes) -> None:
    """What a snapshot's header says of its state: refused, or made of the tensors that are there."""
    plan, blueprint, tensors = sound_state()
    meta = blueprint.fields._replace(extra=data.decode("utf-8", "replace"))
    draft = Blueprint(meta, list(blueprint._table.specs)).draft()
    for name, array in draft.tensors.items():
        array[...] = tensors[name]
    image = draft.seal()
    if plan.fits(image, "snapshot", 0, 3):
        stored = plan.stored_state(image)
        stored.leaf(0)
        assert stored.leaf_nbytes(0) <= image.nbytes


def words(data: bytes) -> None:
    """Coded rows: 4 heads, where their words are, and the words; C and NumPy judge them alike."""
    tables, classes = first_guess(), class_of(np.geomspace(20, 0.2, 12))
    data = data.ljust(16, b"\0")
    heads, first = np.frombuffer(data, "<u2", 4), np.frombuffer(data, "<i2", 4, 8).astype(np.int64)
    content = np.frombuffer(data[16 : len(data) & ~1], "<u2")

    def judged(decode: Callable[..., np.ndarray]) -> bytes:
        try:
            return decode(heads, content, first, classes, tables).tobytes()
        except entropy.DamagedCodes:
            return b"damaged"

    assert judged(backends.decode) == judged(entropy.unpack)


def media(data: bytes) -> None:
    """A list of media: six numbers of each, beside a prompt of 300 tokens, some of them placeholders."""
    numbers = np.frombuffer(data[: len(data) // 6 * 6], "i1").reshape(-1, 6).astype(int)
    ids = np.where(np.arange(300) % 100 < 50, 7, 1)
    try:
        listed = [
            Media(start + 128, length, bytes([digest & 3]) * 32, None if has_none & 1 else positions, bool(whole & 1))
            for start, length, digest, has_none, positions, whole in numbers.tolist()
        ]
        spans = as_media(listed, len(ids))
    except ValueError:
        return
    inside = np.zeros(len(ids), bool)
    for span in spans:
        assert not inside[span.start : span.end].any()
        inside[span.start : span.end] = True
    keyed = with_pseudo_ids(ids, spans)
    assert (keyed[~inside] == ids[~inside]).all()
    assert (keyed[inside] >= PSEUDO_IDS).all()
    for first, last in chunks(0, len(ids), 64, spans):
        assert outside_media(spans, first) == first < outside_media(spans, last) == last
    with suppress(ValueError):
        check_placeholders(ids, spans, np.array([7]))
        assert (inside == (ids == 7)).all()


def sound_media() -> bytes:
    """Four pictures, where all placeholders are."""
    spans = np.array([[0, 50, 1, 1, 0, 1], [100, 25, 2, 0, 9, 0], [125, 25, 1, 1, 0, 1], [200, 50, 3, 1, 0, 1]])
    return (spans - [128, 0, 0, 0, 0, 0]).astype("i1").tobytes()


def basis(data: bytes) -> None:
    """A basis is refused, or rows can be coded with it."""
    try:
        found = Basis(data)
    except BasisError:
        return
    for group in found.groups:
        coder = GroupCoder(group, found.tables, 4.0, "float32")
        rows = [np.ones((3, heads, width), np.float32) for heads, width in coder.streams]
        with np.errstate(all="ignore"), suppress(entropy.DamagedCodes):
            coder.decode(coder.encode(rows, 0), 0)


def coded_window(data: bytes) -> None:
    """A window image of transformed layers is none of its namespace's, or has rows, or is said to be damaged."""
    plan, image = windowed_plan(), Image(sealed_anew(data))
    try:
        examine(sealed_anew(data))
        mask = mask_from(image.header()[0].extra)
    except (ImageError, ValueError):
        return
    if len(mask) == 1 and plan.fits(image, "window", BLOCK, BLOCK, mask):
        block = CodedWindow(BLOCK, image.tensors(), mask[0], mask[0])
        with np.errstate(all="ignore"), suppress(DamagedBlock):
            for group in decode_joined(coded_window_of(plan.windowed[0], [block])):
                assert sum(len(stretch.on_cpu[0]) for stretch in group.stretches) == mask[0].bit_count()


@cache
def windowed_plan() -> Plan:
    layers = states.uneven_windows(range(2 * BLOCK))
    of_model = Basis(uneven_basis("m", states.windows_of(layers)))
    return Plan(read(layers).layout, Calibrated(4.0, TurboQuant(), of_model))


def sound_window() -> bytes:
    tokens = list(range(2 * BLOCK))
    layers = states.uneven_windows(tokens)
    with PrefixCache(
        ram=5_000_000, codec="transform:4", basis_dir=uneven_bases(states.windows_of(layers)), memory_reserve=0
    ) as cache:
        cache.store(tokens, layers, model="m")
        found = cache.lookup(tokens, model="m", leave=0)
        assert found is not None
        return found.blocks[1].windows[0].image.data.tobytes()


def sound_words() -> bytes:
    values = np.random.default_rng(0).laplace(size=(4, 12)) * np.geomspace(20, 0.2, 12)
    heads, content, _ = backends.encode(values.astype(np.float32), class_of(np.geomspace(20, 0.2, 12)), first_guess())
    counts = entropy.words_of(heads)
    return heads.tobytes() + (counts.cumsum() - counts).astype("<i2").tobytes() + content.tobytes()


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "image": (image, lambda: [sound_image(kind) for kind in ("rows", "window", "snapshot")]),
    "header": (header, lambda: [sound_image(kind) for kind in ("rows", "window", "snapshot")]),
    "index": (edited_index, lambda: [b"\x64\x00\x01\x0d\x05", b"\x00\x10\x01\x0d\x05", b"\x12\x00\x01\x02\x02"]),
    "note": (note, lambda: [NOTE]),
    "lock": (lock, lambda: [LOCK_TEXT]),
    "state": (state, lambda: [sound_state()[1].fields.extra.encode()]),
    "media": (media, lambda: [sound_media()]),
    "words": (words, lambda: [sound_words()]),
    "basis": (basis, lambda: [uneven_basis("m", (200, 0, 200))]),
    "coded window": (coded_window, lambda: [sound_window()]),
    "ranges": (ranges, lambda: [b'{"ranges":[[[0,2],[4,256]]]}']),
}
