"""One prompt's images from a remote tier into RAM: asked for, reserved, read, checked, and placed, the first block first.

It stops at the first image that is missing, is not what its name says, finds no room or is late; what has landed by then
stays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FuturesTimeout
from functools import partial
from typing import NamedTuple

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.graph import NODE_BYTES
from prefixcache.blocks.node import RAM, Node, Slot
from prefixcache.image_format import HEADER_LIMIT, ROWS, SNAPSHOT, Digest, Image, ImageError, examine
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.remote.calls import READERS
from prefixcache.remote.client import Client
from prefixcache.remote.engine import PIECE, EngineError
from prefixcache.remote.sealing import image_name, snapshot_folder
from prefixcache.remote.search import Gap, SoughtImage, search
from prefixcache.ssd.entries import Entry
from prefixcache.ssd.files import is_image_of
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage

# An answer is waited for the longest of these, and an image its expected time more.
MIN_TIMEOUT = 0.1  # seconds
SHARE_OF_COMPUTING = 40  # a part of what computing takes, where the prefill rate is known
SHARE_OF_SETTING = 5  # a part of `remote_timeout`, where it isn't
TIMEOUT_FACTOR = 4  # times what it is expected to take, up to a part of what computing takes: ASKING_SHARE
MAX_IMAGE_FACTOR = 2  # an image may take so many times the bytes of its rows in a live cache
SNAPSHOT_BUDGET_SHARE = 8  # a recurrent state may take an 8th of the budget
ASKING_SHARE = 10  # of what computing takes, the part that one question may take


class Pace(NamedTuple):
    """How long the promotion of one prompt may take: it `began` when it was asked for, by time.monotonic(), `timeout` is the
    setting `remote_timeout`, and `prefill_rate` the tokens computed a second. None: it may take all of the time.
    """

    began: float
    timeout: float
    prefill_rate: float | None

    def gain(self, tokens: int) -> float:
        """Return the seconds that computing so many tokens takes, or all that there are."""
        return tokens / self.prefill_rate if self.prefill_rate else self.timeout

    def until(self, tokens: int) -> float:
        """Return when the promotion of so many tokens ends at the latest."""
        return self.began + min(self.timeout, self.gain(tokens))

    def shortest_wait(self, tokens: int) -> float:
        """Return the seconds that an answer is waited for at least, when so many tokens can be gained."""
        share = SHARE_OF_COMPUTING if self.prefill_rate is not None else SHARE_OF_SETTING
        return max(MIN_TIMEOUT, self.gain(tokens) / share)


class Transfer(NamedTuple):
    """So many bytes that came in so many seconds."""

    nbytes: int
    seconds: float


class _RemoteRead:
    """An image on its way, and the RAM reserved for it once its size is known."""

    def __init__(self, wanted: SoughtImage):
        self.wanted = wanted
        self.reservation: Reservation | None = None
        self.future: Future[Image | None]

    def release(self, done: Future[Image | None] | None = None) -> None:
        if self.reservation is not None:
            self.reservation.release()


class RemotePromotion:
    """Runs on a thread of its own; takes the storage's lock where it needs it. It is the `Asking` of its own search."""

    def __init__(self, storage: Storage, client: Client, namespace: Namespace, gap: Gap, pace: Pace):
        self._storage, self._client, self._namespace, self._gap, self._pace = storage, client, namespace, gap, pace
        self._until = max(pace.until(gap.tokens), pace.began + MIN_TIMEOUT)
        self._min_timeout = pace.shortest_wait(gap.tokens)
        self._pinned: list[Slot] = []
        self._mean_size = 0  # bytes of an image, where the engine hasn't said
        self.at_once = client.engine.names_at_once

    def run(self) -> Callable[[], None] | None:
        """Read what is worth it. Returns a call to be made with nobody waiting, where reading was not worth it: it measures
        how quick reading is. Raises EngineError where the engine could not be asked.
        """
        boundary, wanted = search(self._gap, self)
        if not wanted:
            self._client.missing.add(gap_name(self._client, self._gap))
            return None
        nbytes = self._estimate(wanted)
        if not self._has_room(nbytes):
            return None
        if not self._is_quicker(boundary, nbytes):
            self._client.counters.add(skipped=1)
            return partial(self._measure, wanted[:READERS]) if self._client.speed.is_time_to_measure() else None
        if (read := self._read_all(wanted)) is not None:
            self._client.speed.learn_rate(*read)
        return None

    def _measure(self, wanted: Sequence[SoughtImage]) -> None:
        self._min_timeout = self._pace.timeout
        self._until = time.monotonic() + self._pace.timeout
        if (read := self._read_all(wanted)) is not None:
            self._client.speed.measured(*read)

    # -- asking -------------------------------------------------------------------------------------------------------

    def sizes(self, wanted: Sequence[SoughtImage]) -> list[int | None]:
        return self._client.sizes([self._name(image) for image in wanted], self._question_timeout())

    def snapshots(self, parents: Sequence[bytes]) -> list[set[str]]:
        folders = [snapshot_folder(self._client.seal, self._gap.root, parent) for parent in parents]
        return [set(names) for names in self._client.ids_under(folders, self._question_timeout())]

    def snapshot_id(self, key: bytes) -> str:
        return self._client.seal.opaque(key)

    def _question_timeout(self) -> float:
        return min(question_timeout(self._client, self._until - self._pace.began, self._min_timeout), self._left())

    def _left(self) -> float:
        return max(self._until - time.monotonic(), 0.0)

    def _name(self, wanted: SoughtImage) -> str:
        return image_name(self._client.seal, self._gap.root, wanted.kind, wanted.key, wanted.parent)

    def _estimate(self, wanted: Sequence[SoughtImage]) -> int:
        """Estimate the bytes of these images; where the engine has told some sizes only, by their mean."""
        known = [image.size for image in wanted if image.size is not None]
        self._mean_size = sum(known) // max(len(known), 1)
        return self._mean_size * len(wanted)

    def _has_room(self, nbytes: int) -> bool:
        """Tell whether what is no hit in parts has room as a whole."""
        held, limit = self._storage.budget.held(), self._storage.budget.limit
        return not (self._gap.windows or self._gap.snapshots) or nbytes <= limit - held.nodes - held.reserved

    def _is_quicker(self, boundary: int, nbytes: int) -> bool:
        pace = self._pace
        seconds = time.monotonic() - pace.began + self._client.speed.expected(nbytes)
        return pace.prefill_rate is None or seconds < pace.gain(boundary - self._gap.boundary)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _pin_known(self) -> None:
        graph = self._storage.graph
        known = (graph.slots.get((ROWS, key)) for key in self._gap.keys[: self._gap.known])
        self._pinned += graph.pin(slot for slot in known if slot is not None)

    def _read_all(self, wanted: Sequence[SoughtImage]) -> Transfer | None:
        """Read and place images. Returns how many bytes came, in how many seconds; None where nothing did."""
        waiting, reads, began, nbytes = deque(wanted), deque[_RemoteRead](), time.monotonic(), 0
        with self._storage.lock:
            self._pin_known()
        try:
            while waiting or reads:
                while waiting and len(reads) < READERS:
                    reads.append(self._begin(waiting.popleft()))
                image = self._await(reads[0], sum(read.wanted.size or self._mean_size for read in reads), began)
                if image is None or not self._land(reads[0], image):
                    break
                nbytes += image.nbytes
                reads.popleft()
        finally:
            for read in reads:
                if not read.future.done():
                    read.future.cancel()
                read.future.add_done_callback(read.release)
            self._storage.unpin(self._pinned)
        return Transfer(nbytes, time.monotonic() - began) if nbytes else None

    def _begin(self, wanted: SoughtImage) -> _RemoteRead:
        read = _RemoteRead(wanted)
        read.future = self._client.calls.read(self._read, read)
        return read

    def _read(self, read: _RemoteRead) -> Image | None:
        """Read and check an image, on a thread of the client."""
        wanted, storage = read.wanted, self._storage

        def reserve_room(nbytes: int) -> bool:  # for the image, and for a piece as it comes
            if nbytes > self._size_limit(wanted):
                return False
            beside = NODE_BYTES + storage.graph.slot_bytes + 2 * BLOCK * TOKEN_BYTES
            read.reservation = storage.ram.reserve(nbytes + min(PIECE, nbytes) + beside, drop=False)
            return read.reservation is not None

        name, digest = self._name(wanted), Digest()
        data = self._client.read(name, wanted.size, reserve_room, digest.update)
        if data is None:
            return None
        image, row = Image(data), self._namespace.row
        tokens = BLOCK if wanted.kind not in (ROWS, SNAPSHOT) else len(wanted.tokens) // TOKEN_BYTES
        try:
            header = examine(data, digest=digest)
        except ImageError as error:
            self._client.refuse(name, str(error))
            return None
        entry = Entry(
            wanted.kind, wanted.key, row.root, wanted.parent, wanted.start, wanted.tokens, data.nbytes, header.checksum
        )
        said = header.fields.model, header.fields.codec, header.fields.layout
        fits = is_image_of(header, data, entry) and said == row.stated
        if not fits or not self._namespace.plan.fits(image, wanted.kind, wanted.start, tokens, wanted.mask):
            self._client.refuse(name, "it is not the image that its name says")
            return None
        return image

    def _size_limit(self, wanted: SoughtImage) -> int:
        """Return the bytes beyond which no image of ours is: nothing is evicted for what somebody left under its name. Codes
        take less than rows in fp16; of a recurrent state only the budget tells.
        """
        if wanted.kind == SNAPSHOT:
            return self._storage.budget.limit // SNAPSHOT_BUDGET_SHARE
        return MAX_IMAGE_FACTOR * self._namespace.plan.fp16_bytes(BLOCK) + HEADER_LIMIT

    def _await(self, read: _RemoteRead, under_way: int, began: float) -> Image | None:
        """Return the image, if it comes before computing would be quicker, and about as soon as it should. `began`: the
        reading of what is `under_way` with it, in bytes.
        """
        timeout = self._min_timeout + TIMEOUT_FACTOR * self._client.speed.expected(under_way)
        try:
            return read.future.result(min(timeout, self._left()))
        except FuturesTimeout:
            self._client.counters.add(timeouts=1)
            self._client.calls.give_up(read.future)
            read.future.add_done_callback(lambda late: self._came_late(late, under_way, began))
            return None
        except (EngineError, CancelledError):
            return None

    def _came_late(self, late: Future[Image | None], nbytes: int, began: float) -> None:
        """Learn how slow a read was, or the next prompt would wait as long."""
        if not late.cancelled() and late.exception() is None:
            self._client.speed.learn_rate(nbytes, time.monotonic() - began)

    # -- placing ---------------------------------------------------------------------------------------------------------

    def _land(self, read: _RemoteRead, image: Image) -> bool:
        """Place an image that was read. False where its place is gone."""
        storage, wanted = self._storage, read.wanted
        assert read.reservation is not None
        with storage.lock, read.reservation as reservation:
            known = storage.namespaces.get(self._namespace.row.root)
            if known is None or known.tree is not self._namespace.tree:
                return False  # it held nothing, and was dropped meanwhile
            node = self._node(wanted, reservation)
            if node is None:
                return False
            suffix = wanted.tokens if wanted.kind == SNAPSHOT else b""
            slot = Slot(wanted.kind, node, wanted.key, image.nbytes, suffix, wanted.mask)
            slot.checksum, slot.created, slot.tick = image.checksum, time.time(), storage.graph.recency.clock
            slot.remote_at = self._pace.began
            if not storage.graph.attach(slot, reservation):
                return True  # it was stored meanwhile
            storage.graph.place(slot, RAM, image=image, reservation=reservation)
            self._pinned += storage.graph.pin([slot])
            storage.counters.promoted_from_remote(slot, self._gap.boundary)
            storage.drop_superseded(slot)
            storage.spilling.write_through([slot])
            storage.spilling.ahead(slot.nbytes)
            storage.changed.notify_all()
            return True

    def _node(self, wanted: SoughtImage, reservation: Reservation) -> Node | None:
        """Return the node that the image belongs to; None where the block before it is gone."""
        graph = self._storage.graph
        if wanted.parent == self._gap.root:
            above: Node | None = self._namespace.tree.root
        else:
            rows = graph.slots.get((ROWS, wanted.parent))
            above = rows.node if rows is not None else None
        if above is None or wanted.kind != ROWS:
            return above
        return graph.grow(above, wanted.tokens, reservation, wanted.key)


def question_timeout(client: Client, seconds: float, minimum: float) -> float:
    """Return the seconds that an answer is waited for, when so many can be gained, and `minimum` at least."""
    return max(minimum, min(TIMEOUT_FACTOR * client.speed.expected(0), seconds / ASKING_SHARE))


def gap_name(client: Client, gap: Gap) -> str:
    """Return the name that stands for a gap of which nothing was there just now. No image has it: some may be there."""
    first = gap.rows(min(gap.known, len(gap.keys) - 1))
    return f"{image_name(client.seal, gap.root, first.kind, first.key, first.parent)}/gap"
