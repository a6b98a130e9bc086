"""Coded rows are as docs/transform.md has them: here is a decoder that was written from that page, number by number."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_basis import INTERLEAVED, group_of, layer, of_dtype, rows_of

from prefixcache.codecs.interchange import as_float32
from prefixcache.codecs.transform.basis import LayerGroup
from prefixcache.codecs.transform.coding import Codes, GroupCoder
from prefixcache.codecs.transform.rope import Rope
from prefixcache.codecs.transform.tables import Tables, first_guess


def follows(symbol: int) -> int:
    """Bits of a magnitude that follow its symbol."""
    return 15 if symbol == 56 else 0 if symbol < 8 else (symbol - 8) // 4 + 1


def least(symbol: int) -> int:
    return 0 if symbol == 56 else symbol if symbol < 8 else (4 + (symbol - 8) % 4) << follows(symbol)


def components_of(words: list[int], classes: list[int], tables: Tables) -> list[float]:
    state, following, values = words[0] << 16 | words[1], 2, []
    for c in classes:
        slot, symbol, start = state & 4095, 0, 0
        while slot >= start + int(tables.frequencies[c, symbol]):
            start += int(tables.frequencies[c, symbol])
            symbol += 1
        state = int(tables.frequencies[c, symbol]) * (state >> 12) + slot - start
        if state < 65536:
            state, following = state << 16 | words[following], following + 1
        value = 0.0
        if symbol > 0:
            bits = 1 + follows(symbol)
            v, state = state & ((1 << bits) - 1), state >> bits
            if state < 65536:
                state, following = state << 16 | words[following], following + 1
            magnitude = least(symbol) + (v >> 1)
            value = float(tables.points[c, magnitude - 1]) if magnitude in (1, 2) else float(magnitude)
            value = -value if v & 1 else value
        values.append(value)
    assert (state, following) == (65536, len(words))
    return values


def bf16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def turned(key: np.ndarray, rotation: Rope, token: int) -> np.ndarray:
    out, pairs = key.copy(), len(rotation.frequencies)
    for i, frequency in enumerate(rotation.frequencies):
        a, b = (2 * i, 2 * i + 1) if rotation.interleaved else (i, i + pairs)
        pair = (key[a] + 1j * key[b]) * np.exp(1j * frequency * token) * rotation.scale
        out[a], out[b] = pair.real, pair.imag
    return out


def decoded(group: LayerGroup, tables: Tables, quality: float, codes: Codes, first: int) -> list[np.ndarray]:
    """Float64 rows (tokens, heads, width) of each stream; rows that are as they were are left at 0."""
    finer, words = np.float32(2.0 ** (quality - 4)), codes.words.tolist()
    components = sum(1 for spread in group.spreads if spread * finer >= 1 / 4)
    classes = [int(min(max(round(4 * float(np.log2(spread * finer))) + 20, 0), 60)) for spread in group.spreads]
    shapes = [(of.heads, width) for of in group.layers for width in (of.key_width, of.value_width)]
    streams = [np.zeros((len(codes.heads), *shape)) for shape in shapes]
    factors = [factor for pair in group.factors for factor in pair]
    raw = group.channels * (2 if group.layers[0].dtype == "float32" else 1)
    at = 0
    for row, head in enumerate(codes.heads.tolist()):
        gain, count = head >> 12, raw if head >> 12 == 15 else head & 4095
        own, at = words[at : at + count], at + count
        if gain == 15:
            continue
        shifted = [min(max(c + gain - 7, 0), 60) for c in classes[:components]]
        z = np.array(components_of(own, shifted, tables) if own else [0.0] * components)
        y = group.vectors[:, :components].astype(np.float64) @ z / finer
        channel = step = 0
        for number, (heads, width) in enumerate(shapes):
            for head_number in range(heads):
                x = y[channel : channel + width] @ np.linalg.inv(factors[number][head_number].astype(np.float64))
                for j in range(width):
                    byte = int(codes.offsets[(channel + j) // 2])
                    nibble = byte >> 4 if (channel + j) % 2 else byte & 15
                    x[j] += group.mean[channel + j] + (nibble - 8) * bf16(int(codes.offset_steps[step]))
                if number % 2 == 0:
                    x = turned(x, group.layers[number // 2].rotation, first + row)
                streams[number][row, head_number] = x
                channel, step = channel + width, step + 1
    assert at == len(words)
    return streams


@pytest.mark.parametrize("quality", [2.5, 4.0, 6.0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_decoder_written_from_the_page_gives_the_same_rows(quality, dtype):
    group = group_of([layer(0, dtype), layer(3, dtype, INTERLEAVED, heads=1)], widest=3000, narrowest=0.05)
    coder, first = GroupCoder(group, first_guess(), quality, group.layers[0].dtype), 250
    rows = rows_of(group, 12, first)
    rows[2][4] = of_dtype(np.full(rows[2].shape[1:], np.nan), dtype)
    codes = coder.encode(rows, first, skip=2)
    theirs = decoded(group, first_guess(), quality, codes, first)
    for mine, other in zip(coder.decode(codes, first), theirs, strict=True):
        values = np.delete(as_float32(mine, dtype), 4, axis=0)
        wide = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        np.testing.assert_allclose(values, np.delete(other, 4, axis=0), rtol=wide, atol=1e-3)
