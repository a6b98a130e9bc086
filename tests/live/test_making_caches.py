"""Which layers become live compressed caches, what the result says of the others, and what models answer on them."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.models.cache import make_prompt_cache as make_plain

import prefixcache
from prefixcache import (
    TurboQuant,
    TurboQuantKVCache,
    convert_in_place,
    convert_prompt_cache,
    make_prompt_cache,
)
from prefixcache.live import SharedLevels
from prefixcache.upstream import hook_attention, unhook_attention
from tests.inside import layer_of
from tests.models.families import FAMILIES

TOKENS = [n * 7 % 128 for n in range(300)]


def built(name):
    if name not in FAMILIES:
        pytest.skip(f"this mlx-lm has no {name}")
    return FAMILIES[name].build()


def prefilled(model, tokens=TOKENS):
    cache = make_plain(model)
    model(mx.array([tokens]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def logits(model, cache, token=5):
    return model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)


def test_plain_layers_are_coded_and_the_rest_is_named():
    for name, coded, left in (
        ("llama", 4, {}),
        ("gemma3_text", 1, {RotatingKVCache: 3}),
        ("qwen3_next", 1, {ArraysCache: 3}),
        ("falcon_h1", 4, {}),
    ):
        made = make_prompt_cache(built(name), TurboQuant())
        assert len(made.coded) == coded, name
        assert len(made.left) == sum(left.values()), name
        for layer, why in made.left.items():
            assert type(made[layer]) in left
            assert type(made[layer]).__name__ in why


def test_a_list_of_caches_is_coded_inside():
    made = make_prompt_cache(built("falcon_h1"), TurboQuant())
    assert all(isinstance(layer, CacheList) for layer in made)
    assert {type(child) for layer in made for child in layer.caches} == {ArraysCache, TurboQuantKVCache}


def decoded(layer):
    if isinstance(layer, CacheList):
        return CacheList(*map(decoded, layer.caches))
    return layer.dequantize() if isinstance(layer, TurboQuantKVCache) else copy.deepcopy(layer)


@pytest.mark.parametrize("name", ["llama", "llama-bf16", "qwen2", "gpt_oss", "qwen3_next", "falcon_h1", "openelm"])
def test_a_model_answers_on_codes_as_on_what_they_decode_to(name):
    """On 8 bits with raw recent rows: near enough to tell a wrong mask, head or position from codes."""
    model = built(name)
    plain = prefilled(model)
    live = convert_prompt_cache(plain, "turboquant:8", model=model)
    assert live.coded
    for token in (5, 9, 77):
        wanted = logits(model, [decoded(layer) for layer in live], token)
        got = logits(model, live, token)
        assert mx.linalg.norm(got - wanted).item() <= (0.1 if "bf16" in name else 0.02) * mx.linalg.norm(wanted).item()


def test_what_was_converted_stays_as_it_was():
    model = built("gemma3_text")
    plain, twin = prefilled(model), prefilled(model)
    live = convert_prompt_cache(plain, "turboquant:4:fp16_layers=1", model=model)
    for token in (5, 9):
        logits(model, live, token)
    assert mx.array_equal(logits(model, plain), logits(model, twin))


def test_in_place_replaces_layers_one_by_one():
    plain = prefilled(built("llama"))
    made = convert_in_place(plain, "turboquant:4")
    assert all(a is b for a, b in zip(plain, made, strict=True))
    assert all(isinstance(layer, TurboQuantKVCache) for layer in plain)
    again = convert_prompt_cache(plain, "turboquant:4")
    assert again.coded == (0, 1, 2, 3)


def test_the_codec_decides_layer_by_layer():
    made = make_prompt_cache(
        built("llama"), TurboQuant(key_bits=8, value_bits=3, fp16_layers=1, layers={1: 2}, sink_tokens=4)
    )
    assert made.coded == (1, 2)
    assert [type(made[i]) for i in (0, 3)] == [KVCache, KVCache]
    assert "leaves 2 heads of 32 float32 as they are" in made.left[0]
    assert (made[1].choice.key_bits, made[1].choice.value_bits) == (2, 2)
    assert (made[2].choice.key_bits, made[2].choice.value_bits, made[2].choice.sink_tokens) == (8, 3, 4)
    assert made[2].choice.recent_tokens == 64


def test_layers_that_mx_quantize_coded_stay_as_they_are():
    plain = prefilled(built("llama"))
    quantized = QuantizedKVCache(group_size=32, bits=8)
    quantized.update_and_fetch(*plain[0].state[:2])
    made = convert_prompt_cache([quantized, *plain[1:]], "turboquant:4")
    assert made.left == {0: "QuantizedKVCache is no plain KVCache"}
    assert type(made[0]) is QuantizedKVCache


def test_levels_are_shared_between_layers_of_their_own():
    model, shared = built("qwen2"), SharedLevels()
    first = make_prompt_cache(model, TurboQuant(), levels=shared)
    model(mx.array([TOKENS]), cache=first)
    second = make_prompt_cache(model, TurboQuant(), levels=shared)
    model(mx.array([[1, 2, 3]]), cache=second)
    own = [layer_of(cache).runs[0][0].levels for cache in second]
    assert own == [layer_of(cache).runs[0][0].levels for cache in first]
    assert len({id(pair) for pair in own}) == len(own)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mamba", "no layer can be coded by turboquant k4 v4: ArraysCache is no plain KVCache"),
        ("gemma2", "gemma2"),
        ("plamo2", "plamo2"),
        ("deepseek_v3", "deepseek_v3"),
    ],
)
def test_a_model_where_nothing_qualifies_is_an_error(name, said):
    with pytest.raises(ValueError, match=said):
        make_prompt_cache(built(name), TurboQuant())


def test_a_model_that_can_not_attend_to_codes_says_so_where_nobody_asked_before():
    model = built("gemma2")
    with pytest.raises(TypeError, match="Codes"):
        logits(model, convert_prompt_cache(prefilled(model), "turboquant:8"))


def test_a_cache_of_another_model_is_an_error():
    small, deep = built("llama"), built("openelm")
    cache = prefilled(small)
    with pytest.raises(ValueError, match="layer 0 holds 2 heads of 32 float32, the model makes"):
        convert_prompt_cache(cache, model=deep)
    with pytest.raises(ValueError, match="a prompt cache of 3 layers for a model of 4"):
        convert_prompt_cache(cache[:3], model=small)
    with pytest.raises(ValueError, match="layer 0 holds"):
        convert_prompt_cache(prefilled(deep), model=small)
    live = convert_prompt_cache(cache, "turboquant:4")
    with pytest.raises(ValueError, match="rows that don't go with those that are held"):
        logits(deep, live)


def test_bad_input_is_named():
    model = built("llama")
    with pytest.raises(ValueError, match="live caches keep codes of TurboQuant"):
        make_prompt_cache(model, "raw")
    with pytest.raises(ValueError, match="recent_tokens=-1"):
        make_prompt_cache(model, recent_tokens=-1)
    with pytest.raises(ValueError, match="pass the list of layer caches"):
        convert_prompt_cache([])
    with pytest.raises(ValueError, match="it holds no rows"):
        convert_prompt_cache(make_plain(model))


def test_a_model_whose_layers_changed_is_sketched_anew():
    model = built("llama")
    old = prefilled(model)
    make_prompt_cache(model, TurboQuant())
    model.model.layers = model.model.layers[:2]
    assert len(make_prompt_cache(model, TurboQuant())) == 2
    assert len(convert_prompt_cache(prefilled(model), model=model)) == 2
    with pytest.raises(ValueError, match="a prompt cache of 4 layers for a model of 2"):
        convert_prompt_cache(old, model=model)


def test_a_layer_that_is_coded_otherwise_is_an_error():
    live = convert_prompt_cache(prefilled(built("llama")), "turboquant:4")
    with pytest.raises(ValueError, match="layer 0 is coded already, by turboquant k4 v4, not turboquant k8 v8"):
        convert_prompt_cache(live, "turboquant:8")


def test_mlx_lm_saves_and_loads_live_caches(tmp_path):
    model = built("llama")
    live = convert_prompt_cache(prefilled(model), "turboquant:4")
    save_prompt_cache(str(tmp_path / "cache.safetensors"), list(live))
    back = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert mx.allclose(logits(model, live), logits(model, back), atol=1e-3)


def test_an_unhooked_model_says_what_to_do():
    model = built("llama")
    live = convert_prompt_cache(prefilled(model), "turboquant:4", model=model)
    unhook_attention()
    try:
        with pytest.raises(TypeError, match=r"call prefixcache.upstream.hook_attention\(\)"):
            logits(model, live)
        waiting = make_prompt_cache(model, "turboquant:4")
        unhook_attention()
        logits(model, waiting)  # arrays, so far
    finally:
        hook_attention()
    logits(model, live)


def test_the_package_names_them_without_loading_mlx_lm_first():
    assert prefixcache.make_prompt_cache is make_prompt_cache
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        prefixcache.nothing  # noqa: B018
