"""`prefixcache serve --salt-from authorization`: each API key is a tenant. And `--require-salt`: who is none is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from hypothesis import example, given
from hypothesis import strategies as st

from prefixcache.servers.salts import RequestRefused, Salts, salt_of, token_of
from tests.servers.serving import (
    SECONDS,
    Message,
    Server,
    answer_to,
    ask,
    at_once,
    chat,
    complete,
    serve,
    serving,
    starting,
    text,
    user,
)

FLAGS = BY_KEY = ("--salt-from", "authorization")  # of `served`
SHARED = 30  # tokens with which all prompts begin, by the template; within one tenant they may be hit


@pytest.fixture(scope="module")
def strict(model: Path) -> Iterator[Server]:
    with serving(model.parent / "strict.log", "--model", model, *BY_KEY, "--require-salt") as server:
        yield server


def post(server: Server, prompt: list[Message], headers: dict[str, str | bytes], **more: object) -> requests.Response:
    body = {"messages": prompt, "max_tokens": 2, **more}
    return requests.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS)


def cached(response: requests.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


# -- each key is a tenant ---------------------------------------------------------------------------------------------


def test_two_api_keys_share_nothing_and_one_hits_what_it_stored(served):
    prompt = user(text(300, "key"))
    for key in ("sk-one", "sk-two"):
        tenant = served.as_tenant(key)
        assert ask(tenant, prompt).cached == 0
        assert ask(tenant, prompt, stream=True).computed == ask(tenant, prompt).computed == 1
        assert ask(tenant, prompt, seed=1).computed == 1  # served by itself, not in a batch
        assert complete(tenant, text(300, "key")).cached < SHARED
        assert complete(tenant, text(300, "key")).computed == 1


def test_a_key_hits_the_turns_of_its_chat_and_not_those_of_another(served):
    asked = [text(30, f"turn {turn}") for turn in range(3)]
    for key in ("sk-chat", "sk-other"):
        first, second, third = chat(served.as_tenant(key), text(300, "chat"), asked)
        assert first.cached < SHARED
        assert second.cached >= first.prompt - 1
        assert third.cached >= second.prompt - 1


def test_keys_that_come_at_once_with_one_prompt_compute_it_each(served):
    prompt = user(text(300, "at once"))
    tenants = [served.as_tenant(f"sk-at-once-{i % 3}") for i in range(6)]
    answers = at_once([lambda tenant=tenant: ask(tenant, prompt) for tenant in tenants])
    assert sum(answer.cached < SHARED for answer in answers) == 3


def test_a_key_hits_after_a_restart_and_in_another_server_what_it_stored(model, tmp_path):
    prompt, ssd = user(text(300, "restart")), tmp_path / "ssd"
    flags = ["--model", model, "--ssd-dir", ssd, *BY_KEY]
    with serving(tmp_path / "first.log", *flags) as first:
        assert ask(first.as_tenant("sk-one"), prompt).cached == 0
    with serving(tmp_path / "second.log", *flags) as second:
        assert ask(second.as_tenant("sk-two"), prompt).cached == 0
        assert ask(second.as_tenant("sk-one"), prompt).computed == 1
    with serving(tmp_path / "third.log", "--model", model, "--ssd-dir", ssd) as without:  # keys mean nothing to it
        assert ask(without.as_tenant("sk-one"), prompt).cached == 0
        assert ask(without.as_tenant("sk-other"), prompt).computed == 1


def test_a_tenant_divides_its_space_with_cache_salt_and_reaches_no_other_with_it(served):
    prompt = user(text(300, "divided"))
    spaces = [(key, salt) for key in ("sk-wide", "sk-far") for salt in ("", "a", "b")]
    for key, salt in spaces:
        assert ask(served.as_tenant(key), prompt, cache_salt=salt).cached == 0
    for key, salt in spaces:
        assert ask(served.as_tenant(key), prompt, cache_salt=salt).computed == 1


def test_a_request_without_a_key_has_what_its_cache_salt_has_or_what_is_without_one(served):
    prompt = user(text(300, "none"))
    assert cached(post(served, prompt, {"Authorization": "Bearer sk-some"})) == 0
    for salt in ("", "a"):
        assert cached(post(served, prompt, {}, cache_salt=salt)) < SHARED
        assert cached(post(served, prompt, {}, cache_salt=salt)) > 290
    for empty in ("", "Bearer", "Bearer ", "bearer\t "):
        assert cached(post(served, prompt, {"Authorization": empty})) > 290


def test_a_key_is_the_same_however_its_header_is_written(served):
    prompt = user(text(300, "written"))
    assert cached(post(served, prompt, {"Authorization": "Bearer sk-written"})) < SHARED
    for header in ("bearer sk-written", "BEARER   sk-written", "Bearer\tsk-written ", "sk-written"):
        assert cached(post(served, prompt, {"Authorization": header})) > 290, header
    assert cached(post(served, prompt, {"Authorization": "Basic sk-written"})) == 0
    assert cached(post(served, prompt, {"Authorization": "basic  sk-written"})) > 290


def test_keys_that_are_no_ascii_and_long_ones_are_keys(served):
    prompt = user(text(300, "odd"))
    keys = ["ключ", "clé", "clé\u00a0", "\x85é", "\x85\u00a0é", "k" * 60_000, "k" * 60_001]
    for key in keys:
        assert cached(post(served, prompt, {"Authorization": f"Bearer {key}".encode()})) == 0, key[:10]
    for key in keys:
        assert cached(post(served, prompt, {"Authorization": f"Bearer {key}".encode()})) > 290, key[:10]
    assert post(served, prompt, {"Authorization": "Bearer " + "k" * 100_000}).status_code == 431
    assert ask(served, user("still there?")).prompt > 0


def test_two_authorization_headers_are_refused(served):
    body = json.dumps({"messages": user("hello")})
    head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n"
    given = answer_to(served, f"{head}Authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n{body}".encode())
    assert given.startswith(b"HTTP/1.0 400 ")
    assert b"2 Authorization headers: whose request is it? Send one" in given


# -- a salt is required -----------------------------------------------------------------------------------------------


def test_a_request_without_a_key_is_refused_where_a_salt_is_required(strict):
    nobody: dict[str, Any] = {"model": "default_model", "extra_headers": {"Authorization": openai.Omit()}}
    for stream in (False, True):
        with pytest.raises(
            openai.AuthenticationError, match=r"no API key.* send the header `Authorization: Bearer KEY`"
        ):
            strict.client.chat.completions.create(messages=user("hello"), stream=stream, **nobody)
    with pytest.raises(openai.AuthenticationError):
        strict.client.completions.create(prompt="hello", **nobody)
    assert post(strict, user("hello"), {"Authorization": "Bearer "}).status_code == 401
    assert post(strict, user("hello"), {}).headers["WWW-Authenticate"] == "Bearer"
    assert post(strict, user("hello"), {}, cache_salt="").status_code == 401
    assert post(strict, user("hello"), {}, cache_salt="mine").status_code == 200
    assert ask(strict.as_tenant("sk-one"), user("hello")).generated
    assert requests.get(f"{strict.url}/health", timeout=SECONDS).status_code == 200
    assert [*strict.client.models.list()]


def test_a_request_without_cache_salt_is_refused_where_a_salt_is_required(model, tmp_path):
    with serving(tmp_path / "log", "--model", model, "--require-salt") as server:
        for none in ({}, {"cache_salt": ""}, {"cache_salt": None}):
            with pytest.raises(openai.BadRequestError, match=r'no salt.* send "cache_salt": "..." in the body'):
                ask(server, user("hello"), **none)
        assert ask(server, user("hello"), cache_salt="mine").generated


def test_a_refused_request_stores_nothing_and_is_no_trouble(strict):
    before = strict.metrics()
    assert post(strict, user(text(300, "refused")), {}).status_code == 401
    after = strict.metrics()
    for name in ("prefixcache_fetches_total", "prefixcache_stores_total"):
        assert after[name] == before[name]
    assert strict.troubles() == []


# -- prompts that are warm --------------------------------------------------------------------------------------------


def test_warm_prompts_are_for_requests_without_a_key_and_a_warning_says_so(model, tmp_path):
    system = {"role": "system", "content": text(280, "warm")}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, [{"messages": [system]}, {"messages": [system], "cache_salt": "a"}])))
    prompt = [system, *user("Begin.")]
    warm = ["--model", model, "--ram", "200MB", "--codec", "raw", "--warm", prompts, *BY_KEY]
    with starting(serve, tmp_path / "log", *warm) as server:
        server.ready()
        assert "WARNING - --warm with --salt-from: requests with an API key hit none of these prompts" in server.said()
        assert cached(post(server, prompt, {})) > 250
        assert cached(post(server, prompt, {}, cache_salt="a")) > 250
        for key in ("sk-one", "a"):
            assert ask(server.as_tenant(key), prompt).cached == 0
    with starting(serve, tmp_path / "log", *warm, "--require-salt") as server:
        server.ready()
        assert (
            "--warm with --require-salt: 1 of 2 prompts are left out, since no request could hit them" in server.said()
        )
        assert "warm-up: 1 prompts of " in server.said()
        assert cached(post(server, prompt, {}, cache_salt="a")) > 250


# -- salts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer a", "a"),
        ("bearer a", "a"),
        ("BEARER \t a \r\n", "a"),
        ("  Bearer a b ", "a b"),
        ("a", "a"),
        ("", None),
        (" \t", None),
        ("Bearer", None),
        ("Bearer  ", None),
        ("bearer\t", None),
        ("Basic dTpw", " basic dTpw"),
        ("BASIC  dTpw", " basic dTpw"),
        ("Bearer basic dTpw", "basic dTpw"),
        ("Bearer a\u00a0", "a\u00a0"),
        ("Bearer a\x85", "a\x85"),
        ("Bearera", "Bearera"),
        ("Bearer Bearer", "Bearer"),
    ],
)
def test_what_a_header_names_its_sender_by(header, token):
    assert token_of(header) == token


SPACES = st.text(" \t\r\n", max_size=2)
WORDS = st.sampled_from(["bearer", "Bearer", "BEARER", "basic", "Basic", "digest", "a", "A", "\xa0", "\x85"])
CREDENTIALS = st.lists(WORDS, max_size=3)


@given(
    st.tuples(st.sampled_from(["", "Bearer", "bearer", "Basic", "BASIC", "Digest", "b"]), CREDENTIALS),
    st.tuples(st.sampled_from(["", "Bearer", "bearer", "Basic", "BASIC", "Digest", "b"]), CREDENTIALS),
    SPACES,
)
@example(("Bearer", ["basic", "a"]), ("Basic", ["a"]), "")
def test_no_two_senders_have_one_name(one, other, space):
    """But those whose headers differ in the scheme's case, in spaces around it, or in a missing `Bearer`."""
    tokens = [token_of(f"{space}{scheme} {space}{' '.join(words)}{space}") for scheme, words in (one, other)]
    assert (tokens[0] == tokens[1]) == (sender(*one) == sender(*other))


def sender(scheme: str, words: list[str]) -> tuple[str, str]:
    """The scheme and the credentials that a header means; of none at all two empty texts."""
    if not scheme:
        scheme, words = (words[0], words[1:]) if words else ("", [])
    if not words:
        return ("", "") if scheme.lower() in ("", "bearer") else ("bearer", scheme)
    return scheme.lower(), " ".join(words)


def test_salts_are_what_they_were_in_every_release():
    """Another hash makes every prompt that was stored with an API key a miss."""
    assert salt_of(None, "") == b""
    assert salt_of(None, "ë") == "ë".encode()
    assert salt_of("sk-one", "").hex() == "ffa2d8f0f22e5c85e9a03e66b0e2be3dc86be29944b555c40832b718823bbf3f6a"
    assert salt_of("sk-one", "a", b"key").hex() == "ff199e3184aa2868d3cfe26328170cf9373216cda2324d9a67f8f23ca80cd3bdcc"


def test_no_two_senders_have_one_salt():
    given = [
        (token, salt, key) for token in ("a", "ab", "", "é") for salt in ("", "a", "b", "ab") for key in (b"", b"k")
    ]
    salts = {salt_of(token, salt, key) for token, salt, key in given}
    assert len(salts) == len(given)
    for salt in salts:  # so no cache_salt is one
        with pytest.raises(UnicodeDecodeError):
            salt.decode()


def test_a_key_of_the_hash_that_is_too_long_is_an_error():
    assert len(salt_of("a", "", b"k" * 64)) == 33
    with pytest.raises(ValueError, match="64"):
        salt_of("a", "", b"k" * 65)


def test_what_says_whose_a_request_is_names_no_key():
    salts = Salts(from_authorization=True, required=True, key=b"sesame")
    assert "sesame" not in repr(salts)
    with pytest.raises(RequestRefused) as refused:
        salts.of(["Bearer sk-one", "Bearer sk-two"], "")
    assert refused.value.status == 400
    assert "sk-" not in str(refused.value)
