"""A model that goes on from compressed hits: real mlx-lm models, their live caches stored, fetched and stored again."""

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from mlx_lm.models import cache as mlx_caches

from prefixcache import PrefixCache, TurboQuant, make_prompt_cache
from prefixcache.live.turboquant import TurboQuantKVCache
from prefixcache.tiers import ram
from tests.cache.pictured import picture_end
from tests.cache.test_cache_machine import CacheMachine, LevelledMachine
from tests.inside import layer_of
from tests.models import states
from tests.models.families import FAMILIES

CODEC = TurboQuant(4, 4)
# Full layers alone, beside rings, chunks, recurrent state, in lists with it, in lists beside rings, and some layers without
# rows.
NAMES = ["llama", "llama-bf16", "gpt_oss", "llama4-256", "qwen3_next", "falcon_h1", "baichuan_m1", "nemotron-nas"]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return FAMILIES[request.param].build()


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


def feed(model: Any, cache: list[Any], tokens: list[int], at_once: int = 64) -> mx.array:
    """The (vocabulary,) logits after the last token."""
    for at in range(0, len(tokens), at_once):
        logits = model(mx.array([tokens[at : at + at_once]]), cache=cache)
        mx.eval(logits)
    return logits[0, -1].astype(mx.float32)


def steps(model: Any, cache: list[Any], token: int, n: int) -> mx.array:
    """(n, vocabulary) logits of `n` greedy steps."""
    found = []
    for _ in range(n):
        found.append(feed(model, cache, [token]))
        token = mx.argmax(found[-1]).item()
    return mx.stack(found)


def leaves(caches: Any) -> list[Any]:
    found = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, mlx_caches.CacheList) else [cache]
    return found


def coded(caches: list[Any]) -> list[TurboQuantKVCache]:
    return [leaf for leaf in leaves(caches) if isinstance(leaf, TurboQuantKVCache)]


def bits(layer: TurboQuantKVCache, tokens: int) -> list[np.ndarray]:
    codes, scales = layer_of(layer).codes.arrays
    return [np.array(codes[:, :, :tokens]), np.array(scales[:, :, :tokens])]


def same_bits(a: list[Any], b: list[Any], tokens: int) -> bool:
    pairs = [(bits(x, tokens), bits(y, tokens)) for x, y in zip(coded(a), coded(b), strict=True)]
    return all(np.array_equal(m, n) for x, y in pairs for m, n in zip(x, y, strict=True))


def by_codes_alone(layer: Any) -> Any:
    """A live cache again, without the last rows that it keeps as they are: codes are all that is stored."""
    if isinstance(layer, mlx_caches.CacheList):
        made = type(layer).__new__(type(layer))
        made.caches = type(layer.caches)(map(by_codes_alone, layer.caches))
        return made
    if not isinstance(layer, TurboQuantKVCache):
        return layer
    coded, kind = layer_of(layer), layer.kind
    assert kind is not None
    return TurboQuantKVCache.from_codes(
        coded.choice, kind, coded.runs[0], coded.codes.arrays, coded.rows, coded.sinks.arrays
    )


def test_a_model_goes_on_from_a_compressed_hit_as_from_the_cache_that_was_stored(model: Any) -> None:
    tokens = prompt(400)
    live = make_prompt_cache(model, CODEC)
    feed(model, live, tokens)
    with PrefixCache(ram="100MB", codec=CODEC) as cache:
        stored = cache.store(tokens, live, model="m")
        assert (stored.tokens, stored.new_tokens) == (400, 400)
        back, rest = states.compressed(cache, tokens, leave=0)
        assert back is not None
        assert rest == []
        assert [type(leaf) for leaf in leaves(back)] == [type(leaf) for leaf in leaves(live)]
        assert same_bits(live, back, 400)
        plain = cache.fetch(tokens, model="m", leave=0)[0]
        assert plain is not None
        assert coded(plain) == []
        for a, b in zip(leaves(plain), leaves(back), strict=True):
            if not isinstance(b, TurboQuantKVCache):
                assert type(a) is type(b)
                assert all(mx.array_equal(x, y) for x, y in zip(_arrays(a), _arrays(b), strict=True))
        cache.check_integrity()

        # The rows of rings and chunks were encoded on their way; so take them from another hit.
        again = states.compressed(cache, tokens, leave=0)[0]
        assert again is not None
        numbers = {i for i, leaf in enumerate(leaves(live)) if isinstance(leaf, TurboQuantKVCache)}
        own, others = leaves(list(map(by_codes_alone, live))), leaves(again)
        mixed = iter([own[i] if i in numbers else others[i] for i in range(len(own))])
        expected = steps(model, _like(again, mixed), 5, 6)
        assert mx.allclose(steps(model, back, 5, 6), expected, atol=1e-4, rtol=1e-4)


def _like(caches: list[Any], own: Any) -> list[Any]:
    made = []
    for cache in caches:
        if isinstance(cache, mlx_caches.CacheList):
            cache.caches = type(cache.caches)(_like(list(cache.caches), own))
            made.append(cache)
        else:
            made.append(next(own))
    return made


def _arrays(leaf: Any) -> list[mx.array]:
    values = [v for own in vars(leaf).values() for v in (own if isinstance(own, (list, tuple)) else [own])]
    return [value for value in values if isinstance(value, mx.array)]


def test_turns_of_a_chat_add_their_codes_and_change_none(model: Any) -> None:
    """Five turns: what was stored is fetched, the model reads on, and all is stored again; now and then uncompressed."""
    tokens = prompt(300)
    live: Any = make_prompt_cache(model, CODEC)
    feed(model, live, tokens)
    with PrefixCache(ram="100MB", codec=CODEC) as cache:
        before: list[Any] = []
        for turn in range(5):
            cache.store(tokens, live, model="m")
            back = states.compressed(cache, tokens, leave=0)[0]
            assert back is not None
            if coded(live):
                assert same_bits(live, back, len(tokens))
            if before:
                assert same_bits(before, back, len(tokens) - 41)
            before, live = states.compressed(cache, tokens, leave=0)[0] or [], back
            if turn == 2:
                live = cache.fetch(tokens, model="m", leave=0)[0]
            more = prompt(41, turn + 1)
            feed(model, live, more)
            tokens = tokens + more
            cache.check_integrity()
        assert cache.stats().counters.recoded_tokens == 0


def test_a_short_first_turn_waits_and_is_coded_when_it_is_long_enough() -> None:
    model = FAMILIES["llama"].build()
    tokens = prompt(700)
    with PrefixCache(ram="100MB", codec=CODEC) as cache:
        live: Any = make_prompt_cache(model, CODEC)
        feed(model, live, tokens[:90])
        cache.store(tokens[:90], live, model="m")
        live, rest = states.compressed(cache, tokens)
        assert len(rest) == 610
        feed(model, live, rest)
        cache.store(tokens, live, model="m")
        back = states.compressed(cache, tokens, leave=0)[0]
        assert back is not None
        assert same_bits(live, back, 700)
        assert cache.stats().counters.recoded_tokens == 0
        cache.check_integrity()


def test_layers_that_a_codec_leaves_raw_stay_plain_beside_compressed_ones() -> None:
    model, tokens = FAMILIES["llama"].build(), prompt(400)
    codec = TurboQuant(4, 3, layers={0: None, 1: (8, 2)}, fp16_layers=1, sink_tokens=4)
    live = make_prompt_cache(model, codec)
    feed(model, live, tokens)
    with PrefixCache(ram="100MB", codec=codec) as cache:
        assert cache.store(tokens, live, model="m").raw_layers == (0, 3)
        back = states.compressed(cache, tokens, leave=0)[0]
        assert back is not None
        assert [type(leaf).__name__ for leaf in back] == [type(leaf).__name__ for leaf in live]
        assert same_bits(live, back, 400)
        for i in (0, 3):
            assert mx.array_equal(live[i].keys[..., :400, :], back[i].keys[..., :400, :])
        expected = steps(model, list(map(by_codes_alone, live)), 5, 6)
        assert mx.allclose(steps(model, back, 5, 6), expected, atol=1e-4, rtol=1e-4)


class LiveMachine(LevelledMachine):
    """Stores and hits in both forms, and turns that go on from a hit: nothing wrong is ever fetched."""

    @staticmethod
    def live(tokens: list[int]) -> list[Any]:
        plain = states.uneven(tokens)
        return [
            TurboQuantKVCache(TurboQuant(8, 8, sink_tokens=3), layer=i).filled_from(own) for i, own in enumerate(plain)
        ]

    @staticmethod
    def plain(made: list[Any]) -> list[Any]:
        return [own.dequantize() if isinstance(own, TurboQuantKVCache) else own for own in made]

    def _keep(self, tokens: list[int], caches: list[Any]) -> None:
        stored = self.cache.store(tokens, caches, model="m")
        self.note_stored(tokens, stored.tokens)
        if self.roomy:
            assert stored.tokens == len(tokens)
            self.sure.append(tokens)

    @rule(tokens=CacheMachine.prompts, more=CacheMachine.prompts, forms=st.lists(st.booleans(), min_size=2, max_size=5))
    def chat(self, tokens: list[int], more: list[int], forms: list[bool]) -> None:
        """Store, fetch, read on, in this form and that."""
        self._keep(tokens, self.live(tokens) if forms[0] else states.uneven(tokens))
        for compressed in forms[1:]:
            fetch = states.compressed if compressed else PrefixCache.fetch
            made, rest = fetch(self.cache, tokens, model="m", leave=0)
            if made is None:
                return
            depth = len(tokens) - len(rest)
            assert depth <= self.expected(tokens)
            states.check_uneven(self.plain(made), tokens[:depth])
            tokens = [*tokens[: picture_end(tokens, depth)], *more]
            for layer, own in enumerate(made):
                rows = [states.uneven_rows(tokens, layer + part)[:, :, depth:] for part in (0, 7)]
                own.update_and_fetch(*map(mx.array, rows))
            states.check_uneven(self.plain(made), tokens)
            self._keep(tokens, made)


def test_nothing_wrong_is_ever_fetched_in_either_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "LOOK_AGAIN", 0.001)
    run_state_machine_as_test(
        LiveMachine,
        settings=settings(max_examples=20, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )
