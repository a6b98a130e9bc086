"""Chat templates that requests bring along: refused, or rendered in a process with limits. And where a model's own is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from prefixcache import PrefixCache
from prefixcache.servers.mlx_lm import client_template
from prefixcache.servers.mlx_lm.client_template import render
from prefixcache.servers.request_schema import RequestRefused
from tests.servers.serving import TINY, Message, Server, ask, post, save_model, serving, user
from tests.servers.test_requests import Asked, generating

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}hi"
MESSAGES: list[Message] = [{"role": "user", "content": "hé"}]
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ more | default('') }}"


def refused(template: str, limit: int = 10_000) -> str:
    with pytest.raises(RequestRefused) as error:
        render(template, {"messages": MESSAGES}, limit)
    return str(error.value)


def test_a_template_sees_its_variables_and_what_templates_are_offered():
    assert render(OWN, {"messages": MESSAGES, "more": "!"}, 100) == "<user>hé!"
    assert render(
        "{{ messages | tojson }}{% for i in [1, 2] %}{% break %}{% endfor %}", {"messages": MESSAGES}, 100
    ) == (json.dumps(MESSAGES, ensure_ascii=False))
    assert render("{{ strftime_now('%Y') | length }}", {}, 100) == "4"


MODELS_OWN = json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"]
TRAINED = (
    "{% set n = 0 %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{% set n = 1 %}{{ loop.index }}{{ m.content }}\n{% endgeneration %}{% endif %}{% endfor %}{{ n }}"
)


@pytest.mark.parametrize("template", [MODELS_OWN, TRAINED])
def test_it_renders_as_transformers_does(template):
    tokenizer = load_tokenizer(str(TINY))
    chat = [{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "hi"}]
    own = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=True)
    variables = {"messages": chat, "add_generation_prompt": True, **tokenizer.special_tokens_map}
    assert render(template, variables, 10_000) == own


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if", "TemplateSyntaxError"),
        ("{{ raise_exception('no chats') }}", "no chats"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set x = 'a' * 10**9 %}", "TemplateError"),
        ("{% set x = 'a' * 1000000000 %}", "a repetition is too long"),
        ("{{ [1] * 1000000000 }}", "a repetition is too long"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaa{% endfor %}{% endfor %}",
            "more than 10000 bytes",
        ),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", ""),
        ("{{ 'a' | center(10000000000) }}", ""),
        ("{{ '%10000000000d' % 1 }}", ""),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_what_a_template_may_not_do_or_take_ends_it_alone(template, told):
    error = refused(template)
    assert error.startswith("chat_template: ")
    assert told in error
    assert len(error) < 400


def test_a_template_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(client_template, "SECONDS", 1)
    assert refused(LOOPS) == "chat_template: not rendered within 1 s; send one that ends"


# -- at a server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def allowing(model: Path) -> Iterator[Server]:
    with serving(model.parent / "allowing.log", "--model", model, "--allow-chat-template") as server:
        yield server


@pytest.mark.parametrize("more", [{"chat_template": OWN}, {"chat_template_kwargs": {"chat_template": OWN}}], ids=str)
def test_a_template_is_refused_unless_it_is_allowed(served, allowing, more):
    given = post(served, **more)
    assert given.status_code == 400
    assert "--allow-chat-template" in given.json()["error"]["message"]
    given = post(allowing, **more)
    own = post(allowing)
    assert given.status_code == own.status_code == 200
    assert given.json()["usage"]["prompt_tokens"] != own.json()["usage"]["prompt_tokens"]
    longer = post(allowing, chat_template=OWN, chat_template_kwargs={"more": "and so on, and so on"})
    assert longer.json()["usage"]["prompt_tokens"] > given.json()["usage"]["prompt_tokens"]


def test_a_template_that_does_not_end_stops_nobody_else(allowing):
    slow = threading.Thread(target=post, args=(allowing,), kwargs={"chat_template": LOOPS})
    slow.start()
    time.sleep(0.5)
    assert [ask(allowing, user(f"hello {i}")).finish for i in range(5)]
    assert slow.is_alive()
    slow.join()
    assert post(allowing, chat_template=LOOPS).status_code == 400


def test_a_template_for_a_model_that_is_not_loaded_is_refused(allowing, model, tmp_path):
    other = save_model(tmp_path / "other", seed=2)
    given = post(allowing, model=str(other), chat_template=OWN)
    assert given.status_code == 400
    assert "its model is not loaded" in given.json()["error"]["message"]


@pytest.mark.parametrize("seed", [None, 1])  # in a batch, or one by one
def test_the_models_own_template_is_rendered_on_the_threads_of_clients(model, monkeypatch, seed):
    rendered = []
    with PrefixCache(ram="50MB", codec="raw") as cache, generating(cache, "--model", model) as generator:
        tokenizer = generator.model_provider.tokenizer
        kind, render_own = type(tokenizer), type(tokenizer).apply_chat_template

        def apply(self: Any, *args: Any, **options: Any) -> Any:
            rendered.append(threading.current_thread())
            return render_own(self, *args, **options)

        monkeypatch.setattr(kind, "apply_chat_template", apply)
        asked = [Asked(generator, user(f"hello {i}"), seed=seed) for i in range(3)]
        assert all(one.answered().tokens for one in asked)
        assert set(rendered) == set(asked)
