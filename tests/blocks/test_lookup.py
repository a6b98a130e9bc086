"""How deep a prompt is found in the graph, and what that costs."""

import pytest

from prefixcache.blocks.eviction import eviction_victim
from prefixcache.blocks.lookup import image_depth
from prefixcache.blocks.node import RAM, Slot, common_tokens
from prefixcache.keys import BLOCK
from tests.blocks.planting import IMAGE, ROOT, SSD, Planting, blocks, leaving, raw, runs

# -- lookups ----------------------------------------------------------------------------------------------------------


def test_an_empty_tree_knows_nothing():
    planting = Planting()
    assert planting.walk(blocks(1)).nodes == []
    assert planting.reach(blocks(1)) == planting.reach([]) == planting.reach([], SSD) == 0
    assert eviction_victim(planting.graph, RAM) is eviction_victim(planting.graph, SSD) is None


def test_of_many_siblings_the_one_with_the_longest_common_prefix_is_found():
    planting = Planting()
    for same in range(0, BLOCK, 5):
        planting.store([*runs((1, same)), 100 + same, *runs((2, 600 - same))])
    for same in range(0, BLOCK, 5):
        assert planting.reach([*runs((1, same)), 100 + same, 7, 7]) == same + 1


def test_tokens_sort_by_their_bytes_but_match_by_whole_tokens():
    planting = Planting()
    planting.store([256, 1])
    planting.store([-256, 1])
    assert planting.reach([512]) == planting.reach([257]) == planting.reach([0]) == 0
    assert planting.reach([256]) == planting.reach([-256]) == 1
    assert planting.reach([256 + 2**40, 1]) == 0


def test_twins_that_match_alike_are_told_apart_by_ram():
    planting = Planting()
    planting.store(runs((1, 40), (2, 60)))
    planting.store(runs((1, 40), (3, 60)))
    planting.spill_all()
    for gone in (2, 3):
        planting.graph.drop(planting.rows(runs((1, 40), (gone, 60))), RAM)
        assert planting.reach(runs((1, 40), (9, 9))) == 40
        planting.promote(runs((1, 40), (gone, 60)))


def test_another_namespace_is_another_tree():
    planting = Planting()
    planting.store(blocks(1, 2))
    other = planting.graph.tree(b"other root key..")
    assert image_depth(planting.graph.walk(other, raw(blocks(1, 2))), SSD, 512) == 0
    assert planting.graph.tree(ROOT) is planting.tree


def test_a_long_prompt_among_ten_thousand_near_twins_costs_a_visit_a_block():
    planting = Planting()
    prompt = runs(*((i, BLOCK) for i in range(128)))
    planting.store(prompt)
    trunk = planting.node(prompt[: 127 * BLOCK])
    with planting.reserve(1 << 30) as reservation:
        for i in range(10_000):
            node = planting.graph.grow(trunk, raw([127] * 255 + [1000 + i]), reservation)
            planting.graph.attach(Slot("rows", node, node.key, IMAGE), reservation)
    deepest = [prompt, [*prompt[:-1], 5], [*prompt[:-1], 5000], [*prompt[:-1], 10**6], [*prompt, 1, 2, 3]]
    for asked in deepest:
        planting.graph.visits = 0
        walk = planting.walk(asked)
        assert walk.depth >= 128 * BLOCK - 1
        assert planting.graph.visits <= 130 + 14  # log2 of the siblings


def test_siblings_are_found_by_bisection_not_by_a_scan():
    planting = Planting()
    with planting.reserve(1 << 30) as reservation:
        for i in range(4096):
            node = planting.graph.grow(planting.tree.root, raw([7] * 255 + [i]), reservation)
            planting.graph.attach(Slot("rows", node, node.key, IMAGE), reservation)
    planting.graph.visits = 0
    assert planting.graph.nearest(planting.tree.root, raw([7] * 255 + [999]))[1] == 256
    assert planting.graph.nearest(planting.tree.root, raw([7] * 254 + [1, 1]))[1] == 254
    assert planting.graph.visits <= 8


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2], [1, 3], 1), ([256], [0], 0)],
)
def test_common_tokens(a, b, shared):
    assert common_tokens(raw(a), raw(b)) == common_tokens(raw(b), raw(a)) == shared


# -- hollow nodes -----------------------------------------------------------------------------------------------------


def test_a_hollow_node_goes_with_the_last_that_hangs_on_it():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    planting.graph.drop(planting.rows(blocks(1)), RAM)
    planting.graph.drop(planting.rows(blocks(1, 2)), RAM)
    assert planting.graph.nodes == 3
    assert leaving(planting, RAM) == [("rows", 768)]
    assert planting.graph.nodes == 0
    assert planting.budget.held().total == 0


def test_a_sibling_with_rows_is_nearer_than_a_hollow_one():
    planting = Planting()
    planting.store(runs((1, 100), (2, 156), (3, 10)))
    planting.store(runs((1, 90), (4, 20)))
    planting.graph.drop(planting.rows(runs((1, 100), (2, 156))), RAM)
    assert planting.reach(runs((1, 100), (2, 30))) == 90
