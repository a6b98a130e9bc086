"""openai-agents as it is installed, against `prefixcache serve`: it asks `/v1/responses`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.peers.scripted_agent import SAYS, SHELL, STEPS, ScriptedAgent, work_folder
from tests.peers.wheels import installed

RELEASE = "openai-agents==0.24.0"
CALL = json.dumps({"name": "shell", "arguments": {"command": SHELL}})


def test_an_agent_is_answered_at_once_and_as_a_stream_and_hits_what_it_said_before(tmp_path: Path):
    python = installed(RELEASE)
    with ScriptedAgent(tmp_path, CALL).serving("served") as server:
        command = [str(python), str(Path(__file__).with_name("agents_run.py")), server.url]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        folder = work_folder(tmp_path / "home")
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    whole, streamed = json.loads(done.stdout)
    for turn in (whole, streamed):
        assert (turn["said"], turn["outputs"]) == ("".join(SAYS), ["2\n"] * STEPS)
    assert whole["cached"] > 0.5 * whole["prompts"]
    assert streamed["cached"] > 0.8 * streamed["prompts"]
