"""Tokens, the keys chained over them, and the root key of a namespace.

Every other module takes tokens in the form made here (a one-dimensional int64 array, or its little-endian bytes) and
keys as 32 bytes. Nothing here knows blocks' contents, tiers or MLX.
Decision 0001 says why keys are SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

BLOCK = 256  # tokens a block
TOKEN_BYTES = 8  # an int64
KEY_BYTES = 32
PSEUDO_IDS = 1 << 62  # from here on ids stand for what is no text, see `media`
SESSION_LIMIT = 256  # characters of a session's name
MODEL_BYTES = 512  # a model's name, as UTF-8
_HALF = BLOCK * TOKEN_BYTES // 2

Tokens = Sequence[int] | np.ndarray


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens two prompts share."""
    a, b = as_tokens(a), as_tokens(b)
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if n and differ.any() else n


def as_tokens(tokens: Any) -> np.ndarray:
    """Return tokens as a contiguous one-dimensional little-endian int64 array; an array of that form is taken as it is.

    Takes a list, tuple or range of ints, or a one-dimensional integer array of NumPy or MLX. Negative ids are valid. Raises
    TypeError for what is not a sequence of integers (booleans and floats are not), ValueError for nested sequences and ids
    outside int64.
    """
    if isinstance(tokens, (np.ndarray, memoryview, array)):
        return _from_array(np.asarray(tokens))
    if hasattr(tokens, "dtype") and hasattr(tokens, "tolist") and hasattr(tokens, "ndim"):  # an mx.array, a tensor
        if tokens.ndim != 1:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}: pass one sequence, an array of one dimension")
        tokens = tokens.tolist()
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokens of type {type(tokens).__name__}: pass a list, tuple or integer array of token ids")
    kinds = set(map(type, tokens)) - {int}
    for kind in kinds:
        if issubclass(kind, (list, tuple, np.ndarray)):
            raise ValueError(f"tokens hold a nested {kind.__name__}: pass one flat sequence of token ids")
        if kind is bool or issubclass(kind, np.bool_) or not issubclass(kind, (int, np.integer)):
            raise TypeError(f"tokens hold a {kind.__name__}: token ids are integers")
    try:
        return np.array(tokens, dtype="<i8")
    except OverflowError:
        bad = next(int(t) for t in tokens if not -(2**63) <= t < 2**63)
        named = bad if bad.bit_length() < 256 else f"of {bad.bit_length()} bits"  # str() refuses 4300 digits
        raise ValueError(f"token id {named}: ids must fit in 64 bits, -2**63 to 2**63 - 1") from None


def _from_array(tokens: np.ndarray) -> np.ndarray:
    if tokens.ndim != 1:
        raise ValueError(f"tokens of shape {tokens.shape}: pass one sequence, an array of one dimension")
    if tokens.dtype.kind not in "iu":
        if not tokens.size:
            return np.empty(0, "<i8")
        raise TypeError(f"tokens of dtype {tokens.dtype}: token ids are integers")
    if tokens.dtype.kind == "u" and tokens.dtype.itemsize == 8 and tokens.size and int(tokens.max()) >= 2**63:
        raise ValueError(f"token id {int(tokens.max())}: ids must fit in 64 bits, -2**63 to 2**63 - 1")
    return np.ascontiguousarray(tokens, dtype="<i8")


def chain(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of `tokens` (raw int64 bytes) that follow the block whose key is `parent`: SHA-256 of both.

    In two parts, each below the 2,048 bytes from which on hashlib gives up the interpreter's lock: beside a busy thread, to
    get it back takes a hundred times as long as to hash a block.
    """
    hashed = hashlib.sha256(parent + tokens[:_HALF])
    hashed.update(tokens[_HALF:])
    return hashed.digest()


def as_model(model: Any) -> str:
    """Return a model's name. Raise TypeError unless it is a str, ValueError when it is empty or longer than 512 bytes as
    UTF-8.
    """
    if not isinstance(model, str):
        raise TypeError(f"model of type {type(model).__name__}: pass the model's name as a str")
    try:
        size = len(model.encode())
    except UnicodeEncodeError:
        raise ValueError(f"model {model[:40]!r}: the name holds characters that UTF-8 can't") from None
    if not 0 < size <= MODEL_BYTES:
        raise ValueError(f"model name of {size} bytes: give one of 1 to {MODEL_BYTES} bytes")
    return model


def as_salt(salt: Any) -> bytes:
    """Return a tenant's secret. Raise TypeError unless it is bytes, of any length. It is hashed, and kept nowhere."""
    if not isinstance(salt, (bytes, bytearray)):
        raise TypeError(f"salt of type {type(salt).__name__}: pass bytes, such as tenant_id.encode()")
    return bytes(salt)


def as_session(name: Any) -> str:
    """Return the name of a session. Raise ValueError unless it is a string of 1 to SESSION_LIMIT characters."""
    if not isinstance(name, str) or not 0 < len(name) <= SESSION_LIMIT:
        raise ValueError(f"session={str(name)[:50]!r}: give a name of 1 to {SESSION_LIMIT} characters, as requests do")
    return name


def root_key(model: str, codec: dict[str, Any], layout: dict[str, Any], salt: bytes) -> bytes:
    """Return the root key of a namespace: BLAKE2b over its identity as canonical JSON, keyed with a hash of the salt."""
    identity = canonical({"model": model, "codec": codec, "layout": layout, "block": BLOCK})
    secret = hashlib.blake2b(salt, person=b"prefixcache.salt").digest()
    return hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES, key=secret, person=b"prefixcache.root").digest()


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
