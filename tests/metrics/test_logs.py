"""Logs for machines: one line of JSON a record whatever is in it, a summary a period, and nothing of a prompt in either."""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from mlx_lm.utils import load_tokenizer
from typer.testing import CliRunner

from prefixcache import PrefixCache
from prefixcache.cli import app
from prefixcache.metrics.logs import JsonFormatter, UsageLog, in_words, quotes_nothing, summed_up
from prefixcache.servers.salts import salt_of
from tests.models import states
from tests.servers.serving import TINY, chat, save_model, serve, starting, text
from tests.waiting import until

LONG = list(range(1000))
API_KEY = "sk-of-great-fame"
FIELDS = {
    "seconds",
    "fetches",
    "stores",
    "asked_tokens_per_second",
    "hit_rate",
    "ram_hit_rate",
    "ssd_hit_rate",
    "stored_bytes_per_second",
    "evicted",
    "dropped",
    "denied",
    "errors",
    "ram_held_bytes",
    "ram_limit_bytes",
}
SSD_FIELDS = {"written_bytes_per_second", "read_bytes_per_second", "queued_bytes", "ssd_used_bytes", "ssd_limit_bytes"}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(ram="10MB", codec="raw", ssd_dir=tmp_path / "ssd", ssd="50MB") as made:
        yield made


def written(message: str, *args: Any, level: int = logging.INFO, path: str = "here.py", **extra: Any) -> str:
    record = logging.getLogger("a.b").makeRecord("a.b", level, path, 1, message, args, None, extra=extra or None)
    return JsonFormatter().format(record)


# -- the formatter ----------------------------------------------------------------------------------------------------


def test_a_record_is_one_object_on_one_line():
    line = written("%d files\nof %s", 3, "\u2028\x1b[31m\udc80", tier="ssd", bytes=7, rates={"p50": 0.5})
    assert "\n" not in line
    assert line.isascii()
    found = json.loads(line)
    when = datetime.fromisoformat(found.pop("time").replace("Z", "+00:00"))
    assert abs(when.timestamp() - time.time()) < 60
    assert found == {
        "level": "INFO",
        "logger": "a.b",
        "message": "3 files\nof \u2028\x1b[31m\udc80",
        "tier": "ssd",
        "bytes": 7,
        "rates": {"p50": 0.5},
    }


def test_what_json_has_no_form_for_is_its_text():
    loop: list[Any] = []
    loop.append(loop)
    line = written("x", path_=Path("/a"), bad=float("nan"), odd={(1, 2): 3}, loop=loop, fine=[1])
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert found["path_"] == "/a"
    assert found["bad"] == "nan"
    assert found["odd"] == "{(1, 2): 3}"
    assert found["fine"] == [1]
    assert isinstance(found["loop"], str)


def test_a_field_does_not_hide_what_every_record_has():
    found = json.loads(written("hello", level_=1, time="never", logger=2))
    assert (found["message"], found["logger"], found["time_"], found["logger_"]) == ("hello", "a.b", "never", 2)


def test_a_traceback_is_a_field():
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.getLogger().makeRecord("r", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    found = json.loads(JsonFormatter().format(record))
    assert found["exception"].splitlines()[-1] == "ValueError: no"


def test_mlx_lms_lines_are_kept_without_the_bodies_that_they_quote():
    def passed(message: str, level: int, path: str) -> str | None:
        record = logging.getLogger().makeRecord("root", level, path, 1, message, (), None)
        return record.getMessage() if quotes_nothing(record) else None

    theirs = "/x/site-packages/mlx_lm/server.py"
    for head in ("JSONDecodeError: Expecting value - Raw body: SECRET", 'Invalid Request Body: ["SECRET"]'):
        kept = passed(head, logging.ERROR, theirs)
        assert kept is not None
        assert "SECRET" not in kept
        assert kept.startswith(head.partition(":")[0])
    assert passed("Incoming Request Body: SECRET", logging.DEBUG, theirs) is None
    assert passed("Prompt Cache: 3 sequences, 0.00 GB", logging.INFO, theirs) == "Prompt Cache: 3 sequences, 0.00 GB"
    assert (
        passed("Invalid Request Body: of another", logging.ERROR, "/x/other.py") == "Invalid Request Body: of another"
    )


# -- summaries --------------------------------------------------------------------------------------------------------


def summaries(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if hasattr(record, "asked_tokens_per_second")]


def test_a_summary_says_what_happened_since_the_last_as_rates(cache, caplog):
    caplog.set_level(logging.INFO, "prefixcache")
    now = [100.0]
    summary = UsageLog(cache, 10, clock=lambda: now[0])
    stored = cache.store(LONG, states.sliceable(LONG), model="m")
    cache.fetch([*LONG, 5, 6, 7, 8], model="m")
    cache.flush(30)
    cache.trim_to(0)
    cache.promote(LONG, model="m").result(30)
    cache.fetch([*LONG, 5, 6, 7, 8], model="m")
    now[0] = 104.0
    summary.look()
    now[0] = 114.0
    summary.look()
    first, second = (vars(record) for record in summaries(caplog))
    stats = cache.stats()
    assert stats.ssd is not None
    assert {name: first[name] for name in ("seconds", "fetches", "stores", "dropped", "denied", "errors")} == {
        "seconds": 4,
        "fetches": 2,
        "stores": 1,
        "dropped": 0,
        "denied": 0,
        "errors": 0,
    }
    assert first["asked_tokens_per_second"] == 2008 / 4
    assert first["hit_rate"] == pytest.approx(2000 / 2008, abs=1e-6)
    assert first["ram_hit_rate"] == first["ssd_hit_rate"] == pytest.approx(1000 / 2008, abs=1e-6)
    assert first["stored_bytes_per_second"] == first["written_bytes_per_second"] == stored.new_bytes / 4
    assert first["read_bytes_per_second"] == stats.ssd.read_bytes / 4
    assert (second["seconds"], second["hit_rate"], second["asked_tokens_per_second"]) == (10, None, 0)
    assert second["ram_held_bytes"] == stats.ram_held
    assert second["ssd_used_bytes"] == stats.ssd.used
    assert second.keys() >= FIELDS | SSD_FIELDS


def test_a_summary_can_be_read_and_parsed(cache, caplog):
    caplog.set_level(logging.INFO, "prefixcache")
    summary = UsageLog(cache, 10)
    cache.store(LONG, states.sliceable(LONG), model="m")
    summary.look()
    cache.fetch([*LONG, 5], model="m")
    summary.look()
    idle, busy = summaries(caplog)
    assert idle.getMessage().startswith("nothing asked for; ")
    assert re.search(r"tokens/s asked for, 99\.9% hit \(RAM 99\.9%, SSD 0\.0%\); ", busy.getMessage())
    held = r"; RAM \d+(\.\d+)? kB of 10\.0 MB; SSD \d+(\.\d+)? kB of 50\.0 MB$"
    assert re.search(held, busy.getMessage())
    found = json.loads(JsonFormatter().format(busy))
    assert found["message"] == busy.getMessage()
    assert found.keys() == FIELDS | SSD_FIELDS | {"time", "level", "logger", "message"}
    assert (found["level"], found["logger"]) == ("INFO", "prefixcache")


def test_without_an_ssd_nothing_is_said_of_one():
    with PrefixCache(ram="10MB", codec="raw") as cache:
        stats = cache.stats()
        fields = summed_up(stats, stats, 0.0)
    assert fields.keys() == FIELDS
    assert "SSD" not in in_words(fields)


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefixcache-summary"]


def gone() -> bool:
    return not running()


def test_the_setting_log_every_logs_until_the_cache_is_closed(caplog):
    caplog.set_level(logging.INFO, "prefixcache")
    with PrefixCache(ram="10MB", codec="raw", log_every=0.05) as cache:
        until(lambda: len(summaries(caplog)) >= 2)
        assert cache.stats().ram_limit == 10e6
    until(gone)


def test_without_the_setting_there_is_no_thread():
    with PrefixCache(ram="10MB", codec="raw"):
        assert not running()


def test_a_cache_that_nobody_has_any_more_ends_its_summaries_at_once():
    cache = PrefixCache(ram="10MB", codec="raw")
    summary = UsageLog(cache, 3600)
    summary.start()
    assert running()
    del cache
    gc.collect()
    until(gone)
    summary.look()  # says nothing of what is gone


def test_a_summary_that_fails_is_told_and_the_next_comes(caplog):
    class Failing:
        calls = 0

        def stats(self) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise OSError("no")
            return stats

    with PrefixCache(ram="10MB", codec="raw") as cache:
        stats = cache.stats()
    caplog.set_level(logging.INFO, "prefixcache")
    failing = Failing()
    summary = UsageLog(failing, 0.02)
    summary.start()
    until(lambda: summaries(caplog))
    summary.stop()
    until(gone)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
        "log_every=0.02: the cache could not be looked at"
    ]
    assert summaries(caplog)


# -- a whole conversation ---------------------------------------------------------------------------------------------


def spoken(ids: list[int]) -> Iterator[str]:
    """How tokens could stand in a text: two neighbours in digits, one as the bytes of an int64."""
    for a, b in pairwise(ids):
        yield from (f"{a}, {b}", f"{a},{b}", f"{a} {b}")
    for token in ids:
        raw = np.array([token], "<i8").tobytes()
        yield from (raw.hex(), repr(raw)[2:-1])


def test_nothing_of_a_served_conversation_is_in_logs_metrics_and_top(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_LOG_EVERY", "0.1")
    model, asked = save_model(tmp_path / "model"), [f"Xylograph {turn} quokkas?" for turn in range(2)]
    flags = ["--model", model, "--ssd-dir", tmp_path / "ssd", "--ssd", "100MB", "--log-level", "DEBUG", "--log-json"]
    flags += ["--salt-from", "authorization", "--require-salt"]
    with starting(serve, tmp_path / "log", "--ram", "20MB", "--codec", "raw", *flags) as server:
        server.ready()
        server.url = server.url.rstrip('"}')
        answers = chat(server.as_tenant(API_KEY), text(280, "brontide"), asked, cache_salt="tenantsecret")
        for headers in ({}, {"Authorization": f"Basic {API_KEY}"}, {"Authorization": "Bearer " + API_KEY * 10_000}):
            requests.post(f"{server.url}/v1/completions", json={"prompt": 7}, headers=headers, timeout=60)
        for body in ("{Xylograph", '["Xylograph"]', '{"messages": "Xylograph"}'):
            requests.post(f"{server.url}/v1/chat/completions", data=body, timeout=60)
        page = requests.get(f"{server.url}/metrics", timeout=60).text
        seen = [
            CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", server.url, *more]).output
            for more in ([], ["--json"])
        ]
        assert server.end() == 0
    lines = server.said().splitlines()
    logged = [json.loads(line) for line in lines]
    assert {"prefixcache", "prefixcache.http", "root"} <= {line["logger"] for line in logged}
    assert [line for line in logged if line["logger"] == "prefixcache.http" and line["client"] == "127.0.0.1"]
    assert [line["message"] for line in logged if line["level"] == "ERROR"]  # the bodies that are none
    assert answers[1].cached
    assert 'prefixcache_fetch_tokens_total{result="hit"}' in page
    ids = load_tokenizer(str(TINY)).encode(" ".join([text(280, "brontide"), *asked]))
    salts = [salt_of(token, salt) for token in (API_KEY, f"basic {API_KEY}") for salt in ("tenantsecret", "")]
    secrets = [API_KEY, *(secret for salt in salts for secret in (salt[1:].hex(), repr(salt[1:])[2:-1]))]
    secrets += ["brontide", "Xylograph", "quokkas", "tenantsecret", *(answer.text for answer in answers), *spoken(ids)]
    for said in (server.said(), page, *seen):
        assert said
        said = re.sub(r"\d+\.\d+", "", said)  # 0.19000000000000003 seconds are no token's bytes in hexadecimal
        assert [secret for secret in secrets if secret in said] == []
