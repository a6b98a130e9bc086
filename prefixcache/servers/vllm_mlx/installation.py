"""vllm-mlx on a PrefixCache: `install` puts `TieredPrefixCache` where its schedulers have their `MemoryAwarePrefixCache`,
and learns from which weights each model was loaded.

Neither vllm_mlx nor mlx_lm is imported before that. `python -m prefixcache.servers.vllm_mlx` is vllm-mlx's own command
with it installed.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from prefixcache.cache import PrefixCache
from prefixcache.identity import mlx_vlm_identity, model_identity, nameless, version_of
from prefixcache.layers.form import CacheForm
from prefixcache.servers.vllm_mlx.prefix_cache import LONGEST_WAIT, TieredPrefixCache
from prefixcache.servers.vllm_mlx.upstream import in_order, with_own_arguments
from prefixcache.settings import Settings
from prefixcache.ssd import DirectoryError

__all__ = ["TieredPrefixCache", "identity_of", "install", "main", "name_model", "uninstall"]

log = logging.getLogger("prefixcache")


# -- names ----------------------------------------------------------------------------------------------------------------

NAME = "prefixcache_identity"  # the attribute of a model that says from which weights it was loaded


def name_model(model: Any, path: str | Path, adapter: str | Path | None = None) -> str:
    """Say from which files a model was loaded, and get its identity. Models that vllm-mlx loads itself after `install` are
    named by that. Raises what `model_identity` raises.
    """
    return _name(model, model_identity(path, adapter))


def identity_of(model: Any) -> str:
    """Return the identity of a model's weights; where nobody said it, a name that is good in this process only."""
    known = getattr(model, NAME, None)
    if isinstance(known, str):
        return known
    log.warning(
        "a model without identity, so what is kept of it is of no use to another process: load it with vllm-mlx after "
        "install(), or call name_model(model, path)"
    )
    return _name(model, nameless())


def _name(model: Any, name: str) -> str:
    for part in (model, getattr(model, "language_model", None)):
        try:
            setattr(part, NAME, name)
        except (AttributeError, TypeError):  # no object of a kind that takes attributes; its name is good once
            continue
    return name


def _form_of(model: Any) -> CacheForm | None:
    """Return what the prompt caches of a text model are like; None, which is any, where that can't be told."""
    try:
        return importlib.import_module("prefixcache.servers.loaded_model").form_of(model)
    except Exception as error:
        log.debug("a model's prompt caches have no form: %s: %s", type(error).__name__, error)
        return None


def _name_loaded(model: Any, path: Any, identity_of: Callable[[Any], str]) -> None:
    try:
        _name(model, identity_of(path))
    except (OSError, ValueError, TypeError) as error:
        log.warning("no identity of a model that was loaded: %s", error)


# -- installing -------------------------------------------------------------------------------------------------------------


class _Replaced(NamedTuple):
    owner: Any
    name: str
    before: Any
    after: Any


_replaced: list[_Replaced] = []
_opened: list[PrefixCache] = []


def install(cache: PrefixCache | Settings, *, salt: bytes = b"", longest_wait: float = LONGEST_WAIT) -> PrefixCache:
    """Let vllm-mlx keep its prompts in `cache` from now on: call it before a model is loaded. Returns the PrefixCache.

    Given `Settings`, one is opened, and closed by `uninstall` or at the end of the process. `salt` separates this server's
    prompts from those of others in the same directory. Raises ImportError without vllm-mlx, or when the installed one is
    older than 0.6.
    """
    uninstall()
    scheduler = importlib.import_module("vllm_mlx.scheduler")
    _check_release(scheduler)
    if isinstance(cache, Settings):
        cache = PrefixCache(cache)
        _opened.append(cache)
        atexit.register(cache.close)
    kept = cache

    def build(
        model: Any, config: Any = None, form_of: Callable[[Any], CacheForm | None] = _form_of
    ) -> TieredPrefixCache:
        name, form = identity_of(model), form_of(model)
        return TieredPrefixCache(kept, name, config, salt=salt, longest_wait=longest_wait, like=form)

    _replace(scheduler, "MemoryAwarePrefixCache", build)
    _replace(scheduler.Scheduler, "__init__", _bounding(scheduler.Scheduler.__init__))
    tokenizer = importlib.import_module("vllm_mlx.utils.tokenizer")
    loader = _naming(tokenizer.load_model_with_fallback)
    for owner in (tokenizer, sys.modules["vllm_mlx.utils"]):  # the package hands it on
        if hasattr(owner, "load_model_with_fallback"):
            _replace(owner, "load_model_with_fallback", loader)
    try:
        multimodal = importlib.import_module("vllm_mlx.mllm_batch_generator")
        mllm = importlib.import_module("vllm_mlx.models.mllm")
    except ImportError as error:
        log.info("without multimodal models: %s", error)
    else:
        prefill = importlib.import_module("prefixcache.servers.vllm_mlx.media_prefill")  # which needs mlx_lm
        pixels = importlib.import_module("vllm_mlx.vision_embedding_cache")
        generator, memory = multimodal.MLLMBatchGenerator, pixels.VisionEmbeddingCache
        _replace(multimodal, "MemoryAwarePrefixCache", functools.partial(build, form_of=lambda model: None))
        _replace(generator, "__init__", prefill.tried(_bounding(generator.__init__)))
        _replace(generator, "_run_vision_encoding", prefill.reusing(generator._run_vision_encoding))
        _replace(pixels, "compute_images_hash", in_order(pixels.compute_image_hash))
        _replace(memory, "set_pixel_cache", with_own_arguments(memory.set_pixel_cache))
        _replace(mllm.MLXMultimodalLM, "load", _naming_multimodal(mllm.MLXMultimodalLM.load))
    return cache


def _check_release(scheduler: Any) -> None:
    """Raise ImportError for a vllm-mlx that knows prompts by their tokens alone, which are the same for every picture."""
    memory_cache, gate = importlib.import_module("vllm_mlx.memory_cache"), "is_text_only_prefix_cache_request"
    if not hasattr(scheduler, "MemoryAwarePrefixCache") or not hasattr(memory_cache, gate):
        release = version_of("vllm-mlx") or "of unknown version"
        why = "before 0.6 it answers from another picture's state"
        raise ImportError(f"vllm-mlx {release}: {why}: install vllm-mlx 0.6")


def uninstall() -> None:
    """Give vllm-mlx its own cache back, for schedulers made from now on."""
    while _replaced:
        owner, name, before, after = _replaced.pop()
        if vars(owner).get(name) is after:
            setattr(owner, name, before)
    while _opened:
        cache = _opened.pop()
        atexit.unregister(cache.close)
        cache.close()


def _replace(owner: Any, name: str, after: Any) -> None:
    _replaced.append(_Replaced(owner, name, getattr(owner, name), after))
    setattr(owner, name, after)


def _bounding(init: Callable[..., None]) -> Callable[..., None]:
    """Return a scheduler's constructor, which then tells its cache of --max-kv-size: that gives layers of another class, and
    vllm-mlx doesn't tell the cache.
    """

    @functools.wraps(init)
    def bounded(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        bound = getattr(getattr(self, "config", self), "max_kv_size", None)
        for cache in (getattr(self, "memory_aware_cache", None), getattr(self, "prefix_cache", None)):
            if isinstance(cache, TieredPrefixCache) and isinstance(bound, int) and bound > 0:
                cache.model_name += f"|max_kv_size={bound}"
                cache.like = None

    return bounded


def _naming(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return vllm-mlx's loader of text models, which then says from where the model is."""

    @functools.wraps(load)
    def loaded(model_name: str, *args: Any, **options: Any) -> Any:
        model, tokenizer = load(model_name, *args, **options)
        _name_loaded(model, model_name, model_identity)
        return model, tokenizer

    return loaded


def _naming_multimodal(load: Callable[..., Any]) -> Callable[..., Any]:
    """Do the same to the loader of mlx-vlm's models. It has other code for a model than mlx-lm, so theirs never meet."""

    @functools.wraps(load)
    def loaded(self: Any) -> None:
        before = self.model
        load(self)
        if self.model is not before:
            _name_loaded(self.model, self.model_name, mlx_vlm_identity)

    return loaded


def main() -> None:
    """vllm-mlx's command, with a PrefixCache of the settings in `PREFIXCACHE_*` variables or the TOML file."""
    try:
        install(Settings())
    except (ValueError, ImportError, DirectoryError) as error:
        sys.exit(f"prefixcache: {error}")
    try:
        importlib.import_module("vllm_mlx.cli").main()
    finally:
        uninstall()
