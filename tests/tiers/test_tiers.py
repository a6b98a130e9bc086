"""Tiers below RAM behind the protocol: a third one is another object, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from prefixcache.blocks.lookup import image_depth
from prefixcache.blocks.node import RAM, Slot
from prefixcache.image_format import ImageKind
from prefixcache.keys import BLOCK, as_tokens, chain
from prefixcache.settings import Settings
from prefixcache.ssd import Corrupt
from prefixcache.ssd.entries import Entry, NamespaceRow
from prefixcache.tiers.promotion import promote
from prefixcache.tiers.prompt import Prompt, take_hit
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage
from prefixcache.tiers.tier import Tier

IMAGE = 1000
ROOT = bytes(32)


class Plan:
    """In the place of a layout's: rows only, and any image fits."""

    windows = ()
    snapshots = ()
    lossless = True

    def fits(self, image, kind, start, tokens, mask=()):
        return True


class Stub:
    """An image: its size and its name."""

    def __init__(self, key: bytes):
        self.nbytes, self.checksum = IMAGE, key.hex()


class DictTier:
    """A tier whose images are in a dict. Writes wait until `settle`."""

    def __init__(self, name: str, limit: int, written: Callable[[Entry, Exception | None], None]):
        self.name, self.limit, self._written = name, limit, written
        self.images: dict[tuple[ImageKind, bytes], Stub] = {}
        self.waiting: dict[tuple[ImageKind, bytes], tuple[Entry, Stub]] = {}
        self.reads: list[bytes] = []
        self.failed = 0

    @property
    def used(self) -> int:
        return IMAGE * len(self.images.keys() | self.waiting.keys())

    @property
    def stored(self) -> int:
        return self.used

    def entries(self):
        return iter(())

    def max_tick(self):
        return 0

    def has_room(self, nbytes):
        return True

    def footprint(self, nbytes):
        return nbytes

    def write(self, entry, namespace, image):
        self.waiting[entry.address] = entry, image
        return True

    def read(self, entry):
        self.reads.append(entry.key)
        reading: Future = Future()
        if entry.address in self.images:
            reading.set_result(self.images[entry.address])
        else:
            reading.set_exception(Corrupt(entry, "it is not there"))
        return reading

    def delete(self, entries):
        for entry in entries:
            self.images.pop(entry.address, None)
            if (cancelled := self.waiting.pop(entry.address, None)) is not None:
                self._written(cancelled[0], RuntimeError("cancelled"))

    def touch(self, uses):
        pass

    def resize(self, limit):
        self.limit = limit

    def settle(self) -> None:
        while self.waiting:
            address = next(iter(self.waiting))
            entry, image = self.waiting.pop(address)
            self.images[address] = image
            self._written(entry._replace(disk=IMAGE), None)

    def flush(self, timeout=None, since=None):
        self.settle()
        return True


class Turns:
    """In the place of the storage's condition: to wait is to let the tiers write."""

    def __init__(self, served: Served):
        self._served = served

    def notify_all(self) -> None:
        """Nobody waits."""

    def wait(self, timeout: float | None = None) -> None:
        self._served.settle()


class Served:
    """A storage with RAM, a middle tier and a slow one, and what a store does with it."""

    def __init__(self, middle: int = 1 << 30, ram: int = 1 << 20):
        settings = Settings.model_construct(
            ram=ram, ssd_dir=None, ssd=1, policy="lru", ssd_admission="always", spill="drop"
        )
        self.storage = Storage(settings, ram, tiers=3)
        row = NamespaceRow(ROOT, "m", "{}", "{}", 0.0)
        self.namespace = Namespace(row, Plan(), self.storage.graph.tree(ROOT))
        self.tiers: list[DictTier] = []
        for name, limit in (("middle", middle), ("slow", 1 << 40)):
            lower = self.storage.add_tier()
            self.tiers.append(DictTier(name, limit, partial(self.storage.written, lower)))
            self.storage.open_tier(lower, self.tiers[-1], [self.namespace])
        self.storage.changed = Turns(self)

    def prompt(self, *ids: int) -> Prompt:
        tokens = as_tokens([token for token in ids for _ in range(BLOCK)])
        return Prompt(self.storage, lambda: [self.namespace], tokens.tobytes())

    def store(self, *ids: int) -> None:
        storage, graph, node = self.storage, self.storage.graph, self.namespace.tree.root
        reservation = storage.ram.reserve(len(ids) * (IMAGE + 8192))  # first: it may evict
        assert reservation is not None
        with storage.lock, reservation:
            for token in ids:
                tokens = self.prompt(token).token_bytes
                child = graph.grow(node, tokens, reservation)
                assert child is not None
                if child.rows is None:
                    slot = Slot(ImageKind.ROWS, child, chain(node.key, tokens), IMAGE)
                    graph.attach(slot, reservation)
                    graph.place(slot, RAM, image=Stub(slot.key), reservation=reservation)
                node = child
            walk = self.prompt(*ids).walk(self.namespace)
            graph.recency.request_ended([n.rows for n in reversed(walk.path)])

    def settle(self) -> None:
        for tier in self.tiers:
            tier.settle()

    def depths(self, *ids: int) -> list[int]:
        """How many blocks can be hit with each tier and the faster ones."""
        walk = self.prompt(*ids).walk(self.namespace)
        return [image_depth(walk, tier, 1 << 40) // BLOCK for tier in self.storage.graph.tiers]

    def check(self) -> None:
        self.storage.graph.check_integrity()
        for lower, tier in zip(self.storage.lower, self.tiers, strict=True):
            there = {(s.kind, s.key) for s in self.storage.graph.slots.values() if s.is_in(lower.number)}
            assert there == tier.images.keys()


def test_a_dict_is_a_tier():
    tier: Tier = Served().tiers[0]
    assert tier.used == 0


def test_what_is_durable_goes_on_to_the_tier_below():
    served = Served()
    served.store(1, 2)
    assert served.depths(1, 2) == [2, 2, 2]
    assert served.storage.spilling.drain(5)
    assert [len(tier.images) for tier in served.tiers] == [2, 2]
    served.check()


def test_a_prompt_that_only_the_slowest_tier_has_is_promoted_from_it():
    served = Served(middle=2 * IMAGE)
    served.store(1, 2)
    assert served.storage.spilling.drain(5)
    served.store(3, 4)
    assert served.storage.spilling.drain(5)
    served.storage.ram.trim(0, 0)
    assert served.depths(1, 2) == [0, 0, 2]
    assert served.depths(3, 4) == [0, 2, 2]
    assert promote(served.storage, served.prompt(1, 2), 0) == 2 * BLOCK
    assert served.depths(1, 2) == [2, 2, 2]
    assert promote(served.storage, served.prompt(3, 4), 0) == 2 * BLOCK
    assert [len(tier.reads) for tier in served.tiers] == [2, 2]
    served.check()


def test_what_one_tier_lost_is_read_from_the_next():
    served = Served()
    served.store(1, 2)
    assert served.storage.spilling.drain(5)
    served.storage.ram.trim(0, 0)
    served.tiers[0].images.clear()
    assert promote(served.storage, served.prompt(1, 2), 0) == 0  # found out by the read
    assert promote(served.storage, served.prompt(1, 2), 0) >= BLOCK
    assert promote(served.storage, served.prompt(1, 2), 0) == 2 * BLOCK
    assert served.tiers[1].reads


def test_a_promotion_whose_check_raises_ends_and_so_do_those_that_wait_for_it(monkeypatch):
    served = Served()
    served.store(1, 2)
    assert served.storage.spilling.drain(5)
    served.storage.ram.trim(0, 0)
    before = served.storage.budget.held()

    def broken(*_args):
        raise MemoryError

    monkeypatch.setattr(Plan, "fits", broken)
    assert promote(served.storage, served.prompt(1, 2), 0) == 0
    assert served.storage.budget.held() == before
    assert all(slot.reading is None for slot in served.storage.graph.slots.values())
    monkeypatch.undo()
    assert promote(served.storage, served.prompt(1, 2), 0) == 2 * BLOCK
    served.check()


class TiersMachine(RuleBasedStateMachine):
    """Anything in any order: nothing is promised that can't be had, and the tiers hold what the graph says."""

    def __init__(self):
        super().__init__()
        self.served = Served(middle=6 * IMAGE, ram=80_000)

    ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)

    @rule(ids=ids)
    def store(self, ids):
        self.served.store(*ids)

    @rule(ids=ids)
    def fetch(self, ids):
        found = take_hit(self.served.storage, self.served.prompt(*ids), 0)
        if found is not None:
            assert all(node.rows.image is not None for node in found.walk.nodes if node.start < found.depth)
            self.served.storage.unpin(found.pinned)

    @rule(ids=ids)
    def promote(self, ids):
        wanted = self.served.depths(*ids)[-1] * BLOCK
        assert promote(self.served.storage, self.served.prompt(*ids), 0) == wanted

    @rule(nbytes=st.integers(0, 40_000))
    def trim(self, nbytes):
        self.served.storage.ram.trim(nbytes, 0)

    @rule(tier=st.integers(0, 1))
    def settle(self, tier):
        self.served.tiers[tier].settle()

    @rule(ids=ids)
    def discard(self, ids):
        walk = self.served.prompt(*ids).walk(self.served.namespace)
        if walk.path and not walk.path[-1].children:
            self.served.storage.lower.discard(walk.path[-1].rows)

    @invariant()
    def sound(self):
        self.served.check()


def test_three_tiers_in_any_order():
    run_state_machine_as_test(
        TiersMachine,
        settings=settings(max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )
