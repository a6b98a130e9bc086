"""Images: the bytes of a block's rows, a block's window or a snapshot, as one complete safetensors file.

The same bytes stand in RAM, in a file and in whatever tier comes later. A `Blueprint` knows an image's size before a
byte is taken, `draft()` gives arrays to fill, `seal()` makes the image immutable. `parse_header` alone decides whether a
header is valid; foreign bytes become an `Image` after `examine` alone: it believes nothing. Layers fill and read
tensors, tiers move bytes; neither I/O nor MLX is known here.

The checksum covers the whole file, its own 32 digits counted as zeros. It stands first in the header, so it is found
without parsing, and the index keeps the same value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash

from prefixcache import image_memory

FORMAT = 1


class ImageKind(str, Enum):
    """What an image has: of a block its rows, or its window; or the state that can't be cut by token, at one boundary."""

    ROWS = "rows"
    WINDOW = "window"
    SNAPSHOT = "snapshot"

    __str__ = str.__str__


KINDS = ROWS, WINDOW, SNAPSHOT = tuple(ImageKind)  # names of the module, because an enum's take 120 ns to look up

# safetensors' names, the element type that NumPy holds them in (bf16 and fp8 as their bits)
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}

OPENING = b'{"__metadata__":{"checksum":"'
CHECKSUM_DIGITS = 32
_CHECKSUM = slice(8 + len(OPENING), 8 + len(OPENING) + CHECKSUM_DIGITS)
_BLANK = b"0" * CHECKSUM_DIGITS
HEADER_LIMIT = 4 << 20
TOKENS = "tokens"  # the tensor (I64, one dimension) that holds the tokens of a rows image or a snapshot
START_BOUND, SIZE_BOUND = 1 << 40, 1 << 40  # a start and a dimension are below these
_DIMENSIONS = 32  # what NumPy can shape
_ALIGN = 8
_KEY = re.compile("[0-9a-f]{64}")
_HEX = {"checksum": re.compile("[0-9a-f]{32}"), "key": _KEY, "parent": _KEY, "namespace": _KEY}
# How a `Blueprint` begins a header, with what tells apart the images of one layout in groups.
_IDENTITY = re.compile(
    rb'\{"__metadata__":\{"checksum":"([0-9a-f]{32})","format":"' + b"%d" % FORMAT + rb'","kind":"([a-z]+)",'
    rb'"key":"([0-9a-f]{64})","parent":"([0-9a-f]{64})","namespace":"([0-9a-f]{64})"'
)
_START = re.compile(rb'","start":"([0-9]{1,12})"')
_KNOWN = 4096  # headers that `Headers` remembers


class ImageError(Exception):
    """These bytes are not an image that may be believed. The text says why and names nothing of the prompt."""


class WrongFormat(ImageError):
    """The header says another format than this release reads: `said`, cut to 20 characters."""

    def __init__(self, said: str):
        self.said = said[:20]
        super().__init__(f"format {self.said!r}, this release reads {FORMAT}")


class Spec(NamedTuple):
    """A tensor to come: its name, its safetensors dtype, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class HeaderFields(NamedTuple):
    """The fields of an image's header, but for its checksum and format. Keys are 64 hex digits; `codec`, `layout` and `extra`
    are JSON text.

    `start` is the number of tokens before the image's first; `parent` the key of the block before (the namespace's root
    key at the start).
    """

    kind: str
    key: str
    parent: str
    namespace: str
    model: str
    codec: str
    layout: str
    start: int
    extra: str = "{}"


_REQUIRED = ("checksum", "format", *HeaderFields._fields)


class ParsedHeader(NamedTuple):
    """What a valid header says. `tokens`: first and last byte of the tokens, counted from the header's end; None without."""

    fields: HeaderFields
    checksum: str
    tokens: tuple[int, int] | None


class Image:
    """An immutable safetensors image: read-only bytes, and views of its tensors. Costs no memory beyond its bytes."""

    __slots__ = ("data",)

    def __init__(self, data: np.ndarray):
        data.flags.writeable = False
        self.data = data

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def checksum(self) -> str:
        return bytes(self.data[_CHECKSUM]).decode("ascii", "replace")

    def header(self) -> tuple[HeaderFields, dict[str, np.ndarray]]:
        """Return what it says of itself, and a read-only view of each tensor by name (bf16 as uint16)."""
        end = 8 + int(self.data[:8].view("<u8")[0])
        table = json.loads(bytes(self.data[8:end]))
        metadata = table.pop("__metadata__")
        tensors = {
            name: self.data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]]
            .view(DTYPES[entry["dtype"]])
            .reshape(entry["shape"])
            for name, entry in table.items()
        }
        return _fields_of(metadata), tensors

    def tensors(self) -> dict[str, np.ndarray]:
        return self.header()[1]


class TensorTable(NamedTuple):
    """Tensors in the order in which they lie, as a header describes them (JSON), and the bytes that they take."""

    specs: tuple[Spec, ...]
    described: str
    nbytes: int


@lru_cache(maxsize=256)  # the blocks of a model have the same few
def _table_of(specs: tuple[Spec, ...]) -> TensorTable:
    # Wide elements first: every tensor then starts at a multiple of its element's size.
    specs = tuple(sorted(specs, key=lambda spec: -DTYPES[spec.dtype].itemsize))
    table, at = {}, 0
    for spec in specs:
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    return TensorTable(specs, _json(table), at)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


class Blueprint:
    """An image before its bytes: `nbytes` is exact, so that the room can be reserved first."""

    def __init__(self, fields: HeaderFields, specs: list[Spec]):
        self.fields = fields
        self._table = _table_of(tuple(specs))
        described = {"checksum": _BLANK.decode(), "format": str(FORMAT), **fields._asdict(), "start": str(fields.start)}
        tensors = self._table.described[1:] if specs else "}"
        header = f'{{"__metadata__":{_json(described)}{"," * bool(specs)}{tensors}'.encode()
        self._header = header + b" " * (-len(header) % _ALIGN)
        if len(self._header) > HEADER_LIMIT:
            raise ValueError(f"a header of {len(self._header)} bytes: an image's is at most {HEADER_LIMIT}")
        self.nbytes = 8 + len(self._header) + self._table.nbytes

    def draft(self) -> ImageDraft:
        """Take the memory and lay out the arrays to fill."""
        return ImageDraft(self._header, self._table.specs, self.nbytes)


class ImageDraft:
    """An image being filled: `tensors[name]` are writable arrays; `seal()` ends the writing. Until then nothing here touches
    the memory: new pages take longer than all the rest of it, and whoever generates is not to wait for them.
    """

    def __init__(self, header: bytes, specs: Sequence[Spec], nbytes: int):
        self._header = header
        self._data = image_memory.take(nbytes)
        self.tensors: dict[str, np.ndarray] = {}
        at = 8 + len(header)
        for spec in specs:
            self.tensors[spec.name] = self._data[at : at + spec.nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape)
            at += spec.nbytes

    def seal(self) -> Image:
        """Write the header with its checksum; from here on the bytes don't change."""
        opening = len(self._header).to_bytes(8, "little") + self._header
        self._data[: len(opening)] = np.frombuffer(opening, np.uint8)
        self._data[_CHECKSUM] = np.frombuffer(_digest(self._data).encode(), np.uint8)
        self.tensors = {}
        return Image(self._data)


def examine(
    data: np.ndarray,
    checksum: str | None = None,
    parse: Callable[[bytes, int], ParsedHeader] | None = None,
    digest: Digest | None = None,
) -> ParsedHeader:
    """Return the header of foreign bytes (uint8) that are whole and valid; raise ImageError with the reason for others.

    `checksum` is what the index says of the file; without it the file's own is the judge. `parse` is `parse_header`, or that
    of a `Headers`; `digest` has seen the bytes, which are not read again for it.
    """
    size = data.nbytes
    if size < _CHECKSUM.stop:
        raise ImageError(f"{size} bytes: too short for a header")
    end = 8 + int(data[:8].view("<u8")[0])
    if end > min(size, HEADER_LIMIT):
        raise ImageError(f"the header claims {end - 8} bytes of {size}")
    if bytes(data[8 : 8 + len(OPENING)]) != OPENING:
        raise ImageError("not an image of prefixcache")
    claimed = bytes(data[_CHECKSUM]).decode("ascii", "replace")
    if checksum is not None and claimed != checksum:
        raise ImageError("the file is not the one that the index names")
    if (digest.hex() if digest is not None else _digest(data)) != claimed:
        raise ImageError("the checksum does not match")
    return (parse or parse_header)(bytes(data[8:end]), size - end)


def is_whole(data: np.ndarray, rest: Iterable[np.ndarray] = ()) -> bool:
    """Tell whether the checksum in the header is that of the bytes, whatever they say. `rest` are those that follow, in
    pieces.
    """
    if data.nbytes < _CHECKSUM.stop:
        return False
    digest = Digest()
    for piece in chain((data,), rest):
        digest.update(piece.data)
    return digest.hex().encode() == bytes(data[_CHECKSUM])


class Digest:
    """The checksum of an image whose bytes come in pieces, in order."""

    def __init__(self) -> None:
        self._state, self._seen = xxhash.xxh3_128(), 0

    def update(self, piece: memoryview) -> None:
        """Take the next bytes. Of the header's own checksum zeros are taken."""
        first, self._seen = self._seen, self._seen + len(piece)
        if first < _CHECKSUM.stop:
            head = bytearray(piece[: _CHECKSUM.stop - first])
            blank = slice(max(_CHECKSUM.start - first, 0), len(head))
            head[blank] = b"0" * len(head[blank])
            self._state.update(head)
            piece = piece[len(head) :]
        self._state.update(piece)

    def hex(self) -> str:
        return str(self._state.hexdigest())


def _digest(data: np.ndarray) -> str:
    digest = Digest()
    digest.update(data.data)
    return digest.hex()


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ImageError("the header names a field twice")
    return dict(pairs)


def parse_header(header: bytes, room: int) -> ParsedHeader:
    """Return what a header says. Raise ImageError unless a `Blueprint` could have written it for `room` bytes of tensors."""
    try:
        table = json.loads(header, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError):
        raise ImageError("the header is not JSON") from None
    metadata = table.pop("__metadata__", None) if isinstance(table, dict) else None
    said = metadata.get("format") if isinstance(metadata, dict) else None
    if isinstance(said, str) and said != str(FORMAT):  # first: another format may have other fields
        raise WrongFormat(said)
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(n), str) for n in (*_REQUIRED, *metadata)):
        raise ImageError("the header lacks a field, or one is not text")
    if not all(digits.fullmatch(metadata[name]) for name, digits in _HEX.items()):
        raise ImageError("a key is not 64 hex digits, or the checksum not 32")
    start = metadata["start"]
    if metadata["kind"] not in KINDS or not (start.isascii() and start.isdecimal() and len(start) <= 13):
        raise ImageError("the header's kind or start is not valid")
    if int(start) >= START_BOUND:
        raise ImageError("the header's kind or start is not valid")
    try:
        "".join(metadata.values()).encode()
    except UnicodeEncodeError:
        raise ImageError("the header holds characters that UTF-8 can't") from None
    at, tokens = 0, None
    for name, entry in table.items():
        nbytes = _tensor_bytes(entry)
        if entry["data_offsets"] != [at, at + nbytes] or not all(type(n) is int for n in entry["data_offsets"]):
            raise ImageError("a tensor's offsets are not valid")
        if name == TOKENS:
            if entry["dtype"] != "I64" or len(entry["shape"]) != 1 or nbytes > HEADER_LIMIT:
                raise ImageError("the tokens are not valid")
            tokens = at, at + nbytes
        at += nbytes
    if at != room:
        raise ImageError(f"tensors of {at} bytes in room for {room}")
    return ParsedHeader(_fields_of(metadata), metadata["checksum"], tokens)


def _tensor_bytes(entry: Any) -> int:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ImageError("a tensor's entry is not valid")
    name, shape = entry["dtype"], entry["shape"]
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or not isinstance(shape, list) or not all(type(n) is int and 0 <= n < SIZE_BOUND for n in shape):
        raise ImageError("a tensor's dtype or shape is not valid")
    if len(shape) > _DIMENSIONS or math.prod(n or 1 for n in shape) >= 2**56:
        raise ImageError("a tensor's shape is not valid")
    return dtype.itemsize * math.prod(shape)


class Headers:
    """`parse_header` for very many images: a header that differs from a valid one in checksum, keys and start alone is
    valid, too, and is not parsed again. Thread-safe: `_known` only grows, by whole members.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes, bytes, int], ParsedHeader] = {}

    def parse(self, header: bytes, room: int) -> ParsedHeader:
        identity = _IDENTITY.match(header)
        # A quote within a text is written \", so the first place where this stands is the field's.
        start = _START.search(header, identity.end()) if identity else None
        if identity is None or start is None or int(start[1]) >= START_BOUND:
            return parse_header(header, room)
        checksum, kind, key, parent, namespace = (part.decode() for part in identity.groups())
        constant = identity[2], header[identity.end() : start.start()], header[start.end() :], room
        known = self._known.get(constant)
        if known is None:
            known = parse_header(header, room)
            if len(self._known) < _KNOWN:
                self._known[constant] = known
            return known
        fields = known.fields._replace(kind=kind, key=key, parent=parent, namespace=namespace, start=int(start[1]))
        return ParsedHeader(fields, checksum, known.tokens)


def _fields_of(metadata: dict[str, str]) -> HeaderFields:
    texts = {name: metadata[name] for name in HeaderFields._fields if name != "start"}
    return HeaderFields(**texts, start=int(metadata["start"]))
