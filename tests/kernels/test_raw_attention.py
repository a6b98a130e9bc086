"""The kernel for rows that are kept as they are, its very text run on the host and on the machine's GPU.

It gives what composed operations give.
"""

import host_gpu
import mlx.core as mx
import pytest

from prefixcache.codecs import TurboQuant, raw_attention_gpu
from prefixcache.codecs.turboquant import gpu_rows as turboquant_gpu
from prefixcache.codecs.turboquant.format import AttentionCall, AttentionPart
from prefixcache.kernels import raw_attention
from prefixcache.live import TurboQuantKVCache, attention
from prefixcache.live.attention import uncoded_for_kernel
from tests.inside import layer_of

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")


@pytest.fixture(params=host_gpu.places("metal"))
def place(request, run_at):
    run_at(request.param, (raw_attention,), turboquant_gpu)
    return request.param


def batch_of(lengths, width, dtype, sinks, recent, cut=0):
    singles = []
    for n in lengths:
        cache = TurboQuantKVCache(TurboQuant(levelling=False, sink_tokens=sinks), recent_tokens=recent)
        if n:
            cache.update_and_fetch(*(mx.random.normal((1, 2, n, width)).astype(dtype) for _ in range(2)))
            cache.trim(min(cut, n))
        singles.append(cache)
    return TurboQuantKVCache.merge(singles) if len(singles) > 1 else singles[0]


SHAPES = [  # lengths, width, dtype, sinks, recent, cut
    ((50,), 64, mx.float16, 0, 16, 0),
    ((50,), 64, mx.float32, 4, 16, 0),
    ((10,), 128, mx.bfloat16, 4, 16, 0),  # fewer than the ring has places for
    ((50,), 80, mx.float16, 4, 8, 5),
    ((50, 3, 0, 17), 64, mx.float16, 2, 16, 0),
    ((50, 20), 64, mx.float16, 0, 16, 9),
]
MASKS = ("", "bool", "additive", "causal")

# Every shape under every mask; over them, lengths and logits take turns so that each meets each.
CASES = [
    (*shape, (1, 3)[(s + m) % 2], mask, (s + m // 2) % 2 == 1)
    for s, shape in enumerate(SHAPES)
    for m, mask in enumerate(MASKS)
]


@pytest.mark.parametrize(
    ("lengths", "width", "dtype", "sinks", "recent", "cut", "length", "masked", "with_logits"), CASES
)
def test_it_gives_what_composed_operations_give(
    place, lengths, width, dtype, sinks, recent, cut, length, masked, with_logits
):
    mx.random.seed(1)
    cache = batch_of(lengths, width, dtype, sinks, recent, cut)
    batch = len(lengths)
    cache.update_and_fetch(*(mx.random.normal((batch, 2, length, width)).astype(dtype) for _ in range(2)))
    layer = layer_of(cache)
    queries = mx.random.normal((batch, 4, length, width)).astype(dtype)
    mask = None
    if masked in ("bool", "additive"):
        mask = mx.random.uniform(shape=(batch, 1, length, layer.rows)) < 0.6
        if masked == "additive":
            mask = mx.where(mask, mx.random.normal(mask.shape), -mx.inf)
    logits = mx.random.normal((4,)) if with_logits else None
    # Stand-ins for what codes give; nothing for the last sequence.
    out = mx.random.normal((batch, 4, length, width))
    lse = mx.random.normal((batch, 4, length)) * 2
    if batch > 1:
        out[-1], lse[-1] = 0.0, -mx.inf
    uncoded = uncoded_for_kernel(layer)
    coded, call = AttentionPart(out, lse), AttentionCall(queries, 0.125, mask, masked == "causal", logits)
    got = raw_attention_gpu.attend(uncoded, coded, call)
    wanted = attention.with_logits(attention._together([coded, attention._uncoded_part(layer, call)]), logits)
    assert got.dtype == dtype
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    assert mx.max(mx.abs(got.astype(mx.float32) - wanted)).item() <= tolerance
