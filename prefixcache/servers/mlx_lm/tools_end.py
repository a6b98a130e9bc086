"""Where the tools of a prompt end, in templates that put them before all else: other chats with the same tools part there at
the earliest, so a model with recurrent layers keeps its state there: decision 0046. `PromptTokenizer` asks, on a thread of a
client.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from prefixcache.keys import BLOCK, as_tokens, common_prefix
from prefixcache.servers.chat_messages import Message

log = logging.getLogger("prefixcache")

OTHER = "\u00a4"  # what no chat begins with
REMEMBERED = 16  # sets of tools

Tokenize = Callable[[list[Message]], Any]


class ToolsEnds:
    """Knows what chats with the same tools, but other messages, begin with. Thread-safe."""

    def __init__(self) -> None:
        self._others: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, tokens: np.ndarray, messages: list[Message], terms: tuple[Any, ...], tokenize: Tokenize) -> int:
        """Return the end of the last block of a prompt with which all chats of these `terms` begin (JSON: model, tools,
        options of the template). `tokenize` gives the tokens of other messages with them.
        """
        has_system = any(message["role"] == "system" for message in messages[:1])
        key = json.dumps([has_system, *terms], default=str)
        with self._lock:
            other = self._others.get(key)
            if other is not None:
                self._others.move_to_end(key)
        if other is None:
            other = self._tokens(["system"] * has_system, tokenize)
            with self._lock:
                self._others[key] = other
                while len(self._others) > REMEMBERED:
                    self._others.popitem(last=False)
        return common_prefix(tokens, other) // BLOCK * BLOCK

    @staticmethod
    def _tokens(leading: list[str], tokenize: Tokenize) -> np.ndarray:
        try:
            return as_tokens(tokenize([{"role": role, "content": OTHER} for role in [*leading, "user", "assistant"]]))
        except Exception as error:  # a template raises what it likes
            log.debug("no end of the tools: %s: %s", type(error).__name__, error)
            return as_tokens([])


def segment_at(tokenized: Any, end: int) -> Any:
    """Return what mlx-lm's `_tokenize` gave with its first segment cut after `end` tokens, where it is longer."""
    prompt, segments, kinds, *others = tokenized
    if not 0 < end < len(segments[0]):
        return tokenized
    first, *later = segments
    return prompt, [first[:end], first[end:], *later], ["system", *kinds], *others
