"""What every engine does, on real servers: whole values or none, within the time that was given."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

from prefixcache.remote.engine import Engine, EngineError, Sink
from prefixcache.remote.object_store import _engine_error

from .conftest import Place
from .servers import LOOPBACK, Certificates, Server, certificates, proxy, redis_server, valkey_server

SLACK = 1.0  # seconds that a busy machine may add to a timeout
BIG = 16 << 20
NONSENSE = "it answered what no server of this kind does"


def value(
    engine: Engine, name: str, size: int | None = None, meanwhile: Callable[[int], object] = lambda nbytes: None
) -> bytes | None:
    """What an engine gives, in the bytes that it announced. `meanwhile` is called with their number before they are read."""
    data, announced = bytearray(), []

    def accept(nbytes: int) -> Sink:
        announced.append(nbytes)
        meanwhile(nbytes)
        return data.extend

    if not engine.get(name, size, accept):
        return None
    assert announced == [len(data)]
    return bytes(data)


@contextmanager
def fails_within(seconds: float) -> Iterator[pytest.ExceptionInfo[EngineError]]:
    start = time.monotonic()
    with pytest.raises(EngineError) as failure:
        yield failure
    assert time.monotonic() - start < seconds + SLACK


def put_all(engine: Engine, names: list[str], data: bytes) -> None:
    for name in names:
        engine.put(name, data)


def put_soon(engine: Engine, name: str, data: bytes, seconds: float = 20) -> None:
    """Until it works: a store may need a moment after a start."""
    end = time.monotonic() + seconds
    while True:
        try:
            return engine.put(name, data)
        except EngineError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


# ---- bytes under names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 6001, 70_000, BIG])
def test_what_was_put_is_got(engine, size):
    data = os.urandom(size)
    engine.put("ab/cd-1", memoryview(data))
    assert value(engine, "ab/cd-1") == data
    assert value(engine, "ab/cd-1", size) == data
    assert engine.sizes(["ab/cd-1", "ab/cd-2"]) == [size, None]


def test_what_was_put_last_counts(engine):
    engine.put("a", b"first")
    engine.put("a", b"second")
    assert value(engine, "a") == b"second"


def test_a_missing_name_is_no_error(engine):
    assert value(engine, "none") is None
    assert value(engine, "none", 5) is None
    assert engine.sizes(["none"]) == [None]
    assert engine.names_under("none") == []


def test_no_bytes_count_as_none(engine):
    engine.put("empty", b"")
    assert engine.sizes(["empty"]) == [None]
    assert value(engine, "empty") is None
    assert value(engine, "empty", 0) is None
    assert engine.sizes([]) == []


def test_an_empty_value_is_not_listed(engine):
    engine.put("folder/empty", b"", listed=True)
    assert engine.names_under("folder") == []


def test_sizes_of_many_names_come_in_their_order(engine):
    for number in range(0, 100, 3):
        engine.put(f"many/{number}", b"x" * (number + 1))
    sizes = engine.sizes([f"many/{number}" for number in range(100)])
    assert sizes == [None if number % 3 else number + 1 for number in range(100)]


def test_more_names_than_a_round_trip_takes(open_it, servers, monkeypatch):
    engine = open_it(Place("valkey", servers("valkey"), Path("rounds")).url())
    monkeypatch.setattr(type(engine), "names_at_once", 7)
    engine.put("n/20", b"123")
    assert engine.sizes([f"n/{number}" for number in range(30)]) == [None] * 20 + [3] + [None] * 9


def test_listed_names_are_those_of_one_folder(engine):
    for name in ("spaces/b", "spaces/a", "spaces/deeper/c", "spaces-2/d", "e"):
        engine.put(name, b"1", listed=True)
    engine.put("spaces/b", b"again", listed=True)
    assert sorted(engine.names_under("spaces")) == ["spaces/a", "spaces/b"]


@pytest.mark.parametrize("kind", ["file", "seaweedfs", "valkey"])
def test_a_thousand_names_are_listed_at_most(kind, open_it, servers, tmp_path):
    (tmp_path / "listed").mkdir()
    engine = open_it(Place(kind, None if kind == "file" else servers(kind), tmp_path / "listed").url(), timeout=30)
    for number in range(1003):
        engine.put(f"folder/{number}", b"1", listed=True)
    names = engine.names_under("folder")
    assert len(names) == len(set(names)) == 1000


def test_an_engine_with_another_prefix_has_other_names(place, open_it):
    (place.folder.parent / "other").mkdir()
    one, other = open_it(place.url()), open_it(place._replace(folder=place.folder.parent / "other").url())
    one.put("folder/a", b"1", listed=True)
    assert value(other, "folder/a") is None
    assert other.names_under("folder") == []


def test_bytes_that_find_no_room_are_not_read(engine):
    asked: list[int] = []

    engine.put("a", b"12345")
    assert not engine.get("a", None, asked.append)
    assert not engine.get("a", 5, asked.append)
    assert asked == [5, 5]
    assert value(engine, "a") == b"12345"


def test_an_error_of_room_is_the_callers(engine):
    engine.put("a", b"12345")
    with pytest.raises(ZeroDivisionError):
        value(engine, "a", meanwhile=lambda nbytes: nbytes / 0)
    assert value(engine, "a") == b"12345"


@pytest.mark.parametrize("now", [b"short", b"much longer than before", b""])
def test_a_value_that_was_replaced_is_got_whole_or_not_at_all(engine, now):
    engine.put("a", b"as it was")
    (size,) = engine.sizes(["a"])
    engine.put("a", now)
    assert value(engine, "a", size) in (None, now)
    engine.put("a", b"as it was")
    assert value(engine, "a", size, lambda nbytes: engine.put("a", now)) in (None, b"as it was", now)


def test_threads_get_their_own_bytes(engine):
    def work(thread: int) -> None:
        for turn in range(6):
            data = os.urandom(1000 * thread + 100_000 * turn + 1)
            engine.put(f"t/{thread}", data)
            assert engine.sizes([f"t/{thread}", "t/none"]) == [len(data), None]
            assert value(engine, f"t/{thread}") == data

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_a_closed_engine_says_so(engine):
    engine.put("a", b"1")
    engine.close()
    engine.close()
    for call in (lambda: engine.put("a", b"1"), lambda: value(engine, "a"), lambda: engine.sizes(["a"])):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_what_an_operator_is_told(place, engine):
    about = engine.about()
    assert engine.label == place.url().partition("?")[0]
    assert all(isinstance(told, str) for told in about.values())
    if place.kind in ("valkey", "redis"):
        assert about["engine"].split()[0].lower() == place.kind
        assert about | {"policy": "noeviction", "limit": "0"} == about
    else:
        assert about == {"engine": "file" if place.kind == "file" else "s3"}


# ---- a folder ----------------------------------------------------------------------------------------------------------


def test_what_a_folder_keeps_is_for_its_owner(open_it, tmp_path):
    (tmp_path / "engine").mkdir()
    engine = open_it(f"file://{tmp_path}/engine")
    engine.put("ab/cd/e", b"1")
    for folder in ("engine/ab", "engine/ab/cd"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700, folder


def test_what_is_no_file_in_a_folder_is_missing_and_keeps_nobody_waiting(tmp_path, open_it):
    (tmp_path / "engine").mkdir()
    engine = open_it(f"file://{tmp_path}/engine")
    engine.put("folder/a", b"1", listed=True)
    os.mkfifo(tmp_path / "engine/folder/fifo")
    (tmp_path / "engine/folder/loop").symlink_to(tmp_path / "engine/folder/loop")
    (tmp_path / "engine/folder/sub").mkdir()
    for name in ("folder/fifo", "folder/loop", "folder/sub", "folder/none"):
        assert value(engine, name) is None
    assert value(engine, "folder/a") == b"1"


def test_in_a_folder_that_is_gone_nothing_is_known_to_be_missing(tmp_path, open_it):
    (tmp_path / "engine").mkdir()
    engine = open_it(f"file://{tmp_path}/engine")
    (tmp_path / "engine").rmdir()
    for call in (lambda: engine.sizes(["a"]), lambda: value(engine, "a")):
        with pytest.raises(EngineError):
            call()


# A limit on files stands for a full disk: the kernel refuses a write half-way, and the process outlives it.
TOO_LARGE = """
import resource, sys
from prefixcache.remote.engine import EngineError
from prefixcache.remote.url import open_engine

engine = open_engine(sys.argv[1], timeout=5, connect_timeout=1, ca_file=None)
engine.put("a/b", b"first")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    engine.put("a/b", bytes(2 << 20))
except EngineError as error:
    print(error)
data = bytearray()
assert engine.get("a/b", None, lambda nbytes: data.extend)
assert data == b"first"
assert engine.names_under("a") == ["a/b"]
"""


def test_a_folder_that_takes_no_more_is_full_and_keeps_what_it_has(tmp_path):
    (tmp_path / "engine").mkdir()
    command = [sys.executable, "-c", TOO_LARGE, f"file://{tmp_path}/engine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("full: file too large\n", "")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("status: 507,", "full: HTTP 507"),
        ("status: 403,\n body: <Code>QuotaExceeded</Code>", "full: QuotaExceeded"),
        ("Unable to copy data to file: No space left on device (os error 28)", "full: no space left on device"),
        ("status: 503,\n body: <Code>SlowDown</Code>", "HTTP 503, SlowDown"),
    ],
)
def test_what_obstore_says_of_a_store_that_takes_no_more(said, reason):
    assert str(_engine_error(GenericError(f"Generic S3 error: https://host/name {said}"))) == reason


# ---- servers that fail -------------------------------------------------------------------------------------------------


def test_a_server_that_answers_nothing_costs_the_timeout(remote_place, open_it):
    engine = open_it(remote_place.url(), timeout=0.5)
    put_soon(engine, "a", b"1")  # a busy machine takes its time, too
    server = remote_place.server
    server.freeze()
    try:
        for call in (
            lambda: engine.put("a", bytes(BIG)),
            lambda: value(engine, "a"),
            lambda: engine.sizes(["a", "b", "c"]),
            lambda: engine.names_under("a"),
        ):
            with fails_within(0.5) as failure:
                call()
            assert str(failure.value) == "timed out"
    finally:
        server.thaw()
    put_soon(engine, "a", b"22")
    assert value(engine, "a") == b"22"


@pytest.mark.parametrize("kind", ["moto", "valkey", "redis"])
def test_a_server_that_was_killed_is_used_again_when_it_is_back(kind, servers, open_it, tmp_path):
    place = Place(kind, servers(kind), tmp_path / "engine")
    engine = open_it(place.url())
    with ThreadPoolExecutor(8) as threads:  # eight connections
        list(threads.map(lambda number: engine.put(f"a{number}", bytes(1 << 20)), range(8)))
    place.server.kill()
    for _ in range(2):
        with fails_within(1):
            engine.put("a", b"1")
        with fails_within(1):
            engine.sizes(["a", "b"])
    place.server.start()
    engine.put("a", b"again")  # the first call
    assert value(engine, "a") == b"again"


@pytest.mark.parametrize("kind", ["moto", "valkey", "redis"])
def test_a_restart_that_nobody_saw_costs_no_call(kind, servers, open_it, tmp_path):
    place = Place(kind, servers(kind), tmp_path / "engine")
    engine = open_it(place.url())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: engine.put(f"a{number}", bytes(1 << 20)), range(4)))
    place.server.kill()
    place.server.start()
    for number in range(8):
        engine.put(f"b{number}", b"1")


def test_no_server_is_an_error_that_names_nobody(open_it):
    for url in (f"valkey://user:secret@{LOOPBACK}:1/private", f"s3://private/x?endpoint=http://{LOOPBACK}:1"):
        engine = open_it(url)
        for call, arguments in ((engine.put, ("name", b"1")), (engine.sizes, (["name"],)), (value, (engine, "name"))):
            with fails_within(1) as failure:
                call(*arguments)
            assert str(failure.value) == "connection refused"


def test_a_host_that_does_not_exist_is_an_error(open_it):
    for url in ("valkey://nowhere.invalid", "s3://private?endpoint=https://nowhere.invalid"):
        with fails_within(5) as failure:
            open_it(url).put("name", b"1")
        assert str(failure.value) in ("its host name can't be resolved", "timed out")


@pytest.mark.parametrize("kind", ["seaweedfs", "moto"])
def test_a_bucket_that_is_missing_is_an_error(kind, servers, open_it):
    engine = open_it(f"s3://missing-one/x?endpoint={servers(kind).url}")
    if kind == "moto":  # SeaweedFS makes it
        with pytest.raises(EngineError, match="no such bucket"):
            engine.put("private", b"1")
        with pytest.raises(EngineError, match="no such bucket"):
            value(engine, "private")


# ---- Valkey ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["valkey", "redis"])
def resp_server(request: pytest.FixtureRequest) -> Callable[..., object]:
    return {"valkey": valkey_server, "redis": redis_server}[request.param]


def test_a_full_server_refuses_puts_and_still_answers(resp_server, open_it):
    with resp_server(maxmemory=20 << 20) as server:
        engine = open_it(f"valkey://{LOOPBACK}:{server.port}")
        engine.put("first", b"1" * 1000)
        for number in range(10):
            engine.put(f"a/{number}", bytes(1 << 20), listed=True)
        with pytest.raises(EngineError, match="full: it has reached its maxmemory"):
            put_all(engine, [f"b/{number}" for number in range(20)], bytes(1 << 20))
        with pytest.raises(EngineError, match="full"):
            engine.put("b", bytes(BIG))
        assert len(engine._idle) == 1  # a refusal does not cost the connection
        assert value(engine, "first") == b"1" * 1000
        assert engine.about()["policy"] == "noeviction"


def test_a_server_that_evicts_keeps_what_was_asked_for(resp_server, open_it):
    with resp_server(maxmemory=30 << 20, policy="allkeys-lru", options=("--maxmemory-samples", "64")) as server:
        engine = open_it(f"valkey://{LOOPBACK}:{server.port}")
        for number in range(20):
            engine.put(f"a/{number}", bytes(1 << 20), listed=True)
        time.sleep(1.1)  # the clock of LRU counts seconds
        assert engine.sizes(["a/0"]) == [1 << 20]
        for number in range(15):
            engine.put(f"b/{number}", bytes(1 << 20))
        sizes = engine.sizes([f"a/{number}" for number in range(20)])
        assert sizes[0] == 1 << 20
        assert None in sizes
        there = {f"a/{number}" for number in range(20) if sizes[number]}
        assert set(engine.names_under("a")) <= there  # the list itself may be evicted, too
        assert engine.about() | {"policy": "allkeys-lru", "limit": str(30 << 20)} == engine.about()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu"])
def test_asking_for_a_size_is_a_use(resp_server, policy, open_it):
    """What `sizes` promises: STRLEN does it, so no command more is sent."""
    with resp_server(policy=policy, options=("--lfu-log-factor", "0")) as server:
        engine = open_it(f"valkey://{LOOPBACK}:{server.port}")
        engine.put("a", b"1")
        field = ("OBJECT", "IDLETIME" if policy == "allkeys-lru" else "FREQ", "a")
        if policy == "allkeys-lru":
            time.sleep(1.1)
        (before,) = engine._call([field], time.monotonic() + 5)
        engine.sizes(["a"])
        (after,) = engine._call([field], time.monotonic() + 5)
        assert (before >= 1 and after == 0) if policy == "allkeys-lru" else after > before


def test_names_that_were_evicted_are_taken_off_the_list(resp_server, open_it):
    with resp_server() as server:
        engine = open_it(f"valkey://{LOOPBACK}:{server.port}/prefix")
        for name in ("folder/a", "folder/b"):
            engine.put(name, b"1", listed=True)
        deadline = time.monotonic() + 5
        engine._call([("DEL", "prefix/folder/a")], deadline)
        assert engine.names_under("folder") == ["folder/b"]
        assert engine._call([("SMEMBERS", "prefix/folder/")], deadline) == [[b"prefix/folder/b"]]


def test_passwords(resp_server, open_it, monkeypatch):
    with resp_server(password="se/cret") as server:
        at = f"{LOOPBACK}:{server.port}"
        open_it(f"valkey://:se%2Fcret@{at}").put("a", b"1")
        for url in (f"valkey://:wrong@{at}", f"valkey://{at}", f"valkey://nobody:wrong@{at}"):
            with fails_within(0) as failure:
                open_it(url).put("a", b"1")
            assert str(failure.value) == "refused: access denied"
        monkeypatch.setenv("VALKEY_PASSWORD", "se/cret")
        open_it(f"valkey://{at}").put("a", b"1")
        monkeypatch.setenv("VALKEY_USERNAME", "default")
        open_it(f"valkey://{at}").put("a", b"1")


def test_databases_are_apart(resp_server, open_it):
    with resp_server() as server:
        one, other = (open_it(f"valkey://{LOOPBACK}:{server.port}?db={number}") for number in (0, 3))
        one.put("a", b"1")
        assert value(other, "a") is None
        with pytest.raises(EngineError, match="no database of this number"):
            open_it(f"valkey://{LOOPBACK}:{server.port}?db=99").put("a", b"1")


def test_what_the_server_will_not_do_has_a_reason(resp_server, open_it):
    with resp_server() as server, resp_server(options=("--replicaof", f"{LOOPBACK} {server.port}")) as replica:
        engine = open_it(f"valkey://{LOOPBACK}:{replica.port}")
        with pytest.raises(EngineError, match=r"^refused: (READONLY|MASTERDOWN|LOADING), "):
            engine.put("a", b"1")
        whole = open_it(f"valkey://{LOOPBACK}:{server.port}")
        whole._call([("SADD", "set", "member")], time.monotonic() + 5)
        whole.put("a", b"1")
        assert value(whole, "set") is None
        assert whole.sizes(["set", "a"]) == [None, 1]
        assert len(whole._idle) == 1  # another's name is no failure


def test_a_replica_lists_what_is_left_of_a_folder(resp_server, open_it):
    """It can't take what was evicted off the list."""
    with resp_server() as server, resp_server(options=("--replicaof", f"{LOOPBACK} {server.port}")) as replica:
        primary, reader = (open_it(f"valkey://{LOOPBACK}:{one.port}") for one in (server, replica))
        for name in ("folder/a", "folder/b"):
            primary.put(name, b"1", listed=True)
        until(lambda: len(reader.names_under("folder")) == 2)
        primary._call([("DEL", "folder/a")], time.monotonic() + 5)
        until(lambda: reader.sizes(["folder/a"]) == [None])
        assert reader.names_under("folder") == ["folder/b"]


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """A replica may still be loading."""
    end = time.monotonic() + seconds
    while True:
        with suppress(EngineError):
            if condition():
                return
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def liar(answer: bytes) -> Iterator[int]:
    """A port where every connection gets `answer` again and again. No real server does that."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                clients.append(client)
                with suppress(OSError), client:
                    client.recv(1 << 16)
                    while True:
                        client.sendall(answer)

    clients: list[socket.socket] = []
    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        for sock in (listener, *clients):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def value_or_nonsense(engine: Engine) -> bytes | None:
    """The value under a name, None where the server's answer is told to be nonsense; soon."""
    start, found, said = time.monotonic(), None, NONSENSE
    try:
        found = value(engine, "a", 1000)
    except EngineError as error:
        said = str(error)
    assert said == NONSENSE
    assert time.monotonic() - start < 1 + SLACK
    return found


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\n", b"$8000000000\r\n" + bytes(1 << 16), b"*1000000\r\n" + b":1\r\n" * 10_000, b":" * 99],
)
def test_a_server_that_answers_nonsense_is_left_early(answer, open_it):
    with liar(answer) as port:
        engine = open_it(f"valkey://{LOOPBACK}:{port}")
        assert value_or_nonsense(engine) is None


@pytest.mark.parametrize("answer", [b":7\r\n", b"+OK\r\n", b"$-1\r\n", b"*2\r\n:1\r\n:2\r\n", b"$3\r\nabc\r\n"])
def test_an_answer_to_something_else_is_no_value(answer, open_it):
    with liar(answer) as port:
        engine = open_it(f"valkey://{LOOPBACK}:{port}")
        assert value_or_nonsense(engine) is None
        assert engine.sizes(["a"]) in ([7], [None])
        assert engine.names_under("a") == []
        assert engine.about()["engine"] == "Redis of an unknown version"


def test_a_call_under_way_ends_when_the_engine_is_closed(servers, open_it):
    with proxy(servers("valkey").port) as network:
        engine = open_it(f"valkey://{LOOPBACK}:{network.port}", timeout=20)
        engine.put("a", b"1")
        network.stall = True
        closing = threading.Timer(0.3, engine.close)
        closing.start()
        with fails_within(0.3) as failure:
            value(engine, "a")
        assert str(failure.value) == "closed"
        closing.join()


# ---- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("trusted"))


@pytest.fixture(scope="module")
def tls_server(trusted: Certificates) -> Iterator[Server]:
    with redis_server(tls=trusted) as server:
        yield server


def test_tls_with_an_authority_of_ones_own(tls_server, trusted, open_it):
    for host in (LOOPBACK, "localhost"):
        engine = open_it(f"valkeys://{host}:{tls_server.port}", ca_file=trusted.ca)
        data = os.urandom(BIG)
        engine.put("a", data)
        assert value(engine, "a") == data
        assert len(engine._idle) == 1


def test_tls_that_the_system_does_not_trust_is_refused(tls_server, open_it):
    with fails_within(1) as failure:
        open_it(f"valkeys://{LOOPBACK}:{tls_server.port}").put("a", b"1")
    assert str(failure.value) == "its TLS certificate is not trusted"
    with fails_within(1) as failure:
        open_it(f"s3://images?endpoint=https://{LOOPBACK}:{tls_server.port}").put("a", b"1")
    assert str(failure.value) == "its TLS certificate is not trusted"


def test_the_certificate_of_another_host_is_refused(tmp_path, open_it):
    other = certificates(tmp_path, "DNS:other.example")
    with redis_server(tls=other) as server:
        for url in (
            f"valkeys://{LOOPBACK}:{server.port}",
            f"valkeys://localhost:{server.port}",
            f"s3://images?endpoint=https://{LOOPBACK}:{server.port}",
        ):
            with fails_within(1) as failure:
                open_it(url, ca_file=other.ca).put("a", b"1")
            assert str(failure.value) == "its TLS certificate is not trusted"


def test_a_server_without_tls_is_refused_where_tls_is_asked_for(servers, open_it):
    with fails_within(1):
        open_it(f"valkeys://{LOOPBACK}:{servers('valkey').port}", timeout=1).put("a", b"1")


def test_the_timeout_holds_through_tls(tls_server, trusted, open_it):
    with proxy(tls_server.port) as network:
        engine = open_it(f"valkeys://{LOOPBACK}:{network.port}", timeout=0.5, ca_file=trusted.ca)
        engine.put("a", bytes(1 << 20))
        network.rate = 50_000
        with fails_within(0.5):
            value(engine, "a")
        with fails_within(0.5):
            engine.put("a", bytes(BIG))
        network.stall = True
        with fails_within(0.5):
            engine.sizes(["a"])  # the handshake


# ---- bad networks ------------------------------------------------------------------------------------------------------


def test_a_long_way_is_paid_once_a_call(remote_place, open_it):
    with proxy(remote_place.server.port) as network:
        engine = open_it(remote_place.url(network.port))
        engine.put("a", b"1")
        network.latency = 0.1  # there, and back
        start = time.monotonic()
        assert value(engine, "a", 1) == b"1"
        assert 0.2 <= time.monotonic() - start < 0.6
        start = time.monotonic()
        assert engine.sizes(["a"] * engine.names_at_once if engine.names_at_once < 9 else ["a"] * 1000)[0] == 1
        assert time.monotonic() - start < 1.2  # object stores connect eight times


def test_lost_packets_cost_time_and_no_bytes(remote_place, open_it):
    with proxy(remote_place.server.port, loss=0.02) as network:
        engine = open_it(remote_place.url(network.port), timeout=20)
        data = os.urandom(4 << 20)
        engine.put("a", data)
        assert value(engine, "a") == data


def test_a_byte_now_and_then_does_not_hold_a_call(remote_place, open_it):
    with proxy(remote_place.server.port) as network:
        engine = open_it(remote_place.url(network.port), timeout=0.5)
        engine.put("a", bytes(1 << 20))
        network.rate = 5000
        for call in (
            lambda: value(engine, "a"),
            lambda: value(engine, "a", 1 << 20),
            lambda: engine.put("a", bytes(BIG)),
        ):
            with fails_within(0.5) as failure:
                call()
            assert str(failure.value) == "timed out"
        network.rate = None
        put_soon(engine, "a", b"2")


@pytest.mark.parametrize("passed", [0, 1, 5, 100, 1 << 16, (1 << 20) - 1, 1 << 20])
def test_a_value_that_is_cut_off_is_none_at_all(remote_place, passed, open_it):
    with proxy(remote_place.server.port) as network:
        direct, engine = open_it(remote_place.url()), open_it(remote_place.url(network.port))
        data = os.urandom(1 << 20)
        direct.put("a", data)
        network.cut_after = passed
        with fails_within(0):
            value(engine, "a", len(data))
        network.cut_after = None
        assert value(engine, "a", len(data)) == data


def test_a_reset_costs_the_calls_under_way_and_no_more(remote_place, open_it):
    with proxy(remote_place.server.port) as network:
        engine = open_it(remote_place.url(network.port))
        engine.put("a", b"1")
        network.stall = True
        cutting = threading.Timer(0.2, network.cut)
        cutting.start()
        with fails_within(0.2) as failure:
            engine.put("a", b"2")
        assert str(failure.value) == "the connection was lost"
        cutting.join()
        network.stall = False
        engine.put("a", b"3")
        assert value(engine, "a") == b"3"


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_connections_that_a_router_forgot_cost_one_call(kind, servers, open_it, tmp_path):
    with proxy(servers(kind).port) as network:
        engine = open_it(Place(kind, servers(kind), tmp_path / "engine").url(network.port), timeout=0.5)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda number: engine.put(f"a{number}", bytes(1 << 20)), range(8)))
        assert network.connections > 1
        network.abandon()
        with fails_within(0.5):
            engine.put("a", b"1")
        for number in range(8):
            engine.put(f"b{number}", b"1")


def test_there_is_no_second_try(remote_place, open_it):
    with proxy(remote_place.server.port) as network:
        engine = open_it(remote_place.url(network.port))
        network.cut_after = 0
        for number, call in enumerate((lambda: engine.put("a", b"1"), lambda: value(engine, "a")), 1):
            with fails_within(0):
                call()
            assert network.connections == number


def test_the_late_answer_of_one_call_is_not_the_next_ones(remote_place, open_it):
    """A frozen network holds back the answers of calls that timed out; then it delivers all of them."""
    with proxy(remote_place.server.port) as network:
        engine, direct = open_it(remote_place.url(network.port), timeout=0.4), open_it(remote_place.url())
        values = {f"n/{number}": os.urandom(1000 + number) for number in range(12)}
        for name, data in values.items():
            direct.put(name, data)
        network.stall = True
        for name in [*values][:4]:
            with fails_within(0.4):
                value(engine, name)
        network.stall = False
        for _ in range(2):
            for name, data in values.items():
                assert answered(value, engine, name, len(data)) == data
                assert answered(engine.sizes, [name, "none"]) == [len(data), None]


def answered(call: Callable[..., Any], *args: Any) -> Any:
    """What a call gives that a busy machine may let time out: then it is made again."""
    for _ in range(20):
        with suppress(EngineError):
            return call(*args)
    return call(*args)


def test_answers_do_not_mix_while_the_network_stutters(remote_place, open_it):
    with proxy(remote_place.server.port) as network:
        engine, direct = open_it(remote_place.url(network.port), timeout=0.3), open_it(remote_place.url())
        values = {f"n/{number}": bytes([number]) * 1000 for number in range(1, 30)}
        for name, data in values.items():
            direct.put(name, data)
        began = time.monotonic()
        wrong: list[str] = []
        counts = {"whole": 0, "failed": 0}

        def goes_on() -> bool:
            """For 1.5 s, and on a busy machine until enough was answered."""
            seconds = time.monotonic() - began
            return seconds < 1.5 or (seconds < 30 and not (counts["whole"] > 10 and counts["failed"] > 4))

        def ask(thread: int) -> None:
            names = [*values]
            turn = thread
            while goes_on():
                name = names[turn % len(names)]
                turn += 5
                try:
                    found = value(engine, name)
                except EngineError:
                    counts["failed"] += 1
                    continue
                counts["whole"] += 1
                if found != values[name]:
                    wrong.append(name)

        threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        while goes_on():
            network.stall = True
            time.sleep(0.4)
            network.stall = False
            time.sleep(0.2)
            network.cut()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        assert not wrong
        assert counts["whole"] > 10
        assert counts["failed"] > 4
