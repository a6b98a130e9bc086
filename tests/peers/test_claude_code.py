"""Claude Code itself, of npm's registry, against `prefixcache serve`: it asks `/v1/messages`, and its shell does what the
model says.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.peers.npm import CLAUDE_CODE, installed
from tests.peers.scripted_agent import SAYS, SHELL, STEPS, ScriptedAgent, work_folder
from tests.servers.serving import Server, at_once

CALL = json.dumps({"name": "Bash", "arguments": {"command": SHELL}})


@pytest.fixture(scope="module")
def claude() -> Path:
    return installed(*CLAUDE_CODE) / "claude"


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path, CALL)


def run(claude: Path, server: Server, home: Path, prompt: str, *flags: str) -> dict[str, Any]:
    """One turn, in a folder that has notes.txt. What Claude Code says of it."""
    folder = work_folder(home)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "default_model",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "default_model",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [
        str(claude),
        "-p",
        prompt,
        "--tools",
        "Bash",
        "--allowedTools",
        "Bash",
        "--output-format",
        "json",
        *flags,
    ]
    done = subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr + server.said()
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def check(said: dict[str, Any]) -> None:
    assert (said["is_error"], said["result"]) == (False, "".join(SAYS))
    assert said["num_turns"] == STEPS + 1


def prompt_of(said: dict[str, Any]) -> int:
    usage = said["usage"]
    return usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] + usage["input_tokens"]


def test_a_session_calls_its_tools_and_goes_on_after_a_restart_four_at_once(claude, agent, tmp_path):
    home = tmp_path / "home"
    with agent.serving("first") as server:
        first = run(claude, server, home, "How many lines have alpha?")
        check(first)
        read = first["usage"]["cache_read_input_tokens"]
        assert read > 0.6 * prompt_of(first)  # the first of its requests computes all, the others read
    goes_on = "--resume", first["session_id"], "--fork-session"
    with agent.serving("second") as server:
        for turn in at_once([lambda i=i: run(claude, server, home, f"And beta, {i}?", *goes_on) for i in range(4)]):
            check(turn)
            assert turn["usage"]["cache_read_input_tokens"] > read


def test_four_sessions_at_once_are_served_each_its_own(claude, agent, tmp_path):
    with agent.serving("served") as server:
        for i, said in enumerate(
            at_once([lambda i=i: run(claude, server, tmp_path / f"home{i}", f"{i}?") for i in range(4)])
        ):
            check(said)
            assert said["usage"]["cache_read_input_tokens"] > 0.6 * prompt_of(said), i
