"""vllm-mlx 0.6.0's own schedulers on a PrefixCache: which models share what is kept, the same tokens as uncached, and more
hits than with its own cache.
"""

import logging
import random
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from prefixcache import Settings, model_identity
from prefixcache.servers.vllm_mlx import installation as vllm_mlx
from prefixcache.servers.vllm_mlx.installation import TieredPrefixCache
from tests.models import states
from tests.models.families import FAMILIES

CACHE = {"ram": "50MB", "ssd": "100MB", "disk": False}

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny-llama"
PROMPT = list(range(1000, 1700))


# -- names: no two models meet ------------------------------------------------------------------------------------------


class Model:
    """A model object, as far as names go."""


def test_install_builds_ours_in_both_schedulers_and_uninstall_theirs_again(wheel, opened, install):
    theirs = wheel.memory_cache.MemoryAwarePrefixCache
    loader, load = (
        wheel.tokenizer.load_model_with_fallback,
        vars(sys.modules["vllm_mlx.models.mllm"].MLXMultimodalLM)["load"],
    )
    constructors = [wheel.scheduler.Scheduler.__init__, wheel.multimodal.MLLMBatchGenerator.__init__]
    first, second = opened(), opened()
    assert install(first) is first
    install(second)
    config = wheel.memory_cache.MemoryCacheConfig(max_memory_mb=1)
    for module in (wheel.scheduler, wheel.multimodal):
        built = module.MemoryAwarePrefixCache(model=Model(), config=config)
        assert isinstance(built, TieredPrefixCache)
        assert built.cache is second
    vllm_mlx.uninstall()
    vllm_mlx.uninstall()
    assert wheel.scheduler.MemoryAwarePrefixCache is wheel.multimodal.MemoryAwarePrefixCache is theirs
    assert [wheel.scheduler.Scheduler.__init__, wheel.multimodal.MLLMBatchGenerator.__init__] == constructors
    assert wheel.tokenizer.load_model_with_fallback is loader
    assert vars(sys.modules["vllm_mlx.models.mllm"].MLXMultimodalLM)["load"] is load


def test_given_settings_install_opens_a_cache_and_uninstall_closes_it(install):
    cache = install(Settings(ram="1MB"))
    assert cache.stats().ram_limit == 1_000_000
    vllm_mlx.uninstall()
    with pytest.raises(RuntimeError, match="closed"):
        cache.match([1], model="m")


def test_a_model_that_vllm_mlx_loads_is_named_by_its_weights(wheel, opened, install):
    install(opened())
    model, _ = wheel.tokenizer.load_model_with_fallback(str(TINY))
    assert wheel.scheduler.MemoryAwarePrefixCache(model).model_name == model_identity(TINY)


def test_a_multimodal_models_language_model_is_named_too_and_never_as_mlx_lms(wheel, opened, install, monkeypatch):
    mllm, loaded = sys.modules["vllm_mlx.models.mllm"], Model()
    loaded.language_model = Model()
    monkeypatch.setattr(mllm.MLXMultimodalLM, "load", lambda self: setattr(self, "model", loaded))
    install(opened())
    (instance := mllm.MLXMultimodalLM(str(TINY))).load()
    assert instance.model is loaded
    name = wheel.multimodal.MemoryAwarePrefixCache(loaded.language_model).model_name
    assert re.fullmatch(re.escape(model_identity(TINY)) + r"\|mlx-vlm( [0-9.]+)?", name)


def test_a_model_that_nobody_named_has_a_name_of_its_own_in_this_process_and_that_is_said(opened, install, caplog):
    cache = opened()
    caplog.set_level(logging.WARNING, "prefixcache")
    install(cache)
    one, other, named = Model(), Model(), Model()
    vllm_mlx.name_model(named, TINY)
    build = sys.modules["vllm_mlx.scheduler"].MemoryAwarePrefixCache
    caches = [build(model) for model in (one, other, named, 5, 5)]
    assert len({mine.model_name for mine in caches}) == 5
    assert build(one).model_name == caches[0].model_name
    assert len(caplog.records) == 4
    assert "name_model" in caplog.text
    for mine in caches:
        assert mine.fetch(PROMPT) == (None, PROMPT)
        mine.store(PROMPT, states.sliceable(PROMPT))


def test_a_model_whose_files_are_gone_is_loaded_all_the_same(wheel, opened, install, monkeypatch, caplog):
    model = Model()
    monkeypatch.setattr(wheel.tokenizer, "load_model_with_fallback", lambda name: (model, None))
    install(opened())
    assert wheel.tokenizer.load_model_with_fallback("/no/such/model") == (model, None)
    assert "/no/such/model" in caplog.text
    assert wheel.scheduler.MemoryAwarePrefixCache(model).model_name.startswith("process-")


def test_models_salts_and_bounds_never_meet(wheel, opened, install):
    cache, model = opened(), FAMILIES["llama"].build()
    vllm_mlx.name_model(model, TINY)
    made = []
    for salt in (b"", b"x"):
        install(cache, salt=salt)
        made += [Ran(wheel, model, max_kv_size=size).cache for size in (0, 512, 1024)]
    for mine in made:
        assert mine.fetch(PROMPT) == (None, PROMPT)
        assert mine.store(PROMPT, states.sliceable(PROMPT))
    assert [len(mine.fetch(PROMPT)[1]) for mine in made] == [1] * 6
    assert Ran(wheel, model, max_kv_size=512).cache.model_name == made[1].model_name


@pytest.mark.parametrize("name", ["MemoryAwarePrefixCache", "is_text_only_prefix_cache_request"])
def test_an_older_release_of_vllm_mlx_is_refused_by_name(wheel, opened, install, monkeypatch, name):
    module = wheel.scheduler if name == "MemoryAwarePrefixCache" else wheel.memory_cache
    monkeypatch.delattr(module, name)
    with pytest.raises(ImportError, match=r"vllm-mlx .*: before 0\.6 .*: install vllm-mlx 0\.6"):
        install(opened())
    assert not hasattr(module, name)


# -- their schedulers ---------------------------------------------------------------------------------------------------


class Bare:
    """A tokenizer for prompts that are tokens already."""

    eos_token_id, eos_token_ids, clean_up_tokenization_spaces = None, (), False

    def decode(self, tokens):
        return ""

    def encode(self, text, **options):
        return []


class Ran:
    """Requests through one of their schedulers: (how the cache was hit, how many tokens it gave, what was generated)."""

    def __init__(self, wheel, model, tokenizer=None, **config):
        self.wheel = wheel
        self.scheduler = wheel.scheduler.Scheduler(
            model, tokenizer or Bare(), wheel.scheduler.SchedulerConfig(cache_memory_mb=100, **config)
        )
        self.cache = self.scheduler.memory_aware_cache

    def __call__(self, *prompts, n=6):
        params = self.wheel.request.SamplingParams(max_tokens=n, temperature=0.0)
        requests = [self.wheel.request.Request(str(i), list(p), params) for i, p in enumerate(prompts)]
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.has_requests():
            assert all(output.finish_reason != "error" for output in self.scheduler.step().outputs)
        for request in requests:
            self.scheduler.remove_finished_request(request.request_id)
        done = [(r.cache_hit_type, r.cached_tokens, r.output_token_ids) for r in requests]
        return done if len(done) > 1 else done[0]


def prompt_of(seed: int, n: int, vocabulary: int = 128) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=n)


def tiny(wheel):
    """tiny-llama and its tokenizer, as vllm-mlx loads them; in float32, where no two next tokens are equally likely."""
    model, tokenizer = wheel.tokenizer.load_model_with_fallback(str(TINY))
    model.set_dtype(mx.float32)
    return model, tokenizer


def test_a_chat_is_the_uncached_one_its_next_turn_hits_and_so_it_does_after_a_restart(wheel, opened, install):
    cache = opened(disk=True)
    install(cache)
    model, tokenizer = tiny(wheel)
    ours, plain = Ran(wheel, model, tokenizer), Ran(wheel, model, tokenizer, enable_prefix_cache=False)
    assert isinstance(ours.cache, TieredPrefixCache)
    said, known = list(tokenizer.encode("def add(a, b):\n    return a + b\n\n" * 12)), 0
    for turn in range(2):
        said += tokenizer.encode(f"# number {turn}\ndef sub")
        _, hit, answer = ours(said, n=4)
        assert answer == plain(said, n=4)[2]
        assert hit >= known
        known = len(said)
        said += answer
    assert ours.scheduler.save_cache_to_disk("elsewhere")
    ours.scheduler.deep_reset()
    cache.close()
    install(opened(disk=True))
    again = Ran(wheel, *tiny(wheel))
    assert again.scheduler.load_cache_from_disk("elsewhere") > 0
    _, hit, answer = again(said, n=4)
    assert hit == len(said) - 1
    assert answer == plain(said, n=4)[2]


def test_a_prompt_that_comes_again_is_computed_whole_by_theirs_and_not_by_ours(wheel, opened, install):
    model = FAMILIES["llama"].build()
    prompt = prompt_of(1, 300)
    theirs = Ran(wheel, model)
    install(opened())
    ours = Ran(wheel, model)
    first, again = zip(*((ran(prompt), ran(prompt)) for ran in (theirs, ours)), strict=True)
    assert [hit for _, hit, _ in again] == [0, 299]
    assert first[0][2] == first[1][2] == again[0][2] == again[1][2]


def test_requests_in_one_batch_share_what_is_stored(wheel, opened, install):
    model = FAMILIES["llama"].build()
    shared = prompt_of(1, 400)
    prompts = [shared + prompt_of(i, 20 + i) for i in range(2, 7)]
    plain = Ran(wheel, model, enable_prefix_cache=False)
    expected = [plain(prompt)[2] for prompt in prompts]
    install(opened())
    ours = Ran(wheel, model)
    ours(shared)
    done = ours(*prompts)
    assert [answer for _, _, answer in done] == expected
    assert all(hit >= 400 for _, hit, _ in done)
    assert ours.scheduler.get_stats()["memory_aware_cache"]["hits"] == 5


def test_with_a_lossy_codec_the_scheduler_goes_on_from_what_it_keeps(wheel, opened, install):
    install(opened(codec="turboquant:8"))
    model, tokenizer = tiny(wheel)
    ours, plain = Ran(wheel, model, tokenizer), Ran(wheel, model, tokenizer, enable_prefix_cache=False)
    prompt = list(tokenizer.encode("def add(a, b):\n    return a + b\n\n" * 12))
    ours(prompt)
    _, hit, answer = ours(prompt)
    assert (hit, answer) == (len(prompt) - 1, plain(prompt)[2])


def classes(layers) -> list[type]:
    return [type(layer) for layer in layers]


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "falcon_h1"])
def test_windows_and_recurrent_state_come_back_as_they_were_after_a_restart_too(wheel, opened, install, name):
    model = FAMILIES[name].build()
    prompt = prompt_of(1, 300)
    plain = Ran(wheel, model, enable_prefix_cache=False)
    vllm_mlx.name_model(model, TINY)  # files enough for a name
    cache = opened(disk=True)
    install(cache)
    ours = Ran(wheel, model)
    _, _, answer = ours(prompt)
    longer = prompt + answer + prompt_of(2, 30)
    expected = plain(longer)[2]
    kind, hit, said = ours(longer)
    assert (kind, hit >= 300, said) == ("prefix", True, expected)
    found, _ = ours.cache.fetch(longer)
    assert classes(found) == classes(make_prompt_cache(model))
    cache.close()
    install(opened(disk=True))
    kind, hit, said = Ran(wheel, model)(longer)
    assert (kind, hit >= 300, said) == ("prefix", True, expected)


def test_their_own_ssd_tier_brings_a_window_back_as_another_class(wheel, tmp_path, opened):
    live = states.windowed(PROMPT)
    tier = wheel.ssd_cache.SSDCacheTier(wheel.ssd_cache.SSDCacheConfig(cache_dir=str(tmp_path / "theirs")))
    tier.start_writer()
    tier.enqueue_spill(tuple(PROMPT), live, 1000)
    tier.close()
    tier = wheel.ssd_cache.SSDCacheTier(wheel.ssd_cache.SSDCacheConfig(cache_dir=str(tmp_path / "theirs")))
    read = tier._read_entry(tuple(PROMPT), tier.lookup_ssd(tuple(PROMPT))["file_path"])
    tier.close()
    assert classes(wheel.scheduler.Scheduler._reconstruct_ssd_layers(None, read)) == [KVCache, KVCache]
    ours = TieredPrefixCache(opened(disk=True), "m")
    ours.store(PROMPT, live)
    ours.clear()
    assert classes(ours.fetch([*PROMPT, 1])[0]) == [KVCache, RotatingKVCache]


def test_another_bound_of_the_window_starts_anew(wheel, opened, install):
    model = FAMILIES["llama"].build()
    vllm_mlx.name_model(model, TINY)
    cache, prompt = opened(), prompt_of(1, 300)
    install(cache)
    expected = Ran(wheel, model)(prompt)[2]
    bounded = Ran(wheel, model, max_kv_size=512)
    for _ in range(2):
        _, hit, answer = bounded(prompt)
        assert answer == expected
    assert hit == 299
    assert Ran(wheel, model)(prompt)[1:] == (299, expected)
    assert set(classes(bounded.cache.fetch(prompt)[0])) == {RotatingKVCache}
    assert Multimodal(wheel, model, max_kv_size=512).cache.model_name == bounded.cache.model_name


class Multimodal:
    """Text requests through their multimodal scheduler's generator."""

    def __init__(self, wheel, model, cached=True, **options):
        self.wheel = wheel
        config = wheel.memory_cache.MemoryCacheConfig(max_memory_mb=100) if cached else None
        self.generator = wheel.multimodal.MLLMBatchGenerator(model, Bare(), prefix_cache_config=config, **options)
        self.cache = self.generator.prefix_cache

    def __call__(self, prompt, n=6, abort=False):
        request = self.wheel.multimodal.MLLMBatchRequest(
            uid=0,
            request_id=str(random.random()),
            prompt="",
            max_tokens=n,
            temperature=0.0,
            input_ids=mx.array([prompt]),
        )
        self.generator.insert([request])
        if abort:
            self.generator.abort_prefill(request.request_id)
        said = []
        while True:
            responses = self.generator.next()
            said += [response.token for response in responses]
            if any(response.finish_reason for response in responses):
                return said


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "falcon_h1"])
def test_the_multimodal_generator_says_the_same_and_saves_what_theirs_saves(wheel, opened, install, name):
    model = FAMILIES[name].build()
    prompt = prompt_of(1, 200)
    plain, theirs = Multimodal(wheel, model, cached=False), Multimodal(wheel, model)
    install(opened())
    ours = Multimodal(wheel, model)
    assert isinstance(ours.cache, TieredPrefixCache)
    longer = prompt + prompt_of(2, 30)
    for asked in (prompt, longer, prompt):
        expected = plain(asked)
        saved = []
        for ran in (theirs, ours):
            before = ran.generator.get_prefix_cache_stats()["tokens_saved"]
            assert ran(asked) == expected
            saved.append(ran.generator.get_prefix_cache_stats()["tokens_saved"] - before)
        assert saved[1] >= min(saved[0], len(asked) - 1)
    if name != "llama":  # first tokens from stored logits, without a forward pass
        assert ours.cache._last_match_type == "exact"


def test_an_aborted_prefill_leaves_the_generator_and_the_cache_in_order(wheel, opened, install):
    model = FAMILIES["qwen3_next"].build()
    prompt = prompt_of(1, 300)
    expected = Multimodal(wheel, model, cached=False)(prompt)
    install(opened())
    ours = Multimodal(wheel, model)
    ours(prompt, abort=True)
    assert ours.cache.fetch_exact_auxiliary(prompt) is None
    assert ours(prompt) == ours(prompt) == expected


def test_the_command_is_vllm_mlxs_own(tmp_path):
    own = {
        "__init__": "",
        "scheduler": "MemoryAwarePrefixCache = None\nclass Scheduler: pass",
        "memory_cache": "is_text_only_prefix_cache_request = None",
        "utils/__init__": "",
        "utils/tokenizer": "load_model_with_fallback = None",
        "cli": "import sys, vllm_mlx.scheduler as s\ndef main(): print(s.MemoryAwarePrefixCache, sys.argv[1:])",
    }
    for name, text in own.items():
        path = tmp_path / "vllm_mlx" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)

    def run(ram):
        command = [sys.executable, "-m", "prefixcache.servers.vllm_mlx", "serve", "x"]
        env = {"PYTHONPATH": str(tmp_path), "PREFIXCACHE_RAM": ram}
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, env=env)

    done = run("1MB")
    assert "install.<locals>.build" in done.stdout, done.stderr
    assert done.stdout.endswith("['serve', 'x']\n")
    bad = run("much")
    assert (bad.returncode, bad.stderr[:12]) == (1, "prefixcache:")
