"""`TurboQuantKVCache` and `BatchTurboQuantKVCache` against what they decode to, and against single runs."""

import copy
import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache

from prefixcache.codecs import TurboQuant
from prefixcache.codecs.turboquant import live as turboquant_live
from prefixcache.codecs.turboquant.format import AttentionCall
from prefixcache.live import BatchTurboQuantKVCache, SharedLevels, TurboQuantKVCache, attention, decoding
from prefixcache.live import layer as live_layer
from prefixcache.live import levels as live_levels
from prefixcache.live.attention import coded_parts
from prefixcache.live.protocol import CodesStandIn
from tests.inside import layer_of
from tests.live.generating import alone, check_logprobs, drive, feed
from tests.models.families import FAMILIES

HEADS, WIDTH = 2, 64


def cache_of(*bits, levelling=True, sink_tokens=4, seed=0, **kept):
    return TurboQuantKVCache(TurboQuant(*bits, levelling=levelling, sink_tokens=sink_tokens, seed=seed), **kept)


def rows(n, batch=1, heads=HEADS, width=WIDTH, dtype=mx.float16, loud=1.0):
    return (mx.random.normal((batch, heads, n, width)) * loud).astype(dtype)


def added(cache, n, batch=1, queries=4, length=None, dtype=mx.float16):
    """Append n random rows; queries for the last `length` of them."""
    fetched = cache.update_and_fetch(rows(n, batch, dtype=dtype), rows(n, batch, dtype=dtype))
    return mx.random.normal((batch, queries, length or n, WIDTH)).astype(dtype), *fetched


def meant(cache):
    """Keys and values that attention means, float32."""
    plain = cache.dequantize()
    return tuple(own[..., : plain.offset, :].astype(mx.float32) for own in (plain.keys, plain.values))


def error(got, wanted):
    wanted = wanted.astype(mx.float32)
    return (mx.linalg.norm(got.astype(mx.float32) - wanted) / mx.linalg.norm(wanted)).item()


def plain_attention(queries, keys, values, mask, scale=0.125, sinks=None):
    length, count = queries.shape[2], keys.shape[2]
    if isinstance(mask, str):
        mask = mx.arange(count) <= count - length + mx.arange(length)[:, None]
    group = queries.shape[1] // keys.shape[1]
    scores = queries.astype(mx.float32) @ mx.swapaxes(mx.repeat(keys, group, 1), -1, -2) * scale
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([column, scores], -1)
    weights = mx.softmax(scores, -1)
    return (weights[..., 1:] if sinks is not None else weights) @ mx.repeat(values, group, 1)


def no_kernel(*_):
    """As where no kernel attends to codes: what is attended to is decoded head by head."""
    return None


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(0)


# -- one sequence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (0, 16), (4, 128), (4, 0)])
@pytest.mark.parametrize("levelling", [True, False])
def test_attention_is_that_of_the_dequantized_cache_at_every_length_and_after_every_cut(sinks, recent, levelling):
    cache = cache_of(4, 3, levelling=levelling, sink_tokens=sinks, recent_tokens=recent)
    for n in (100, 200, 1, 1, 300, 5, -30, 1, 40, -200, 3, 1, -400, 2):
        if n < 0:
            assert cache.trim(-n) == -n
            continue
        queries, keys, values = added(cache, n)
        out = cache.attend_to_codes(queries, keys, values, scale=0.125, mask="causal")
        assert out.dtype == mx.float16
        assert error(out, plain_attention(queries, *meant(cache), "causal")) <= 1e-3


@given(data=st.data())
def test_attention_is_that_of_the_dequantized_cache_under_every_mask(data):
    batch, length = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([1, 2, 5, 40]))
    total = length + data.draw(st.sampled_from([0, 1, 30, 300]))
    bits = data.draw(st.sampled_from([(4, 4), (3, 4), (2, 1), (8, 8)]))
    choice = {
        "sink_tokens": data.draw(st.sampled_from([0, 4])),
        "recent_tokens": data.draw(st.sampled_from([0, 8, 128])),
    }
    cache = cache_of(*bits, levelling=data.draw(st.booleans()), **choice)
    if total > length:
        added(cache, total - length, batch)
    queries, keys, values = added(cache, length, batch)
    kind = data.draw(st.sampled_from(["none", "causal", "bool", "additive"]))
    mask = {"none": None, "causal": "causal"}.get(kind)
    if kind in ("bool", "additive"):
        full = (batch, 4, length, total)
        shape = tuple(n if data.draw(st.booleans()) or i == 3 else 1 for i, n in enumerate(full))
        shape = shape[data.draw(st.integers(0, 2)) :] if batch == 1 else shape
        mask = mx.random.uniform(shape=shape) < 0.7
        mask[..., 0] = True
        if kind == "additive":
            mask = mx.where(mask, mx.random.normal(shape), -mx.inf).astype(mx.float16)
    sinks = mx.random.normal((4,)) if data.draw(st.booleans()) else None
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(attention, "attend_to_part", no_kernel)
        out = cache.attend_to_codes(queries, keys, values, scale=0.125, mask=mask, sinks=sinks)
    wanted = plain_attention(queries, *meant(cache), mask, sinks=sinks)
    assert error(out, wanted) <= 1.5e-3 if bits == (2, 1) else 1e-3


def test_peaked_logits_are_as_near():
    cache = cache_of(levelling=False, recent_tokens=0)
    cache.update_and_fetch(rows(400, dtype=mx.float32, loud=4), rows(400, dtype=mx.float32))
    queries = mx.random.normal((1, 4, 3, WIDTH)) * 3
    out = cache.attend_to_codes(queries, *cache.keys_and_values(), scale=0.125, mask=None)
    assert error(out, plain_attention(queries, *meant(cache), None)) <= 1e-4


def test_a_step_encodes_its_new_row_and_nothing_else(monkeypatch):
    cache = TurboQuantKVCache()
    added(cache, 600)
    encoded = []

    def counted(encode):
        return lambda keys, *rest: encoded.append(keys.shape[2]) or encode(keys, *rest)

    encoder = turboquant_live.encoder
    monkeypatch.setattr(live_layer, "encode", counted(turboquant_live.encode))
    monkeypatch.setattr(live_layer, "encoder", lambda *kind: counted(encoder(*kind)))  # of all steps but the first
    for _ in range(5):
        added(cache, 1)
    assert encoded == [1] * 5


def test_no_decoded_copy_of_the_past_is_ever_held_or_made(monkeypatch):
    """Decoding on codes that quietly ran on fp16 rows was a bug elsewhere."""
    cache = TurboQuantKVCache()
    queries, keys, values = added(cache, 2000)
    assert isinstance(keys, CodesStandIn)
    assert isinstance(values, CodesStandIn)
    layer = layer_of(cache)
    assert all(array.dtype in (mx.uint32, mx.uint16) or array.shape[2] <= 128 for array in layer.arrays())
    if turboquant_live.attend(coded_parts(layer)[0], AttentionCall(queries[:, :, -1:], 1.0)) is None:
        pytest.skip("no kernel here: head by head is decoded for the moment")
    monkeypatch.setattr(decoding, "decode", None)
    queries, keys, values = added(cache, 1)
    mx.eval(cache.attend_to_codes(queries, keys, values, scale=0.125, mask=None))


def test_what_is_kept_as_it_is_keeps_nothing_else_alive():
    cache = cache_of(levelling=False, sink_tokens=4, recent_tokens=16)
    added(cache, 500)
    mx.eval(cache.state)
    for array in (*layer_of(cache).sinks.arrays, *layer_of(cache).recent.arrays):
        assert np.asarray(array).flags.c_contiguous  # a view of the 500 rows is not


def test_bytes_are_those_of_the_buffers_and_are_a_quarter_of_fp16():
    cache = TurboQuantKVCache()
    cache.update_and_fetch(rows(32768, heads=1, width=128), rows(32768, heads=1, width=128))
    assert cache.nbytes <= 0.27 * 32768 * 2 * 128 * 2
    layer = layer_of(cache)
    buffers = sum(array.nbytes for array in (*layer.codes.arrays, *layer.recent.arrays))
    assert buffers <= cache.nbytes <= buffers + 10_000  # levels


@pytest.mark.parametrize("n", [30, 600])
@pytest.mark.parametrize("copied", [TurboQuantKVCache.copy, copy.copy, copy.deepcopy])
def test_changing_a_copy_never_shows_in_the_other(n, copied):
    cache = cache_of(sink_tokens=2)
    added(cache, n)
    before = [np.array(x) for x in meant(cache)]
    other = copied(cache)
    other.trim(7)
    added(other, 20)
    assert all(np.array_equal(a, b) for a, b in zip(before, map(np.array, meant(cache)), strict=True))
    theirs = [np.array(x) for x in meant(other)]
    cache.trim(n)
    added(cache, 300)
    assert all(np.array_equal(a, b) for a, b in zip(theirs, map(np.array, meant(other)), strict=True))


@pytest.mark.parametrize("n", [0, 30, 600])
def test_a_state_is_the_whole_cache_its_codec_included(n, tmp_path):
    """A restored cache without its codec was a bug elsewhere."""
    cache = cache_of(3, 4, sink_tokens=3, seed=5)
    if n:
        added(cache, n)
    mx.save_safetensors(str(tmp_path / "state.safetensors"), {str(i): array for i, array in enumerate(cache.state)})
    saved = mx.load(str(tmp_path / "state.safetensors"))
    back = TurboQuantKVCache.from_state([saved[str(i)] for i in range(len(saved))], cache.meta_state)
    assert (back.choice, back.offset, back.nbytes) == (cache.choice, n, cache.nbytes)
    mx.random.seed(3)
    first = added(cache, 4)
    mx.random.seed(3)
    second = added(back, 4)
    outs = [c.attend_to_codes(*f, scale=0.125, mask="causal") for c, f in ((cache, first), (back, second))]
    assert mx.array_equal(*outs)
    with pytest.raises(ValueError, match="no state of a live TurboQuant cache"):
        TurboQuantKVCache.from_state([mx.zeros((3,), mx.uint8)])
    with pytest.raises(ValueError, match="no state of a live TurboQuant cache"):
        TurboQuantKVCache.from_state([])


def test_the_original_dtype_comes_back_and_the_original_stays():
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        plain = KVCache()
        plain.update_and_fetch(rows(500, dtype=dtype), rows(500, dtype=dtype))
        made = TurboQuantKVCache().filled_from(plain).dequantize()
        assert type(made) is KVCache
        assert made.keys.dtype == dtype
        assert made.offset == plain.offset == 500
        assert error(made.keys[..., :500, :], plain.keys[..., :500, :]) < 0.1
        assert mx.array_equal(made.values[..., 440:500, :], plain.values[..., 440:500, :])  # recent


def test_levels_that_are_shared_are_measured_once(monkeypatch):
    measured = []
    measure = live_levels.measure_levels
    monkeypatch.setattr(
        live_levels, "measure_levels", lambda own, centred: measured.append(len(own)) or measure(own, centred)
    )
    shared = SharedLevels()
    for _ in range(3):
        added(TurboQuantKVCache(levels=shared, layer=2), 300)
    assert len(measured) == 2  # keys and values
    short = TurboQuantKVCache(levels=shared, layer=2)
    added(short, 5)  # no need to wait for 256
    assert layer_of(short).waiting is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update_and_fetch(rows(1, heads=3), rows(1, heads=3)), "heads 3 where the cache has 2"),
        (lambda c: c.update_and_fetch(rows(1, width=96), rows(1, width=96)), "key_width 96 where the cache has 64"),
        (lambda c: c.update_and_fetch(rows(1), rows(1, dtype=mx.bfloat16)), "keys are float16, values bfloat16"),
        (lambda c: c.update_and_fetch(rows(1, dtype=mx.float32), rows(1, dtype=mx.float32)), "dtype float32"),
        (lambda c: c.update_and_fetch(rows(1, 2), rows(1, 2)), "rows of 2 sequences for a cache of 1"),
        (lambda c: c.update_and_fetch(rows(1)[0], rows(1)[0]), "give \\(batch, heads, tokens, width\\)"),
        (lambda c: c.trim(601), "trim\\(601\\): 600 tokens are held"),
        (lambda c: c.trim(-1), "trim\\(-1\\)"),
        (
            lambda c: c.attend_to_codes(rows(1, 2, 4), *c.keys_and_values(), scale=1, mask=None),
            "batch sizes must match",
        ),
        (lambda c: c.attend_to_codes(rows(1, 1, 3), *c.keys_and_values(), scale=1, mask=None), "3 query heads"),
        (
            lambda c: c.attend_to_codes(rows(1, 1, 4), *c.keys_and_values(), scale=1, mask=mx.ones((1, 1, 1, 9))),
            "doesn't broadcast to",
        ),
        (lambda c: c.attend_to_codes(rows(1, 1, 4), *c.keys_and_values(), scale=1, mask="full"), "mask='full'"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change, said):
    cache = TurboQuantKVCache()
    added(cache, 600)
    with pytest.raises(ValueError, match=said):
        change(cache)
    assert cache.offset == 600


def test_bad_settings_are_named():
    for made, said in (
        (lambda: cache_of(5), "key_bits=5"),
        (lambda: TurboQuantKVCache(recent_tokens=-1), "recent_tokens=-1"),
        (lambda: cache_of(sink_tokens=1000), "sink_tokens=1000"),
    ):
        with pytest.raises(ValueError, match=said):
            made()
    with pytest.raises(ValueError, match="16 wide"):
        TurboQuantKVCache().update_and_fetch(rows(1, width=16), rows(1, width=16))
    with pytest.raises(TypeError, match="only mlx-lm's KVCache"):
        TurboQuantKVCache().filled_from(TurboQuantKVCache())


def test_a_cache_cut_to_nothing_is_an_empty_one():
    cache = TurboQuantKVCache()
    added(cache, 300)
    cache.trim(300)
    assert cache.dequantize().keys.shape[2] == 0 or cache.dequantize().offset == 0
    assert TurboQuantKVCache.from_state(cache.state).offset == 0
    empty = cache_of(levelling=False)
    empty.update_and_fetch(rows(0), rows(0))
    assert empty.offset == 0
    for own in (cache, empty):
        queries, keys, values = added(own, 3)
        out = own.attend_to_codes(queries, keys, values, scale=0.125, mask="causal")
        assert error(out, plain_attention(queries, *meant(own), "causal")) <= 1e-3


@pytest.mark.parametrize("n", [30, 300])
@pytest.mark.parametrize("additive", [False, True])
def test_a_query_that_may_attend_to_nothing_gets_zeros_in_every_state(n, additive):
    cache = TurboQuantKVCache()
    queries, keys, values = added(cache, n, length=2)
    mask = mx.zeros((1, 1, 2, n), mx.bool_)
    mask[:, :, 1] = True
    mask = mx.where(mask, 0.0, -mx.inf).astype(mx.float16) if additive else mask
    out = cache.attend_to_codes(queries, keys, values, scale=0.125, mask=mask)
    assert not mx.any(out[:, :, 0]).item()
    assert mx.all(mx.any(out[:, :, 1], axis=-1)).item()


def test_levels_of_another_model_are_named_and_nothing_is_lost():
    shared = SharedLevels()
    cache = TurboQuantKVCache(levels=shared)
    added(cache, 100)
    before = [np.array(x) for x in meant(cache)]
    TurboQuantKVCache(levels=shared).update_and_fetch(rows(300, width=96), rows(300, width=96))
    with pytest.raises(ValueError, match="one SharedLevels for each model"):
        added(cache, 1)
    assert cache.offset == 100
    assert all(np.array_equal(a, b) for a, b in zip(before, map(np.array, meant(cache)), strict=True))


def test_a_state_whose_arrays_do_not_fit_is_refused():
    cache = cache_of(sink_tokens=2)
    added(cache, 300)
    good = cache.state
    for bad in (
        [good[0], good[1][:, :, :100], good[2][:, :, :100], *good[3:]],
        [good[0], good[2], good[1], *good[3:]],
        [*good[:3], good[3][..., :32], *good[4:]],
        good[:-1],
    ):
        with pytest.raises(ValueError, match="no state of a live TurboQuant cache"):
            TurboQuantKVCache.from_state(bad)


def test_a_row_that_comes_after_a_cut_below_the_sinks_is_a_sink_again():
    """Steps have a short way, which doesn't look for sinks."""
    cache = cache_of(levelling=False, sink_tokens=4, recent_tokens=0)
    added(cache, 300)
    added(cache, 1)
    cache.trim(300)
    keys, values = rows(1), rows(1)
    cache.update_and_fetch(keys, values)
    assert all(mx.array_equal(own[:, :, 1:], new) for own, new in zip(meant(cache), (keys, values), strict=True))


# -- batches -----------------------------------------------------------------------------------------------------------------


def singles(lengths, **choice):
    made = []
    for n in lengths:
        cache = cache_of(levelling=False, **choice)
        if n:
            added(cache, n)
        made.append(cache)
    return made


@pytest.mark.parametrize("lengths", [(5, 40, 0), (0, 0), (300, 1, 129, 128), (7,)])
@pytest.mark.parametrize("choice", [{}, {"sink_tokens": 4, "recent_tokens": 16}, {"recent_tokens": 0}])
def test_each_sequence_of_a_batch_is_attended_to_as_it_is_alone(lengths, choice):
    """Left-padded rows that attended to nothing, and an empty row that crashed the batch, were bugs elsewhere."""
    alone = singles(lengths, **choice)
    batch = TurboQuantKVCache.merge(alone)
    plain = BatchKVCache.merge([cache.dequantize() for cache in alone])
    for n in (1, 1, 4, 1, 150, 1):
        keys, values = rows(n, len(lengths)), rows(n, len(lengths))
        queries = rows(n, len(lengths), 4)
        mask = batch.make_mask(n)
        assert mx.array_equal(mask, plain.make_mask(n))
        out = batch.attend_to_codes(queries, *batch.update_and_fetch(keys, values), scale=0.125, mask=mask)
        plain.update_and_fetch(keys, values)
        assert mx.array_equal(batch.offset, plain.offset)
        for b, cache in enumerate(alone):
            own = cache.update_and_fetch(keys[b : b + 1], values[b : b + 1])
            wanted = cache.attend_to_codes(queries[b : b + 1], *own, scale=0.125, mask="causal")
            assert error(out[b : b + 1], wanted) <= 1e-3


class Driven:
    """A batch and single caches that are treated alike."""

    def __init__(self, seed, **choice):
        self.rng, self.choice = random.Random(seed), {"levelling": False, **choice}
        self.singles: list[TurboQuantKVCache] = []
        self.batch: BatchTurboQuantKVCache | None = None

    def fresh(self):
        made = []
        for _ in range(self.rng.randint(1, 3)):
            cache = cache_of(**self.choice)
            for _ in range(self.rng.randint(0, 2)):
                added(cache, self.rng.choice([1, 3, 20, 200]))
            made.append(cache)
        return made

    def join(self):
        new = self.fresh()
        batch = TurboQuantKVCache.merge(new)
        if self.batch is None:
            self.batch = batch
        else:
            self.batch.extend(batch)
        self.singles += new

    def leave(self):
        kept = sorted(self.rng.sample(range(len(self.singles)), self.rng.randint(1, len(self.singles))))
        self.batch.filter(mx.array(kept) if self.rng.random() < 0.5 else kept)
        self.singles = [self.singles[i] for i in kept]

    def step(self):
        n = self.rng.choice([1, 1, 1, 3, 30])
        keys, values = rows(n, len(self.singles)), rows(n, len(self.singles))
        queries, mask = rows(n, len(self.singles), 4), self.batch.make_mask(n)
        out = self.batch.attend_to_codes(queries, *self.batch.update_and_fetch(keys, values), scale=0.125, mask=mask)
        for b, cache in enumerate(self.singles):
            own = cache.update_and_fetch(keys[b : b + 1], values[b : b + 1])
            assert error(out[b], cache.attend_to_codes(queries[b : b + 1], *own, scale=0.125, mask="causal")[0]) <= 1e-3

    def prefill_ragged(self):
        lengths = [self.rng.randint(0, 40) for _ in self.singles]
        lengths[0] += 1
        most = max(lengths)
        self.batch.prepare(lengths=lengths, right_padding=[most - n for n in lengths])
        keys, values = rows(most, len(self.singles)), rows(most, len(self.singles))
        piece = self.rng.choice([7, most])
        for at in range(0, most, piece):
            own = slice(at, at + piece)
            queries = rows(min(piece, most - at), len(self.singles), 4)
            mask = self.batch.make_mask(queries.shape[2])
            fetched = self.batch.update_and_fetch(keys[:, :, own], values[:, :, own])
            out = self.batch.attend_to_codes(queries, *fetched, scale=0.125, mask=mask)
            for b, cache in enumerate(self.singles):
                count = min(max(lengths[b] - at, 0), queries.shape[2])
                if count:
                    mine = (keys[b : b + 1, :, at : at + count], values[b : b + 1, :, at : at + count])
                    asked = queries[b : b + 1, :, :count]
                    wanted = cache.attend_to_codes(asked, *cache.update_and_fetch(*mine), scale=0.125, mask="causal")
                    assert error(out[b : b + 1, :, :count], wanted) <= 1e-3
        self.batch.finalize()

    def cut(self):
        most = min(cache.offset for cache in self.singles)
        n = self.rng.randint(0, min(most, 40))
        self.batch.trim(n)
        for cache in self.singles:
            cache.trim(n)

    def check(self):
        assert self.batch.size() == max(cache.offset for cache in self.singles) or self.batch.size() >= 0
        assert self.batch.offset.tolist() == [cache.offset for cache in self.singles]
        for b, cache in enumerate(self.singles):
            out = self.batch.extract(b)
            assert out.offset == cache.offset
            if cache.offset:
                assert all(mx.array_equal(x, y) for x, y in zip(meant(out), meant(cache), strict=True))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_to_a_batch_each_sequence_is_what_it_is_alone(seed, kernels, monkeypatch):
    if not kernels:  # as a GPU's prefill, and widths that no kernel takes: head by head
        monkeypatch.setattr(attention, "attend_to_part", lambda *_: None)
    choice = [
        {},
        {"sink_tokens": 4, "recent_tokens": 16},
        {"recent_tokens": 0},
        {"recent_tokens": 8},
    ]
    driven = Driven(seed, **choice[seed % 4])
    driven.join()
    for _ in range(14):
        getattr(driven, driven.rng.choice(["join", "leave", "step", "step", "prefill_ragged", "cut"]))()
        driven.check()


def test_levels_of_sequences_that_join_may_differ():
    levelled = TurboQuantKVCache()
    added(levelled, 400)
    other = TurboQuantKVCache()
    other.update_and_fetch(rows(300, loud=3), rows(300) + 5)
    short = TurboQuantKVCache()
    added(short, 20)
    batch = TurboQuantKVCache.merge([levelled, other, short])
    keys, values, queries, mask = rows(1, 3), rows(1, 3), rows(1, 3, 4), batch.make_mask(1)
    out = batch.attend_to_codes(queries, *batch.update_and_fetch(keys, values), scale=0.125, mask=mask)
    for b in range(3):
        wanted = plain_attention(queries[b : b + 1], *meant(batch.extract(b)), None)
        assert error(out[b : b + 1], wanted) <= 1e-3


def test_a_batch_that_begins_empty_measures_its_levels_together():
    batch = TurboQuantKVCache.merge([TurboQuantKVCache() for _ in range(3)])
    batch.prepare(lengths=[150, 100, 40], right_padding=[0, 50, 110])
    batch.update_and_fetch(rows(150, 3), rows(150, 3))
    assert layer_of(batch).waiting is None  # 290 rows that aren't padding
    batch.finalize()
    assert batch.offset.tolist() == [150, 100, 40]
    assert batch.left_padding.tolist() == [0, 50, 110]


def test_rows_wait_until_enough_are_behind_the_sinks_to_measure_levels():
    batch = TurboQuantKVCache.merge([TurboQuantKVCache() for _ in range(64)])
    batch.update_and_fetch(rows(4, 64), rows(4, 64))  # 256 rows, all of them sinks
    assert layer_of(batch).waiting is not None
    added(batch, 1, 64)
    assert layer_of(batch).waiting is None
    alone = cache_of(sink_tokens=256)
    for count, waits in ((256, True), (40, True), (40, False)):
        queries, keys, values = added(alone, count)
        assert (layer_of(alone).waiting is not None) == waits
        out = alone.attend_to_codes(queries, keys, values, scale=0.125, mask="causal")
        assert error(out, plain_attention(queries, *meant(alone), "causal")) < 1e-2
    assert not np.all(layer_of(alone).runs[0][0].levels.keys.divisor == 1)  # measured


def test_a_batchs_state_is_the_whole_batch():
    batch = TurboQuantKVCache.merge(singles((5, 200, 0), sink_tokens=2))
    back = BatchTurboQuantKVCache.from_state(batch.state, batch.meta_state)
    assert back.offset.tolist() == batch.offset.tolist()
    queries, mask = rows(1, 3, 4), batch.make_mask(1)
    keys, values = rows(1, 3), rows(1, 3)
    outs = [c.attend_to_codes(queries, *c.update_and_fetch(keys, values), scale=1.0, mask=mask) for c in (batch, back)]
    assert mx.array_equal(*outs)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: cache_of(3, levelling=False), "key_bits 4 and key_bits 3"),
        (lambda: cache_of(levelling=False, sink_tokens=2), "sink_tokens 4 and sink_tokens 2"),
    ],
)
def test_caches_that_are_not_alike_can_not_be_in_one_batch(other, said):
    with pytest.raises(ValueError, match=said):
        TurboQuantKVCache.merge([*singles((5,)), other()])
    with pytest.raises(ValueError, match=said):
        TurboQuantKVCache.merge(singles((5,))).extend(TurboQuantKVCache.merge([other()]))


def test_rows_that_are_not_alike_can_not_be_in_one_batch():
    wide = cache_of(levelling=False)
    wide.update_and_fetch(rows(3, width=96), rows(3, width=96))
    bf16 = cache_of(levelling=False)
    added(bf16, 3, dtype=mx.bfloat16)
    for other, said in ((wide, "key_width 64 and key_width 96"), (bf16, "dtype float16 and dtype bfloat16")):
        with pytest.raises(ValueError, match=said):
            TurboQuantKVCache.merge([*singles((5,)), other])
    with pytest.raises(TypeError, match="KVCache and TurboQuantKVCache"):
        TurboQuantKVCache.merge([*singles((5,)), KVCache()])
    batch = TurboQuantKVCache.merge(singles((5, 6)))
    with pytest.raises(ValueError, match="rows of 3 sequences for a cache of 2"):
        batch.update_and_fetch(rows(1, 3), rows(1, 3))
    with pytest.raises(ValueError, match="trim\\(7\\)"):
        batch.trim(7)
    with pytest.raises(IndexError, match="sequence 2"):
        batch.filter([2])
    with pytest.raises(ValueError, match="one for each sequence"):
        batch.prepare(right_padding=[1])
    with pytest.raises(ValueError, match="empty batch only"):
        batch.prepare(left_padding=[1, 0])


def test_a_batch_of_none_stands_for_none():
    whole = TurboQuantKVCache.merge(singles((300, 20)))
    for empty in (
        BatchTurboQuantKVCache([], cache_of(levelling=False)),
        TurboQuantKVCache.merge(singles((300,))),
    ):
        empty.filter([])
        assert empty.offset.tolist() == []
        with pytest.raises(ValueError, match="rows of 2 sequences for a cache of 0"):
            empty.update_and_fetch(rows(1, 2), rows(1, 2))
        other = whole.copy()
        other.extend(empty)
        assert other.offset.tolist() == [300, 20]
        empty.extend(whole)
        assert empty.offset.tolist() == [300, 20]
        queries, mask, new = rows(1, 2, 4), whole.make_mask(1), (rows(1, 2), rows(1, 2))
        outs = [c.attend_to_codes(queries, *c.update_and_fetch(*new), scale=1.0, mask=mask) for c in (empty, other)]
        assert error(*outs) <= 1e-3


def test_a_batch_is_cut_no_further_than_its_shortest():
    batch = TurboQuantKVCache.merge(singles((300, 20)))
    with pytest.raises(ValueError, match="trim\\(100\\): sequence 1 has 20 tokens"):
        batch.trim(100)
    with pytest.raises(TypeError, match="whole numbers from 0"):
        batch.filter(mx.array([True, False]))
    with pytest.raises(ValueError, match="0 or more"):
        BatchTurboQuantKVCache([-2, 0])
    assert batch.trim(np.int64(3)) == 3
    assert batch.offset.tolist() == [297, 17]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("levelled", [False, True])
@pytest.mark.parametrize("kernel", [True, False])
def test_requests_that_join_finish_and_are_cancelled_get_what_they_would_get_alone(seed, levelled, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(attention, "attend_to_part", no_kernel)
    model = FAMILIES["llama"].build()
    shared = SharedLevels()

    def make():
        return [cache_of(levelling=levelled, recent_tokens=16, levels=shared, layer=i) for i in range(4)]

    if levelled:  # known before the first comes: alone or together, all are coded alike
        feed(model, make(), [n * 7 % 128 for n in range(300)])
    same = 0
    results = drive(model, make, seed)
    for result in results:
        # Rows of a batch differ in the last bit from those alone, and a value on a border may get the next code.
        logprobs, own = alone(model, make, result)
        off = [words_that_differ(a, b) for a, b in zip(own, result.cache, strict=True)]
        assert max(off) <= 0.03
        if not any(off):
            same += 1
            check_logprobs(result, logprobs)
            if not result.cancelled:
                assert [c.offset for c in result.cache] == [c.offset for c in own]
    assert same >= len(results) - 2


def words_that_differ(one, other):
    """Of the codes of the tokens that both have."""
    rows = min(one.offset, other.offset)
    if not rows:
        return 0.0
    words, others = (np.array(layer_of(cache).codes.arrays[0][:, :, :rows]) for cache in (one, other))
    return float(np.mean(words != others))
