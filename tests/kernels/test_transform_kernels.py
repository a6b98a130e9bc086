"""The GPU kernels of the entropy coder, their very text run on the host and on the machine's GPU.

They give the heads, words and values that NumPy gives.
"""

import host_gpu
import mlx.core as mx
import numpy as np
import pytest

from prefixcache.codecs.transform import entropy, gpu_entropy
from prefixcache.codecs.transform.gpu_entropy import Classes
from prefixcache.codecs.transform.tables import CLASSES, fit, quantised
from prefixcache.kernels import transform_entropy

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")

COMPONENTS = 90


@pytest.fixture(params=host_gpu.places("metal", "cuda"))
def place(request, run_at):
    """Where the kernels run that the product's own calls launch."""
    run_at(request.param, (transform_entropy,), gpu_entropy)
    return request.param


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
    values[2] = 32752
    values[3] = 0.4
    values[4, -1] = -3000
    values[5] = np.where(np.arange(len(classes)) % 2, 7.58, -7.57)
    return values.astype(np.float16).astype(np.float32)


def packed(values, classes, tables, skipped=(), lengths=None, limit=1e9):
    rows, several = len(values), Classes.of([classes])
    skips = np.zeros(rows, np.uint32)
    skips[list(skipped)] = 1
    lengths = np.nan_to_num(values**2, posinf=0).sum(axis=1) if lengths is None else lengths
    return gpu_entropy.pack(
        several.padded(mx.array(values.T.astype(np.float16)))[None],
        mx.array(lengths.astype(np.float32))[None],
        mx.array(skips),
        mx.array(np.float32([limit])),
        several,
        tables,
    )


def unpacked(heads, words, first, classes, tables):
    places = mx.array(first.astype(np.uint32))[None]
    values, wrong = gpu_entropy.unpack(mx.array(heads)[None], mx.array(words), places, Classes.of([classes]), tables)
    return values[0, : len(classes)], wrong[0]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("many", [0, 1 << 15])
def test_rows_are_packed_and_unpacked_as_numpy_does(tables, classes, monkeypatch, many):
    monkeypatch.setattr(transform_entropy, "MANY_ROWS", many)
    values = values_of(classes, 70)
    lengths = (values**2).sum(axis=1)
    loud = int(np.argmax((lengths > 6e5) & (lengths < 6e6) & (np.arange(70) > 13)))
    lengths[12] += 49
    lengths[13] = 1.1 * lengths[13] + 60
    lengths[loud] += 600
    steps = quantised(values)
    heads, parts = entropy.pack(steps, classes, tables)
    kept = [1, 13]  # what isn't finite, and what the vectors don't reach
    heads[10], heads[kept] = 0, 0xFFFF
    for row in (10, *kept):
        parts[row] = parts[0][:0]
    expected = entropy.decoded(steps, heads, classes, tables)
    expected[10] = 0

    found = packed(values, classes, tables, [10], lengths, 50)
    assert np.array_equal(np.array(found.heads[0]), heads)
    assert np.array_equal(np.array(found.decoded[0, : len(classes)]).T, expected.astype(np.float16))
    fine = np.ones(70)
    fine[[*kept, 10, loud]] = 0
    exact = lengths < 6e6  # squares of longer ones round to more than the limit
    assert np.array_equal(np.array(found.fine[0])[exact], fine[exact])
    words = np.concatenate(parts)
    assert np.array_equal(np.array(gpu_entropy.gathered(found, len(words))), words)

    counts = np.where(entropy.gain_of(heads) == entropy.AS_IT_IS, 0, entropy.words_of(heads))
    back, wrong = unpacked(heads, words, np.cumsum(counts) - counts, classes, tables)
    assert not np.array(wrong).any()
    assert np.array_equal(np.array(back).T, expected.astype(np.float16))


@pytest.mark.usefixtures("place")
def test_groups_of_more_and_of_fewer_components_are_coded_at_once(tables, classes):
    of_groups = [classes, classes[:5], classes[:0], classes[:33]]
    several = Classes.of(of_groups)
    values = [values_of(classes, 70, seed)[:, : len(own)] for seed, own in enumerate(of_groups)]
    for of_group in values:
        of_group[1] = 1
    lying = [several.padded(mx.array(of_group.T.astype(np.float16))) for of_group in values]
    lengths = np.stack([(of_group**2).sum(axis=1) for of_group in values])
    found = gpu_entropy.pack(
        mx.stack(lying), mx.array(lengths), mx.zeros((70,), mx.uint32), mx.full((4,), 1e9), several, tables
    )
    expected = [entropy.pack(quantised(of), own, tables) for of, own in zip(values, of_groups, strict=True)]
    heads = np.stack([of_group for of_group, _ in expected])
    assert np.array_equal(np.array(found.heads), heads)
    words = np.concatenate([word for _, parts in expected for word in parts])
    assert np.array_equal(np.array(gpu_entropy.gathered(found, len(words))), words)
    counts = entropy.words_of(heads)
    first = (np.cumsum(counts).reshape(counts.shape) - counts).astype(np.uint32)
    back, wrong = gpu_entropy.unpack(mx.array(heads), mx.array(words), mx.array(first), several, tables)
    assert not np.array(wrong).any()
    assert np.array_equal(np.array(back), np.array(found.decoded))
    for g, own in enumerate(of_groups):
        there = entropy.decoded(quantised(values[g]), heads[g], own, tables).astype(np.float16)
        assert np.array_equal(np.array(back[g, : len(own)]).T, there)
        assert not np.array(back[g, len(own) :]).any()


@pytest.mark.usefixtures("place")
def test_a_row_that_takes_too_many_words_is_kept_as_it_is(tables):
    classes = np.full(2600, 30, np.int32)
    values = np.full((3, 2600), 32752, np.float32)  # the largest of half precision that has a code
    values[1] = 1
    found = packed(values, classes, tables)
    expected, parts = entropy.pack(quantised(values), classes, tables)
    assert expected[0] == expected[2] == 0xFFFF
    assert np.array_equal(np.array(found.heads[0]), expected)
    assert np.array_equal(np.array(gpu_entropy.gathered(found, len(parts[1]))), parts[1])
    assert not np.array(found.decoded)[0][:, [0, 2]].any()


@pytest.mark.usefixtures("place")
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
