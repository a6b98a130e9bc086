"""What `prefixcache top URL` shows of a server: its /metrics, read twice, and what happened in between. A page of metrics has
no token and no text of a prompt; names in it (a codec, an address) are shown with control characters escaped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefixcache.cli.text import foreign, safe, size
from prefixcache.cli.top.parts import Away, Facts, NotOurs, clock, meter, pairs, part_of
from prefixcache.metrics.histogram import Observed

TIMEOUT = 5.0  # seconds that a server may take to answer
LARGEST = 16 << 20  # bytes of a page
LARGEST_VALUE = 1e18  # of a sample: beyond it, below 0 or NaN is none of ours
KNOWN_BY = "prefixcache_fetches_total", ""
RATES = {  # what is shown a second, and the counters that it is of: name without "prefixcache_" and "_total", label's value
    "asked_tokens": (("fetch_tokens", "hit"), ("fetch_tokens", "miss")),
    "hit_tokens": (("hit_tokens", "ram"), ("hit_tokens", "ssd")),
    "promoted_tokens": (("promoted_tokens", ""),),
    "stored_tokens": (("store_tokens", "new"),),
    "fetches": (("fetches", ""),),
    "stores": (("stores", ""),),
    "stored_bytes": (("stored_bytes", ""),),
    "written_bytes": (("ssd_written_bytes", ""),),
    "read_bytes": (("ssd_read_bytes", ""),),
    "evicted_ram": (("evicted_images", "ram"),),
    "evicted_ssd": (("evicted_images", "ssd"),),
}
TROUBLE = {
    "dropped": "dropped_images", "denied": "denied_reservations", "not_written": "write_errors",
    "set_aside": "ssd_quarantined_files", "unreadable": "ssd_unreadable_files",
}  # fmt: skip
TIMES = {
    "fetch_hit": ("fetch_seconds", "hit"), "fetch_miss": ("fetch_seconds", "miss"), "store": ("store_seconds", ""),
    "promotion": ("promote_seconds", ""), "spill_of_a_file": ("ssd_spill_seconds", ""),
    "read_of_a_file": ("ssd_read_seconds", ""),
}  # fmt: skip


class Page(NamedTuple):
    """One scrape, `at` a time of the monotonic clock. `samples` by name and the value of the one label (of a bucket
    "label|le"); `info` has the info's labels.
    """

    at: float
    samples: dict[tuple[str, str], float]
    info: dict[str, str]

    def get(self, name: str, label: str = "") -> float | None:
        return self.samples.get((f"prefixcache_{name}", label))


class Server:
    """A server, looked at by its /metrics. ValueError for what is no address."""

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
        seen = facts(self.name, self._before, now)
        self._before = now
        return seen

    def picture(self, facts: Facts) -> RenderableType:
        return picture(facts)


def address(text: str) -> str:
    """The whole address of a server's metrics. ValueError for what is none."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; give a server's address, such as http://127.0.0.1:8080") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{text!r}: not an address of a server; give one such as http://127.0.0.1:8080")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/metrics", parts.query, ""))


def scrape(url: str, timeout: float = TIMEOUT) -> Page:
    """Read the page. Raises Away when nobody answers as a server should, NotOurs for another's page."""
    try:
        with urlopen(Request(url, headers={"Accept": "text/plain"}), timeout=timeout) as answer:
            body, deadline = b"", time.monotonic() + timeout
            while len(body) <= LARGEST and (piece := answer.read1(LARGEST)):
                body += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"its page takes longer than {timeout:g} s")
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
    """All that is shown, as plain values. What happened is of the time between two pages: None with no page before, or when
    the server was begun anew meanwhile.
    """
    if before is not None and any(
        now.samples.get(key, 0) < value for key, value in before.samples.items() if key[0].endswith("_total")
    ):
        before = None
    seconds = max(now.at - before.at, 1e-6) if before is not None else None
    asked = RATES["asked_tokens"]
    return {
        "source": url, "up": True, "error": None, "now": time.time(), "seconds": seconds, "info": now.info,
        "per_second": {name: _rate(before, now, of, seconds) for name, of in RATES.items()},
        "hit_rate": {tier: _share(before, now, (("hit_tokens", tier),), asked) for tier in ("ram", "ssd")},
        "hit_rate_since_start": {tier: _share(None, now, (("hit_tokens", tier),), asked) for tier in ("ram", "ssd")},
        "ram": {
            **{state: now.get("ram_bytes", state) for state in ("images", "queued", "nodes", "reserved")},
            "limit": now.get("ram_limit_bytes"), "configured": now.get("ram_configured_bytes"),
        },
        "ssd": {name: now.get(f"ssd_{name}_bytes") for name in ("used", "limit", "disk", "queued", "quarantine")},
        "images": {tier: now.get("images", tier) for tier in ("ram", "ssd")},
        "trouble": {name: now.get(f"{of}_total") for name, of in TROUBLE.items()},
        "trouble_meanwhile": {name: _grown(before, now, ((of, ""),)) for name, of in TROUBLE.items()},
        "latency": {name: _latency(before, now, *of) for name, of in TIMES.items()},
    }  # fmt: skip


def _sum(page: Page | None, of: Iterable[tuple[str, str]]) -> float | None:
    """None when the server has none of them."""
    found = [page.get(f"{name}_total", label) for name, label in of] if page is not None else []
    there = [value for value in found if value is not None]
    return sum(there) if there else None


def _grown(before: Page | None, now: Page, of: tuple[tuple[str, str], ...]) -> float | None:
    old, new = _sum(before, of), _sum(now, of)
    return new - old if old is not None and new is not None else None


def _rate(before: Page | None, now: Page, of: tuple[tuple[str, str], ...], seconds: float | None) -> float | None:
    grown = _grown(before, now, of)
    return grown / seconds if grown is not None and seconds else None


def _share(before: Page | None, now: Page, part: Any, whole: Any) -> float | None:
    """Of what was asked for between the pages, or in all with no page before. None where nothing was."""
    parts = [_grown(before, now, of) if before is not None else _sum(now, of) for of in (part, whole)]
    return parts[0] / parts[1] if parts[0] is not None and parts[1] else None


def _latency(before: Page | None, now: Page, name: str, label: str) -> Facts | None:
    """Between the pages; of all the server's time where nothing was timed in between. None where it has no such histogram."""
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
    found = sorted(
        (float(key[1].removeprefix(head)), int(value))
        for key, value in page.samples.items()
        if key[0] == f"prefixcache_{name}_bucket" and key[1].startswith(head)
    )
    if len(found) < 2 or found[-1][0] != math.inf:
        return None
    bounds, counts = zip(*found, strict=True)
    return Observed(bounds[:-1], counts, page.get(f"{name}_sum", label) or 0.0)


# -- the picture ------------------------------------------------------------------------------------------------------


def picture(now: Facts) -> RenderableType:
    """Fits in 80 columns."""
    info, rates = now["info"], now["per_second"]
    head = Text.assemble(("prefixcache ", "bold"), foreign(info.get("version", "?"), "bold"), "  ",
                         foreign(now["source"]), "  ", foreign(info.get("codec", "")), "  ", clock(now["now"]))  # fmt: skip
    table = pairs()
    table.add_row("hit rate", _hits(now))
    table.add_row("tokens/s", _listed(rates, "asked_tokens", "hit_tokens", "promoted_tokens", "stored_tokens"))
    table.add_row("calls/s", _listed(rates, "fetches", "stores"))
    table.add_row("RAM", _ram(now["ram"]))
    if now["ssd"]["limit"] is not None:
        table.add_row("SSD", _ssd(now["ssd"]))
        moved = f"written {_bytes(rates['written_bytes'])}, read {_bytes(rates['read_bytes'])}"
        table.add_row("disk", f"{moved}, {size(int(now['ssd']['queued'] or 0))} queued")
    leaving = f"{_number(rates['evicted_ram'])} images/s from RAM"
    if now["ssd"]["limit"] is not None:
        leaving += f", {_number(rates['evicted_ssd'])}/s from SSD"
    table.add_row("leaving", leaving)
    table.add_row("trouble", _trouble(now))
    latencies = _latencies(now["latency"])
    return Group(head, table, latencies) if latencies.row_count else Group(head, table)


def _hits(now: Facts) -> str:
    def of(rates: dict[str, float | None]) -> str:
        ram, ssd = rates["ram"], rates["ssd"]
        if ram is None or ssd is None:
            return "nothing asked for"
        return f"{ram + ssd:.1%} (RAM {ram:.1%}, SSD {ssd:.1%})"

    lately, always = of(now["hit_rate"]), of(now["hit_rate_since_start"])
    return f"since its start {always}" if now["seconds"] is None else f"{lately}; since its start {always}"


def _ram(ram: Facts) -> Text:
    held = sum(int(ram[state] or 0) for state in ("images", "queued", "nodes", "reserved"))
    rest = ", ".join(f"{name} {size(int(ram[name] or 0))}" for name in ("queued", "nodes", "reserved"))
    short = ""
    if (ram["limit"] or 0) < (ram["configured"] or 0):
        short = f"\nshort of memory: of {size(int(ram['configured']))} configured"
    return Text.assemble(meter(held, ram["limit"]), f"\n{rest}{short}")


def _ssd(ssd: Facts) -> Text:
    aside = f", quarantine {size(int(ssd['quarantine']))}" if ssd["quarantine"] else ""
    return Text.assemble(meter(ssd["used"] or 0, ssd["limit"]), f"\non disk {size(int(ssd['disk'] or 0))}{aside}")


def _trouble(now: Facts) -> Text:
    said = Text("")
    for name, number in now["trouble"].items():
        if number:
            more = now["trouble_meanwhile"][name] or 0
            said.append(", " if said else "")
            said.append(f"{number:,.0f} {_words(name)}" + (f" (+{more:,.0f})" if more else ""), "red" if more else "")
    return said or Text("none since its start")


def _latencies(latency: dict[str, Facts | None]) -> Table:
    table = part_of("took", "calls", "p50", "p99", "of")
    for name, one in latency.items():
        if one is not None and one["count"]:
            since = "this interval" if one["lately"] else "all its time"
            table.add_row(
                _words(name), f"{one['count']:,}", _seconds(one["p50"]), _seconds(one["p99"]), Text(since, "dim")
            )
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _listed(rates: dict[str, float | None], *names: str) -> str:
    return ", ".join(f"{_number(rates[name])} {name.partition('_')[0]}" for name in names)


def _number(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 99.95 or not rate else f"{rate:,.1f}"


def _bytes(rate: float | None) -> str:
    return "-" if rate is None else f"{size(int(rate))}/s"


def _seconds(seconds: float) -> str:
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:,.{1 if seconds / length < 99.95 else 0}f} {unit}"
    return f"{seconds * 1e6:,.0f} us"
