"""The picture that `prefixcache top` draws of a server: 80 columns wide, made of what `server` knows. Names that a server
gives itself (its codec, its address) are shown with control characters escaped.
"""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefixcache.cli.tables import listing, named_rows
from prefixcache.cli.text import duration, foreign, size
from prefixcache.cli.top.metrics_page import Facts

BAR = 24  # columns of a meter
LAST_COLD_VALUES = "tokens", "hit", "position", "message", "messages"


def picture(now: Facts) -> RenderableType:
    info, rates = now["info"], now["per_second"]
    head = Text.assemble(
        ("prefixcache ", "bold"),
        foreign(info.get("version", "?"), "bold"),
        "  ",
        foreign(now["source"]),
        "  ",
        foreign(info.get("codec", "")),
        "  ",
        clock(now["now"]),
    )
    table = named_rows()
    table.add_row("hit rate", _hits(now))
    if now["cold"]["requests"]:
        table.add_row("cold", _cold(now["cold"]))
    table.add_row("tokens/s", _listed(rates, "asked_tokens", "hit_tokens", "promoted_tokens", "stored_tokens"))
    table.add_row("calls/s", _listed(rates, "fetches", "stores"))
    table.add_row("RAM", _ram(now["ram"]))
    if now["ssd"]["limit"] is not None:
        table.add_row("SSD", _ssd(now["ssd"]))
        moved = f"written {_bytes(rates['written_bytes'])}, read {_bytes(rates['read_bytes'])}"
        table.add_row("disk", f"{moved}, {size(int(now['ssd']['queued'] or 0))} queued")
    if now["remote"]["up"] is not None:
        table.add_row("remote", _remote(now["remote"], rates))
    if now["leases"]["count"]:
        table.add_row("leases", f"{now['leases']['count']:,.0f}, {size(int(now['leases']['bytes'] or 0))}")
    evicted = f"{_number(rates['evicted_ram'])} images/s from RAM"
    if now["ssd"]["limit"] is not None:
        evicted += f", {_number(rates['evicted_ssd'])}/s from SSD"
    table.add_row("evicted", evicted)
    table.add_row("trouble", _trouble(now))
    latencies = _latencies(now["latency"])
    return Group(head, table, latencies) if latencies.row_count else Group(head, table)


def _hits(now: Facts) -> str:
    def describe(rates: dict[str, float | None]) -> str:
        ram, ssd, remote = rates["ram"], rates["ssd"], rates["remote"] or 0.0
        if ram is None or ssd is None:
            return "nothing asked for"
        far = f", remote {remote:.1%}" if now["remote"]["up"] is not None else ""
        return f"{ram + ssd + remote:.1%} (RAM {ram:.1%}, SSD {ssd:.1%}{far})"

    since_start = f"since its start {describe(now['hit_rate_since_start'])}"
    return since_start if now["seconds"] is None else f"{describe(now['hit_rate'])}; {since_start}"


def _cold(cold: Facts) -> Text:
    """Return how many requests hit little, by the part in which they parted, and where the last one did."""
    more = f" (+{cold['meanwhile']:,.0f})" if cold["meanwhile"] else ""
    parts = sorted(cold["parts"].items(), key=lambda counted: -counted[1])
    listed = ", ".join(f"{number:,.0f} {part}" for part, number in parts)
    text = foreign(f"{cold['requests']:,.0f} requests{more}: {listed}")
    if (last := cold["last"]) is not None:
        tokens, hit, position, message, messages = (last.get(name, 0.0) for name in LAST_COLD_VALUES)
        where = f"{last['part']} {message:,.0f} of {messages:,.0f}" if message else last["part"]
        text.append("\n")
        text.append(foreign(f"last: {hit:,.0f} of {tokens:,.0f} hit, parts at {position:,.0f}, {where}: "))
        text.append(foreign(_words(last["reason"])))
    return text


def _ram(ram: Facts) -> Text:
    used = sum(int(ram[state] or 0) for state in ("images", "queued", "nodes", "hot", "reserved"))
    rest = ", ".join(f"{name} {size(int(ram[name] or 0))}" for name in ("queued", "nodes", "hot", "reserved"))
    short = ""
    if (ram["limit"] or 0) < (ram["configured"] or 0):
        short = f"\nshort of memory: of {size(int(ram['configured']))} configured"
    return Text.assemble(meter(used, ram["limit"]), f"\n{rest}{short}")


def _ssd(ssd: Facts) -> Text:
    quarantine = f", quarantine {size(int(ssd['quarantine']))}" if ssd["quarantine"] else ""
    return Text.assemble(meter(ssd["used"] or 0, ssd["limit"]), f"\non disk {size(int(ssd['disk'] or 0))}{quarantine}")


def _remote(remote: Facts, rates: Facts) -> Text:
    moved = f"sent {_bytes(rates['sent_bytes'])}, read {_bytes(rates['brought_bytes'])}"
    text = Text(f"{moved}, {int(remote['queued_images'] or 0)} images queued")
    if not remote["up"]:
        text.append("; left alone: it fails", "red")
    elif not remote["writable"]:
        text.append("; takes no images", "red")
    return text


def _trouble(now: Facts) -> Text:
    text = Text("")
    for name, number in now["trouble"].items():
        if number:
            more = now["trouble_meanwhile"][name] or 0
            text.append(", " if text else "")
            text.append(f"{number:,.0f} {_words(name)}" + (f" (+{more:,.0f})" if more else ""), "red" if more else "")
    return text or Text("none since its start")


def _latencies(latency: dict[str, Facts | None]) -> Table:
    table = listing(["took"], ["calls", "p50", "p99", "of"])
    for name, timed in latency.items():
        if timed is not None and timed["count"]:
            period = Text("this interval" if timed["lately"] else "all its time", "dim")
            table.add_row(_words(name), f"{timed['count']:,}", duration(timed["p50"]), duration(timed["p99"]), period)
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


def clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def meter(used: float, limit: float | None) -> Text:
    """Return how much of a limit is used, as a bar and in numbers; without a limit the number alone."""
    if not limit:
        return Text(size(int(used)))
    share = min(max(used / limit, 0.0), 1.0)
    full = round(share * BAR)
    return Text.assemble(
        "[",
        ("#" * full, "green"),
        "." * (BAR - full),
        f"] {used / limit:4.0%}  {size(int(used))} of {size(int(limit))}",
    )
