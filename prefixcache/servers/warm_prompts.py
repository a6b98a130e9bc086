"""Prompts that are to be stored ahead of the first user: read from a file, and their tokens, as mlx_lm.server makes those of
the requests that will begin with them. `warming` computes and stores them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from prefixcache.keys import common_prefix
from prefixcache.servers.canonical import TemplateChat, canonical
from prefixcache.servers.chat_messages import for_template, template_roles

CHAT, TEXT = ("messages", "tools", "chat_template_kwargs"), ("prompt",)
KEYS = (*CHAT, *TEXT, "cache_salt")

# After these roles it is the user's turn: what is stored must serve whatever the user says. After any other role
# the model answers.
USER_FOLLOWS = ("system", "developer", "assistant")
# What may come next begins like one of these. A tokenizer may join it with the end of what stands before it.
NEXT = ("a", "1", ".", " a", "  ", "\n", "\t\t", "\r")
THINKING = 11  # tokens at the end in which mlx_lm.server looks for the beginning of a thought


class BadPrompt(ValueError):
    """A prompt that can't be read or rendered. The text names file, line, key and what to do; it quotes no prompt."""


@dataclass(frozen=True)
class WarmPrompt:
    """One line of a file of prompts: either `messages`, as in a chat request, or `text`. `where` is "file:line"."""

    where: str
    messages: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    salt: bytes = field(default=b"", repr=False)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)

    def canonical(self, rules: Collection[str]) -> WarmPrompt:
        """Return the prompt in the text that a server with these rules of canonical text has of such requests."""
        chat = canonical(TemplateChat(list(self.messages), list(self.tools)), rules)
        return replace(self, messages=tuple(chat.messages), tools=tuple(chat.tools or ()))


@dataclass(frozen=True)
class WarmSequence:
    """The tokens to store of one prompt, and whose they are: of a tenant and a session. `label`: see `PrefixCache.prompt`."""

    tokens: list[int] = field(repr=False)
    salt: bytes = field(default=b"", repr=False)
    session: str = field(default="", repr=False)
    label: str = field(default="system", repr=False)  # mlx_lm.server's word for what conversations open with


# -- reading ----------------------------------------------------------------------------------------------------------


def read_prompts(path: str | PathLike[str]) -> list[WarmPrompt]:
    """Return the prompts of a JSON Lines file; blank lines don't count.

    A line is {"messages": [...], "tools": [...], "chat_template_kwargs": {...}} as in a chat request to mlx_lm.server, or
    {"prompt": "text"}; with "cache_salt": "..." its UTF-8 bytes are the salt. BadPrompt for anything else.
    """
    return [parse_prompt(where, given) for where, given in read_objects(path)]


def read_objects(path: str | PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return where each object of a JSON Lines file stands, and the object; a file may also be one object over several lines.
    "-" is standard input. BadPrompt for a file that can't be read, has no object, or anything else.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as error:
        raise BadPrompt(f"{path}: {error.strerror or error}; give a file with a prompt as JSON on each line") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    if b"\n" in data.strip() and _is_one_object(data):
        return [(str(path), _object(path, 1, data))]
    lines = enumerate(data.split(b"\n"), 1)
    objects = [(f"{path}:{number}", _object(path, number, line)) for number, line in lines if line.strip()]
    if not objects:
        raise BadPrompt(f'{path}: no prompts in it; write one as JSON on each line, such as {{"messages": [...]}}')
    return objects


def _is_one_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return data.lstrip().partition(b"\n")[0].rstrip() == b"{"  # or was meant to be one


def _object(path: str | PathLike[str], number: int, text: bytes) -> dict[str, Any]:
    """Return the object that the JSON is which begins in line `number` of a file."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "nested too deep, or a number too long"
        if isinstance(error, json.JSONDecodeError):
            number, reason = number + error.lineno - 1, f"{error.msg}, column {error.colno}"
        raise BadPrompt(f"{path}:{number}: not JSON ({reason}); write one object on each line") from None
    if not isinstance(given, dict):
        raise BadPrompt(f'{path}:{number}: no JSON object; write {{"messages": [...]}} or {{"prompt": "..."}}')
    return given


def parse_prompt(where: str, given: dict[str, Any]) -> WarmPrompt:
    """Return the prompt that one object of such a file means. Errors call it `where`. BadPrompt if it means none."""
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, 1, 0.55) or [", ".join(KEYS)]
            raise BadPrompt(f"{where}: unknown key {key!r}; write {near[0]}, or leave it out")
    ways = [key for key in ("messages", "prompt") if key in given]
    if len(ways) != 1:
        raise BadPrompt(f'{where}: {" and ".join(ways) or "no prompt"}; give one of "messages" and "prompt"')
    if ways == ["prompt"]:
        for key in CHAT:
            _require(where, key, key not in given, 'goes with "messages" only; leave it out')
        _require(where, "prompt", isinstance(given["prompt"], str), "not a text; write a string")
        _require(where, "prompt", given["prompt"], "empty; write what is to be stored, or leave the line out")
        return WarmPrompt(where, text=given["prompt"], salt=_salt(where, given))
    tools, options = given.get("tools", []), given.get("chat_template_kwargs", {})
    _require(where, "tools", _are_objects(tools), "not a list of objects; write tools as in a chat request")
    _require(where, "chat_template_kwargs", isinstance(options, dict), 'not an object; write {"name": value}')
    return WarmPrompt(where, _messages(where, given["messages"]), tuple(tools), "", _salt(where, given), options)


def _messages(where: str, messages: Any) -> tuple[dict[str, Any], ...]:
    remedy = 'write [{"role": "system", "content": "..."}]'
    _require(where, "messages", _are_objects(messages) and messages, f"not a list of messages; {remedy}")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        _require(where, f"messages[{i}].role", isinstance(role, str), f"missing, or not a text; {remedy}")
        texts = _are_objects(content) and all(
            part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
        )
        wrong = "not a text, nor a list of text parts; images can't be warmed, so leave them out"
        _require(where, f"messages[{i}].content", content is None or isinstance(content, str) or texts, wrong)
    return tuple(messages)


def _salt(where: str, given: dict[str, Any]) -> bytes:
    salt = given.get("cache_salt", "")
    _require(where, "cache_salt", isinstance(salt, str), "not a text; write one, or leave it out")
    try:
        return bytes(salt.encode())
    except UnicodeEncodeError:
        raise BadPrompt(f"{where}: cache_salt: not Unicode text (half of a surrogate pair); write another") from None


def _require(where: str, key: str, ok: Any, message: str) -> None:
    if not ok:
        raise BadPrompt(f"{where}: {key}: {message}")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


# -- tokens -----------------------------------------------------------------------------------------------------------


def sequences_of(
    tokenizer: Any, prompts: Iterable[WarmPrompt], chat_template_args: dict[str, Any] | None
) -> list[WarmSequence]:
    """Return what to store of each prompt. BadPrompt for one that the tokenizer or its chat template refuses."""
    return [WarmSequence(tokens_of(tokenizer, prompt, chat_template_args), prompt.salt) for prompt in prompts]


def tokens_of(tokenizer: Any, prompt: WarmPrompt, chat_template_args: dict[str, Any] | None = None) -> list[int]:
    """Return the tokens that every later request which begins with this prompt has, as mlx_lm.server makes them.

    `tokenizer` is mlx-lm's wrapper, `chat_template_args` what the server was started with.

    - Messages that the user goes on from (the last one is system, developer or assistant), or a tool that the last one
      calls: what the chat template gives whatever the next message says. It ends where mlx_lm.server ends its "system"
      segment, or some tokens before: the server sees one request, and a line feed in front of a text can be another token
      than one in front of a line feed.
    - Other messages are a request (the last one is user or tool), and it will come as it is: all its tokens up to the tail
      in which the template opens a thought, as the server's "user" segment; without such a tail all but the last one, as a
      request leaves one token to compute.
    - A text: its tokens but the last one, and but those that another text joined to it would change. A tokenizer of word
      pieces can change more of a last word that goes on, so a text should end where a word does. Attention is hit up
      to the first token that differs, whatever is stored; only recurrent layers need a boundary that is exactly there.

    What a template makes of the day or the hour is no one's to share.
    """
    if prompt.messages and prompt.messages[-1]["role"] in USER_FOLLOWS:
        return common_beginning(next_requests(tokenizer, prompt, chat_template_args))
    with _refusals_of(prompt):
        if prompt.text:
            whole = list(tokenizer.encode(prompt.text))
            return common_beginning([whole[:-1], *(list(tokenizer.encode(prompt.text + more)) for more in NEXT)])
        return _without_thought_tail(tokenizer, _render(tokenizer, prompt, chat_template_args))


def next_requests(tokenizer: Any, prompt: WarmPrompt, chat_template_args: dict[str, Any] | None) -> Iterator[list[int]]:
    """Give the tokens of requests that go on from a prompt's messages, each time with another message of the user, or of the
    tool that the last one calls. What all of them begin with is there whatever the next message says. BadPrompt as above.
    """
    for more in NEXT:
        with _refusals_of(prompt):
            calls = prompt.messages[-1].get("tool_calls")
            called = {"role": "tool", "tool_call_id": calls[0].get("id", "")} if calls else {"role": "user"}
            request = _render(tokenizer, prompt, chat_template_args, {**called, "content": more})
        yield request


@contextmanager
def _refusals_of(prompt: WarmPrompt) -> Iterator[None]:
    """Raise BadPrompt for what a tokenizer or its chat template refuses of a prompt."""
    try:
        yield
    except Exception as error:  # a template may raise anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BadPrompt(f"{prompt.where}: the tokenizer or its chat template refuses it: {reason}") from error


def _render(
    tokenizer: Any, prompt: WarmPrompt, chat_template_args: dict[str, Any] | None, *following: dict[str, Any]
) -> list[int]:
    from mlx_lm.server import convert_chat, process_message_content

    messages = for_template([*prompt.messages, *following], template_roles(tokenizer), images=False)
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(convert_chat(messages)))
    process_message_content(messages)
    options = {**(chat_template_args or {}), **prompt.chat_template_kwargs}
    tools = list(prompt.tools) or None
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools, tokenize=True, **options)
    )


def _without_thought_tail(tokenizer: Any, request: list[int]) -> list[int]:
    if tokenizer.has_thinking:
        thought = tokenizer.rfind_think_start(request, start=max(len(request) - THINKING, 0))
        if thought >= 0:
            return request[:thought]
    return request[:-1]


def common_beginning(sequences: Iterable[list[int]]) -> list[int]:
    """Return the tokens with which all of them begin: those that the least and the greatest share."""
    ordered = sorted(sequences)
    return ordered[0][: common_prefix(ordered[0], ordered[-1])]
