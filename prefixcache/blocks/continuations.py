"""How stored sequences go on behind tokens that they begin with, in whichever tier they are: what a prompt is compared with
that says the same in other tokens. Whether they can be hit says `lookup`.
"""

from __future__ import annotations

from itertools import islice

from prefixcache.blocks.node import Walk
from prefixcache.keys import TOKEN_BYTES


def continuations(walk: Walk, start: int, limit: int, most: int) -> set[bytes]:
    """Return the tokens (raw int64 bytes) that sequences have behind the first `start` of a walk, which knows those.

    At most `limit` tokens of each; sequences that are alike so far count once, and no more than `most` are looked at.
    """
    node = next((node for node in reversed(walk.path) if node.end <= start and node.is_whole), walk.tree.root)
    begin = walk.token_bytes[node.end * TOKEN_BYTES : start * TOKEN_BYTES]
    waiting = [(child, child.tokens[len(begin) :]) for child in islice(node.children_beginning(begin), most)]
    found: set[bytes] = set()
    while waiting and len(found) < most:
        node, tokens = waiting.pop()
        if node.children and len(tokens) < limit * TOKEN_BYTES:
            waiting += [(child, tokens + child.tokens) for child in islice(node.children, most)]
        elif tokens:
            found.add(tokens[: limit * TOKEN_BYTES])
    return found
