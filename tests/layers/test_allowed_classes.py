"""Which classes a layout may name: layer caches of mlx-lm, mlx-vlm and this package, and no class beside them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import mlx_lm.models.cache as mlx_lm_cache
import mlx_vlm.models
import pytest
from mlx_lm.models.cache import CacheList, KVCache

import prefixcache
from prefixcache import CacheError, PrefixCache
from prefixcache.layers.allowed_classes import find_class

TOKENS = list(range(300))
OF_MLX_LM = {
    "KVCache",
    "ConcatenateKVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "ChunkedKVCache",
    "ArraysCache",
    "CacheList",
}
OF_MLX_VLM = {"BufferedRotatingKVCache", "PoolingCache", "SimpleKVCache", "StaticPrefixKVCache"}
OF_MLX_VLMS_MODELS = {
    "deepseek_v41.language.DeepseekV41Cache",
    "hy_v4.cache.HyV4KVCache",
    "minimax_m3_vl.language.MiniMaxM3KVCache",
    "qwen4_exp.language.QSAKVCache",
    "qwen4_exp.language.QSAQuantizedKVCache",
    "unlimited_ocr.language.RingSlidingKVCache",
}


def modules() -> Iterator[ModuleType]:
    for package in (mlx_lm.models, mlx_vlm.models, prefixcache):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("__main__"):
                try:
                    yield importlib.import_module(found.name)
                except (Exception, SystemExit):  # what it needs is not installed
                    continue


def paths() -> set[str]:
    """Every name that a module of theirs, or of ours, has for a class."""
    return {f"{m.__name__}.{name}" for m in modules() for name, value in vars(m).items() if isinstance(value, type)}


def is_found(path: str) -> bool:
    try:
        find_class(path)
    except CacheError:
        return False
    return True


def test_exactly_what_a_prompt_cache_can_hold_may_be_named(monkeypatch):
    """Whatever a module merely imports, and whatever it defines for other ends, is refused; nothing is constructed."""
    known = paths()
    assert len(known) > 1000
    found = {path for path in known if is_found(path)}
    own = {path for path in known if path.endswith(".LayerCache") and path.startswith("mlx_lm.models.deepseek_v4")}
    expected = {f"mlx_lm.models.cache.{name}" for name in OF_MLX_LM}
    assert {path for path in found if not path.startswith("mlx_vlm.")} == expected | own
    of_mlx_vlm = {path.removeprefix("mlx_vlm.models.") for path in found if path.startswith("mlx_vlm.")}
    assert of_mlx_vlm == {f"cache.{name}" for name in OF_MLX_LM | OF_MLX_VLM} | OF_MLX_VLMS_MODELS
    for path in found:
        cls = find_class(path)
        assert f"{cls.__module__}.{cls.__qualname__}" == path
        assert not issubclass(cls, nn.Module)


def test_every_cache_that_a_model_of_mlx_lms_makes_may_be_named():
    """Found without the rule that is tested: by the names that `make_cache` functions use."""
    for module in modules():
        make = getattr(getattr(module, "Model", None), "make_cache", None)
        code = [make.__code__] if hasattr(make, "__code__") else []
        while code:
            one = code.pop()
            code += [const for const in one.co_consts if isinstance(const, type(one))]
            for name in one.co_names:
                made = getattr(module, name, None)
                if isinstance(made, type) and issubclass(made, (mlx_lm_cache._BaseCache, *owns(module))):
                    assert is_found(f"{made.__module__}.{made.__qualname__}"), (module.__name__, name)


def owns(module: ModuleType) -> tuple[type, ...]:
    return tuple(v for n, v in vars(module).items() if isinstance(v, type) and n.endswith("Cache"))


@pytest.mark.parametrize(
    "path",
    [
        "prefixcache.cache.ThreadPoolExecutor",
        "prefixcache.servers.mlx_lm.http_server.ThreadingHTTPServer",
        "mlx_lm.models.llama.KVCache",
        "mlx_lm.models.cache.TokenBuffer",
        "mlx_lm.models.cache.LRUPromptCache",
        "mlx_lm.models.cache.BatchKVCache",
        "mlx_lm.models.cache.KVCache.update_and_fetch",
        "mlx_lm.models.cache.",
        "mlx_lm.models.cache._BaseCache",
        "mlx_vlm.models.cache._BaseCache",
        "mlx_vlm.models.minimax_m3_vl.language.MiniMaxM3BatchKVCache",
        "prefixcache.live.turboquant.TurboQuantKVCache",
        "mlx_lm.models.llama.nn.Linear",
        "prefixcache.__main__.app",
        "builtins.list",
        "KVCache",
        "",
        "mlx_lm.models.cache.\0",
    ],
)
def test_any_other_class_is_refused_with_its_name(path):
    with pytest.raises(CacheError, match="class"):
        find_class(path)


class NotAllowed(KVCache):  # type: ignore[misc]
    pass


class ListNotAllowed(CacheList):  # type: ignore[misc]
    pass


def filled(made: KVCache) -> KVCache:
    made.update_and_fetch(mx.zeros((1, 2, 300, 32)), mx.zeros((1, 2, 300, 32)))
    return made


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: filled(NotAllowed()), "NotAllowed"),
        (lambda: CacheList(filled(KVCache()), filled(NotAllowed())), "NotAllowed"),
        (lambda: ListNotAllowed(filled(KVCache())), "ListNotAllowed"),
    ],
)
def test_a_subclass_that_is_not_allowed_is_an_error_that_says_how_to_allow_it(make, named):
    with PrefixCache(ram="50MB", codec="raw") as cache:
        with pytest.raises(CacheError, match=rf"layer 1.*{named}.*prefixcache\.allow\({named}\)"):
            cache.store(TOKENS, [filled(KVCache()), make()], model="m")
        assert cache.stats().blocks == cache.stats().namespaces == 0
