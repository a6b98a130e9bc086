"""The GPU kernels of TurboQuant, their very text run on the host and on the machine's GPU.

They give the codes, scales and rows that NumPy gives, bit for bit.
"""

import host_gpu
import mlx.core as mx
import numpy as np
import pytest

from prefixcache.codecs import gather
from prefixcache.codecs.interchange import borrow, copy_out
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant import gpu_rows as turboquant_gpu
from prefixcache.codecs.turboquant import numpy_rows as turboquant_numpy
from prefixcache.codecs.turboquant.format import form_of
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from prefixcache.kernels import gather_rows, turboquant_decode, turboquant_encode, turboquant_measure
from prefixcache.kernels.dialects import DIALECTS

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 448, 512)  # all that have a layout
BITS = (1, 2, 3, 4, 8)
DTYPES = ("float16", "bfloat16", "float32")

# Every width with every number of bits; over them, dtypes and levels take turns so that each meets each.
CASES = [
    (width, bits, DTYPES[(w + b) % 3], (w + b // 2) % 2 == 0)
    for w, width in enumerate(WIDTHS)
    for b, bits in enumerate(BITS)
]


@pytest.fixture(params=host_gpu.places("metal"))
def place(request, run_at):
    """Where the kernels run that the product's own calls launch."""
    run_at(request.param, (turboquant_encode, turboquant_decode, turboquant_measure), turboquant_gpu)
    return request.param


def rows_of(tokens, heads, width, dtype, seed=0):
    """Rows of many lengths, and after them one of every awkward kind."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens * heads, width))
    span = 3 if dtype == "float16" else 75
    x *= np.exp(random.uniform(-span, span, (len(x), 1)))
    awkward = np.zeros((12, width))
    awkward[1, 3], awkward[2, 5] = np.inf, np.nan
    awkward[3, [7, width - 1]] = 2, -2
    awkward[4] = 1e-30
    awkward[5, ::3] = 1e-39  # float32 subnormals
    awkward[6, 0] = 5
    awkward[7] = 65504 if dtype == "float16" else 3e38
    awkward[8] = -0.0
    awkward[9, ::2], awkward[9, 1] = 1e-12, 1e12
    awkward[10, width // 2 : width // 2 + 2] = 1  # a half that is all zeros, and in the other one what cancels
    awkward[11] = np.where(np.arange(width) % 2, 1e-20, -1e18)
    some = awkward[: max(0, min(12, len(x) - 2))]
    x[: len(some)] = some
    with np.errstate(over="ignore"):
        return mx.array(x.reshape(tokens, heads, width).astype(np.float32)).astype(getattr(mx, dtype))


def levels_of(heads, width):
    random = np.random.default_rng(5)
    mean = 3 * random.standard_normal((heads, width))
    return Levels(mean.astype(np.float32), (1 + np.abs(random.standard_normal((heads, width)))).astype(np.float32))


def by_numpy(rows, dtype, form, levels):
    tokens, heads, width = rows.shape
    codes = np.empty((tokens, heads, words_of(width, form.codebook.bits)), np.uint32)
    scales = np.empty((tokens, heads), np.uint16)
    turboquant_numpy.encode(borrow(rows), dtype, form, levels, codes, scales)
    return codes, scales


def rows_by_numpy(codes, scales, dtype, form, levels):
    rows = copy_out(mx.zeros((codes.shape[1], len(codes), form.width), getattr(mx, dtype)))
    turboquant_numpy.decode(codes, scales, dtype, form, levels, rows)
    return rows


def same_rows(got, want, dtype):
    """Bit for bit, except that every NaN is the same."""
    got, want = (np.asarray(a).view(f"u{a.itemsize}") for a in (got, want))
    lost = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}[dtype]
    below_sign = (1 << 8 * got.itemsize - 1) - 1
    both_nan = ((got & below_sign) > lost) & ((want & below_sign) > lost)
    np.testing.assert_array_equal(np.where(both_nan, 0, got), np.where(both_nan, 0, want))


def check(width, bits, dtype, levelled, tokens=33, heads=2):
    form = form_of(width, bits, seed=3)
    levels = levels_of(heads, width) if levelled else None
    rows = rows_of(tokens, heads, width, dtype, seed=width + bits)
    codes, scales = by_numpy(rows, dtype, form, levels)
    got_codes, got_scales = turboquant_gpu.encode(rows, form, levels)
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_codes, codes)
    codes[-1] = np.random.default_rng(0).integers(0, 2**32, codes[-1].shape)  # not what an encoder writes
    got = copy_out(turboquant_gpu.decode(codes, scales, dtype, form, levels))
    same_rows(got, rows_by_numpy(codes, scales, dtype, form, levels), dtype)


@pytest.mark.parametrize(("width", "bits", "dtype", "levelled"), CASES)
def test_kernels_give_what_numpy_gives(place, width, bits, dtype, levelled):
    check(width, bits, dtype, levelled)
    if place == host_gpu.OWN:
        check(width, bits, dtype, levelled, tokens=300, heads=3)


@pytest.mark.parametrize("place", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("width", "bits", "dtype", "levelled"),
    [
        (64, 3, "bfloat16", True),
        (80, 4, "float16", False),
        (112, 2, "float32", False),
        (128, 4, "float16", True),
        (128, 8, "bfloat16", False),
        (192, 1, "float16", True),
        (256, 2, "bfloat16", False),
        (512, 4, "bfloat16", True),
    ],
)
def test_cuda_gives_what_numpy_gives(place, width, bits, dtype, levelled):
    check(width, bits, dtype, levelled)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 5), (65, 1), (301, 2)])
def test_any_number_of_rows(place, tokens, heads):
    check(128, 4, "float16", False, tokens, heads)
    check(64, 3, "bfloat16", True, tokens, heads)


def test_no_rows_need_no_kernel(place):
    form = form_of(128, 4, 0)
    codes, scales = turboquant_gpu.encode(mx.zeros((0, 3, 128), mx.float16), form, None)
    assert codes.shape == (0, 3, 16)
    assert scales.shape == (0, 3)
    assert turboquant_gpu.decode(codes, scales, "float16", form, None).shape == (3, 0, 128)


@pytest.mark.parametrize("axes", ["transposed", "sliced", "reversed rows"])
def test_rows_codes_and_scales_may_be_views(place, axes):
    form = form_of(64, 4, 1)
    base = rows_of(40, 3, 64, "float16")
    if axes == "transposed":  # as a live cache has them: heads outside, room behind the tokens
        held = mx.contiguous(mx.pad(mx.swapaxes(base, 0, 1), [(0, 0), (0, 9), (0, 0)]))
        mx.eval(held)
        rows = mx.swapaxes(held[:, 2:37], 0, 1)
    elif axes == "sliced":
        rows = base[5:, 1:]
    else:
        rows = mx.swapaxes(mx.contiguous(mx.swapaxes(base, 0, 2)), 0, 2)  # no row in one piece
    mx.eval(rows)
    codes, scales = by_numpy(rows, "float16", form, None)
    got_codes, got_scales = turboquant_gpu.encode(rows, form, None)
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_codes, codes)

    by_head = mx.swapaxes(mx.contiguous(mx.swapaxes(mx.array(codes), 0, 1)), 0, 1)[3:]
    mx.eval(by_head)
    got = turboquant_gpu.decode_arrays(by_head, mx.array(scales)[3:], "float16", form, None)
    same_rows(copy_out(got), rows_by_numpy(codes[3:], scales[3:], "float16", form, None), "float16")


def test_scales_near_the_dtypes_end_are_cut(place):
    form = form_of(128, 4, 0)
    random = np.random.default_rng(1)
    codes = random.integers(0, 2**32, (40, 1, 16), dtype=np.uint32)
    scales = (np.geomspace(1e2, 1e6, 40).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)[:, None]
    got = copy_out(turboquant_gpu.decode(codes, scales, "float16", form, None))
    assert np.abs(got).max() == 65504
    same_rows(got, rows_by_numpy(codes, scales, "float16", form, None), "float16")


def test_levels_may_be_on_the_gpu_already(place):
    form, levels, rows = form_of(128, 4, 0), levels_of(2, 128), rows_of(20, 2, 128, "float16")
    codes, scales = turboquant_gpu.encode_arrays(rows, form, turboquant_gpu.for_encoding(levels))
    want = by_numpy(rows, "float16", form, levels)
    np.testing.assert_array_equal(copy_out(codes), want[0])
    back = turboquant_gpu.for_decoding(levels, form)
    got = copy_out(turboquant_gpu.decode_arrays(codes, scales, "float16", form, back))
    same_rows(got, rows_by_numpy(*want, "float16", form, levels), "float16")


def test_the_name_of_a_kernel_follows_its_text():
    kinds = [turboquant_gpu._kind(form_of(128, bits, seed), "float16", False) for bits in (3, 4) for seed in (0, 1)]
    names = {DIALECTS["cuda"].name_of(turboquant_decode.source_of(kind)) for kind in kinds}
    assert len(names) == 4


def test_widths_without_a_layout_are_left_to_others():
    for bits in BITS:
        assert tuple(n for n in range(1, 1100) if turboquant_gpu.takes(form_of(n, bits, 0))) == WIDTHS


def test_a_cpu_has_no_kernel():
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("here is a GPU")
    assert not turboquant_gpu.available()
    assert "CPU" in turboquant_gpu.describe()
    with pytest.raises(RuntimeError, match="no GPU kernel"):
        turboquant_gpu.encode(mx.zeros((1, 1, 128)), form_of(128, 4, 0), None)


# --- levels


def check_levels(width, dtype, centred, tokens, firsts, heads=2, unlike=0, strided=False):
    """As NumPy measures them, block by block; a root half-way between two steps may be taken for either."""
    random = np.random.default_rng(width + tokens)
    x = random.standard_normal((tokens, len(firsts) * heads, width)) * np.exp(random.standard_normal(width))
    x += random.standard_normal(width)
    x[random.permutation(tokens)[:unlike], 0] *= 100
    if unlike:
        x[random.permutation(tokens)[:unlike], 1, 3] = np.nan
    rows = mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
    if strided:
        rows = mx.swapaxes(mx.contiguous(mx.swapaxes(rows, 0, 1)), 0, 1)
    mx.eval(rows)
    measured = turboquant_gpu.measure_levels(rows, centred, firsts)
    steps, mean = copy_out(measured.steps).astype(int), copy_out(measured.mean.astype(mx.float32))
    for i, first in enumerate(firsts):
        own = slice(i, None, len(firsts))
        wanted = measure_levels(copy_out(rows.astype(mx.float32))[first:, own], centred)
        assert np.abs(steps[own] - wanted.packed().steps).max() <= 1
        assert (steps[own] != wanted.packed().steps).mean() < 0.02
        np.testing.assert_allclose(mean[own], wanted.mean, rtol=0.01, atol=2e-3)


LEVELS = [
    (128, "float16", True, 256, (4, 0, 0), 0, False),
    (128, "float16", False, 256, (0,), 9, True),
    (64, "bfloat16", True, 200, (0, 136, 137), 5, True),
    (80, "float32", True, 256, (4, 0), 3, False),
    (112, "bfloat16", True, 70, (0, 7), 2, True),
    (192, "float16", False, 256, (4,), 0, False),
    (256, "bfloat16", True, 256, (0,), 4, True),
    (96, "float16", True, 63, (0,), 0, False),
    (128, "float16", True, 1, (0, 1), 0, False),
]


@pytest.mark.parametrize(("width", "dtype", "centred", "tokens", "firsts", "unlike", "strided"), LEVELS)
def test_levels_are_those_that_numpy_measures(place, width, dtype, centred, tokens, firsts, unlike, strided):
    for heads in (2, 5) if place == host_gpu.OWN else (2,):
        check_levels(width, dtype, centred, tokens, firsts, heads, unlike, strided)


@pytest.mark.parametrize("place", host_gpu.places("cuda"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "last", "turned"), [(0, 1, False), (3, 67, False), (10, 140, False), (5, 80, True)])
def test_rows_of_many_layers_are_gathered_as_mlx_concatenates_them(
    place, run_at, monkeypatch, dtype, first, last, turned
):
    run_at(place, (gather_rows,), turboquant_gpu)
    monkeypatch.setattr(gather_rows, "MOST", 2)
    values = np.random.default_rng(0).standard_normal((3, 1, 2, 150, 72)).astype(np.float32)
    layers = [mx.array(layer).astype(getattr(mx, dtype)) for layer in values]
    if turned:
        layers = [mx.swapaxes(mx.contiguous(mx.swapaxes(layer, 1, 2)), 1, 2) for layer in layers]
    layers[2] = mx.swapaxes(mx.contiguous(mx.swapaxes(layers[2], 2, 3)), 2, 3)  # they need not lie alike
    mx.eval(layers)
    assert gather_rows.takes(DIALECTS["cuda"], layers)
    gathered = gather_rows.gather(turboquant_gpu.dialect(), layers, first, last)
    wanted = mx.concatenate([layer[:, :, first:last] for layer in layers], axis=1)[0]
    assert copy_out(gathered).tobytes() == copy_out(wanted).tobytes()


@pytest.mark.parametrize("place", host_gpu.places("cuda"))
@pytest.mark.parametrize("shape", [(), (5,), (32,), (2, 24), (2, 3, 40)])
def test_arrays_are_stacked_as_by_mlx(place, run_at, shape):
    run_at(place, (gather_rows,), gather)
    values = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    assert np.array_equal(np.array(gather.stacked([mx.array(each) for each in values])), values)


def test_layers_that_are_not_alike_are_left_to_mlx():
    some = mx.zeros((1, 2, 256, 128), mx.float16)
    assert not gather_rows.takes(DIALECTS["metal"], [some] * 2)
    for others in ([], [some[:, :1]], [some[:, :, :8]], [some.astype(mx.float32)]):
        assert not gather_rows.takes(DIALECTS["cuda"], [some, *others])
    assert not gather_rows.takes(DIALECTS["cuda"], [some[..., :36]] * 2)


@pytest.mark.parametrize("value", [0.0, 5.0, np.inf, np.nan])
def test_levels_of_rows_that_never_move_or_are_no_numbers_change_nothing(place, value):
    measured = turboquant_gpu.measure_levels(mx.full((100, 2, 128), value, mx.float16), True, [0])
    assert not copy_out(measured.steps).any()
    assert np.all(copy_out(measured.mean.astype(mx.float32)) == (value if np.isfinite(value) else 0))


def test_levels_of_rows_whose_sums_are_not_finite_change_nothing(place):
    measured = turboquant_gpu.measure_levels(mx.full((100, 2, 128), 3e38, mx.float32), True, [0])
    assert not copy_out(measured.steps).any()
    assert not copy_out(measured.mean.astype(mx.float32)).any()


def test_more_rows_than_a_group_has_threads_are_measured_too(place):
    check_levels(128, "float16", True, 300, (4,))
