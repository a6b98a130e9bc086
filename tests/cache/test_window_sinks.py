"""The first tokens of a prompt stay as they are in sliding windows, too, as long as a window holds them."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from prefixcache import PrefixCache, TurboQuant

PROMPT = list(range(900))
WIDTH, SINKS = 64, 4


@cache
def row_of(token, layer, part):
    return np.random.default_rng((7, token, layer, part)).standard_normal((2, WIDTH))


def rows_of(tokens, layer):
    """Rows that are a function of the tokens, at random; the first ones larger."""
    made = []
    for part in (0, 1):
        rows = np.stack([row_of(token, layer, part) for token in tokens], 1)
        rows[:, :4] *= 20 if part == 0 else 0.01
        made.append(mx.array(rows[None].astype(np.float16)))
    return made


def cache_of(tokens, size=512, keep=0, chunk=256):
    whole, ring = KVCache(), RotatingKVCache(size, keep)
    for layer, own in enumerate((whole, ring)):
        keys, values = rows_of(tokens, layer)
        for at in range(0, len(tokens), chunk):
            own.update_and_fetch(keys[:, :, at : at + chunk], values[:, :, at : at + chunk])
    return [whole, ring]


def check(made, tokens, exact_from, size=512):
    """Sinks, and what comes after whole blocks, are the rows themselves; the others are near them."""
    for layer, own in enumerate(made):
        n = own.offset
        assert n == len(tokens)
        first = 0 if layer == 0 or n <= size else n - size + 1
        for held, rows in zip((own.keys, own.values), rows_of(tokens, layer), strict=True):
            got = np.array(held[0, :, :n] if layer == 0 else held[0, :, -(n - first) :]).astype(np.float32)
            want = np.array(rows[0, :, first:]).astype(np.float32)
            token = np.arange(first, n)
            exact = (token < SINKS) | (token >= exact_from)
            assert np.array_equal(got[:, exact], want[:, exact]), layer
            assert np.abs(got - want).max() <= 0.4 * np.abs(want).max(), layer


def asked(cache, tokens):
    made, rest = cache.fetch([*tokens, 99999], model="m")
    assert rest == [99999]
    return made


@pytest.mark.parametrize("codec", [TurboQuant(), TurboQuant(3, 3), TurboQuant(4, 2, levelling=False)])
@pytest.mark.parametrize("tokens", [300, 512, 700])
def test_sinks_come_back_as_they_were_from_ram_and_ssd(tmp_path, codec, tokens):
    prompt = PROMPT[:tokens]
    for turn in range(2):
        with PrefixCache(ram="50MB", ssd_dir=tmp_path / "ssd", ssd="50MB", codec=codec) as cache:
            if not turn:
                cache.store(prompt, cache_of(prompt), model="m")
            assert cache.promote(prompt, model="m").result(10) == tokens
            check(asked(cache, prompt), prompt, tokens // 256 * 256)
            cache.check_integrity()


@pytest.mark.parametrize("lengths", [(100, 300), (300, 100), (2, 300), (100, 200, 600), (600, 300, 100)])
def test_when_a_tail_grows_and_when_a_block_is_taken_for_a_tail(lengths):
    with PrefixCache(ram="50MB") as cache:
        for i, length in enumerate(lengths):
            prompt = PROMPT[:length] if length == max(lengths) else [*PROMPT[: length - 1], 5000 + i]
            cache.store(prompt, cache_of(prompt), model="m")
            check(asked(cache, prompt), prompt, length // 256 * 256)
            cache.check_integrity()


def test_a_codec_without_sinks_and_exact_codecs_have_none():
    for codec in (TurboQuant(sink_tokens=0), "raw"):
        with PrefixCache(ram="50MB", codec=codec) as cache:
            cache.store(PROMPT[:300], cache_of(PROMPT[:300]), model="m")
            assert asked(cache, PROMPT[:300])[1].offset == 300


def test_a_ring_that_keeps_its_first_tokens():
    with PrefixCache(ram="50MB") as cache:
        cache.store(PROMPT[:300], cache_of(PROMPT[:300], keep=2), model="m")
        check(asked(cache, PROMPT[:300]), PROMPT[:300], 256)


@given(
    st.lists(st.tuples(st.integers(1, 620), st.booleans()), min_size=1, max_size=5), st.integers(1, 300), st.booleans()
)
def test_whatever_is_stored_in_whatever_order(stores, chunk, write_back):
    with PrefixCache(ram="50MB") as cache:
        for i, (length, branch) in enumerate(stores):
            prompt = [*PROMPT[: length - 1], 5000 + i] if branch else PROMPT[:length]
            live = cache_of(prompt, chunk=chunk)
            cache.store(prompt, live, model="m", write_back_from=0 if write_back else None)
            if write_back:
                check_live = [own for own in live if own.offset <= 512]
                for layer, own in enumerate(check_live):
                    for held, rows in zip((own.keys, own.values), rows_of(prompt, layer), strict=True):
                        n = min(SINKS, length)
                        assert mx.array_equal(held[:, :, :n], rows[:, :, :n])
            found = cache.fetch([*prompt, 99999], model="m")
            if found[0] is not None:
                n = len(prompt) + 1 - len(found[1])
                check(found[0], prompt[:n], n)
            cache.check_integrity()
