"""What clients send to `/v1/chat/completions` and `/v1/models`, and how it is taken: a served model whose template is
as strict as some are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from tests.servers.serving import SECONDS, Server, ask, post, save_model, serve, serving, starting, user

# A late system message raises, `developer` is dropped, calls are read as their parsed arguments: as Qwen's templates have it.
STRICT = (
    "{{ bos_token }}{% if tools %}<|system|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if m.role in ('system', 'user', 'assistant', 'tool') %}{{ '<|' + m.role + '|>\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | items | list }}{% endfor %}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]
HI = user("hello")[0]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("strict") / "model", template=STRICT)


@pytest.fixture(scope="module")
def served(strict: Path) -> Iterator[Server]:
    with starting(serve, strict.parent / "served.log", "--ram", "200MB", "--codec", "raw", "--model", strict) as server:
        yield server.ready()  # its log tells of the errors that are asked for


def prompt(server: Server, *messages: dict[str, Any], **more: Any) -> int:
    """How many tokens the prompt has that these messages make."""
    return ask(server, list(messages), max_tokens=1, **more).prompt


def test_developer_is_system_and_a_late_one_is_the_users(served):
    late = {"role": "system", "content": "be brief"}
    assert prompt(served, late, HI) == prompt(served, {**late, "role": "developer"}, HI) > prompt(served, HI)
    assert prompt(served, HI, late) == prompt(served, HI, {**late, "role": "user"})
    assert prompt(served, HI, {**late, "role": "developer"}) == prompt(served, HI, {**late, "role": "user"})
    assert prompt(served, late, late, HI) == prompt(served, {**late, "content": "be brief\n\nbe brief"}, HI)


def test_null_is_not_given_anywhere(served):
    nulls = {"tool_calls": None, "reasoning_content": None, "name": None, "refusal": None}
    given = post(served, messages=[HI, {"role": "assistant", "content": None, **nulls}, HI], tools=None, stop=None)
    assert given.status_code == 200


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages.1.tool_calls.0.function.arguments must be a JSON object",
        ),
        (
            {"messages": user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}])},
            "messages.0.content.0 is an image, and the model reads text only",
        ),
        ({"messages": user([{"type": "input_audio"}])}, "messages.0.content.0 must be a text or an image"),
        ({"messages": [{"role": "assistant", "content": 1}]}, "messages must be a list of objects"),
        ({"n": 2}, "n must be 1, not 2"),
        ({"response_format": {"type": "json_object"}}, 'response_format must be {"type": "text"}'),
        (
            {"tool_choice": "required"},
            'tool_choice must be "auto" or "none", since no answer is held to a call, not "required"',
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 'tool_choice must be "auto" or "none"'),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs.tools is not a variable"),
    ],
    ids=str,
)
def test_what_cant_be_had_is_400_in_openais_form(served, body, told):
    given = post(served, **body)
    error = given.json()["error"]
    assert (given.status_code, error["type"], error["code"]) == (400, "invalid_request_error", 400)
    assert told in error["message"]
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.chat.completions.create(model="default_model", messages=[HI], extra_body=body)
    assert told in str(raised.value)


def test_a_template_that_fails_is_400(served):
    given = post(served, messages=[{"role": "user", "content": "x", "tool_calls": [{"function": 0}]}])
    assert given.status_code == 400
    given = post(served, messages=[{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}])
    assert (given.status_code, "can't be read" in given.json()["error"]["message"]) == (400, True)


def test_without_a_choice_there_are_no_tools(served):
    tools = prompt(served, HI, tools=TOOLS)
    assert prompt(served, HI, tools=TOOLS, tool_choice="none") == prompt(served, HI) < tools
    assert prompt(served, HI, tools=TOOLS, tool_choice="auto", n=1, response_format={"type": "text"}) == tools


def test_one_model_is_one_model_and_others_are_404(served, strict):
    for name in (str(strict), "default_model"):
        assert served.client.models.retrieve(name).id == name
    for path in ("/v1/models/gpt-5", "/v1/models/a/b", "/v1/modelsx"):
        given = requests.get(f"{served.url}{path}", timeout=SECONDS)
        assert given.status_code == 404
    assert str(strict) in requests.get(f"{served.url}/v1/models/gpt-5", timeout=SECONDS).json()["error"]["message"]


def test_another_model_is_404_unless_any_is_taken(served, strict, tmp_path):
    refused = post(served, model="no-such-model")
    assert refused.status_code == 404
    assert f"{strict} is loaded: name that, or serve with --any-model" in refused.json()["error"]["message"]
    with serving(tmp_path / "any.log", "--model", strict, "--any-model") as server:
        for name in ("no-such-model", "org/no-such-model", "default_model", str(strict), "a\nb", "x" * 1000):
            assert post(server, model=name).status_code == 200
