"""Requests that hit little are told of: in the log, in /metrics and by `prefixcache top`, by position, part and reason."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.metrics.prometheus import render
from prefixcache.servers.cold_requests import AT_ONCE, NO_PART, ColdRequest, ColdRequests
from prefixcache.servers.prompt_parts import MESSAGE, SYSTEM, UNKNOWN, Part
from prefixcache.tiers.parting import EVICTED, NO_STATE, NOTHING_STORED, PARTED, REASONS, Parting
from tests.servers.serving import SECONDS, Server, ask, complete, save_model, serving, text, user, wait_for

LINE = re.compile(
    r"INFO - (?P<id>\S+): cold, (?P<hit>[\d,]+) of (?P<tokens>[\d,]+) tokens hit: "
    r"(?:it parts from what is stored at token (?P<position>[\d,]+), in (?P<part>[^;]+); )?(?P<reason>.+)$",
    re.MULTILINE,
)
SECRET = "xylograph"


def told(server: Server, number: int) -> dict[str, str]:
    """The line of that cold request, counted from 0, once it is there."""
    wait_for(lambda: len(LINE.findall(server.said())) > number, "a line", server.log)
    return list(LINE.finditer(server.said()))[number].groupdict()


def system(content: str, *others: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": content}, *others]


def test_a_cold_request_says_where_it_parted_and_why(model, tmp_path):
    with serving(tmp_path / "log", "--model", model) as server:
        long = text(300, SECRET)
        ask(server, system(long, *user("hello")))
        first = told(server, 0)
        assert (first["hit"], first["part"], first["reason"]) == ("0", None, REASONS[NOTHING_STORED])
        ask(server, system(long, *user("hello again")))  # hits, and says nothing
        ask(server, system(f"Monday. {long}", *user("hello")))
        changed = told(server, 1)
        assert (changed["part"], changed["reason"]) == ("the system text", REASONS[PARTED])
        assert 0 <= int(changed["position"]) - int(changed["hit"]) <= 1
        ask(server, system("Short.", *user(f"One. {long}")))
        ask(server, system("Short.", *user(f"Two. {long}")))
        assert told(server, 3)["part"] == "message 2 of 2"
        complete(server, f"Three. {long}")
        assert told(server, 4)["part"] == "the text"
        assert len(LINE.findall(server.said())) == 5
        cold = {name: value for name, value in server.metrics().items() if "cold" in name}
        assert cold["prefixcache_cold_requests_total{system}{parted}"] == 2  # Short. is no Monday.
        assert cold["prefixcache_cold_requests_total{message}{parted}"] == 1
        assert cold["prefixcache_cold_requests_total{none}{nothing_stored}"] == 1
        assert cold["prefixcache_last_cold_request{text}{parted}{tokens}"] > 300
        assert SECRET not in server.said()


def test_a_recurrent_model_without_a_state_says_so(tmp_path):
    folder = save_model(tmp_path / "model", "qwen3_next")
    with serving(tmp_path / "log", "--model", folder) as server:
        long = text(200)
        ask(server, user(f"{long} One."))
        ask(server, user(f"{long} Two."))
        line = told(server, 1)
        assert (line["hit"], line["part"], line["reason"]) == ("0", "message 1 of 1", REASONS[NO_STATE])
        assert int(line["position"]) > 100


def test_a_log_of_json_has_the_numbers_and_nothing_else(model, tmp_path):
    with serving(tmp_path / "log", "--model", model, "--log-json") as server:
        server.url = server.url.rstrip('"}')
        ask(server, user(text(300, SECRET)))
        ask(server, user(f"Monday. {text(300, SECRET)}"))
        wait_for(lambda: server.said().count('"cold_at"') == 2, "two lines", server.log)
        lines = [json.loads(line) for line in server.said().splitlines() if "cold_at" in line]
        second = {name: value for name, value in lines[1].items() if name.startswith("cold_")}
        at = second.pop("cold_at")
        assert second == {"cold_part": MESSAGE, "cold_reason": PARTED, "cold_message": 1, "cold_messages": 1}
        assert 0 < at < 20
        assert SECRET not in server.said()


def test_with_0_nothing_is_cold(model, tmp_path):
    with serving(tmp_path / "log", "--model", model, "--cold-below", 0) as server:
        ask(server, user("hello"))
        ask(server, user("other"))
        assert not LINE.search(server.said())
        assert not [name for name in server.metrics() if name.startswith("prefixcache_cold_requests_total{")]


# -- without a server -------------------------------------------------------------------------------------------------


def samples(cold: ColdRequests) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("prefixcache_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(render(cold).decode())
        for sample in family.samples
    }


def test_requests_are_counted_by_part_and_reason_and_the_last_one_is_shown():
    cold = ColdRequests()
    assert samples(cold) == {}
    cold.tell("a", Parting(100, 0, 0, NOTHING_STORED), lambda: pytest.fail("it did not part"))
    cold.tell("b", Parting(100, 20, 30, PARTED), lambda: Part(MESSAGE, 2, 3))
    cold.tell("c", Parting(100, 20, 30, PARTED), lambda: Part(MESSAGE, 3, 3))
    assert samples(cold) == {
        ("cold_requests_total", "none", "nothing_stored"): 1,
        ("cold_requests_total", "message", "parted"): 2,
        ("last_cold_request", "message", "parted", "tokens"): 100,
        ("last_cold_request", "message", "parted", "hit"): 20,
        ("last_cold_request", "message", "parted", "position"): 30,
        ("last_cold_request", "message", "parted", "message"): 3,
        ("last_cold_request", "message", "parted", "messages"): 3,
    }


def test_a_part_that_cannot_be_found_is_said_to_be_unknown():
    cold = ColdRequests()

    def fail() -> Part:
        raise ValueError(SECRET)

    cold.tell("a", Parting(100, 0, 10, PARTED), fail)
    assert samples(cold)["cold_requests_total", UNKNOWN, PARTED] == 1


def test_no_more_than_some_parts_are_looked_for_at_once():
    cold, go_on, begun = ColdRequests(), threading.Event(), threading.Semaphore(0)

    def find() -> Part:
        begun.release()
        assert go_on.wait(SECONDS)
        return Part(SYSTEM)

    looking = [threading.Thread(target=cold.tell, args=("a", Parting(9, 0, 1, PARTED), find)) for _ in range(AT_ONCE)]
    for thread in looking:
        thread.start()
    for _ in looking:
        assert begun.acquire(timeout=SECONDS)
    cold.tell("b", Parting(9, 0, 1, PARTED), lambda: pytest.fail("one too many"))
    go_on.set()
    for thread in looking:
        thread.join(SECONDS)
    assert samples(cold)["cold_requests_total", UNKNOWN, PARTED] == 1
    assert samples(cold)["cold_requests_total", SYSTEM, PARTED] == AT_ONCE


def test_what_is_all_known_did_not_part():
    words = ColdRequest(Parting(700, 0, 700, EVICTED), Part(NO_PART)).in_words()
    assert words == "cold, 0 of 700 tokens hit: 700 tokens are known; more was stored, and has been evicted since"
