"""RAM and SSD under one lock: who is where, who makes room, what is written and read.

`Tiers` owns the tree, the budget and the SSD, and moves images between them: a store asks it for room, a promotion for
images. What an image means is not known here, and nothing here runs MLX. Nothing on the request path waits for the
disk, unless the setting `spill="wait"` says so, and then no longer than `spill_wait`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prefixcache.blocks.policies import Doorkeeper
from prefixcache.blocks.tree import BLOCK_BYTES, NODE_BYTES, RAM, SSD, Node, Slot, Space, Tree
from prefixcache.image import Image
from prefixcache.layers.plan import Plan, mask_from, window_key
from prefixcache.memory import collector_at_rest
from prefixcache.metrics.stats import Counters
from prefixcache.settings import Settings
from prefixcache.ssd import Address, Cancelled, Entry, Namespace, Ssd
from prefixcache.tiers.budget import Budget, Reservation

log = logging.getLogger("prefixcache")

MIRROR_SHARE = 2  # the tree's nodes may take 1/2 of the budget
QUEUE_SHARE = 4  # spill_queue="auto" is a 4th of the RAM budget
DOORKEEPER_SHARE = 4096  # of the budget: for what the SSD was not given at first sight
DOORKEEPER_MOST = 16 << 20  # and bytes of it


class Home(NamedTuple):
    """A namespace at work: what the index says of it, where its streams stand, and its tree."""

    row: Namespace
    plan: Plan
    space: Space


class Tiers:
    """`lock` guards the tree, the homes and the counters; the budget and the SSD's queue have locks of their own, taken
    inside it and never around it. `moved` is notified when an image left RAM or became durable."""

    def __init__(self, settings: Settings, ram: int):
        self.settings = settings
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.budget = Budget(ram)
        self.full = ram  # the budget that was asked for; `Pressure` may lower the one in force
        self.tree = Tree(self.budget, settings.policy)
        self.homes: dict[bytes, Home] = {}
        self.counters = Counters()
        self.through = settings.ram == 0  # nothing stays in RAM once it is durable
        self._unlisted: deque[Entry] = deque()  # on SSD, not in the tree for want of RAM; coldest first
        self._whole: dict[Slot, None] = {}  # with spill="through": what the SSD is still to be given, oldest first
        self._ahead = 0  # bytes that entered RAM since the last spill ahead
        self._doorkeeper: Doorkeeper | None = None
        if settings.ssd_admission == "second":
            nbytes = min(max(ram // DOORKEEPER_SHARE, 1024), DOORKEEPER_MOST, ram // 16)
            self._doorkeeper = Doorkeeper(nbytes)
            self._doorkeeping = self.budget.reserve(nbytes)  # held for good
        self.ssd: Ssd | None = None

    # -- the SSD at open ----------------------------------------------------------------------------------------------

    def open_ssd(self, ssd: Ssd, homes: Iterable[Home]) -> None:
        """Mirror the index in the tree: as many of the newest entries as half of the budget holds.

        The collector of cycles rests meanwhile: what is made here lives on, and visiting it again and again took half of
        the time at 100k blocks.
        """
        with collector_at_rest():
            self._mirror_all(ssd, homes)

    def _mirror_all(self, ssd: Ssd, homes: Iterable[Home]) -> None:
        self.ssd = ssd
        for home in homes:
            self.homes[home.row.root] = home
        entries = [entry for entry in ssd.entries() if entry.namespace in self.homes]
        oldest = _oldest_within(entries, self.budget.limit // MIRROR_SHARE, self.tree.slot_bytes)
        reservation = self.budget.reserve(self.budget.limit // MIRROR_SHARE, pooled=True)
        assert reservation is not None
        with self.lock, reservation:
            for entry in entries:
                if entry.used < oldest or not self._mirror(entry, reservation):
                    self._unlisted.append(entry._replace(tokens=b"", extra=""))
            self.tree.settle()
            self.tree.clock = max(self.tree.clock, ssd.max_tick())
            for slot in [slot for slot in self.tree.slots.values() if _may_be_superseded(slot.node)]:
                self.drop_superseded(slot)  # what a crash left beside its successor
        self.budget.peak = self.budget.held().total
        if self._unlisted:
            self._unlisted = deque(sorted(self._unlisted, key=lambda e: (e.used, -e.start)))
        self._keep_limit(ssd)
        if self._unlisted:
            log.warning("%d of %d images on SSD are not within reach: ram is too small, or what they hang on is gone",
                        len(self._unlisted), len(entries))  # fmt: skip

    def _keep_limit(self, ssd: Ssd) -> None:
        """The limit may be lower than it was: the coldest leave until it holds."""
        before = ssd.used
        with self.lock:
            holds, left = self._room_on_ssd(0), self.tree.on_ssd
        if ssd.used < before:
            log.warning("the SSD's limit is %d bytes, and it held %d: the coldest were deleted", ssd.limit, before)
        if not holds and left:
            log.warning("the SSD's limit is %d bytes, and it holds %d that are pinned or being written: they leave when they "
                        "may", ssd.limit, ssd.used)  # fmt: skip
        elif not holds:
            log.warning("ssd=%d is less than the %d bytes that the directory takes without an image: nothing will be "
                        "kept there; give it more", ssd.limit, ssd.used)  # fmt: skip

    def _mirror(self, entry: Entry, reservation: Reservation) -> bool:
        home = self.homes[entry.namespace]
        parent: Node
        if entry.parent == entry.namespace:
            parent = home.space.root
        elif ("rows", entry.parent) in self.tree.slots:
            parent = self.tree.slots["rows", entry.parent].node
        else:
            return False
        try:
            slot = self._load(entry, parent, home, reservation)
        except ValueError:  # a window without ranges, or the reservation is spent
            return False
        if slot is None:
            return False
        slot.checksum, slot.tick, slot.hits, slot.created = entry.checksum, entry.used, entry.hits, entry.created
        return True

    def _load(self, entry: Entry, parent: Node, home: Home, reservation: Reservation) -> Slot | None:
        if entry.kind == "rows":
            return self.tree.load_rows(parent, entry.tokens, entry.key, entry.nbytes, entry.disk, reservation)
        mask: tuple[int, ...] = ()
        if entry.kind == "window":
            mask = mask_from(entry.extra)
            if len(mask) != len(home.plan.windows) or window_key(parent.key, mask) != entry.key:
                return None
        suffix = entry.tokens if entry.kind == "snapshot" else b""
        slot = Slot(entry.kind, parent, entry.key, entry.nbytes, suffix, mask)
        if not self.tree.attach(slot, reservation):
            return None
        self.tree.enter(slot, SSD, disk=entry.disk)
        return slot

    # -- room in RAM --------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, wait: float = 0, drop: bool = True) -> Reservation | None:
        """Reserve RAM, evicting the coldest for it; for `wait` seconds nothing is evicted that the SSD does not have.

        After that, if `drop`, the coldest leave although the SSD has no room in its queue for them. None when the room
        can't be had: what is left is pinned, or waits for the SSD.
        """
        with self.lock:
            if nbytes <= self.budget.limit and (
                self._in_time(lambda: self._make_room(nbytes, False), wait) or (drop and self._make_room(nbytes, True))
            ):
                return self.budget.reserve(nbytes)
            self.counters.denied += drop or wait > 0  # else only asked in passing, and again
            return None

    def _in_time(self, done: Callable[[], bool], wait: float) -> bool:
        """Try until `done`, or until `wait` seconds have passed, or the writer has nothing left that could help."""
        deadline, idle = time.monotonic() + wait, 0
        while not done():
            left = deadline - time.monotonic()
            idle = 0 if self.budget.held().queued else idle + 1
            if left <= 0 or idle > 3:
                return False
            self.moved.wait(min(left, 0.05))
        return True

    def _make_room(self, nbytes: int, drop: bool) -> bool:
        while self.budget.room < nbytes:
            if not drop and self.budget.room + self.budget.held().queued >= nbytes:
                return False  # enough is on its way to the SSD
            if not self._evict_one(drop):
                return False
        return True

    def _evict_one(self, drop: bool, asked: bool = False) -> bool:
        """Let the coldest image leave RAM, or begin to. False when none can, or none without being lost if not
        `drop`. `asked`: for who asks for RAM to be given back, and not for what comes in its place: the SSD gets all.
        """
        slot = self.tree.coldest(RAM)
        if slot is None:
            return self._forget_one()
        if not slot.disk and self.ssd is not None:
            if not (asked or self._admits(slot)):
                self._decline(slot)
            elif self.spill(slot):
                return True  # it stays until it is durable; the next one may go at once
            elif not drop:
                return False
            else:
                self._count_drop(slot)
        self.tree.leave(slot, RAM)
        self.counters.arrivals.left(slot)
        self.counters.evicted += 1
        self.moved.notify_all()
        return True

    def _admits(self, slot: Slot) -> bool:
        """Whether the SSD is to be given an image: with admission "second", if its block was asked for again since it came,
        or came before and was declined, or if the SSD has what hangs on it.
        """
        if self._doorkeeper is None or slot.hits > 0 or slot.node.key in self._doorkeeper:
            return True
        return slot.kind == "rows" and slot.node.hanging[SSD] > 0

    def _decline(self, slot: Slot) -> None:
        assert self._doorkeeper is not None
        self._doorkeeper.add(slot.node.key)
        self.counters.declined += 1

    def _count_drop(self, slot: Slot) -> None:
        counters = self.counters
        counters.dropped += 1
        counters.dropped_bytes += slot.nbytes
        if counters.dropped in (1, 10, 100) or counters.dropped % 1000 == 0:
            log.warning("the SSD is behind: %d images (%d bytes) left RAM unwritten",
                        counters.dropped, counters.dropped_bytes)  # fmt: skip

    def _forget_one(self) -> bool:
        """When nodes fill their share of the RAM: the coldest image leaves the SSD, and its node the tree."""
        if self.budget.held().nodes <= self.budget.limit // MIRROR_SHARE:
            return False
        slot = self.tree.coldest_of_all(on_ssd=True)
        if slot is None:
            return False
        self.counters.forgotten += 1
        self.discard(slot)
        return True

    def trim(self, nbytes: int, wait: float) -> int:
        """Let the coldest leave RAM until it holds at most `nbytes`. Nothing is lost for it: what the SSD has not
        taken in `wait` seconds stays. Returns the bytes held."""

        def done() -> bool:
            while (held := self.budget.held()).total > nbytes:
                enough = held.total - held.queued <= nbytes  # is on its way to the SSD, and hotter ones may stay
                if enough or self.tree.coldest(RAM) is None or not self._evict_one(False, asked=True):
                    return False
            return True

        with self.lock:
            self._in_time(done, wait)
            return self.budget.held().total

    def resize(self, nbytes: int, wait: float = 0, asked: bool = False) -> int:
        """The budget becomes `nbytes`, and the coldest leave until it holds. What the SSD has not taken in `wait` seconds
        is lost, but for what waits for it by then: that leaves when it is durable. `asked`: it is what was asked for now.
        Returns the bytes held.
        """
        with self.lock:
            self.full = nbytes if asked else self.full
            self.budget.resize(nbytes)
            while self.budget.held().nodes > nbytes // MIRROR_SHARE:
                slot = self.tree.coldest_of_all(on_ssd=True)
                if slot is None:
                    break
                self._unlist(slot)
            if not self._in_time(lambda: self._shrink(False), wait):
                self._shrink(True)
            return self.budget.held().total

    def _shrink(self, drop: bool) -> bool:
        while (room := self.budget.room) < 0:
            enough = room + self.budget.held().queued >= 0  # is on its way to the SSD, and hotter ones may stay
            if enough or not self._evict_one(drop, asked=True):
                return False
        return True

    def _unlist(self, slot: Slot) -> None:
        """An image that is on SSD leaves the tree for want of RAM: it stays there, out of reach until the next opening."""
        self._unlisted.append(self.entry_of(slot)._replace(tokens=b"", extra=""))
        self.tree.leave(slot, SSD)
        self.tree.leave(slot, RAM)

    def resize_ssd(self, nbytes: int) -> None:
        """The SSD's limit becomes `nbytes`: the coldest leave; the writer deletes their files."""
        with self.lock:
            assert self.ssd is not None
            self.ssd.resize(nbytes)
            self._keep_limit(self.ssd)

    def keep(self, sequences: int) -> int:
        """Let the coldest leave every tier until no more than so many sequences are left. Returns how many are."""
        with self.lock:
            while (kept := self.tree.leaves.total()) > sequences and (slot := self.tree.coldest_of_all()) is not None:
                self.discard(slot)
            return kept

    # -- RAM to SSD ---------------------------------------------------------------------------------------------------

    def spill(self, slot: Slot) -> bool:
        """Queue an image for the SSD, what it hangs on first. False when the queue or the SSD has no room for all."""
        chain = self._hangs_on(slot)
        held = self.tree.pin(chain)
        try:
            return all(one.disk or one.saving or self._write(one, slot) for one in chain)
        finally:
            self.tree.unpin(held)

    def _hangs_on(self, slot: Slot) -> list[Slot]:
        """The slot and the rows that it is of no use without, the first block first, from the last one that is on
        SSD.
        """
        chain = [slot]
        node: Node | None = slot.node if slot.kind != "rows" else slot.node.parent
        if slot.kind == "snapshot":
            chain += [k.rows for k in slot.node.kids if k.rows is not None and k.tokens.startswith(slot.suffix)][:1]
        while node is not None and node.rows is not None:
            chain.append(node.rows)
            if node.rows.disk or node.rows.saving:
                break
            node = node.parent
        return chain[::-1]

    def _write(self, slot: Slot, wanted: Slot) -> bool:
        """Queue one image, for the sake of `wanted`, which may be another that hangs on it."""
        ssd = self.ssd
        if ssd is None or slot.image is None or not ssd.takes(slot.nbytes):
            return False
        if not self._room_on_ssd(ssd.footprint(slot.nbytes), slot, wanted):
            return False
        home = self.homes[_root_of(slot).key]
        if not ssd.write(self.entry_of(slot), home.row, slot.image):
            return False
        self.tree.save(slot)
        return True

    def _room_on_ssd(self, nbytes: int, slot: Slot | None = None, wanted: Slot | None = None) -> bool:
        """Make room by deleting what is coldest. For a `slot` that is to be written, and that `wanted` hangs on or is: only
        what is colder than both, and nothing that is known unless it makes enough.
        """
        ssd = self.ssd
        assert ssd is not None
        while (missing := ssd.used + nbytes - ssd.limit) > 0:
            if self._unlisted:
                entry = self._unlisted.popleft()
                known = self.tree.slots.get(entry.address)
                if known is None or not (known.disk or known.saving):  # else it was stored again meanwhile
                    ssd.delete([entry])
                continue
            if slot is None or wanted is None:
                coldest = self.tree.coldest(SSD)
                victims = [coldest] if coldest is not None else []
            else:
                victims = self.tree.making_room(missing, slot, wanted)
            if not victims:
                return False
            for victim in victims:
                ssd.delete([self.entry_of(victim)])
                self.tree.leave(victim, SSD)
                self.counters.ssd_evicted += 1
        return True

    def entry_of(self, slot: Slot) -> Entry:
        """What the index is to know of a slot."""
        node, parent = slot.node, slot.node.parent
        tokens, start, above = slot.suffix, node.end, node.key
        if slot.kind == "rows":
            assert parent is not None
            tokens, start, above = node.tokens, node.start, parent.key
        elif slot.kind == "window":
            start = node.start
        image: Image | None = slot.image
        checksum = slot.checksum or (image.checksum if image is not None else "")
        extra = "{}"
        if slot.kind == "window" and image is not None:
            extra = image.header()[0].extra
        return Entry(slot.kind, slot.key, _root_of(slot).key, above, start, tokens, slot.nbytes, checksum,
                     slot.disk, slot.tick, slot.created, slot.hits, extra)  # fmt: skip

    def written(self, entry: Entry, error: Exception | None) -> None:
        """The writer's word on an image: durable and indexed, or not. On the writer's thread."""
        with self.lock:
            slot = self.tree.let_go(entry.kind, entry.key)
            if slot is not None:
                self.budget.queue(-slot.nbytes)
                self.moved.notify_all()
                return
            slot = self.tree.slots.get((entry.kind, entry.key))
            if slot is None or not slot.saving:
                return
            used_since = slot.tick != entry.used
            self.tree.saved(slot, used_since)
            if error is None:
                slot.checksum = entry.checksum
                self.tree.enter(slot, SSD, disk=entry.disk)
                if used_since:
                    self.tree.touched.setdefault(slot, 0)
                self.drop_superseded(slot)
                if self.through:
                    self._pass_through(slot)
            elif not isinstance(error, Cancelled):
                self.counters.write_errors += 1
                self.write_through([slot])
            self._write_whole()
            self._back_to_limit()
            self.moved.notify_all()

    def vanished(self, there: set[Address]) -> None:
        """The SSD's directory was gone, and has only these images now: what RAM holds is to be written anew. On the
        writer's thread.
        """
        with self.lock:
            for slot in list(self.tree.slots.values()):
                if slot.disk and (slot.kind, slot.key) not in there:
                    self.tree.leave(slot, SSD)
            self._unlisted = deque(entry for entry in self._unlisted if entry.address in there)
            self.write_through(self.tree.order[RAM])
            self.moved.notify_all()

    def drain(self, timeout: float) -> bool:
        """Write all that RAM holds and the SSD has room for, the newest first. False when not done in `timeout`
        seconds.
        """
        deadline = time.monotonic() + timeout
        with self.lock:
            if self.ssd is None:
                return True
            failed = self.ssd.failed
            given: set[Slot] = set()  # once each: what the SSD then lets go of makes room for others
            while True:
                dirty = [s for s in reversed(self.tree.order[RAM]) if not s.disk and not s.saving and s not in given]
                for slot in dirty:  # what finds the queue full is tried again while the writer makes progress
                    if self.spill(slot):
                        given.add(slot)
                    elif self.budget.held().queued:
                        break
                if not self.budget.held().queued:
                    break
                if time.monotonic() > deadline:
                    return False
                self.moved.wait(0.1)
        return self.ssd.flush(max(deadline - time.monotonic(), 0.01), since=failed)

    def persist_recency(self) -> None:
        """Tell the index what was used since it last heard."""
        with self.lock:
            if self.ssd is not None and self.tree.touched:
                self.ssd.touch([(slot.kind, slot.key, slot.tick, hits) for slot, hits in self.tree.touched.items()])
                self.tree.touched.clear()

    def write_through(self, slots: Iterable[Slot]) -> None:
        """With spill="through": queue images of whole blocks, and snapshots, for the SSD, or as soon as there is room. Tails
        are written when they are evicted or at the end: each turn of a conversation has another.
        """
        if self.ssd is None or self.settings.spill != "through":
            return
        self._whole.update(
            (slot, None) for slot in slots if slot.kind == "snapshot" or len(slot.node.tokens) == BLOCK_BYTES
        )
        self._write_whole()

    def _write_whole(self) -> None:
        while self._whole and self.ssd is not None:
            slot = next(iter(self._whole))
            dirty = slot.image is not None and not slot.disk and not slot.saving
            if dirty and not self.spill(slot) and not self.ssd.has_room(slot.nbytes):
                break  # goes on when a write has ended, or with the next store
            del self._whole[slot]  # what the limit has no room for is tried again when RAM evicts it
        if len(self._whole) > 2 * len(self.tree.slots):  # of a disk that has failed for long
            self._whole = {one: None for one in self._whole if one.image is not None and not one.disk}

    def _pass_through(self, slot: Slot) -> None:
        """With no RAM to keep it: what is durable and of no more use leaves, and then what it hung on."""
        one: Slot | None = slot
        while (
            one is not None and one.image is not None and one.disk and not one.pins and not self.tree.needed(one, RAM)
        ):
            self.tree.leave(one, RAM)
            above = one.node if one.kind != "rows" else one.node.parent
            one = above.rows if above is not None else None

    def spill_ahead(self, entered: int) -> None:
        """Write the coldest quarter of a full RAM before it must leave, so that leaving costs nothing."""
        if self.ssd is None:
            return
        self._ahead += entered
        limit = self.budget.limit
        if not self.through and (self._ahead < limit // 32 or self.budget.held().total < limit - limit // 4):
            return
        self._ahead = 0
        passed = self.budget.held().queued
        for slot in list(self.tree.order[RAM]):
            passed += slot.nbytes
            if passed > limit // 4 and not self.through:
                return
            if slot.image is None or slot.disk or slot.saving or not self._admits(slot):
                continue
            if not self.spill(slot):
                return

    # -- superseded images, images that left --------------------------------------------------------------------------

    def drop_superseded(self, changed: Slot) -> None:
        """An image came into a tier, or is no longer pinned: what it supersedes there leaves, or it does for its successor.

        `Tree.is_superseded` has the rule. Pinned images stay, and those that wait for the SSD, until they don't. An image
        that stays in RAM stays on SSD, too: it would only be written again.
        """
        if changed.kind == "snapshot":
            return
        tree = self.tree
        for slot, successor in list(tree.successions(changed.node)):
            if slot.pins or slot.saving:
                continue
            if slot.image is not None and tree.is_superseded(slot, successor, RAM):
                tree.leave(slot, RAM)
            if slot.disk and slot.image is None and tree.is_superseded(slot, successor, SSD):
                assert self.ssd is not None
                self.ssd.delete([self.entry_of(slot)])
                tree.leave(slot, SSD)

    def discard(self, slot: Slot) -> int:
        """An image leaves every tier. Returns its bytes. One that waits for the SSD leaves when the writer lets go of
        it.
        """
        if slot.saving:
            assert self.ssd is not None
            self.ssd.delete([self.entry_of(slot)])
            self.tree.part(slot)
            return slot.nbytes
        if slot.disk:
            assert self.ssd is not None
            self.ssd.delete([self.entry_of(slot)])
            self.tree.leave(slot, SSD)
        self.tree.leave(slot, RAM)
        self.moved.notify_all()
        return slot.nbytes

    def clear(self) -> None:
        """Every image leaves every tier; pins end."""
        for entry in self._unlisted:
            assert self.ssd is not None
            self.ssd.delete([entry])
        self._unlisted.clear()
        for slot in list(self.tree.slots.values()):
            self.discard(slot)
        self._whole.clear()

    def disown(self, home: Home) -> None:
        """A namespace that the index described falsely: its images leave every tier, and it is no longer known."""
        for slot in list(self.tree.slots.values()):
            if _root_of(slot) is home.space.root:
                self.discard(slot)
        self._forget_home(home)

    def _forget_home(self, home: Home) -> None:
        root = home.row.root
        del self.homes[root], self.tree.spaces[root]

    def drop_empty(self) -> None:
        """Forget namespaces that hold nothing: whoever may choose a salt may make any number of them."""
        for home in list(self.homes.values()):
            if not home.space.root.kids and not home.space.root.snapshots:
                self._forget_home(home)

    def release(self) -> None:
        """RAM is given back; the SSD keeps what it has."""
        with self.lock:
            for slot in list(self.tree.order[RAM]):
                slot.image = None
            self._whole.clear()
            self.budget = Budget(self.budget.limit)
            self.tree = Tree(self.budget, self.tree.policy)

    def lost(self, slot: Slot) -> None:
        """Its file went bad and was set aside: no longer on SSD."""
        self.counters.corrupt += 1
        self.tree.leave(slot, SSD)

    def unpin(self, held: list[Slot]) -> None:
        """Let go of slots; what was superseded meanwhile leaves now."""
        with self.lock:
            self.tree.unpin(held)
            for slot in held:
                if (
                    slot.kind == "window" or len(slot.node.tokens) < BLOCK_BYTES
                ):  # nothing supersedes rows that are whole
                    self.drop_superseded(slot)
            self._back_to_limit()
            self.moved.notify_all()

    def _back_to_limit(self) -> None:
        """What could not leave when a limit was lowered, pinned or on its way to the SSD, leaves as soon as it can."""
        if self.budget.room < 0:
            self._shrink(False)
        if self.ssd is not None and self.ssd.used > self.ssd.limit:
            self._room_on_ssd(0)


def _may_be_superseded(node: Node) -> bool:
    return len(node.windows) > 1 or (node.parent is not None and len(node.parent.kids) > 1)


def _root_of(slot: Slot) -> Node:
    space = slot.node.space
    assert space is not None
    return space.root


def _oldest_within(entries: list[Entry], room: int, slot_bytes: int) -> int:
    """The tick from which on the newest entries fit into `room` bytes of nodes."""
    costs = [slot_bytes + len(e.tokens) + (NODE_BYTES if e.kind == "rows" else 0) for e in entries]
    if sum(costs) <= room:
        return 0
    for used, cost in sorted(zip((e.used for e in entries), costs, strict=True), reverse=True):
        room -= cost
        if room < 0:
            return used + 1
    return 0
