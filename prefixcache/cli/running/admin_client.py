"""A running server's admin path, asked over HTTP. The key goes to the server that was named and to no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import typer

from prefixcache.cli.running.admin_key import ADMIN_KEY, admin_key_of
from prefixcache.cli.text import Refused
from prefixcache.remote.url import is_loopback

PATH = "/prefixcache/"
TIMEOUT = 600.0  # seconds that an operation may take, or a server be silent
EXAMPLE = "give a server's address, such as http://127.0.0.1:8080"

Json = dict[str, Any]

Url = Annotated[str, typer.Option("--url", metavar="URL", help="The running server: http://127.0.0.1:8080.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        metavar="FILE",
        help=f"The server's admin key; else {ADMIN_KEY} has it. A server without one takes what comes from its machine.",
    ),
]


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Refuse a redirect: the key would go along."""


class AdminClient:
    """Asks a server's admin path. Refused for what is no address, for a server that can't be asked, and for what it refuses,
    in its words.
    """

    def __init__(self, url: str, key_file: Path | None):
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise Refused(f"--url {url}: {error}; {EXAMPLE}") from None
        try:
            key = admin_key_of(None, key_file)
        except ValueError as error:
            raise Refused(str(error)) from None
        if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/") or parts.query:
            raise Refused(f"--url {url}: not the address of a server; {EXAMPLE}")
        self.name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key.decode()}"
        direct = [ProxyHandler({})] if is_loopback(host) else []
        self._open = build_opener(_NoRedirect, *direct).open

    def ask(self, method: str, operation: str, body: Json | None = None) -> Json:
        """Do an operation, and return its result."""
        with self._answer(method, operation, body) as answer:
            return _object(self.name, answer.read())

    def follow(self, method: str, operation: str, body: Json) -> Iterator[Json]:
        """Do an operation that tells how far it is: its results, one after the other."""
        with self._answer(method, operation, body) as answer:
            for line in answer:
                yield _object(self.name, line)

    @contextmanager
    def _answer(self, method: str, operation: str, body: Json | None) -> Iterator[Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = Request(f"{self.name}{PATH}{operation}", data, self._headers, method=method)
        try:
            with self._open(request, timeout=TIMEOUT) as answer:
                yield answer
        except HTTPError as error:
            with error:
                raise Refused(f"{self.name}: {_refusal(error)}") from None
        except (URLError, HTTPException, OSError, UnicodeError) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            raise Refused(f"{self.name}: {reason}; is the server up, and --url its address?") from None


def _object(name: str, text: bytes) -> Json:
    try:
        result = json.loads(text)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise Refused(f"{name}: its answer is none of `prefixcache serve`; check --url")
    return result


def _refusal(error: HTTPError) -> str:
    """Return why, in the server's words where it has some."""
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"it answers {error.code}: no `prefixcache serve` of this release; check --url"
