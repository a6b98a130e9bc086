"""Several machines that share a remote tier, simulated: `simulate_fleet`.

Each machine is a `Simulation` of its own; the remote is an account of names and sizes. What is found there stands in the
machine's graph for the length of one lookup, as a last tier below the others: so the cache's own lookup says how deep a
prompt can be hit with it and which images that reads, and the cache's own promotion brings them. Sending costs no time:
no request waits for it. Decision 0036 says why.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prefixcache.blocks.graph import NODE_BYTES
from prefixcache.blocks.lookup import image_depth, required_images
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot
from prefixcache.codecs import Codec
from prefixcache.image_format import ROWS, SNAPSHOT, ImageKind
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Fleet, FleetOutcome
from prefixcache.planning.routing import machines_of
from prefixcache.planning.simulated_ssd import Done, SimulatedImage
from prefixcache.planning.simulator import Given, Simulation, last_tier, replay
from prefixcache.tiers.promotion import PATIENCE, promote
from prefixcache.tiers.prompt import Deepest, Hit, Prompt
from prefixcache.trace.reading import Request

Name = tuple[ImageKind, bytes]  # an image's kind and key: what it is called on every machine


class RemoteImage(NamedTuple):
    """What the remote has of an image. `parent` is the key of the block before it, of a window that of its own block.
    `tokens` are those of a tail, or those of a snapshot behind its parent; whole blocks have none here.
    """

    kind: ImageKind
    key: bytes
    parent: bytes
    nbytes: int
    tokens: bytes = b""
    mask: tuple[int, ...] = ()
    extra: str = "{}"

    @property
    def name(self) -> Name:
        return self.kind, self.key


class SimulatedRemote:
    """What machines of this fleet share, and each machine's last tier: images by name, the least recently used first out.

    Using an image is to ask for it, to read it or to send it, on any machine.
    """

    def __init__(self, fleet: Fleet):
        self.limit, self.number = fleet.remote, last_tier(fleet.cell)
        self.used = self.peak = 0
        self.sent_images = self.sent_bytes = self.read_images = self.read_bytes = self.evicted = 0
        self.reused_tokens = 0  # of blocks that were read at least once
        self._images: OrderedDict[Name, RemoteImage] = OrderedDict()
        self._beside: dict[bytes, dict[Name, RemoteImage]] = {}  # by parent: all but the rows of whole blocks
        self._read: set[Name] = set()

    def __contains__(self, name: Name) -> bool:
        return name in self._images

    def ask(self, name: Name) -> RemoteImage | None:
        """Return what is there of this name, the most recently used from now on."""
        image = self._images.get(name)
        if image is not None:
            self._images.move_to_end(name)
        return image

    def beside(self, parent: bytes) -> list[RemoteImage]:
        """Return windows, snapshots and tails of a block."""
        return [image for image in self._beside.get(parent, {}).values() if self.ask(image.name)]

    def send(self, image: RemoteImage) -> None:
        """Put an image there that is not, unless it alone is above the limit."""
        if self.limit is not None:
            if image.nbytes > self.limit:
                return
            while self.used + image.nbytes > self.limit:
                self._evict()
        self._images[image.name] = image
        if image.kind != ROWS or image.tokens:
            self._beside.setdefault(image.parent, {})[image.name] = image
        self.used += image.nbytes
        self.peak = max(self.peak, self.used)
        self.sent_images += 1
        self.sent_bytes += image.nbytes

    def read(self, slot: Slot) -> Done:
        """Read an image, as a tier does."""
        image = self._images[slot.kind, slot.key]
        self._images.move_to_end(image.name)
        self.read_images += 1
        self.read_bytes += image.nbytes
        if image.kind == ROWS and image.name not in self._read:
            self._read.add(image.name)
            self.reused_tokens += len(image.tokens) // TOKEN_BYTES or BLOCK
        return Done(SimulatedImage(image.nbytes, "", image.extra))

    def invalidate(self, slot: Slot) -> None:
        raise AssertionError("a size never goes bad")

    def _evict(self) -> None:
        name, image = self._images.popitem(last=False)
        self.used -= image.nbytes
        self.evicted += 1
        if name in (beside := self._beside.get(image.parent, {})):
            del beside[name]
            if not beside:
                del self._beside[image.parent]


class Machine(Simulation):
    """One of a fleet. `trips` are the round trips that its lookups waited for."""

    def __init__(self, state: ModelState, codec: Codec, fleet: Fleet, remote: SimulatedRemote):
        super().__init__(state, codec, fleet.cell, [remote])
        self._fleet, self._remote = fleet, remote
        # Images that the remote has, as far as this machine knows, by the key of their node: a block that is found missing
        # takes what depends on it along.
        self._there: defaultdict[bytes, set[Name]] = defaultdict(set)
        self.trips = 0

    def promote(self, prompt: Prompt) -> None:
        """Promote from the SSD; then the remote is asked for what comes after."""
        super().promote(prompt)
        graph = self.storage.graph
        local = prompt.deepest(graph.last)
        assert local is not None
        end = len(prompt) if local.walk.tree.snapshots else len(prompt) // BLOCK * BLOCK
        if local.depth < end:
            self.trips += 1
            self._bring(prompt, local)

    def given_so_far(self) -> Given:
        return super().given_so_far()._replace(remote_read=self._remote.read_bytes, trips=self.trips)

    def on_hit(self, hit: Hit) -> None:
        if self._fleet.remote_admission == "second":
            self._send(required_images(hit.walk, hit.depth, RAM))

    def store(self, prompt: Prompt) -> None:
        super().store(prompt)
        if self._fleet.remote_admission == "always":
            walk = prompt.walk(self.namespace)
            self._send(required_images(walk, image_depth(walk, RAM, len(prompt)), RAM))

    # -- up -----------------------------------------------------------------------------------------------------------

    def _send(self, slots: Iterable[Slot]) -> None:
        """Send what isn't there, tail first as a path is touched: under a limit its first blocks are evicted last. Of tails
        only what a snapshot needs.
        """
        for slot in slots:
            name, there = (slot.kind, slot.key), self._there[slot.node.key]
            if name in there or not (slot.node.is_whole or self.namespace.tree.snapshots):
                continue
            there.add(name)
            if self._remote.ask(name) is None:
                self._remote.send(_image_of(slot))

    # -- down ---------------------------------------------------------------------------------------------------------

    def _bring(self, prompt: Prompt, local: Deepest) -> None:
        """Read what the remote has beyond the `local` depth, where that takes less time than to compute it."""
        storage, graph, fleet = self.storage, self.storage.graph, self._fleet
        offered, before = self._beyond(prompt, local), image_depth(local.walk, RAM, len(prompt))
        slots: list[Slot] = []
        path = [node.rows for node in _whole(local) if node.rows is not None]
        pinned = graph.pin([*required_images(local.walk, local.depth, graph.last), *path])
        try:
            slots = self._list(offered, self._last_block(local))
            walk = prompt.walk(self.namespace)
            depth = image_depth(walk, graph.last, len(prompt))
            remote = [slot for slot in required_images(walk, depth, graph.last) if slot.tiers == 1 << graph.last]
            seconds = fleet.link.rtt + sum(slot.nbytes for slot in remote) / fleet.link.rate
            if remote and seconds < (depth - local.depth) / fleet.prefill:
                self.trips += 1
                promote(storage, prompt, 0, source=self.source)
        finally:
            storage.unpin(pinned)
            for slot in reversed(slots):
                graph.drop(slot, graph.last)
        landed = [slot for slot in slots if slot.image is not None]
        for slot in landed:
            storage.counters.arrivals.left(slot)  # which a promotion counts as the SSD's
            storage.counters.promoted_from_remote(slot, before)
            self._there[slot.node.key].add((slot.kind, slot.key))
            storage.drop_superseded(slot)
        storage.spilling.ahead(sum(slot.nbytes for slot in landed))
        self.run_writer()

    def _beyond(self, prompt: Prompt, local: Deepest) -> list[tuple[RemoteImage, bytes]]:
        """Return what the remote has beyond the local depth, with the tokens of its block or snapshot: parents first."""
        tree, token_bytes = self.namespace.tree, prompt.token_bytes
        parent = self._last_block(local)
        first, last = parent.end // BLOCK, len(prompt) // BLOCK
        keys = [parent.key, *prompt.keys(self.namespace)[first:last]]
        blocks = [token_bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in range(first, last)]
        rows = [self._remote.ask((ROWS, key)) for key in reversed(keys[1:])][::-1]
        for key, image in zip(keys[1:], rows, strict=True):
            if image is None:
                self._there.pop(key, None)
        leading = next((i for i, image in enumerate(rows) if image is None), len(rows))
        offered = [(image, tokens) for image, tokens in zip(rows[:leading], blocks, strict=False) if image is not None]
        if not tree.windows and not tree.snapshots:
            return offered
        first = min([local.depth, *(window.first(local.depth) for window in tree.windows)]) // BLOCK * BLOCK
        places = [(node.key, node.end) for node in (tree.root, *_whole(local)) if node.end >= first]
        places += [(key, parent.end + BLOCK * (i + 1)) for i, key in enumerate(keys[1 : leading + 1])]
        while places:
            key, end = places.pop(0)
            for image in self._remote.beside(key):
                if token_bytes.startswith(image.tokens, end * TOKEN_BYTES):
                    offered.append((image, image.tokens))
                    places += [(image.key, len(prompt))] if image.kind == ROWS else []  # a tail may have a window
        return offered

    def _list(self, offered: list[tuple[RemoteImage, bytes]], parent: Node) -> list[Slot]:
        """Make places in the graph for images that are offered; none where RAM has no room for them."""
        graph, slots = self.storage.graph, []
        each = NODE_BYTES + BLOCK_BYTES + graph.slot_bytes
        nbytes = sum(each + len(image.tokens) for image, _ in offered)
        reservation = self.storage.ram.reserve(nbytes, PATIENCE, drop=False)
        if reservation is None:
            return []
        nodes = {node.key: node for node in _above(parent)}
        with reservation:
            for image, tokens in offered:
                node: Node | None = nodes.get(image.parent)
                if node is not None and image.kind == ROWS:
                    node = graph.grow(node, tokens, reservation, image.key)
                if node is None:
                    continue
                nodes.setdefault(node.key, node)
                suffix = tokens if image.kind == SNAPSHOT else b""
                slot = Slot(image.kind, node, image.key, image.nbytes, suffix, image.mask)
                slot.tick = graph.recency.clock
                if graph.attach(slot, reservation):
                    graph.place(slot, graph.last)
                    slots.append(slot)
        return slots

    def _last_block(self, local: Deepest) -> Node:
        return next(reversed(_whole(local)), self.namespace.tree.root)


def _whole(local: Deepest) -> list[Node]:
    return [node for node in local.walk.path if node.is_whole and node.rows is not None]


def _above(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _image_of(slot: Slot) -> RemoteImage:
    """Return what the remote is given of an image in RAM."""
    node, tokens = slot.node, slot.suffix
    parent = node
    if slot.kind == ROWS:
        assert node.parent is not None
        parent, tokens = node.parent, b"" if node.is_whole else node.tokens
    return RemoteImage(slot.kind, slot.key, parent.key, slot.nbytes, tokens, slot.mask, slot.image.extra)


def simulate_fleet(
    requests: Iterable[Request],
    state: ModelState,
    codec: Codec,
    fleet: Fleet,
    *,
    block: int = 512,
    progress: Callable[[int], None] | None = None,
) -> FleetOutcome:
    """Serve these requests, one after the other, each by one machine of the fleet. `requests` are read more than once; the
    others are the arguments of `simulator.simulate`.
    """
    remote = SimulatedRemote(fleet)
    machines: list[Simulation] = [
        Simulation(state, codec, fleet.cell) if fleet.remote_admission is None else Machine(state, codec, fleet, remote)
        for _ in range(fleet.machines)
    ]
    chosen = machines_of(requests, fleet.machines, fleet.routing)
    served = replay(
        ((request, machines[index]) for request, index in zip(requests, chosen, strict=True)), block, progress
    )
    counters = [machine.storage.counters for machine in machines]
    return FleetOutcome(
        fleet,
        served,
        [c.fetches for c in counters],
        sum(c.ram_hit_tokens for c in counters),
        sum(c.hot_hit_tokens for c in counters),
        sum(c.ssd_hit_tokens for c in counters),
        sum(c.remote_hit_tokens for c in counters),
        remote.sent_images,
        remote.sent_bytes,
        remote.read_images,
        remote.read_bytes,
        remote.reused_tokens,
        remote.evicted,
        remote.peak,
    )
