"""Two blocks with one key: what was computed after one is never given for the other, whatever was lost meanwhile."""

from __future__ import annotations

from pathlib import Path

from prefixcache import PrefixCache
from prefixcache.image_format import ROWS
from tests.states import got, put
from tests.twins import twin

REST = list(range(1000, 1600))
FIRST, SECOND = [*twin(1), *REST], [*twin(0), *REST]


def brought(cache: PrefixCache, tokens: list[int]) -> int:
    """What a hit gives that may read the SSD: it is checked."""
    cache.promote(tokens, model="m").result(10)
    return got(cache, tokens)


def flip_first_block(cache: PrefixCache, root: Path) -> None:
    cache.flush(10)
    (slot,) = (slot for slot in cache._storage.graph.slots.values() if slot.kind == ROWS and not slot.node.start)
    (file,) = root.rglob(f"{slot.key.hex()}*")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    cache.trim_to(0)


def test_while_what_depends_on_a_lost_block_is_there_no_other_takes_its_key(opened, tmp_path):
    cache = opened()
    put(cache, FIRST)
    flip_first_block(cache, tmp_path)
    assert brought(cache, FIRST) == 0
    put(cache, twin(0))
    assert brought(cache, SECOND) == 0
    put(cache, twin(1))
    assert brought(cache, FIRST) == len(FIRST) - 1
    cache.check_integrity()


def test_what_depends_on_a_lost_block_is_gone_after_a_restart(opened, tmp_path, caplog):
    cache = opened()
    put(cache, FIRST)
    flip_first_block(cache, tmp_path)
    assert brought(cache, FIRST) == 0
    cache.close()
    cache = opened()
    assert "3 images were deleted: the blocks before them are gone" in caplog.text
    put(cache, twin(0))
    cache.close()
    cache = opened()
    assert brought(cache, SECOND) == 256
    assert brought(cache, FIRST) == 0
    cache.check_integrity()


def test_a_block_that_replaces_one_that_is_not_indexed_has_not_what_depends_on_it(opened):
    cache = opened()
    put(cache, FIRST)
    cache.flush(10)
    cache.resize(ram=4000)  # nothing is indexed any more
    assert cache.match(FIRST, model="m") == (0, 0)
    cache.resize(ram=50_000_000)
    put(cache, twin(0))
    cache.close()
    cache = opened()
    assert brought(cache, SECOND) == 256
    assert brought(cache, FIRST) == 0


def test_what_is_not_indexed_stays_when_its_block_is_stored_again(opened):
    cache = opened()
    put(cache, FIRST)
    cache.flush(10)
    cache.resize(ram=4000)
    cache.resize(ram=50_000_000)
    put(cache, twin(1))
    cache.close()
    assert brought(opened(), FIRST) == len(FIRST) - 1


def test_what_is_not_indexed_goes_with_the_block_that_it_depends_on(opened):
    cache = opened()
    put(cache, FIRST)
    cache.flush(10)
    cache.resize(ram=4000)
    cache.resize(ram=50_000_000)
    put(cache, twin(1))
    cache.flush(10)
    cache.remove(twin(1), model="m")
    put(cache, twin(0))
    cache.close()
    cache = opened()
    assert brought(cache, SECOND) == 256
