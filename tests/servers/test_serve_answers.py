"""`prefixcache serve` answers as mlx_lm.server does without a prompt cache, token by token, whatever is hit: processes of
their own, HTTP, models of three kinds of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.models.families import MLX_LM_0_31
from tests.servers.serving import (
    TEMPLATE,
    Answer,
    Message,
    Server,
    ask,
    at_once,
    chat,
    complete,
    post,
    save_adapter,
    save_model,
    save_parrot,
    serving,
    serving_plainly,
    text,
    upstream_serve,
)

SYSTEM = text(280)
USERS = 3
TURNS = 4
DENSE = pytest.mark.parametrize("pair", ["llama"], indirect=True)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": text(60, "tool"),
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


class Pair(NamedTuple):
    """One model on two servers."""

    family: str
    folder: Path
    plain: Server
    served: Server


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    where = tmp_path_factory.mktemp(request.param)
    folder = save_model(where / "model", request.param, template=TEMPLATE)
    with (
        serving_plainly(where / "plain.log", "--model", folder) as plain,
        serving(where / "served.log", "--model", folder) as served,
    ):
        yield Pair(request.param, folder, plain, served)


def questions(user: int, of: str) -> list[str]:
    return [text(12 + 30 * (user % 2), f"{of} {user}{turn}") for turn in range(TURNS)]


def said(answers: list[Answer]) -> list[tuple[Any, ...]]:
    return [(answer.text, answer.finish, answer.prompt, answer.generated) for answer in answers]


def check_hits(answers: list[Answer]) -> None:
    """Every prompt after the first is hit at least as deep as the one before was long.

    But its last token: what the answer begins with may join it.
    """
    for before, answer in pairwise(answers):
        assert answer.cached >= before.prompt - 1
    assert all(answer.cached < answer.prompt for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_answered_as_without_a_cache_and_hit_from_its_second_turn_on(pair, stream):
    more = {} if stream else {"logprobs": True}
    asked = questions(0, f"alone {stream}")
    plain, served = (chat(server, SYSTEM, asked, stream=stream, **more) for server in (pair.plain, pair.served))
    assert said(served) == said(plain)
    for one, other in zip(served, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(one.logprobs) == (0 if stream else one.generated)
    check_hits(served)
    assert not any(answer.cached for answer in plain)


def test_chats_at_once_are_answered_as_each_alone_without_a_cache(pair):
    asked = [questions(user, "at once")[:3] for user in range(USERS)]
    alone = [chat(pair.plain, SYSTEM, each) for each in asked]
    together = at_once([lambda each=each: chat(pair.served, SYSTEM, each, stream=True) for each in asked])
    assert [said(answers) for answers in together] == [said(answers) for answers in alone]
    for answers in together:
        check_hits(answers)


def test_an_exact_prompt_again_computes_one_token(pair):
    messages = [{"role": "user", "content": text(300, "again")}]
    first, second = ask(pair.served, messages), ask(pair.served, messages)
    assert said([first]) == said([second])
    assert (first.cached, second.computed) == (first.cached, 1)


@DENSE
def test_a_text_goes_on_as_without_a_cache(pair):
    prompt = text(300, "text")
    first, again = complete(pair.served, prompt), complete(pair.served, prompt)
    longer = prompt + " And then" + text(20, "end")
    plain = [complete(pair.plain, prompt), complete(pair.plain, longer)]
    assert said([first, complete(pair.served, longer)]) == said(plain)
    assert (said([again]), again.computed) == (said([first]), 1)


@DENSE
@pytest.mark.parametrize("stream", [False, True])
def test_stop_words_end_an_answer_that_is_hit_later(pair, stream):
    messages = [{"role": "user", "content": text(100, f"stop {stream}")}]
    whole = ask(pair.plain, messages)
    word = whole.text.strip()[len(whole.text) // 3 :][:4]
    served = ask(pair.served, messages, stop=[word], stream=stream)
    if MLX_LM_0_31:  # later releases cut a text out that the model writes in other tokens
        assert said([served]) == said([ask(pair.plain, messages, stop=[word], stream=stream)])
    after = ask(pair.served, messages)
    assert said([after]) == said([whole])
    assert after.computed == 1


@DENSE
@pytest.mark.skipif(MLX_LM_0_31, reason="it finds the tokens that a stop text has by itself")
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_in_whichever_tokens_it_is_written(pair, stream):
    messages = [{"role": "user", "content": text(100, f"written {stream}")}]
    whole = ask(pair.plain, messages).text
    for word in (whole[first:][:4] for first in range(len(whole) // 3, len(whole) // 3 + 4)):
        served = ask(pair.served, messages, stop=["nowhere", word], stream=stream)
        assert (served.text, served.finish) == (whole[: whole.find(word)], "stop")


@DENSE
@pytest.mark.skipif(MLX_LM_0_31, reason="it finds the tokens that a stop text has by itself")
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"seed": 1}], ids=str)  # with a seed it is served by itself
def test_what_a_stop_text_may_begin_with_is_not_lost(pair, tmp_path, more):
    parrot = str(save_parrot(tmp_path / "parrot", ["One.", " Qxr", "ready~", " Two."], template=TEMPLATE))
    for stop, told in (("ready~", "One. Qxr"), ("Two.fold", "One. Qxrready~ Two."), ("y~ T", "One. Qxrread")):
        answer = ask(pair.served, [{"role": "user", "content": "hello"}], model=parrot, stop=[stop], **more)
        assert (answer.text, answer.finish) == (told, "stop")


@DENSE
def test_logprobs_are_those_of_an_answer_without_a_cache(pair):
    messages = [{"role": "user", "content": text(100, "probable")}]
    ask(pair.served, messages)
    plain = ask(pair.plain, messages, logprobs=True)
    for more in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}):
        served = ask(pair.served, messages, **more)
        assert served.computed == 1
        assert served.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert len(served.logprobs) == served.generated


@DENSE
def test_a_tokens_logprob_is_its_own_and_the_likeliest_are_in_order(pair):
    for more in ({"temperature": 0}, {"temperature": 100, "seed": 1}):
        answer = post(pair.served, top_logprobs=5, max_tokens=8, **more).json()["choices"][0]
        assert len(answer["logprobs"]["content"]) > 1
        for one in answer["logprobs"]["content"]:
            assert set(one) == {"id", "token", "logprob", "top_logprobs"}
            likeliest = [other["logprob"] for other in one["top_logprobs"]]
            assert likeliest == sorted(likeliest, reverse=True)
            assert (one["id"] == one["top_logprobs"][0]["id"]) == (more["temperature"] == 0)


@DENSE
def test_a_seed_gives_the_same_answer_and_is_hit(pair):
    messages = [{"role": "user", "content": text(100, "seed")}]
    drawn = {"seed": 11, "temperature": 1.0}
    plain = ask(pair.plain, messages, **drawn)
    first, second = ask(pair.served, messages, **drawn), ask(pair.served, messages, **drawn, stream=True)
    assert said([first]) == said([second]) == said([plain])
    assert (first.cached < 30, second.computed) == (True, 1)
    assert ask(pair.served, messages, **{**drawn, "seed": 12}).text != plain.text


@DENSE
def test_requests_with_and_without_a_seed_at_once_are_answered_each_as_alone(pair):
    asked = [[{"role": "user", "content": text(100, f"mixed {user}")}] for user in range(4)]
    more = [{"seed": 5, "temperature": 0.7} if user % 2 else {} for user in range(4)]
    alone = [ask(pair.plain, messages, **drawn) for messages, drawn in zip(asked, more, strict=True)]
    calls = [lambda m=m, d=d: ask(pair.served, m, **d) for m, d in zip(asked, more, strict=True)]
    assert said(at_once(calls)) == said(alone)


@DENSE
@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results_are_part_of_what_is_hit(pair, stream):
    called = {"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"to": 3}'}}
    messages: list[Message] = [{"role": "user", "content": f"Count, {stream}."}]
    steps: list[list[Message]] = [
        [{"role": "assistant", "content": "", "tool_calls": [called]}, tool(text(40, f"result {stream}"))],
        [{"role": "assistant", "content": "", "tool_calls": [called]}, tool("3")],
        [{"role": "assistant", "content": "Three."}, {"role": "user", "content": "Again."}],
    ]
    answers = []
    for step in [[], *steps]:
        messages += step
        plain, served = (ask(server, messages, tools=TOOLS, stream=stream) for server in (pair.plain, pair.served))
        assert said([served]) == said([plain])
        answers.append(served)
    check_hits(answers)
    other = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": f"reckon {stream}"}}]
    assert ask(pair.served, messages, tools=other).cached < 120


def tool(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": content}


@DENSE
def test_a_call_of_a_tool_is_answered_as_one_and_its_result_is_hit(pair, tmp_path):
    says = ["<tool_call>", '{"name": "count", "arguments": {"to": 3}}', "</tool_call>"]
    parrot = str(save_parrot(tmp_path / "parrot", says, template=TEMPLATE))
    messages: list[Message] = [{"role": "user", "content": text(50, "call")}]
    create = pair.served.client.chat.completions.create
    given = create(model=parrot, messages=messages, tools=TOOLS, temperature=0)
    choice = given.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("count", '{"to": 3}')
    messages += [choice.message.model_dump(exclude_none=True), tool("3")]
    chunks = list(create(model=parrot, messages=messages, tools=TOOLS, temperature=0, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["count"]
    again = create(model=parrot, messages=messages, tools=TOOLS, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1 > given.usage.prompt_tokens


@DENSE
def test_a_call_without_a_name_or_arguments_leaves_its_client_the_answer(pair, tmp_path):
    says = ["Well. ", "<tool_call>", '[{"name": "count"}, {"arguments": {"to": 3}}, 7]', "</tool_call>"]
    parrot = str(save_parrot(tmp_path / "parrot", says, template=TEMPLATE))
    asked: Any = {
        "model": parrot,
        "messages": [{"role": "user", "content": "Count."}],
        "tools": TOOLS,
        "temperature": 0,
    }
    create = pair.served.client.chat.completions.create
    told = create(**asked).choices[0]
    assert (told.message.content, told.finish_reason) == ("Well. ", "tool_calls")
    streamed = [chunk.choices[0] for chunk in create(**asked, stream=True)]
    assert streamed[-1].finish_reason == "tool_calls"
    for calls in (told.message.tool_calls, [call for choice in streamed for call in choice.delta.tool_calls or []]):
        assert [(call.function.name, call.function.arguments) for call in calls] == [("count", "{}")]


@DENSE
def test_a_draft_model_changes_no_answer_and_its_layers_are_kept_too(pair):
    asked = questions(0, "draft")[:3]
    draft = {"draft_model": str(pair.folder)}
    served, again = (chat(pair.served, SYSTEM, asked, **draft) for _ in range(2))
    assert said(served) == said(again) == said(chat(pair.plain, SYSTEM, asked, **draft))
    check_hits(served)
    assert all(answer.computed <= 2 for answer in again)
    assert served[0].cached == 0  # what the model keeps alone is of no use to both
    assert [answer.text for answer in served] == [answer.text for answer in chat(pair.plain, SYSTEM, asked)]


@DENSE
def test_adapters_and_models_that_requests_name_never_meet(pair, tmp_path):
    asked = questions(0, "names")[:2]
    model = {"model": str(pair.folder)}
    names = [
        {**model},
        {**model, "adapters": str(save_adapter(tmp_path / "one", pair.folder, 1))},
        {**model, "adapters": str(save_adapter(tmp_path / "two", pair.folder, 2))},
        {"model": str(save_model(tmp_path / "model", seed=1, template=TEMPLATE))},
    ]
    answers = [chat(pair.served, f"Say. {SYSTEM}", asked, **name) for name in names]
    assert [said(each) for each in answers] == [said(chat(pair.plain, f"Say. {SYSTEM}", asked, **n)) for n in names]
    assert len({each[0].text for each in answers}) == len(names)
    for each, name in zip(answers, names, strict=True):
        assert each[0].cached < 10  # the beginning of the system prompts that were said before
        check_hits(each)
        assert chat(pair.served, f"Say. {SYSTEM}", asked[:1], **name)[0].computed == 1
    of_default = chat(pair.served, f"Say. {SYSTEM}", asked[:1], adapters=names[1]["adapters"])
    assert (said(of_default), of_default[0].computed) == (said(answers[1][:1]), 1)


@pytest.mark.skipif(MLX_LM_0_31, reason="mlx-lm 0.31's server can't quantize its caches")
def test_rows_that_mlx_lm_quantized_are_hit_as_by_its_own_prompt_cache(tmp_path):
    """Without a cache the answers differ a little: there no prompt attends to quantized rows of its own."""
    flags = [
        "--model",
        save_model(tmp_path / "model"),
        "--kv-bits",
        8,
        "--kv-group-size",
        32,
        "--quantized-kv-start",
        0,
    ]
    asked = questions(1, "quantized")
    with (
        serving_plainly(tmp_path / "own.log", *flags, main=upstream_serve) as own,
        serving(tmp_path / "served.log", *flags, limits=["--ram", "200MB"]) as served,
    ):
        kept, ours = (chat(server, SYSTEM, asked, logprobs=True) for server in (own, served))
        assert said(ours) == said(kept)
        for one, other in zip(ours, kept, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert [answer.cached for answer in ours] == [answer.cached for answer in kept]
        check_hits(ours)
