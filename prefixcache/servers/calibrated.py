"""What a server says of codec transform, once it knows its model: which basis codes its rows, or what to run for one."""

from __future__ import annotations

import shlex
from pathlib import Path

from prefixcache.cache import PrefixCache
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.codec import Calibrated, Transform
from prefixcache.settings import BASIS_DIR


def calibration_of(cache: PrefixCache, name: str, model: str, adapter: str | None = None) -> str:
    """Of the model with the identity `name`: the codec and the basis of its rows, "" where the cache has another codec than
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
    """What makes this model's basis."""
    words = ["prefixcache", "calibrate", model, *(["--adapter-path", adapter] if adapter else [])]
    if folder != BASIS_DIR.expanduser():
        words += ["--basis-dir", str(folder)]
    return shlex.join(words)
