"""A prompt's pictures, sounds and videos as a processor prepared them: which placeholder tokens each has, and which part of
the arrays is its own. Servers of mlx-vlm's models make a prompt's `Media` of it, and what the encoder is given of a rest.
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

KINDS = {  # of media, and what processors make of each
    "image": ("pixel_values", "image_grid_thw", "image_position_ids"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_position_ids", "num_frames_per_video"),
    "audio": ("input_features", "input_features_mask"),
}
GRIDS = ("image_grid_thw", "video_grid_thw")  # patches of each picture or video: frames, rows, columns
FRAMES = "num_frames_per_video"
PLAIN = (bool, int, float, str)
OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")  # these follow from the tokens

# Families whose encoders see each group of a video's frames by itself, and those that take media of several kinds.
FRAMES_APART = frozenset({"gemma4", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"})
KINDS_APART = frozenset({"gemma4"})


class Placeholders(NamedTuple):
    """A model's placeholder tokens, and the kind of media that each is for. A video's groups of frames may count one by one
    with `frames_apart`, and media of several kinds with `kinds_apart`.
    """

    kinds: Mapping[int, str]
    frames_apart: bool = False
    kinds_apart: bool = False


class MediaInputs(NamedTuple):
    """The media of a prompt, and by name what the model is given beside the tokens: of all media (`arrays`), and of each one;
    `parts` is None where it can't be told which medium has which.
    """

    media: tuple[Media, ...]
    arrays: Mapping[str, Any]
    parts: Sequence[Mapping[str, Any]] | None

    def between(self, start: int, end: int) -> dict[str, Any]:
        """Return what the model is given beside the tokens from `start` to `end`. ValueError where that can't be told."""
        first, last = (sum(medium.end <= place for medium in self.media) for place in (start, end))
        if first == last:
            return {}
        if (first, last) == (0, len(self.media)):
            return dict(self.arrays)
        if self.parts is None:
            raise ValueError("these inputs can't be divided among the prompt's media")
        parts = self.parts[first:last]
        names = {name: None for part in parts for name in part}
        return {name: _joined([part[name] for part in parts if name in part]) for name in names}


def placeholders_of(config: Any) -> Placeholders:
    """Return the placeholders of a model, as its configuration names them."""
    named = ((getattr(config, f"{kind}_token_{name}", None), kind) for kind in KINDS for name in ("id", "index"))
    kinds = {token: kind for token, kind in named if isinstance(token, int)}
    family = getattr(config, "model_type", None)
    return Placeholders(kinds, family in FRAMES_APART, family in KINDS_APART)


def media_inputs(tokens: Sequence[int], inputs: Mapping[str, Any], placeholders: Placeholders) -> MediaInputs:
    """Return the media of a prompt whose processor made `inputs` (mlx-vlm's names, None for what there is not).

    Media are told apart where every array has a row for each, or the patches that its grid says; else each counts as all of
    them together. A video counts as many videos where it has placeholders for each group of frames. Raises ValueError where
    media and placeholders don't match, TypeError for what no processor makes.
    """
    arrays = {name: inputs[name] for name in sorted(inputs) if name not in OF_TOKENS and inputs[name] is not None}
    runs = _runs(np.asarray(tokens), placeholders.kinds)
    if bool(arrays) != bool(runs):
        raise ValueError(f"{len(runs)} runs of placeholders, and {len(arrays)} arrays for them")
    parts = _parts([placeholders.kinds[tokens[start]] for start, _ in runs], arrays, placeholders)
    if parts is None:
        digest = _digest(arrays)
        return MediaInputs(tuple(Media(start, end - start, digest) for start, end in runs), arrays, None)
    media = (
        Media(start, end - start, _digest(part), _positions(end - start, part))
        for (start, end), part in zip(runs, parts, strict=True)
    )
    return MediaInputs(tuple(media), arrays, parts)


def _parts(kinds: Sequence[str], arrays: Mapping[str, Any], placeholders: Placeholders) -> list[dict[str, Any]] | None:
    """Return what each of the media has of the arrays, by the kinds of the media; None where that can't be told."""
    of_kind = {kind: {name: arrays[name] for name in KINDS[kind] if name in arrays} for kind in set(kinds)}
    if len(of_kind) == 1:
        of_kind = {kinds[0]: dict(arrays)}
    elif not placeholders.kinds_apart or sum(map(len, of_kind.values())) < len(arrays):
        return None
    divided = {}
    for kind, kind_arrays in of_kind.items():
        parts = _divided(kind_arrays, kinds.count(kind))
        if parts is None and placeholders.frames_apart:
            parts = _divided(_by_frames(kind_arrays), kinds.count(kind))
        if parts is None:
            return None
        divided[kind] = iter(parts)
    return [next(divided[kind]) for kind in kinds]


def _runs(tokens: np.ndarray, placeholders: Iterable[int]) -> list[tuple[int, int]]:
    """Return where tokens that are one placeholder begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(tokens)) + 1).tolist(), len(tokens)]
    is_placeholder = np.isin(tokens, list(placeholders))
    return [(start, end) for start, end in pairwise(edges) if end > start and is_placeholder[start]]


def _divided(arrays: Mapping[str, Any], count: int) -> list[dict[str, Any]] | None:
    """Return the parts of the arrays of so many media, which have a row for each, or the patches that a grid says."""
    grids = _grids(arrays)
    edges = [*accumulate(map(prod, grids), initial=0)]
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in arrays.items():
        length = -1 if getattr(value, "ndim", 1) == 0 or not hasattr(value, "__len__") else len(value)
        if length == count:
            rows = [value[i : i + 1] for i in range(count)]
        elif len(grids) == count and length == edges[-1]:
            rows = [value[start:end] for start, end in pairwise(edges)]
        else:
            return None
        for part, row in zip(parts, rows, strict=True):
            part[name] = row
    return parts


def _by_frames(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of videos as those of more videos, one of each group of frames."""
    by_frames = dict(arrays)
    if grids := _grids(arrays):
        groups = mx.array([[1, *sides] for frames, *sides in grids for _ in range(frames)])
        by_frames |= {name: groups for name in GRIDS if name in arrays}
    elif FRAMES in arrays:
        of_video = [name for name in KINDS["video"] if name in arrays and name != FRAMES]
        by_frames |= {name: [frame[None] for video in arrays[name] for frame in video] for name in of_video}
        by_frames[FRAMES] = [1] * sum(arrays[FRAMES])
    return by_frames


def _grids(arrays: Mapping[str, Any]) -> list[list[int]]:
    return next((arrays[name].tolist() for name in GRIDS if name in arrays), [])


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], (list, tuple)):
        return [item for part in parts for item in part]
    return mx.concatenate([mx.array(part) for part in parts])


def _positions(length: int, part: Mapping[str, Any]) -> int | None:
    """Return how far a picture moves what comes behind it (M-RoPE): by its longest side, in tokens."""
    for frames, rows, columns in _grids(part):
        side = isqrt(frames * rows * columns // length)
        return max(frames, rows // side, columns // side)
    return None


def _digest(arrays: Mapping[str, Any]) -> bytes:
    rows = {name: value[0][None] if _is_row(value) else value for name, value in arrays.items()}
    leaves = [(f"{name}{place}", value) for name, array in rows.items() for place, value in tree_flatten(array)]
    data = [
        copy_out(v) if isinstance(v, mx.array) else repr(v).encode() if isinstance(v, PLAIN) else v for _, v in leaves
    ]
    return media_digest("media", data, ",".join(name for name, _ in leaves))


def _is_row(value: Any) -> bool:
    """Return whether this is one medium's row in a list, which processors make where media have several sizes."""
    return isinstance(value, (list, tuple)) and len(value) == 1 and hasattr(value[0], "ndim")
