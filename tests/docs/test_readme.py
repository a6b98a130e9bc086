"""README.md is kept true: each of its fences runs here as it stands, on a tiny model and a directory of the test's own."""

import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from prefixcache import PrefixCache
from prefixcache.cli import app
from prefixcache.keys import BLOCK
from tests.models.families import FAMILIES
from tests.servers.serving import SECONDS, save_model, serve, starting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "fixtures" / "traces" / "coding_agents.jsonl.gz"
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(.*?)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
LINES = [
    line.split(" # ")[0].strip() for language, text in FENCES if language == "console" for line in text.splitlines()
]


def fence(language: str) -> str:
    (text,) = [text for of, text in FENCES if of == language]
    return text


def lines(program: str) -> list[list[str]]:
    return [words for line in LINES if (words := shlex.split(line))[0] == program]


def run(directory: Path, *arguments: str) -> str:
    shown = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200", "NO_COLOR": "1", "HOME": str(directory)})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model")


def test_every_line_of_a_fence_is_one_that_this_file_runs() -> None:
    assert [language for language, _ in FENCES] == [
        "console",
        "console",
        "console",
        "python",
        "text",
        "console",
        "console",
    ]
    assert {shlex.split(line)[0] for line in LINES} == {"pip", "make", "prefixcache", "curl"}
    commands = {words[1] for words in lines("prefixcache")}
    assert commands == {"demo", "serve", "calibrate", "plan", "top", "inspect", "reconcile", "prune", "clear"}


def test_it_is_short() -> None:
    assert len(re.findall(r"\w[\w'./-]*", README)) < 1_200


# -- python -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def program(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the program defines, its cache under a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict[str, Any] = {}
    source = fence("python").replace("mlx-community/Qwen3-4B-4bit", str(model))
    exec(compile(source, "README.md", "exec"), names)
    yield names
    names["cache"].close()


def test_the_program_runs_as_it_stands_and_reuses_what_was_said(program: dict[str, Any], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "How many books may I borrow at a time? " * 24}]
    first = program["answer"](messages, max_tokens=4)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And films?"}]
    program["answer"](messages, max_tokens=4)
    asked = len(program["tokenizer"].apply_chat_template(messages[:1], add_generation_prompt=True))
    assert program["cache"].stats().counters.hit_tokens >= asked // BLOCK * BLOCK > 0
    program["cache"].close()
    assert list((tmp_path / ".cache" / "prefixcache").rglob("*.safetensors"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("length", [100, 1100])
def test_a_prompt_that_is_asked_again_is_hit_and_answered_alike_whatever_the_layers(
    program: dict[str, Any], family: str, length: int
) -> None:
    """With sliding windows, too, which an answer longer than the window leaves no rows of the prompt in."""
    prompt = random.Random(length).choices(range(128), k=length)
    program |= {"model": FAMILIES[family].build(), "NAME": family}
    program["tokenizer"] = SimpleNamespace(
        apply_chat_template=lambda messages, **_: messages, eos_token_ids=(), decode=list
    )
    counters = program["cache"].stats
    said = program["answer"](prompt, max_tokens=40)
    assert counters().counters.hit_tokens == 0
    assert program["answer"](prompt, max_tokens=40) == said
    assert counters().counters.hit_tokens == length - 1


# -- console ----------------------------------------------------------------------------------------------------------


def test_pip_installs_extras_that_the_package_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    for _, verb, what in lines("pip"):
        name, _, extra = what.rstrip("]").partition("[")
        assert (verb, name) == ("install", ".")
        assert extra in ("", *project["optional-dependencies"])
    assert "cuda" in project["optional-dependencies"]


def test_the_make_targets_exist() -> None:
    assert [words[1:] for words in lines("make")] == [["demo"], ["test"]]
    for target in ("demo", "test", "lint", "bench", "clean", "help"):
        ran = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


def test_the_server_starts_with_these_flags_and_answers_what_curl_asks(model: Path, tmp_path: Path) -> None:
    command = next(words for words in lines("prefixcache") if words[1] == "serve")
    (ask,) = lines("curl")
    flags = [str(model) if word.startswith("mlx-community/") else word for word in command[2:]]
    flags = [str(tmp_path / "ssd") if word.startswith("~/") else word for word in flags]
    with starting(serve, tmp_path / "log", *flags, anew=True) as server:
        url = ask[1].replace("http://127.0.0.1:8080", server.ready().url)
        form = {"Content-Type": "application/x-www-form-urlencoded"}  # curl's, where nothing else is said
        answer = requests.post(url, ask[ask.index("-d") + 1], headers=form, timeout=SECONDS).json()
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        server.end()


def test_a_model_that_is_calibrated_as_it_says_is_served_with_its_basis(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (calibrate,) = [words for words in lines("prefixcache") if words[1] == "calibrate"]
    _, command = [words for words in lines("prefixcache") if words[1] == "serve"]
    named = {"mlx-community/Qwen3-8B-4bit": str(model), "~/.cache/prefixcache": str(tmp_path / "ssd")}
    run(
        tmp_path,
        "calibrate",
        *(named.get(word, word) for word in calibrate[2:]),
        "--windows",
        "4",
        "--tokens",
        "96",
        "--draws",
        "3",
    )
    with starting(serve, tmp_path / "log", *(named.get(word, word) for word in command[2:]), anew=True) as server:
        assert re.search(r"codec transform quality 4 basis [0-9a-f]{8}: 4 layers transformed", server.ready().said())
        server.end()


def test_plan_runs_for_its_model_and_with_a_trace() -> None:
    for _, _, *arguments in [words for words in lines("prefixcache") if words[1] == "plan"]:
        traced = "--trace" in arguments
        arguments = [str(TRACE) if word == "requests.jsonl" else word for word in arguments]
        shown = run(ROOT, "plan", *arguments, *(["--first", "40"] if traced else []))
        assert ("of what is possible" if traced else "Room") in shown


def test_the_commands_of_a_directory_run_in_their_order(tmp_path: Path) -> None:
    directory = tmp_path / "ssd"
    PrefixCache(ram="8MB", ssd_dir=directory, ssd="1GB", codec="raw").close()
    for _, command, *arguments in lines("prefixcache"):
        if "DIR" in arguments:
            run(tmp_path, command, *(str(directory) if word == "DIR" else word for word in arguments))


def test_the_other_commands_take_their_options() -> None:
    for _, command, *arguments in lines("prefixcache"):
        shown = run(ROOT, command, "--help")
        mlx_lm_s = {"--model"} if command == "serve" else set()
        assert all(word in shown for word in arguments if word.startswith("--") and word not in mlx_lm_s), command


# -- the picture ------------------------------------------------------------------------------------------------------


def test_the_calls_of_the_picture_exist_and_its_lines_meet() -> None:
    picture = fence("text")
    assert {"store", "fetch", "promote"} <= set(re.findall(r"[|^] (\w+):", picture)) | {"spill"}
    assert all(callable(getattr(PrefixCache, call)) for call in ("store", "fetch", "promote"))
    boxes = [line for line in picture.splitlines() if line.startswith(("  +", "  |"))]
    assert len({len(line) for line in boxes}) == 1
    assert picture.isascii()
