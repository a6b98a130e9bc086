"""Rows of groups of layers, joined and transformed, on MLX's GPUs: the products are MLX's, what stands around them and the
entropy coder are kernels.

The same format as `coding`, whose values these are but for the rounding of products: factors and what comes of them are half
precision, as rows are. Many blocks and several groups are coded at once: a row takes as long as it has components, however
many rows there are. Decision 0025 says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from prefixcache.codecs.gather import gather, stacked
from prefixcache.codecs.interchange import (
    Array,
    CopiesUnderWay,
    as_float32,
    begin_copies,
    bring_in,
    copy_out,
    element,
)
from prefixcache.codecs.threads import share_out
from prefixcache.codecs.transform import gpu_entropy
from prefixcache.codecs.transform.basis import MARGIN, QUALITIES, LayerGroup
from prefixcache.codecs.transform.coding import CLAIMED, MOST_OFFSET, OFFSET_ROWS, Codes, GroupCoder
from prefixcache.codecs.transform.entropy import AS_IT_IS, MOST_WORDS, DamagedCodes, gain_of
from prefixcache.codecs.transform.gpu_entropy import Classes, padded_count
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.rope import NO_ROPE, Rope
from prefixcache.codecs.transform.tables import first_guess
from prefixcache.kernels import transform_rows as kernels
from prefixcache.kernels.dialects import Dialect

log = logging.getLogger("prefixcache")

_NAMES = {"metal": "Metal", "cuda": "CUDA"}
_WITHIN = 256  # tokens over which the phases of a rotation are kept
_PART = 256.0  # a block's sums are divided by this, so that they fit half precision
_WORTH_A_THREAD = 1 << 20  # bytes
_SHARE, _ROOM = 1 / 16, 4 << 30  # of the GPU's memory, and bytes, that groups take at most which are coded at once


class BlockSpan(NamedTuple):
    """Rows of one block that are to be coded: those of tokens `first` to `last` (not included). The first `skip` have no
    codes.
    """

    first: int
    last: int
    skip: int = 0


class GroupRows(NamedTuple):
    """A group's rows (heads, tokens, width) by stream, those of blocks one after the other; and of each block codes of other
    rows of the same, whose offsets stand, or None.
    """

    coder: GroupCoder
    streams: Sequence[mx.array]
    settled: Sequence[Codes | None]


class GroupCodes(NamedTuple):
    """A group's codes, block by block."""

    coder: GroupCoder
    blocks: Sequence[Codes]


class BesideValues(NamedTuple):
    """What a group's rows are beside their values: of each block, on the GPU, `Codes.offsets` (blocks, (channels + 1) // 2)
    and `offset_steps` (blocks, heads); of the rows that are kept as they are their numbers and, (rows, channels), bits.
    """

    offsets: mx.array
    offset_steps: mx.array
    kept: Array
    bits: Array


class GroupBatch(NamedTuple):
    """Codes of several groups, of the tokens of `runs`, in the GPU's memory: heads uint16 (groups, rows), the first word of
    each row uint32 (groups, rows), words uint16.
    """

    coders: tuple[GroupCoder, ...]
    runs: tuple[tuple[int, int], ...]
    heads: mx.array
    first: mx.array
    words: mx.array
    beside: Sequence[BesideValues]


class KnownRows(NamedTuple):
    """What is known of coded rows before their words are here: heads and where words end, (groups, rows), and of each group
    the rows that are kept as they are, with their bits, uint16 (rows, halves of a row).
    """

    heads: Array
    ends: Array
    kept: Sequence[Array]
    bits: Sequence[Array]


class EncodingUnderWay(NamedTuple):
    """Codes of each group and block, whose arrays have what they are to have once `copies` were waited for. And, where that
    was asked for, of each group the rows that `decode` would give, (heads, tokens, width) by stream: lazy.
    """

    codes: list[list[Codes]]
    decoded: list[list[mx.array]]
    copies: CopiesUnderWay


class _Operands(NamedTuple):
    """What products and kernels take of a coder: `vectors` (components, channels), some more than have codes, whose values
    count for nothing; of each run of streams of one width `by_head` (heads, components, width) and `inverses` (heads, width,
    width); of each stream the number of its run, and in uint32 (3,) its first channel and head, and that among its run's.
    """

    vectors: mx.array
    by_head: list[mx.array]
    inverses: list[mx.array]
    places: list[mx.array]
    runs: list[int]


class Alike(NamedTuple):
    """Groups that are alike and follow each other: which of all, and their rows in the metric, float16 (groups, channels,
    tokens).
    """

    groups: slice
    measured: mx.array


class Restored(NamedTuple):
    """Rows (heads, tokens, width) of each stream of a group, and what is wrong with each token's, for `reason_of`. Lazy."""

    streams: list[mx.array]
    wrong: mx.array


def available() -> bool:
    """Tell whether rows are coded on MLX's default device: a GPU whose compiler and arithmetic give what NumPy gives."""
    return _refused() is None


def describe() -> str:
    """ "Metal kernels", "CUDA kernels", or why there are none."""
    return _refused() or f"{_NAMES[gpu_entropy.dialect().name]} kernels"


def _refused() -> str | None:
    dialect = gpu_entropy.dialect_here()
    return "no GPU kernels: MLX's default device has none" if dialect is None else _tried(dialect)


@lru_cache(maxsize=1)
def _tried(dialect: Dialect) -> str | None:
    """Return what is wrong with the kernels on this device, by a few rows: then those are coded on the CPU."""
    try:
        if gpu_entropy.right() and _right():
            return None
    except (RuntimeError, ValueError) as error:  # of the device's compiler
        log.warning("transform coding stays on the CPU: its kernels don't compile on this GPU (%s)", error)
        return "no GPU kernels: they don't compile here"
    log.warning("transform coding stays on the CPU: its kernels give other codes on this GPU than NumPy does")
    return "no GPU kernels: they err here"


def _right() -> bool:
    """Tell whether rows are coded here as on the CPU, but for how products round: some of two blocks, of two layers that are
    not alike, each a group.
    """
    chance, tables = np.random.default_rng(0), first_guess()
    layers = [
        Layer(0, 2, 8, 8, "float16", Rope(np.array([0.9, 0.09, 0.009]))),
        Layer(1, 1, 6, 5, "bfloat16", Rope(np.array([0.7, 0.07]), True, 1.25)),
    ]
    given, rows = [], []
    for layer in layers:
        count, widths = layer.channels, (layer.key_width, layer.value_width)
        keys, values = (
            (np.tril(chance.normal(size=(layer.heads, width, width)), -1) + 4 * np.eye(width)).astype(np.float32)
            for width in widths
        )
        vectors = np.linalg.qr(chance.normal(size=(count, count)))[0].astype(np.float16)
        spreads, mean = np.geomspace(20, 0.5, count).astype(np.float32), chance.normal(size=count).astype(np.float32)
        group = LayerGroup((layer,), mean, ((keys, values),), vectors, spreads, np.zeros(len(QUALITIES), np.float32))
        drawn = [chance.normal(scale=2, size=(layer.heads, 90, width)).astype(np.float32) for width in widths]
        drawn[0][0, 20, 1] = np.inf  # a row that is kept as it is
        streams = [mx.array(stream).astype(element(layer.dtype).mlx) for stream in drawn]
        given.append(GroupRows(GroupCoder(group, tables, 4.0, layer.dtype), streams, [None, None]))
        rows.append([np.array(stream.astype(mx.float32)) for stream in streams])
    encoded = encode(given, [BlockSpan(5, 70), BlockSpan(70, 95)])
    restored = decode(
        [GroupCodes(of_group.coder, codes) for of_group, codes in zip(given, encoded, strict=True)], [5, 70]
    )
    coded = np.arange(90) != 20
    for of_group, codes, originals, (here, wrong) in zip(given, encoded, rows, restored, strict=True):
        blocks = [of_group.coder.decode(block, first) for block, first in zip(codes, (5, 70), strict=True)]
        for i, (original, stream) in enumerate(zip(originals, here, strict=True)):
            there = as_float32(np.concatenate([block[i] for block in blocks]).swapaxes(0, 1), of_group.coder.dtype)
            decoded = np.array(stream.astype(mx.float32))
            apart, lost = (
                decoded[:, coded] - there[:, coded],
                there[:, coded] - original[:, coded],
            )  # a step is a quarter
            if np.abs(apart).max() > 0.15 or lost.std() > 0.3 or not np.array_equal(decoded[:, 20], original[:, 20]):
                return False
        if copy_out(wrong).any():
            return False
    return True


def takes(coder: GroupCoder) -> bool:
    """Tell whether half precision will do for this group; else it is coded on the CPU."""
    return coder.group.half_precision_will_do


def at_once(coders: Sequence[GroupCoder], tokens: int) -> int:
    """Return how many of these groups, from the first on, are best coded together, for so many tokens: one at least."""
    room, most, channels = min(_ROOM, _memory() * _SHARE), 0, 0
    for count, coder in enumerate(coders):
        most = max(most, padded_count(len(coder.classes)))
        channels += coder.group.channels
        # Values three times and words, all of as many components as the group with most; rows twice, in two forms.
        if count and (
            tokens * (12 * (count + 1) * most + 8 * channels) > room
            or coder.tables is not coders[0].tables
            or not takes(coder)
        ):
            return count
    return len(coders)


def _memory() -> int:
    """Return bytes of the GPU's, by Metal's name or CUDA's."""
    info = mx.device_info()
    return int(info.get("memory_size") or info.get("total_memory") or 16 << 30)


# -- to codes -------------------------------------------------------------------------------------------------------------


def encode(groups: Sequence[GroupRows], blocks: Sequence[BlockSpan]) -> list[list[Codes]]:
    """Return the codes of groups, all of which have rows of these blocks: of each group and block."""
    encoding = begin_encoding(groups, blocks)
    encoding.copies.wait()
    return encoding.codes


def begin_encoding(
    groups: Sequence[GroupRows], blocks: Sequence[BlockSpan], *, decoding: bool = False
) -> EncodingUnderWay:
    """Encode, and wait for no more than how long codes are. With `decoding`, of blocks none of which has settled codes, what
    a fetch would give of them stays on the GPU.
    """
    coders = [group.coder for group in groups]
    runs = tuple((block.first, block.last) for block in blocks)
    skipped = np.concatenate([np.arange(block.last - block.first) < block.skip for block in blocks])
    joined = [Alike(part, _measured(groups[part], runs)) for part in _alike(coders)]
    mx.async_eval([of.measured for of in joined])  # the GPU begins while the rest is prepared
    classes = Classes.of([coder.classes for coder in coders])
    values = [
        classes.padded(_operands(coder).vectors @ of_group)
        for of in joined
        for coder, of_group in zip(coders[of.groups], of.measured, strict=True)
    ]
    lengths = [kernels.lengths(gpu_entropy.dialect(), of.measured.view(mx.uint16)).sum(axis=1) for of in joined]
    mx.async_eval(values, lengths)
    packed = gpu_entropy.pack(
        stacked(values),
        mx.concatenate(lengths),
        mx.array(skipped.astype(np.uint32)),
        mx.array(np.array([coder.most_left_out(0) for coder in coders], np.float32)),
        classes,
        coders[0].tables,
    )
    coded = begin_copies([packed.heads, packed.ends])
    offsets = _offsets(coders, joined, packed, runs)
    mx.async_eval(offsets)
    heads, ends = coded.wait()  # while the GPU finds the offsets
    rest = begin_copies([gpu_entropy.gathered(packed, int(ends[-1, -1])), *(part for run in offsets for part in run)])
    as_they_are = [np.flatnonzero(of_group) for of_group in gain_of(heads) == AS_IT_IS]
    bits = [_bits(group.streams, kept) for group, kept in zip(groups, as_they_are, strict=True)]
    decoded = []
    if decoding:
        beside = _beside(coders, offsets, as_they_are, bits)
        decoded = [
            _restored(coder, packed.decoded[g : g + 1], runs, of_group)
            for g, (coder, of_group) in enumerate(zip(coders, beside, strict=True))
        ]
        mx.async_eval(decoded)
    if any(map(len, as_they_are)):
        rest.wait()  # their words are joined with these rows' bits
    return EncodingUnderWay(
        _parted(groups, runs, KnownRows(heads, ends, as_they_are, bits), rest.arrays), decoded, rest
    )


def _parted(
    groups: Sequence[GroupRows], runs: Sequence[tuple[int, int]], known: KnownRows, arrays: Sequence[Array]
) -> list[list[Codes]]:
    """Return views of `arrays` as codes of each group and block. Those are all words, then numbers and steps of the offsets
    of each run of groups that are alike.
    """
    words, *parts = arrays
    numbers, steps = ([of_group for of_run in part for of_group in of_run] for part in (parts[::2], parts[1::2]))
    edges = _edges(runs)
    ends_of_blocks = known.ends[:, np.array(edges[1:]) - 1].tolist()
    codes, word = [], 0
    for g, group in enumerate(groups):
        heads, kept, of_blocks = known.heads[g], known.kept[g], []
        for number, (settled, end) in enumerate(zip(group.settled, ends_of_blocks[g], strict=True)):
            rows = slice(edges[number], edges[number + 1])
            own_words, word = words[word:end], end
            if len(kept):
                whole_rows = known.bits[g][np.searchsorted(kept, rows.start) : np.searchsorted(kept, rows.stop)]
                own_words = _with_rows(heads[rows], own_words, whole_rows)
            of_block = (numbers[g][:, number], steps[g][:, number]) if settled is None else settled[2:]
            of_blocks.append(Codes(heads[rows], own_words, *of_block))
        codes.append(of_blocks)
    return codes


def _beside(
    coders: Sequence[GroupCoder],
    offsets: Sequence[tuple[mx.array, mx.array]],
    kept: Sequence[Array],
    bits: Sequence[Array],
) -> list[BesideValues]:
    """Return what is beside the values of groups, whose offsets `_offsets` has given."""
    by_block = [[mx.contiguous(mx.swapaxes(part, 1, 2)) for part in run] for run in offsets]
    of_groups = [pair for numbers, steps in by_block for pair in zip(numbers, steps, strict=True)]
    of_rows = zip(coders, of_groups, kept, bits, strict=True)
    return [BesideValues(*pair, rows, own.view(element(coder.dtype).numpy)) for coder, pair, rows, own in of_rows]


def _alike(coders: Sequence[GroupCoder]) -> list[slice]:
    """Return runs of groups of the same streams, rotations and quality."""

    def kind(coder: GroupCoder) -> tuple[object, ...]:
        return coder.streams, coder.dtype, coder.quality, [layer.rotation for layer in coder.group.layers]

    ends = accumulate(len(list(run)) for _, run in groupby(coders, kind))
    return [slice(first, last) for first, last in pairwise([0, *ends])]


def _measured(groups: Sequence[GroupRows], runs: tuple[tuple[int, int], ...]) -> mx.array:
    """Return rows of groups that are alike in the metric, in steps, float16 (groups, channels, tokens): not finite where they
    are too far off. A launch takes all groups.
    """
    coder, tokens, dialect = groups[0].coder, groups[0].streams[0].shape[1], gpu_entropy.dialect()
    of, on_gpu = _operands(coder), [group.coder.group.on_gpu for group in groups]
    mean, scale = (stacked(arrays)[:, 0] for arrays in zip(*((of.mean, of.scale) for of in on_gpu), strict=True))
    centred: list[list[mx.array]] = [[] for _ in of.inverses]
    for i, (heads, width) in enumerate(coder.streams):
        form, phases = _form(coder, i, runs, decoding=False)
        rows = gather([group.streams[i][None] for group in groups], 0, tokens)
        bits = rows.view(mx.uint32 if coder.dtype == "float32" else mx.uint16)
        shifted = kernels.centre(dialect, form, [bits, mean, scale, *phases, of.places[i]])
        centred[of.runs[i]].append(shifted.view(mx.float16).reshape(len(groups), heads, tokens, width))
    measured = []
    for run, parts in enumerate(centred):
        rows = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        factors = stacked([of.factors[run] for of in on_gpu])
        measured.append((mx.swapaxes(factors, 2, 3) @ mx.swapaxes(rows, 2, 3)).reshape(len(groups), -1, tokens))
    return measured[0] if len(measured) == 1 else mx.concatenate(measured, axis=1)


def _offsets(
    coders: Sequence[GroupCoder],
    joined: Sequence[Alike],
    packed: gpu_entropy.Packed,
    runs: tuple[tuple[int, int], ...],
) -> list[tuple[mx.array, mx.array]]:
    """Return what decoded values of each block's fine rows lack on average, as it is stored: for each run of groups of the
    same streams uint8 (groups, (channels + 1) // 2, blocks) and bf16 as uint16 (groups, heads, blocks). Lazy.
    """
    dialect, edges, fine = gpu_entropy.dialect(), mx.array(np.array(_edges(runs), np.uint32)), packed.fine
    here = mx.arange(len(runs))[:, None] == _block_of_each(runs)
    seen = (here[None] * fine[:, None]).sum(axis=2).astype(mx.float32)
    # As parts of means, for products of half precision.
    decoded = (kernels.sums(dialect, packed.decoded.view(mx.uint16), fine, edges) / _PART).astype(mx.float16)
    offsets = []
    for groups, measured in joined:
        several = coders[groups]
        vectors = [_operands(coder).vectors for coder in several]
        coded = stacked([of.T @ sums[: len(of)] for of, sums in zip(vectors, decoded[groups], strict=True)])
        sums = kernels.sums(dialect, measured.view(mx.uint16), fine[groups], edges)
        missing = sums - coded.astype(mx.float32) * _PART
        offsets.append(_quantised(several, missing / mx.maximum(seen[groups], OFFSET_ROWS)[:, None]))
    return offsets


def _quantised(coders: Sequence[GroupCoder], missing: mx.array) -> tuple[mx.array, mx.array]:
    """Return what is missing in the metric of groups of the same streams, float32 (groups, channels, blocks), as offsets and
    their steps."""
    groups, _, blocks = missing.shape
    scale = stacked([coder.group.on_gpu.scale for coder in coders])[:, 0] * _factor(coders[0])
    numbers, steps, at = [], [], 0
    for run, first in enumerate(coders[0].group.on_gpu.inverses):
        heads, width, _ = first.shape
        channels = slice(at, at + heads * width)
        at = channels.stop
        inverses = stacked([coder.group.on_gpu.inverses[run] for coder in coders])
        back = mx.swapaxes(inverses, 2, 3) @ missing[:, channels].astype(mx.float16).reshape(
            groups, heads, width, blocks
        )
        lacking = back.astype(mx.float32) * scale[:, channels].reshape(groups, heads, width, 1)
        bits = ((mx.abs(lacking).max(axis=2) / MOST_OFFSET).view(mx.uint32) + 0xFFFF) >> 16  # bf16, rounded up
        step = (bits << 16).view(mx.float32)
        whole = mx.round(lacking / mx.where(step > 0, step, 1)[:, :, None])
        numbers.append((mx.clip(whole, -MOST_OFFSET, MOST_OFFSET) + 8).astype(mx.uint8).reshape(groups, -1, blocks))
        steps.append(bits.astype(mx.uint16))
    nibbles = mx.concatenate(numbers, axis=1)
    if nibbles.shape[1] % 2:
        nibbles = mx.concatenate([nibbles, mx.full((groups, 1, blocks), 8, mx.uint8)], axis=1)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, mx.concatenate(steps, axis=1)


def _factor(coder: GroupCoder) -> float:
    """Return what undoes the inverses' margin, and goes from steps to the metric."""
    return MARGIN / float(coder.finer)


def _bits(streams: Sequence[mx.array], rows: Array) -> Array:
    """Return uint16 (rows, halves of a row): the bits of these rows, stream after stream."""
    if not len(rows):
        return np.empty((0, 0), np.uint16)
    at = mx.array(rows.astype(np.int32))
    parts = [copy_out(mx.swapaxes(mx.take(stream, at, axis=1), 0, 1)) for stream in streams]
    return np.concatenate([part.reshape(len(rows), -1).view(np.uint16) for part in parts], axis=1)


def _with_rows(heads: Array, words: Array, whole_rows: Array) -> Array:
    """Return the words of rows with these heads, and whole rows where the heads say so."""
    parts, at, whole = [], 0, iter(whole_rows)
    for head in heads.tolist():
        if head == 0xFFFF:
            parts.append(next(whole))
        else:
            parts.append(words[at : at + (head & MOST_WORDS)])
            at += head & MOST_WORDS
    return np.concatenate(parts)


# -- and back -------------------------------------------------------------------------------------------------------------


def decode(groups: Sequence[GroupCodes], firsts: Sequence[int]) -> list[Restored]:
    """Decode codes of groups, each of the same blocks, which begin at these tokens -> their rows, the blocks' one after
    the other. DamagedCodes where more than words is.
    """
    return decode_batch(brought_in(groups, firsts))


def brought_in(groups: Sequence[GroupCodes], firsts: Sequence[int]) -> GroupBatch:
    """Return what `decode` takes, in the GPU's memory."""
    counts = [len(codes.heads) for codes in groups[0].blocks]
    heads = np.stack([np.concatenate([codes.heads for codes in group.blocks]) for group in groups])
    row_words = np.stack([group.coder.row_words(own) for group, own in zip(groups, heads, strict=True)])
    ends = np.cumsum(row_words).reshape(row_words.shape)
    lengths = np.add.reduceat(row_words, np.cumsum([0, *counts[:-1]]), axis=1)
    for group, of_blocks in zip(groups, lengths.tolist(), strict=True):
        _check(group, of_blocks)
    words = _joined(
        [
            codes.words[:length]
            for group, own in zip(groups, lengths.tolist(), strict=True)
            for codes, length in zip(group.blocks, own, strict=True)
        ]
    )
    offsets = _parts([np.stack([codes.offsets for codes in group.blocks]) for group in groups])
    steps = _parts([np.stack([codes.offset_steps for codes in group.blocks]) for group in groups])
    beside = []
    for g, (group, own, of_group) in enumerate(zip(groups, heads, ends, strict=True)):
        rows = np.flatnonzero(gain_of(own) == AS_IT_IS)
        whole = [words[of_group[row] - group.coder.raw_words : of_group[row]] for row in rows]
        bits = np.stack(whole).view(element(group.coder.dtype).numpy) if whole else np.empty((0, 0))
        beside.append(BesideValues(offsets[g], steps[g], rows, bits))
    return GroupBatch(
        tuple(group.coder for group in groups),
        tuple((first, first + count) for first, count in zip(firsts, counts, strict=True)),
        mx.array(heads),
        mx.array((ends - row_words).astype(np.uint32)),
        mx.array(words),
        beside,
    )


def _check(group: GroupCodes, lengths: Sequence[int]) -> None:
    """Raise DamagedCodes for blocks that claim more words than they have, or whose offsets no encoder wrote."""
    steps = np.concatenate([codes.offset_steps for codes in group.blocks])
    suspect = bool((steps & 0x7F80 == 0x7F80).any())
    shape = -(-group.coder.group.channels // 2), group.coder.heads
    for number, (codes, length) in enumerate(zip(group.blocks, lengths, strict=True)):
        if suspect or (len(codes.offsets), len(codes.offset_steps)) != shape:
            try:
                group.coder.check(codes)
            except DamagedCodes as damage:
                raise DamagedCodes(str(damage), number) from None
        if length > len(codes.words):
            raise DamagedCodes(CLAIMED, number)


def _joined(parts: Sequence[Array]) -> Array:
    """Return words one after the other, one at least."""
    edges = [0, *accumulate(len(part) for part in parts)]
    words = np.empty(max(1, edges[-1]), np.uint16)

    def copy(first: int, last: int) -> None:
        for number in range(first, last):
            words[edges[number] : edges[number + 1]] = parts[number]

    share_out(len(parts), 8, words.nbytes // _WORTH_A_THREAD, copy)
    return words


def _parts(arrays: Sequence[Array]) -> list[mx.array]:
    """Return arrays in the GPU's memory, brought there together."""
    whole = mx.array(np.concatenate([array.ravel() for array in arrays]))
    ends = np.cumsum([array.size for array in arrays]).tolist()
    return [whole[end - array.size : end].reshape(array.shape) for array, end in zip(arrays, ends, strict=True)]


def decode_batch(batch: GroupBatch) -> list[Restored]:
    """`decode` of a batch in the GPU's memory."""
    coders = batch.coders
    classes = Classes.of([coder.classes for coder in coders])
    values, wrong = gpu_entropy.unpack(batch.heads, batch.words, batch.first, classes, coders[0].tables)
    return [
        Restored(_restored(coder, values[g : g + 1], batch.runs, of_group), wrong[g])
        for g, (coder, of_group) in enumerate(zip(coders, batch.beside, strict=True))
    ]


def _restored(
    coder: GroupCoder, values: mx.array, runs: tuple[tuple[int, int], ...], beside: BesideValues
) -> list[mx.array]:
    """Return rows of each stream, of values float16 (1, components at least, rows): their products with what was scaled,
    centred and turned back as it was.
    """
    on_gpu, of, dialect = coder.group.on_gpu, _operands(coder), gpu_entropy.dialect()
    turned = mx.swapaxes(values[:, : of.by_head[0].shape[1]], 1, 2)
    products = [
        (turned @ (vectors @ inverse)).view(mx.uint16) for vectors, inverse in zip(of.by_head, of.inverses, strict=True)
    ]
    of_blocks = _block_of_each(runs), beside.offsets, beside.offset_steps
    streams, at = [], 0
    for i, (heads, width) in enumerate(coder.streams):
        form, phases = _form(coder, i, runs, decoding=True)
        restored = kernels.restore(
            dialect, form, [products[of.runs[i]], on_gpu.mean, on_gpu.scale, *of_blocks, *phases, of.places[i]]
        )
        stream = restored.view(element(coder.dtype).mlx)
        if kept := len(beside.kept):
            whole = beside.bits[:, at : at + heads * width].reshape(kept, heads, width).swapaxes(0, 1)
            stream[:, mx.array(beside.kept)] = bring_in(np.ascontiguousarray(whole), coder.dtype)
        streams.append(stream)
        at += heads * width
    return streams


def _edges(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return where each block's rows begin, and where the last one's end."""
    return [0, *accumulate(last - first for first, last in runs)]


def reason_of(wrong: Array) -> str | None:
    """Return what is wrong with a block, of whose rows `Restored` says this; None: nothing."""
    return gpu_entropy.reason_of(int(wrong.max(initial=0)))


# -- where rows are -------------------------------------------------------------------------------------------------------


def _form(
    coder: GroupCoder, stream: int, runs: tuple[tuple[int, int], ...], *, decoding: bool
) -> tuple[kernels.StreamKind, tuple[mx.array, mx.array]]:
    """Return what a kernel is made for, and the cosines and sines of the rows' phases."""
    rotation = NO_ROPE if stream % 2 else coder.group.layers[stream // 2].rotation
    pairs, (heads, width) = len(rotation.frequencies), coder.streams[stream]
    turning = (rotation.scale, rotation.scale) if decoding else (1 / rotation.scale, -1 / rotation.scale)
    factor = _factor(coder) if decoding else float(coder.finer)
    phases = _phases(rotation, runs) if pairs else _no_phases()
    return kernels.StreamKind(heads, width, coder.dtype, pairs, rotation.interleaved, *turning, factor), phases


_all_operands: WeakKeyDictionary[GroupCoder, _Operands] = WeakKeyDictionary()


def _operands(coder: GroupCoder) -> _Operands:
    if coder not in _all_operands:
        on_gpu, by_head, at = coder.group.on_gpu, [], 0
        count = min(padded_count(len(coder.classes)), len(on_gpu.vectors))
        for inverse in on_gpu.inverses:
            heads, width, _ = inverse.shape
            of_run = on_gpu.vectors[:count, at : at + heads * width].reshape(count, heads, width)
            by_head.append(mx.swapaxes(of_run, 0, 1))
            at += heads * width
        places, runs, channel, head = [], [], 0, 0
        for run, (_, streams) in enumerate(groupby(coder.streams, lambda stream: stream[1])):
            before = head
            for heads, width in streams:
                runs.append(run)
                places.append(mx.array(np.array([channel, head, head - before], np.uint32)))
                channel, head = channel + heads * width, head + heads
        operands = _Operands(on_gpu.vectors[:count], by_head, on_gpu.inverses, places, runs)
        mx.eval(operands[:-1])  # MLX evaluates an array only on the thread that made it, and these are for all
        _all_operands[coder] = operands
    return _all_operands[coder]


@lru_cache(maxsize=8)
def _block_of_each(runs: tuple[tuple[int, int], ...]) -> mx.array:
    """Return the number of each token's block: uint32 (tokens,)."""
    counts = [last - first for first, last in runs]
    return mx.array(np.repeat(np.arange(len(counts), dtype=np.uint32), counts))


@lru_cache(maxsize=1)
def _no_phases() -> tuple[mx.array, mx.array]:
    none = mx.zeros((1, 1))
    mx.eval(none)
    return none, none


@lru_cache(maxsize=2)  # the layers of a model share a rotation, or two, as a rule; a long prompt's phases are large
def _phases(rotation: Rope, runs: tuple[tuple[int, int], ...]) -> tuple[mx.array, mx.array]:
    """Return cosines and sines, float32 (tokens, pairs). Phases are float64's: of each 256th token, between them added."""
    radians = np.asarray(rotation.frequencies, np.float64)
    within = np.arange(_WITHIN)[:, None] * radians
    starts = np.array([start for first, last in runs for start in range(first, last, _WITHIN)])
    firsts = starts[:, None] * radians
    c, s, cos, sin = (mx.array(f(x).astype(np.float32)) for x in (within, firsts) for f in (np.cos, np.sin))
    cos, sin = cos[:, None], sin[:, None]
    both = [(cos * c - sin * s).reshape(-1, len(radians)), (sin * c + cos * s).reshape(-1, len(radians))]
    places, at = [], 0
    for first, last in runs:
        places.append(np.arange(at, at + last - first))
        at += -(-(last - first) // _WITHIN) * _WITHIN
    whole = np.concatenate(places)
    if len(whole) != at:
        both = [mx.take(part, mx.array(whole.astype(np.int32)), axis=0) for part in both]
    mx.eval(both)
    return both[0], both[1]
