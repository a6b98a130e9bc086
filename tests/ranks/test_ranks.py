"""`PrefixCache(group=)` on real ranks: random requests with faults on single ones, beside cold runs. `python -m tools.ranks`
runs as many as one likes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefixcache import Raw
from prefixcache.open_cache import OpenCache
from prefixcache.settings import Settings
from tests.servers.forked import ROOT, preloaded
from tools.ranks.__main__ import one
from tools.ranks.launch import ring
from tools.ranks.models import CASES, Case


@pytest.fixture(autouse=True)
def light_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in preloaded().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 2) for case in CASES), (Case("tp", "sliding"), 3), (Case("pp", "dense"), 3)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else f"{value} ranks",
)
def test_no_hit_changes_an_answer_and_no_rank_waits_for_ever(case, size):
    told = one(case, size, SimpleNamespace(requests=20, seed=5, alone=False, gpu=False))["counts"]
    assert told["requests"] == 20
    assert told["hit"]
    assert not any(told.get(name) for name in ("deviation", "hang", "failure"))


SCRIPT = """
import json, sys
import mlx.core as mx
from prefixcache import PrefixCache, Raw
from prefixcache.ranks import OutOfStep, Ranks, rank_identity
from mlx_lm.models.cache import KVCache
from tools.ranks.models import Case, build, shard

mx.set_default_device(mx.cpu)
group = mx.distributed.init()
names = [rank_identity("m@0", shard(build(Case(*case)), case[0], group), Ranks(group))
         for case in (("tp", "dense"), ("tp", "mla"), ("pp", "mla"), ("tp", "hybrid"))]
cache = PrefixCache(group=group, ram="10MB", ssd_dir=sys.argv[1], ssd="10MB", codec=Raw())
wrong = []
for call in (lambda: cache.fetch([1, 2, 3 + group.rank()], model="m"),
             lambda: (cache.match if group.rank() else cache.fetch)([1, 2, 3], model="m")):
    try:
        call()
    except OutOfStep as error:
        wrong.append(str(error))

tokens, layer = list(range(300)), KVCache()
layer.update_and_fetch(*[mx.zeros((1, 2, 300, 8))] * 2)
cache.store(tokens, [layer], model="n")
if group.rank() == 1:
    cache.clear()
before = cache.stats().counters
missed = cache.fetch([*tokens, 1], model="n")[0] is None
counted = [getattr(cache.stats().counters, name) - getattr(before, name) for name in ("fetches", "hit_tokens")]
print(json.dumps({"names": names, "ssd_dir": str(cache.settings.ssd_dir), "sharing": cache.sharing, "wrong": wrong,
                  "missed": missed, "counted": counted}), flush=True)
cache.close()
"""


def test_names_directories_and_shares_of_ranks(tmp_path: Path):
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    outputs = [log.open("wb") for log in logs]
    ranks = ring([sys.executable, "-c", SCRIPT, str(tmp_path / "ssd")], 2, outputs, cwd=ROOT)
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0], [log.read_text() for log in logs]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        raise
    told = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    assert [one["names"] for one in told] == [
        ["m@0|tp 0/2", "m@0|tp 0/2", "m@0|pp 2:4/4", "m@0|tp 0/2"],
        ["m@0|tp 1/2", "m@0|tp 0/2", "m@0|pp 0:2/4", "m@0|tp 1/2"],
    ]
    assert [Path(one["ssd_dir"]).name for one in told] == ["rank-0", "rank-1"]
    assert [one["sharing"] for one in told] == [2, 2]
    assert all(["look different prompts up" in error for error in one["wrong"]] == [True, True] for one in told)
    assert all(one["missed"] for one in told)
    assert [one["counted"] for one in told] == [[1, 0], [1, 0]]  # on rank 0 it was there


def test_what_all_ranks_hold_counts_as_free_so_that_a_restart_leaves_each_its_share(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100 << 20, total=1 << 30))
    (tmp_path / "rank-1").mkdir()
    (tmp_path / "rank-1" / "image").write_bytes(b"x" * (20 << 20))
    held = (tmp_path / "rank-1" / "image").stat().st_blocks * 512
    cache = OpenCache(Settings(ram="10MB", ssd_dir=tmp_path / "rank-0"), Raw(), sharing=2)
    try:
        assert cache.stats().ssd.limit == ((100 << 20) + held) // 2 // 2
    finally:
        cache.close()


DIED = """
import os
import mlx.core as mx
from prefixcache.ranks import Ranks

mx.set_default_device(mx.cpu)
ranks = Ranks(mx.distributed.init())
ranks.any(True)
if ranks.rank == 1:
    os._exit(0)
try:
    for _ in range(3):
        ranks.least(1)
    print("agreed with nobody", flush=True)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_an_agreement_with_a_rank_that_died_is_an_error(tmp_path: Path):
    with (tmp_path / "log").open("wb") as out:
        ranks = ring([sys.executable, "-c", DIED], 2, [out, subprocess.DEVNULL], cwd=ROOT)
        try:
            assert ranks[0].wait(60) == 0
        finally:
            ranks[0].kill()
    assert "connection to a peer was lost" in (tmp_path / "log").read_text()
