"""Two `prefixcache serve` with one Valkey: what one has computed is a hit on the other, and no engine is no matter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.remote.servers import Server as Engine
from tests.remote.servers import valkey_server
from tests.servers.serving import (
    Message,
    Server,
    ask,
    chat,
    save_model,
    serve,
    serving_plainly,
    starting,
    text,
    wait_for,
)

FAMILIES = ("llama", "gemma3_text", "qwen3_next")  # every token kept; sliding windows; recurrent state
QUESTIONS = ["What is it?", "And what else?", "Go on."]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with valkey_server(maxmemory=256 << 20, policy="allkeys-lru") as server:
        yield server


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> list[Any]:
    key = tmp_path_factory.mktemp("fleet") / "fleet.key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    remote = f"valkey://127.0.0.1:{engine.port}/fleet"
    return ["--ram", "100MB", "--codec", "raw", "--remote", remote, "--remote-key-file", key]


def sent(server: Server) -> float:
    """Wait until nothing waits to be sent; the images that were."""
    wait_for(lambda: server.metrics()["prefixcache_remote_queued_images"] == 0, "empty queue", server.log)
    return server.metrics()["prefixcache_remote_written_images_total"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_goes_on_on_another_machine_with_the_same_answers(tmp_path, flags, family):
    model = save_model(tmp_path / "model", family)
    system = text(900)
    with ExitStack() as stack:
        first = stack.enter_context(starting(serve, tmp_path / "first.log", "--model", model, *flags)).ready()
        second = stack.enter_context(starting(serve, tmp_path / "second.log", "--model", model, *flags)).ready()
        plain = stack.enter_context(serving_plainly(tmp_path / "plain.log", "--model", model))
        expected = chat(plain, system, QUESTIONS)
        assert [a.text for a in chat(first, system, QUESTIONS)] == [a.text for a in expected]
        assert sent(first) > 3
        messages: list[Message] = [{"role": "system", "content": system}]
        for question, answer in zip(QUESTIONS, expected, strict=True):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
        third = ask(second, messages[:-1])  # the first thing that it is asked
        assert third.text == expected[-1].text
        assert third.cached >= 768
        assert second.metrics()["prefixcache_hit_tokens_total{remote}"] >= 768
        assert "from remote" in second.said()
        assert first.troubles() == second.troubles() == []


def test_a_key_that_others_may_read_is_warned_of_once(tmp_path):
    (tmp_path / "fleet.key").write_text("5a" * 32)
    (tmp_path / "fleet.key").chmod(0o644)
    (tmp_path / "nas").mkdir()
    model, key = save_model(tmp_path / "model"), ["--remote-key-file", tmp_path / "fleet.key"]
    for number, remote in enumerate(([], ["--remote", f"file://{tmp_path / 'nas'}"])):
        flags = ["--model", model, "--ram", "100MB", "--codec", "raw", *key, *remote]
        with starting(serve, tmp_path / f"{number}.log", *flags) as server:
            assert server.ready().said().count("others may read it; run chmod 600") == 1


def test_an_engine_that_stops_and_dies_delays_one_request_and_is_used_again_when_it_is_back(tmp_path, flags, engine):
    model = save_model(tmp_path / "model", seed=5)
    with (
        starting(serve, tmp_path / "first.log", "--model", model, *flags) as first,
        starting(serve, tmp_path / "second.log", "--model", model, *flags) as second,
    ):
        first.ready()
        second.ready()
        prompt = [{"role": "user", "content": text(900)}]
        wanted = ask(first, prompt)
        ask(first, prompt)
        sent(first)
        engine.freeze()
        try:
            assert ask(second, prompt).text == wanted.text
            for number in range(5):
                other = [{"role": "user", "content": f"{number} {text(600)}"}]
                assert ask(second, other).cached < 256
        finally:
            engine.thaw()
        wait_for(lambda: second.metrics()["prefixcache_remote_up"] == 1, "engine that is back", second.log)
        third = [{"role": "user", "content": f"third {text(900)}"}]
        ask(first, third)
        ask(first, third)
        sent(first)
        assert wait_for(lambda: ask(second, third).cached >= 768, "hit")


def test_a_tenants_prompts_are_hit_by_the_tenant_alone_on_every_machine(tmp_path, flags):
    model = save_model(tmp_path / "model", seed=7)
    by_key = [*flags, "--salt-from", "authorization"]
    with (
        starting(serve, tmp_path / "first.log", "--model", model, *by_key) as first,
        starting(serve, tmp_path / "second.log", "--model", model, *by_key) as second,
    ):
        first.ready()
        second.ready()
        prompt = [{"role": "user", "content": text(900)}]
        for _ in range(2):
            ask(first.as_tenant("sk-one"), prompt)
        sent(first)
        assert ask(second.as_tenant("sk-two"), prompt).cached < 256
        assert ask(second.as_tenant("sk-one"), prompt).cached >= 768
