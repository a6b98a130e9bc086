"""Who is evicted next: recency, what depends on what, pins, and the order after a restart."""

from __future__ import annotations

import random

import pytest

from prefixcache.blocks.eviction import eviction_order, eviction_victim, victim_in_ram
from prefixcache.blocks.graph import NODE_BYTES, SLOT_BYTES
from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Window
from tests.blocks.planting import IMAGE, SSD, Planting, blocks, leaving, order, restarted, runs

# -- recency and who leaves -------------------------------------------------------------------------------------------


def test_a_hit_counts_for_the_blocks_it_reads_only():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    planting.store(blocks(9))
    planting.touch(blocks(1, 2))
    assert order(planting, RAM) == [("rows", 768), ("rows", 256), ("rows", 512), ("rows", 256)]
    assert [planting.rows(blocks(1, 2, 3)[:n]).hits for n in (256, 512, 768)] == [2, 2, 1]


def thinned(planting: Planting, count: int) -> list[int]:
    """The boundaries of the snapshots that leave RAM next."""
    ends = []
    while len(ends) < count and (slot := victim_in_ram(planting.graph)) is not None:
        planting.graph.drop(slot, RAM)
        planting.graph.check_integrity()
        ends += [slot.end] * (slot.kind == "snapshot")
    return ends


def test_a_prompt_that_grew_is_thinned_where_its_snapshots_are_near_each_other():
    planting, prompt = Planting(snapshots=True), blocks(*range(32))
    for end in (*range(512, 4096, 512), 4096, 8192):
        planting.store(prompt[:end])
    assert thinned(planting, 3) == [512, 1536, 2560]
    assert [planting.reach(prompt[:end]) for end in (1024, 2000, 3072, 8192)] == [1024, 1024, 3072, 8192]


def test_where_a_prompt_ended_stays_longer_than_where_another_went_on():
    planting, first, second = Planting(snapshots=True), blocks(1, 2), blocks(*range(10, 16))
    planting.store(first)
    for end in (512, 1024, 1536):
        planting.store(second[:end])
    assert thinned(planting, 2) == [512, 1024]
    assert planting.reach(first) == len(first)


def test_the_snapshot_that_was_used_last_stays_however_little_it_saves():
    planting = Planting(snapshots=True)
    for end in (1024, 2048, 2049):
        planting.store(blocks(*range(9))[:end])
    thinned(planting, 2)
    assert planting.reach(blocks(*range(9))) == 2049


def test_a_hit_in_ram_touches_the_order_of_the_ssd_too():
    planting = Planting()
    planting.store(blocks(1))
    planting.store(blocks(2))
    planting.spill_all()
    planting.graph.recency.unflushed.clear()
    planting.touch(blocks(1))
    assert eviction_victim(planting.graph, SSD) is planting.rows(blocks(2))
    assert list(planting.graph.recency.unflushed) == [planting.rows(blocks(1))]


def test_what_is_not_on_ssd_is_not_told_to_the_index():
    planting = Planting()
    planting.store(blocks(1))
    planting.touch(blocks(1))
    assert not planting.graph.recency.unflushed


def test_a_promotion_touches_its_whole_path_again():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    planting.spill_all()
    for n in (768, 512):
        planting.graph.drop(planting.rows(blocks(1, 2, 3)[:n]), RAM)
    planting.store(blocks(9))
    planting.promote(blocks(1, 2, 3))
    assert order(planting, RAM) == [("rows", 256), ("rows", 768), ("rows", 512), ("rows", 256)]
    assert leaving(planting, RAM) == [("rows", 256), ("rows", 768), ("rows", 512), ("rows", 256)]


def test_what_waits_for_the_ssd_does_not_leave():
    planting = Planting()
    planting.store(blocks(1))
    planting.store(blocks(2))
    planting.rows(blocks(1)).pending = True
    assert eviction_victim(planting.graph, RAM) is planting.rows(blocks(2))
    planting.rows(blocks(2)).pending = True
    assert eviction_victim(planting.graph, RAM) is None


def test_the_last_image_of_a_block_stays_while_something_in_ram_hangs_on_it():
    planting = Planting()
    planting.store(blocks(1))
    planting.empty_ram()
    planting.store(blocks(1, 2))  # its first block is on SSD only
    assert eviction_victim(planting.graph, SSD) is None
    assert planting.reach(blocks(1, 2), SSD) == 512
    planting.spill_all()
    assert leaving(planting, SSD) == [("rows", 512), ("rows", 256)] or eviction_victim(planting.graph, SSD) is None


def test_an_image_that_leaves_its_last_tier_frees_all_it_cost():
    planting = Planting()
    planting.store(blocks(1))
    held = planting.budget.held()
    assert (held.images, held.nodes) == (IMAGE, NODE_BYTES + BLOCK_BYTES + SLOT_BYTES)
    planting.spill_all()
    planting.evict(RAM)
    assert planting.budget.held().images == 0
    assert planting.budget.held().nodes == held.nodes
    assert planting.graph.images[SSD] == 1
    planting.evict(SSD)
    assert planting.budget.held().total == planting.graph.images[SSD] == planting.graph.nodes == 0


def test_leaving_a_tier_twice_is_leaving_it_once():
    planting = Planting()
    slot = planting.store(blocks(1))[0]
    planting.graph.drop(slot, SSD)
    planting.graph.drop(slot, RAM)
    planting.graph.drop(slot, RAM)
    planting.graph.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_the_eviction_order_says_beforehand_who_is_evicted_one_after_the_other(seed):
    chance, planting = random.Random(seed), Planting()
    prompts = [blocks(*(chance.randrange(3) for _ in range(chance.randrange(1, 6)))) for _ in range(12)]
    for tokens in prompts:
        planting.store(tokens + [9] * chance.choice([0, 40]))
    planting.empty_ram()
    graph = planting.graph
    slots = list(graph.slots.values())
    for slot in chance.sample(slots, len(slots) // 3):
        slot.tick = chance.randrange(20)  # less recent than what depends on it, too
    graph.recency.sort_below_ram(slots)
    graph.pin(chance.sample(slots, seed))
    foreseen = list(eviction_order(graph, SSD, graph.orders[SSD]))
    assert len(foreseen) >= len(slots) // 4
    assert foreseen == list(iter(lambda: planting.evict(SSD), None))


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_prompt_with_a_snapshot_keeps_all_that_it_needs():
    planting = Planting(windows=(Window(300),), snapshots=True)
    planting.store(runs((1, 600)))
    planting.store(runs((1, 256), (2, 256)))
    planting.spill_all()
    planting.graph.pin(planting.serving(runs((1, 600))))
    for tier in (RAM, SSD):
        leaving(planting, tier)
        assert planting.reach(runs((1, 600)), tier) == 600
        assert planting.reach(runs((1, 256), (2, 256)), tier) == 0


# -- after a restart --------------------------------------------------------------------------------------------------


def test_ties_after_a_restart_break_by_depth():
    planting = Planting(windows=(Window(600),), snapshots=True)
    planting.store(runs((1, 700)))
    planting.spill_all()
    again = restarted(planting)
    assert len({slot.tick for slot in again.graph.slots.values()}) == 1
    assert (
        order(again, SSD)
        == order(planting, SSD)
        == [
            ("snapshot", 700),
            ("window", 700),
            ("rows", 700),
            ("window", 512),
            ("rows", 512),
            ("window", 256),
            ("rows", 256),
        ]
    )


def test_after_a_restart_a_snapshot_leaves_before_the_rows_that_its_boundary_needs():
    planting = Planting(snapshots=True)
    planting.store(blocks(1, 2, 3), snapshot=False)
    planting.snapshot(blocks(1, 2, 3)[:300])
    planting.graph.recency.touch([*required_images(planting.walk(blocks(1, 2, 3)[:300]), 300, SSD)])
    planting.spill_all()
    again = restarted(planting)
    assert [kind for kind, end in order(again, SSD) if end in (300, 512)] == ["snapshot", "rows"]
