"""Makes the two tiny language models in tests/fixtures: tiny-llama and tiny-qwen2.

    python tools/train_tiny.py data  --out work          # download sources, build the corpus and the tokenizer
    python tools/train_tiny.py pack  --data work         # tokenise, and write the recall tasks
    python tools/train_tiny.py train --data work --model llama --out tests/fixtures/tiny-llama
    python tools/train_tiny.py eval  --data work --model tests/fixtures/tiny-llama
    python tools/train_tiny.py smoke                     # all four, far too small, in seconds on a CPU

Training runs in MLX, on mlx-lm's own model classes, so it needs what mlx-lm needs and the `tokenizers` package. The
models in the repository were made on one CUDA GPU, where the larger one sees more than three million tokens a second;
elsewhere it takes longer, and `--steps` asks for less. They had `--steps 5681` and then `--resume ... --start 0.7
--steps 3294 --seed 1` (llama), and `--steps 8240` (qwen2); their cards say more. `data` needs pip and a network; what
it makes is the same again while the index still has the versions in SOURCES and the interpreter is the same one.
Training is seeded, but a GPU adds in no fixed order, so a second run gives a model that is as good, not the same.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import math
import multiprocessing
import os
import platform
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Pinned, with the licence that each project states. An sdist is taken where it holds documentation that the wheel lacks.
SOURCES = [
    # (name, version, "sdist" or "wheel", licence)
    ("aiohttp", "3.14.5", "sdist", "Apache-2.0 AND MIT"),
    ("attrs", "26.1.0", "sdist", "MIT"),
    ("bokeh", "3.9.2", "wheel", "BSD-3-Clause"),
    ("celery", "5.7.0", "sdist", "BSD-3-Clause"),
    ("click", "8.5.1", "sdist", "BSD-3-Clause"),
    ("dask", "2026.8.0", "wheel", "BSD-3-Clause"),
    ("distributed", "2026.8.0", "wheel", "BSD-3-Clause"),
    ("django", "5.2.19", "sdist", "BSD-3-Clause"),
    ("fastapi", "0.165.0", "sdist", "MIT"),
    ("flask", "3.1.3", "sdist", "BSD-3-Clause"),
    ("httpx", "0.28.1", "sdist", "BSD-3-Clause"),
    ("jinja2", "3.1.6", "sdist", "BSD-3-Clause"),
    ("jsonschema", "4.26.0", "sdist", "MIT"),
    ("matplotlib", "3.11.2", "wheel", "PSF-based"),
    ("mlx-lm", "0.32.2", "wheel", "MIT"),
    ("mypy", "2.4.1", "wheel", "MIT"),
    ("networkx", "3.6.1", "sdist", "BSD-3-Clause"),
    ("nltk", "3.10.4", "wheel", "Apache-2.0"),
    ("numpy", "2.4.6", "wheel", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
    ("pandas", "3.1.1", "wheel", "BSD-3-Clause"),
    ("pip", "26.3", "wheel", "MIT"),
    ("pydantic", "2.14.3", "wheel", "MIT"),
    ("pytest", "9.2.0", "sdist", "MIT"),
    ("requests", "2.34.2", "sdist", "Apache-2.0"),
    ("rich", "15.0.0", "sdist", "MIT"),
    ("scikit-image", "0.26.0", "wheel", "BSD-3-Clause"),
    ("scikit-learn", "1.9.1", "wheel", "BSD-3-Clause"),
    ("scipy", "1.17.1", "wheel", "BSD-3-Clause"),
    ("setuptools", "84.2.1", "wheel", "MIT"),
    ("sphinx", "9.0.4", "sdist", "BSD-2-Clause"),
    ("sqlalchemy", "2.1.9", "sdist", "MIT"),
    ("sqlite-utils", "4.2.1", "wheel", "Apache-2.0"),
    ("starlette", "1.10.0", "sdist", "BSD-3-Clause"),
    ("statsmodels", "0.15.0", "wheel", "BSD-3-Clause"),
    ("sympy", "1.14.0", "sdist", "BSD-3-Clause"),
    ("tornado", "6.6.1", "sdist", "Apache-2.0"),
    ("transformers", "5.23.0", "wheel", "Apache-2.0"),
    ("twisted", "26.10.0", "sdist", "MIT"),
    ("wagtail", "8.0.1", "sdist", "BSD-3-Clause"),
    ("werkzeug", "3.1.9", "sdist", "BSD-3-Clause"),
    ("xarray", "2026.9.0", "wheel", "Apache-2.0"),
]
SKIP_PARTS = {
    "tests",
    "test",
    "testing",
    "_vendor",
    "vendor",
    "vendored",
    "extern",
    "externals",
    "locale",
    "node_modules",
}
SKIP_PARTS |= {"idlelib", "lib2to3", "turtledemo", "site-packages", "__pycache__", "typeshed", "_static", "changelog"}
TEXT_ENDINGS = (".py", ".rst", ".txt", ".md")

BOS, END, ROLES = "<|bos|>", "<|end|>", ("system", "user", "assistant")
SPECIAL = [BOS, END, *(f"<|{role}|>" for role in ROLES)]
BOS_ID, END_ID, ASSISTANT_ID = 0, 1, 4
# transformers 5 gives every model of type qwen2 this split, whatever its tokenizer.json says. With `--split qwen2` a
# model is trained on what it will be given. The models in the repository were trained on the other: see their cards.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB = 3072
CONTEXT = 4096
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ANSWER_WEIGHT = 10  # an answer is a dozen tokens in thousands, and is what the recall tasks are there for
STAGES = [(0.0, 1024), (0.45, 2048), (0.75, 4096)]  # (from which part of the training, row length)

COMMON = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": END_ID,
    "torch_dtype": "float16",
    "use_cache": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **COMMON,
        "num_hidden_layers": 6,
        "intermediate_size": 640,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **COMMON,
        "num_hidden_layers": 4,
        "intermediate_size": 240,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0,
        "use_sliding_window": False,
    },
}


# ---- data: sources to a corpus and a tokenizer ----------------------------------------------------------------------


def archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.name.endswith(".whl"):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(TEXT_ENDINGS):
                    yield name, archive.read(name)
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(TEXT_ENDINGS):
                    yield member.name, archive.extractfile(member).read()  # type: ignore[union-attr]


def stdlib_files() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), path.read_bytes()


def usable(name: str, raw: bytes) -> str | None:
    """The file's text, or None when it is no prose and no code that a person wrote."""
    parts = name.lower().split("/")
    if SKIP_PARTS & set(parts) or parts[-1].startswith(("test_", "license", "copying", "conftest")):
        return None
    if not 300 <= len(raw) <= 400_000:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\t", "    ")
    except UnicodeDecodeError:
        return None
    lines = text.count("\n") + 1
    digits = sum(text.count(d) for d in "0123456789")
    odd = sum(ord(c) > 127 for c in text)
    if len(text) / lines > 160 or digits > 0.12 * len(text) or odd > 0.02 * len(text):
        return None
    if "GNU General Public" in text or "GNU GENERAL PUBLIC" in text:
        return None
    return text.replace("<|", "< |")  # other models' chat tokens, in some sources, must not read as ours


def outline(name: str, tree: ast.Module) -> tuple[str, list[tuple[str, str]]]:
    """A module as help() would show it, and (qualified name, docstring) of all that has one."""
    module = re.sub(r"^.*?/(?:src/|lib/)?", "", name, count=1)[:-3].replace("/", ".").removesuffix(".__init__")
    found: list[tuple[str, str]] = []
    shown: list[str] = []

    def visit(node: Any, path: str, indent: str) -> None:
        doc = ast.get_docstring(node)
        if doc:
            found.append((path, doc))
            shown.append("\n".join((indent + line).rstrip() for line in doc.split("\n")) + "\n")
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                shown.append(f"{indent}class {child.name}:")
                visit(child, f"{path}.{child.name}", indent + "    ")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(child):
                shown.append(f"{indent}{child.name}({ast.unparse(child.args)})")
                visit(child, f"{path}.{child.name}", indent + "    ")

    visit(tree, module, "")
    return f"Help on module {module}:\n\n" + "\n".join(shown), found


def chat(*turns: tuple[str, str]) -> str:
    return BOS + "".join(f"<|{role}|>\n{content}{END}\n" for role, content in turns)


def chat_about(found: list[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    """Short conversations about what has a docstring: the question names it, the answer is the first sentence."""
    for path, doc in found:
        first = " ".join(doc.split("\n\n")[0].split())
        end = first.find(". ")
        first = first[: end + 1] if end > 0 else first
        if not 20 <= len(first) <= 300 or rng.random() < 0.4:
            continue
        name = path if rng.random() < 0.5 else ".".join(path.split(".")[-2:])
        forms = [
            "What does `{}` do?",
            "What is {}?",
            "Explain {} in one sentence.",
            "Describe `{}`.",
            "What is {} for?",
        ]
        turns = [("user", rng.choice(forms).format(name)), ("assistant", first)]
        if rng.random() < 0.3:
            turns.insert(
                0, ("system", rng.choice(["You are a helpful assistant.", "You know the Python documentation."]))
            )
        yield chat(*turns)


def make_data(out: Path, stdlib_only: bool, limit: int, downloads: Path | None, split: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    version = platform.python_version()
    listed = [("CPython standard library", version, "stdlib", "PSF-2.0")] + ([] if stdlib_only else SOURCES)
    seen: set[str] = set()
    documents: list[str] = []
    held_out: list[str] = []
    chats: list[str] = []
    counts = []
    rng = random.Random(1)
    for name, version, form, licence in listed:
        before = sum(map(len, documents))
        if form == "stdlib":
            files = stdlib_files()
        else:
            folder = downloads or out / "downloads"
            files = archive_files(download(folder, name, version, form))
        for path, raw in files:
            digest = hashlib.sha256(raw).hexdigest()
            if digest in seen or (text := usable(path, raw)) is None:
                continue
            seen.add(digest)
            pieces = [text]
            if path.endswith("topics.py"):  # pydoc's texts: the language reference, as a dictionary of strings
                pieces = list(ast.literal_eval(text[text.index("{") :].strip()).values())
            elif path.endswith(".py"):
                try:
                    shown, found = outline(path, ast.parse(text))
                except (SyntaxError, ValueError, RecursionError):
                    continue
                chats += chat_about(found, rng)
                # Half of the modules are shown as source and half as documentation: both would say the same thing twice.
                if int(digest[:2], 16) % 2 and len(shown) > 600:
                    pieces = [shown]
            for piece in pieces:
                (held_out if int(digest[2:6], 16) % 150 == 0 else documents).append(piece)
            if limit and sum(map(len, documents)) > limit:
                break
        counts.append({"name": name, "version": version, "form": form, "licence": licence})
        counts[-1]["characters"] = sum(map(len, documents)) - before
        print(counts[-1], flush=True)
    rng.shuffle(documents)
    rng.shuffle(chats)
    with lzma.open(out / "corpus.json.xz", "wt", encoding="utf-8", preset=3) as file:
        json.dump({"documents": documents, "held_out": held_out, "chats": chats}, file)
    (out / "sources.json").write_text(json.dumps(counts, indent=1) + "\n")
    train_tokenizer(documents, out / "tokenizer.json", split)
    print(f"{len(documents)} documents, {sum(map(len, documents)) / 1e6:.1f} M characters, {len(chats)} short chats")


def download(folder: Path, name: str, version: str, form: str) -> Path:
    wanted = re.sub(r"[-_.]+", "_", name).lower() + "-" + version
    for _ in range(2):
        for path in sorted(folder.glob("*")):
            if path.name.lower().replace("-", "_").startswith(wanted.replace("-", "_")):
                return path
        only = ["--no-binary", name] if form == "sdist" else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *only, "-d", str(folder)]
        subprocess.run([*command, f"{name}=={version}"], check=True)
    raise FileNotFoundError(f"pip did not bring {name} {version}")


def train_tokenizer(documents: list[str], path: Path, split: str) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    # Digit by digit: a number that must be repeated is then a row of ten symbols, each of them well known.
    if split == "qwen2":
        first = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        tokenizer.normalizer = normalizers.NFC()
    else:
        first = pre_tokenizers.Digits(individual_digits=True)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split != "qwen2")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    sample, size = [], 0
    for document in documents:  # shuffled already
        sample.append(document)
        size += len(document)
        if size > 15_000_000:
            break
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))


# ---- pack: the corpus and the recall tasks as token arrays ----------------------------------------------------------

FIRST_NAMES = """
Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karin Leo Maria Nina Oscar Paula Quentin Rosa Simon Tara
Ursula Victor Wanda Xavier Yusuf Zoe Anton Bella Cyrus Dora Elias Fatima Gustav Hanna Igor Julia Kofi Lena Mateo
Noor Olga Pedro Ravi Sofia Tomas Uma Vera Walter Yara Zane
""".split()  # noqa: SIM905
SYLLABLES = """
ba be bo ca da del do fa fen ga gor ha hel ka kel ko la len lo ma mir mo na nor or pa pel ra rin ro sa sel so ta tel to
ul va vel vo wa wen za zor
""".split()  # noqa: SIM905
PLACES = """
harbour archive station library bridge garden tower museum office market river server project ship vault
""".split()  # noqa: SIM905
THINGS = ["secret number", "access code", "magic number", "phone number", "room number", "PIN", "port", "serial number"]
COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "purple",
    "orange",
    "black",
    "white",
    "silver",
    "golden",
    "teal",
    "crimson",
]


def a_name(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(FIRST_NAMES)
    made = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))
    if kind < 0.6:
        return made.capitalize()
    if kind < 0.7:
        return f"{rng.choice(FIRST_NAMES)} {made.capitalize()}"
    if kind < 0.85:
        return f"the {made} {rng.choice(PLACES)}" if rng.random() < 0.6 else f"the {rng.choice(PLACES)}"
    return f"{made}{rng.choice(['_', '-', '.'])}{rng.choice(SYLLABLES)}"


def a_number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** (length := rng.choice([3, 4, 5, 5, 5, 5, 6, 7])) // 10, 10**length))


def a_needle(rng: random.Random) -> tuple[str, str, str]:
    """A sentence, the question that asks for what it says, and the answer."""
    name, kind = a_name(rng), rng.random()
    if kind < 0.1:
        colour = rng.choice(COLOURS)
        return f"The colour of {name} is {colour}.", f"What is the colour of {name}?", colour
    thing = THINGS[0] if kind < 0.6 else rng.choice(THINGS)
    number = a_number(rng)
    return f"The {thing} of {name} is {number}.", f"What is the {thing} of {name}?", number


def filler(corpus: list[str], size: int, rng: random.Random) -> str:
    parts, have = [], 0
    while have < size:
        text = rng.choice(corpus)
        start = rng.randrange(max(1, len(text) - size))
        start = text.find("\n", start) + 1
        parts.append(text[start : start + size - have])
        have += len(parts[-1]) + 1
    return "\n".join(parts)


def hide(text: str, sentence: str, at: float, rng: random.Random) -> str:
    """Put the sentence into the text, near the place asked for, at the end of a line or of a sentence."""
    if at < 0:
        return f"{sentence}\n{text}"
    place = int(at * len(text))
    mark = "\n" if rng.random() < 0.5 else ". "
    found = text.find(mark, place, place + 400)
    if found < 0:
        mark, found = "\n", text.find("\n", place)
    if found < 0:
        return f"{text}\n{sentence}"
    cut = found + len(mark)
    return f"{text[:cut]}{sentence}{' ' if mark == '. ' else chr(10)}{text[cut:]}"


def conversation(text: str, asked: list[tuple[str, str]], form: float, rng: random.Random) -> str:
    """The text and the questions: text in the first question, as a system prompt, or before a chat without one."""
    turns = [turn for question, answer in asked for turn in (("user", question), ("assistant", answer))]
    if form < 0.6:
        joined = f"{text}\n\n{turns[0][1]}" if rng.random() < 0.8 else f"{turns[0][1]}\n\n{text}\n\n{turns[0][1]}"
        turns[0] = ("user", joined)
        if rng.random() < 0.2:
            turns.insert(0, ("system", "You are a helpful assistant."))
    elif form < 0.85:
        turns.insert(0, ("system", text))
    else:
        return BOS + text + "\n" + chat(*turns).removeprefix(BOS)
    return chat(*turns)


def recall_task(corpus: list[str], size: int, rng: random.Random) -> str:
    """One task of about `size` characters: needles in real text, a list to look things up in, or a text to copy."""
    kind = rng.random()
    if kind < 0.12:
        words = [rng.choice([a_name, a_number])(rng) for _ in range(min(60, max(2, size // 20)))]
        if rng.random() < 0.5:
            text = " ".join(words)
        else:
            text = filler(corpus, min(size // 2, 600), rng).strip()
        return chat(("user", f"Repeat this:\n{text}"), ("assistant", text))
    if kind < 0.3:
        rows = {a_name(rng): a_number(rng) for _ in range(min(150, max(3, size // 22)))}
        joint = rng.choice([": ", " = ", " -> "])
        text = "\n".join(f"{name}{joint}{number}" for name, number in rows.items())
        names = rng.sample(list(rows), min(len(rows), 6))
        asked = [(f"What is the value of {name}?", rows[name]) for name in names]
        return conversation(text, asked, rng.random(), rng)
    needles = {question: (sentence, answer) for sentence, question, answer in (a_needle(rng) for _ in range(8))}
    chosen = list(needles.items())[: rng.choice([1, 1, 2, 3, 4, 6, 8])]
    text = filler(corpus, max(120, size - 90 * len(chosen)), rng)
    for _, (sentence, _answer) in chosen:
        text = hide(text, sentence, rng.uniform(-0.04, 1.02), rng)
    rng.shuffle(chosen)
    asked = [(question, answer) for question, (_sentence, answer) in chosen[:4]]
    return conversation(text, asked, rng.random(), rng)


def answer_weights(ids: np.ndarray) -> np.ndarray:
    """ANSWER_WEIGHT on what the assistant says, its end token included, and 1 elsewhere."""
    weights = np.ones(len(ids), np.uint8)
    for start in np.flatnonzero(ids == ASSISTANT_ID):
        ends = np.flatnonzero(ids[start:] == END_ID)
        weights[start + 1 : start + 1 + (ends[0] if len(ends) else len(ids))] = ANSWER_WEIGHT
    return weights


WORKER: dict[str, Any] = {}  # what a forked worker inherits: the corpus and the tokenizer


def encode_some(texts: list[str]) -> np.ndarray:
    ids = [WORKER["tokenizer"].encode(text, add_special_tokens=False).ids for text in texts]
    return np.fromiter((i for row in ids for i in row), np.uint16)


def recall_rows(job: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `length`+1 tokens filled with whole recall tasks, and the weight of each token."""
    seed, length, count = job
    rng, tokenizer, corpus = random.Random(seed), WORKER["tokenizer"], WORKER["documents"]
    rows = np.zeros((count, length + 1), np.uint16)
    weights = np.ones((count, length + 1), np.uint8)
    for row in range(count):
        used, factor = 0, 1.0
        while (left := length + 1 - used) > 120:
            size = int(length * rng.uniform(0.6, 0.97)) if rng.random() < 0.5 else int(math.exp(rng.uniform(4.8, 8.2)))
            text = recall_task(corpus, int(min(size, left * 0.9) * WORKER["per_token"] * factor), rng)
            ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)
            if len(ids) > left:
                factor *= 0.8
                continue
            rows[row, used : used + len(ids)] = ids
            weights[row, used : used + len(ids)] = answer_weights(ids)
            used, factor = used + len(ids), 1.0
        rest = tokenizer.encode(BOS + filler(corpus, 1500, rng), add_special_tokens=False).ids
        rows[row, used:] = (rest * 5)[: length + 1 - used]
    return rows, weights


def load_corpus(data: Path) -> dict[str, list[str]]:
    with lzma.open(data / "corpus.json.xz", "rt", encoding="utf-8") as file:
        return json.load(file)


def pack(data: Path, recall_tokens: int, longest: int) -> None:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    corpus = load_corpus(data)
    WORKER["tokenizer"] = Tokenizer.from_file(str(data / "tokenizer.json"))
    WORKER["documents"] = corpus["documents"]
    texts = [f"{BOS}{text}{END}" for text in corpus["documents"]] + corpus["chats"]
    random.Random(2).shuffle(texts)
    sample = corpus["documents"][:50]
    WORKER["per_token"] = sum(map(len, sample)) / len(encode_some(sample))
    start = time.time()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        tokens = np.concatenate(pool.map(encode_some, [texts[i : i + 200] for i in range(0, len(texts), 200)]))
        np.save(data / "text.npy", tokens)
        print(f"{len(tokens) / 1e6:.2f} M tokens of text, {time.time() - start:.0f} s", flush=True)
        for _, length in stages(longest):
            jobs = max(1, min(256, recall_tokens // length // 8))
            each = max(2, recall_tokens // length // jobs)
            made = pool.map(recall_rows, [(length * 1000 + job, length, each) for job in range(jobs)])
            np.save(data / f"recall-{length}.npy", np.concatenate([rows for rows, _ in made]))
            np.save(data / f"recall-{length}-weights.npy", np.concatenate([weights for _, weights in made]))
            print(f"{jobs * each} rows of recall tasks of {length}, {time.time() - start:.0f} s", flush=True)


# ---- train ----------------------------------------------------------------------------------------------------------


def build(config: dict[str, Any]) -> Any:
    from mlx_lm.models import llama, qwen2

    module = {"llama": llama, "qwen2": qwen2}[config["model_type"]]
    return module.Model(module.ModelArgs.from_dict(config))


def initial(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """Weights by path. Matrices are small and normal, what writes into the residual stream smaller by the depth."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    mx.random.seed(seed)
    rng = np.random.default_rng(seed)
    weights = {}
    for path, value in tree_flatten(build(config).parameters()):
        if path.endswith("k_proj.bias"):
            value = mx.array(key_biases(config, rng))
        elif path.endswith("bias"):
            value = mx.zeros(value.shape)
        elif value.ndim == 1:
            value = mx.ones(value.shape)
        else:
            narrow = path.endswith(("o_proj.weight", "down_proj.weight"))
            spread = 0.04 / (math.sqrt(2 * config["num_hidden_layers"]) if narrow else 1)
            value = spread * mx.random.normal(value.shape)
        weights[path] = value.astype(mx.float32)
    return weights


def key_biases(config: dict[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Strong biases in a few channels of each head, as trained Qwen2 models have: they are what a codec must survive.

    They sit in the pairs that RoPE turns slowest. There a constant in the keys is nearly the same for every position, so
    softmax takes it out again, which is why a model can carry it; in a fast pair it would drown what the keys say.
    """
    heads, width = config["num_key_value_heads"], config["head_dim"]
    bias = rng.normal(0, 0.5, (heads, width))
    for head in range(heads):
        for pair in rng.choice(np.arange(width // 2 - 8, width // 2), 4, replace=False):
            sizes = rng.uniform(40, 100, 2) * rng.choice([-1, 1], 2)
            bias[head, [pair, pair + width // 2]] = sizes
    return bias.reshape(-1).astype(np.float32)


def stages(longest: int) -> list[tuple[float, int]]:
    return [(begin, length * longest // CONTEXT) for begin, length in STAGES]


def rate(done: float, start: float, peak: float) -> float:
    """Warm up, hold, and fall to nothing over the second half."""
    return peak * min(1.0, (done - start) / 0.015, (1 - done) / 0.5)


def train(args: argparse.Namespace) -> None:
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten, tree_map, tree_unflatten

    config = CONFIGS[args.model]
    compute = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
    model = build(config)
    first = mx.load(str(args.resume / "model.safetensors")) if args.resume else initial(config, args.seed)
    held = {"weights": tree_unflatten([(path, value.astype(mx.float32)) for path, value in first.items()])}
    optimizer = optim.AdamW(learning_rate=args.rate, betas=[0.9, 0.95], weight_decay=0.0, bias_correction=True)
    optimizer.init(held["weights"])

    def loss_of(weights: Any, x: mx.array, y: mx.array, worth: mx.array) -> tuple[mx.array, mx.array]:
        model.update(tree_map(lambda value: value.astype(compute), weights))
        # Tokens are looked up by a matrix product: a gather's gradient adds row by row, and the commonest tokens queue.
        table = model.model.embed_tokens.weight
        chosen = (x[..., None] == mx.arange(VOCAB)).astype(compute)
        logits = model(x, input_embeddings=chosen @ table).astype(mx.float32)
        each = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
        plain = worth == 1
        shown = mx.stack([mx.sum(each * plain), mx.sum(plain), mx.sum(each * ~plain), mx.sum(~plain)])
        return mx.sum(each * worth) / mx.sum(worth), shown

    gradient = mx.value_and_grad(loss_of)
    state = [held, optimizer.state]

    def step(x: mx.array, y: mx.array, worth: mx.array) -> mx.array:
        (_, shown), grads = gradient(held["weights"], x, y, worth)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        keep = 1 - optimizer.learning_rate * args.decay
        # Biases and norms do not decay: a key bias that does would be gone at the end.
        decayed = tree_map(lambda value: value * keep if value.ndim > 1 else value, held["weights"])
        held["weights"] = optimizer.apply_gradients(grads, decayed)
        return shown

    step = mx.compile(step, inputs=state, outputs=state)
    text = mx.array(np.load(args.data / "text.npy"))
    chance = np.random.default_rng(args.seed)
    length, recall, worths, log, sums = 0, None, None, [], mx.zeros(4)
    start, tokens, last = time.time(), 0, 0.0
    for number in range(args.steps):
        done = number / args.steps
        if args.minutes:
            done = max(done, (time.time() - start) / 60 / args.minutes)
        done = args.start + (1 - args.start) * done
        if done >= 1:
            break
        wanted = [size for begin, size in stages(args.longest) if done >= begin][-1]
        if wanted != length:
            length = wanted
            recall = mx.array(np.load(args.data / f"recall-{length}.npy"))
            worths = mx.array(np.load(args.data / f"recall-{length}-weights.npy"))
        rows = max(2, args.batch // length)
        tasks = max(1, round(rows * args.recall))
        at = mx.array(chance.integers(0, text.size - length - 1, rows - tasks))
        plain = text[at[:, None] + mx.arange(length + 1)[None]]
        plain[:, 0] = BOS_ID  # a row begins as every prompt does
        which = mx.array(chance.integers(0, recall.shape[0], tasks))
        batch = mx.concatenate([plain, recall[which]]).astype(mx.int32)
        worth = mx.concatenate([mx.ones((rows - tasks, length)), worths[which][:, 1:].astype(mx.float32)])
        optimizer.learning_rate = rate(done, args.start, args.rate)
        sums = sums + step(batch[:, :-1], batch[:, 1:], worth)
        mx.eval(sums, state)
        tokens += rows * length
        if number % args.every == args.every - 1 or number == args.steps - 1:
            a, b, c, d = sums.tolist()
            entry = {"step": number + 1, "tokens": tokens, "length": length, "loss": round(a / b, 4)}
            entry |= {"answers": round(c / max(d, 1), 4), "rate": round(rate(done, args.start, args.rate), 6)}
            entry |= {"seconds": round(time.time() - start, 1), "done": round(done, 3)}
            log.append(entry)
            print(json.dumps(entry), flush=True)
            sums = mx.zeros(4)
        if args.save and time.time() - last > 60 * args.save:
            last = time.time()
            export(args.model, dict(tree_flatten(held["weights"])), args.data, args.out)
    export(args.model, dict(tree_flatten(held["weights"])), args.data, args.out)
    if args.log:
        args.log.write_text(json.dumps({"tokens": tokens, "seconds": time.time() - start, "log": log}) + "\n")


def export(name: str, weights: dict[str, Any], data: Path, out: Path) -> None:
    import mlx.core as mx

    out.mkdir(parents=True, exist_ok=True)
    halves = {path: value.astype(mx.float16) for path, value in weights.items()}
    mx.save_safetensors(str(out / "model.safetensors"), halves, metadata={"format": "mlx"})
    write = lambda file, value: (out / file).write_text(json.dumps(value, indent=2) + "\n")  # noqa: E731
    write("config.json", CONFIGS[name])
    write("generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": END_ID})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": END, "pad_token": END}
    settings |= {"additional_special_tokens": SPECIAL[2:], "model_max_length": CONTEXT, "chat_template": CHAT_TEMPLATE}
    write("tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
    (out / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())


# ---- eval -----------------------------------------------------------------------------------------------------------


def bits_per_byte(model: Any, tokenizer: Any, texts: list[str], length: int, limit: int) -> dict[str, float]:
    """Held-out text in rows of `length`, each read from its first token on."""
    import mlx.core as mx

    total, size, count = 0.0, 0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for begin in range(0, len(ids) - 64, length):
            piece = [BOS_ID, *ids[begin : begin + length]]
            logits = model(mx.array([piece[:-1]])).astype(mx.float32)
            each = (
                mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, mx.array([piece[1:]])[..., None], -1)[..., 0]
            )
            total += mx.sum(each).item()
            count += len(piece) - 1
            size += len(tokenizer.decode(piece[1:]).encode())
            if size > limit:
                break
        if size > limit:
            break
    return {"loss": total / count, "bits per byte": total / math.log(2) / size, "bytes": size, "tokens": count}


def recall_at(model: Any, tokenizer: Any, texts: list[str], tokens: int, depth: float, tries: int, seed: int) -> float:
    """How often every token of the answer is the likeliest one, which is when greedy decoding gives the answer."""
    import mlx.core as mx

    rng, right = random.Random(seed), 0
    for _ in range(tries):
        name, number = a_name(rng), a_number(rng)
        ids = tokenizer.encode(filler(texts, tokens * 4, rng), add_special_tokens=False)[: tokens - 60]
        text = tokenizer.decode(ids)
        place = text.find("\n", int(depth * len(text)))
        place = len(text) if depth >= 1 or place < 0 else place
        place = 0 if depth <= 0 else place
        text = f"{text[:place]}\nThe secret number of {name} is {number}.\n{text[place:]}"
        asked = [{"role": "user", "content": f"{text}\n\nWhat is the secret number of {name}?"}]
        prompt = list(tokenizer.apply_chat_template(asked, add_generation_prompt=True))
        answer = [*tokenizer.encode(number, add_special_tokens=False), END_ID]
        logits = model(mx.array([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
        right += mx.argmax(logits, axis=-1).tolist() == answer
    return right / tries


def evaluate(args: argparse.Namespace) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load

    model, tokenizer = load(str(args.model))
    held_out = load_corpus(args.data)["held_out"]
    result: dict[str, Any] = {"text": bits_per_byte(model, tokenizer, held_out, 1024, args.bytes)}
    print(result["text"])
    depths = [0.0, 0.25, 0.5, 0.75, 1.0]
    print("tokens " + "".join(f"{depth:>7.0%}" for depth in depths))
    result["recall"] = {}
    for tokens in args.lengths:
        row = [recall_at(model, tokenizer, held_out, tokens, depth, args.tries, 7) for depth in depths]
        result["recall"][tokens] = row
        print(f"{tokens:6} " + "".join(f"{share:7.0%}" for share in row), flush=True)
    if "k_proj.bias" in "".join(mx.load(str(args.model / "model.safetensors"))):
        result["key biases"] = measure_key_biases(model, tokenizer, held_out)
        print("layer, head: bias norm, median norm of keys without it, ratio, largest channel")
        for row in result["key biases"]:
            print("  {layer}, {head}: {bias:.1f}, {keys:.1f}, {ratio:.1f}, {largest:.1f}".format(**row))
    if args.log:
        args.log.write_text(json.dumps(result, indent=1) + "\n")


def measure_key_biases(model: Any, tokenizer: Any, texts: list[str]) -> list[dict[str, float]]:
    """For each layer and head, the bias's norm against the median norm of the keys before it is added."""
    import mlx.core as mx

    ids = tokenizer.encode(max(texts, key=len), add_special_tokens=False)[:1024]
    hidden, rows = model.model.embed_tokens(mx.array([[BOS_ID, *ids]])), []
    for number, layer in enumerate(model.model.layers):
        k = layer.self_attn.k_proj
        keys = (layer.input_layernorm(hidden) @ k.weight.T).astype(mx.float32)
        keys = np.array(keys).reshape(-1, layer.self_attn.n_kv_heads, CONFIGS["qwen2"]["head_dim"])
        biases = np.array(k.bias.astype(mx.float32)).reshape(keys.shape[1:])
        for head, bias in enumerate(biases):
            typical = float(np.median(np.linalg.norm(keys[:, head], axis=-1)))
            norm = float(np.linalg.norm(bias))
            row = {"layer": number, "head": head, "bias": norm, "keys": typical, "ratio": norm / typical}
            rows.append(row | {"largest": float(np.abs(bias).max())})
        hidden = layer(hidden, "causal")
    return rows


# ---- the command ----------------------------------------------------------------------------------------------------


def smoke(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for line in (
            f"data --out {folder} --stdlib-only --limit 300000",
            f"pack --data {folder} --recall-tokens 4000 --longest 512",
            f"train --data {folder} --model qwen2 --out {folder}/model --steps {steps} --batch 256 --longest 512 --every 1",
            f"eval --data {folder} --model {folder}/model --lengths 200 --tries 1 --bytes 2000",
        ):
            main(line.split())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("data", help="download the sources, write corpus and tokenizer")
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--downloads", type=Path, help="a folder with archives that pip has downloaded before")
    sub.add_argument("--stdlib-only", action="store_true")
    sub.add_argument("--split", choices=["bytelevel", "qwen2"], default="bytelevel", help="the models here: bytelevel")
    sub.add_argument("--limit", type=int, default=0, help="stop a source at this many characters in all")
    sub = commands.add_parser("pack", help="write token arrays")
    sub.add_argument("--data", type=Path, required=True)
    sub.add_argument("--recall-tokens", type=int, default=40_000_000, help="for each row length")
    sub.add_argument("--longest", type=int, default=CONTEXT, help="row length of the last stage")
    sub = commands.add_parser("train", help="train one model and write it")
    sub.add_argument("--data", type=Path, required=True)
    sub.add_argument("--model", choices=list(CONFIGS), required=True)
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--resume", type=Path, help="begin with the weights of this model folder")
    sub.add_argument("--start", type=float, default=0.0, help="with --resume: begin at this part of the schedule")
    sub.add_argument("--steps", type=int, default=10_000)
    sub.add_argument("--minutes", type=float, help="finish the schedule within this time, at fewer steps if need be")
    sub.add_argument("--batch", type=int, default=131072, help="tokens in a step")
    sub.add_argument("--longest", type=int, default=CONTEXT, help="row length of the last stage")
    sub.add_argument("--rate", type=float, default=3e-3)
    sub.add_argument("--decay", type=float, default=0.1)
    sub.add_argument("--recall", type=float, default=0.3, help="share of the rows that are recall tasks")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--every", type=int, default=100, help="steps between two lines of the log")
    sub.add_argument("--save", type=float, default=2, help="minutes between two checkpoints")
    sub.add_argument("--log", type=Path)
    sub = commands.add_parser("eval", help="bits per byte, recall by depth and length, key biases")
    sub.add_argument("--data", type=Path, required=True)
    sub.add_argument("--model", type=Path, required=True)
    sub.add_argument("--lengths", type=int, nargs="+", default=[250, 600, 1200, 2400, 3500])
    sub.add_argument("--tries", type=int, default=20)
    sub.add_argument("--bytes", type=int, default=400_000)
    sub.add_argument("--log", type=Path)
    sub = commands.add_parser("smoke", help="run all of it, very small")
    sub.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    if args.command == "data":
        make_data(args.out, args.stdlib_only, args.limit, args.downloads, args.split)
    elif args.command == "pack":
        pack(args.data, args.recall_tokens, args.longest)
    elif args.command == "train":
        train(args)
    elif args.command == "eval":
        evaluate(args)
    else:
        smoke(args.steps)


if __name__ == "__main__":
    main()
