"""What a model's state takes, told from its config: equal to what real stores of real tiny models take, to the byte."""

import json
import pickle
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from prefixcache import PrefixCache, Raw, TurboQuant
from prefixcache.blocks.node import Window
from prefixcache.codecs import as_codec
from prefixcache.layers.reading import read
from prefixcache.planning import model as module
from prefixcache.planning.model import Law, ModelError, ModelState, _probe, held_rows
from prefixcache.planning.model_config import context_length
from prefixcache.planning.sizes import StateSizes
from tests.models.families import BASE, FAMILIES, MLX_LM_0_31

PROMPT = 263  # two blocks, the second short: its rows are kept as they are
CODECS = ("raw", "turboquant:4")
MEBIBYTE = 1 << 20

# Fields as the models' authors published them; those that no cache depends on are left out where mlx-lm lets them.
# fmt: off
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
REAL = {
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "Qwen3-8B": QWEN | {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": QWEN | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "Qwen3-235B-A22B": QWEN | {
        "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "intermediate_size": 12288,
        "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "rms_norm_eps": 1e-5,
        "rope_theta": 150000, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    },
    "Gemma-3-27B": {"model_type": "gemma3", "vocab_size": 262208, "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        "sliding_window_pattern": 6, "query_pre_attn_scalar": 168, "vocab_size": 262208, "dtype": "bfloat16",
    }},
    "Qwen3-Next-80B-A3B": QWEN | {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 5120,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 512, "moe_intermediate_size": 512, "mlp_only_layers": [],
        "partial_rotary_factor": 0.25, "norm_topk_prob": True, "full_attention_interval": 4,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840, "rope_theta": 10000.0, "attention_bias": False, "torch_dtype": "bfloat16",
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "GLM-4.6": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120, "intermediate_size": 12288,
        "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "norm_topk_prob": True,
        "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "head_dim": 128, "n_shared_experts": 1,
        "n_routed_experts": 160, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "num_hidden_layers": 92, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "rope_scaling": None, "use_qk_norm": True, "tie_word_embeddings": False, "attention_bias": True,
        "partial_rotary_factor": 0.5, "dtype": "bfloat16",
    },
    "Falcon-H1-7B": {
        "model_type": "falcon_h1", "hidden_size": 3072, "num_hidden_layers": 44, "intermediate_size": 12288,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072,
        "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "vocab_size": 130048, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
}
# Bytes of a token in the layers that keep every one: layers x heads x width of K and V together x 2.
PER_TOKEN = {
    "Llama-3.1-8B": 32 * 8 * 256 * 2,
    "Qwen3-8B": 36 * 8 * 256 * 2,
    "Qwen3-30B-A3B": 48 * 4 * 256 * 2,
    "Qwen3-235B-A22B": 94 * 4 * 256 * 2,
    "gpt-oss-20b": 12 * 8 * 128 * 2,
    "Gemma-3-27B": 10 * 16 * 256 * 2,
    "Qwen3-Next-80B-A3B": 12 * 2 * 512 * 2,
    "DeepSeek-V3": 61 * 1 * (512 + 64) * 2,  # a latent and the rotated part of the key
    "GLM-4.6": 92 * 8 * 256 * 2,
    "Falcon-H1-7B": 44 * 2 * 256 * 2,
}
# Of Gemma 3 with an output layer of its own: mlx-lm makes one, and drops it when the weights have none.
BILLIONS = {
    "Llama-3.1-8B": 8.03, "Qwen3-8B": 8.19, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235, "gpt-oss-20b": 20.9,
    "Gemma-3-27B": 28.4, "Qwen3-Next-80B-A3B": 79.7, "DeepSeek-V3": 671, "GLM-4.6": 353, "Falcon-H1-7B": 7.59,
}
# fmt: on


def config_of(name: str) -> dict:
    family, config, dtype = FAMILIES[name].build.args
    plain = json.loads(json.dumps({"model_type": family, **config}))
    return plain | {"dtype": str(dtype).rpartition(".")[2]}


@cache
def told(name: str) -> ModelState:
    return ModelState.of(REAL[name], name) if name in REAL else ModelState.of(config_of(name))


def prefilled(model, prompt: list[int]) -> list:
    """Its prompt cache after a prefill and one decoded token."""
    prompt_cache = make_prompt_cache(model)
    for piece in (prompt[:-1], prompt[-1:]):
        model(mx.array([piece]), cache=prompt_cache)
    return prompt_cache


def assert_stored_as_told(state: ModelState, prompt: list[int], prompt_cache: list, codec) -> None:
    sizes = StateSizes(state, codec)
    sizes.model = "a model"
    with PrefixCache(ram="1GB", codec=codec, memory_reserve=0) as prefixes:
        stored = prefixes.store(prompt, prompt_cache, model="a model")
        assert stored.tokens == len(prompt)
        assert stored.new_bytes == sizes.prompt_bytes(len(prompt))
        assert prefixes.stats().ram_images == sizes.prompt_bytes(len(prompt))
        assert stored.raw_layers == tuple(sizes.plan.raw)


# A chunked cache of 0.31 takes its buffer's length for its tokens' number, and drops rows that it should hold.
@pytest.mark.parametrize("name", [name for name in FAMILIES if not (MLX_LM_0_31 and name == "llama4-256")])
def test_of_every_family_a_real_store_takes_the_bytes_that_the_config_told(name):
    prompt = [i % 128 for i in range(PROMPT)]
    state = told(name)
    model = FAMILIES[name].build()
    prompt_cache = prefilled(model, prompt)
    reading = read(prompt_cache)

    assert state.layout == reading.layout
    assert state.parameters == sum(weight.size for weight in leaves_of(model.parameters()))
    leaves = state.leaves(PROMPT)
    assert [(leaf.positions, leaf.held) for leaf in leaves] == [(leaf.positions, leaf.held) for leaf in reading.leaves]
    plan = state.plan(Raw())
    expected = plan.describe_state(reading.leaves)
    assert StateSizes(state, Raw()).snapshot(PROMPT).described == expected.described
    assert StateSizes(state, Raw()).snapshot(PROMPT).specs() == expected.specs()
    for codec in map(as_codec, CODECS):
        assert_stored_as_told(state, prompt, prompt_cache, codec)


def leaves_of(tree) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    return [leaf for child in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves_of(child)]


def test_every_kind_of_layer_cache_is_among_those_families():
    kinds = {kind.kind for name in FAMILIES for kind in told(name).layers}
    assert kinds == {"sliceable", "windowed", "snapshot", "none"}


# -- images of every place in a prompt ----------------------------------------------------------------------------------


def synthetic(tokens: int, keep: int = 0, chunk: int = 0) -> list:
    """A layer that keeps every token, a window and recurrent state, none of them evaluated before it is stored."""
    ring = ChunkedKVCache(chunk) if chunk else RotatingKVCache(48, keep)
    made = [KVCache(), ring]
    for layer in made:
        for count in (tokens - 1, 1):
            rows = mx.zeros((1, 2, count, 32), mx.float16)
            if isinstance(layer, ChunkedKVCache):
                layer.maybe_trim_front()
            layer.update_and_fetch(rows, rows)
    state = ArraysCache(2)
    state[0] = mx.zeros((1, 3, 8))
    return [*made, state]


def state_of(prompt_cache: list) -> ModelState:
    """As if a config had told it."""
    probe = _probe(1, prompt_cache)
    return ModelState("synthetic", "synthetic", "float16", 0, probe.layout, tuple(probe.states), probe.counted)


@pytest.mark.parametrize("codec", [Raw(), TurboQuant(3, 4, sink_tokens=6), TurboQuant(levelling=False)], ids=str)
@pytest.mark.parametrize("window", [{}, {"keep": 4}, *([] if MLX_LM_0_31 else [{"chunk": 300}])], ids=str)
def test_headers_are_counted_at_starts_of_up_to_five_digits_and_with_kept_and_sunk_tokens(codec, window):
    for tokens in (1, 255, 1030, 10_500):
        prompt, prompt_cache = [i % 977 for i in range(tokens)], synthetic(tokens, **window)
        assert_stored_as_told(state_of(prompt_cache), prompt, prompt_cache, codec)


def test_a_block_that_is_not_whole_takes_what_its_rows_take():
    raw, coded = (StateSizes(state_of(synthetic(300)), codec) for codec in (Raw(), TurboQuant()))
    assert abs(coded.rows_bytes(0, 255) - raw.rows_bytes(0, 255)) < 300  # the codec's name in the header
    assert coded.rows_bytes(256, 256) < raw.rows_bytes(256, 256) / 2
    assert coded.prompt_bytes(300) == (
        coded.rows_bytes(0) + coded.rows_bytes(256, 44) + coded.windows_bytes(300) + coded.snapshot_bytes(256, 44)
    )


@given(
    st.integers(2, 40),
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=1, max_size=12),
)
def test_rows_held_are_those_of_mlx_lms_windows_after_any_pieces_and_a_generated_token(size, keep, chunked, pieces):
    chunked = chunked and not MLX_LM_0_31
    window = Window(size, 0 if chunked else min(keep, size - 1), chunked)
    live = ChunkedKVCache(size) if chunked else RotatingKVCache(size, window.keep)
    for piece in (*pieces, 1):
        rows = mx.zeros((1, 1, piece, 1))
        if chunked:
            live.maybe_trim_front()
        live.update_and_fetch(rows, rows)
    (leaf,) = read([live]).leaves
    tokens = sum(pieces) + 1
    told = {t for first, end in held_rows(window, tokens) for t in range(first, end)}
    held = {t for first, end in leaf.held for t in range(first, end)}
    assert held == told


# -- configs of real models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_a_real_models_bytes_a_token_are_those_computed_by_hand_and_nothing_is_evaluated(name):
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    state = ModelState.of(REAL[name], name)
    assert mx.get_peak_memory() - before < MEBIBYTE

    assert state.dtype == "bfloat16"
    assert StateSizes(state, Raw()).raw_bytes_per_token == PER_TOKEN[name]
    assert state.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_layers_are_told_by_kind():
    gemma, qwen, oss = map(told, ("Gemma-3-27B", "Qwen3-Next-80B-A3B", "gpt-oss-20b"))
    assert gemma.layers == [("windowed", 52, (1024, 0, False)), ("sliceable", 10, None)]
    assert qwen.layers == [("snapshot", 36, None), ("sliceable", 12, None)]
    assert set(oss.layers) == {("windowed", 12, (128, 0, False)), ("sliceable", 12, None)}


def test_windows_and_snapshots_are_what_a_boundary_takes_beside_the_tokens():
    gemma, qwen = (StateSizes(told(n), Raw()) for n in ("Gemma-3-27B", "Qwen3-Next-80B-A3B"))
    row = 52 * 16 * 256 * 2
    assert 1024 * row < gemma.most_windows_bytes < 1024 * row * 1.001
    assert gemma.snapshot_bytes(256, 10) == 0
    conv, recurrent = 3 * (2 * 16 + 32) * 128 * 2, 32 * 128 * 128 * 4
    assert 36 * (conv + recurrent) < qwen.snapshot_bytes(256, 10) < 36 * (conv + recurrent) * 1.001
    assert qwen.most_windows_bytes == 0
    assert qwen.live_bytes(1000) == 36 * (conv + recurrent) + 1000 * PER_TOKEN["Qwen3-Next-80B-A3B"]
    assert gemma.live_bytes(10_000) == 1024 * row + 10_000 * PER_TOKEN["Gemma-3-27B"]


def test_sizes_are_those_of_each_codec():
    state = told("Llama-3.1-8B")
    raw, four, three = (StateSizes(state, codec) for codec in (Raw(), TurboQuant(), TurboQuant(3, 3)))
    assert 131072 < raw.bytes_per_token < 131072 * 1.001
    assert four.bytes_per_token == pytest.approx(32 * 8 * 2 * (64 + 2) + 32 * 8 * 128 * 4 // 256 + 8, rel=0.001)
    assert (raw.ratio, four.ratio, three.ratio) == pytest.approx((1.0, 3.82, 5.02), rel=0.002)
    assert four.ram_bytes_per_token == pytest.approx(four.bytes_per_token, rel=0.002)
    assert four.prompt_bytes(32_768) == pytest.approx(32_768 * four.bytes_per_token, rel=0.002)
    assert not four.plan.raw
    assert not raw.plan.raw
    latents = StateSizes(told("DeepSeek-V3"), TurboQuant())
    assert tuple(latents.plan.raw) == tuple(range(61))
    assert latents.ratio == pytest.approx(1.0, rel=0.001)


def test_a_model_without_rows_has_no_ratio():
    sizes = StateSizes(told("mamba"), TurboQuant())
    assert sizes.ratio is None
    assert sizes.snapshot_bytes(32_512, 256) > 0


def test_a_state_is_plain_data_that_another_process_can_have():
    for name in ("Qwen3-Next-80B-A3B", "Gemma-3-27B"):
        state = told(name)
        sizes = StateSizes(state, TurboQuant())
        again = pickle.loads(pickle.dumps(state))
        assert again == state
        assert StateSizes(again, TurboQuant()).prompt_bytes(5_000) == sizes.prompt_bytes(5_000)


@pytest.mark.skipif("deepseek_v41" not in FAMILIES, reason="this mlx-lm has no model whose state grows")
def test_state_that_grows_with_the_prompt_is_told_for_any_length():
    state = told("deepseek_v41")
    assert state.grows
    assert state.states[0]["offset"] == Law("n // by", 1)
    sizes = StateSizes(state, Raw())
    assert sizes.snapshot_bytes(2560, 4) > sizes.snapshot_bytes(256, 4)
    model, prompt = FAMILIES["deepseek_v41"].build(), list(range(128))
    for tokens in (1, 2, 5, 31, 64):  # fewer than a window, and no group closed yet
        reading = read(prefilled(model, prompt[:tokens]) if tokens > 1 else fed(model, prompt[:1]))
        expected = state.plan(Raw()).describe_state(reading.leaves)
        assert sizes.snapshot(tokens).described == expected.described
        assert sizes.snapshot(tokens).specs() == expected.specs()


def fed(model, prompt: list[int]) -> list:
    prompt_cache = make_prompt_cache(model)
    model(mx.array([prompt]), cache=prompt_cache)
    return prompt_cache


# -- reading a config ---------------------------------------------------------------------------------------------------


def written(folder, config) -> object:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_a_folder_a_file_and_a_hubs_snapshot_are_read_and_named(tmp_path):
    config = config_of("llama")
    folder = written(tmp_path / "Tiny-Llama", config)
    assert ModelState.read(folder).name == "Tiny-Llama"
    assert ModelState.read(str(folder / "config.json")).name == "Tiny-Llama"
    (tmp_path / "my-model.json").write_text(json.dumps(config))
    assert ModelState.read(tmp_path / "my-model.json").name == "my-model"
    hub = written(tmp_path / "models--org--Tiny-1B" / "snapshots" / "0123abc", config)
    assert ModelState.read(hub).name == "Tiny-1B"
    assert ModelState.of(config).name == "llama"


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "float16", "text_config": {"dtype": "float32"}}, "float16"),
        ({"text_config": {"torch_dtype": "float16"}}, "float16"),
        ({"language_config": {"torch_dtype": "float16"}}, "float16"),
        ({}, "bfloat16"),
        ({"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "float16"}, "float16"),
    ],
)
def test_the_dtype_is_the_configs_and_the_caches(fields, dtype):
    config = {"model_type": "llama", **BASE, **fields}
    state = ModelState.of(config)
    assert state.dtype == dtype
    assert {stream[4] for leaf in state.plan(Raw()).leaves for stream in leaf["streams"]} == {dtype}
    assert ModelState.of(config, dtype="float32").dtype == "float32"


def test_a_config_of_a_remapped_family_is_its_familys():
    assert ModelState.of({**BASE, "model_type": "mistral"}).layout == told("llama-bf16").layout


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    config = config_of("mamba2") | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert ModelState.read(written(tmp_path, config)).layout == told("mamba2").layout


DBRX = {
    "model_type": "dbrx",
    "vocab_size": 128,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
}


def test_a_model_that_looks_at_its_values_is_told_as_it_really_is():
    from mlx_lm.models import dbrx

    real = dbrx.Model(dbrx.ModelArgs.from_dict(DBRX))
    real.eval()
    state = ModelState.of(DBRX, dtype="float32")
    assert state.layout == read(fed(real, [1, 2, 3])).layout
    assert state.parameters == sum(weight.size for weight in leaves_of(real.parameters()))


def test_a_model_that_looks_at_its_values_and_is_not_known_for_it_is_refused_before_it_does(monkeypatch):
    monkeypatch.setattr(module, "_REPLACEMENTS", {})
    with pytest.raises(ModelError, match="model_type='dbrx': its cache depends on the weights' values"):
        ModelState.of(DBRX)


def test_a_model_whose_layers_need_a_gpu_is_told_without_one():
    config = BASE | {"head_dim": 16}
    layouts = [ModelState.of(config | {"model_type": kind}).layout for kind in ("bitnet", "llama")]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "lama"}, r"model_type='lama': mlx-lm [\d.]+ has no such model \(it has llama.*upgrade mlx-lm"),
        ({"model_type": "cache"}, "has no such model"),
        ({"model_type": "../llama"}, "has no such model"),
        ({"model_type": 5}, "model_type=5: not a family's name"),
        ({"model_type": None}, "model_type=None"),
        ({"model_type": "olmo"}, "another package"),
        ({"model_file": "custom.py"}, "model_file='custom.py': the model is code of its own"),
        ({"hidden_size": None}, "check hidden_size=None"),
        ({"hidden_size": "64"}, "check hidden_size='64'"),
        ({"num_attention_heads": 0}, "check num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "refuses the config"),
        ({"num_hidden_layers": 0}, "check num_hidden_layers=0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: more than any model has"),
        ({"hidden_size": 2**40}, "refuses the config"),
        ({"dtype": "int8"}, "dtype='int8': no dtype of activations; choose one: float16, bfloat16, float32"),
        ({"text_config": []}, None),
    ],
)
def test_a_config_that_no_state_can_be_told_from_is_named_with_the_remedy(change, said, tmp_path):
    folder = written(tmp_path, config_of("llama") | change)
    if said is None:
        assert ModelState.read(folder).layout == told("llama").layout
        return
    with pytest.raises(ModelError, match=said) as caught:
        ModelState.read(folder)
    assert str(caught.value).startswith(str(folder / "config.json") + ": ")


def test_a_field_that_is_missing_is_named():
    config = config_of("llama")
    del config["num_hidden_layers"]
    with pytest.raises(ModelError, match="num_hidden_layers is missing"):
        ModelState.of(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "holds a JSON list"),
        ("[" * 100_000, "not JSON"),
        ("\0", "not JSON"),
        ('{"__float__": []}', "not JSON"),
    ],
    ids=["empty", "torn", "list", "deep", "binary", "number"],
)
def test_a_file_that_is_no_config_is_named(text, said, tmp_path):
    with pytest.raises(ModelError, match=said):
        ModelState.read(written(tmp_path, text))


def test_a_path_without_a_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"the folder has no config\.json; give a model's folder"):
        ModelState.read(tmp_path)
    with pytest.raises(ModelError, match="'org/model': no such file"):
        ModelState.read("org/model")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="not JSON"):
        ModelState.read(tmp_path)
    with pytest.raises(TypeError, match="give a model's folder"):
        ModelState.read(5)  # type: ignore[arg-type]


def test_a_dtype_that_is_none_is_named():
    with pytest.raises(ModelError, match="dtype='int4'"):
        ModelState.of(config_of("llama"), dtype="int4")


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"max_position_embeddings": 40_960}, 40_960),
        (
            {
                "max_position_embeddings": 40_960,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32_768},
            },
            131_072,
        ),
        ({"rope_scaling": {"factor": 32.0, "original_max_position_embeddings": 4096}}, 131_072),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": float("inf")}, None),
        ({"max_position_embeddings": "many", "rope_scaling": "yarn"}, None),
        ({}, None),
    ],
)
def test_the_context_is_what_the_config_says_the_model_is_made_for(fields, context):
    assert context_length(fields) == context


def test_the_context_travels_with_the_state():
    state = ModelState.of(REAL["Qwen3-8B"], "qwen3-8b")
    assert pickle.loads(pickle.dumps(state)).context == state.context == 40_960
