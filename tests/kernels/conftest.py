"""What the tests of kernels share: a folder for programs, and the choice where a kernel runs."""

from pathlib import Path

import host_gpu
import mlx.core as mx
import pytest

from prefixcache.kernels.dialects import DIALECTS


@pytest.fixture(scope="session")
def programs():
    """A folder for programs that run on the host, which all processes share and later runs find (`make clean` removes it)."""
    folder = Path(__file__).parents[2] / "build/host-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def run_at(programs, monkeypatch):
    """`run_at(place, modules, asker, *caches)`: the kernels of `modules` run at a place, one of `host_gpu.places()`, until
    the test ends. `asker` is the module that asks for the dialect, `caches` remember kernels beside the modules' own.
    """
    device, cleared = mx.default_device(), []

    def clear():
        for cache in cleared:
            cache.cache_clear()

    def choose(place, modules, asker, *caches):
        cleared.extend([*(module._kernel for module in modules if hasattr(module, "_kernel")), *caches])
        clear()
        if place == host_gpu.OWN:
            return
        mx.set_default_device(mx.cpu)
        for module in modules:
            monkeypatch.setattr(module, "build", host_gpu.builder(programs))
        monkeypatch.setattr(asker, "dialect_here", lambda: DIALECTS[place])

    yield choose
    clear()
    mx.set_default_device(device)
