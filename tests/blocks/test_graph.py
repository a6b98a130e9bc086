"""Superseded tails, and what nodes and slots cost while they are there."""

import pytest

from prefixcache.blocks.budget import Budget
from prefixcache.blocks.graph import NODE_BYTES, Graph
from prefixcache.blocks.node import Node, Slot, Window
from prefixcache.blocks.superseded import successors, superseded_tails
from prefixcache.keys import chain
from tests.blocks.planting import IMAGE, ROOT, SSD, Planting, blocks, raw, runs

# -- twins ------------------------------------------------------------------------------------------------------------


def test_shorter_twins_are_the_siblings_that_are_a_prefix():
    planting = Planting()
    for tokens in ([1], [1, 1], [1, 1, 2], [1, 1, 3], [1, 2], [2], [1, 1, 3, 3]):
        planting.grow(planting.tree.root, raw(tokens))
    node = planting.graph.child(planting.tree.root, raw([1, 1, 3, 3]))
    assert [twin.tokens for twin in superseded_tails(node)] == [raw([1, 1, 3]), raw([1, 1]), raw([1])]
    assert successors(node) == []


def test_longer_twins_are_the_siblings_that_go_on():
    planting = Planting()
    for tokens in ([1], [1, 1], [1, 1, 2], [1, 1, 3], [1, 2], [2]):
        planting.grow(planting.tree.root, raw(tokens))
    node = planting.graph.child(planting.tree.root, raw([1, 1]))
    assert [twin.tokens for twin in successors(node)] == [raw([1, 1, 2]), raw([1, 1, 3])]


def test_a_whole_block_has_no_longer_twin():
    planting = Planting()
    planting.store(blocks(1, 2))
    assert successors(planting.node(blocks(1))) == []
    assert superseded_tails(planting.node(blocks(1, 2))) == []


def test_an_outgrown_tail_leaves_ram_at_once_and_the_ssd_when_its_heir_is_durable():
    planting = Planting()
    planting.store(runs((1, 100)))
    planting.spill_all()
    tail = planting.rows(runs((1, 100)))
    planting.store(runs((1, 200)))
    assert tail.image is None
    assert tail.disk
    assert planting.reach(runs((1, 200))) == 200
    planting.spill(planting.rows(runs((1, 200))))
    planting.drop_superseded(planting.node(runs((1, 200))))
    assert not tail.disk
    assert planting.graph.nodes == 1
    planting.graph.check_integrity()


def test_a_grown_tail_keeps_the_snapshots_that_its_shorter_twin_served():
    planting = Planting(snapshots=True)
    planting.store(runs((1, 300)))
    planting.store(runs((1, 400)))
    assert planting.graph.nodes == 2
    assert planting.reach(runs((1, 399))) == 300
    planting.graph.check_integrity()


# -- places and prices ------------------------------------------------------------------------------------------------


def test_a_key_that_another_block_has_is_a_collision_and_nothing_grows():
    planting = Planting()
    planting.store(blocks(1))
    with planting.reserve(1 << 16) as reservation:
        assert planting.graph.grow(planting.tree.root, raw([5]), reservation, planting.node(blocks(1)).key) is None
    assert planting.graph.nodes == 1
    planting.graph.check_integrity()


def test_growing_what_is_there_costs_nothing():
    planting = Planting()
    planting.store(blocks(1))
    with planting.reserve(0) as reservation:
        node = planting.graph.grow(planting.tree.root, raw(blocks(1)), reservation)
    assert node is planting.node(blocks(1))


@pytest.mark.parametrize("kind", ["rows", "window", "snapshot"])
def test_a_taken_place_is_not_given_twice(kind):
    planting = Planting(windows=(Window(100),), snapshots=True)
    planting.store(blocks(1))
    planting.store(blocks(1)[:100])
    node = planting.node(blocks(1)) if kind != "snapshot" else planting.tree.root
    suffix = raw(blocks(1)) if kind == "snapshot" else b""
    key = node.windows[0].key if kind == "window" else b"another key....."  # which a window's rows are a part of
    with planting.reserve(1 << 16) as reservation:
        assert not planting.graph.attach(Slot(kind, node, key, IMAGE, suffix), reservation)
    planting.graph.check_integrity()


@pytest.mark.parametrize("kind", ["rows", "window", "snapshot"])
def test_a_slot_that_cannot_be_paid_for_is_not_attached(kind):
    budget = Budget(1 << 20)
    graph = Graph(budget)
    root = graph.tree(ROOT).root
    with budget.reserve(NODE_BYTES + 8) as reservation:
        node = graph.grow(root, raw([1]), reservation)
        suffix = raw([1]) if kind == "snapshot" else b""
        slot = Slot(kind, root if kind == "snapshot" else node, chain(ROOT, b"x"), IMAGE, suffix)
        with pytest.raises(ValueError, match="0 left"):
            graph.attach(slot, reservation)
    graph.prune(node)
    graph.check_integrity()
    assert not graph.slots
    assert graph.nodes == budget.held().total == 0


def test_a_node_that_cannot_be_paid_for_does_not_grow():
    planting = Planting()
    with planting.reserve(NODE_BYTES) as reservation, pytest.raises(ValueError, match="spent"):
        planting.graph.grow(planting.tree.root, raw([1]), reservation)
    assert planting.tree.root.children == []
    planting.graph.check_integrity()


def test_a_parted_slot_is_out_of_sight_and_paid_for_until_the_writer_lets_go():
    planting = Planting()
    planting.store(blocks(1))
    slot = planting.rows(blocks(1))
    planting.graph.begin_write(slot, SSD)
    planting.graph.detach(slot)
    planting.graph.check_integrity()
    assert planting.reach(blocks(1), SSD) == planting.graph.nodes == 0
    assert planting.budget.held().images == IMAGE
    planting.store(blocks(1))  # the same key anew, while the old one is still being written
    planting.graph.check_integrity()
    assert planting.budget.held().images == 2 * IMAGE
    assert planting.graph.release("rows", slot.key) is slot
    assert planting.graph.release("rows", slot.key) is None
    assert planting.budget.held().images == IMAGE
    assert planting.reach(blocks(1)) == 256
    planting.graph.check_integrity()


def test_pruning_what_holds_something_or_is_out_already_changes_nothing():
    planting = Planting()
    planting.store(blocks(1))
    planting.graph.prune(planting.node(blocks(1)))
    planting.graph.prune(planting.tree.root)
    planting.graph.prune(None)
    stray = Node(planting.tree, planting.tree.root, raw([9]), chain(ROOT, raw([9])))
    planting.graph.prune(stray)
    planting.graph.check_integrity()
    assert planting.graph.nodes == 1
