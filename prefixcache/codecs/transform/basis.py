"""A basis: what a calibration learned of one model, in one file that is named by its content.

For each group of layers it has the mean of a token's channels, a metric in which errors count, and the directions in which
tokens differ, widest first; and the entropy coder's tables for all of them. A file is believed only when all of it is
consistent. `calibration.design` makes bases, `coding` uses them, `bases` finds their files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import safetensors
import safetensors.numpy

from prefixcache.codecs.interchange import FLOATS, Array, borrow, on_cpu
from prefixcache.codecs.transform.layer import MOST_CHANNELS, Layer
from prefixcache.codecs.transform.rope import Rope
from prefixcache.codecs.transform.tables import Tables, class_of

FORMAT = "1"
SUFFIX = ".safetensors"
LEAST_QUALITY, MOST_QUALITY = 1.0, 6.0
QUALITIES = np.arange(LEAST_QUALITY, MOST_QUALITY + 0.5, 0.5)  # for which a basis says how long rows are
# How the step of quality 4 was found: as the one at which KL is TurboQuant's; as the nearest to it that is allowed; or by the
# metric alone, since KL didn't show where it is.
MATCHED, NEAREST, GUESSED = ANCHORS = ("matched", "nearest", "guessed")
# In steps: of a component that spreads less, 1 value in 50 at most isn't coded as 0; it is left out.
LEAST_SPREAD = 2.0**-2
LEFT_OUT_SHARE = 1e-3  # of a row's square along the vectors: what their rounding to float16 may make of it
_KEY = b"prefixcache.basis.1"
_HASH = re.compile("[0-9a-f]{32}")
_FIELDS = {"format", "model", "layers", "groups", "sinks", "metric", "texts", "measured"}
_LARGEST = 1 << 36  # bytes of a file


ALIGNED = 16  # components on a GPU are filled up to a multiple of this: products are quick then
MARGIN = 64.0  # 8,192 values of 32,767 along orthonormal vectors stay in half precision's range, divided by it
LARGEST_FACTOR = 64.0  # with which half precision will do; SmolLM2-135M-Instruct has 5 to 9


class BasisError(ValueError):
    """A file that is no basis, or not the one that was asked for. The text says why."""


class OnGpu(NamedTuple):
    """What products on a GPU take of a group, in half precision: `vectors` float16 (components, channels), and zeros behind
    them up to a multiple of 16 components. Channels are divided by `scale`, float32 (channels,), powers of two: `factors` and
    `inverses` are of such, float16 (heads, width, width), for each run of heads of one width; products with the latter are
    64 times too small.
    """

    vectors: mx.array
    mean: mx.array
    scale: mx.array
    factors: list[mx.array]
    inverses: list[mx.array]


class BasisOrigin(NamedTuple):
    """What a basis was made of: the model's identity, how many first tokens stay as they are, the metric, the texts."""

    model: str
    sinks: int
    metric: str
    texts: str


class Measured(NamedTuple):
    """How much a restored prompt changes what the model says, on text that it wasn't calibrated on: mean KL of the next
    token, in nats, at quality 4 (`kl`) and with turboquant:4 (`reference_kl`), over `tokens` tokens in `windows` windows.
    `anchor`, one of ANCHORS, is how the step of quality 4 was found.
    """

    kl: float
    reference_kl: float
    windows: int
    tokens: int
    anchor: str


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers whose channels are joined: of each its keys, RoPE undone, head by head, then its values.

    `mean` float32 (channels,). `factors`: for each layer those of keys and of values, float32 (heads, width, width), lower
    triangular: (x - mean) times them is in the metric, in steps at quality 4. `vectors` float16 (channels, components) are
    orthonormal there, `spreads` float32 (components,) the standard deviations along them, falling. `words` float32 (11,):
    the mean length of a coded row, in 16-bit words, at qualities 1, 1.5 ... 6.
    """

    layers: tuple[Layer, ...]
    mean: Array
    factors: tuple[tuple[Array, Array], ...]
    vectors: Array
    spreads: Array
    words: Array

    @property
    def channels(self) -> int:
        return len(self.mean)

    def components(self, quality: float) -> int:
        """Return how many components have a chance to be other than zero."""
        return int((self.spreads * np.float32(finer(quality)) >= LEAST_SPREAD).sum())

    def classes(self, quality: float) -> Array:
        """Return the class of each of those: int32 (components,)."""
        return class_of(self.spreads[: self.components(quality)] * np.float32(finer(quality)))

    def row_words(self, quality: float) -> float:
        """Return how many 16-bit words a row has, on average."""
        return float(np.interp(quality, QUALITIES, self.words))

    @cached_property
    def on_gpu(self) -> OnGpu:
        """Return the group in the GPU's memory. From then on the host's vectors are a view of those: they are there once."""
        components = self.vectors.shape[1]
        vectors = np.zeros((max(1, -(-components // ALIGNED)) * ALIGNED, self.channels), np.float16)
        vectors[:components] = self.vectors.T
        scales = [scale.astype(np.float32) for scale in self._scales]
        factors = [
            mx.array((forth * scale[:, :, None]).astype(np.float16))
            for forth, scale in zip(self._by_width(self.factors), scales, strict=True)
        ]
        inverses = [
            mx.array((back / scale[:, None] / MARGIN).astype(np.float16))
            for back, scale in zip(self._by_width(self.inverses), scales, strict=True)
        ]
        scale = mx.array(np.concatenate([scale.ravel() for scale in scales])[None])
        arrays = OnGpu(mx.array(vectors), mx.array(self.mean[None]), scale, factors, inverses)
        mx.eval(arrays)
        object.__setattr__(self, "vectors", borrow(arrays.vectors)[:components].T)
        return arrays

    @cached_property
    def half_precision_will_do(self) -> bool:
        """Tell whether what float16 makes of scaled factors is small beside a step. Not so where a head's metric is
        ill-conditioned.
        """
        largest = [
            np.abs(forth * scale[:, :, None]).max()
            for forth, scale in zip(self._by_width(self.factors), self._scales, strict=True)
        ]
        return bool(max(largest) <= LARGEST_FACTOR)

    @property
    def _scales(self) -> list[Array]:
        """Return a power of two about as long as each channel's column of the inverse: float64 (heads, width) of each run."""
        scales = []
        for back in self._by_width(self.inverses):
            wide = back.astype(np.float64)
            _, exponents = np.frexp(np.sqrt(np.einsum("hij,hij->hj", wide, wide)))
            scales.append(np.ldexp(1.0, exponents))
        return scales

    @staticmethod
    def _by_width(parts: tuple[tuple[Array, Array], ...]) -> list[Array]:
        """Return (heads, width, width) of layers' keys and values, neighbours of one width joined."""
        runs: list[list[Array]] = []
        for part in (part for pair in parts for part in pair):
            if runs and runs[-1][0].shape[1] == part.shape[1]:
                runs[-1].append(part)
            else:
                runs.append([part])
        return [np.concatenate(run) for run in runs]

    @cached_property
    def inverses(self) -> tuple[tuple[Array, Array], ...]:
        """Return the inverses of `factors`, float32."""
        return tuple((_inverse(keys), _inverse(values)) for keys, values in self.factors)


def finer(quality: float) -> float:
    """Return how many steps of this quality make one step of quality 4."""
    return float(2.0 ** (quality - 4.0))


class Basis:
    """The basis of one model. Immutable; `hash` is its name: 32 hex digits of its bytes."""

    def __init__(self, data: bytes):
        """Read the bytes of a file. BasisError for others than a basis."""
        self.hash = hashlib.blake2b(data, digest_size=16, key=_KEY).hexdigest()
        fields, tensors = _parsed(data)
        try:
            self.model = str(fields["model"])
            self.metric = str(fields["metric"])
            self.texts = str(fields["texts"])
            self.sinks = int(fields["sinks"])
            self.measured = _measured(json.loads(fields["measured"]))
            layers = _layers(json.loads(fields["layers"]), tensors)
            self.tables = Tables(_taken(tensors, "frequencies"), _taken(tensors, "points"))
            self.groups = tuple(
                _group(g, tuple(layers[index] for index in indices), tensors)
                for g, indices in enumerate(_group_indices(json.loads(fields["groups"])))
            )
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            raise BasisError(f"not a basis: {str(error) or type(error).__name__}") from None
        if tensors:
            raise BasisError(f"not a basis: it has a tensor {min(tensors)!r} that none has")
        placed = [layer.index for group in self.groups for layer in group.layers]
        if len(placed) != len(set(placed)) or set(placed) != layers.keys() or not 0 <= self.sinks <= 256:
            raise BasisError("not a basis: its layers are not in one group each")
        self.nbytes = sum(array.nbytes for group in self.groups for array in (group.vectors, group.mean, group.spreads))
        # Factors and their inverses; on a GPU both once more, in half precision.
        copies = 2 if on_cpu() else 3
        self.nbytes += copies * sum(part.nbytes for group in self.groups for pair in group.factors for part in pair)
        self.nbytes += self.tables.symbols.nbytes + self.tables.costs.nbytes

    @property
    def layers(self) -> int:
        """Return how many layers are transformed."""
        return len(self._places)

    def coded_bytes(self, quality: float) -> float:
        """Return what a token takes in the transformed layers, on average: heads and words."""
        return sum(2 * (1 + group.row_words(quality)) for group in self.groups)

    @property
    def fp16_bytes(self) -> int:
        """Return how many bytes a token's rows take in fp16, in the layers of the basis."""
        return sum(2 * group.channels for group in self.groups)

    def place_of(self, layer: int) -> tuple[int, Layer] | None:
        """Return the number of the group that a layer is in, and the layer as the group describes it."""
        return self._places.get(layer)

    @cached_property
    def _places(self) -> dict[int, tuple[int, Layer]]:
        return {layer.index: (g, layer) for g, group in enumerate(self.groups) for layer in group.layers}


def read(path: Path) -> Basis:
    """Return the basis in a file. BasisError for a file that is none, OSError for one that can't be read."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > _LARGEST:
            raise BasisError("larger than any basis")
        try:
            with safetensors.safe_open(path, "numpy"):  # looks at the header and the size: a file may still be copied
                pass
        except safetensors.SafetensorError as error:
            raise BasisError(f"not a basis: {error}") from None
        return Basis(file.read())


def model_of(path: Path) -> str:
    """Return the model that a file says it is of: its header is read alone, and proves nothing. BasisError, OSError."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 1 << 26:
                raise ValueError("no header")
            return str(json.loads(file.read(length))["__metadata__"]["model"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BasisError(f"{path}: not a basis ({error})") from None


def basis_bytes(
    groups: Sequence[LayerGroup], tables: Tables, origin: BasisOrigin, measured: Measured | None = None
) -> bytes:
    """Return the bytes of a basis: the same for the same."""
    layers = [layer for group in groups for layer in group.layers]
    described = [
        {
            "index": layer.index,
            "heads": layer.heads,
            "key_width": layer.key_width,
            "value_width": layer.value_width,
            "dtype": layer.dtype,
            "interleaved": layer.rotation.interleaved,
            "scale": layer.rotation.scale,
            **({"window": layer.window} if layer.window else {}),
        }
        for layer in layers
    ]
    fields = {
        "format": FORMAT,
        "model": origin.model,
        "layers": json.dumps(described),
        "sinks": str(origin.sinks),
        "metric": origin.metric,
        "groups": json.dumps([[layer.index for layer in group.layers] for group in groups]),
        "texts": origin.texts,
        "measured": json.dumps(measured and measured._asdict()),
    }
    tensors = {"frequencies": tables.frequencies, "points": tables.points}
    for g, group in enumerate(groups):
        tensors |= {f"g{g}.{name}": getattr(group, name) for name in ("mean", "vectors", "spreads", "words")}
        for layer, (keys, values) in zip(group.layers, group.factors, strict=True):
            tensors[f"l{layer.index}.frequencies"] = np.asarray(layer.rotation.frequencies, np.float64)
            tensors[f"l{layer.index}.keys"], tensors[f"l{layer.index}.values"] = keys, values
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    data: bytes = safetensors.numpy.save(whole, fields)
    return _ordered(data)


def _ordered(data: bytes) -> bytes:
    """Return the same file with the fields of its metadata in the order of their names: safetensors has them in any."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(ordered, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


# -- what is believed --------------------------------------------------------------------------------------------------


def _parsed(data: bytes) -> tuple[dict[str, str], dict[str, Array]]:
    """Return metadata and tensors of a safetensors file of this format."""
    try:
        tensors: dict[str, Array] = safetensors.numpy.load(data)
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length]).get("__metadata__")
    except Exception as error:  # of safetensors' own classes
        raise BasisError(f"not a basis: {error}") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise BasisError("not a basis: its header says other things")
    if fields["format"] != FORMAT:
        raise BasisError(f"a basis of format {fields['format'][:20]!r}: this release reads {FORMAT!r}")
    return fields, tensors


def _measured(said: Any) -> Measured | None:
    if said is None:
        return None
    measured = Measured(**said)
    divergences, counts = (measured.kl, measured.reference_kl), (measured.windows, measured.tokens)
    if not all(type(kl) is float and 0 <= kl < math.inf for kl in divergences):
        raise ValueError("what was measured is no KL")
    if not all(type(count) is int and 0 < count < 1 << 31 for count in counts) or measured.anchor not in ANCHORS:
        raise ValueError("what was measured is of no number of tokens, or anchored in no way")
    return measured


def _layers(described: Any, tensors: dict[str, Array]) -> dict[int, Layer]:
    layers = {}
    for said in described:
        index, *sizes = (said[name] for name in ("index", "heads", "key_width", "value_width"))
        if not all(type(n) is int and 0 < n <= MOST_CHANNELS for n in sizes) or type(index) is not int:
            raise ValueError(f"layer {index!r} has heads and widths {sizes!r}")
        heads, key_width, value_width = sizes
        if said["dtype"] not in FLOATS or type(said["interleaved"]) is not bool or index < 0:
            raise ValueError(f"layer {index}: {said['dtype']!r} or how it rotates is none of ours")
        scale, frequencies = float(said["scale"]), _taken(tensors, f"l{index}.frequencies")
        if frequencies.dtype != np.float64 or frequencies.ndim != 1 or 2 * len(frequencies) > key_width:
            raise ValueError(f"layer {index}: its frequencies are none")
        if not (np.isfinite(frequencies).all() and 2.0**-20 < scale < 2.0**20):
            raise ValueError(f"layer {index}: its rotation has no finite numbers")
        window = said.get("window", 0)
        if type(window) is not int or not 0 <= window < 1 << 31:
            raise ValueError(f"layer {index}: its window is of {window!r} tokens")
        rotation = Rope(frequencies, said["interleaved"], scale)
        layers[index] = Layer(index, heads, key_width, value_width, said["dtype"], rotation, window)
    return layers


def _group_indices(said: Any) -> list[list[int]]:
    lists = isinstance(said, list) and all(isinstance(group, list) for group in said)
    if not lists or not all(type(index) is int for group in said for index in group):
        raise ValueError("its groups are not lists of whole numbers")
    return list(said)


def _group(g: int, layers: tuple[Layer, ...], tensors: dict[str, Array]) -> LayerGroup:
    channels = sum(layer.channels for layer in layers)
    mean, spreads, words = (_taken(tensors, f"g{g}.{name}") for name in ("mean", "spreads", "words"))
    vectors = _taken(tensors, f"g{g}.vectors")
    components = len(spreads)
    _check_shape("mean", mean, np.float32, (channels,))
    _check_shape("spreads", spreads, np.float32, (components,))
    _check_shape("words", words, np.float32, QUALITIES.shape)
    _check_shape("vectors", vectors, np.float16, (channels, components))
    if not 0 < channels <= MOST_CHANNELS or len({layer.window for layer in layers}) > 1:
        raise ValueError(f"group {g}: its layers can't be joined")
    if (spreads <= 0).any() or (np.diff(spreads) > 0).any() or (words < 0).any() or (words > 4 * channels).any():
        raise ValueError(f"group {g}: its spreads don't fall, or its rows have no length")
    factors = []
    for layer in layers:
        pair = []
        for part, width in (("keys", layer.key_width), ("values", layer.value_width)):
            factor = _taken(tensors, f"l{layer.index}.{part}")
            _check_shape(part, factor, np.float32, (layer.heads, width, width))
            diagonal = np.diagonal(factor, axis1=1, axis2=2)
            if np.triu(factor, 1).any() or (diagonal <= 0).any():
                raise ValueError(f"layer {layer.index}: the metric of its {part} is none")
            pair.append(factor)
        factors.append((pair[0], pair[1]))
    group = LayerGroup(layers, mean, tuple(factors), vectors, spreads, words)
    for keys, values in group.inverses:
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise ValueError(f"group {g}: its metric can't be undone")
    return group


def _taken(tensors: dict[str, Array], name: str) -> Array:
    """Return a tensor, which is there no more."""
    if name not in tensors:
        raise ValueError(f"it has no tensor {name!r}")
    array = tensors.pop(name)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite")
    array.flags.writeable = False
    return array


def _check_shape(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> None:
    if (array.dtype, array.shape) != (np.dtype(dtype), shape):
        raise ValueError(f"{name} of {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}")


def _inverse(factor: Array) -> Array:
    """Invert lower triangular blocks (heads, width, width) by rows: LAPACK's threads wait for each other on small ones."""
    lower = factor.astype(np.float64)
    inverse = np.zeros_like(lower)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what isn't finite is refused
        for i in range(lower.shape[1]):
            pivot = lower[:, i, i, None]
            inverse[:, i, :i] = -np.einsum("hk,hkj->hj", lower[:, i, :i], inverse[:, :i, :i]) / pivot
            inverse[:, i, i] = 1 / pivot[:, 0]
        return inverse.astype(np.float32)


def is_hash(text: object) -> bool:
    return isinstance(text, str) and _HASH.fullmatch(text) is not None


def summary(basis: Basis) -> Mapping[str, Any]:
    return {
        "model": basis.model,
        "hash": basis.hash,
        "metric": basis.metric,
        "texts": basis.texts,
        "layers": basis.layers,
        "groups": len(basis.groups),
        "bytes": basis.nbytes,
        "measured": basis.measured and basis.measured._asdict(),
    }
