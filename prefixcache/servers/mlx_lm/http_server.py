"""What is between a request and its client: mlx_lm.server's paths, /metrics, and whose a request's prompts are."""

from __future__ import annotations

import json
import logging
import socket
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx_lm.server as upstream
from huggingface_hub import CacheNotFound, scan_cache_dir

from prefixcache.metrics import prometheus
from prefixcache.servers import request_log
from prefixcache.servers.mlx_lm.admin_http import PATH, AdminPath
from prefixcache.servers.mlx_lm.answers import Ended
from prefixcache.servers.mlx_lm.errors import ServeError
from prefixcache.servers.request_log import RequestLog
from prefixcache.servers.salts import BY_CACHE_SALT, NoSalt, Salts

log = logging.getLogger("prefixcache")
http_log = logging.getLogger("prefixcache.http")

SALT_LIMIT = 1024  # characters of a request's cache_salt
BODY_LIMIT = 1 << 28  # bytes of a request; images are in it
LISTED = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}  # files of a model that mlx-lm lists


class Handler(upstream.APIHandler):
    """mlx-lm's paths, /metrics, and a salt for each tenant's prompts: `cache_salt` in the body, as in vLLM, or the API key.

    `collectors`: of the metrics. `log_json`: requests are logged, not printed as `BaseHTTPRequestHandler` does it. `admin`:
    what answers below `PATH`.
    """

    def __init__(
        self,
        *args: Any,
        collectors: tuple[Any, ...] = (),
        log_json: bool = False,
        salts: Salts = BY_CACHE_SALT,
        admin: AdminPath | None = None,
        **options: Any,
    ):
        self._collectors, self._log_json, self._salts, self._admin = collectors, log_json, salts, admin
        super().__init__(*args, **options)  # this answers the request

    def do_DELETE(self) -> None:
        if self._admin is not None and self.path.startswith(PATH):
            return self._admin.answer(self)
        self._refuse(404, f"nothing to delete there; what can be is below {PATH}")

    def do_GET(self) -> None:
        if self._admin is not None and self.path.startswith(PATH):
            return self._admin.answer(self)
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
            return self._admin.answer(self)
        length = self.headers.get("Content-Length", "0")
        if length.removeprefix("-").isdigit() and not 0 <= int(length) <= BODY_LIMIT:
            return self._refuse(413, f"Content-Length {length[:20]}: at most {BODY_LIMIT} bytes are read")
        try:
            super().do_POST()
        except (UnicodeDecodeError, RecursionError):
            self._refuse(400, "the body is not JSON in UTF-8, or nested too deeply")

    def handle_completion(self, request: Any, stop_words: Any) -> None:
        wrong = _wrong(self.body)
        if wrong:
            return self._refuse(400, wrong)
        try:
            request.salt = self._salts.of(self.headers.get_all("Authorization", []), self.body.get("cache_salt") or "")
        except NoSalt as error:
            return self._refuse(error.status, str(error))
        request.request_log = RequestLog()
        self.server.replying.add(self)
        end = request_log.FAILED
        try:
            super().handle_completion(request, stop_words)
            end = ""
        except Ended as error:
            end = request_log.CUT
            self._cut(str(error))
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

    def _cut(self, error: str) -> None:
        """The end of an answer that is not whole. Clients take an event with an error for one; without Content-Length, a
        closed connection alone looks like the end of an answer.
        """
        if not self.stream:
            self._headers_buffer: list[bytes] = []  # the status 200, which was not sent yet
            return self._refuse(503, error)
        self.wfile.write(f"data: {_told(503, error)}\n\n".encode())

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if isinstance(sys.exc_info()[1], Ended):  # mlx-lm says 404, whatever a request failed of
            status_code = 503
        super()._set_completion_headers(status_code)

    def _refuse(self, status: int, error: str) -> None:
        self._set_completion_headers(status)
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


def _wrong(body: dict[str, Any]) -> str:
    """What mlx-lm would not notice before it fails over it; "" for nothing."""
    salt, stop, seed, options = (body.get(name) for name in ("cache_salt", "stop", "seed", "stream_options"))
    if salt is not None and not _is_salt(salt):
        return f"cache_salt must be a string of at most {SALT_LIMIT} Unicode characters"
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(word, str) and word for word in stops):
        return "stop must be a string or a list of strings, none of them empty"
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**64):
        return "seed must be an integer from 0 to 2**64 - 1"
    if options is not None and not (
        isinstance(options, dict) and isinstance(options.get("include_usage", False), bool)
    ):
        return 'stream_options must be an object such as {"include_usage": true}'
    return ""


def _is_salt(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value) <= SALT_LIMIT and value.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


class Server(ThreadingHTTPServer):
    """One thread a connection, none of which keeps the process alive. `replying`: the handlers whose client waits."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted; the default is 5

    def __init__(self, host: str, port: int):
        self.replying: set[Handler] = set()
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = addresses[0]
            super().__init__((address[0], port), upstream.APIHandler)  # type: ignore[arg-type]
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise ServeError(f"--host {host} --port {port}: {reason}; give another, or stop what uses it") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server's."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError, TimeoutError)):
            log.exception("a request failed")
