"""Runs of blocks made of edges, and the words for numbers, without a directory."""

from __future__ import annotations

import json
import random

import pytest

from prefixcache.cli.directory.blocktree import block_tree, largest
from prefixcache.cli.text import age, many, safe, size
from prefixcache.ssd import Edge

ROOT = b"r" * 16


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def rows(i: int, parent: bytes, block: int, hits: int = 0) -> Edge:
    return Edge("rows", key(i), parent, block * 256, 256, 100, 1, hits)


def grown(n: int, seed: int) -> list[Edge]:
    """A random tree of n blocks."""
    chance, level = random.Random(seed), [0]
    edges = [rows(0, ROOT, 0)]
    for i in range(1, n):
        parent = i - 1 if chance.random() < 0.6 else chance.randrange(i)
        level.append(level[parent] + 1)
        edges.append(rows(i, key(parent), level[i]))
    return edges


def test_nothing_gives_an_empty_tree():
    tree = block_tree([], ROOT)
    assert (tree.tops, tree.blocks, tree.depth, tree.fan_out, tree.forks) == ([], 0, 0, 0, 0)


def test_the_order_of_the_edges_does_not_matter():
    edges = grown(300, 1)
    shuffled = random.Random(2).sample(edges, len(edges))
    trees = [block_tree(one, ROOT) for one in (edges, shuffled)]
    assert sorted(r.start for r in trees[0].runs) == sorted(r.start for r in trees[1].runs)
    assert [(t.blocks, t.nbytes, t.depth, t.fan_out, t.forks) for t in trees[:1]] == [
        (t.blocks, t.nbytes, t.depth, t.fan_out, t.forks) for t in trees[1:]
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_block_is_in_one_run_and_the_sums_agree(seed):
    tree = block_tree(grown(500, seed), ROOT)
    assert sum(run.blocks for run in tree.runs) == 500
    assert sum(top.blocks + top.below_blocks for top in tree.tops) == 500
    assert sum(top.total for top in tree.tops) == tree.nbytes == 50_000
    for run in tree.runs:
        assert len(run.branches) != 1
        assert run.below_blocks == sum(b.blocks + b.below_blocks for b in run.branches)
        assert all(b.parent is run and b.start == run.start + run.tokens for b in run.branches)


def test_windows_and_snapshots_count_with_their_block():
    window = Edge("window", b"w" * 16, key(0), 0, 0, 7, 1, 0)
    snapshot = Edge("snapshot", b"s" * 16, key(1), 512, 9, 5, 1, 0)
    lost = Edge("window", b"x" * 16, key(9), 0, 0, 3, 1, 0)
    early = Edge("snapshot", b"y" * 16, ROOT, 0, 20, 2, 1, 0)
    tree = block_tree([lost, window, rows(0, ROOT, 0, 2), snapshot, rows(1, key(0), 1, 1), early], ROOT)
    (run,) = tree.runs
    assert (run.blocks, run.windows, run.snapshots, run.nbytes, run.hits) == (2, 1, 1, 212, 2)
    assert (tree.apart, tree.nbytes) == (1, 217)


def test_a_circle_in_a_broken_index_ends():
    tree = block_tree([rows(0, key(1), 1), rows(1, key(0), 1), rows(2, key(2), 0)], ROOT)
    assert tree.blocks == 3
    assert all(run.loose for run in tree.tops)


def test_a_very_deep_tree_is_no_recursion():
    edges = [rows(0, ROOT, 0)]
    for i in range(1, 5000):
        edges += [rows(2 * i, key(max(2 * i - 2, 0)), i), rows(2 * i + 1, key(max(2 * i - 2, 0)), i)]
    tree = block_tree(edges, ROOT)
    assert max(run.depth for run in tree.runs) == 4999
    json.dumps(tree.as_dict())


@pytest.mark.parametrize("lines", [1, 5, 50, 10_000])
def test_the_largest_runs_are_chosen_with_all_above_them(lines):
    trees = [block_tree(grown(n, n), ROOT) for n in (400, 30, 3)]
    shown = largest(trees, lines, 1000)
    by_id = {id(run): run for tree in trees for run in tree.runs}
    assert len(shown) <= lines
    assert all(by_id[i].parent is None or id(by_id[i].parent) in shown for i in shown)
    if lines == 10_000:
        assert len(shown) == len(by_id)
    left = [run for i, run in by_id.items() if i not in shown and (run.parent is None or id(run.parent) in shown)]
    if left and shown:
        assert max(run.total for run in left) <= max(by_id[i].total for i in shown)


def test_more_trees_than_lines_still_show_the_largest():
    trees = [block_tree(grown(n, n), ROOT) for n in range(1, 100)]
    shown = largest(trees, 20, 1000)
    assert id(trees[-1].tops[0]) in shown


def test_no_run_is_chosen_below_the_levels_that_fit():
    tree = block_tree(grown(500, 3), ROOT)
    shown = largest([tree], 10_000, 3)
    assert {run.depth for run in tree.runs if id(run) in shown} == {0, 1, 2}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (99_949, "99.9 kB"), (99_960, "100 kB"), (999_499, "999 kB"),
     (999_500, "1.00 MB"), (8 * 10**9, "8.00 GB"), (1234 * 10**15, "1,234 PB")],
)  # fmt: skip
def test_sizes(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (90_000, "1 d"), (400 * 86400, "1 y")],
)
def test_ages(seconds, text):
    assert age(1e9 - seconds, 1e9) == text
    assert age(None, 1e9) == "-"


def test_words():
    assert [many(1, "branch"), many(2, "branch"), many(1234, "block")] == ["1 branch", "2 branches", "1,234 blocks"]
    assert safe("a\x1b\n\u202e\udc80é漢") == "a\\x1b\\n\\u202e\\udc80é漢"
