"""Prompts move to another machine: any tool copies image files, `prefixcache reconcile` adopts them, a cache serves them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from directories import LONG, ODD, SALT, SHORT, images, kv, spoil, tokens

from prefixcache import PrefixCache

FOLDERS = ("rows", "windows", "snapshots")


def opened(root: Path) -> PrefixCache:
    return PrefixCache(ram="20MB", ssd_dir=root, ssd="100MB")


def copied(source: Path, target: Path) -> Path:
    """As docs/operating.md says, with cp."""
    target.mkdir(exist_ok=True)
    (target / "LOCK").touch()
    subprocess.run(["cp", "-pRn", *(source / folder for folder in FOLDERS), target], check=True)
    return target


def report(done):
    return json.loads(done.stdout)


def check_warm(root: Path) -> None:
    with opened(root) as cache:
        assert cache.match(tokens(LONG), model="chat").ssd == LONG
        assert cache.match(tokens(SHORT, 1), model="chat").ssd == SHORT
        assert cache.match(tokens(600), model="chat", salt=SALT).ssd == 600
        assert cache.match(tokens(1000), model=ODD).ssd == 1000
        assert cache.match(tokens(700), model="state").ssd == 700


def test_a_cache_is_warm_after_it_bit_for_bit(call, filled, tmp_path):
    target = copied(filled, tmp_path / "target")
    done = call("reconcile", target, "--deep", "--json")
    assert done.exit_code == 1
    assert report(done)["counts"] == {"index": 1, "orphan": sum(len(images(filled, folder)) for folder in FOLDERS)}
    check_warm(target)
    fetched = []
    for root in (filled, target):
        with opened(root) as cache:
            cache.promote(tokens(LONG), model="chat").result(30)
            layers, rest = cache.fetch(tokens(LONG), model="chat")
            assert len(rest) == 1
            fetched.append([part for layer in layers for part in (layer.keys, layer.values)])
    assert all(mx.array_equal(here, there) for here, there in zip(*fetched, strict=True))
    assert call("reconcile", target, "--deep").exit_code == 0


def test_what_the_cache_stores_then_continues_what_came(call, filled, tmp_path):
    target = copied(filled, tmp_path / "target")
    assert call("reconcile", target).exit_code == 1
    with opened(target) as cache:
        cache.promote(tokens(LONG), model="chat").result(30)
        stored = cache.store(tokens(LONG + 500), kv(LONG + 500), model="chat")
        assert 0 < stored.new_tokens <= 500 + 256
    assert call("reconcile", target, "--deep").exit_code == 0


def test_a_live_directory_is_copied_too(call, filled, tmp_path):
    with opened(filled):
        target = copied(filled, tmp_path / "target")
    assert call("reconcile", target, "--deep").exit_code == 1
    check_warm(target)


def test_a_second_time_nothing_is_to_be_done(call, filled, tmp_path):
    target = copied(filled, tmp_path / "target")
    assert call("reconcile", target).exit_code == 1
    copied(filled, target)
    assert call("reconcile", target, "--deep").exit_code == 0


def test_what_is_damaged_on_the_way_is_quarantined_and_may_come_again(call, filled, tmp_path):
    target = copied(filled, tmp_path / "target")
    spoil(images(target)[0])
    images(target)[1].write_bytes(b"half")
    counts = report(call("reconcile", target, "--deep", "--json"))["counts"]
    assert counts["broken"] == 2
    copied(filled, target)
    assert report(call("reconcile", target, "--deep", "--json"))["counts"] == {"orphan": 2}
    check_warm(target)


@pytest.mark.parametrize("first", ["later blocks", "windows and snapshots"])
def test_a_cache_that_opens_before_all_is_there_keeps_what_it_cannot_use_yet(call, filled, tmp_path, first):
    """The dependents of what is still to come: a later opening has both, and uses them."""
    target, later = tmp_path / "target", tmp_path / "later"
    copied(filled, target)
    later.mkdir()
    held_back = images(target)
    if first == "later blocks":
        held_back = [path for path in held_back if b'"start":"0"' in path.read_bytes()[:2000]]
        assert held_back
    for path in held_back:
        shutil.move(path, later / path.name)
    waiting = sum(len(images(target, folder)) for folder in FOLDERS)
    with opened(target) as cache:
        assert cache.match(tokens(LONG), model="chat").ssd == 0
        assert cache.stats().ssd.files == waiting
        cache.store(tokens(300, 7), kv(300), model="chat")
    assert sum(len(images(target, folder)) for folder in FOLDERS) == waiting + 2
    for path in held_back:
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            shutil.move(later / path.name, path)
    check_warm(target)
    assert call("reconcile", target, "--deep").exit_code == 0


def test_into_a_directory_that_has_its_own_prompts(call, filled, tmp_path):
    target = tmp_path / "target"
    mine = [7 * number for number in range(1000)]
    with opened(target) as cache:
        cache.store(mine, kv(1000), model="chat")
        cache.store(tokens(LONG), kv(LONG), model="chat")  # the source has it, too
    copied(filled, target)
    assert call("reconcile", target, "--deep").exit_code == 1
    check_warm(target)
    with opened(target) as cache:
        assert cache.match(mine, model="chat").ssd == 1000
    assert not list((target / "quarantine").iterdir())


def test_more_than_the_new_limit_is_cut_to_it_at_the_next_start(call, filled, tmp_path):
    target = copied(filled, tmp_path / "target")
    assert call("reconcile", target).exit_code == 1
    with PrefixCache(ram="20MB", ssd_dir=target, ssd="500kB") as cache:
        assert cache.flush(30)
        assert cache.stats().ssd.files > 0
        assert cache.stats().ssd.used <= 500_000
    assert report(call("inspect", target, "--json"))["disk"] <= 500_000
    assert call("reconcile", target, "--deep").exit_code == 0
