"""What `model_identity` promises: new weights have a new identity, copies keep theirs, and it costs a bounded read."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from prefixcache import PrefixCache, identity, model_identity
from prefixcache.keys import as_model
from tests.models import states

LIBRARY = Path(mlx_lm.__file__).parent
TINY = Path(__file__).parent / "fixtures" / "tiny-llama"
LONG = list(range(1000))


def header(path):
    """(where the data begins, the entries by tensor) of a safetensors file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return 8 + length, entries


TENSORS = sorted(header(TINY / "model.safetensors")[1])


def smallest_step(values):
    """Each value of 16 bits made its neighbour, up or down; twice gives what was there."""
    return (values.view(np.uint16) ^ 1).view(np.float16)


def nudge(path, names, change=smallest_step):
    """Change the values of these tensors in place."""
    start, entries = header(path)
    weights = np.memmap(path, np.uint8, "r+")
    for name in names:
        first, end = entries[name]["data_offsets"]
        values = weights[start + first : start + end].view(np.float16)
        values[:] = change(values)
    weights.flush()


def copied(to, source=TINY):
    shutil.copytree(source, to)
    return to


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def weights(folder, tensors, name="model.safetensors"):
    """A folder with these tensors and no config to speak of."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / name)
    return folder


def hash_of(*args):
    return model_identity(*args).partition("@")[2]


@pytest.fixture
def model(tmp_path):
    return copied(tmp_path / "tiny")


@pytest.fixture
def sampled(monkeypatch):
    """As if any model were too large to be read whole, and had so many tensors that one place of each is read."""
    monkeypatch.setattr(identity, "WHOLE", 0)
    monkeypatch.setattr(identity, "READS", 1)


@pytest.fixture(params=["whole", "sampled"])
def either(request):
    if request.param == "sampled":
        request.getfixturevalue("sampled")


# -- the same model -----------------------------------------------------------------------------------------------------


def test_an_identity_is_a_name_and_a_hash_that_a_cache_takes_for_a_model():
    assert re.fullmatch(r"tiny-llama@[0-9a-f]{24}\|code [0-9a-f]{16}", model_identity(TINY))
    assert as_model(model_identity(TINY)) == model_identity(str(TINY))


def test_a_models_identity_stays_from_release_to_release():
    """When this fails, every cache in the field turns cold with the next release: is that meant? And every calibrated basis
    is looked for in vain.
    """
    assert model_identity(TINY).partition("|")[0] == "tiny-llama@18d451a5c1145f6703f9e408"


def test_the_identity_of_a_large_model_stays_from_release_to_release(sampled):
    assert model_identity(TINY).partition("|")[0] == "tiny-llama@9410adf692d0760406aa5517"


def test_a_copy_elsewhere_differs_in_the_name_alone(tmp_path, either):
    moved = copied(tmp_path / "Another Name")
    for path in moved.iterdir():
        os.utime(path, (1, 1))
    assert model_identity(moved) == model_identity(TINY).replace("tiny-llama", "Another-Name")


def test_every_way_to_a_folder_gives_one_identity(tmp_path, model, monkeypatch):
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    ways = [model, "tiny", "tiny/", "./tiny", "link", "link/", "tiny/../tiny", "~/tiny", Path("~/link"), f"{model}//"]
    assert {model_identity(way) for way in ways} == {model_identity(model)}
    monkeypatch.chdir(model)
    assert model_identity(".") == model_identity(model)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen3-8B_4bit.v2", "Qwen3-8B_4bit.v2"),
        ("a b\tc\x1b[31m", "a-b-c-31m"),
        ("mod\u00e8le@x+y", "mod-le-x-y"),
        ("\u6a21\u578b", "model"),
        ("--help", "help"),
        ("n" * 200, "n" * 64),
        ("models--org--name", "models--org--name"),
    ],
)
def test_a_name_is_fit_for_terminals_and_an_index(tmp_path, folder, name):
    assert model_identity(weights(tmp_path / folder, {})).partition("@")[0] == name


def test_what_does_not_change_the_state_does_not_change_the_identity(model):
    before = model_identity(model)
    edit(model / "config.json", transformers_version="99.0", _name_or_path="/somewhere/else", _commit_hash="0" * 40)
    assert model_identity(model) == before
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert model_identity(model) == before
    edit(model / "generation_config.json", temperature=0.1)
    edit(model / "tokenizer_config.json", chat_template="{{ messages }}")
    (model / "README.md").write_text("another card")
    (model / "consolidated.safetensors").write_bytes(b"what mlx-lm leaves alone")
    assert model_identity(model) == before


def test_the_weights_that_count_are_those_that_mlx_lm_loads(model, monkeypatch):
    save_file({"unused": np.ones(3)}, model / "adapters.safetensors")
    (model / "deeper").mkdir()
    save_file({"unused": np.ones(3)}, model / "deeper" / "model.safetensors")
    save_file({"model.norm.weight": np.ones(256, np.float16)}, model / "model-extra.safetensors")
    loaded, opened, load, open_ = set(), set(), mx.load, os.open
    monkeypatch.setattr(mx, "load", lambda path: loaded.add(Path(path)) or load(path))
    mlx_lm.utils.load_model(model)
    monkeypatch.setattr(os, "open", lambda path, *args: opened.add(Path(path)) or open_(path, *args))
    model_identity(model)
    monkeypatch.undo()
    assert opened - {model / "config.json"} == loaded
    assert {path.name for path in loaded} == {"model.safetensors", "model-extra.safetensors"}


# -- another model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A model that tests change and put back."""
    return copied(tmp_path_factory.mktemp("scratch") / "tiny-llama")


@cache
def unchanged(limit):
    """The identity of tiny-llama, asked once for each `identity.WHOLE`."""
    return model_identity(TINY)


@pytest.mark.parametrize("name", TENSORS)
def test_a_small_change_all_through_any_one_tensor_is_seen(scratch, name, either):
    nudge(scratch / "model.safetensors", [name])
    changed = model_identity(scratch)
    nudge(scratch / "model.safetensors", [name])
    assert changed != unchanged(identity.WHOLE)


def test_weights_put_back_are_the_model_that_they_were(scratch, either):
    for name in TENSORS[::10]:
        nudge(scratch / "model.safetensors", [name])
        nudge(scratch / "model.safetensors", [name])
    assert model_identity(scratch) == unchanged(identity.WHOLE)


def test_new_weights_under_an_old_name_have_another_identity(model, either):
    before = model_identity(model)
    rng = np.random.default_rng(0)
    layer = [name for name in TENSORS if ".layers.3." in name]
    nudge(model / "model.safetensors", layer, lambda v: v * (1 + 0.001 * rng.standard_normal(v.shape)))
    after = model_identity(model)
    assert after != before
    assert after.partition("@")[0] == before.partition("@")[0] == "tiny"


def test_any_one_value_of_a_small_model_is_seen(model):
    seen = {model_identity(model)}
    for at in (0, 12345, -1):
        nudge(model / "model.safetensors", ["model.embed_tokens.weight"], lambda v, at=at: one_more(v, at))
        seen.add(model_identity(model))
    assert len(seen) == 4


def one_more(values, at):
    values = values.copy()
    values[at] += 1
    return values


def test_a_lora_fused_into_one_quantised_projection_is_seen(tmp_path, sampled):
    name = "model.layers.2.mlp.up_proj"
    weight = mx.load(str(TINY / "model.safetensors"))[f"{name}.weight"].astype(mx.float32)
    a, b = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate([(640, 4), (4, 256)]))
    fused = weight + 0.01 * mx.std(weight) / 2 * (a @ b)  # a hundredth of the weights' own spread
    folders = []
    for folder, values in (("plain", weight), ("fused", fused)):
        codes, _, _ = mx.quantize(values, group_size=64, bits=4)
        folders.append(weights(tmp_path / folder, {f"{name}.weight": np.array(codes)}))
    assert hash_of(folders[0]) != hash_of(folders[1])


def test_any_change_of_the_config_is_another_identity(model):
    seen = {model_identity(model)}
    for change in [
        {"rope_theta": 10001.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": None},
        {"eos_token_id": [1, 2]},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"limit": float("inf")},
    ]:
        edit(model / "config.json", **change)
        seen.add(model_identity(model))
    assert len(seen) == 8


def test_quantisation_settings_beside_the_config_count(model):
    seen = {model_identity(model)}
    for algo in ("NVFP4", "FP8"):
        (model / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algo}}))
        seen.add(model_identity(model))
    assert len(seen) == 3


def test_the_code_that_builds_the_model_counts(model):
    seen = {model_identity(model)}
    (model / "mine.py").write_text("class Model: ...")
    assert model_identity(model) in seen  # nobody runs it
    edit(model / "config.json", model_file="mine.py")
    seen.add(model_identity(model))
    (model / "mine.py").write_text("class Model: pass")
    seen.add(model_identity(model))
    assert len(seen) == 3


def test_a_tensors_name_dtype_and_shape_count(tmp_path):
    v = np.zeros(64, np.float32)
    others = [{"a": v}, {"b": v}, {"a": v.view("i4")}, {"a": v.reshape(8, 8)}, {"a": v[:32]}, {"a": v, "b": v}, {}]
    made = [weights(tmp_path / str(i), tensors) for i, tensors in enumerate(others)]
    assert len(set(map(hash_of, made))) == len(others)


# -- shards -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    """Two files and their index, as mlx-lm saves a larger model."""
    folder = tmp_path / "sharded"
    rng = np.random.default_rng(1)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        weights(folder, {f"{name[:11]}.{part}": rng.random((64, 1000), np.float32) for part in "ab"}, name)
    shards = {tensor: name for name in names for tensor in header(folder / name)[1]}
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_every_shard_counts(sharded, either):
    seen = {model_identity(sharded)}
    for shard in sorted(sharded.glob("*.safetensors")):
        nudge(shard, sorted(header(shard)[1])[-1:])
        seen.add(model_identity(sharded))
    save_file({"more": np.zeros(4)}, sharded / "model-00003-of-00002.safetensors")
    seen.add(model_identity(sharded))
    assert len(seen) == 4


def test_shards_that_change_places_are_another_model(sharded):
    before = model_identity(sharded)
    one, two = sorted(sharded.glob("*.safetensors"))
    one.rename(sharded / "aside")
    two.rename(one)
    (sharded / "aside").rename(two)
    assert model_identity(sharded) != before


def test_a_shards_name_counts(sharded):
    before = model_identity(sharded)
    one = min(sharded.glob("*.safetensors"))
    one.rename(sharded / "model-00000.safetensors")
    assert model_identity(sharded) != before


def test_of_an_index_its_weight_map_counts(sharded):
    index = sharded / "model.safetensors.index.json"
    before = model_identity(sharded)
    edit(index, metadata={"total_size": 2})
    assert model_identity(sharded) == before
    shards = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**shards, "model-00001.a": "model-00002-of-00002.safetensors"})
    assert model_identity(sharded) != before


# -- adapters -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(2)
    lora = {f"model.layers.5.self_attn.q_proj.lora_{x}": rng.random((256, 4), np.float32) for x in "ab"}
    save_file(lora, folder / "adapters.safetensors")
    return folder


def test_an_adapter_adds_a_hash_of_its_own_to_the_models(adapter, model):
    alone, together = model_identity(model), model_identity(model, adapter=adapter)
    weights, code = alone.split("|")
    assert re.fullmatch(re.escape(weights) + r"\+[0-9a-f]{24}" + re.escape(f"|{code}"), together)
    assert as_model(together) == together
    moved = copied(adapter.parent / "renamed", adapter)
    assert model_identity(model, str(moved) + "/") == together
    assert hash_of(TINY, adapter) == together.partition("@")[2]


def test_any_change_of_an_adapter_is_another_identity(adapter, either):
    seen = {model_identity(TINY), model_identity(TINY, adapter)}
    for name in sorted(header(adapter / "adapters.safetensors")[1]):
        nudge(adapter / "adapters.safetensors", [name])
        seen.add(model_identity(TINY, adapter))
    edit(adapter / "adapter_config.json", lora_parameters={"rank": 4, "scale": 10.0, "dropout": 0.0})
    seen.add(model_identity(TINY, adapter))
    (adapter / "0000100_adapters.safetensors").write_bytes(b"a checkpoint, which nobody loads")
    seen.add(model_identity(TINY, adapter))
    assert len(seen) == 5


@pytest.mark.parametrize("left_out", ["adapter", "adapter_config.json", "adapters.safetensors"])
def test_an_adapter_that_is_not_there_is_named(adapter, left_out):
    missing = adapter if left_out == "adapter" else adapter / left_out
    missing.rename(adapter.parent / "aside")
    refused(FileNotFoundError, str(missing), TINY, adapter)


# -- the program --------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes another mlx-lm, of links to the installed one's files but for those that are changed, the installed one."""

    def installed(**changed):
        package = tmp_path / f"mlx_lm-{len(list(tmp_path.glob('mlx_lm-*')))}"
        (package / "models").mkdir(parents=True)
        for path in [*LIBRARY.glob("*.py"), *LIBRARY.glob("models/*.py")]:
            (package / path.relative_to(LIBRARY)).symlink_to(path)
        for name, change in changed.items():
            path = package / f"{name.replace('__', '/')}.py"
            text = path.read_text()
            path.unlink()
            if change is not None:
                path.write_text(text + change)
        monkeypatch.setattr(identity, "_package", lambda: package)
        return package

    return installed


def code_of(*args):
    return model_identity(*args).partition("|")[2]


MORE = "\nMORE = 1\n"


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        ("models__llama", True),
        ("models__base", True),
        ("models__rope_utils", True),
        ("models__cache", True),
        ("models__mamba", False),
        ("server", False),
        ("utils", False),
    ],
)
def test_the_code_that_computes_the_state_is_in_the_identity(library, module, counts):
    library()
    before = model_identity(TINY)
    library(**{module: MORE})
    assert (model_identity(TINY) != before) == counts
    assert model_identity(TINY).partition("|")[0] == before.partition("|")[0]


def test_code_that_another_module_imports_counts_for_both(model, library):
    edit(model / "config.json", model_type="deepseek_v32")
    seen = set()
    for changed in ({}, {"models__deepseek_v32": MORE}, {"models__switch_layers": MORE}, {"models__mamba": MORE}):
        library(**changed)
        seen.add(code_of(model))
    assert len(seen) == 3


def test_a_process_keeps_the_name_of_the_code_that_it_has_imported(library):
    """An upgrade under a server that runs: what it has imported is the old code."""
    package, before = library(), model_identity(TINY)
    path = package / "models" / "llama.py"
    text = path.read_text()
    path.unlink()
    path.write_text(text + MORE)
    assert model_identity(TINY) == before


def test_types_that_mlx_lm_makes_of_one_module_have_one_code(model):
    llama = code_of(model)
    edit(model / "config.json", model_type="mistral")
    assert code_of(model) == llama
    edit(model / "config.json", model_type="mamba")
    assert re.fullmatch(r"code [0-9a-f]{16}", code_of(model))
    assert code_of(model) != llama


def test_an_architecture_may_mean_another_module(model, library):
    table = {("llama", "OtherForCausalLM"): "mamba"}
    library(utils=f"\nMODEL_ARCHITECTURE_REMAPPING = {table}\n")
    llama = code_of(model)
    edit(model / "config.json", architectures=["OtherForCausalLM"])
    other = code_of(model)
    edit(model / "config.json", model_type="mamba")
    assert other == code_of(model) != llama


def test_every_module_of_mlx_lm_that_makes_a_model_has_a_hash_of_its_own():
    models = [path for path in LIBRARY.glob("models/*.py") if "class Model(" in path.read_text()]
    hashes = {identity._code_hash(LIBRARY, path) for path in models}
    assert len(hashes) == len(models) > 50


def test_where_the_code_is_not_found_mlx_lms_version_stands_for_it(model, library, monkeypatch):
    version = importlib.metadata.version("mlx-lm")
    for kind in ("no_such_model", "../server", "", None, ["llama"]):
        edit(model / "config.json", model_type=kind)
        assert code_of(model) == f"mlx-lm {version}"
    edit(model / "config.json", model_type="llama")
    library(models__llama=None)
    assert code_of(model) == f"mlx-lm {version}"
    library(models__llama="\ndef broken(:\n")
    assert code_of(model) == f"mlx-lm {version}"
    monkeypatch.undo()
    monkeypatch.setattr(identity, "_LIBRARY", "no_such_library")
    assert code_of(model) == f"mlx-lm {version}"
    monkeypatch.setattr(identity, "version_of", lambda distribution: "")
    assert "|" not in model_identity(model)


def test_what_a_models_own_code_imports_of_mlx_lm_counts(model, library):
    (model / "mine.py").write_text("from mlx_lm.models import base\nfrom mlx_lm.models.mamba import Model\nimport json")
    edit(model / "config.json", model_file="mine.py")
    library()
    before = code_of(model)
    library(models__mamba=MORE)
    changed = code_of(model)
    library(models__llama=MORE)
    assert code_of(model) == before != changed


def test_what_a_model_imports_from_a_package_counts_wherever_it_is_there(library):
    seen = set()
    for where, text in (("sums", "FAST = 1"), ("sums", "FAST = 2"), ("products", "FAST = 2")):
        kernels = library(models__llama="\nfrom ..fused import fast\n") / "fused"
        kernels.mkdir()
        (kernels / "__init__.py").write_text(f"from .{where} import fast\n")
        for name in ("sums", "products"):
            (kernels / f"{name}.py").write_text(text)
        seen.add(code_of(TINY))
    assert len(seen) == 3


# -- the Hugging Face cache ---------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path):
    """A cache as huggingface_hub lays it out: a snapshot is links to blobs."""
    repo = tmp_path / "hf" / "hub" / "models--some-org--Tiny_Llama-4bit"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    copied(repo / "blobs")
    for path in (repo / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    return SimpleNamespace(home=tmp_path / "hf", snapshot=snapshot)


def offline(code, **environment):
    """Python in a process of its own that no socket can leave."""
    guard = """
import socket
def no(*args, **kw): raise SystemExit("the network was asked")
socket.socket.connect = socket.getaddrinfo = no
"""
    unset = {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", guard + code]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_repo_id_is_looked_up_in_the_local_cache_and_nowhere_else(hub, variable):
    names, folders = ["some-org/other", "nobody", "odd..name/x"], ["a/b/c", "./some-org/other"]
    code = f"""
from prefixcache import model_identity
print(model_identity("some-org/Tiny_Llama-4bit"))
for name in {names + folders}:
    try:
        model_identity(name)
    except FileNotFoundError as error:
        print(error)
"""
    where = hub.home if variable == "HF_HOME" else hub.home / "hub"
    done = offline(code, **{variable: str(where)})
    assert done.returncode == 0, done.stderr
    found, *errors = done.stdout.splitlines()
    assert found == "Tiny_Llama-4bit@" + hash_of(TINY) == model_identity(hub.snapshot)
    for error, name in zip(errors, names + folders, strict=True):
        assert error.startswith(f"model {name!r}: no such folder")
        assert (f"the Hugging Face cache in {hub.home / 'hub'} " in error) == (name in names)


def test_a_folder_comes_before_a_repo_of_its_name(tmp_path, monkeypatch):
    copied(tmp_path / "some-org" / "Tiny_Llama-4bit")
    monkeypatch.chdir(tmp_path)
    assert model_identity("some-org/Tiny_Llama-4bit") == "Tiny_Llama-4bit@" + hash_of(TINY)


def test_of_a_download_that_broke_off_the_missing_file_is_named(hub):
    hub.snapshot.joinpath("model.safetensors").resolve().unlink()
    refused(FileNotFoundError, "model.safetensors is missing", hub.snapshot)


def test_a_folder_needs_neither_mlx_nor_the_hub_nor_the_rest_of_the_package():
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("identity", {identity.__file__!r})
sys.modules["identity"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.model_identity({str(TINY)!r}))
print([name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm", "huggingface_hub", "prefixcache", "numpy")])
"""
    done = offline(code)
    assert done.stdout == f"{model_identity(TINY)}\n[]\n", done.stderr


# -- what it costs ------------------------------------------------------------------------------------------------------


def sparse_model(folder, files, tensors, size):
    """Files with real headers whose `size` bytes a tensor are all holes."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for i in range(files):
        entries = {
            f"model.layers.{i}.{t}": {"dtype": "U8", "shape": [size], "data_offsets": [t * size, (t + 1) * size]}
            for t in range(tensors)
        }
        said = json.dumps(entries).encode()
        with open(folder / f"model-{i:05}.safetensors", "wb") as file:
            file.write(len(said).to_bytes(8, "little") + said)
            file.truncate(8 + len(said) + tensors * size)
    return folder


@pytest.mark.parametrize(
    ("files", "tensors", "size", "each"),
    [(100, 50, 80_000_000, 4), (2, 50, 80_000_000, 64), (3, 7000, 10_000, 1), (4, 40, 100_000, 1), (2, 5, 1000, 1)],
    ids=["400B", "a few large tensors", "very many tensors", "small tensors", "a small model"],
)
def test_reads_and_bytes_are_bounded_whatever_the_size(tmp_path, monkeypatch, files, tensors, size, each):
    folder = sparse_model(tmp_path / "sparse", files, tensors, size)
    calls, pread = [], os.pread

    def counted(file, n, at):
        calls.append((os.fstat(file).st_ino, n, at))
        return pread(file, n, at)

    monkeypatch.setattr(os, "pread", counted)
    model_identity(folder)
    starts = {path.stat().st_ino: header(path)[0] for path in folder.glob("*.safetensors")}
    reads = Counter((file, (at - starts[file]) // size) for file, _, at in calls if at >= starts.get(file, 1 << 60))
    assert set(reads.values()) == {each}
    assert len(reads) == files * tensors
    assert len(calls) == files * tensors * each + 2 * files + 1
    assert sum(n for _, n, _ in calls) <= max(20_000, files * tensors) * 4096 + sum(starts.values()) + 2


@given(st.text(max_size=5), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 64))
def test_a_tensor_is_read_once_in_each_of_its_parts(name, start, size, count):
    tensor = identity.Tensor(name, "F16", [size], start, size)
    places = list(identity._places(tensor, count))
    assert places == list(identity._places(tensor, count))
    if size <= count * 4096:
        assert places == [(start, size)] * (size > 0)
        return
    assert len(places) == count
    for part, (at, n) in enumerate(places):
        assert n == 4096
        assert size * part // count <= at - start <= size * (part + 1) // count - n


def test_a_run_of_changes_as_long_as_two_parts_is_seen_wherever_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 0)
    monkeypatch.setattr(identity, "READS", 8)
    length = 1 << 20
    values = np.zeros(length, np.uint8)
    before = hash_of(weights(tmp_path / "run", {"w": values}))
    for first in range(0, length - length // 4 + 1, 65432):
        changed = values.copy()
        changed[first : first + length // 4] = 1
        assert hash_of(weights(tmp_path / "run", {"w": changed})) != before


def test_a_change_of_the_same_columns_in_every_row_is_seen_whichever_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 0)
    monkeypatch.setattr(identity, "READS", 8)
    values = np.zeros((64, 16384), np.uint8)
    seen = {hash_of(weights(tmp_path / "columns", {"w": values}))}
    for first in range(0, 16384, 4096):  # one head of four, in an output projection
        changed = values.copy()
        changed[:, first : first + 4096] = 1
        seen.add(hash_of(weights(tmp_path / "columns", {"w": changed})))
    assert len(seen) == 5


FIELDS = st.lists(st.binary(max_size=12), max_size=4)


@given(FIELDS, FIELDS)
def test_no_two_lists_of_fields_run_together(one, other):
    assert (identity._hash("x", *one) == identity._hash("x", *other)) == (one == other)
    assert identity._hash("x", *one) != identity._hash("y", *one)
    if one:
        assert identity._hash("x", b"".join(one)) != identity._hash("x", *one, b"")


# -- errors -------------------------------------------------------------------------------------------------------------

REMEDY = re.compile(r"(copy or download it again|download it first|give (one|the|a) )")


def refused(kind, text, *args):
    with pytest.raises(kind) as caught:
        model_identity(*args)
    said = str(caught.value)
    assert text in said
    assert "\n" not in said
    assert REMEDY.search(said), said


def test_a_model_that_is_not_there_is_named(tmp_path, model):
    for path in (tmp_path / "none", "", "~nobody/x", model / "config.json"):
        refused(FileNotFoundError, f"model {str(path)!r}: no such folder", path)
    for wrong in (None, 7, b"tiny"):
        with pytest.raises(TypeError, match="give a folder as a str or Path"):
            model_identity(wrong)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_without_config_or_weights_is_refused(model, name):
    (model / name).unlink()
    refused(FileNotFoundError, str(model), model)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no JSON"),
        (b'{"a": 1', "no JSON"),
        (b"\xff\xfe\xfd", "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"[1]", "a JSON list, not an object"),
        (b"null", "a JSON NoneType, not an object"),
    ],
    ids=["empty", "cut", "bytes", "deep", "digits", "list", "null"],
)
def test_a_damaged_json_file_is_named(model, file, content, why):
    (model / file).write_bytes(content)
    if b"999" in content and sys.version_info < (3, 10, 7):
        return  # the limit of digits is newer
    refused(ValueError, f"{model / file} ", model)
    refused(ValueError, why, model)


def test_a_model_file_that_is_no_file_is_refused(model):
    edit(model / "config.json", model_file="gone.py")
    refused(FileNotFoundError, f"{model / 'gone.py'} is missing", model)
    edit(model / "config.json", model_file=["a.py"])
    refused(ValueError, "model_file is a list", model)
    edit(model / "config.json", model_file="/dev/zero")
    refused(ValueError, "/dev/zero is no regular file", model)


def entry(**fields):
    said = json.dumps({"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | fields}).encode()
    return len(said).to_bytes(8, "little") + said + bytes(4)


DAMAGED = {
    "empty": b"",
    "seven bytes": b"\2\0\0\0\0\0\0",
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9843014\n",
    "a header longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "a header of 2**63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "no header": bytes(8),
    "no JSON": (2).to_bytes(8, "little") + b"{]",
    "no object": (2).to_bytes(8, "little") + b"[]",
    "deep nesting": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "a tensor that is no object": (7).to_bytes(8, "little") + b'{"t":7}',
    "a tensor beyond the end": entry(data_offsets=[0, 5]),
    "a tensor far beyond the end": entry(data_offsets=[0, 1 << 70]),
    "a tensor before the beginning": entry(data_offsets=[-4, 0]),
    "offsets the wrong way": entry(data_offsets=[4, 0]),
    "one offset": entry(data_offsets=[4]),
    "offsets of another kind": entry(data_offsets=[0.0, 4.0]),
    "a dtype of another kind": entry(dtype=8),
    "a shape of another kind": entry(shape="4"),
    "a negative shape": entry(shape=[-4]),
    "a shape of truths": entry(shape=[True]),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_weights_file_is_named(model, content):
    (model / "model-2.safetensors").write_bytes(content)
    refused(ValueError, f"{model / 'model-2.safetensors'} ", model)


def test_weights_cut_short_anywhere_are_refused(model):
    path = model / "model.safetensors"
    size = path.stat().st_size
    for left in (size - 1, size // 2, header(path)[0], header(path)[0] - 1, 8, 0):
        os.truncate(path, left)
        refused(ValueError, f"{path} ", model)


def test_weights_that_shrink_while_they_are_read_are_refused(model, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, n, at: pread(file, n, at)[: -1 if n > 100_000 else n])
    refused(ValueError, f"{model / 'model.safetensors'} ends before byte", model)


def test_what_is_no_file_is_refused_and_never_waited_for(model):
    os.mkfifo(model / "model-2.safetensors")
    refused(ValueError, "model-2.safetensors is no regular file", model)
    (model / "model-2.safetensors").unlink()
    (model / "model-2.safetensors").mkdir()
    refused(ValueError, "model-2.safetensors is no regular file", model)


@given(st.binary(max_size=60) | st.binary(max_size=200).map(lambda b: len(b).to_bytes(8, "little") + b))
def test_no_bytes_in_the_place_of_weights_raise_anything_but_valueerror(tmp_path_factory, content):
    folder = weights(tmp_path_factory.getbasetemp() / "fuzz", {})
    (folder / "model.safetensors").write_bytes(content)
    try:
        said = model_identity(folder)
    except ValueError as error:
        said = str(error)
    assert said.startswith(("fuzz@", str(folder / "model.safetensors")))


# -- in a cache ---------------------------------------------------------------------------------------------------------


def test_what_one_models_cache_stored_the_next_weights_under_its_name_never_fetch(tmp_path):
    folders = [copied(tmp_path / place / "tiny-llama") for place in ("old", "new")]
    nudge(folders[1] / "model.safetensors", ["model.layers.4.mlp.down_proj.weight"])
    old, new = map(model_identity, folders)
    assert old.split("@")[0] == new.split("@")[0]
    values = {"ram": "10MB", "codec": "raw", "ssd_dir": tmp_path / "ssd", "ssd": "50MB"}
    with PrefixCache(**values) as cache:
        cache.store(LONG, states.sliceable(LONG), model=old)
        assert cache.fetch(LONG, model=new) == (None, LONG)
    with PrefixCache(**values) as cache:
        assert cache.match(LONG, model=new) == (0, 0)
        assert cache.promote(LONG, model=new).result(10) == 0
        assert cache.promote(LONG, model=old).result(10) == 1000
        assert cache.fetch(LONG, model=new) == (None, LONG)
        restored, rest = cache.fetch(LONG, model=old)
        states.check(restored, LONG[: len(LONG) - len(rest)])
