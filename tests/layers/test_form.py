"""A hit of another form than the caller's prompt caches is a miss: of other classes, rings of another size, other rows."""

import logging

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.keys import canonical
from prefixcache.layers import CacheError
from prefixcache.layers.form import CacheForm
from prefixcache.layers.reading import read
from prefixcache.servers.loaded_model import form_of
from tests.models import states
from tests.models.families import FAMILIES

LONG = list(range(600))
RAM = {"ram": "50MB", "codec": "raw"}


def filled(make, tokens=1, heads=2, width=8, dtype=mx.float32):
    layers = [make(), make()]
    for layer in layers:
        layer.update_and_fetch(*[mx.zeros((1, heads, tokens, width), dtype)] * 2)
    return layers


def ring(size, keep=4):
    return lambda: RotatingKVCache(max_size=size, keep=keep)


def difference(made, stored):
    return CacheForm(made).difference(canonical(read(stored).layout))


@pytest.mark.parametrize("make", [KVCache, ring(256)], ids=["plain", "ring"])
def test_what_a_caller_makes_itself_is_of_its_form(make):
    for stored in (filled(make, 300), [CacheList(*filled(make, 300))]):
        unused = [CacheList(make(), make())] if len(stored) == 1 else [make(), make()]
        assert difference(unused, stored) == difference(stored, stored) == ""


@pytest.mark.parametrize(
    ("made", "stored", "said"),
    [
        ([KVCache(), KVCache()], filled(ring(256), 300), "layer 0 is a RotatingKVCache, not a KVCache"),
        ([ring(512)(), ring(512)()], filled(ring(256), 300), "has keep 4, max_size 256, not keep 4, max_size 512"),
        ([ring(256, 0)(), ring(256, 0)()], filled(ring(256), 300), "has keep 4, max_size 256, not keep 0"),
        ([KVCache()], filled(KVCache), "2 layers, not 1"),
        (filled(KVCache, width=16), filled(KVCache), "has rows of keys 2 x 8 float32"),
        (filled(KVCache, heads=4), filled(KVCache), "not of keys 4 x 8 float32"),
        (filled(KVCache, dtype=mx.bfloat16), filled(KVCache), "not of keys 2 x 8 bfloat16"),
        ([QuantizedKVCache(64, 4)] * 2, filled(KVCache), "is a KVCache, not a QuantizedKVCache"),
        ([CacheList(KVCache(), KVCache())] * 2, [CacheList(KVCache())] * 2, "layer 0 has 1 caches, not 2"),
        ([CacheList(KVCache(), ring(8)())] * 2, [CacheList(KVCache(), KVCache())] * 2, "layer 0.1 is a KVCache"),
    ],
)
def test_another_form_is_named(made, stored, said):
    assert said in difference(made, stored)


def test_a_form_may_be_one_of_several():
    plain, quantised = [KVCache(), KVCache()], [QuantizedKVCache(64, 4), QuantizedKVCache(64, 4)]
    form = CacheForm(plain, quantised)
    for stored in (filled(KVCache), quantised):
        assert form.difference(canonical(read(stored).layout)) == ""
    assert form.difference(canonical(read(filled(ring(8))).layout)) != ""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_a_model_computes_is_of_the_form_of_its_first_token(family):
    """Were it not, a server would never hit this family."""
    model = FAMILIES[family].build()
    form = form_of(model)
    for lengths in ([1], [2], [40, 37, 1, 5]):
        layers = make_prompt_cache(model)
        for n in lengths:
            model(mx.array([[*range(7, 7 + n)]]), cache=layers)
        assert form.difference(canonical(read(layers).layout)) == ""


def test_a_model_that_stores_other_widths_than_it_makes_now_is_a_miss():
    """DeepSeek-V3.2's indexer: values of width 0 in one release of mlx-lm, 32 in the next."""
    family = next(name for name in FAMILIES if "deepseek_v32" in name)
    model = FAMILIES[family].build()
    layers = make_prompt_cache(model)
    model(mx.array([LONG[:40]]), cache=layers)
    indexer = layers[0].caches[1]
    other = 32 if indexer.values.shape[-1] == 0 else 0
    indexer.values = mx.zeros((*indexer.values.shape[:3], other))
    mx.eval([layer.state for layer in layers])
    assert "layer 0.1" in form_of(model).difference(canonical(read(layers).layout))


def test_rows_that_a_server_quantises_on_the_way_are_of_its_form():
    model = FAMILIES["llama"].build()
    layers = make_prompt_cache(model)
    model(mx.array([LONG[:40]]), cache=layers)
    quantised = canonical(read([layer.to_quantized(32, 4) for layer in layers]).layout)
    assert form_of(model).difference(quantised) != ""
    form = form_of(model, kv_bits=4, kv_group_size=32)
    assert form.difference(quantised) == form.difference(canonical(read(layers).layout)) == ""
    assert form_of(model, kv_bits=8, kv_group_size=32).difference(quantised) != ""


def test_a_ring_is_never_given_to_who_makes_plain_caches(caplog):
    """`max_kv_size` is an option of the maker of the prompt cache: the weights' name doesn't say it."""
    with PrefixCache(**RAM) as cache:
        cache.store(LONG, filled(ring(256), len(LONG)), model="m@1")
        plain = [KVCache(), KVCache()]
        assert cache.fetch(cache.prompt([*LONG, 1], model="m@1", like=plain)) == (None, [*LONG, 1])
        assert cache.fetch(cache.prompt([*LONG, 1, 2], model="m@1", like=plain))[0] is None
        assert cache.stats().counters.of_other_form == 2
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
        assert "layer 0 is a RotatingKVCache, not a KVCache" in caplog.text
        made, rest = cache.fetch(cache.prompt([*LONG, 1], model="m@1", like=[ring(256)(), ring(256)()]))
        assert ([layer.max_size for layer in made], rest) == ([256, 256], [1])
        cache.store(LONG, filled(KVCache, len(LONG)), model="m@1")
        for like, kind in ((plain, KVCache), ([ring(256)(), ring(256)()], RotatingKVCache)):
            made, rest = cache.fetch(cache.prompt([*LONG, 1], model="m@1", like=like))
            assert ({type(layer) for layer in made}, rest) == ({kind}, [1])
        assert cache.stats().counters.of_other_form == 2
        assert cache.fetch([*LONG, 1], model="m@1")[1] == [1]  # who doesn't say gets either


def test_a_prompt_has_its_form_in_every_call(tmp_path):
    values = {**RAM, "ssd_dir": tmp_path, "ssd": "50MB"}
    with PrefixCache(**values) as cache:
        cache.store(LONG, filled(ring(256), len(LONG)), model="m@1")
    with PrefixCache(**values) as cache:
        plain = cache.prompt(LONG, model="m@1", like=[KVCache(), KVCache()])
        rings = cache.prompt(LONG, model="m@1", like=CacheForm([ring(256)(), ring(256)()]))
        for prompt in (plain, plain.first(300), plain.continued([1])):
            assert cache.match(prompt) == (0, 0)
            assert cache.promote(prompt).result(10) == 0
            assert cache.lookup(prompt) is None
            assert cache.unread(prompt) == 0
        assert cache.match(rings) == (0, len(LONG))
        assert cache.promote(rings).result(10) == len(LONG)
        assert cache.lookup(rings).tokens == len(LONG)
        with pytest.raises(CacheError, match="pass the list of layer caches"):
            cache.prompt(LONG, model="m@1", like="plain")


def test_a_form_of_no_prompt_cache_is_refused():
    with pytest.raises(ValueError, match="of no prompt cache: give one as make_prompt_cache"):
        CacheForm()


def test_what_a_caller_stores_is_of_its_form_from_then_on():
    with PrefixCache(**RAM) as cache:
        form = CacheForm([KVCache(), KVCache()])
        stored = cache.prompt(LONG, model="m@1", like=form)
        cache.store(stored, filled(ring(256), len(LONG)))
        made, _ = cache.fetch(cache.prompt([*LONG, 1], model="m@1", like=form))
        assert {type(layer) for layer in made} == {RotatingKVCache}


def test_live_codes_are_of_the_form_of_plain_caches():
    with PrefixCache(ram="50MB") as cache:
        cache.store(LONG, states.sliceable(LONG), model="m@1")
        like = states.sliceable(LONG[:1])
        made, rest = states.compressed(cache, cache.prompt([*LONG, 1], model="m@1", like=like), model=None)
        assert (len(made), rest) == (len(like), [1])
        cache.store([*LONG, 1], made, model="m@1")
        assert cache.fetch(cache.prompt([*LONG, 1, 2], model="m@1", like=like))[0] is not None


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", False), ("gemma3_text", False), ("qwen3_next", True), ("falcon_h1", True), ("mamba2", True)],
)
def test_a_form_says_whether_there_is_state_that_cannot_be_cut(family, expected):
    assert CacheForm(make_prompt_cache(FAMILIES[family].build())).is_recurrent is expected
