"""Attention on codes, the kernels' very text run on the host and on the machine's GPU: what comes out of decoded rows.

And new keys and values, coded in one launch: the codes of each by itself.
"""

import host_gpu
import mlx.core as mx
import numpy as np
import pytest

from prefixcache.codecs.levels import Levels
from prefixcache.codecs.turboquant import gpu_attention as turboquant_gpu_attention
from prefixcache.codecs.turboquant import gpu_rows as turboquant_gpu
from prefixcache.codecs.turboquant.format import AttentionCall, CodedRows, form_of
from prefixcache.kernels import turboquant_attention, turboquant_encode
from tests.codecs import attention_oracle

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")

MODULES = (turboquant_attention, turboquant_encode)


@pytest.fixture(params=host_gpu.places("metal"))
def place(request, run_at):
    """Where the kernels run that the product's own calls launch."""
    gpu_attention = turboquant_gpu_attention
    run_at(request.param, MODULES, turboquant_gpu, gpu_attention._kernels, gpu_attention._pair_encoder)
    return request.param


def levels_of(heads, width, seed):
    random = np.random.default_rng(seed)
    mean = random.standard_normal((heads, width)).astype(np.float32)
    return Levels(mean, (1 + np.abs(random.standard_normal((heads, width)))).astype(np.float32))


def coded(keys=(128, 4), values=(128, 4), batch=1, heads=1, tokens=40, levelled=False, size=1.0, seed=0):
    """Rows of `batch` sequences; `keys`, `values`: width and bits."""
    random = np.random.default_rng(seed)
    key_form, value_form = form_of(*keys, 3), form_of(*values, 3)
    k = random.standard_normal((batch, heads, tokens, keys[0]))
    v = random.standard_normal((batch, heads, tokens, values[0])) * np.exp(
        random.standard_normal((batch, heads, tokens, 1))
    )
    key_levels, value_levels = (levels_of(heads, w, seed) if levelled else None for w in (keys[0], values[0]))
    codes, scales = attention_oracle.encode_rows(
        k.astype(np.float32), (v * size).astype(np.float32), key_form, value_form, key_levels, value_levels
    )
    spread = attention_oracle.spread_of
    return CodedRows(
        codes, scales, key_form, value_form, spread(key_levels, key_form), spread(value_levels, value_form)
    )


def queries_of(rows, group=1, length=1, dtype=mx.float16, peaked=1.0, seed=1):
    batch, heads = rows.codes.shape[:2]
    random = np.random.default_rng(seed)
    q = random.standard_normal((batch, heads * group, length, rows.keys.width)) * peaked
    return mx.array(q.astype(np.float32)).astype(dtype)


def agrees(rows, queries, mask=None, causal=False, within=1e-4, **more):
    scale = rows.keys.width**-0.5
    assert turboquant_gpu_attention.takes(rows, queries)
    out, lse = turboquant_gpu_attention.attend(rows, AttentionCall(queries, scale, mask, causal, **more))
    want, want_lse = attention_oracle.attention(rows, queries, scale, mask, causal)
    if (sinks := more.get("logits")) is not None:
        with np.errstate(over="ignore"):
            want = want / (1 + np.exp(np.array(sinks.astype(mx.float32))[None, :, None] - want_lse))[..., None]
    got, got_lse = np.array(out.astype(mx.float32)), np.array(lse)
    assert got.shape == want.shape
    assert got_lse.shape == want_lse.shape
    seen = np.isfinite(want_lse)
    assert (got_lse[~seen] == -np.inf).all()
    assert (got[~seen] == 0).all()
    np.testing.assert_allclose(got_lse[seen], want_lse[seen], atol=1e-4)
    error = np.linalg.norm(got - want, axis=-1)[seen] / np.linalg.norm(want, axis=-1)[seen]
    assert (error < within).all(), error.max()  # and no NaN


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 3])
def test_every_number_of_bits(place, bits, length):
    rows = coded((64, bits), (64, bits), heads=2, tokens=37)
    agrees(rows, queries_of(rows, 4, length), causal=length > 1)


@pytest.mark.parametrize(
    ("keys", "values", "group", "dtype"),
    [
        ((128, 4), (128, 4), 4, mx.float16),
        ((128, 3), (128, 3), 1, mx.bfloat16),
        ((192, 4), (128, 2), 8, mx.float16),
        ((80, 3), (96, 1), 5, mx.float32),
        ((256, 8), (256, 3), 4, mx.float16),
        ((96, 2), (80, 8), 1, mx.float32),
        ((112, 1), (192, 4), 2, mx.bfloat16),
    ],
)
@pytest.mark.parametrize("peaked", [1.0, 10.0])
def test_widths_and_bits_may_differ(place, keys, values, group, dtype, peaked):
    rows = coded(keys, values, tokens=75)
    agrees(rows, queries_of(rows, group, 1, dtype, peaked))


@pytest.mark.parametrize(
    ("width", "bits"), [(64, 4), (80, 3), (96, 2), (112, 1), (128, 4), (160, 8), (192, 3), (224, 4), (256, 2)]
)
def test_every_width_with_few_queries_and_with_many(place, width, bits):
    rows = coded((width, bits), (width, bits), tokens=40)
    for group in (4, 8):
        agrees(rows, queries_of(rows, group))


@pytest.mark.parametrize(
    ("group", "length", "tokens"), [(1, 1, 1), (4, 1, 300), (1, 8, 5), (8, 8, 20), (3, 16, 17), (1, 16, 16)]
)
def test_any_number_of_queries_and_rows(place, group, length, tokens):
    rows = coded((64, 4), (64, 4), tokens=tokens)
    agrees(rows, queries_of(rows, group, length), causal=length > 1)


def test_sequences_have_their_own_bounds(place):
    rows = coded((64, 4), (64, 4), batch=3, heads=2, tokens=70)
    for bounds in ((None, [70, 1, 33]), ([0, 69, 5], None), ([3, 40, 70], [66, 40, 70]), ([0, -5, 60], [200, 16, 10])):
        first, last = (None if n is None else mx.array(n, mx.int32) for n in bounds)
        own = rows._replace(first=first, last=last)
        agrees(own, queries_of(own, 2, 2), causal=True)


MASKS = {  # of batch 2, query heads 4, L 3, T 50
    "of columns": lambda m: m[0, 0, 0],
    "one of all": lambda m: m[:1, :1, :1],
    "of sequences": lambda m: m[:, :1, :1],
    "of queries": lambda m: m[0, 0],
    "of heads": lambda m: m[:1, :, :1],
    "full": lambda m: m,
    "a view": lambda m: mx.swapaxes(mx.contiguous(mx.swapaxes(m, 1, 3)), 1, 3),
    "of one column": lambda m: m[..., :1],
}


@pytest.mark.parametrize("dtype", [mx.bool_, mx.float32, mx.bfloat16])
def test_masks_are_read_as_they_lie(place, dtype):
    rows = coded((64, 4), (64, 4), batch=2, heads=2, tokens=50)
    queries = queries_of(rows, 2, 3)
    random = np.random.default_rng(2)
    allowed = random.random((2, 4, 3, 50)) < 0.6
    allowed[1, 2, 1] = False  # this one attends to nothing
    allowed[..., 0, :] |= np.arange(50) == 7
    added = np.where(allowed, random.standard_normal(allowed.shape) * 3, -np.inf).astype(np.float32)
    mask = mx.array(allowed) if dtype == mx.bool_ else mx.array(added).astype(dtype)
    for form in MASKS.values():
        own = form(mask)
        mx.eval(own)
        agrees(rows, queries, own)
    agrees(rows._replace(last=mx.array([50, 20], mx.int32)), queries, mask, causal=True)


def test_masked_rows_never_count(place):
    """Not even those whose scales are not numbers; but they do where they are attended to."""
    rows = coded((64, 4), (64, 4), tokens=40)
    scales = np.array(rows.scales)
    scales[0, 0, 5], scales[0, 0, 30, 1] = 0x7FC0, 0x7FC0
    lost = rows._replace(scales=mx.array(scales))
    queries = queries_of(rows, 2)
    allowed = np.ones(40, bool)
    allowed[[5, 30]] = False
    for mask in (mx.array(allowed), mx.where(mx.array(allowed), 0.0, -mx.inf)):
        out, lse = turboquant_gpu_attention.attend(lost, AttentionCall(queries, 0.125, mask))
        want, want_lse = attention_oracle.attention(rows, queries, 0.125, mask)
        np.testing.assert_allclose(np.array(out), want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.array(lse), want_lse, atol=1e-5)
    for row in (5, 30):
        seen = mx.array(np.arange(40) == row) | mx.array(allowed)
        assert np.isnan(np.array(turboquant_gpu_attention.attend(lost, AttentionCall(queries, 0.125, seen)).out)).all()


def test_levels_of_each_sequence(place):
    rows = coded((64, 4), (64, 3), batch=3, heads=2, tokens=45, levelled=True)
    agrees(rows, queries_of(rows, 4), within=2e-4)
    own = [mx.concatenate([x, x * 1.5, x * 0.5], 1) for x in (rows.key_levels, rows.value_levels)]
    agrees(rows._replace(key_levels=own[0], value_levels=own[1]), queries_of(rows, 4), within=2e-4)


@pytest.mark.parametrize("result", [mx.float32, mx.float16, mx.bfloat16])
def test_sinks_and_the_results_dtype(place, result):
    rows = coded((64, 4), (64, 4), heads=2, tokens=33)
    sinks = mx.array([0.5, -3.0, 90.0, 2.0, -200.0, 4.0]).astype(result)
    within = {mx.float32: 1e-4, mx.float16: 1e-3, mx.bfloat16: 5e-3}[result]
    queries = queries_of(rows, 3)
    out, _ = turboquant_gpu_attention.attend(rows, AttentionCall(queries, 0.125, logits=sinks, dtype=result))
    assert out.dtype == result
    agrees(
        rows,
        queries[:, [0, 1, 1, 3, 4, 5]],
        logits=mx.where(sinks > 50, 1.0, sinks).astype(result),
        dtype=result,
        within=within,
    )
    assert np.abs(np.array(out.astype(mx.float32))[:, 2]).max() < 1e-30


@pytest.mark.parametrize("size", [1e-34, 1e-8, 1e9, 1e35])
def test_values_may_have_any_size(place, size):
    rows = coded((64, 4), (64, 4), tokens=40, size=size)
    agrees(rows, queries_of(rows, 2, peaked=4.0))


def test_a_large_value_that_hardly_counts_takes_nothing_from_others(place):
    rows = coded((64, 4), (64, 4), tokens=40)
    scales = np.array(rows.scales)
    scales[0, 0, 3, 1] += 40 * 128  # 2**40 times as long
    rows = rows._replace(scales=mx.array(scales))
    mask = np.zeros(40, np.float32)
    mask[3] = -60
    agrees(rows, queries_of(rows, 2), mx.array(mask))


def test_a_few_sets_of_keys_at_a_time(place, monkeypatch):
    monkeypatch.setitem(turboquant_attention.SETS, "metal", 2)
    rows = coded((64, 4), (64, 3), heads=2, tokens=210)
    agrees(rows, queries_of(rows, 2, 1, peaked=5.0))


def test_rows_may_be_views(place):
    held = coded((64, 4), (64, 4), batch=2, heads=3, tokens=60)
    for rows in (
        held._replace(codes=held.codes[:, :, 7:51], scales=held.scales[:, :, 7:51]),
        held._replace(codes=held.codes[1:, ::2], scales=held.scales[1:, ::2]),
        held._replace(
            codes=mx.swapaxes(mx.contiguous(mx.swapaxes(held.codes, 1, 2)), 1, 2),
            scales=mx.contiguous(mx.pad(held.scales, [(0, 0), (0, 0), (0, 0), (0, 1)]))[..., :2],
        ),
        held._replace(codes=mx.contiguous(mx.pad(held.codes, [(0, 0), (0, 0), (0, 0), (0, 3)]))[..., :-3]),
    ):
        mx.eval(rows.codes, rows.scales)
        queries = mx.swapaxes(mx.contiguous(mx.swapaxes(queries_of(rows, 2, 2), 1, 2)), 1, 2)
        agrees(rows, queries, causal=True)


def test_no_rows_give_zeros(place):
    rows = coded((64, 4), (64, 4), tokens=3)
    rows = rows._replace(codes=rows.codes[:, :, :0], scales=rows.scales[:, :, :0])
    out, lse = turboquant_gpu_attention.attend(rows, AttentionCall(queries_of(rows, 2), 1.0, dtype=mx.float16))
    assert out.dtype == mx.float16
    assert np.array(out).tolist() == np.zeros((1, 2, 1, 64)).tolist()
    assert np.array(lse).tolist() == [[[-np.inf], [-np.inf]]]


def test_what_is_taken(place):
    rows = coded((64, 4), (64, 4), heads=2, tokens=3)
    takes = turboquant_gpu_attention.takes
    assert takes(rows, queries_of(rows, 8, 8))
    assert not takes(rows, queries_of(rows, 8, 9))
    assert not takes(rows, queries_of(rows, 2)[:, :3])
    assert not takes(rows, queries_of(rows, 2).astype(mx.int32))
    assert not takes(rows._replace(keys=form_of(512, 4, 0)), queries_of(rows, 2))


def test_a_cpu_takes_nothing():
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("here is a GPU")
    rows = coded((64, 4), (64, 4), tokens=3)
    assert not turboquant_gpu_attention.takes(rows, queries_of(rows))


PAIRS = [
    ((128, 4), (128, 4), "float16", False),
    ((64, 3), (64, 3), "bfloat16", True),
    ((96, 2), (96, 2), "float32", True),
    ((64, 8), (64, 8), "float16", False),
    ((64, 4), (128, 3), "float16", True),
]


@pytest.mark.parametrize(("keys", "values", "dtype", "levelled"), PAIRS)
def test_a_pair_is_coded_as_each_part_is(place, keys, values, dtype, levelled):
    check_pair(keys, values, dtype, levelled)


def check_pair(keys, values, dtype, levelled):
    forms = [form_of(*part, 3) for part in (keys, values)]
    random = np.random.default_rng(4)
    for batch, heads, length, own in ((1, 2, 1, False), (3, 2, 5, True)):
        parts, levels = [], []
        for form in forms:
            x = random.standard_normal((batch, length, heads, form.width)) * 3
            x[0, 0, 0, 3] = np.nan if length > 1 else 1
            parts.append(mx.swapaxes(mx.array(x.astype(np.float32)).astype(getattr(mx, dtype)), 1, 2))
            kept = np.stack(
                [
                    np.stack([level.mean, level.weight])
                    for level in (levels_of(heads, form.width, 7 + b) for b in range(batch))
                ],
                1,
            )
            levels.append(mx.array(kept if own else kept[:, :1]) if levelled else None)
        mx.eval(parts, [x for x in levels if x is not None])
        codes, scales = turboquant_gpu_attention.encode_pair(*parts, *forms, *levels)
        at = codes.shape[-1] - -(-values[0] * values[1] // 32)
        for part, (rows, form) in enumerate(zip(parts, forms, strict=True)):
            for b in range(batch):
                mine = None if levels[part] is None else mx.contiguous(levels[part][:, b if own else 0])
                want, want_scales = turboquant_gpu.encode_arrays(mx.swapaxes(rows[b], 0, 1), form, mine)
                got = codes[b, :, :, at:] if part else codes[b, :, :, :at]
                np.testing.assert_array_equal(np.array(mx.swapaxes(got, 0, 1)), np.array(want))
                np.testing.assert_array_equal(np.array(mx.swapaxes(scales[b, ..., part], 0, 1)), np.array(want_scales))


def test_no_new_rows_need_no_kernel(place):
    form = form_of(64, 4, 0)
    empty = mx.zeros((2, 3, 0, 64), mx.float16)
    codes, scales = turboquant_gpu_attention.encode_pair(empty, empty, form, form)
    assert codes.shape == (2, 3, 0, 16)
    assert scales.shape == (2, 3, 0, 2)
