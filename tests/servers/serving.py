"""Servers for tests, in processes of their own, asked over HTTP: `prefixcache serve`, and mlx_lm.server without any prompt
cache, whose answers are the right ones. Also what they need: models small enough to be computed here, and adapters.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import openai
import requests
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load, load_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from tests.models.families import FAMILIES
from tests.servers.forked import Main, begin
from tests.waiting import until

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-llama"
VOCABULARY = 3072  # of its tokenizer
DETERMINED = ("--no-decline-slow-hits", "--no-canonical", "--no-warm-next-turn")
SECONDS = 60  # that a server may take to start, to answer, to end
TROUBLE = re.compile(r"Traceback|Error|ERROR|WARNING|died|failed")
EXPECTED = re.compile(r"not recommended for production|Future(Warning)?")  # upstream's, whatever is asked

Message = dict[str, Any]


# -- models -----------------------------------------------------------------------------------------------------------

# As many models' templates: tools in front, and calls as the parser "json_tools" reads them.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>\nTools: {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    "<tool_call>{{ {'name': tool_call.name, 'arguments': tool_call.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def save_model(folder: Path, family: str = "llama", seed: int = 0, template: str = "", **fields: Any) -> Path:
    """A folder that mlx-lm loads: random float32 weights, tiny-llama's tokenizer, its chat template or this one."""
    build = FAMILIES[family].build
    assert isinstance(build, partial)
    module, config, dtype = build.args
    config = {"model_type": module, **config, "vocab_size": VOCABULARY, "eos_token_id": 1, **fields}
    weights = dict(tree_flatten(build.func(module, config, dtype).parameters()))
    if seed:
        mx.random.seed(seed)
        weights = {name: _others(weight) if weight.ndim == 2 else weight for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((TINY / "tokenizer_config.json").read_text())
    if template:
        tokenizer["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    shutil.copy(TINY / "tokenizer.json", folder)
    return folder


def _others(weight: mx.array) -> mx.array:
    return weight[mx.random.permutation(weight.shape[0])]


def save_parrot(
    folder: Path, says: Sequence[str], *, after: dict[str, Sequence[str]] | None = None, **given: Any
) -> Path:
    """A model that answers with these texts, one token each, whatever it is asked, and then ends; and with those of `after`
    where its template ends a prompt with another character than a line feed.

    Its layers keep rows like any other's, and add nothing to what the last token alone decides.
    """
    answers = {"\n": says, **(after or {})}
    says = [said for answer in answers.values() for said in answer]
    save_model(folder, vocab_size=VOCABULARY + len(says), **given)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = range(VOCABULARY, VOCABULARY + len(says))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": i, "content": said, **plain} for i, said in zip(tokens, says, strict=True)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    encode = load_tokenizer(str(folder)).encode
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    for name in weights:
        if name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")
        ):
            weights[name] = mx.zeros_like(weights[name])
    rest = iter(tokens)
    chains = [[encode(end)[-1], *islice(rest, len(answer)), 1] for end, answer in answers.items()]
    for i, (token, following) in enumerate(chain.from_iterable(map(pairwise, chains))):
        weights["model.embed_tokens.weight"][token, i] = 1
        weights["lm_head.weight"][following, i] = 5
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def save_adapter(folder: Path, model: Path, seed: int = 1) -> Path:
    """A LoRA adapter of a model as `mlx_lm.lora` saves one, strong enough to change every answer."""
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    adapted = load(str(model))[0]
    linear_to_lora_layers(adapted, config["num_layers"], config["lora_parameters"])
    mx.random.seed(seed)
    weights = {
        name: mx.random.normal(weight.shape) * 0.1
        for name, weight in tree_flatten(adapted.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


# -- servers ----------------------------------------------------------------------------------------------------------


def serve(flags: list[str]) -> None:
    """`prefixcache serve`, which gives every hit, and computes nothing ahead: what is hit must not depend on how fast this
    machine is. Prompts are mlx-lm's: models of random weights say what no tokenizer reads back, so that canonical text would
    be another one.
    """
    from prefixcache.cli import app

    app(["serve", *DETERMINED, *flags], prog_name="prefixcache")


class Endpoint:
    url = ""

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def as_tenant(self, api_key: str, **headers: str) -> Any:
        """The same, asked with this API key and these headers."""
        tenant = copy.copy(self)
        tenant.client = self.client.with_options(api_key=api_key, default_headers=headers)
        return tenant


class Server(Endpoint):
    """A process that serves, or will, and what it logs."""

    ADDRESS = r"serving at (http://\S+)"  # as it logs where it serves

    def __init__(self, main: Main, arguments: Sequence[Any], log: Path, *, anew: bool = False):
        self.log = log
        log.write_bytes(b"")
        self.process = begin(main, arguments, log, log, anew=anew)

    def ready(self) -> Server:
        """Wait until it takes requests."""
        self.url = wait_for(self._address, "a server that takes requests", self.log)
        return self

    def _address(self) -> str:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.said()}"
        address = re.search(self.ADDRESS, self.said())
        return address[1] if address else ""

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def troubles(self) -> list[str]:
        lines = self.said().splitlines()
        return [line for line in lines if TROUBLE.search(line) and not EXPECTED.search(line)]

    def metrics(self) -> dict[str, float]:
        """What /metrics says: name{label's value} -> value."""
        page = requests.get(f"{self.url}/metrics", timeout=SECONDS)
        assert page.status_code == 200
        return {
            sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
            if not sample.name.endswith("_info")
        }

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Send the signal and wait; the exit code."""
        self.send(signum)
        return self.process.wait(SECONDS)


def wait_for(condition: Callable[[], Any], what: str, log: Path | None = None) -> Any:
    try:
        return until(condition, SECONDS)
    except TimeoutError as error:
        raise AssertionError(f"{what}: {error}" + (f":\n{log.read_text(errors='replace')}" if log else "")) from None


@contextmanager
def starting(main: Main, log: Path, *flags: Any, anew: bool = False) -> Iterator[Server]:
    """A server that starts; at the end of the block it is killed, if it still runs."""
    server = Server(main, ["--port", 0, *flags], log, anew=anew)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def serving(log: Path, *flags: Any, limits: Sequence[str] = ("--ram", "200MB", "--codec", "raw")) -> Iterator[Server]:
    """`prefixcache serve`, rows kept as they are; at the end of the block it must end in order, and without trouble."""
    with starting(serve, log, *limits, *flags) as server:
        yield server.ready()
        if server.process.poll() is None:
            assert server.end() == 0, server.said()
        assert server.troubles() == []


@contextmanager
def serving_plainly(log: Path, *flags: Any, main: Main | None = None) -> Iterator[Server]:
    """mlx_lm.server whose prompt cache keeps nothing and finds nothing; or with its own (`main=upstream_serve`)."""
    with starting(main or plain_serve, log, *flags) as server:
        yield server.ready()


def plain_serve(flags: list[str]) -> None:
    """mlx_lm.server without a prompt cache."""
    from mlx_lm.models.cache import LRUPromptCache

    class Nothing(LRUPromptCache):  # type: ignore[misc]
        def fetch_nearest_cache(self, model: Any, tokens: Any) -> tuple[None, Any]:
            return None, tokens

        def insert_cache(self, *args: Any, **kwargs: Any) -> None:
            pass

    _serve_with(Nothing(), flags)


def upstream_serve(flags: list[str]) -> None:
    """mlx_lm.server with its own prompt cache."""
    from mlx_lm.models.cache import LRUPromptCache

    _serve_with(LRUPromptCache(), flags)


def _serve_with(cache: Any, flags: list[str]) -> None:
    from mlx_lm import server

    class Http(server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def serve_forever(self, poll_interval: float = 0.5) -> None:
            print(f"serving at http://127.0.0.1:{self.server_port}", flush=True)
            super().serve_forever(poll_interval)

    def run(host: str, port: int, provider: Any) -> None:
        server._run_http_server(host, port, server.ResponseGenerator(provider, cache), Http)

    server.run = run
    sys.argv = ["mlx_lm.server", *flags]
    server.main()


# -- requests ---------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a request was answered. `logprobs`: of its tokens, where they were asked for."""

    text: str
    finish: str
    prompt: int
    cached: int
    generated: int
    logprobs: tuple[float, ...] = ()

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


def user(content: Any) -> list[Message]:
    return [{"role": "user", "content": content}]


def ask(server: Endpoint, messages: list[Message], *, stream: bool = False, **more: Any) -> Answer:
    """One greedy request; `more` goes into its body."""
    create: Any = partial(server.client.chat.completions.create, messages=messages, **_body(more))
    if not stream:
        given = create()
        choice = given.choices[0]
        content = choice.logprobs.content if choice.logprobs else []
        return _answer(choice.message.content, choice.finish_reason, given.usage, [one.logprob for one in content])
    text, finish, usage = "", "", None
    for chunk in create(stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    return _answer(text, finish, usage)


def post(server: Endpoint, **body: Any) -> requests.Response:
    """What a chat request with this body is answered, whatever is wrong with it."""
    body = {"messages": user("hello"), "max_tokens": 2, **body}
    return requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS)


def connected(server: Endpoint) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def answer_to(server: Endpoint, data: bytes) -> bytes:
    """What the server answers to these bytes, until it closes the connection."""
    with connected(server) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def complete(server: Endpoint, prompt: str, **more: Any) -> Answer:
    """One greedy request for a text that goes on."""
    given = server.client.completions.create(prompt=prompt, **_body(more))
    return _answer(given.choices[0].text, given.choices[0].finish_reason, given.usage)


def _body(more: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "default_model", "max_tokens": 12, "temperature": 0, **more}
    extra = {name: body.pop(name) for name in ("cache", "cache_salt", "adapters", "draft_model") if name in body}
    return {**body, "extra_body": extra}


def _answer(text: str | None, finish: str, usage: Any, logprobs: Sequence[float] = ()) -> Answer:
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    return Answer(text or "", finish, usage.prompt_tokens, cached, usage.completion_tokens, tuple(logprobs))


def chat(server: Endpoint, system: str, questions: Sequence[str], **more: Any) -> list[Answer]:
    """Ask one question after the other, each with all that was said before."""
    messages, answers = [{"role": "system", "content": system}], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(ask(server, messages, **more))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def text(n: int, of: str = "rule") -> str:
    """About `n` tokens that no other `of` has."""
    return " ".join(f"The {of} {i} is {i * 7919 % 1000:03d}." for i in range(max(n // 12, 1)))
