"""Two requests of one's own, compared as a server has their prompts: how many tokens they begin with alike, and what stands
where they part. `prefixcache explain` shows it, with text. Nothing here loads a model's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefixcache.keys import common_prefix
from prefixcache.servers.apis import Json, objects
from prefixcache.servers.apis.messages import TEXTS, Messages, MessagesRequest
from prefixcache.servers.apis.responses import Responses
from prefixcache.servers.canonical import RULES, TemplateChat, canonical
from prefixcache.servers.chat_messages import TemplateRoles, for_template
from prefixcache.servers.prompt_parts import TEXT, UNKNOWN, ChatText, Part, common_length, place_of, render_by
from prefixcache.servers.request_schema import ChatRequest, RequestRefused, TextRequest, checked

FIELDS = MessagesRequest.model_fields.keys() - ChatRequest.model_fields.keys()  # that only /v1/messages has
BLOCKS = (
    *(TEXTS.keys() - {"text"}),
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
)  # types of its own, too
AROUND = 80  # characters that are shown on both sides of a place


@dataclass(frozen=True)
class RequestReader:
    """Makes prompts of requests, as a server with this tokenizer does. `arguments`: of its chat template. `roles`: which
    messages the template takes.
    """

    tokenizer: Any
    roles: TemplateRoles
    arguments: Json

    def prompt(self, body: Json, rules: Sequence[str]) -> PromptText:
        """Return a request's prompt, by these rules of canonical text. RequestRefused where a server would refuse it."""
        body = {name: value for name, value in body.items() if value is not None}
        if "prompt" in body:
            text = checked(TextRequest, body)["prompt"]
            return PromptText(text, list(self.tokenizer.encode(text)))
        asked = checked(ChatRequest, chat_request(body))
        messages, tools = canonical(TemplateChat(asked["messages"], asked.get("tools")), rules)
        messages = for_template(messages, self.roles, images=False)
        render = render_by(self.tokenizer, {**self.arguments, **asked.get("chat_template_kwargs", {})})
        rendered = ChatText(render, messages, tools)
        try:
            text = rendered.text
        except Exception as error:  # a template raises what it likes
            raise RequestRefused(f"the prompt can't be read: {str(error)[:200]}") from error
        has_template = self.tokenizer.has_chat_template
        tokens = list(self.tokenizer.encode(text, add_special_tokens=not has_template))
        return PromptText(text, tokens, rendered if has_template else None, self.tokenizer)


def chat_request(body: Json) -> Json:
    """Return the chat request that a body of any of the APIs means; what only one of them has says which one it is."""
    if "input" in body:
        return Responses().chat_request(body)
    contents = [message.get("content") for message in objects(body.get("messages"))]
    has_blocks = any(block.get("type") in BLOCKS for content in contents for block in objects(content))
    if FIELDS & body.keys() or any("input_schema" in tool for tool in objects(body.get("tools"))) or has_blocks:
        return Messages().chat_request(body)
    return body


@dataclass(frozen=True)
class PromptText:
    """A prompt's text and tokens. `chat`: None of one that no chat template has made."""

    text: str
    tokens: list[int]
    chat: ChatText | None = None
    tokenizer: Any = None

    def place_of(self, position: int) -> int | None:
        """Return the character at which a token begins; of the place behind the last one, the text's end."""
        if position == len(self.tokens):
            return len(self.text)
        return place_of(self.tokenizer, self.text, self.tokens, position) if self.tokenizer is not None else None

    def part_at(self, place: int | None) -> Part:
        """Return the part in which a character is."""
        if self.chat is None or place is None:
            return Part(UNKNOWN if self.chat is not None or self.tokenizer is not None else TEXT)
        return self.chat.part_at(place)


class Side(NamedTuple):
    """One of two prompts: how many tokens it has, the part in which the other leaves it, and the text around that place."""

    tokens: int
    part: Part
    before: str
    behind: str


class Comparison(NamedTuple):
    """The `common` tokens with which both prompts begin; `switched`: how many those were with a rule of canonical text
    switched off, or on where it was off, by its name, where that changes where they part.
    """

    common: int
    first: Side
    second: Side
    switched: dict[str, int]

    @property
    def are_same(self) -> bool:
        return self.common == self.first.tokens == self.second.tokens


def compare(reader: RequestReader, first: Json, second: Json, *, rules: Sequence[str]) -> Comparison:
    """Compare two requests, by these rules of canonical text. RequestRefused where a server would refuse one of them."""
    texts = reader.prompt(first, rules), reader.prompt(second, rules)
    common = common_prefix(texts[0].tokens, texts[1].tokens)
    switched: dict[str, int] = {}
    for rule in RULES:
        others = [name for name in RULES if (name in rules) != (name == rule)]
        prompts = [reader.prompt(body, others).tokens for body in (first, second)]
        tokens = common_prefix(*prompts)
        rest = [len(each) - tokens for each in prompts]  # what the rule changes in what both have makes no difference
        if tokens != common and rest != [len(text.tokens) - common for text in texts]:
            switched[rule] = tokens
    first_side, second_side = _side(texts[0], texts[1], common), _side(texts[1], texts[0], common)
    return Comparison(common, first_side, second_side, switched)


def _side(text: PromptText, other: PromptText, common: int) -> Side:
    place = text.place_of(common)
    shown = common_length(text.text, other.text) if place is None else place
    before, behind = text.text[max(shown - AROUND, 0) : shown], text.text[shown : shown + AROUND]
    return Side(len(text.tokens), text.part_at(place), before, behind)
