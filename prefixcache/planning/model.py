"""What a model's prompt cache is, known from its config.json alone: `ModelState`. `model_config` reads the config and builds
mlx-lm's model of it; how many bytes the state takes, `sizes` says.

MLX is lazy. The model is called on a few tokens, and nothing of it is evaluated: the caches' shapes and dtypes stand in the
graph, so a model of 600B parameters takes no memory and part of a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from prefixcache.blocks.node import Window
from prefixcache.codecs import Codec, Raw
from prefixcache.codecs.interchange import element, name_of
from prefixcache.layers.adapters import CacheError, Layout, Leaf
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.reading import read
from prefixcache.planning.model_config import (
    ModelError,
    activation_dtype,
    build_model,
    config_file,
    context_length,
    model_name,
    model_type,
    read_config,
    refusal,
)

PROMPT = 32_768  # tokens of a long prompt, deep in which sizes are taken
_SHORT = (8, 37)  # tokens of the calls that every model gets
_LONGER = (300, 1_111)  # and a model whose recurrent state is not the same after both
_LONGEST = (1, 300, 4_999, 65_521)  # and a model whose state grows; primes, so that a law shows
_RATIOS = 255  # tokens for which state may keep one row: those that the primes tell apart
_FIXED = "ArraysCache"  # of recurrent layers: as large after one token as after many


class Law(NamedTuple):
    """A number that follows from the tokens n of a prompt: "min(n, by)", "n // by" or "n % by"."""

    kind: str
    by: int

    def at(self, n: int) -> int:
        return min(n, self.by) if self.kind == "min(n, by)" else n // self.by if self.kind == "n // by" else n % self.by


class Shape(NamedTuple):
    """An array of a layer's state. `optional`: it is not there while it would have no rows."""

    sides: tuple[int | Law, ...]
    dtype: str
    optional: bool = False

    def at(self, n: int) -> mx.array | None:
        """Return an array of that shape after n tokens, not evaluated."""
        sides = tuple(side.at(n) if isinstance(side, Law) else side for side in self.sides)
        return None if self.optional and 0 in sides else mx.zeros(sides, element(self.dtype).mlx)


class LayerKind(NamedTuple):
    """How many layer caches are of a kind: "sliceable", "windowed" (with their window), "snapshot", or "none", which stay
    empty. The caches in a layer's list count by themselves.
    """

    kind: str
    caches: int
    window: Window | None = None


@dataclass(frozen=True)
class ModelState:
    """What a model's prompt cache is. Plain data: it can be pickled, and holds no array.

    `name` is the folder's, for readers; `model_type` and `dtype` are the config's. `parameters` is the number of weights,
    as if they were not quantised. `layout` is the JSON that namespaces are made of, `states` what a snapshot keeps of each
    layer cache that can't be cut, by attribute; `counted` which layer caches count their tokens. `context` is the longest
    prompt that the config says the model is made for, in tokens; None where it says nothing.
    """

    name: str
    model_type: str
    dtype: str
    parameters: int
    layout: Layout
    states: tuple[dict[str, Any], ...]
    counted: tuple[bool, ...]
    context: int | None = None

    @classmethod
    def read(cls, path: str | Path, dtype: str | None = None) -> ModelState:
        """Read the state of a config.json, or of a folder that has one; any family that this mlx-lm knows. Only that file
        is read.

        `dtype` is that of the activations: "bfloat16", "float16" or "float32", the config's unless given. Building a model
        draws from MLX's random state. ModelError for a file that is missing or is no config, for a family that mlx-lm
        doesn't know, and for a config that its class refuses.
        """
        file = config_file(path)
        try:
            return cls.of(read_config(file), model_name(file), dtype)
        except ModelError as error:
            raise ModelError(f"{file}: {error}") from error.__cause__

    @classmethod
    def of(cls, config: dict[str, Any], name: str | None = None, dtype: str | None = None) -> ModelState:
        """Return the state of a config's fields; see `read`."""
        family = model_type(config)
        dtype = activation_dtype(config, dtype)
        model = build_model(config, dtype)
        parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
        _replace_modules(model)
        try:
            probes = _probes(model, _SHORT)
            if not _is_fixed(probes[0].layout):
                probes += _probes(model, _LONGEST)
            elif probes[0].states != probes[1].states:
                probes += _probes(model, _LONGER)
        except CacheError as error:
            raise ModelError(f"model_type={family!r}: its prompt cache can't be kept: {error}") from error
        except (Exception, SystemExit) as error:
            raise refusal(config, error) from error
        first = probes[0]
        if any(probe.layout != first.layout for probe in probes):
            raise ModelError(f"model_type={family!r}: the layout of its prompt cache changes with the prompt's length")
        lengths = [probe.tokens for probe in probes]
        states = tuple(
            _generalized(lengths, [probe.states[i] for probe in probes], f"model_type={family!r}: state {i}")
            for i in range(len(first.states))
        )
        return cls(
            name or family, family, dtype, parameters, first.layout, states, first.counted, context_length(config)
        )

    def plan(self, codec: Codec) -> Plan:
        """Return which tensors the images have with this codec."""
        return Plan(self.layout, codec)

    @cached_property
    def _raw_plan(self) -> Plan:
        return Plan(self.layout, Raw())

    @property
    def layers(self) -> list[LayerKind]:
        """The layer caches by kind, the most frequent first."""
        counts = Counter(map(_kind_of, self._raw_plan.leaves))
        return [LayerKind(kind, count, window) for (kind, window), count in counts.most_common()]

    @property
    def has_snapshots(self) -> bool:
        return bool(self.states)

    @cached_property
    def grows(self) -> bool:
        """Whether the state that can't be cut grows with the prompt."""
        return any(_has_law(state) for state in self.states)

    def leaves(self, tokens: int) -> list[Leaf]:
        """Return what `prefixcache.layers` reads of a live cache after so many tokens, the last of which was generated.

        No leaf has rows; the state that a snapshot keeps is arrays that are not evaluated.
        """
        states, leaves = iter(self.states), []
        for layout, is_counted in zip(self._raw_plan.leaves, self.counted, strict=True):
            runs: tuple[tuple[int, int], ...] = ()
            if layout.get("streams"):
                runs = held_rows(Window(*layout["window"]), tokens) if "window" in layout else ((0, tokens),)
            state = _state_after(next(states), tokens) if layout["kind"] == "snapshot" else {}
            leaves.append(Leaf(layout, tokens if is_counted else None, runs, state=state))
        return leaves

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def held_rows(window: Window, tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of tokens whose rows mlx-lm's cache of this window holds, when the last of `tokens` was generated.

    A chunked cache of mlx-lm 0.31 may hold less.
    """
    if window.chunked:
        return ((max(tokens - 1 - window.size, 0), tokens),)
    first = tokens - window.size + window.keep
    if first <= window.keep:
        return ((0, tokens),)
    return ((0, window.keep), (first, tokens)) if window.keep else ((first, tokens),)


def row_bytes(leaf: Layout) -> int:
    """Return the bytes of one token's row of a leaf in a live cache."""
    streams = leaf.get("streams") or ()
    return sum(heads * width * element(dtype).numpy.itemsize for _, _, heads, width, dtype, _ in streams)


def _kind_of(leaf: Layout) -> tuple[str, Window | None]:
    if leaf["kind"] == "snapshot":
        return "snapshot", None
    if not leaf["streams"]:
        return "none", None
    return leaf["kind"], Window(*leaf["window"]) if "window" in leaf else None


# -- calling the model --------------------------------------------------------------------------------------------------


class _Identity(nn.Module):
    """In the place of a module that gives as many values a token as it takes, of the same dtype."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return x


class _Linear(nn.Module):
    """In the place of a linear layer."""

    def __init__(self, out: int):
        super().__init__()
        self._out = out

    def __call__(self, x: mx.array) -> mx.array:
        return mx.zeros((*x.shape[:-1], self._out), x.dtype)


# Modules of mlx-lm's that look at values, or need a GPU, to give what no cache's shape depends on; and what replaces them.
_REPLACEMENTS: dict[str, Callable[[Any], nn.Module]] = {
    "mlx_lm.models.dbrx.SparseMoeBlock": lambda module: _Identity(),
    "mlx_lm.models.bitlinear_layers.BitLinear": lambda module: _Linear(module.out_features),
}


def _replace_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        make = _REPLACEMENTS.get(f"{type(module).__module__}.{type(module).__qualname__}")
        if make is not None:
            model.update_modules(tree_unflatten([(name, make(module))]))


class _Probe(NamedTuple):
    """A prompt cache after so many tokens; of its snapshots' states, `Shape`s in the place of arrays."""

    tokens: int
    layout: Layout
    states: list[dict[str, Any]]
    counted: tuple[bool, ...]


class _Traced(Exception):
    """Ends a trace: all prompt caches have been read."""


def _probes(model: Any, lengths: Sequence[int]) -> list[_Probe]:
    """Return the prompt cache after prompts of these lengths. Nothing is evaluated: MLX refuses to while it traces."""
    from mlx_lm.models.cache import make_prompt_cache

    probes: list[_Probe] = []

    def trace(*prompts: mx.array) -> None:
        for prompt in prompts:
            prompt_cache = make_prompt_cache(model)
            model(prompt, cache=prompt_cache)
            probes.append(_probe(prompt.shape[1], prompt_cache))
        raise _Traced

    with suppress(_Traced):
        mx.compile(trace)(*[mx.zeros((1, n), mx.int32) for n in lengths])
    return probes


def _probe(tokens: int, prompt_cache: list[Any]) -> _Probe:
    reading = read(prompt_cache)
    states = [_shapes(leaf.state) for leaf in reading.leaves if leaf.layout["kind"] == "snapshot"]
    if not states and not any(leaf.layout.get("streams") for leaf in reading.leaves):
        raise CacheError("it stays empty")
    return _Probe(tokens, reading.layout, states, tuple(leaf.positions is not None for leaf in reading.leaves))


def _shapes(value: Any) -> Any:
    if isinstance(value, mx.array):
        return Shape(tuple(value.shape), name_of(value.dtype))
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return type(value)(map(_shapes, value)) if type(value) in (list, tuple) else value


# -- state that grows ---------------------------------------------------------------------------------------------------


def _is_fixed(layout: Layout) -> bool:
    plan = Plan(layout, Raw())
    return all(plan.leaves[i]["class"].endswith(f".{_FIXED}") for i in plan.snapshots)


def _generalized(lengths: list[int], values: list[Any], where: str) -> Any:
    """Return what several probes say, for any length: numbers that change with the prompt's length become laws."""
    first = values[0]
    if all(type(value) is type(first) and value == first for value in values):
        return first
    if all(isinstance(value, Shape) or value is None for value in values):
        return _shape(lengths, values, where)
    if all(type(value) is int for value in values):
        return _law(lengths, values, where)
    if isinstance(first, dict) and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _generalized(lengths, [value[key] for value in values], f"{where}.{key}") for key in first}
    if type(first) in (list, tuple) and all(type(v) is type(first) and len(v) == len(first) for v in values):
        columns = enumerate(zip(*values, strict=True))
        return type(first)(_generalized(lengths, list(column), f"{where}[{i}]") for i, column in columns)
    raise ModelError(f"{where} changes with the prompt's length in a way that is not known here")


def _shape(lengths: list[int], values: list[Shape | None], where: str) -> Shape:
    shapes = [value for value in values if value is not None]
    if len({(len(shape.sides), shape.dtype) for shape in shapes}) > 1:
        raise ModelError(f"{where}: its dtype changes with the prompt's length")
    present = [n for n, value in zip(lengths, values, strict=True) if value is not None]
    sides = [
        side[0] if len(set(side)) == 1 else _law(present, side, where)
        for side in zip(*(shape.sides for shape in shapes), strict=True)
    ]
    shape = Shape(tuple(sides), shapes[0].dtype, len(present) < len(lengths))
    if any((shape.at(n) is None) != (value is None) for n, value in zip(lengths, values, strict=True)):
        raise ModelError(f"{where} is there after some prompts and not after others, which is not known here")
    return shape


def _law(lengths: list[int], values: Sequence[Any], where: str) -> Law:
    pairs = list(zip(lengths, values, strict=True))
    laws = [Law("n // by", 1), Law("min(n, by)", max(values))]
    laws += [Law(kind, by) for by in range(2, _RATIOS + 1) for kind in ("n // by", "n % by")]
    for law in laws:
        if all(law.at(n) == value for n, value in pairs):
            return law
    raise ModelError(f"{where}: {values} after {lengths} tokens follows no law that is known here")


def _has_law(value: Any) -> bool:
    if isinstance(value, Law):
        return True
    if isinstance(value, Shape):
        return any(isinstance(side, Law) for side in value.sides)
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(_has_law, value))


def _state_after(value: Any, tokens: int) -> Any:
    """Return the state with its laws' numbers and arrays of its shapes."""
    if isinstance(value, (Law, Shape)):
        return value.at(tokens)
    if isinstance(value, dict):
        return {key: _state_after(item, tokens) for key, item in value.items()}
    return type(value)(_state_after(item, tokens) for item in value) if type(value) in (list, tuple) else value
