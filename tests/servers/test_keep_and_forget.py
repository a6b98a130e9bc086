"""What requests ask of the cache: to keep a prompt for a time, to keep nothing, and to forget a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from prefixcache.servers.apis.messages import Messages
from prefixcache.servers.apis.responses import Responses
from prefixcache.servers.keeping import Keeping
from prefixcache.servers.request_schema import ChatRequest, RequestRefused, checked
from tests.servers.serving import TEMPLATE, Server, ask, complete, post, save_model, serving, text, user
from tests.servers.test_admin import admin, command, done

MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SHORT = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keep")
    model = save_model(folder / "model", template=TEMPLATE)
    with serving(folder / "log", "--model", model, "--ssd-dir", folder / "ssd", "--ssd", "100MB") as server:
        yield server


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> None:
    if "served" in request.fixturenames:
        assert admin(request.getfixturevalue("served"), "DELETE", "images").status_code == 200


def leased(server: Server) -> list[dict[str, Any]]:
    """The leases, once what was answered is stored."""
    admin(server, "DELETE", "sessions", {"session": "nobody's"})
    leases: list[dict[str, Any]] = admin(server, "GET", "leases").json()["leases"]
    return leases


# -- a time to live ---------------------------------------------------------------------------------------------------


def test_a_chat_is_kept_for_as_long_as_it_asks(served):
    answer = ask(served, user(text(400)), cache={"ttl": "1h"})
    (lease,) = leased(served)
    assert lease["tokens"] >= answer.prompt - 1
    assert 3500 < lease["seconds"] <= 3600
    metrics = served.metrics()
    assert metrics["prefixcache_leases"] == 1
    assert metrics["prefixcache_leased_bytes"] == lease["nbytes"]


def test_a_text_is_kept_for_as_long_as_it_asks(served):
    complete(served, text(400), cache={"ttl": "5m"})
    (lease,) = leased(served)
    assert 200 < lease["seconds"] <= 300


def test_a_message_is_kept_as_its_marks_say(served):
    system = [{"type": "text", "text": text(300, "system"), **MARK}]
    messages = user([{"type": "text", "text": text(300), **SHORT}])
    body = {"model": "default_model", "max_tokens": 4, "system": system, "messages": messages}
    assert requests.post(f"{served.url}/v1/messages", json=body, timeout=60).status_code == 200
    longest, whole = leased(served)
    assert longest["seconds"] > 300 >= whole["seconds"] > 200
    assert 250 < longest["tokens"] < whole["tokens"]


def test_nothing_is_leased_that_no_request_asked_for(served):
    ask(served, user(text(400)))
    assert leased(served) == []


# -- nothing is kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"seed": 1}], ids=["in a batch", "alone"])
def test_of_a_request_that_asks_for_it_nothing_is_kept(served, more):
    before = served.metrics()
    for _ in range(2):
        assert ask(served, user(text(600)), cache={"store": False}, **more).cached == 0
    assert leased(served) == []
    after = served.metrics()
    for name in ("prefixcache_blocks", "prefixcache_hot_prompts", "prefixcache_images{ram}", "prefixcache_images{ssd}"):
        assert after[name] == 0
    assert after["prefixcache_stored_bytes_total"] == before["prefixcache_stored_bytes_total"]


def test_a_request_that_leaves_nothing_hits_what_is_there(served):
    ask(served, user(text(600)))
    blocks = served.metrics()["prefixcache_blocks"]
    assert ask(served, user(text(600)), cache={"store": False}).cached > 250
    admin(served, "GET", "leases")
    assert served.metrics()["prefixcache_blocks"] == blocks


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_the_end_of_a_session_deletes_what_it_alone_stored(served):
    cache = {"session": "mine", "ttl": "1h"}
    ask(served, user(text(600)), cache=cache)
    ask(served, user(text(600, "another")), cache={"session": "other"})
    ended = admin(served, "DELETE", "sessions", {"session": "mine"}).json()
    assert ended["images"] > 0
    assert leased(served) == []
    assert ask(served, user(text(600, "another"))).cached > 250
    assert ask(served, user(text(600)), cache=cache).cached < 10  # both begin with the same words


def test_the_command_ends_a_session_of_a_tenant(served, tmp_path):
    salt = tmp_path / "salt"
    salt.write_text("tenant")
    for tenant in ("tenant", "another"):
        ask(served, user(text(600)), cache={"session": "mine"}, cache_salt=tenant)
    assert done("end-session", served, "mine", "--cache-salt-file", salt)["images"] > 0
    assert ask(served, user(text(600)), cache_salt="tenant").cached == 0
    assert ask(served, user(text(600)), cache_salt="another").cached > 250
    ran = command("end-session", served, "mine")
    assert ran.returncode == 0
    assert "deleted 0 images" in ran.stdout


@pytest.mark.parametrize(
    "body", [{}, {"session": ""}, {"session": 7}, {"session": "x" * 257}, {"session": "a", "b": 1}]
)
def test_a_session_that_has_no_name_is_not_ended(served, body):
    assert admin(served, "DELETE", "sessions", body).status_code == 400


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache", ["1h", {"ttl": "2h"}, {"ttl": 300}, {"stor": False}, {"store": 0}, {"session": ""}, {"session": "x" * 257}]
)
def test_a_wish_that_is_not_understood_is_refused(served, cache):
    refused = post(served, messages=user("x"), cache=cache)
    assert refused.status_code == 400
    assert "cache must be an object with `ttl`" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wish", "system", "leases"),
    [
        (None, 100, []),
        ({"store": True, "session": "x"}, 100, []),
        ({"ttl": "5m"}, 100, [(900, 300.0)]),
        ({"ttl": "1h", "system_ttl": "5m"}, 100, [(900, 3600.0)]),
        ({"ttl": "5m", "system_ttl": "1h"}, 100, [(100, 3600.0), (900, 300.0)]),
        ({"ttl": "5m", "system_ttl": "1h"}, 0, [(900, 3600.0)]),
        ({"system_ttl": "5m"}, 100, [(100, 300.0)]),
        ({"system_ttl": "5m", "ttl": None}, 0, [(900, 300.0)]),
    ],
)
def test_the_longer_of_two_times_counts(wish, system, leases):
    assert Keeping.of(wish).leases(900, system) == leases


def message(**more: Any) -> Any:
    return Messages().chat_request({"model": "m", "max_tokens": 1, "messages": user("x"), **more}).get("cache")


@pytest.mark.parametrize(
    ("more", "cache"),
    [
        ({}, None),
        ({"system": [{"type": "text", "text": "x", **SHORT}]}, {"system_ttl": "5m"}),
        ({"tools": [{"name": "f", "input_schema": {}, **MARK}]}, {"system_ttl": "1h"}),
        ({"messages": user([{"type": "text", "text": "x", **SHORT}, {"type": "text", "text": "y"}])}, {"ttl": "5m"}),
        (
            {
                "messages": user(
                    [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x", **MARK}]}]
                )
            },
            {"ttl": "1h"},
        ),
        ({**MARK, "cache": {"session": "s"}}, {"ttl": "1h", "session": "s"}),
        ({**SHORT, "cache": {"ttl": "1h"}}, {"ttl": "1h"}),
        ({"cache_control": None}, None),
    ],
)
def test_marks_of_messages_are_times_to_live(more, cache):
    assert message(**more) == cache


@pytest.mark.parametrize("mark", ["5m", {"ttl": "2h"}, {"ttl": ["1h"]}, {"ttl": None}, 7])
def test_a_mark_that_is_not_understood_is_refused(mark):
    with pytest.raises(RequestRefused, match=r"system\[0\].cache_control must be"):
        message(system=[{"type": "text", "text": "x", "cache_control": mark}])


def test_all_apis_take_the_same_wish():
    wish = {"ttl": "1h", "store": True, "session": "s"}
    assert checked(ChatRequest, {"messages": user("x"), "cache": wish})["cache"] == wish
    assert Responses().chat_request({"model": "m", "input": "x", "cache": wish})["cache"] == wish
    assert message(cache=wish) == wish
