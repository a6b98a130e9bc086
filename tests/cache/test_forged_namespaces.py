"""Images that name the root key of a victim's model with another layout: they are refused where that can be proven, and in
any case lock nobody out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from prefixcache import PrefixCache
from prefixcache.ssd import reconcile, survey
from tests.inside import inside
from tests.models import states

PROMPT = [n * 7 % 1000 for n in range(600)]
OTHER = [n * 11 % 1000 for n in range(700)]
SALTS = pytest.mark.parametrize("salt", [b"", b"secret"], ids=["unsalted", "salted"])


def opened(folder, **more):
    return PrefixCache(ram="64MB", ssd_dir=folder, ssd="64MB", codec="raw", **more)


def root_of(salt: bytes) -> bytes:
    """The root key of the victim's namespace."""
    with PrefixCache(ram="64MB", codec="raw") as cache:
        cache.store(PROMPT, states.sliceable(PROMPT), model="m", salt=salt)
        return next(iter(inside(cache).storage.namespaces))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """`made(salt)`: a directory of the victim's, and one of forged images that name the same root key."""

    def make(salt: bytes, model: str = "m") -> tuple[Path, Path]:
        with opened(tmp_path / "true") as cache:
            for prompt in (PROMPT, OTHER):
                cache.store(prompt, states.sliceable(prompt), model="m", salt=salt)
            assert cache.flush(30)
        with monkeypatch.context() as patch:
            root = root_of(salt)
            patch.setattr("prefixcache.store_fetch_remove.namespaces.root_key", lambda *identity: root)
            with opened(tmp_path / "forged") as cache:
                cache.store(PROMPT, states.sliceable(PROMPT, 5), model=model)
                branch = [*PROMPT[:300], 5]
                cache.store(branch, states.sliceable(branch, 5), model=model)
                assert cache.flush(30)
        return tmp_path / "true", tmp_path / "forged"

    return make


@pytest.fixture
def victim(tmp_path):
    with opened(tmp_path / "victim"):
        pass
    return tmp_path / "victim"


def put(images: Path, into: Path) -> None:
    """As who may write to the directory: the images alone, beside what is there."""
    for path in images.glob("rows/*/*"):
        (into / "rows" / path.parent.name).mkdir(exist_ok=True)
        shutil.copyfile(path, into / "rows" / path.parent.name / path.name)


def put_beside(images: Path, into: Path) -> None:
    """Only those whose names are not taken: an overwritten file is damage, and the next store makes it anew."""
    here = {path.name for path in into.glob("rows/*/*")}
    for path in images.glob("rows/*/*"):
        if path.name not in here:
            (into / "rows" / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(path, into / "rows" / path.parent.name / path.name)


def layouts(folder: Path) -> list[str]:
    return [space.layout for space in survey(folder).namespaces]


def check_serves(folder: Path, salt: bytes) -> None:
    """Stores are taken, answers are right, and both after another opening."""
    for again in (False, True):
        with opened(folder) as cache:
            if not again:
                assert cache.store(PROMPT, states.sliceable(PROMPT), model="m", salt=salt).tokens == len(PROMPT)
            assert cache.match(PROMPT, model="m", salt=salt).ssd == len(PROMPT)
            assert cache.promote(PROMPT, model="m", salt=salt).result(30) == len(PROMPT)
            found, rest = cache.fetch(PROMPT, model="m", salt=salt, leave=0)
            assert rest == []
            states.check(found, PROMPT)
            assert cache.flush(30)
            states.check_integrity(cache)
    assert reconcile(folder, dry_run=True, deep=True).clean


def check_whole(folder: Path, salt: bytes) -> None:
    with opened(folder) as cache:
        for prompt in (PROMPT, OTHER):
            assert cache.promote(prompt, model="m", salt=salt).result(30) == len(prompt)
            states.check(cache.fetch(prompt, model="m", salt=salt, leave=0)[0], prompt)


@SALTS
@pytest.mark.parametrize("model", ["m", "another"])
def test_a_forged_namespace_that_came_first_locks_nobody_out(made, victim, salt, model):
    _, forged = made(salt, model)
    put(forged, victim)
    check_serves(victim, salt)


@SALTS
def test_one_that_the_index_has_already_is_replaced_at_its_first_use(made, salt):
    true, forged = made(salt)
    (false,) = layouts(forged)
    check_serves(forged, salt)
    assert layouts(forged) == layouts(true) != [false]


def test_one_whose_layers_cannot_be_made_is_replaced_too(made, monkeypatch):
    _, forged = made(b"secret")
    with monkeypatch.context() as patch:
        patch.setattr("prefixcache.layers.image_layout.Plan.check_classes", lambda plan: 1 / 0)
        with opened(forged) as cache:
            assert cache.match(PROMPT, model="m", salt=b"secret").ssd == 0
            assert cache.stats().namespaces == 0
            patch.undo()
            assert cache.store(OTHER, states.sliceable(OTHER), model="m", salt=b"secret").tokens == len(OTHER)
            assert cache.flush(30)
            states.check_integrity(cache)
            assert cache.stats().ssd.files == 3
    check_serves(forged, b"secret")


@SALTS
def test_a_forged_namespace_beside_a_right_row_is_refused(made, salt):
    true, forged = made(salt)
    before = layouts(true)
    for _ in range(2):
        put_beside(forged, true)
        check_whole(true, salt)
        assert layouts(true) == before
    check_serves(true, salt)


@pytest.mark.parametrize("forged_first", [False, True])
def test_of_two_that_come_at_once_the_proven_one_is_adopted(made, victim, forged_first):
    true, forged = made(b"")
    if forged_first:
        put(forged, victim)
        with opened(victim):
            pass
        for path in victim.glob("rows/*/*"):  # what the victim writes has other bytes under some of these names
            if (true / "rows" / path.parent.name / path.name).exists():
                path.unlink()
    put_beside(true, victim)
    put_beside(forged, victim)
    check_whole(victim, b"")
    assert layouts(victim) == layouts(true)
    reasons = {item.reason for item in survey(victim).quarantine if item.origin != "index.db"}
    assert reasons == {"the model, codec or layout is not that of the namespace which has this root key"}
    check_serves(victim, b"")


def test_a_layout_in_another_spelling_is_refused(made, victim, monkeypatch):
    """Else one namespace had many, and none of them could be compared."""
    with monkeypatch.context() as patch:
        root = root_of(b"")
        patch.setattr("prefixcache.store_fetch_remove.namespaces.root_key", lambda *identity: root)
        patch.setattr(
            "prefixcache.store_fetch_remove.namespaces.canonical", lambda value: json.dumps(value, sort_keys=True)
        )
        with opened(victim.parent / "spelled") as cache:
            cache.store(PROMPT, states.sliceable(PROMPT), model="m")
            assert cache.flush(30)
    put(victim.parent / "spelled", victim)
    assert reconcile(victim).counts == {"broken": 3}
    check_serves(victim, b"")
