"""What is done to the files behind the cache's back. Which files is drawn from the names that are there."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress

from prefixcache.ssd.directory import Directory
from prefixcache.ssd.entries import Address
from prefixcache.ssd.index import IndexFiles

Mark = Callable[[Address], None]  # called before an image is touched


def images(directory: Directory) -> dict[Address, str]:
    """The image files by address, in the order of their names."""
    found = {address: item.path for address, item in directory.files() if address is not None}
    return dict(sorted(found.items()))


def damage(directory: Directory, kind: str, count: int, chance: random.Random, mark: Mark) -> int:
    """flip, truncate, delete or swap some images; how many files it came to. They may go away meanwhile."""
    there = images(directory)
    chosen = chance.sample(list(there), min(count, len(there)))
    if kind == "swap":
        return sum(_swap(directory, there, address, chance, mark) for address in chosen[:2])
    work = {"flip": _flip, "truncate": _truncate, "delete": _delete}[kind]
    done = 0
    for address in chosen:
        mark(address)
        with suppress(FileNotFoundError):
            work(there[address], chance)
            done += 1
    return done


def _flip(path: str, chance: random.Random) -> None:
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        at = chance.choice((chance.randrange(8), chance.randrange(size), chance.randrange(size), size - 1))
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ (1 << chance.randrange(8))]))


def _truncate(path: str, chance: random.Random) -> None:
    os.truncate(path, int(os.stat(path).st_size * chance.random() ** 2))


def _delete(path: str, chance: random.Random) -> None:
    os.unlink(path)


def _swap(directory: Directory, there: dict[Address, str], one: Address, chance: random.Random, mark: Mark) -> int:
    """With another that takes as many blocks: the sizes of rows and files stay true."""
    with suppress(FileNotFoundError, IndexError):
        blocks = {address: os.stat(path).st_blocks for address, path in there.items()}
        other = chance.choice([a for a in there if a != one and blocks[a] == blocks[one]])
        mark(one)
        mark(other)
        aside = f"{directory.root}.swapped"
        os.rename(there[one], aside)
        try:
            os.rename(there[other], there[one])
        finally:
            os.rename(aside, there[other])
        return 2
    return 0


def delete_index(directory: Directory, chance: random.Random) -> None:
    files = IndexFiles.of(directory.index)
    for path in files if chance.random() < 0.5 else files[:1]:
        path.unlink(missing_ok=True)


def damage_index(directory: Directory, chance: random.Random) -> None:
    """Garbage in a page, or an end that is missing."""
    path = directory.index
    if not path.exists():
        return
    size = path.stat().st_size
    if chance.random() < 0.3:
        os.truncate(path, chance.choice((0, 50, size // 2)))
        return
    with open(path, "r+b") as file:
        file.seek(chance.randrange(max(size // 4096, 1)) * 4096)
        file.write(chance.randbytes(4096))


def leave_debris(directory: Directory, chance: random.Random) -> None:
    """What a crashed writer leaves."""
    with suppress(FileNotFoundError):
        (directory.tmp / f"{chance.randrange(1000)}.safetensors").write_bytes(b"torn")
