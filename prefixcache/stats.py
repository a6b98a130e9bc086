"""Counters, and the snapshot of them that `PrefixCache.stats()` gives. Tokens are counted in tokens, all else in
bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from prefixcache.ssd import SsdStats


@dataclass
class Counters:
    """What has happened since the cache was opened. Changed under the tiers' lock only."""

    fetches: int = 0
    asked_tokens: int = 0  # tokens that fetches asked for: the denominator of a hit rate
    hit_tokens: int = 0  # of them, tokens that fetches gave from RAM
    promoted_tokens: int = 0
    promoted_bytes: int = 0
    stores: int = 0
    stored_tokens: int = 0  # new tokens that stores kept
    stored_bytes: int = 0
    shared_tokens: int = 0  # tokens that stores found kept already
    unkept_tokens: int = 0  # tokens that stores found no room for
    recoded_tokens: int = 0  # tokens coded again: their codes were on SSD only, or had other levels than their block
    evicted: int = 0  # images that left RAM
    dropped: int = 0  # of them, images that the SSD was to get and did not
    dropped_bytes: int = 0
    forgotten: int = 0  # images that left the SSD because nodes filled the RAM
    ssd_evicted: int = 0  # images that left the SSD to keep its limit
    corrupt: int = 0  # images set aside on reading
    write_errors: int = 0
    collisions: int = 0  # blocks not kept because another has their key


class Labelled(NamedTuple):
    """What stores under one label brought: sequences that no other goes on from, in any tier, and bytes in RAM."""

    sequences: int
    ram_bytes: int


@dataclass(frozen=True)
class Stats:
    """The cache at one moment. `ram_held` = `ram_images` + `ram_nodes` + `ram_reserved`, and never exceeds
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
    codec: str
    kernels: dict[str, str]
    """What code runs TurboQuant here: "cpu", and "device" where MLX's default device is a GPU."""
    counters: Counters
    ssd: SsdStats | None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        labels = {label: counted._asdict() for label, counted in self.labels.items()}
        return {**asdict(self), "labels": labels, "ssd": self.ssd._asdict() if self.ssd is not None else None}
