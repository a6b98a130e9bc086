"""What a chat's next turn begins with is computed while there is no request: jobs of `idle_work`, how clients send answers
back, a server's loop with real models, and `prefixcache serve`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.servers.keeping import Keeping
from prefixcache.servers.mlx_lm import next_turns as module
from prefixcache.servers.mlx_lm.idle_work import Check, IdleWork
from prefixcache.servers.mlx_lm.next_turns import LEAST, WAITING, NextTurns
from prefixcache.servers.told_answer import THOUGHTS, ToldAnswer
from prefixcache.servers.warm_prompts import WarmPrompt, tokens_of
from tests.models.families import greedy
from tests.servers.serving import Message, Server, ask, save_model, save_parrot, serving, text, user, wait_for
from tests.servers.test_admin import admin
from tests.servers.test_requests import Asked, generating

# -- jobs -------------------------------------------------------------------------------------------------------------


class Counting:
    """A job of some chunks, which notes how many are done."""

    def __init__(self, chunks: int, done: Callable[[], None] = lambda: None):
        self.chunks, self.wanted, self.done, self._told = chunks, True, 0, done

    def run(self, check: Check) -> None:
        while self.done < self.chunks:
            self.done += 1
            self._told()
            check()

    def fail(self, error: Exception) -> None:
        raise AssertionError from error


@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.booleans(), max_size=30))
def test_jobs_go_on_where_they_were_and_stop_between_two_chunks(chunks, waits):
    """Whenever requests come, each chunk is computed once, in order, and one chunk at most after a request has come."""
    asked, after = iter(waits), 0

    def request_waits() -> bool:
        nonlocal after
        after = 0
        return next(asked, False)

    def computed() -> None:
        nonlocal after
        after += 1
        assert after == 1

    work = IdleWork(request_waits)
    jobs = [Counting(number, computed) for number in chunks]
    for job in jobs:
        work.add(job)
    for _ in range(len(waits) + 1):
        work.step()
        done = [job.done for job in jobs]
        begun = [place for place, job in enumerate(jobs) if job.done]
        assert all(jobs[place].done == jobs[place].chunks for place in begun[:-1])
    assert done == chunks


def test_a_job_that_nobody_wants_ends_at_its_next_check_and_the_others_go_on():
    work = IdleWork(lambda: False)
    first, second, third = Counting(9), Counting(2), Counting(1)
    first._told = lambda: setattr(first, "wanted", first.done < 3)
    second.wanted = False
    for job in (first, second, third):
        work.add(job)
    work.step()
    assert [job.done for job in (first, second, third)] == [3, 0, 1]


def test_a_job_that_fails_hears_of_it_and_the_others_go_on(caplog):
    heard: list[Exception] = []
    failing = Counting(1, lambda: 1 // 0)
    failing.fail = heard.append  # type: ignore[method-assign]
    work, other = IdleWork(lambda: False), Counting(1)
    work.add(failing)
    work.add(other)
    work.step()
    assert (type(heard[0]), other.done) == (ZeroDivisionError, 1)
    assert "ZeroDivisionError" in caplog.text


def test_while_they_are_held_no_job_goes_on():
    work, job = IdleWork(lambda: False), Counting(2)
    work.add(job)
    with work.paused():
        with work.paused():
            work.step()
        work.step()
        assert job.done == 0
    work.step()
    assert job.done == 2


# -- answers that come back -------------------------------------------------------------------------------------------

CALLS = [{"id": "1", "type": "function", "function": {"name": "count", "arguments": "{}"}}]
PARTS = st.lists(st.tuples(st.text(max_size=3), st.sampled_from([None, [], CALLS]), st.sampled_from([None, "", "Hm."])))


def history(field: str | None) -> list[Message]:
    answer = {"role": "assistant", "content": "Yes."} | ({field: "Hm."} if field else {})
    return [*user("first"), answer, *user("second")]


@given(PARTS, st.sampled_from([None, *THOUGHTS]))
def test_an_answer_comes_back_as_it_was_told_with_thoughts_where_earlier_ones_have_them(parts, thoughts):
    told = ToldAnswer()
    for part in parts:
        told.add(*part)
    text, calls, thought = (
        [part[place] or type_() for part in parts] for place, type_ in ((0, str), (1, list), (2, str))
    )
    plain = {"role": "assistant", "content": "".join(text)}
    if any(calls):
        plain["tool_calls"] = [call for some in calls for call in some]
    (message,) = told.sent_back(history(thoughts))
    assert message == plain | ({thoughts: "".join(thought)} if thoughts and any(thought) else {})
    first = told.sent_back(user("first"))
    assert first == [plain] + ([{**plain, THOUGHTS[0]: "".join(thought)}] if any(thought) else [])


# -- the loop ---------------------------------------------------------------------------------------------------------

SAID = (  # answers stand in a history in other words than when they are made
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + ('Said: ' if m.role == 'assistant' else '') "
    "+ (m.content or '') + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
KINDS = ("llama", "qwen3_next", "llama-sliding")
ANY_KIND = pytest.mark.parametrize("chats", KINDS[:1], indirect=True)
ANSWER = 40  # tokens
KEPT = Keeping()


class AskedKept(Asked):
    def __init__(self, *args: Any, keeping: Keeping, **more: Any):
        self.keeping = keeping
        super().__init__(*args, **more)

    def run(self) -> None:
        self.request.keeping = self.keeping
        super().run()


class Chats:
    """Chats with one server's loop, and its next turns."""

    def __init__(self, generator: Any, cache: PrefixCache):
        self.generator, self.cache = generator, cache
        self.begin()

    def begin(self) -> None:
        """Begin with nothing stored, and nothing counted."""
        self.be_idle()
        with self.generator.idle.paused():
            assert self.generator.wait_for_stores(60)
            self.cache.clear()
        self.turns = NextTurns(self.generator)
        self.talks: dict[Any, list[Message]] = {}

    def be_idle(self) -> None:
        """Wait until nothing is left to do."""
        wait_for(lambda: self.generator.idle._first() is None, "idle work that has ended")

    def ask(
        self, name: str, question: str, *, keeping: Keeping = KEPT, cache_salt: str = "", idle: bool = True
    ) -> Asked:
        """Ask one more question in a chat. `idle`: what the next turn begins with may be computed."""
        talk = self.talks.setdefault((name, cache_salt), [])
        messages = [*talk, *user(question)]
        asked = AskedKept(self.generator, messages, salt=cache_salt, max_tokens=ANSWER, keeping=keeping)
        asked.answered()
        told = ToldAnswer()
        tokenizer = self.generator.model_provider.tokenizer
        told.add(tokenizer.decode([token for token in asked.tokens if token not in tokenizer.eos_token_ids]))
        self.talks[name, cache_salt] = [*messages, told.sent_back(talk)[0]]
        if idle:
            args = SimpleNamespace(model=asked._args.model, chat_template_kwargs=None)
            self.turns.add(asked.request, SimpleNamespace(told=told, prompt_arguments=args, request_id="test"))
        return asked

    def beginning(self, name: str, cache_salt: str = "") -> int:
        """How many tokens the next request in a chat begins with, whatever it says."""
        chat = WarmPrompt("test", tuple(self.talks[name, cache_salt]))
        return len(tokens_of(self.generator.model_provider.tokenizer, chat))

    def right(self, asked: Asked) -> list[int]:
        model = self.generator.model_provider.model
        prompt = list(asked.context.prompt)
        with self.generator.idle.paused():
            return greedy(model, make_prompt_cache(model), prompt, len(asked.tokens))


@pytest.fixture(scope="module", params=KINDS)
def chats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    folder = save_model(tmp_path_factory.mktemp("next") / "model", request.param, template=SAID)
    with PrefixCache(ram="200MB", codec="raw") as cache, generating(cache, "--model", folder) as generator:
        yield Chats(generator, cache)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["one", "other"]),
        st.sampled_from(["And?", "\nWhat then?", text(60, "more")]),
        st.sampled_from([Keeping(), Keeping(session="s"), Keeping(stored=False)]),
        st.sampled_from(["", "tenant"]),
        st.booleans(),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=5)
@given(steps=STEPS)
def test_a_turn_hits_what_it_begins_with_and_is_answered_the_same(chats, steps):
    """In whatever order chats of several tenants go on. What is not to be kept is not computed ahead."""
    chats.begin()
    ahead: dict[Any, int] = {}
    for name, question, keeping, salt, waits in steps:
        asked = chats.ask(name, question, keeping=keeping, cache_salt=salt)
        assert asked.cached >= ahead.pop((name, salt), 0) - LEAST
        if waits:
            chats.be_idle()
            if keeping.stored:
                ahead[name, salt] = chats.beginning(name, salt)
        tokens = chats.turns.tokens()
        assert 0 <= tokens["hit"] <= tokens["computed"]
        chats.cache.check_integrity()
    assert asked.tokens == chats.right(asked)


def test_what_was_computed_ahead_and_hit_is_counted(chats):
    chats.begin()
    first = chats.ask("one", text(400, "count"))
    chats.be_idle()
    computed = chats.turns.tokens()["computed"]
    assert computed >= chats.beginning("one") - len(first.context.prompt)
    assert chats.turns.tokens()["hit"] == 0
    beginning = chats.beginning("one")
    assert chats.ask("one", "And?", idle=False).cached == beginning
    assert chats.turns.tokens() == {"computed": computed, "hit": computed}


def test_nothing_is_computed_of_what_is_not_kept(chats):
    chats.begin()
    chats.ask("one", text(400, "unkept"), keeping=Keeping(stored=False))
    chats.ask("other", text(400, "kept"))
    chats.be_idle()
    known = chats.cache.known(prompt_of(chats, "one"))
    assert known < chats.beginning("one") / 2
    assert chats.cache.known(prompt_of(chats, "other")) == chats.beginning("other")


def prompt_of(chats: Chats, name: str) -> Any:
    """The tokens that the next turn of a chat begins with."""
    provider, prompts = chats.generator.model_provider, chats.generator.prompts
    tokens = tokens_of(provider.tokenizer, WarmPrompt("test", tuple(chats.talks[name, ""])))
    return chats.cache.prompt(tokens, model=prompts.name_of(provider.model_key))


def test_nothing_is_computed_of_a_session_that_has_ended(chats):
    chats.begin()
    with chats.generator.idle.paused():
        chats.ask("one", text(400, "ended"), keeping=Keeping(session="s"))
        assert chats.generator.wait_for_stores(60)
        assert chats.cache.end_session("s").images
    chats.be_idle()
    assert chats.turns.tokens() == {"computed": 0, "hit": 0}
    assert chats.cache.stats().images_in_ram == 0
    chats.ask("one", "And?", keeping=Keeping(session="s"))
    chats.be_idle()
    assert chats.turns.tokens()["computed"] > 0
    assert chats.cache.end_session("s").held == 0
    assert chats.cache.stats().images_in_ram == 0  # what was computed ahead was the session's, too


def test_a_request_that_comes_waits_for_one_chunk(chats, monkeypatch):
    """What was computed before is stored, and the rest follows."""
    chats.begin()
    go, waits, chunks = threading.Event(), threading.Event(), list[int]()
    compute = module.warm_sequences

    def warm_sequences(*args: Any, progress: Any, **options: Any) -> Any:
        def chunk(step: Any) -> None:
            if not go.is_set() and step.done > len(asked.context.prompt):
                waits.set()
                wait_for(chats.generator.request_waits, "a request that waits")
                go.set()
            chunks.append(step.done)
            progress(step)

        return compute(*args, progress=chunk, **options)

    monkeypatch.setattr(module, "warm_sequences", warm_sequences)
    monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(module, "LEAST", 1)
    with chats.generator.idle.paused():
        asked = chats.ask("one", text(400, "long"))
    assert waits.wait(60)
    chats.ask("other", "Hello.", idle=False)
    begun = len(chunks)
    chats.be_idle()
    assert chunks[begun - 1] < chats.beginning("one") == chunks[-1]
    assert chunks[begun] >= chunks[begun - 1]  # it went on from what was stored
    assert chats.turns.tokens()["computed"] == chunks[-1] - chunks[0]


@ANY_KIND
@pytest.mark.parametrize("plugged", [True, False, None])
def test_on_its_battery_a_machine_computes_nothing_ahead(chats, monkeypatch, plugged):
    chats.begin()
    battery = SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    chats.ask("one", text(200, f"battery {plugged}"))
    chats.be_idle()
    assert (chats.turns.tokens()["computed"] > 0) == (plugged is not False)


@ANY_KIND
def test_only_the_last_turn_of_a_chat_waits_and_few_of_all_chats(chats):
    chats.begin()
    with chats.generator.idle.paused():
        for question in ("First?", "Second?", "Third?"):
            chats.ask("one", question)
        assert [turn.wanted for turn in chats.turns._waiting] == [True]
        for number in range(WAITING + 2):
            chats.ask(f"chat {number}", f"Hello, {number}.")
        assert len(chats.turns._waiting) == WAITING == len(chats.generator.idle._jobs)


# -- served -----------------------------------------------------------------------------------------------------------

DROPPING = (  # thoughts before the last message of the user are dropped, as by Qwen3's template
    "{{ bos_token }}{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.reasoning_content and loop.index0 > last.user %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ (m.content or '') + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SAYS = ["<think>", "Hm. ", "So. ", "</think>", *(f"word {number} " for number in range(40))]
FLAGS = ("--warm-next-turn", "--canonical")


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def thinking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_parrot(tmp_path_factory.mktemp("thinking") / "model", SAYS, family=request.param, template=DROPPING)


ONE_FAMILY = pytest.mark.parametrize("thinking", ["llama"], indirect=True)


def computed(server: Server) -> float:
    return server.metrics()["prefixcache_next_turn_tokens_total{computed}"]


def next_turn(messages: list[Message], answer: str, question: str = "And what then?") -> list[Message]:
    return [*messages, {"role": "assistant", "content": answer}, *user(question)]


@pytest.fixture(scope="module")
def warming(thinking: Path) -> Iterator[Server]:
    with serving(thinking.parent / "warming.log", "--model", thinking, *FLAGS) as server:
        yield server


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"seed": 3}], ids=["at once", "streamed", "by itself"])
def test_a_next_turn_computes_its_own_tokens_only(warming, more):
    answer_and_go_on(warming, "".join(["first", *more]), **more)


@pytest.mark.parametrize(
    ("thinking", "flags"),
    [
        ("llama", ["--no-canonical"]),
        ("qwen3_next", ["--no-canonical"]),
        ("llama", ["--codec", "turboquant:4"]),
        ("qwen3_next", ["--codec", "turboquant:4"]),
    ],
    indirect=["thinking"],
)
def test_a_next_turn_does_so_with_other_flags(thinking, tmp_path, flags):
    with serving(tmp_path / "log", "--model", thinking, *FLAGS, *flags) as server:
        answer_and_go_on(server, "first")


def answer_and_go_on(server: Server, about: str, **more: Any) -> None:
    """AssertionError unless all but its own tokens of a chat's second turn was computed ahead."""
    before = server.metrics()
    chat = user(text(500, about))
    first = ask(server, chat, max_tokens=80, **more)
    assert "Hm." not in first.text
    wait_until_idle(server)
    chat = next_turn(chat, first.text)
    second = ask(server, chat, max_tokens=1, **more)
    assert second.computed < 20
    after, name = server.metrics(), "prefixcache_next_turn_tokens_total"
    hit, ahead = (after[name + part] - before[name + part] for part in ("{hit}", "{computed}"))
    assert hit == ahead > 32
    assert ask(server, chat, max_tokens=1, cache_salt=about).cached == 0


def test_other_apis_next_turns_do_so_too(warming):
    def message(messages: list[Message]) -> Any:
        body = {"model": "default_model", "max_tokens": 80, "messages": messages}
        return requests.post(f"{warming.url}/v1/messages", json=body, timeout=60).json()

    chat = user(text(500, "message"))
    first = message(chat)
    assert {block["type"] for block in first["content"]} == {"thinking", "text"}
    wait_until_idle(warming)
    second = message([*chat, {"role": "assistant", "content": first["content"]}, *user("And?")])
    assert second["usage"]["cache_creation_input_tokens"] + second["usage"]["input_tokens"] < 20


@ONE_FAMILY
def test_nothing_is_computed_where_all_is_stored_or_nothing_is_to_be(thinking, tmp_path):
    """Chats are looked at in the order of their answers: the last one shows that the others had their time."""
    keeps = save_parrot(tmp_path / "keeps", SAYS[4:], template=DROPPING)
    with serving(tmp_path / "log", "--model", keeps, *FLAGS) as server:
        ask(server, user(text(500, "stored")), max_tokens=80)
        wait_until_idle(server)
        assert computed(server) == 0
    with serving(tmp_path / "off.log", "--model", thinking, "--canonical") as server:
        ask(server, user(text(500, "off")), max_tokens=80)
        wait_until_idle(server)
        assert computed(server) == 0
    with serving(tmp_path / "exact.log", "--model", thinking, *FLAGS, "--exact-prefill") as server:
        ask(server, user(text(500, "exact")), max_tokens=80)
        wait_until_idle(server)
        assert computed(server) == 0


def wait_until_idle(server: Server) -> None:
    """Wait until a job that was queued behind the others has ended."""
    assert '"unkept"' in admin(server, "POST", "prompts", {"prompts": [{"prompt": "all that came before"}]}).text


def test_of_sessions_that_end_nothing_is_left(warming):
    wait_until_idle(warming)
    before = warming.metrics()
    for number in range(3):
        ask(warming, user(text(300, f"ended {number}")), max_tokens=80, cache={"session": "s"})
        if number:
            wait_until_idle(warming)
        assert admin(warming, "DELETE", "sessions", {"session": "s"}).json()["held"] == 0
        wait_until_idle(warming)
        assert warming.metrics()["prefixcache_images{ram}"] == before["prefixcache_images{ram}"]
    assert computed(warming) > before["prefixcache_next_turn_tokens_total{computed}"]


def test_chats_by_turns_are_answered_the_same_whatever_was_begun_between_them(warming):
    chats = [user(text(200, f"chat {number}")) for number in range(4)]
    for _ in range(3):
        for place, chat in enumerate(chats):
            answer = ask(warming, chat, max_tokens=80)
            assert answer.text.startswith("word 0 word 1 ")
            chats[place] = next_turn(chat, answer.text)
            time.sleep(0.02 * place)
