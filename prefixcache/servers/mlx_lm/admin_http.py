"""The admin path of a server: who may ask there, and an operation's JSON over HTTP.

With a key, whoever sends it as `Authorization: Bearer KEY` may ask, from anywhere. Without one only programs on this machine
may: no browser, whose pages come from anywhere, and no reverse proxy, whose clients do.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from itertools import chain
from typing import Any

from prefixcache.remote.url import is_loopback
from prefixcache.servers.mlx_lm.admin import Admin
from prefixcache.servers.request_schema import RequestRefused

log = logging.getLogger("prefixcache")

ADMIN_PATH = "/prefixcache/"
FOREIGN_HEADERS = {  # by who sends them: no program on this machine
    "proxy": re.compile("x-forwarded-.*|x-real-ip|forwarded|via|cf-connecting-ip|true-client-ip|x-client-ip"),
    "browser": re.compile("origin|referer|sec-fetch-.*"),
}
REMEDY = "start the server with --admin-key-file, and send its key as `Authorization: Bearer KEY`"
LOCAL_NAME = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]{1,5})?")


class AdminPath:
    """Answers the paths of a server that begin with `ADMIN_PATH`. `key`: b"" for none."""

    def __init__(self, admin: Admin, key: bytes):
        self._admin, self._key = admin, key

    def answer(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        """Answer a request with this content; RequestRefused where it can't be answered."""
        try:
            self._check_sender(handler)
            name = handler.path.partition("?")[0].removeprefix(ADMIN_PATH)
            result = self._admin.answer(handler.command, name, _body_of(handler, content))
        except RequestRefused:
            raise
        except Exception:
            log.exception("an admin request failed")
            raise RequestRefused("it failed; see the server's log", 500) from None
        if isinstance(result, dict):
            body = json.dumps(result).encode() + b"\n"
            _begin(handler, "application/json", len(body))
            handler.wfile.write(body)
        else:
            _stream(handler, result)

    def _check_sender(self, handler: BaseHTTPRequestHandler) -> None:
        if self._key:
            given = handler.headers.get_all("Authorization", [])
            scheme, _, token = given[0].strip().partition(" ") if len(given) == 1 else ("", "", "")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._key):
                raise RequestRefused(
                    "the admin path needs this server's admin key: send `Authorization: Bearer KEY`, or give a "
                    "command --admin-key-file",
                    401,
                )
            return
        why = _why_not_local(handler)
        if why:
            raise RequestRefused(
                f"{why}, and without an admin key only programs on its machine may ask here: {REMEDY}", 403
            )


def _why_not_local(handler: BaseHTTPRequestHandler) -> str:
    """Return why a request may not be of a program on this machine; "" where it surely is."""
    if not is_loopback(str(handler.client_address[0])):
        return "this comes from another machine"
    for name in handler.headers:
        for sender, headers in FOREIGN_HEADERS.items():
            if headers.fullmatch(name.lower()):
                return f"this has the header {name}, of a {sender}"
    if handler.request_version == "HTTP/1.0":  # nginx's to what is behind it, when it is told nothing else
        return "this is HTTP/1.0, as of a proxy"
    hosts = handler.headers.get_all("Host", [])
    if len(hosts) != 1 or not LOCAL_NAME.fullmatch(hosts[0].lower()):
        return "this calls the server by a name that other machines know"
    return ""


def _body_of(handler: BaseHTTPRequestHandler, content: bytes) -> dict[str, Any]:
    if not content:
        return {}
    if handler.headers.get_content_type() != "application/json":
        raise RequestRefused(
            "the body is no application/json by its Content-Type: send `Content-Type: application/json`", 415
        )
    try:
        body = json.loads(content.decode())
    except (ValueError, RecursionError):
        raise RequestRefused("the body is not JSON in UTF-8, or nested too deeply: send one object") from None
    if not isinstance(body, dict):
        raise RequestRefused('the body is no JSON object: send one, such as {"model": "NAME"}')
    return body


def _begin(handler: BaseHTTPRequestHandler, kind: str, length: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Cache-Control", "no-store")
    if length is not None:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()


def _stream(handler: BaseHTTPRequestHandler, results: Iterator[dict[str, Any]]) -> None:
    """Send results as they come, an object a line, until the connection ends. A client that goes away ends the operation."""
    try:
        first = next(results, {})  # only what has begun is ended by `close`
        _begin(handler, "application/x-ndjson")
        for result in chain([first], results):
            handler.wfile.write(json.dumps(result).encode() + b"\n")
            handler.wfile.flush()
    finally:
        results.close()  # type: ignore[attr-defined]
