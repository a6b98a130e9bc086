"""The wheel's modules, PrefixCaches that are closed in the end, and `install`, undone."""

import pytest

from prefixcache.servers.vllm_mlx import installation as vllm_mlx
from tests.peers.vllm_mlx_wheel import imported


@pytest.fixture(scope="module")
def wheel():
    with imported() as modules:
        yield modules


@pytest.fixture
def opened(opened):
    """As everywhere; vllm-mlx lets go of the caches before they are closed."""
    yield opened
    vllm_mlx.uninstall()


@pytest.fixture
def install(wheel):
    """`vllm_mlx.install`, undone at the end."""
    yield vllm_mlx.install
    vllm_mlx.uninstall()
