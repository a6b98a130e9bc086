"""The cache as its users call it: what prompts share, the request path, pins, removal and namespaces."""

import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from prefixcache import TurboQuant
from tests.inside import inside
from tests.models import states
from tests.models.states import got, put

LONG = list(range(1000))


# -- sharing ------------------------------------------------------------------------------------------------------------


def test_a_shared_prompt_is_stored_once(opened):
    cache = opened()
    put(cache, LONG)
    for i in range(10):
        stored = put(cache, LONG[:768] + [5000 + i] * 256)
        assert (stored.tokens, stored.new_tokens) == (1024, 256)
    assert cache.stats().blocks == 4 + 10


def test_a_turn_adds_its_new_tokens_only(opened):
    cache = opened()
    put(cache, LONG)
    before = cache.stats().counters.stored_bytes
    stored = put(cache, [*LONG, *range(2000, 2100)])
    assert stored.new_tokens == 100
    assert cache.stats().counters.stored_bytes - before < before / 2
    assert put(cache, LONG[:500]).new_tokens == 0


def test_a_tail_that_grows_is_extended_and_its_shorter_twin_leaves(opened):
    cache = opened()
    put(cache, LONG[:300])
    images = cache.stats().images_in_ram
    put(cache, LONG[:400])
    assert cache.stats().images_in_ram == images
    assert cache.flush(10)
    put(cache, LONG[:500])
    assert cache.flush(10)
    assert cache.flush(10)  # the twin's deletion was queued by the write's completion
    stats = cache.stats()
    assert stats.images_on_ssd == stats.ssd.files == images


def test_a_block_is_coded_once_when_it_is_whole(opened):
    """Turns of fetch and store: a tail's rows are the first ones, a block's are the codes of those, ever after."""
    cache = opened(codec=TurboQuant(key_bits=2, value_bits=2))
    rng = np.random.default_rng(0)

    def rows(n):
        return mx.array(rng.standard_normal((1, 2, n, 64)).astype(np.float16))

    live = [KVCache()]
    live[0].update_and_fetch(rows(100), rows(100))
    exact = np.array(live[0].keys[:, :, :100])
    cache.store(LONG[:100], live, model="m")
    coded = None
    for n in range(150, 600, 50):
        made, rest = cache.fetch(LONG[:n], model="m")
        made[0].update_and_fetch(rows(len(rest)), rows(len(rest)))
        cache.store(LONG[:n], made, model="m")
        now = np.array(cache.fetch(LONG[:n], model="m", leave=0)[0][0].keys[:, :, :100])
        if n < 256:
            assert np.array_equal(now, exact)
        else:
            coded = now if coded is None else coded
            assert np.array_equal(now, coded)
            assert not np.array_equal(now, exact)
    assert cache.stats().counters.recoded_tokens == 0


def test_a_diverging_prompt_hits_inside_a_block(opened):
    cache = opened()
    put(cache, LONG)
    assert got(cache, LONG[:777] + [9] * 50) == 777


def test_hits_with_a_hybrid_are_at_stored_boundaries(opened):
    cache = opened()
    for end in (100, 400, 700):
        assert put(cache, LONG[:end], states.hybrid).snapshot
    assert got(cache, LONG) == 700
    assert got(cache, LONG[:700]) == 400  # one token is left
    assert got(cache, LONG[:700], leave=0) == 700
    assert got(cache, LONG[:300]) == 100
    assert got(cache, LONG[:99]) == 0


def test_a_window_is_hit_wherever_its_rows_were_held(opened):
    cache = opened()
    tokens: list[int] = []
    for turn in range(6):
        tokens = tokens + [turn] * 150
        put(cache, tokens, lambda t: states.windowed(t, size=200, chunk=150))
    assert got(cache, tokens[:880] + [77] * 10) == 880
    assert got(cache, tokens[:520] + [77] * 10) == 520
    cache.trim_to(0)
    assert cache.match(tokens, model="m") == (0, 900)
    assert cache.promote(tokens, model="m").result(10) == 900


# -- the request path ---------------------------------------------------------------------------------------------------


def test_match_and_fetch_open_no_file(opened):
    cache = opened()
    put(cache, LONG)
    cache.flush(10)
    got(cache, LONG)
    opens, me = [], threading.get_ident()

    def hook(event, args):
        if (
            event in ("open", "os.listdir", "os.scandir", "sqlite3.connect")
            and threading.get_ident() == me
            and watching
        ):
            opens.append((event, args))

    watching = True
    sys.addaudithook(hook)
    cache.match(LONG, model="m")
    got(cache, LONG)
    cache.match([4] * 700, model="m")
    watching = False
    assert not opens


def test_fetched_and_stored_share_no_memory(opened):
    cache = opened()
    live = states.sliceable(LONG)
    cache.store(LONG, live, model="m")
    live[0].keys[:, :, :50] = 0
    mx.eval(live[0].keys)
    made, _ = cache.fetch(LONG, model="m")
    made[0].keys[:, :, :50] = 1
    made[1].update_and_fetch(*states.rows([3] * 300, 1))
    mx.eval(made[0].keys, made[1].keys)
    assert got(cache, LONG) == 999


def test_fetch_leaves_room_to_grow_without_a_copy(opened):
    cache = opened()
    put(cache, LONG)
    made, rest = cache.fetch(LONG + [1] * 200, model="m")
    before = made[0].keys.shape[2]
    made[0].update_and_fetch(*states.rows(rest, 0))
    assert made[0].keys.shape[2] == before >= 1200 + 256 - 256


def test_lookup_gives_wrappers_that_copy_trim_and_decode(opened):
    cache = opened()
    put(cache, LONG)
    entry = cache.lookup(LONG, model="m")
    assert entry.tokens == 1000
    assert entry.is_trimmable()
    other = entry.copy()
    assert other.trim(300) == 300
    assert (entry.tokens, other.tokens) == (1000, 700)
    states.check(entry.dequantize(), LONG)
    states.check(other.dequantize(), LONG[:700])
    layer = entry.layers[1]
    assert layer.class_name == "mlx_lm.models.cache.KVCache"
    assert layer.nbytes == 1000 * states.WIDTH * 4 * 2
    copied = layer.copy()
    copied.trim(990)
    assert (copied.dequantize().offset, layer.dequantize().offset) == (10, 1000)
    cache.clear()
    states.check(entry.dequantize(), LONG)
    assert cache.lookup(LONG, model="m") is None
    with pytest.raises(ValueError, match="trim"):
        entry.trim(-1)


# -- pins, removal, namespaces ------------------------------------------------------------------------------------------


def test_a_pinned_path_stays_until_unpinned(opened):
    cache = opened(ram=200_000, disk=False)
    put(cache, LONG)
    assert cache.pin(LONG, model="m") == 1000
    assert cache.pin(LONG, model="m") == 1000
    for i in range(20):
        put(cache, [7000 + i] * 600)
    assert got(cache, LONG) == 999
    assert cache.unpin(LONG, model="m")
    assert cache.unpin(LONG, model="m")
    assert not cache.unpin(LONG, model="m")
    for i in range(20):
        put(cache, [8000 + i] * 100)  # less than an eighth of the RAM: what is longer leaves others what was hit
    assert cache.match(LONG, model="m").ram == 0
    assert cache.pin([1, 2, 3], model="m") == 0


def test_remove_forgets_a_prompt_and_spares_what_others_share(opened):
    cache = opened()
    put(cache, LONG)
    put(cache, LONG[:512] + [3] * 300)
    cache.flush(10)
    assert cache.remove(LONG, model="m") > 0
    assert cache.match(LONG, model="m").ssd == 512
    assert got(cache, LONG[:512] + [3] * 300) == 811
    assert cache.remove([1, 2, 3], model="m") == 0
    cache.flush(10)
    cache.check_integrity()
    assert cache.remove(LONG[:512] + [3] * 300, model="m") > 0
    cache.flush(10)
    assert cache.stats().blocks == cache.stats().ssd.files == 0


def test_clear_leaves_nothing_anywhere(opened, tmp_path):
    cache = opened()
    for i in range(5):
        put(cache, [i] * 600)
    cache.pin([1] * 600, model="m")
    cache.clear()
    cache.flush(10)
    stats = cache.stats()
    assert (stats.blocks, stats.ram_held, stats.ssd.files, stats.pinned) == (0, 0, 0, 0)
    assert not list((tmp_path / "ssd" / "rows").rglob("*.safetensors"))
    assert put(cache, [1] * 600).tokens == 600


@pytest.mark.parametrize("boundary", [256, 300, 512])
def test_remove_spares_the_shorter_boundaries_of_recurrent_state(opened, boundary):
    cache = opened()
    put(cache, LONG[:boundary], states.hybrid)
    put(cache, LONG[:700], states.hybrid)
    assert cache.remove(LONG[:700], model="m") > 0
    cache.check_integrity()
    assert got(cache, LONG) == boundary
    assert cache.remove(LONG[:boundary], model="m") > 0
    assert got(cache, LONG) == 0


def test_namespaces_of_salts_that_hold_nothing_are_dropped_when_there_are_many(opened, monkeypatch):
    monkeypatch.setattr("prefixcache.store_fetch_remove.namespaces.SWEEP_AT", 20)
    cache = opened(disk=False, ram="200KB")
    put(cache, LONG, salt=b"keep")
    held = cache.pin(LONG, model="m", salt=b"keep")
    for i in range(500):
        put(cache, [i, *LONG[:200]], salt=str(i).encode())
    cache.check_integrity()
    assert cache.stats().namespaces < 100
    assert got(cache, LONG, salt=b"keep", leave=0) == held > 0
    assert got(cache, [499, *LONG[:200]], salt=b"499", leave=0) == 201
    cache.clear()
    put(cache, LONG, salt=b"0")
    assert got(cache, LONG, salt=b"0") == 999


def test_trim_to_nothing_does_not_wait_for_what_nodes_hold(opened, monkeypatch):
    cache = opened()
    put(cache, LONG)
    assert cache.flush(10)
    monkeypatch.setattr(inside(cache).storage.changed, "wait", lambda seconds: pytest.fail("it waits"))
    assert 0 < cache.trim_to(0, wait=30) == cache.stats().ram_held
    assert cache.match(LONG, model="m") == (0, len(LONG))


def test_trim_to_without_a_wait_lets_the_coldest_be_written_and_the_hot_stay(opened):
    cache = opened()
    hot = [7, *LONG[:500]]
    put(cache, hot)
    assert cache.flush(10)
    for i in range(4):
        put(cache, [9000 + i, *LONG[:500]])
    assert got(cache, hot) == 500  # the hottest now, and on SSD already
    cache.trim_to(cache.stats().ram_held - 1000, wait=0)
    assert cache.match(hot, model="m").ram == 501


def test_removed_while_it_waits_for_the_ssd_and_stored_again(opened):
    cache = opened(spill="wait")
    for _ in range(20):
        put(cache, LONG)
        with inside(cache).storage.lock:
            for slot in list(inside(cache).storage.graph.orders[0]):
                inside(cache).storage.lower.spill_tier.spill(slot)
        cache.remove(LONG, model="m")
        cache.check_integrity()
        assert cache.match(LONG, model="m") == (0, 0)
    put(cache, LONG)
    assert cache.flush(10)
    cache.check_integrity()
    cache.close()
    cache = opened()
    assert cache.promote(LONG, model="m").result(10) == 1000
    assert got(cache, LONG) == 999


def test_models_salts_codecs_and_layouts_never_meet(opened):
    cache = opened()
    cache.store(LONG, states.sliceable(LONG), model="a", salt=b"one")
    for model, salt in (("b", b"one"), ("a", b""), ("a", b"two"), ("a", b"one\0")):
        assert cache.match(LONG, model=model, salt=salt) == (0, 0)
        assert cache.fetch(LONG, model=model, salt=salt)[0] is None
    cache.store(LONG[:300], states.sliceable(LONG[:300], layers=3), model="a", salt=b"one")
    assert len(cache.fetch(LONG, model="a", salt=b"one")[0]) == 2  # the deeper of two layouts
    cache.close()
    cache = opened(codec="turboquant:8")
    assert cache.match(LONG, model="a", salt=b"one") == (0, 0)
    cache.close()
    cache = opened()
    assert cache.match(LONG, model="a", salt=b"one") == (0, 1000)
    assert cache.match(LONG, model="a", salt=b"") == (0, 0)


def test_a_salt_is_written_nowhere(opened, tmp_path):
    cache = opened()
    cache.store(LONG, states.sliceable(LONG), model="a", salt=b"tenant-secret-8c1d")
    cache.flush(10)
    for file in (tmp_path / "ssd").rglob("*"):
        if file.is_file():
            assert b"tenant-secret" not in file.read_bytes()


def test_a_forced_collision_of_keys_is_a_miss_never_another_prompts_state(opened, monkeypatch):
    from prefixcache import keys
    from prefixcache.blocks import graph
    from prefixcache.store_fetch_remove import store as storing

    refused, grow = [], graph.Graph.grow

    def counted(*arguments):
        node = grow(*arguments)
        refused.append(node is None)
        return node

    monkeypatch.setattr(graph.Graph, "grow", counted)

    def weak(parent, tokens):
        return keys.hashlib.sha256(parent + tokens).digest()[:1] + bytes(31)

    monkeypatch.setattr(storing, "chain", weak)
    monkeypatch.setattr(graph, "chain", weak)
    monkeypatch.setattr("prefixcache.ssd.entries.keys.chain", weak)
    cache = opened()
    prompts = [[i] * 700 for i in range(150)]
    for prompt in prompts:
        put(cache, prompt)
    for prompt in prompts:
        got(cache, prompt)
    assert any(refused)
    cache.close()  # before keys are what they were
