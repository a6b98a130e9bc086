"""A tiny hybrid model, trained for some minutes, whose recurrent state means something: `python -m tools.tiny_hybrid FOLDER`.

Four layers of Qwen 3.5's classes in mlx-lm, two heads of a gated delta net of 128 x 128 in three of them, attention in the
last; its tokens are made of this repository's texts, most of which it learns to go on with. The folder is mlx-lm's, so

    prefixcache evaluate FOLDER --float32
    python -m tools.snapshot_quality FOLDER

measure on it. Training computes the gated delta rule in chunks, as matrix products: the state is the same.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten

ROOT = Path(__file__).parents[1]
HELD_BACK = 12  # of so many files the last is not learnt
VOCABULARY = 1024
CHUNK, BLOCK = 64, 16  # tokens that the delta rule takes at once
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rope_parameters": {"type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.5},
}


def texts(*, held_back: bool) -> list[str]:
    """Return the repository's Python files and pages: those that are learnt, or the others."""
    files = sorted(path for suffix in ("py", "md") for path in ROOT.glob(f"[!.]*/**/*.{suffix}"))
    chosen = [path for i, path in enumerate(files) if (i % HELD_BACK == HELD_BACK - 1) is held_back]
    return [path.read_text() for path in chosen]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts(held_back=False), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def gated_delta_in_chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    decay_rate: mx.array,
    dt_bias: mx.array,
    *_: Any,
    **__: Any,
) -> tuple[mx.array, None]:
    """mlx-lm's `gated_delta_update` of whole sequences: y (batch, tokens, heads, width), as matrix products.

    Within a chunk the rule is a triangular system (Yang et al., arXiv 2412.06464).
    """
    batch, tokens, heads, width = v.shape
    q, k = (mx.repeat(x, heads // x.shape[2], 2) for x in (q, k))
    log_decay = -mx.exp(decay_rate) * nn.softplus(a + dt_bias)
    chunks = tokens // CHUNK

    def split(x: mx.array) -> mx.array:  # (batch, tokens, heads, ...) -> (chunks, batch, heads, CHUNK, ...)
        x = x.reshape(batch, chunks, CHUNK, *x.shape[2:])
        return mx.moveaxis(mx.moveaxis(x, 1, 0), 3, 2)

    q, k, v, beta, log_decay = map(split, (q, k, v, mx.sigmoid(b), log_decay))
    total, beta = mx.cumsum(log_decay, axis=-1), beta[..., None]
    triangle = mx.tril(mx.ones((CHUNK, CHUNK)))
    decay = mx.exp(mx.where(triangle > 0, total[..., :, None] - total[..., None, :], -1e9))
    below = beta * decay * (k @ mx.swapaxes(k, -1, -2)) * mx.tril(triangle, -1)
    scores, kept = decay * (q @ mx.swapaxes(k, -1, -2)), mx.exp(total)[..., None]
    solved = _solve(below, mx.concatenate([beta * v, beta * kept * k], axis=-1))
    fresh, of_state = solved[..., :width], solved[..., width:]
    left = mx.exp(total[..., -1:] - total)[..., None] * k
    state, outputs = mx.zeros((batch, heads, k.shape[-1], width)), []
    for i in range(chunks):
        new = fresh[i] - of_state[i] @ state
        outputs.append(kept[i] * (q[i] @ state) + scores[i] @ new)
        state = kept[i][..., -1:, :] * state + mx.swapaxes(left[i], -1, -2) @ new
    out = mx.moveaxis(mx.stack(outputs), 0, 1)  # (batch, chunks, heads, CHUNK, width)
    return mx.swapaxes(out, 2, 3).reshape(batch, tokens, heads, width), None


def _solve(below: mx.array, right: mx.array) -> mx.array:
    """Solve (1 + below) x = right by blocks; of a block, whose `below` has no diagonal, by a product of four factors."""
    parts: list[mx.array] = []
    for at in range(0, CHUNK, BLOCK):
        rows = slice(at, at + BLOCK)
        part = right[..., rows, :]
        if at:
            part = part - below[..., rows, :at] @ mx.concatenate(parts, axis=-2)
        power = -below[..., rows, rows]
        for _ in range(int(math.log2(BLOCK))):
            part = part + power @ part
            power = power @ power
        parts.append(part)
    return mx.concatenate(parts, axis=-2)


class Convolution(nn.Module):
    """MLX's depthwise `Conv1d` as sums of products: on a CPU that is twice as quick as its gradient."""

    def __init__(self, weight: mx.array):
        super().__init__()
        self.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        taps = self.weight.shape[1]
        tokens = x.shape[1] - taps + 1
        total = x[:, :tokens] * self.weight[:, 0, 0]
        for i in range(1, taps):
            total = total + x[:, i : i + tokens] * self.weight[:, i, 0]
        return total


def make_model() -> nn.Module:
    from mlx_lm.models import qwen3_5

    model = qwen3_5.TextModel(qwen3_5.TextModelArgs.from_dict(CONFIG))
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn.conv1d = Convolution(layer.linear_attn.conv1d.weight)
            # Heads that forget within a few tokens, and some that keep for thousands.
            heads = CONFIG["linear_num_value_heads"]
            step = mx.exp(mx.random.uniform(math.log(0.0005), math.log(0.05), (heads,)))
            layer.linear_attn.dt_bias = mx.log(mx.expm1(step))
            layer.linear_attn.A_log = mx.log(mx.random.uniform(1, 8, (heads,)))
    return model


def train(model: nn.Module, ids: np.ndarray, *, steps: int, batch: int, length: int) -> Iterator[int]:
    """Train, and return the number of each step that is done."""
    from mlx_lm.models import qwen3_5

    qwen3_5.gated_delta_update = gated_delta_in_chunks
    rate = optimizers.join_schedules(
        [optimizers.linear_schedule(0, 2e-3, 50), optimizers.cosine_decay(2e-3, max(steps - 50, 1), 1e-4)], [50]
    )
    optimizer, rng = optimizers.AdamW(rate, betas=[0.9, 0.95], weight_decay=0.05), np.random.default_rng(1)

    def loss_of(windows: mx.array) -> mx.array:
        logits = model(windows[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, windows[:, 1:], reduction="mean")

    step_of = nn.value_and_grad(model, loss_of)
    model.train()
    began = time.monotonic()
    for step in range(steps):
        starts = rng.integers(0, len(ids) - length - 1, batch)
        loss, gradients = step_of(mx.array(np.stack([ids[at : at + length + 1] for at in starts])))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
        yield step


def save(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_hybrid", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    given = parser.parse_args()
    mx.random.seed(7)
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    ids = np.concatenate([[*tokenizer.encode(text), end] for text in texts(held_back=False)]).astype(np.int32)
    print(f"{len(ids)} tokens", flush=True)
    model = make_model()
    for step in train(model, ids, steps=given.steps, batch=given.batch, length=given.length):
        if step % 100 == 99 or step == given.steps - 1:
            save(model, tokenizer, given.folder)


if __name__ == "__main__":
    main()
