"""`prefixcache prune`: what its options mean, and its exit codes."""

import json
import os
import sqlite3
import time

import pytest
from directories import LONG, ODD, SALT, SHORT, fingerprint, tokens

from prefixcache import PrefixCache


def report(done):
    return json.loads(done.stdout)


def depths(root):
    with PrefixCache(ram="20MB", ssd_dir=root, ssd="100MB") as cache:
        return {
            name: cache.match(what, model=model, salt=salt).ssd
            for name, what, model, salt in (
                ("long", tokens(LONG), "chat", b""),
                ("short", tokens(SHORT, 1), "chat", b""),
                ("salted", tokens(600), "chat", SALT),
                ("odd", tokens(1000), ODD, b""),
                ("state", tokens(700), "state", b""),
            )
        }


ALL = {"long": LONG, "short": SHORT, "salted": 600, "odd": 1000, "state": 700}


def older(root, model, days):
    connection = sqlite3.connect(root / "index.db", isolation_level=None)
    connection.execute(
        "UPDATE image SET used_at = ? WHERE namespace IN (SELECT id FROM namespace WHERE model = ?)",
        [time.time() - days * 86400, model],
    )
    connection.close()


def test_nothing_chosen_gives_2_and_says_what_to_give(call, filled):
    before = fingerprint(filled)
    done = call("prune", filled)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--older-than" in done.stderr
    assert fingerprint(filled) == before


@pytest.mark.parametrize(
    ("option", "value"),
    [("--older-than", "7"), ("--older-than", "-1d"), ("--older-than", "7 years"), ("--to-size", "20QB")],
)
def test_a_value_that_makes_no_sense_gives_2(call, filled, option, value):
    done = call("prune", filled, option, value)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert option in done.stderr
    assert value in done.stderr


def test_a_model_alone_leaves_whole(call, filled):
    done = call("prune", filled, "--model", ODD)
    assert (done.exit_code, done.stderr) == (0, "")
    assert r"evil\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout
    assert depths(filled) == {**ALL, "odd": 0}


def test_one_tenant_leaves_by_its_namespace(call, filled):
    spaces = json.loads(call("inspect", filled, "--json").stdout)["namespaces"]
    (root,) = [space["root"] for space in spaces if space["model"] == "chat" and space["tokens"] == 600]
    assert call("prune", filled, "--namespace", root[:8]).exit_code == 0
    assert depths(filled) == {**ALL, "salted": 0}


@pytest.mark.parametrize(("age", "leaves"), [("8d", False), ("1w", True), ("167h", True), ("6.5d", True)])
def test_an_age_and_a_model_combine(call, filled, age, leaves):
    older(filled, "chat", 7.5)
    older(filled, "state", 7.5)
    assert call("prune", filled, "--older-than", age, "--model", "state").exit_code == 0
    assert depths(filled) == {**ALL, "state": 0 if leaves else 700}


def test_a_dry_run_says_the_same_and_changes_nothing(call, filled):
    older(filled, "chat", 9)
    before = fingerprint(filled)
    said = report(call("prune", filled, "--older-than", "7d", "--dry-run", "--json"))
    assert fingerprint(filled) == before
    done = report(call("prune", filled, "--older-than", "7d", "--json"))
    assert (said["images"], said["disk"]) == (done["images"], done["disk"])
    assert done["images"] > 0


def test_a_size_is_reached_or_gives_1(call, filled):
    done = call("prune", filled, "--to-size", "600kB", "--json")
    assert done.exit_code == 0
    assert report(done)["after"] <= 600_000
    assert json.loads(call("inspect", filled, "--json").stdout)["disk"] <= 600_000
    assert call("reconcile", filled, "--deep").exit_code == 0
    done = call("prune", filled, "--to-size", "1kB")
    assert done.exit_code == 1
    assert "even so" in done.stderr


def test_a_model_that_is_not_there_gives_2(call, filled):
    for options in (("--model", "nobody[red]"), ("--namespace", "xyz")):
        done = call("prune", filled, *options)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_live_directory_gives_2_and_names_the_holder(call, live_directory):
    done = call("prune", live_directory, "--older-than", "0s")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"in use by pid {os.getpid()}" in done.stderr
    assert report(call("prune", live_directory, "--older-than", "0s", "--dry-run", "--json"))["images"] > 20
