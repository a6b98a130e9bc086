"""How a model's answers are read: its tokenizer's marks of thoughts and calls, and mlx-lm's parser of its calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

Reading = tuple[str, ...]  # marks, texts without white space around them, and calls as JSON, in their order


class MarkReader:
    """Reads answers as the server told them to their client: `as_written` asks it. `tools`: those of the request."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None):
        self.ends = frozenset(tokenizer.eos_token_ids)
        self.thought: str = tokenizer.think_start or ""
        self._tokenizer, self._tools = tokenizer, tools
        self._call = tokenizer.tool_call_start
        marks = (tokenizer.think_start, tokenizer.think_end, tokenizer.tool_call_start, tokenizer.tool_call_end)
        self._marks = re.compile(f"({'|'.join(re.escape(mark) for mark in marks if mark) or '(?!)'})")

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def meaning(self, text: str) -> Reading:
        meaning: list[str] = []
        for part in self._marks.split(text):
            if meaning and meaning[-1] == self._call:
                meaning.append(self._call_in(part))
            elif part.strip():
                meaning.append(part.strip())
        return tuple(meaning)

    def _call_in(self, text: str) -> str:
        """Return a call as JSON with its keys sorted; as it stands where it can't be read."""
        for parse in (self._tokenizer.tool_parser, _literal):
            try:
                return json.dumps(_plain(parse(text, self._tools)), sort_keys=True)
            except Exception:  # parsers raise what they like
                continue
        return text.strip()


def _literal(text: str, tools: Any) -> Any:
    """Return a call that a template has printed as Python does."""
    return ast.literal_eval(text.strip())


def _plain(value: Any) -> Any:
    """Return a value with whole numbers as integers, as some clients send them back."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
