"""`prefixcache serve` as a process: restarts, weights that change, tenants, prompts that arrive together, clients that go,
metrics, and the end. What it answers is in test_serve_answers, what it refuses in tests/cli/test_serve_command.
"""

from __future__ import annotations

import http.client
import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from prefixcache import PrefixCache
from prefixcache.servers.mlx_lm.lifetime import url_of
from prefixcache.servers.mlx_lm.model_list import downloaded
from tests.models.families import MLX_LM_0_31
from tests.servers.serving import (
    SECONDS,
    Message,
    Server,
    ask,
    at_once,
    chat,
    complete,
    connected,
    post,
    save_adapter,
    save_model,
    serve,
    serving,
    serving_plainly,
    starting,
    text,
    user,
    wait_for,
)

LIMITS = ["--ram", "200MB", "--codec", "raw"]
FAMILIES = ("llama", "gemma3_text", "qwen3_next")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_model(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def plain(models: Path) -> Iterator[Server]:
    """Answers as they must be, of any model that a request names."""
    with serving_plainly(models / "plain.log", "--model", models / "llama") as server:
        yield server


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[Server]:
    """One server for all that needs no end of its own. RAM only."""
    with serving(models / "served.log", "--model", models / "llama") as server:
        yield server


# -- restarts and weights ---------------------------------------------------------------------------------------------


def test_what_one_server_stored_the_next_hits_but_not_for_new_weights(models, plain, tmp_path):
    """Three models and one whose weights change, all in one directory."""
    changed, old = tmp_path / "changed", tmp_path / "old"
    save_model(changed)
    shutil.copytree(changed, old)
    flags = ["--model", changed, "--ssd-dir", tmp_path / "ssd"]
    names = {family: {"model": str(models / family)} for family in FAMILIES}
    prompt = user(text(300, "restart"))
    with serving(tmp_path / "first.log", *flags) as first:
        save_model(changed, seed=3)  # it has the old ones in memory
        before = {"old": ask(first, prompt)} | {family: ask(first, prompt, **name) for family, name in names.items()}
        assert not any(answer.cached for answer in before.values())
        assert first.end(signal.SIGINT) == 0
    assert before["old"] == ask(plain, prompt, model=str(old))
    with serving(tmp_path / "second.log", *flags) as second:
        after = ask(second, prompt)
        assert after == ask(plain, prompt, model=str(changed))
        assert after.text != before["old"].text
        for family, name in names.items():
            again = ask(second, prompt, **name)
            assert again == before[family]._replace(cached=again.prompt - 1)
        assert ask(second, prompt, model=str(changed)).computed == 1


def test_the_adapter_and_the_draft_model_of_the_command_line_are_used_and_hit(models, plain, tmp_path):
    llama, system = models / "llama", text(280)
    adapter = save_adapter(tmp_path / "adapter", llama)
    asked = [text(20, f"flag {turn}") for turn in range(3)]
    with serving(tmp_path / "log", "--model", llama, "--adapter-path", adapter, "--draft-model", llama) as server:
        answers = chat(server, system, asked)
        for name in (str(llama), f"{llama.parent}/../{llama.parent.name}/llama/"):
            named = chat(server, system, asked, model=name)
            assert [answer.text for answer in named] == [answer.text for answer in answers]
            assert named[0].computed == 1  # the same model, with its adapter: it isn't loaded again without
    names = {"model": str(llama), "draft_model": str(llama)}
    if not MLX_LM_0_31:  # its server forgets the adapter of the command line
        names["adapters"] = str(adapter)
    assert [answer.text for answer in answers] == [answer.text for answer in chat(plain, system, asked, **names)]
    assert all(answer.cached >= before.prompt - 1 for before, answer in pairwise(answers))


def test_prompts_are_warm_before_the_first_request(models, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    system = {"role": "system", "content": text(280, "warm")}
    lines = [{"messages": [system]}, {"messages": [system], "cache_salt": "tenant"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    with serving(tmp_path / "log", "--model", models / "qwen3_next", "--warm", prompts) as server:
        for salt in ({}, {"cache_salt": "tenant"}):
            answer = ask(server, [system, *user("Begin.")], **salt)
            assert 0 < answer.computed < 30
        assert ask(server, [system, *user("Begin.")], cache_salt="other").cached == 0


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_tenants_never_meet(served):
    prompt = user(text(300, "secret"))
    for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}, {"cache_salt": "ë"}):
        assert ask(served, prompt, **salt).cached < 30  # what all prompts of a test begin with
        assert ask(served, prompt, **salt, stream=True).computed == 1
        assert ask(served, prompt, **salt, seed=1).computed == 1  # served by itself, not in a batch
    assert ask(served, prompt, cache_salt=None).computed == ask(served, prompt, cache_salt="").computed == 1
    assert complete(served, text(300, "secret"), cache_salt="one").cached < 30


def test_tenants_at_once_with_one_prompt_compute_it_each(served):
    prompt = user(text(300, "tenants"))
    asked = [{"cache_salt": f"tenant {i % 3}"} for i in range(6)]
    answers = at_once([lambda salt=salt: ask(served, prompt, **salt) for salt in asked])
    assert sum(answer.cached == 0 for answer in answers) == 3
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("salt", [7, ["a"], {"a": 1}, True, "x" * 1025, "\ud800"])
def test_a_bad_salt_is_refused(served, salt):
    with pytest.raises(openai.BadRequestError, match="cache_salt must be a string of at most 1024 Unicode characters"):
        ask_raw(served, {"messages": user("hello"), "cache_salt": salt})


def ask_raw(server: Server, body: dict[str, Any]) -> requests.Response:
    """A body as it is, half surrogates and all."""
    given = requests.post(f"{server.url}/v1/chat/completions", data=json.dumps(body), timeout=SECONDS)
    if given.status_code == 400:
        raise openai.BadRequestError(given.json()["error"]["message"], response=given, body=None)  # type: ignore[arg-type]
    return given


@pytest.mark.parametrize(
    "bad",
    [
        {"stop": 5},
        {"stop": [5]},
        {"stop": [""]},
        {"seed": -1},
        {"seed": 2**70},
        {"stream": True, "stream_options": 5},
        {"temperature": 1, "top_k": 10**9},
        {"logit_bias": {"999999": 1}},
        {"logit_bias": {"-1": 1}},
    ],
    ids=str,
)
def test_what_mlx_lm_would_not_survive_is_refused_and_the_server_goes_on(served, bad):
    given = post(served, **bad)
    assert given.status_code in (400, 404)
    assert [*bad][-1] in given.text
    assert ask(served, user("still there?")).prompt > 0


@pytest.mark.parametrize(
    ("body", "headers"),
    [(b"\xff\xfe", {}), (b"[" * 50_000, {}), (b"{}", {"Content-Length": "-5"}), (b"{}", {"Content-Length": "9" * 14})],
    ids=["not UTF-8", "nested", "negative", "too long"],
)
def test_a_body_that_cant_be_read_is_refused(served, body, headers):
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=SECONDS)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Length": str(len(body)), **headers})
    answer = connection.getresponse()
    assert answer.status in (400, 413)
    assert "error" in json.loads(answer.read())


# -- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_ten_requests_with_one_new_prompt_compute_it_once(served, models, family):
    model = {"model": str(models / family)}
    ask(served, user("load it"), **model)
    prompt = user(text(600, f"same {family}"))
    answers = at_once([lambda i=i: ask(served, prompt, stream=bool(i % 2), **model) for i in range(10)])
    assert sum(answer.computed for answer in answers) <= answers[0].prompt + 9
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_ten_users_on_one_new_system_prompt_compute_it_once(served, models, family):
    model = {"model": str(models / family)}
    ask(served, user("load it"), **model)
    system = {"role": "system", "content": text(600, f"system {family}")}
    prompts = [[system, *user(text(20, f"user {i}"))] for i in range(10)]
    answers = at_once([lambda prompt=prompt: ask(served, prompt, **model) for prompt in prompts])
    own = 60 + 255  # tokens of a user, the template's, and of the block that the system prompt ends in
    assert sum(answer.computed for answer in answers) <= answers[0].prompt + 9 * own
    assert max(answer.prompt for answer in answers) > 500


# -- clients that go --------------------------------------------------------------------------------------------------


def test_clients_that_go_leave_what_was_computed_and_do_no_harm(served, plain):
    rng = random.Random(5)
    prompts = [user(text(100 + 20 * i, f"gone {i}")) for i in range(12)]

    def go(prompt: list[Message], after: int) -> int:
        create = served.client.chat.completions.create
        with create(model="default_model", messages=prompt, max_tokens=400, temperature=0, stream=True) as stream:
            return sum(1 for _ in zip(range(after), stream, strict=False))

    stores = served.metrics()["prefixcache_stores_total"]
    chunks = at_once([lambda p=prompt: go(p, rng.randrange(1, 30)) for prompt in prompts])
    assert min(chunks) >= 1
    # A chunk, the tail and the user's segment of each: the answers were not finished.
    assert served.metrics()["prefixcache_stores_total"] - stores <= 3 * len(prompts)
    for _ in range(6):
        go_silently(served, {"messages": user(text(200, "silent")), "stream": bool(rng.random() < 0.5)})
    answers = [ask(served, prompt) for prompt in prompts]
    assert [answer.computed for answer in answers] == [1] * len(prompts)
    assert answers[:3] == [answer._replace(cached=answer.prompt - 1) for answer in (ask(plain, p) for p in prompts[:3])]
    assert served.troubles() == []


def go_silently(server: Server, body: dict[str, Any]) -> None:
    """Ask, and be gone before there is an answer."""
    data = json.dumps({"max_tokens": 20, **body}).encode()
    with connected(server) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_agree_with_what_was_asked(served):
    prompts = [user(text(200, "measured")), user(text(200, "measured")), user(text(100, "counted"))]
    before = served.metrics()
    answers = [ask(served, prompt) for prompt in prompts]
    after = served.metrics()

    def grown(name: str) -> float:
        return after[f"prefixcache_{name}"] - before[f"prefixcache_{name}"]

    assert grown("fetches_total") == 3
    assert grown("fetch_tokens_total{hit}") == sum(answer.cached for answer in answers)
    assert grown("fetch_tokens_total{miss}") == sum(answer.computed for answer in answers)
    assert grown("stores_total") >= 3
    new = grown("store_tokens_total{new}")
    assert sum(answer.computed for answer in answers) - 6 <= new <= sum(a.computed + a.generated for a in answers)
    held = sum(value for name, value in after.items() if name.startswith("prefixcache_ram_bytes"))
    assert 0 < held <= after["prefixcache_ram_peak_bytes"] <= after["prefixcache_ram_limit_bytes"] == 200e6


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:8080"), ("::1", "http://[::1]:8080")])
def test_the_url_that_a_server_tells_is_one(host, url):
    assert url_of(host, 8080) == url
    assert requests.Request("GET", url).prepare().url == f"{url}/"


def test_health_models_and_unknown_paths_are_mlx_lms(served, models):
    get = lambda path: requests.get(f"{served.url}{path}", timeout=SECONDS)  # noqa: E731
    assert (get("/health").status_code, get("/health").json()) == (200, {"status": "ok"})
    assert [model.id for model in served.client.models.list()] == [str(models / "llama")]  # no Hugging Face cache
    assert get("/v1/models").headers["Content-Type"] == "application/json"
    assert get("/metrics?x=1").headers["Content-Type"].startswith("text/plain")
    assert get("/nowhere").status_code == get("/metricsx").status_code == 404


def test_models_that_were_downloaded_are_listed_and_what_mlx_lm_cant_load_is_not(tmp_path):
    config = ("config.json", "tokenizer_config.json", "model.safetensors.index.json")
    for name, files in (("whole", config), ("other", config[:1])):
        snapshot = tmp_path / f"models--org--{name}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
        for file in files:
            (snapshot / file).write_text("{}")
    assert downloaded(tmp_path) == ["org/whole"]
    assert downloaded(tmp_path / "nowhere") == downloaded(tmp_path / "models--org--whole" / "refs" / "main") == []


def test_a_request_that_cant_be_served_harms_no_other(served):
    wrongs = [{"model": "/no/such/model"}, {"messages": user([{"type": "sound"}])}]
    if not MLX_LM_0_31:  # it closes the connection
        wrongs += [{"max_tokens": -1}]
    for wrong in wrongs:
        with pytest.raises(openai.APIStatusError):
            ask(served, **{"messages": user("hello"), **wrong})
    assert ask(served, user("hello")).generated


# -- the end ----------------------------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """A client whose answer takes long: how many chunks of it came, whether the last of them told an end, what it met."""

    def __init__(
        self, server: Server, prompt: str = "long", max_tokens: int = 100_000, *, stream: bool = True, **more: Any
    ):
        super().__init__(daemon=True)
        self.chunks, self.finish, self.error = 0, "", ""
        self._create = server.client.chat.completions.create
        self._asked = {"messages": user(text(280, prompt)), "max_tokens": max_tokens, "stream": stream, **more}
        self.start()

    def under_way(self) -> Reader:
        wait_for(lambda: self.chunks > 2, "stream")
        return self

    def run(self) -> None:
        try:
            given = self._create(model="default_model", temperature=0, **self._asked)
            for chunk in given if self._asked["stream"] else [given]:
                self.chunks += 1
                self.finish = chunk.choices[0].finish_reason or self.finish
        except Exception as error:
            self.error = type(error).__name__


def sequences(ssd: Path) -> int:
    """What a directory holds; it opens, and all of it is sound."""
    with PrefixCache(ram="200MB", codec="raw", ssd_dir=ssd) as cache:
        cache.check_integrity()
        return cache.stats().sequences


@pytest.fixture
def ending(models: Path, tmp_path: Path) -> Any:
    def start(*flags: Any) -> Any:
        return starting(serve, tmp_path / "log", *LIMITS, "--ssd-dir", tmp_path / "ssd", *flags)

    return start


def test_streams_under_way_end_as_they_should(models, ending, tmp_path):
    with ending("--model", models / "llama", "--grace", 50) as server:
        readers = [Reader(server.ready(), f"long {i}", 40 + 5 * i) for i in range(5)]
        for reader in readers:
            reader.under_way()
        assert server.end() == 0
        for reader in readers:
            reader.join(SECONDS)
            assert (reader.finish, reader.error) == ("length", "")
        assert server.troubles() == []
    assert sequences(tmp_path / "ssd") == 5


def test_a_stream_that_takes_longer_than_the_grace_is_cut(models, ending, tmp_path):
    with ending("--model", models / "llama", "--grace", 0.2) as server:
        reader = Reader(server.ready()).under_way()
        assert server.end() == 0
        reader.join(SECONDS)
        assert not reader.is_alive()
        assert reader.finish == ""
        assert server.troubles() == []
    assert sequences(tmp_path / "ssd") == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", [{}, {"seed": 3}, {"model": "/no/such/model"}], ids=["batched", "alone", "after"])
def test_an_answer_that_the_end_cuts_never_looks_finished(models, ending, more, stream):
    """Whether mlx-lm serves it in a batch or alone, under way or in line: an error event in a stream, else status 503."""
    with ending("--model", models / "llama", "--grace", 0.2) as server:
        server.ready()
        if "model" in more:  # the next request is served alone
            with pytest.raises(openai.APIStatusError):
                ask(server, user("hello"), **more)
        own = {name: value for name, value in more.items() if name != "model"}
        first = Reader(server, stream=stream, **own)
        if stream:
            first.under_way()
        else:
            wait_for(lambda: "Prompt processing progress" in server.said(), "answer under way")
        others = [Reader(server, f"other {i}", stream=bool(i), **own) for i in range(2)]
        time.sleep(0.5)
        assert server.end() == 0
        for reader in (first, *others):
            reader.join(SECONDS)
            assert not reader.is_alive()
            assert reader.finish == ""
            assert reader.error in ("InternalServerError", "APIError")  # 503, or an event in the stream
        assert first.error == ("APIError" if stream else "InternalServerError")
        assert server.troubles() == []


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_ends_the_process_at_once(models, ending, tmp_path, first, second):
    with ending("--model", models / "llama", "--grace", 50) as server:
        Reader(server.ready()).under_way()
        server.send(first)
        wait_for(lambda: "a second signal ends at once" in server.said(), "first signal")
        assert server.end(second) == 128 + second
    sequences(tmp_path / "ssd")


def test_a_signal_while_the_model_loads_ends_the_process(ending, tmp_path):
    slow = save_model(tmp_path / "slow")
    (slow / "model.py").write_text(
        "import time, pathlib; pathlib.Path(__file__).with_name('loading').touch(); time.sleep(600)"
    )
    (slow / "config.json").write_text(json.dumps({"model_type": "llama", "model_file": "model.py"}))
    with ending("--model", slow, "--trust-remote-code") as server:
        wait_for((slow / "loading").exists, "model that loads")
        assert server.end() == 128 + signal.SIGTERM
        assert server.troubles() == []
    sequences(tmp_path / "ssd")


def test_a_signal_while_prompts_are_warmed_ends_the_process(models, ending, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text(2500, f"warm {i}")}) for i in range(20)))
    with ending("--model", models / "llama", "--warm", prompts) as server:
        wait_for((tmp_path / "ssd" / "index.db").exists, "directory")
        time.sleep(1)  # it loads the model, or warms
        assert server.end() == 128 + signal.SIGTERM
        assert server.troubles() == []
    sequences(tmp_path / "ssd")
