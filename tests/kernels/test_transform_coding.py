"""Rows of joined layers on a GPU, its kernels run on the host and on the machine's GPU.

They give what the CPU's coder gives, but for how products round.
"""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import host_gpu
import mlx.core as mx
import numpy as np
import pytest

from prefixcache.codecs.interchange import as_float32, bring_in, copy_out
from prefixcache.codecs.transform import gpu_coding, gpu_entropy
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.codecs.transform.entropy import DamagedCodes
from prefixcache.codecs.transform.rope import NO_ROPE
from prefixcache.codecs.transform.tables import first_guess
from prefixcache.kernels import transform_entropy, transform_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "codecs/transform"))
from synthetic_basis import INTERLEAVED, group_of, layer, rows_of

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")

NEAR = {"float32": 2**-10, "float16": 2**-9, "bfloat16": 2**-7}  # of the largest: products are half precision


@pytest.fixture(autouse=True, params=host_gpu.places("cuda", "metal"))
def place(request, run_at):
    run_at(request.param, (transform_entropy, transform_rows), gpu_entropy)
    return request.param


LOUD = 60


def coder_of(dtype):
    layers = [layer(0), layer(1, rotation=INTERLEAVED, heads=1), layer(4, rotation=NO_ROPE)]
    return GroupCoder(group_of([of._replace(dtype=dtype) for of in layers]), first_guess(), 4.0, dtype)


def on_gpu(coder, rows):
    return [bring_in(np.ascontiguousarray(stream.swapaxes(0, 1)), coder.dtype) for stream in rows]


def floats(array):
    return np.array(array.astype(mx.float32))


def near(coder, mine, theirs):
    """MLX arrays (heads, tokens, width) and NumPy's (tokens, heads, width): a token's, of all streams, within what half
    precision makes of its largest.
    """
    theirs = [floats(bring_in(np.ascontiguousarray(other.swapaxes(0, 1)), coder.dtype)) for other in theirs]
    pairs = [
        [np.nan_to_num(x, posinf=0, neginf=0) for x in pair] for pair in zip(map(floats, mine), theirs, strict=True)
    ]
    largest = np.max([np.abs(other).max(axis=(0, 2)) for _, other in pairs], axis=0)
    for one, other in pairs:
        assert (np.abs(one - other).max(axis=(0, 2)) <= NEAR[coder.dtype] * np.maximum(1, largest)).all()


def errors(coder, rows, at, codes, block):
    """The mean square of what the CPU decodes, but for rows that aren't coded, and the one that is 400 times as loud."""
    lost, coded = [], (codes.heads != 0xFFFF) & (codes.heads != 0) & (np.arange(len(codes.heads)) != LOUD - at)
    for mine, theirs in zip(coder.decode(codes, block.first), rows, strict=True):
        one, other = (as_float32(x, coder.dtype) for x in (mine, theirs[at : at + len(mine)]))
        lost.append(np.square(one[coded] - other[coded]).mean())
    return np.mean(lost)


@pytest.mark.parametrize("dtype", NEAR)
def test_blocks_are_coded_together_as_the_cpu_does_one_by_one(dtype):
    coder = coder_of(dtype)
    rows = rows_of(coder.group, 90, first=250)
    rows[0][7] = np.float32(1).astype(rows[0].dtype) * 0 + (0x7F80 if dtype == "bfloat16" else np.inf)
    rows[1][LOUD] *= 1 if dtype == "bfloat16" else 400
    settled = [None, None, coder.encode([stream[:20] for stream in rows], 250)]
    blocks = [gpu_coding.BlockSpan(250, 256, skip=4), gpu_coding.BlockSpan(256, 300), gpu_coding.BlockSpan(300, 340)]
    (made,) = gpu_coding.encode([gpu_coding.GroupRows(coder, on_gpu(coder, rows), settled)], blocks)
    ((back, wrong),) = gpu_coding.decode([gpu_coding.GroupCodes(coder, made)], [block.first for block in blocks])
    assert gpu_coding.reason_of(copy_out(wrong)) is None
    at = 0
    for block, codes, offsets in zip(blocks, made, settled, strict=True):
        count = block.last - block.first
        expected = coder.encode([stream[at : at + count] for stream in rows], block.first, block.skip, offsets)
        assert np.array_equal(codes.heads == 0xFFFF, expected.heads == 0xFFFF)
        assert np.array_equal(codes.heads == 0, expected.heads == 0)
        assert abs(len(codes.words) / len(expected.words) - 1) < 0.01
        assert np.array_equal(codes.offset_steps, expected.offset_steps) or offsets is None
        lost, least = errors(coder, rows, at, codes, block), errors(coder, rows, at, expected, block)
        assert lost <= 1.02 * least
        decoded = coder.decode(codes, block.first)
        near(coder, [stream[:, at : at + count] for stream in back], decoded)
        at += count


def test_groups_coded_together_are_what_they_are_alone():
    tables = first_guess()
    groups = [
        group_of([layer(0), layer(1, rotation=INTERLEAVED, heads=1)]),
        group_of([layer(2, "bfloat16", NO_ROPE, heads=3)], seed=1),
        group_of([layer(3)], widest=0.6, narrowest=0.5, seed=2),
        group_of([layer(4, "float32", heads=1)], widest=200, seed=3),
        group_of([layer(5, "float32", heads=1)], seed=4),
    ]
    blocks = [gpu_coding.BlockSpan(1, 9, skip=2), gpu_coding.BlockSpan(300, 301), gpu_coding.BlockSpan(302, 400)]
    rowed = []
    for group in groups:
        coder = GroupCoder(group, tables, 1.0 if group is groups[2] else 4.0, group.layers[0].dtype)
        parts = [rows_of(group, block.last - block.first, block.first, block.first) for block in blocks]
        rows = [np.concatenate(stream) for stream in zip(*parts, strict=True)]
        rows[0][20] = 30000 if coder.dtype != "bfloat16" else 0x7F00
        settled = [None, None, coder.encode([stream[9:20] for stream in rows], 302) if group is groups[3] else None]
        rowed.append(gpu_coding.GroupRows(coder, on_gpu(coder, rows), settled))
    together = gpu_coding.encode(rowed, blocks)
    for one, codes in zip(rowed, together, strict=True):
        for mine, theirs in zip(codes, gpu_coding.encode([one], blocks)[0], strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(mine, theirs, strict=True))
    assert any((codes.heads == 0xFFFF).any() for of_group in together for codes in of_group)
    coded = [gpu_coding.GroupCodes(one.coder, codes) for one, codes in zip(rowed, together, strict=True)]
    firsts = [block.first for block in blocks]
    for of_group, back in zip(coded, gpu_coding.decode(coded, firsts), strict=True):
        assert gpu_coding.reason_of(copy_out(back.wrong)) is None
        ((alone, _),) = gpu_coding.decode([of_group], firsts)
        assert all(np.array_equal(floats(x), floats(y)) for x, y in zip(back.streams, alone, strict=True))
        there = [of_group.coder.decode(codes, first) for codes, first in zip(of_group.blocks, firsts, strict=True)]
        near(of_group.coder, back.streams, [np.concatenate(stream) for stream in zip(*there, strict=True)])


def test_one_thread_encodes_and_another_decodes():
    """What is kept for all threads is evaluated: MLX evaluates an array only on the thread that made it."""
    coder = coder_of("float16")
    rows = rows_of(coder.group, 40)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        rowed = one.submit(on_gpu, coder, rows).result()
        work = [gpu_coding.GroupRows(coder, rowed, [None])], [gpu_coding.BlockSpan(0, 40)]
        (codes,) = one.submit(gpu_coding.encode, *work).result()

        def decoded():
            ((back, _),) = gpu_coding.decode([gpu_coding.GroupCodes(coder, codes)], [0])
            mx.eval(back)
            return back

        near(coder, other.submit(decoded).result(), coder.decode(codes[0], 0))
        near(coder, one.submit(decoded).result(), coder.decode(codes[0], 0))


def test_a_metric_that_half_precision_is_too_coarse_for_stays_on_the_cpu():
    group = group_of([layer(0)])
    assert gpu_coding.takes(GroupCoder(group, first_guess(), 4.0, "float16"))
    ((keys, values),) = group.factors
    steep = keys.copy()
    steep[0, 7, 0] = 8000
    group = dataclasses.replace(group, factors=((steep, values),))
    assert not gpu_coding.takes(GroupCoder(group, first_guess(), 4.0, "float16"))


def test_groups_that_are_coded_at_once_are_padded_to_the_largest(monkeypatch):
    monkeypatch.setattr(gpu_coding, "_memory", lambda: 16 * 1000 * 12 * 3 * 80)
    tables = first_guess()
    large, small = (GroupCoder(group_of([layer(0, heads=heads)]), tables, 4.0, "float16") for heads in (5, 1))
    assert (len(large.classes), len(small.classes)) == (65, 13)
    assert gpu_coding.at_once([small] * 9, 1000) == 9
    assert gpu_coding.at_once([large, *[small] * 9], 1000) == 2
    assert gpu_coding.at_once([large], 10**9) == 1
    assert gpu_coding.at_once([small, GroupCoder(group_of([layer(0)]), first_guess(), 4.0, "float16")], 1) == 1


def test_a_quality_at_which_nothing_is_coded_gives_the_means():
    narrow = group_of([layer(0)], widest=0.6, narrowest=0.5)
    coder = GroupCoder(narrow, first_guess(), 1.0, "float16")
    assert not len(coder.classes)
    rows = rows_of(narrow, 300)
    rowed = gpu_coding.GroupRows(coder, on_gpu(coder, rows), [None, None])
    (made,) = gpu_coding.encode([rowed], [gpu_coding.BlockSpan(0, 256), gpu_coding.BlockSpan(256, 300)])
    expected = [
        coder.encode([stream[:256] for stream in rows], 0),
        coder.encode([stream[256:] for stream in rows], 256),
    ]
    for mine, theirs in zip(made, expected, strict=True):
        assert np.array_equal(mine.heads, theirs.heads)
        assert not len(mine.words)
    ((back, wrong),) = gpu_coding.decode([gpu_coding.GroupCodes(coder, made[:1])], [0])
    assert gpu_coding.reason_of(copy_out(wrong)) is None
    near(coder, back, coder.decode(made[0], 0))


def test_claims_of_more_words_and_words_that_none_wrote_are_damage():
    coder = coder_of("float16")
    codes = coder.encode(rows_of(coder.group, 12), 0)
    with pytest.raises(DamagedCodes, match="claim more words"):
        gpu_coding.decode([gpu_coding.GroupCodes(coder, [codes._replace(words=codes.words[:-1])])], [0])
    noise = np.random.default_rng(0).integers(0, 1 << 16, len(codes.words)).astype(np.uint16)
    blocks = [codes, codes._replace(words=noise)]
    ((_, wrong),) = gpu_coding.decode([gpu_coding.GroupCodes(coder, blocks)], [0, 256])
    assert gpu_coding.reason_of(copy_out(wrong[:12])) is None
    assert gpu_coding.reason_of(copy_out(wrong[12:]))
