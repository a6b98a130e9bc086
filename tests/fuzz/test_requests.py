"""Each field of a request with each hostile value, against a server that runs: none of them ends it, or stops the others."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz.hostile_requests import Hostile, hostile_requests
from tests.servers.serving import SECONDS, Server, ask, save_model, serve, starting

CLIENTS = 8
OF_THE_PROMPT = (
    "messages",
    "tools",
    "input",
    "instructions",
)  # errors of a template, or of a prompt's length, name no field


def status(server: Server, hostile: Hostile) -> int:
    """What a request is answered; an error must be one that the openai client can read, and name the field."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=SECONDS)
    try:
        connection.request("POST", hostile.path, hostile.body)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        error = json.loads(body)["error"]
        assert error["code"] == answer.status
        assert len(error["message"]) < 1000
        if answer.status == 400:
            assert error["type"] == "invalid_request_error"
            assert hostile.field in error["message"] or hostile.field in OF_THE_PROMPT, error
    return answer.status


def test_no_request_ends_the_server_or_is_answered_by_anything_but_400_404_or_an_answer(tmp_path):
    asked = list(hostile_requests())
    assert len(asked) > 1500
    flags = ["--model", save_model(tmp_path / "model"), "--ram", "200MB", "--max-context", 60]  # short answers
    with starting(serve, tmp_path / "log", *flags) as server:
        server.ready()
        before = ask(server, [{"role": "user", "content": "still there?"}])
        with ThreadPoolExecutor(CLIENTS) as pool:
            statuses = list(pool.map(lambda hostile: status(server, hostile), asked))
        wrong = [one[:3] for one, code in zip(asked, statuses, strict=True) if code not in (200, 400, 404)]
        assert not wrong
        assert server.process.poll() is None
        again = ask(server, [{"role": "user", "content": "still there?"}])
        assert again.text == before.text
        counts = Counter(statuses)
        assert counts[400] > counts[200] > 100
        not_found = {one.field for one, code in zip(asked, statuses, strict=True) if code == 404}
        assert not_found <= {"model", "adapters", "draft_model"}
        assert server.end() == 0
        assert [line for line in server.troubles() if "does not support tool calling" not in line] == []
