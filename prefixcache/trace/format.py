"""The format of a trace: JSON Lines in the fields of Mooncake's traces, and three of our own. `recording` writes it and
`reading` reads it; only here is said what a field is called, what it may hold and what an id stands for.

    timestamp       milliseconds; of a recording since 1970
    call            "fetch" or "store"; missing, or "request": a prompt that is looked up and then stored
    block_size      tokens that an id stands for; missing: the same for the whole file, to be found or given
    input_length    tokens of the prompt
    output_length   tokens of the answer; 0 in a recording, which doesn't know it
    hash_ids        one id for each block of the prompt; an id stands for its block and all before it. The last may stand for
                    fewer tokens, or be missing
    grown           [[index in hash_ids, id of a tail, its tokens], ...]: blocks that begin with an earlier prompt's tail
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from prefixcache.keys import BLOCK, TOKEN_BYTES, chain

REQUEST, FETCH, STORE = CALLS = ("request", "fetch", "store")
MOONCAKE_BLOCK = 512  # tokens an id in Mooncake's published traces
LINE_BYTES = 1 << 26  # a longer line is no request
MAX = 2**63 - 1  # of every number
SECRET_BYTES = 32
ID_BITS = 53  # of a recording's ids: what every reader of JSON keeps exactly

LINES = "a trace has one JSON object a line with timestamp, input_length, output_length and hash_ids, plain or gzip"
GROWN_FORM = "write [[index in hash_ids, id of the tail, tokens of the tail], ...], or leave it out"


class Grown(NamedTuple):
    """A block that begins with an earlier prompt's tail: the block's place in its prompt, the tail's id and tokens."""

    place: int
    tail: int
    tokens: int


class LineError(ValueError):
    """A line that can't be used: which field, and what to do. The reader says which file and line."""


class NotJson(LineError):
    """A line that may be the torn end of a file."""


class Line(NamedTuple):
    """What a line says. `time` is in milliseconds, `block` the line's block_size."""

    time: float
    tokens: int
    output: int
    ids: Sequence[int]
    call: str = REQUEST
    block: int | None = None
    grown: Sequence[Grown] = ()


# -- ids --------------------------------------------------------------------------------------------------------------


def block_keys(root: bytes, token_bytes: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return the chained key of each 256 tokens, and one of a tail. `known`: the first keys, where the caller has them."""
    keys = list(known)
    for at in range(len(keys) * BLOCK * TOKEN_BYTES, len(token_bytes), BLOCK * TOKEN_BYTES):
        keys.append(chain(keys[-1] if keys else root, token_bytes[at : at + BLOCK * TOKEN_BYTES]))
    return keys


def block_ids(secret: bytes, keys: Sequence[bytes]) -> list[int]:
    """Return an id for each key: a keyed hash, 0 to 2**53 - 1. Without the secret it leads to no tokens and no key."""
    ids = []
    keyed = hashlib.blake2b(digest_size=8, key=secret)
    for key in keys:
        hashed = keyed.copy()  # two thirds of the time of a new one
        hashed.update(key)
        ids.append(int.from_bytes(hashed.digest(), "little") >> (64 - ID_BITS))
    return ids


# -- writing ----------------------------------------------------------------------------------------------------------


def encode(line: Line) -> bytes:
    """Return the line of a call that was recorded."""
    fields = {
        "timestamp": line.time,
        "call": line.call,
        "block_size": line.block,
        "input_length": line.tokens,
        "output_length": line.output,
        "hash_ids": line.ids,
    }
    return json.dumps(fields | {"grown": line.grown} if line.grown else fields).encode() + b"\n"


_TIME = b'{"timestamp": '  # how `encode` begins a line; `_CALLS`: how it goes on behind the number
_CALLS = [f', "call": "{call}", "block_size": {BLOCK}, '.encode() for call in (FETCH, STORE)]
HEAD_BYTES = 80  # no beginning of a line is longer


def begins_recording(head: bytes) -> bool:
    """Tell whether the first `HEAD_BYTES` of a file are a recording's, or all that a crash left of one."""
    begun = re.match(re.escape(_TIME) + rb"\d{1,19}", head)
    if not begun:
        return _TIME.startswith(head)
    rest = head[begun.end() :]
    return any(rest.startswith(call) or call.startswith(rest) for call in _CALLS)


# -- reading ----------------------------------------------------------------------------------------------------------


def decode(text: bytes, encoding: str = "utf-8") -> Line:
    """Return what a line says, checked. Raises LineError; NotJson when it is no JSON."""
    try:
        fields = json.loads(text.decode(encoding))
    except (ValueError, RecursionError):  # of the encoding, of JSON, of too many digits
        raise NotJson(f"not JSON; {LINES}") from None
    if not isinstance(fields, dict):
        raise LineError(f"{_kind(fields)}, not an object; {LINES}")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise LineError(f"{name} is missing; {LINES}")
    tokens, output = (_count(fields, name) for name in ("input_length", "output_length"))
    block = _count(fields, "block_size") if "block_size" in fields else None
    if block == 0:
        raise LineError("block_size is 0; write the tokens that an id stands for")
    call = fields.get("call", REQUEST)
    if call not in CALLS:
        raise LineError(f"call is none of {', '.join(CALLS)}; leave it out of a trace of whole requests")
    ids = _ids(fields["hash_ids"])
    grown = _grown(fields["grown"], len(ids)) if "grown" in fields else ()
    return Line(_time(fields["timestamp"]), tokens, output, ids, call, block, grown)


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LineError(f"timestamp is {_kind(value)}; write milliseconds")
    if not 0 <= value <= MAX:  # refuses a NaN too
        said = short(value) if isinstance(value, int) else value
        raise LineError(f"timestamp is {said}; write milliseconds, from 0 to 2**63 - 1")
    return value


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int:
        raise LineError(f"{name} is {_kind(value)}; write a whole number of tokens")
    if not 0 <= value <= MAX:
        raise LineError(f"{name} is {short(value)}; write a number of tokens, from 0 to 2**63 - 1")
    return value


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise LineError(f"hash_ids is {_kind(value)}; write a list of whole numbers")
    if set(map(type, value)) - {int}:
        kinds = sorted({_kind(item) for item in value if type(item) is not int})
        raise LineError(f"hash_ids holds {kinds[0]}; write a list of whole numbers")
    if value and not (min(value) >= 0 and max(value) <= MAX):
        bad = short(next(item for item in value if not 0 <= item <= MAX))
        raise LineError(f"hash_ids holds {bad}; write ids from 0 to 2**63 - 1, such as 63 bits of a hash")
    return value


def _grown(value: Any, ids: int) -> tuple[Grown, ...]:
    if not isinstance(value, list):
        raise LineError(f"grown is {_kind(value)}; {GROWN_FORM}")
    for item in value:
        if not isinstance(item, list) or len(item) != 3 or set(map(type, item)) != {int}:
            raise LineError(f"grown holds something else than lists of three whole numbers; {GROWN_FORM}")
        index, tail, tokens = item
        if not 0 <= index < ids:
            raise LineError(f"grown has index {short(index)}, but hash_ids has {ids} ids; {GROWN_FORM}")
        if not 0 <= tail <= MAX:
            raise LineError(f"grown holds id {short(tail)}; write ids from 0 to 2**63 - 1")
        if tokens < 1:
            raise LineError(f"grown has a tail of {short(tokens)} tokens; write one token or more")
    return tuple(Grown(*item) for item in value)


def short(value: int) -> str:
    return str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"


def _kind(value: Any) -> str:
    """Return what a JSON value is."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    return {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a fraction"}[type(value)]
