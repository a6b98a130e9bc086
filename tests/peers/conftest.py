"""The wheel's modules, PrefixCaches that are closed in the end, and `install`, undone."""

import pytest

from prefixcache import PrefixCache
from prefixcache.servers.vllm_mlx import installation as vllm_mlx
from tests.peers.vllm_mlx_wheel import imported


@pytest.fixture(scope="module")
def wheel():
    with imported() as modules:
        yield modules


@pytest.fixture
def opened(tmp_path):
    """Opens PrefixCaches, one directory for all, and closes them; checks them before."""
    caches: list[PrefixCache] = []

    def open_one(ram="50MB", codec="raw", disk=False, **values) -> PrefixCache:
        if disk:
            values |= {"ssd_dir": tmp_path / "ssd", "ssd": "100MB"}
        caches.append(PrefixCache(ram=ram, codec=codec, **values))
        return caches[-1]

    yield open_one
    vllm_mlx.uninstall()
    for cache in caches:
        cache.check_integrity()
        cache.close()


@pytest.fixture
def install(wheel):
    """`vllm_mlx.install`, undone at the end."""
    yield vllm_mlx.install
    vllm_mlx.uninstall()
