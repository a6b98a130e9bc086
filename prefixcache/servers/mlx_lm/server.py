"""mlx_lm.server with a PrefixCache: what `prefixcache serve` runs. Here it starts, answers over HTTP, and ends.

Its flags and its answers are mlx-lm's; `mlx_lm_requests` has what is changed on the way of a request. Beside mlx-lm's paths
there is /metrics, and a request may carry `cache_salt`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
import mlx_lm.server as upstream
from huggingface_hub import CacheNotFound, scan_cache_dir

import prefixcache
from prefixcache.cache import PrefixCache
from prefixcache.metrics import prometheus
from prefixcache.metrics.logs import quotes_nothing
from prefixcache.metrics.stats import Stats
from prefixcache.servers import request_log
from prefixcache.servers.mlx_lm.requests import Ended, Generator, Provider
from prefixcache.servers.request_log import RequestLog
from prefixcache.settings import Settings

log = logging.getLogger("prefixcache")

LINGER = 1.0  # seconds, beyond the grace, for the thread that generates to end
SALT_LIMIT = 1024  # characters of a request's cache_salt
BODY_LIMIT = 1 << 28  # bytes of a request; images are in it
LISTED = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}  # files of a model that mlx-lm lists
POLL = 0.05  # seconds between two looks at what ends


class ServeError(Exception):
    """The server can't be started as asked. The text is one line: what is wrong, and what to do."""


class ServeFailed(ServeError):
    """The same, of a server whose thread has used MLX already."""


class Flags(argparse.ArgumentParser):
    """mlx_lm.server's own flags, in full, so that ours and theirs are told apart. One that is bad is told in one line."""

    def __init__(self, description: str | None = None):
        super().__init__(description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ServeError(f"{message}; see `prefixcache serve --help` and `mlx_lm.server --help`")


class Handler(upstream.APIHandler):
    """mlx-lm's paths, /metrics, and `cache_salt` in the body of a request: one tenant's salt, as in vLLM."""

    collectors: tuple[Any, ...] = ()

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            return super().do_GET()
        body = prometheus.render(*self.collectors)
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
        request.cache_salt = self.body.get("cache_salt") or ""
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
            log.info("%s: %s", self.request_id, request_log.in_words(fields), extra={"id": self.request_id, **fields})

    def log_request(self, *about: Any) -> None:
        """Who looks at the metrics, again and again, is not logged."""
        if getattr(self, "path", "").partition("?")[0] != "/metrics":  # there is none where the request can't be read
            super().log_request(*about)

    def _cut(self, error: str) -> None:
        """The end of an answer that is not whole. Clients take an event with an error for one; without Content-Length, a
        closed connection alone looks like the end of an answer.
        """
        if not self.stream:
            self._headers_buffer: list[bytes] = []  # the status 200, which was not sent yet
            return self._refuse(503, error)
        told = {"error": {"message": error, "type": "server_error", "code": 503}}
        self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if isinstance(sys.exc_info()[1], Ended):  # mlx-lm says 404, whatever a request failed of
            status_code = 503
        super()._set_completion_headers(status_code)

    def _refuse(self, status: int, error: str) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps({"error": error}).encode())


def downloaded(folder: Path | None = None) -> list[str]:
    """Names of the models in the Hugging Face cache (`folder`; None: where theirs is) that mlx-lm lists; none where there
    is no such folder, or none that can be read.
    """
    try:
        repos = scan_cache_dir(folder).repos
    except (CacheNotFound, ValueError, OSError):
        return []
    found = [repo for repo in repos if repo.repo_type == "model" and "main" in repo.refs]
    return sorted(repo.repo_id for repo in found if {file.file_name for file in repo.refs["main"].files} >= LISTED)


def _wrong(body: dict[str, Any]) -> str:
    """What mlx-lm would not notice before it fails over it; "" for nothing."""
    salt, stop, seed, options = (body.get(name) for name in ("cache_salt", "stop", "seed", "stream_options"))
    if salt is not None and not _is_salt(salt):
        return f"cache_salt must be a string of at most {SALT_LIMIT} Unicode characters"
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
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
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = found[0]
            super().__init__((address[0], port), upstream.APIHandler)  # type: ignore[arg-type]
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise ServeError(f"--host {host} --port {port}: {reason}; give another, or stop what uses it") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server's."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError, TimeoutError)):
            log.exception("a request failed")


class Ending:
    """SIGTERM and SIGINT: the first asks for a clean end, the second ends the process at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.signum = 0

    def __enter__(self) -> Ending:
        self._before = {number: signal.signal(number, self._on) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on(self, signum: int, frame: Any) -> None:
        if self.asked.is_set():
            os._exit(128 + signum)
        self.signum = signum
        self.asked.set()


def serve(
    settings: Settings,
    flags: Sequence[str],
    *,
    before: Callable[[Generator], None] = lambda generator: None,
    grace: float = 5.0,
    exact_prefill: bool = False,
) -> None:
    """Run mlx_lm.server with these flags of its own until a signal ends it. Call it on the main thread.

    `before`: called on the thread that generates when the model is there, before the first request is taken. `grace`:
    seconds that requests under way may still take at the end. `exact_prefill`: prompts are computed on exact rows, not on
    those that a hit will give. Raises ServeError, ValueError or `ssd.DirectoryError` when
    it can't start.
    """
    host, port, provider = _read(flags)
    for handler in logging.getLogger().handlers:  # who asks for DEBUG asks for what mlx-lm quotes there
        handler.addFilter(lambda record: record.levelno <= logging.DEBUG or quotes_nothing(record))
    _check_model(provider.cli_args)
    if mx.distributed.init().size() > 1:
        raise ServeError("several processes share this model: their caches would disagree; serve it from one process")
    if any(flag.startswith("--prompt-cache-size") for flag in flags):
        log.warning("--prompt-cache-size is not used: this cache is bounded in bytes, by --ram and --ssd")
    with Ending() as ending:
        server = Server(host, port)
        try:
            with PrefixCache(settings) as cache:
                opened = cache.stats()
                generator = Generator(provider, cache, before, exact_prefill)
                try:
                    _run(server, generator, ending, grace, opened)
                finally:
                    _end(server, generator, ending)
                held = cache.stats().ram_images
                log.info("writing what is warm: %.2f GB", held / 1e9)
        finally:
            server.server_close()


def _read(flags: Sequence[str]) -> tuple[str, int, Provider]:
    """What mlx_lm.server's own command line makes of these flags: host, port, and its provider of models."""
    read: list[Any] = []
    argv, provider, run, parsing = sys.argv, upstream.ModelProvider, upstream.run, upstream.argparse
    try:
        sys.argv = ["prefixcache serve", *flags]
        upstream.ModelProvider, upstream.run = Provider, lambda *given: read.extend(given)
        upstream.argparse = SimpleNamespace(ArgumentParser=Flags)
        upstream.main()
    finally:
        sys.argv, upstream.ModelProvider, upstream.run, upstream.argparse = argv, provider, run, parsing
    return read[0], read[1], read[2]


def _run(server: Server, generator: Generator, ending: Ending, grace: float, opened: Stats) -> None:
    """Answer requests until the end is asked for, then let those under way end."""
    while not generator.ready.wait(POLL):
        if ending.asked.is_set():
            return
    if isinstance(generator.failure, ServeError):
        raise ServeFailed(str(generator.failure))
    if generator.failure is not None:
        raise ServeFailed(f"the model can't be loaded: {_one_line(generator.failure)}")
    _tell(generator, opened)
    fingerprint = upstream.get_system_fingerprint()
    handler = type("Handler", (Handler,), {"collectors": (prometheus.CacheCollector(generator.prompts.cache),)})
    server.RequestHandlerClass = lambda *args: handler(generator, *args, system_fingerprint=fingerprint)
    thread = threading.Thread(target=server.serve_forever, args=(POLL,), name="prefixcache-http", daemon=True)
    thread.start()
    host, port = server.server_address[:2]
    log.info("serving at http://%s:%d", host, port)
    while not ending.asked.wait(POLL):
        if not generator._generation_thread.is_alive():
            raise ServeFailed("the thread that generates died; see the log")
    log.info("ending: no new requests; those under way have %g s; a second signal ends at once", grace)
    server.shutdown()
    until = time.monotonic() + grace
    while time.monotonic() < until and server.replying:
        time.sleep(POLL)


def _tell(generator: Generator, opened: Stats) -> None:
    """What is served, with what, and what the directory had when it was opened."""
    kernels = "; ".join(f"{where}: {what}" for where, what in opened.kernels.items())
    log.info(
        "prefixcache %s, mlx-lm %s, MLX %s; kernels: %s; codec %s",
        prefixcache.__version__, version("mlx-lm"), version("mlx"), kernels, opened.codec,
    )  # fmt: skip
    none = f"no model yet; RAM budget {opened.ram_limit / 1e9:.2f} GB (ram={opened.ram_setting})"
    log.info("%s", generator.model or none)
    if opened.ssd is None:
        log.info("no SSD directory: RAM only")
    else:
        directory, used, limit = generator.prompts.cache.settings.ssd_dir, opened.ssd.used / 1e9, opened.ssd.limit / 1e9
        log.info("SSD %s: %d images found; %.2f of %.2f GB used", directory, opened.images_on_ssd, used, limit)


def _end(server: Server, generator: Generator, ending: Ending) -> None:
    """Stop the thread that generates, and tell clients that wait. While it loads a model it can't be stopped: then the
    process ends without it. A step of a prefill can't either: it gets LINGER seconds, and what is warm is written beside it.
    """
    generator._stop = True
    thread, until = generator._generation_thread, time.monotonic() + LINGER
    while (thread.is_alive() or server.replying) and (time.monotonic() < until or not generator.ready.is_set()):
        generator.stop_answering()
        time.sleep(POLL)
        if not generator.ready.is_set() and ending.asked.is_set():
            try:
                generator.prompts.cache.close()
            finally:
                os._exit(128 + ending.signum)


def _check_model(args: Any) -> None:
    """A folder that isn't there is named before anything is loaded or downloaded."""
    for flag, value in (
        ("--model", args.model),
        ("--draft-model", args.draft_model),
        ("--adapter-path", args.adapter_path),
    ):
        if value is None:
            continue
        if not value:
            raise ServeError(f"{flag} is empty: give a folder, or leave it out")
        folder = Path(value).expanduser()
        local = flag == "--adapter-path" or value.count("/") != 1 or value.startswith(("/", ".", "~"))
        if local and not folder.is_dir():
            others = "" if flag == "--adapter-path" else " or a Hugging Face name"
            raise ServeError(f"{flag} {value}: no such folder; give one{others}")
        config = "adapter_config.json" if flag == "--adapter-path" else "config.json"
        if folder.is_dir() and not (folder / config).is_file():
            raise ServeError(f"{flag} {value}: the folder has no {config}; give the folder that has it")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
