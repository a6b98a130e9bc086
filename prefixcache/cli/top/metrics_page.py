"""What `prefixcache top` knows of a server: its /metrics, read twice, and what happened in between, as plain values. A page
of metrics has no token and no text of a prompt. `picture` draws it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import ProxyHandler, Request, build_opener

from prometheus_client.parser import text_string_to_metric_families

from prefixcache.cli.text import safe, size
from prefixcache.metrics.histogram import Observed
from prefixcache.remote.url import is_loopback

TIMEOUT = 5.0  # seconds that a server may take to answer
LARGEST = 16 << 20  # bytes of a page
LARGEST_VALUE = 1e18  # of a sample: beyond it, below 0 or NaN is none of ours
KNOWN_BY = "prefixcache_fetches_total", ""
COLD, LAST_COLD = "prefixcache_cold_requests_total", "prefixcache_last_cold_request"
RATES = {  # what is shown a second, and the counters that it is of: name without "prefixcache_" and "_total", label's value
    "asked_tokens": (("fetch_tokens", "hit"), ("fetch_tokens", "miss")),
    "hit_tokens": (("hit_tokens", "ram"), ("hit_tokens", "ssd"), ("hit_tokens", "remote")),
    "promoted_tokens": (("promoted_tokens", ""),),
    "stored_tokens": (("store_tokens", "new"),),
    "fetches": (("fetches", ""),),
    "stores": (("stores", ""),),
    "stored_bytes": (("stored_bytes", ""),),
    "written_bytes": (("ssd_written_bytes", ""),),
    "read_bytes": (("ssd_read_bytes", ""),),
    "sent_bytes": (("remote_written_bytes", ""),),
    "brought_bytes": (("remote_read_bytes", ""),),
    "evicted_ram": (("evicted_images", "ram"),),
    "evicted_ssd": (("evicted_images", "ssd"),),
}
TIERS = "ram", "ssd", "remote"
TROUBLE = {
    "dropped": "dropped_images",
    "denied": "denied_reservations",
    "not_written": "write_errors",
    "quarantined": "ssd_quarantined_files",
    "unreadable": "ssd_unreadable_files",
    "refused_from_remote": "remote_refused_images",
    "remote_errors": "remote_errors",
}
TIMES = {
    "fetch_hit": ("fetch_seconds", "hit"),
    "fetch_miss": ("fetch_seconds", "miss"),
    "store": ("store_seconds", ""),
    "promotion": ("promote_seconds", ""),
    "spill_of_a_file": ("ssd_spill_seconds", ""),
    "read_of_a_file": ("ssd_read_seconds", ""),
}


Facts = dict[str, Any]


class Away(Exception):
    """Nobody answers there for now. The text says why."""


class NotOurs(Exception):
    """The page there is not prefixcache's. The text names it and says what to do."""


class Page(NamedTuple):
    """One scrape, `at` a time of the monotonic clock. `samples` by name and the value of the one label (of a bucket
    "label|le"); `info` has the info's labels.
    """

    at: float
    samples: dict[tuple[str, str], float]
    info: dict[str, str]

    def get(self, name: str, label: str = "") -> float | None:
        return self.samples.get((f"prefixcache_{name}", label))


class WatchedServer:
    """A server, looked at by its /metrics. ValueError for what is no address.

    `look` raises Away when nobody answers for now, NotOurs when the page is another's.
    """

    def __init__(self, url: str):
        self.name = address(url)
        self._before: Page | None = None

    def look(self) -> Facts:
        try:
            now = scrape(self.name)
        except NotOurs as error:
            if self._before is None:
                raise
            raise Away(str(error)) from None  # something else answers there meanwhile
        current = facts(self.name, self._before, now)
        self._before = now
        return current


def address(text: str) -> str:
    """Return the whole address of a server's metrics. ValueError for what is none."""
    if "://" not in text:
        raise ValueError(
            f"{text!r}: not an address of a server, such as http://127.0.0.1:8080; for a cache's directory run "
            "prefixcache inspect DIR, or watch prefixcache inspect DIR"
        )
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; give a server's address, such as http://127.0.0.1:8080") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{text!r}: not an address of a server; give one such as http://127.0.0.1:8080")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/metrics", parts.query, ""))


def scrape(url: str) -> Page:
    """Read the page. Raises Away when nobody answers as a server should, NotOurs for another's page."""
    direct = [ProxyHandler({})] if is_loopback(urlsplit(url).hostname or "") else []
    try:
        request = Request(url, headers={"Accept": "text/plain"})
        with build_opener(*direct).open(request, timeout=TIMEOUT) as answer:
            body, deadline = b"", time.monotonic() + TIMEOUT
            while len(body) <= LARGEST and (piece := answer.read1(LARGEST)):
                body += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"its page takes longer than {TIMEOUT:g} s")
    except HTTPError as error:
        error.close()
        if error.code >= 500:
            raise Away(f"it answers {error.code}") from None
        raise NotOurs(f"{url}: it answers {error.code}; give the address of a server's metrics") from None
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise Away(safe(str(getattr(error, "reason", error))) or type(error).__name__) from None
    if len(body) > LARGEST:
        raise NotOurs(f"{url}: more than {size(LARGEST)}: not a page of metrics")
    return read_page(url, body, time.monotonic())


def read_page(url: str, body: bytes, at: float) -> Page:
    samples: dict[tuple[str, str], float] = {}
    info: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples if family.name.startswith("prefixcache") else ():
                if sample.name == "prefixcache_info":
                    info = dict(sample.labels)
                    continue
                labels = [value for name, value in sorted(sample.labels.items()) if name != "le"]
                le = [sample.labels["le"]] if "le" in sample.labels else []
                value = float(sample.value)
                if not 0 <= value < LARGEST_VALUE or any(float(bound) < 0 for bound in le):
                    raise ValueError
                samples[sample.name, "|".join([*labels, *le])] = value
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):  # what the parser says to what is no page
        raise NotOurs(f"{url}: not a page of Prometheus metrics; give the address of a server's metrics") from None
    if KNOWN_BY not in samples:
        raise NotOurs(f"{url}: a page of metrics, but none of prefixcache's; give the address of its server")
    return Page(at, samples, info)


# -- the facts --------------------------------------------------------------------------------------------------------


def facts(url: str, before: Page | None, now: Page) -> Facts:
    """Return all that is shown, as plain values. What happened is of the time between two pages: None with no page before, or
    when the server was restarted meanwhile.
    """
    if before is not None and any(
        now.samples.get(key, 0) < value for key, value in before.samples.items() if key[0].endswith("_total")
    ):
        before = None
    seconds = max(now.at - before.at, 1e-6) if before is not None else None
    asked = RATES["asked_tokens"]
    return {
        "source": url,
        "up": True,
        "error": None,
        "now": time.time(),
        "seconds": seconds,
        "info": now.info,
        "per_second": {name: _rate(before, now, counters, seconds) for name, counters in RATES.items()},
        "hit_rate": {tier: _share(before, now, (("hit_tokens", tier),), asked) for tier in TIERS},
        "hit_rate_since_start": {tier: _share(None, now, (("hit_tokens", tier),), asked) for tier in TIERS},
        "ram": {
            **{state: now.get("ram_bytes", state) for state in ("images", "queued", "nodes", "hot", "reserved")},
            "limit": now.get("ram_limit_bytes"),
            "configured": now.get("ram_configured_bytes"),
        },
        "ssd": {name: now.get(f"ssd_{name}_bytes") for name in ("used", "limit", "disk", "queued", "quarantine")},
        "remote": {name: now.get(f"remote_{name}") for name in ("up", "writable", "queued_images")},
        "leases": {"count": now.get("leases"), "bytes": now.get("leased_bytes")},
        "images": {tier: now.get("images", tier) for tier in ("ram", "ssd")},
        "trouble": {name: now.get(f"{counter}_total") for name, counter in TROUBLE.items()},
        "trouble_meanwhile": {name: _growth(before, now, ((counter, ""),)) for name, counter in TROUBLE.items()},
        "cold": _cold(before, now),
        "latency": {name: _latency(before, now, *histogram) for name, histogram in TIMES.items()},
    }


def _cold(before: Page | None, now: Page) -> Facts:
    """Return how many requests hit little since the server's start, and meanwhile, by the part in which they parted; and what
    it says of the last one, None of none.
    """
    last: Facts | None = None
    parts: dict[str, float] = {}
    for (name, labels), value in now.samples.items():
        part, *others = labels.split("|")
        if name == COLD:
            parts[part] = parts.get(part, 0) + value
        elif name == LAST_COLD and len(others) == 2:
            last = (last or {"part": part, "reason": others[0]}) | {others[1]: value}
    total = sum(parts.values())
    earlier = [value for (name, _), value in (before.samples if before is not None else {}).items() if name == COLD]
    return {
        "requests": total,
        "meanwhile": None if before is None else total - sum(earlier),
        "parts": parts,
        "last": last,
    }


def _sum(page: Page | None, counters: Iterable[tuple[str, str]]) -> float | None:
    """Return the sum of these counters; None when the server has none of them."""
    values = [page.get(f"{name}_total", label) for name, label in counters] if page is not None else []
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _growth(before: Page | None, now: Page, counters: tuple[tuple[str, str], ...]) -> float | None:
    old, new = _sum(before, counters), _sum(now, counters)
    return new - old if old is not None and new is not None else None


def _rate(before: Page | None, now: Page, counters: tuple[tuple[str, str], ...], seconds: float | None) -> float | None:
    growth = _growth(before, now, counters)
    return growth / seconds if growth is not None and seconds else None


def _share(before: Page | None, now: Page, part: Any, whole: Any) -> float | None:
    """Return the share of what was asked for between the pages, or in all with no page before. None where nothing was."""
    hit, total = (_growth(before, now, c) if before is not None else _sum(now, c) for c in (part, whole))
    return hit / total if hit is not None and total else None


def _latency(before: Page | None, now: Page, name: str, label: str) -> Facts | None:
    """Return the latency between the pages; of all the server's time where nothing was timed in between. None where it
    has no such histogram.
    """
    new = _observed(now, name, label)
    if new is None:
        return None
    old = _observed(before, name, label) if before is not None else None
    lately = old is not None and old.bounds == new.bounds and new.number > old.number
    if lately and old is not None:
        counts = tuple(a - b for a, b in zip(new.counts, old.counts, strict=True))
        new = Observed(new.bounds, counts, new.total - old.total)
    return {"lately": lately, "count": new.number, "p50": new.quantile(0.5), "p99": new.quantile(0.99)}


def _observed(page: Page, name: str, label: str) -> Observed | None:
    head = f"{label}|" if label else ""
    buckets = sorted(
        (float(key[1].removeprefix(head)), int(value))
        for key, value in page.samples.items()
        if key[0] == f"prefixcache_{name}_bucket" and key[1].startswith(head)
    )
    if len(buckets) < 2 or buckets[-1][0] != math.inf:
        return None
    bounds, counts = zip(*buckets, strict=True)
    return Observed(bounds[:-1], counts, page.get(f"{name}_sum", label) or 0.0)
