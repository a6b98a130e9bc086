"""Rows of one stream from many images: with and without levels, raw and coded, wherever there are gaps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import rows_of

from prefixcache.codecs import pieces
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.pieces import Piece, decode
from prefixcache.codecs.raw import RawRows
from prefixcache.codecs.threads import set_threads, threads
from prefixcache.codecs.turboquant.codec import TurboQuantRows
from prefixcache.codecs.turboquant.measure_levels import measure_levels

HEADS, WIDTH = 3, 64


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    room=st.integers(0, 70),
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["raw", "plain", "levelled"]),
            st.sampled_from([0, 3, 64, 100]),
            st.sampled_from([0, 0, 0, 5]),
        ),
        max_size=6,
    ),
)
def test_launches_give_what_the_cpu_gives_piece_by_piece(
    seed: int, dtype: str, room: int, kinds: list[tuple[str, int, int]]
) -> None:
    """To a kernel, pieces with levels of their own are more heads of one."""
    rng = np.random.default_rng(seed)
    made, at = [], 0
    for kind, tokens, gap in kinds:
        rows = rows_of(rng.standard_normal((tokens, HEADS, WIDTH)) + 5 * rng.standard_normal(WIDTH), dtype)
        codec = RawRows(WIDTH, dtype) if kind == "raw" else TurboQuantRows(WIDTH, dtype, 4, 0, kind == "levelled", True)
        levels = measure_levels(rows.astype(mx.float32), True) if kind == "levelled" else None
        at += gap
        packed = levels.packed() if levels is not None else None
        made.append(Piece(codec, tuple(codec.encode(rows, levels)), at, packed))
        at += tokens
    ordered = [piece for piece in made if piece.tokens]
    expected = decode([made[i] for i in rng.permutation(len(made))], HEADS, at + room, WIDTH, dtype)
    if at + room:
        launched = pieces._launched(ordered, HEADS, at + room, WIDTH, dtype)
        assert launched.dtype == expected.dtype
        assert mx.array_equal(launched, expected)
    for piece in ordered:
        alone = piece.codec.decode(piece.planes, piece.tokens, Levels.unpacked(piece.levels) if piece.levels else None)
        assert mx.array_equal(expected[:, piece.at : piece.end], alone)


def test_blocks_that_follow_each_other_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, made, launches = TurboQuantRows(WIDTH, "float16", 4, 0, True, True), [], []
    for i in range(5):
        rows = rows_of(np.random.default_rng(i).standard_normal((256 if i < 4 else 100, HEADS, WIDTH)), "float16")
        levels = measure_levels(rows.astype(mx.float32), True)
        made.append(Piece(codec, tuple(codec.encode(rows, levels)), 256 * i, levels.packed()))
    call = TurboQuantRows.decode
    monkeypatch.setattr(TurboQuantRows, "decode", lambda *args: launches.append(1) or call(*args))
    pieces._launched(made, HEADS, 2000, WIDTH, "float16")
    assert len(launches) == 2


@pytest.mark.parametrize("axis", [0, 1])
def test_planes_are_joined_by_several_threads(axis: int) -> None:
    rng = np.random.default_rng(axis)
    shapes = [(256, 8, 40), *((int(n), 8, 40) if axis == 0 else (256, int(n), 40) for n in rng.integers(1, 90, 30))]
    planes = [rng.integers(0, 1 << 32, shape, np.uint32) for shape in shapes]
    before = threads()
    set_threads(4)
    try:
        assert np.array_equal(pieces._joined(planes, axis), np.concatenate(planes, axis))
    finally:
        set_threads(before)
