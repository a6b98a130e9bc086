"""What is asked of the cache: the requests of the trace, as tokens of tenants, and the state that those tokens have.

Everything here is a function of the trace and of the tokens, so that the server under test and its judge, in another
process, each work out by themselves what a right answer is. NumPy only.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

TRACE = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "traces" / "coding_agents.jsonl.gz"

FIRST_TOKEN = 7_310_000_000_000_000  # tokens are told by their digits, wherever they may turn up
TOKEN_TEXT = re.compile(r"(?<![0-9a-fA-F])731\d{13}(?![0-9a-fA-F])")
SALT_TEXT = "tenant-of-the-soak-"
WIDTH = 8  # of a row
KINDS = ("sliceable", "sliceable", "windowed", "sliceable", "hybrid", "sinks")

_ODD = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Tenant(NamedTuple):
    """Whose prompt it is: what the cache must keep apart, and how the model's caches are laid out."""

    model: str
    salt: bytes
    kind: str

    @property
    def seed(self) -> np.uint64:
        said = f"{self.model}|{self.salt.hex()}|{self.kind}".encode()
        return np.uint64(int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little"))


class Request(NamedTuple):
    """`prompt` and `answer` are int64 tokens."""

    number: int
    tenant: Tenant
    prompt: np.ndarray
    answer: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.answer])


class Trace:
    """The requests, without end: after the last one all begin again with other tokens."""

    def __init__(self, path: Path = TRACE, run: int = 24):
        """`run`: how many tokens a block of the trace becomes."""
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            self._blocks = [np.array(json.loads(line)["hash_ids"], np.int64) for line in lines]
        self.run = run
        self._span = 1 + max(int(ids.max()) for ids in self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def request(self, number: int) -> Request:
        lap, at = divmod(number, len(self._blocks))
        ids = self._blocks[at] + lap * self._span
        prompt = FIRST_TOKEN + (ids[:, None] * 64 + np.arange(self.run)).reshape(-1)
        answer = FIRST_TOKEN + 10**12 + number * 64 + np.arange(1 + number % 13)
        return Request(number, _tenant(int(ids[0])), prompt, answer)


def _tenant(first: int) -> Tenant:
    """A session is known by its first block, and so are its kind, its model and its salt."""
    chance = hashlib.blake2b(b"session %d" % first, digest_size=4).digest()
    salt = f"{SALT_TEXT}{chance[2] % 3}".encode() if chance[1] % 3 == 0 else b""
    return Tenant(f"soak-{'ab'[chance[3] % 2]}", salt, KINDS[chance[0] % len(KINDS)])


def prefixes(tokens: np.ndarray, tenant: Tenant) -> np.ndarray:
    """A 64-bit hash of each prefix of these tokens, as the tenant's model sees it."""
    weights = np.cumprod(np.full(len(tokens), _ODD, np.uint64))
    return _mix(np.cumsum(_mix(tokens.astype(np.uint64)) * weights, dtype=np.uint64) + tenant.seed)


def rows(hashes: np.ndarray, stream: int) -> np.ndarray:
    """(positions, WIDTH) float32: the rows of one stream of keys or values, of 23 random bits each, below 1024."""
    channel = _mix(np.arange(stream * WIDTH, (stream + 1) * WIDTH, dtype=np.uint64))
    return (_mix(hashes[:, None] ^ channel) >> np.uint64(41)).astype(np.float32) / np.float32(1 << 13)


def digest(keys: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(keys).tobytes(), digest_size=8).hexdigest()


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))
