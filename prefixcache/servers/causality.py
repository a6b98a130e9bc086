"""Whether a model's prompts can be hit: what is kept of a token must depend on the tokens before it alone, but for the tokens
of a medium, which may attend to each other. mlx-vlm's models don't say that, so each that is loaded is tried (decision 0051).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from prefixcache.upstream import let_pictures_attend_behind_a_hit

REFUSED = {
    "florence2": "its tokens attend to what an encoder makes of the whole prompt",
    "mllama": "its pictures are beside its tokens, in cross-attention",
    "paligemma": "each token of its prompt attends to all others",
}
TOKENS, START, END = 24, 8, 16  # of the prompt that is tried, and of the medium in it
MOVED = 0.01  # of the logits' deviation: more than rounding
OTHERWISE = 0.1  # the same, where the logits were computed in other chunks


class NotCausal(ValueError):
    """A model whose prompts can't be hit; says why."""


def media_are_whole(model: Any, placeholder: int, new_layers: Callable[[], list[Any]]) -> bool:
    """Return whether the tokens of a medium attend to each other (see `Media.whole`) in a model of mlx-vlm's, by trying it:
    a few forward passes of 24 tokens. Before that, pictures are let attend behind a hit, where mlx-vlm's model doesn't.

    `placeholder`: a token that stands for media. `new_layers` returns an empty prompt cache. Raises NotCausal where earlier
    tokens depend on later ones elsewhere, where a whole medium behind a hit comes out otherwise, for families that are known
    to be so, and where the model can't be tried.
    """
    family = str(getattr(model.config, "model_type", ""))
    check_family(family)
    try:
        let_pictures_attend_behind_a_hit(model)
        return _tried(_TriedModel(model, placeholder, new_layers))
    except NotCausal as error:
        raise NotCausal(f"{family}: {error}; its prompts can't be hit") from None
    except Exception as error:
        raise NotCausal(f"{family}: it can't be tried ({type(error).__name__}: {error})") from error


def check_family(family: str) -> None:
    """Raise NotCausal for a model_type whose prompts are known to be of no use to others."""
    if family in REFUSED:
        raise NotCausal(f"{family}: {REFUSED[family]}; its prompts can't be hit")


class _TriedModel:
    """A prompt of random tokens with one medium, given to the language model as mlx-vlm's server gives it."""

    def __init__(self, model: Any, placeholder: int, new_layers: Callable[[], list[Any]]):
        self._model, self._new_layers = model, new_layers
        self._random = np.random.default_rng(0)
        tokens = self._random.integers(1, 1000, TOKENS)
        tokens[START:END] = placeholder
        kinds = np.zeros((1, TOKENS), np.int32)
        kinds[:, START:END] = 1
        self._ids = mx.array(tokens[None])
        given = model.get_input_embeddings(self._ids, None, mask=mx.ones_like(self._ids)).to_dict()
        self._embeddings = given.pop("inputs_embeds")
        per_layer = given["per_layer_inputs"]
        self._of_tokens = {"mm_token_type_ids": mx.array(kinds), "token_type_ids": mx.array(kinds)}
        if per_layer is not None:
            self._of_tokens["per_layer_inputs"] = per_layer
        self._logits = self._computed(self._embeddings)

    def moved_by(self, place: int) -> np.ndarray:
        """Return which tokens before this place have other logits where the embedding there is another."""
        embeddings = np.array(self._embeddings.astype(mx.float32))
        size = max(float(embeddings.std()), 1e-3)
        embeddings[0, place] += 3 * size * self._random.standard_normal(embeddings.shape[-1])
        logits = self._computed(mx.array(embeddings).astype(self._embeddings.dtype))
        return self._difference(logits)[:place] > MOVED

    def moved_by_chunks(self) -> bool:
        """Return whether the logits are others where the medium is computed behind what comes before it."""
        logits = self._computed(self._embeddings, START)
        return bool((self._difference(logits) > OTHERWISE).any())

    def _difference(self, logits: np.ndarray) -> np.ndarray:
        """Return the largest difference of each token's logits, over their deviation."""
        return np.abs(logits - self._logits).max(-1) / self._logits.std()

    def _computed(self, embeddings: mx.array, *cuts: int) -> np.ndarray:
        """Return the logits (tokens, vocabulary), computed in chunks that end at these places and at the end."""
        language_model, layers = self._model.language_model, self._new_layers()
        _forget_positions(language_model)
        logits = []
        for first, last in pairwise([0, *cuts, TOKENS]):
            given = {name: array[:, first:last] for name, array in self._of_tokens.items()}
            chunk = language_model(
                self._ids[:, first:last], inputs_embeds=embeddings[:, first:last], cache=layers, **given
            )
            logits.append(np.array(chunk.logits[0].astype(mx.float32)))
        _forget_positions(language_model)
        return np.concatenate(logits)


def _forget_positions(language_model: Any) -> None:
    """Let a model of mlx-vlm's forget the positions of the prompt before, which it would take for the next one's."""
    for remembered in ("_position_ids", "_rope_deltas"):
        if hasattr(language_model, remembered):
            setattr(language_model, remembered, None)


def _tried(trial: _TriedModel) -> bool:
    moved = trial.moved_by(TOKENS - 1)
    if moved.any():
        raise NotCausal(f"token {moved.argmax()} of a prompt of {TOKENS} depends on the last one")
    moved = trial.moved_by(END - 1)
    if moved[:START].any():
        raise NotCausal("what comes before a medium depends on it")
    whole = bool(moved.any())
    if whole and trial.moved_by_chunks():
        raise NotCausal("a medium that is computed behind a hit comes out otherwise")
    return whole
