"""What is simulated and what it gave, plain numbers: a `Cell` and its `CellOutcome`, a `Fleet` and its `FleetOutcome`.
`simulator` and `fleet` make the outcomes; `sweep`, `advice` and the command read them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefixcache.planning.advice import NO_WAIT, Link, Served


class Cell(NamedTuple):
    """One size to try: bytes of RAM and SSD (0: none), eviction policy and SSD admission, as in `Settings`.

    So are `spill` and `idle` (`spill_idle`), which is 0, since what it adds depends on how long the server lives; "auto" has
    all gaps of the trace used. `hot` is of the RAM: bytes, "auto", or 0 for none. `lease`: seconds that each request leases
    its prompt for, 0 for none, and of the prompt the first `lease_tokens`, 0 for all.
    """

    ram: int
    ssd: int = 0
    policy: str = "lru"
    admission: str = "always"
    spill: str = "drop"
    idle: int | str = 0
    hot: int | str = 0
    lease: float = 0.0
    lease_tokens: int = 0


class Fleet(NamedTuple):
    """Machines of the size of a `cell` each, and the remote tier that they share.

    `remote_admission` is "second", "always" or "never", None without a remote; `remote` its limit in bytes, None for none.
    What computing takes less time for, at `prefill` tokens a second, is not read over the `link`.
    """

    cell: Cell
    machines: int = 1
    routing: str = "sticky"
    remote_admission: str | None = None
    remote: int | None = None
    link: Link = NO_WAIT
    prefill: float = 1000.0


class CellOutcome(NamedTuple):
    """One run of a trace at the size of a `cell`. Tokens are counted in tokens, all else in bytes or images.

    `ram_tokens` are hits that RAM had at once, `ssd_tokens` those that a promotion brought; their share of the tokens asked
    for is the hit rate. `hot_tokens`, among RAM's, had nothing to decode.
    """

    cell: Cell
    served: Served
    ram_tokens: int
    hot_tokens: int
    ssd_tokens: int
    stored_tokens: int
    stored_bytes: int
    written_files: int
    written_bytes: int
    read_files: int
    read_bytes: int
    evicted: int
    ssd_evicted: int
    dropped: int
    declined: int
    unkept_tokens: int
    ram_peak: int
    ssd_peak: int

    @property
    def hit_tokens(self) -> int:
        return self.ram_tokens + self.ssd_tokens

    @property
    def hot_hits(self) -> int:
        """Requests that a hot prompt gave tokens."""
        return int(np.count_nonzero(self.served.hot))

    @property
    def hit_rate(self) -> float:
        """Hits of both tiers over tokens asked for; 0 of a trace that asks for none."""
        return self.hit_tokens / max(self.served.asked_tokens, 1)


class FleetOutcome(NamedTuple):
    """One run of a trace on a `fleet`. Hits are of RAM, of the machine's own SSD, or of the remote, in tokens.

    `requests` are those of each machine. `reused_tokens` are those of blocks that were read from the remote at least once.
    """

    fleet: Fleet
    served: Served
    requests: list[int]
    ram_tokens: int
    hot_tokens: int
    ssd_tokens: int
    remote_tokens: int
    sent_images: int
    sent_bytes: int
    remote_read_images: int
    remote_read_bytes: int
    reused_tokens: int
    remote_evicted: int
    remote_peak: int

    @property
    def hit_tokens(self) -> int:
        return self.ram_tokens + self.ssd_tokens + self.remote_tokens

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(self.served.asked_tokens, 1)

    @property
    def sent_per_reused_token(self) -> float | None:
        """Bytes sent for each token that was ever read again; None where none was."""
        return self.sent_bytes / self.reused_tokens if self.reused_tokens else None
