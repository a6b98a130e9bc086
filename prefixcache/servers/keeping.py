"""How long a request's prompt is kept, whether anything of it is, and under which session: what its field `cache` says."""

from __future__ import annotations

from typing import Any, NamedTuple

SECONDS = {"5m": 300.0, "1h": 3600.0}


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

    def leases(self, tokens: int, system: int) -> list[tuple[int, float]]:
        """Return the leases of a prompt of so many tokens: how many of its first tokens, and for how many seconds. `system`:
        tokens of the system text and tools, 0 where that is not known; then all of the prompt is kept as long.
        """
        if not system:
            return [(tokens, max(self.ttl, self.system_ttl))] if self.ttl or self.system_ttl else []
        wanted = [(system, self.system_ttl if self.system_ttl > self.ttl else 0.0), (tokens, self.ttl)]
        return [lease for lease in wanted if lease[1]]
