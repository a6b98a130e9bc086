"""What a server learns of a model that it has loaded: the form of its prompt caches, and which basis codes its rows."""

from __future__ import annotations

import logging
import shlex
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.cache import PrefixCache
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.codec import Calibrated, Transform
from prefixcache.kernels.dialects import dialect_here
from prefixcache.keys import BLOCK
from prefixcache.layers.form import CacheForm
from prefixcache.settings import BASIS_DIR

log = logging.getLogger("prefixcache")

WARM_TOKENS = 300  # a whole block, whose rows are coded, and an incomplete one
WARM_RAM = "4GB"
SAID_SECONDS = 3.0


def form_of(
    *models: Any, max_kv_size: int | None = None, kv_bits: int | None = None, kv_group_size: int = 64
) -> CacheForm | None:
    """Return the form of the prompt caches of these models, one behind the other; None, any, where the first can't be kept.

    Each model is called with one token, and nothing of that is evaluated: an array that is yet to be computed has its shape
    and dtype. With `kv_bits` the rows of a prompt may be quantised, or not yet.
    """
    layers: list[Any] = []
    for model in models:
        prompt_cache = make_prompt_cache(model, max_kv_size)
        try:
            model(mx.array([[0]]), cache=prompt_cache)
        except Exception as error:  # it takes more than tokens: then its layers' classes must do
            log.debug("no widths of a model's layers: %s: %s", type(error).__name__, error)
            prompt_cache = make_prompt_cache(model, max_kv_size)
        layers += prompt_cache
    forms = [layers]
    if kv_bits is not None:
        forms.append(list(layers))
        maybe_quantize_kv_cache(forms[1], 0, kv_group_size, kv_bits)
    return CacheForm.of_kept(*forms)


def compile_kernels(cache: PrefixCache, model: Any, name: str) -> None:
    """Store and fetch two prompts of a loaded model, the weights of which have this name, in a cache of its own, so that
    CUDA's kernels are compiled: that takes half a minute in each process, since MLX keeps none of a library's. The second
    parts from the first within a block, so that their rows are compared. Runs on the thread that generates. Metal compiles
    them in no time.
    """
    if (dialect := dialect_here()) is None or dialect.name != "cuda":
        return
    began, tokens = time.monotonic(), [0] * WARM_TOKENS
    parting = [0] * (WARM_TOKENS - BLOCK) + [1] * BLOCK
    try:
        with PrefixCache(  # variables may name the server's fleet and its trace, which are not for this
            ram=WARM_RAM,
            ssd_dir=None,
            remote=None,
            trace=None,
            hot=0,
            codec=cache.codec,
            basis_dir=cache.settings.basis_dir,
        ) as scratch:
            for prompt in (tokens, parting):
                layers = make_prompt_cache(model)
                model(mx.array([prompt]), cache=layers)
                scratch.store(prompt, layers, model=name, write_back_from=0)
                scratch.fetch(prompt, model=name, leave=0)
    except Exception as error:  # a model that takes more than tokens: its first request compiles them
        log.debug("kernels are not compiled yet: %s: %s", type(error).__name__, error)
    if (seconds := time.monotonic() - began) > SAID_SECONDS:
        log.info("kernels are ready (%.0f s)", seconds)


def calibration_of(cache: PrefixCache, name: str, model: str, adapter: str | None = None) -> str:
    """Return codec and basis of the rows of the model with the identity `name`, "" where the cache has another codec than
    transform. Without a basis a warning says what to run: `model` and `adapter` are as the user gave them.
    """
    chosen, folder = cache.codec, cache.settings.basis_dir
    if not isinstance(chosen, Transform):
        return ""
    if Bases(folder).of_model(name) is None:
        chosen.warn_of_no_basis(name, folder, command(model, adapter, folder))
    codec = cache.codec_of(name)
    if not isinstance(codec, Calibrated):
        return f"codec {codec}"
    basis = codec.basis
    ratio = basis.fp16_bytes / basis.coded_bytes(codec.quality)
    return (
        f"codec {codec}: {basis.layers} layers transformed, {ratio:.1f} times smaller than fp16 on text it had not seen"
    )


def command(model: str, adapter: str | None, folder: Path) -> str:
    """Return what makes this model's basis."""
    words = ["prefixcache", "calibrate", model, *(["--adapter-path", adapter] if adapter else [])]
    if folder != BASIS_DIR.expanduser():
        words += ["--basis-dir", str(folder)]
    return shlex.join(words)
