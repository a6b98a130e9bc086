"""Where the parts of a prompt end with which others begin: its tools, in templates that put them before all else, and its
system text. Models with recurrent layers keep their state there: decision 0046. `PromptTokenizer` asks, on a thread of a
client.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import date
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from prefixcache.keys import BLOCK, as_tokens, common_prefix
from prefixcache.servers.chat_messages import Message

log = logging.getLogger("prefixcache")

OTHER = "\x02"  # what no chat begins with, and shares no byte with what one does
REMEMBERED = 16  # beginnings
SYSTEM = "system"  # mlx-lm's kind of a segment that is tools and system text

Tokenize = Callable[[list[Message]], Any]


class LeadingEnds(NamedTuple):
    """After how many tokens of a prompt its leading parts end, 0 where it has none."""

    tools: int
    system: int


class LeadingParts:
    """Knows what chats with the same tools, or the same tools and system text, begin with. Thread-safe."""

    def __init__(self) -> None:
        self._others: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def ends(
        self, tokens: np.ndarray, messages: list[Message], terms: tuple[Any, ...], tokenize: Tokenize
    ) -> LeadingEnds:
        """Return the end of the last block of a prompt with which all chats of these `terms` begin (JSON: model, tools,
        options of the template), and the end of its system text. `tokenize` gives the tokens of other messages with them.
        """
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        others: list[Message] = [{"role": "system", "content": OTHER}] if leading else []
        tools_end = self._common(tokens, others, terms, tokenize) // BLOCK * BLOCK
        return LeadingEnds(tools_end, self._common(tokens, leading, terms, tokenize) if leading else 0)

    def _common(self, tokens: np.ndarray, leading: list[Message], terms: tuple[Any, ...], tokenize: Tokenize) -> int:
        """Return how many tokens a prompt shares with another chat that begins with these messages."""
        key = json.dumps([leading, date.today(), *terms], default=str)  # templates may write the day
        with self._lock:
            other = self._others.get(key)
            if other is not None:
                self._others.move_to_end(key)
        if other is None:
            other = self._tokens(leading, tokenize)
            with self._lock:
                self._others[key] = other
                while len(self._others) > REMEMBERED:
                    self._others.popitem(last=False)
        return common_prefix(tokens, other)

    @staticmethod
    def _tokens(leading: list[Message], tokenize: Tokenize) -> np.ndarray:
        try:
            others = [{"role": role, "content": OTHER} for role in ("user", "assistant")]
            return as_tokens(tokenize([*map(dict, leading), *others]))
        except Exception as error:  # a template raises what it likes
            log.debug("a prompt's beginning is not told from its rest: %s: %s", type(error).__name__, error)
            return as_tokens([])


def segments_at(tokenized: Any, ends: Iterable[int]) -> Any:
    """Return what mlx-lm's `_tokenize` gave with its first segment cut at these tokens, as far as it reaches."""
    prompt, (first, *later), kinds, *others = tokenized
    cuts = sorted({end for end in ends if 0 < end < len(first)})
    parts = [first[start:end] for start, end in pairwise([0, *cuts, len(first)])]
    return prompt, [*parts, *later], [*[SYSTEM] * len(cuts), *kinds], *others


def system_end(segments: Iterable[list[int]], kinds: Iterable[str]) -> int:
    """Return where tools and system text end, by mlx-lm's segments of a prompt; 0 where it doesn't say."""
    leading = takewhile(lambda pair: pair[1] == SYSTEM, zip(segments, kinds, strict=True))
    return max(accumulate(len(segment) for segment, _ in leading), default=0)
