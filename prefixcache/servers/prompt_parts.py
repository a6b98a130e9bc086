"""In which part of a chat a place of its prompt's text lies: the system text, the tools, a message, or what the template
writes by itself.

Templates look ahead and move things about, so nothing is guessed: a part is marked, and the chat is rendered again. The part
is where the mark comes out. Where the text changes before or behind that, too, nothing is told (decision 0045).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from prefixcache.servers.chat_messages import Message

Tools = list[dict[str, Any]]

SYSTEM, TOOLS, MESSAGE, TEMPLATE, TEXT, UNKNOWN = "system", "tools", "message", "template", "text", "unknown"
WORDS = {
    SYSTEM: "the system text",
    TOOLS: "the tools",
    MESSAGE: "a message",
    TEMPLATE: "what the chat template writes by itself",
    TEXT: "the text",
    UNKNOWN: "a part that can't be told",
}
MARKS = tuple(f"qzx{number}jkv" for number in range(8))  # the first that the text doesn't have is taken
LONGEST = 1 << 22  # characters of a text that is looked at
AS_IS = ("role", "type", "id", "tool_call_id")  # fields that templates compare: they get no mark


class Part(NamedTuple):
    """A part of a prompt. `number`: which message it is of `total`, counted from 1; 0 of what is none or can't be told."""

    name: str
    number: int = 0
    total: int = 0

    def in_words(self) -> str:
        """Return the part's name for people."""
        return f"message {self.number} of {self.total}" if self.number else WORDS[self.name]


class Render(Protocol):
    """A model's chat template."""

    def __call__(self, messages: list[Message], tools: Tools | None, *, answer_follows: bool) -> str:
        """Return the text of a chat. `answer_follows`: it ends with what an answer begins with."""


def render_by(tokenizer: Any, arguments: dict[str, Any]) -> Render:
    """Return the chat template of mlx-lm's `tokenizer`, called with these arguments, as mlx_lm.server calls it."""
    from mlx_lm.server import convert_chat, process_message_content

    def render(messages: list[Message], tools: Tools | None, *, answer_follows: bool) -> str:
        chat = copy.deepcopy(messages)
        process_message_content(chat)
        if not tokenizer.has_chat_template:
            return str(convert_chat(chat))
        options = {**arguments, "tools": tools, "tokenize": False, "add_generation_prompt": answer_follows}
        return str(tokenizer.apply_chat_template(chat, **options))

    return render


def place_of(tokenizer: Any, text: str, tokens: Sequence[int], position: int) -> int | None:
    """Return the character of `text` at which the token at `position` begins; None where the text has other tokens, or the
    tokenizer doesn't tell.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    encoded = backend.encode(text, add_special_tokens=False)
    if position >= len(encoded.ids) or encoded.ids[: position + 1] != list(tokens[: position + 1]):
        return None
    return int(encoded.offsets[position][0])


class Around(NamedTuple):
    """The messages around a place, as far as they can be told: the `last` one that begins at or before it, -1 for none, and
    the first one that begins behind it.
    """

    last: int
    following: int


@dataclass(frozen=True)
class ChatText:
    """A chat as the template's text. To find one place it is rendered again some ten times, and once more for each doubling
    of its messages.
    """

    render: Render
    messages: list[Message]
    tools: Tools | None = None

    @cached_property
    def text(self) -> str:
        return self.render(self.messages, self.tools, answer_follows=True)

    @cached_property
    def mark(self) -> str:
        """A mark that the text doesn't have; "" where it has all."""
        return next((mark for mark in MARKS if mark not in self.text), "")

    def part_at(self, place: int) -> Part:
        """Return the part in which a character of the text lies. The end of a part counts as in it: it may go on."""
        if len(self.text) > LONGEST or not self.mark:
            return Part(UNKNOWN)
        if self._is_of_tools(place):
            return Part(TOOLS)
        number, following = self._around(place)
        if number < 0:
            return Part(TEMPLATE) if following == 0 else Part(MESSAGE)
        end = self._end(number)
        if end is not None and place <= end:
            return self._part(number)
        closed = self._closed(number)
        if closed is not None and place < closed:
            return self._part(number)
        if closed is None or following > number + 1:
            return Part(MESSAGE)
        return self._part(number + 1) if number + 1 < len(self.messages) else Part(TEMPLATE)

    def _part(self, number: int) -> Part:
        if number == 0 and self.messages[0].get("role") == "system":
            return Part(SYSTEM)
        return Part(MESSAGE, number + 1, len(self.messages))

    # -- tools --------------------------------------------------------------------------------------------------------

    def _is_of_tools(self, place: int) -> bool:
        """Tell whether a place is in what the text has because of its tools: behind what it shares with the chat that has
        none, up to where one more would be.
        """
        if not self.tools:
            return False
        without = self._rendered(self.messages, None)
        more = self._rendered(self.messages, [*self.tools, {"type": "function", "function": {"name": self.mark}}])
        if not without or self.mark not in more:
            return False
        begin, end = common_length(self.text, without), common_length(self.text, more)
        return begin <= place <= end and not (place == begin == self._end(0))  # a system text that ends there may go on

    # -- messages -----------------------------------------------------------------------------------------------------

    def _around(self, place: int) -> Around:
        before, behind = -1, len(self.messages)
        while behind - before > 1:
            middle = (before + behind) // 2
            near = sorted(range(before + 1, behind), key=lambda number: abs(number - middle))[:3]
            begins = ((number, begin) for number in near if (begin := self._begin(number)) is not None)
            known = next(begins, None)
            if known is None:
                break
            number, begin = known
            before, behind = (number, behind) if begin <= place else (before, number)
        return Around(before, behind)

    def _begin(self, number: int) -> int | None:
        """Return where the first text of a message begins."""
        before, mark, _ = self._with_mark(number, at_end=False).partition(self.mark)
        return len(before) if mark and self.text.startswith(before) else None

    def _end(self, number: int) -> int | None:
        """Return where the last text of a message ends."""
        _, mark, behind = self._with_mark(number, at_end=True).rpartition(self.mark)
        return len(self.text) - len(behind) if mark and self.text.endswith(behind) else None

    def _closed(self, number: int) -> int | None:
        """Return where all that belongs to a message ends, and the next one, or the answer, begins."""
        beginning = self._rendered(self.messages[: number + 1], self.tools, answer_follows=False)
        return len(beginning) if beginning and self.text.startswith(beginning) else None

    def _with_mark(self, number: int, *, at_end: bool) -> str:
        """Return the text with each text of a message marked; "" where that can't be rendered."""
        try:
            marked = _marked(self.messages[number], self.mark, at_end=at_end)
        except ValueError:  # arguments that are no JSON
            return ""
        return self._rendered([*self.messages[:number], marked, *self.messages[number + 1 :]], self.tools)

    def _rendered(self, messages: list[Message], tools: Tools | None, *, answer_follows: bool = True) -> str:
        """Return the text of another chat; "" where the template raises an exception of it."""
        try:
            return self.render(messages, tools, answer_follows=answer_follows)
        except Exception:  # it may be any
            return ""


def common_length(text: str, other: str) -> int:
    """Return how many leading characters two texts share."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _marked(value: Any, mark: str, *, at_end: bool) -> Any:
    """Return a message or a tool with the mark before, or behind, each text in it; a call's arguments stay JSON."""
    if isinstance(value, str):
        return value and (value + mark if at_end else mark + value)
    if isinstance(value, list):
        return [_marked(item, mark, at_end=at_end) for item in value]
    if isinstance(value, dict):
        return {
            name: item if name in AS_IS else _marked(_read(item) if name == "arguments" else item, mark, at_end=at_end)
            for name, item in value.items()
        }
    return value


def _read(arguments: Any) -> Any:
    """Return a call's arguments as an object, as mlx-lm gives them to templates."""
    return json.loads(arguments) if isinstance(arguments, str) and arguments else arguments
