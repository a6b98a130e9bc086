"""Every row of the table of cache classes, and every prompt cache that can't be kept: a defined answer each, none silent."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from prefixcache import CacheError, PrefixCache, Raw, TurboQuant, allow
from prefixcache.layers import Plan, read
from prefixcache.layers.allowed_classes import _allowed
from tests.models import states

TOKENS = list(range(600))


@pytest.fixture
def cache():
    with PrefixCache(ram="50MB", codec="raw") as opened:
        yield opened


def random(*shape, dtype=mx.float16, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def filled(made, n=600, heads=2, width=32, values=None, dtype=mx.float16, seed=0, step=None):
    step = step or n
    k, v = (
        random(1, heads, n, width, dtype=dtype, seed=seed),
        random(1, heads, n, values or width, dtype=dtype, seed=seed + 1),
    )
    for at in range(0, n, step):
        made.update_and_fetch(k[:, :, at : at + step], v[:, :, at : at + step])
    return made


def round_trip(cache, prompt_cache, n=600, codec_tokens=TOKENS):
    stored = cache.store(codec_tokens[:n], prompt_cache, model="m")
    assert stored.tokens == n
    made, rest = cache.fetch(codec_tokens[:n], model="m", leave=0)
    assert rest == []
    assert [type(c) for c in made] == [type(c) for c in prompt_cache]
    return made


def same_rows(a, b, n):
    return all(mx.array_equal(getattr(a, p)[..., :n, :], getattr(b, p)[..., :n, :]) for p in ("keys", "values"))


# -- the classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("cls", [KVCache, ConcatenateKVCache])
def test_sliceable_rows_are_bit_exact(cache, cls, dtype):
    live = filled(cls(), dtype=dtype)
    (made,) = round_trip(cache, [live])
    assert made.offset == 600
    assert made.keys.dtype == dtype
    assert same_rows(made, live, 600)
    more = random(1, 2, 5, 32, dtype=dtype, seed=9)
    assert all(
        mx.array_equal(a, b)
        for a, b in zip(made.update_and_fetch(more, more), live.update_and_fetch(more, more), strict=True)
    )


def test_a_concatenate_cache_has_no_spare_rows(cache):
    (made,) = round_trip(cache, [filled(ConcatenateKVCache())])
    assert made.keys.shape[2] == made.offset == 600


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32), (3, 32)])
def test_quantised_caches_keep_their_codes(bits, group):
    live = filled(QuantizedKVCache(group, bits))
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:  # whatever the codec
        (made,) = round_trip(cache, [live])
    assert (made.bits, made.group_size, made.offset) == (bits, group, 600)
    for part in ("keys", "values"):
        for a, b in zip(getattr(made, part), getattr(live, part), strict=True):
            assert a.dtype == b.dtype
            assert mx.array_equal(a[..., :600, :], b[..., :600, :])
    more = random(1, 2, 5, 32, seed=9)
    grown = zip(made.update_and_fetch(more, more)[0], live.update_and_fetch(more, more)[0], strict=True)
    assert all(mx.array_equal(a, b) for a, b in grown)


@pytest.mark.parametrize("keep", [0, 4, 100])
@pytest.mark.parametrize("n", [50, 199, 200, 201, 457, 600])
@pytest.mark.parametrize("step", [1, 64, 600])
def test_a_rotating_cache_goes_on_as_if_it_had_never_left(cache, keep, n, step):
    if step == 1 and n > 300:
        n = 300
    live = filled(RotatingKVCache(200, keep), n, step=step)
    (made,) = round_trip(cache, [live], n)
    assert (made.max_size, made.keep, made.offset) == (200, keep, n)
    for i in range(230 if step == 600 and keep != 4 else 5):  # once around
        one = random(1, 2, 1, 32, seed=100 + i)
        a, b = made.update_and_fetch(one, one), live.update_and_fetch(one, one)
        if n > 200 and step > 1 and keep and i == 0:
            continue  # what mlx-lm's ring holds then depends on the chunks of the prefill
        sums = [mx.sort(mx.sum(keys, (0, 1, 3))) for keys, _ in (a, b)]  # in whatever order the rows lie
        assert mx.allclose(*sums, rtol=0, atol=1e-3), i
        if i in (0, 1) and n < 200:
            assert mx.array_equal(a[0], b[0])


def test_a_rotating_cache_after_prefill_gives_more_boundaries_than_one(cache):
    cache.store(TOKENS, [filled(RotatingKVCache(200), step=600)], model="m")
    assert cache.match([*TOKENS[:450], 7], model="m").ram == 450
    assert cache.match([*TOKENS[:300], 7], model="m").ram == 300


@pytest.mark.parametrize("n", [100, 256, 300, 512, 600])
def test_a_chunked_cache_has_its_chunk_only(cache, n):
    live = ChunkedKVCache(256)
    for at in range(0, n, 100):
        live.maybe_trim_front()
        count = min(100, n - at)
        rows = random(1, 2, count, 32, seed=at)
        live.update_and_fetch(rows, rows)
    (made,) = round_trip(cache, [live], n)
    assert (made.chunk_size, made.offset, made.start_position) == (256, n, n // 256 * 256)
    first = n - made.start_position
    held = live.offset - live.start_position
    if first:
        assert mx.array_equal(made.keys[:, :, :first], live.keys[:, :, held - first : held])
    more = random(1, 2, 3, 32, seed=5)
    assert mx.array_equal(made.update_and_fetch(more, more)[0][:, :, -3:], more)
    assert cache.store([*TOKENS[:n], 1, 2, 3], [made], model="m").tokens == n + 3


def test_recurrent_state_is_kept_exactly_with_its_holes(cache):
    live = ArraysCache(4, left_padding=[3])
    live[0], live[2] = random(1, 5, 7, dtype=mx.bfloat16), mx.array([[2**40 + 1, -3]])
    live[3] = mx.zeros((1, 0, 64))
    live.lengths = mx.array([9])
    (made,) = round_trip(cache, [live])
    assert made.cache[1] is None
    for i in (0, 2, 3):
        assert made.cache[i].dtype == live.cache[i].dtype
        assert made.cache[i].shape == live.cache[i].shape
        assert mx.array_equal(made.cache[i], live.cache[i])
    assert made.left_padding.tolist() == [3]
    assert made.lengths.tolist() == [9]


def test_lists_of_caches_mix_kinds_and_nest(cache):
    state = ArraysCache(1)
    state[0] = random(1, 3)
    live = [
        CacheList(state, filled(KVCache())),
        CacheList(filled(KVCache(), values=16), CacheList(filled(RotatingKVCache(100)))),
    ]
    made = round_trip(cache, live)
    assert isinstance(made[0].caches, tuple)
    assert [type(c) for c in made[0].caches] == [ArraysCache, KVCache]
    assert type(made[1][1][0]) is RotatingKVCache
    assert made[1][0].values.shape[-1] == 16


def test_a_list_without_caches_comes_back_wherever_it_stands(cache):
    made = round_trip(cache, [CacheList(), filled(KVCache()), CacheList(), CacheList(CacheList())])
    assert [type(layer) for layer in made] == [CacheList, KVCache, CacheList, CacheList]
    assert (made[0].caches, made[2].caches, made[3][0].caches) == ((), (), ())


def test_zero_width_values_come_back(cache):
    live = KVCache()
    live.update_and_fetch(random(1, 1, 600, 64), mx.zeros((1, 1, 600, 0), mx.float16))
    (made,) = round_trip(cache, [live])
    assert made.values.shape[3] == 0
    assert mx.array_equal(made.keys[:, :, :600], live.keys[:, :, :600])


def test_a_layer_that_no_row_went_through_stays_empty_and_hinders_nothing(cache):
    made = round_trip(cache, [filled(KVCache()), KVCache(), RotatingKVCache(64), filled(KVCache(), seed=4)])
    assert made[1].keys is None
    assert made[1].offset == 0
    assert made[2].keys is None
    assert made[2].empty()
    made[2].update_and_fetch(random(1, 1, 1, 32), random(1, 1, 1, 32))


def test_an_empty_prompt_cache_stores_nothing(cache):
    assert cache.store(TOKENS, [KVCache(), KVCache()], model="m") == (0, 0, 0, False, ())
    assert cache.store(TOKENS, [ArraysCache(2)], model="m") == (0, 0, 0, False, ())
    assert cache.match(TOKENS, model="m") == (0, 0)


def test_layers_that_disagree_are_stored_to_the_shorter_without_state(cache):
    state = ArraysCache(1)
    state[0] = random(1, 3)
    stored = cache.store(TOKENS, [filled(KVCache(), 600), filled(KVCache(), 500), state], model="m")
    assert stored.tokens == 0  # rows are kept, but no boundary has its state
    assert not stored.snapshot
    assert cache.store(TOKENS, [filled(KVCache(), 600), filled(KVCache(), 500)], model="m").tokens == 500


class Own:
    """A cache class of a server's own."""

    def __init__(self):
        self.offset = 0
        self.parts = {"a": [None, (mx.array(3.5), 2)], "name": "x"}
        self.scale = float("inf")


class Wider(KVCache):
    """A subclass that keeps more beside its rows."""

    def __init__(self):
        super().__init__()
        self.index = mx.zeros((1, 4))
        self.flag = True


class Marked(KVCache):
    def __init__(self, mark="m"):
        super().__init__()
        self.mark = mark


@pytest.fixture
def allowed():
    before = dict(_allowed)
    yield allow
    _allowed.clear()
    _allowed.update(before)


def test_an_unknown_class_is_kept_as_its_attributes_once_it_is_allowed(cache, allowed):
    live = Own()
    live.offset = 600
    with pytest.raises(CacheError, match=r"layer 0.*Own.*allow"):
        cache.store(TOKENS, [live], model="m")
    allowed(Own)
    (made,) = round_trip(cache, [live])
    assert made.parts["a"][0] is None
    assert made.parts["a"][1][0].item() == 3.5
    assert made.parts["a"][1][1] == 2
    assert (made.parts["name"], made.scale, made.offset) == ("x", float("inf"), 600)
    assert cache.match([*TOKENS[:599], 5], model="m") == (0, 0)


def test_a_subclass_comes_back_as_itself(cache, allowed):
    allowed(Marked, Wider)
    (made,) = round_trip(cache, [filled(Marked("here"))])
    assert made.mark == "here"
    (made,) = round_trip(cache, [filled(Wider())], codec_tokens=[5] * 600)
    assert made.flag is True
    assert made.index.shape == (1, 4)
    assert made.offset == 600


@pytest.mark.parametrize("value", [object(), {1: 2}, np.zeros(3), b"bytes", lambda: 0])
def test_an_attribute_that_cannot_be_kept_is_named(cache, allowed, value):
    allowed(Own)
    live = Own()
    live.parts["odd"] = [value]
    with pytest.raises(CacheError, match=r"layer 0.*Own.*parts.*odd"):
        cache.store(TOKENS, [live], model="m")
    assert cache.stats().blocks == 0


def test_batches_are_refused_and_told_how(cache):
    batched = BatchKVCache([0, 0])
    batched.update_and_fetch(random(2, 2, 600, 32), random(2, 2, 600, 32))
    with pytest.raises(CacheError, match=r"layer 0.*BatchKVCache.*extract"):
        cache.store(TOKENS, [batched], model="m")
    with pytest.raises(CacheError, match=r"BatchRotatingKVCache.*extract"):
        cache.store(TOKENS, [BatchRotatingKVCache(5, [0])], model="m")
    assert round_trip(cache, [batched.extract(1)])[0].offset == 600
    live = KVCache()
    live.update_and_fetch(random(3, 2, 600, 32), random(3, 2, 600, 32))
    with pytest.raises(CacheError, match="batch of 3"):
        cache.store(TOKENS, [live], model="m")
    state = ArraysCache(1)
    state[0] = random(2, 3)
    with pytest.raises(CacheError, match="batch of 2"):
        cache.store(TOKENS, [state], model="m")


@pytest.mark.parametrize("wrong", [None, [], "cache", KVCache(), {}])
def test_what_is_no_prompt_cache_is_an_error(cache, wrong):
    with pytest.raises(CacheError, match="prompt cache"):
        cache.store(TOKENS, wrong, model="m")


@pytest.mark.parametrize("attribute", ["offset", "keys"])
def test_a_cache_that_contradicts_itself_is_an_error(cache, attribute):
    live = filled(KVCache())
    setattr(live, attribute, {"offset": 9999, "keys": mx.zeros((3, 4))}[attribute])
    with pytest.raises(CacheError, match="layer 0"):
        cache.store(TOKENS, [live], model="m")


def test_a_file_that_names_a_class_that_is_not_allowed_is_out_of_reach(tmp_path, allowed, caplog):
    allowed(Own)
    live = Own()
    live.offset = 600
    with PrefixCache(ram="5MB", ssd_dir=tmp_path, ssd="50MB") as cache:
        cache.store(TOKENS, [live], model="m")
    del _allowed[f"{__name__}.Own"]
    with PrefixCache(ram="5MB", ssd_dir=tmp_path, ssd="50MB") as cache:
        assert cache.match(TOKENS, model="m") == (0, 0)
        assert "not allowed" in caplog.text
    with PrefixCache(ram="5MB", ssd_dir=tmp_path, ssd="50MB", allow_classes=(f"{__name__}.Own",)) as cache:
        assert cache.match(TOKENS, model="m") == (0, 600)


def test_latents_stay_raw_and_the_result_says_so():
    live = KVCache()
    live.update_and_fetch(random(1, 1, 600, 512), random(1, 1, 600, 64))
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        assert cache.store(TOKENS, [filled(KVCache()), live], model="m").raw_layers == (1,)
        made, _ = cache.fetch(TOKENS, model="m", leave=0)
        assert mx.array_equal(made[1].keys[:, :, :600], live.keys[:, :, :600])


def test_streams_of_equal_codec_width_and_dtype_share_a_tensor():
    live = [filled(KVCache()), filled(KVCache(), heads=3), filled(KVCache(), values=64)]
    plan = Plan(read(live).layout, Raw())
    assert [(g.codec.width, g.heads) for g in plan.rows.groups] == [(32, 2 + 2 + 3 + 3 + 2), (64, 2)]


@pytest.mark.parametrize("keep", [0, 4])
def test_a_row_that_a_restored_ring_does_not_have_is_not_stored_as_if_it_had(cache, keep):
    """At its own boundary the oldest place of a full ring is empty: a hit one token before would attend to it."""
    live = filled(RotatingKVCache(100, keep), 550)
    for _ in range(50):
        filled(live, 1)  # one by one: then it holds no more than its window
    cache.store(TOKENS, [filled(KVCache()), live], model="m")
    restored, rest = cache.fetch(TOKENS[:599], model="m", leave=0)
    assert rest == []
    assert cache.match(TOKENS[:598], model="m").ram == keep
    assert cache.store(TOKENS[:599], restored, model="m").new_bytes == 0
    assert cache.match(TOKENS[:598], model="m").ram == keep
    for layer in restored:
        filled(layer, 1)
    assert read(restored).leaves[1].held[-1] == (600 - 100 + keep, 600)


def test_the_layout_does_not_depend_on_the_tokens():
    assert read([filled(KVCache(), 5)]).layout == read([filled(KVCache(), 700)]).layout
    assert read([filled(RotatingKVCache(64), 5)]).layout == read([filled(RotatingKVCache(64), 700)]).layout


# -- on another thread --------------------------------------------------------------------------------------------------


def recurrent() -> ArraysCache:
    state = ArraysCache(2)
    state[0], state[1] = random(1, 3, 80), random(1, 2, 32, 8)
    return state


NESTED = {
    "falcon_h1": lambda: [CacheList(recurrent(), filled(KVCache()))],
    "baichuan_m1": lambda: [
        CacheList(recurrent(), filled(RotatingKVCache(100))),
        CacheList(recurrent(), filled(KVCache())),
    ],
    "deeper": lambda: [CacheList(filled(KVCache()), CacheList(CacheList(recurrent()), filled(QuantizedKVCache(32))))],
    "in no list": lambda: [recurrent(), filled(KVCache())],
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("layers", sorted(NESTED))
def test_no_array_that_one_thread_fetched_is_lazy_for_another(layers, compressed):
    live, fetched = NESTED[layers](), []
    with PrefixCache(ram="16MB", codec="turboquant", memory_reserve=0) as cache:
        cache.store(TOKENS, live, model="m")
        fetch = states.compressed if compressed else PrefixCache.fetch
        worker = threading.Thread(target=lambda: fetched.append(fetch(cache, TOKENS, model="m", leave=0)[0]))
        worker.start()
        worker.join()
    (made,) = fetched
    arrays = [array for _, array in tree_flatten([everything(layer) for layer in made]) if isinstance(array, mx.array)]
    assert len(arrays) >= 4
    for array in arrays:
        mx.eval(array + 0)  # "There is no Stream" where it is lazy


def everything(value):
    """An object's attributes as plain data, whatever it is: a test may look where an adapter does not."""
    if isinstance(value, (list, tuple)):
        return [everything(item) for item in value]
    if isinstance(value, dict):
        return {str(name): everything(item) for name, item in value.items()}
    if isinstance(value, mx.array) or not hasattr(value, "__dict__"):
        return value
    return {name: everything(item) for name, item in vars(value).items() if name != "_stacks"}
