"""vllm-mlx 0.6.0's own server on a PrefixCache, asked over HTTP about pictures: alone, at once, cancelled, after a restart.
It answers as it does without a cache.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

pytest.importorskip("mlx_vlm")

from tests.peers.wheels import fetch
from tests.servers.serving import SECONDS, Server
from tests.vlm.folders import save
from tests.vlm.pictures import CHATS, SAID, Chat, user


class VllmMlx(Server):
    """A process that serves a model, and what it logs."""

    ADDRESS = r"running on (http://\S+)"
    model = ""

    def ask(self, chat: Chat, n: int = 12, **more: Any) -> requests.Response:
        body = {"model": self.model, "messages": chat, "max_tokens": n, "temperature": 0, **more}
        answer = requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=SECONDS, stream="stream" in more)
        answer.raise_for_status()
        return answer

    def answer(self, chat: Chat) -> str:
        said = self.ask(chat).json()["choices"][0]["message"]["content"]
        assert isinstance(said, str)
        return said

    def answers(self, chats: Sequence[Chat]) -> list[str]:
        with ThreadPoolExecutor(len(chats)) as pool:
            return list(pool.map(self.answer, chats))

    @property
    def saved(self) -> int:
        """Tokens that hits gave so far."""
        stats = requests.get(f"{self.url}/v1/cache/stats", timeout=SECONDS).json()
        return int(stats["engine_cache"]["prefix_cache"]["tokens_saved"])


def serve(flags: list[str]) -> None:
    from prefixcache.servers.vllm_mlx.installation import main

    sys.argv = ["vllm-mlx", "serve", *flags]
    main()


def serve_plainly(flags: list[str]) -> None:
    """vllm-mlx without a prefix cache, and without the memory of pixels that confuses them."""
    from vllm_mlx import cli, vision_embedding_cache

    vision_embedding_cache.VisionEmbeddingCache.get_pixel_cache = lambda *args: None
    sys.argv = ["vllm-mlx", "serve", *flags, "--disable-prefix-cache"]
    cli.main()


@contextmanager
def serving(main: Any, folder: Path, log: Path) -> Iterator[VllmMlx]:
    flags = [folder, "--continuous-batching", "--mllm", "--host", "127.0.0.1", "--port", 0]
    server = VllmMlx(main, flags, log, anew=True)
    server.model = str(folder)
    try:
        server.ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(fetch("vllm-mlx==0.6.0")))
    given = {
        "ram": "100MB",
        "codec": "raw",
        "ssd_dir": str(tmp_path / "ssd"),
        "ssd": "100MB",
        "decline_slow_hits": "false",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"PREFIXCACHE_{name.upper()}", value)
    monkeypatch.setenv("HOME", str(tmp_path))  # where vllm-mlx keeps what it knows of its own cache


def test_pictures_over_http_are_answered_as_without_a_cache(folder, environment, tmp_path):
    chats = list(CHATS.values())
    longer = [*CHATS["two pictures"], SAID, user("And now?")]
    with serving(serve_plainly, folder, tmp_path / "plain") as plain:
        expected, after = [plain.answer(chat) for chat in chats], plain.answer(longer)
    with serving(serve, folder, tmp_path / "ours") as server:
        assert [server.answer(chat) for chat in chats] == expected
        assert server.saved > 1000
        cancelled = server.ask(longer, stream=True, n=200)
        next(cancelled.iter_lines())
        cancelled.close()
        assert server.answer(longer) == after
        at_once = server.answers(chats[:4])
        if "qwen2_5" in folder.name:  # in a batch, vllm-mlx itself answers one in sixty of a hybrid's prompts otherwise
            assert at_once == expected[:4]
        before = server.saved
        assert server.answer(chats[0]) == expected[0]
        assert server.saved > before + 200
        assert server.end() == -signal.SIGTERM  # uvicorn lets the signal have its way in the end
    with serving(serve, folder, tmp_path / "again") as server:
        assert server.answer([*longer, SAID, user("What else?")])
        assert server.saved > 200
        assert [server.answer(chat) for chat in chats] == expected
    logged = (tmp_path / "ours").read_text() + (tmp_path / "again").read_text()
    assert re.findall("Traceback|WARNING:prefixcache.*", logged) == []
