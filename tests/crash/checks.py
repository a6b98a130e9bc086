"""What must be true of a directory after a crash: what was promised is there and exact, nothing else is wrong.

`promised` works the scenario's words into promises; `check` opens the directory, as the next process would, and holds it
to them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prefixcache import PrefixCache
from prefixcache.ssd import Entry, reconcile
from prefixcache.ssd.directory import Directory
from tests.crash.prompts import LEVELLED, PROMPTS, RAW
from tests.inside import inside
from tools.faults.evidence import before_deletion, du, image_fault


class Wrong(AssertionError):
    """Something was had that is not what was stored."""


class Lost(AssertionError):
    """Something was promised and can't be had."""


class Debris(AssertionError):
    """Index, ledger and files do not agree after an opening, or something was left lying about."""


WAIT = 30.0


def promised(words: Iterable[list[Any]]) -> dict[str, Any]:
    """What the last words before a crash bind to: checksums by address, depths by prompt, and of those that are leased."""
    images: dict[str, str] = {}
    prompts: dict[str, tuple[int, set[str]]] = {}
    leases: dict[str, int] = {}
    replaced: set[str] = set()  # prompts that are served by successors, whose names were not said yet
    for word, what in words:
        if word == "have":
            images |= {f"{kind} {key}": checksum for kind, key, checksum in what["images"]}
            fresh = {
                name: (depth, {f"{kind} {key}" for kind, key in needs})
                for name, (depth, needs) in what["prompts"].items()
            }
            prompts |= fresh
            replaced -= fresh.keys()
            leases = what.get("leases", {})
        elif word == "unindexed":
            leases = {}
        elif word in ("leaving", "outgrown"):
            gone = {f"{kind} {key}" for kind, key in what}
            images = {address: checksum for address, checksum in images.items() if address not in gone}
            for name in [name for name, (_, needs) in prompts.items() if needs & gone]:
                if word == "leaving":
                    del prompts[name]
                else:
                    replaced.add(name)
            if word == "leaving":
                for name in replaced:
                    prompts.pop(name, None)
                replaced.clear()
    return {
        "images": images,
        "prompts": {name: depth for name, (depth, _) in prompts.items()},
        "leases": {name: tokens for name, tokens in leases.items() if name in prompts},
    }


def check(root: str, promises: dict[str, Any], say: Callable[[str], None], *, strict: bool = True) -> dict[str, Any]:
    """Wrong, Lost or Debris; else what was looked at.

    `strict`: nothing has failed, so nothing may have been set aside either.
    """
    images, prompts = promises["images"], promises["prompts"]
    missing, nbytes, fetched = dict(images), 0, 0
    with outgrown_at_opening(say) as outgrown:
        for codec in (LEVELLED, RAW):
            with opened(root, codec) as cache:
                settled(cache, root)
                leased(cache, promises["leases"])
                nbytes += held_to(cache, root, missing, outgrown)
                fetched += fetched_from(cache, codec, prompts)
                if codec == RAW:
                    stored_anew(cache, "afterwards")
    if strict and (set_aside := os.listdir(os.path.join(root, "quarantine"))):
        raise Debris(f"set aside after a crash: {set_aside}")
    for dry_run in (True, False):
        report = reconcile(root, dry_run=dry_run, deep=True)
        if not report.clean:
            raise Debris(f"reconcile has found {report.summary()}: {report.findings}")
    with opened(root, RAW) as cache:
        if promoted(cache, "afterwards") != len(PROMPTS["afterwards"].tokens):
            raise Lost("a store afterwards was not kept")
    return {"images": len(images), "nbytes": nbytes, "fetched": fetched}


def opened(root: str, codec: str) -> PrefixCache:
    """With room for all: nothing leaves that the crash has left."""
    return PrefixCache(ram="64MB", ssd_dir=root, ssd="256MB", codec=codec)


def settled(cache: PrefixCache, root: str) -> None:
    """The tree, the ledger, the index and the disk agree; no debris."""
    assert inside(cache).ssd is not None
    if not cache.flush(WAIT):
        raise Lost(f"flush gave False on a disk that works: {cache.stats().ssd}")
    try:
        cache.check_integrity()
        inside(cache).ssd.check_integrity()
    except AssertionError as error:
        raise Debris(f"check_integrity: {error}") from error
    stats = inside(cache).ssd.stats()
    if stats.disk != du(root):
        raise Debris(f"{stats} says {stats.disk} bytes, du {du(root)}")
    if left := os.listdir(os.path.join(root, "tmp")):
        raise Debris(f"in tmp/: {left}")


def leased(cache: PrefixCache, leases: dict[str, int]) -> None:
    """What was leased is, as deep as it was."""
    here = {leased.session: leased.tokens for leased in cache.leased()}
    for name, tokens in leases.items():
        if here.get(name) != tokens:
            raise Lost(f"{name} was leased to {tokens} tokens, and is to {here.get(name)}")


def held_to(cache: PrefixCache, root: str, missing: dict[str, str], outgrown: set[str]) -> int:
    """Every image that was promised is in the index and on the disk, byte for byte. Returns the bytes read."""
    assert inside(cache).ssd is not None
    here = {f"{entry.kind} {entry.key.hex()}": entry for entry in inside(cache).ssd.entries()}
    nbytes = 0
    for address, checksum in missing.items():
        if address in outgrown:
            continue
        if address not in here:
            raise Lost(f"{address} was promised and is not in the index")
        if here[address].checksum != checksum:
            raise Wrong(f"{address} is another image than was promised")
    directory = Directory(root)
    for address, entry in here.items():
        if fault := image_fault(directory, entry.address, entry.checksum):
            raise Wrong(f"{address}: {fault}")
        nbytes += entry.nbytes
    return nbytes


def fetched_from(cache: PrefixCache, codec: str, prompts: dict[str, int]) -> int:
    """Every prompt is had exactly or not at all, and as deep as was promised. Returns how many were had."""
    had = 0
    for name, (kind, tokens) in PROMPTS.items():
        if kind.codec != codec:
            continue
        depth = promoted(cache, name)
        if depth < prompts.get(name, 0):
            raise Lost(f"{name} is had to {depth} tokens, {prompts[name]} were promised")
        made, rest = cache.fetch(tokens, model=kind.model, leave=0)
        if len(tokens) - len(rest) != depth:
            raise Lost(f"{name}: {depth} tokens are in RAM, fetch leaves {len(rest)}")
        if made is not None:
            try:
                kind.check(made, tokens[:depth])
            except AssertionError as error:
                raise Wrong(f"{name} to {depth} tokens: {error}") from error
            had += 1
    return had


def promoted(cache: PrefixCache, name: str) -> int:
    kind, tokens = PROMPTS[name]
    match = cache.match(tokens, model=kind.model)
    depth = cache.promote(tokens, model=kind.model).result(WAIT)
    if depth != match.ssd:
        raise Lost(f"{name}: match says {match}, promote gave {depth}")
    return depth


def stored_anew(cache: PrefixCache, name: str) -> None:
    kind, tokens = PROMPTS[name]
    cache.store(tokens, kind.make(tokens), model=kind.model)
    if not cache.flush(WAIT):
        raise Lost(f"a store afterwards was not written: {cache.stats().ssd}")


@contextlib.contextmanager
def outgrown_at_opening(say: Callable[[str], None]) -> Iterator[set[str]]:
    """Addresses of shorter twins that an opening deletes beside their longer ones: the crash came in between."""
    gone: set[str] = set()

    def announce(entries: list[Entry], superseded: bool) -> None:
        if superseded:
            gone.update(f"{entry.kind} {entry.key.hex()}" for entry in entries)
            say(json.dumps(["outgrown", [[entry.kind, entry.key.hex()] for entry in entries]]))

    undo = before_deletion(announce)
    try:
        yield gone
    finally:
        undo()
