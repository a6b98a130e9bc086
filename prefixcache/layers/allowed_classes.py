"""Which classes of layer caches may be stored, and made again by the name that a file gives: those that a trusted module
defines, and those that the user allowed. How each is read and made is `adapters`'s. Decision 0005 says why.
"""

from __future__ import annotations

import importlib

from prefixcache.layers.adapters import CacheError, adapter_of, class_path

TRUSTED = ("mlx_lm.models.", "mlx_vlm.models.", "prefixcache.live.")  # where layer caches are defined

_allowed: dict[str, type] = {}


def allow(*classes: type | str) -> None:
    """Allow cache classes outside mlx-lm to be stored, and made again by name. A name is imported when first needed."""
    for cls in classes:
        path = cls if isinstance(cls, str) else class_path(cls)
        if "." not in path or "<" in path:
            raise ValueError(f"class {path!r}: only a class that can be imported by name can be allowed")
        _allowed[path] = cls if isinstance(cls, type) else _import(path)


def find_class(path: str) -> type:
    """Return the class of this path: one that was allowed, or a layer cache that a trusted module defines. CacheError
    for any other, and for one that is not there in this release of its package.

    A path may come from a forged file: what a module merely imports, or defines for other ends, is never given.
    """
    if path in _allowed:
        return _allowed[path]
    name = path.rpartition(".")[2][:60]
    if not path.startswith(TRUSTED):
        raise CacheError(f"class {path[:200]!r} is not allowed; call prefixcache.allow({name})")
    cls = _import(path)
    if class_path(cls) != path or not _is_layer_cache(cls):
        raise CacheError(f"class {path[:200]!r} is no layer cache of that module; call prefixcache.allow({name})")
    return cls


def _is_layer_cache(cls: type) -> bool:
    """Tell whether a prompt cache can hold objects of this class, with the attributes that mlx-lm uses of a layer's cache."""
    asked = hasattr(cls, "state") and hasattr(cls, "is_trimmable")
    return asked and cls.__name__ != "_BaseCache" and adapter_of(cls).can_make


def _import(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit):  # a module of mlx-lm's ends the process where what it needs is missing
        raise CacheError(f"class {path[:200]!r} can't be imported; install the release that stored it") from None
    if not isinstance(cls, type):
        raise CacheError(f"{path[:200]!r} is not a class")
    return cls
