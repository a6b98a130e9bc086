"""The RAM budget: every byte that the cache is about to use is reserved here first. The graph of blocks keeps its account.

`Budget` counts the bytes held by images, by nodes and slots of the graph, by hot prompts and by reservations, and how many of
the images' bytes are queued for a tier below. `eviction` chooses the victims.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NamedTuple

from prefixcache.image_memory import ForImages


class BytesHeld(NamedTuple):
    """Bytes held now. `queued` is the part of `images` that waits for the SSD; `total` never exceeds `Budget.bound`."""

    images: int
    queued: int
    nodes: int
    reserved: int
    hot: int = 0

    @property
    def total(self) -> int:
        return self.images + self.nodes + self.reserved + self.hot


class Budget:
    """A hard limit in bytes. Thread-safe: `_lock` guards the counters; what is held in all never exceeds `bound`.

    `bound` equals `limit`, except after `limit` was lowered below the bytes held: then it equals those, and falls with them.
    """

    def __init__(self, limit: int):
        self.limit = self.bound = limit
        self._lock = threading.Lock()
        self._images = self._queued = self._nodes = self._reserved = self._hot = 0
        self.peak = 0
        self.denied = 0

    def held(self) -> BytesHeld:
        with self._lock:
            return BytesHeld(self._images, self._queued, self._nodes, self._reserved, self._hot)

    @property
    def room(self) -> int:
        """Return the bytes that could be reserved now; below 0 while more is held than a lowered limit allows."""
        with self._lock:
            return self.limit - self._images - self._nodes - self._reserved - self._hot

    def for_images(self) -> ForImages:
        """Return the bytes that images may take, and those that they take. It takes no lock: images die at any moment."""
        return ForImages(self.limit - self._nodes, self._images)

    @property
    def queued(self) -> int:
        """Return the bytes of images that wait for a tier below."""
        return self._queued

    def reserve(self, nbytes: int, *, pooled: bool = False) -> Reservation | None:
        """Set `nbytes` aside, all or nothing: None when they don't fit. `pooled`: to be spent in very many parts."""
        with self._lock:
            total = self._images + self._nodes + self._reserved + self._hot + nbytes
            if total > self.limit:
                self.denied += 1
                return None
            self._reserved += nbytes
            self.peak = max(self.peak, total)
            return Pooled(self, nbytes) if pooled else Reservation(self, nbytes)

    def resize(self, limit: int) -> None:
        """Reserve nothing beyond `limit` from now on."""
        with self._lock:
            self.limit = limit
            self._update_bound()

    def free_image(self, nbytes: int) -> None:
        with self._lock:
            self._images -= nbytes
            if self.bound > self.limit:
                self._update_bound()

    def free_node(self, nbytes: int) -> None:
        with self._lock:
            self._nodes -= nbytes
            if self.bound > self.limit:
                self._update_bound()

    def free_hot(self, nbytes: int) -> None:
        with self._lock:
            self._hot -= nbytes
            if self.bound > self.limit:
                self._update_bound()

    def queue(self, nbytes: int) -> None:
        """Count an image that begins (`nbytes` > 0) or ends (< 0) to wait for the SSD; it is held all the while."""
        with self._lock:
            self._queued += nbytes

    def check_integrity(self) -> None:
        held = self.held()
        assert min(held) >= 0, held
        assert held.queued <= held.images, held
        assert held.total <= self.bound, (held, self.bound)

    def _update_bound(self) -> None:
        self.bound = max(self.limit, self._images + self._nodes + self._reserved + self._hot)

    def _spend(self, images: int, nodes: int, back: int, hot: int = 0) -> None:
        with self._lock:
            self._images += images
            self._nodes += nodes
            self._hot += hot
            self._reserved -= images + nodes + hot + back
            if self.bound > self.limit:
                self._update_bound()


class Reservation:
    """Bytes set aside. The unspent ones go back when the `with` block ends, however it ends."""

    def __init__(self, budget: Budget, nbytes: int):
        self._budget = budget
        self.left = nbytes

    def spend(self, *, images: int = 0, nodes: int = 0, hot: int = 0) -> None:
        """Turn reserved bytes into held ones. ValueError when more is spent than was reserved."""
        if (spent := images + nodes + hot) > self.left:
            raise ValueError(f"{spent} bytes spent of a reservation with {self.left} left")
        self.left -= spent
        self._budget._spend(images, nodes, 0, hot)

    def split(self, nbytes: int) -> Reservation:
        """Split off a reservation of so many of the bytes that are left. ValueError when there are fewer."""
        if nbytes > self.left:
            raise ValueError(f"{nbytes} bytes split off a reservation with {self.left} left")
        self.left -= nbytes
        return Reservation(self._budget, nbytes)

    def release(self, nbytes: int | None = None) -> int:
        """Give back the bytes that are left, or at most `nbytes` of them. Returns how many went back."""
        back = self.left if nbytes is None else min(nbytes, self.left)
        self.left -= back
        self._budget._spend(0, 0, back)
        return back

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pooled(Reservation):
    """A reservation whose spent bytes count as reserved until the end: then they are booked all at once."""

    def __init__(self, budget: Budget, nbytes: int):
        super().__init__(budget, nbytes)
        self._images = self._nodes = self._hot = 0

    def spend(self, *, images: int = 0, nodes: int = 0, hot: int = 0) -> None:
        if (spent := images + nodes + hot) > self.left:
            raise ValueError(f"{spent} bytes spent of a reservation with {self.left} left")
        self.left -= spent
        self._hot += hot
        self._images += images
        self._nodes += nodes

    def release(self, nbytes: int | None = None) -> int:
        self._budget._spend(self._images, self._nodes, 0, self._hot)
        self._images = self._nodes = self._hot = 0
        return super().release(nbytes)
