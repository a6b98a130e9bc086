"""Logs for machines: `JsonFormatter` writes a record as one line of JSON, `UsageLog` logs every so many seconds what a cache
did, as rates. Neither ever has anything of a prompt; `quotes_nothing` keeps the lines of others out that would.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Protocol

from prefixcache.byte_sizes import size
from prefixcache.metrics.periodic import Periodic
from prefixcache.metrics.stats import Stats

log = logging.getLogger("prefixcache")

_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # what any record has
_BODIES = ("JSONDecodeError:", "Invalid Request Body:")  # mlx-lm's errors that quote a request
_SERVER = "mlx_lm/server.py"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, ASCII: time (UTC), level, logger, message, what `extra` was given, and a traceback if there is
    one. A value that JSON has no form for is its text.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _OWN:
                line[f"{name}_" if name in line else name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return json.dumps(line, allow_nan=False, default=str)
        except (TypeError, ValueError, RecursionError):  # NaN, a key that is no text, an object within itself
            return json.dumps({str(name): _plain(value) for name, value in line.items()}, default=str)


def _plain(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


def quotes_nothing(record: logging.LogRecord) -> bool:
    """Take the request's body out of mlx-lm's errors, and refuse its DEBUG lines, which quote all. A filter."""
    if record.pathname.replace("\\", "/").endswith(_SERVER):
        if record.levelno <= logging.DEBUG:
            return False
        for head in _BODIES:
            if isinstance(record.msg, str) and record.msg.startswith(head):
                record.msg, record.args = f"{head} the request's body is not as it must be", ()
    return True


class _HasStats(Protocol):
    def stats(self) -> Stats: ...


class UsageLog(Periodic):
    """Logs what a cache did since the last look, and what it holds. Level INFO of the logger "prefixcache"; the numbers are
    in `extra`, for `JsonFormatter`, with their units in their names. The looks end when the cache is gone.
    """

    def __init__(self, cache: _HasStats, every: float, clock: Callable[[], float] = time.monotonic):
        super().__init__("summary", every, f"log_every={every:g}: the cache could not be looked at")
        self._cache = weakref.ref(cache, lambda gone: self.stop())
        self._clock = clock
        self._before = cache.stats()
        self._at = clock()

    def look(self) -> bool:
        cache = self._cache()
        if cache is None:
            return False
        now, stats = self._clock(), cache.stats()
        fields = summed_up(self._before, stats, now - self._at)
        self._before, self._at = stats, now
        log.info("%s", in_words(fields), extra=fields)
        return True


def summed_up(before: Stats, after: Stats, seconds: float) -> dict[str, Any]:
    """Return what happened between two looks at a cache: rates a second, counts, and what is held now. A hit rate is None
    where nothing was asked for; of a cache without an SSD or remote tier their fields are missing.
    """
    old, new, rate = before.counters, after.counters, 1 / max(seconds, 1e-9)
    asked = new.asked_tokens - old.asked_tokens
    ram, ssd = new.ram_hit_tokens - old.ram_hit_tokens, new.ssd_hit_tokens - old.ssd_hit_tokens
    remote = new.remote_hit_tokens - old.remote_hit_tokens
    fields: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "fetches": new.fetches - old.fetches,
        "stores": new.stores - old.stores,
        "asked_tokens_per_second": round(asked * rate, 3),
        "hit_rate": round((ram + ssd + remote) / asked, 6) if asked else None,
        "ram_hit_rate": round(ram / asked, 6) if asked else None,
        "ssd_hit_rate": round(ssd / asked, 6) if asked else None,
        "stored_bytes_per_second": round((new.stored_bytes - old.stored_bytes) * rate, 3),
        "evicted": new.evicted - old.evicted,
        "dropped": new.dropped - old.dropped,
        "denied": new.denied - old.denied,
        "errors": new.write_errors + new.corrupt - old.write_errors - old.corrupt,
        "ram_held_bytes": after.ram_held,
        "ram_limit_bytes": after.ram_limit,
    }
    if before.ssd is not None and after.ssd is not None:
        fields |= {
            "written_bytes_per_second": round((after.ssd.written_bytes - before.ssd.written_bytes) * rate, 3),
            "read_bytes_per_second": round((after.ssd.read_bytes - before.ssd.read_bytes) * rate, 3),
            "queued_bytes": after.ssd.queued_bytes,
            "ssd_used_bytes": after.ssd.used,
            "ssd_limit_bytes": after.ssd.limit,
        }
    if before.remote is not None and after.remote is not None:
        fields |= {
            "remote_hit_rate": round(remote / asked, 6) if asked else None,
            "remote_written_bytes_per_second": round(
                (after.remote.written_bytes - before.remote.written_bytes) * rate, 3
            ),
            "remote_read_bytes_per_second": round((after.remote.read_bytes - before.remote.read_bytes) * rate, 3),
            "remote_errors": after.remote.errors - before.remote.errors,
            "remote_queued_images": after.remote.queued,
        }
    return fields


def in_words(fields: dict[str, Any]) -> str:
    """Return what `summed_up` gave as a line to read."""
    hits = "nothing asked for"
    if fields["hit_rate"] is not None:
        remote = f", remote {fields['remote_hit_rate']:.1%}" if "remote_hit_rate" in fields else ""
        hits = (
            f"{fields['asked_tokens_per_second']:,.0f} tokens/s asked for, {fields['hit_rate']:.1%} hit "
            f"(RAM {fields['ram_hit_rate']:.1%}, SSD {fields['ssd_hit_rate']:.1%}{remote})"
        )
    said = [hits, f"{_rate(fields['stored_bytes_per_second'])} stored"]
    if "ssd_used_bytes" in fields:
        said.append(
            f"{_rate(fields['written_bytes_per_second'])} written, {_rate(fields['read_bytes_per_second'])} read"
        )
    if "remote_errors" in fields:
        said.append(
            f"remote: {_rate(fields['remote_written_bytes_per_second'])} sent, "
            f"{_rate(fields['remote_read_bytes_per_second'])} read, {fields['remote_errors']:,} errors"
        )
    said.append(", ".join(f"{fields[name]:,} {name}" for name in ("dropped", "denied", "errors")))
    said.append(f"RAM {size(fields['ram_held_bytes'])} of {size(fields['ram_limit_bytes'])}")
    if "ssd_used_bytes" in fields:
        said.append(f"SSD {size(fields['ssd_used_bytes'])} of {size(fields['ssd_limit_bytes'])}")
    return "; ".join(said)


def _rate(bytes_per_second: float) -> str:
    return f"{size(round(bytes_per_second))}/s"
