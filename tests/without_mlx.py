"""Whatever imports MLX or mlx-lm fails once this is imported: `pytest -p tests.without_mlx`, which `make test-fast` runs."""

from __future__ import annotations

import importlib.abc
import sys
from types import ModuleType


class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.split(".")[0] in ("mlx", "mlx_lm", "torch"):
            raise ImportError(f"{name} is blocked")


assert "mlx" not in sys.modules
sys.meta_path.insert(0, Blocker())
