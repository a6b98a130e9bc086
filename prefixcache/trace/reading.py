"""Traces of requests: who asked for which blocks, and when. Reads Mooncake's JSONL and the server's own recordings, plain
or gzip.

A `Trace` is read anew from its file on each pass, a line at a time, so it may be larger than RAM; what a line says is checked
here and nowhere else. What a cache makes of the requests is for `simulator` and `bound` to say.
"""

from __future__ import annotations

import gzip
import json
import logging
import stat
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

log = logging.getLogger("prefixcache")

MOONCAKE_BLOCK = 512  # tokens an id in Mooncake's published traces
CALLS = ("request", "fetch", "store")
LINE_BYTES = 1 << 26  # a longer line is no request
CHUNK = 1 << 20  # bytes read at once
SAMPLE = 100  # requests that tell the block size
PLACES = 1 << 22  # of the table in which contradictions are looked for: 64 MiB of address space, used as ids come
EXACT = 1 << 22  # distinct blocks that `summary` counts exactly
ROOT = -1  # the parent of a prompt's first block; ids are never negative

_FORMAT = "a trace has one JSON object a line with timestamp, input_length, output_length and hash_ids, plain or gzip"


class TraceError(ValueError):
    """A trace that can't be used; says which file, line and field, and what to do."""


class Request(NamedTuple):
    """One line of a trace.

    `time` is in seconds since the trace's first line and never goes back. `tokens` and `output` are the lengths of the prompt
    and of the answer. `ids` has one id for each `Trace.block` tokens of the prompt; an id stands for its block and all before
    it. The last may stand for fewer tokens, or be missing: some traces give a tail no id. `call` is "request" for a prompt
    that is looked up and then stored, as in Mooncake's traces; the server's recordings have "fetch" and "store".

    `grown` tells of blocks that begin with an earlier prompt's tail: the block's index in `ids`, the tail's id, its tokens.
    """

    time: float
    tokens: int
    output: int
    ids: tuple[int, ...]
    call: str = "request"
    grown: tuple[tuple[int, int, int], ...] = ()


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
        self.block: int = self._given or first[0].block or _found_block(self.path, first)

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}, block={self.block})"

    def __iter__(self) -> Iterator[Request]:
        self.torn, self.backwards = False, 0
        parents = _Parents(self.path)
        start = now = None
        for line in islice(self._lines(), self.limit):
            self._check_length(line)
            parents.check(line.number, line.array)
            if start is None or now is None:
                start = now = line.time
            self.backwards += line.time < now
            now = max(now, line.time)
            yield Request((now - start) / 1000, line.tokens, line.output, tuple(line.ids), line.call, line.grown)
        if start is None:
            raise self._empty()

    def _check_length(self, line: _Line) -> None:
        if self._given is None and line.block not in (None, self.block):
            said = f"block_size is {line.block}, but {self.block} before; make a trace of each, or give one size with --block"
            raise _wrong(self.path, line.number, said)
        least, most = line.tokens // self.block, -(-line.tokens // self.block)
        if not least <= len(line.ids) <= most:
            said = f"hash_ids has {_ids_of(line)}, which is not one for each {self.block} tokens and at most one for a tail"
            raise _wrong(self.path, line.number, f"{said}; give the tokens that an id stands for with --block")
        longest = max((tokens for _, _, tokens in line.grown), default=0)
        if longest >= self.block:
            said = f"grown has a tail of {_short(longest)} tokens, but an id stands for {self.block}"
            raise _wrong(self.path, line.number, f"{said}; write fewer than that, or leave grown out")

    def _lines(self) -> Iterator[_Line]:
        for number, (text, whole) in enumerate(_split(self.path), 1):
            if whole and not text.strip():
                continue
            try:
                fields = json.loads(text.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError):  # of the encoding, of JSON, of too many digits
                if whole:
                    raise _wrong(self.path, number, f"not JSON; {_FORMAT}") from None
                self._cut(number)
                continue
            yield _line(self.path, number, fields)

    def _cut(self, number: int) -> None:
        self.torn = True
        if not self._hinted:
            self._hinted = True
            log.warning("%s ends within line %d or its gzip stream: what was cut off is left out", self.path, number)

    def _empty(self) -> TraceError:
        torn = " (it is cut off)" if self.torn else ""
        return TraceError(f"{self.path}: no request in it{torn}; {_FORMAT}")


class Summary(NamedTuple):
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

    @property
    def mean_ids(self) -> float:
        return self.ids / self.requests if self.requests else 0.0


def summary(trace: Iterable[Request]) -> Summary:
    """One pass, in bounded memory."""
    requests = stores = tokens = output = ids = longest = 0
    seconds = 0.0
    distinct = _Distinct()
    for request in trace:
        seconds = request.time  # of a trace it begins at 0
        distinct.add(request.ids)
        if request.call == "store":
            stores += 1
            continue
        requests += 1
        tokens += request.tokens
        output += request.output
        ids += len(request.ids)
        longest = max(longest, request.tokens)
    blocks, exact = distinct.count()
    return Summary(requests, stores, tokens, output, ids, blocks, exact, seconds, longest)


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

    def count(self) -> tuple[int, bool]:
        self._merge()
        return len(self._kept) << self._halvings, not self._halvings

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
    """A bijection of uint64 that spreads neighbours (the finaliser of SplitMix64, public domain)."""
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
        """TraceError when one of a prompt's ids followed another parent before, or does so twice in it."""
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


class _Line(NamedTuple):
    """What a line says: `time` in milliseconds, `array` the ids once more, as int64, `block` its own block_size, if any."""

    number: int
    time: float
    tokens: int
    output: int
    ids: list[int]
    array: np.ndarray
    call: str
    block: int | None
    grown: tuple[tuple[int, int, int], ...]


def _line(path: Path, number: int, fields: Any) -> _Line:
    if not isinstance(fields, dict):
        raise _wrong(path, number, f"a JSON {_kind(fields)}, not an object; {_FORMAT}")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise _wrong(path, number, f"{name} is missing; {_FORMAT}")
    tokens, output = (_count(path, number, fields, name) for name in ("input_length", "output_length"))
    block = _count(path, number, fields, "block_size") if "block_size" in fields else None
    if block == 0:
        raise _wrong(path, number, "block_size is 0; write the tokens that an id stands for")
    call = fields.get("call", "request")
    if call not in CALLS:
        raise _wrong(path, number, f"call is none of {', '.join(CALLS)}; leave it out of a trace of whole requests")
    array = _ids(path, number, fields["hash_ids"])
    grown = _grown(path, number, fields["grown"], len(array)) if "grown" in fields else ()
    time = _time(path, number, fields["timestamp"])
    return _Line(number, time, tokens, output, fields["hash_ids"], array, call, block, grown)


def _time(path: Path, number: int, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(path, number, f"timestamp is a {_kind(value)}; write milliseconds")
    if not 0 <= value < 2**63:  # refuses a NaN too
        said = _short(value) if isinstance(value, int) else value
        raise _wrong(path, number, f"timestamp is {said}; write milliseconds, from 0 to 2**63 - 1")
    return value


def _count(path: Path, number: int, fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int:
        raise _wrong(path, number, f"{name} is a {_kind(value)}; write a whole number of tokens")
    if not 0 <= value < 2**63:
        raise _wrong(path, number, f"{name} is {_short(value)}; write a number of tokens, from 0 to 2**63 - 1")
    return value


def _ids(path: Path, number: int, value: Any) -> np.ndarray:
    if not isinstance(value, list):
        raise _wrong(path, number, f"hash_ids is a {_kind(value)}; write a list of whole numbers")
    if set(map(type, value)) - {int}:
        kinds = sorted({_kind(one) for one in value if type(one) is not int})
        raise _wrong(path, number, f"hash_ids holds a {kinds[0]}; write a list of whole numbers")
    try:
        array = np.array(value, np.int64)
        fits = not array.size or int(array.min()) >= 0
    except OverflowError:
        fits = False
    if not fits:
        bad = _short(next(one for one in value if not 0 <= one < 2**63))
        raise _wrong(path, number, f"hash_ids holds {bad}; write ids from 0 to 2**63 - 1, such as 63 bits of a hash")
    return array


def _grown(path: Path, number: int, value: Any, ids: int) -> tuple[tuple[int, int, int], ...]:
    form = "write [[index in hash_ids, id of the tail, tokens of the tail], ...], or leave it out"
    if not isinstance(value, list):
        raise _wrong(path, number, f"grown is a {_kind(value)}; {form}")
    for one in value:
        if not isinstance(one, list) or len(one) != 3 or set(map(type, one)) != {int}:
            raise _wrong(path, number, f"grown holds something else than lists of three whole numbers; {form}")
        index, tail, tokens = one
        if not 0 <= index < ids:
            raise _wrong(path, number, f"grown has index {_short(index)}, but hash_ids has {ids} ids; {form}")
        if not 0 <= tail < 2**63:
            raise _wrong(path, number, f"grown holds id {_short(tail)}; write ids from 0 to 2**63 - 1")
        if tokens < 1:
            raise _wrong(path, number, f"grown has a tail of {_short(tokens)} tokens; write one token or more")
    return tuple((index, tail, tokens) for index, tail, tokens in value)


def _ids_of(line: _Line) -> str:
    return f"{len(line.ids)} ids for an input_length of {line.tokens}"


def _short(value: int) -> str:
    return str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "true or false", int: "number", float: "fraction"}
    return names.get(type(value), "null")


def _found_block(path: Path, lines: list[_Line]) -> int:
    """Tokens an id, from lengths and numbers of ids: 512 (Mooncake's), the only power of two, or the only number at all."""
    least, most = 1, 2**63
    for line in lines:
        count = len(line.ids)
        least = max(least, line.tokens // (count + 1) + 1)
        if count > 1:
            most = min(most, (line.tokens - 1) // (count - 1))
        if least > most:
            said = f"hash_ids has {_ids_of(line)}, which no number of tokens an id fits that fits the lines before"
            raise _wrong(path, line.number, f"{said}; give it with --block, or mend the line")
    if least <= MOONCAKE_BLOCK <= most:
        return MOONCAKE_BLOCK
    powers = [1 << bits for bits in range(64) if least <= 1 << bits <= most]
    if len(powers) == 1 or least == most:
        return powers[0] if powers else least
    raise TraceError(f"{path}: an id may stand for {least} to {most} tokens; say for how many with --block")


def _split(path: Path) -> Iterator[tuple[bytes, bool]]:
    """The file's lines and whether each is whole: not what follows the last newline, nor the end of a gzip stream cut off."""
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
                raise _wrong(path, number, f"longer than {LINE_BYTES >> 20} MiB; {_FORMAT}")
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
            raise TraceError(f"{path}: a binary file; {_FORMAT}")
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
