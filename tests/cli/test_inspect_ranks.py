"""`prefixcache inspect` of a directory in which the ranks of a model have theirs."""

import json

import pytest
from directories import kv, tokens
from typer.testing import CliRunner

from prefixcache import PrefixCache
from prefixcache.cli import app
from prefixcache.ssd import DirectoryError
from prefixcache.ssd.directory import rank_folder


@pytest.fixture
def ranks(tmp_path):
    for rank in (0, 1, 10):
        with PrefixCache(ram="20MB", ssd_dir=rank_folder(tmp_path / "ssd", rank), ssd="100MB") as cache:
            n = 600 if rank else 900
            cache.store(tokens(n), kv(n), model=f"big@12|tp {rank}/11")
    return tmp_path / "ssd"


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_ranks_stand_side_by_side(ranks):
    shown = call("inspect", ranks)
    assert shown.exit_code == 0
    lines = {words[0]: words[1:] for line in shown.stdout.splitlines() if (words := line.split())}
    assert "rank 0" in shown.stdout
    assert shown.stdout.index("rank 1 ") < shown.stdout.index("rank 10")
    assert shown.stdout.count("big@12") == 1
    assert lines["tokens"] == ["900", "600", "600"]
    assert lines["state"] == ["closed"] * 3
    assert lines["part"] == ["tp", "0/11", "tp", "1/11", "tp", "10/11"]


def test_as_json_each_rank_is_as_it_would_be_alone(ranks):
    told = json.loads(call("inspect", ranks, "--json").stdout)
    alone = [json.loads(call("inspect", ranks / f"rank-{rank}", "--json").stdout) for rank in (0, 1, 10)]
    expected = [{"rank": number, **rank, "now": 0} for number, rank in zip((0, 1, 10), alone, strict=True)]
    assert [{**rank, "now": 0} for rank in told["ranks"]] == expected


@pytest.mark.parametrize("name", ["big", "big@12"])
def test_a_model_is_named_as_it_stands_there(ranks, name):
    shown = call("inspect", ranks, "--model", name)
    assert (shown.exit_code, "rank 10" in shown.stdout) == (0, True)
    assert call("prune", ranks / "rank-1", "--model", name, "--dry-run").exit_code == 0


def test_one_rank_that_cannot_be_read_is_told(ranks):
    (ranks / "rank-1" / "index.db").write_bytes(b"no index" * 100)
    shown = call("inspect", ranks)
    assert shown.exit_code == 1
    assert "can't be read" in shown.stdout


def test_a_rank_without_a_cache_hides_no_other(ranks):
    (ranks / "rank-2").mkdir()
    shown = call("inspect", ranks)
    assert shown.exit_code == 1
    assert "rank 10" in shown.stdout
    assert "rank 2" not in shown.stdout
    assert "it is empty" in shown.output


@pytest.mark.parametrize("command", [("reconcile",), ("prune", "--older-than", "1d"), ("clear", "--yes")])
def test_other_commands_name_the_ranks(ranks, command):
    done = call(command[0], ranks, *command[1:])
    assert done.exit_code == 2
    assert "has a directory for each of 3 ranks of a model; name one of them, such as" in done.output


def test_a_cache_that_is_no_rank_is_told(ranks):
    with pytest.raises(DirectoryError, match="has a directory for each of 3 ranks"):
        PrefixCache(ram="20MB", ssd_dir=ranks, ssd="100MB")
