"""`drop_hit`: what a hit was made of is deleted in every tier, and nothing else."""

import pytest

from prefixcache import PrefixCache
from tests.models import states

LONG = list(range(1000))
OTHER = [*range(600), *range(5000, 5400)]


@pytest.mark.parametrize("make", [states.sliceable, states.windowed, states.hybrid], ids=lambda make: make.__name__)
@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
def test_a_dropped_hit_is_a_miss_in_every_tier_and_after_a_restart(tmp_path, make, codec):
    values = {"ram": "20MB", "codec": codec, "ssd_dir": tmp_path, "ssd": "100MB"}
    with PrefixCache(**values) as cache:
        cache.store(LONG, make(LONG), model="m")
        cache.store(LONG, make(LONG), model="other")
        assert cache.flush()
        prompt = cache.prompt([*LONG, 1], model="m")
        _, rest = cache.fetch(prompt)
        assert len(rest) == 1
        assert cache.drop_hit(prompt, 1000) > 0
        assert cache.match(prompt) == (0, 0)
        assert cache.promote(prompt).result(10) == 0
        assert cache.fetch(prompt)[0] is None
        assert cache.match(LONG, model="other") == (1000, 1000)
        cache.check_integrity()
        assert cache.flush()
    with PrefixCache(**values) as cache:
        assert cache.match(LONG, model="m") == (0, 0)
        assert cache.match(LONG, model="other").ssd == 1000
        cache.store(LONG, make(LONG), model="m")
        made, rest = cache.fetch([*LONG, 1], model="m")
        assert (made is not None, len(rest)) == (True, 1)


def test_what_is_stored_behind_the_hit_waits_for_its_beginning_to_be_stored_again(tmp_path):
    with PrefixCache(ram="20MB", codec="raw", ssd_dir=tmp_path, ssd="100MB") as cache:
        for tokens in (LONG, OTHER):
            cache.store(tokens, states.sliceable(tokens), model="m")
        prompt = cache.prompt([*range(600), -1], model="m")
        assert len(cache.fetch(prompt)[1]) == 1
        cache.drop_hit(prompt, 600)
        assert cache.match(OTHER, model="m") == (0, 0)
        cache.check_integrity()
        cache.store(LONG, states.sliceable(LONG), model="m")
        made, rest = cache.fetch([*LONG, 1], model="m")
        assert rest == [1]
        states.check(made, LONG)
        assert cache.match(OTHER, model="m").ram >= 600
        cache.check_integrity()


def test_a_block_that_has_the_same_tokens_is_dropped_with_a_hit():
    with PrefixCache(ram="20MB", codec="raw") as cache:
        for end in (1, 2, 3):
            cache.store([*LONG[:30], -end], states.sliceable([*LONG[:30], -end]), model="m")
        cache.store(LONG[:20], states.sliceable(LONG[:20]), model="m")
        cache.pin(LONG[:20], model="m")
        prompt = cache.prompt(LONG, model="m")
        assert len(cache.fetch(prompt)[1]) == len(LONG) - 30
        cache.drop_hit(prompt, 30)
        assert cache.match(prompt).ssd < 30
        cache.check_integrity()
