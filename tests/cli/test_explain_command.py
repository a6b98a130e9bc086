"""`prefixcache explain`: where the prompts of two requests part, to the token, whichever API they are of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from prefixcache.keys import common_prefix
from prefixcache.servers.apis.messages import Messages
from prefixcache.servers.canonical import EVERY_RULE, RULES
from prefixcache.servers.chat_messages import TemplateRoles, template_roles
from prefixcache.servers.compared_prompts import AROUND, RequestReader, chat_request, compare
from prefixcache.servers.prompt_parts import MESSAGE, Part

MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-llama"
HEADER = "x-anthropic-billing-header: cc_version={};\n"
TOOL = {"name": "ls", "description": "Lists files.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def reader() -> RequestReader:
    tokenizer = load_tokenizer(str(MODEL))
    return RequestReader(tokenizer, template_roles(tokenizer), {})


@pytest.fixture
def written(tmp_path):
    def write(name: str, body: Any) -> Path:
        (tmp_path / name).write_text(body if isinstance(body, str) else json.dumps(body))
        return tmp_path / name

    return write


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asked(system: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 9, "system": system, "messages": list(messages), "tools": [TOOL]}


WORDS = st.text("abc \né", min_size=1, max_size=40).filter(str.strip)
CHATS = st.lists(WORDS, min_size=1, max_size=5).map(
    lambda texts: [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
)


@given(first=CHATS, second=CHATS, share=st.integers(0, 5))
def test_the_common_prefix_is_that_of_the_tokens_that_a_server_makes(reader, first, second, share):
    second = [*first[:share], *second[share:]] or first
    told = compare(reader, {"messages": first}, {"messages": second}, rules=EVERY_RULE)
    made = [
        list(reader.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True))
        for chat in (first, second)
    ]
    assert (told.first.tokens, told.second.tokens) == tuple(map(len, made))
    assert told.common == common_prefix(*made)
    assert told.are_same == (made[0] == made[1])
    assert told.first.before == told.second.before
    assert len(told.first.behind) <= AROUND
    assert told.switched == {}
    mirrored = compare(reader, {"messages": second}, {"messages": first}, rules=EVERY_RULE)
    assert (mirrored.common, mirrored.first, mirrored.second) == (told.common, told.second, told.first)


def test_bodies_of_all_apis_are_read_as_the_chats_that_they_mean():
    chat = [{"role": "system", "content": "Be brief."}, user("hello")]
    assert chat_request({"messages": chat}) == {"messages": chat}
    of_messages = chat_request({"max_tokens": 9, "system": "Be brief.", "messages": [user("hello")]})
    of_responses = chat_request({"instructions": "Be brief.", "input": "hello"})
    assert [of_messages["messages"], of_responses["messages"]] == [chat, chat]


@pytest.mark.parametrize(
    "field",
    [{"thinking": {"type": "disabled"}}, {"output_config": {"effort": "low"}}, {"stop_sequences": ["."]}],
    ids=str,
)
def test_a_field_that_only_one_api_has_says_which_one_it_is(field):
    body = {"max_tokens": 9, "messages": [user("hello")], **field}
    assert chat_request(body) == Messages().chat_request(body)


@pytest.mark.parametrize("kind", ["document", "search_result", "tool_reference"])
def test_a_block_that_only_one_api_has_says_which_one_it_is(kind):
    block = {"type": kind, "source": {"type": "text", "data": "a"}, "content": [], "tool_name": "ls"}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
    assert chat_request(body) == Messages().chat_request(body)


def test_what_is_null_is_not_given(reader):
    body = {"messages": [user("hello")]}
    assert compare(reader, body, {**body, "prompt": None, "input": None, "system": None}, rules=EVERY_RULE).are_same


def test_a_changing_header_is_named_by_its_rule(written, call):
    bodies = {name: asked(HEADER.format(name) + 10 * "Be brief. ", user(name)) for name in ("one", "two")}
    files = [written(f"{name}.json", body) for name, body in bodies.items()]
    done = call("explain", *files, "--model", MODEL)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "parts in message 2 of 2" in done.stdout
    assert "Be brief." in done.stdout
    assert "without rule headers of canonical text: " in done.stdout
    plain = call("explain", *files, "--model", MODEL, "--no-canonical")
    assert "parts in the system text" in plain.stdout
    assert "with rule headers of canonical text: " in plain.stdout
    others = call("explain", *files, "--model", MODEL, "--canonical-rules", "schemas, answers")
    assert others.stdout == plain.stdout
    wrong = call("explain", *files, "--model", MODEL, "--canonical-rules", "headers,tools")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    told = "prefixcache: --canonical-rules 'tools': no rule of that name; write headers, schemas, answers\n"
    assert wrong.stderr == told
    facts = [
        json.loads(call("explain", *files, "--model", MODEL, "--json", *more).stdout)
        for more in ((), ["--no-canonical"])
    ]
    assert facts[0]["common"] == facts[1]["rules"]["headers"] > facts[1]["common"] == facts[0]["rules"]["headers"]
    assert facts[0]["first"]["part"] == {"name": "message", "number": 2, "total": 2}
    assert set(facts[0]["rules"]) <= set(RULES)


def test_a_changing_header_leaves_the_system_text_that_becomes_the_users(reader):
    reader = replace(reader, roles=TemplateRoles(leading_system=False))
    one, two = (asked(HEADER.format(name) + "Be brief.", user(name)) for name in ("one", "two"))
    assert compare(reader, one, two, rules=EVERY_RULE).first.part == Part(MESSAGE, 2, 2)


def test_a_rule_that_changes_what_both_have_makes_no_difference(reader):
    one, two = (asked(HEADER.format("same") + "Be brief.", user(name)) for name in ("one", "two"))
    assert compare(reader, one, two, rules=EVERY_RULE).switched == {}
    assert compare(reader, one, two, rules=()).switched == {}


def test_a_request_that_goes_on_from_another_has_all_of_it_in_common(written, call):
    short, long = written("a.json", {"prompt": "one two"}), written("b.json", {"prompt": "one two three"})
    done = call("explain", short, long, "--model", MODEL)
    assert "a.json  " in done.stdout
    assert "; all of it is in common" in done.stdout
    assert "(it ends here)" in done.stdout
    assert "parts in the text" in done.stdout
    other = call("explain", short, written("c.json", {"prompt": "two"}), "--model", MODEL)
    assert other.stdout.startswith("1 token in common\n")  # the one that texts begin with
    same = call("explain", short, short, "--model", MODEL)
    assert same.stdout.count("\n") == 3
    assert "->" not in same.stdout


def test_what_cannot_be_read_is_told_in_a_line(written, call, tmp_path):
    good, empty = written("good.json", {"messages": [user("hello")]}), written("empty.json", "")
    two = written("two.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    wrong, odd = written("wrong.json", {"messages": "hello"}), written("odd.json", {"messages": [user("a")], "n": 2})
    namespaces = 400 * '{"type": "namespace", "name": "n", "tools": [' + '{"type": "function"}' + 400 * "]}"
    for files, options, said in (
        ((good, tmp_path / "missing.json"), (), "missing.json"),
        ((good, empty), (), "no prompts"),
        ((good, two), (), "2 requests"),
        ((good, wrong), (), "messages must be"),
        ((good, written("number.json", {"messages": 5})), (), "messages must be"),
        ((good, written("tools.json", {"messages": [user("a")], "tools": 5})), (), "tools must be"),
        ((good, written("type.json", {"messages": [user([{"type": []}])]})), (), "must be a text or an image"),
        ((odd, good), (), "n must be"),
        ((good, written("deep.json", f'{{"input": "a", "tools": [{namespaces}]}}')), (), ""),
        ((good, good), ("--chat-template-args", "[]"), "not a JSON object"),
    ):
        done = call("explain", *files, "--model", MODEL, *options)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr
    done = call("explain", good, good, "--model", tmp_path / "no-model")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"--model {tmp_path / 'no-model'}: no such folder" in done.stderr
    done = call("explain", good, good, "--model", tmp_path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"--model {tmp_path}: its tokenizer can't be loaded: " in done.stderr


def test_what_requests_say_cannot_write_to_the_terminal(written, call):
    files = [written(f"{name}.json", {"messages": [user(f"\x1b[31m{name}\u202e")]}) for name in ("one", "two")]
    said = call("explain", *files, "--model", MODEL).stdout
    assert "\x1b" not in said
    assert "\u202e" not in said
