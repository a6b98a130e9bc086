"""A chat's messages as the model's template takes them, whichever API brought them: null means not given, `developer` is a
system message, several system messages at the beginning are one, and those that a template would drop or refuse become the
user's. Called before a prompt is made of them; nothing here knows MLX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from prefixcache.servers.request_schema import RequestRefused, shown

Message = dict[str, Any]
Content = str | list[dict[str, Any]]

IMAGES = ("image_url", "input_image", "image")  # types of parts that mlx-lm takes for images
MARK = "marker"  # the content of messages by which a template is tried, with their place


class TemplateRoles(NamedTuple):
    """Whether a template takes a system message at the beginning, one later, two of the user in a row."""

    leading_system: bool = True
    late_system: bool = True
    users_in_a_row: bool = True


def template_roles(tokenizer: Any) -> TemplateRoles:
    """Return what the chat template of a tokenizer of mlx-lm's takes: all where it has none, since mlx-lm's own takes all."""
    if not tokenizer.has_chat_template:
        return TemplateRoles()
    return roles_of(lambda chat: tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def roles_of(render: Callable[[list[Message]], str]) -> TemplateRoles:
    """Return what the template of `render` takes, found by rendering short chats. A message is taken that it neither raises
    an exception of, nor leaves out, nor moves: a later system message at the beginning would change all that is cached. Where
    it doesn't render the chat without that message either, nothing is known, and it counts as taken.
    """

    def takes(*roles: str, doubtful: int) -> bool:
        chat = [{"role": role, "content": f"{MARK}{place}"} for place, role in enumerate(roles)]
        in_order = ".*".join(message["content"] for message in chat)
        if re.search(in_order, _rendered(render, chat), re.DOTALL):
            return True
        return not _rendered(render, chat[:doubtful] + chat[doubtful + 1 :])

    return TemplateRoles(
        leading_system=takes("system", "user", doubtful=0),
        late_system=takes("user", "assistant", "system", "user", doubtful=2),
        users_in_a_row=takes("user", "user", doubtful=1),
    )


def _rendered(render: Callable[[list[Message]], str], chat: list[Message]) -> str:
    try:
        return render(chat)
    except Exception:  # a template raises what it likes
        return ""


def for_template(messages: list[Message], roles: TemplateRoles, *, images: bool) -> list[Message]:
    """Return new messages, as a template with these roles takes them. `images`: whether the model reads images.
    RequestRefused for parts and calls that can't be read.
    """
    plain = [_plain(f"messages.{place}", message, images=images) for place, message in enumerate(messages)]
    leading = len(list(takewhile(lambda message: message["role"] == "system", plain)))
    chat = _runs_joined(plain[:leading], "system") + plain[leading:]
    for place, message in enumerate(chat):
        taken = roles.leading_system if place == 0 else roles.late_system
        if message["role"] == "system" and not taken:
            message["role"] = "user"
    return chat if roles.users_in_a_row else _runs_joined(chat, "user")


def _runs_joined(messages: list[Message], role: str) -> list[Message]:
    """Return the messages, those of this role in a row as one."""
    chat: list[Message] = []
    for message in messages:
        if chat and message["role"] == chat[-1]["role"] == role:
            chat[-1]["content"] = _joined(chat[-1].get("content") or "", message.get("content") or "")
        else:
            chat.append(message)
    return chat


def _joined(first: Content, second: Content) -> Content:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), {"type": "text", "text": "\n\n"}, *_parts(second)]


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _plain(where: str, message: Message, *, images: bool) -> Message:
    plain = {name: value for name, value in message.items() if value is not None}
    if plain["role"] == "developer":
        plain["role"] = "system"
    if isinstance(plain.get("content"), list):
        parts = enumerate(plain["content"])
        plain["content"] = [_part(f"{where}.content.{place}", part, images=images) for place, part in parts]
    if "tool_calls" in plain:
        calls = enumerate(plain["tool_calls"])
        plain["tool_calls"] = [_call(f"{where}.tool_calls.{place}", call) for place, call in calls]
    return plain


def _part(where: str, part: dict[str, Any], *, images: bool) -> dict[str, Any]:
    kind = part.get("type")
    if kind in IMAGES and not images:
        raise RequestRefused(f"{where} is an image, and the model reads text only; leave it out, or ask another model")
    if kind not in IMAGES and (kind != "text" or not isinstance(part.get("text"), str)):
        said = f"must be a text or an image, not of type {shown(kind)}" if kind != "text" else "must have its text"
        raise RequestRefused(f"{where} {said}; leave it out")
    return dict(part)


def _call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if function is None:
        return dict(call)
    if not isinstance(function, dict):
        raise RequestRefused(f"{where}.function must be an object, not {shown(function)}")
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(where: str, given: Any) -> str:
    """Return the arguments as text, of which both releases of mlx-lm make the object that templates read."""
    text = "{}" if given in (None, "") else given
    try:
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise RequestRefused(f"{where} must be a JSON object, or its text, not {shown(given)}")
