"""Images, entries and directories for the tests of the SSD tier."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache import keys
from prefixcache.image_format import Blueprint, HeaderFields, Image, Spec
from prefixcache.ssd import Entry, NamespaceRow, Ssd, WriterEvents
from tests.waiting import until

MODEL, CODEC, LAYOUT = "tiny", '{"name":"raw"}', '{"layers":2}'
ROOT = keys.root_key(MODEL, {"name": "raw"}, {"layers": 2}, b"")
SPACE = NamespaceRow(ROOT, MODEL, CODEC, LAYOUT, 1.7e9)


def make(
    seed: int,
    *,
    kind: str = "rows",
    parent: bytes = ROOT,
    start: int = 0,
    size: int = 5000,
    count: int = 256,
    space: NamespaceRow = SPACE,
    used: int = 0,
) -> tuple[Entry, Image]:
    """An entry and its image, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 150_000, count).astype("<i8") if kind != "window" else np.empty(0, "<i8")
    raw = tokens.tobytes()
    key = hashlib.sha256(b"window %d" % seed).digest() if kind == "window" else keys.chain(parent, raw)
    meta = HeaderFields(
        kind,
        key.hex(),
        parent.hex(),
        space.root.hex(),
        space.model,
        space.codec,
        space.layout,
        start,
        extra=f'{{"seed":{seed}}}',
    )
    draft = Blueprint(meta, [Spec("tokens", "I64", (len(tokens),)), Spec("rows", "U8", (size,))]).draft()
    draft.tensors["tokens"][:] = tokens
    draft.tensors["rows"][:] = rng.integers(0, 256, size, dtype=np.uint8)
    image = draft.seal()
    entry = Entry(
        kind,
        key,
        space.root,
        parent,
        start,
        raw,
        image.nbytes,
        image.checksum,
        used=used,
        created=1.7e9,
        extra=meta.extra,
    )
    return entry, image


def path_of(root: Path, entry: Entry) -> Path:
    folder = {"rows": "rows", "window": "windows", "snapshot": "snapshots"}[entry.kind]
    name = entry.key.hex()
    return root / folder / name[:2] / f"{name}.safetensors"


def chain(count: int, *, first: int = 0, **more: Any) -> list[tuple[Entry, Image]]:
    """`count` blocks, each on the one before."""
    found, parent = [], ROOT
    for n in range(count):
        found.append(make(first + n, parent=parent, start=256 * n, **more))
        parent = found[-1][0].key
    return found


def execute(root: Path, statement: str, *values: Any) -> int:
    """Change the index of a closed directory. How many rows were changed; -1 for what is no change of rows."""
    index = sqlite3.connect(root / "index.db", isolation_level=None)
    try:
        index.execute("PRAGMA ignore_check_constraints = ON")
        return index.execute(statement, values).rowcount
    finally:
        index.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Opened(Ssd):
    """An Ssd that remembers what its writer reported, unless `written` is told."""

    def __init__(self, directory: Path, *, written: Any = None, reopened: Any = None, **more: Any):
        self.reports: list[tuple[Entry, Exception | None]] = []
        events = WriterEvents(written or (lambda entry, error: self.reports.append((entry, error))), reopened)
        super().__init__(directory, **{"limit": 100 << 20, "queue_bytes": 64 << 20, "events": events, **more})

    def put(self, *pairs: tuple[Entry, Image]) -> list[Entry]:
        """Write and wait; the entries as the index has them."""
        for entry, image in pairs:
            assert self.write(entry, SPACE, image)
        assert self.flush(30)
        reported = {entry.address: entry for entry, error in self.reports if error is None}
        return [reported[entry.address] for entry, _ in pairs]

    def holds(self, entry: Entry, image: Image) -> bool:
        return bool((self.read(entry).result(30).data == image.data).all())


def fingerprint(root: Path) -> dict[str, tuple[int, int, str]]:
    """Names, modes, times and contents below `root`. Not while this very process has its index open."""
    found = {}
    for folder, _, files in os.walk(root):
        found[folder] = (os.stat(folder).st_mode, os.stat(folder).st_mtime_ns, "")
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            found[path] = (os.stat(path).st_mode, os.stat(path).st_mtime_ns, digest)
    return found


@contextlib.contextmanager
def full() -> Iterator[None]:
    """In the place of a transaction of the index: its disk has no room."""
    raise sqlite3.OperationalError("database or disk is full")
    yield


def gate(monkeypatch: Any, ssd: Opened) -> threading.Event:
    """The writer stands before its next batch of files until the event is set."""
    event = threading.Event()
    original = ssd._writer._write_images

    def write_images(batch: Any) -> None:
        event.wait(20)
        original(batch)

    monkeypatch.setattr(ssd._writer, "_write_images", write_images)
    return event


def hold(monkeypatch: Any, ssd: Opened, seed: int = 9000) -> threading.Event:
    """Like `gate`, and one write is standing there already: what comes next must wait in the queue."""
    event = gate(monkeypatch, ssd)
    entry, image = make(seed)
    assert ssd.write(entry, SPACE, image)
    until(lambda: ssd.stats().queued_files == 0)
    return event


READER = """
import sqlite3, sys
reader = sqlite3.connect(f"file:{sys.argv[1]}/index.db?mode=ro", uri=True, isolation_level=None)
reader.execute("BEGIN")
reader.execute("SELECT count(*) FROM image").fetchone()
print("reading", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def while_read(root: Path) -> Iterator[None]:
    """Another process reads, and does not end its transaction until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        try:
            yield
        finally:
            reader.communicate()
