"""Counters and durations, and the snapshot of them that `PrefixCache.stats()` gives. Tokens are counted in tokens, durations
in seconds, all else in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from prefixcache.metrics.histogram import Histogram, Observed

if TYPE_CHECKING:
    from prefixcache.blocks.node import Slot
    from prefixcache.remote.stats import RemoteStats
    from prefixcache.ssd import SsdStats


class Arrivals:
    """Images that promotions brought and that no hit has used since: what a hit owes to the SSD. Called under the tiers'
    lock.

    A hit is the SSD's from the first token on that RAM alone would not have given, and once: the next is RAM's.
    """

    LEAST = 1024  # images, below which nothing is swept

    def __init__(self) -> None:
        self._first: dict[Slot, int] = {}  # the first token that RAM lacked for want of the image
        self._sweep_at = self.LEAST

    def arrived(self, slot: Slot, first: int) -> None:
        """Note that an image is in RAM now, without which a hit would have ended at token `first`."""
        self._first[slot] = first
        if len(self._first) >= self._sweep_at:  # those that left RAM unused; the same slot may come again
            self._first = {slot: begin for slot, begin in self._first.items() if slot.image is not None}
            self._sweep_at = max(self.LEAST, 2 * len(self._first))

    def left(self, slot: Slot) -> None:
        """Forget an image that left RAM."""
        self._first.pop(slot, None)

    def take_share(self, slots: Iterable[Slot], depth: int) -> int:
        """Return how many tokens of a hit of `depth` are the SSD's; the next hit of them is RAM's. `slots`: the hit's images,
        tail first; of its rows the last will do.
        """
        if not self._first:
            return 0
        first, below = depth, False
        for slot in slots:
            first = min(first, self._first.pop(slot, depth))
            node = slot.node.parent if slot.kind == "rows" and not below else None
            below |= slot.kind == "rows"
            while node is not None:
                if node.rows is not None:
                    first = min(first, self._first.pop(node.rows, depth))
                node = node.parent
        return depth - first


class Durations:
    """How long things took, in seconds, from call to return; a promotion from its first look to its last image."""

    def __init__(self) -> None:
        self.store, self.fetch_hit, self.fetch_miss, self.promote = (Histogram() for _ in range(4))

    def read(self) -> dict[str, Observed]:
        return {name: histogram.read() for name, histogram in vars(self).items()}


@dataclass
class Counters:
    """What has happened since the cache was opened. Changed under the tiers' lock only.

    `arrivals` and `durations` are what the counting itself needs: of a `copy` they are empty.
    """

    fetches: int = 0
    asked_tokens: int = 0  # tokens that fetches asked for: the denominator of a hit rate
    hit_tokens: int = 0  # of them, tokens that fetches gave from RAM
    ram_hit_tokens: int = 0  # of those, tokens that RAM had by itself
    hot_hit_tokens: int = 0  # tokens of hits that were there decoded; they count as RAM's, too
    ssd_hit_tokens: int = 0  # and tokens that a promotion had brought and no hit had used since
    remote_hit_tokens: int = 0  # and of tokens that the remote tier had brought
    remote_promoted_images: int = 0  # images that came from the remote tier
    of_other_form: int = 0  # fetches that left a deeper hit alone: the caller makes prompt caches of another form
    declined_hits: int = (
        0  # fetches that gave no hit, or a part, since computing is quicker (setting decline_slow_hits)
    )
    declined_hit_tokens: int = 0  # tokens of RAM's that they did not give
    failed_hits: int = 0  # hits that were deleted since the model could not go on from them
    promoted_tokens: int = 0
    promoted_bytes: int = 0
    stores: int = 0
    stored_tokens: int = 0  # new tokens that stores kept
    stored_bytes: int = 0
    shared_tokens: int = 0  # tokens that stores found kept already
    unkept_tokens: int = 0  # tokens that stores found no room for, or that came behind a state that isn't finite
    not_finite: int = 0  # stores that ended early: the state held NaN or infinity from there on
    recoded_tokens: int = 0  # tokens coded again: their codes were on SSD only, or had other levels than their block
    evicted: int = 0  # images evicted from RAM
    dropped: int = 0  # of them, images that the SSD was to get and did not
    dropped_bytes: int = 0
    idle_bytes: int = 0  # of images that were queued for the SSD while nobody asked
    declined: int = 0  # images that the SSD was not given at first sight
    forgotten: int = 0  # images that left the SSD because nodes filled the RAM
    ssd_evicted: int = 0  # images evicted from the SSD to keep its limit
    corrupt: int = 0  # images quarantined on reading
    write_errors: int = 0
    denied: int = 0  # reservations of RAM that found no room

    def __post_init__(self) -> None:
        self.arrivals, self.arrivals_remote = Arrivals(), Arrivals()
        self.durations = Durations()

    def count_tiers(self, slots: Iterable[Slot], depth: int) -> None:
        """Count how much of a hit of `depth` tokens is which tier's (`slots` as in `Arrivals.take_share`)."""
        slots = list(slots)
        remote = self.arrivals_remote.take_share(slots, depth)
        ssd = max(self.arrivals.take_share(slots, depth) - remote, 0)
        self.remote_hit_tokens += remote
        self.ssd_hit_tokens += ssd
        self.ram_hit_tokens += depth - ssd - remote

    def promoted_from_remote(self, slot: Slot, first: int) -> None:
        """Count an image of the remote tier, without which a hit would have ended at token `first`, or at its block's."""
        self.remote_promoted_images += 1
        self.arrivals_remote.arrived(slot, max(first, slot.node.start if slot.kind == "rows" else 0))

    def copy(self, **changes: int) -> Counters:
        return replace(self, **changes)


class Labelled(NamedTuple):
    """What stores under one label brought: sequences that no other goes on from, in any tier, and bytes in RAM."""

    sequences: int
    ram_bytes: int


@dataclass(frozen=True)
class Stats:
    """The cache at one moment. `ram_held` = `ram_images` + `ram_nodes` + `ram_hot` + `ram_reserved`, and never exceeds
    `ram_limit`.
    """

    ram_limit: int
    ram_configured: int
    """What was asked for; `ram_limit` is less while the machine is short of memory (setting `memory_reserve`)."""
    ram_setting: str
    ram_held: int
    ram_images: int
    ram_queued: int
    ram_nodes: int
    ram_hot: int
    """Of hot prompts, where the device computes in RAM (setting `hot`)."""
    ram_reserved: int
    ram_peak: int
    namespaces: int
    blocks: int
    sequences: int
    labels: dict[str, Labelled]
    """By the word that `store` was given. "" is what came without one, or from an SSD after a restart."""
    images_in_ram: int
    images_on_ssd: int
    pinned: int
    leases: int
    """Prompts that are the last to be evicted, for a time: see `PrefixCache.lease`."""
    leased_bytes: int
    hot_prompts: int
    hot_bytes: int
    """Of hot prompts, in RAM or on the device."""
    codec: str
    kernels: dict[str, str]
    """What code runs TurboQuant here: "cpu", and "device" where MLX's default device is a GPU."""
    counters: Counters
    seconds: dict[str, Observed]
    """How long each `store`, `fetch_hit`, `fetch_miss` and `promote` took; what files took is in `ssd`."""
    ssd: SsdStats | None
    remote: RemoteStats | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain JSON types."""
        labels = {label: counted._asdict() for label, counted in self.labels.items()}
        seconds = {name: observed.as_dict() for name, observed in self.seconds.items()}
        tiers = {"ssd": _plain(self.ssd), "remote": _plain(self.remote)}
        return {**asdict(self), "labels": labels, "seconds": seconds, **tiers}


def _plain(stats: SsdStats | RemoteStats | None) -> dict[str, Any] | None:
    if stats is None:
        return None
    return {name: value.as_dict() if isinstance(value, Observed) else value for name, value in stats._asdict().items()}
