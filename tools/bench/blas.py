"""GFLOP/s of MLX's float32 products on the CPU, with the BLAS that the process has: run it with and without OpenBLAS.

    python -m tools.bench.blas
    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0 python -m tools.bench.blas

A linear layer computes `x @ W.T`. The best of many times: another process on the machine only makes them longer.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version

import mlx.core as mx

SHAPES = [(850, 384, 384), (2048, 576, 1536), (512, 2048, 2048), (8, 576, 576), (1, 576, 1536), (1, 2048, 2048)]
SECONDS = 1.0  # for each product


def gflops(rows: int, inner: int, columns: int, *, transposed: bool) -> float:
    """Of (rows, inner) times (inner, columns)."""
    x = mx.random.normal((rows, inner))
    w = mx.random.normal((columns, inner) if transposed else (inner, columns))
    mx.eval(x, w)
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        begin = time.perf_counter()
        mx.eval(x @ (w.T if transposed else w))
        best = min(best, time.perf_counter() - begin)
    return 2 * rows * inner * columns / best / 1e9


def main() -> int:
    mx.set_default_device(mx.cpu)
    print(f"MLX {version('mlx')}, {os.cpu_count()} CPUs, LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}")
    print("| rows x inner x columns | x @ W | x @ W.T |\n|---|---:|---:|")
    for shape in SHAPES:
        plain, transposed = (gflops(*shape, transposed=of) for of in (False, True))
        print(f"| {' x '.join(map(str, shape))} | {plain:.1f} | {transposed:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
