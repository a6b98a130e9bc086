"""Clients that send too much, too slowly, or too many of them, at the socket of a server that runs."""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefixcache.servers.mlx_lm.connections import MOST, Connections
from tests.servers.serving import Server, answer_to, ask, connected, serve, starting, wait_for

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
ADMIN = "DELETE /prefixcache/images HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n{"
USER = [{"role": "user", "content": "hello"}]
CHAT = json.dumps({"messages": USER, "max_tokens": 2})


def hurried_serve(flags: list[str]) -> None:
    """`prefixcache serve` that waits for a second, and serves few at once."""
    from prefixcache.servers.mlx_lm import connections, http_server

    connections.HEAD_SECONDS = http_server.BODY_SECONDS = 1.0
    connections.MOST = 20
    serve(flags)


@pytest.fixture(scope="module")
def hurried(model: Path) -> Iterator[Server]:
    with starting(hurried_serve, model.parent / "hurried.log", "--ram", "100MB", "--model", model) as server:
        yield server.ready()


def answer(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answered(server: Server, text: str) -> tuple[int, str]:
    head, _, body = answer_to(server, text.encode("latin-1")).decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "length", ["+600000000", "600_000_000", "6e8", "0x10", "-5", " ", "", "\xb2", "9" * 30, "5 5", "5,5", "5;", "1.0"]
)
def test_a_length_that_is_not_digits_alone_is_refused(served, length):
    status, body = answered(served, f"{HEAD}Content-Length: {length}\r\n\r\n{{}}")
    assert status == 400
    assert json.loads(body)["error"]["message"].startswith("Content-Length")


@pytest.mark.parametrize(
    ("request_head", "status", "said"),
    [
        ("GET /v1/nowhere HTTP/1.1\r\n\r\n", 404, "no such path; there are GET /metrics"),
        ("GET /v1/chat/completions HTTP/1.1\r\n\r\n", 404, "POST /v1/completions"),
        ("PUT /v1/models HTTP/1.1\r\n\r\n", 501, "PUT"),
        ("GET / HTTP/nine\r\n\r\n", 400, "HTTP/nine"),
        (f"GET /{'a' * 70_000} HTTP/1.1\r\n\r\n", 414, "Too Long"),
        (f"GET / HTTP/1.1\r\nX: {'a' * 70_000}\r\n\r\n", 431, "Line too long"),
    ],
)
def test_whatever_is_refused_is_refused_in_the_form_of_an_error(served, request_head, status, said):
    code, body = answered(served, request_head)
    assert (code, json.loads(body)["error"]["code"]) == (status, status)
    assert said in json.loads(body)["error"]["message"]


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read(served):
    status, body = answered(served, f"{HEAD}Content-Length: 600000000\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (413, 413)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("", 411),
        ("Transfer-Encoding: chunked\r\n", 411),
        ("Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", 411),
        ("Content-Length: 2\r\nContent-Length: 3\r\n", 400),
        (f"Content-Length: \t{len(CHAT)} \r\n", 200),
        (f"Content-Length: {len(CHAT)}\r\nContent-Length: {len(CHAT)}\r\n", 200),
    ],
)
def test_one_length_is_needed_and_one_only(served, headers, status):
    assert answered(served, f"{HEAD}{headers}\r\n{CHAT}")[0] == status


def test_a_body_that_ends_early_is_refused(served):
    with connected(served) as connection:
        connection.sendall(f"{HEAD}Content-Length: 500\r\n\r\n{CHAT}".encode())
        connection.shutdown(socket.SHUT_WR)
        assert f"the body ended after {len(CHAT)} of 500 bytes".encode() in answer(connection)


def test_a_refusal_is_read_by_a_client_that_still_sends(served):
    with connected(served) as connection:
        connection.sendall(f"{HEAD}Origin: https://evil.example\r\nContent-Length: 500000\r\n\r\n".encode())
        connection.sendall(b"x" * 500_000)
        assert answer(connection).startswith(b"HTTP/1.0 403 ")


@pytest.mark.parametrize("body", ["1" * 5000, "{", "[1]", '"x"', "null"])
def test_a_body_that_is_no_object_is_refused_as_openai_does_it(hurried, body):
    status, told = answered(hurried, f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}")
    assert (status, json.loads(told)["error"]["type"]) == (400, "invalid_request_error")


# -- slow and many ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["", "POST /v1/chat", HEAD, f"{HEAD}Content-Length: 5000000\r\n\r\n{{"])
def test_a_request_that_does_not_come_is_answered_408(hurried, sent):
    with connected(hurried) as connection:
        connection.sendall(sent.encode())
        if "5000000" not in sent:  # a body gets a second more for each 64 KiB
            assert answer(connection).startswith(b"HTTP/1.0 408 ")


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_a_body_for_operators_that_does_not_come_is_answered_408(hurried, method):
    with connected(hurried) as connection:
        connection.sendall(
            f"{method} /prefixcache/pins HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        assert answer(connection).startswith(b"HTTP/1.0 408 ")
    assert "an admin request failed" not in "".join(hurried.troubles())


def test_bytes_that_trickle_buy_no_time(hurried):
    with connected(hurried) as connection:
        gone = threading.Event()

        def trickle() -> None:
            while not gone.wait(0.1):
                try:
                    connection.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert answer(connection).startswith(b"HTTP/1.0 408 ")
        gone.set()
        thread.join()


@pytest.mark.parametrize("sent", [HEAD, ADMIN])
def test_half_sent_requests_do_not_keep_others_out(hurried, sent):
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connected(hurried)).sendall(sent.encode())
        assert ask(hurried, USER).generated
    assert ask(hurried, USER).generated


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """For this process; the server was begun before, with as many as it had then."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(before[1], 4096)), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_2100_half_sent_requests_leave_the_server_its_descriptors(served, many_descriptors):
    with ExitStack() as stack:
        for _ in range(2100):
            stack.enter_context(connected(served)).sendall(HEAD.encode())
        assert ask(served, USER).generated
        if sys.platform == "linux":
            assert len(list(Path(f"/proc/{served.process.pid}/fd").iterdir())) < MOST + 100
    assert served.troubles() == []


def test_a_slow_reader_of_a_stream_gets_all_of_it(hurried):
    body = json.dumps({"messages": USER, "max_tokens": 300, "stream": True})
    with connected(hurried) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        begun = connection.recv(100)
        time.sleep(2.5)  # longer than any part of a request may take
        assert (begun + answer(connection)).endswith(b"data: [DONE]\n\n")


def test_when_all_are_being_answered_another_is_told_to_come_back(hurried):
    body = json.dumps({"messages": USER, "max_tokens": 3000, "stream": True})
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(connected(hurried))
            connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert connection.recv(1)  # it is being answered
        with connected(hurried) as connection:
            assert answer(connection).startswith(b"HTTP/1.0 503 ")

    def is_served() -> bool:
        try:
            return answered(hurried, f"{HEAD}Content-Length: {len(CHAT)}\r\n\r\n{CHAT}")[0] == 200
        except OSError:  # told 503 before it had asked
            return False

    wait_for(is_served, "place")


# -- who makes place --------------------------------------------------------------------------------------------------


def test_the_oldest_whose_request_has_not_arrived_makes_place():
    pairs = [socket.socketpair() for _ in range(5)]
    connections, ends = Connections(), [end for _, end in pairs]
    connections.limit = 2
    first, second, third, fourth, fifth = (one for one, _ in pairs)
    assert connections.admit(first)
    connections.arrived(first)
    assert connections.admit(second)
    assert connections.admit(third)  # in the place of the second
    assert ends[1].recv(1) == b""
    connections.arrived(third)
    connections.arrived(second)  # it is too late
    assert not connections.admit(fourth)
    connections.closed(first)
    assert connections.admit(fifth)
    assert len(connections) == 2
    for pair in pairs:
        for one in pair:
            one.close()
