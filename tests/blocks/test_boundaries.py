"""At which boundaries a prompt can be hit whose model has sliding windows or recurrent state, and what goes with them."""

import pytest

from prefixcache.blocks.node import RAM, Window, covering_rows, dependencies
from tests.blocks.planting import SSD, Planting, blocks, leaving, raw, runs

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
        ("rows", 600),
        ("rows", 512),
        ("snapshot", 256),
        ("rows", 256),
        ("snapshot", 256),
        ("rows", 256),
    ]


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
