"""The remote tier as a whole, with real servers that stop, die, forget, fill up and lie, behind networks that are bad: every
fetch is right or a miss, no request waits for a server that doesn't answer, and everything comes back by itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from valkey import Valkey

from prefixcache import PrefixCache
from prefixcache.image_format import ROWS
from prefixcache.metrics.prometheus import CacheCollector, render
from prefixcache.remote.sealing import NoSeal, image_name
from tests.inside import inside
from tests.models import states
from tests.models.states import got, put
from tests.remote.conftest import Place
from tests.remote.dict_engine import DictEngine
from tests.remote.fleet import LONG, Machine, brought, sent, shared
from tests.remote.servers import LOOPBACK, Server, proxy, valkey_server
from tests.waiting import until


@pytest.fixture
def machine(open_machine: Callable[..., PrefixCache]) -> Machine:
    def make(url: str, mounted: bool = True, **values: Any) -> PrefixCache:
        if mounted and url.startswith("file://"):
            Path(url.removeprefix("file://")).mkdir(exist_ok=True)
        return open_machine(**{"remote": url, "remote_timeout": 1.0, **values})

    return make


def calls_of(cache: PrefixCache) -> Counter[str]:
    """Counts the calls of its engine from now on."""
    engine, calls = inside(cache).storage.remote._client.engine, Counter[str]()

    def counted(name: str) -> None:
        call = getattr(engine, name)

        def count(*arguments: Any, **more: Any) -> Any:
            calls[name] += 1
            return call(*arguments, **more)

        setattr(engine, name, count)

    for name in ("sizes", "get", "put", "names_under"):
        counted(name)
    return calls


def valkey(port: int) -> str:
    return f"valkey://{LOOPBACK}:{port}/tests"


def closes_within(cache: PrefixCache, seconds: float) -> bool:
    began = time.monotonic()
    cache.close()
    return time.monotonic() - began < seconds


# -- a server that does not answer ------------------------------------------------------------------------------------


def test_a_server_that_stops_delays_few_requests_and_is_hit_again_when_it_goes_on(machine, remote_place: Place):
    url, server = remote_place.url(), remote_place.server
    assert server is not None
    shared(machine(url, remote_timeout=5.0), LONG)
    other, closing = machine(url), machine(url)
    for cache in (other, closing):
        put(cache, [5] * 300)
        assert brought(cache, [6] * 300) == 0  # connected
    calls = calls_of(other)
    server.freeze()
    try:
        began = time.monotonic()
        assert brought(other, LONG, prefill_rate=500.0) == 0
        assert time.monotonic() - began < 1.5  # what computing takes is 2 s
        for first in range(50):
            assert brought(other, [first + 10, *LONG], prefill_rate=500.0) == 0
        assert calls["sizes"] == 1
        began = time.monotonic()
        for first in range(20):
            tokens = [first, *LONG]
            put(other, tokens)
            assert other.match(tokens, model="m") == (1001, 1001)
            assert got(other, tokens) == 1000
        assert time.monotonic() - began < 3
        put(closing, LONG)
        got(closing, LONG)
        assert closes_within(closing, 8)
        until(lambda: not other.stats().remote.reading, 10)
        asked = calls["sizes"]
        for first in range(50):
            assert brought(other, [first + 100, *LONG], prefill_rate=500.0) == 0
        assert calls["sizes"] - asked <= 1  # a probe
    finally:
        server.thaw()
    until(lambda: other.stats().remote.reading, 20)
    third = machine(url)
    until(lambda: brought(third, LONG) == 768)
    assert got(third, LONG) == 768


def test_a_machine_that_has_stored_nothing_does_not_wait_for_layouts_longer(machine):
    with valkey_server() as server:
        shared(machine(valkey(server.port)), LONG)
        other = machine(valkey(server.port))
        server.freeze()
        try:
            began = time.monotonic()
            assert brought(other, LONG, prefill_rate=500.0) == 0
            assert time.monotonic() - began < 1
        finally:
            server.thaw()


@pytest.mark.parametrize("rate", [300, 10_000], ids=["stall", "trickle"])
def test_a_read_that_stalls_in_mid_value_is_given_up_and_few_pay_for_it(machine, rate):
    with valkey_server() as server, proxy(server.port) as network:
        shared(machine(valkey(server.port)), LONG)
        other = machine(valkey(network.port))
        put(other, [5] * 300)
        brought(other, [6] * 300)
        network.rate = rate
        waited = []
        for first in range(30):
            began = time.monotonic()
            depth = brought(other, [*LONG[: 999 - first], first], prefill_rate=500.0)
            waited.append(time.monotonic() - began)
            assert got(other, LONG) >= depth
            time.sleep(0.1)
        assert max(waited) < 2.5
        assert sum(wait > 0.1 for wait in waited) <= 4, waited
        network.rate = None
        until(lambda: brought(other, LONG, prefill_rate=500.0) == 768, 30)
        assert got(other, LONG) == 768


# -- images that are not what their names say -------------------------------------------------------------------------

KINDS = {"dense": states.sliceable, "window": states.windowed, "recurrent": states.hybrid}
HARMS = 10_000
DISK = "300k"  # of the fixture of that name


class Forger:
    """Harms images as who can write to the engine can, without the key. `foreign` are whole images of other prompts, models,
    tenants, layouts, codecs and fleets.
    """

    def __init__(self, seed: int, truth: dict[str, bytes], foreign: list[bytes]):
        self._chance, self._truth = random.Random(seed), truth
        self._foreign = [*foreign, b"", b"{}", b"\0" * 64, os.urandom(5000), b"x" * 100_000]

    def harmed(self, name: str) -> bytes:
        chance, data = self._chance, bytearray(self._truth[name])
        how = chance.choice(("flip", "flip", "flips", "cut", "grow", "swap", "swap", "foreign", "splice"))
        if how == "flip":  # half of them in the header and the tokens, where more is believed
            data[chance.randrange(chance.choice((min(3000, len(data)), len(data))))] ^= 1 << chance.randrange(8)
        elif how == "flips":
            for _ in range(chance.randrange(2, 50)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif how == "cut":
            del data[chance.randrange(len(data)) :]
        elif how == "grow":
            data += chance.choice((b"\0", b" ", self._truth[name], os.urandom(chance.randrange(1, 5000))))
        elif how == "swap":
            data = bytearray(self._truth[chance.choice(sorted(self._truth))])
        elif how == "foreign":
            data = bytearray(chance.choice(self._foreign))
        else:  # the head of one, the rest of another
            other, at = self._truth[chance.choice(sorted(self._truth))], chance.randrange(len(data))
            data[at:] = other[at:]
        return bytes(data)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
def test_of_ten_thousand_harmed_images_none_is_believed(machine, monkeypatch, tmp_path, sealed):
    engine = DictEngine()
    monkeypatch.setattr("prefixcache.remote.client.open_engine", lambda url, **options: engine)
    monkeypatch.setattr("prefixcache.remote.promotion.MIN_TIMEOUT", 10.0)  # what is missed, is for what it is
    (tmp_path / "theirs.key").write_text("7b" * 32)
    how: dict[str, Any] = {"remote_timeout": 30.0, **({} if sealed else {"remote_key_file": None})}

    def stored_by(make: Callable[[], Any], **values: Any) -> dict[str, bytes]:
        cache = machine("valkey://localhost", **{**how, "remote_admission": "always", **values})
        before, engine.images = engine.images, {}
        made = make(cache)
        sent(cache)
        cache.close()
        images, engine.images = engine.images, before
        return images if made is None else made

    def all_prompts(cache: PrefixCache) -> dict[str, dict[str, bytes]]:
        images: dict[Any, dict[str, bytes]] = {}
        for kind, make in KINDS.items():
            for seed in range(20):
                known = set(engine.images)
                cache.store(tokens := [seed] * 256, make(tokens), model=kind)
                sent(cache)
                images[kind, seed] = {
                    name: data
                    for name, data in engine.images.items()
                    if name not in known and "layouts" not in name and not name.endswith("/key")
                }
                everything[0] = engine.images
        return images

    everything: list[dict[str, bytes]] = [{}]
    by_prompt: Any = stored_by(all_prompts)
    truth = everything[0]

    def same_tokens(cache: PrefixCache, layers: int = 2, **more: Any) -> None:
        for seed in range(20):
            tokens = [seed] * 256
            cache.store(tokens, states.sliceable(tokens, layers), **{"model": "dense", **more})

    foreign = [
        stored_by(lambda cache: same_tokens(cache, model="another")),
        stored_by(lambda cache: same_tokens(cache, salt=b"tenant")),
        stored_by(lambda cache: same_tokens(cache, layers=3)),
        stored_by(lambda cache: same_tokens(cache), codec="turboquant:4"),
        stored_by(lambda cache: same_tokens(cache), remote_key_file=tmp_path / "theirs.key"),
        stored_by(lambda cache: same_tokens(cache), remote_key_file=None),
    ]
    forger = Forger(7, truth, [data for images in foreign for data in images.values()])
    chance, harmed_images, hits = random.Random(11), 0, 0
    while harmed_images < HARMS // 2:
        engine.images = dict(truth)
        harmed = set()
        for prompt, images in by_prompt.items():
            name = chance.choice(sorted(images))
            data = forger.harmed(name)
            if chance.random() < 0.9 and data != truth[name]:
                engine.images[name] = data
                harmed.add(prompt)
        cache = machine("valkey://localhost", **how, remote_admission="never")
        coming = [cache.promote([seed] * 256 + [1], model=kind) for kind, seed in by_prompt]
        for (kind, seed), future in zip(by_prompt, coming, strict=True):
            future.result(20)
            made, _ = cache.fetch([seed] * 256 + [1], model=kind)
            assert (made is None) == ((kind, seed) in harmed), (kind, seed)
            if made is not None:
                states.check(made, [seed] * 256)
                hits += 1
        cache.check_integrity()
        cache.close()
        harmed_images += len(harmed)
    assert hits > harmed_images / 20  # what was left alone


# -- a server that dies, forgets, is full -----------------------------------------------------------------------------


def test_a_server_that_died_and_begins_empty_is_filled_again_by_what_is_used(machine):
    with valkey_server() as server:
        cache = machine(valkey(server.port))
        shared(cache, LONG)
        server.kill()
        for first in range(5):
            assert brought(cache, [first + 10, *LONG]) == 0
            put(cache, [first + 10, *LONG])
            assert got(cache, [first + 10, *LONG]) == 1000
        assert not cache.stats().remote.reading
        server.start()
        until(lambda: cache.stats().remote.reading)
        assert brought(machine(valkey(server.port)), LONG) == 0
        assert got(cache, LONG) == 999
        sent(cache)
        other = machine(valkey(server.port))
        assert brought(other, LONG) == got(other, LONG) == 768


def test_that_an_engine_was_emptied_shows_when_something_is_sent(machine):
    with valkey_server() as server:
        cache = machine(valkey(server.port))
        shared(cache, LONG)
        ask(server, "FLUSHALL")
        got(cache, LONG)
        sent(cache)
        assert brought(machine(valkey(server.port)), LONG) == 0  # nobody could know
        shared(cache, [7] * 300)
        got(cache, LONG)
        sent(cache)
        other = machine(valkey(server.port))
        assert brought(other, LONG) == got(other, LONG) == 768


def test_what_is_used_here_alone_is_asked_for_again_after_a_while_and_so_used_there(machine, monkeypatch):
    with valkey_server() as server:
        cache = machine(valkey(server.port))
        shared(cache, LONG)
        before = cache.stats().remote
        got(cache, LONG)
        sent(cache)
        assert cache.stats().remote.asks == before.asks
        monkeypatch.setattr("prefixcache.remote.tier.BELIEVED", 0.0)
        got(cache, LONG)
        sent(cache)
        after = cache.stats().remote
        assert (after.known, after.written_images) == (before.known + 3, before.written_images)


def ask(server: Server, *command: Any) -> Any:
    """A command to a Valkey, as its operator gives it."""
    with Valkey(LOOPBACK, server.port, socket_timeout=5) as client:
        return client.execute_command(*command)


def test_a_full_server_is_read_from_and_written_to_again_when_it_has_room(machine, caplog):
    caplog.set_level("INFO")
    with valkey_server(maxmemory=4_000_000) as server:
        cache = machine(valkey(server.port), remote_admission="always")
        put(cache, LONG)
        sent(cache)
        for seed in range(20):
            put(cache, [seed] * 2000)
        until(lambda: not cache.stats().remote.writing)
        assert cache.stats().remote.reading
        assert "full" in cache.stats().remote.last_error
        other = machine(valkey(server.port), remote_admission="never")
        assert brought(other, LONG) == got(other, LONG) == 768
        time.sleep(2.5)  # probes that find it full
        said = [record.message for record in caplog.records if "writing" in record.message]
        assert len(said) <= 3, said  # its clients' buffers made room for one more
        ask(server, "FLUSHALL")
        until(lambda: cache.stats().remote.writing)
        sent(cache)
        put(cache, [77] * 600)
        sent(cache)
        third = machine(valkey(server.port))
        assert brought(third, [77] * 600) == got(third, [77] * 600) == 512


def test_a_server_that_evicts_gives_shorter_hits_and_never_wrong_ones(machine):
    chance, depths = random.Random(5), Counter[int]()
    with valkey_server(maxmemory=3_000_000, policy="allkeys-lru") as server:
        cache = machine(valkey(server.port), remote_admission="always")
        other = machine(valkey(server.port), remote_admission="never")
        for seed in range(40):
            put(cache, prompt_of(seed))
            sent(cache)
            for _ in range(3):
                tokens = prompt_of(chance.randrange(seed + 1))
                depth = brought(other, tokens)
                assert got(other, tokens) == depth
                depths[depth] += 1
            other.clear()
    assert depths[1792]
    assert depths[0]
    assert len(depths) > 3, depths  # parts of chains


def prompt_of(seed: int) -> list[int]:
    return [(seed * 7919 + i * 13) % 50_000 for i in range(2000)]


@pytest.mark.parametrize("kind", ["file", "seaweedfs", "valkey"])
def test_what_is_deleted_and_replaced_while_it_is_read_is_right_or_missed(machine, tmp_path, servers, open_it, kind):
    place = Place(kind, None if kind == "file" else servers(kind), tmp_path / "engine")
    cache = machine(place.url(), remote_key_file=None, remote_admission="always")
    for seed in range(3):
        put(cache, prompt_of(seed))
    sent(cache)
    engine, chance, ended = open_it(place.url()), random.Random(3), threading.Event()
    names = [row for seed in range(3) for row in rows_of(cache, prompt_of(seed))]
    sizes = engine.sizes(names)
    assert None not in sizes
    images = [bytearray() for _ in names]
    for name, size, image in zip(names, sizes, images, strict=True):
        assert engine.get(name, size, lambda nbytes, image=image: image.extend)

    def meddle() -> None:
        while not ended.is_set():
            which = chance.randrange(len(names))
            data = images[which]
            engine.put(names[which], chance.choice((data, data[:-1], data + b"1", data[: len(data) // 2], 3 * data)))
            if chance.random() < 0.2:
                for name, data in zip(names, images, strict=True):
                    engine.put(name, b"" if chance.random() < 0.5 else data)

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        depths = set()
        for _ in range(12):
            other = machine(place.url(), remote_key_file=None, remote_admission="never")
            for seed in range(3):
                depth = brought(other, prompt_of(seed))
                assert got(other, prompt_of(seed)) == depth
                depths.add(depth)
            other.check_integrity()
            other.close()
    finally:
        ended.set()
        meddler.join()
    assert len(depths) > 1


def rows_of(cache: PrefixCache, tokens: list[int]) -> list[str]:
    """The names of a prompt's whole blocks."""
    (namespace,) = cache.prompt(tokens, model="m").namespaces()
    with inside(cache).storage.lock:
        nodes = cache.prompt(tokens, model="m").walk(namespace).path
    root = namespace.row.root
    return [image_name(NoSeal(), root, ROWS, node.key, node.parent.key) for node in nodes if node.is_whole]


# -- networks, credentials, folders -----------------------------------------------------------------------------------


def test_a_slow_network_that_loses_packets_gives_what_was_stored(machine, remote_place: Place):
    assert remote_place.server is not None
    shared(machine(remote_place.url(), remote_timeout=5.0), LONG)
    with proxy(remote_place.server.port, latency=0.02, loss=0.05) as network:
        other = machine(remote_place.url(network.port), remote_timeout=5.0)
        until(lambda: brought(other, LONG) == 768)
        assert got(other, LONG) == 768


def test_a_connection_that_is_cut_while_images_are_read_ends_the_hit_and_nothing_else(machine, remote_place: Place):
    assert remote_place.server is not None
    shared(machine(remote_place.url(), remote_timeout=5.0), LONG)
    with proxy(remote_place.server.port) as network:
        other = machine(remote_place.url(network.port))
        put(other, [5] * 300)
        brought(other, [6] * 300)
        for after in (100, 5_000, 40_000):
            network.cut_after = after
            network.cut()
            assert brought(other, LONG) == got(other, LONG)
        network.cut_after = None
        network.cut()
        until(lambda: brought(other, LONG) == 768)
        assert got(other, LONG) == 768


def test_a_password_that_is_changed_is_said_and_does_no_harm(machine, caplog):
    with valkey_server() as server:
        cache, other = machine(valkey(server.port)), machine(valkey(server.port))
        shared(cache, LONG)
        put(other, [5] * 300)
        with Valkey(LOOPBACK, server.port) as operator:
            operator.execute_command("CONFIG", "SET", "requirepass", "of-great-fame")
            operator.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            for first in range(5):
                assert brought(other, [first, *LONG]) == 0
            assert not other.stats().remote.reading
            assert "access denied" in other.stats().remote.last_error
            operator.execute_command("CONFIG", "SET", "requirepass", "")
        until(lambda: other.stats().remote.reading)
        assert brought(other, LONG) == got(other, LONG) == 768
    assert "of-great-fame" not in caplog.text


def test_a_folder_that_is_gone_is_not_made_anew_and_is_used_when_it_is_back(machine, tmp_path):
    cache = machine(f"file://{tmp_path}/engine", remote_timeout=20.0)
    shared(cache, LONG)
    shutil.rmtree(tmp_path / "engine")  # as a share that is not mounted any more
    for first in range(3):
        put(cache, [first] * 300)
        got(cache, [first] * 300)
    until(lambda: not cache.stats().remote.reading)
    assert not (tmp_path / "engine").exists()
    (tmp_path / "engine").mkdir()
    until(lambda: cache.stats().remote.reading)
    shared(cache, [7] * 300)
    got(cache, LONG)
    sent(cache)
    third = machine(f"file://{tmp_path}/engine", remote_timeout=20.0)
    assert brought(third, LONG) == got(third, LONG) == 768


def test_a_folder_that_is_not_mounted_at_the_start_is_used_once_it_is(machine, tmp_path, caplog):
    cache = machine(f"file://{tmp_path}/engine", mounted=False)
    for first in range(3):
        put(cache, [first] * 300)
        assert brought(cache, [first] * 900) == 300
    until(lambda: not cache.stats().remote.reading)
    assert not (tmp_path / "engine").exists()
    assert caplog.text.count("no such folder") == 1
    (tmp_path / "engine").mkdir()
    until(lambda: cache.stats().remote.reading)
    shared(cache, LONG)
    other = machine(f"file://{tmp_path}/engine")
    assert brought(other, LONG) == got(other, LONG) == 768


def test_a_folder_that_became_a_file_fails_and_works_again_as_a_folder(machine, tmp_path):
    folder = tmp_path / "engine"
    cache, other = machine(f"file://{folder}"), machine(f"file://{folder}")
    shared(cache, LONG)
    put(other, [5] * 300)
    folder.rename(tmp_path / "aside")
    folder.write_text("not a folder")
    for first in range(5):
        assert brought(other, [first, *LONG]) == 0
        put(cache, [first] * 300)
        got(cache, [first] * 300)
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    until(lambda: other.stats().remote.reading and cache.stats().remote.writing)
    assert brought(other, LONG) == got(other, LONG) == 768


def test_a_folder_on_a_full_disk_is_read_from_and_written_to_again_when_there_is_room(machine, disk, caplog):
    caplog.set_level("INFO")
    cache = machine(f"file://{disk}/engine", remote_admission="always")
    put(cache, LONG)
    sent(cache)
    for seed in range(4):
        put(cache, prompt_of(seed))
    until(lambda: not cache.stats().remote.writing)
    other = machine(f"file://{disk}/engine", remote_admission="never")
    assert brought(other, LONG) == got(other, LONG) == 768
    time.sleep(2.5)  # probes that find it full
    said = [record.message for record in caplog.records if "writing" in record.message]
    assert len(said) == 1, said
    subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
    until(lambda: cache.stats().remote.writing)
    put(cache, [77] * 600)
    sent(cache)
    third = machine(f"file://{disk}/engine")
    assert brought(third, [77] * 600) == got(third, [77] * 600) == 512


def test_a_folder_that_can_only_be_read_is_read(machine, disk):
    cache = machine(f"file://{disk}/engine", remote_admission="always")
    put(cache, LONG)
    sent(cache)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    other = machine(f"file://{disk}/engine", remote_admission="always")
    for seed in range(3):
        put(other, prompt_of(seed))
    until(lambda: not other.stats().remote.writing)
    assert brought(other, LONG) == got(other, LONG) == 768
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


# -- many threads, the end of a process, secrets ----------------------------------------------------------------------


def test_machines_whose_threads_do_anything_at_any_time_leave_nothing_behind(machine, tmp_path):
    seconds = float(os.environ.get("FAULTS_SECONDS", 4))
    before, failed, ended = set(threading.enumerate()), [], time.monotonic() + seconds
    with valkey_server(maxmemory=20_000_000, policy="allkeys-lru") as server:

        def opened(number: int) -> PrefixCache:
            values: dict[str, Any] = [
                {"ram": 2_000_000},
                {"ram": 600_000, "ssd": 5_000_000, "ssd_dir": tmp_path / "ssd", "spill": "through"},
                {"ram": 1_000_000, "remote_admission": "always"},
            ][number]
            return machine(valkey(server.port), **values)

        machines, reopening = [opened(number) for number in range(3)], threading.Lock()
        done = Counter[str]()

        def run(seed: int) -> None:
            chance = random.Random(seed)
            while time.monotonic() < ended and not failed:
                number = chance.randrange(3)
                cache = machines[number]
                kind = chance.choice(("dense", "dense", "window", "recurrent"))
                tokens = [
                    *prompt_of(chance.randrange(8))[: 256 * chance.randrange(1, 6)],
                    *range(chance.randrange(300)),
                ]
                what = chance.choices(
                    ("store", "promote", "fetch", "evict", "clear", "remove", "resize", "close", "pin"),
                    (20, 30, 30, 5, 1, 3, 2, 0.5, 2),
                )[0]
                try:
                    if what == "store":
                        cache.store(tokens, KINDS[kind](tokens), model=kind)
                    elif what == "promote":
                        rate = chance.choice((None, 50.0, 5000.0))
                        cache.promote(tokens, model=kind, prefill_rate=rate).result(20)
                    elif what == "fetch":
                        made, rest = cache.fetch(tokens, model=kind, promote=chance.random() < 0.3)
                        if made is not None:
                            states.check(made, tokens[: len(tokens) - len(rest)])
                    elif what == "evict":
                        cache.trim_to(chance.choice((0, 100_000)), wait=0.1)
                    elif what == "clear":
                        cache.clear()
                    elif what == "remove":
                        cache.remove(tokens, model=kind)
                    elif what == "pin":
                        if cache.pin(tokens, model=kind):
                            cache.unpin(tokens, model=kind)
                    elif what == "resize":
                        ram = cache.settings.ram
                        cache.resize(ram=int(chance.choice((0.6, 0.8, 1)) * ram), wait=0.1)
                    elif reopening.acquire(blocking=False):
                        try:
                            cache.close()
                            machines[number] = opened(number)
                        finally:
                            reopening.release()
                    stats = cache.stats()
                    assert stats.ram_held <= stats.ram_limit
                    done[what] += 1
                except CancelledError:  # a promotion that had not begun when the cache was closed
                    pass
                except RuntimeError as error:
                    if "closed" not in str(error):
                        failed.append(error)
                        raise
                except BaseException as error:
                    failed.append(error)
                    raise

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
            assert not thread.is_alive()
        assert not failed, failed
        assert len(done) == 9, done
        for cache in machines:
            sent(cache)
            cache.flush(10)
            with suppress(TimeoutError):
                until(lambda cache=cache: (cache.stats().ram_reserved, cache.stats().pinned) == (0, 0), 5)
            assert (cache.stats().ram_reserved, cache.stats().pinned) == (0, 0), cache.settings
            cache.check_integrity()
            stats = cache.stats()
            assert stats.ram_peak <= cache.settings.ram
            cache.close()
        until(lambda: not [t for t in threading.enumerate() if t not in before and "prefixcache" in t.name], 10)


BEGIN = """
import os, signal, sys
import prefixcache.open_cache
from prefixcache import PrefixCache
from tests.models.states import got, put
LONG = list(range(1000))
key, *urls = sys.argv[1:]
how = {"ram": 50_000_000, "codec": "raw", "remote_key_file": key, "remote_admission": "always"}
caches = [PrefixCache(remote=url, **how) for url in urls]
for cache in caches:
    put(cache, [5] * 300)
    cache.promote([6] * 300, model="m").result(20)
"""


def ends(code: str, key: Path, places: list[Place]) -> tuple[float, str]:
    """Run it in an interpreter of its own: how many seconds after it said "ends" it did, and all that it said."""
    command = [sys.executable, "-c", BEGIN + code, str(key), *(place.url() for place in places)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line == "ends\n":
                break
        began = time.monotonic()
        said += process.communicate(timeout=60)[0]
        return time.monotonic() - began, said
    finally:
        process.kill()


@pytest.fixture
def places(tmp_path: Path, servers: Callable[[str], Server]) -> list[Place]:
    """One of each client: a socket of ours, and obstore, which can't be told to stop."""
    return [Place(kind, servers(kind), tmp_path / "engine") for kind in ("valkey", "moto")]


def test_a_process_ends_though_its_servers_have_stopped_and_nobody_closed_its_caches(tmp_path, machine, places):
    for place in places:
        shared(machine(place.url(), remote_timeout=5.0), LONG)
    pids = [place.server.pid for place in places]
    code = f"""
prefixcache.open_cache.LAST_UPLOADS = 0.5
for pid in {pids}:
    os.kill(pid, signal.SIGSTOP)
for cache in caches:
    put(cache, [8] * 900)
    for first in range(8):
        cache.promote([first, *LONG], model="m")
    cache.promote(LONG, model="m")
print("ends", flush=True)
"""
    try:
        seconds, said = ends(code, tmp_path / "fleet.key", places)
    finally:
        for place in places:
            place.server.thaw()
    assert said == "ends\n"
    assert seconds < 4.5  # of a call of the engine alone 5


def test_a_process_that_forks_and_ends_without_closing_sends_what_waits(tmp_path, machine, places):
    shared(machine(places[0].url(), remote_timeout=5.0), LONG)
    code = """
prefixcache.open_cache.LAST_UPLOADS = 20.0
cache = caches[0]
if os.fork() == 0:
    try:
        cache.promote(LONG, model="m")
    except RuntimeError as error:
        print("in the fork:", "fork" in str(error), flush=True)
    cache.close()
    sys.exit()
os.wait()
errors = cache.stats().remote.errors
print(cache.promote(LONG, model="m").result(20), got(cache, LONG), cache.stats().remote.errors - errors, flush=True)
for cache in caches:
    put(cache, list(range(5000, 10_000)))
print("ends", flush=True)
"""
    _, said = ends(code, tmp_path / "fleet.key", places)
    assert said == "in the fork: True\n768 768 0\nends\n"
    for place in places:
        other = machine(place.url(), remote_timeout=5.0)
        until(lambda other=other: brought(other, list(range(5000, 10_000))) == 4864)


def test_an_interrupted_close_ends_the_remote_tier_too(machine, monkeypatch, tmp_path):
    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    cache = machine(f"file://{tmp_path}/engine")
    shared(cache, LONG)
    monkeypatch.setattr(inside(cache).promoter, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    until(lambda: not [t for t in threading.enumerate() if t not in before and "remote" in t.name], 5)


def test_a_close_while_a_server_has_stopped_says_nothing_of_the_server(machine, monkeypatch, caplog):
    monkeypatch.setattr("prefixcache.open_cache.LAST_UPLOADS", 1.0)
    with valkey_server() as server:
        cache = machine(valkey(server.port), remote_timeout=30.0, remote_admission="always")
        put(cache, LONG)
        sent(cache)
        server.freeze()
        try:
            put(cache, prompt_of(1))
            brought(cache, prompt_of(2))
            assert closes_within(cache, 4)
        finally:
            server.thaw()
        time.sleep(0.2)
    assert "closed" not in caplog.text
    assert "going on without" not in caplog.text


def test_no_password_or_key_is_said_anywhere(machine, tmp_path, caplog):
    caplog.set_level("DEBUG")
    user, password, salt = "user-of-great-fame", "pass-of-great-fame", "salt-of-great-fame"
    said: list[str] = []

    def tried(call: Callable[[], Any]) -> None:
        try:
            said.append(repr(call()))
        except Exception as error:
            said.append("".join(traceback.format_exception(error)))

    with valkey_server(password="another") as server:
        url = f"valkey://{user}:{password}@{LOOPBACK}:{server.port}/tests?db=3"
        for wrong in (url, url.replace(f":{server.port}", ":1"), f"{url}&x={password}", f"{url}#{password}"):
            tried(lambda wrong=wrong: machine(wrong))
        tried(lambda: machine(url, remote_key_file=tmp_path / "pass"))
        tried(lambda: machine(f"s3://{user}:{password}@images"))
        for cache in (machine(url), machine(url.replace(f":{server.port}", ":1"))):
            tried(lambda cache=cache: put(cache, LONG, salt=salt.encode()))
            tried(lambda cache=cache: got(cache, LONG, salt=salt.encode()))
            for _ in range(3):
                tried(lambda cache=cache: brought(cache, LONG, salt=salt.encode()))
            until(lambda cache=cache: not cache.stats().remote.reading)
            assert cache.stats().remote.errors
            tried(lambda cache=cache: cache.settings)
            tried(lambda cache=cache: str(cache.settings))
            tried(lambda cache=cache: cache.stats())
            said += [json.dumps(cache.stats().as_dict()), render(CacheCollector(cache)).decode()]
            cache.close()
    said.append(caplog.text)
    assert "access denied" in caplog.text
    for text in said:
        for secret in (user, password, salt, "5a5a5a5a"):
            assert secret not in text, text
