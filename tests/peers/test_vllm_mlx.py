"""`TieredPrefixCache` against vllm-mlx 0.6.0's own modules: what they call is there and means the same, and hits are as deep
as with theirs, or deeper.
"""

import ast
import inspect
import logging
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from prefixcache.servers.vllm_mlx import installation as vllm_mlx
from prefixcache.servers.vllm_mlx.auxiliary import SHARE
from prefixcache.servers.vllm_mlx.installation import TieredPrefixCache
from prefixcache.servers.vllm_mlx.prefix_cache import LONGEST_WAIT, PreparedEntry
from tests.models import states
from tests.peers.uses import uses

CACHE = {"ram": "50MB", "ssd": "100MB", "disk": False}

ROOT = Path(__file__).parents[2]
PROMPT = list(range(1000, 1700))
FIRST = {
    "scheduler.py": ("memory_aware_cache",),
    "mllm_batch_generator.py": ("prefix_cache",),
    "mllm_scheduler.py": ("prefix_cache",),
}


@pytest.fixture
def ours(opened):
    return make(opened())


def make(cache, name="m", **values) -> TieredPrefixCache:
    return TieredPrefixCache(cache, name, **values)


class Config:
    """What is read of vllm-mlx's MemoryCacheConfig."""

    def __init__(self, least=4, quantize=False):
        self.min_prefix_tokens, self.kv_quantize = least, quantize


# -- the interface ------------------------------------------------------------------------------------------------------


def test_everything_that_vllm_mlx_reads_of_the_cache_is_there(wheel, ours):
    read = [use for name, owner in FIRST.items() for use in uses(wheel.folder / "vllm_mlx" / name, owner)]
    assert {"fetch", "_entries", "_current_memory", "commit_prepared", "set_ssd_tier"} <= {use.name for use in read}
    assert [use for use in read if not hasattr(ours, use.name)] == []


def test_every_call_that_vllm_mlx_makes_can_be_made(wheel, ours):
    read = [use for name, owner in FIRST.items() for use in uses(wheel.folder / "vllm_mlx" / name, owner)]
    calls = [use for use in read if use.call]
    assert len(calls) > 20
    for use in calls:
        count, keywords = use.call
        inspect.signature(getattr(ours, use.name)).bind(*[None] * count, **dict.fromkeys(keywords))


def test_what_vllm_mlx_reads_of_a_prepared_entry_is_there(wheel):
    path = wheel.folder / "vllm_mlx" / "mllm_batch_generator.py"
    read = {use.name for use in uses(path, ("checkpoint_entry", "full_prompt_entry", "entry"))}
    assert {"tokens", "cache"} <= read
    assert [name for name in read if not hasattr(PreparedEntry, name)] == []


def test_nothing_else_in_vllm_mlx_makes_the_cache(wheel):
    name, makers = "MemoryAwarePrefixCache", set()
    for path in (wheel.folder / "vllm_mlx").rglob("*.py"):
        if name in (text := path.read_text()):
            called = {
                node.func.id
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call) and hasattr(node.func, "id")
            }
            makers |= {path.name} if name in called else set()
    assert makers == {"scheduler.py", "mllm_batch_generator.py"}


def test_every_public_name_of_theirs_takes_the_same_arguments(wheel):
    theirs = wheel.memory_cache.MemoryAwarePrefixCache
    names = [name for name in vars(theirs) if not name.startswith("_")]
    assert len(names) > 15
    for name in names:
        mine = inspect.getattr_static(TieredPrefixCache, name)
        if not callable(getattr(theirs, name)):
            assert isinstance(mine, property), name
            continue
        wanted, given = (inspect.signature(fn).parameters for fn in (getattr(theirs, name), mine))
        assert list(given) == list(wanted), name
        for parameter in wanted.values():
            assert (parameter.kind, parameter.default) == (given[parameter.name].kind, given[parameter.name].default)


def test_the_numbers_that_vllm_mlx_shows_have_the_names_of_theirs(wheel, ours):
    shown = ours.get_stats()
    assert shown.keys() >= wheel.memory_cache.CacheStats().to_dict().keys()
    ours.fetch(PROMPT)
    ours.store(PROMPT, states.sliceable(PROMPT))
    ours.fetch(PROMPT)
    shown = ours.get_stats()
    assert (shown["hits"], shown["misses"], shown["hit_rate"], shown["tokens_saved"]) == (1, 1, 0.5, 699)
    assert (shown["entry_count"], shown["store_rejections"]) == (1, 0)
    assert shown["current_memory_mb"] == round(ours.memory_usage_mb, 2) == round(ours._current_memory / 2**20, 2) > 0
    assert shown["max_memory_mb"] == round(ours.memory_limit_mb, 2) == round(50e6 / 2**20, 2)
    ours.reset_stats()
    assert (ours.get_stats()["hits"], len(ours)) == (0, 1)


def test_loading_the_module_loads_neither_vllm_mlx_nor_mlx_lm():
    code = "import sys, prefixcache.servers.vllm_mlx.installation; print({'vllm_mlx', 'mlx_lm'} & sys.modules.keys() or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


# -- the same traffic on theirs and on ours -----------------------------------------------------------------------------


@pytest.fixture
def both(wheel, opened):
    """A new pair, theirs and ours, with the same configuration."""

    def pair():
        config = wheel.memory_cache.MemoryCacheConfig(max_memory_mb=100, min_prefix_tokens=4)
        theirs = wheel.memory_cache.MemoryAwarePrefixCache(object(), config)
        return theirs, TieredPrefixCache(opened(), "m", config)

    return pair


def compare(theirs, mine, tokens: list[int]) -> None:
    """What one fetch gives: as many tokens as theirs or more, save for the one that is left; the right state, the right
    rest.
    """
    found, rest = mine.fetch(tokens)
    depth = len(tokens) - len(rest)
    assert (found is None) == (depth == 0)
    assert rest == tokens[depth:]
    if found is not None:
        states.check(found, tokens[:depth])
        assert mine._last_matched_key == tuple(tokens[:depth])
    other, left = theirs.fetch(tokens)
    if other is not None:
        states.check(other, tokens[: len(tokens) - len(left)])
        assert depth >= min(len(tokens) - len(left), len(tokens) - 1)
    assert (mine._last_match_type == "miss_short_prefix") == (theirs._last_match_type == "miss_short_prefix")


@pytest.mark.parametrize("asked", [699, 700, 701, 3, 4, 5, 0, 256, 257])
def test_one_prompt_is_found_as_deep_as_theirs(both, asked):
    theirs, mine = both()
    tokens = [*PROMPT, 5, 6, 7][:asked]
    for cache in (theirs, mine):
        assert cache.store(PROMPT, states.sliceable(PROMPT))
    compare(theirs, mine, tokens)


SEGMENTS = st.sampled_from([(0, 3), (10, 90), (1000, 256), (2000, 257), (3000, 300)])
PROMPTS = st.lists(SEGMENTS, min_size=1, max_size=4).map(lambda parts: [a + i for a, n in parts for i in range(n)])


@given(
    st.lists(st.tuples(st.sampled_from(["store", "store", "keep", "fetch", "fetch", "clear"]), PROMPTS), max_size=12)
)
def test_any_traffic_hits_at_least_as_deep_as_theirs(both, traffic):
    theirs, mine = both()
    for act, tokens in traffic:
        if act == "fetch":
            compare(theirs, mine, tokens)
        elif act == "clear":
            theirs.clear()
            mine.clear()
            assert len(mine) == len(mine._entries) == 0
        else:
            live = states.sliceable(tokens)
            stored = [cache.store(tokens, live, evict_prefixes=act == "store") for cache in (theirs, mine)]
            assert stored[0] == stored[1]
            assert tokens in mine or not stored[1]
    for _, tokens in traffic:
        compare(theirs, mine, tokens)


def test_divergent_prompts_are_found_where_theirs_looks_at_neighbours_only(both):
    theirs, mine = both()
    for cache in (theirs, mine):
        for last in range(20):
            tokens = [*range(500), last * 2, 7, 7, 7]
            cache.store(tokens, states.sliceable(tokens))
    for last in range(0, 40, 3):
        compare(theirs, mine, [*range(500), last, 8, 8, 8])


# -- what a call means --------------------------------------------------------------------------------------------------


def test_a_hit_leaves_a_token_and_is_the_callers_own(ours):
    ours.store(PROMPT, states.sliceable(PROMPT))
    for _ in range(2):
        found, rest = ours.fetch(PROMPT)
        assert rest == PROMPT[-1:]
        (clone := ours.clone_for_replay(found))[0].keys[:, :, :50] = 0
        mx.eval(clone[0].keys)
    assert ours._last_match_type == "prefix"


def test_a_state_that_was_stored_at_a_boundary_is_an_arrays_cache_again(ours):
    ours.store(PROMPT, states.hybrid(PROMPT))
    found, _ = ours.fetch([*PROMPT, 1])
    assert [type(layer) for layer in found] == [KVCache, ArraysCache]
    states.check(found, PROMPT)


def test_short_prompts_and_short_common_parts_are_misses_that_say_so(opened):
    ours = TieredPrefixCache(opened(), "m", Config(least=100))
    assert not ours.store(PROMPT[:99], states.sliceable(PROMPT[:99]))
    assert ours.store(PROMPT, states.sliceable(PROMPT))
    for tokens, kind in (
        (PROMPT[:99], "miss_short_prefix"),
        ([], "miss"),
        ([1] * 200, "miss"),
        (PROMPT[:99] + [1] * 100, "miss_short_lcp"),
        (PROMPT[:100] + [1] * 100, "prefix"),
    ):
        found, rest = ours.fetch(tokens)
        assert ours._last_match_type == kind
        assert (found is not None, ours._last_matched_key is not None) == (kind == "prefix",) * 2
        assert rest == tokens[100:] if found else rest is tokens
    assert ours.get_stats()["store_rejections"] == 0


def test_what_was_prepared_is_the_state_of_then(ours):
    live = states.sliceable(PROMPT[:500])
    entry = ours.prepare_store(PROMPT[:500], live)
    live[0].keys[:, :, :] = 0
    live[0].update_and_fetch(*states.rows([4] * 50, 0))
    mx.eval(live[0].keys)
    assert ours.commit_prepared(entry, evict_prefixes=False)
    assert entry.tokens == tuple(PROMPT[:500])
    assert entry.memory_bytes > 0
    states.check(entry.cache, PROMPT[:500])
    states.check(ours.fetch(PROMPT[:501])[0], PROMPT[:500])


def test_a_commit_is_what_its_guard_says_under_its_lock(ours):
    lock, held = threading.Lock(), []

    def guard(answer):
        return lambda: (held.append(lock.locked()), answer)[1]

    extra = {"last_logits": mx.arange(8.0)}
    for answer in (False, True):
        entry = ours.prepare_store(PROMPT, states.sliceable(PROMPT), auxiliary=extra)
        assert ours.commit_prepared(entry, commit_lock=lock, commit_guard=guard(answer)) is answer
        assert (ours.fetch_exact_auxiliary(PROMPT) is not None) is answer
    assert held == [True, True]
    assert not lock.locked()
    assert not ours.commit_prepared(entry, commit_guard=lambda: 1 / 0)
    assert ours.get_stats()["store_rejections"] == 1


def test_a_prepared_entry_that_is_never_committed_holds_nothing_back(ours):
    ours.prepare_store(PROMPT, states.sliceable(PROMPT), auxiliary={"last_logits": mx.zeros(1000)})
    assert ours.cache.stats().ram_reserved == 0
    assert ours.fetch_exact_auxiliary(PROMPT) is None


# -- auxiliary data -----------------------------------------------------------------------------------------------------


def keep(cache: TieredPrefixCache, tokens: list[int], live, **auxiliary) -> None:
    assert cache.commit_prepared(cache.prepare_store(tokens, live, auxiliary))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_auxiliary_data_comes_back_bit_for_bit_for_its_own_tokens_only(ours, dtype):
    logits = mx.random.normal((1, 100)).astype(dtype)
    keep(ours, PROMPT, states.hybrid(PROMPT), last_logits=logits, step=3)
    given = ours.fetch_exact_auxiliary(PROMPT)
    assert mx.array_equal(given["last_logits"], logits)
    assert given["last_logits"].dtype == dtype
    assert given["step"] == 3
    for other in (PROMPT[:-1], [*PROMPT, 1], [*PROMPT[:-1], 1], []):
        assert ours.fetch_exact_auxiliary(other) is None
    ours.remove(PROMPT)
    assert ours.fetch_exact_auxiliary(PROMPT) is None


def test_after_its_auxiliary_data_a_prompt_comes_whole_and_otherwise_it_leaves_a_token(ours):
    keep(ours, PROMPT[:300], states.hybrid(PROMPT[:300]))
    keep(ours, PROMPT, states.hybrid(PROMPT), last_logits=mx.zeros(4))
    assert len(ours.fetch(PROMPT)[1]) == 400
    ours.fetch_exact_auxiliary(PROMPT)
    found, rest = ours.fetch(PROMPT)
    assert (rest, ours._last_match_type) == ([], "exact")
    states.check(found, PROMPT)
    assert len(ours.fetch(PROMPT)[1]) == 400
    ours.fetch_exact_auxiliary(PROMPT)
    assert len(ours.fetch(PROMPT[:-1])[1]) == 399


def test_a_prompt_that_leaves_after_its_auxiliary_data_was_given_is_a_miss_and_never_a_part(ours):
    other = [*PROMPT[:600], *range(100)]
    ours.store(other, states.sliceable(other))
    keep(ours, PROMPT, states.sliceable(PROMPT), last_logits=mx.zeros(4))
    assert ours.fetch_exact_auxiliary(PROMPT)
    ours.cache.remove(PROMPT, model="m")
    assert ours.fetch(PROMPT) == (None, PROMPT)
    assert ours.fetch_exact_auxiliary(PROMPT) is None
    assert len(ours.fetch(PROMPT)[1]) == 100


def test_auxiliary_data_stays_within_its_share_of_the_budget(opened):
    cache = opened(ram="20MB")
    ours = make(cache)
    for i in range(40):
        keep(ours, [i, *range(200)], states.sliceable([i, *range(200)]), last_logits=mx.zeros(20_000))
        assert cache.stats().ram_reserved <= 20e6 / 32
    assert ours.fetch_exact_auxiliary([0, *range(200)]) is None
    assert ours.fetch_exact_auxiliary([39, *range(200)])
    keep(ours, PROMPT, states.sliceable(PROMPT), last_logits=mx.zeros(1_000_000))
    assert ours.fetch_exact_auxiliary(PROMPT) is None
    ours.clear()
    assert cache.stats().ram_reserved == 0


# -- memory, and what is refused ----------------------------------------------------------------------------------------


def test_reservations_count_as_memory_and_balance_however_they_are_split(ours):
    before = ours._current_memory
    assert ours.try_reserve_memory(1000)
    assert ours.try_reserve_memory(500)
    assert ours.try_reserve_memory(0)
    assert ours._current_memory == before + 1500
    for give, left in ((200, 1300), (900, 400), (0, 400), (401, 0), (99, 0)):
        ours.release_reserved_memory(give)
        assert ours._current_memory == before + left
    assert not ours.try_reserve_memory(60_000_000)
    assert ours._current_memory == before


def of_two_sequences() -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((2, 1, 700, 8)), mx.zeros((2, 1, 700, 8)))
    return cache


@pytest.mark.parametrize(
    "unkeepable",
    [[BatchKVCache([0, 0])], [of_two_sequences()], [None], [{"state": ()}], [object()], [Config()], "text"],
    ids=["batch", "batch of rows", "no layer", "states", "object", "unknown class", "text"],
)
def test_what_cannot_be_kept_is_refused_counted_and_told_once(ours, caplog, unkeepable):
    caplog.set_level(logging.WARNING, "prefixcache")
    for _ in range(3):
        assert ours.store(PROMPT, unkeepable) is False
        assert ours.prepare_store(PROMPT, unkeepable) is None
    assert ours.get_stats()["store_rejections"] == 6
    assert len(caplog.records) == 1
    assert "1000" not in caplog.text


def test_no_tokens_or_no_cache_is_not_stored(ours):
    assert not ours.store([], states.sliceable(PROMPT))
    assert not ours.store(PROMPT, [])
    assert ours.get_stats()["store_rejections"] == 0


def test_a_closed_cache_is_a_miss_and_keeps_nothing(ours):
    ours.store(PROMPT, states.sliceable(PROMPT))
    ours.cache.close()
    assert ours.fetch(PROMPT) == (None, PROMPT)
    assert ours._last_match_type == "miss"
    assert not ours.store(PROMPT, states.sliceable(PROMPT))
    assert ours.fetch_exact_auxiliary(PROMPT) is None
    assert not ours.remove(PROMPT)
    assert not ours.try_reserve_memory(1)
    assert ours.get_stats()["misses"] == 1
    ours.clear()


def test_a_prompt_is_removed_from_every_tier(opened):
    ours = make(opened(disk=True))
    ours.store(PROMPT, states.sliceable(PROMPT))
    ours.cache.flush(10)
    assert ours.remove(PROMPT, include_ssd=True)
    assert not ours.remove(PROMPT)
    assert ours.cache.match(PROMPT, model="m") == (0, 0)


def test_another_quantisation_and_another_ssd_tier_are_said_to_be_unused(opened, caplog):
    caplog.set_level(logging.WARNING, "prefixcache")
    ours = TieredPrefixCache(opened(), "m", Config(quantize=True))
    ours.set_ssd_tier(object())
    ours.set_ssd_tier(None)
    assert ours.check_ssd(PROMPT) is None
    assert len(caplog.records) == 2
    assert "raw" in caplog.records[0].getMessage()
    assert "ssd_dir" in caplog.records[1].getMessage()


# -- the SSD ------------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_found_after_a_restart_without_asking_for_the_ssd(opened):
    cache = opened(disk=True)
    ours = make(cache)
    assert (ours.load_from_disk("elsewhere"), ours.save_to_disk("elsewhere")) == (0, False)
    ours.store(PROMPT, states.windowed(PROMPT))
    assert ours.save_to_disk("elsewhere")
    cache.close()
    ours = make(opened(disk=True))
    assert ours.load_from_disk("elsewhere") == 1
    found, rest = ours.fetch([*PROMPT, 1, 2])
    assert rest == [1, 2]
    states.check(found, PROMPT)
    assert not Path("elsewhere").exists()


def test_without_a_directory_nothing_is_saved_and_that_is_said(ours, caplog):
    caplog.set_level(logging.WARNING, "prefixcache")
    ours.store(PROMPT, states.sliceable(PROMPT))
    assert not ours.save_to_disk("elsewhere")
    assert ours.load_from_disk("elsewhere") == 0
    assert "ssd_dir" in caplog.text


def test_clear_empties_ram_and_leaves_the_ssd(opened):
    ours = make(opened(disk=True))
    keep(ours, PROMPT, states.sliceable(PROMPT), last_logits=mx.zeros(4))
    ours.clear()
    assert PROMPT not in ours
    assert ours.get_stats()["misses"] == 0
    ours.cache.flush(10)
    assert len(ours.fetch(PROMPT)[1]) == 1
    without = make(opened())
    without.store(PROMPT, states.sliceable(PROMPT))
    without.clear()
    assert without.fetch(PROMPT) == (None, PROMPT)


# -- threads ------------------------------------------------------------------------------------------------------------


def test_each_thread_is_told_of_its_own_fetch(ours):
    ours.store(PROMPT, states.sliceable(PROMPT))
    ours.fetch(PROMPT)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (ours._last_match_type, ours._last_matched_key)).result() == (None, None)
        pool.submit(ours.fetch, [1] * 200).result()
        assert pool.submit(lambda: ours._last_match_type).result() == "miss"
    assert (ours._last_match_type, ours._last_matched_key) == ("prefix", tuple(PROMPT[:-1]))


def test_many_threads_at_once(opened):
    ours = make(opened(ram="600KB", disk=True, spill="wait"))
    prompts = [[i % 3] * 300 + [i] * 300 for i in range(8)]

    def work(seed):
        rng = random.Random(seed)
        for _ in range(20):
            tokens = rng.choice(prompts)[: rng.choice([200, 300, 555, 600])]
            act = rng.random()
            if act < 0.4:
                extra = {"last_logits": mx.array([float(sum(tokens))])}
                if entry := ours.prepare_store(tokens, states.hybrid(tokens), extra):
                    ours.commit_prepared(entry, commit_guard=lambda: True)
            elif act < 0.6:
                kept = ours.fetch_exact_auxiliary(tokens)
                found, rest = ours.fetch(tokens)
                assert kept is None or found is None or not rest
                assert kept is None or kept["last_logits"].item() == sum(tokens)
                if found:
                    states.check(found, tokens[: len(tokens) - len(rest)])
            elif act < 0.8:
                found, rest = ours.fetch(tokens)
                if found:
                    states.check(found, tokens[: len(tokens) - len(rest)])
            elif act < 0.9:
                if ours.try_reserve_memory(5000):
                    ours.release_reserved_memory(5000)
            elif act < 0.95:
                ours.remove(tokens)
            else:
                ours.get_stats()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    ours.clear()
    assert ours.cache.flush(20)
    assert ours.cache.stats().ram_reserved == 0


# -- docs/vllm-mlx.md -----------------------------------------------------------------------------------------------------


def test_the_page_names_flags_that_vllm_mlx_has_and_calls_that_are_there(wheel):
    page = (ROOT / "docs" / "vllm-mlx.md").read_text()
    command = (wheel.folder / "vllm_mlx" / "cli.py").read_text()
    flags = set(re.findall(r"--[a-z][a-z-]+", page))
    assert {"--continuous-batching", "--ssd-cache-dir"} <= flags
    assert {flag for flag in flags if f'"{flag}"' not in command} == set()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        compile(block, "vllm-mlx.md", "exec")
    named = set(re.findall(r"`vllm_mlx\.(\w+)\(", page))
    assert {"uninstall", "name_model"} <= named <= set(vllm_mlx.__all__)
    assert str(LONGEST_WAIT).removesuffix(".0") + " s) at most" in page
    assert f"1/{SHARE} of the budget" in page
