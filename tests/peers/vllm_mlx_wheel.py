"""vllm-mlx 0.6.0's own modules, loaded from its wheel for as long as a test needs them, without its dependencies.

What they import of those at once is in this project's test environment. Where mlx-vlm is not (it needs a newer mlx-lm than
the oldest that is tested), mlx-lm's cache classes stand in for those that the multimodal scheduler asks it for.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import mlx_lm.models.cache

from tests.peers.wheels import fetch

OURS_TO_LOAD = ("vllm_mlx", "mlx_vlm")


class Wheel(NamedTuple):
    """Where it is, and the modules that tests use."""

    folder: Path
    scheduler: ModuleType
    memory_cache: ModuleType
    ssd_cache: ModuleType
    request: ModuleType
    multimodal: ModuleType
    tokenizer: ModuleType


@contextmanager
def imported() -> Iterator[Wheel]:
    """The wheel's modules. Afterwards they are out of `sys.modules` again, and what was there before is back."""
    folder = fetch("vllm-mlx==0.6.0")
    before = _taken_out()
    sys.path.insert(0, str(folder))
    try:
        if find_spec("mlx_vlm") is None:
            _stand_in_for_mlx_vlm()
        names = ("scheduler", "memory_cache", "ssd_cache", "request", "mllm_batch_generator", "utils.tokenizer")
        yield Wheel(folder, *(import_module(f"vllm_mlx.{name}") for name in names))
    finally:
        sys.path.remove(str(folder))
        _taken_out()
        sys.modules.update(before)


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in OURS_TO_LOAD]
    return {name: sys.modules.pop(name) for name in names}


def _stand_in_for_mlx_vlm() -> None:
    package, models = ModuleType("mlx_vlm"), ModuleType("mlx_vlm.models")
    package.__path__, models.__path__ = [], []
    package.models, models.cache = models, mlx_lm.models.cache
    sys.modules |= {"mlx_vlm": package, "mlx_vlm.models": models, "mlx_vlm.models.cache": mlx_lm.models.cache}
