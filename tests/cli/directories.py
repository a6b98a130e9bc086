"""Real directories, made by real caches, and what is done to them. The fixtures on top are in conftest."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from prefixcache import PrefixCache

TOKEN = 7_654_000_000  # every token is this and a bit: seven digits that nothing else shows
SALT = b"tenant-secret-42"
SHARED, LONG, SHORT = 2560, 3000, 2700
ODD = "evil\x1b[31m[bold red]/model[/]\n:smile:\u202e"

COMMAND = [sys.executable, "-c", "from prefixcache.cli import app; app()"]


def live(arguments: list[str]) -> None:
    """A process that has a directory open until SIGUSR1 asks it to close."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    with PrefixCache(ram="20MB", ssd_dir=arguments[0], ssd="100MB") as cache:
        cache.store([TOKEN + i for i in range(1000)], kv(1000), model="live")
        cache.flush()
        print("ready", flush=True)
        signal.sigwait([signal.SIGUSR1])


def kv(n: int, layers: int = 2, heads: int = 2, width: int = 32) -> list[Any]:
    made = []
    for i in range(layers):
        layer = KVCache()
        mx.random.seed(i)
        keys, values = (mx.random.normal((1, heads, n, width)).astype(mx.float16) for _ in range(2))
        layer.update_and_fetch(keys, values)
        made.append(layer)
    return made


def windowed(n: int) -> list[Any]:
    layer = RotatingKVCache(max_size=128)
    layer.update_and_fetch(mx.ones((1, 2, n, 32), mx.float16), mx.ones((1, 2, n, 32), mx.float16))
    return [*kv(n, layers=1), layer]


def recurrent(n: int) -> list[Any]:
    layer = ArraysCache(2)
    layer[0], layer[1] = mx.zeros((1, 4, 8)), mx.ones((1, 4, 8))
    return [*kv(n, layers=1), layer]


def tokens(n: int, other: int = 0) -> list[int]:
    """`SHARED` tokens that all prompts have, then those of prompt number `other`."""
    return [TOKEN + i + (100_000 * other if i >= SHARED else 0) for i in range(n)]


def fill(path: Path) -> Path:
    with PrefixCache(ram="50MB", ssd_dir=path, ssd="100MB") as cache:
        for other, n in enumerate((LONG, SHORT, SHORT)):
            cache.store(tokens(n, other), kv(n), model="chat")
        cache.store(tokens(600), kv(600), model="chat", salt=SALT)
        cache.store(tokens(1000), windowed(1000), model=ODD)
        cache.store(tokens(700), recurrent(700), model="state")
        cache.flush()
        cache.fetch(tokens(LONG), model="chat")
    return path


def crash(process: Any) -> None:
    process.kill()
    process.wait()


def fingerprint(root: Path) -> dict[str, tuple[int, int, int]]:
    """What would change when anything in a directory did."""
    return {
        str(path): (path.lstat().st_ino, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted([root, *root.rglob("*")])
    }


def images(root: Path, folder: str = "rows") -> list[Path]:
    return sorted((root / folder).rglob("*.safetensors"))


def spoil(path: Path) -> None:
    """Flip a bit of the last byte."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
