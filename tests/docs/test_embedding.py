"""docs/embedding.md is kept true: its Python is one program that runs as it stands, and its server is what is tested here.

The server's answers are compared with mlx-lm's own generation without any cache, token for token.
"""

import asyncio
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import CacheError, PrefixCache
from prefixcache.keys import BLOCK
from tests.models.families import FAMILIES
from tests.servers.forked import BLAS
from tests.servers.serving import save_model

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "fixtures" / "tiny-llama"
PAGE = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LAST = BLOCKS[-1]  # stops the page's server and closes its cache
NAMES = ["Anna", "Boris", "Clara"]
SYSTEM = "The secret number of Anna is 48213."
Tokens = list[int]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page, run to where it stops its server."""
    home = planted(tmp_path_factory.mktemp("page"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.chdir(home)
        module = ModuleType("the_page")
        for block in BLOCKS[:-1]:
            exec(compile(block, "docs/embedding.md", "exec"), vars(module))
        yield module
        exec(compile(LAST, "docs/embedding.md", "exec"), vars(module))


def planted(home: Path) -> Path:
    """A folder where the page's PATH is a model that computes little."""
    save_model(home / "models" / "Qwen3-4B-4bit")
    return home


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """The trained model and its tokenizer. In float32: sums in another order, as a batch makes them, change no answer."""
    model, tokenizer = load(str(MODEL))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture(scope="module")
def family() -> Callable[[str], Any]:
    return cache(lambda name: FAMILIES[name].build())


@pytest.fixture
def serve(page: Any) -> Iterator[Callable[..., Any]]:
    """A function that starts the page's server; all are stopped, and their caches closed, at the end."""
    started = []

    def start(model: Any, stop: Sequence[int] = (), batch: int = 32, **settings: Any) -> Any:
        cache = PrefixCache(**{"ram": "200MB", "codec": "raw", **settings})
        started.append(page.Server(model, stop, cache, "m", batch))
        return started[-1]

    yield start
    for server in started:
        server.stop()
        server.cache.close()


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def uncached(model: Any, prompt: Tokens, n: int, stop: Sequence[int] = ()) -> Tokens:
    """What mlx-lm says by itself, without the token that ends it."""
    said: Tokens = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=make_prompt_cache(model)):
        if token in stop:
            break
        said.append(token)
    return said


def some(n: int, seed: int) -> Tokens:
    return random.Random(seed).choices(range(128), k=n)


def answered(server: Any, request: Any) -> Tokens:
    return list(server.submit(request))


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_a_program_that_ends_by_itself(tmp_path: Path) -> None:
    program = "\n\n".join(BLOCKS)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=planted(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **BLAS},
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r" (stop|length) 0$", ended.stdout.strip())
    assert list((tmp_path / ".cache" / "prefixcache").rglob("*.safetensors"))


def test_the_short_version_reuses_what_was_said(page: Any) -> None:
    messages = [{"role": "user", "content": "How many books may I borrow at a time? " * 24}]
    first = page.answer(messages, max_tokens=4)
    asked = len(page.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    hits = page.cache.stats().counters.hit_tokens
    page.answer([*messages, {"role": "assistant", "content": first}, *messages], max_tokens=4)
    assert page.cache.stats().counters.hit_tokens - hits >= asked // BLOCK * BLOCK > 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_the_short_version_hits_a_prompt_that_is_asked_again_whatever_the_layers(
    page: Any, family: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **_: messages, eos_token_ids=(), decode=list)
    for part, made in (("model", family(name)), ("MODEL", f"short {name}"), ("tokenizer", tokenizer)):
        monkeypatch.setattr(page, part, made)
    prompt, counters = some(700, 5), page.cache.stats
    hits = counters().counters.hit_tokens
    said = page.answer(prompt, max_tokens=60)
    assert counters().counters.hit_tokens == hits
    assert page.answer(prompt, max_tokens=60) == said
    assert counters().counters.hit_tokens - hits == len(prompt) - 1


def test_each_of_the_three_live_caches_is_made_and_the_last_has_the_prompt(page: Any) -> None:
    assert len(page.tokens) > BLOCK
    assert {type(layer).__name__ for layer in page.live} == {"TurboQuantKVCache"}


# -- answers ----------------------------------------------------------------------------------------------------------


def test_chats_of_two_tenants_at_once_are_answered_as_without_a_cache(
    page: Any, serve: Any, tiny: Any, errors: Any
) -> None:
    """Each user is a thread; answers become text and tokens again, as with any chat server."""
    model, tokenizer = tiny
    stop = sorted(tokenizer.eos_token_ids)
    server = serve(model, stop)
    together = threading.Barrier(3)

    def converse(user: int) -> list[tuple[Any, Tokens]]:
        tenant, turns = b"one" if user else b"two", []
        messages = [{"role": "system", "content": SYSTEM}]
        for name in NAMES[user:] + NAMES[:user]:
            messages.append({"role": "user", "content": f"What is the secret number of {name}?"})
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            together.wait(60)
            cuts = page.boundaries(tokenizer, messages, prompt)
            request = page.Request(prompt, tenant, 8, cuts)
            turns.append((request, answered(server, request)))
            messages.append({"role": "assistant", "content": tokenizer.decode(turns[-1][1])})
        return turns

    with ThreadPoolExecutor(3) as users:
        chats = list(users.map(converse, range(3)))
    system = chats[0][0][0].boundaries[0]
    first, second, third = sorted(turns[0][0].reused for turns in chats)
    assert first == second == 0 < 15 < system <= third  # one user of each tenant computes it
    for turns in chats:
        for (request, _), (before, _) in zip(turns[1:], turns, strict=False):
            assert request.reused >= len(before.prompt)
        for request, said in turns:
            assert said == uncached(model, request.prompt, 8, stop)
            assert request.reason in ("stop", "length")
    assert not errors()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_every_kind_of_layer_is_answered_as_without_a_cache(
    page: Any, serve: Any, family: Any, errors: Any, name: str, at_once: int
) -> None:
    """Chats whose answers come back without their thinking: the first tokens, and the end of the generation prompt."""
    model, think, thought, system = family(name), [1, 2, 3], 4, some(90, 0)
    server = serve(model)
    histories = [system + some(20 + 17 * i, i) for i in range(1, at_once + 1)]
    stored = [0] + [len(system)] * (at_once - 1)
    for turn in range(3):
        requests = [page.Request(h + think, max_tokens=9, boundaries=[len(system), len(h)]) for h in histories]
        for request in requests:
            server.submit(request)
        said = [list(request) for request in requests]
        assert said == [uncached(model, request.prompt, 9) for request in requests]
        assert all(request.reused >= length for request, length in zip(requests, stored, strict=True))
        stored = [len(history) for history in histories]
        histories = [h + s[thought:] + some(11, turn) for h, s in zip(histories, said, strict=True)]
    assert not errors()
    server.cache.check_integrity()


def test_users_who_come_at_once_compute_a_new_prompt_of_many_steps_once(
    page: Any, serve: Any, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other: prefilled together, prompts of unequal length would spoil a recurrent state on mlx-lm 0.31.3."""
    monkeypatch.setattr(page, "BatchGenerator", partial(page.BatchGenerator, prefill_step_size=32))
    model, system = family("qwen3_next"), some(100, 0)
    server = serve(model)
    requests = [page.Request(system + some(10 + 13 * i, i), max_tokens=5, boundaries=[100]) for i in range(1, 4)]
    for request in requests:
        server.submit(request)
    assert [list(request) for request in requests] == [uncached(model, request.prompt, 5) for request in requests]
    assert [request.reused for request in requests] == [0, 100, 100]


def test_a_recurrent_model_is_hit_where_the_boundaries_said_and_nowhere_else(
    page: Any, serve: Any, family: Any
) -> None:
    server, history, think = serve(family("qwen3_next")), some(60, 1), [1, 2, 3]
    following = history + some(20, 2)
    answered(server, page.Request(history + think, b"without", 4))
    answered(server, page.Request(history + think, b"with", 4, [20, 60]))
    without, given = page.Request(following, b"without", 4), page.Request(following, b"with", 4)
    assert answered(server, without) == answered(server, given)
    assert (without.reused, given.reused) == (0, 60)
    again, other = page.Request(history + think, b"with", 4), page.Request(history[:20] + some(20, 3), b"with", 4)
    answered(server, again)
    answered(server, other)
    assert (again.reused, other.reused) == (62, 20)


def test_a_window_is_hit_far_before_the_prompts_end_because_it_was_stored_after_prefill(
    page: Any, serve: Any, family: Any
) -> None:
    server, prompt = serve(family("gemma3_text")), some(300, 1)
    answered(server, page.Request(prompt, max_tokens=60))
    for depth in (250, 150, 40):
        request = page.Request(prompt[:depth] + some(10, 2), max_tokens=1)
        answered(server, request)
        assert request.reused == depth


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_tenants_never_hit_each_others(page: Any, serve: Any, family: Any) -> None:
    server, prompt = serve(family("llama")), some(60, 1)
    reused = []
    for tenant in (b"one", b"two", b"", b"one", b"two"):
        request = page.Request(prompt, tenant, 3)
        answered(server, request)
        reused.append(request.reused)
    assert reused == [0, 0, 0, 59, 59]


# -- boundaries -------------------------------------------------------------------------------------------------------

THINKING = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{{ '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n<think>\\n' }}{% endif %}"
)


def test_the_boundaries_are_where_other_chats_and_the_next_turn_part_from_the_prompt(page: Any, tiny: Any) -> None:
    tokenizer = tiny[1]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which number?"}]
    following = [{"role": "assistant", "content": "Anna's?</think>It is 5."}, {"role": "user", "content": "And hers?"}]

    def rendered(messages: list[dict[str, str]]) -> Tokens:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, chat_template=THINKING)

    prompt = rendered(messages)
    system, history = page.boundaries(tokenizer, messages, prompt, chat_template=THINKING)
    assert tokenizer.decode(prompt[:system]) == "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\n"
    assert tokenizer.decode(prompt[history:]) == "<think>\n"
    assert rendered([*messages, *following])[:history] == prompt[:history]
    assert page.boundaries(tokenizer, messages[1:], prompt, chat_template=THINKING)[:-1] == []


# -- SSD --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_after_a_restart_the_first_request_is_a_hit(
    page: Any, serve: Any, family: Any, tmp_path: Path, name: str
) -> None:
    model, prompt = family(name), some(300, 1)
    disk = {"ssd_dir": tmp_path / "ssd", "ssd": "100MB"}
    server = serve(model, **disk)
    said = answered(server, page.Request(prompt, b"one", 6))
    server.stop()
    server.cache.close()
    server = serve(model, **disk)
    following = prompt + said + some(9, 2)
    assert server.cache.match(following, model="m", salt=b"one") == (0, 306)
    request = page.Request(following, b"one", 6)
    assert answered(server, request) == uncached(model, following, 6)
    assert request.reused == 306


def test_a_request_whose_prefix_is_being_read_waits_aside_while_others_are_answered(
    page: Any, serve: Any, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, reading, promote = serve(family("llama")), Future[int](), PrefixCache.promote
    monkeypatch.setattr(
        PrefixCache, "promote", lambda self, tokens, **kw: reading if tokens == [5] else promote(self, tokens, **kw)
    )
    slow = server.submit(page.Request([5], max_tokens=3))
    assert len(answered(server, page.Request([6], max_tokens=3))) == 3
    assert slow.out.empty()
    reading.set_exception(OSError("the disk is gone"))  # then it is computed
    assert list(slow) == uncached(server.model, [5], 3)


# -- cancelling and stopping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_a_cancelled_request_goes_on_from_where_it_was(
    page: Any, serve: Any, family: Any, errors: Any, name: str
) -> None:
    model, prompt = family(name), some(70, 1)
    server = serve(model)
    other = server.submit(page.Request(some(30, 2), max_tokens=40))
    request = server.submit(page.Request(prompt, max_tokens=10_000))
    said = [request.out.get() for _ in range(5)]
    request.cancelled = True
    said += list(request)
    assert request.reason == "cancelled"
    again = page.Request(prompt + said + some(9, 3), max_tokens=5)
    assert answered(server, again) == uncached(model, again.prompt, 5)
    assert again.reused == len(prompt + said)
    assert list(other) == uncached(model, other.prompt, 40)
    assert not errors()


def test_a_prompt_cancelled_in_its_prefill_goes_on_from_where_it_was(
    page: Any, serve: Any, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = family("llama"), some(300, 1)
    monkeypatch.setattr(page, "BatchGenerator", partial(page.BatchGenerator, prefill_step_size=64))
    server, request = serve(model), page.Request(prompt, max_tokens=5)
    call = type(model).__call__

    def cancelling(self: Any, *args: Any, **kw: Any) -> Any:
        request.cancelled = True
        return call(self, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "__call__", cancelling)
        assert answered(server, request) == []
    assert (request.reason, request.prefilled) == ("cancelled", False)
    again = page.Request(prompt, max_tokens=5)
    answered(server, again)
    assert again.reused == 64


def test_what_is_cancelled_before_its_turn_is_never_computed(page: Any, serve: Any, family: Any) -> None:
    server = serve(family("llama"), batch=1)
    running = server.submit(page.Request(some(10, 1), max_tokens=10_000))
    running.out.get()
    waiting = server.submit(page.Request(some(300, 2)))
    waiting.cancelled = running.cancelled = True
    assert list(waiting) == []
    assert waiting.reason == "cancelled"
    assert server.cache.match(waiting.prompt, model="m").ram == 0


def test_stop_ends_every_request_and_keeps_what_was_computed(page: Any, serve: Any, family: Any, errors: Any) -> None:
    server = serve(family("llama"), batch=2)
    requests = [server.submit(page.Request(some(40 + i, i), max_tokens=10_000)) for i in range(4)]
    for request in requests[:2]:
        request.out.get()
    server.stop()
    requests.append(server.submit(page.Request(some(40, 9))))
    assert requests[-1].reason == "cancelled"
    server.stop()  # again
    assert all(isinstance(token, int) for request in requests for token in request)
    assert {request.reason for request in requests} == {"cancelled"}
    assert not server.thread.is_alive()
    depths = [server.cache.match(request.prompt, model="m").ram for request in requests]
    assert depths == [40, 41, 0, 0, 0]
    assert not errors()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{"prompt": []}, {"prompt": [1], "max_tokens": 0}, {"prompt": [2**63]}])
def test_a_request_that_cannot_be_answered_is_refused_where_it_is_made(
    page: Any, serve: Any, family: Any, values: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"prompt|token"):
        serve(family("llama")).submit(page.Request(**values))


def test_a_model_that_fails_fails_the_requests_in_hand_and_the_next_is_answered(
    page: Any, serve: Any, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family("llama")
    server, request = serve(model), page.Request(some(40, 1))

    def failing(*args: Any, **kw: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "__call__", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            answered(server, request)
    assert request.reason == "error"
    assert answered(server, page.Request(some(40, 1), max_tokens=5)) == uncached(model, some(40, 1), 5)


@pytest.mark.parametrize("call", ["fetch", "store"])
def test_a_cache_that_fails_ends_no_other_request(
    page: Any, serve: Any, family: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    server, works = serve(family("llama")), getattr(PrefixCache, call)

    def failing(self: Any, tokens: Any, *args: Any, **kw: Any) -> Any:
        if tokens[0] == 7:
            raise CacheError("layer 0: not to be kept")
        return works(self, tokens, *args, **kw)

    monkeypatch.setattr(PrefixCache, call, failing)
    other = server.submit(page.Request([8, 9], max_tokens=30))
    failed = server.submit(page.Request([7, 9], max_tokens=3))
    if call == "fetch":
        with pytest.raises(CacheError):
            list(failed)
    else:
        assert len(list(failed)) == 3
    assert len(list(other)) == 30


# -- from an event loop -----------------------------------------------------------------------------------------------


def test_a_chat_on_an_event_loop_gives_the_tokens_and_one_that_is_left_is_cancelled(
    page: Any, serve: Any, tiny: Any, errors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny
    server = serve(model, tokenizer.eos_token_ids)
    question = {"role": "user", "content": "What is the secret number of Anna?"}
    messages = [{"role": "system", "content": SYSTEM}, question]
    made, make = [], page.Request
    monkeypatch.setattr(page, "server", server)
    monkeypatch.setattr(page, "Request", lambda *values: made.append(make(*values)) or made[-1])

    async def read(n: int) -> Tokens:
        answer, tokens = page.chat(messages, b"one", max_tokens=12), []
        async for token in answer:
            tokens.append(token)
            if len(tokens) == n:
                break
        await answer.aclose()
        return tokens

    async def users() -> list[Tokens]:
        return [*await asyncio.gather(read(100), read(100)), await read(2)]

    first, second, left = asyncio.run(users())
    assert first == second == uncached(model, made[0].prompt, 12, sorted(tokenizer.eos_token_ids))
    assert left == first[:2]
    assert made[-1].cancelled
    assert within(20, lambda: not server.running)
    assert made[-1].reused == len(made[0].prompt) - 1
    assert not errors()


# -- stress -----------------------------------------------------------------------------------------------------------


def test_sixty_requests_with_random_cancels_in_little_ram(
    page: Any, serve: Any, family: Any, tmp_path: Path, errors: Any
) -> None:
    """Six users with prompts of one tree; RAM holds a part of it, the SSD the rest. Whoever isn't cancelled is right."""
    model = family("gemma3_text")
    server = serve(model, batch=4, ram="1500KB", ssd_dir=tmp_path / "ssd", ssd="40MB")

    def use(user: int) -> list[tuple[Any, Tokens]]:
        rng, done = random.Random(user), []
        for i in range(10):
            prompt = some(80, rng.randrange(2))[: rng.choice([40, 80])] + some(rng.choice([1, 70]), rng.randrange(4))
            request = page.Request(prompt, rng.choice([b"one", b"two"]), rng.randint(1, 12), [40, len(prompt) - 1])
            server.submit(request)
            if rng.random() < 0.6:
                time.sleep(rng.choice([0.0, 0.01, 0.05]))
                request.cancelled = True
            done.append((request, list(request)))
            if i == 5:
                server.cache.trim_to(0)
        return done

    with ThreadPoolExecutor(6) as users:
        done = list(chain(*users.map(use, range(6))))
    server.stop()
    server.cache.check_integrity()
    stats = server.cache.stats()
    assert stats.ram_peak <= stats.ram_limit
    assert stats.pinned == 0
    assert len(done) == 60
    assert {request.reason for request, _ in done} == {"length", "cancelled"}
    assert any(request.reused for request, _ in done)
    said = {prompt: uncached(model, list(prompt), 12) for prompt in {tuple(request.prompt) for request, _ in done}}
    for request, tokens in done:
        assert tokens == said[tuple(request.prompt)][: len(tokens)]
        assert request.reason == "cancelled" or len(tokens) == request.max_tokens
    assert not errors()
    assert not server.running
