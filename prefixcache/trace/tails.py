"""Which blocks of a recording begin with the tail of an earlier prompt.

A tail that has grown has a new id, so ids alone don't tell that the longer block goes on from the shorter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from prefixcache.keys import BLOCK, TOKEN_BYTES, chain
from prefixcache.trace.format import Grown


class _Tail(NamedTuple):
    parent: bytes  # the key of the block before it
    tokens: int
    last: bytes  # its last token
    id: int


class Tails:
    """The tails seen last, at most `limit`, of prompts looked up as well as stored. Not thread-safe.

    A tail that was looked up is remembered because the store that follows goes on from it, and a prompt that is asked again,
    or edited behind it, then shares its tokens with what was stored.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._tails: OrderedDict[bytes, _Tail] = OrderedDict()  # by key
        self._lasts: dict[bytes, dict[int, Counter[bytes]]] = {}  # parent -> tokens -> last token of so many tails
        self._compared: OrderedDict[int, None] = OrderedDict()  # ids of blocks that were compared with these tails

    def seen(self, keys: list[bytes], ids: list[int], token_bytes: bytes) -> list[Grown]:
        """Return the blocks of a prompt that go on from a tail; its own tail is remembered. `keys` begin with the root."""
        grown: list[Grown] = []
        for index, block_id in enumerate(ids):
            parent = keys[index]
            if parent in self._lasts and block_id not in self._compared:
                start = index * BLOCK * TOKEN_BYTES
                tail = self._longest(parent, token_bytes[start : start + BLOCK * TOKEN_BYTES])
                if tail is not None:
                    grown.append(Grown(index, tail.id, tail.tokens))
                self._compared[block_id] = None
                if len(self._compared) > self._limit:
                    self._compared.popitem(last=False)
        tokens = len(token_bytes) // TOKEN_BYTES % BLOCK
        if tokens:
            self._remember(keys[-1], _Tail(keys[-2], tokens, token_bytes[-TOKEN_BYTES:], ids[-1]))
        return grown

    def _longest(self, parent: bytes, block: bytes) -> _Tail | None:
        """Return the longest tail that a block begins with."""
        lasts = self._lasts[parent]
        for tokens in sorted(lasts, reverse=True):
            size = tokens * TOKEN_BYTES
            if size < len(block) and block[size - TOKEN_BYTES : size] in lasts[tokens]:  # else not worth a hash
                key = chain(parent, block[:size])
                if key in self._tails:
                    self._tails.move_to_end(key)
                    return self._tails[key]
        return None

    def _remember(self, key: bytes, tail: _Tail) -> None:
        if key in self._tails:
            self._tails.move_to_end(key)
            return
        self._tails[key] = tail
        self._lasts.setdefault(tail.parent, {}).setdefault(tail.tokens, Counter())[tail.last] += 1
        if len(self._tails) > self._limit:
            self._forget(self._tails.popitem(last=False)[1])

    def _forget(self, tail: _Tail) -> None:
        lasts = self._lasts[tail.parent]
        lasts[tail.tokens][tail.last] -= 1
        if not lasts[tail.tokens][tail.last]:
            del lasts[tail.tokens][tail.last]
        if not lasts[tail.tokens]:
            del lasts[tail.tokens]
        if not lasts:
            del self._lasts[tail.parent]
