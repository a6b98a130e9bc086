"""`TieredPromptCache` where mlx_lm.server has its `LRUPromptCache`: the same calls, at least the same hits."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, LRUPromptCache

from prefixcache import PrefixCache
from prefixcache.servers.mlx_lm.prompt_cache import TieredPromptCache, identity_of
from tests.models import states
from tests.servers.slow_disk import slow_disk

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-llama"
KEY = ("model", None, None)
LONG = list(range(1000))


class OfTheServersOwn:
    """A layer cache that only its server knows, with what LRUPromptCache asks of one."""

    def __init__(self, nbytes=100, trimmable=True):
        self.nbytes = nbytes
        self.seen = None
        self.trimmable = trimmable

    def is_trimmable(self):
        return self.trimmable

    def trim(self, n):
        return n


class OfMlxLmsKind(KVCache):
    """A subclass that nobody has allowed."""


CACHE = {"disk": False}
OF_A_CACHE = ("ram", "codec", "disk")


@pytest.fixture
def prompts_opened(opened):
    """Prompt caches on caches of their own."""

    def open_prompts(**values):
        cache = opened(**{name: values.pop(name) for name in OF_A_CACHE if name in values})
        return TieredPromptCache(cache, **{"identify": str, **values})

    return open_prompts


def insert(prompts, tokens, make=states.sliceable, **kw):
    prompts.insert_cache(KEY, tokens, make(tokens), **kw)


def fetched(prompts, tokens, key=KEY, **kw):
    """The depth of a hit, checked row by row."""
    made, rest = prompts.fetch_nearest_cache(key, tokens, **kw)
    depth = len(tokens) - len(rest)
    assert list(rest) == list(tokens[depth:])
    if made is not None:
        states.check(made, tokens[:depth])
    return depth


def test_it_is_an_lru_prompt_cache_and_a_hit_leaves_one_token(prompts_opened):
    prompts = prompts_opened()
    assert {name for name in dir(LRUPromptCache()) if not name.startswith("_")} - set(dir(prompts)) <= {
        "CacheEntry",
        "CacheOrder",
    }
    assert prompts.fetch_nearest_cache(KEY, LONG) == (None, LONG)
    insert(prompts, LONG)
    assert fetched(prompts, LONG) == 999
    assert fetched(prompts, [*LONG, 1, 2]) == 1000
    assert fetched(prompts, [*LONG[:700], 5]) == 700
    assert fetched(prompts, LONG, key=("other", None, None)) == 0


def test_hits_are_the_callers_own(prompts_opened):
    prompts = prompts_opened()
    insert(prompts, LONG)
    made, _ = prompts.fetch_nearest_cache(KEY, LONG)
    for layer in made:
        layer.keys[...] = 0
        layer.trim(500)
    assert fetched(prompts, LONG) == 999


def test_sequences_and_bytes_are_counted_by_type(prompts_opened):
    prompts = prompts_opened()
    insert(prompts, LONG[:512], cache_type="system")
    assert prompts.stats_by_type()["system"]["n_sequences"] == len(prompts) == 1
    for i in range(3):
        insert(prompts, [*LONG[:512], 7000 + i, *range(100)], cache_type="user")
    by_type = prompts.stats_by_type()
    assert [by_type[t]["n_sequences"] for t in ("system", "user", "assistant")] == [0, 3, 0]
    assert len(prompts) == 3
    assert by_type["system"]["n_bytes"] > 0
    assert sum(counted["n_bytes"] for counted in by_type.values()) == prompts.nbytes > 0


def test_what_the_ssd_brought_is_of_type_restored(prompts_opened):
    prompts = prompts_opened(disk=True)
    insert(prompts, LONG)
    prompts.cache.close()
    prompts = prompts_opened(disk=True)
    assert prompts.stats_by_type()["restored"]["n_sequences"] == len(prompts) == 1
    assert fetched(prompts, LONG) == 999  # read, within the wait
    assert prompts.promotions.waited == 1


def test_trim_to_bytes_empties_ram_and_to_sequences_every_tier(prompts_opened):
    prompts = prompts_opened(disk=True)
    for i in range(5):
        insert(prompts, [9000 + i, *LONG[:600]])
    assert prompts.cache.flush(10)
    prompts.trim_to(n_bytes=0)
    assert (prompts.nbytes, len(prompts)) == (0, 5)
    prompts.trim_to(n_sequences=2)
    assert len(prompts) == 2
    assert fetched(prompts, [9000, *LONG[:600]]) == 0
    assert fetched(prompts, [9004, *LONG[:600]]) == 600
    prompts.trim_to(n_bytes=-5, n_sequences=-1)  # the server subtracts what its batch takes
    assert (prompts.nbytes, len(prompts)) == (0, 0)


def test_max_size_counts_sequences_and_max_bytes_ram(prompts_opened):
    prompts = prompts_opened(max_size=2)
    for i in range(4):
        insert(prompts, [9000 + i, *LONG[:300]])
    assert len(prompts) == 2
    prompts = prompts_opened(max_bytes=100_000)
    for i in range(4):
        insert(prompts, [9000 + i, *LONG[:300]])
    assert 0 < prompts.nbytes <= 100_000


@pytest.mark.parametrize("make", [states.windowed, states.hybrid])
def test_windows_and_recurrent_state_come_back_as_themselves(prompts_opened, make):
    prompts = prompts_opened()
    insert(prompts, LONG, make)
    made, rest = prompts.fetch_nearest_cache(KEY, [*LONG, 5])
    assert [type(layer) for layer in made] == [type(layer) for layer in make([1])]
    assert rest == [5]
    states.check(made, LONG)


def test_salts_never_meet(prompts_opened):
    prompts = prompts_opened()
    insert(prompts, LONG, salt=b"me")
    assert fetched(prompts, LONG, salt=b"you") == 0
    assert fetched(prompts, LONG) == 0
    assert fetched(prompts, LONG, salt=b"me") == 999
    assert fetched(prompts, [*LONG[:500], 4], salt=b"me") == 500


def test_a_class_of_the_servers_own_is_kept_alive_and_paid_for(prompts_opened):
    prompts = prompts_opened(ram="1MB")
    insert(prompts, LONG[:100])
    prompts.insert_cache(KEY, [1, 2, 3], [OfTheServersOwn(nbytes=600_000)])
    assert prompts.cache.stats().ram_reserved == 600_000
    made, rest = prompts.fetch_nearest_cache(KEY, [1, 2, 3, 4])
    assert (type(made[0]), rest) == (OfTheServersOwn, [4])
    prompts.insert_cache(KEY, [4, 5], [OfTheServersOwn(nbytes=700_000)])  # the budget has room for one
    assert prompts.cache.stats().ram_reserved == 700_000
    assert prompts.fetch_nearest_cache(KEY, [1, 2, 3, 4])[0] is None
    prompts.insert_cache(KEY, [6, 7], [OfTheServersOwn(nbytes=7_000_000)])  # and for this never
    assert prompts.failed == 1
    prompts.trim_to(n_bytes=0)
    assert prompts.cache.stats().ram_held == prompts.nbytes == 0


def test_a_subclass_that_is_not_allowed_is_kept_alive_too(prompts_opened):
    prompts = prompts_opened()
    own = OfMlxLmsKind()
    own.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    prompts.insert_cache(KEY, [1, 2, 3], [own])
    assert (prompts.failed, prompts.cache.stats().ram_reserved) == (0, own.nbytes)
    made, rest = prompts.fetch_nearest_cache(KEY, [1, 2, 3, 4])
    assert (type(made[0]), made[0].offset, rest) == (OfMlxLmsKind, 3, [4])


def test_a_hit_never_ends_inside_an_image(prompts_opened):
    prompts = prompts_opened()
    image, other = [-77] * 300, [-78] * 300
    seen = [1, 2, 3, *image, 4, *LONG[:100], *other, 5]
    insert(prompts, seen[:200])  # as when the tail was evicted
    assert fetched(prompts, seen) == 3
    insert(prompts, seen)
    assert fetched(prompts, seen) == len(seen) - 1
    assert fetched(prompts, seen[:-1]) == 3 + 300 + 1 + 100
    assert fetched(prompts, [*image, 5]) == 0
    insert(prompts, image)
    assert fetched(prompts, image) == 0
    assert fetched(prompts, [*image, 5]) == 300


def test_what_is_kept_as_it_is_has_the_names_and_salts_of_the_rest(prompts_opened):
    prompts = prompts_opened()
    own = [OfTheServersOwn()]
    prompts.insert_cache(KEY, [1, 2, 3], own, salt=b"me")
    assert prompts.fetch_nearest_cache(KEY, [1, 2, 3, 4], salt=b"you")[0] is None
    assert prompts.fetch_nearest_cache(KEY, [1, 2, 3, 4])[0] is None
    assert prompts.fetch_nearest_cache(("other", None, None), [1, 2, 3, 4], salt=b"me")[0] is None
    assert prompts.fetch_nearest_cache(KEY, [1, 2, 3, 4], salt=b"me")[0] is not None


def test_trim_to_counts_prompt_caches_and_not_what_stands_beside_them(prompts_opened):
    prompts = prompts_opened()
    for i in range(4):
        insert(prompts, [9000 + i, *LONG[:600]])
    prompts.insert_cache(KEY, [1, 2, 3], [OfTheServersOwn(nbytes=10_000)])
    held = prompts.nbytes
    prompts.trim_to(n_bytes=held)
    assert prompts.nbytes == held
    before = prompts.cache.stats()
    prompts.trim_to(n_bytes=held - 1)
    after = prompts.cache.stats()
    assert (after.hot_prompts, after.ram_images) == (before.hot_prompts - 1, before.ram_images)  # these leave first
    assert prompts.nbytes == held - before.ram_hot // before.hot_prompts
    prompts.trim_to(n_bytes=after.ram_images)
    assert prompts.cache.stats().ram_hot == 0
    assert after.ram_images - 60_000 < prompts.nbytes <= after.ram_images


def test_weights_are_looked_at_again_when_their_files_changed_and_not_each_time_models_take_turns(
    prompts_opened, tmp_path
):
    looked = []
    prompts = prompts_opened(identify=lambda key: looked.append(key) or f"{key}{len(looked)}")
    one, two = (str(tmp_path / "one"), None, None), (str(tmp_path / "two"), None, None)
    for key in (one, two):
        Path(key[0]).mkdir()
        (Path(key[0]) / "model.safetensors").write_bytes(b"1")
    names = [prompts.name_of(key) for key in (one, two, one, two)]
    assert len(looked) == len(set(names)) == 2
    (tmp_path / "one" / "model.safetensors").write_bytes(b"22")
    assert prompts.name_of(one) not in names
    assert prompts.name_anew(one) == prompts.name_of(one)
    assert len(looked) == 4


def test_nothing_raises_into_the_thread_that_generates(prompts_opened, caplog):
    prompts = prompts_opened()
    prompts.insert_cache(KEY, ["no token"], states.sliceable([1]))
    prompts.insert_cache(KEY, [1], [object()])
    prompts.insert_cache(KEY, [1], None)
    assert prompts.fetch_nearest_cache(KEY, ["no token"]) == (None, ["no token"])
    assert prompts.fetch_nearest_cache(KEY, []) == (None, [])
    prompts.cache.close()
    insert(prompts, LONG)
    assert prompts.fetch_nearest_cache(KEY, LONG) == (None, LONG)
    assert "could not be kept" in caplog.text
    assert "999" not in caplog.text  # no tokens in logs


def test_a_name_follows_the_weights(tmp_path, prompts_opened):
    prompts = prompts_opened(identify=identity_of)
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    key, other = (str(model), None, None), (str(TINY), None, None)
    first = prompts.name_of(key)
    assert first.startswith("model@")
    weights = mx.load(str(model / "model.safetensors"))
    name = next(iter(weights))
    weights[name] = weights[name] * 1.25
    mx.save_safetensors(str(model / "model.safetensors"), weights)
    assert prompts.name_of(key) == first  # the server still has the old ones
    prompts.name_of(other)  # now it has loaded another model
    assert prompts.name_of(key) != first


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hugging Face cache; call it to let another revision of org/tiny arrive, whose first tensor is scaled."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--tiny"

    def arrive(scale):
        commit = f"{scale:040x}"
        folder = repo / "snapshots" / commit
        folder.mkdir(parents=True)
        for path in TINY.iterdir():
            shutil.copy(path, folder)
        weights = mx.load(str(folder / "model.safetensors"))
        name = min(weights)
        weights[name] = weights[name] * scale
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(commit)

    return arrive


def test_a_new_revision_of_a_repository_is_not_given_the_old_ones_prompts(hub, prompts_opened):
    hub(1)
    prompts = prompts_opened(identify=identity_of)
    key, other = ("org/tiny", None, None), (str(TINY), None, None)
    first = prompts.name_of(key)
    assert first.startswith("tiny@")
    prompts.insert_cache(key, LONG, states.sliceable(LONG))
    prompts.name_of(other)
    assert prompts.name_of(key) == first
    hub(2)
    assert prompts.name_of(key) == first  # the server still has the old ones
    prompts.name_of(other)  # now it has loaded another model
    assert prompts.fetch_nearest_cache(key, [*LONG, 1]) == (None, [*LONG, 1])
    assert prompts.name_of(key) == identity_of(key) != first


def test_weights_that_cant_be_found_have_a_name_for_this_process_only(caplog):
    name = identity_of(("nobody/has-this", None))
    assert name.startswith("process-")
    assert name != identity_of(("nobody/has-this", None))  # it may have been loaded anew
    assert "no identity" in caplog.text


def test_an_adapter_and_a_draft_model_are_part_of_the_name(tmp_path):
    plain = identity_of((str(TINY), None, None))
    assert identity_of((str(TINY), None, str(TINY))) == f"{plain}|{plain}"
    assert identity_of((str(TINY), None)) == identity_of(str(TINY)) == plain


def test_a_lookup_waits_for_the_ssd_no_longer_than_computing_would_take(prompts_opened):
    prompts = prompts_opened(disk=True)
    insert(prompts, LONG)
    prompts.cache.close()
    prompts = prompts_opened(disk=True)
    with slow_disk(prompts.cache) as go:
        assert fetched(prompts, LONG) == 0
        assert prompts.promotions.late == 1
        go.set()
        prompts.cache.promote(LONG, model=str(KEY)).result(10)
    assert fetched(prompts, LONG) == 999


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.booleans(), tokens, st.integers(0, 3)), max_size=30))
def test_hits_are_as_deep_as_mlx_lms_own_with_no_limit(steps):
    with PrefixCache(ram="50MB", codec="raw") as cache:
        ours, theirs = TieredPromptCache(cache, identify=str), LRUPromptCache(max_size=1000)
        for store, some, repeat in steps:
            prompt = [token for token in some for _ in range(1 + 90 * repeat)]
            if store:
                ours.insert_cache(KEY, prompt, states.sliceable(prompt))
                theirs.insert_cache(KEY, prompt, states.sliceable(prompt))
            else:
                found, rest = theirs.fetch_nearest_cache(KEY, prompt)
                depth = fetched(ours, prompt)
                assert depth >= min(len(prompt) - len(rest), len(prompt) - 1), (depth, len(rest))
                assert depth == 0 or found is not None
        cache.check_integrity()


def test_draft_models_layers_go_with_the_models(prompts_opened):
    prompts = prompts_opened()
    both = [*states.sliceable(LONG), *states.sliceable(LONG, 1)]
    prompts.insert_cache(KEY, LONG, both)
    made, _ = prompts.fetch_nearest_cache(KEY, [*LONG, 1])
    assert len(made) == 3
    assert all(type(layer) is KVCache and layer.offset == 1000 for layer in made)
