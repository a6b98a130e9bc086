"""Under `prefixcache serve`, a model with recurrent layers is hit where a prompt parted from those stored before it: a system
text that another directory or another day changes behind long tools. Processes of their own, HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from prefixcache.keys import BLOCK, as_tokens, common_prefix
from tests.servers.serving import (
    TEMPLATE,
    Message,
    Server,
    ask,
    at_once,
    save_model,
    serving,
    serving_plainly,
    text,
    user,
)

SHARED = text(700, "agent")
DIRECTORIES = ("alpha", "beta", "gamma", "delta")
DRAWN = {"seed": 3}  # a request that is computed by itself, and not in a batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("recurrent") / "model", "qwen3_next", template=TEMPLATE)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Server]:
    with serving_plainly(folder / "plain.log", "--model", folder) as server:
        yield server


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    with serving(folder / "served.log", "--model", folder) as server:
        yield server


def in_directory(name: str, shared: str) -> list[Message]:
    """A prompt that begins as others do, and parts from them in the middle of its system text."""
    return [
        {"role": "system", "content": f"{shared} You are in {name}. {text(150, name)}"},
        *user("Look at the notes."),
    ]


def tool(name: str) -> dict[str, Any]:
    function = {"name": "count", "description": text(70, name), "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def branch_point(folder: Path, *prompts: list[Message], **options: Any) -> int:
    """The end of the last block that all prompts share."""
    template = load_tokenizer(str(folder)).apply_chat_template
    tokens = [as_tokens(template(prompt, add_generation_prompt=True, **options)) for prompt in prompts]
    return min(common_prefix(tokens[0], other) for other in tokens[1:]) // BLOCK * BLOCK


@pytest.mark.parametrize("drawn", [{}, DRAWN], ids=["in a batch", "by itself"])
def test_from_the_third_directory_on_what_is_shared_is_hit(folder, plain, served, drawn):
    prompts = [in_directory(name, f"{drawn} {SHARED}") for name in DIRECTORIES]
    answers = [ask(served, prompt, **drawn) for prompt in prompts]
    assert [answer.cached for answer in answers] == [0, 0] + 2 * [branch_point(folder, *prompts)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert ask(plain, prompt, **drawn)._replace(cached=answer.cached) == answer


@pytest.mark.parametrize(
    ("roles", "drawn"),
    [
        (("system", "user"), {}),
        (("user",), {}),
        (("system", "user", "assistant", "user"), {}),
        (("system", "user"), DRAWN),
    ],
)
def test_of_the_second_directory_on_the_tools_are_hit(folder, plain, served, roles, drawn):
    """The template has them before all else."""
    tools = [tool(f"{roles} {drawn} {number}") for number in range(6)]
    names = DIRECTORIES[:3]
    chats = [[{"role": role, "content": f"{role} {name} {text(300, name)}"} for role in roles] for name in names]
    answers = [ask(served, chat, tools=tools, **drawn) for chat in chats]
    point = branch_point(folder, *chats, tools=tools)
    assert [answer.cached for answer in answers] == [0] + 2 * [point]
    assert point >= 256
    for chat, answer in zip(chats, answers, strict=True):
        assert ask(plain, chat, tools=tools, **drawn)._replace(cached=answer.cached) == answer


@pytest.mark.parametrize("last", ["system", "tool"])
def test_a_new_talk_is_hit_to_the_end_of_the_system_text(folder, plain, served, last):
    """Whoever spoke last in the first one: a list of agents behind the user's words, or a tool with its result."""
    system = {"role": "system", "content": f"{last} {SHARED}"}
    first = [system, *user("Look at the notes."), {"role": last, "content": text(50, last)}]
    new = [system, *user("Rename the notes.")]
    assert ask(served, first).cached == 0
    answer = ask(served, new)
    template = load_tokenizer(str(folder)).apply_chat_template
    other = template([system, *user("Why?")], add_generation_prompt=True)
    assert answer.cached == common_prefix(as_tokens(other), as_tokens(template(new, add_generation_prompt=True)))
    assert ask(plain, new)._replace(cached=answer.cached) == answer


def test_of_those_that_ask_at_once_one_computes_what_is_shared(folder, plain, served):
    """The first of them leaves its state where it parts from what is stored, and the others wait for that."""
    known, *prompts = [in_directory(name, f"At once. {SHARED}") for name in DIRECTORIES]
    ask(served, known)
    answers = at_once([lambda prompt=prompt: ask(served, prompt) for prompt in prompts])
    assert sorted(answer.cached for answer in answers) == [0] + 2 * [branch_point(folder, known, *prompts)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert ask(plain, prompt)._replace(cached=answer.cached) == answer


def test_of_those_that_ask_at_once_and_first_two_compute_what_is_shared(folder, plain, served):
    """The second parts from the first while that is computed, and has the tools from it."""
    prompts = [in_directory(name, f"All at once. {SHARED}") for name in DIRECTORIES]
    tools = [tool(f"at once {number}") for number in range(6)]
    answers = at_once([lambda prompt=prompt: ask(served, prompt, tools=tools) for prompt in prompts])
    first, second, *others = sorted(answer.cached for answer in answers)
    assert others == 2 * [branch_point(folder, *prompts, tools=tools)]
    assert (first, 256 <= second < others[0]) == (0, True)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert ask(plain, prompt, tools=tools)._replace(cached=answer.cached) == answer


def test_what_is_shared_is_hit_after_a_restart(folder, tmp_path):
    prompts = [in_directory(name, f"Next day. {SHARED}") for name in DIRECTORIES]
    flags = ["--model", folder, "--ssd-dir", tmp_path / "ssd"]
    with serving(tmp_path / "first.log", *flags) as first:
        assert [ask(first, prompt).cached for prompt in prompts[:2]] == [0, 0]
    with serving(tmp_path / "second.log", *flags) as second:
        assert [ask(second, prompt).cached for prompt in prompts[2:]] == 2 * [branch_point(folder, *prompts)]
