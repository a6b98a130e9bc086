"""How long a prompt and its answer may be, and which model a request may ask for: both are told before anything is computed
or unloaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import requests

from prefixcache.planning.model_config import context_length
from prefixcache.servers.mlx_lm.context import NO_LIMIT, room_for
from prefixcache.servers.request_schema import RequestRefused
from tests.servers.serving import (
    SECONDS,
    Server,
    ask,
    complete,
    post,
    save_adapter,
    save_model,
    serve,
    serving,
    starting,
    text,
    user,
)

CONTEXT = 300


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"text_config": {"max_position_embeddings": 131072}, "max_position_embeddings": 512}, 131072),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "yarn", "factor": 2}}, 262144),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", "factor": "much"}}, 2048),
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": True}, None),
        ({"text_config": None}, None),
    ],
)
def test_a_models_context_is_what_its_config_says_stretched_where_it_is_scaled(config, context):
    assert context_length(config) == context


def test_a_prompt_leaves_room_for_a_token_or_is_refused_with_both_numbers():
    assert room_for(1000, None) == NO_LIMIT
    assert room_for(99, 100) == 1
    for tokens in (100, 5000):
        with pytest.raises(
            RequestRefused, match=f"prompt is too long: {tokens} tokens > 100, the model's maximum context length,"
        ):
            room_for(tokens, 100)


# -- at a server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "short", max_position_embeddings=CONTEXT)
    save_model(folder / "other", seed=3)
    save_adapter(folder / "adapter", folder / "short")
    return folder


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[Server]:
    with serving(models / "served.log", "--model", models / "short") as server:
        yield server


def loads(server: Server) -> int:
    return server.said().count(" of weights; ")


@pytest.mark.parametrize("more", [{}, {"seed": 1}, {"stream": True}], ids=str)
def test_a_prompt_beyond_the_context_is_refused_before_it_is_computed(served, more):
    before = served.metrics()
    with pytest.raises(openai.BadRequestError, match=rf"prompt is too long: \d+ tokens > {CONTEXT}"):
        ask(served, user(text(600)), **more)
    with pytest.raises(openai.BadRequestError, match=rf"tokens > {CONTEXT}"):
        complete(served, text(600))
    with pytest.raises(openai.BadRequestError, match=rf"prompt is too long: at least \d+ tokens > {CONTEXT}"):
        ask(served, user(text(100_000)))
    changed = {name for name, value in served.metrics().items() if value != before.get(name)}
    assert not {name for name in changed if "store" in name or "fetch" in name}


CALL = {"function": {"name": "a", "arguments": "{bad"}}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0 must have its text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages.0.content.0 must have its text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0 is an image"),
        ([{"role": "assistant", "tool_calls": [CALL]}, *user("go on")], "messages.0.tool_calls.0.function.arguments"),
    ],
    ids=str,
)
def test_a_message_that_the_model_cant_read_is_the_clients_fault(served, messages, told):
    answer = post(served, messages=messages)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_prompts_that_are_warmed_fit_into_the_context(served):
    prompts = {"prompts": [{"messages": user("a")}, {"messages": user(text(600))}]}
    answer = requests.post(f"{served.url}/prefixcache/prompts", json=prompts, timeout=SECONDS)
    assert answer.status_code == 400
    assert "prompts[1]: the prompt is too long" in answer.text


def test_an_answer_ends_where_the_context_does(served):
    for more in ({}, {"seed": 2}):
        answer = ask(served, user(text(100)), max_tokens=2**31, logit_bias={"1": -1000}, **more)
        assert (answer.prompt + answer.generated, answer.finish) == (CONTEXT, "length")


def test_the_flag_is_in_the_models_place(models, tmp_path):
    with serving(tmp_path / "log", "--model", models / "short", "--max-context", 100) as server:
        with pytest.raises(openai.BadRequestError, match="tokens > 100"):
            ask(server, user(text(150)))
        assert ask(server, user("hello"), max_tokens=50).generated


def test_a_model_that_is_loaded_for_a_request_has_its_own_context(models, served):
    short, other = ({"model": str(models / name)} for name in ("short", "other"))
    assert ask(served, user(text(600)), **other).prompt > CONTEXT
    with pytest.raises(openai.BadRequestError, match=f"tokens > {CONTEXT}"):  # it is loaded for this request
        ask(served, user(text(600)), **short)


@pytest.mark.parametrize("field", ["model", "draft_model", "adapters"])
@pytest.mark.parametrize("name", ["/no/such/model", "gpt 4o", "empty", "no-weights", "no-tokenizer", "no-type"])
def test_a_model_that_cant_be_loaded_leaves_the_loaded_one_where_it_is(models, served, name, field):
    broken = shutil.copytree(models / "other", models / f"{name.strip('/').replace('/', '-')}-{field}")
    for pattern in {"no-weights": ["*.safetensors"], "no-tokenizer": ["tokenizer*"], "empty": ["*"]}.get(name, []):
        for file in broken.glob(pattern):
            file.unlink()
    if name == "no-type":
        (broken / "config.json").write_text('{"model_type": "no_such_type"}')
    ask(served, user("hello"))
    before, loaded = loads(served), {"model": str(models / "short")}
    ask(served, user("hello"), **loaded)
    asked = {**loaded, field: name if name in ("/no/such/model", "gpt 4o") else str(broken)}
    with pytest.raises(openai.NotFoundError, match=f"{field} .*({name})"):
        ask(served, user("hello"), **asked)
    assert ask(served, user("hello"), **loaded).cached
    assert loads(served) == before


def test_the_loaded_model_is_named(models, served):
    ask(served, user("hello"))
    with pytest.raises(openai.NotFoundError, match=f"the model {models / 'short'} is loaded: name that"):
        ask(served, user("hello"), model="gpt 4o")


def test_a_model_whose_weights_are_broken_leaves_the_server_with_the_one_before(models, tmp_path):
    broken = shutil.copytree(models / "other", tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    with starting(serve, tmp_path / "log", "--ram", "100MB", "--codec", "raw", "--model", models / "short") as server:
        before = ask(server.ready(), user("hello"))
        with pytest.raises(openai.APIStatusError):
            ask(server, user("hello"), model=str(broken))
        assert f"{models / 'short'} is loaded again" in server.said()
        count = loads(server)
        assert ask(server, user("hello")).text == before.text
        assert loads(server) == count


def test_the_name_by_which_a_model_is_listed_is_the_one_that_is_loaded(models, tmp_path):
    with serving(tmp_path / "log", "--model", os.path.relpath(models / "short")) as server:
        ask(server, user(text(100)))
        (listed,) = [model.id for model in server.client.models.list()]
        assert listed == str(models / "short")
        assert ask(server, user(text(100)), model=listed).cached
        assert loads(server) == 1
