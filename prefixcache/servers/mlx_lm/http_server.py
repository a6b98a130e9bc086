"""What is between a request and its client: mlx_lm.server's paths, /metrics, who may ask, what a request may say, and whose
its prompts are.
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import mlx_lm.server as upstream
from huggingface_hub import CacheNotFound, scan_cache_dir

from prefixcache.metrics import prometheus
from prefixcache.servers import request_log
from prefixcache.servers.mlx_lm.admin_http import BODY_HEADERS, PATH, AdminPath
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
from prefixcache.servers.mlx_lm.errors import RequestRefused, ServeError
from prefixcache.servers.request_log import RequestLog
from prefixcache.servers.request_schema import BadRequest, ChatRequest, GenerationRequest, TextRequest, checked
from prefixcache.servers.salts import BY_CACHE_SALT, NoSalt, Salts
from prefixcache.servers.web_access import WebAccess

log = logging.getLogger("prefixcache")
http_log = logging.getLogger("prefixcache.http")

KINDS: dict[str, type[GenerationRequest]] = {
    "/v1/completions": TextRequest,
    "/v1/chat/completions": ChatRequest,
    "/chat/completions": ChatRequest,
}
LONG = ("messages", "prompt", "tools")  # fields that mlx-lm's reading of a body need not go through once more
BODY_LIMIT = 1 << 28  # bytes of a request; images are in it
LISTED = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}  # files of a model that mlx-lm lists


class ClientRules(NamedTuple):
    """What a server takes of its clients. `allowed_hosts`: names of the server, beside those that it was bound to.
    `max_context`: tokens of a prompt and its answer, in the place of the model's own.
    """

    allowed_hosts: tuple[str, ...] = ()
    allow_chat_template: bool = False
    max_context: int | None = None


NO_RULES = ClientRules()
LOCAL_ONLY = WebAccess()


class Handler(upstream.APIHandler):
    """mlx-lm's paths, /metrics, and a salt for each tenant's prompts: `cache_salt` in the body, as in vLLM, or the API key.

    `collectors`: of the metrics. `log_json`: requests are logged, not printed as `BaseHTTPRequestHandler` does it. `rules`:
    what they may bring along. `web`: which requests of browsers are answered. `admin`: what answers below `PATH`.
    """

    def __init__(
        self,
        *args: Any,
        collectors: tuple[Any, ...] = (),
        log_json: bool = False,
        salts: Salts = BY_CACHE_SALT,
        rules: ClientRules = NO_RULES,
        web: WebAccess = LOCAL_ONLY,
        admin: AdminPath | None = None,
        **options: Any,
    ):
        self._collectors, self._log_json, self._salts, self._admin = collectors, log_json, salts, admin
        self._rules, self._web = rules, web
        self._whole = False  # all of the request has been read
        self._long: dict[str, Any] = {}
        super().__init__(*args, **options)  # this answers the request

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

    def parse_request(self) -> bool:
        """Read the headers; False, and the request is answered, where it may not be sent."""
        if not super().parse_request():
            return False
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        wrong = self._web.refusal(hosts, origins, self.headers.get("Sec-Fetch-Site", ""))
        if wrong:
            self._refuse(403, wrong)
            return False
        if not self._reads_body():
            self._arrived()
        return True

    def _reads_body(self) -> bool:
        """Whether a body is read of this request, which has arrived only then."""
        of_admin = self.path.startswith(PATH) and any(name in self.headers for name in BODY_HEADERS)
        return self.command == "POST" or of_admin

    def _arrived(self) -> None:
        self._whole = True
        self.server.connections.arrived(self.connection)
        self.connection.settimeout(UNREAD_SECONDS)

    def read_body(self, limit: int = BODY_LIMIT) -> bytes:
        """Read the request's body. RequestRefused for one that has no length, is longer than `limit`, or is cut."""
        if self.headers.get_all("Transfer-Encoding"):
            raise RequestRefused(411, "Transfer-Encoding is not read here: send the body at once, with Content-Length")
        lengths = {length.strip(" \t") for length in self.headers.get_all("Content-Length", [])}
        if not lengths:
            raise RequestRefused(411, "the request has no Content-Length: send the number of bytes of its body")
        length = lengths.pop()
        if lengths or not re.fullmatch("[0-9]{1,20}", length):
            raise RequestRefused(400, f"Content-Length {length[:20]!a} must be one number of bytes, in digits")
        if int(length) > limit:
            raise RequestRefused(413, f"Content-Length {length}: at most {limit} bytes are read; send less at once")
        self._reader.expect(BODY_SECONDS + int(length) / BODY_RATE)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise RequestRefused(400, f"the body ended after {len(body)} of {length} bytes")
        self._arrived()
        return body

    # -- paths --------------------------------------------------------------------------------------------------------

    def do_DELETE(self) -> None:
        if self._admin is not None and self.path.startswith(PATH):
            return self._admin.answer(self, self.read_body)
        self._refuse(404, f"nothing to delete there; what can be is below {PATH}")

    def do_GET(self) -> None:
        if self._admin is not None and self.path.startswith(PATH):
            return self._admin.answer(self, self.read_body)
        if self.path.partition("?")[0] != "/metrics":
            return super().do_GET()
        body = prometheus.render(*self._collectors)
        self.send_response(200)
        self.send_header("Content-Type", prometheus.CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_models_request(self) -> None:
        """The model that is served and those that were downloaded. mlx-lm's own says 200 before it looks for them, and has
        nothing more to say where there is no Hugging Face cache.
        """
        only, served = "/".join(self.path.split("/")[3:]), self.response_generator.cli_args.model
        names = [name for name in downloaded() if only in ("", name)]
        if served:
            names.append(str(Path(served).resolve()) if Path(served).exists() else served)
        data = [{"id": name, "object": "model", "created": self.created} for name in dict.fromkeys(names)]
        self._set_completion_headers(200)
        self.end_headers()
        self.wfile.write(json.dumps({"object": "list", "data": data}).encode())

    def do_POST(self) -> None:
        if self._admin is not None and self.path.startswith(PATH):
            return self._admin.answer(self, self.read_body)
        kind = KINDS.get(self.path)
        try:
            if kind is None:
                raise RequestRefused(404, f"no such path; there are {', '.join(KINDS)}")
            asked = checked(kind, _parsed(self.read_body()), allow_chat_template=self._rules.allow_chat_template)
            self._give_upstream(asked)
            super().do_POST()
        except (BadRequest, RequestRefused) as error:
            self._refuse(error.status, str(error))

    def _give_upstream(self, asked: dict[str, Any]) -> None:
        """Let mlx-lm read these fields as the request's body. It reads all again, so the long ones are kept from it."""
        debugging = logging.getLogger().isEnabledFor(logging.DEBUG)  # it quotes the body
        self._long = {} if debugging else {name: asked.pop(name) for name in LONG if name in asked}
        body = json.dumps(asked).encode()
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(body))
        self.rfile = io.BytesIO(body)  # type: ignore[assignment]

    def validate_model_parameters(self) -> None:
        """mlx-lm calls this when it has read the fields."""
        self.body |= self._long
        self._long = {}
        try:
            super().validate_model_parameters()
        except ValueError as error:
            raise RequestRefused(400, str(error)) from error

    def handle_completion(self, request: Any, stop_words: Any) -> None:
        try:
            request.salt = self._salts.of(self.headers.get_all("Authorization", []), self.body.get("cache_salt") or "")
        except NoSalt as error:
            raise RequestRefused(error.status, str(error)) from error
        request.request_log = RequestLog()
        self.server.replying.add(self)
        end = request_log.FAILED
        try:
            super().handle_completion(request, stop_words)
            end = ""
        except RequestRefused as error:
            end = ""
            request.request_log.refuse(error)
            raise
        except Ended as error:
            end = request_log.FAILED if isinstance(error, StepFailed) else request_log.CUT
            self._cut(error.status, str(error))
        except OSError:
            end = request_log.GONE
            raise
        finally:
            self.server.replying.discard(self)
            fields = request.request_log.fields(end)
            words = request_log.in_words(fields, request.request_log.asks_remote)
            log.info("%s: %s", self.request_id, words, extra={"id": self.request_id, **fields})

    def log_request(self, *about: Any) -> None:
        """Who looks at the metrics, again and again, is not logged."""
        if getattr(self, "path", "").partition("?")[0] != "/metrics":  # there is none where the request can't be read
            super().log_request(*about)

    def log_message(self, text: str, *args: Any) -> None:
        if self._log_json:
            http_log.info(text, *args, extra={"client": self.address_string()})
        else:
            super().log_message(text, *args)

    def _cut(self, status: int, error: str) -> None:
        """The end of an answer that is not whole. Clients take an event with an error for one; without Content-Length, a
        closed connection alone looks like the end of an answer.
        """
        if not self.stream:
            self._headers_buffer: list[bytes] = []  # the status 200, which was not sent yet
            return self._refuse(status, error)
        self.wfile.write(f"data: {_told(status, error)}\n\n".encode())

    def _set_completion_headers(self, status_code: int = 200) -> None:
        error = sys.exc_info()[1]
        if error is None:
            return super()._set_completion_headers(status_code)
        # mlx-lm answers an error in a form of its own, and says 404 whatever a request failed of.
        status = error.status if isinstance(error, (Ended, BadRequest)) else status_code
        raise RequestRefused(status, str(error)) from error

    def _set_cors_headers(self) -> None:
        """Let pages read the answer whose origin may ask."""
        origin = self.headers.get("Origin") if getattr(self, "headers", None) else None
        if origin is None or not self._web.allows(origin):
            return
        self.send_header("Access-Control-Allow-Origin", origin)
        self.send_header("Vary", "Origin")
        self.send_header("Access-Control-Allow-Methods", "*")
        self.send_header("Access-Control-Allow-Headers", "*, Authorization")

    def _refuse(self, status: int, error: str) -> None:
        super()._set_completion_headers(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(_told(status, error).encode())


def _told(status: int, error: str) -> str:
    """An error as the openai client shows it."""
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return json.dumps({"error": {"message": error, "type": kind, "code": status}})


def downloaded(folder: Path | None = None) -> list[str]:
    """Names of the models in the Hugging Face cache (`folder`; None: where theirs is) that mlx-lm lists; none where there
    is no such folder, or none that can be read.
    """
    try:
        repos = scan_cache_dir(folder).repos
    except (CacheNotFound, ValueError, OSError):
        return []
    models = [repo for repo in repos if repo.repo_type == "model" and "main" in repo.refs]
    return sorted(repo.repo_id for repo in models if {file.file_name for file in repo.refs["main"].files} >= LISTED)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a ValueError, too
        reason = ""
        if isinstance(error, json.JSONDecodeError):
            reason = f", at character {error.pos}"
            log.error("the body of a request is not JSON%s", reason)
        raise BadRequest(f"the body is not JSON in UTF-8, or nested too deeply{reason}") from None


BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n\r\n"
    + _told(503, "too many requests are being answered: ask again").encode()
)


class HttpServer(ThreadingHTTPServer):
    """One thread a connection, none of which keeps the process alive. `replying`: the handlers whose client waits. `web`:
    which requests of browsers are answered.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted; the default is 5

    def __init__(self, host: str, port: int, allowed_hosts: Sequence[str] = (), origins: Sequence[str] = ()):
        self.replying: set[Handler] = set()
        self.connections = Connections()
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = addresses[0]
            super().__init__((address[0], port), upstream.APIHandler)  # type: ignore[arg-type]
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise ServeError(f"--host {host} --port {port}: {reason}; give another, or stop what uses it") from None
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
        """A client that went away is no error of the server's."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError, TimeoutError, SlowClient)):
            log.exception("a request failed")
