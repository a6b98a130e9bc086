"""The families that are said to hold do, by what their code does with fetched keys and by what they compute."""

import ast
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from prefixcache.live import families
from prefixcache.live.families import EXCLUDED, SUPPORTED, UNLESS, check
from prefixcache.live.protocol import CodesStandIn
from prefixcache.upstream import hook_attention
from tests.models.families import BASE, DELTA, FAMILIES, MLA, MLX_LM_0_31, MOE, SLIDING

FOLDER = Path(mlx_lm.models.__path__[0])
MODULES = sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]) if module.name not in ("base", "cache"))


class Private(KVCache):
    """A cache whose rows nobody sees: plain ones behind a `CodesStandIn` of each, which it attends to itself."""

    def __init__(self):
        super().__init__()
        hook_attention()
        self._plain = KVCache()
        self.attended = 0

    def update_and_fetch(self, keys, values):
        self._plain.update_and_fetch(keys, values)
        self.offset = self._plain.offset
        return self.keys_and_values()

    def keys_and_values(self):
        rows = (a[:, :, : self.offset] for a in (self._plain.keys, self._plain.values))
        return tuple(CodesStandIn(self, a.shape, a.dtype) for a in rows)

    @property
    def state(self):
        return [mx.zeros(1)]

    def attend_to_codes(self, queries, keys, values, *, scale, mask, sinks):
        assert keys._cache is values._cache is self
        rows = (a[:, :, : self.offset] for a in (self._plain.keys, self._plain.values))
        self.attended += 1
        return mx.fast.scaled_dot_product_attention(queries, *rows, scale=scale, mask=mask, sinks=sinks)


def private(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*map(private, cache.caches))
    return Private() if type(cache) is KVCache else cache


def leaves(prompt_cache) -> list[Any]:
    return [leaf for c in prompt_cache for leaf in (c.caches if isinstance(c, CacheList) else [c])]


def built(module: str, config: dict) -> nn.Module:
    family = import_module(f"mlx_lm.models.{module}")
    mx.random.seed(0)
    return family.Model(family.ModelArgs.from_dict({"model_type": module, **config}))


def holds(model: nn.Module) -> bool:
    try:
        check(model)
    except ValueError:
        return False
    return True


def steps(model: nn.Module, prompt_cache: list[Any]) -> list[mx.array]:
    """Logits of a prefill in two pieces and of three more tokens."""
    tokens = list(range(1, 60))
    pieces = [tokens[:30], tokens[30:56], *([token] for token in tokens[56:])]
    return [model(mx.array([piece]), cache=prompt_cache) for piece in pieces]


# -- what they compute --


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def model(request):
    return request.param.build()


def test_a_family_computes_the_same_from_rows_that_it_never_sees_or_is_refused(model):
    expected = steps(model, make_prompt_cache(model))
    hidden = [private(cache) for cache in make_prompt_cache(model)]
    plain = [leaf for leaf in leaves(hidden) if isinstance(leaf, Private)]
    if holds(model):
        for ours, theirs in zip(steps(model, hidden), expected, strict=True):
            assert mx.allclose(ours, theirs, atol=1e-5)
        assert all(leaf.attended >= 5 for leaf in plain if leaf.offset)
    elif plain:  # a model that check() never saw says so itself, and computes nothing else
        with pytest.raises((TypeError, ValueError)):
            mx.eval(steps(model, hidden))


# fmt: off
GEMMA4 = BASE | {
    "num_hidden_layers": 4, "layer_types": [SLIDING, "full_attention"] * 2, "global_head_dim": 64,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128,
}
GEAR = BASE | {"layer_types": ["conv_mixer", SLIDING, "conv_mixer", "full_attention"]}
# fmt: on


def test_gemma4_holds_where_no_layers_share_keys():
    model = built("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 0})
    check(model)
    hidden = [private(cache) for cache in make_prompt_cache(model)]
    for ours, theirs in zip(steps(model, hidden), steps(model, make_prompt_cache(model)), strict=True):
        assert mx.allclose(ours, theirs, atol=1e-5)
    with pytest.raises(ValueError, match="'gemma4_text' can't attend to codes: layers that share keys"):
        check(built("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2}))


@pytest.mark.skipif(MLX_LM_0_31, reason="mlx-lm 0.31 has no gear")
def test_gear_holds_without_soft_caps_on_scores():
    check(built("gear", GEAR))
    with pytest.raises(ValueError, match="with attn_logit_softcapping it multiplies"):
        check(built("gear", GEAR | {"attn_logit_softcapping": 30.0}))


# -- check() --


# fmt: off
WRAPPERS = {
    "mistral3": {"text_config": BASE | {"model_type": "llama"}},
    "pixtral": {"text_config": BASE | {"model_type": "llama"}},
    "qwen2_vl": {"text_config": BASE | {"model_type": "qwen2"}},
    "qwen3_vl": {"text_config": BASE | {"model_type": "qwen3"}},
    "gemma3": {"text_config": BASE | {"model_type": "gemma3_text", "query_pre_attn_scalar": 32}},
    "gemma4": {"text_config": GEMMA4 | {"model_type": "gemma4_text", "num_kv_shared_layers": 0}},
    "qwen3_5": {"text_config": BASE | DELTA},
    "smollm3": BASE | {"model_type": "smollm3"},
}
LATENT_WRAPPERS = {
    "kimi_vl": {"text_config": BASE | MOE | MLA | {"model_type": "deepseek_v3"}},
    "kimi_k25": {"text_config": BASE | MOE | MLA | {"model_type": "deepseek_v3"}},
}
# fmt: on


@pytest.mark.parametrize("module", WRAPPERS)
def test_a_wrapper_holds_with_the_text_model_that_it_wraps(module):
    check(built(module, WRAPPERS[module]))


@pytest.mark.parametrize("module", LATENT_WRAPPERS)
def test_a_wrapper_of_a_family_that_does_not_hold_is_refused_by_both_names(module):
    with pytest.raises(ValueError, match=rf"'{module}' \(the attention of 'deepseek_v3'\) .*latents.*caches plain"):
        check(built(module, LATENT_WRAPPERS[module]))


def test_a_quantised_model_and_one_with_adapters_hold_as_before():
    model = FAMILIES["llama"].build()
    nn.quantize(model, group_size=32, bits=4)
    check(model)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 1.0, "dropout": 0.0})
    check(model)


class Attention(nn.Module):
    """A server's own."""

    def __call__(self, x, cache):
        keys, _ = cache.update_and_fetch(x, x)
        return keys


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = list(layers)


def test_a_servers_own_attention_is_not_known():
    with pytest.raises(ValueError, match=r"test_families_of_live_caches'.* it is not one of mlx-lm's models"):
        check(Model(Attention()))
    with pytest.raises(ValueError, match="no layer that updates a cache was found"):
        check(Model(nn.Linear(1, 1)))


def test_a_servers_own_model_around_one_of_mlx_lms_holds_with_it():
    check(Model(FAMILIES["llama"].build()))


def test_a_servers_patch_of_mlx_lms_attention_is_not_mlx_lms(monkeypatch):
    model = FAMILIES["llama"].build()
    monkeypatch.setattr(llama.Attention, "__call__", Attention.__call__)
    with pytest.raises(ValueError, match="it is not one of mlx-lm's models"):
        check(model)


def test_a_family_of_a_later_mlx_lm_is_not_known(monkeypatch):
    monkeypatch.setattr(families, "SUPPORTED", SUPPORTED - {"llama"})
    with pytest.raises(ValueError, match=r"models of 'llama' can't attend to codes: what it does .* is not known"):
        check(FAMILIES["llama"].build())


# -- what their code does: of every module, also where there is no tiny model of it --


def fetches(function: ast.AST) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("update_and_fetch", "keys_and_values")
    ]


def touched(module: str) -> list[str]:
    """What a module does with what caches fetched or hold, beside attending to it with the same cache.

    The arrays of a pipeline's last cache, which `mx.depends` ties to what is sent, don't count: a run over several
    machines is another matter.
    """
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            found += [f"{function.name}: {what}" for call in fetches(function) for what in uses(function, call)]
            found += [f"{function.name}: {what}" for what in reads(function)]
    return found


def uses(function: ast.FunctionDef, call: ast.Call) -> list[str]:
    cache = ast.unparse(call.func.value)
    assignment = next((n for n in ast.walk(function) if isinstance(n, ast.Assign) and n.value is call), None)
    if assignment is None:
        return [ast.unparse(call)]
    names = {node.id for target in assignment.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    fine = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "scaled_dot_product_attention":
            given = [k.value for k in node.keywords if k.arg == "cache"] or node.args[3:4]
            if [ast.unparse(c) for c in given] == [cache]:
                fine |= {id(argument) for argument in node.args[1:3]}
        elif isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype"):
            fine.add(id(node.value))
        elif isinstance(node, ast.If) and any(call in ast.walk(inner) for inner in node.body):
            fine |= {id(inner) for branch in node.orelse for inner in ast.walk(branch)}  # where nothing was fetched
    return [
        f"{node.id} in line {node.lineno}"
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
        and node.id in names
        and isinstance(node.ctx, ast.Load)
        and node.lineno > assignment.end_lineno
        and id(node) not in fine
    ]


def reads(function: ast.FunctionDef) -> list[str]:
    """Where it reads the arrays of something that is called a cache."""
    fine = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            fine.add(id(node.func))  # weights.keys()
            if ast.unparse(node.func) == "mx.depends" and ast.unparse(node.args[0]).startswith("cache[-1]"):
                fine |= {id(inner) for inner in ast.walk(node)}
    return [
        ast.unparse(node)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr in ("keys", "values", "state")
        and isinstance(node.ctx, ast.Load)
        and id(node) not in fine
        and "cache" in ast.unparse(node.value)
    ]


ATTENDING = [
    module
    for module in MODULES
    if re.search(r"update_and_fetch|scaled_dot_product_attention\(", (FOLDER / f"{module}.py").read_text())
]


@pytest.mark.parametrize("module", ATTENDING)
def test_every_module_with_attention_is_listed_for_what_its_code_does(module):
    found = touched(module)
    if module in UNLESS:
        assert module in SUPPORTED
    elif module in SUPPORTED:
        assert module not in EXCLUDED
        assert not found, "this family does not hold: move it to EXCLUDED"
    elif module in EXCLUDED:
        own_caches = "update_and_fetch" not in (FOLDER / f"{module}.py").read_text()
        assert found or own_caches, "attention can read its codes: move it to SUPPORTED"
    else:
        pytest.fail(f"a new family: {'EXCLUDED: ' + '; '.join(found) if found else 'SUPPORTED'}")


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(ATTENDING)))
def test_a_module_without_attention_of_its_own_leaves_what_others_fetched_alone(module):
    assert module not in SUPPORTED | set(EXCLUDED)
    assert not touched(module)


def test_no_family_is_listed_that_mlx_lm_has_not():
    listed = SUPPORTED | set(EXCLUDED) | set(UNLESS) | families.WITHOUT_ATTENTION
    assert MLX_LM_0_31 or listed <= set(MODULES)
    assert not SUPPORTED & set(EXCLUDED)
