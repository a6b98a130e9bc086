"""Tenants never meet: not by salt, not by model, not when keys collide; and nothing of a prompt gets out."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sqlite3
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

from prefixcache import PrefixCache, keys
from prefixcache.blocks.graph import Graph
from prefixcache.cli import app
from prefixcache.metrics.prometheus import CacheCollector, render
from prefixcache.servers.salts import salt_of
from prefixcache.ssd import reconcile
from tests.inside import inside
from tests.models import states

OWNERS = [("m1", b""), ("m1", b"a"), ("m1", b"b"), ("m2", b""), ("m2", b"a")]
SECRET = 7_000_000_000_000  # token ids that stand nowhere by chance


def offset(owner: tuple[str, bytes]) -> int:
    """What an owner's states are shifted by, so that another's would be seen."""
    return 1 + OWNERS.index(owner)


def state(tokens: list[int], owner: tuple[str, bytes]):
    """The state of these tokens under this owner's weights: a function of both."""
    return states.sliceable([token + offset(owner) * 100_000 for token in tokens])


def check(made, tokens: list[int], owner: tuple[str, bytes]) -> None:
    states.check(made, [token + offset(owner) * 100_000 for token in tokens])


@pytest.fixture
def narrow(monkeypatch):
    """Keys of 8 bits: nearly every key is another's, too. Gives an item for each block that was refused for it."""

    class Narrow:
        def __init__(self, data: bytes):
            self._state = xxhash.xxh3_64(data)

        def update(self, data: bytes) -> None:
            self._state.update(data)

        def digest(self) -> bytes:
            return bytes(31) + self._state.digest()[:1]

    monkeypatch.setattr(keys, "hashlib", SimpleNamespace(sha256=Narrow, blake2b=hashlib.blake2b))
    refused, grow = [], Graph.grow

    def counted(*arguments):
        node = grow(*arguments)
        refused.extend([None] if node is None else [])
        return node

    monkeypatch.setattr(Graph, "grow", counted)
    return refused


def opened(root: Path | None, **values) -> PrefixCache:
    return PrefixCache(ssd_dir=root, **{"ram": "1MB", "ssd": "4MB", "codec": "raw", **values})


@pytest.mark.parametrize("seed", range(3))
def test_salts_and_models_never_meet_when_keys_collide_at_eight_bits(tmp_path, narrow, seed):
    chance = random.Random(seed)
    prompts = [[p % 3] * 256 + [p] * chance.choice([10, 256, 300]) for p in range(30)]
    stored: set[tuple[tuple[str, bytes], int]] = set()
    hits = 0
    for _ in range(3):  # restarts
        cache = opened(tmp_path, ram="300KB", spill="wait", spill_wait=60)
        for _ in range(80):
            owner, which = chance.choice(OWNERS), chance.randrange(len(prompts))
            tokens, (model, salt) = prompts[which], owner
            if chance.random() < 0.4:
                cache.store(tokens, state(tokens, owner), model=model, salt=salt)
                stored.add((owner, which))
            else:
                cache.promote(tokens, model=model, salt=salt).result(20)
                made, rest = cache.fetch(tokens, model=model, salt=salt, leave=0)
                if made is not None:
                    depth = len(tokens) - len(rest)
                    check(made, tokens[:depth], owner)
                    same = [prompts[w][:depth] == tokens[:depth] for o, w in stored if o == owner]
                    assert any(same), "a hit on what this owner never stored"
                    hits += 1
        cache.check_integrity()
        cache.flush()
        states.check_integrity(cache)
        cache.close()
    assert hits > 20
    assert len(narrow) > 5
    assert reconcile(tmp_path, deep=True).clean


def test_a_tenant_hits_nothing_of_another_at_any_depth_or_tier(tmp_path):
    tokens = list(range(600))
    with opened(tmp_path) as cache:
        cache.store(tokens, state(tokens, OWNERS[1]), model="m1", salt=b"a")
        cache.flush()
        for model, salt in (("m1", b""), ("m1", b"b"), ("m1", b"a\0"), ("m1", b"aa"), ("m2", b"a"), ("", b"")):
            if not model:
                continue
            assert cache.match(tokens, model=model, salt=salt) == (0, 0)
            assert cache.unread(tokens, model=model, salt=salt) == 0
            assert cache.promote(tokens, model=model, salt=salt).result(20) == 0
            assert cache.lookup(tokens, model=model, salt=salt) is None
            assert cache.pin(tokens, model=model, salt=salt) == 0
            assert cache.remove(tokens, model=model, salt=salt) == 0
        assert cache.match(tokens, model="m1", salt=b"a").ram == 600


def test_a_miss_takes_the_same_steps_whatever_other_tenants_hold(tmp_path, monkeypatch):
    """What is promised of timing: a lookup touches the nodes of its own namespace, and no others."""
    tokens = list(range(2000))
    visited: list[int] = []
    with opened(tmp_path, ram="20MB") as cache:
        cache.store([1, 2, 3], states.sliceable([1, 2, 3]), model="m", salt=b"mine")
        original = inside(cache).storage.graph.walk

        def walk(space, raw, known=()):
            found = original(space, raw, known)
            visited.append(len(found.nodes))
            return found

        monkeypatch.setattr(inside(cache).storage.graph, "walk", walk)
        before = cache.match(tokens, model="m", salt=b"mine")
        steps = list(visited)
        for n in range(20):
            cache.store(tokens, states.sliceable(tokens), model="m", salt=b"theirs%d" % n)
        visited.clear()
        assert cache.match(tokens, model="m", salt=b"mine") == before == (0, 0)
        assert visited == steps == [0]


# -- what gets out ----------------------------------------------------------------------------------------------------


def spoken(tokens: list[int]) -> list[str]:
    """How a token could stand in a text: its digits, its bytes, and those as hex."""
    found = []
    for token in tokens[:3] + tokens[-3:]:
        raw = np.array([token], "<i8").tobytes()
        found += [str(token), raw.hex(), raw.hex().upper(), repr(raw)[2:-1]]
    return found


@pytest.mark.parametrize("salt", [b"tenant-of-great-fame", salt_of("sk-of-great-fame", "")], ids=["salt", "API key"])
def test_no_log_metric_error_or_report_has_anything_of_a_prompt(tmp_path, caplog, salt):
    caplog.set_level(logging.DEBUG)
    tokens = [SECRET + 17 * i for i in range(600)]
    said: list[str] = []

    def tried(call) -> None:
        try:
            said.append(repr(call()))
        except Exception as error:
            said.append("".join(traceback.format_exception(error)))

    with opened(tmp_path) as cache:
        cache.store(tokens, states.sliceable(tokens), model="m", salt=salt)
        cache.flush()
        cache.trim_to(0)
        for file in (tmp_path / "rows").rglob("*.safetensors"):  # found damaged on reading
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        tried(lambda: cache.promote(tokens, model="m", salt=salt).result(20))
        tried(lambda: cache.store(tokens, [object()], model="m", salt=salt))
        tried(lambda: cache.store([*tokens, 0.5], states.sliceable(tokens), model="m", salt=salt))
        tried(lambda: cache.fetch([tokens], model="m", salt=salt))
        tried(lambda: cache.fetch(tokens, model="", salt=salt))
        tried(lambda: cache.fetch(tokens, model="m", salt=salt.decode("latin-1")))
        tried(lambda: cache.fetch(tokens, model="m", salt=salt, leave=-1))
        cache.store(tokens, states.sliceable(tokens), model="m", salt=salt)
        tried(lambda: cache.lookup(tokens, model="m", salt=salt))
        said += [repr(cache.stats()), json.dumps(cache.stats().as_dict()), render(CacheCollector(cache)).decode()]
    index = sqlite3.connect(tmp_path / "index.db")
    index.execute("UPDATE image SET parent = zeroblob(32)")
    index.commit()
    index.close()
    for command in (["inspect"], ["inspect", "--json"], ["reconcile", "--deep", "--json"]):
        said.append(CliRunner().invoke(app, [command[0], str(tmp_path), *command[1:]]).output)
    with opened(tmp_path):
        said.append(caplog.text)
    said += [file.read_text() for file in (tmp_path / "quarantine").glob("*.json")]
    assert (tmp_path / "quarantine").exists()
    assert "set aside" in caplog.text or any("checksum" in text for text in said)
    for text in said:
        for secret in [*spoken(tokens), salt.decode("latin-1"), repr(salt)[2:-1], salt[1:].hex(), "of-great-fame"]:
            assert secret not in text, text[:500]


def test_all_that_is_written_is_for_the_owner_alone_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        root = tmp_path / "new" / "ssd"
        with opened(root, codec="turboquant:4") as cache:
            for n in range(3):
                tokens = [n * 1000 + i for i in range(600)]
                cache.store(tokens, states.uneven(tokens), model="m")
            cache.flush()
            next((root / "rows").rglob("*.safetensors")).write_bytes(b"bad")
            cache.trim_to(0)
            for n in range(3):
                cache.promote([n * 1000 + i for i in range(600)], model="m").result(20)
            live = list(root.rglob("*"))
            assert {path.stat().st_mode & 0o777 for path in live if path.is_file()} == {0o600}
            assert any("quarantine" in str(path) and path.suffix == ".json" for path in live)
        assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o600}
        assert {path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")] if path.is_dir()} == {0o700}
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", "..", "\0", "\n", "x" * 500, "C:\\x", "é" * 100, "; rm -rf"])
def test_no_name_from_outside_becomes_a_path(tmp_path, name):
    root = tmp_path / "ssd"
    with opened(root) as cache:
        prompt = cache.prompt([1] * 300, model=name, salt=name.encode()).labelled(name)
        cache.store(prompt, states.sliceable([1] * 300))
        cache.flush()
        assert cache.match([1] * 300, model=name, salt=name.encode()).ssd == 300
    allowed = set("0123456789abcdef")
    for path in root.rglob("*"):
        if path.suffix == ".safetensors":
            assert set(path.stem) <= allowed
        else:
            assert path.name in {
                "index.db",
                "LOCK",
                "rows",
                "windows",
                "snapshots",
                "stats",
                "quarantine",
                "tmp",
                "CACHEDIR.TAG",
            } or (len(path.name) == 2 and set(path.name) <= allowed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ssd"]
