"""What a child does until it dies: three sessions on one directory that store, spill, evict, promote, remove, reconcile.

It says what it was promised (`have`) after the promise, and what it lets go of (`leaving`, `outgrown`) before it does.
A disk that fails is lifted where a server would have met it; then the cache must go on by itself.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from prefixcache import PrefixCache
from prefixcache.blocks.lookup import image_depth, required_images
from prefixcache.ssd import DirectoryError, Entry, reconcile
from tests.crash.prompts import IS_TRANSFORM, LEVELLED, PROMPTS, RAW
from tests.inside import inside
from tools.faults.evidence import before_deletion, du
from tools.faults.shim import Shim

RAM_BYTES, SSD_BYTES = 130_000, 480_000
BASIS_RAM = 1_500_000  # a basis takes a quarter of the RAM at most
PATIENCE = 20.0  # seconds after which a cache that has not resumed never will


class Violation(AssertionError):
    """A promise that did not hold."""


class Scenario:
    def __init__(self, root: str, shim: Shim):
        self.root, self.shim = root, shim
        self.cache: PrefixCache
        self.codec = ""
        self.known: set[str] = set()  # names of what was stored
        self.faults = 0  # that the cache had noticed and outlived
        self._announce_deletions()

    def _announce_deletions(self) -> None:
        """Say which images leave before their deletion is queued. This is a child: the class is its own."""

        def announce(entries: list[Entry], superseded: bool) -> None:
            self.say("outgrown" if superseded else "leaving", [[entry.kind, entry.key.hex()] for entry in entries])

        before_deletion(announce)

    def say(self, word: str, what: Any = None) -> None:
        self.shim.say(json.dumps([word, what], separators=(",", ":")))

    # -- the story ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.open(RAW)
        self.store("short", "window", "state")
        self.lease("short")
        self.flush()
        self.store("grown", "early", "later")  # a tail grows, a window gets rows, a second boundary
        self.flush()
        self.empty_ram()
        self.promote("grown", "window", "later")
        self.store("branch")
        self.flush()
        self.remove("later")
        self.flush()
        self.close()

        self.open(LEVELLED)
        self.store("first", "second")
        self.flush()
        self.empty_ram()
        self.promote("first", "second")
        self.close()

        self.reconcile()
        self.say("unindexed")
        os.unlink(os.path.join(self.root, "index.db"))
        self.reconcile()  # all of it comes back from the files

        self.open(RAW)
        self.lease("window")
        for n in range(3):  # more than the SSD holds: the coldest leave
            self.store(f"filler{n}")
            self.flush()
        self.promote("filler1", "window")
        self.keep(2)
        self.flush()
        self.store("last")
        self.flush()
        self.close()
        self.say("done", self.shim.count)

    # -- the steps ----------------------------------------------------------------------------------------------------

    def open(self, codec: str) -> None:
        self.codec = codec
        try:
            self.cache = self._opened(codec)
        except DirectoryError as error:
            if not self._met():
                raise Violation(f"refused on a disk that works: {error}") from error
            self.cache = self._opened(codec)
        self.cache.check_integrity()

    def _opened(self, codec: str) -> PrefixCache:
        ram = RAM_BYTES + BASIS_RAM * (IS_TRANSFORM and codec == LEVELLED)
        return PrefixCache(
            ram=ram,
            ssd_dir=self.root,
            ssd=SSD_BYTES,
            codec=codec,
            spill="wait",
            spill_wait=1,
            close_timeout=20,
            spill_idle=0,  # its calls are numbered
        )

    def store(self, *names: str) -> None:
        for name in names:
            kind, tokens = PROMPTS[name]
            self.cache.store(tokens, kind.make(tokens), model=kind.model)
            self.known.add(name)
            self.fetch(name)

    def lease(self, name: str) -> None:
        kind, tokens = PROMPTS[name]
        self.cache.lease(self.cache.prompt(tokens, model=kind.model).in_session(name), ttl=3600)

    def fetch(self, name: str) -> None:
        """What RAM has of it is exact."""
        kind, tokens = PROMPTS[name]
        made, rest = self.cache.fetch(tokens, model=kind.model, leave=0)
        if made is not None:
            kind.check(made, tokens[: len(tokens) - len(rest)])

    def flush(self) -> None:
        good = self.cache.flush(PATIENCE)
        if not good:
            if not self.shim.fired:
                raise Violation(f"flush gave False on a disk that works: {self.cache.stats().ssd}")
            self.outlive()
        self.have()

    def outlive(self) -> None:
        """The disk fails: RAM serves and takes. The disk is well again: the cache resumes by itself."""
        self.faults += 1
        for name in sorted(self.known):
            if PROMPTS[name].kind.codec == self.codec:
                self.fetch(name)
        if self.codec == RAW:
            kind, tokens = PROMPTS["probe"]
            self.cache.store(tokens, kind.make(tokens), model=kind.model)
            if self.cache.match(tokens, model=kind.model).ram != len(tokens):
                raise Violation("RAM takes no prompt while the disk fails")
            self.fetch("probe")
        self.shim.lift()
        end = time.monotonic() + PATIENCE
        while not self.cache.flush(PATIENCE):
            if time.monotonic() > end:
                raise Violation(f"the writer does not resume: {self.cache.stats().ssd}")
            time.sleep(0.02)

    def have(self) -> None:
        """Say which images `flush` has made durable, how deep each prompt can be had from them, and which are leased."""
        tiers = inside(self.cache).storage
        self.cache.check_integrity()
        with tiers.lock:
            held = tiers.budget.held()
            if held.total > tiers.budget.limit:
                raise Violation(f"RAM holds {held}, its limit is {tiers.budget.limit}")
            images = [[*_address(slot), slot.checksum] for slot in tiers.graph.slots.values() if slot.disk]
            depths = {}
            for name in sorted(self.known):
                kind, tokens = PROMPTS[name]
                if kind.codec != self.codec:
                    continue
                prompt, last = self.cache.prompt(tokens, model=kind.model), tiers.graph.last
                for namespace in prompt.namespaces():
                    walk = prompt.walk(namespace)
                    depth = image_depth(walk, last, len(tokens))
                    serving = required_images(walk, depth, last) if depth else []
                    if serving and all(slot.disk for slot in serving):
                        depths[name] = [depth, [_address(slot) for slot in serving]]
        leases = {leased.session: leased.tokens for leased in self.cache.leased()}
        self.say("have", {"images": images, "prompts": depths, "leases": leases})
        if (size := du(self.root)) > SSD_BYTES:
            raise Violation(f"the directory takes {size} bytes, its limit is {SSD_BYTES}")

    def empty_ram(self) -> None:
        self.cache.trim_to(0, wait=5)

    def promote(self, *names: str) -> None:
        for name in names:
            kind, tokens = PROMPTS[name]
            depth = self.cache.promote(tokens, model=kind.model).result(PATIENCE)
            if depth != self.cache.match(tokens, model=kind.model).ram and not self.shim.fired:
                raise Violation(f"promote({name}) gave {depth}, and RAM has something else")
            self.fetch(name)

    def remove(self, name: str) -> None:
        kind, tokens = PROMPTS[name]
        self.cache.remove(tokens, model=kind.model)

    def keep(self, sequences: int) -> None:
        self.cache.keep(sequences)

    def close(self) -> None:
        self.cache.close()
        self._met()
        self.say("closed")

    def reconcile(self) -> None:
        report = reconcile(self.root, deep=True)
        if report.exit_code == 2:
            if not self._met():
                raise Violation(f"reconcile on a disk that works: {report.summary()}, {report.findings}")
            report = reconcile(self.root, deep=True)
            if report.exit_code == 2:
                raise Violation(f"reconcile after the fault: {report.summary()}, {report.findings}")
        self.say("reconciled", report.counts)

    def _met(self) -> bool:
        """Whether a fault has been met; it is over then."""
        if not self.shim.fired:
            return False
        self.faults += 1
        self.shim.lift()
        return True


def _address(slot: Any) -> list[str]:
    return [slot.kind, slot.key.hex()]
