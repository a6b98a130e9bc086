"""`prefixcache demo`, scaled down: it runs whole, its check can fail, and it leaves behind only what it was told to."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache
from typer.testing import CliRunner

from prefixcache.cli import app, demo
from prefixcache.cli.demo_passes import ANSWER, build, generate, unique
from prefixcache.cli.demo_text import SYSTEM, following, opening

CONVERSATIONS, TURNS = 2, 2


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, Path]:
    """The demo as JSON, once: how it ended, the folder that it was to keep, and the one for temporary files.

    What the environment says of the cache is not for the demo: these settings would be refused, or keep nothing.
    """
    keep, temporary = tmp_path_factory.mktemp("demo") / "kept", tmp_path_factory.mktemp("tmp")
    ended = subprocess.run(
        [sys.executable, "-m", "prefixcache.cli.demo", "--json", "--keep", str(keep),
         "--conversations", str(CONVERSATIONS), "--turns", str(TURNS)],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "PREFIXCACHE_RAM": "much", "PREFIXCACHE_SSD": "0", "TMPDIR": str(temporary)},
    )  # fmt: skip
    return ended, keep, temporary


def test_answers_from_ram_and_from_ssd_after_a_restart_are_the_cold_ones(
    ran: tuple[subprocess.CompletedProcess[str], Path, Path],
) -> None:
    ended, _, _ = ran
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    assert shown["problems"] == []
    assert shown["cold"]["count"] == CONVERSATIONS * TURNS
    assert shown["ram"]["equal"] == shown["ram"]["count"] == CONVERSATIONS * (TURNS - 1)
    assert shown["ssd"]["equal"] == shown["ssd"]["count"] == CONVERSATIONS


def test_the_numbers_fit_each_other(ran: tuple[subprocess.CompletedProcess[str], Path, Path]) -> None:
    shown = json.loads(ran[0].stdout)
    ram, ssd, turboquant = shown["ram"], shown["ssd"], shown["turboquant"]
    assert (ram["hits"], ssd["hits"]) == (1, CONVERSATIONS)
    assert ram["reused_tokens"] >= len(SYSTEM)
    assert ssd["reused_tokens"] >= CONVERSATIONS * (len(opening(0)) - 10)
    for each in (ram, ssd, turboquant):
        assert each["ram_peak"] <= each["ram_limit"]
        assert each["not_kept"] == each["dropped"] == 0
    assert ram["plain_bytes"] < ram["ssd"]["bytes"] < 1.1 * ram["plain_bytes"] < ram["whole_bytes"]
    assert turboquant["unique_tokens"] == ram["unique_tokens"]
    assert turboquant["smaller"] > 5
    assert turboquant["tokens"] == ram["count"] * ANSWER
    assert shown["cold"]["first"] > max(ram["first"], ssd["first"])


def test_the_folder_is_kept_when_asked_for_and_no_other(
    ran: tuple[subprocess.CompletedProcess[str], Path, Path],
) -> None:
    ended, keep, temporary = ran
    assert len(list((keep / "raw" / "rows").rglob("*.safetensors"))) == json.loads(ended.stdout)["ssd"]["ssd"]["files"]
    assert not list(temporary.glob("prefixcache-demo-*"))


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    ended = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path)])
    assert ended.exit_code == 2
    assert "not empty" in ended.output


def results() -> dict[str, Any]:
    """Passes of two conversations and two turns that agree."""

    def turn(conversation: int, turn: int, reused: int) -> dict[str, Any]:
        return {
            "conversation": conversation, "turn": turn, "prompt_tokens": 100 + 50 * turn, "reused_tokens": reused,
            "kept_tokens": 0, "first": 1.0, "store": 0.1, "answer": [7, 8, conversation], "gaps": [0.5, 1e-6, 0.5],
        }  # fmt: skip

    def result(turns: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "turns": turns, "hits": len(turns), "first": 1.0, "store": 0.1, "prompt_tokens": 200, "reused_tokens": 100,
            "ram_limit": 9, "ram_peak": 9, "ram_images": 9, "ssd": {"files": 1, "bytes": 9}, "unique_tokens": 9,
            "plain_bytes": 9, "whole_bytes": 9,
        }  # fmt: skip

    return {
        "cold": {
            **result([turn(c, t, 0) for c in (0, 1) for t in (0, 1)]),
            "answers": [[[7, 8, 0]] * 2, [[7, 8, 1]] * 2],
        },
        "ram": result([turn(c, 0, 0) for c in (0, 1)]),
        "ssd": result([turn(c, 1, 120) for c in (0, 1)]),
        "turboquant": result([turn(c, 0, 0) for c in (0, 1)]),
    }


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


def test_the_models_answer_depends_on_the_prompts_beginning() -> None:
    """Or equal answers would prove nothing."""
    model, prompt = build(0), list(opening(0)[:700])
    other = [ord("Y") + 1, *prompt[1:]]
    answers = [[t for t, _ in generate(model, make_prompt_cache(model), p, None)] for p in (prompt, other, prompt)]
    assert answers[0] == answers[2] != answers[1]
    assert len(set(answers[0])) > ANSWER // 4


def test_no_two_conversations_begin_alike() -> None:
    assert len({opening(c) for c in range(100)}) == 100
    assert following(0, 1) != following(0, 2)


def test_a_shared_beginning_is_counted_once() -> None:
    assert unique([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 6], [1, 2]]) == 6
