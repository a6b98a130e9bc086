"""Why requests were cold: what the log, /metrics and `prefixcache top` say of those that hit little of their prompt, in
positions and names of parts, never with a text. `mlx_lm.http_server` tells of each when it is answered.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixcache.servers.prompt_parts import UNKNOWN, Part
from prefixcache.tiers.parting import REASONS, Parting

log = logging.getLogger("prefixcache")

NO_PART = "none"  # of a prompt that did not part from anything
AT_ONCE = 4  # requests whose parts are looked for at a time; of more than that the part is not told


class ColdRequest(NamedTuple):
    """A request that hit little: where it parted from what is stored, and in which part of its prompt."""

    parting: Parting
    part: Part

    def in_words(self) -> str:
        """Return what the log says of it."""
        tokens, hit, position, reason = self.parting
        if self.part.name != NO_PART:
            parted = f"it parts from what is stored at token {position:,}, in {self.part.in_words()}; "
        else:
            parted = f"{position:,} tokens are known; " if position else ""
        return f"cold, {hit:,} of {tokens:,} tokens hit: {parted}{REASONS[reason]}"

    def fields(self) -> dict[str, Any]:
        """Return the same as fields, for a log of JSON."""
        tokens, hit, position, reason = self.parting
        fields: dict[str, Any] = {"prompt_tokens": tokens, "hit_tokens": hit}
        fields |= {"cold_at": position, "cold_part": self.part.name, "cold_reason": reason}
        if self.part.number:
            fields |= {"cold_message": self.part.number, "cold_messages": self.part.total}
        return fields


class ColdRequests(Collector):
    """The cold requests of one server: their counts since its start, and the last one. Thread-safe: `_lock` guards both."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finding = threading.BoundedSemaphore(AT_ONCE)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last: ColdRequest | None = None

    def tell(self, request_id: str, parting: Parting, find_part: Callable[[], Part]) -> None:
        """Log and count a request. `find_part` returns the part of its prompt in which it parted."""
        cold = ColdRequest(parting, self._part_by(find_part) if parting.has_parted else Part(NO_PART))
        with self._lock:
            self._counts[cold.part.name, parting.reason] += 1
            self._last = cold
        log.info("%s: %s", request_id, cold.in_words(), extra={"id": request_id, **cold.fields()})

    def _part_by(self, find_part: Callable[[], Part]) -> Part:
        if not self._finding.acquire(blocking=False):
            return Part(UNKNOWN)
        try:
            return find_part()
        except Exception as error:  # of a tokenizer or a template
            log.debug("no part is told: %s", type(error).__name__)
            return Part(UNKNOWN)
        finally:
            self._finding.release()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, last = dict(self._counts), self._last
        text = "Requests that hit less of their prompt than cold_below, by the part in which they parted, and why."
        counter = CounterMetricFamily("prefixcache_cold_requests", text, labels=("part", "reason"))
        for labels, number in counts.items():
            counter.add_metric(labels, number)
        yield counter
        text = "The last cold request: tokens of its prompt, hit, and where it parted; the message, of how many; 0 for none."
        gauge = GaugeMetricFamily("prefixcache_last_cold_request", text, labels=("part", "reason", "value"))
        if last is not None:
            tokens, hit, position, reason = last.parting
            values = {"tokens": tokens, "hit": hit, "position": position}
            values |= {"message": last.part.number, "messages": last.part.total}
            for name, value in values.items():
                gauge.add_metric((last.part.name, reason, name), value)
        yield gauge
