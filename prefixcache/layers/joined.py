"""Rows of layers that are transformed together: from live leaves and known codes to an image's tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import RowCodec
from prefixcache.codecs.interchange import borrow, bring_in, copy_out, on_cpu
from prefixcache.codecs.pieces import Piece
from prefixcache.codecs.transform import gpu_coding
from prefixcache.codecs.transform.coding import Codes
from prefixcache.codecs.transform.entropy import DamagedCodes
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.image_layout import Joined, Tensors


class DamagedBlock(ValueError):
    """The rows of the block that begins at token `start` are codes that no encoder wrote. Its checksum is right: whoever
    wrote it sealed it.
    """

    def __init__(self, start: int, reason: str):
        super().__init__(f"the block at token {start} is damaged: {reason}")
        self.start = start


class BlockRows(NamedTuple):
    """Tokens `first` to `last` (not included) of a block, whose rows are to be codes.

    `known`: the tensors of another block's image, and of how many of its first tokens the codes are taken over.
    """

    first: int
    last: int
    known: tuple[Tensors, int] | None = None


class RowsToCode(NamedTuple):
    """Those of a block's rows that are still to be coded in one group: `first` to `last`, of which the first `skip` are kept
    elsewhere. `taken`: the codes of those before, of another image.
    """

    first: int
    last: int
    skip: int
    taken: Codes | None


def encode_joined(
    groups: Sequence[Joined], leaves: Sequence[Leaf], blocks: Sequence[BlockRows], sinks: int
) -> list[list[Codes]]:
    """Encode, for each group of layers, each block; tokens before token `sinks` are kept elsewhere."""
    parts = [[_uncoded(joined, block, sinks) for block in blocks] for joined in groups]
    uncoded = [[part for part in of_group if part.first < part.last] for of_group in parts]
    codes = []
    encode = _encode_on_gpu if gpu_coding.available() else _encode
    for of_group, encoded in zip(parts, encode(groups, leaves, uncoded), strict=True):
        new = iter(encoded)
        codes.append([_behind(part.taken, next(new) if part.first < part.last else None) for part in of_group])
    return codes


def _uncoded(joined: Joined, block: BlockRows, sinks: int) -> RowsToCode:
    taken, copied = None, 0
    if block.known is not None:
        tensors, copied = block.known
        taken = codes_of(joined, tensors, copied)
    first = block.first + copied
    return RowsToCode(first, block.last, min(max(sinks - first, 0), block.last - first), taken)


def _behind(taken: Codes | None, new: Codes | None) -> Codes:
    if taken is None or new is None:
        return taken or new  # type: ignore[return-value]
    return taken._replace(
        heads=np.concatenate([taken.heads, new.heads]), words=np.concatenate([taken.words, new.words])
    )


def _encode(
    groups: Sequence[Joined], leaves: Sequence[Leaf], parts: Sequence[Sequence[RowsToCode]]
) -> Iterator[list[Codes]]:
    for joined, of_group in zip(groups, parts, strict=True):
        codes = []
        for part in of_group:
            rows = [_rows_of(leaves[leaf], stream, part.first, part.last) for leaf, stream in joined.streams]
            codes.append(joined.coder.encode(rows, part.first, part.skip, part.taken))
        yield codes


def _encode_on_gpu(
    groups: Sequence[Joined], leaves: Sequence[Leaf], parts: Sequence[Sequence[RowsToCode]]
) -> Iterator[list[Codes]]:
    """Encode groups of which the same rows are to be coded together, as many as there is room for."""
    at = 0
    while at < len(groups):
        if not gpu_coding.takes(groups[at].coder):
            yield from _encode(groups[at : at + 1], leaves, parts[at : at + 1])
            at += 1
            continue
        blocks = [gpu_coding.BlockSpan(part.first, part.last, part.skip) for part in parts[at]]
        alike = at + 1
        while alike < len(groups) and [part[:3] for part in parts[alike]] == blocks:
            alike += 1
        if not blocks:
            yield from ([] for _ in range(at, alike))
            at = alike
            continue
        coders = [joined.coder for joined in groups[at:alike]]
        end = at + gpu_coding.at_once(coders, sum(block.last - block.first for block in blocks))
        runs = merged([(block.first, block.last) for block in blocks])
        yield from gpu_coding.encode(
            [
                gpu_coding.GroupRows(joined.coder, _streams_of(joined, leaves, runs), [part.taken for part in of_group])
                for joined, of_group in zip(groups[at:end], parts[at:end], strict=True)
            ],
            blocks,
        )
        at = end


def _streams_of(joined: Joined, leaves: Sequence[Leaf], runs: Sequence[tuple[int, int]]) -> list[mx.array]:
    """Return rows (heads, tokens, width) of each joined stream, of the tokens of runs."""
    streams = []
    for leaf, stream in joined.streams:
        there = [leaves[leaf].arrays[stream][0][:, leaves[leaf].where(*run)] for run in runs]
        streams.append(there[0] if len(there) == 1 else mx.concatenate(there, axis=1))
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

    def since(self, token: int) -> Stretch:
        """Return the same without the rows of tokens before `token`."""
        skipped = max(token - self.first, 0)
        on_cpu, on_gpu = [stream[skipped:] for stream in self.on_cpu], [stream[:, skipped:] for stream in self.on_gpu]
        return Stretch(token, on_cpu, on_gpu) if skipped else self

    def piece(self, number: int, codec: RowCodec) -> Piece:
        """Return the rows of one stream, for a buffer; `codec` keeps rows as they are."""
        if self.on_gpu:
            return Piece(codec, (), self.first, rows=self.on_gpu[number])
        return Piece(codec, (self.on_cpu[number],), self.first)

    def rows(self, number: int, dtype: str) -> mx.array:
        """Return rows (heads, tokens, width) of one stream."""
        return self.on_gpu[number] if self.on_gpu else bring_in(self.on_cpu[number].swapaxes(0, 1), dtype)


class DecodedGroup(NamedTuple):
    """Decoded rows of blocks, in their order. `wrong`: what `check` looks at, of each row; None: nothing is."""

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
    """Codes of a group of layers, of blocks, each from a token on."""

    joined: Joined
    blocks: Sequence[tuple[int, Codes]]


def decode_joined(groups: Sequence[CodedBlocks]) -> Iterator[DecodedGroup]:
    """Decode the rows of groups' blocks, which are the same ones. DamagedBlock for codes that no encoder wrote; on a GPU
    those are seen when `DecodedGroup.check` is called. There groups are decoded together, as many as there is room for.
    """
    counts = [(start, len(codes.heads)) for start, codes in groups[0].blocks]
    at, tokens, on_gpu = 0, sum(count for _, count in counts), gpu_coding.available()
    while at < len(groups):
        if not on_gpu or not tokens or not gpu_coding.takes(groups[at].joined.coder):
            joined, blocks = groups[at]
            yield DecodedGroup([Stretch(start, _decoded(joined, start, codes)) for start, codes in blocks], counts)
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


def _decoded(joined: Joined, start: int, codes: Codes) -> list[np.ndarray]:
    try:
        return joined.coder.decode(codes, start)
    except DamagedCodes as reason:
        raise DamagedBlock(start, str(reason)) from None


def codes_of(joined: Joined, tensors: Tensors, count: int) -> Codes:
    """Return the codes of the first `count` rows in an image's tensors."""
    heads, words, offsets, offset_steps = (tensors[name] for name in joined.names)
    heads = heads[:count]
    return Codes(heads, words[: joined.coder.words_of(heads)], offsets, offset_steps)


def write_joined(joined: Joined, codes: Codes, tensors: Tensors) -> None:
    for name, values in zip(joined.names, codes, strict=True):
        tensors[name][...] = values


def _rows_of(leaf: Leaf, stream: str, first: int, last: int) -> np.ndarray:
    """Return rows (tokens, heads, width), bf16 as uint16."""
    where = leaf.where(first, last)
    assert isinstance(where, slice)  # of layers that keep every token
    array = leaf.arrays[stream]
    rows = borrow(array)[0][:, where] if on_cpu() else copy_out(array[0][:, where])
    return rows.swapaxes(0, 1)
