"""The request path on a disk that stands still: a call that waited for it would wait for ever, and the run would hang."""

from __future__ import annotations

import json

from prefixcache import PrefixCache
from tests.crash.prompts import PROMPTS, RAW
from tests.crash.scenario import PATIENCE, Violation
from tests.inside import inside
from tools.faults.shim import EVERY, STALL, Shim


def stalled(root: str, shim: Shim, at: int) -> None:
    """From the disk's call `at` on none comes back until the requests are done."""
    with PrefixCache(ram=130_000, ssd_dir=root, ssd="4MB", codec=RAW, spill="drop", close_timeout=20) as cache:

        def store(name: str) -> None:
            kind, tokens = PROMPTS[name]
            cache.store(tokens, kind.make(tokens), model=kind.model)

        def fetch(name: str) -> int:
            kind, tokens = PROMPTS[name]
            made, rest = cache.fetch(tokens, model=kind.model, leave=0)
            if made is not None:
                kind.check(made, tokens[: len(tokens) - len(rest)])
            return len(tokens) - len(rest)

        for name in ("grown", "window", "state"):
            store(name)
        if not cache.flush(PATIENCE):
            raise Violation(f"flush gave False on a disk that works: {cache.stats().ssd}")
        cache.trim_to(0, wait=5)
        shim.again(STALL, at, EVERY)
        kind, tokens = PROMPTS["grown"]
        promotion = cache.promote(tokens, model=kind.model)
        for n in range(3):
            store(f"filler{n}")
            for name in ("window", "state", f"filler{n}"):
                fetch(name)
        store("probe")
        if fetch("probe") != len(PROMPTS["probe"].tokens):
            raise Violation("RAM takes no prompt while the disk stands still")
        cache.remove(PROMPTS["filler0"].tokens, model="dense")
        cache.trim_to(60_000, wait=0)
        cache.flush(0.01)
        cache.check_integrity()
        held = cache.stats()
        if held.ram_held > held.ram_limit:
            raise Violation(f"RAM holds {held.ram_held} bytes, its limit is {held.ram_limit}")
        shim.lift()
        promotion.result(PATIENCE)
        fetch("grown")
        if not cache.flush(PATIENCE):
            raise Violation(f"the writer does not resume: {cache.stats().ssd}")
        tiers = inside(cache).storage
        with tiers.lock:
            images = [[slot.kind, slot.key.hex(), slot.checksum] for slot in tiers.graph.slots.values() if slot.disk]
        shim.say(json.dumps(["have", {"images": images, "prompts": {}}]))
