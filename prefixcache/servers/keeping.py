"""How long a request's prompt is kept, whether anything of it is, and under which session: what its field `cache` says."""

from __future__ import annotations

from typing import Any, NamedTuple

SECONDS = {"5m": 300.0, "1h": 3600.0}


class WantedLease(NamedTuple):
    """A lease that a request asks for: of how many of its first tokens, for how many seconds."""

    tokens: int
    seconds: float


class Keeping(NamedTuple):
    """`ttl`: seconds that the prompt is leased for, 0 for none; `system_ttl`: the same of its system text and tools. Not
    `stored`: nothing of the request is kept. `session`: "" where none is named.
    """

    ttl: float = 0.0
    system_ttl: float = 0.0
    stored: bool = True
    session: str = ""

    @classmethod
    def of(cls, wish: dict[str, Any] | None) -> Keeping:
        """Return what a request's checked field `cache` means."""
        told = {name: value for name, value in (wish or {}).items() if value is not None}
        ttl, system_ttl = (SECONDS.get(told.get(name, ""), 0.0) for name in ("ttl", "system_ttl"))
        return cls(ttl, system_ttl, told.get("store", True), told.get("session", ""))

    def leases(self, tokens: int, system: int) -> list[WantedLease]:
        """Return the leases of a prompt of so many tokens. `system`: tokens of the system text and tools, 0 where that is not
        known; then all of the prompt is kept as long.
        """
        ttl, system_ttl = (self.ttl, self.system_ttl) if system else (max(self.ttl, self.system_ttl), 0.0)
        wanted = WantedLease(system, system_ttl if system_ttl > ttl else 0.0), WantedLease(tokens, ttl)
        return [lease for lease in wanted if lease.seconds]
