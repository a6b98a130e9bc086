"""Reads traces: who asked for which blocks, and when. Mooncake's JSONL and the server's own recordings, plain or gzip.

A `Trace` is read anew from its file on each pass, a line at a time, so it may be larger than RAM. What a line may say is
`format`'s; that the lines agree with each other is checked here. What a cache makes of the requests is for `simulator` and
`bound` to say.
"""

from __future__ import annotations

import gzip
import logging
import stat
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from prefixcache.trace.format import (
    LINE_BYTES,
    LINES,
    MAX,
    MOONCAKE_BLOCK,
    REQUEST,
    STORE,
    Grown,
    Line,
    LineError,
    NotJson,
    decode,
    short,
)

log = logging.getLogger("prefixcache")

CHUNK = 1 << 20  # bytes read at once
SAMPLE = 100  # requests that tell the block size
PLACES = 1 << 22  # of the table in which contradictions are looked for: 64 MiB of address space, used as ids come
EXACT = 1 << 22  # distinct blocks that `summary` counts exactly
ROOT = -1  # the parent of a prompt's first block; ids are never negative


class TraceError(ValueError):
    """A trace that can't be used; says which file, line and field, and what to do."""


class Request(NamedTuple):
    """One line of a trace.

    `time` is in seconds since the trace's first line and never goes back. `tokens` and `output` are the lengths of the prompt
    and of the answer. `ids` has one id for each `Trace.block` tokens of the prompt; an id stands for its block and all before
    it. The last may stand for fewer tokens, or be missing: some traces give a tail no id. `call` is "request" for a prompt
    that is looked up and then stored, as in Mooncake's traces; the server's recordings have "fetch" and "store".

    `grown` are the blocks that begin with an earlier prompt's tail.
    """

    time: float
    tokens: int
    output: int
    ids: tuple[int, ...]
    call: str = REQUEST
    grown: tuple[Grown, ...] = ()


class Trace:
    """The requests of a file, in its order; iterable any number of times, in constant memory.

    `block` is the tokens that an id stands for: as given, or as the lines' own `block_size` says, or found from the lengths
    of the first lines. `limit` keeps that many requests. After a pass, `torn` says whether the file ended within a line or a
    gzip stream (what was cut off is left out), and `backwards` how many timestamps went back (they count as the time before).

    Raises TraceError, now or in a pass: no such file, not a trace, no request in it, a line with a field that is missing or
    wrong, an id under two parents. Those are looked for among the ids last seen, some 4 million of them.
    """

    def __init__(self, path: str | Path, block: int | None = None, *, limit: int | None = None):
        self.path = Path(path)
        self.limit = _count_or_none("limit", limit)
        self.torn = False
        self.backwards = 0
        self._hinted = False
        self._given = _count_or_none("block", block)
        first = list(islice(self._lines(), SAMPLE))
        if not first:
            raise self._empty()
        self.block: int = self._given or first[0][1].block or _block_of(self.path, first)

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}, block={self.block})"

    def __iter__(self) -> Iterator[Request]:
        self.torn, self.backwards = False, 0
        parents = _Parents(self.path)
        start = now = None
        for number, line in islice(self._lines(), self.limit):
            self._check_length(number, line)
            parents.check(number, np.array(line.ids, np.int64))
            if start is None or now is None:
                start = now = line.time
            self.backwards += line.time < now
            now = max(now, line.time)
            yield Request((now - start) / 1000, line.tokens, line.output, tuple(line.ids), line.call, tuple(line.grown))
        if start is None:
            raise self._empty()

    def _check_length(self, number: int, line: Line) -> None:
        if self._given is None and line.block not in (None, self.block):
            said = f"block_size is {line.block}, but {self.block} before; make a trace of each, or give one size with --block"
            raise _wrong(self.path, number, said)
        least, most = line.tokens // self.block, -(-line.tokens // self.block)
        if not least <= len(line.ids) <= most:
            said = f"hash_ids has {_ids_of(line)}, which is not one for each {self.block} tokens and at most one for a tail"
            raise _wrong(self.path, number, f"{said}; give the tokens that an id stands for with --block")
        longest = max((grown.tokens for grown in line.grown), default=0)
        if longest >= self.block:
            said = f"grown has a tail of {short(longest)} tokens, but an id stands for {self.block}"
            raise _wrong(self.path, number, f"{said}; write fewer than that, or leave grown out")

    def _lines(self) -> Iterator[tuple[int, Line]]:
        """Yield the lines that are requests, and their numbers."""
        for number, (text, whole) in enumerate(_split(self.path), 1):
            if whole and not text.strip():
                continue
            try:
                yield number, decode(text, "utf-8-sig" if number == 1 else "utf-8")
            except NotJson as error:
                if whole:
                    raise _wrong(self.path, number, str(error)) from None
                self._cut(number)
            except LineError as error:
                raise _wrong(self.path, number, str(error)) from None

    def _cut(self, number: int) -> None:
        self.torn = True
        if not self._hinted:
            self._hinted = True
            log.warning("%s ends within line %d or its gzip stream: what was cut off is left out", self.path, number)

    def _empty(self) -> TraceError:
        torn = " (it is cut off)" if self.torn else ""
        return TraceError(f"{self.path}: no request in it{torn}; {LINES}")


class TraceSummary(NamedTuple):
    """What a trace amounts to. `requests`, `tokens`, `output`, `ids` and `longest` (tokens) are of the prompts that were
    looked up; `stores` are a recording's other calls. `seconds` is from the first call to the last.

    `blocks` are distinct ids of both: exact up to 4 million, beyond that an estimate to a few thousandths (`exact` is False).
    """

    requests: int
    stores: int
    tokens: int
    output: int
    ids: int
    blocks: int
    exact: bool
    seconds: float
    longest: int

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.requests if self.requests else 0.0


def summary(trace: Iterable[Request]) -> TraceSummary:
    """Read the trace once, in bounded memory, and return what it amounts to."""
    requests = stores = tokens = output = ids = longest = 0
    seconds = 0.0
    distinct = _Distinct()
    for request in trace:
        seconds = request.time  # of a trace it begins at 0
        distinct.add(request.ids)
        if request.call == STORE:
            stores += 1
            continue
        requests += 1
        tokens += request.tokens
        output += request.output
        ids += len(request.ids)
        longest = max(longest, request.tokens)
    blocks, exact = distinct.count()
    return TraceSummary(requests, stores, tokens, output, ids, blocks, exact, seconds, longest)


class DistinctCount(NamedTuple):
    """How many different ids there are, and whether that is exact."""

    blocks: int
    exact: bool


class _Distinct:
    """How many different ids were added. All are kept while they are few; then a half, a quarter and so on, by hash."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint64)
        self._added: list[int] = []
        self._halvings = 0

    def add(self, ids: Iterable[int]) -> None:
        self._added.extend(ids)
        if len(self._added) >= CHUNK:
            self._merge()

    def count(self) -> DistinctCount:
        self._merge()
        return DistinctCount(len(self._kept) << self._halvings, not self._halvings)

    def _merge(self) -> None:
        added = self._below(_mixed(np.array(self._added, np.int64).view(np.uint64)))
        self._added.clear()
        self._kept = np.unique(np.concatenate([self._kept, added]))
        while len(self._kept) > EXACT:
            self._halvings += 1
            self._kept = self._below(self._kept)

    def _below(self, mixed: np.ndarray) -> np.ndarray:
        return mixed if not self._halvings else mixed[mixed >> np.uint64(64 - self._halvings) == 0]


def _mixed(ids: np.ndarray) -> np.ndarray:
    """Mix by a bijection of uint64 that spreads neighbours (the finaliser of SplitMix64, public domain)."""
    ids = (ids ^ (ids >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    ids = (ids ^ (ids >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ids ^ (ids >> np.uint64(31))


class _Parents:
    """The block that each id was seen to follow. Direct-mapped: an id may push another out, so in a trace of millions of ids
    a contradiction may be overlooked, and none is ever made up.
    """

    def __init__(self, path: Path):
        self._path = path
        self._ids = np.zeros(PLACES, np.int64)
        self._ids[0] = 1  # id 0 belongs there and was not seen yet; id 1 belongs elsewhere
        self._parents = np.zeros(PLACES, np.int64)

    def check(self, number: int, ids: np.ndarray) -> None:
        """Raise TraceError when one of a prompt's ids followed another parent before, or does so twice in it."""
        parents = np.empty_like(ids)
        parents[:1], parents[1:] = ROOT, ids[:-1]
        places = (ids ^ (ids >> 22) ^ (ids >> 44)) & (PLACES - 1)
        self._compare(number, ids, parents, places)
        new = self._ids[places] != ids
        if new.any():
            ids, parents, places = ids[new], parents[new], places[new]
            self._ids[places] = ids
            self._parents[places] = parents
            self._compare(number, ids, parents, places)

    def _compare(self, number: int, ids: np.ndarray, parents: np.ndarray, places: np.ndarray) -> None:
        before = self._parents[places]
        wrong = (before != parents) & (self._ids[places] == ids)
        if wrong.any():
            at = int(wrong.argmax())
            here, there = (_named(int(parent[at])) for parent in (parents, before))
            said = f"hash_ids has id {int(ids[at])} after {here}, but also after {there}"
            rule = "an id stands for its block and all before it: after another prefix the block needs an id of its own"
            raise _wrong(self._path, number, f"{said}; {rule}")


def _named(parent: int) -> str:
    return "nothing (a prompt's first block)" if parent == ROOT else f"id {parent}"


def _ids_of(line: Line) -> str:
    return f"{len(line.ids)} ids for an input_length of {line.tokens}"


def _block_of(path: Path, lines: list[tuple[int, Line]]) -> int:
    """Return the tokens an id, by lengths and numbers of ids: 512 (Mooncake's), the only power of two, the only number."""
    least, most = 1, MAX
    for number, line in lines:
        count = len(line.ids)
        least = max(least, line.tokens // (count + 1) + 1)
        if count > 1:
            most = min(most, (line.tokens - 1) // (count - 1))
        if least > most:
            said = f"hash_ids has {_ids_of(line)}, which no number of tokens an id fits that fits the lines before"
            raise _wrong(path, number, f"{said}; give it with --block, or mend the line")
    if least <= MOONCAKE_BLOCK <= most:
        return MOONCAKE_BLOCK
    powers = [1 << bits for bits in range(64) if least <= 1 << bits <= most]
    if len(powers) == 1 or least == most:
        return powers[0] if powers else least
    raise TraceError(f"{path}: an id may stand for {least} to {most} tokens; say for how many with --block")


def _split(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines and whether each is whole: not what follows the last newline, nor the end of a cut gzip stream."""
    rest = b""
    number = 1
    with _opened(path) as file:
        while True:
            try:
                chunk = file.read1(CHUNK)  # type: ignore[attr-defined]
            except EOFError:  # the gzip stream is cut off
                if rest.strip():
                    yield rest, False
                yield b"", False
                return
            except (OSError, zlib.error) as error:
                raise TraceError(
                    f"{path}: unreadable after line {number - 1} ({error}); copy or record it anew"
                ) from None
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            number += len(lines)
            yield from ((line, True) for line in lines)
            if len(rest) > LINE_BYTES:
                raise _wrong(path, number, f"longer than {LINE_BYTES >> 20} MiB; {LINES}")
    if rest.strip():
        yield rest, False


def _opened(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            what = "a folder" if path.is_dir() else "no regular file"
            raise TraceError(f"{path}: {what}; give the trace's file (a trace is read more than once)")
        with path.open("rb") as file:
            head = file.read(4096)
        packed = head.startswith(b"\x1f\x8b")
        if not packed and b"\0" in head and not head.lstrip().startswith(b"{"):  # a crash may leave NULs at the end
            raise TraceError(f"{path}: a binary file; {LINES}")
        return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TraceError(f"{path}: can't be read ({reason}); give the trace's file") from None


def _count_or_none(name: str, value: int | None) -> int | None:
    if value is None or (type(value) is int and value > 0):
        return value
    raise TraceError(f"{name}={value!r}: write a whole number from 1 on, or leave it out")


def _wrong(path: Path, number: int, said: str) -> TraceError:
    return TraceError(f"{path}, line {number}: {said}")
