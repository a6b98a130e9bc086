"""What stands for keys and values that are codes, on their way through a model to the attention that reads them: see
`prefixcache.upstream.hook_attention`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from prefixcache.upstream import attention_is_hooked


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
            "mlx-lm's attention was unhooked (call prefixcache.upstream.hook_attention())"
            if not attention_is_hooked()
            else "this model works on fetched keys or values itself"
        )
        raise TypeError(
            f"{type(self._cache).__name__} keeps codes, and {use} asks for an array: {why}. "
            "Call dequantize() on it, or keep this model's caches plain"
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


for _name in "add sub mul matmul truediv pow and or xor lshift rshift mod floordiv".split():  # noqa: SIM905
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(CodesStandIn, _form, _refusing(_form))
for _name in ("neg", "abs", "invert", "bool", "float", "int", "lt", "le", "gt", "ge"):
    setattr(CodesStandIn, f"__{_name}__", _refusing(f"__{_name}__"))
