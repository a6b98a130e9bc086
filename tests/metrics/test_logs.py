"""Logs for machines: one line of JSON a record whatever is in it, a summary a period, and nothing of a prompt in either."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from mlx_lm.utils import load_tokenizer
from typer.testing import CliRunner

from prefixcache.cli import app
from prefixcache.metrics.logs import JsonFormatter, quotes_nothing
from prefixcache.servers.salts import salt_of
from tests.servers.serving import TINY, chat, save_model, serve, starting, text

API_KEY = "sk-of-great-fame"


def written(message: str, *args: Any, level: int = logging.INFO, path: str = "here.py", **extra: Any) -> str:
    record = logging.getLogger("a.b").makeRecord("a.b", level, path, 1, message, args, None, extra=extra or None)
    return JsonFormatter().format(record)


# -- the formatter ----------------------------------------------------------------------------------------------------


def test_a_record_is_one_object_on_one_line():
    line = written("%d files\nof %s", 3, "\u2028\x1b[31m\udc80", tier="ssd", bytes=7, rates={"p50": 0.5})
    assert "\n" not in line
    assert line.isascii()
    found = json.loads(line)
    when = datetime.fromisoformat(found.pop("time").replace("Z", "+00:00"))
    assert abs(when.timestamp() - time.time()) < 60
    assert found == {
        "level": "INFO",
        "logger": "a.b",
        "message": "3 files\nof \u2028\x1b[31m\udc80",
        "tier": "ssd",
        "bytes": 7,
        "rates": {"p50": 0.5},
    }


def test_what_json_has_no_form_for_is_its_text():
    loop: list[Any] = []
    loop.append(loop)
    line = written("x", path_=Path("/a"), bad=float("nan"), odd={(1, 2): 3}, loop=loop, fine=[1])
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert found["path_"] == "/a"
    assert found["bad"] == "nan"
    assert found["odd"] == "{(1, 2): 3}"
    assert found["fine"] == [1]
    assert isinstance(found["loop"], str)


def test_a_field_does_not_hide_what_every_record_has():
    found = json.loads(written("hello", level_=1, time="never", logger=2))
    assert (found["message"], found["logger"], found["time_"], found["logger_"]) == ("hello", "a.b", "never", 2)


def test_a_traceback_is_a_field():
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.getLogger().makeRecord("r", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    found = json.loads(JsonFormatter().format(record))
    assert found["exception"].splitlines()[-1] == "ValueError: no"


def test_mlx_lms_lines_are_kept_without_the_bodies_that_they_quote():
    def passed(message: str, level: int, path: str) -> str | None:
        record = logging.getLogger().makeRecord("root", level, path, 1, message, (), None)
        return record.getMessage() if quotes_nothing(record) else None

    theirs = "/x/site-packages/mlx_lm/server.py"
    for head in ("JSONDecodeError: Expecting value - Raw body: SECRET", 'Invalid Request Body: ["SECRET"]'):
        kept = passed(head, logging.ERROR, theirs)
        assert kept is not None
        assert "SECRET" not in kept
        assert kept.startswith(head.partition(":")[0])
    call = "Failed to parse tool call (ValueError: Could not parse tool call from: SECRET) — tool text was likely truncated"
    assert passed(call, logging.WARNING, theirs) == "Failed to parse tool call of an answer, which was likely cut off"
    assert passed("Incoming Request Body: SECRET", logging.DEBUG, theirs) is None
    assert passed("Prompt Cache: 3 sequences, 0.00 GB", logging.INFO, theirs) == "Prompt Cache: 3 sequences, 0.00 GB"
    assert (
        passed("Invalid Request Body: of another", logging.ERROR, "/x/other.py") == "Invalid Request Body: of another"
    )


# -- a whole conversation ---------------------------------------------------------------------------------------------


def spoken(ids: list[int]) -> Iterator[str]:
    """How tokens could stand in a text: two neighbours in digits, one as the bytes of an int64."""
    for a, b in pairwise(ids):
        yield from (f"{a}, {b}", f"{a},{b}", f"{a} {b}")
    for token in ids:
        raw = np.array([token], "<i8").tobytes()
        yield from (raw.hex(), repr(raw)[2:-1])


def test_nothing_of_a_served_conversation_is_in_logs_metrics_and_top(tmp_path):
    model, asked = save_model(tmp_path / "model"), [f"Xylograph {turn} quokkas?" for turn in range(2)]
    flags = ["--model", model, "--ssd-dir", tmp_path / "ssd", "--ssd", "100MB", "--log-level", "DEBUG", "--log-json"]
    flags += ["--salt-from", "authorization", "--require-salt"]
    with starting(serve, tmp_path / "log", "--ram", "20MB", "--codec", "raw", *flags) as server:
        server.ready()
        server.url = server.url.rstrip('"}')
        answers = chat(server.as_tenant(API_KEY), text(280, "brontide"), asked, cache_salt="tenantsecret")
        for headers in ({}, {"Authorization": f"Basic {API_KEY}"}, {"Authorization": "Bearer " + API_KEY * 10_000}):
            requests.post(f"{server.url}/v1/completions", json={"prompt": 7}, headers=headers, timeout=60)
        for body in ("{Xylograph", '["Xylograph"]', '{"messages": "Xylograph"}'):
            requests.post(f"{server.url}/v1/chat/completions", data=body, timeout=60)
        longer = {"prompt": "a " * 5000, "max_tokens": 1, "cache_salt": "x"}  # than the tokenizer has a limit for
        assert requests.post(f"{server.url}/v1/completions", json=longer, timeout=60).status_code in (200, 400)
        page = requests.get(f"{server.url}/metrics", timeout=60).text
        seen = [
            CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", server.url, *more]).output
            for more in ([], ["--json"])
        ]
        assert server.end() == 0
    lines = server.said().splitlines()
    logged = [json.loads(line) for line in lines]
    assert {"prefixcache", "prefixcache.http", "root"} <= {line["logger"] for line in logged}
    assert [line for line in logged if line["logger"] == "prefixcache.http" and line["client"] == "127.0.0.1"]
    assert [line["message"] for line in logged if line["level"] == "ERROR"]  # the bodies that are none
    assert answers[1].cached
    assert 'prefixcache_fetch_tokens_total{result="hit"}' in page
    ids = load_tokenizer(str(TINY)).encode(" ".join([text(280, "brontide"), *asked]))
    salts = [salt_of(token, salt) for token in (API_KEY, f"basic {API_KEY}") for salt in ("tenantsecret", "")]
    secrets = [API_KEY, *(secret for salt in salts for secret in (salt[1:].hex(), repr(salt[1:])[2:-1]))]
    secrets += ["brontide", "Xylograph", "quokkas", "tenantsecret", *(answer.text for answer in answers), *spoken(ids)]
    for said in (server.said(), page, *seen):
        assert said
        said = re.sub(r"\d+\.\d+", "", said)  # 0.19000000000000003 seconds are no token's bytes in hexadecimal
        assert [secret for secret in secrets if secret in said] == []
