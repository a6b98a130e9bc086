"""Where codec transform pays: small models of three kinds, calibrated and evaluated, with what a stored token takes and from
how many tokens on a basis has saved the RAM that it takes.

The fixtures are trained. The hybrid and the one with sliding windows have random weights: their rows are those of no model
that anyone uses, their layers are.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from prefixcache.calibration.texts import CORPUS
from prefixcache.cli.calibrate import making
from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.evaluate import measuring
from prefixcache.cli.evaluate.texts import EvaluationSize, default_text
from tools.bench import report
from tools.bench.report import Beside, Figure

FIXTURES = report.ROOT / "tests" / "fixtures"
TRAINED = ("tiny-llama", "tiny-qwen2")
OURS, OTHER = "transform:4", "turboquant:4"


class Sizes(NamedTuple):
    """What is calibrated on (windows, their tokens, draws) and evaluated on (tokens stored, read after them, windows)."""

    models: tuple[str, ...]
    windows: int
    tokens: int
    draws: int
    prefix: int
    after: int
    places: int


EVERY = (*TRAINED, "hybrid", "windowed")
SIZES = {
    "full": Sizes(EVERY, 32, 1024, 48, 2048, 256, 6),
    "quick": Sizes(EVERY, 8, 512, 12, 1024, 64, 2),
    "tiny": Sizes(("hybrid",), 4, 96, 3, 300, 8, 1),
}
COMMON = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 3072,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
RANDOM: dict[str, dict[str, Any]] = {
    "hybrid": COMMON
    | {  # three recurrent layers to one of attention
        "model_type": "qwen3_next",
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "moe_intermediate_size": 0,
        "mlp_only_layers": list(range(12)),
        "partial_rotary_factor": 0.25,
    },
    "windowed": COMMON | {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6},
}


def models(scale: str) -> Iterator[Figure]:
    """What a token takes by either codec, all of it counted, and when the basis has paid for itself."""
    sizes = SIZES[scale]
    for name in sizes.models:
        with report.scratch() as folder:
            yield _figure(name, sizes, _model(name, folder / "model"), folder / "bases")


def _figure(name: str, sizes: Sizes, model: Path, bases: Path) -> Figure:
    bases.mkdir()
    texts = None if sizes.prefix > 300 else [CORPUS / "languages" / "english_dialogue.txt"]
    asked = Calibration(str(model), None, texts, sizes.windows, sizes.tokens, sizes.draws, float32=True)
    made = making.make(asked, bases)
    job = EvaluationSize(sizes.prefix, sizes.after, sizes.places, needles=0)
    subject = measuring.load(str(model), float32=True)
    found = measuring.measure(subject, [OTHER, OURS], default_text(), job, basis_dir=bases)
    other, ours = found["codecs"]
    fp16 = 2 * ours["values_per_token"]
    saved = other["stored_bytes_per_token"] - ours["stored_bytes_per_token"]
    inside = made.basis.layers
    said = {
        codec["codec"]: f"{codec['stored_bytes_per_token']:,.0f} B"
        + (f", KL {codec['kl_mean']:.4f}" if name in TRAINED else "")
        for codec in (ours, other)
    }
    return Figure(
        f"{name}, {inside} of {inside + len(made.left_out)} layers transformed: a token of {sizes.prefix:,} stored",
        f"{said[OURS]}; the basis, {made.basis.nbytes / 1e6:.1f} MB, is saved by {math.ceil(made.basis.nbytes / saved):,} "
        "tokens",
        "",
        "",
        None,
        {"left_out": made.left_out, "basis": made.basis.nbytes, "codecs": found["codecs"]},
        (
            Beside(OTHER, said[OTHER], f"{other['stored_bytes_per_token'] / ours['stored_bytes_per_token']:.1f} x"),
            Beside("every layer's rows in fp16", f"{fp16:,} B", f"{fp16 / ours['stored_bytes_per_token']:.1f} x"),
        ),
    )


def _model(name: str, folder: Path) -> Path:
    """The folder of a fixture, or of a model with random weights and a fixture's tokenizer, which is made."""
    if name in TRAINED:
        return FIXTURES / name
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / TRAINED[0] / file, folder)
    config = RANDOM[name]
    (folder / "config.json").write_text(json.dumps(config))
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    made = family.Model(family.ModelArgs.from_dict(config))
    made.set_dtype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(made.parameters())), {"format": "mlx"})
    return folder


FIGURES = {"transform-models": models}
