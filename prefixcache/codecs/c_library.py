"""Loads the C kernels' libraries, which were built into `prefixcache.kernels` where there was a compiler, by ctypes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from prefixcache.codecs.interchange import Array

FOLDER = Path(str(files("prefixcache.kernels")))


def load(name: str, sizes: Sequence[tuple[str, int]]) -> tuple[ctypes.CDLL | None, str]:
    """The library `name`, or None and why there is none.

    `sizes` are functions of it, and what each must return: the bytes of a structure that both sides know.
    """
    path = FOLDER / f"{name}.so"
    if not path.exists():
        return None, "not built"
    if sys.byteorder != "little":
        return None, "not for big-endian machines"
    try:
        library = ctypes.CDLL(str(path))
        found = [getattr(library, function)() for function, _ in sizes]
    except (OSError, AttributeError) as error:
        return None, f"not loadable: {error}"
    if found != [size for _, size in sizes]:
        return None, "built from other sources than these; install the package again"
    return library, ""


def address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
