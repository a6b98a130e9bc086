"""What it costs ranks to agree: run on each rank, rank 0 prints one JSON object.

The same lookups as those of a request under `prefixcache serve` that is hit in RAM, by turns with a group and without, both
ranks at the same time: `agreed` and `alone`, in seconds. `collectives`: how many the former makes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache, Raw
from prefixcache.ranks import Ranks
from prefixcache.servers.read_or_compute import ReadOrCompute


def main(tokens: int, requests: int) -> None:
    group, count = mx.distributed.init(), [0]
    inner = Ranks._result

    def counted(array: mx.array) -> Any:
        count[0] += 1
        return inner(array)

    Ranks._result = staticmethod(counted)  # type: ignore[method-assign]
    ranks, ids = Ranks(group), np.arange(tokens) % 30_000
    agreed, alone = (_lookups(ids, f"m|{ranks.rank}", of) for of in (group, None))
    seconds: dict[str, list[float]] = {"agreed": [], "alone": []}
    for number in range(requests):
        for name, look_up in (("agreed", agreed), ("alone", alone)):
            prompt = np.append(ids, [number, 1])
            ranks.any(False)  # begin together
            count[0], began = 0, time.perf_counter()
            look_up(prompt)
            seconds[name].append(time.perf_counter() - began)
            if name == "agreed":
                collectives = count[0]
    if ranks.is_first:
        print(json.dumps({**seconds, "collectives": collectives}), flush=True)
    ranks.any(False)


def _lookups(ids: np.ndarray, model: str, group: mx.distributed.Group | None) -> Callable[[np.ndarray], None]:
    """What a request looks up, on a cache that has `ids`."""
    cache = PrefixCache(group=group, ram="1GB", codec=Raw(), memory_reserve=0)
    layer, rows = KVCache(), mx.zeros((1, 1, len(ids), 32), mx.float16)
    layer.update_and_fetch(rows, rows)
    cache.store(ids, [layer], model=model)
    reading = ReadOrCompute(cache)

    def look_up(tokens: np.ndarray) -> None:
        prompt = cache.prompt(tokens, model=model)
        reading.begin(prompt, cache.match(prompt, leave=1))
        if cache.ranks is not None:
            cache.ranks.any(False)  # whether it waits for another request
        found, _ = cache.fetch(prompt, leave=1)
        assert found is not None

    return look_up


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
