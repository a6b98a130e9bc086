"""What all tests share: caches that are opened for a test and closed after it, signals as a terminal gives them, and
temporary folders in memory where the system has some for that."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# On CUDA, MLX would round what it multiplies in float32 to 11 bits: a row alone and in a batch would differ in its codes.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import prefixcache  # MLX comes with `prefixcache.PrefixCache`, when a test opens one
from tests.inside import inside

# How long an example takes says how busy the machine is, and nothing of the code.
BUSY = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("any machine", settings(), max_examples=40, deadline=None, suppress_health_check=BUSY)
settings.load_profile("any machine")
# CI tells a failing example as it was found, since shrinking that of a state machine may take longer than a test may.
settings.register_profile("shrink", settings(), derandomize=True, database=None)  # finds what CI finds
if settings().derandomize:  # Hypothesis does so in CI
    settings.register_profile("as found", settings(), phases=[Phase.explicit, Phase.generate, Phase.target])
    settings.load_profile("as found")

# Where a shell starts the tests in the background, they and what they start would ignore SIGINT, which some of them send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test's files are real ones; but tens of thousands of fsyncs wait for a disk whose own durability nothing here proves.
MEMORY = Path("/dev/shm")
if sys.platform == "linux" and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 << 30:
    if not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:  # some tests build programs and run them
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
        tempfile.tempdir = str(MEMORY)  # for those that make a folder for each of their runs

# What is written while nobody asks has tests of its own: elsewhere what is counted must not depend on how long a test takes.
DEFAULTS = {"ram": "10MB", "ssd": "50MB", "codec": "raw", "spill_idle": 0}

# Files that take half a minute and more on two cores, or wait that long for what they fetch. They begin first, so that in the
# end no worker waits long for another.
LONGEST = [
    "peers/test_claude_code.py",
    "peers/test_codex.py",
    "ranks/test_rank_server.py",
    "ranks/test_ranks.py",
    "tools/test_bench.py",
    "cache/test_neighbours.py",
    "servers/test_serve_transform.py",
    "cache/test_processes.py",
    "servers/test_admin.py",
    "kernels/test_transform_served.py",
    "peers/test_vllm_mlx_media.py",
    "peers/test_vllm_mlx_served.py",
    "vlm/test_served_prompts.py",
    "vlm/test_pictures.py",
    "vlm/test_server.py",
    "servers/test_next_turns.py",
    "cli/test_calibrate_command.py",
    "servers/test_requests.py",
    "servers/test_serve.py",
    "live/test_turboquant_caches.py",
    "servers/test_upgrade.py",
    "servers/test_serve_answers.py",
    "kernels/test_gpu_kernels.py",
    "cache/test_cache_machine.py",
    "servers/test_failing_steps.py",
    "docs/test_readme.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turn = {Path(__file__).parent / name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(item.path, len(turn)))


def pytest_xdist_auto_num_workers() -> int:
    """Return one more than there are cores: tests wait for threads, servers and processes, a third of their time."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment says of caches is not for tests."""
    for name in [name for name in os.environ if name.upper().startswith("PREFIXCACHE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def new_objects_only() -> Iterator[None]:
    """`gc.collect()` visits what the test itself makes, and not what hundreds of modules made before it."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Opens caches, on one directory for all of a test (`disk=False`: without). A module's `CACHE` has its own defaults.

    At the end each that is open is checked and closed.
    """
    caches: list[Any] = []
    defaults = {**DEFAULTS, **getattr(request.module, "CACHE", {})}

    def open_cache(**values: Any) -> Any:
        values = {"disk": True, "ssd_dir": tmp_path / "ssd", **defaults, **values}
        if not values.pop("disk"):
            del values["ssd_dir"], values["ssd"]
        caches.append(prefixcache.PrefixCache(**values))
        return caches[-1]

    yield open_cache
    with ExitStack() as closing:
        for cache in caches:
            closing.callback(cache.close)
        for cache in caches:
            if not inside(cache).closed:
                cache.check_integrity()
    for cache in caches:  # a writer that a test kept from ending in time would go on, and log, in the next one
        if inside(cache).ssd is not None:
            inside(cache).ssd._writer._thread.join(60)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.key"
    file.write_text("5a" * 32)
    file.chmod(0o600)
    return file


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, of 700 kB or a module's `DISK`."""
    where, size = tmp_path / "disk", getattr(request.module, "DISK", "700k")
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", where]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("can't mount a file system here: that takes Linux and root")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)
