"""The search for what a remote tier has of a prompt, against all that could be tried."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.blocks.node import Window
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW
from prefixcache.keys import BLOCK, TOKEN_BYTES, as_tokens, chain
from prefixcache.remote.search import SNAPSHOT_BLOCKS, Gap, SoughtImage, leading, search

ROOT = bytes(32)


class Names:
    """What is there, as a dict; counts the questions."""

    def __init__(
        self, there: dict[tuple[str, bytes], int], snapshots: dict[bytes, set[str]] | None = None, at_once: int = 8
    ):
        self.there, self.behind, self.at_once, self.rounds = there, snapshots or {}, at_once, 0

    def sizes(self, wanted):
        self.rounds += math.ceil(len(wanted) / self.at_once)
        return [self.there.get((one.kind, one.key)) for one in wanted]

    def snapshots(self, parents):
        return [self.behind.get(parent, set()) for parent in parents]

    def snapshot_id(self, key):
        return key.hex()


def gap_of(tokens: int, known: int = 0, windows=(), snapshots=False, here=(), boundary: int | None = None) -> Gap:
    """A prompt of so many tokens, of which the rows of the first `known` blocks are here, and the windows of blocks
    `here`.
    """
    data = as_tokens(list(range(tokens))).tobytes()
    keys, step = [], BLOCK * TOKEN_BYTES
    for block in range(tokens // BLOCK):
        keys.append(chain(keys[-1] if keys else ROOT, data[block * step : (block + 1) * step]))
    plain = not windows and not snapshots
    at = (known * BLOCK if plain else 0) if boundary is None else boundary
    return Gap(ROOT, data, keys, known, at, tuple(windows), snapshots, lambda block: block in here)


def wanted(count: int) -> list[SoughtImage]:
    return [SoughtImage(ROWS, n.to_bytes(32, "big"), b"", n, b"") for n in range(count)]


@given(st.integers(0, 5000), st.integers(0, 5000), st.sampled_from([2, 8, 1 << 16]))
def test_the_leading_images_are_found_in_few_rounds(count, there, at_once):
    there = min(there, count)
    rows = wanted(count)
    names = Names({(one.kind, one.key): 7 for one in rows[:there]}, at_once=at_once)
    found = leading(rows, names)
    assert len(found) == there
    assert set(found) <= {7, None}
    assert names.rounds <= 3 + math.log(max(count, 1), at_once)


def test_what_nobody_has_costs_one_question():
    names = Names({})
    assert leading(wanted(4000), names) == []
    assert names.rounds == 1


@given(st.lists(st.booleans(), max_size=60))
def test_asked_for_at_once_a_hole_ends_it(there):
    rows = wanted(len(there))
    names = Names(
        {(one.kind, one.key): 1 for one, is_there in zip(rows, there, strict=True) if is_there}, at_once=1 << 16
    )
    assert len(leading(rows, names)) == (there.index(False) if False in there else len(there))


@given(
    tokens=st.integers(0, 3000),
    known=st.integers(0, 6),
    rows=st.integers(0, 12),
    window=st.integers(1, 1500),
    keep=st.integers(0, 300),
    chunked=st.booleans(),
    here=st.sets(st.integers(0, 12)),
    there=st.sets(st.integers(0, 12)),
)
def test_with_windows_the_deepest_block_end_that_has_them_is_found(
    tokens, known, rows, window, keep, chunked, here, there
):
    keep = 0 if chunked else min(keep, window - 1)
    windows = (Window(window, keep, chunked),)
    known = min(known, tokens // BLOCK)
    gap = gap_of(tokens, known, windows, here={block for block in here if block < known})
    images = {(ROWS, one): 1 for one in gap.keys[:rows]}
    images |= {(WINDOW, gap.window(block).key): 1 for block in there if block < len(gap.keys)}
    boundary, found = search(gap, Names(images, at_once=1 << 16))
    reach = max(known, min(rows, len(gap.keys)) if rows > known else known)
    ends = []
    for end in range(1, reach + 1):
        first = windows[0].first(end * BLOCK) // BLOCK
        needed = [b for b in range(first, end) if any(gap.window(b).mask)]
        if all(b in there or (b in here and b < known) for b in needed):
            ends.append(end)
    assert boundary == (max(ends) * BLOCK if ends else 0)
    if boundary:
        assert [one.start // BLOCK for one in found if one.kind == ROWS] == list(range(known, boundary // BLOCK))


@given(
    tokens=st.integers(0, 3000),
    rows=st.integers(0, 12),
    ends=st.sets(st.integers(1, 3000)),
    tails=st.sets(st.integers(1, 3000)),
    boundary=st.integers(0, 600),
)
def test_of_snapshots_the_deepest_whose_rows_are_there_is_found(tokens, rows, ends, tails, boundary):
    gap = gap_of(tokens, snapshots=True, boundary=min(boundary, tokens))
    images = {(ROWS, one): 1 for one in gap.keys[:rows]}
    blocks = min(rows, len(gap.keys))
    behind: dict[bytes, set[str]] = {}
    for end in (end for end in ends if end <= tokens):
        above = (end - 1) // BLOCK
        suffix = gap.token_bytes[above * BLOCK * TOKEN_BYTES : end * TOKEN_BYTES]
        key = chain(gap.parent(above), suffix)
        behind.setdefault(gap.parent(above), set()).add(key.hex())
        if end in tails:
            images[ROWS, key] = 1
    blocks = len(leading([gap.rows(b) for b in range(len(gap.keys))], Names(images, at_once=1 << 16)))
    reached, found = search(gap, Names(images, behind, at_once=1 << 16))
    usable = [
        end
        for end in ends
        if gap.boundary < end <= tokens
        and blocks - SNAPSHOT_BLOCKS < (end - 1) // BLOCK <= blocks
        and ((end - 1) // BLOCK < blocks or (end in tails and end % BLOCK))
    ]
    assert reached == max(usable, default=gap.boundary)
    if usable:
        assert found[-1].kind == SNAPSHOT
        assert all(one.kind == ROWS for one in found[:-1])
        assert sum(len(one.tokens) // TOKEN_BYTES for one in found[:-1]) >= reached
