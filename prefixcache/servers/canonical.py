"""Canonical text of a chat: what means the same becomes the same tokens, whichever client and API brought it.

Each rule is a function of a chat that returns it as its template is to have it, or the very chat where the rule has nothing
to change. A rule changes what its name says and nothing else, and a second time it changes nothing. `as_written` has the rule
for tokens. Nothing here knows MLX.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

Json = dict[str, Any]

CHANGING_HEADERS = ("x-anthropic-billing-header:",)  # how lines begin that say something else in each conversation
SYSTEM = ("system", "developer")

# Keywords of tools and their JSON schemas, in the order in which most clients have them. Others follow, sorted.
KEYWORDS = (
    "$schema",
    "type",
    "function",
    "name",
    "description",
    "parameters",
    "enum",
    "items",
    "properties",
    "required",
)
NAMES = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose keys are names, not keywords


class TemplateChat(NamedTuple):
    """What a chat template is given: the messages, and the tools that the model may call."""

    messages: list[Json]
    tools: list[Json] | None = None


def without_changing_headers(chat: TemplateChat) -> TemplateChat:
    """Leave out lines at the beginning of the system text that are of no meaning to a model.

    Claude Code needs it: the first line of its system text is `x-anthropic-billing-header: ...`, another one in each
    conversation, so that two of them would share 26 of 21,393 tokens.
    """
    messages = list(chat.messages)
    for place, message in enumerate(messages):
        if message.get("role") not in SYSTEM:
            break
        content = message.get("content")
        stripped = _parts_without_headers(content) if isinstance(content, list) else _without_headers(content)
        if stripped != content:
            messages[place] = {**message, "content": stripped}
    return chat if messages == chat.messages else chat._replace(messages=messages)


def _without_headers(text: Any) -> Any:
    while isinstance(text, str) and text.startswith(CHANGING_HEADERS):
        text = text.partition("\n")[2]
    return text


def _parts_without_headers(parts: list[Any]) -> list[Any]:
    """Return the parts of a text without the headers at its beginning, and without parts that had nothing else."""
    for place, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if (stripped := _without_headers(text)) or stripped == text:
            return [part if stripped == text else {**part, "text": stripped}, *parts[place + 1 :]]
    return []


def with_ordered_schemas(chat: TemplateChat) -> TemplateChat:
    """Have the keys of tools and their schemas in one order: keywords as most clients have them, and properties as
    `required` lists them, the others sorted. A list stays as it is.

    Clients in Swift and Go need it, and tools that such programs offer: their maps have another order in each process.
    """
    tools = [_ordered(tool) for tool in chat.tools or ()]
    return chat if repr(tools) == repr(chat.tools or []) else chat._replace(tools=tools)


def _ordered(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_ordered(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    required = schema.get("required")
    first = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    ordered = {}
    for keyword in _sorted(schema, KEYWORDS):
        value = schema[keyword]
        if keyword in NAMES and isinstance(value, dict):
            ordered[keyword] = {name: _ordered(value[name]) for name in _sorted(value, first)}
        else:
            ordered[keyword] = _ordered(value)
    return ordered


def _sorted(keys: Json, first: list[str] | tuple[str, ...]) -> list[str]:
    places = {key: place for place, key in reversed(list(enumerate(first)))}
    return sorted(keys, key=lambda key: (places.get(key, len(first)), key))


Rule = Callable[[TemplateChat], TemplateChat]

RULES: dict[str, Rule] = {"headers": without_changing_headers, "schemas": with_ordered_schemas}
ANSWERS = "answers"  # the rule of `as_written`
EVERY_RULE = (*RULES, ANSWERS)


def canonical(chat: TemplateChat, rules: Collection[str] = EVERY_RULE) -> TemplateChat:
    """Return a chat as its template is to have it by these rules. What is given stays as it is."""
    for name, rule in RULES.items():
        chat = rule(chat) if name in rules else chat
    return chat


class CanonicalText:
    """The `rules` of one server, and how many prompts each has changed. Thread-safe."""

    def __init__(self, rules: Collection[str] = EVERY_RULE):
        self.rules = rules
        self._changed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, chat: TemplateChat) -> TemplateChat:
        """Return a chat as its template is to have it."""
        for name, rule in RULES.items():
            if name in self.rules and (changed := rule(chat)) is not chat:
                self.count(name)
                chat = changed
        return chat

    def count(self, rule: str) -> None:
        """Count a prompt that this rule has changed."""
        with self._lock:
            self._changed[rule] += 1

    def changed(self) -> dict[str, float]:
        """Return how many prompts each rule has changed."""
        with self._lock:
            return {name: float(self._changed[name]) for name in EVERY_RULE}
