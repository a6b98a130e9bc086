"""Models are loaded whatever back end the ranks have."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from prefixcache.upstream import any_backend


def test_a_collective_on_the_cpu_runs_where_the_group_is(monkeypatch):
    told: list[dict[str, Any]] = []

    def all_sum(x: mx.array, **options: Any) -> mx.array:
        told.append(options)
        return x

    monkeypatch.setattr(mx.distributed, "all_sum", all_sum)
    with any_backend():
        mx.distributed.all_sum(mx.array(1.0), group=None, stream=mx.cpu)
    assert told == [{"group": None}]
    assert mx.distributed.all_sum is all_sum
