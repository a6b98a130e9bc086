"""Which web pages may ask: `Host`, `Origin` and `Sec-Fetch-Site` of a request, alone and at a server's socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from prefixcache.servers.web_access import WebAccess
from tests.servers.serving import Server, answer_to, serving

LOCAL = WebAccess.of("127.0.0.1", "127.0.0.1")
WIDE = WebAccess.of("0.0.0.0", "0.0.0.0", ["llm.example"])
OPEN = WebAccess.of("127.0.0.1", "127.0.0.1", ["*"], ["*"])
CHAT = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}).encode()
PATHS = ("/v1/models", "/metrics", "/health", "/nowhere")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:8080", "localhost."]
)
def test_a_server_of_this_machine_answers_to_its_own_names_at_any_port(host):
    assert LOCAL.refusal([host], [], "") == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "0.0.0.0",
        "x",
        "",
        "[::1",
        "a b",
        "localhost:80:80",
        "localhost/",
        "evil@localhost",
        "localhost\u00e9",
    ],
)
def test_and_to_no_other(host):
    assert "--allowed-hosts NAME" in LOCAL.refusal([host], [], "")


def test_a_server_of_all_addresses_answers_to_any_address_its_machines_name_and_those_given():
    own = socket.gethostname()
    for host in (
        "10.0.0.1:8080",
        "[fe80::1]:8080",
        "localhost",
        own,
        f"{own.partition('.')[0]}.local",
        "llm.example:443",
    ):
        assert WIDE.refusal([host], [], "") == ""
    assert WIDE.refusal(["evil.example"], [], "")


def test_a_server_of_one_address_answers_to_that_and_its_name():
    access = WebAccess.of("box.lan", "192.168.1.5")
    assert not any(access.refusal([host], [], "") for host in ("box.lan:8080", "192.168.1.5"))
    assert all(access.refusal([host], [], "") for host in ("192.168.1.6", "localhost"))


def test_a_server_of_a_link_local_address_answers_to_it_without_its_zone():
    access = WebAccess.of("fe80::1%en0", "fe80::1%en0")
    assert access.refusal(["[fe80::1]:8080"], [], "") == ""
    assert access.refusal(["[fe80::2]:8080"], [], "")


def test_a_page_asks_only_from_the_server_itself_or_from_an_origin_that_was_allowed():
    asked = WebAccess.of("127.0.0.1", "127.0.0.1", [], ["https://app.example"])
    assert asked.refusal(["localhost:8080"], ["http://localhost:8080"], "same-origin") == ""
    assert asked.refusal(["localhost:8080"], ["https://app.example"], "cross-site") == ""
    for origin in (
        "http://localhost:3000",
        "https://evil.example",
        "null",
        "",
        "http://[",
        "file://",
        "app://localhost:8080",
    ):
        assert "--allowed-origins ORIGIN" in asked.refusal(["localhost:8080"], [origin], "")
    assert OPEN.refusal(["evil.example"], ["https://evil.example"], "cross-site") == ""


def test_origins_may_be_given_as_people_write_them():
    listed = WebAccess.of("127.0.0.1", "127.0.0.1", [], ["https://app.example", " http://Box.lan:3000/", " "])
    for origin in ("https://app.example", "http://box.lan:3000"):
        assert listed.refusal(["localhost"], [origin], "cross-site") == ""
    assert listed.refusal(["localhost"], [""], "")


def test_a_page_that_sends_no_origin_is_known_by_its_fetch_site():
    assert LOCAL.refusal(["localhost"], [], "cross-site")
    assert LOCAL.refusal(["localhost"], [], "same-site")
    assert not any(LOCAL.refusal(["localhost"], [], site) for site in ("", "none", "same-origin"))
    assert OPEN.refusal(["localhost"], [], "cross-site") == ""


def test_two_hosts_or_origins_are_refused_and_none_is_not():
    assert LOCAL.refusal(["localhost", "localhost"], [], "")
    assert OPEN.refusal(["localhost"], ["http://a", "http://b"], "")
    assert LOCAL.refusal([], [], "") == ""  # a browser sends one


# -- at a server's socket ---------------------------------------------------------------------------------------------


class Raw(NamedTuple):
    status: int
    head: str
    body: str


def raw(server: Server, method: str, path: str, *headers: str, body: bytes = b"") -> Raw:
    lines = [f"{method} {path} HTTP/1.1", *headers, *([f"Content-Length: {len(body)}"] if body else [])]
    answer = answer_to(server, "\r\n".join(lines).encode() + b"\r\n\r\n" + body).decode()
    head, _, rest = answer.partition("\r\n\r\n")
    return Raw(int(head.split()[1]), head, rest)


@pytest.fixture(scope="module")
def allowing(model: Path) -> Iterator[Server]:
    flags = ["--allowed-origins", "https://app.example,null", "--allowed-hosts", "llm.example, other.example"]
    with serving(model.parent / "opened.log", "--model", model, *flags) as server:
        yield server


@pytest.mark.parametrize(
    "headers",
    [
        ("Host: evil.example",),
        ("Host: localhost", "Origin: https://evil.example"),
        ("Host: localhost", "Origin: null"),
        ("Host: localhost", "Sec-Fetch-Site: cross-site"),
        ("Host: localhost", "Host: evil.example"),
        ("Host: rebound.example:8080", "Origin: http://rebound.example:8080"),
    ],
    ids=str,
)
def test_a_foreign_page_learns_nothing_by_any_path_or_method(served, headers):
    for given in (
        *(raw(served, "GET", path, *headers) for path in PATHS),
        raw(served, "OPTIONS", "/v1/chat/completions", *headers, "Access-Control-Request-Method: POST"),
        raw(served, "POST", "/v1/chat/completions", *headers, "Content-Type: text/plain", body=CHAT),
    ):
        assert given.status == 403
        assert "access-control" not in given.head.lower()
        assert json.loads(given.body)["error"]["code"] == 403


def test_other_programs_and_pages_of_the_server_itself_ask_as_before(served):
    port = served.url.rpartition(":")[2]
    for headers in (
        (f"Host: 127.0.0.1:{port}",),
        (f"Host: localhost:{port}",),
        (),
        (f"Host: localhost:{port}", f"Origin: http://localhost:{port}", "Sec-Fetch-Site: same-origin"),
    ):
        given = raw(served, "POST", "/v1/chat/completions", *headers, body=CHAT)
        assert given.status == 200
        assert "access-control" not in given.head.lower()
        assert raw(served, "GET", "/metrics", *headers).status == raw(served, "GET", "/health", *headers).status == 200


def test_what_was_allowed_may_ask_and_read_and_nothing_else(allowing):
    headers = ("Host: llm.example", "Origin: https://app.example")
    for given in (
        raw(allowing, "POST", "/v1/chat/completions", *headers, body=CHAT),
        raw(allowing, "GET", "/v1/models", *headers),
        raw(allowing, "OPTIONS", "/v1/chat/completions", *headers),
        raw(allowing, "POST", "/v1/chat/completions", *headers, body=b"{}"),  # a page may read what was wrong, too
    ):
        assert given.status in (200, 204, 400)
        assert "Access-Control-Allow-Origin: https://app.example" in given.head
        assert "Vary: Origin" in given.head
    assert raw(allowing, "GET", "/v1/models", "Host: other.example", "Origin: null").status == 200
    assert raw(allowing, "GET", "/v1/models", "Host: llm.example", "Origin: https://other.example").status == 403
    assert raw(allowing, "GET", "/v1/models", "Host: evil.example").status == 403
