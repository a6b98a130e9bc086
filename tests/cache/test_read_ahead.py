"""`fetch(promote=True)`: what only the SSD has, decoded as it is read, is what `promote` and then `fetch` give."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from prefixcache import PrefixCache
from prefixcache.codecs.interchange import copy_out
from prefixcache.layers import read_ahead as module
from tests.inside import inside
from tests.models import states

LONG = list(range(1000))
CODECS = ("raw", "turboquant:4", "turboquant:4:2")


def wide(tokens, dtype=mx.float16, heads=2, width=64, layers=2):
    """Two layers with rows of 64 values, at random."""
    made = []
    for layer in range(layers):
        cache = KVCache()
        shape = (1, heads, len(tokens), width)
        rows = [mx.random.normal(shape, key=mx.random.key(2 * layer + part)).astype(dtype) for part in (0, 1)]
        cache.update_and_fetch(*rows)
        made.append(cache)
    return made


def quantized(tokens):
    return [layer.to_quantized(32, 8) for layer in wide(tokens)]


def listed(tokens):
    return [CacheList(*wide(tokens)), *wide(tokens, mx.bfloat16)]


def arrays_of(value):
    if isinstance(value, mx.array):
        return [(value.shape, value.dtype, copy_out(value).tobytes())]
    if isinstance(value, (list, tuple)):
        return [found for own in value for found in arrays_of(own)]
    if isinstance(value, dict):
        return [found for name in sorted(value) for found in arrays_of(value[name])]
    return arrays_of(vars(value)) if isinstance(value, (KVCache, QuantizedKVCache, CacheList)) else [value]


def cold(path, codec, make, tokens):
    """A cache that has these tokens on the SSD only."""
    cache = PrefixCache(ram="50MB", ssd_dir=path, ssd="100MB", codec=codec)
    cache.store(tokens, make(tokens), model="m")
    assert cache.flush(30)
    cache.trim_to(0)
    assert cache.match(tokens, model="m") == (0, len(tokens))
    return cache


@pytest.fixture
def taken(monkeypatch):
    found = []
    real = module.ReadAhead.take

    def take(self, prompt):
        found.append(real(self, prompt))
        return found[-1]

    monkeypatch.setattr(module.ReadAhead, "take", take)
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("make", [wide, lambda t: wide(t, mx.bfloat16), quantized, listed])
@pytest.mark.parametrize("tokens", [100, 256, 1000])
def test_it_is_what_promote_and_fetch_give_to_the_byte(tmp_path, taken, codec, make, tokens):
    prompt = LONG[:tokens]
    with cold(tmp_path / "ssd", codec, make, prompt) as cache:
        made, rest = cache.fetch([*prompt, 7], model="m", promote=True)
        assert len(taken) == 1
        assert taken[0] is not None
        again, same = cache.fetch([*prompt, 7], model="m")
        assert rest == same == [7]
        assert [type(layer) for layer in made] == [type(layer) for layer in again]
        assert arrays_of(made) == arrays_of(again)
        cache.check_integrity()
        assert cache.stats().ram_reserved == 0


@settings(max_examples=25)
@given(
    stored=st.integers(1, 900),
    asked=st.integers(1, 1000),
    leave=st.integers(0, 300),
    whole_blocks=st.booleans(),
    room=st.none() | st.integers(0, 600),
    codec=st.sampled_from(("raw", "turboquant:4")),
    kept=st.integers(0, 4),
)
def test_wherever_the_hit_ends(tmp_path_factory, stored, asked, leave, whole_blocks, room, codec, kept):
    """The first `kept` blocks are in RAM already."""
    how = {"leave": leave, "room": room}
    with cold(tmp_path_factory.mktemp("ssd"), codec, wide, LONG[:stored]) as cache:
        cache.promote(LONG[: min(stored, 256 * kept)], model="m").result(10)
        prompt = cache.prompt(LONG[:asked], model="m", whole_blocks=whole_blocks)
        made, rest = cache.fetch(prompt, promote=True, **how)
        again, same = cache.fetch(prompt, **how)
        assert rest == same
        assert (made is None) == (again is None)
        assert made is None or arrays_of(made) == arrays_of(again)


@pytest.mark.parametrize("make", [states.windowed, states.chunked, states.hybrid])
def test_windows_and_recurrent_state_come_as_by_promote(tmp_path, taken, make):
    with PrefixCache(ram="50MB", ssd_dir=tmp_path / "ssd", ssd="50MB", codec="raw") as cache:
        cache.store(LONG, make(LONG), model="m")
        assert cache.flush(30)
        cache.trim_to(0)
        made, rest = cache.fetch([*LONG, 7], model="m", promote=True)
        assert rest == [7]
        states.check(made, LONG)
        assert not taken


def sliding(tokens, at=0, into=None, size=300):
    into = into or [KVCache(), RotatingKVCache(size)]
    for layer, own in zip(wide(tokens), into, strict=True):
        own.update_and_fetch(layer.keys[:, :, at : len(tokens)], layer.values[:, :, at : len(tokens)])
    return into


@pytest.mark.parametrize("parts", [1, 2])
def test_a_window_s_rows_come_for_the_boundary_that_is_hit(tmp_path, parts):
    """A hit that ends with a whole block needs older rows than one that ends where the prompts part."""
    prompt = LONG[:580]
    with PrefixCache(ram="50MB", ssd_dir=tmp_path / "ssd", ssd="50MB") as cache:
        live = sliding(prompt[:512])
        cache.store(prompt[:512], live, model="m", write_back_from=0)
        cache.store(prompt, sliding(prompt, 512, live), model="m", write_back_from=512)
        assert cache.flush(30)
        cache.trim_to(0)
        parted = [*prompt[:500], *[7] * 120]
        asked = cache.prompt(parted, model="m", whole_blocks=True)
        assert cache.match(asked, leave=1) == (0, 256)
        if parts == 1:
            made, rest = cache.fetch(asked, promote=True)
        else:
            cache.promote(parted, model="m").result(10)  # of another boundary, first
            assert cache.promote(asked, leave=1).result(10) == 256
            made, rest = cache.fetch(asked)
        assert len(rest) == 620 - 256
        assert [layer.offset for layer in made] == [256, 256]
        assert cache.unread(asked, leave=1) == 0


def test_closed_meanwhile_is_said(tmp_path):
    cache = cold(tmp_path / "ssd", "raw", states.sliceable, LONG)
    real, errors = inside(cache).promoter._threads.submit, []

    def submit(*given):
        coming = real(threading.Event().wait, 1)  # until then nothing else begins
        return coming if not given else real(*given)

    inside(cache).promoter._threads.submit = submit

    def ask():
        try:
            cache.fetch(LONG, model="m", promote=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    cache.close()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, RuntimeError) and "closed" in str(error) for error in errors), errors


@pytest.mark.parametrize("block", range(4))
def test_where_a_file_went_bad_the_hit_ends(tmp_path, block):
    """Whether what was decoded ahead is of use depends on which came first, the bad file or the decoding."""
    with cold(tmp_path / "ssd", "raw", states.sliceable, LONG) as cache:
        path = sorted((tmp_path / "ssd" / "rows").rglob("*.safetensors"))[block]  # in any order: each goes bad once
        stored = bytearray(path.read_bytes())
        stored[len(stored) // 2] ^= 4
        path.write_bytes(stored)
        made, rest = cache.fetch(LONG, model="m", promote=True)
        assert len(rest) in (1000, 744, 488, 232)
        assert (made is None) == (len(rest) == 1000)
        if made is not None:
            states.check(made, LONG[: 1000 - len(rest)])
        assert cache.stats().counters.corrupt == 1
        cache.check_integrity()


def test_ram_too_small_for_the_prompt(tmp_path):
    long = [i % 5000 for i in range(5000)]
    with PrefixCache(ram="5MB", ssd_dir=tmp_path / "ssd", ssd="50MB", codec="raw") as cache:
        cache.store(long, states.sliceable(long), model="m")
    with PrefixCache(ram=150_000, ssd_dir=tmp_path / "ssd", ssd="50MB", codec="raw") as cache:
        made, rest = cache.fetch(long, model="m", promote=True)
        assert 0 < len(rest) <= 5000 - 256
        states.check(made, long[: 5000 - len(rest)])


def test_nothing_stored_nothing_on_the_ssd_and_no_ssd(tmp_path, taken):
    with PrefixCache(ram="5MB", ssd_dir=tmp_path / "ssd", ssd="50MB", codec="raw") as cache:
        assert cache.fetch(LONG, model="m", promote=True) == (None, LONG)
        cache.store(LONG, states.sliceable(LONG), model="m")
        assert len(cache.fetch(LONG, model="m", promote=True)[1]) == 1
    with PrefixCache(ram="5MB", codec="raw") as cache:
        cache.store(LONG, states.sliceable(LONG), model="m")
        assert len(cache.fetch(LONG, model="m", promote=True)[1]) == 1
    assert not taken


def test_what_is_decoded_ahead_is_the_caller_s_own(tmp_path):
    with cold(tmp_path / "ssd", "raw", states.sliceable, LONG) as cache:
        made, _ = cache.fetch(LONG, model="m", promote=True)
        made[0].update_and_fetch(*states.rows([3] * 300, 0))
        made[1].keys[:, :, :50] = 1
        mx.eval(made[0].keys, made[1].keys)
        again, rest = cache.fetch(LONG, model="m")
        states.check(again, LONG[: 1000 - len(rest)])


def test_many_at_once(tmp_path):
    prompts = [[i] * 200 + LONG[:600] for i in range(6)]
    with PrefixCache(ram="20MB", ssd_dir=tmp_path / "ssd", ssd="50MB", codec="raw") as cache:
        for prompt in prompts:
            cache.store(prompt, states.sliceable(prompt), model="m")
        assert cache.flush(30)
        cache.trim_to(0)
        wrong = []

        def ask(turn):
            for prompt in prompts[turn:] + prompts[:turn]:
                made, rest = cache.fetch(prompt, model="m", promote=True)
                try:
                    states.check(made, prompt[: len(prompt) - len(rest)])
                    assert len(rest) == 1
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=ask, args=(turn,)) for turn in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        cache.check_integrity()
        assert cache.stats().ram_reserved == 0


@pytest.mark.parametrize("leave", [-1, True, "1"])
def test_bad_leave(tmp_path, leave):
    with PrefixCache(ram="5MB", codec="raw") as cache, pytest.raises(ValueError, match="leave"):
        cache.fetch(LONG, model="m", leave=leave, promote=True)


def test_writable_memory_is_mlx_s_own():
    for dtype in ("float16", "bfloat16", "float32", "uint32", "uint8"):
        made, rows = module.writable((1, 2, 3, 8), dtype)
        rows[...] = np.arange(48).reshape(1, 2, 3, 8)
        assert copy_out(made).tobytes() == rows.tobytes()
