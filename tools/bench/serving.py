"""Servers and clients for a bench over HTTP: tiny models as folders, server processes, chats through the openai client.

What is measured with them is `server`'s. Run as a module this is a server with clocks, see `clocked`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench import report

FIXTURE = report.ROOT / "tests" / "fixtures" / "tiny-llama"
OURS = [sys.executable, "-c", "from prefixcache.cli import app; app()", "serve"]
THEIRS = [sys.executable, "-m", "mlx_lm", "server"]
CLOCKED = [sys.executable, "-m", "tools.bench.serving"]  # and a file for the spans, and "ours" or "theirs"
PATIENCE = 900.0  # seconds for a start, an answer or an end, before a bench gives up
DEFAULT_MODEL = "default_model"  # mlx-lm's name for the one that it serves

Messages = list[dict[str, Any]]


# -- models and texts --------------------------------------------------------------------------------------------------


def trained_model(folder: Path, layers: int = 6) -> Path:
    """The trained tiny model, or its first layers, as float32, which MLX multiplies on the CPU several times as fast as
    float16."""
    import mlx.core as mx

    weights = {
        name: value.astype(mx.float32)
        for name, value in mx.load(str(FIXTURE / "model.safetensors")).items()
        if (of := re.match(r"model\.layers\.(\d+)\.", name)) is None or int(of[1]) < layers
    }
    return _written(folder / f"tiny-llama-{layers}", weights, {"num_hidden_layers": layers})


def random_large(folder: Path) -> Path:
    """Random weights of Llama 3.2 3B's shape in bfloat16 under the tiny model's tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    shape = {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    }
    config = json.loads((FIXTURE / "config.json").read_text()) | shape
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {
        name: (mx.random.normal(w.shape) * 0.02).astype(mx.bfloat16) for name, w in tree_flatten(model.parameters())
    }
    return _written(folder / "random-3b", weights, shape)


def _written(folder: Path, weights: dict[str, Any], changed: dict[str, Any]) -> Path:
    import mlx.core as mx

    folder.mkdir()
    for file in FIXTURE.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((FIXTURE / "config.json").read_text()) | changed | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


class Texts:
    """Pieces of one long text, never the same one twice, and prompts as the server makes them."""

    def __init__(self) -> None:
        from mlx_lm.utils import load_tokenizer

        from prefixcache.cli.evaluate.texts import default_text

        logging.getLogger("transformers").setLevel(
            logging.ERROR
        )  # it would warn that a text is longer than the context
        self.tokenizer = load_tokenizer(FIXTURE)
        self._text = default_text()
        self._at = self._rounds = 0

    def piece(self, tokens: int) -> str:
        """The next of about so many tokens: where a text is cut, one more or less. At the end of the text, its beginning
        again, from another character on."""
        if self._at + 12 * tokens > len(self._text):
            self._rounds += 1
            self._at = 7 * self._rounds
        part = self._text[self._at : self._at + 12 * tokens]
        piece = str(self.tokenizer.decode(self.tokenizer.encode(part, add_special_tokens=False)[:tokens]))
        self._at += len(piece)
        return piece

    def prompt(self, messages: Messages) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))

    def answer(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


# -- servers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server process that answers, and the file that has what it prints."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self) -> dict[str, float]:
        """What /metrics says: sample, with its label as in `name{label="value"}`, -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def stop(self) -> float:
        """SIGTERM, and the seconds until the process has ended. RuntimeError when it ends otherwise than cleanly."""
        begin = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        if code not in (0, -signal.SIGTERM):
            raise RuntimeError(f"the server ended with code {code}:\n{self._tail()}")
        return time.perf_counter() - begin

    def wait_until_ready(self) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server did not start, code {self.process.returncode}:\n{self._tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=60):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.05)
        raise RuntimeError(f"the server did not start in {PATIENCE:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def serving(
    command: Sequence[str], model: Path, folder: Path, *flags: str, name: str = DEFAULT_MODEL
) -> Iterator[Server]:
    """A server of this model, ready for requests, which call it by `name`; what is left of it at the end is killed. Its log
    goes to `folder`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"server-{port}.log"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFIXCACHE_")},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(report.ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--model", str(model), "--port", str(port), *flags],
            cwd=report.ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    server = Server(process, port, log)
    try:
        server.wait_until_ready()
        ask(client_of(server), [{"role": "user", "content": "Hello?"}], 4, name)  # compiles what MLX compiles
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


# -- clients -----------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """An answer as a client sees it, tokens as `usage` counts them. `first`: seconds to the first text; `stopped`: it ended
    by itself."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stopped: bool
    first: float
    seconds: float

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def client_of(server: Server) -> Any:
    import openai  # takes a second: not for the benches that need no client

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def ask(client: Any, messages: Messages, max_tokens: int, name: str = DEFAULT_MODEL) -> Reply:
    """One chat request to the model of this name, streamed to its end, greedy."""
    begin, first, text, reason, usage = time.perf_counter(), 0.0, "", "", None
    for chunk in _stream(client, messages, max_tokens, model=name, stream_options={"include_usage": True}):
        if chunk.choices:
            if chunk.choices[0].delta.content:
                first = first or time.perf_counter() - begin
                text += chunk.choices[0].delta.content
            reason = chunk.choices[0].finish_reason or reason
        usage = chunk.usage or usage
    seconds = time.perf_counter() - begin
    if usage is None or not reason:
        raise RuntimeError("the server's answer has no end or no usage")
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    counts = usage.prompt_tokens, cached or 0, usage.completion_tokens
    return Reply(text, *counts, reason == "stop", first or seconds, seconds)


def _stream(client: Any, messages: Messages, max_tokens: int, **more: Any) -> Any:
    return client.chat.completions.create(
        messages=messages, max_tokens=max_tokens, temperature=0, stream=True, **{"model": DEFAULT_MODEL, **more}
    )


def at_once(works: Sequence[Callable[[], object]]) -> None:
    """Do all of this on threads that begin together. Raises the first error of theirs when all have ended."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            begin.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Turn(NamedTuple):
    """One turn of a chat: its prompt's tokens, and what came."""

    prompt: list[int]
    reply: Reply


def chat(client: Any, texts: Texts, system: str, questions: Sequence[str], max_tokens: int) -> list[Turn]:
    """A chat by turns, each going on from the answers before."""
    messages, turns = [{"role": "system", "content": system}], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        turns.append(Turn(texts.prompt(messages), ask(client, messages, max_tokens)))
        messages.append({"role": "assistant", "content": turns[-1].reply.text})
    return turns


# -- a server with clocks ----------------------------------------------------------------------------------------------


WHAT = ("step", "prefill", "fetch", "store", "encode")


class Span(NamedTuple):
    """What the thread that generates did: "step" (one token of every sequence in the batch), "prefill", "fetch", "store" or
    "encode" (which lies within a store); from, to (perf_counter); a step's sequences, a store's tokens."""

    what: str
    begin: float
    end: float
    size: int


def clocked(out: Path, ours: bool, arguments: list[str]) -> None:
    """`prefixcache serve` with these arguments, or mlx_lm.server, its loop watched; the spans go to `out` as JSON when it
    has ended."""
    import mlx_lm.server
    from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
    from mlx_lm.models.cache import LRUPromptCache

    from prefixcache.cli import app
    from prefixcache.servers.mlx_lm import serve as mlx_lm_server
    from prefixcache.servers.mlx_lm.tenant_cache import TenantPromptCache
    from prefixcache.store_fetch_remove import image_maker

    spans: list[Span] = []

    def watch(owner: Any, name: str, what: str, size: Callable[..., int]) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            count, begin = size(*args), time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spans.append(Span(what, begin, time.perf_counter(), count))

        setattr(owner, name, timed)

    prompt_cache = TenantPromptCache if ours else LRUPromptCache
    watch(GenerationBatch, "next", "step", len)
    watch(PromptProcessingBatch, "prompt", "prefill", lambda batch, prompts: sum(map(len, prompts)))
    watch(PromptProcessingBatch, "generate", "prefill", lambda batch, prompts: len(prompts))
    watch(prompt_cache, "fetch_nearest_cache", "fetch", lambda prompts, model, tokens: len(tokens))
    watch(prompt_cache, "insert_cache", "store", lambda prompts, model, tokens, caches: len(tokens))
    watch(image_maker, "encode", "encode", lambda section, leaves, targets, back: len(targets))

    def written(run: Callable[..., Any]) -> Callable[..., Any]:
        def runs(*args: Any, **kwargs: Any) -> None:
            try:
                run(*args, **kwargs)
            finally:
                out.write_text(json.dumps(spans))

        return runs

    if ours:
        mlx_lm_server.serve = written(mlx_lm_server.serve)
        app(["serve", *arguments])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its way to end is Ctrl-C
    sys.argv = ["mlx_lm.server", *arguments]
    written(mlx_lm.server.main)()
    os._exit(0)  # MLX may abort a Python that shuts down after its threads compiled (ml-explore/mlx#4110)


if __name__ == "__main__":
    clocked(Path(sys.argv[1]), sys.argv[2] == "ours", sys.argv[3:])
