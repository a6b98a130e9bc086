"""`prefixcache demo`, scaled down: it runs whole, its check can fail, and it leaves behind only what it was told to."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlx_lm.utils import load
from typer.testing import CliRunner

from prefixcache.cli import app
from prefixcache.cli.demo import command as demo
from prefixcache.cli.demo.passes import unique_tokens
from prefixcache.cli.demo.text import CALIBRATED, LOSSY, SYSTEM, TITLES, Chat, facts, question
from tests.servers.forked import BLAS
from tests.servers.serving import wait_for

CONVERSATIONS, TURNS = 2, 2
Ran = tuple[subprocess.CompletedProcess[str], Path, Path]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load(str(demo.OWN_MODEL))[1]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The demo as JSON, once: how it ended, the folder that it was to keep, and the one for temporary files.

    What the environment says of the cache is not for the demo: these settings would be refused, or keep nothing.
    """
    keep, temporary = tmp_path_factory.mktemp("demo") / "kept", tmp_path_factory.mktemp("tmp")
    options = ("--json", "--keep", keep, "--conversations", CONVERSATIONS, "--turns", TURNS)
    ended = subprocess.run(
        [sys.executable, "-m", "prefixcache", "demo", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PREFIXCACHE_RAM": "much", "PREFIXCACHE_SSD": "0", "TMPDIR": str(temporary), **BLAS},
    )
    return ended, keep, temporary


def test_answers_from_ram_and_from_ssd_after_a_restart_are_the_cold_ones(ran: Ran) -> None:
    ended, _, _ = ran
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    assert shown["problems"] == []
    assert shown["cold"]["count"] == shown["cold"]["needles"] == CONVERSATIONS * TURNS
    assert shown["ram"]["equal"] == shown["ram"]["count"] == CONVERSATIONS * (TURNS - 1)
    assert shown["ssd"]["equal"] == shown["ssd"]["count"] == CONVERSATIONS


def test_every_needle_is_found_cold_and_from_the_cache_whatever_the_codec(ran: Ran) -> None:
    shown = json.loads(ran[0].stdout)
    for name in TITLES:
        assert shown[name]["found"] == shown[name]["needles"] == shown[name]["count"]
    (first, last) = shown["conversation"]
    assert (first["from"], first["said"]) == ("ram", "7615")
    assert (last["from"], last["said"]) == ("ssd", question(1, 0).text[len("The secret number of Oscar is ") :][:5])
    assert last["question"] == "What is the secret number of Oscar?"


def test_the_numbers_fit_each_other(ran: Ran, tokenizer: Any) -> None:
    shown = json.loads(ran[0].stdout)
    ram, ssd, lossy = shown["ram"], shown["ssd"], [shown[name] for name in (*LOSSY, CALIBRATED)]
    shared = len(tokenizer.encode(SYSTEM))
    assert (ram["hits"], ssd["hits"]) == (1, CONVERSATIONS)
    assert ram["reused_tokens"] >= shared
    assert ssd["reused_tokens"] >= CONVERSATIONS * (shared + 10)
    for each in (ram, ssd, *lossy):
        assert each["ram_peak"] <= each["ram_limit"]
        assert each["not_kept"] == each["dropped"] == 0
    assert ram["plain_bytes"] == ram["unique_tokens"] * 6 * 2 * 2 * 64 * 4  # layers, K and V, heads, width, float32
    assert ram["plain_bytes"] < ram["ssd"]["bytes"] < 1.1 * ram["plain_bytes"] < ram["whole_bytes"]
    for each in lossy:
        assert each["reused_tokens"] == ram["reused_tokens"]
        assert each["equal"] == each["count"]  # of answers as short as these
    # Chats as short as these are half tails, which are kept as they are.
    assert ram["ssd"]["bytes"] > 3 * lossy[0]["ssd"]["bytes"] > 3 * lossy[1]["ssd"]["bytes"]
    assert shown[CALIBRATED]["ssd"]["bytes"] < lossy[0]["ssd"]["bytes"]
    assert shown["cold"]["first"] > max(ram["first"], ssd["first"])


def test_the_folder_is_kept_when_asked_for_and_no_other(ran: Ran) -> None:
    ended, keep, temporary = ran
    assert len(list((keep / "raw" / "rows").rglob("*.safetensors"))) == json.loads(ended.stdout)["ssd"]["ssd"]["files"]
    assert not list(temporary.glob("prefixcache-demo-*"))


def test_a_signal_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefixcache", "demo", "--json"]
    demo_process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    process = psutil.Process(demo_process.pid)
    (passes,) = wait_for(process.children, "process of the passes")
    assert list(tmp_path.glob("prefixcache-demo-*"))
    process.terminate()
    assert demo_process.wait(30) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(passes.pid)
    assert not list(tmp_path.glob("prefixcache-demo-*"))


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    ended = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path)])
    assert ended.exit_code == 2
    assert "not empty" in ended.output


def results() -> dict[str, Any]:
    """Passes of two conversations and two turns that agree."""

    def turn(conversation: int, turn: int, reused: int) -> dict[str, Any]:
        return {
            "conversation": conversation,
            "turn": turn,
            "prompt_tokens": 100 + 50 * turn,
            "reused_tokens": reused,
            "kept_tokens": 0,
            "first": 1.0,
            "store": 0.1,
            "answer": [7, 8, conversation],
            "question": "What?",
            "wanted": "78",
            "said": f"78{conversation}",
            "found": True,
        }

    def result(turns: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "turns": turns,
            "ram_limit": 9,
            "ram_peak": 9,
            "ram_images": 9,
            "ssd": {"files": 1, "bytes": 9},
            "unique_tokens": 9,
            "plain_bytes": 9,
            "whole_bytes": 9,
        }

    return {
        "cold": result([turn(c, t, 0) for c in (0, 1) for t in (0, 1)]),
        "ram": result([turn(c, 0, 0) for c in (0, 1)]),
        "ssd": result([turn(c, 1, 120) for c in (0, 1)]),
        **{name: result([turn(c, 0, 0) for c in (0, 1)]) for name in (*LOSSY, CALIBRATED)},
    }


def test_codec_transform_is_shown_beside_turboquant_with_the_files_and_answers_of_both() -> None:
    shown = demo.describe(results())
    shown[CALIBRATED]["ssd"], shown[CALIBRATED]["equal"] = {"files": 1, "bytes": 5}, 1
    said = demo._calibrated(shown)
    assert "the same pass: 5 B of files, 1 of 2 answers equal to cold" in said
    assert "(TurboQuant, 4 bits: 9 B of files, 2 of 2 answers equal to cold)" in said
    assert "says nothing of real models" in said


def test_passes_that_agree_are_no_problem() -> None:
    assert demo.check(results()) == []


def test_a_different_answer_is_named_and_the_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = results()
    wrong["ssd"]["turns"][1]["answer"] = [7, 8, 9]
    monkeypatch.setattr(demo, "_work", lambda job: wrong)
    ended = CliRunner().invoke(app, ["demo"])
    assert ended.exit_code == 1
    assert "conversation 2, answer 2 differs from the cold one at token 3: 9, not 1" in " ".join(ended.output.split())


def test_an_answer_cut_short_is_a_difference() -> None:
    wrong = results()
    wrong["ram"]["turns"][0]["answer"] = [7, 8]
    (problem,) = demo.check(wrong)
    assert "has 2 tokens, the cold one 3" in problem


def test_an_answer_that_found_less_than_was_stored_is_a_problem() -> None:
    forgotten = copy.deepcopy(results())
    forgotten["ssd"]["turns"][0]["reused_tokens"] = 99
    (problem,) = demo.check(forgotten)
    assert "conversation 1, answer 2 found 99 tokens, where 100 at least" in problem


def test_a_wrong_answer_is_a_problem() -> None:
    wrong = results()
    wrong["ssd"]["turns"][0] |= {"said": "87", "found": False}
    (problem,) = demo.check(wrong)
    assert "conversation 1, answer 2 should say '78', and says '87'" in problem


# -- what is said -----------------------------------------------------------------------------------------------------


def test_no_two_conversations_begin_alike() -> None:
    assert len({question(c, 0) for c in range(500)}) == 500


def test_the_system_prompt_has_what_is_asked_for() -> None:
    assert len(facts()) == 11
    assert all(SYSTEM.count(fact.wanted) == 1 for fact in facts())
    asked = [question(c, t) for c in range(8) for t in range(3)]
    assert len({q.text for q in asked}) > 20
    assert sum(not q.wanted for q in asked) == 2
    assert all(question(c, 0).wanted in SYSTEM for c in range(8))


@pytest.mark.parametrize("ended", [True, False])
def test_a_later_prompt_goes_on_from_the_tokens_of_the_answer(tokenizer: Any, ended: bool) -> None:
    """The answer's tokens stay as the model said them; its end stands there once, whether the model said it or not."""
    chat = Chat(tokenizer)
    digits = tokenizer.encode("7615", add_special_tokens=False)
    answer = digits + [tokenizer.eos_token_id] * ended
    tokens = chat.opening(1) + answer + chat.following(1, 1, answer)
    messages = [
        {"role": "system", "content": SYSTEM.strip()},
        {"role": "user", "content": question(1, 0).text},
        {"role": "assistant", "content": "7615"},
        {"role": "user", "content": question(1, 1).text},
    ]
    assert tokens == list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    assert chat.text(answer) == "7615"


def test_a_shared_beginning_is_counted_once() -> None:
    assert unique_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 6], [1, 2]]) == 6
