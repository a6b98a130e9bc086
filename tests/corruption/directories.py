"""A directory as a real cache writes it, small, with every kind of file; and the judge of what became of a damaged copy.

The judge does what a server does: open, promote, fetch, store, close, open again. Whatever was done to the copy, an
answer is exact or a miss, the account is what the disk holds, and after a store everything can be had again.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache import PrefixCache
from prefixcache.image_format import Blueprint, HeaderFields, Image, Spec
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.quarantine import quarantined
from tests.models import states
from tools.faults.evidence import du

PROMPT = [9_000_000_000 + 7 * i for i in range(600)]  # int64 in the index
SHORT = [5000 + i for i in range(300)]  # int32
SALT = b"tenant"
LIMIT = 50_000_000


class Kept(NamedTuple):
    """A prompt that the directory has: how its prompt cache is made, and where it is kept."""

    model: str
    tokens: list[int]
    make: Any
    salt: bytes = b""

    @property
    def name(self) -> str:
        return f"{self.model} {len(self.tokens)}"

    @property
    def where(self) -> dict[str, Any]:
        return {"model": self.model, "salt": self.salt}


PLAIN = Kept("plain", PROMPT, states.sliceable)
BRANCH = Kept("plain", PROMPT[:300] + SHORT[:50], states.sliceable)
TENANT = Kept("plain", SHORT, states.sliceable, SALT)
WINDOW = Kept("window", PROMPT, states.windowed)
STATE = Kept("state", SHORT, states.hybrid)
CODED = Kept("coded", SHORT, states.uneven)
EXACT = (PLAIN, BRANCH, TENANT, WINDOW, STATE)
_coded: list[np.ndarray] = []  # what CODED decodes to, from an undamaged directory


def opened(root: Path, codec: str = "raw", **more: Any) -> PrefixCache:
    values = {"ram": "10MB", "ssd_dir": root, "ssd": LIMIT, "codec": codec, "memory_reserve": 0, **more}
    return PrefixCache(**values)


def store(cache: PrefixCache, kept: Kept) -> None:
    stored = cache.store(kept.tokens, kept.make(kept.tokens), **kept.where)
    assert stored.tokens == len(kept.tokens), (kept.model, stored)


def fill(root: Path) -> Path:
    with opened(root) as cache:
        for kept in EXACT:
            store(cache, kept)
    with opened(root, "turboquant") as cache:
        store(cache, CODED)
        _coded[:] = _arrays(cache.fetch(CODED.tokens, leave=0, **CODED.where)[0])
    return root


def _arrays(made: list[Any]) -> list[np.ndarray]:
    mx.eval([array for layer in made for array in (layer.keys, layer.values)])
    return [np.array(array[:, :, : layer.offset]) for layer in made for array in (layer.keys, layer.values)]


def depth(cache: PrefixCache, kept: Kept, leave: int = 0) -> int:
    """How much of the prompt can be had, which is checked: exact."""
    cache.promote(kept.tokens, **kept.where).result(30)
    made, rest = cache.fetch(kept.tokens, leave=leave, **kept.where)
    if made is None:
        return 0
    found = len(kept.tokens) - len(rest)
    if kept is CODED:
        for ours, theirs in zip(_arrays(made), _coded, strict=True):
            assert np.array_equal(ours, theirs[:, :, :found])
    else:
        states.check(made, kept.tokens[:found])
    return found


def settled(cache: PrefixCache, root: Path) -> None:
    """AssertionError unless all is written and the account is what the disk holds."""
    assert cache.flush(30), cache.stats().ssd
    states.check_integrity(cache)
    stats = cache.stats().ssd
    assert stats is not None
    assert stats.disk == du(root)
    assert stats.used <= LIMIT


def restored(cache: PrefixCache, kept: Kept) -> None:
    """Stored anew. What the index alone knows wrongly shows when it is read next, so the second store may be the one."""
    for _ in range(2):
        store(cache, kept)
        if depth(cache, kept) == len(kept.tokens):
            return
    raise AssertionError(f"{kept.name}: out of reach although it was stored twice")


class Verdict(NamedTuple):
    """`depths` before anything was stored anew, by prompt; `corrupt` images that reads found bad; `reasons` of all that lies
    in quarantine."""

    depths: dict[str, int]
    corrupt: int
    reasons: list[str]


def judge(root: Path, codec: str = "raw", *, ask: tuple[Kept, ...] | None = None) -> Verdict:
    """What became of a damaged directory. AssertionError for a wrong answer, a wrong account, or what stays a miss."""
    ask = ask if ask is not None else (EXACT if codec == "raw" else (CODED,))
    depths = {}
    with opened(root, codec) as cache:
        for kept in ask:
            depth(cache, kept, leave=90)
            depths[kept.name] = depth(cache, kept)
        settled(cache, root)
        stats = cache.stats()
        for kept in ask:
            restored(cache, kept)
        settled(cache, root)
    with opened(root, codec) as cache:
        for kept in ask:
            assert depth(cache, kept) == len(kept.tokens), f"{kept.model}: what was stored anew is out of reach again"
        settled(cache, root)
        assert cache.stats().counters.corrupt == 0, "what was stored anew is set aside again"
    return Verdict(depths, stats.counters.corrupt, reasons(root))


def reasons(root: Path) -> list[str]:
    return [item.reason for item in quarantined(Directory(root))]


def copy(root: Path, to: Path) -> Path:
    shutil.copytree(root, to, symlinks=True)
    return to


def images(root: Path, folder: str) -> list[Path]:
    return sorted((root / folder).rglob("*.safetensors"))


def execute(root: Path, *statements: Any) -> list[Any]:
    """Change the index as whoever has no respect for it would."""
    connection = sqlite3.connect(root / "index.db", isolation_level=None)
    try:
        return [connection.execute(*((s,) if isinstance(s, str) else s)).fetchall() for s in statements]
    finally:
        connection.close()


def remove(root: Path) -> None:
    shutil.rmtree(root)


def uncleanly(root: Path) -> None:
    """As after a crash: the next opening compares index and files."""
    execute(root, "UPDATE meta SET value = '0' WHERE name = 'clean'")


def file_of(root: Path, row: int) -> Path:
    ((kind, key),) = execute(root, ("SELECT kind, key FROM image WHERE id = ?", [row]))[0]
    folder, name = ("rows", "windows", "snapshots")[kind], key.hex()
    return root / folder / name[:2] / f"{name}.safetensors"


class Parts(NamedTuple):
    meta: HeaderFields
    specs: list[Spec]
    tensors: dict[str, np.ndarray]


def parts_of(root: Path, row: int) -> Parts:
    data = np.frombuffer(bytearray(file_of(root, row).read_bytes()), np.uint8)
    table = json.loads(bytes(data[8 : 8 + int(data[:8].view("<u8")[0])]))
    del table["__metadata__"]
    specs = [Spec(name, said["dtype"], tuple(said["shape"])) for name, said in table.items()]
    meta, tensors = Image(data).header()
    return Parts(meta, specs, tensors)


def put_image(root: Path, row: int, parts: Parts) -> None:
    """Put another image into the file of a row, and say so in the index. Zeros take the place of tensors that don't fit."""
    draft = Blueprint(parts.meta, parts.specs).draft()
    for name, array in draft.tensors.items():
        given = parts.tensors.get(name)
        array[...] = given if given is not None and given.shape == array.shape else 0
    image, path = draft.seal(), file_of(root, row)
    path.write_bytes(image.data.tobytes())
    values = [image.checksum, image.nbytes, path.stat().st_blocks * 512, row]
    execute(root, ("UPDATE image SET checksum = ?, nbytes = ?, disk = ? WHERE id = ?", values))


def rows_of(root: Path, model: str, kind: int = 0) -> list[int]:
    """Numbers of the rows of a model's images, the first block first."""
    found = execute(
        root,
        (
            "SELECT image.id FROM image JOIN namespace ON namespace.id = namespace WHERE model = ? AND kind = ? "
            "ORDER BY start, length DESC, image.id",
            [model, kind],
        ),
    )[0]
    return [row for (row,) in found]
