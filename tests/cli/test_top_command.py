"""`prefixcache top`: what it shows of a server is what the server's page says; it goes on when the server goes away, and ends
as it is told to.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from directories import COMMAND, TOKEN, kv
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prefixcache import PrefixCache
from prefixcache.cli.top.metrics_page import Away, NotOurs, WatchedServer, address, facts, read_page
from prefixcache.cli.top.picture import meter, picture
from prefixcache.metrics.histogram import Histogram
from prefixcache.metrics.prometheus import CONTENT_TYPE, CacheCollector, render
from prefixcache.servers.cold_requests import ColdRequests
from prefixcache.servers.prompt_parts import MESSAGE, SYSTEM, Part
from prefixcache.tiers.parting import NO_STATE, PARTED, Parting
from tests.remote.servers import free_port
from tests.servers.serving import wait_for

TOKENS = [TOKEN + i for i in range(1000)]
QUICK = ("--interval", "0.1")


class Served:
    """A server of pages: `page` is asked for each, `answers` counts them."""

    def __init__(self, page: Callable[[], bytes], status: int = 200, port: int = 0):
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.paths.append(self.path)
                body = page()
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Says nothing."""

        self.paths: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(page: Callable[[], bytes], **more: Any) -> Iterator[Served]:
    served = Served(page, **more)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(ram="10MB", codec="raw", ssd_dir=tmp_path / "ssd", ssd="50MB") as made:
        yield made


def use(cache: PrefixCache) -> None:
    cache.store(TOKENS, kv(1000), model="m")
    cache.fetch([*TOKENS, 5], model="m")
    assert cache.flush(30)
    cache.trim_to(0)
    cache.promote(TOKENS, model="m").result(30)
    cache.fetch([*TOKENS, 5], model="m")


def narrow(said: str, width: int = 80) -> None:
    assert "\x1b" not in said
    assert [line for line in said.splitlines() if len(line.rstrip()) > width] == []


@pytest.fixture
def busy(cache: PrefixCache) -> Iterator[Served]:
    """A server whose cache is used between the first two looks at it."""
    looks = []

    def page() -> bytes:
        if len(looks) == 1:
            use(cache)
        looks.append(1)
        return render(CacheCollector(cache))

    with serving(page) as served:
        yield served


def test_a_servers_rates_are_of_what_happened_between_two_looks(busy, cache, call):
    done = call("top", busy.url, *QUICK, "--once", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    seen, stats = json.loads(done.stdout), cache.stats()
    assert stats.ssd is not None
    counts = {name: round(rate * seen["seconds"]) for name, rate in seen["per_second"].items() if rate is not None}
    assert counts == {
        "asked_tokens": 2002,
        "hit_tokens": 2000,
        "promoted_tokens": 1000,
        "stored_tokens": 1000,
        "fetches": 2,
        "stores": 1,
        "stored_bytes": stats.counters.stored_bytes,
        "written_bytes": stats.ssd.written_bytes,
        "read_bytes": stats.ssd.read_bytes,
        "evicted_ram": stats.counters.evicted,
        "evicted_ssd": 0,
    }
    assert seen["hit_rate"] == seen["hit_rate_since_start"]
    assert seen["hit_rate"] == pytest.approx({"ram": 1000 / 2002, "ssd": 1000 / 2002, "remote": 0.0})
    assert sum(seen["ram"][state] for state in ("images", "queued", "nodes", "reserved")) == stats.ram_held
    assert (seen["ram"]["limit"], seen["ssd"]["limit"]) == (10e6, 50e6)
    assert seen["ssd"]["used"] == stats.ssd.used
    assert seen["info"]["codec"] == "raw"
    latency = {name: (one["lately"], one["count"]) for name, one in seen["latency"].items()}
    assert latency == {
        "fetch_hit": (True, 2),
        "fetch_miss": (False, 0),
        "store": (True, 1),
        "promotion": (True, 1),
        "spill_of_a_file": (True, stats.ssd.written_files),
        "read_of_a_file": (True, stats.ssd.read_files),
    }
    assert seen["up"]


def test_a_servers_picture_is_plain_text_of_80_columns(busy, call):
    done = call("top", busy.url, *QUICK, "--once", columns=80)
    assert done.exit_code == 0
    narrow(done.stdout)
    assert "hit rate  99.9% (RAM 50.0%, SSD 50.0%); since its start 99.9%" in done.stdout
    assert "of 10.0 MB" in done.stdout
    assert "of 50.0 MB" in done.stdout
    assert "trouble   none since its start" in done.stdout
    for name in ("fetch hit", "store", "promotion", "spill of a file", "read of a file"):
        assert f"\n {name} " in done.stdout
    assert "fetch miss" not in done.stdout  # there was none
    assert str(TOKEN)[:4] not in done.stdout.replace(str(busy.port), "")


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("http://host:8080", "http://host:8080/metrics"),
        ("http://host:8080/", "http://host:8080/metrics"),
        ("https://host/metrics", "https://host/metrics"),
        ("http://[::1]:9/behind/a/proxy?x=1", "http://[::1]:9/behind/a/proxy?x=1"),
    ],
)
def test_an_address_may_leave_the_path_out(given, whole):
    assert address(given) == whole


@pytest.mark.parametrize(
    "given",
    ["ftp://host", "http://", "http://host:99999", "file:///etc/passwd", "http://[::1", "host:80", "/srv/cache"],
)
def test_what_is_no_address_is_told(call, given):
    done = call("top", given, "--once")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "such as http://127.0.0.1:8080" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"<html>hello</html>", 200, "not a page of Prometheus metrics"),
        (b"\xff\xfe\x00", 200, "not a page of Prometheus metrics"),
        (b"# TYPE up gauge\nup 1\n", 200, "none of prefixcache's"),
        (b"", 200, "none of prefixcache's"),
        (b"", 404, "it answers 404"),
    ],
)
def test_a_page_that_is_not_ours_is_told(call, body, status, told):
    with serving(lambda: body, status=status) as served:
        done = call("top", served.url, *QUICK)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in done.stderr
    assert f"{served.url}/metrics" in done.stderr


SAMPLES = """\
prefixcache_fetches_total 3.0
prefixcache_fetch_tokens_total{result="hit"} 10.0
prefixcache_fetch_tokens_total{result="miss"} 5.0
prefixcache_hit_tokens_total{tier="ram"} 10.0
prefixcache_hit_tokens_total{tier="ssd"} 0.0
prefixcache_ram_bytes{state="images"} 1e+06
prefixcache_ram_limit_bytes 1e+07
prefixcache_ssd_limit_bytes 1e+08
prefixcache_store_seconds_bucket{le="0.1"} 3.0
prefixcache_store_seconds_bucket{le="+Inf"} 4.0
prefixcache_store_seconds_sum 1.5
prefixcache_cold_requests_total{part="system",reason="parted"} 3.0
prefixcache_cold_requests_total{part="none",reason="evicted"} 1.0
prefixcache_last_cold_request{part="message",reason="parted",value="position"} 30.0
prefixcache_last_cold_request{part="message",reason="parted",value="message"} 2.0
prefixcache_last_cold_request{part="message",reason="parted",value="messages"} 3.0
prefixcache_info{codec="raw"} 1.0
""".splitlines()


@given(st.data())
def test_any_page_is_shown_or_refused(data):
    """Lines of a real page, some left out, some with other numbers or with other bytes in them."""
    pages = []
    for at in (1.0, 2.0):
        lines = data.draw(st.lists(st.sampled_from(SAMPLES), unique=True))
        numbers = st.sampled_from(["", "NaN", "-1", "1e400", "+Inf", "0", "7.5", "1e17"])
        lines = [f"{line.rpartition(' ')[0]} {number}" if (number := data.draw(numbers)) else line for line in lines]
        body = ("\n".join(["prefixcache_fetches_total 3", *lines]) + "\n").encode()
        if data.draw(st.booleans()):
            cut = data.draw(st.integers(0, len(body)))
            body = body[:cut] + data.draw(st.binary(max_size=4)) + body[cut:]
        try:
            pages.append(read_page("u", body, at))
        except NotOurs:
            return
    for before in (None, pages[0]):
        seen = facts("u", before, pages[1])
        json.dumps(seen, allow_nan=False)
        out = Console(file=io.StringIO(), width=80)
        out.print(picture(seen))


def test_cold_requests_are_shown_by_their_parts_and_the_last_one_by_its_place(cache, call):
    cold, looks = ColdRequests(), []

    def page() -> bytes:
        if looks:
            cold.tell("b", Parting(9_000, 20, 3_000, NO_STATE), lambda: Part(MESSAGE, 3, 12))
        looks.append(1)
        return render(CacheCollector(cache), cold)

    with serving(page) as served:
        cold.tell("a", Parting(21_393, 26, 26, PARTED), lambda: Part(SYSTEM))
        done = call("top", served.url, *QUICK, "--once", columns=80)
        seen = json.loads(call("top", served.url, *QUICK, "--once", "--json").stdout)["cold"]
    narrow(done.stdout)
    assert re.search(r"^cold +2 requests \(\+1\): 1 (message|system), 1 (message|system) *$", done.stdout, re.MULTILINE)
    assert "last: 20 of 9,000 hit, parts at 3,000, message 3 of 12: no state" in done.stdout
    assert (seen["requests"], seen["meanwhile"], seen["parts"]) == (4, 1, {"message": 3, "system": 1})
    last = {"tokens": 9_000, "hit": 20, "position": 3_000, "message": 3, "messages": 12}
    assert seen["last"] == {"part": "message", "reason": "no_state", **last}


def test_a_server_on_this_machine_is_asked_through_no_proxy(cache, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(lambda: render(CacheCollector(cache))) as served:
        assert WatchedServer(served.url).look()["up"]


def test_nobody_there_with_once_is_told(call):
    with serving(lambda: b"") as served:
        pass
    done = call("top", served.url, *QUICK, "--once")
    assert (done.exit_code, done.stdout) == (2, "")
    assert served.url in done.stderr
    assert "refused; is the server up" in done.stderr


def test_a_server_that_was_ours_and_answers_otherwise_may_come_back(cache):
    pages = [render(CacheCollector(cache)), b"<html>", render(CacheCollector(cache))]
    with serving(lambda: pages.pop(0)) as served:
        source = WatchedServer(served.url)
        assert source.look()["seconds"] is None
        with pytest.raises(Away, match="not a page"):
            source.look()
        assert source.look()["seconds"] > 0
    with serving(lambda: b"", status=503) as served, pytest.raises(Away, match="503"):
        WatchedServer(served.url).look()


def test_a_server_that_began_anew_has_no_rates_until_the_next_look(cache):
    use(cache)
    before = read_page("u", render(CacheCollector(cache)), 100.0)
    with PrefixCache(ram="10MB", codec="raw") as fresh:
        fresh.fetch(TOKENS, model="m")
        after = read_page("u", render(CacheCollector(fresh)), 102.0)
        again = read_page("u", render(CacheCollector(fresh)), 104.0)
    seen = facts("u", before, after)
    assert (seen["seconds"], seen["per_second"]["fetches"], seen["hit_rate"]["ram"]) == (None, None, 0)
    assert facts("u", after, again)["per_second"]["fetches"] == 0


def test_a_server_without_an_ssd_is_shown_without_one(call):
    with PrefixCache(ram="10MB", codec="raw") as cache, serving(lambda: render(CacheCollector(cache))) as served:
        done = call("top", served.url, *QUICK, "--once")
        seen = json.loads(call("top", served.url, *QUICK, "--once", "--json").stdout)
    assert "SSD" not in done.stdout
    assert "p99" not in done.stdout  # nothing was timed yet
    assert "nothing asked for" in done.stdout
    assert (seen["ssd"]["limit"], seen["per_second"]["written_bytes"], seen["hit_rate"]["ram"]) == (None, None, None)


def test_for_a_directory_it_names_inspect(call, filled):
    done = call("top", filled)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "run prefixcache inspect DIR, or watch prefixcache inspect DIR" in done.stderr


@pytest.mark.parametrize("interval", ["nan", "0"])
def test_a_bad_interval_is_told(call, interval):
    done = call("top", "http://127.0.0.1:1", "--once", "--interval", interval)
    assert done.exit_code == 2
    assert "--interval" in done.stderr


def test_what_a_server_calls_itself_cannot_write_to_the_terminal(cache, call):
    page = render(CacheCollector(cache)).replace(b'codec="raw"', 'codec="\x1b[31m\u202e[b]"'.encode())
    with serving(lambda: page) as served:
        done = call("top", served.url, *QUICK, "--once")
    narrow(done.stdout, 100)
    assert "\\x1b[31m\\u202e[b]" in done.stdout


def test_a_quantile_is_within_its_bucket():
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.read().quantile(0.5) == 0.0
    for value in (0.5, 1.5, 1.5, 3.0):
        histogram.observe(value)
    assert 1.0 < histogram.read().quantile(0.5) <= 2.0
    assert 2.0 < histogram.read().quantile(0.99) <= 4.0
    histogram.observe(100.0)
    assert histogram.read().quantile(0.99) == 4.0
    assert histogram.read().counts == (1, 3, 4, 5)


def test_a_meter_is_full_at_its_limit_and_never_longer():
    assert str(meter(0, 1000)) == "[" + "." * 24 + "]   0%  0 B of 1.00 kB"
    assert str(meter(500, 1000)).count("#") == 12
    assert str(meter(3000, 1000)) == "[" + "#" * 24 + "] 300%  3.00 kB of 1.00 kB"
    assert str(meter(500, None)) == str(meter(500, 0)) == "500 B"


# -- live -------------------------------------------------------------------------------------------------------------


def line_of(process: subprocess.Popen[str], up: bool) -> dict[str, Any]:
    assert process.stdout is not None
    while line := process.stdout.readline():
        seen = json.loads(line)
        if seen["up"] is up:
            return seen
    raise AssertionError(f"it ended: {process.wait()}")


def test_it_goes_on_while_a_server_is_away_and_ctrl_c_is_a_good_end(cache):
    def page() -> bytes:
        return render(CacheCollector(cache))

    with serving(page) as served:
        url, port = served.url, served.port
    command = [*COMMAND, "top", url, *QUICK, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        away = line_of(process, False)
        assert away["source"] == f"{url}/metrics"
        assert "refused" in away["error"]
        for _ in range(2):
            with serving(page, port=port):
                assert line_of(process, True)["ram"]["limit"] == 10e6
            line_of(process, False)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert (process.returncode, told) == (0, "")


def in_terminal(fd: int, until: Callable[[str], bool]) -> str:
    said, end = b"", time.monotonic() + 60
    while time.monotonic() < end and not until(said.decode(errors="replace")):
        if select.select([fd], [], [], 0.1)[0]:
            try:
                said += os.read(fd, 1 << 16)
            except OSError:  # its other end was closed
                break
    return said.decode(errors="replace")


FOREGROUND = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)


def top_in_terminal(url: str, *flags: str) -> tuple[subprocess.Popen[bytes], int, int]:
    """`top` in the foreground of a terminal of its own, and both ends of that terminal, ours first."""
    mine, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", FOREGROUND, *COMMAND, "top", url, *flags]
    return (
        subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True),
        mine,
        its,
    )


LOCAL = termios.ECHO | termios.ICANON | termios.ISIG


@pytest.mark.parametrize("pressed", [b"q", b"Q", b"\x1b", b"xq", b"\x03"])
def test_a_key_ends_it_and_leaves_the_terminal_as_it_was(cache, pressed):
    with serving(lambda: render(CacheCollector(cache))) as served:
        process, mine, its = top_in_terminal(served.url, "--interval", "3600")
        try:
            before = termios.tcgetattr(its)[3] & LOCAL
            said = in_terminal(mine, lambda said: "hit rate" in said)
            wait_for(lambda: not termios.tcgetattr(its)[3] & termios.ICANON, "a terminal that sends each key")
            os.write(mine, b"x\x1b[A")  # a letter that is none of ours, and an arrow
            time.sleep(0.2)
            assert process.poll() is None
            os.write(mine, pressed)
            said += in_terminal(mine, lambda said: "\x1b[?25h" in said)
            assert process.wait(60) == 0, said
            assert termios.tcgetattr(its)[3] & LOCAL == before
        finally:
            process.kill()
            os.close(its)
            os.close(mine)
    assert "\x1b[?25h" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_in_a_terminal_of_80_columns_it_redraws_without_colour_and_leaves_it_as_it_was(cache, signum):
    with serving(lambda: render(CacheCollector(cache))) as served:
        process, mine, its = top_in_terminal(served.url, *QUICK)
        try:
            before = termios.tcgetattr(its)[3] & LOCAL
            said = in_terminal(mine, lambda said: said.count("hit rate") >= 4)
            assert not termios.tcgetattr(its)[3] & termios.ICANON
            process.send_signal(signum)
            said += in_terminal(mine, lambda said: "\x1b[?25h" in said)
            assert process.wait(60) == (0 if signum == signal.SIGINT else 143)
            assert termios.tcgetattr(its)[3] & LOCAL == before
        finally:
            process.kill()
            os.close(its)
            os.close(mine)
    assert "\x1b[?25h" in said  # the cursor is back
    assert "Traceback" not in said
    assert not [code for code in ("\x1b[31m", "\x1b[32m", "\x1b[33m") if code in said]
    assert "\x1b[1A" in said  # it went back up to draw anew
