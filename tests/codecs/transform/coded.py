"""Tables, classes and values for the tests of the entropy coder."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

from prefixcache.codecs.transform import entropy
from prefixcache.codecs.transform.tables import (
    CLASSES,
    ESCAPE,
    SYMBOLS,
    TOTAL,
    Tables,
    class_of,
    first_guess,
    fit,
)

KINDS = ("laplacian", "sparse", "flat", "huge", "strange")


def laplacian(rng: np.random.Generator, rows: int, spreads: np.ndarray) -> np.ndarray:
    """Values in steps, whose standard deviations are `spreads`."""
    return (rng.laplace(size=(rows, len(spreads))) * spreads / np.sqrt(2)).astype(np.float32)


def falling(components: int, highest: float = 60.0, lowest: float = 0.125) -> np.ndarray:
    return np.geomspace(highest, lowest, components)


def values_of(kind: str, rng: np.random.Generator, rows: int, spreads: np.ndarray) -> np.ndarray:
    """ "strange": with NaN, infinities, either zero and the smallest numbers in between; "huge": up to the largest steps."""
    values = laplacian(rng, rows, spreads)
    if kind == "sparse":
        values *= rng.random(values.shape) < 0.05
    if kind == "flat":
        values = rng.uniform(-12, 12, values.shape).astype(np.float32)
    if kind == "huge":
        values *= np.float32(10) ** rng.integers(0, 6, values.shape).astype(np.float32)
    if kind == "strange":
        odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -0.58, 0.58, 32766.58], np.float32)
        values = np.where(rng.random(values.shape) < 0.3, rng.choice(odd, values.shape), values)
    return values


@lru_cache(maxsize=4)
def tables_of(kind: str) -> Tables:
    """ "guessed", "fitted", or "odd": some symbols have no slots, in some classes not even 0, and points are anywhere."""
    rng = np.random.default_rng(7)
    if kind == "guessed":
        return first_guess()
    if kind == "fitted":
        spreads = falling(300)
        return fit([(laplacian(rng, 200, spreads), class_of(spreads))])
    weights = rng.random((CLASSES, SYMBOLS)) ** 8 * (rng.random((CLASSES, SYMBOLS)) < 0.5)
    weights[::5, 3] = 1e6  # a class with almost nothing else
    weights[::7, 0] = 0
    frequencies = np.floor(weights / weights.sum(axis=1, keepdims=True) * (TOTAL - 1)).astype(np.int64)
    frequencies[:, ESCAPE] += TOTAL - frequencies.sum(axis=1)
    return Tables(frequencies.astype(np.uint16), rng.uniform(0.01, 3, (CLASSES, 2)).astype(np.float32))


TABLES = ("guessed", "fitted", "odd")


def first_of(heads: np.ndarray) -> np.ndarray:
    """Where each row's words begin, when they stand one behind the other."""
    counts = np.where(entropy.gain_of(heads) == entropy.AS_IT_IS, 0, entropy.words_of(heads))
    return np.cumsum(counts) - counts


some_rows = {
    "kind": st.sampled_from(KINDS),
    "tables": st.sampled_from(TABLES),
    "rows": st.integers(0, 11),
    "components": st.integers(0, 70),
    "highest": st.floats(0.01, 2000),
    "seed": st.integers(0, 2**32 - 1),
}
