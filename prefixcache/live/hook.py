"""How attention on codes enters a model: one function of mlx-lm asks the cache first, and is put back on request.

mlx-lm's models take what `update_and_fetch` returns straight to `mlx_lm.models.base.scaled_dot_product_attention`, which
each module has imported by its name. So the function stays the same object, and what changes is its code: it looks for
the cache's own `attend_to_codes`, and else does what it did.
"""

from __future__ import annotations

import threading
from types import CodeType, FunctionType
from typing import Any, NoReturn

from mlx_lm.models import base

AS_IT_WAS = "scaled_dot_product_attention_as_it_was"  # a name in mlx_lm.models.base while the hook is in place

_lock = threading.Lock()
_found: CodeType | None = None


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):  # type: ignore[no-untyped-def]
    """What mlx-lm's function does while the hook is in place. Its globals are `mlx_lm.models.base`'s."""
    attend = getattr(cache, "attend_to_codes", None)
    if attend is not None:
        return attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return scaled_dot_product_attention_as_it_was(  # type: ignore[name-defined]  # noqa: F821
        queries, keys, values, cache, scale, mask, sinks
    )


def install() -> None:
    """Let mlx-lm's attention ask the cache first. Making a live cache does it; again changes nothing.

    RuntimeError where another package has put something in the function's place that can't be hooked.
    """
    global _found
    with _lock:
        if _found is not None:
            return
        function = base.scaled_dot_product_attention
        if type(function) is not FunctionType or function.__closure__:
            raise RuntimeError(
                f"mlx_lm.models.base.scaled_dot_product_attention is {function!r}, put there by another package: make "
                'live caches before it does so, or make them with attend="buffer"'
            )
        _found = function.__code__
        before = FunctionType(_found, base.__dict__, AS_IT_WAS, function.__defaults__)
        setattr(base, AS_IT_WAS, before)
        function.__code__ = scaled_dot_product_attention.__code__


def uninstall() -> None:
    """Put mlx-lm's own code back. Live caches that attend to codes can't be used then, until `install`."""
    global _found
    with _lock:
        if _found is not None:
            base.scaled_dot_product_attention.__code__ = _found
            delattr(base, AS_IT_WAS)
            _found = None


def installed() -> bool:
    return _found is not None


class CodesStandIn:
    """What `update_and_fetch` returns in place of keys or values: their shape and dtype, but no array.

    The cache that made it attends to it, through the hook. Any other use raises TypeError.
    """

    def __init__(self, cache: Any, shape: tuple[int, ...], dtype: Any):
        self._cache, self.shape, self.dtype = cache, shape, dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _refuse(self, use: str) -> NoReturn:
        why = (
            "mlx-lm's attention was unhooked (call prefixcache.live.hook.install())"
            if not installed()
            else "this model works on fetched keys or values itself"
        )
        raise TypeError(
            f"{type(self._cache).__name__} keeps codes, and {use} asks for an array: {why}. "
            'Make the cache with attend="buffer", or call dequantize() on it'
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__mlx_array__":
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("[...]")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __len__(self) -> NoReturn:
        self._refuse("len()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("NumPy")


def _refusing(name: str) -> Any:
    def operator(self: CodesStandIn, *others: Any) -> NoReturn:
        self._refuse(name)

    return operator


for _name in (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "mod",
    "floordiv",
):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(CodesStandIn, _form, _refusing(_form))
for _name in ("neg", "abs", "invert", "bool", "float", "int", "lt", "le", "gt", "ge"):
    setattr(CodesStandIn, f"__{_name}__", _refusing(f"__{_name}__"))
