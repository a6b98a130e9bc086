"""Somebody reads the index in a transaction that does not end: the limit holds meanwhile, and writing goes on afterwards.

What the SSD tier does then is in tests/ssd/test_held_log.py.
"""

from __future__ import annotations

from prefixcache import PrefixCache
from prefixcache.ssd import queue
from tests.inside import directory_of, inside
from tests.models import states
from tests.models.states import put_prompts
from tests.ssd.images import while_read
from tests.waiting import until
from tools.faults.evidence import du


def test_the_limit_holds_while_an_index_is_read_without_an_end_and_writing_goes_on_afterwards(tmp_path, monkeypatch):
    root = tmp_path / "ssd"
    monkeypatch.setattr(queue, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(queue, "LONGEST_DELAY", 0.1)
    asked: list[str] = []  # how long SQLite may wait for locks, whenever it copies its log
    limit = 3_000_000
    with PrefixCache(ram="1MB", ssd_dir=root, ssd=limit, codec="raw", memory_reserve=0) as cache:
        index = directory_of(inside(cache).ssd).index
        original = type(index).checkpoint

        def checkpoint(index) -> bool:
            seen = []
            index._connection.set_trace_callback(seen.append)
            done = original(index)
            index._connection.set_trace_callback(None)
            asked.extend(seen)
            return done

        monkeypatch.setattr(type(index), "checkpoint", checkpoint)
        for seed in range(20):
            put_prompts(cache, seed)
        assert cache.flush(30)
        with while_read(root):
            for seed in range(100, 160):
                put_prompts(cache, seed)
                cache.flush(0.05)
                assert du(root) <= limit
            assert "fuser" in cache.stats().ssd.last_error
            assert cache.stats().images_on_ssd > 0
        until(lambda: cache.flush(5))
        for seed in range(200, 220):
            put_prompts(cache, seed)
        assert cache.flush(30)
        assert du(root) <= limit
        states.check_integrity(cache)
    assert [text for text in asked if "checkpoint" in text]
    for at, text in enumerate(asked):
        assert "checkpoint" not in text or asked[at - 1] == "PRAGMA busy_timeout = 0"
