"""Two blocks with one key, behind any parent. They differ at every eighth token of the first 128; found by reducing a
lattice.
"""

from __future__ import annotations

TWINS = (
    (0, 0, 37280, 1, 0, 81920, 0, 16, 0, 0, 768, 0, 512, 64, 0, 4),
    (8192, 0, 1, 68, 272, 256, 1024, 4096, 0, 32, 0, 0, 0, 0, 98304, 8320),
)


def twin(number: int) -> list[int]:
    return [TWINS[number][i // 8] if i < 128 and i % 8 == 0 else 50 for i in range(256)]
