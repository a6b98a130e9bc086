"""What the codecs cost in quality: the error of rows, the attention that keys still give, the bits that it takes.

All by the real codecs. Decision 0017 has what was tried and not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.turboquant.codec import TurboQuantRows
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from tools.bench.attention import WIDTH, Array, Head, heads, kl
from tools.bench.report import Figure

LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.00950}
PAPER = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
BITS_A_VALUE = {1: 1.13, 2: 2.13, 3: 3.13, 4: 4.13}
KL_BARS = {
    3: {"log-normal": 0.055, "channels x20": 0.037, "offset 20": 0.055, "RoPE low": 0.13, "RoPE high": 0.45},
    4: {"log-normal": 0.0145, "channels x20": 0.0095, "offset 20": 0.0150, "RoPE low": 0.036, "RoPE high": 0.12},
}


# -- rows --------------------------------------------------------------------------------------------------------------


def coded(rows: np.ndarray, bits: int, levels: Levels | None = None, seed: int = 0) -> Array:
    """fp16 rows (n, width) through the codec and back, in float32."""
    codec = TurboQuantRows(rows.shape[1], "float32", bits, seed)
    planes = codec.encode(mx.array(rows.astype(np.float32)[:, None]), levels)
    return np.array(codec.decode(planes, levels))[0].astype(np.float64)


def levels_of(rows: np.ndarray) -> Levels:
    """Of keys that are coded together: here all, in a cache a block's 256."""
    return measure_levels(rows.astype(np.float32)[:, None], True)


def affine(rows: np.ndarray, bits: int) -> Array:
    """mx.quantize, groups of 64."""
    array = mx.array(rows.astype(np.float32))
    return np.array(mx.dequantize(*mx.quantize(array, 64, bits), group_size=64, bits=bits)).astype(np.float64)


def error(scale: str) -> Iterator[Figure]:
    """Relative squared error on rows of N(0,1), width 128, plain; at 1 bit with the scale of least error."""
    rows = np.random.default_rng(0).standard_normal((40_000, WIDTH))
    for bits, best in LLOYD_MAX.items():
        back, kept = coded(rows, bits), rows.astype(np.float32).astype(np.float64)
        exact = float(np.mean(((back - kept) ** 2).sum(1) / (kept**2).sum(1)))
        least = float(np.mean(1 - (back * kept).sum(1) ** 2 / ((kept**2).sum(1) * (back**2).sum(1))))
        shown = least if bits == 1 else exact
        text = f"{shown:.4g}" + (f" ({exact:.4g} at exact length)" if bits == 1 else "")
        yield Figure(
            f"squared error, {bits} bits",
            text,
            f"<= {1.015 * best:.4g}",
            f"{best:.4g} Lloyd-Max, {PAPER[bits]:g} the paper's",
            shown <= 1.015 * best,
            {"exact": exact, "least": least},
        )


def bits_a_value(scale: str) -> Iterator[Figure]:
    for bits, bar in BITS_A_VALUE.items():
        planes = TurboQuantRows(WIDTH, "float16", bits, levelled=True).encode(mx.zeros((4, 1, WIDTH), mx.float16))
        taken = sum(plane.nbytes for plane in planes) * 8 / 4 / WIDTH
        yield Figure(
            f"bits a value, {bits} bits", f"{taken:.3f}", f"<= {bar}", "4.5 mx.quantize at 4 bits", taken <= bar
        )


# -- attention ---------------------------------------------------------------------------------------------------------

Codec = Callable[[Head, int], Array]


def levelled(head: Head, bits: int) -> Array:
    return coded(head.keys, bits, levels_of(head.earlier))


def means(codec: Codec, bits: int) -> dict[str, float]:
    """The mean KL of a codec by trouble."""
    found: dict[str, list[float]] = {}
    for name, head in heads():
        found.setdefault(name, []).append(kl(head, codec(head, bits)))
    return {name: float(np.mean(each)) for name, each in found.items()}


def attention_kl(scale: str) -> Iterator[Figure]:
    for bits, bars in KL_BARS.items():
        ours = means(levelled, bits)
        plain = means(lambda head, bits: coded(head.keys, bits), bits)
        group = means(lambda head, bits: affine(head.keys, bits), 4)
        for name, bar in bars.items():
            reference = f"{plain[name]:.3g} plain, {group[name]:.3g} mx.quantize at 4 bits"
            yield Figure(
                f"attention KL, {bits} bits, {name}",
                f"{ours[name]:.4f}",
                f"<= {bar}",
                reference,
                ours[name] <= bar,
                {"levelled": ours[name], "plain": plain[name]},
            )


# -- turns -------------------------------------------------------------------------------------------------------------


def turns(scale: str) -> Iterator[Figure]:
    """Five turns of store and fetch, each storing what the one before fetched, against encoding anew each time."""
    rows = np.random.default_rng(1).standard_normal((1, 1, 512, WIDTH)).astype(np.float16)
    live, tokens = KVCache(), list(range(512))
    live.update_and_fetch(mx.array(rows), mx.array(rows))
    errors, again = [], rows[0, 0]
    anew = []
    with PrefixCache(ram="16MB", codec=TurboQuant(levelling=False)) as cache:
        for _ in range(5):
            cache.store(tokens, [live], model="bench")
            made, _ = cache.fetch(tokens, model="bench", leave=0)
            assert made is not None
            (live,) = made
            errors.append(_relative(rows[0, 0], np.array(live.keys[0, 0, :512])))
            again = coded(again, 4).astype(np.float16)
            anew.append(_relative(rows[0, 0], again))
    yield Figure(
        "squared error, 5 turns over 1",
        f"{errors[-1] / errors[0]:.3f}",
        "1",
        f"{anew[-1] / anew[0]:.2f} encoding anew each time",
        errors[-1] == errors[0],
        {"turns": errors, "anew": anew},
    )


def _relative(rows: np.ndarray, back: np.ndarray) -> float:
    x, y = rows.astype(np.float64), back.astype(np.float64)
    return float(np.mean(((x - y) ** 2).sum(1) / (x**2).sum(1)))


FIGURES = {"error": error, "depths": bits_a_value, "turns": turns, "attention": attention_kl}
