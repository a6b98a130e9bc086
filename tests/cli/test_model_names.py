"""`--model` of the commands that look into a directory: an identity, or the name before its @."""

import json

import pytest
from directories import kv

from prefixcache import PrefixCache

OLD, NEW, OTHER, PLAIN = "qwen@" + "1" * 24, "qwen@" + "2" * 24, "llama@" + "3" * 24 + "+" + "4" * 24, "qwen-plain"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "cache"
    with PrefixCache(ram="20MB", ssd_dir=path, ssd="50MB", codec="raw") as cache:
        for model in (OLD, NEW, OTHER, PLAIN):
            cache.store(list(range(300)), kv(300), model=model)
    return path


def shown(call, path, *options):
    done = call("inspect", path, *options, "--json")
    assert done.exit_code == 0, done.output
    return sorted(space["model"] for space in json.loads(done.stdout)["namespaces"])


@pytest.mark.parametrize(("name", "model"), [("llama", OTHER), (OTHER, OTHER), (NEW, NEW), (PLAIN, PLAIN)])
def test_the_name_before_the_at_is_enough_where_one_model_has_it(call, models, name, model):
    assert shown(call, models, "--model", name) == [model]
    pruned = json.loads(call("prune", models, "--model", name, "--dry-run", "--json").stdout)
    assert {share["model"] for share in pruned["shares"]} == {model}


def test_of_one_model_the_rest_on_disk_is_of_the_others_too(call, models):
    assert "the rest other models, folders and the lock" in call("inspect", models, "--model", PLAIN).stdout
    assert "the rest folders and the lock" in call("inspect", models).stdout


def test_without_a_model_all_are_shown(call, models):
    assert shown(call, models) == sorted((OLD, NEW, OTHER, PLAIN))


@pytest.mark.parametrize("command", [("inspect",), ("prune", "--dry-run")])
@pytest.mark.parametrize(
    ("name", "told", "listed"),
    [
        ("qwen", "--model 'qwen': 2 models have that name; give one whole: ", (OLD, NEW)),
        ("gemma", "--model 'gemma': nothing is of that model; there are ", (OLD, NEW, OTHER, PLAIN)),
        ("qwen@", "--model 'qwen@': nothing is of that model; there are ", (OLD, NEW, OTHER, PLAIN)),
    ],
)
def test_a_name_that_means_none_or_several_lists_what_there_is(call, models, command, name, told, listed):
    done = call(command[0], models, *command[1:], "--model", name)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert told in done.stderr
    assert [model for model in (OLD, NEW, OTHER, PLAIN) if repr(model) in done.stderr] == list(listed)


def test_in_an_empty_directory_there_is_none(call, tmp_path):
    PrefixCache(ram="2MB", ssd_dir=tmp_path / "cache", ssd="5MB").close()
    done = call("inspect", tmp_path / "cache", "--model", "qwen")
    assert done.exit_code == 2
    assert "nothing is of that model; the index is empty" in done.stderr
