"""A model's config.json: its file, the fields that a plan needs, and mlx-lm's model of it, whose weights are neither loaded
nor made. `model` finds out what prompt cache that model has.
"""

from __future__ import annotations

import difflib
import json
import os
import pkgutil
from copy import deepcopy
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from prefixcache.codecs.interchange import FLOATS, element

_DEFAULT_DTYPE = "bfloat16"  # of a config that names none
_MAX_CONTEXT = 1e12  # tokens: a config that names more, or infinitely many, has no limit
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_TEXT_PARTS = ("text_config", "language_config", "llm_config")  # of a model that takes images, too
_STRETCHING = ("yarn", "dynamic")  # kinds of rope scaling whose config may name the length before it
_MAX_LAYERS = 2_000  # a config of more is no model's
_GIVE = "give a model's folder, or its config.json"
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool, int), "str": (str,)}

Config = dict[str, Any]


class ModelError(ValueError):
    """A config that no state can be told from; says what is wrong with it and what to do."""


# -- the file -----------------------------------------------------------------------------------------------------------


def config_file(path: str | Path) -> Path:
    """Return the config.json that a path means: itself, or the one in this folder."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f"path of type {type(path).__name__}: {_GIVE}")
    file, missing = Path(path).expanduser(), "no such file; models of a hub must be there in full"
    if file.is_dir():
        file, missing = file / "config.json", "the folder has no config.json"
    if not file.is_file():
        raise ModelError(f"{str(path)!r}: {missing}; {_GIVE}")
    return file


def model_name(file: Path) -> str:
    """Return the folder's name, of a hub's snapshot the repository's; the file's own where that is no config.json."""
    if file.name != "config.json":
        return file.stem
    folder = Path(os.path.abspath(file)).parent
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        folder = Path(folder.parent.parent.name.split("--", 2)[-1])
    return folder.name or "model"


def read_config(file: Path) -> Config:
    """Return the fields of a config.json. ModelError for a file that is none."""
    try:
        config = json.loads(file.read_text("utf-8"), object_hook=_number)
    except OSError as error:
        raise ModelError(f"can't be read ({error.strerror}); {_GIVE}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not JSON ({error}); copy or download it again") from None
    if not isinstance(config, dict):
        raise ModelError(f"holds a JSON {type(config).__name__}, not an object; {_GIVE}")
    return config


def _number(value: Config) -> Any:
    """Return what transformers writes for numbers that JSON doesn't have."""
    return float(str(value["__float__"])) if value.keys() == {"__float__"} else value


# -- its fields ---------------------------------------------------------------------------------------------------------


def model_type(config: Config) -> str:
    """Return the model's family. ModelError where there is none, or the model is code of its own."""
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ModelError(f"model_type={family!r}: not a family's name, so this is no model's config; {_GIVE}")
    if config.get("model_file") is not None:
        raise ModelError(
            f"model_file={config['model_file']!r}: the model is code of its own, which is not run here; "
            "remove the field if mlx-lm has such a model"
        )
    return family


def activation_dtype(config: Config, chosen: str | None) -> str:
    """Return the `chosen` dtype, else the config's."""
    levels = _levels(config)
    named = [level[key] for level in levels for key in ("dtype", "torch_dtype") if level.get(key) is not None]
    dtype = chosen if chosen is not None else [*named, _DEFAULT_DTYPE][0]
    name = str(dtype).rpartition(".")[2]  # "torch.bfloat16" as well
    if name not in FLOATS:
        raise ModelError(f"dtype={dtype!r}: no dtype of activations; choose one: {', '.join(FLOATS)}")
    return name


def context_length(config: Config) -> int | None:
    """Return the longest prompt and answer together that a model is made for; None where the config doesn't say, as that of a
    recurrent model.

    YaRN and dynamic scaling stretch the length by their factor. Some configs have the length before it, others after:
    what is longer holds.
    """
    levels = _levels(config)[::-1]  # the text model's is meant
    found = ((level, level[name]) for level in levels for name in _LENGTHS if _is_length(level.get(name)))
    level, length = next(found, (levels[0], 0))
    return max(length, _stretched(length, level.get("rope_scaling") or level.get("rope_parameters"))) or None


def _stretched(length: int, scaling: Any) -> int:
    """Return the length that a scaling makes of another one or of its own; 0 where it makes none."""
    if not isinstance(scaling, dict):
        return 0
    before: Any = scaling.get("original_max_position_embeddings")
    factor = scaling.get("factor")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in (*_STRETCHING, None) or not isinstance(factor, (int, float)) or not 1 <= factor < 1e6:
        return 0
    return int((before if _is_length(before) else length) * factor)


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 < value < _MAX_CONTEXT


def _levels(config: Config) -> list[Config]:
    """Return the config, and that of its text model where it has one of its own."""
    return [config, *(config[name] for name in _TEXT_PARTS if isinstance(config.get(name), dict))]


# -- its model ----------------------------------------------------------------------------------------------------------


def build_model(config: Config, dtype: str) -> nn.Module:
    """Make mlx-lm's model of a config. Its weights are lazy arrays of this dtype that are never evaluated."""
    model_class, arguments_class = _classes(config)
    for level in _levels(config):
        depth = level.get("num_hidden_layers")
        if isinstance(depth, (int, float)) and depth > _MAX_LAYERS:
            raise ModelError(f"num_hidden_layers={depth}: more than any model has; check the config")
    try:
        model: nn.Module = model_class(arguments_class.from_dict(deepcopy(config)))
    except (Exception, SystemExit) as error:
        raise refusal(config, error) from error
    is_cast = getattr(model, "cast_predicate", lambda name: True)
    target = element(dtype).mlx

    def to_dtype(name: str, weight: mx.array) -> mx.array:
        return weight.astype(target) if is_cast(name) and mx.issubdtype(weight.dtype, mx.floating) else weight

    model.update(tree_map_with_path(to_dtype, model.parameters()))
    model.eval()
    return model


def _classes(config: Config) -> tuple[Any, Any]:
    """Return mlx-lm's classes of the config's model and of its arguments."""
    from prefixcache.upstream import classes_of  # only when asked: it takes seconds

    family = config["model_type"]
    try:
        return classes_of(config)
    except SystemExit:
        raise ModelError(
            f"model_type={family!r}: mlx-lm needs another package for it, which is not installed"
        ) from None
    except Exception as error:
        missing = getattr(error.__cause__, "name", None) or ""
        if isinstance(error.__cause__, ImportError) and not missing.startswith("mlx_lm.models."):
            raise ModelError(f"model_type={family!r}: mlx-lm can't import its model: {error.__cause__}") from error
        import mlx_lm.models

        known = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
        similar = difflib.get_close_matches(family, known, 3)
        raise ModelError(
            f"model_type={family!r}: mlx-lm {version('mlx-lm')} has no such model"
            + (f" (it has {', '.join(similar)})" if similar else "")
            + "; upgrade mlx-lm, or give the config of a model that it serves"
        ) from None


def refusal(config: Config, error: BaseException) -> ModelError:
    """Return why a model can't be made or called, with the fields that look wrong."""
    family, arguments_class = config["model_type"], _classes(config)[1]
    message = str(error).split("\n")[0][:200]
    if message.startswith("[eval]"):
        return ModelError(f"model_type={family!r}: its cache depends on the weights' values, which are not read here")
    suspects = []
    for field in fields(arguments_class) if is_dataclass(arguments_class) else ():
        is_needed = field.default is MISSING and field.default_factory is MISSING
        value = config.get(field.name)
        types = _TYPES.get(field.type if isinstance(field.type, str) else getattr(field.type, "__name__", ""))
        if is_needed and field.name not in config:
            suspects.append(f"{field.name} is missing")
        elif types is not None and not isinstance(value, types) and (value is not None or is_needed):
            suspects.append(f"{field.name}={value!r}")
    for level in _levels(config):
        for name, value in level.items():
            if name.startswith(("num_", "hidden_", "head_")) and type(value) is int and value <= 0:
                suspects.append(f"{name}={value!r}")
    check = ", ".join(dict.fromkeys(suspects)) or "its fields"
    return ModelError(
        f"model_type={family!r}: mlx-lm refuses the config ({type(error).__name__}: {message}); check {check}"
    )
