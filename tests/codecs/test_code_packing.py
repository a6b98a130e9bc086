from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import BITS

from prefixcache.codecs.packing import pack_columns, unpack_centroids, words_of
from prefixcache.codecs.turboquant.codebook import CODEBOOKS


def packed_bit_by_bit(codes: np.ndarray, bits: int) -> np.ndarray:
    n, width = codes.shape
    words = np.zeros((n, -(-width * bits // 32)), np.uint32)
    for row in range(n):
        stream = 0
        for i in range(width):
            stream |= int(codes[row, i]) << (i * bits)
        for word in range(words.shape[1]):
            words[row, word] = stream >> (32 * word) & 0xFFFFFFFF
    return words


def random_codes(n: int, width: int, bits: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, (n, width)).astype(np.uint8)


coded = given(
    n=st.integers(1, 4), width=st.integers(1, 300), bits=st.sampled_from(BITS), seed=st.integers(0, 2**32 - 1)
)


@coded
def test_packing_writes_the_little_endian_bit_stream(n: int, width: int, bits: int, seed: int) -> None:
    codes = random_codes(n, width, bits, seed)
    expected = packed_bit_by_bit(codes, bits)
    columns = pack_columns(np.ascontiguousarray(codes.T), bits)
    assert np.array_equal(np.ascontiguousarray(columns.T).view(np.uint32), expected)


@coded
def test_unpacking_reads_what_was_packed(n: int, width: int, bits: int, seed: int) -> None:
    codes = random_codes(n, width, bits, seed)
    words = packed_bit_by_bit(codes, bits)
    centroids = CODEBOOKS[bits].centroids()
    assert np.array_equal(unpack_centroids(words, width, bits, centroids), centroids[codes])


@pytest.mark.parametrize(("width", "bits", "words"), [(32, 3, 3), (128, 3, 12), (42, 3, 4), (1, 1, 1), (72, 4, 9)])
def test_rows_take_whole_words_and_no_more(width: int, bits: int, words: int) -> None:
    assert words_of(width, bits) == words
