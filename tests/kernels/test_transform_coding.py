"""Rows of joined layers on a GPU, its kernels run on the host: what the CPU's coder gives, but for how products round."""

import sys
from pathlib import Path

import host_gpu
import mlx.core as mx
import numpy as np
import pytest
from prefixcache.kernels import transform_entropy
from prefixcache.kernels.dialects import DIALECTS

from prefixcache.codecs.interchange import bring_in, copy_out
from prefixcache.codecs.transform import gpu_coding, gpu_entropy
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.codecs.transform.entropy import Damaged
from prefixcache.codecs.transform.rotation import NO_ROTATION
from prefixcache.codecs.transform.tables import first_guess

sys.path.insert(0, str(Path(__file__).parents[1] / "codecs/transform"))
from synthetic_basis import INTERLEAVED, group_of, layer, rows_of

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")

ULP = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}


@pytest.fixture(autouse=True)
def on_host(programs, monkeypatch):
    monkeypatch.setattr(transform_entropy, "build", host_gpu.builder(programs))
    monkeypatch.setattr(gpu_entropy, "dialect_here", lambda: DIALECTS["cuda"])
    transform_entropy._kernel.cache_clear()
    yield
    transform_entropy._kernel.cache_clear()


def coder_of(dtype):
    layers = [layer(0), layer(1, rotation=INTERLEAVED, heads=1), layer(4, rotation=NO_ROTATION)]
    return GroupCoder(group_of([of._replace(dtype=dtype) for of in layers]), first_guess(), 4.0, dtype)


def on_gpu(coder, rows):
    return [bring_in(np.ascontiguousarray(stream.swapaxes(0, 1)), coder.dtype) for stream in rows]


def floats(array):
    return np.array(array.astype(mx.float32))


def near(coder, mine, theirs):
    """MLX arrays (heads, tokens, width) and NumPy's (tokens, heads, width): within a unit in the largest one's last place."""
    for one, other in zip(mine, theirs, strict=True):
        expected = floats(bring_in(np.ascontiguousarray(other.swapaxes(0, 1)), coder.dtype))
        expected, found = (np.nan_to_num(x, posinf=0, neginf=0) for x in (expected, floats(one)))
        assert np.abs(found - expected).max() <= ULP[coder.dtype] * max(1, np.abs(expected).max())


@pytest.mark.parametrize("dtype", ULP)
def test_blocks_are_coded_together_as_the_cpu_does_one_by_one(dtype):
    coder = coder_of(dtype)
    gpu = gpu_coding.GpuCoder(coder)
    rows = rows_of(coder.group, 90, first=250)
    rows[0][7] = np.float32(1).astype(rows[0].dtype) * 0 + (0x7F80 if dtype == "bfloat16" else np.inf)
    rows[1][60] *= 1 if dtype == "bfloat16" else 400
    settled = coder.encode([stream[:20] for stream in rows], 250)
    blocks = [gpu_coding.Rows(250, 256, skip=4), gpu_coding.Rows(256, 300), gpu_coding.Rows(300, 340, settled=settled)]
    made = gpu.encode(on_gpu(coder, rows), blocks)
    back, wrong = gpu.decode([(block.first, codes) for block, codes in zip(blocks, made, strict=True)])
    assert gpu_coding.reason_of(copy_out(wrong)) is None
    at = 0
    for block, codes in zip(blocks, made, strict=True):
        count = block.last - block.first
        expected = coder.encode([stream[at : at + count] for stream in rows], block.first, block.skip, block.settled)
        assert np.array_equal(codes.heads, expected.heads)
        assert (codes.words != expected.words).mean() < 0.01
        assert np.array_equal(codes.offset_steps, expected.offset_steps) or block.settled is None
        decoded = coder.decode(codes, block.first)
        near(coder, [stream[:, at : at + count] for stream in back], decoded)
        at += count


def test_a_quality_at_which_nothing_is_coded_gives_the_means():
    narrow = group_of([layer(0)], widest=0.6, narrowest=0.5)
    coder = GroupCoder(narrow, first_guess(), 1.0, "float16")
    assert not len(coder.classes)
    rows = rows_of(narrow, 300)
    made = gpu_coding.GpuCoder(coder).encode(on_gpu(coder, rows), [gpu_coding.Rows(0, 256), gpu_coding.Rows(256, 300)])
    expected = [
        coder.encode([stream[:256] for stream in rows], 0),
        coder.encode([stream[256:] for stream in rows], 256),
    ]
    for mine, theirs in zip(made, expected, strict=True):
        assert np.array_equal(mine.heads, theirs.heads)
        assert not len(mine.words)
    back, wrong = gpu_coding.GpuCoder(coder).decode([(0, made[0])])
    assert gpu_coding.reason_of(copy_out(wrong)) is None
    near(coder, back, coder.decode(made[0], 0))


def test_claims_of_more_words_and_words_that_none_wrote_are_damage():
    coder = coder_of("float16")
    gpu = gpu_coding.GpuCoder(coder)
    codes = coder.encode(rows_of(coder.group, 12), 0)
    with pytest.raises(Damaged, match="claim more words"):
        gpu.decode([(0, codes._replace(words=codes.words[:-1]))])
    noise = np.random.default_rng(0).integers(0, 1 << 16, len(codes.words)).astype(np.uint16)
    _, wrong = gpu.decode([(0, codes), (256, codes._replace(words=noise))])
    assert gpu_coding.reason_of(copy_out(wrong[:12])) is None
    assert gpu_coding.reason_of(copy_out(wrong[12:]))
