"""MLX's pool of freed buffers, which servers on a GPU keep between the chunks of a prompt."""

from __future__ import annotations

import mlx.core as mx
import pytest

from prefixcache.servers import buffer_pool

DEFAULT = 100 << 30


@pytest.fixture
def limits(monkeypatch):
    """The limits that the pool is given, the first of which it has."""
    given = [DEFAULT]

    def set_cache_limit(limit):
        given.append(limit)
        return given[-2]

    monkeypatch.setattr(mx, "set_cache_limit", set_cache_limit)
    return given


def test_on_a_gpu_of_its_own_the_pool_is_bounded_and_not_emptied(monkeypatch, limits):
    monkeypatch.setattr(buffer_pool, "device_memory", lambda: 80 << 30)
    emptied: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: emptied.append(1))
    with buffer_pool.pool_kept():
        mx.clear_cache()
        assert (limits[-1], emptied) == (buffer_pool.POOL, [])
    assert limits[-1] == DEFAULT
    assert mx.clear_cache is buffer_pool.empty_pool


def test_a_tighter_bound_stays(monkeypatch, limits):
    monkeypatch.setattr(buffer_pool, "device_memory", lambda: 80 << 30)
    limits.append(1000)
    with buffer_pool.pool_kept():
        assert limits[-1] == 1000
    assert limits[-1] == 1000


def test_where_mlx_computes_in_ram_it_stays_as_it_is(limits):
    before = mx.clear_cache
    with buffer_pool.pool_kept():
        assert mx.clear_cache is before
    assert limits == [DEFAULT]
