"""Blocks that are stored while a GPU computes their chunk are those that are stored once a chunk is computed."""

from __future__ import annotations

import pytest

from prefixcache import PrefixCache
from prefixcache.servers.mlx_lm.prefill import BlockKeeper
from tests.cache.test_not_finite import computed_on
from tests.servers.serving import text, user
from tests.servers.test_requests import Asked, generating


@pytest.mark.parametrize("seed", [None, 1], ids=["batch", "alone"])
@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
def test_answers_and_hits_are_the_same(model, codec, seed, monkeypatch):
    kept, keep = [], BlockKeeper._keep_of_one
    monkeypatch.setattr(BlockKeeper, "_keep_of_one", lambda self: kept.append(1) or keep(self))
    found = []
    for where in ("cpu", "gpu"):
        cache = PrefixCache(ram="100MB", codec=codec, memory_reserve=0)
        with computed_on(where), cache, generating(cache, "--model", model) as generator:
            first, other = user(text(700, "first")), user(text(900, "other"))
            answers = [Asked(generator, messages, seed=seed).answered() for messages in (first, first)]
            together = [Asked(generator, messages, seed=seed) for messages in (other, user(text(300, "third")))]
            found.append([(each.answered().tokens, each.cached) for each in [*answers, *together]])
            generator.prompts.cache.check_integrity()
        assert bool(kept) == (where == "gpu" and seed is None)
    assert found[0] == found[1]
    assert found[1][1][1] > 600
