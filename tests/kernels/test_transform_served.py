"""A cache whose transformed rows are coded on a GPU: stored, fetched, grown and written back.

The kernels run on the host, and on the machine's GPU.
"""

import host_gpu
import mlx.core as mx
import numpy as np
import pytest

from prefixcache.codecs.transform import bases as bases_module
from prefixcache.codecs.transform import gpu_coding, gpu_entropy
from prefixcache.kernels import transform_entropy, transform_rows
from prefixcache.layers.read_ahead import ReadAhead
from prefixcache.layers.transformed import DamagedBlock
from prefixcache.store_fetch_remove.store import StoreCall
from tests.corruption.test_transformed import changed
from tests.corruption.test_transformed import opened as opened_in
from tests.models.transforming import SINKS, prompt, tiny

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")

TOKENS = prompt(700, 0)
NEAR = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 2**-10}  # of the largest: products are half precision


@pytest.fixture(params=host_gpu.places("cuda"))
def place(request, run_at, monkeypatch):
    run_at(request.param, (transform_entropy, transform_rows), gpu_entropy, gpu_coding._tried)
    monkeypatch.setattr(bases_module, "_loaded", {})
    monkeypatch.setattr(ReadAhead, "serves", lambda plan: False)  # it is for CPUs
    return request.param


@pytest.fixture(params=["at once", "behind"])
def way(request, monkeypatch):
    """Whether a store waits for its codes, as where the host has MLX's arrays, or a thread of the cache does."""
    for module in ("layers.encode", "layers.finite", "store_fetch_remove.image_maker") * (request.param == "behind"):
        monkeypatch.setattr(f"prefixcache.{module}.on_cpu", lambda: False)
    return request.param


@pytest.fixture(params=["llama-bf16", "qwen2"])
def served(request, place, way, opened, tmp_path):
    model = tiny(request.param)
    assert gpu_coding.available()
    return model, opened(basis_dir=model.saved(tmp_path), ram="40MB", codec="transform:4")


def rows(prompt_cache, count):
    """Of the plain layers, float32."""
    found = []
    for layer in prompt_cache:
        if type(layer).__name__ == "KVCache":
            found += [np.array(array[:, :, :count].astype(mx.float32)) for array in (layer.keys, layer.values)]
    assert found
    return found


def near(model, one, other):
    tolerance = NEAR[str(model.prefill(TOKENS[:8])[-1].keys.dtype).rpartition(".")[2]]
    return all(np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max()) for a, b in zip(one, other, strict=True))


def fetched(cache, model, tokens, depth=None):
    made, rest = cache.fetch(tokens, model=model.identity, leave=0, promote=True)
    assert len(tokens) - len(rest) == (len(tokens) if depth is None else depth)
    cache.check_integrity()
    return made


def test_what_the_gpu_stored_is_what_the_cpu_reads(served, monkeypatch):
    model, cache = served
    live = model.prefill(TOKENS)
    cache.store(TOKENS, live, model=model.identity)
    found = rows(fetched(cache, model, TOKENS), len(TOKENS))
    for mine, theirs in zip(found, rows(live, len(TOKENS)), strict=True):
        assert np.array_equal(mine[:, :, :SINKS], theirs[:, :, :SINKS])
        assert np.array_equal(mine[:, :, 512:], theirs[:, :, 512:])
        assert 0 < np.abs(mine - theirs).mean() < 0.3 * np.abs(theirs).mean()
    assert cache.flush(30)
    cache.trim_to(0)
    monkeypatch.setattr(gpu_coding, "available", lambda: False)
    assert near(model, rows(fetched(cache, model, TOKENS), len(TOKENS)), found)


@pytest.mark.parametrize("depth", [3, 255, 300, 513])
def test_a_hit_at_any_depth_gives_the_same_rows(served, depth):
    model, cache = served
    cache.store(TOKENS, model.prefill(TOKENS), model=model.identity)
    want = [stream[:, :, :depth] for stream in rows(fetched(cache, model, TOKENS), depth)]
    assert near(model, rows(fetched(cache, model, [*TOKENS[:depth], 127_000], depth), depth), want)
    single = [layer.dequantize() for layer in cache.lookup(TOKENS, model=model.identity).layers]
    assert near(model, [stream[:, :, :depth] for stream in rows(single, depth)], want)


def test_a_prompt_that_goes_on_from_half_a_block_takes_over_its_codes(served):
    model, cache = served
    other = [*TOKENS[:100], *prompt(600, 5)]
    cache.store(TOKENS, model.prefill(TOKENS), model=model.identity)
    want = rows(fetched(cache, model, TOKENS), 100)
    cache.store(other, model.prefill(other[100:], fetched(cache, model, other, 100)), model=model.identity)
    assert near(model, rows(fetched(cache, model, other), 100), want)


def test_write_back_leaves_in_the_live_cache_what_a_fetch_gives(served):
    model, cache = served
    live = model.prefill(TOKENS)
    cache.store(TOKENS, live, model=model.identity, write_back_from=0)
    assert near(model, rows(live, len(TOKENS)), rows(fetched(cache, model, TOKENS), len(TOKENS)))
    again = model.prefill(TOKENS)
    cache.store(TOKENS, again, model=model.identity, write_back_from=0)
    assert near(model, rows(again, len(TOKENS)), rows(live, len(TOKENS)))


@pytest.mark.parametrize("at", [40, 300, 511])
def test_nothing_is_kept_from_the_block_of_a_row_that_is_not_finite(served, at):
    model, cache = served
    live = model.prefill(TOKENS)
    values = live[-1].values
    values[:, :, at] = float("nan")
    live[-1].values = values
    assert cache.store(TOKENS, live, model=model.identity, write_back_from=0).tokens == at // 256 * 256
    assert cache.stats().counters.not_finite == 1
    cache.check_integrity()


def test_blocks_that_find_no_room_stay_as_they_were_computed(served, monkeypatch):
    model, cache = served
    reserve = StoreCall._reserve
    monkeypatch.setattr(StoreCall, "_reserve", lambda call, jobs: reserve(call, jobs[:1]))
    live = model.prefill(TOKENS)
    computed = rows(live, len(TOKENS))
    assert cache.store(TOKENS, live, model=model.identity, write_back_from=0).tokens == 256
    assert near(model, rows(live, 256), rows(fetched(cache, model, TOKENS, 256), 256))
    for mine, theirs in zip(rows(live, len(TOKENS)), computed, strict=True):
        assert np.array_equal(mine[:, :, 256:], theirs[:, :, 256:])


def noise(tensors):
    return {"z0.words": np.random.default_rng(0).integers(0, 1 << 16, len(tensors["z0.words"])).astype(np.uint16)}


def infinity(tensors):
    tensors["z1.offset_steps"][3] = 0x7F80
    return {}


@pytest.mark.parametrize("change", [noise, infinity])
def test_codes_that_no_encoder_wrote_are_a_miss(place, tmp_path, change):
    model = tiny("llama-bf16")
    model.saved(tmp_path / "bases")
    with opened_in(tmp_path / "ssd") as cache:
        cache.store(TOKENS, model.prefill(TOKENS), model=model.identity)
    changed(tmp_path / "ssd", model, 1, change)
    with opened_in(tmp_path / "ssd") as cache:
        made, rest = cache.fetch(TOKENS, model=model.identity, leave=0, promote=True)
        assert made is not None
        assert len(rest) == len(TOKENS) - 256
        counters = cache.stats().counters
        assert (counters.fetches, counters.asked_tokens, counters.hit_tokens) == (1, len(TOKENS), 256)  # what was given
        cache.check_integrity()


def test_a_prompt_that_is_cut_before_a_damaged_block_can_be_had(place, tmp_path):
    model = tiny("llama-bf16")
    model.saved(tmp_path / "bases")
    with opened_in(tmp_path / "ssd") as cache:
        live = model.prefill(TOKENS)
        cache.store(TOKENS, live, model=model.identity)
    changed(tmp_path / "ssd", model, 1, noise)
    with opened_in(tmp_path / "ssd") as cache:
        assert cache.promote(TOKENS, model=model.identity).result(30) == len(TOKENS)
        prompt = cache.lookup(TOKENS, model=model.identity)
        for _ in range(2):
            with pytest.raises(DamagedBlock, match="token 256 is damaged"):
                prompt.dequantize()
            with pytest.raises(DamagedBlock, match="token 256 is damaged"):
                prompt.layers[0].dequantize()
        prompt.trim(prompt.tokens - 256)
        found = rows(prompt.dequantize(), 256)
        assert near(model, [stream[:, :, :SINKS] for stream in found], [s[:, :, :SINKS] for s in rows(live, 256)])
        single = [layer.dequantize() for layer in prompt.layers]
        assert near(model, rows(single, 256), found)


def other_words(honest):
    return lambda *given: (honest(*given)[0] ^ 1, honest(*given)[1])


def other_rows(honest):
    return lambda *given: honest(*given) ^ 0x400


@pytest.mark.parametrize(
    ("kernels", "name", "erring"),
    [
        (transform_entropy, "unpack", other_words),
        (transform_rows, "restore", other_rows),
        (transform_rows, "centre", other_rows),
    ],
)
def test_kernels_that_err_are_not_used(place, monkeypatch, caplog, kernels, name, erring):
    monkeypatch.setattr(kernels, name, erring(getattr(kernels, name)))
    assert not gpu_coding.available()
    assert "other codes on this GPU" in caplog.text
    assert gpu_coding.describe() == "no GPU kernels: they err here"


@pytest.mark.parametrize("kernels", [transform_entropy, transform_rows])
def test_kernels_that_do_not_compile_are_not_used(place, monkeypatch, caplog, kernels):
    monkeypatch.setattr(kernels, "build", lambda *_: failing)
    assert gpu_coding.describe() == "no GPU kernels: they don't compile here"
    assert "expected ';'" in caplog.text


def failing(**_):
    raise RuntimeError("error: expected ';'")
