"""Codec transform from outside: a calibrated model's rows come back close to what they were, the same by every way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from prefixcache import PrefixCache, Transform, TurboQuant
from prefixcache.codecs.transform import bases as bases_module
from prefixcache.codecs.transform import codec as codec_module
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import Basis
from prefixcache.live.turboquant import TurboQuantKVCache
from prefixcache.store_fetch_remove import namespaces, store
from tests.inside import inside
from tests.models import states
from tests.models.transforming import SINKS, Tiny, prompt, tiny

CACHE = {"ram": "40MB", "codec": "transform:4"}
LLAMA = "llama"
KINDS = ["llama float16", "llama-bf16", "llama"]
FAMILIES = ["qwen2", "gemma3_text", "gpt_oss", "qwen3_next", "smollm3", "llama-sliding"]
TOKENS = prompt(700, 0)
BEYOND = 127_000  # a token that no prompt has


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bases of this module's models."""
    return tmp_path_factory.mktemp("bases")


@pytest.fixture(autouse=True)
def told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is the first to read bases and to be warned."""
    monkeypatch.setattr(codec_module, "_warned", set())
    monkeypatch.setattr(bases_module, "_loaded", {})


Opened = Callable[..., PrefixCache]


@pytest.fixture
def calibrated(opened: Opened, folder: Path) -> Callable[..., tuple[Tiny, PrefixCache]]:
    def open_with(name: str = LLAMA, **values: Any) -> tuple[Tiny, PrefixCache]:
        known = {key: values.pop(key) for key in ("channels", "left_over", "windows") if key in values}
        model = tiny(name, **known)
        return model, opened(basis_dir=model.saved(folder), **values)

    return open_with


def rows(prompt_cache: list[Any], count: int) -> list[np.ndarray]:
    """The first `count` rows of plain layers, and the state of all others, as bits."""
    found = []
    for layer in prompt_cache:
        if type(layer) is KVCache:
            assert layer.offset >= count
            found += [as_bits(array[:, :, :count]) for array in (layer.keys, layer.values)]
        else:
            found += [as_bits(array) for array in flat(layer.state)]
    return found


def plain(prompt_cache: list[Any]) -> list[Any]:
    return [layer for layer in prompt_cache if type(layer) is KVCache]


def flat(state: Any) -> list[mx.array]:
    if isinstance(state, (mx.array, int)):
        return [state] if isinstance(state, mx.array) else []
    return [array for part in state or () for array in flat(part)]


def as_bits(array: mx.array) -> np.ndarray:
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    return np.array(mx.contiguous(array).view(kinds[array.dtype.size]))


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def fetched(cache: PrefixCache, model: Tiny, tokens: list[int], depth: int | None = None, **more: Any) -> list[Any]:
    made, rest = cache.fetch(tokens, model=model.identity, leave=0, **more)
    assert len(tokens) - len(rest) == (len(tokens) if depth is None else depth)
    cache.check_integrity()
    assert made is not None
    return made


def stored(cache: PrefixCache, model: Tiny, tokens: list[int], **more: Any) -> list[Any]:
    prompt_cache = model.prefill(tokens)
    cache.store(tokens, prompt_cache, model=model.identity, **more)
    cache.check_integrity()
    return prompt_cache


def error(one: list[Any], other: list[Any], layer: int, count: int) -> float:
    """The mean error of a layer's rows, by what they are on average."""
    wrong = size = 0.0
    for part in ("keys", "values"):
        a, b = (getattr(of[layer], part)[:, :, SINKS:count].astype(mx.float32) for of in (one, other))
        wrong, size = wrong + float(mx.abs(a - b).mean()), size + float(mx.abs(b).mean())
    return wrong / size


def is_transformed(cache: PrefixCache) -> list[set[str]]:
    """Of each namespace, the prefixes of the tensors that its whole blocks have."""
    found = []
    for namespace in inside(cache).storage.namespaces.values():
        names: set[str] = set()
        for node in namespace.tree.root.children:
            if node.is_whole and node.rows is not None and node.rows.image is not None:
                names |= {name[0] for name in node.rows.image.tensors()}
        found.append(names)
    return found


# -- what comes back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_close_to_what_was_stored_and_closer_at_a_higher_quality(calibrated, tmp_path, name):
    errors = []
    for quality in (2, 3, 4, 5, 6):
        model, cache = calibrated(name, codec=Transform(quality), disk=False)
        live = stored(cache, model, TOKENS)
        made = fetched(cache, model, TOKENS)
        assert {layer.keys.dtype for layer in made} == {live[0].keys.dtype}
        errors.append([error(made, live, layer, 512) for layer in range(4)])
    assert (np.diff(errors, axis=0) < 0).all()
    assert np.max(errors[-1]) < 0.15


@pytest.mark.parametrize("name", [*KINDS, *FAMILIES])
def test_the_first_tokens_and_the_tail_are_kept_bit_for_bit(calibrated, name):
    model, cache = calibrated(name)
    live, made = stored(cache, model, TOKENS), fetched(cache, model, TOKENS)
    for a, b in zip(live, made, strict=True):
        assert type(a) is type(b)
        if type(a) is KVCache:
            for part in ("keys", "values"):
                one, other = getattr(a, part), getattr(b, part)
                assert np.array_equal(as_bits(one[:, :, :SINKS]), as_bits(other[:, :, :SINKS]))
                assert np.array_equal(as_bits(one[:, :, 512:700]), as_bits(other[:, :, 512:700]))
                assert not np.array_equal(as_bits(one[:, :, SINKS:512]), as_bits(other[:, :, SINKS:512]))


@pytest.mark.parametrize("name", [*KINDS, *FAMILIES])
def test_rows_are_the_same_from_ram_from_the_ssd_and_after_a_restart(calibrated, name):
    model, cache = calibrated(name)
    stored(cache, model, TOKENS)
    assert "z" in set().union(*is_transformed(cache))
    want = rows(fetched(cache, model, TOKENS), len(TOKENS))
    found = cache.lookup(TOKENS, model=model.identity)
    assert found is not None
    assert same(rows(found.dequantize(), len(TOKENS)), want)
    assert cache.flush(30)
    cache.trim_to(0)
    assert cache.match(TOKENS, model=model.identity).ram == 0
    assert same(rows(fetched(cache, model, TOKENS, promote=True), len(TOKENS)), want)
    cache.trim_to(0)
    assert cache.promote(TOKENS, model=model.identity).result(30) == len(TOKENS)
    assert same(rows(fetched(cache, model, TOKENS), len(TOKENS)), want)
    cache.close()
    _, cache = calibrated(name)
    assert same(rows(fetched(cache, model, TOKENS, promote=True), len(TOKENS)), want)


@pytest.mark.parametrize("name", ["llama-bf16", "qwen2"])
@pytest.mark.parametrize("depth", [1, 3, 4, 5, 100, 255, 256, 257, 259, 300, 511, 512, 513, 699])
def test_a_hit_at_any_depth_gives_the_same_rows(calibrated, name, depth):
    model, cache = calibrated(name, disk=False)
    stored(cache, model, TOKENS)
    want = rows(fetched(cache, model, TOKENS), depth)
    other = [*TOKENS[:depth], BEYOND]
    assert same(rows(fetched(cache, model, other, depth), depth), want)
    found = cache.lookup(TOKENS, model=model.identity)
    assert found is not None
    found.trim(len(TOKENS) - depth)
    assert same(rows(found.dequantize(), depth), want)
    assert same(rows([layer.dequantize() for layer in found.layers], depth), want)


@pytest.mark.parametrize("name", ["llama-bf16", "qwen2", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("before", [0, 256])
def test_write_back_leaves_in_the_live_cache_what_a_fetch_gives(calibrated, name, before):
    model, cache = calibrated(name)
    live, at = None, before
    if before:
        stored(cache, model, TOKENS[:before])
        live = fetched(cache, model, TOKENS[:before])
    for end in (256, 512, 700):
        if end > at:
            live = model.prefill(TOKENS[at:end], live)
            cache.store(TOKENS[:end], live, model=model.identity, write_back_from=at // 256 * 256)
            cache.check_integrity()
            at = end
    assert live is not None
    made = fetched(cache, model, TOKENS)
    for mine, theirs in zip(live, made, strict=True):
        if type(mine) is KVCache:
            assert same(rows([mine], 700), rows([theirs], 700))


@pytest.mark.parametrize("name", ["llama-bf16", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("shared", [1, 100, 256, 300])
def test_a_prompt_that_goes_on_from_a_hit_takes_its_codes_over(calibrated, name, shared):
    model, cache = calibrated(name)
    for end in (shared, len(TOKENS)):  # where a hit is to end, windows are stored
        stored(cache, model, TOKENS[:end])
    want = rows(plain(fetched(cache, model, TOKENS)), shared)
    other = TOKENS[:shared] + prompt(600, 9)
    live = model.prefill(other[shared:], fetched(cache, model, other, shared))
    cache.store(other, live, model=model.identity)
    cache.check_integrity()
    assert same(rows(plain(fetched(cache, model, other)), shared), want)
    cache.remove(TOKENS, model=model.identity)
    assert same(rows(plain(fetched(cache, model, other)), shared), want)


@pytest.mark.parametrize("name", ["llama-bf16", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("shared", [1, 100, 300])
def test_a_prompt_that_was_computed_takes_no_codes_over(calibrated, name, shared):
    """It is stored as on an empty cache, though another begins as it does."""
    other, found = TOKENS[:shared] + prompt(600, 9), []
    for first in ([], TOKENS):
        model, cache = calibrated(name, disk=False)
        if first:
            stored(cache, model, first)
        stored(cache, model, other)
        made = fetched(cache, model, other)
        found.append(rows(made if shared < 256 else plain(made), len(other)))
    assert same(*found)


@pytest.mark.parametrize("shared", [100, 256, 300])
def test_what_was_stored_first_changes_nothing_for_a_prompt_that_is_computed(calibrated, shared):
    """As a server asks: a hit ends with a whole block, and what is computed is coded by itself."""
    other = TOKENS[:shared] + prompt(500, 9)
    found = []
    for first in ([], TOKENS):
        model, cache = calibrated("llama-bf16", disk=False)
        if first:
            cache.store(first, model.prefill(first), model=model.identity, write_back_from=0)
        live, rest = cache.fetch(cache.prompt(other, model=model.identity, whole_blocks=True))
        begun = len(other) - len(rest)
        assert begun == (shared // 256 * 256 if first else 0)
        for at in range(begun, len(other), 256):
            live = model.prefill(other[at : at + 256], live)
            cache.store(other[: at + 256], live, model=model.identity, write_back_from=at)
        found.append(rows(fetched(cache, model, other), len(other)))
    assert same(*found)


@pytest.mark.parametrize("name", ["llama float16", "llama-bf16", "qwen2", "qwen3_next"])
@pytest.mark.parametrize("depth", [600, 700])
def test_what_was_fetched_is_stored_without_a_change_however_often(calibrated, name, depth):
    """Each round goes on from the last one's rows and changes the prompt's end: nothing is coded twice."""
    model, cache = calibrated(name)
    stored(cache, model, TOKENS[:depth])
    tokens, live = TOKENS[:depth], fetched(cache, model, TOKENS[:depth])
    want = rows(plain(live), depth // 256 * 256)
    for seed in range(5):
        more = prompt(30, seed)
        live = model.prefill(more, live)
        tokens = tokens + more
        cache.store(tokens, live, model=model.identity, write_back_from=0 if seed % 2 else None)
        live = fetched(cache, model, tokens)
        assert same(rows(plain(live), depth // 256 * 256), want)
    assert cache.stats().counters.recoded_tokens == 0


@pytest.mark.parametrize("promote", [False, True])
def test_a_compressed_hit_has_decoded_rows_coded_by_turboquant(calibrated, promote):
    model, cache = calibrated("llama-bf16")
    stored(cache, model, TOKENS)
    if promote:
        assert cache.flush(30)
        cache.trim_to(0)
        assert cache.promote(TOKENS, model=model.identity).result(30) == len(TOKENS)
    live, _ = states.compressed(cache, TOKENS, model=model.identity, leave=0)
    plain = fetched(cache, model, TOKENS)
    assert all(isinstance(layer, TurboQuantKVCache) for layer in live)
    for mine, theirs in zip(live, plain, strict=True):
        assert mine.offset == theirs.offset == len(TOKENS)
    assert cache.store([*TOKENS, 1], model.prefill([1], live), model=model.identity).tokens == len(TOKENS) + 1
    cache.check_integrity()


@pytest.mark.parametrize("left_over", [0, 1])
def test_live_codes_are_stored_as_the_rows_that_they_decode_to(calibrated, opened, left_over, monkeypatch):
    monkeypatch.setattr(store, "BATCH", 1)  # blocks that are decoded at once
    model, cache = calibrated("llama-bf16", left_over=left_over, disk=False)
    codec = (
        TurboQuant() if left_over else TurboQuant(3, 4, sink_tokens=5)
    )  # what is not transformed has the codec's codes
    live = [
        TurboQuantKVCache(codec, recent_tokens=0, layer=i).filled_from(layer)
        for i, layer in enumerate(model.prefill(TOKENS))
    ]
    assert cache.store(TOKENS, live, model=model.identity, write_back_from=0).tokens == len(TOKENS)
    assert cache.stats().counters.recoded_tokens == (len(TOKENS) if left_over else 512)
    assert cache.keep_hot(cache.prompt(TOKENS, model=model.identity), live) == 0
    other = opened(basis_dir=cache.settings.basis_dir, disk=False)
    decoded = [layer.dequantize() for layer in live]
    other.store(TOKENS, decoded, model=model.identity)
    transformed = 4 - left_over
    one, two = (rows(fetched(each, model, TOKENS)[:transformed], 512) for each in (cache, other))
    assert same(one, two)
    cache.check_integrity()


# -- which layers and models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("gemma3_text", [[0, 1], [2], [3]]),
        ("gpt_oss", [[0, 2], [1, 3]]),
        ("qwen3_next", [[3]]),
        ("llama-sliding", [[0, 1], [2], [3]]),
    ],
)
def test_layers_of_one_window_are_joined_and_others_are_coded_by_turboquant(calibrated, name, groups):
    model, cache = calibrated(name)
    stored(cache, model, TOKENS)
    (namespace,) = inside(cache).storage.namespaces.values()
    plan = namespace.plan
    assert model.groups == groups
    assert sorted({plan.layer_of[leaf] for leaf, _ in plan.joined_places}) == sorted(at for of in groups for at in of)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_a_basis_without_windows_as_earlier_releases_made_it_leaves_those_to_turboquant(calibrated, name):
    model, cache = calibrated(name, windows=False)
    assert b'"window"' not in model.basis
    stored(cache, model, TOKENS)
    (namespace,) = inside(cache).storage.namespaces.values()
    assert not any(section.joined for section in namespace.plan.windowed)
    assert len(namespace.plan.rows.joined) == len(model.groups) == 1
    fetched(cache, model, TOKENS)


def test_a_row_that_left_its_window_before_it_was_stored_takes_nothing(calibrated):
    model, cache = calibrated("gemma3_text", disk=False)
    cache.store(TOKENS[:512], model.prefill(TOKENS[:512], step=20), model=model.identity)
    found = cache.lookup(TOKENS[:512], model=model.identity, leave=0)
    assert found is not None
    (first, second), (window,) = found.blocks, found.blocks[1].windows
    assert not first.windows
    rows = window.mask[0].bit_count()
    assert 31 <= rows <= 51
    assert window.tensors["z0.heads"].shape == (rows,)
    assert len(window.tensors["z0.words"]) < len(second.tensors["z1.words"])


@pytest.mark.parametrize("left_over", [1, 2])
def test_groups_and_a_layer_that_is_in_none_are_coded_side_by_side(calibrated, left_over):
    model, cache = calibrated("llama-bf16", left_over=left_over)
    live = stored(cache, model, TOKENS)
    made = fetched(cache, model, TOKENS)
    assert set().union(*is_transformed(cache)) >= {"z", "r", "s"}
    assert max(error(made, live, layer, 512) for layer in range(4)) < 0.5
    stats = cache.lookup(TOKENS, model=model.identity)
    assert stats is not None
    assert 0.9 * stats.nbytes < sum(layer.nbytes for layer in stats.layers) <= stats.nbytes


def test_layers_that_are_transformed_are_not_left_raw(calibrated):
    model, cache = calibrated(channels=64, left_over=1, codec=Transform(4, TurboQuant(fp16_layers=1)), disk=False)
    assert cache.store(TOKENS, model.prefill(TOKENS), model=model.identity).raw_layers == (3,)


def test_a_model_without_a_basis_is_coded_by_turboquant_and_that_is_said_once(opened, folder, tmp_path, caplog):
    model = tiny(LLAMA)
    transformed = opened(basis_dir=tmp_path / "none", disk=False)
    turboquant = opened(codec="turboquant", disk=False)
    with caplog.at_level(logging.WARNING, "prefixcache"):
        stored(transformed, model, TOKENS)
        stored(transformed, model, TOKENS, salt=b"other")
    assert [message for message in caplog.messages if "prefixcache calibrate" in message] == [
        f"no basis of model {model.identity} in {tmp_path / 'none'}: its rows are coded by turboquant k4 v4 until you run "
        "`prefixcache calibrate MODEL`"
    ]
    stored(turboquant, model, TOKENS)
    one, other = fetched(transformed, model, TOKENS), fetched(turboquant, model, TOKENS)
    assert same(rows(one, len(TOKENS)), rows(other, len(TOKENS)))


@pytest.mark.parametrize("part", ["pp 2:4/4", "tp 0/2"])
def test_what_a_rank_has_of_a_model_is_coded_by_turboquant(calibrated, caplog, part):
    """A stage of a pipeline counts its own layers from 0: they would be coded as others are."""
    model, cache = calibrated(disk=False)
    name = f"{model.identity}|{part}"
    with caplog.at_level(logging.WARNING, "prefixcache"):
        cache.store(TOKENS, model.prefill(TOKENS), model=name)
    assert "z" not in set().union(*is_transformed(cache))
    assert caplog.messages == [f"no basis is of a part of a model: the rows of {name} are coded by turboquant k4 v4"]


def test_a_basis_that_is_made_while_a_cache_runs_codes_the_next_prompt_and_what_stands_is_hit(opened, tmp_path, caplog):
    model, more = tiny(LLAMA), prompt(300, 9)
    cache = opened(basis_dir=tmp_path / "bases")
    stored(cache, model, TOKENS)
    with caplog.at_level(logging.INFO, "prefixcache"):
        model.saved(tmp_path / "bases")
        asked = cache.prompt([*TOKENS, *more], model=model.identity)
        live, rest = cache.fetch(asked)
    assert "a basis was made, and codes its rows from now on: transform quality 4 basis" in caplog.text
    assert rest == more
    live = model.prefill(more, live)
    cache.store(asked, live, write_back_from=len(TOKENS))
    assert cache.stats().counters.recoded_tokens == len(TOKENS)
    assert "z" in set().union(*is_transformed(cache))
    assert asked.given_rows.tokens == 768
    assert same(rows(fetched(cache, model, [*TOKENS, *more]), 768), rows(live, 768))
    cache.close()
    again = opened(basis_dir=tmp_path / "bases")  # what either codec stored is known to the next cache
    parted = [*TOKENS[:512], *prompt(100, 10)]
    assert again.promote([*TOKENS, *more], model=model.identity).result(30) == 1000
    assert again.match(parted, model=model.identity).ram == 512


def test_a_folder_of_bases_is_read_again_when_it_has_changed(opened, tmp_path, monkeypatch):
    looks, files, model = [], Bases.files, tiny(LLAMA)
    monkeypatch.setattr(Bases, "files", lambda self: looks.append(1) or files(self))
    monkeypatch.setattr(namespaces, "SETTLED", 0)
    cache = opened(basis_dir=tmp_path, disk=False)
    for _ in range(3):
        cache.prompt(TOKENS, model=model.identity)
    assert len(looks) == 1
    tiny("llama-bf16").saved(tmp_path)  # another model's
    for _ in range(3):
        cache.prompt(TOKENS, model=model.identity)
    assert str(cache.codec_of(model.identity)) == "turboquant k4 v4"
    before = len(looks)
    cache.prompt(TOKENS, model=model.identity)
    assert len(looks) == before


def test_a_basis_that_takes_long_to_arrive_is_used_once_it_is_whole(opened, tmp_path, monkeypatch):
    """As scp copies: the file is there from its first byte on, and the folder does not change any more."""
    monkeypatch.setattr(namespaces, "SETTLED", 0)
    model = tiny(LLAMA)
    basis = Bases(tmp_path / "elsewhere").save(model.basis).read_bytes()
    (tmp_path / "bases").mkdir()
    cache = opened(basis_dir=tmp_path / "bases", disk=False)
    with open(tmp_path / "bases" / f"x-{Basis(basis).hash}.safetensors", "wb", buffering=0) as file:
        file.write(basis[:-1000])
        for _ in range(2):
            cache.prompt(TOKENS, model=model.identity)
            assert str(cache.codec_of(model.identity)) == "turboquant k4 v4"
        time.sleep(0.05)  # a clock of files may have few ticks
        file.write(basis[-1000:])
    assert str(cache.codec_of(model.identity)).startswith("transform quality 4 basis")


def test_a_basis_of_other_weights_is_never_used_whatever_its_name(calibrated):
    model, cache = calibrated()
    name, _, weights = model.identity.partition("@")
    live = model.prefill(TOKENS)
    cache.store(TOKENS, live, model=f"{name}@{weights[::-1]}")
    assert "z" not in set().union(*is_transformed(cache))
    cache.store(TOKENS, live, model=f"renamed@{weights}")
    assert "z" in set().union(*is_transformed(cache))


def test_a_file_that_names_a_model_which_its_basis_does_not_is_left_out(opened, folder, tmp_path, caplog):
    model = tiny(LLAMA)
    path = Bases(tmp_path).save(model.basis)
    path.write_bytes(path.read_bytes().replace(b"0-llama", b"0-lload", 1))
    cache = opened(basis_dir=tmp_path, disk=False)
    with caplog.at_level(logging.WARNING, "prefixcache"):
        cache.store(TOKENS, model.prefill(TOKENS), model=model.identity.replace("0-llama", "0-lload"))
    assert "z" not in set().union(*is_transformed(cache))
    assert "its content is not what its name says" in caplog.text


def test_a_prompt_cache_with_other_heads_than_its_basis_knows_is_coded_by_turboquant(calibrated):
    model, cache = calibrated()
    for heads, width, layers in ((4, 32, 4), (2, 64, 4), (2, 32, 3)):
        made = []
        for _ in range(layers):
            made.append(KVCache())
            made[-1].update_and_fetch(*mx.random.normal((2, 1, heads, 600, width)))
        cache.store(prompt(600, heads), made, model=model.identity)
        found, rest = cache.fetch(prompt(600, heads), model=model.identity, leave=0)
        assert found is not None
        assert found[0].keys.shape[1:] == (heads, 600, width) or found[0].keys.shape[2] >= 600
        assert rest == []
        cache.clear()
    joined = [len(namespace.plan.joined) for namespace in inside(cache).storage.namespaces.values()]
    assert sorted(joined) == [0, 0, 1]  # of three layers the first group is whole


def test_salts_and_models_do_not_share_rows(calibrated, folder):
    model, cache = calibrated()
    other = tiny("qwen2")
    other.saved(folder)
    one = stored(cache, model, TOKENS, salt=b"one")
    assert cache.fetch(TOKENS, model=model.identity)[0] is None
    assert cache.fetch(TOKENS, model=model.identity, salt=b"two")[0] is None
    stored(cache, model, TOKENS, salt=b"two")
    theirs = stored(cache, other, TOKENS)
    assert cache.flush(30)
    cache.close()
    _, cache = calibrated()
    for salt in (b"one", b"two"):
        made = fetched(cache, model, TOKENS, salt=salt, promote=True)
        assert error(made, one, 0, 512) < 0.5
    assert error(fetched(cache, other, TOKENS, promote=True), theirs, 0, 512) < 0.5


def test_another_quality_is_another_namespace_and_both_stay(calibrated):
    want = {}
    for quality in (4, 5, 4.5):
        model, cache = calibrated(codec=f"transform:{quality}")
        assert cache.match(TOKENS, model=model.identity).ssd == 0
        stored(cache, model, TOKENS)
        want[quality] = rows(fetched(cache, model, TOKENS), len(TOKENS))
        cache.close()
    for quality, expected in want.items():
        model, cache = calibrated(codec=f"transform:{quality}")
        assert cache.stats().namespaces == 3
        assert same(rows(fetched(cache, model, TOKENS, promote=True), len(TOKENS)), expected)
        cache.close()


# -- budget --------------------------------------------------------------------------------------------------------------


def test_a_basis_counts_in_the_budget_once_for_all_its_namespaces(calibrated, folder):
    model, cache = calibrated()
    nbytes = Basis(model.basis).nbytes
    assert cache.stats().ram_reserved == 0  # none is read before its model is asked for
    for salt in (b"", b"one", b"two"):
        stored(cache, model, TOKENS, salt=salt)
    cache.store(TOKENS[:300], model.prefill(TOKENS[:300])[:2], model=model.identity)
    assert cache.stats().ram_reserved == nbytes
    other = tiny("qwen2")
    other.saved(folder)
    stored(cache, other, TOKENS)
    assert cache.stats().ram_reserved == nbytes + Basis(other.basis).nbytes


def test_opening_a_directory_reads_no_basis(calibrated, monkeypatch):
    model, cache = calibrated()
    stored(cache, model, TOKENS)
    cache.close()
    monkeypatch.setattr(bases_module, "_loaded", {})
    _, cache = calibrated()
    assert (cache.stats().ram_reserved, bases_module._loaded) == (0, {})
    assert cache.match(TOKENS, model=model.identity).ssd == len(TOKENS)
    assert len(bases_module._loaded) == 1


def test_without_ram_for_its_basis_a_model_is_coded_by_turboquant(calibrated, caplog):
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "prefixcache"):
            model, cache = calibrated(ram=1_500_000)
            cache.store(TOKENS, model.prefill(TOKENS), model=model.identity)
        assert "z" not in set().union(*is_transformed(cache))
        assert cache.stats().ram_reserved == 0
        assert f"the basis of model {model.identity!r} takes" in caplog.text
        assert "give more ram" in caplog.text
        cache.check_integrity()
        cache.close()


def test_two_threads_that_ask_first_reserve_one_basis(calibrated):
    model, cache = calibrated()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: cache.match(TOKENS, model=model.identity, salt=bytes([n])), range(32)))
    assert cache.stats().ram_reserved == Basis(model.basis).nbytes


def test_stored_bytes_are_those_of_the_images(calibrated):
    model, cache = calibrated()
    sizes = set()
    for seed in range(4):
        stored(cache, model, prompt(600, seed) if seed else TOKENS)
        images = [slot.image for slot in inside(cache).storage.graph.slots.values()]
        assert cache.stats().counters.stored_bytes == sum(image.nbytes for image in images)
        assert cache.stats().ram_images == sum(image.nbytes for image in images)
        assert all(image.nbytes == image.data.nbytes for image in images)
        sizes |= {image.nbytes for image in images}
    assert len(sizes) > 4  # blocks of equal tokens have unequal lengths
    assert cache.flush(30)
    stats = cache.stats()
    assert stats.ssd is not None
    assert stats.ssd.written_bytes == stats.counters.stored_bytes


def test_a_budget_of_few_blocks_is_kept_while_prompts_come_and_go(calibrated):
    model, cache = calibrated("llama-bf16", ram="2500kB", ssd="8MB", spill="wait")
    for seed in range(18):
        tokens = prompt(600, seed % 13)
        made, rest = cache.fetch(tokens, model=model.identity, promote=True)
        live = model.prefill(tokens[len(tokens) - len(rest) :], made)
        cache.store(tokens, live, model=model.identity)
        cache.check_integrity()
        stats = cache.stats()
        assert stats.ram_held <= stats.ram_limit
    assert stats.counters.evicted > 0
    assert stats.counters.ssd_hit_tokens > 0


# -- bases that go, and come back ----------------------------------------------------------------------------------------


def test_without_its_basis_a_directory_serves_other_models_and_with_it_again_the_old_blocks(
    calibrated, folder, opened, tmp_path, caplog, monkeypatch
):
    model, other = tiny(LLAMA), tiny("qwen2")
    for each in (model, other):
        each.saved(tmp_path / "bases")
    cache = opened(basis_dir=tmp_path / "bases")
    stored(cache, model, TOKENS)
    stored(cache, other, TOKENS)
    want = rows(fetched(cache, model, TOKENS), len(TOKENS))
    cache.close()

    file = Bases(tmp_path / "bases").path_of(Basis(model.basis).hash)
    assert file is not None
    kept = file.read_bytes()
    file.unlink()
    monkeypatch.setattr(bases_module, "_loaded", {})
    cache = opened(basis_dir=tmp_path / "bases")
    with caplog.at_level(logging.WARNING, "prefixcache"):
        assert cache.fetch(TOKENS, model=model.identity, promote=True)[0] is None
    assert "prefixcache calibrate" in caplog.text
    fetched(cache, other, TOKENS, promote=True)
    cache.close()

    file.write_bytes(kept)
    cache = opened(basis_dir=tmp_path / "bases")
    assert same(rows(fetched(cache, model, TOKENS, promote=True), len(TOKENS)), want)


def test_a_directory_of_transformed_rows_opens_under_any_codec(calibrated, opened, tmp_path, caplog):
    model, cache = calibrated()
    stored(cache, model, TOKENS)
    want = rows(fetched(cache, model, TOKENS), len(TOKENS))
    cache.close()
    with caplog.at_level(logging.WARNING, "prefixcache"):
        cache = opened(codec="raw", basis_dir=tmp_path / "none")
        assert cache.fetch(TOKENS, model=model.identity, promote=True)[0] is None
        stored(cache, model, TOKENS)
        cache.close()
    assert caplog.messages == []
    _, cache = calibrated()
    assert same(rows(fetched(cache, model, TOKENS, promote=True), len(TOKENS)), want)


# -- rows that are no model's --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_cannot_be_coded_come_back_as_they_are_and_harm_no_others(calibrated, name):
    model, cache = calibrated(name)
    live = model.prefill(TOKENS)
    odd = {5: 6e4, 100: -6e4, 255: 5e4, 256: -5e4, 300: 3e4, 301: -6e4, 511: 4e4}  # what isn't finite is not stored
    for token, value in odd.items():
        live[1].keys[:, 1, token, 3] = value  # of the first group
        live[2].values[:, 0, token, 31] = value  # of the second
    cache.store(TOKENS, live, model=model.identity)
    made = fetched(cache, model, TOKENS)
    others = np.setdiff1d(np.arange(SINKS, 512), list(odd))
    for mine, theirs in zip(made, live, strict=True):
        for part in ("keys", "values"):
            one, other = getattr(mine, part)[:, :, :512], getattr(theirs, part)[:, :, :512]
            exact = as_bits(one) == as_bits(other)
            assert exact[:, :, list(odd)].all()
            assert not exact[:, :, others].all(axis=(0, 1, 3)).any()
            wrong = np.array(mx.abs(one.astype(mx.float32) - other.astype(mx.float32)))[:, :, others]
            assert wrong.mean() < 0.35 * np.abs(np.array(other.astype(mx.float32))[:, :, others]).mean()
    want = rows(made, len(TOKENS))
    assert cache.flush(30)
    cache.trim_to(0)
    assert same(rows(fetched(cache, model, TOKENS, promote=True), len(TOKENS)), want)


def test_a_prompt_cache_of_zeros_and_one_of_constants_are_kept(calibrated):
    model, cache = calibrated("llama-bf16")
    for seed, value in enumerate((0.0, 1.0, 1e30, -1e-30)):
        made = make_prompt_cache(model.model)
        for layer in made:
            layer.update_and_fetch(*mx.full((2, 1, 2, 600, 32), value, mx.bfloat16))
        cache.store(prompt(600, seed + 20), made, model=model.identity)
        found = fetched(cache, model, prompt(600, seed + 20))
        for layer in found:
            keys = np.array(layer.values[:, :, :600].astype(mx.float32))
            assert np.isfinite(keys).all()
