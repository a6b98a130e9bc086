"""The graph, rule by rule. `test_graph_model.py` runs it against a plain model."""

from __future__ import annotations

import random

import pytest

from prefixcache.blocks.budget import Budget
from prefixcache.blocks.eviction import eviction_order, eviction_victim
from prefixcache.blocks.graph import NODE_BYTES, SLOT_BYTES, Graph
from prefixcache.blocks.lookup import hit_depth, required_images
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot, Window, common_tokens, covering_rows, dependencies
from prefixcache.blocks.superseded import successors, superseded_tails
from prefixcache.keys import BLOCK, chain
from tests.planting import IMAGE, ROOT, SSD, Planting, blocks, raw, restarted, runs


def order(planting: Planting, tier: int) -> list[tuple[str, int]]:
    """Who leaves a tier next: kind and end, the coldest first."""
    return [(slot.kind, slot.end) for slot in planting.graph.order[tier]]


def leaving(planting: Planting, tier: int) -> list[tuple[str, int]]:
    """All that leave a tier, in their order."""
    found = []
    while (slot := planting.evict(tier)) is not None:
        found.append((slot.kind, slot.end))
        planting.graph.check_integrity()
    return found


# -- lookups ----------------------------------------------------------------------------------------------------------


def test_an_empty_tree_knows_nothing():
    planting = Planting()
    assert planting.walk(blocks(1)).nodes == []
    assert planting.reach(blocks(1)) == planting.reach([]) == planting.reach([], SSD) == 0
    assert eviction_victim(planting.graph, RAM) is eviction_victim(planting.graph, SSD) is None


@pytest.mark.parametrize("length", [1, 255, 256, 257, 511, 512, 513, 700])
@pytest.mark.parametrize("asked", [1, 255, 256, 257, 511, 512, 513, 700])
def test_a_prompt_is_found_to_its_deepest_common_prefix(length, asked):
    planting = Planting()
    planting.store(runs((1, length)))
    assert planting.reach(runs((1, asked))) == min(length, asked)
    assert planting.reach(runs((1, min(length, asked)), (2, 40))) == min(length, asked)


def test_a_prompt_that_diverges_inside_a_block_is_found_to_the_token():
    planting = Planting()
    planting.store(runs((1, 300), (2, 300)))
    for same in (0, 1, 7, 255, 256, 257, 299, 300, 301, 511, 512, 599):
        asked = runs((1, 300), (2, 300))[:same] + [9] * 50
        assert planting.reach(asked) == same
        assert planting.walk(asked).depth == same


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


def test_a_limit_cuts_the_depth_at_any_token():
    planting = Planting()
    planting.store(runs((1, 700)))
    for limit in (-5, 0, 1, 255, 256, 300, 699, 700, 10_000):
        assert max(planting.reach(runs((1, 700)), RAM, limit), 0) == max(min(limit, 700), 0)


def test_ssd_depth_counts_ram_and_ssd_together():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    first, second, third = (planting.rows(blocks(1, 2, 3)[:n]) for n in (256, 512, 768))
    planting.spill(second)
    planting.graph.drop(second, RAM)
    assert planting.reach(blocks(1, 2, 3), RAM) == 256
    assert planting.reach(blocks(1, 2, 3), SSD) == 768
    assert first.disk
    assert not third.disk


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
    assert hit_depth(planting.graph.walk(other, raw(blocks(1, 2))), SSD, 512) == 0
    assert planting.graph.tree(ROOT) is planting.tree


def test_a_walk_changes_nothing():
    planting = Planting()
    planting.store(runs((1, 600)))
    before = order(planting, RAM), order(planting, SSD), planting.graph.recency.clock
    for asked in (runs((1, 600)), runs((1, 300), (2, 9)), runs((5, 5))):
        planting.reach(asked)
        planting.serving(asked)
    assert before == (order(planting, RAM), order(planting, SSD), planting.graph.recency.clock)


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


def test_a_lookup_ends_at_a_hollow_node_until_its_rows_are_stored_again():
    planting = Planting()
    prompt = blocks(1, 2, 3)
    planting.store(prompt)
    planting.graph.drop(planting.rows(prompt[:512]), RAM)
    planting.graph.check_integrity()
    assert planting.node(prompt[:512]).rows is None
    assert planting.reach(prompt) == planting.reach(prompt, SSD) == 256
    assert planting.reach(prompt[:300]) == 256
    assert [slot.end for slot in planting.store(prompt)] == [512]
    assert planting.reach(prompt) == 768


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


# -- recency and who leaves -------------------------------------------------------------------------------------------


def test_a_path_is_touched_tail_first():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    assert [slot.end for slot in planting.serving(blocks(1, 2, 3))] == [768, 512, 256]
    assert order(planting, RAM) == order(planting, SSD) == [("rows", 768), ("rows", 512), ("rows", 256)]


def test_lru_lets_leaves_go_first_without_asking():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    planting.store(blocks(1, 2, 4))
    planting.store(blocks(5))
    planting.touch(blocks(1, 2, 3))
    ends = [slot.end for slot in planting.graph.order[RAM]]
    assert ends == [768, 256, 768, 512, 256]
    assert [end for _, end in leaving(planting, RAM)] == ends


def test_a_hit_counts_for_the_blocks_it_reads_only():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    planting.store(blocks(9))
    planting.touch(blocks(1, 2))
    assert order(planting, RAM) == [("rows", 768), ("rows", 256), ("rows", 512), ("rows", 256)]
    assert [planting.rows(blocks(1, 2, 3)[:n]).hits for n in (256, 512, 768)] == [2, 2, 1]


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


def test_the_ssd_order_has_every_slot_and_gives_only_what_the_ssd_holds():
    planting = Planting()
    planting.store(blocks(1))
    planting.store(blocks(2))
    planting.spill(planting.rows(blocks(2)))
    assert order(planting, SSD) == [("rows", 256)] * 2
    assert eviction_victim(planting.graph, SSD) is planting.rows(blocks(2))


def test_an_image_that_reaches_the_ssd_late_has_its_place_in_the_order():
    planting = Planting()
    planting.store(blocks(1))
    planting.store(blocks(2))
    planting.spill(planting.rows(blocks(2)))
    planting.spill(planting.rows(blocks(1)))
    assert eviction_victim(planting.graph, SSD) is planting.rows(blocks(1))


def test_what_waits_for_the_ssd_does_not_leave():
    planting = Planting()
    planting.store(blocks(1))
    planting.store(blocks(2))
    planting.rows(blocks(1)).pending = True
    assert eviction_victim(planting.graph, RAM) is planting.rows(blocks(2))
    planting.rows(blocks(2)).pending = True
    assert eviction_victim(planting.graph, RAM) is None


def test_what_hangs_in_the_other_tier_keeps_nothing_from_leaving():
    planting = Planting()
    planting.store(blocks(1, 2))
    planting.spill_all()
    planting.graph.drop(planting.rows(blocks(1, 2)), RAM)
    assert eviction_victim(planting.graph, RAM) is planting.rows(blocks(1))
    assert eviction_victim(planting.graph, SSD) is planting.rows(blocks(1, 2))


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
    foreseen = list(eviction_order(graph, SSD, graph.order[SSD]))
    assert len(foreseen) >= len(slots) // 4
    assert foreseen == list(iter(lambda: planting.evict(SSD), None))


# -- pins -------------------------------------------------------------------------------------------------------------


def test_nothing_above_a_pinned_block_leaves():
    planting = Planting()
    planting.store(blocks(1, 2, 3))
    planting.spill_all()
    held = planting.graph.pin([planting.rows(blocks(1, 2))])
    for tier in (RAM, SSD):
        assert leaving(planting, tier) == [("rows", 768)]
    planting.graph.unpin(held)
    assert leaving(planting, RAM) == leaving(planting, SSD) == [("rows", 512), ("rows", 256)]


def test_pins_count():
    planting = Planting()
    planting.store(blocks(1))
    slot = planting.rows(blocks(1))
    first, second = planting.graph.pin([slot]), planting.graph.pin([slot])
    planting.graph.unpin(first)
    assert eviction_victim(planting.graph, RAM) is None
    planting.graph.unpin(second)
    assert eviction_victim(planting.graph, RAM) is slot


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


def test_after_a_restart_the_order_follows_the_ticks():
    planting = Planting()
    for i in (1, 2, 3):
        planting.store(blocks(i))
    planting.touch(blocks(1))
    planting.spill_all()
    again = restarted(planting, reversed(planting.graph.order[SSD]))
    again.graph.check_integrity()
    assert [again.evict(SSD).node.tokens[0] for _ in range(3)] == [2, 3, 1]
    assert again.graph.recency.clock == planting.graph.recency.clock


def test_ties_after_a_restart_break_by_depth():
    planting = Planting(windows=(Window(600),), snapshots=True)
    planting.store(runs((1, 700)))
    planting.spill_all()
    again = restarted(planting)
    assert len({slot.tick for slot in again.graph.slots.values()}) == 1
    assert order(again, SSD) == order(planting, SSD) == [
        ("snapshot", 700), ("window", 700), ("rows", 700), ("window", 512), ("rows", 512), ("window", 256), ("rows", 256)
    ]  # fmt: skip


def test_after_a_restart_a_snapshot_leaves_before_the_rows_that_its_boundary_needs():
    planting = Planting(snapshots=True)
    planting.store(blocks(1, 2, 3), snapshot=False)
    planting.snapshot(blocks(1, 2, 3)[:300])
    planting.graph.recency.touch([*required_images(planting.walk(blocks(1, 2, 3)[:300]), 300, SSD)])
    planting.spill_all()
    again = restarted(planting)
    assert [kind for kind, end in order(again, SSD) if end in (300, 512)] == ["snapshot", "rows"]


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "boundary", "first"),
    [
        (Window(512), 100, 0),
        (Window(512), 512, 0),
        (Window(512), 513, 2),
        (Window(512), 2000, 1489),
        (Window(300, keep=4), 2, 2),
        (Window(300, keep=4), 300, 4),
        (Window(300, keep=4), 301, 6),
        (Window(300, keep=4), 1000, 705),
        (Window(1, keep=0), 50, 50),
        (Window(512, chunked=True), 100, 0),
        (Window(512, chunked=True), 511, 0),
        (Window(512, chunked=True), 512, 512),
        (Window(512, chunked=True), 700, 512),
        (Window(300, chunked=True), 299, 0),
        (Window(300, chunked=True), 310, 256),
        (Window(300, chunked=True), 600, 512),
    ],
)
def test_the_first_row_that_a_window_needs(window, boundary, first):
    assert window.first(boundary) == first


@pytest.mark.parametrize(
    ("size", "keep"), [(size, keep) for size in (1, 2, 200, 256, 300, 512, 700) for keep in (0, 4) if keep < size]
)
@pytest.mark.parametrize("length", [100, 256, 600, 1100])
def test_a_rotating_window_is_hit_where_its_rows_are(size, keep, length):
    planting = Planting(windows=(Window(size, keep),))
    prompt = list(range(length))
    held = max(length - size, 0)  # what the live cache holds after one decoded token
    planting.store(prompt, held=held)
    for asked in {length, length - 1, length - 2, held + size - keep, held, 1, 300}:
        boundary = min(asked, length)
        needed = range(min(keep, boundary) if boundary <= size else boundary - size + keep + 1, boundary)
        if all(t >= held for t in needed):
            assert planting.reach(prompt[:boundary]) == boundary


def test_boundaries_without_their_rows_are_not_hit():
    planting = Planting(windows=(Window(300),))
    prompt = list(range(1000))
    planting.store(prompt, held=700)  # the rows that a window of 300 holds
    assert planting.reach(prompt) == planting.reach([*prompt, 7]) == 1000
    assert planting.reach(prompt[:999]) == 999
    assert planting.reach(prompt[:998]) == 0
    planting.store(prompt[:800], held=400)
    assert planting.reach(prompt[:998]) == 998
    assert planting.reach(prompt[:699]) == 699
    assert planting.reach(prompt[:698]) == 0


def test_a_hole_in_a_window_ends_at_the_deepest_boundary_before_it():
    planting = Planting(windows=(Window(100),))
    prompt = list(range(1024))
    planting.store(prompt)
    window = planting.node(prompt[:512]).windows[0]
    window.mask = (window.mask[0] & ~(1 << 200),)  # token 456
    assert planting.reach(prompt[:456]) == 456
    for asked in (457, 500, 554, 555):
        assert planting.reach(prompt[:asked]) == 456
    for asked in (556, 600, 1024):
        assert planting.reach(prompt[:asked]) == asked


def test_a_window_that_left_is_a_hole():
    planting = Planting(windows=(Window(256),))
    prompt = blocks(1, 2, 3, 4)
    planting.store(prompt)
    planting.graph.drop(planting.node(blocks(1, 2)).windows[0], RAM)
    assert planting.reach(prompt) == 1024
    assert planting.reach(prompt[:767]) == 767  # needs rows 512 to 766
    assert planting.reach(prompt[:766]) == planting.reach(prompt[:600]) == planting.reach(prompt[:257]) == 256
    planting.graph.check_integrity()


def test_two_windows_at_once_both_must_have_their_rows():
    planting = Planting(windows=(Window(100), Window(512, chunked=True)))
    prompt = list(range(1200))
    planting.store(prompt, held=1024)
    assert planting.reach(prompt) == 1200
    assert planting.reach(prompt[:1124]) == 1124  # rows 1025 and on
    assert planting.reach(prompt[:1122]) == 0
    planting.store(prompt[:800], held=512)
    assert planting.reach(prompt[:800]) == 800
    assert planting.reach(prompt[:610]) == 0
    assert planting.reach(prompt[:611]) == 611


def test_each_window_has_a_mask_of_its_own():
    planting = Planting(windows=(Window(100), Window(300)))
    prompt = list(range(700))
    planting.store(prompt)
    window = planting.node(prompt[:512]).windows[0]
    window.mask = (window.mask[0], window.mask[1] & ~1)  # token 256, of the wide window alone
    assert planting.reach(prompt[:556]) == 556
    assert planting.reach(prompt[:555]) == 256


def test_a_chunked_layer_needs_its_chunk_only():
    planting = Planting(windows=(Window(512, chunked=True),))
    prompt = list(range(1300))
    planting.store(prompt, held=1024)
    assert planting.reach(prompt) == 1300
    assert planting.reach(prompt[:1025]) == 1025
    assert planting.reach(prompt[:1024]) == 1024  # a chunk's end needs no row at all
    assert planting.reach(prompt[:1023]) == 512
    assert planting.reach(prompt[:500]) == 0


def test_windows_of_another_branch_do_not_help():
    planting = Planting(windows=(Window(300),))
    planting.store(runs((1, 256), (2, 256), (3, 100)))
    planting.store(runs((1, 256), (4, 256), (3, 100)), held=500)
    assert planting.reach(runs((1, 256), (4, 256), (3, 100))) == 256
    assert planting.reach(runs((1, 256), (4, 100))) == 256
    assert planting.reach(runs((1, 256), (2, 100))) == 356


def test_windows_in_ram_alone_count_for_ram():
    planting = Planting(windows=(Window(256),))
    planting.store(blocks(1, 2))
    planting.spill_all()
    planting.graph.drop(planting.node(blocks(1, 2)).windows[0], RAM)
    assert planting.reach(blocks(1, 2), RAM) == 256
    assert planting.reach(blocks(1, 2), SSD) == 512


def test_a_hit_reads_the_windows_that_it_needs_and_no_other():
    planting = Planting(windows=(Window(300), Window(20)))
    planting.store(blocks(1, 2, 3, 4))
    serving = [(slot.kind, slot.end) for slot in planting.serving(blocks(1, 2, 3, 4))]
    assert serving == [("window", 1024), ("rows", 1024), ("window", 768), ("rows", 768), ("rows", 512), ("rows", 256)]


def test_a_window_leaves_before_the_rows_it_hangs_on():
    planting = Planting(windows=(Window(300),))
    planting.store(blocks(1, 2))
    assert leaving(planting, RAM) == [("window", 512), ("rows", 512), ("window", 256), ("rows", 256)]


def test_rows_that_no_boundary_needs_any_more_go_next():
    planting = Planting(windows=(Window(100),))
    planting.store(blocks(1, 2, 3), held=668)
    planting.store(blocks(7))
    planting.touch(blocks(1, 2, 3))
    planting.graph.drop(planting.node(blocks(1, 2, 3)).windows[0], RAM)
    assert leaving(planting, RAM) == [("rows", 768), ("rows", 512), ("rows", 256), ("window", 256), ("rows", 256)]


def test_rows_that_another_boundary_needs_stay():
    planting = Planting(windows=(Window(100),))
    planting.store(blocks(1, 2, 3), held=668)
    planting.store(blocks(1, 2), held=412)
    planting.store(blocks(7))
    planting.touch(blocks(1, 2, 3))
    planting.graph.drop(planting.node(blocks(1, 2, 3)).windows[0], RAM)
    assert leaving(planting, RAM)[0] == ("rows", 768)
    planting.graph.check_integrity()


def test_rows_up_to_a_whole_chunk_are_still_of_use_when_the_last_window_left():
    planting = Planting(windows=(Window(512, chunked=True),))
    planting.store(blocks(1, 2, 3), held=512)
    planting.store(blocks(7), held=0)
    planting.touch(blocks(1, 2, 3))
    planting.graph.drop(planting.node(blocks(1, 2, 3)).windows[0], RAM)
    assert planting.reach(blocks(1, 2, 3)) == 512
    assert planting.evict(RAM).end == 768
    assert planting.evict(RAM).node.tokens == raw(blocks(7)), "512 tokens can be hit, and are the warmer"


def test_in_the_ssd_the_rows_that_served_a_lost_window_go_next_too():
    planting = Planting(windows=(Window(100),))
    planting.store(blocks(1, 2), held=412)
    planting.store(blocks(7))
    planting.touch(blocks(1, 2))
    planting.empty_ram()
    planting.graph.drop(planting.node(blocks(1, 2)).windows[0], SSD)
    assert leaving(planting, SSD)[:2] == [("rows", 512), ("rows", 256)]


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_with_snapshots_only_stored_boundaries_are_hit():
    planting = Planting(snapshots=True)
    prompt = list(range(900))
    for end in (10, 256, 300, 301, 512, 900):
        planting.store(prompt[:end])
    for asked, deepest in ((9, 0), (10, 10), (255, 10), (256, 256), (299, 256), (300, 300), (511, 301), (900, 900)):
        assert planting.reach(prompt[:asked]) == deepest
    assert planting.reach(prompt, limit=899) == 512
    assert planting.reach(prompt[:600] + [7] * 50) == 512


def test_several_snapshots_hang_on_one_block():
    planting = Planting(snapshots=True)
    prompt = list(range(500))
    for end in (257, 300, 400, 500):
        planting.store(prompt[:end])
    parent = planting.node(prompt[:256])
    assert sorted(slot.end for slot in parent.snapshots.values()) == [257, 300, 400, 500]
    planting.graph.check_integrity()
    for end in (257, 300, 400, 500):
        assert planting.reach(prompt[: end + 1][:500]) == end


def test_after_a_divergence_each_branch_has_its_own_snapshots():
    planting = Planting(snapshots=True)
    planting.store(runs((1, 300), (2, 50)))
    planting.store(runs((1, 300), (3, 50)))
    planting.store(runs((1, 300)))
    assert planting.reach(runs((1, 300), (2, 50))) == planting.reach(runs((1, 300), (3, 50))) == 350
    assert planting.reach(runs((1, 300), (2, 49))) == planting.reach(runs((1, 300), (4, 9))) == 300
    assert planting.reach(runs((1, 299))) == 0


def test_a_snapshot_without_the_rows_before_it_is_not_hit():
    planting = Planting(snapshots=True)
    planting.store(blocks(1, 2))
    planting.graph.drop(planting.rows(blocks(1)), RAM)
    assert planting.reach(blocks(1, 2)) == 0


def test_a_snapshot_needs_its_windows_too():
    planting = Planting(windows=(Window(100),), snapshots=True)
    prompt = list(range(600))
    planting.store(prompt[:400])
    planting.store(prompt, held=580)
    assert planting.reach(prompt) == 400
    planting.store(prompt, held=400)
    assert planting.reach(prompt) == 600


def test_a_snapshot_in_ram_alone_counts_for_ram():
    planting = Planting(snapshots=True)
    planting.store(blocks(1)[:200])
    planting.store(blocks(1, 2))
    planting.spill_all()
    planting.graph.drop(next(iter(planting.node(blocks(1)).snapshots.values())), RAM)
    assert planting.reach(blocks(1, 2), RAM) == 200
    assert planting.reach(blocks(1, 2), SSD) == 512


def test_a_hit_reads_one_snapshot():
    planting = Planting(snapshots=True)
    for end in (256, 300, 400):
        planting.store(blocks(1, 2)[:end])
    serving = [(slot.kind, slot.end) for slot in planting.serving(blocks(1, 2)[:300])]
    assert serving == [("snapshot", 300), ("rows", 400), ("rows", 256)]


def test_rows_that_served_only_a_snapshot_that_left_go_next():
    planting = Planting(snapshots=True)
    planting.store(blocks(1))
    planting.store(blocks(1, 2, 3)[:600])
    planting.store(blocks(7))
    planting.touch(blocks(1))
    planting.touch(blocks(1, 2, 3)[:600])
    planting.graph.drop(planting.serving(blocks(1, 2, 3)[:600])[0], RAM)
    assert leaving(planting, RAM) == [
        ("rows", 600), ("rows", 512), ("snapshot", 256), ("rows", 256), ("snapshot", 256), ("rows", 256)
    ]  # fmt: skip


def test_a_block_that_a_snapshot_inside_it_needs_is_not_let_go_with_another():
    planting = Planting(snapshots=True)
    planting.store(runs((1, 300)))
    planting.store(runs((1, 400)))
    planting.store(blocks(7))
    planting.touch(runs((1, 300)))
    planting.touch(runs((1, 400)))
    planting.graph.drop(planting.serving(runs((1, 400)))[0], RAM)
    assert planting.reach(runs((1, 400))) == 300
    assert planting.evict(RAM).node.tokens != planting.node(runs((1, 400))).tokens


def test_a_snapshot_depends_on_the_most_recent_rows_that_reach_its_boundary_and_on_its_blocks():
    planting = Planting(snapshots=True)
    planting.store(blocks(1, 2) + [3] * 40)
    (snapshot,) = planting.node(blocks(1, 2)).snapshots.values()
    tail = planting.rows(blocks(1, 2) + [3] * 40)
    above = [planting.rows(blocks(1, 2)), planting.rows(blocks(1))]
    assert list(dependencies(snapshot)) == [tail, *above]
    assert list(dependencies(tail)) == above
    planting.store(blocks(1, 2) + [3] * 30 + [4] * 9, snapshot=False)
    assert covering_rows(snapshot) is tail
    planting.store(blocks(1, 2) + [3] * 40 + [5], snapshot=False, settle=False)
    assert covering_rows(snapshot) is planting.rows(blocks(1, 2) + [3] * 40 + [5])


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
    mask = node.windows[0].mask if kind == "window" else ()
    with planting.reserve(1 << 16) as reservation:
        assert not planting.graph.attach(Slot(kind, node, b"another key.....", IMAGE, suffix, mask), reservation)
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
