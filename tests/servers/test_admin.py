"""The admin path of a running server, by its HTTP and by the commands: what it deletes, keeps, stores and gives back, and who
may ask.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from prefixcache.cli import app
from prefixcache.servers.mlx_lm import admin_http
from tests.servers import forked
from tests.servers.serving import SECONDS, Server, answer_to, ask, at_once, serving, text, user
from tests.servers.test_api_keys import BY_KEY

KEY = "d41d8cd98f00b204"
MINE = {"authorization": "Bearer none"}  # whose the requests of `ask` are, where API keys are tenants


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Server]:
    flags = ("--model", model, "--ssd-dir", model.parent / "ssd", "--ssd", "100MB", "--prefill-step-size", 256, *BY_KEY)
    with serving(model.parent / "served.log", *flags) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> None:
    """Each test finds a server with nothing in its cache."""
    if "served" in request.fixturenames:
        assert admin(request.getfixturevalue("served"), "DELETE", "images").status_code == 200


def admin(server: Server, method: str, operation: str, body: Any = None, **headers: str) -> requests.Response:
    url = f"{server.url}/prefixcache/{operation}"
    return requests.request(method, url, json=body, headers=headers, timeout=SECONDS)


def command(name: str, server: Server, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return forked.run(run_app, name, "--url", server.url, *arguments)


def run_app(arguments: list[str]) -> None:
    app(arguments, prog_name="prefixcache")


def done(name: str, server: Server, *arguments: Any) -> Any:
    """What a command that succeeds prints as JSON."""
    ran = command(name, server, *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def prompts_in(folder: Path, *bodies: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return file


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_clear_deletes_everything_from_ram_and_ssd(served):
    ask(served, user(text(560)))
    assert ask(served, user(text(560))).cached > 250
    cleared = done("clear", served, "--yes")
    assert cleared["images"] >= 2
    assert cleared["bytes"] > 0
    assert ask(served, user(text(560))).cached == 0
    metrics = served.metrics()
    assert metrics["prefixcache_images{ssd}"] == 0


def test_clear_of_a_tenant_leaves_the_others(served, tmp_path):
    prompt, secret = user(text(560)), tmp_path / "secret"
    one, other = served.as_tenant("one"), served.as_tenant("other")
    for server, salt in ((one, ""), (other, ""), (served, "team"), (one, "team")):
        ask(server, prompt, cache_salt=salt)
    secret.write_text("one\n")
    assert done("clear", served, "--yes", "--api-key-file", secret)["images"] >= 2
    assert ask(one, prompt, max_tokens=1).cached == 0
    assert ask(other, prompt).cached > 250
    assert ask(one, prompt, cache_salt="team").cached > 250
    assert (
        admin(served, "DELETE", "images", {"cache_salt": "team", "authorization": "Bearer one"}).json()["images"] >= 2
    )
    assert ask(one, prompt, cache_salt="team", max_tokens=1).cached == 0
    assert ask(other, prompt).cached > 250
    assert admin(served, "DELETE", "images", {"cache_salt": "nobody's"}).json()["images"] == 0
    for hidden in ("Bearer one", "team"):
        assert hidden not in served.said()


def test_what_was_answered_just_before_is_deleted_too(served):
    """A client has its answer before the server has stored all of it."""
    for number in range(6):
        prompt = user(text(300, f"just now {number}"))
        ask(served, prompt, max_tokens=2)
        if number % 2:
            admin(served, "DELETE", "images")
        else:
            admin(served, "DELETE", "prompts", {"messages": prompt, **MINE})
        assert ask(served, prompt, max_tokens=1).cached < 256


def test_what_has_no_salt_is_cleared_by_itself(model, tmp_path):
    with serving(tmp_path / "log", "--model", model) as server:
        ask(server, user(text(560)))
        ask(server, user(text(560)), cache_salt="team")
        assert done("clear", server, "--yes", "--no-salt")["images"] >= 2
        assert ask(server, user(text(560)), max_tokens=1).cached == 0
        assert ask(server, user(text(560)), cache_salt="team").cached > 250
        assert done("clear", server, "--yes", "--model", "model")["images"] >= 2
        ran = command("clear", server, "--yes", "--model", "modle")
        assert (ran.returncode, "nothing is of that model" in ran.stderr) == (2, True)


def test_what_a_restart_brought_back_is_its_tenants_too(model, tmp_path):
    flags = ("--model", model, "--ssd-dir", tmp_path / "ssd", "--ssd", "100MB")
    with serving(tmp_path / "first", *flags) as server:
        for salt in ("one", "other"):
            ask(server, user(text(560)), cache_salt=salt)
    with serving(tmp_path / "second", *flags) as server:
        assert admin(server, "DELETE", "images", {"cache_salt": "one"}).json()["images"] >= 2
        assert ask(server, user(text(560)), cache_salt="one", max_tokens=1).cached == 0
        assert ask(server, user(text(560)), cache_salt="other").cached > 250
    with serving(tmp_path / "third", *flags) as server:
        assert ask(server, user(text(560)), cache_salt="other").cached > 250


def test_prune_deletes_what_was_not_used_lately_and_makes_the_ssd_smaller(served):
    for number in range(4):
        ask(served, user(text(560, f"pruned {number}")))
    assert done("prune", served, "--older-than", "1h")["images"] == 0
    assert admin(served, "POST", "ram", {"to_size": 0}).status_code == 200  # all is on the SSD, and there alone
    before = served.metrics()["prefixcache_ssd_used_bytes"]
    per_image = (before - 1e6) / served.metrics()["prefixcache_images{ssd}"]
    target = int(before - 2 * max(per_image, 1e5))
    pruned = done("prune", served, "--to-size", target)
    assert pruned["ssd_bytes"] <= target
    assert 0 < pruned["images"] < 12
    assert ask(served, user(text(560, "pruned 3"))).cached > 250  # the most recent one
    assert done("prune", served, "--older-than", "0s")["images"] > 0
    assert ask(served, user(text(560, "pruned 3")), max_tokens=1).cached < 250


def test_images_are_deleted_and_ram_is_given_back_by_one_command(served):
    ask(served, user(text(560)))
    pruned = done("prune", served, "--older-than", "0s", "--ram-to-size", "0")
    assert (pruned["images"] > 0, pruned["ram_bytes"] < 100_000) == (True, True)
    ask(served, user(text(560)), max_tokens=1)
    ran = command("prune", served, "--to-size", "1kB", "--ram-to-size", "0", "--json")  # the index takes more
    assert (ran.returncode, "even so" in ran.stderr) == (1, True)
    assert json.loads(ran.stdout)["ram_bytes"] < 100_000


def test_ram_is_given_back_and_the_ssd_has_what_was_in_it(model, tmp_path):
    flags = ("--model", model, "--ssd-dir", tmp_path / "ssd", "--ssd", "500MB", "--spill", "wait")
    with serving(tmp_path / "log", *flags) as server:
        for number in range(3):
            ask(server, user(text(560, f"held {number}")), max_tokens=1)
        held = server.metrics()["prefixcache_ram_bytes{images}"]
        now = done("prune", server, "--ram-to-size", "100kB")
        assert now["ram_bytes"] <= 100_000 < held
        assert server.metrics()["prefixcache_ram_bytes{images}"] <= 100_000
        assert ask(server, user(text(560, "held 0"))).cached > 250  # from the SSD


def test_remove_deletes_a_prompt_and_its_further_turns_and_nothing_else(served, tmp_path):
    system = {"role": "system", "content": text(560, "shared")}
    chats = []
    for name in ("one", "other"):
        messages = [system, {"role": "user", "content": text(300, name)}]
        answer = ask(served, messages)
        later = [
            *messages,
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": text(300, "more")},
        ]
        ask(served, later)
        chats.append((messages, later))
    body = {"model": "default_model", "messages": chats[0][0], "temperature": 0, "max_tokens": 5, **MINE}
    removed = done("remove", served, prompts_in(tmp_path, body))["removed"]
    assert removed[0]["bytes"] > 0
    again = ask(served, chats[1][1])
    assert again.computed < 300
    assert ask(served, chats[0][1], max_tokens=1).cached <= 600  # the system prompt, which the other chat has
    assert (
        "nothing was stored of it" in command("remove", served, prompts_in(tmp_path, body | {"cache_salt": "x"})).stderr
    )


def test_remove_deletes_a_prompt_whose_request_left_its_tools_out(agent):
    tools = [{"type": "function", "function": {"name": "count", "description": text(300, "tool")}}]
    body = {"messages": user(text(560, "no tools")), "tools": tools, "tool_choice": "none"}
    ask(agent, **body)
    assert ask(agent, **body).cached > 500
    assert admin(agent, "DELETE", "prompts", {**body, "response_format": {"type": "text"}}).json()["bytes"] > 0
    assert ask(agent, **body).cached < 250


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_prompt_stays_whatever_is_pruned(served, tmp_path):
    system = {"role": "system", "content": text(700, "pinned")}
    file = prompts_in(tmp_path, {"messages": [system], **MINE})
    ran = command("pin", served, file)
    assert (ran.returncode, "nothing of this prompt is stored" in ran.stderr) == (2, True)
    ask(served, [system, *user("a")])
    ask(served, user(text(560, "not pinned")))
    of_answers = {"presence_context_size": 5, "frequency_context_size": 5, "temperature": 1, "user": "a"}
    pins = done("pin", served, prompts_in(tmp_path, {"messages": [system], **of_answers, **MINE}))
    assert pins["done"][0]["pinned_tokens"] > 500
    assert [pin["pins"] for pin in pins["pins"]] == [1]
    done("prune", served, "--model", "model")
    assert ask(served, [system, *user("b")]).cached > 500
    assert ask(served, user(text(560, "not pinned")), max_tokens=1).cached < 250
    assert done("pin", served, file)["pins"][0]["pins"] == 2
    assert done("pin", served, file, "--undo")["pins"][0]["pins"] == 1
    assert done("pin", served, "--end", pins["pins"][0]["name"])["pins"] == []
    assert command("pin", served, "--end", "none").returncode == 2
    assert "nothing is pinned" in command("pin", served).stdout


# -- warm -------------------------------------------------------------------------------------------------------------


def test_warm_stores_prompts_on_a_running_server(served, tmp_path):
    system = {"role": "system", "content": text(1500, "warm")}
    others = {"messages": [system], "authorization": "Bearer one"}
    file = prompts_in(tmp_path, {"messages": [system], **MINE}, others)
    ran = command("warm", served, file)
    assert (ran.returncode, ran.stdout[:12]) == (0, "2 prompts of"), ran
    for server in (served, served.as_tenant("one")):
        assert ask(server, [system, *user("a")]).cached >= 1280
    assert "2 stored already" in command("warm", served, file).stdout


def test_a_request_does_not_wait_for_all_that_is_warmed(served):
    prompts = [{"prompt": text(900, f"slow {number}")} for number in range(6)]
    body = {"prompts": prompts}
    with requests.post(f"{served.url}/prefixcache/prompts", json=body, stream=True, timeout=SECONDS) as answer:
        lines = (json.loads(line) for line in answer.iter_lines())
        total = next(lines)["total"]
        while next(lines)["done"] == 0:
            pass
        ask(served, user("quick"), max_tokens=2)
        behind = next(lines)
        assert behind["done"] < total  # it was answered in between
        last = [behind, *lines][-1]
    assert last["unkept"] == 0
    assert last["prompts"] == 6


def test_a_client_that_goes_ends_its_warming(served):
    body = {"prompts": [{"prompt": text(900, f"left {number}")} for number in range(40)]}
    with requests.post(f"{served.url}/prefixcache/prompts", json=body, stream=True, timeout=SECONDS) as answer:
        next(answer.iter_lines())
    small = {"prompts": [{"prompt": text(300, "after")}]}
    with requests.post(f"{served.url}/prefixcache/prompts", json=small, stream=True, timeout=SECONDS) as answer:
        assert json.loads(list(answer.iter_lines())[-1])["unkept"] == 0
    assert admin(served, "DELETE", "images").json()["images"] < 20 * 4


def test_a_client_that_went_before_the_first_word_ends_its_warming():
    class Gone:
        def send_response(self, status: int) -> None:
            raise BrokenPipeError

    ended = []

    def results() -> Iterator[dict[str, Any]]:
        try:
            yield {"done": 0}
        finally:
            ended.append(True)

    with pytest.raises(BrokenPipeError):
        admin_http._stream(Gone(), results())
    assert ended == [True]


def test_operations_beside_requests_harm_none(served):
    """Answers are what they are without."""
    prompt = user(text(800, "beside"))
    expected = ask(served, prompt).text

    def care(number: int) -> None:
        body = {"messages": prompt, **MINE}
        calls = [
            ("DELETE", "images", {}),
            ("DELETE", "prompts", body),
            ("POST", "ram", {"to_size": 0}),
            ("POST", "pins", body),
            ("DELETE", "images", {"older_than": 0}),
            ("GET", "pins", None),
        ]
        for turn in range(6):
            method, operation, given = calls[(turn + number) % len(calls)]
            assert admin(served, method, operation, given).status_code in (200, 404)

    def ask_on() -> list[str]:
        return [ask(served, prompt).text for _ in range(5)]

    said = at_once([ask_on, ask_on, *(lambda number=number: care(number) for number in range(3))])
    assert said[0] + said[1] == [expected] * 10


# -- who may ask, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://localhost:8080"},
        {"Origin": "null"},
        {"Referer": "http://evil.example/"},
        {"Sec-Fetch-Site": "cross-site"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"X-Real-IP": "127.0.0.1"},
        {"X-Forwarded-Port": "80"},
        {"CF-Connecting-IP": "127.0.0.1"},
        {"Via": "1.1 proxy"},
        {"Host": "models.example"},
        {"Host": "127.0.0.1.evil.example"},
    ],
)
def test_without_a_key_browsers_and_proxies_may_not_ask(served, header):
    ask(served, user(text(560)))
    for method, operation, body in (("DELETE", "images", {}), ("GET", "pins", None), ("POST", "ram", {"to_size": 0})):
        refused = admin(served, method, operation, body, **header)
        assert refused.status_code == 403
        assert "images" not in refused.json()
    assert ask(served, user(text(560))).cached > 250


def test_without_a_key_http_1_0_may_not_ask(served):
    host = served.url.removeprefix("http://")
    assert b" 403 " in answer_to(served, f"DELETE /prefixcache/images HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())


def test_without_a_key_other_machines_may_not_ask(model, tmp_path):
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    with serving(tmp_path / "log", "--model", model, "--host", address) as server:
        refused = admin(server, "DELETE", "images")
        assert (refused.status_code, "--admin-key-file" in refused.text) == (403, True)


def test_with_a_key_who_has_it_may_ask_from_anywhere(model, tmp_path, monkeypatch):
    file, wrong = tmp_path / "key", tmp_path / "wrong"
    file.write_text(f"{KEY}\n")
    wrong.write_text("another\n")
    with serving(tmp_path / "log", "--model", model, "--admin-key-file", file) as server:
        for header in ({}, {"Authorization": "Bearer x"}, {"Authorization": KEY}, {"Authorization": "Bearer "}):
            assert admin(server, "GET", "pins", **header).status_code == 401
        assert admin(server, "GET", "pins", Authorization=f"Bearer {KEY}", Via="1.1 proxy").status_code == 200
        assert done("clear", server, "--yes", "--admin-key-file", file)["images"] == 0
        assert command("clear", server, "--yes", "--admin-key-file", wrong).returncode == 2
        assert command("clear", server, "--yes").returncode == 2
        monkeypatch.setenv("PREFIXCACHE_ADMIN_KEY", KEY)
        assert done("clear", server, "--yes")["images"] == 0
        assert KEY not in server.said()
    with serving(tmp_path / "log2", "--model", model) as server:  # the variable
        monkeypatch.delenv("PREFIXCACHE_ADMIN_KEY")
        assert admin(server, "GET", "pins").status_code == 401
        assert admin(server, "GET", "pins", Authorization=f"Bearer {KEY}").status_code == 200


@pytest.mark.parametrize(
    ("method", "operation", "body", "status", "told"),
    [
        ("DELETE", "everything", None, 404, "DELETE images"),
        ("POST", "images", {}, 404, "DELETE images"),
        ("DELETE", "images", {"modle": "x"}, 400, "unknown field 'modle': write model"),
        ("DELETE", "images", {"model": "x"}, 404, "nothing is of that model"),
        ("DELETE", "images", {"model": ""}, 404, "nothing is of that model"),
        ("DELETE", "images", {"namespace": ""}, 404, "no namespace whose root key begins so"),
        ("DELETE", "images", {"cache_salt": None}, 400, "cache_salt is null: give a value"),
        ("DELETE", "images", {"namespace": "ffff"}, 404, "no namespace whose root key begins so"),
        ("DELETE", "images", {"older_than": "7d"}, 400, "older_than='7d': not a number of seconds"),
        ("DELETE", "images", {"older_than": True}, 400, "not a number of seconds"),
        ("DELETE", "images", {"older_than": -1}, 400, "not a number of seconds"),
        ("DELETE", "images", {"to_size": "20QB"}, 400, "to_size='20QB': not a size"),
        ("DELETE", "images", {"cache_salt": 7}, 400, "cache_salt: not a text"),
        ("DELETE", "images", {"cache_salt": "\ud800"}, 400, "cache_salt: not a text"),
        ("DELETE", "images", {"authorization": ""}, 400, "no API key in it"),
        ("DELETE", "images", [1], 400, "no JSON object"),
        ("POST", "ram", {}, 400, "to_size is missing"),
        ("POST", "ram", {"to_size": -1}, 400, "not a size"),
        ("DELETE", "prompts", {}, 400, 'give one of "messages" and "prompt"'),
        ("DELETE", "prompts", {"prompt": "x", "cachesalt": "y"}, 400, "unknown key 'cachesalt'; write cache_salt"),
        ("DELETE", "prompts", {"messages": [{"role": "user"}], "model": "/other"}, 409, "is not loaded"),
        ("POST", "pins", {"prompt": text(50, "never stored")}, 404, "warm it first"),
        ("DELETE", "pins", {"name": "x"}, 404, "no such pin"),
        ("POST", "prompts", {"prompts": []}, 400, "no list of objects"),
        ("POST", "prompts", {"prompts": [{"prompt": "good enough"}, {"mesages": []}]}, 400, "prompts[1]: unknown key"),
    ],
)
def test_what_cant_be_done_is_told(served, method, operation, body, status, told):
    refused = admin(served, method, operation, body)
    assert (refused.status_code, told in refused.json()["error"]["message"]) == (status, True), refused.text


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Length": "2", "Content-Type": "text/plain"}, b"{}", 415),
        ({"Content-Length": "2", "Content-Type": "application/json"}, b"{]", 400),
        ({"Content-Length": "+2", "Content-Type": "application/json"}, b"{}", 400),
        ({"Content-Length": "99999999999", "Content-Type": "application/json"}, b"{}", 413),
        ({"Transfer-Encoding": "chunked", "Content-Type": "application/json"}, b"2\r\n{}\r\n0\r\n\r\n", 411),
    ],
)
def test_a_body_that_cant_be_read_is_refused(served, headers, body, status):
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=SECONDS)
    connection.putrequest("DELETE", "/prefixcache/images")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == status
    connection.close()


def test_a_page_may_not_delete_by_a_path_of_mlx_lms(served):
    assert requests.delete(f"{served.url}/v1/models", timeout=SECONDS).status_code == 404
