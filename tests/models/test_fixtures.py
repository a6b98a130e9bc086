"""The two small language models in tests/fixtures: that they are what their cards say, and that they remember."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMITS = {"tiny-llama": (9_900_000, 4_918_528), "tiny-qwen2": (4_700_000, 2_314_496)}  # (bytes of weights, parameters)
NAMES = sorted(LIMITS)

# Written for this test, so it is in nobody's training data.
PASSAGE = """
The loader opens the file once and reads the header. If the header is not valid, it raises a ValueError and closes the
file. Otherwise it returns a list of records, each with a name and a value. The order of the records is the order in
which they were written. Pass `strict=False` to skip records that cannot be read.

    >>> loader = Loader(path)
    >>> for record in loader:
    ...     print(record.name, record.value)
"""


@pytest.fixture(scope="module")
def loaded():
    return {name: load(str(FIXTURES / name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_half_precision_small_and_as_many_as_the_card_says(name, loaded):
    limit, parameters = LIMITS[name]
    assert (FIXTURES / name / "model.safetensors").stat().st_size <= limit
    values = [value for _, value in tree_flatten(loaded[name][0].parameters())]
    assert {value.dtype for value in values} == {mx.float16}
    assert all(mx.isfinite(value).all().item() for value in values)
    assert sum(value.size for value in values) == parameters
    assert f"{parameters:,}" in (FIXTURES / name / "README.md").read_text()


def test_both_together_are_below_fifteen_megabytes():
    sizes = [path.stat().st_size for name in NAMES for path in (FIXTURES / name).iterdir()]
    assert sum(sizes) < 15_000_000


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_the_one_on_the_card(name, loaded):
    config = json.loads((FIXTURES / name / "config.json").read_text())
    card = (FIXTURES / name / "README.md").read_text()
    assert config["model_type"] == name.removeprefix("tiny-")
    assert (config["head_dim"], config["max_position_embeddings"], config["tie_word_embeddings"]) == (64, 4096, True)
    assert config["hidden_size"] // config["num_attention_heads"] == 64
    for row in (
        f"| layers | {config['num_hidden_layers']} |",
        f"| width | {config['hidden_size']} |",
        f"| query heads, key heads | {config['num_attention_heads']}, {config['num_key_value_heads']} |",
        f"| vocabulary | {config['vocab_size']} |",
        f"| RoPE theta | {config['rope_theta']:.0f} |",
    ):
        assert row in card
    assert len(loaded[name][0].layers) == config["num_hidden_layers"]


@pytest.mark.parametrize("name", NAMES)
def test_the_chat_template_opens_with_one_bos_and_asks_for_an_answer(name, loaded):
    _, tokenizer = loaded[name]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert list(ids).count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|end|>")}


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_written_digit_by_digit(name, loaded):
    _, tokenizer = loaded[name]
    ids = tokenizer.encode("48213", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids] == list("48213")


def test_key_biases_are_many_times_the_keys(loaded):
    """As in Qwen2 proper: a few channels of each head are nearly constant and far larger than all that varies."""
    model, tokenizer = loaded["tiny-qwen2"]
    hidden = model.model.embed_tokens(mx.array([tokenizer.encode(PASSAGE)]))
    strong = 0
    for layer in model.layers:
        attention = layer.self_attn
        keys = np.array((layer.input_layernorm(hidden) @ attention.k_proj.weight.T).astype(mx.float32))
        keys = keys.reshape(-1, attention.n_kv_heads, 64)
        bias = np.array(attention.k_proj.bias.astype(mx.float32)).reshape(attention.n_kv_heads, 64)
        ratios = np.linalg.norm(bias, axis=-1) / np.median(np.linalg.norm(keys, axis=-1), axis=0)
        strong += ratios.min() >= 10
        large = np.abs(bias) > 20
        assert (large.sum(axis=-1) >= 4).all()
        assert np.abs(bias).max() < 200  # far from what half precision cannot hold, squared and summed
        pairs = np.flatnonzero(large.any(axis=0)) % 32
        assert pairs.min() >= 24  # only in the pairs that RoPE turns slowest
        hidden = layer(hidden, "causal")
    assert strong >= 3


@pytest.mark.parametrize(("name", "bound"), [("tiny-llama", 1.6), ("tiny-qwen2", 2.0)])
def test_text_it_has_not_seen_costs_few_bits(name, bound, loaded):
    model, tokenizer = loaded[name]
    ids = mx.array([tokenizer.encode(PASSAGE)])
    logits = model(ids[:, :-1]).astype(mx.float32)
    cost = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    bits = mx.sum(cost).item() / math.log(2) / len(PASSAGE.encode())
    assert bits < bound, bits


@pytest.mark.parametrize("name", NAMES)
def test_a_number_some_hundred_tokens_back_is_found(name, loaded):
    model, tokenizer = loaded[name]
    before, after = PASSAGE * 2, PASSAGE.replace("loader", "writer").replace("file", "table") * 3
    text = f"{before}The secret number of Marlow is 48213.\n{after}"
    asked = [{"role": "user", "content": f"{text}\n\nWhat is the secret number of Marlow?"}]
    prompt = mx.array(tokenizer.apply_chat_template(asked, add_generation_prompt=True))
    assert prompt.size > 500
    said = [token for token, _ in generate_step(prompt, model, max_tokens=6)]
    assert tokenizer.decode(said) == "48213<|end|>"
