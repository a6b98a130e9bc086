"""Rows of layers that are transformed together: from live leaves and known codes to an image's tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import RowCodec
from prefixcache.codecs.interchange import CopiesUnderWay, borrow, bring_in, copy_out, on_cpu
from prefixcache.codecs.pieces import Piece
from prefixcache.codecs.transform import gpu_coding
from prefixcache.codecs.transform.coding import Codes
from prefixcache.codecs.transform.entropy import DamagedCodes
from prefixcache.keys import BLOCK
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.finite import NotFinite, is_finite
from prefixcache.layers.image_layout import Joined, Place, Plan, Section, Tensors


class DamagedBlock(ValueError):
    """Rows of the block of token `start` are codes that no encoder wrote. The image's checksum is right: whoever wrote it
    sealed it. `start` becomes the block's first token.
    """

    def __init__(self, start: int, reason: str):
        self.start = start - start % BLOCK
        super().__init__(f"the block at token {self.start} is damaged: {reason}")


class BlockRows(NamedTuple):
    """Tokens `first` to `last` (not included) of a block, whose rows are to be codes.

    `known`: the tensors of another block's image, and of how many of its first tokens the codes are taken over.
    """

    first: int
    last: int
    known: tuple[Tensors, int] | None = None


class TailRows(NamedTuple):
    """Rows of a window that the tensors of a tail's image have as they are, those of `section`."""

    section: Section
    tensors: Tensors
    rows: slice

    def of(self, at: Place) -> np.ndarray:
        """Return rows (tokens, heads, width), bf16 as uint16, of the stream that is `at` this place of the section."""
        group, member = at
        return self.tensors[self.section.groups[group].names[0]][self.rows, member.in_group]

    def on_device(self, at: Place) -> mx.array:
        """Return rows (heads, tokens, width) of the same."""
        return bring_in(self.of(at).swapaxes(0, 1), self.section.groups[at[0]].codec.dtype)


class RowsToCode(NamedTuple):
    """Rows of a block that are still to be coded for one group, of tokens `first` to `last` (not included). The first `skip`
    of them are kept elsewhere and get no codes. `taken` are codes of other rows of the block. The rows are in `tail`, or in
    live leaves.
    """

    first: int
    last: int
    skip: int
    taken: Codes | None
    tail: TailRows | None = None

    def of(self, leaf: Leaf, stream: str, place: Place) -> np.ndarray:
        """Return rows (tokens, heads, width), bf16 as uint16, of one stream, which tails have at this place."""
        if self.tail is not None:
            return self.tail.of(place)
        if on_cpu():
            rows = borrow(leaf.arrays[stream])[0][:, leaf.where(self.first, self.last)]
        else:
            rows = copy_out(leaf.rows(stream, self.first, self.last))
        return rows.swapaxes(0, 1)


class CodedGroup(NamedTuple):
    """Codes of a group's parts, and of each stream the rows that they decode to, one part's after the other's, where a GPU
    has them: (heads, tokens, width).
    """

    codes: list[Codes]
    decoded: list[mx.array]


class JoinedCodes(NamedTuple):
    """Codes of groups, block by block, whose arrays have what they are to have once all `copies` were waited for. And of each
    group the rows that they decode to, where a GPU has those of all groups.
    """

    codes: list[list[Codes]]
    decoded: list[list[Stretch]]
    copies: list[CopiesUnderWay]

    def wait(self) -> None:
        """Wait for the copies, once."""
        while self.copies:
            self.copies.pop().wait()


NO_CODES = JoinedCodes([], [], [])


def encode_joined(plan: Plan, leaves: Sequence[Leaf], blocks: Sequence[BlockRows], decoding: bool) -> JoinedCodes:
    """Begin to encode, for each group of layers that keep every token, each block. With `decoding`, a GPU keeps what they
    decode to.
    """
    groups = plan.rows.joined
    parts = [[_uncoded(joined, block, plan.sink_tokens) for block in blocks] for joined in groups]
    if any(block.known is not None for block in blocks):  # codes of one block come from two places
        uncoded = [[part for part in of_group if part.first < part.last] for of_group in parts]
        codes = []
        for of_group, encoded in zip(parts, encode_parts(plan, groups, leaves, uncoded), strict=True):
            new = iter(encoded)
            for_blocks = [[part.taken, next(new) if part.first < part.last else None] for part in of_group]
            codes.append([one_after_another([of for of in both if of is not None]) for both in for_blocks])
        return JoinedCodes(codes, [], [])
    copies: list[CopiesUnderWay] = []
    coded = [*_begun(plan, groups, leaves, parts, copies, decoding=decoding)]
    counts = [(block.first, block.last - block.first) for block in blocks]
    decoded = [_stretches(group.decoded, counts) for group in coded if group.decoded]
    return JoinedCodes([group.codes for group in coded], decoded if len(decoded) == len(coded) else [], copies)


def encode_parts(
    plan: Plan, groups: Sequence[Joined], leaves: Sequence[Leaf], parts: Sequence[Sequence[RowsToCode]]
) -> list[list[Codes]]:
    """Encode each part's rows of each group."""
    copies: list[CopiesUnderWay] = []
    coded = [*_begun(plan, groups, leaves, parts, copies, decoding=False)]
    for copy in copies:
        copy.wait()
    return [group.codes for group in coded]


def _uncoded(joined: Joined, block: BlockRows, sinks: int) -> RowsToCode:
    taken, copied = None, 0
    if block.known is not None:
        tensors, copied = block.known
        taken = codes_of(joined, tensors, slice(0, copied))
    first = block.first + copied
    skip = min(max(sinks - first, 0), block.last - first)
    return RowsToCode(first, block.last, skip, taken)


def one_after_another(codes: Sequence[Codes]) -> Codes:
    """Join codes of a block's rows, which keep the offsets of the first codes."""
    if len(codes) == 1:
        return codes[0]
    heads, words = (np.concatenate(arrays) for arrays in zip(*((of.heads, of.words) for of in codes), strict=True))
    return codes[0]._replace(heads=heads, words=words)


def _encode(
    plan: Plan, groups: Sequence[Joined], leaves: Sequence[Leaf], parts: Sequence[Sequence[RowsToCode]]
) -> Iterator[CodedGroup]:
    for joined, of_group in zip(groups, parts, strict=True):
        codes = []
        for part in of_group:
            rows = [part.of(leaves[leaf], stream, plan.tail_places[leaf][stream]) for leaf, stream in joined.streams]
            codes.append(joined.coder.encode(rows, part.first, part.skip, part.taken))
        yield CodedGroup(codes, [])


def _begun(
    plan: Plan,
    groups: Sequence[Joined],
    leaves: Sequence[Leaf],
    parts: Sequence[Sequence[RowsToCode]],
    copies: list[CopiesUnderWay],
    *,
    decoding: bool,
) -> Iterator[CodedGroup]:
    """Begin to encode of each group the rows of each part; `copies` gets what is to be waited for. On a GPU, groups of which
    the same rows are to be coded are coded together, as many as there is room for.
    """
    at, on_gpu = 0, gpu_coding.available()
    while at < len(groups):
        if not on_gpu or not gpu_coding.takes(groups[at].coder):
            yield from _encode(plan, groups[at : at + 1], leaves, parts[at : at + 1])
            at += 1
            continue
        blocks = [gpu_coding.BlockSpan(part.first, part.last, part.skip) for part in parts[at]]
        alike = at + 1
        while alike < len(groups) and [part[:3] for part in parts[alike]] == blocks:
            alike += 1
        if not blocks:
            yield from (CodedGroup([], []) for _ in range(at, alike))
            at = alike
            continue
        coders = [joined.coder for joined in groups[at:alike]]
        end = at + gpu_coding.at_once(coders, sum(block.last - block.first for block in blocks))
        rows = [
            gpu_coding.GroupRows(
                joined.coder, _streams_of(plan, joined, leaves, of_group), [part.taken for part in of_group]
            )
            for joined, of_group in zip(groups[at:end], parts[at:end], strict=True)
        ]
        encoding = gpu_coding.begin_encoding(rows, blocks, decoding=decoding)
        copies.append(encoding.copies)
        for number, codes in enumerate(encoding.codes):
            yield CodedGroup(codes, encoding.decoded[number] if decoding else [])
        at = end


def _streams_of(plan: Plan, joined: Joined, leaves: Sequence[Leaf], parts: Sequence[RowsToCode]) -> list[mx.array]:
    """Return rows (heads, tokens, width) of each joined stream, of all parts."""
    in_leaves = all(part.tail is None for part in parts)
    runs = merged([(part.first, part.last) for part in parts]) if in_leaves else []
    streams = []
    for leaf, stream in joined.streams:
        rows = [leaves[leaf].rows(stream, *run) for run in runs]
        for part in () if in_leaves else parts:
            if part.tail is None:
                rows.append(leaves[leaf].rows(stream, part.first, part.last))
            else:
                rows.append(part.tail.on_device(plan.tail_places[leaf][stream]))
        streams.append(rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1))
    return streams


def merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge runs that follow each other; the others stay, in their order."""
    result: list[tuple[int, int]] = []
    for first, last in runs:
        if result and result[-1][1] == first:
            result[-1] = result[-1][0], last
        else:
            result.append((first, last))
    return result


class Stretch(NamedTuple):
    """Decoded rows of tokens from `first` on, of each joined stream: on the CPU (tokens, heads, width), bf16 as uint16; on a
    GPU (heads, tokens, width), `on_gpu`.
    """

    first: int
    on_cpu: Sequence[np.ndarray] = ()
    on_gpu: Sequence[mx.array] = ()

    def piece(self, number: int, codec: RowCodec) -> Piece:
        """Return the rows of one stream, for a buffer; `codec` keeps rows as they are."""
        if self.on_gpu:
            return Piece(codec, (), self.first, rows=self.on_gpu[number])
        return Piece(codec, (self.on_cpu[number],), self.first)

    def rows(self, number: int, dtype: str) -> mx.array:
        """Return rows (heads, tokens, width) of one stream."""
        return self.on_gpu[number] if self.on_gpu else bring_in(self.on_cpu[number].swapaxes(0, 1), dtype)


class DecodedGroup(NamedTuple):
    """Decoded rows of `blocks`, each a first token and a number of rows. `wrong` tells `check` what is wrong with each row;
    None where the rows were checked when they were decoded.
    """

    stretches: list[Stretch]
    blocks: list[tuple[int, int]]
    wrong: mx.array | None = None

    def check(self) -> None:
        """Raise DamagedBlock for codes that no encoder wrote. Waits for the GPU."""
        if self.wrong is None:
            return
        at, wrong = 0, borrow(self.wrong)
        for start, count in self.blocks:
            reason = gpu_coding.reason_of(wrong[at : at + count])
            if reason is not None:
                raise DamagedBlock(start, reason)
            at += count


class CodedBlocks(NamedTuple):
    """The codes of a group of layers, block by block, each with the token of its first row."""

    joined: Joined
    blocks: Sequence[tuple[int, Codes]]


def decode_joined(groups: Sequence[CodedBlocks]) -> Iterator[DecodedGroup]:
    """Decode the rows of groups of layers, all of the same blocks. DamagedBlock for codes that no encoder wrote. A GPU
    decodes several groups together, as many as there is room for, and finds damage when `DecodedGroup.check` is called.
    """
    counts = [(start, len(codes.heads)) for start, codes in groups[0].blocks]
    at, tokens, on_gpu = 0, sum(count for _, count in counts), gpu_coding.available()
    while at < len(groups):
        if not on_gpu or not tokens or not gpu_coding.takes(groups[at].joined.coder):
            joined, blocks = groups[at]
            yield DecodedGroup([Stretch(start, decoded(joined, start, codes)) for start, codes in blocks], counts)
            at += 1
            continue
        end = at + gpu_coding.at_once([joined.coder for joined, _ in groups[at:]], tokens)
        try:
            restored = gpu_coding.decode(
                [
                    gpu_coding.GroupCodes(joined.coder, [codes for _, codes in blocks])
                    for joined, blocks in groups[at:end]
                ],
                [start for start, _ in counts],
            )
        except DamagedCodes as damage:
            raise DamagedBlock(counts[damage.block][0], str(damage)) from None
        mx.async_eval(restored)  # together: groups wait for each other no more than they must
        restored.reverse()
        while restored:  # no rows are kept here that the caller has done with
            streams, wrong = restored.pop()
            yield DecodedGroup(_stretches(streams, counts), counts, wrong)
            del streams
        at = end


def _stretches(streams: Sequence[mx.array], counts: Sequence[tuple[int, int]]) -> list[Stretch]:
    stretches, at = [], 0
    for first, last in merged([(start, start + count) for start, count in counts]):
        stretches.append(Stretch(first, on_gpu=[stream[:, at : at + last - first] for stream in streams]))
        at += last - first
    return stretches


def decoded(joined: Joined, start: int, codes: Codes) -> list[np.ndarray]:
    """Return rows (tokens, heads, width) of each stream, of tokens from `start` on. DamagedBlock for codes that no encoder
    wrote.
    """
    try:
        return joined.coder.decode(codes, start)
    except DamagedCodes as reason:
        raise DamagedBlock(start, str(reason)) from None


def codes_of(joined: Joined, tensors: Tensors, rows: slice) -> Codes:
    heads, words, offsets, offset_steps = (tensors[name] for name in joined.names)
    first = joined.coder.words_of(heads[: rows.start])
    heads = heads[rows]
    return Codes(heads, words[first : first + joined.coder.words_of(heads)], offsets, offset_steps)


def joined_not_finite(joined: Joined, start: int, codes: Codes) -> NotFinite | None:
    """Return the first row of a block, from token `start` on, that isn't finite: it is kept as it is."""
    for row, values in joined.coder.rows_as_they_are(codes):
        widths = [heads * width for heads, width in joined.coder.streams]
        parts = np.split(values, np.cumsum(widths)[:-1])
        for (leaf, _), part in zip(joined.streams, parts, strict=True):
            if not is_finite(part, joined.coder.dtype):
                return NotFinite(leaf, start + row)
    return None


def write_joined(joined: Joined, codes: Codes, tensors: Tensors) -> None:
    for name, values in zip(joined.names, codes, strict=True):
        tensors[name][...] = values
