"""A step of the model that raises an exception, under `prefixcache serve`: what a hit may have caused is computed without it
and the hit is deleted, anything else ends the requests of that step, and the server goes on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import requests
from mlx_lm import sample_utils
from mlx_lm import server as upstream
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache
from prefixcache.servers.mlx_lm.answers import StepFailed
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.prefill import RequestBatches
from tests.given_rates import computing_is
from tests.servers.serving import SECONDS, serve, starting, text, user, wait_for
from tests.servers.test_requests import Asked, generating

CACHE = {"ram": "100MB", "ssd": "100MB"}
ALONE = pytest.mark.parametrize("seed", [None, 1], ids=["batch", "alone"])
FORBIDDEN = "forbidden"
HIT, OTHER = text(600, "hit"), text(40, "other")
OTHERS, SEVERAL = [text(40, f"other {i}") for i in range(3)], [text(300, f"hit {i}") for i in range(3)]


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[int]]:
    """What answers each text without any cache of it."""
    with PrefixCache(ram="100MB", codec="raw") as cache, generating(cache, "--model", model) as generator:
        texts = (HIT, OTHER, *OTHERS, *SEVERAL)
        return {of: Asked(generator, user(of), salt=of).answered().tokens for of in texts}


@contextmanager
def generating_raw(opened: Any, model: Path, *flags: Any) -> Iterator[Generator]:
    with generating(opened(codec="raw"), "--model", model, *flags) as generator:
        yield generator


def store_another_form(generator: Generator, of: str) -> int:
    """Rows of another width, as an older release of the model's code could have stored them under the same name, and a server
    that doesn't notice. Returns how many tokens.
    """
    generator.model_provider.form = None
    provider, cache = generator.model_provider, generator.prompts.cache
    tokens = provider.tokenizer.apply_chat_template(user(of), add_generation_prompt=True)[:-1]
    layers = []
    for _ in provider.model.layers:
        layers.append(KVCache())
        layers[-1].update_and_fetch(*[mx.zeros((1, 7, len(tokens), 3))] * 2)
    mx.eval([layer.state for layer in layers])
    cache.store(tokens, layers, model=generator.prompts.name_of(provider.model_key))
    return len(tokens)


@ALONE
def test_a_hit_that_the_model_fails_on_is_deleted_and_the_prompt_computed(model, opened, plain, seed, caplog):
    with generating_raw(opened, model) as generator:
        stored = store_another_form(generator, HIT)
        cache = generator.prompts.cache
        assert cache.flush()
        assert cache.stats().images_on_ssd > 0
        first = Asked(generator, user(HIT), seed=seed)
        assert (first.cached, first.tokens) == (0, plain[HIT])
        assert cache.stats().counters.failed_hits == 1
        assert f"a hit of {stored} tokens is deleted, since the model fails on it: ValueError" in caplog.text
        again = Asked(generator, user(HIT), seed=seed)
        assert (again.computed, again.tokens) == (1, plain[HIT])
        assert cache.stats().counters.failed_hits == 1
        cache.check_integrity()


def test_a_hit_that_is_deleted_stays_away_after_a_restart(model, opened, plain, tmp_path):
    cache = opened(codec="raw")
    with generating(cache, "--model", model) as generator:
        store_another_form(generator, HIT)
        cache.flush()
        Asked(generator, user(HIT)).answered()
    cache.close()
    with PrefixCache(ssd_dir=tmp_path / "ssd", codec="raw", **CACHE) as cache:
        cache.rates = computing_is("forever")
        with generating(cache, "--model", model) as generator:
            generator.model_provider.form = None
            again = Asked(generator, user(HIT))
            assert (again.computed, again.tokens) == (1, plain[HIT])
        assert cache.stats().counters.failed_hits == 0


def test_who_is_served_beside_a_failing_hit_notices_nothing(model, opened, plain):
    texts = [OTHERS[0], HIT, *OTHERS[1:]]
    with generating_raw(opened, model, "--prefill-step-size", 64) as generator:
        store_another_form(generator, HIT)
        long = Asked(generator, user(text(30, "long")), max_tokens=60)
        assert long.begun.wait(SECONDS)
        asked = [Asked(generator, user(of)) for of in texts]
        assert [one.answered().tokens for one in asked] == [plain[of] for of in texts]
        assert len(long.answered().tokens) == 60
        assert asked[1].cached < 100  # of what the others have stored meanwhile
        assert generator.prompts.cache.stats().counters.failed_hits >= 1


def test_several_failing_hits_in_one_batch_are_all_computed(model, opened, plain):
    with generating_raw(opened, model) as generator:
        for of in SEVERAL:
            store_another_form(generator, of)
        busy = Asked(generator, user(text(1000, "busy")))
        asked = [Asked(generator, user(of)) for of in SEVERAL]
        assert [one.answered().tokens for one in asked] == [plain[of] for of in SEVERAL]
        assert len(busy.answered().tokens) == 6


@ALONE
def test_a_hit_is_kept_when_memory_runs_out_or_a_sampler_fails(model, opened, plain, seed, monkeypatch):
    with generating_raw(opened, model) as generator:
        Asked(generator, user(HIT)).answered()

        def no_room(self: Any, *args: Any, **options: Any) -> Any:
            raise RuntimeError("[malloc] Unable to allocate 12 bytes")

        monkeypatch.setattr(llama.Model, "__call__", no_room)
        failed = Asked(generator, user(HIT), seed=seed)
        failed.join(SECONDS)
        assert isinstance(failed.error, StepFailed)
        monkeypatch.undo()
        monkeypatch.setattr(
            upstream,
            "_make_sampler",
            lambda *args: sample_utils.make_sampler(0.7, xtc_probability=0.5, xtc_threshold=0.9),
        )
        failed = Asked(generator, user(HIT), seed=seed)
        failed.join(SECONDS)
        assert isinstance(failed.error, StepFailed)
        monkeypatch.undo()
        kept = Asked(generator, user(HIT), seed=seed)
        assert (kept.computed, kept.tokens) == (1, plain[HIT])
        assert generator.prompts.cache.stats().counters.failed_hits == 0


def forbid(monkeypatch: pytest.MonkeyPatch, generator: Generator, when: Callable[[int], bool]) -> None:
    """From now on the model fails on a batch with this word, when its batch's tokens are so many."""
    tokens = set(generator.model_provider.tokenizer.encode(FORBIDDEN, add_special_tokens=False)[-1:])
    call = llama.Model.__call__

    def called(self: Any, inputs: mx.array, *args: Any, **options: Any) -> Any:
        if when(inputs.shape[1]) and tokens & set(inputs.flatten().tolist()):
            raise RuntimeError("[matmul] the shapes don't agree")
        return call(self, inputs, *args, **options)

    monkeypatch.setattr(llama.Model, "__call__", called)


@ALONE
def test_a_prompt_that_the_model_fails_on_ends_with_an_error_and_no_answer_under_way(
    model, opened, plain, seed, monkeypatch
):
    with generating_raw(opened, model) as generator:
        forbid(monkeypatch, generator, lambda length: length > 1)
        long = Asked(generator, user(text(30, "long")), max_tokens=60)
        assert long.begun.wait(SECONDS)
        wait_for(lambda: any(answers._log.tokens for answers in generator.answering), "an answer under way")
        failed = Asked(generator, user(f"{text(30)} {FORBIDDEN}"), seed=seed)
        failed.join(SECONDS)
        assert isinstance(failed.error, StepFailed)
        assert "RuntimeError" in str(failed.error)
        assert "matmul" not in str(failed.error)
        assert len(long.answered().tokens) == 60
        assert Asked(generator, user(OTHER)).answered().tokens == plain[OTHER]


def test_a_step_of_generation_that_fails_ends_its_batch_and_not_the_server(model, opened, plain, monkeypatch):
    call, broken = llama.Model.__call__, threading.Event()

    def called(self: Any, inputs: mx.array, *args: Any, **options: Any) -> Any:
        if inputs.shape[1] == 1 and broken.is_set():
            broken.clear()
            raise RuntimeError("[add] the shapes don't agree")
        return call(self, inputs, *args, **options)

    monkeypatch.setattr(llama.Model, "__call__", called)
    with generating_raw(opened, model) as generator:
        asked = [Asked(generator, user(text(30, f"long {i}")), max_tokens=2000) for i in range(2)]
        assert all(one.begun.wait(SECONDS) for one in asked)
        wait_for(lambda: all(len(answers._log.tokens) > 3 for answers in generator.answering), "tokens of both")
        broken.set()
        for one in asked:
            one.join(SECONDS)
            assert isinstance(one.error, StepFailed)
        assert Asked(generator, user(OTHER)).answered().tokens == plain[OTHER]


def test_what_fails_behind_a_step_leaves_nobody_waiting(model, opened, plain, monkeypatch):
    """One answer ends in a step whose other sequence can't be kept."""
    keep = RequestBatches._keep

    def failing(self: Any, batch: Any, uid: int, *others: Any) -> None:
        if batch is self._batches.generating and len(batch.uids) == 1 and 0 in self._ended_here:
            raise RuntimeError("no room")
        keep(self, batch, uid, *others)

    def forget(self: Any, uid: int) -> None:
        self._ended_here = {*getattr(self, "_ended_here", ()), uid}
        forgotten(self, uid)

    forgotten = RequestBatches._forget
    monkeypatch.setattr(RequestBatches, "_ended_here", frozenset(), raising=False)
    monkeypatch.setattr(RequestBatches, "_forget", forget)
    monkeypatch.setattr(RequestBatches, "_keep", failing)
    with generating_raw(opened, model) as generator:
        short = Asked(generator, user(text(30, "short")), max_tokens=8)
        assert short.begun.wait(SECONDS)  # so its uid is 0
        long = Asked(generator, user(text(30, "long")), max_tokens=2000)
        assert len(short.answered().tokens) == 8
        long.join(SECONDS)
        assert isinstance(long.error, StepFailed)
        monkeypatch.undo()
        assert Asked(generator, user(OTHER)).answered().tokens == plain[OTHER]


@pytest.mark.parametrize("name", ["_make_state_machine", "_log_cache_stats", "_is_batchable"])
def test_an_exception_anywhere_in_the_loop_ends_what_is_under_way_and_the_loop_goes_on(
    model, opened, plain, monkeypatch, name
):
    with generating_raw(opened, model) as generator:
        long = Asked(generator, user(text(30, "long")), max_tokens=2000)
        assert long.begun.wait(SECONDS)
        whole = getattr(generator.loop, name)

        def failing(*args: Any) -> Any:
            monkeypatch.setattr(generator.loop, name, whole)
            raise RuntimeError("no request expects this")

        monkeypatch.setattr(generator.loop, name, failing)
        asked = Asked(generator, user(OTHER))
        for one in (asked, long):
            one.join(SECONDS)
            assert isinstance(one.error, StepFailed)
        again = [Asked(generator, user(OTHER), seed=seed) for seed in (None, 1)]
        assert [one.answered().tokens for one in again] == [plain[OTHER]] * 2


def test_a_loop_that_fails_without_a_request_ends(model, opened, monkeypatch):
    """Or it would fail for ever."""
    with generating_raw(opened, model) as generator:
        Asked(generator, user("hello")).answered()

        def failing(*args: Any, **options: Any) -> Any:
            raise RuntimeError("always")

        monkeypatch.setattr(generator, "next_request", failing)
        generator.thread.join(SECONDS)
        assert not generator.thread.is_alive()
        generator.stop()


# -- over HTTP --------------------------------------------------------------------------------------------------------


def serve_failing(flags: list[str]) -> None:
    """`prefixcache serve` of a model that fails on prompts with a certain word."""
    call = llama.Model.__call__
    from mlx_lm.utils import load_tokenizer

    tokens = set(load_tokenizer(flags[flags.index("--model") + 1]).encode(FORBIDDEN, add_special_tokens=False)[-1:])

    def called(self: Any, inputs: mx.array, *args: Any, **options: Any) -> Any:
        if inputs.shape[1] > 1 and tokens & set(inputs.flatten().tolist()):
            raise RuntimeError("[matmul] the shapes don't agree")
        return call(self, inputs, *args, **options)

    llama.Model.__call__ = called  # type: ignore[method-assign]
    serve(flags)


def test_over_http_it_is_an_error_500_in_openais_form(model, tmp_path):
    with starting(serve_failing, tmp_path / "log", "--model", model, "--ram", "50MB") as server:
        url = server.ready().url + "/v1/chat/completions"

        def post(content: str, **fields: Any) -> requests.Response:
            body = {"messages": user(content), "max_tokens": 4, "temperature": 0, **fields}
            return requests.post(url, json=body, timeout=SECONDS)

        for more in ({}, {"seed": 3}):  # in a batch, or by itself
            for _ in range(2):
                refused = post(f"{text(30)} {FORBIDDEN}", **more)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["type"]) == (500, 500, "server_error")
                assert "could not be computed (RuntimeError)" in error["message"]
            events = [
                line.removeprefix("data: ")
                for line in post(f"{text(30)} {FORBIDDEN}", stream=True, **more).text.splitlines()
                if line.startswith("data: ")
            ]
            assert json.loads(events[-1])["error"]["code"] == 500
            assert post("hello there", **more).status_code == 200
        assert server.process.poll() is None
        assert server.end() == 0
        assert "[matmul] the shapes don't agree" in server.said()
