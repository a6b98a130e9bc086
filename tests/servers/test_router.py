"""Two servers behind sglang-router: a chat stays where its turns are stored, and API keys keep tenants apart, though the
router drops `cache_salt` from chat requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from tests.peers.sglang_router import Router, routing
from tests.servers.serving import (
    SECONDS,
    TINY,
    Answer,
    Server,
    ask,
    at_once,
    chat,
    complete,
    serving,
    text,
    user,
)

FLAGS = ("--model", TINY, "--salt-from", "authorization", "--require-salt")
OPEN = "--disable-circuit-breaker"  # which takes refusals for failures of the server, and then sends it nothing for a minute
ROUTING_KEY = "X-SMG-Routing-Key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("router")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Server]]:
    with serving(folder / "a.log", *FLAGS) as a, serving(folder / "b.log", *FLAGS) as b:
        yield [a, b]


@pytest.fixture(scope="module")
def by_prompt(servers: list[Server], folder: Path) -> Iterator[Router]:
    """The router as it is by default: a prompt goes where the longest beginning of it went."""
    with routing(servers, folder / "by_prompt.log", "--policy", "cache_aware", OPEN) as router:
        yield router


@pytest.fixture(scope="module")
def by_header(servers: list[Server], folder: Path) -> Iterator[Router]:
    """A request goes where those with the same routing key went."""
    with routing(servers, folder / "by_header.log", "--policy", "manual", OPEN) as router:
        yield router


def turns(of: str) -> tuple[str, list[str]]:
    return text(150, of), [text(20, f"{of} turn {turn}") for turn in range(3)]


def asked(servers: list[Server], call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What the call returns, and how many requests each server looked up for it."""
    before = [server.metrics()["prefixcache_fetches_total"] for server in servers]
    returned = call()
    after = [server.metrics()["prefixcache_fetches_total"] for server in servers]
    return returned, [int(b - a) for a, b in zip(before, after, strict=True)]


def assert_hits(answers: list[Answer]) -> None:
    for before, after in pairwise(answers):
        assert after.cached >= before.prompt - 1


# -- where requests go ------------------------------------------------------------------------------------------------


def test_turns_of_a_chat_go_to_one_server_and_hit(by_prompt, servers):
    for n in range(2):
        answers, counts = asked(servers, partial(chat, by_prompt.as_tenant("sk-a"), *turns(f"chat {n}")))
        assert sorted(counts) == [0, 3]
        assert_hits(answers)


def test_chats_at_once_are_spread_and_their_turns_hit(by_prompt, servers):
    calls = [partial(chat, by_prompt.as_tenant("sk-a"), *turns(f"together {n}"), max_tokens=24) for n in range(4)]
    chats, counts = asked(servers, lambda: at_once(calls))
    for answers in chats:
        assert_hits(answers)
    assert min(counts) > 0
    assert sum(counts) == 12


def test_a_routing_key_keeps_a_chat_on_one_server(by_header, servers):
    for n in range(3):
        tenant = by_header.as_tenant("sk-a", **{ROUTING_KEY: f"chat {n}"})
        answers, counts = asked(servers, partial(chat, tenant, *turns("routed")))
        assert sorted(counts) == [0, 3]
        assert_hits(answers)


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_api_keys_share_nothing_though_the_router_drops_cache_salt(by_prompt, servers):
    prompt = user(text(150, "salted"))
    places = []
    for key in ("sk-one", "sk-two"):
        for salt, is_hit in (("a", False), ("b", True)):  # dropped: to the server they are one
            answer, counts = asked(servers, partial(ask, by_prompt.as_tenant(key), prompt, cache_salt=salt))
            assert (answer.computed == 1) == is_hit
            assert is_hit or answer.cached < 30
            places.append(counts)
    assert places == [places[0]] * 4  # on one server all of it
    server = servers[places[0].index(1)]
    assert ask(server.as_tenant("sk-one"), prompt, cache_salt="b").cached < 30
    assert ask(server.as_tenant("sk-one"), prompt).computed == 1


def test_completions_keep_their_cache_salt(by_prompt):
    tenant, prompt = by_prompt.as_tenant("sk-completes"), text(150, "completed")
    for salt in ("a", "b"):
        assert complete(tenant, prompt, cache_salt=salt).cached < 30
        assert complete(tenant, prompt, cache_salt=salt).computed == 1


def test_a_request_without_an_api_key_is_refused_once_and_told_what_to_send(by_prompt, servers):
    def refusals() -> int:
        return sum(len(re.findall(r'"POST /v1/chat/completions HTTP/1.1" 401', server.said())) for server in servers)

    before = refusals()
    for stream in (False, True):
        with pytest.raises(
            openai.AuthenticationError, match=r"no API key.* send the header `Authorization: Bearer KEY`"
        ):
            by_prompt.client.chat.completions.create(
                model="default_model",
                messages=user("hello"),
                stream=stream,
                extra_headers={"Authorization": openai.Omit()},
            )
    assert refusals() == before + 2  # the router doesn't try it again


def test_refusals_close_no_server_to_those_who_have_a_key(by_prompt):
    """With the router's circuit breaker, ten refusals in a row close a server to all."""
    prompt = {"model": "default_model", "messages": user("hello")}
    for _ in range(25):
        answer = requests.post(f"{by_prompt.url}/v1/chat/completions", json=prompt, timeout=SECONDS)
        assert answer.status_code == 401
    assert ask(by_prompt.as_tenant("sk-good"), user("hello")).generated


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_come_through(by_prompt, servers, stream):
    prompt = user(text(100, f"answers {stream}"))
    through = ask(by_prompt.as_tenant("sk-asks"), prompt, stream=stream)
    alone = ask(servers[0].as_tenant("sk-alone"), prompt, stream=stream)
    assert through.text
    assert through._replace(cached=0) == alone._replace(cached=0)
