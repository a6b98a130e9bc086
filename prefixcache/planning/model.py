"""What a model's prompt cache is, known from its config.json alone: `ModelState`. What it takes, `sizes` says.

MLX is lazy. mlx-lm's own model of the config is built and called on a few tokens, and nothing of it is evaluated: the
caches' shapes and dtypes stand in the graph, so that a model of 600B parameters takes no memory and part of a second.
"""

from __future__ import annotations

import difflib
import json
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from prefixcache.blocks.node import Window
from prefixcache.codecs import Codec, Raw
from prefixcache.codecs.interchange import FLOATS, element, name_of
from prefixcache.layers.adapters import CacheError, Layout, Leaf
from prefixcache.layers.image_layout import Plan, read
from prefixcache.layers.snapshots import State, describe_state

PROMPT = 32_768  # tokens of a long prompt, deep in which sizes are taken
_USUAL = "bfloat16"  # of a config that names no dtype
_SHORT = (8, 37)  # tokens of the calls that every model gets
_LONGER = (300, 1_111)  # and a model whose recurrent state is not the same after both
_LONGEST = (1, 300, 4_999, 65_521)  # and a model whose state grows; primes, so that a law shows
_RATIOS = 255  # tokens for which state may keep one row: those that the primes tell apart
_NO_CONTEXT = 1e12  # tokens: a config that names more, or infinitely many, has no limit
_LAYERS = 2_000  # a config of more is no model's
_FIXED = "ArraysCache"  # of recurrent layers: as large after one token as after many
_GIVE = "give a model's folder, or its config.json"


class ModelError(ValueError):
    """A config that no state can be told from; says what is wrong with it and what to do."""


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
        """An array of that shape after n tokens, not evaluated."""
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
        """Of a config.json, or of a folder that has one; any family that this mlx-lm knows. Only that file is read.

        `dtype` is that of the activations: "bfloat16", "float16" or "float32", the config's unless given. Building a model
        draws from MLX's random state. ModelError for a file that is missing or is no config, for a family that mlx-lm
        doesn't know, and for a config that its class refuses.
        """
        file = _file(path)
        try:
            return cls.of(_config(file), _name(file), dtype)
        except ModelError as error:
            raise ModelError(f"{file}: {error}") from error.__cause__

    @classmethod
    def of(cls, config: dict[str, Any], name: str | None = None, dtype: str | None = None) -> ModelState:
        """Of a config's fields; see `read`."""
        kind = _model_type(config)
        dtype = _dtype(config, dtype)
        model = _build(config, dtype)
        parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
        _stand_in(model)
        try:
            probes = _probes(model, _SHORT)
            if not _is_fixed(probes[0].layout):
                probes += _probes(model, _LONGEST)
            elif probes[0].states != probes[1].states:
                probes += _probes(model, _LONGER)
        except CacheError as error:
            raise ModelError(f"model_type={kind!r}: its prompt cache can't be kept: {error}") from error
        except (Exception, SystemExit) as error:
            raise _refusal(config, error, _classes(config)[1]) from error
        first = probes[0]
        if any(probe.layout != first.layout for probe in probes):
            raise ModelError(f"model_type={kind!r}: the layout of its prompt cache changes with the prompt's length")
        lengths = [probe.tokens for probe in probes]
        states = tuple(
            _common(lengths, [probe.states[i] for probe in probes], f"model_type={kind!r}: state {i}")
            for i in range(len(first.states))
        )
        return cls(name or kind, kind, dtype, parameters, first.layout, states, first.counted, _context(config))

    def plan(self, codec: Codec) -> Plan:
        """Which tensors the images have with this codec."""
        return Plan(self.layout, codec)

    @cached_property
    def _plain(self) -> Plan:
        return Plan(self.layout, Raw())

    @property
    def layers(self) -> list[LayerKind]:
        """The layer caches by kind, the most frequent first."""
        counts = Counter(map(_kind, self._plain.leaves))
        return [LayerKind(kind, count, window) for (kind, window), count in counts.most_common()]

    @property
    def has_snapshots(self) -> bool:
        return bool(self.states)

    @cached_property
    def grows(self) -> bool:
        """Whether the state that can't be cut grows with the prompt."""
        return any(_has_law(state) for state in self.states)

    def leaves(self, tokens: int, last: int = 1) -> list[Leaf]:
        """What `prefixcache.layers` reads of a live cache after so many tokens, the `last` of them in one call of the model.

        No leaf has rows; the state that a snapshot keeps is arrays that are not evaluated.
        """
        states, found = iter(self.states), []
        for layout, counted in zip(self._plain.leaves, self.counted, strict=True):
            held: tuple[tuple[int, int], ...] = ()
            if layout.get("streams"):
                held = held_rows(Window(*layout["window"]), tokens, last) if "window" in layout else ((0, tokens),)
            state = _at(next(states), tokens) if layout["kind"] == "snapshot" else {}
            found.append(Leaf(layout, tokens if counted else None, held, state=state))
        return found

    def snapshot(self, tokens: int = PROMPT) -> State:
        """What a snapshot after so many tokens keeps, as a store describes it; its arrays are not evaluated."""
        return self._constant or describe_state(self._plain, self.leaves(tokens))

    @cached_property
    def _constant(self) -> State | None:
        return None if self.grows else describe_state(self._plain, self.leaves(PROMPT))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def state(self) -> State:
        """The same where it doesn't grow."""
        return self.snapshot()


def held_rows(window: Window, tokens: int, last: int = 1) -> tuple[tuple[int, int], ...]:
    """The runs of tokens whose rows mlx-lm's cache of this window holds, when the `last` of `tokens` came in one call.

    After a generation `last` is 1; after a prefill it is the length of its last piece, and more is held. A chunked cache of
    mlx-lm 0.31 may hold less.
    """
    last = min(last, tokens)
    if window.chunked:
        return ((max(tokens - last - window.size, 0), tokens),)
    first = tokens - last - (window.size - 1 - window.keep) if last > 1 else tokens - window.size + window.keep
    if last == tokens or first <= window.keep:
        return ((0, tokens),)
    return ((0, window.keep), (first, tokens)) if window.keep else ((first, tokens),)


def row_bytes(leaf: Layout) -> int:
    """Of one token's row of a leaf in a live cache."""
    streams = leaf.get("streams") or ()
    return sum(heads * width * element(dtype).numpy.itemsize for _, _, heads, width, dtype, _ in streams)


def _kind(leaf: Layout) -> tuple[str, Window | None]:
    if leaf["kind"] == "snapshot":
        return "snapshot", None
    if not leaf["streams"]:
        return "none", None
    return leaf["kind"], Window(*leaf["window"]) if "window" in leaf else None


# -- the config ---------------------------------------------------------------------------------------------------------


def _file(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)):
        raise TypeError(f"path of type {type(path).__name__}: {_GIVE}")
    given = Path(path).expanduser()
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        what = (
            "the folder has no config.json" if given.is_dir() else "no such file; models of a hub must be there in full"
        )
        raise ModelError(f"{str(path)!r}: {what}; {_GIVE}")
    return file


def _name(file: Path) -> str:
    """The folder's name, of a hub's snapshot the repository's; the file's own where that is no config.json."""
    if file.name != "config.json":
        return file.stem
    folder = Path(os.path.abspath(file)).parent
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        folder = Path(folder.parent.parent.name.split("--", 2)[-1])
    return folder.name or "model"


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text("utf-8"), object_hook=_number)
    except OSError as error:
        raise ModelError(f"can't be read ({error.strerror}); {_GIVE}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not JSON ({error}); copy or download it again") from None
    if not isinstance(config, dict):
        raise ModelError(f"holds a JSON {type(config).__name__}, not an object; {_GIVE}")
    return config


def _number(value: dict[str, Any]) -> Any:
    """What transformers writes for numbers that JSON doesn't have."""
    return float(str(value["__float__"])) if value.keys() == {"__float__"} else value


def _model_type(config: dict[str, Any]) -> str:
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"model_type={kind!r}: not a family's name, so this is no model's config; {_GIVE}")
    if config.get("model_file") is not None:
        raise ModelError(
            f"model_file={config['model_file']!r}: the model is code of its own, which is not run here; "
            "remove the field if mlx-lm has such a model"
        )
    return kind


def _dtype(config: dict[str, Any], chosen: str | None) -> str:
    names = ("dtype", "torch_dtype")
    named = [place[name] for place in _places(config) for name in names if place.get(name) is not None]
    dtype = chosen if chosen is not None else named[0] if named else _USUAL
    found = str(dtype).rpartition(".")[2]  # "torch.bfloat16" as well
    if found not in FLOATS:
        raise ModelError(f"dtype={dtype!r}: no dtype of activations; choose one: {', '.join(FLOATS)}")
    return found


def _context(config: dict[str, Any]) -> int | None:
    """The longest prompt a model is made for: its positions, or those that its RoPE is scaled up to."""
    found: list[Any] = []
    for place in _places(config):
        found.append(place.get("max_position_embeddings"))
        scaling = place.get("rope_scaling")
        if isinstance(scaling, dict):
            factor, before = scaling.get("factor"), scaling.get("original_max_position_embeddings")
            if isinstance(factor, (int, float)) and isinstance(before, int):
                found.append(factor * before)
    lengths = [int(n) for n in found if isinstance(n, (int, float)) and 0 < n < _NO_CONTEXT]
    return max(lengths, default=None)


def _build(config: dict[str, Any], dtype: str) -> nn.Module:
    """mlx-lm's model of a config, its weights neither loaded nor made."""
    model_class, arguments = _classes(config)
    for place in _places(config):
        depth = place.get("num_hidden_layers")
        if isinstance(depth, (int, float)) and depth > _LAYERS:
            raise ModelError(f"num_hidden_layers={depth}: more than any model has; check the config")
    try:
        model = model_class(arguments.from_dict(deepcopy(config)))
    except (Exception, SystemExit) as error:
        raise _refusal(config, error, arguments) from error
    cast = getattr(model, "cast_predicate", lambda name: True)
    target = element(dtype).mlx

    def to_dtype(name: str, weight: mx.array) -> mx.array:
        return weight.astype(target) if cast(name) and mx.issubdtype(weight.dtype, mx.floating) else weight

    model.update(tree_map_with_path(to_dtype, model.parameters()))
    model.eval()
    return model


def _places(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config, and that of its text model where it has one of its own."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes of the config's model and of its arguments."""
    from mlx_lm.utils import _get_classes  # only when asked: it takes seconds

    kind = config["model_type"]
    try:
        return _get_classes(config)
    except SystemExit:
        raise ModelError(f"model_type={kind!r}: mlx-lm needs another package for it, which is not installed") from None
    except Exception as error:
        missing = getattr(error.__cause__, "name", None) or ""
        if isinstance(error.__cause__, ImportError) and not missing.startswith("mlx_lm.models."):
            raise ModelError(f"model_type={kind!r}: mlx-lm can't import its model: {error.__cause__}") from error
        import mlx_lm.models

        known = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
        near = difflib.get_close_matches(kind, known, 3)
        raise ModelError(
            f"model_type={kind!r}: mlx-lm {version('mlx-lm')} has no such model"
            + (f" (it has {', '.join(near)})" if near else "")
            + "; upgrade mlx-lm, or give the config of a model that it serves"
        ) from None


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool, int), "str": (str,)}


def _refusal(config: dict[str, Any], error: BaseException, arguments: Any) -> ModelError:
    """Why a model can't be made or called, with the fields that look wrong."""
    kind, wrong = config["model_type"], []
    for field in fields(arguments) if is_dataclass(arguments) else ():
        needed = field.default is MISSING and field.default_factory is MISSING
        value = config.get(field.name)
        types = _TYPES.get(field.type if isinstance(field.type, str) else getattr(field.type, "__name__", ""))
        if needed and field.name not in config:
            wrong.append(f"{field.name} is missing")
        elif types is not None and not isinstance(value, types) and (value is not None or needed):
            wrong.append(f"{field.name}={value!r}")
    for place in _places(config):
        wrong += [
            f"{name}={value!r}"
            for name, value in place.items()
            if name.startswith(("num_", "hidden_", "head_")) and type(value) is int and value <= 0
        ]
    named = f"check {', '.join(dict.fromkeys(wrong))}" if wrong else "check its fields"
    said = str(error).split("\n")[0][:200]
    if said.startswith("[eval]"):
        return ModelError(f"model_type={kind!r}: its cache depends on the weights' values, which are not read here")
    return ModelError(f"model_type={kind!r}: mlx-lm refuses the config ({type(error).__name__}: {said}); {named}")


# -- calling the model --------------------------------------------------------------------------------------------------


class _Through(nn.Module):
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


# Modules of mlx-lm's that look at values, or need a GPU, to give what no cache's shape depends on.
_STAND_INS: dict[str, Callable[[Any], nn.Module]] = {
    "mlx_lm.models.dbrx.SparseMoeBlock": lambda module: _Through(),
    "mlx_lm.models.bitlinear_layers.BitLinear": lambda module: _Linear(module.out_features),
}


def _stand_in(model: nn.Module) -> None:
    for name, module in model.named_modules():
        make = _STAND_INS.get(f"{type(module).__module__}.{type(module).__qualname__}")
        if make is not None:
            model.update_modules(tree_unflatten([(name, make(module))]))


class _Probe(NamedTuple):
    """A prompt cache after so many tokens; of its snapshots' states, `Shape`s in the place of arrays."""

    tokens: int
    layout: Layout
    states: list[dict[str, Any]]
    counted: tuple[bool, ...]


class _Done(Exception):
    """What was to be seen has been seen."""


def _probes(model: Any, lengths: Sequence[int]) -> list[_Probe]:
    """The prompt cache after prompts of these lengths. Nothing is evaluated: MLX refuses to while it traces a function."""
    from mlx_lm.models.cache import make_prompt_cache

    found: list[_Probe] = []

    def trace(*prompts: mx.array) -> None:
        for prompt in prompts:
            prompt_cache = make_prompt_cache(model)
            model(prompt, cache=prompt_cache)
            found.append(_probe(prompt.shape[1], prompt_cache))
        raise _Done

    with suppress(_Done):
        mx.compile(trace)(*[mx.zeros((1, n), mx.int32) for n in lengths])
    return found


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
        return {key: _shapes(own) for key, own in value.items()}
    return type(value)(map(_shapes, value)) if type(value) in (list, tuple) else value


# -- state that grows ---------------------------------------------------------------------------------------------------


def _is_fixed(layout: Layout) -> bool:
    plan = Plan(layout, Raw())
    return all(plan.leaves[i]["class"].endswith(f".{_FIXED}") for i in plan.snapshots)


def _common(lengths: list[int], values: list[Any], at: str) -> Any:
    """What several probes say, as one: numbers that change with the prompt's length become laws."""
    first = values[0]
    if all(type(value) is type(first) and value == first for value in values):
        return first
    shapes = [value for value in values if isinstance(value, Shape)]
    if shapes and all(isinstance(value, Shape) or value is None for value in values):
        return _shape(lengths, values, shapes, at)
    if all(type(value) is int for value in values):
        return _law(lengths, values, at)
    if isinstance(first, dict) and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _common(lengths, [value[key] for value in values], f"{at}.{key}") for key in first}
    if type(first) in (list, tuple) and all(type(v) is type(first) and len(v) == len(first) for v in values):
        return type(first)(_common(lengths, list(own), f"{at}[{i}]") for i, own in enumerate(zip(*values, strict=True)))
    raise ModelError(f"{at} changes with the prompt's length in a way that is not known here")


def _shape(lengths: list[int], values: list[Any], shapes: list[Shape], at: str) -> Shape:
    sides = []
    if len({(len(shape.sides), shape.dtype) for shape in shapes}) > 1:
        raise ModelError(f"{at}: its dtype changes with the prompt's length")
    there = [n for n, value in zip(lengths, values, strict=True) if value is not None]
    for own in zip(*(shape.sides for shape in shapes), strict=True):
        sides.append(own[0] if len(set(own)) == 1 else _law(there, list(own), at))
    shape = Shape(tuple(sides), shapes[0].dtype, len(there) < len(lengths))
    if any((shape.at(n) is None) != (value is None) for n, value in zip(lengths, values, strict=True)):
        raise ModelError(f"{at} is there after some prompts and not after others, which is not known here")
    return shape


def _law(lengths: list[int], values: Sequence[Any], at: str) -> Law:
    pairs = list(zip(lengths, values, strict=True))
    laws = [Law("n // by", 1), Law("min(n, by)", max(values))]
    laws += [Law(kind, by) for by in range(2, _RATIOS + 1) for kind in ("n // by", "n % by")]
    for law in laws:
        if all(law.at(n) == value for n, value in pairs):
            return law
    raise ModelError(f"{at}: {values} after {lengths} tokens follows no law that is known here")


def _has_law(value: Any) -> bool:
    if isinstance(value, Law):
        return True
    if isinstance(value, Shape):
        return any(isinstance(side, Law) for side in value.sides)
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(_has_law, value))


def _at(value: Any, tokens: int) -> Any:
    """State after so many tokens."""
    if isinstance(value, (Law, Shape)):
        return value.at(tokens)
    if isinstance(value, dict):
        return {key: _at(own, tokens) for key, own in value.items()}
    return type(value)(_at(own, tokens) for own in value) if type(value) in (list, tuple) else value
