"""Which models' prompts can be hit, and in which a medium's tokens attend to each other: tried on models of mlx-vlm's."""

from functools import partial
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import mlx.core as mx
import mlx_vlm
import pytest
from mlx_vlm.models import paligemma
from mlx_vlm.models.base import InputEmbeddingsFeatures
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.gemma4 import language

from prefixcache import upstream
from prefixcache.servers import causality
from prefixcache.servers.causality import NotCausal, media_are_whole
from tests.vlm import folders

PLACEHOLDER = folders.IDS["<|image_pad|>"]


@pytest.fixture(autouse=True)
def as_mlx_vlm_has_it(monkeypatch):
    """The overlay that mlx-vlm came with, whatever was patched before."""
    module = find_spec(language.__name__)
    fresh = module_from_spec(module)
    module.loader.exec_module(fresh)
    monkeypatch.setattr(language.Gemma4TextModel, upstream.OVERLAY, vars(fresh.Gemma4TextModel)[upstream.OVERLAY])


def tried(model):
    return media_are_whole(model, PLACEHOLDER, partial(make_prompt_cache, model.language_model))


@pytest.mark.parametrize("family", sorted(folders.CONFIGS))
def test_only_gemma4s_pictures_are_whole(family, tmp_path):
    model, _ = mlx_vlm.load(str(folders.save(family, tmp_path)))
    assert tried(model) == (family == "gemma4")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_what_a_model_remembers_of_the_prompt_before_does_not_count(family, tmp_path):
    model, _ = mlx_vlm.load(str(folders.save(family, tmp_path)))
    model.language_model._position_ids = mx.random.randint(0, 500, (3, 1, 999))
    model.language_model._rope_deltas = mx.array([[-70]])
    assert not tried(model)


def test_gemma4_is_refused_as_long_as_its_pictures_come_out_otherwise_behind_a_hit(tmp_path, monkeypatch):
    monkeypatch.setattr(causality, "let_pictures_attend_behind_a_hit", lambda model: None)
    model, _ = mlx_vlm.load(str(folders.save("gemma4", tmp_path)))
    with pytest.raises(NotCausal, match="gemma4: a medium that is computed behind a hit comes out otherwise"):
        tried(model)


@pytest.mark.parametrize("family", ["paligemma", "mllama", "florence2"])
def test_families_that_are_known_not_to_be_causal_are_refused_by_name(family):
    with pytest.raises(NotCausal, match=family):
        tried(SimpleNamespace(config=SimpleNamespace(model_type=family), language_model=None))


def test_a_prefix_lm_is_found_by_the_trial_too(monkeypatch):
    monkeypatch.setattr(causality, "REFUSED", {})
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "model_type": "gemma", "num_key_value_heads": 1, "vocab_size": folders.VOCABULARY}
    vision = {**sizes, "model_type": "siglip_vision_model", "patch_size": 14, "projection_dim": 32, "image_size": 28}
    config = paligemma.ModelConfig.from_dict(
        {"model_type": "paligemma", "text_config": text, "vision_config": vision, "hidden_size": 32}
    )
    with pytest.raises(NotCausal, match=r"paligemma: token \d+ of a prompt of 24 depends on the last one"):
        tried(paligemma.Model(config))


class Fake:
    """A model whose logits are its embeddings, mixed."""

    def __init__(self, mix):
        self.config = SimpleNamespace(model_type="fake")
        self.language_model = lambda ids, inputs_embeds, **given: SimpleNamespace(logits=mix(inputs_embeds))

    def get_input_embeddings(self, ids, pixels, **given):
        return InputEmbeddingsFeatures(inputs_embeds=mx.sin(ids[..., None] * mx.arange(1.0, 9.0)))


def backwards(embeddings):
    """From the medium on, each token is what comes behind it."""
    return mx.concatenate(
        [
            embeddings[:, :1],
            embeddings[:, 1 : causality.END] + embeddings[:, causality.END - 1 : causality.END],
            embeddings[:, causality.END :],
        ],
        axis=1,
    )


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (lambda embeddings: embeddings + embeddings.sum(1, keepdims=True), "depends on the last one"),
        (backwards, "what comes before a medium depends on it"),
        (lambda embeddings: 1 / 0, "can't be tried.*ZeroDivisionError"),
    ],
)
def test_what_is_wrong_is_said(mix, said):
    with pytest.raises(NotCausal, match=f"fake: .*{said}"):
        media_are_whole(Fake(mix), 5, list)
