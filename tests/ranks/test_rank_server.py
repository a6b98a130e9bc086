"""`prefixcache serve` on several ranks: answers, restarts, ranks that die, hang or are told to end."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests

from tests.ranks.rank_serving import COMMAND, RankServer, rank_serving, save_sharded
from tests.servers.forked import OFFLINE, ROOT, preloaded
from tests.servers.serving import ask, at_once, chat, save_adapter, text, wait_for
from tools.ranks.launch import ring

CASES = {  # what is served, how, and on how many ranks
    "tensor-parallel": ("llama", (), 2),
    "sliding windows": ("llama-sliding", (), 2),
    "latents": ("deepseek_v3", (), 2),
    "a pipeline": ("qwen2", ("--pipeline",), 2),
    "a pipeline of three": ("qwen2", ("--pipeline",), 3),
    "a hybrid": ("qwen3_5", (), 2),
    "a hybrid pipeline": ("qwen3_next", ("--pipeline",), 2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    for family in {family for family, _, _ in CASES.values()}:
        save_sharded(folder / family, family)
    return folder


def turns(server: Any, of: str = "turn", **more: Any) -> list[Any]:
    return chat(server, text(560, "rank"), [text(40, f"{of} {turn}") for turn in range(3)], **more)


@pytest.mark.parametrize("case", CASES)
def test_a_hit_answers_what_a_cold_run_answers_and_a_restart_is_warm(models, tmp_path, case):
    family, flags, size = CASES[case]
    flags = ("--model", models / family, "--ssd-dir", tmp_path / "ssd", *flags)
    with rank_serving(tmp_path / "first", size, *flags) as server:
        first = turns(server)
        assert all(answer.cached > 500 for answer in first[1:])
        apart = [ask(server, message, cache_salt=f"alone {turn}") for turn, message in enumerate(asked(first))]
        assert not any(answer.cached for answer in apart)
        assert [answer.text for answer in apart] == [answer.text for answer in first]
        again = turns(server)
        assert [answer.text for answer in again] == [answer.text for answer in first]
        assert all(answer.computed <= 1 for answer in again)
    with rank_serving(tmp_path / "second", size, *flags) as server:
        after = turns(server)
        assert [answer.text for answer in after] == [answer.text for answer in first]
        assert all(answer.cached > 500 for answer in after)


def asked(answers: list[Any]) -> list[list[dict[str, Any]]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(560, "rank")}]
    each = []
    for turn, answer in enumerate(answers):
        messages.append({"role": "user", "content": text(40, f"turn {turn}")})
        each.append(list(messages))
        messages.append({"role": "assistant", "content": answer.text})
    return each


AS_NCCL = """
import mlx.core as mx
all_sum = mx.distributed.all_sum
def on_the_groups_stream(x, *, stream=None, **options):
    assert stream is None, "There is no Stream(gpu, 1) in current thread."
    return all_sum(x, **options)
mx.distributed.all_sum = on_the_groups_stream
"""


def test_a_model_is_loaded_where_collectives_run_on_the_groups_stream_only(models, tmp_path):
    with rank_serving(tmp_path / "log", 2, "--model", models / "llama", before=AS_NCCL) as server:
        assert turns(server)[-1].cached > 500


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Two ranks, which tests share that leave them as they were."""
    folder = tmp_path_factory.mktemp("served")
    with rank_serving(folder / "log", 2, "--model", models / "llama", "--ssd-dir", folder / "ssd") as server:
        yield server


def test_requests_that_come_at_once_wait_and_go_in_step(served):
    alone = [turns(served, f"who {i}", cache_salt=f"cold {i}") for i in range(4)]
    together = at_once([lambda i=i: turns(served, f"who {i}") for i in range(4)])
    assert [[answer.text for answer in each] for each in together] == [
        [answer.text for answer in each] for each in alone
    ]


@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_rank_is_killed_the_others_end_and_name_it_and_all_start_again_warm(models, tmp_path, killed):
    flags = ("--model", models / "llama", "--ssd-dir", tmp_path / "ssd")
    with rank_serving(tmp_path / "first", 2, *flags, "--spill", "through") as server:
        before = turns(server)
        time.sleep(0.5)  # the writer's
        server.send(killed, signal.SIGKILL)
        began = time.monotonic()
        codes = server.wait(10)
        assert time.monotonic() - began < 10
        assert codes[1 - killed] == 2
        assert f"rank {killed} died" in server.said(1 - killed)
    with rank_serving(tmp_path / "second", 2, *flags) as server:
        after = turns(server)
        assert [answer.text for answer in after] == [answer.text for answer in before]
        assert after[0].cached >= 512


QUICK = "import prefixcache.ranks.watch\nprefixcache.ranks.watch.SILENCE = 3.0\n"


def test_ranks_that_were_all_stopped_for_a_while_go_on(models, tmp_path):
    with rank_serving(tmp_path / "log", 2, "--model", models / "llama", before=QUICK) as server:
        turns(server)
        for signum, pause in ((signal.SIGSTOP, 6), (signal.SIGCONT, 4)):
            for rank in range(2):
                server.send(rank, signum)
            time.sleep(pause)
        turns(server)


def test_a_rank_that_waits_for_its_peers_can_be_ended(tmp_path):
    script = 'test "$MLX_RANK" = 0 && exec "$@"; exec sleep 60'
    command = ["sh", "-c", script, "sh", sys.executable, "-c", COMMAND, "serve", "--model", str(tmp_path)]
    ranks = ring(command, 2, [subprocess.DEVNULL] * 2, cwd=ROOT)
    try:
        time.sleep(6)
        assert ranks[0].poll() is None
        ranks[0].terminate()
        assert ranks[0].wait(10) == -signal.SIGTERM
    finally:
        for rank in ranks:
            rank.kill()


OWN_MODEL = """
import os, sys
sys.argv[:] = [argument.replace("RANK", os.environ["MLX_RANK"]) for argument in sys.argv]
"""


def test_ranks_with_other_weights_are_refused(tmp_path):
    for rank, seed in enumerate((1, 2)):
        save_sharded(tmp_path / f"{rank}" / "model", "llama", seed=seed)
    server = RankServer(tmp_path / "log", 2, "--model", f"{tmp_path}/RANK/model", before=OWN_MODEL)
    try:
        assert server.wait(60) == [2, 2]
        assert "rank 1: " in server.said(0)
        assert "other weights than on rank 0" in server.said(0)
    finally:
        for process in server.ranks:
            process.kill()


DIES = """
import os
import prefixcache.servers.warming
if os.environ["MLX_RANK"] == "1":
    prefixcache.servers.warming.warm_sequences = lambda *args, **options: os._exit(9)
"""


def test_warm_says_that_a_rank_is_gone(models, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": text(560, "warm")}))
    flags = ["--codec", "raw", "--model", str(models / "llama"), "--ssd-dir", str(tmp_path / "ssd")]
    command = [sys.executable, "-c", DIES + COMMAND, "warm", *flags, str(tmp_path / "prompts.jsonl")]
    log = tmp_path / "log"
    with log.open("wb") as out:
        ranks = ring(command, 2, [out, subprocess.DEVNULL], cwd=ROOT, env={**OFFLINE, **preloaded()})
        try:
            assert [rank.wait(60) for rank in ranks] == [2, 9], log.read_text()
        finally:
            for rank in ranks:
                rank.kill()
    assert "Traceback" not in log.read_text()
    assert "rank 0 can't go on" in log.read_text()


def test_a_rank_that_is_told_to_end_ends_all_in_order(models, tmp_path):
    with rank_serving(tmp_path / "log", 2, "--model", models / "llama", "--ssd-dir", tmp_path / "ssd") as server:
        turns(server)
        server.send(1, signal.SIGTERM)
        assert server.wait() == [0, 0]
        assert server.troubles() == []


def test_what_would_set_the_ranks_caches_apart_is_refused(served):
    refused = requests.delete(f"{served.url}/prefixcache/images", timeout=60)
    assert (refused.status_code, "this model spans processes" in refused.text) == (409, True)


def test_a_hang_ends_all_ranks_and_names_the_one_that_is_behind(models, tmp_path):
    with rank_serving(tmp_path / "log", 2, "--model", models / "llama", "--hang-timeout", 10) as server:
        turns(server)
        server.send(1, signal.SIGSTOP)
        began = time.monotonic()
        assert server.ranks[0].wait(40) == 2
        assert time.monotonic() - began < 30
        assert "rank 1 hang" in server.said(0)
        server.send(1, signal.SIGCONT)
        assert server.ranks[1].wait(15) == 2


def go_away(server: RankServer) -> None:
    """End the connection in the middle of an answer. A request with a seed is served by itself."""
    for seed in (None, 7):
        host = server.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=30)
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 2000, "stream": True, "seed": seed}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read(200)
        connection.close()
        del response
        assert ask(server, [{"role": "user", "content": text(30)}], seed=seed).generated > 0


def test_a_client_that_goes_away_leaves_the_ranks_in_step(served):
    go_away(served)


def test_a_client_that_goes_away_leaves_ranks_in_step_that_keep_exact_rows(models, tmp_path):
    with rank_serving(tmp_path / "log", 2, "--model", models / "llama", "--exact-prefill") as server:
        go_away(server)


def test_errors_of_a_request_are_answered_on_all_ranks(served, models, tmp_path):
    deep: Any = []
    for _ in range(930):
        deep = [deep]
    no_tokenizer = shutil.copytree(models / "llama", tmp_path / "no-tokenizer")
    for file in no_tokenizer.glob("tokenizer*"):
        file.unlink()
    for body in (
        {"draft_model": []},
        {"tools": deep},
        {"model": str(no_tokenizer)},
        {"chat_template_kwargs": {"return_tensors": "np"}},
        {"chat_template_kwargs": {"chat_template": ""}},
    ):
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **body}
        assert requests.post(f"{served.url}/v1/chat/completions", json=asked, timeout=60).status_code < 500, body
    asked = {"prompt": ["a", "b"], "max_tokens": 2}
    assert requests.post(f"{served.url}/v1/completions", json=asked, timeout=60).status_code < 500
    for wrong in (
        {"model": str(tmp_path / "none")},
        {"top_k": 5000},
        {"model": str(models / "llama"), "adapters": str(tmp_path)},
        {"model": str(models / "llama"), "adapters": str(save_adapter(tmp_path / "adapter", models / "llama"))},
    ):
        with pytest.raises(openai.APIStatusError):
            served.client.chat.completions.create(
                model=wrong.pop("model", "default_model"),
                messages=[{"role": "user", "content": "x"}],
                extra_body=wrong,
            )
    assert ask(served, [{"role": "user", "content": text(30)}]).generated > 0
    for rank in range(2):
        served.logs[rank].write_bytes(b"")  # mlx-lm logs what it answers with errors


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--model", "{models}/llama", "--draft-model", "{models}/llama"), "--draft-model with several ranks"),
        (("--model", "{models}/none"), "no such folder"),
        (("--model", "{models}/qwen2", "--host", "256.1.1.1"), "--host 256.1.1.1"),
    ],
)
def test_what_can_not_be_served_ends_all_ranks_with_the_reason(models, tmp_path, flags, why):
    server = RankServer(tmp_path / "log", 2, *(flag.format(models=models) for flag in flags))
    try:
        assert all(server.wait(60))
        assert any(why in server.said(rank) for rank in range(2))
    except subprocess.TimeoutExpired:
        for process in server.ranks:
            process.kill()
        raise


def test_what_warm_has_stored_on_the_ranks_is_hit(models, tmp_path):
    system = {"role": "system", "content": text(560, "warm")}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [system]}))
    flags = ["--model", models / "qwen2", "--ssd-dir", tmp_path / "ssd", "--pipeline"]
    log = tmp_path / "warm"
    with log.open("wb") as out:
        command = [
            sys.executable,
            "-c",
            COMMAND,
            "warm",
            "--codec",
            "raw",
            *map(str, flags),
            str(tmp_path / "prompts.jsonl"),
        ]
        ranks = ring(command, 2, [out, subprocess.DEVNULL], cwd=ROOT, env={**OFFLINE, **preloaded()})
        assert [rank.wait(60) for rank in ranks] == [0, 0], log.read_text()
    assert "1 prompt; " in log.read_text()
    with rank_serving(tmp_path / "log", 2, *flags) as server:
        assert ask(server, [system, {"role": "user", "content": text(30)}]).cached > 500
    prompts = ("--warm", tmp_path / "prompts.jsonl")
    with rank_serving(tmp_path / "other", 2, *flags[:2], "--pipeline", *prompts) as server:
        assert ask(server, [system, {"role": "user", "content": text(30)}]).cached > 500


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_ranks_of_other_machines_hit_what_these_have_stored(models, tmp_path, family):
    """Latents are the same on both ranks, which share them."""
    share = tmp_path / "share"
    share.mkdir()
    flags = ("--model", models / family, "--remote", f"file://{share}", "--remote-admission", "always")
    with rank_serving(tmp_path / "first", 2, *flags) as server:
        before = turns(server)
        rows = 2 if family == "llama" else 1  # of each block
        wait_for(lambda: len(list(share.rglob("rows/*"))) >= 2 * rows, "uploads")
    hits = []
    for again in range(3):  # on a busy machine computing may be quicker than asking
        with rank_serving(tmp_path / f"again-{again}", 2, *flags) as server:
            after = turns(server)
            assert [answer.text for answer in after] == [answer.text for answer in before]
            hits.append(after[0].cached)
        if hits[-1] >= 512:
            break
    assert hits[-1] >= 512, hits


def test_prompts_that_branch_are_warmed_on_stages_with_different_layers(tmp_path):
    """The first stage has recurrent layers only, the last none."""
    model = save_sharded(tmp_path / "model", "qwen3_next", num_hidden_layers=2, full_attention_interval=2)
    system = {"role": "system", "content": text(560, "branch")}
    prompts = [{"messages": [system, {"role": "user", "content": text(30, f"user {i}")}]} for i in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    flags = ("--model", model, "--pipeline", "--warm", tmp_path / "prompts.jsonl")
    with rank_serving(tmp_path / "log", 2, *flags) as server:
        assert ask(server, prompts[0]["messages"]).cached > 500


def test_ranks_with_different_settings_are_refused(models, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.ranks.launch.OF_RANK", {0: {"PREFIXCACHE_REMOTE": f"file://{tmp_path}"}})
    server = RankServer(tmp_path / "log", 2, "--model", models / "llama")
    try:
        assert server.wait(60) == [2, 2]
        assert "the ranks differ in --remote" in server.said(0)
    finally:
        for process in server.ranks:
            process.kill()


def test_ranks_that_wait_for_a_request_rest(served):
    def used() -> float:
        return sum(sum(psutil.Process(rank.pid).cpu_times()[:2]) for rank in served.ranks)

    def rest() -> bool:
        before = used()
        time.sleep(2)
        return used() - before < 1

    turns(served)
    wait_for(rest, "ranks that leave the processors alone")  # a turn's own work may go on for a while


def test_metrics_are_at_rank_0(served):
    turns(served)
    wait_for(lambda: "prefixcache_" in served.metrics_text(), "metrics")
