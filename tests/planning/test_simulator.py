"""A simulated run is the real one without its bytes: the same requests hit as deep, and write and read as much."""

import itertools
from concurrent import futures
from itertools import islice
from pathlib import Path
from types import MethodType

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.codecs.choice import as_codec
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import Basis
from prefixcache.codecs.transform.codec import Calibrated
from prefixcache.layers.reading import read
from prefixcache.memory import collector_at_rest
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell, CellOutcome
from prefixcache.planning.simulator import Simulation, simulate, tokens_of
from prefixcache.planning.sizes import StateSizes
from prefixcache.store_fetch_remove.image_maker import LiveMaker
from prefixcache.tiers.parting import states_on_the_way
from prefixcache.trace.reading import Request, Trace
from tests.inside import inside, queue_of
from tests.models.families import BASE, DELTA, MOE
from tools.soak.bases import LayerRows, basis_of

TRACES = Path(__file__).parents[1] / "fixtures" / "traces"
BLOCK = 512  # tokens an id
HEADS, WIDTH = BASE["num_key_value_heads"], BASE["head_dim"]
GB = 10**9

PLAIN = {"model_type": "llama"} | BASE | {"num_hidden_layers": 1}
SLIDING = (
    {"model_type": "gemma3_text", "query_pre_attn_scalar": 32}
    | BASE
    | {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 600}
)
HYBRID = {"model_type": "qwen3_next", "decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.5} | (
    BASE | MOE | DELTA | {"num_hidden_layers": 4}
)


def requests(name: str, count: int, every: int, *, whole: bool = False) -> list[Request]:
    """The first requests of a trace, with each `every`th of their ids: as many turns that share as much, of fewer tokens."""
    kept = []
    for request in islice(Trace(TRACES / f"{name}.jsonl.gz"), count):
        ids = request.ids[::every]
        tokens = len(ids) * BLOCK - (0 if whole else request.tokens % BLOCK)
        kept.append(request._replace(ids=ids, tokens=tokens))
    return kept


def live_cache(state: ModelState, tokens: np.ndarray) -> list:
    """A prompt cache of the model's shape after these tokens, the last of them decoded by itself. Prompts that begin alike
    have the same rows as far as they do.
    """
    arrays, count = iter(StateSizes(state, as_codec("raw")).snapshot(len(tokens)).arrays), len(tokens)
    said_last = tokens[np.maximum.accumulate(np.where(tokens != 0, np.arange(count), 0))]
    signs = 1 - 2 * (said_last[:, None, None, None, None] >> np.arange(WIDTH) & 1).astype(np.float32)
    made = []
    for layer, leaf in enumerate(state.plan(as_codec("raw")).leaves):
        if leaf["kind"] == "snapshot":
            cache = ArraysCache(2)
            cache[0], cache[1] = next(arrays), next(arrays)
        else:
            cache = RotatingKVCache(*leaf["window"][:2]) if "window" in leaf else KVCache()
            drawn = np.random.default_rng(layer).standard_normal((count, 2, 1, HEADS, WIDTH), np.float32)
            rows = mx.array((drawn * signs).transpose(1, 2, 3, 0, 4)).astype(mx.bfloat16)
            for part in (slice(0, count - 1), slice(count - 1, count)):
                cache.update_and_fetch(rows[0, :, :, part], rows[1, :, :, part])
        made.append(cache)
    assert read(made).layout == state.layout
    return made


def write_all(cache: PrefixCache) -> None:
    """Have all written that waits, and what is queued once there is room for it."""
    inside(cache).ssd.flush()
    while inside(cache).storage.budget.held().queued:
        inside(cache).ssd.flush()


def by_turns(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SSD's writer works when a simulation's does: when it is waited for, and between batches of blocks. Reads are done
    when they are asked for, as a simulation's are.
    """
    queue, due = queue_of(inside(cache).ssd), queue_of(inside(cache).ssd)._due
    queue._due = lambda: (queue._hurry > 0 or queue._closing) and due()
    make, read = LiveMaker.make, inside(cache).ssd.read

    def make_then(maker, jobs):
        write_all(cache)
        return make(maker, jobs)

    def read_now(entry):
        reading = read(entry)
        futures.wait([reading])
        return reading

    inside(cache).ssd.read = read_now

    def wait(condition, timeout=None):
        held = condition._release_save()
        try:
            write_all(cache)
        finally:
            condition._acquire_restore(held)

    inside(cache).storage.changed.wait = MethodType(wait, inside(cache).storage.changed)
    monkeypatch.setattr(LiveMaker, "make", make_then)


@pytest.fixture
def served(tmp_path_factory, monkeypatch):
    """Serves requests with a real cache, real files and all; the tokens hit by each, and what it counted."""

    def serve(
        asked: list[Request],
        state: ModelState,
        codec: str,
        ram: int,
        ssd: int,
        hot: int | str = 0,
        lease: float = 0,
        lease_tokens: int = 0,
        **more,
    ):
        model = StateSizes(state, as_codec(codec)).model
        disk = {"ssd_dir": tmp_path_factory.mktemp("ssd"), "ssd": ssd, "spill_on_close": False} if ssd else {}
        hits = []
        with PrefixCache(ram=ram, hot=hot, codec=codec, memory_reserve=0, **disk, **more) as cache:
            if ssd:
                by_turns(cache, monkeypatch)
            for request in asked:
                inside(cache).leases.clock = lambda now=request.time: now
                tokens = np.frombuffer(tokens_of(request, BLOCK), "<i8")
                prompt = cache.prompt(tokens, model=model)
                if ssd:
                    cache.promote(prompt).result()
                    write_all(cache)
                hits.append(len(prompt) - len(cache.fetch(prompt)[1]))
                for end in states_on_the_way(hits[-1], len(prompt)) if state.has_snapshots else ():
                    live = live_cache(state, tokens[:end])
                    cache.store(prompt.first(end), live, write_back_from=prompt.given_rows.tokens)
                live = live_cache(state, tokens)
                cache.store(prompt, live, write_back_from=prompt.given_rows.tokens)
                cache.keep_hot(prompt, live)
                if lease:
                    cache.lease(prompt.first(lease_tokens or len(prompt)), ttl=lease)
                if ssd:
                    write_all(cache)
                cache.check_integrity()
            return hits, cache.stats()

    return serve


def agree(served, asked: list[Request], config: dict, codec: str, ram: int, ssd: int, **policy) -> CellOutcome:
    """Check that a simulation has what a real cache has, and return it."""
    state = ModelState.of(config, name="tiny")
    real = {
        "policy": policy.get("policy", "lru"),
        "ssd_admission": policy.get("admission", "always"),
        "spill": policy.get("spill", "drop"),
        "hot": policy.get("hot", 0),
        "lease": policy.get("lease", 0),
        "lease_tokens": policy.get("lease_tokens", 0),
    }
    hits, stats = served(asked, state, codec, ram, ssd, **real)
    outcome = simulate(asked, state, as_codec(codec), Cell(ram, ssd, **policy), block=BLOCK)
    counters = stats.counters
    assert outcome.served.hit.tolist() == hits
    assert sum(hits) == outcome.ram_tokens + outcome.ssd_tokens == counters.hit_tokens
    assert outcome.served.hot.sum() == outcome.hot_tokens == counters.hot_hit_tokens
    assert outcome.served.asked_tokens == counters.asked_tokens == sum(request.tokens for request in asked)
    assert (outcome.stored_tokens, outcome.stored_bytes) == (counters.stored_tokens, counters.stored_bytes)
    assert (outcome.evicted, outcome.dropped) == (counters.evicted, counters.dropped)
    assert outcome.declined == counters.declined
    if ssd in (0, GB):  # else an image more or less is on the SSD, for which RAM has a node
        assert outcome.ram_peak == stats.ram_peak
        assert (outcome.ram_tokens, outcome.ssd_tokens) == (counters.ram_hit_tokens, counters.ssd_hit_tokens)
    if stats.ssd is not None:
        assert (outcome.written_files, outcome.written_bytes) == (stats.ssd.written_files, stats.ssd.written_bytes)
        assert (outcome.read_files, outcome.read_bytes) == (stats.ssd.read_files, stats.ssd.read_bytes)
        assert outcome.ssd_peak <= ssd
    return outcome


@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
def test_ram_alone(served, codec):
    ram = {"raw": 4_000_000, "turboquant:4": 1_500_000}[codec]
    agree(served, requests("coding_agents", 30, 16), PLAIN, codec, ram, 0)


@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
def test_ram_and_an_ssd_with_room_for_all(served, codec):
    ram = {"raw": 4_000_000, "turboquant:4": 1_500_000}[codec]
    agree(served, requests("coding_agents", 30, 16), PLAIN, codec, ram, GB)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_an_ssd_that_is_too_small_under_each_policy(served, policy):
    """Blocks are whole and the limit is between two of them: the index's size is simulated to some kB, not to the byte."""
    image, ram = 69_632, 30 * 75_000
    ssd = (1 << 20) + (100 << 10) + int(60.5 * (image + 1600))
    agree(served, requests("coding_agents", 30, 16, whole=True), PLAIN, "raw", ram, ssd, policy=policy)


def test_what_the_ssd_is_given_at_second_sight_only(served):
    asked = requests("coding_agents", 30, 16, whole=True)
    agree(served, asked, PLAIN, "raw", 30 * 75_000, GB, admission="second")


@pytest.mark.parametrize("config", [PLAIN, SLIDING, HYBRID], ids=["plain", "sliding", "hybrid"])
def test_blocks_that_are_written_as_soon_as_they_are_whole(served, config):
    asked = requests("coding_agents", 16, 16, whole=config is HYBRID)
    agree(served, [request for request in asked for _ in range(2)], config, "raw", 4_000_000, GB, spill="through")


def test_sliding_windows(served):
    agree(served, requests("coding_agents", 16, 16), SLIDING, "raw", 4_000_000, GB)


def test_state_that_cannot_be_cut(served):
    asked = requests("coding_agents", 16, 16, whole=True)
    agree(served, [request for request in asked for _ in range(2)], HYBRID, "raw", 4_000_000, GB)


# -- hot prompts ----------------------------------------------------------------------------------------------------------


@st.composite
def chats(draw: st.DrawFn) -> list[Request]:
    """Turns of some chats that begin alike: each goes on from what its chat asked before, asks it again, or another end."""
    asked: list[Request] = []
    ids = [(0,)] * 3
    fresh = itertools.count(1)
    for at, chat in enumerate(draw(st.lists(st.integers(0, 2), min_size=3, max_size=12))):
        kept = ids[chat][: draw(st.integers(1, 4))]
        ids[chat] = (*kept, *itertools.islice(fresh, draw(st.integers(0, 2))))
        cut = draw(st.sampled_from((0, 1, 100, 256, 400)))
        asked.append(Request(float(at), len(ids[chat]) * BLOCK - cut, 0, ids[chat]))
    return asked


@given(
    asked=chats(),
    model=st.sampled_from((PLAIN, SLIDING, HYBRID)),
    codec=st.sampled_from(("raw", "turboquant:4")),
    ram=st.sampled_from((500_000, 1_500_000, 20_000_000)),
    ssd=st.sampled_from((0, GB)),
    share=st.sampled_from((2, 4)),
    lease=st.sampled_from((0, 1.5, 4.0, 100.0)),
    lease_tokens=st.sampled_from((0, 300, 512)),
)
def test_what_is_hot_and_what_is_leased_of_any_chats(served, asked, model, codec, ram, ssd, share, **leases):
    agree(served, asked, model, codec, ram, ssd, hot=ram // share, **leases)


def test_a_chat_goes_on_hot():
    state, codec = ModelState.of(PLAIN, name="tiny"), as_codec("turboquant:4")
    turns = [Request(float(at), 500 * (at + 1), 0, (*range(at + 1),)) for at in range(4)]
    for hot, share in ((0, 0), ("auto", 1)):
        outcome = simulate(turns, state, codec, Cell(20_000_000, hot=hot), block=500)
        assert outcome.served.hit.tolist() == [0, 500, 1000, 1500]
        assert outcome.served.hot.tolist() == [share * tokens for tokens in (0, 500, 1000, 1500)]
        assert outcome.hot_hits == 3 * share


# -- codes of unequal lengths ----------------------------------------------------------------------------------------------


@pytest.fixture
def calibrated(tmp_path_factory):
    """The codec of a model whose rows are like those of `live_cache`, and the folder of its basis."""
    rows = np.random.default_rng(0).normal(size=(2, 3000, HEADS, WIDTH)).astype(np.float32)
    state = ModelState.of(PLAIN, name="tiny")
    data = basis_of(StateSizes(state, as_codec("raw")).model, [[LayerRows(0, rows[0], rows[1])]], "bfloat16")
    folder = tmp_path_factory.mktemp("bases")
    Bases(folder).save(data)
    return Calibrated(4.0, TurboQuant(), Basis(data)), folder


@pytest.mark.parametrize("ssd", [0, GB])
def test_transformed_blocks_are_of_the_size_that_the_basis_expects(served, calibrated, ssd):
    """With room for all the same is hit; bytes are what a block takes on average."""
    codec, folder = calibrated
    asked, state = requests("coding_agents", 20, 16), ModelState.of(PLAIN, name="tiny")
    hits, stats = served(asked, state, "transform:4", 40_000_000, ssd, basis_dir=folder)
    outcome = simulate(asked, state, codec, Cell(40_000_000, ssd), block=BLOCK)
    assert outcome.served.hit.tolist() == hits
    assert outcome.stored_tokens == stats.counters.stored_tokens
    assert outcome.stored_bytes == pytest.approx(stats.counters.stored_bytes, rel=0.01)
    assert outcome.ram_peak == pytest.approx(stats.ram_peak, rel=0.01)
    if stats.ssd is not None:
        assert outcome.written_files == stats.ssd.written_files
        assert outcome.written_bytes == pytest.approx(stats.ssd.written_bytes, rel=0.01)


def test_eviction_of_transformed_blocks_is_simulated_but_for_a_few(served, calibrated):
    codec, folder = calibrated
    asked, state = requests("coding_agents", 30, 16), ModelState.of(PLAIN, name="tiny")
    hits, stats = served(asked, state, "transform:4", 1_330_000, 0, basis_dir=folder)
    outcome = simulate(asked, state, codec, Cell(1_330_000), block=BLOCK)
    assert stats.ram_reserved == codec.basis.nbytes
    assert stats.counters.evicted > 50
    assert outcome.evicted == pytest.approx(stats.counters.evicted, rel=0.1)
    assert outcome.served.hit.sum() == pytest.approx(sum(hits), rel=0.05)


def test_a_ram_without_room_for_the_basis_is_simulated_with_turboquant(calibrated):
    codec, _ = calibrated
    asked, state = requests("coding_agents", 4, 16), ModelState.of(PLAIN, name="tiny")
    one, other = (simulate(asked, state, each, Cell(1_000_000), block=BLOCK) for each in (codec, codec.otherwise))
    assert one.stored_bytes == other.stored_bytes


# -- what is known of the trace, and what is refused --------------------------------------------------------------------


def blocks_hit(name: str, room: int) -> float:
    """The share of a trace's ids that an LRU cache of RAM hits in leading runs, with room for so many blocks."""
    state, codec = ModelState.of(PLAIN, name="tiny"), as_codec("raw")
    probe = Simulation(state, codec, Cell(GB))
    probe.store(probe.prompt(tokens_of(Request(0.0, 64 * 256, 0, tuple(range(64))), 256)))
    ram = (room * 64 + 32) * probe.storage.budget.held().total // 64 // 64
    whole = (request._replace(tokens=256 * len(request.ids)) for request in Trace(TRACES / f"{name}.jsonl.gz"))
    run, hits, asked = Simulation(state, codec, Cell(ram)), 0, 0
    with collector_at_rest():
        for request in whole:
            prompt = run.prompt(tokens_of(request, 256))
            hits += -(-run.fetch(prompt) // 256)  # the last token is left to be computed
            asked += len(request.ids)
            run.store(prompt)
    return hits / asked


def test_lru_hits_what_is_known_of_the_chat_trace():
    assert blocks_hit("chat", 10_000) == pytest.approx(0.2116, abs=0.001)


def test_recorded_calls_look_up_and_store_by_themselves():
    state, codec = ModelState.of(PLAIN, name="tiny"), as_codec("raw")
    asked = [("fetch", 512, (1, 2)), ("store", 600, (1, 2, 3)), ("fetch", 700, (1, 2, 4))]
    calls = [Request(float(at), tokens, 0, ids, call) for at, (call, tokens, ids) in enumerate(asked)]
    outcome = simulate(calls, state, codec, Cell(GB), block=256)
    assert (outcome.served.requests, outcome.served.hit.tolist(), outcome.stored_tokens) == (2, [0, 512], 600)
    assert outcome.served.seconds == 2.0


def test_a_prompt_that_the_trace_gives_no_id_was_asked_for_too():
    """Some traces give a tail no id: a prompt shorter than a block then has none."""
    asked = [Request(0.0, 300, 1, ()), Request(1.0, 1100, 1, (1, 2)), Request(2.0, 1100, 1, (1, 2))]
    served = simulate(asked, ModelState.of(PLAIN), as_codec("raw"), Cell(GB), block=512).served
    assert (served.asked.tolist(), served.hit.tolist()) == ([300, 1100, 1100], [0, 0, 1023])


def test_ram_so_small_that_nothing_of_the_first_prompts_reaches_the_ssd_is_simulated():
    state, codec = ModelState.of(PLAIN, name="tiny"), as_codec("turboquant:4")
    for ram in (20_000, 60_000, 250_000):
        run = Simulation(state, codec, Cell(ram, 13_000_000))
        for request in requests("coding_agents", 8, 16):
            prompt = run.prompt(tokens_of(request, BLOCK))
            run.fetch(prompt)
            run.store(prompt)
            run.check_integrity()


def test_a_cache_that_could_keep_nothing_is_refused():
    with pytest.raises(ValueError, match="ram=0, ssd=1000: nothing could be kept"):
        simulate([], ModelState.of(PLAIN, name="tiny"), as_codec("raw"), Cell(0, 1000))


def test_nothing_of_what_left_stays_behind():
    """The collector of cycles rests during a simulation: what leaves must go by itself."""
    import gc

    state, codec = ModelState.of(PLAIN, name="tiny"), as_codec("raw")
    one = Simulation(state, codec, Cell(4_000_000, 6_000_000))
    gc.collect()
    gc.disable()
    try:
        for request in requests("coding_agents", 60, 16):
            prompt = one.prompt(tokens_of(request, BLOCK))
            one.fetch(prompt)
            one.store(prompt)
            one.check_integrity()
        assert gc.collect() < 1000
    finally:
        gc.enable()
