"""mlx-lm's own tests of its server and its prompt cache, with `TieredPromptCache` in the place of `LRUPromptCache`.

They are fetched with the release that is installed, and run in a process of their own, offline: the model that they name is
found in a Hugging Face cache made here, and is tiny-llama in float32.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from tests.peers.wheels import fetch

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-llama"
ROOT = Path(__file__).parents[2]
REPO = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
RUN = """
import importlib.util, json, os, sys, unittest
import mlx_lm.models.cache, mlx_lm.server
from prefixcache import PrefixCache
from prefixcache.servers.mlx_lm import TieredPromptCache

path = sys.argv[1]

class InPlace(TieredPromptCache):
    def __init__(self, max_size=10, max_bytes=1 << 62):
        super().__init__(PrefixCache(ram="64MB", codec="raw"), max_size, max_bytes)

mlx_lm.server.LRUPromptCache = mlx_lm.models.cache.LRUPromptCache = InPlace
spec = importlib.util.spec_from_file_location("theirs", path)
theirs = sys.modules["theirs"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(theirs)
result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromModule(theirs).run(result)
bad = {test.id(): text for test, text in [*result.errors, *result.failures]}
print(json.dumps({"run": result.testsRun, "bad": bad}), flush=True)
os._exit(0)  # MLX may abort when it is torn down with threads of its own
"""


def hub(home, surer):
    """A Hugging Face cache that has the model which the tests name; `surer`: how much surer it is of its next token."""
    repo = home / f"models--{REPO.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(TINY, snapshot, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    weights = {name: weight.astype(mx.float32) for name, weight in mx.load(str(TINY / "model.safetensors")).items()}
    weights["model.norm.weight"] = weights["model.norm.weight"] * surer
    mx.save_safetensors(str(snapshot / "model.safetensors"), weights, metadata={"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return home


# One test of the server samples the same text twice, the second time from a hit, of which mlx-lm's penalty of repeated
# tokens doesn't see the prompt: the model must be sure enough for that to make no difference.
@pytest.mark.parametrize(("name", "surer"), [("test_server.py", 8), ("test_prompt_cache.py", 1)])
def test_mlx_lms_own_tests_pass(tmp_path, name, surer):
    path = fetch(f"mlx-lm=={version('mlx-lm')}", sdist=True) / "tests" / name
    home = hub(tmp_path, surer)
    environment = {**os.environ, "HF_HUB_CACHE": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bad"] == {}
    assert found["run"] >= 20
