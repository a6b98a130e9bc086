"""Loads the C kernels' libraries, which were built into `prefixcache.kernels` where there was a compiler, by ctypes."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from prefixcache.codecs.interchange import Array

log = logging.getLogger("prefixcache")

FOLDER = Path(str(files("prefixcache.kernels")))


class Library(NamedTuple):
    """A loaded library, or None and why there is none."""

    functions: ctypes.CDLL | None
    reason: str = ""


def load(name: str, sizes: Sequence[tuple[str, int]]) -> Library:
    """Load the library `name`.

    `sizes`: for each structure that both sides know, the library's function that returns its bytes, and how many those must
    be.
    """
    path = FOLDER / f"{name}.so"
    if not path.exists():
        return Library(None, "not built")
    if sys.byteorder != "little":
        return Library(None, "not for big-endian machines")
    try:
        library = ctypes.CDLL(str(path))
        built_with = [getattr(library, function)() for function, _ in sizes]
    except (OSError, AttributeError) as error:
        return Library(None, f"not loadable: {error}")
    if built_with != [size for _, size in sizes]:
        return Library(None, "built from other sources than these; install the package again")
    return Library(library)


@lru_cache
def warn_that_numpy_serves(reason: str) -> None:
    """Log, once in a process, why the codecs run without their C kernels, and what to do: else only time would show it."""
    log.warning(
        "the codecs' C kernels can't be used (%s): NumPy does their work, 10 times slower and more; install a C "
        "compiler, then %s",
        reason,
        _installing(),
    )


def _installing() -> str:
    """Return how to build the kernels of this copy. Another copy that is installed has its own, which are not used here."""
    checkout = FOLDER.parents[1]
    return f"run pip install -e {checkout}" if (checkout / "setup.py").exists() else "install the package again"


def address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
