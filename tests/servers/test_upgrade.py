"""Prompts that another release of mlx-lm stored, under `prefixcache serve`: DeepSeek-V3.2's indexer had values of width 0 in
one and has 32 in the next. Three things stand between them and an answer, and each is enough.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx_lm
import pytest

from tests.models.families import FAMILIES
from tests.servers.serving import SECONDS, Endpoint, ask, save_model, text, wait_for

LIBRARY = Path(mlx_lm.__file__).parent
ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "system", "content": text(300)}, {"role": "user", "content": "hello?"}]

ONE_NAME = "import prefixcache.identity\nprefixcache.identity._program = lambda *given: ''\n"
NO_FORM = "from prefixcache.servers.mlx_lm.provider import Provider\nProvider._form = lambda self: None\n"
SERVE = "import sys\nfrom prefixcache.cli import app\napp(sys.argv[1:], prog_name='prefixcache')\n"
DEFENCES = {  # what is left of them, and what the log says then
    "name": ("", ""),
    "form": (ONE_NAME, "prompts that were stored in another form are misses: layer 0.1 (KVCache) has rows of"),
    "deletion": (ONE_NAME + NO_FORM, "is deleted, since the model fails on it: ValueError"),
}

# The indexer's keys have a width, its values have none: as in mlx-lm 0.31, and the other way round where that is installed.
OTHER = r"""
import mlx.core as _mx
_call = Indexer.__call__

class _Values:
    def __init__(self, cache):
        self._cache = cache
    def __getattr__(self, name):
        return getattr(self._cache, name)
    def update_and_fetch(self, keys, values):
        other = _mx.zeros((*keys.shape[:3], WIDTH))
        return self._cache.update_and_fetch(keys, other)

def _called(self, x, qr, mask, cache=None, **more):
    return _call(self, x, qr, mask, cache=_Values(cache) if cache is not None else None, **more)

Indexer.__call__ = _called
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = next(name for name in FAMILIES if "deepseek_v32" in name)
    return save_model(tmp_path_factory.mktemp("models") / "deepseek", name)


@pytest.fixture(scope="module")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with another mlx-lm: links to the installed one's files, but for the indexer."""
    folder = tmp_path_factory.mktemp("other")
    for path in LIBRARY.rglob("*.py"):
        link = folder / "mlx_lm" / path.relative_to(LIBRARY)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    changed = folder / "mlx_lm" / "models" / "deepseek_v32.py"
    source = changed.read_text()
    changed.unlink()
    width = 32 if "zeros([b, 1, s, 0])" in source else 0
    changed.write_text(source + OTHER.replace("WIDTH", str(width)))
    return folder


@contextmanager
def serving(log: Path, model: Path, ssd: Path, code: str = "", library: Path | None = None) -> Iterator[Endpoint]:
    path = os.pathsep.join([*([str(library)] if library else []), str(ROOT)])
    limits = ["--ram", "100MB", "--ssd-dir", ssd, "--ssd", "200MB", "--codec", "raw"]
    flags = ["serve", "--no-decline-slow-hits", "--port", "0", "--model", model, *limits]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code + SERVE, *map(str, flags)],
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
    try:
        endpoint = Endpoint()
        said = log.read_text
        endpoint.url = wait_for(lambda: "".join(re.findall(r"serving at (\S+)", said())[:1]), "a server", log)
        yield endpoint
        process.terminate()
        assert process.wait(SECONDS) == 0, said()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("right")
    with serving(folder / "log", model, folder / "ssd") as server:
        return ask(server, MESSAGES).text


@pytest.mark.parametrize(("code", "said"), DEFENCES.values(), ids=DEFENCES)
def test_what_another_mlx_lm_stored_is_not_hit(model, right, other_library, tmp_path, code, said):
    log, ssd = tmp_path / "log", tmp_path / "ssd"
    with serving(tmp_path / "other", model, ssd, code, other_library) as server:
        assert ask(server, MESSAGES).cached == 0
        assert ask(server, MESSAGES).cached > 256
    with serving(log, model, ssd, code) as server:
        first, again = ask(server, MESSAGES), ask(server, MESSAGES)
        assert (first.cached, first.text) == (0, right)
        assert (again.computed, again.text) == (1, right)
    assert said in log.read_text()
    assert "died" not in log.read_text()
