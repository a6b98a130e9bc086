"""Codex itself, of npm's registry, against `prefixcache serve`: it asks `/v1/responses`, and its shell does what the model
says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.peers.npm import CODEX, installed
from tests.peers.scripted_agent import SAYS, SHELL, STEPS, ScriptedAgent, work_folder
from tests.servers.serving import Server, at_once

CALL = json.dumps({"name": "exec_command", "arguments": {"cmd": SHELL}})
CONFIG = """
model = "default_model"
model_provider = "local"
model_context_window = 131072
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "prefixcache"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
EXEC = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]


class Turn(NamedTuple):
    """What Codex says of a turn. `outputs`: of its shell. `prompts`, `cached`: tokens of all prompts since its talk began."""

    said: str
    outputs: list[str]
    prompts: int
    cached: int


@pytest.fixture(scope="module")
def codex() -> Path:
    return installed(*CODEX) / "codex"


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path, CALL)


def run(codex: Path, server: Server, home: Path, *command: str) -> Turn:
    folder = work_folder(home)
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(CONFIG.format(url=server.url))
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home / ".codex")}
    done = subprocess.run(
        [str(codex), *EXEC, *command],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr + server.said()
    events = [json.loads(line) for line in done.stdout.splitlines()]
    items: list[dict[str, Any]] = [event["item"] for event in events if event["type"] == "item.completed"]
    outputs = [item["aggregated_output"] for item in items if item["type"] == "command_execution"]
    usage = events[-1]["usage"]
    said = "".join(item["text"] for item in items if item["type"] == "agent_message")
    return Turn(said, outputs, usage["input_tokens"], usage["cached_input_tokens"])


def check(turn: Turn) -> None:
    assert (turn.said, turn.outputs) == ("".join(SAYS), ["2\n"] * STEPS)


def test_a_session_calls_its_tools_and_goes_on_after_a_restart_four_at_once(codex, agent, tmp_path):
    with agent.serving("first") as server:
        first = run(codex, server, tmp_path / "home", "How many lines have alpha?")
        check(first)
        assert first.cached > 0.6 * first.prompts  # the first of its requests computes all, the others read
    homes = [tmp_path / f"home{i}" for i in range(4)]
    for home in homes:
        shutil.copytree(tmp_path / "home", home)
    with agent.serving("second") as server:
        goes_on = ("resume", "--last", "And beta?")
        for turn in at_once([lambda home=home: run(codex, server, home, *goes_on) for home in homes]):
            check(turn)
            assert turn.cached - first.cached > 0.9 * (turn.prompts - first.prompts)


def test_four_sessions_at_once_are_served_each_its_own(codex, agent, tmp_path):
    with agent.serving("served") as server:
        for turn in at_once([lambda i=i: run(codex, server, tmp_path / f"home{i}", f"{i}?") for i in range(4)]):
            check(turn)
            assert turn.cached > 0.6 * turn.prompts
