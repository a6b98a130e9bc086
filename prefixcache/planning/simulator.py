"""The cache at work on sizes: `simulate` runs a trace through the graph, the tiers, the stores that serve requests.

A store makes images that have a size and nothing else, and the SSD is an account (`simulated_ssd`). All that decides what is
kept and what is evicted is the code of `prefixcache.blocks`, `prefixcache.tiers` and `store_fetch_remove.store`, so a real
run of the same requests, whose writer keeps up, hits and writes the same.

The SSD's writer has its turn after each batch of blocks that a store encodes, after each promotion and each request.
Decision 0037 says why.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Any, NamedTuple

import numpy as np

from prefixcache.blocks.lookup import image_depth
from prefixcache.blocks.node import RAM, Node, Slot
from prefixcache.codecs import Codec
from prefixcache.codecs.transform.codec import Calibrated
from prefixcache.image_format import SNAPSHOT, Image, ImageKind, Spec
from prefixcache.keys import TOKEN_BYTES, canonical, root_key
from prefixcache.layers.finite import NotFinite
from prefixcache.layers.image_layout import Plan, Words
from prefixcache.layers.snapshots import State
from prefixcache.memory import collector_at_rest
from prefixcache.planning.advice import Served
from prefixcache.planning.model import ModelState, held_rows
from prefixcache.planning.outcome import Cell, CellOutcome
from prefixcache.planning.simulated_ssd import SimulatedImage, SimulatedSsd
from prefixcache.planning.sizes import StateSizes
from prefixcache.settings import Settings
from prefixcache.ssd.entries import NamespaceRow
from prefixcache.store_fetch_remove.hot import add_hot, hot_blocks, hot_hit, tokens_to_keep
from prefixcache.store_fetch_remove.jobs import ImageJob
from prefixcache.store_fetch_remove.leases import Leases
from prefixcache.store_fetch_remove.namespaces import reserve_basis
from prefixcache.store_fetch_remove.store import StoreCall
from prefixcache.tiers.idle import LOOKS, PERIOD, Idle
from prefixcache.tiers.parting import states_on_the_way
from prefixcache.tiers.promotion import ReadableTier, promote
from prefixcache.tiers.prompt import Hit, Prompt, count_hit, take_hit
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage
from prefixcache.trace.reading import Request

PROGRESS_EVERY = 64  # requests
COUNTED = ("stored_tokens", "stored_bytes", "evicted", "ssd_evicted", "dropped", "declined", "unkept_tokens")
COUNTED_OF_SSD = ("written_files", "written_bytes", "read_files", "read_bytes")
MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio: odd, and products of near numbers stay apart


class RememberedPlan(Plan):
    """A plan that gives equal specs as one object, so that a size is computed once."""

    def __init__(self, layout: dict[str, Any], codec: Codec):
        super().__init__(layout, codec)
        self._rows_specs: dict[tuple[int, int, bool], list[Spec]] = {}
        self._window_specs: dict[tuple[Any, ...], list[Spec]] = {}
        self._plain = max([self.sink_tokens, *(window.keep for window in self.windows)])

    def rows_specs(self, start: int, tokens: int, coded: bool, words: Words | None = None) -> list[Spec]:
        key = min(start, self._plain), tokens, coded  # from `_plain` on all blocks have the same tensors
        if key not in self._rows_specs:
            self._rows_specs[key] = super().rows_specs(start, tokens, coded)
        return self._rows_specs[key]

    def window_specs(
        self, mask: tuple[int, ...], start: int, coded: bool, words: Sequence[Words] | None = None
    ) -> list[Spec]:
        key = *(m.bit_count() for m in mask), *(m & self.sunk(start) for m in mask), coded
        if key not in self._window_specs:
            self._window_specs[key] = super().window_specs(mask, start, coded)
        return self._window_specs[key]


class SizeMaker:
    """The `Maker` of one store, of sizes: of a window it has what a live cache holds after the last token."""

    has_codes = False
    recoded = 0
    not_finite: NotFinite | None = None

    def __init__(self, plan: Plan, sizes: StateSizes, ssd: SimulatedSsd | None, limit: int, given: int):
        """Of the `limit` tokens to store the first `given` have the rows that a fetch gives."""
        self._plan, self._sizes, self._ssd, self._limit = plan, sizes, ssd, limit
        self.since: int | None = None if plan.lossless else given
        self.state: State | None = sizes.snapshot(limit) if plan.snapshots else None
        self.is_written_back = True

    def held(self, window: int) -> tuple[tuple[int, int], ...]:
        return held_rows(self._plan.windows[window], self._limit)

    def coded_otherwise(self, first: int, last: int, tensors: dict[str, np.ndarray]) -> int:
        return 0

    def blueprint(
        self, kind: ImageKind, key: bytes, parent: bytes, start: int, specs: list[Spec], extra: str = "{}"
    ) -> Any:
        tensors = tuple(spec.shape for spec in specs) if kind == SNAPSHOT else id(specs)
        nbytes = self._sizes.image_bytes(kind, start, (tensors, len(extra)), lambda: (specs, extra))
        return SimulatedImage(nbytes, "", extra)  # of whose size alone is asked before it is made

    def encoded(self, jobs: list[ImageJob]) -> list[ImageJob]:
        return jobs

    def make(self, jobs: list[ImageJob]) -> Callable[[], list[Any]]:
        if self._ssd is not None:
            self._ssd.run_writer()
        return lambda: [job.blueprint for job in jobs]

    def put_back(self) -> None:
        """Nothing is decoded."""

    def decode_known(self, nodes: Sequence[Node], snapshot: Image | None) -> None:
        """Note what can't be decoded: what the SSD alone has isn't read for it."""
        images = [slot.image for node in nodes for slot in (node.rows, *node.windows) if slot is not None]
        self.is_written_back &= all(image is not None for image in images)


@dataclass
class SimulatedHotState:
    """In the place of a hot prompt's arrays."""

    nbytes: int
    is_sliceable: bool


class WriterTurn(Condition):
    """A storage's condition: to wait for it is to let the simulated writer work."""

    def __init__(self, lock: Any, run_writer: Callable[[], None]):
        super().__init__(lock)
        self._run_writer = run_writer

    def wait(self, timeout: float | None = None) -> bool:
        self._run_writer()
        return True


class SizeSource:
    """Reads sizes from a storage's tiers, and from `more` that nothing spills to."""

    def __init__(self, storage: Storage, more: Sequence[ReadableTier]):
        self._storage, self._more = storage, more

    def tier_of(self, slot: Slot) -> ReadableTier | None:
        return next((tier for tier in (*self._storage.lower, *self._more) if slot.is_in(tier.number)), None)

    def fits(self, slot: Slot, image: Image) -> bool:
        """Return True: a size has no tensors that could be wrong."""
        return True


class Given(NamedTuple):
    """What fetches were given: `hot` tokens of hot prompts, bytes that promotions `read` from the SSD and from a remote tier
    (`remote_read`), and the round `trips` to it that they waited for.
    """

    hot: int
    read: int
    remote_read: int = 0
    trips: int = 0


class Simulation:
    """A cache of a model's state, at first empty. `more` are tiers that it can read from, below its own, and to which nothing
    spills; the first of them has the number `last_tier`. Not thread-safe. ValueError where RAM has no size.
    """

    def __init__(self, state: ModelState, codec: Codec, cell: Cell, more: Sequence[ReadableTier] = ()):
        if cell.ram <= 0 or cell.ssd < 0:
            raise ValueError(f"ram={cell.ram}, ssd={cell.ssd}: nothing could be kept; give ram a size")
        settings = Settings.model_construct(
            ram=cell.ram,
            ssd_dir=None,
            ssd=cell.ssd,
            codec=codec,
            policy=cell.policy,
            ssd_admission=cell.admission,
            spill=cell.spill,
            spill_idle=cell.idle,
            hot=cell.hot,
        )
        self.ssd: SimulatedSsd | None = None
        self.storage = storage = Storage(settings, settings.ram_bytes(0), last_tier(cell) + len(more))
        storage.changed = WriterTurn(storage.lock, self.run_writer)
        if isinstance(codec, Calibrated) and reserve_basis(storage, codec.basis, 0) is None:
            codec = codec.otherwise
        plan = RememberedPlan(state.layout, codec)
        sizes = StateSizes(state, codec)
        layout, spec = canonical(state.layout), canonical(codec.spec())
        root = root_key(sizes.model, codec.spec(), state.layout, b"")
        row = NamespaceRow(root, sizes.model, spec, layout, 0.0)
        namespace = Namespace(row, plan, storage.graph.tree(root, plan.windows, bool(plan.snapshots)))
        storage.namespaces[root] = namespace
        if cell.ssd:
            tier = storage.add_tier()
            queue_bytes = storage.settings.queue_bytes(storage.budget.limit)
            self.ssd = SimulatedSsd(cell.ssd, queue_bytes, partial(storage.written, tier))
            storage.open_tier(tier, self.ssd, [namespace])
        self.namespace = namespace
        self.source = SizeSource(storage, more)
        self._sizes, self._cell, self._now = sizes, cell, 0.0
        self._idle = Idle(storage, lambda: self._now)
        self._leases = Leases(storage)
        self._leases.clock = lambda: self._now

    def prompt(self, token_bytes: bytes) -> Prompt:
        """Return a prompt of one request's tokens (raw int64 bytes), for `fetch` and `store`."""
        return Prompt(self.storage, lambda: [self.namespace], token_bytes)

    def fetch(self, prompt: Prompt) -> int:
        """Promote and look up, and return how many tokens were hit: not the last, which is always computed."""
        self.promote(prompt)
        hot, hit = hot_hit(self.storage, prompt, 1), take_hit(self.storage, prompt, 1)
        depth = max(hot.depth if hot is not None else 0, hit.depth if hit is not None else 0)
        if hot is None and hit is not None:
            hot = hot_blocks(self.storage, prompt, hit.namespace, depth)
        count_hit(self.storage, prompt, depth, hot.depth if hot is not None else 0)
        prompt.given_rows.tokens = prompt.given_rows.state = depth
        if hit is not None:
            self.on_hit(hit)
            self.storage.unpin(hit.pinned)
        return depth

    def promote(self, prompt: Prompt) -> None:
        """Promote from the SSD, where it has more than RAM."""
        if self.ssd is None:
            return
        deepest = prompt.deepest(self.storage.graph.last)
        assert deepest is not None
        if deepest.depth > image_depth(deepest.walk, RAM, len(prompt)):
            promote(self.storage, prompt, 0, source=self.source)
            self.run_writer()

    def rest(self, until: float) -> None:
        """Let time pass: nobody asks until then (seconds)."""
        if until - self._now > LOOKS * PERIOD:
            while self._idle.write():
                self.run_writer()
        self._now = until

    def on_hit(self, hit: Hit) -> None:
        """Hear of a hit, which is pinned now. A fleet's machine uploads it."""

    def store(self, prompt: Prompt) -> None:
        """Keep what is new of a prompt, and its state hot. The stored rows are those that its answer is made on."""
        if self.namespace.plan.snapshots:
            for point in states_on_the_way(prompt.given_rows.tokens, len(prompt)):
                self._store(prompt.first(point))
        self._store(prompt)
        if self.storage.hot.limit:
            self._keep_hot(prompt)
        if self._cell.lease:  # decision 0057 says why of each prompt
            self._leases.add(prompt.first(self._cell.lease_tokens or len(prompt)), self._cell.lease)
        self.run_writer()

    def _store(self, prompt: Prompt) -> None:
        maker = SizeMaker(self.namespace.plan, self._sizes, self.ssd, len(prompt), prompt.given_rows.tokens)
        StoreCall(self.storage, self.namespace, prompt, len(prompt), maker).run()

    def _keep_hot(self, prompt: Prompt) -> None:
        tokens = tokens_to_keep(self.storage, self.namespace, prompt, len(prompt))
        plan, nbytes = self.namespace.plan, self._sizes.hot_bytes(tokens) if tokens else 0
        state = SimulatedHotState(nbytes, not (plan.windows or plan.snapshots))
        add_hot(self.storage, self.namespace, prompt.first(tokens), nbytes, lambda: state)

    def given_so_far(self) -> Given:
        """Return what all fetches were given so far."""
        return Given(self.storage.counters.hot_hit_tokens, self.ssd.read_bytes if self.ssd is not None else 0)

    def run_writer(self) -> None:
        """Give the SSD's writer its turn."""
        if self.ssd is not None:
            self.ssd.run_writer()

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant of the graph, of the budget or of the hot prompts does not hold."""
        self.storage.graph.check_integrity()
        self.storage.hot.check_integrity()
        self._leases.check_integrity()


def last_tier(cell: Cell) -> int:
    """Return how many tiers a simulation of this size has: the number of the first of `more`."""
    return 2 if cell.ssd else 1


def simulate(
    requests: Iterable[Request],
    state: ModelState,
    codec: Codec,
    cell: Cell,
    *,
    block: int = 512,
    progress: Callable[[int], None] | None = None,
) -> CellOutcome:
    """Serve these requests, one after the other, with a cache of this size, and return what came of it. An id stands for
    `block` tokens.

    `progress` is told the requests done, now and then. Raises ValueError where RAM has no size.
    """
    run = Simulation(state, codec, cell)
    served = replay(((request, run) for request in requests), block, progress)
    counts: dict[str, Any] = {name: getattr(run.storage.counters, name) for name in COUNTED}
    counts |= {name: getattr(run.ssd, name, 0) for name in COUNTED_OF_SSD}
    return CellOutcome(
        cell=cell,
        served=served,
        ram_tokens=run.storage.counters.ram_hit_tokens,
        hot_tokens=run.storage.counters.hot_hit_tokens,
        ssd_tokens=run.storage.counters.ssd_hit_tokens,
        ram_peak=run.storage.budget.peak,
        ssd_peak=run.ssd.peak if run.ssd is not None else 0,
        **counts,
    )


def replay(
    calls: Iterable[tuple[Request, Simulation]], block: int, progress: Callable[[int], None] | None = None
) -> Served:
    """Serve requests as `simulate` does, each by the simulation that stands with it. Return what those that fetched were
    given.
    """
    asked, hit = array("q"), array("q")
    given = [array("q") for _ in Given._fields]
    seconds, prompts = 0.0, Prompts(block)
    with collector_at_rest():
        for number, (request, machine) in enumerate(calls):
            prompt = machine.prompt(prompts.token_bytes(request))
            machine.rest(request.time)
            seconds = request.time  # of a trace it begins at 0
            if request.call != "store" and request.tokens:
                before = machine.given_so_far()
                hit.append(machine.fetch(prompt))
                asked.append(request.tokens)
                for counts, new, old in zip(given, machine.given_so_far(), before, strict=True):
                    counts.append(new - old)
            if request.call != "fetch" and len(prompt):
                machine.store(prompt)
            if progress is not None and number % PROGRESS_EVERY == 0:
                progress(number)
    return Served(seconds, *(np.array(counts, np.int64) for counts in (asked, hit, *given)))


class OwnedTokens(NamedTuple):
    """Tokens of a block, up to position `end`: those that stand for the id `owner`."""

    owner: int
    end: int


class Prompts:
    """The tokens that stand for a trace's requests, asked for in its order.

    What an id stands for is settled where the trace has it first, as the block may be in the cache from then on: `block`
    tokens of its own, or, of a block that has grown, the tail's and then its own. Takes some 100 bytes an id of a recording.
    """

    def __init__(self, block: int):
        self._block = block
        self._settled: set[int] = set()
        self._grown: dict[int, list[OwnedTokens]] = {}

    def token_bytes(self, request: Request) -> bytes:
        """Return the tokens of the trace's next request (raw int64 bytes)."""
        if request.call != "request" or request.grown:
            self._settle(request)
        if self._grown.keys().isdisjoint(request.ids):
            return tokens_of(request, self._block)
        owners: list[int] = []
        counts: list[int] = []
        for block_id in request.ids:
            start = 0
            for owner, end in self._parts_of(block_id):
                owners.append(owner)
                counts.append(end - start)
                start = end
        return _joined(owners, counts, request.tokens)

    def _settle(self, request: Request) -> None:
        for index, tail, tokens in request.grown:
            block_id = request.ids[index]
            if block_id not in self._settled:
                self._settled.update((block_id, tail))
                parts = self._parts_of(tail)
                whole = [part for part in parts if part.end < tokens]
                cut = OwnedTokens(parts[len(whole)].owner, tokens)
                self._grown[block_id] = [*whole, cut, OwnedTokens(block_id, self._block)]
        self._settled.update(request.ids)

    def _parts_of(self, block_id: int) -> list[OwnedTokens]:
        return self._grown.get(block_id) or [OwnedTokens(block_id, self._block)]


def tokens_of(request: Request, block: int) -> bytes:
    """Return tokens (raw int64 bytes) for a request's ids: each id has `block` of its own, and the last may be cut."""
    return _joined(request.ids, [block] * len(request.ids), request.tokens)


def _joined(owners: Sequence[int], counts: Sequence[int], limit: int) -> bytes:
    """Return for each owner so many tokens, a marker and then zeros; at most `limit` in all."""
    markers = _markers(owners)
    zeros = bytes((max(counts, default=1) - 1) * TOKEN_BYTES)  # a slice of all of it is no copy
    pieces: list[bytes] = []
    for at, count in enumerate(counts):
        count = min(count, limit)
        if not count:
            break
        limit -= count
        pieces += markers[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES], zeros[: (count - 1) * TOKEN_BYTES]
    return b"".join(pieces)


def _markers(ids: Sequence[int]) -> bytes:
    """Return a token for each id (raw int64 bytes): the upper bits of the mixed id, odd, so that none is the zero that others
    have in its place. Ids below 2**53 never share one; of others, one pair in 2**62.
    """
    mixed = np.array(ids, np.uint64) * MIXER
    return (mixed >> np.uint64(1) | np.uint64(1)).astype("<i8").tobytes()
