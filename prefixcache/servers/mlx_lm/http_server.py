"""What is between a request and its client: mlx_lm.server's paths, those of other APIs, /metrics, who may ask, what a request
may say, and whose its prompts are. mlx-lm reads and answers what asks for tokens (`upstream.Completion`).
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from prometheus_client.registry import Collector

from prefixcache.metrics import prometheus
from prefixcache.servers import request_log
from prefixcache.servers.apis import Api, error_type
from prefixcache.servers.apis.messages import Messages, TokenCount
from prefixcache.servers.apis.responses import Responses
from prefixcache.servers.cold_requests import ColdRequests
from prefixcache.servers.errors import no_address
from prefixcache.servers.keeping import Keeping
from prefixcache.servers.mlx_lm import model_list
from prefixcache.servers.mlx_lm.admin import Admin
from prefixcache.servers.mlx_lm.admin_http import ADMIN_PATH, AdminPath
from prefixcache.servers.mlx_lm.answers import Ended, StepFailed
from prefixcache.servers.mlx_lm.connections import (
    BODY_RATE,
    BODY_SECONDS,
    UNREAD_SECONDS,
    Connections,
    SlowClient,
    TimedReader,
    drain,
)
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.next_turns import NextTurns
from prefixcache.servers.mlx_lm.options import ServeOptions
from prefixcache.servers.mlx_lm.translation import CHAT_PATH, Translation
from prefixcache.servers.mlx_lm.upstream import Completion
from prefixcache.servers.request_log import RequestLog
from prefixcache.servers.request_schema import ChatRequest, GenerationRequest, RequestRefused, TextRequest, checked
from prefixcache.servers.salts import authorization_of
from prefixcache.servers.web_access import WebAccess

log = logging.getLogger("prefixcache")
http_log = logging.getLogger("prefixcache.http")

KINDS: dict[str, type[GenerationRequest]] = {
    "/v1/completions": TextRequest,
    CHAT_PATH: ChatRequest,
    "/chat/completions": ChatRequest,
}
OTHERS: tuple[Api, ...] = (Messages(), TokenCount(), Responses())
APIS = {api.path: api for api in OTHERS}
NO_PATH = f"no such path; there are GET /metrics, /health, {model_list.PATH}, and POST {', '.join([*KINDS, *APIS])}"
BODY_LIMIT = 1 << 28  # bytes of a request; images are in it
ADMIN_BODY_LIMIT = 1 << 26  # bytes of an admin request; prompts are in it


class Site(NamedTuple):
    """What is behind the paths of a server that has its model."""

    generator: Generator
    admin: AdminPath
    cold: ColdRequests
    next_turns: NextTurns
    collectors: tuple[Collector, ...]
    options: ServeOptions

    @classmethod
    def of(cls, generator: Generator, options: ServeOptions) -> Site:
        """Return the paths of a generator, as its server was asked to serve."""
        admin = AdminPath(Admin(generator, options.salts), options.admin_key)
        of_cache, cold = prometheus.CacheCollector(generator.prompts.cache), ColdRequests()
        next_turns = NextTurns(generator, enabled=options.warm_next_turn)
        of_server = prometheus.ServerCollector(generator.canonical.changed, next_turns.tokens)
        return cls(generator, admin, cold, next_turns, (of_cache, of_server, cold), options)


class Handler(BaseHTTPRequestHandler):
    """mlx-lm's paths, /metrics, the admin path, and a salt for each tenant's prompts: `cache_salt` in the body, as in vLLM,
    or the API key. One is made for each connection, and has one request.
    """

    server: HttpServer
    default_request_version = "HTTP/1.0"  # of a request that names none: its answer has a status all the same

    def __init__(self, *connection: Any):
        self._whole = False  # all of the request has been read
        self._tell_cold: Callable[[], None] | None = None  # of a request that hit little
        self._translation: Translation | None = None  # where another API's client waits for a streamed answer
        super().__init__(*connection)  # this answers the request

    # -- what a client sends ------------------------------------------------------------------------------------------

    def setup(self) -> None:
        super().setup()
        self._reader = TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)  # type: ignore[type-var]
        self.requestline, self.request_version = "", "HTTP/1.0"  # of a request that never comes

    def handle(self) -> None:
        try:
            super().handle()
        except SlowClient as error:
            self._refuse(408, str(error))

    def finish(self) -> None:
        if not self._whole:
            drain(self.connection)
        super().finish()
        if self._tell_cold is not None:
            with suppress(OSError):
                self.connection.shutdown(
                    socket.SHUT_WR
                )  # the answer is whole: its client doesn't wait for what follows
            self._tell_cold()

    def parse_request(self) -> bool:
        """Read the headers; False, and the request is answered, where it may not be sent."""
        if not super().parse_request():
            return False
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        wrong = self.server.web.refusal(hosts, origins, self.headers.get("Sec-Fetch-Site", ""))
        if wrong:
            self._refuse(403, wrong)
            return False
        if not self._reads_body():
            self._arrived()
        return True

    def _reads_body(self) -> bool:
        """Return whether this request has a body, with which only it has arrived."""
        return self.command == "POST" or (self.path.startswith(ADMIN_PATH) and self._has_body())

    def _has_body(self) -> bool:
        return any(name in self.headers for name in ("Content-Length", "Transfer-Encoding"))

    def _arrived(self) -> None:
        self._whole = True
        self.server.connections.arrived(self.connection)
        self.connection.settimeout(UNREAD_SECONDS)

    def read_body(self, limit: int = BODY_LIMIT) -> bytes:
        """Read the request's body. RequestRefused for one that has no length, is longer than `limit`, or is cut."""
        if self.headers.get_all("Transfer-Encoding"):
            raise RequestRefused("Transfer-Encoding is not read here: send the body at once, with Content-Length", 411)
        lengths = {length.strip(" \t") for length in self.headers.get_all("Content-Length", [])}
        if not lengths:
            raise RequestRefused("the request has no Content-Length: send the number of bytes of its body", 411)
        length = lengths.pop()
        if lengths or not re.fullmatch("[0-9]{1,20}", length):
            raise RequestRefused(f"Content-Length {length[:20]!a} must be one number of bytes, in digits")
        if int(length) > limit:
            raise RequestRefused(f"Content-Length {length}: at most {limit} bytes are read; send less at once", 413)
        self._reader.expect(BODY_SECONDS + int(length) / BODY_RATE)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise RequestRefused(f"the body ended after {len(body)} of {length} bytes")
        self._arrived()
        return body

    # -- paths --------------------------------------------------------------------------------------------------------

    def do_DELETE(self) -> None:
        if self.path.startswith(ADMIN_PATH):
            return self._answer_admin()
        self._refuse(404, f"nothing to delete there; what can be is below {ADMIN_PATH}")

    def do_OPTIONS(self) -> None:
        self._begin(204)
        self.end_headers()

    def do_HEAD(self) -> None:
        """Answer whether the server is there, as clients ask before their first request."""
        self._begin(200 if self._plain_path == "/" else 404)
        self.end_headers()

    def do_GET(self) -> None:
        if self.path.startswith(ADMIN_PATH):
            self._answer_admin()
        elif self._plain_path == "/metrics":
            self._answer(200, prometheus.render(*self.server.site.collectors), prometheus.CONTENT_TYPE)
        elif f"{self._plain_path}/".startswith(f"{model_list.PATH}/"):
            self._answer_models()
        elif self.path == "/health":
            healthy = self.server.site.generator.is_healthy
            self._answer(200 if healthy else 503, json.dumps({"status": "ok" if healthy else "unavailable"}).encode())
        else:
            self._refuse(404, NO_PATH)

    def _answer_admin(self) -> None:
        try:
            # Read before a refusal, too: else that might not arrive.
            content = self.read_body(ADMIN_BODY_LIMIT) if self._has_body() else b""
            self.server.site.admin.answer(self, content)
        except RequestRefused as error:
            self._refuse(error.status, str(error))

    def _answer_models(self) -> None:
        try:
            models = model_list.listing(self.path, self.server.site.generator.cli_args.model)
        except RequestRefused as error:
            return self._refuse(error.status, str(error))
        self._answer(200, json.dumps(models).encode())

    def do_POST(self) -> None:
        if self.path.startswith(ADMIN_PATH):
            return self._answer_admin()
        try:
            connection, asked = self._read_request()
            Completion(connection, self.server.site.generator, asked).do_POST()
        except RequestRefused as error:
            self._refuse(error.status, str(error))

    @property
    def _plain_path(self) -> str:
        """The path without its query; "" where the request can't be read."""
        return getattr(self, "path", "").partition("?")[0]

    def _read_request(self) -> tuple[Handler | Translation, dict[str, Any]]:
        """Return what mlx-lm answers on, and what it is asked, by the body of this request. RequestRefused for another."""
        kind, api = KINDS.get(self.path), APIS.get(self._plain_path)
        if kind is None and api is None:
            raise RequestRefused(NO_PATH, 404)
        body = _parsed(self.read_body())
        connection: Handler | Translation = self
        if api is not None and isinstance(body, dict):
            try:
                chat = api.chat_request(body)
                connection = self._translation = Translation(self, api, body)
            except RecursionError:
                raise RequestRefused("the body is nested too deeply") from None
            body = chat
        options = self.server.site.options
        asked = checked(kind or ChatRequest, body, allow_chat_template=options.allow_chat_template)
        if options.any_model and not model_list.is_here(asked.get("model", model_list.DEFAULT)):
            asked["model"] = model_list.DEFAULT
        served = self.server.site.generator.cli_args.model
        if asked.get("adapters") and asked.get("model", model_list.DEFAULT) == model_list.DEFAULT and served:
            asked["model"] = served  # of the default model mlx-lm takes no adapter but its own
        return connection, asked

    def complete(self, completion: Completion, request: Any, answer: Callable[[], None]) -> None:
        """Have mlx-lm answer a request that it has read. Its line of the log says how it ended."""
        authorization = authorization_of(lambda name: self.headers.get_all(name, []))
        request.salt = self.server.site.options.salts.of(authorization, completion.body.get("cache_salt") or "")
        request.keeping = Keeping.of(completion.body.get("cache"))
        request.request_log = RequestLog()
        self.server.replying.add(self)
        end = request_log.FAILED
        try:
            answer()
            end = ""
        except RequestRefused as error:
            end = ""
            request.request_log.refuse(error)
            raise
        except Ended as error:
            end = request_log.FAILED if isinstance(error, StepFailed) else request_log.CUT
            self._cut(error, streamed=completion.stream)
        except OSError:
            end = request_log.GONE
            raise
        finally:
            self.server.replying.discard(self)
            fields = request.request_log.fields(end)
            words = request_log.in_words(fields, request.request_log.asks_remote)
            log.info("%s: %s", completion.request_id, words, extra={"id": completion.request_id, **fields})
            if request.request_log.parting is not None:
                self._tell_cold = partial(self._tell_of_cold, completion, request)
        if not end:
            self.server.site.next_turns.add(request, completion)

    def _tell_of_cold(self, completion: Completion, request: Any) -> None:
        parting, tokens = request.request_log.parting, request.request_log.prompt
        tokenizer = self.server.site.generator.prompt_tokenizer
        arguments = completion.prompt_arguments
        find_part = partial(tokenizer.part_of, request, arguments, tokens, parting.position)
        self.server.site.cold.tell(completion.request_id, parting, find_part)

    def log_request(self, *about: Any) -> None:
        """Log the request, unless it looks at the metrics, as somebody does again and again."""
        if self._plain_path != "/metrics":
            super().log_request(*about)

    def log_message(self, text: str, *args: Any) -> None:
        if self.server.site.options.log_json:
            http_log.info(text, *args, extra={"client": self.address_string()})
        else:
            super().log_message(text, *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what http.server can't read, as everything else is refused: its own errors are pages."""
        self._refuse(int(code), message or explain or self.responses[HTTPStatus(code)][0])

    def _cut(self, error: Ended, *, streamed: bool) -> None:
        """End an answer that is not whole. Clients take an event with an error for one; without Content-Length, a closed
        connection alone looks like the end of an answer.
        """
        if streamed and self._translation is not None:
            self._translation.fail(error.status, str(error))
        elif streamed:
            self.wfile.write(f"data: {_told(error.status, str(error))}\n\n".encode())
        else:
            self._headers_buffer: list[bytes] = []  # the status 200, which was not sent yet
            self._refuse(error.status, str(error))

    def send_cors_headers(self) -> None:
        """Let pages read the answer whose origin may ask."""
        origin = self.headers.get("Origin") if getattr(self, "headers", None) else None
        if origin is None or not self.server.web.allows(origin):
            return
        self.send_header("Access-Control-Allow-Origin", origin)
        self.send_header("Vary", "Origin")
        self.send_header("Access-Control-Allow-Methods", "*")
        self.send_header("Access-Control-Allow-Headers", "*, Authorization")

    def _begin(self, status: int, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_cors_headers()

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, error: str) -> None:
        self._begin(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        api = APIS.get(self._plain_path)
        self.wfile.write((_told(status, error) if api is None else json.dumps(api.error(status, error))).encode())


def _told(status: int, error: str) -> str:
    """Return an error as the openai client shows it."""
    return json.dumps({"error": {"message": error, "type": error_type(status), "code": status}})


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a ValueError, too
        reason = ""
        if isinstance(error, json.JSONDecodeError):
            reason = f", at character {error.pos}"
            log.error("the body of a request is not JSON%s", reason)
        raise RequestRefused(f"the body is not JSON in UTF-8, or nested too deeply{reason}") from None


BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n\r\n"
    + _told(503, "too many requests are being answered: ask again").encode()
)


class HttpServer(ThreadingHTTPServer):
    """One thread a connection, none of which keeps the process alive. `replying`: the handlers whose client waits. `web`:
    which requests of browsers are answered. `site`: what is behind the paths, set before `serve_forever` is called.
    """

    site: Site

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted; the default is 5

    def __init__(self, host: str, port: int, allowed_hosts: Sequence[str], origins: Sequence[str]):
        self.replying: set[Handler] = set()
        self.connections = Connections()
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = addresses[0]
            super().__init__((str(address[0]), port), Handler)
        except (OSError, OverflowError) as error:
            raise no_address(host, port, error) from None
        self.web = WebAccess.of(host, str(self.server_address[0]), allowed_hosts, origins)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.admit(request):
            return super().process_request(request, client_address)
        with suppress(OSError):
            request.settimeout(0.1)
            request.sendall(BUSY)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self.connections.closed(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless its client has gone away, which is none of the server's."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError, TimeoutError, SlowClient)):
            log.exception("a request failed")
