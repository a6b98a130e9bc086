"""The GPU kernels of the entropy coder, their very text run on the host: the same heads, words and values as NumPy's."""

import host_gpu
import mlx.core as mx
import numpy as np
import pytest
from prefixcache.kernels import transform_entropy
from prefixcache.kernels.dialects import DIALECTS

from prefixcache.codecs.transform import entropy, gpu_entropy
from prefixcache.codecs.transform.tables import CLASSES, MOST, fit, quantised

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")

COMPONENTS = 90


@pytest.fixture(params=["metal", "cuda"])
def on_host(request, programs, monkeypatch):
    """The product's own calls, with kernels that run on the host."""
    monkeypatch.setattr(transform_entropy, "build", host_gpu.builder(programs))
    monkeypatch.setattr(gpu_entropy, "dialect_here", lambda: DIALECTS[request.param])
    transform_entropy._kernel.cache_clear()
    yield
    transform_entropy._kernel.cache_clear()


@pytest.fixture(scope="module")
def tables():
    random = np.random.default_rng(0)
    classes = np.arange(CLASSES, dtype=np.int32)
    return fit([(random.laplace(size=(400, CLASSES)) * 2.0 ** ((classes - 20) / 4) / 1.4, classes)])


@pytest.fixture(scope="module")
def classes():
    return np.sort(np.random.default_rng(1).integers(10, CLASSES, COMPONENTS).astype(np.int32))[::-1].copy()


def values_of(classes, rows, seed=0):
    """Rows as their classes spread, and awkward ones."""
    random = np.random.default_rng(seed)
    values = random.laplace(size=(rows, len(classes))) * 2.0 ** ((classes - 20) / 4) / 1.4
    values *= 2.0 ** random.uniform(-2, 2, (rows, 1))
    values[0] = 0
    values[1, 3], values[1, 5], values[1, 7] = np.nan, np.inf, -np.inf
    values[2] = MOST
    values[3] = 0.4
    values[4, -1] = -3000
    values[5] = np.where(np.arange(len(classes)) % 2, 7.58, -7.57)
    return values.astype(np.float32)


def unpacked(heads, words, first, classes, tables):
    return gpu_entropy.unpack(mx.array(heads), mx.array(words), mx.array(first.astype(np.uint32)), classes, tables)


@pytest.mark.usefixtures("on_host")
def test_rows_are_packed_and_unpacked_as_numpy_does(tables, classes):
    values = values_of(classes, 70)
    wanted = np.full(70, gpu_entropy.CODED, np.uint32)
    wanted[10], wanted[11] = gpu_entropy.SKIPPED, gpu_entropy.AS_IT_IS
    steps = quantised(values)
    heads, parts = entropy.pack(steps, classes, tables)
    heads[10], heads[11] = 0, 0xFFFF
    parts[10] = parts[11] = parts[0][:0]
    expected = entropy.decoded(steps, heads, classes, tables)
    expected[10] = 0

    found, decoded, scratch = gpu_entropy.pack(mx.array(values.T), mx.array(wanted), classes, tables)
    assert np.array_equal(np.array(found), heads)
    assert np.array_equal(np.array(decoded).T, expected)
    words = np.concatenate(parts)
    assert np.array_equal(np.array(gpu_entropy.gathered(heads, scratch)), words)

    counts = np.where(entropy.gain_of(heads) == entropy.AS_IT_IS, 0, entropy.words_of(heads))
    back, wrong = unpacked(heads, words, np.cumsum(counts) - counts, classes, tables)
    assert not np.array(wrong).any()
    assert np.array_equal(np.array(back).T, expected)


@pytest.mark.usefixtures("on_host")
def test_a_row_that_takes_too_many_words_is_kept_as_it_is(tables):
    classes = np.full(2600, 30, np.int32)
    values = np.full((3, 2600), MOST, np.float32)
    values[1] = 1
    heads, decoded, scratch = gpu_entropy.pack(
        mx.array(values.T), mx.array(np.full(3, gpu_entropy.CODED, np.uint32)), classes, tables
    )
    expected, parts = entropy.pack(quantised(values), classes, tables)
    assert expected[0] == expected[2] == 0xFFFF
    assert np.array_equal(np.array(heads), expected)
    assert np.array_equal(np.array(gpu_entropy.gathered(expected, scratch)), parts[1])
    assert not np.array(decoded)[:, [0, 2]].any()


@pytest.mark.usefixtures("on_host")
def test_words_that_no_encoder_wrote_are_told_and_nothing_else_is_read(tables, classes):
    """The host's memory ends where an array ends: a word that is read beyond it would end the program."""
    heads, parts = entropy.pack(quantised(values_of(classes, 12)[6:]), classes, tables)
    words = np.concatenate(parts)
    first = np.cumsum(entropy.words_of(heads)) - entropy.words_of(heads)
    random = np.random.default_rng(3)
    cases = [
        (heads, words[: len(words) - 1], first),
        (heads, random.integers(0, 1 << 16, len(words)).astype(np.uint16), first),
        (np.full_like(heads, 7 << 12 | 1), words, first),
        (np.full_like(heads, 7 << 12 | 4095), words, first),
        (heads, words, first + len(words)),
    ]
    for case in cases:
        _, wrong = unpacked(*case, classes, tables)
        assert np.array(wrong).any()
        assert all(gpu_entropy.reason_of(int(n)) for n in np.array(wrong) if n)
