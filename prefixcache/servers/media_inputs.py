"""A prompt's pictures as a processor prepared them: which placeholder tokens stand for each, and which part of the arrays is
its own. Servers that run mlx-vlm's models make a prompt's `Media` of it, and what the encoder is given of a rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import isqrt, prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from prefixcache.codecs.interchange import copy_out
from prefixcache.media import Media, media_digest

PLACEHOLDERS = tuple(f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index"))
GRID = "image_grid_thw"  # patches of each picture: frames, rows, columns
PLAIN = (bool, int, float, str)
OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")  # these follow from the tokens


class MediaInputs(NamedTuple):
    """The media of a prompt, and by name what the model is given beside the tokens, in as many parts as there are media; in
    no parts (`arrays` alone) where it can't be told which medium has which.
    """

    media: tuple[Media, ...]
    arrays: Mapping[str, Any]
    parts: Mapping[str, Sequence[Any]] | None

    def between(self, start: int, end: int) -> dict[str, Any]:
        """Return what the model is given beside the tokens from `start` to `end`. ValueError where that can't be told."""
        first, last = (sum(medium.end <= place for medium in self.media) for place in (start, end))
        if first == last:
            return {}
        if (first, last) == (0, len(self.media)):
            return dict(self.arrays)
        if self.parts is None:
            raise ValueError("these inputs can't be divided among the prompt's media")
        return {name: _joined(parts[first:last]) for name, parts in self.parts.items()}


def placeholders_of(config: Any) -> frozenset[int]:
    """Return the ids of a model's placeholder tokens, as its configuration names them."""
    named = (getattr(config, name, None) for name in PLACEHOLDERS)
    return frozenset(token for token in named if isinstance(token, int))


def media_inputs(tokens: Sequence[int], inputs: Mapping[str, Any], placeholders: Iterable[int]) -> MediaInputs:
    """Return the media of a prompt whose processor made `inputs` (mlx-vlm's names, None for what there is not).

    Media are told apart where every array has a row for each, or the patches that its grid says. Else each counts as all of
    them together. Raises ValueError where media and placeholders don't match, TypeError for what no processor makes.
    """
    arrays = {name: inputs[name] for name in sorted(inputs) if name not in OF_TOKENS and inputs[name] is not None}
    runs = _runs(np.asarray(tokens), placeholders)
    if bool(arrays) != bool(runs):
        raise ValueError(f"{len(runs)} runs of placeholders, and {len(arrays)} arrays for them")
    grids = arrays[GRID].tolist() if GRID in arrays else []
    divided = {name: _divided(value, len(runs), list(map(prod, grids))) for name, value in arrays.items()}
    parts = {name: part for name, part in divided.items() if part is not None}
    if len(parts) < len(arrays) or len(grids) not in (0, len(runs)):
        digest = _digest(arrays)
        return MediaInputs(tuple(Media(start, end - start, digest) for start, end in runs), arrays, None)
    media = []
    for i, (start, end) in enumerate(runs):
        digest = _digest({name: part[i] for name, part in parts.items()})
        media.append(Media(start, end - start, digest, _positions(end - start, grids[i : i + 1])))
    return MediaInputs(tuple(media), arrays, parts)


def _runs(tokens: np.ndarray, placeholders: Iterable[int]) -> list[tuple[int, int]]:
    """Return where tokens that are one placeholder begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(tokens)) + 1).tolist(), len(tokens)]
    stands = np.isin(tokens, list(placeholders))
    return [(start, end) for start, end in pairwise(edges) if end > start and stands[start]]


def _divided(value: Any, count: int, patches: list[int]) -> list[Any] | None:
    """Return an array's parts, one for each of so many media; None where it has no such parts."""
    length = -1 if getattr(value, "ndim", 1) == 0 or not hasattr(value, "__len__") else len(value)
    if length == count:
        return [value[i : i + 1] for i in range(count)]
    if patches and length == sum(patches):
        return [value[start:end] for start, end in pairwise(accumulate(patches, initial=0))]
    return None


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], (list, tuple)):
        return [item for part in parts for item in part]
    return mx.concatenate([mx.array(part) for part in parts])


def _positions(length: int, grids: list[list[int]]) -> int | None:
    """Return how far a picture moves what comes behind it (M-RoPE): by its longest side, in tokens."""
    for frames, rows, columns in grids:
        side = isqrt(frames * rows * columns // length)
        return max(frames, rows // side, columns // side)
    return None


def _digest(arrays: Mapping[str, Any]) -> bytes:
    leaves = [(f"{name}{place}", value) for name, array in arrays.items() for place, value in tree_flatten(array)]
    data = [
        copy_out(v) if isinstance(v, mx.array) else repr(v).encode() if isinstance(v, PLAIN) else v for _, v in leaves
    ]
    return media_digest("media", data, ",".join(name for name, _ in leaves))
