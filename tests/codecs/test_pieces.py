"""Rows of one stream from many images: with and without levels, raw and coded, wherever there are gaps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import rows_of

from prefixcache.codecs import pieces
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.pieces import Piece, decode
from prefixcache.codecs.raw import RawRows
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
        alone = piece.codec.decode(piece.planes, Levels.unpacked(piece.levels) if piece.levels else None)
        assert mx.array_equal(expected[:, piece.at : piece.end], alone)
