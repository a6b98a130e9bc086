"""The policies: each order against a plain one, what they do for hits, what they cost, and the doorkeeper of the SSD."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixcache.blocks.adaptive import Adaptive, Duel, Ghosts
from prefixcache.blocks.budget import Budget
from prefixcache.blocks.eviction import eviction_victim, victim_in_ram
from prefixcache.blocks.graph import SLOT_BYTES, Graph
from prefixcache.blocks.lru import Lru
from prefixcache.blocks.node import RAM, Node, Slot, Window
from prefixcache.blocks.policies import POLICIES, Order
from prefixcache.image_format import ROWS
from prefixcache.tiers.admission import Doorkeeper
from tests.blocks.planting import ROOT, SSD, TIERS, Planting, blocks, runs


def decide(order: Adaptive, share: float | None) -> Adaptive:
    """It has made up its mind."""
    order._duel.best = share
    order._duel.request = lambda keys, held: None
    return order


def decided(share: float | None) -> Adaptive:
    return decide(Adaptive(0), share)


SHARED = {"adaptive, lru": None, "adaptive, 0.4": 0.4}


def slot(number: int, nbytes: int = 100) -> Slot:
    """A slot whose key has a place of its own among 64 ghosts."""
    key = number.to_bytes(4, "little") + (number + 1).to_bytes(4, "little") + os.urandom(8)
    return Slot("rows", Node(None, None, b"", b""), key, nbytes)


# -- orders against plain ones ----------------------------------------------------------------------------------------


@dataclass
class Card:
    """What a plain order knows of a slot. `new` and `fetched`: the request that brought it, or fetched it, has not ended."""

    slot: Slot
    again: bool = False
    new: bool = True
    fetched: bool = False
    where: str = "queue"  # or "demoted"


class PlainShares:
    """Lists, and nothing remembered that can be computed. `cards` of both queues in one list, each queue in its order."""

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.cards: list[Card] = []
        self.demoted: list[Card] = []  # the next to leave first
        self.left: list[bytes] = []  # keys, the last at the end; None where one came back

    def card(self, slot: Slot) -> Card:
        return next(card for card in (*self.cards, *self.demoted) if card.slot is slot)

    def here(self, slot: Slot) -> bool:
        return any(card.slot is slot for card in (*self.cards, *self.demoted))

    def queue(self, again: bool) -> list[Card]:
        return [card for card in self.cards if card.again == again and card.where == "queue"]

    @property
    def held(self) -> int:
        return len(self.cards) + len(self.demoted)

    def add(self, slot: Slot) -> None:
        recent = max(4 * self.held, 64)
        again = slot.key in self.left[-recent + 1 :]
        if slot.key in self.left:
            self.left[self.left.index(slot.key)] = b""
        self.cards.append(Card(slot, again=again))

    def touch(self, slot: Slot) -> None:
        card = self.card(slot)
        if card.where == "demoted":
            self.demoted.remove(card)
            card.where = "queue"
            self.cards.append(card)
        elif card.where == "queue":
            self.to_end(card)

    def to_end(self, card: Card) -> None:
        self.cards.remove(card)
        self.cards.append(card)

    def remove(self, slot: Slot) -> None:
        card = self.card(slot)
        (self.demoted if card.where == "demoted" else self.cards).remove(card)
        if slot.key in self.left:
            self.left[self.left.index(slot.key)] = b""
        self.left.append(slot.key)

    def demote(self, slot: Slot) -> None:
        card = self.card(slot)
        (self.demoted if card.where == "demoted" else self.cards).remove(card)
        card.where = "demoted"
        self.demoted.insert(0, card)

    def second_use(self, card: Card, ended: bool) -> bool:
        """Whether this is one more use than the one that brought it, and no part of one that was counted."""
        counts = not card.new and not (card.fetched and ended)
        if card.new:
            counts = card.fetched and not ended
        card.new = card.new and not ended and not counts
        card.fetched = not ended
        return counts

    def used(self, slots: list[Slot], ended: bool) -> None:
        again = False
        for slot in slots:
            if not self.here(slot) or (card := self.card(slot)).where == "demoted":
                continue
            counts = False if card.again else self.second_use(card, ended)
            moves = not card.again and (again or counts) and card.where == "queue"
            again = again or card.again or counts
            if moves or (card.again and card.where == "queue" and ended):
                self.to_end(card)
            card.again = again

    def order(self) -> list[Slot]:
        once, others, order = self.queue(False), self.queue(True), [card.slot for card in self.demoted]
        while once or others:
            if self.share is None:
                first = bool(once) and (not others or once[0].slot.tick < others[0].slot.tick)
            else:
                lately, rest = (sum(card.slot.nbytes for card in queue) for queue in (once, others))
                first = not others or lately > self.share * (lately + rest)
            order.append((once if first else others).pop(0).slot)
        return order


numbers = st.integers(0, 15)


class OrderMachine(RuleBasedStateMachine):
    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.order: Order = decided(SHARED[self.name])
        self.plain = PlainShares(SHARED[self.name])
        self.slots = [slot(number, random.Random(number).choice([10, 50, 100])) for number in range(16)]
        self.clock = 0

    def drawn(self, data) -> Slot | None:
        those = [one for one in self.slots if self.plain.here(one)]
        return data.draw(st.sampled_from(those)) if those else None

    def tick(self, one: Slot) -> None:
        self.clock += 1
        one.tick = self.clock

    @initialize()
    def begin(self) -> None:
        self.add(list(range(12)))

    @rule(some=st.lists(numbers, min_size=1, max_size=5, unique=True))
    def add(self, some: list[int]) -> None:
        for number in some:
            one = self.slots[number]
            if not self.plain.here(one):
                self.tick(one)
                for order in (self.order, self.plain):
                    order.add(one)

    @rule(some=st.lists(numbers, max_size=8, unique=True), ended=st.sampled_from([(False,), (True,), (False, True)]))
    def use(self, some: list[int], ended: tuple[bool, ...]) -> None:
        for last in ended:
            self.use_once([self.slots[number] for number in some], last)

    def use_once(self, slots: list[Slot], ended: bool) -> None:
        for slot in slots:
            self.tick(slot)
            if self.plain.here(slot):
                self.plain.touch(slot)
        self.order.touch(slots)
        for order in (self.order, self.plain):
            order.used(slots, ended)

    @rule(data=st.data(), how=st.sampled_from(["remove", "demote", "leave", "leave"]))
    def change(self, data, how: str) -> None:
        one = self.drawn(data)
        if one is not None:
            if how == "leave":
                one, how = next(iter(self.order)), "remove"
                assert one is self.plain.order()[0]
            for order in (self.order, self.plain):
                getattr(order, how)(one)

    @rule(data=st.data())
    def colder(self, data) -> None:
        one, other = self.drawn(data), self.drawn(data)
        if one is not None:
            found = list(self.order.less_recent(one, other))
            places = self.plain.order()
            assert found == places[: min(places.index(one), places.index(other))]

    @invariant()
    def the_order_is_the_plain_one(self) -> None:
        self.order.check_integrity()
        order = self.plain.order()
        assert list(self.order) == order
        assert list(reversed(self.order)) == order[::-1]
        assert len(self.order) == len(order)
        assert [one in self.order for one in self.slots] == [one in order for one in self.slots]


FEW = settings(max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize("name", SHARED)
def test_an_order_is_the_plain_one(name):
    run_state_machine_as_test(type("Machine", (OrderMachine,), {"name": name}), settings=FEW)


# -- trees of each policy ---------------------------------------------------------------------------------------------


SHARES = {"adaptive, .05": 0.05, "adaptive, .5": 0.5}


def planted(policy: str, windows: tuple[Window, ...] = (), snapshots: bool = False) -> Planting:
    planting = Planting(windows, snapshots)
    planting.graph = Graph(planting.budget, policy.split(",")[0])
    planting.tree = planting.graph.tree(ROOT, windows, snapshots)
    for order in planting.graph.orders if policy in SHARES else ():
        decide(order.rest, SHARES[policy])
    return planting


def ended(planting: Planting, tokens: list[int]) -> None:
    """A request of these tokens: a fetch of what is known, and the store of all."""
    planting.touch(tokens)
    planting.store(tokens, touch=False)
    planting.graph.recency.request_ended(planting.serving(tokens, SSD))


prompts = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 100, 256, 256, 300])), min_size=1, max_size=4).map(
    lambda pairs: runs(*pairs)[:900]
)


class TreeMachine(RuleBasedStateMachine):
    policy = "lru"
    windows: tuple[Window, ...] = ()
    snapshots = False

    def __init__(self) -> None:
        super().__init__()
        self.planting = planted(self.policy, self.windows, self.snapshots)
        self.graph = self.planting.graph
        self.pinned: list[list[Slot]] = []
        self.leased: list[list[Slot]] = []
        self.known: list[list[int]] = [[0]]

    @rule(tokens=prompts)
    def request(self, tokens: list[int]) -> None:
        ended(self.planting, tokens)
        self.known.append(tokens)

    @rule(data=st.data(), more=prompts)
    def request_again(self, data, more: list[int]) -> None:
        self.request([*data.draw(st.sampled_from(self.known)), *more][:900])

    @rule(data=st.data())
    def fetch(self, data) -> None:
        self.planting.promote(data.draw(st.sampled_from(self.known)))

    @rule(data=st.data(), count=st.integers(1, 4))
    def spill(self, data, count: int) -> None:
        self.planting.spill(*[slot for slot in self.graph.orders[RAM] if not slot.disk][:count])

    @rule(count=st.integers(1, 3), leave=st.integers(0, 2), written=st.booleans(), tokens=prompts)
    def save(self, count: int, leave: int, written: bool, tokens: list[int]) -> None:
        """Images wait for the SSD while others leave and are used, and are written then or not."""
        waiting = list(self.graph.orders[RAM])[:count]
        for slot in waiting:
            self.graph.begin_write(slot, SSD)
        self.evict(RAM, leave)
        self.planting.touch(tokens)
        self.graph.check_integrity()
        for slot in waiting:
            self.graph.write_finished(slot, SSD)
            if written:
                self.planting.spill(slot)

    @rule(tier=st.sampled_from(TIERS), count=st.sampled_from([1, 1, 2, 5]))
    def evict(self, tier: int, count: int) -> None:
        for _ in range(count):
            slot = victim_in_ram(self.graph) if tier == RAM else eviction_victim(self.graph, tier)
            if slot is None:
                return
            assert not slot.pins
            assert not slot.pending
            assert slot.is_in(tier)
            assert not self.graph.has_dependents(slot, tier)
            assert not self.is_last(slot, tier) or all(self.is_last(other, tier) for other in self.evictable(tier))
            self.graph.drop(slot, tier)

    @precondition(lambda self: self.snapshots and self.policy == "lru")
    @rule(data=st.data())
    def evict_after_a_hit(self, data) -> None:
        """What was hit last is hit as deep again, if RAM has another snapshot to give."""
        tokens = data.draw(st.sampled_from(self.known))
        self.planting.touch(tokens)
        depth = self.planting.reach(tokens)
        others = [slot for slot in self.evictable(RAM) if slot.kind == "snapshot" and not self.is_last(slot, RAM)]
        if depth and len(others) > 1:
            self.graph.drop(victim_in_ram(self.graph), RAM)
            assert self.planting.reach(tokens) == depth

    def is_last(self, slot: Slot, tier: int) -> bool:
        """A lease holds it, and this is the last tier that has it."""
        return any(slot in leased for leased in self.leased) and not (tier == RAM and slot.is_in(SSD))

    def evictable(self, tier: int) -> list[Slot]:
        free = [slot for slot in self.graph.slots.values() if slot.is_in(tier) and not (slot.pins or slot.pending)]
        return [slot for slot in free if not self.graph.has_dependents(slot, tier)]

    @rule(data=st.data())
    def make_room(self, data) -> None:
        """What makes room on the SSD for an image is colder than it."""
        waiting = [slot for slot in self.graph.slots.values() if not slot.disk]
        if waiting:
            slot = data.draw(st.sampled_from(waiting))
            colder = list(self.graph.orders[SSD].less_recent(slot, slot))
            places = {one: place for place, one in enumerate(self.graph.orders[SSD])}
            assert slot not in colder
            if not self.is_last(slot, SSD):
                assert not any(self.is_last(one, SSD) for one in colder), "a leased image leaves for another"
            if self.policy != "lru":
                assert all(places[one] < places[slot] for one in colder)

    @rule(data=st.data())
    def pin(self, data) -> None:
        self.pinned.append(self.graph.pin(self.planting.serving(data.draw(st.sampled_from(self.known)), SSD)))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.graph.unpin(self.pinned.pop(0))

    @rule(data=st.data())
    def lease(self, data) -> None:
        self.leased.append(self.planting.serving(data.draw(st.sampled_from(self.known)), SSD))
        self.graph.lease(self.leased[-1])

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def end_lease(self, data) -> None:
        self.graph.end_lease(self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1))))

    @rule(data=st.data(), tiers=st.sampled_from([(RAM,), (SSD,), (SSD, RAM)]))
    def lose(self, data, tiers: tuple[int, ...]) -> None:
        """A file went bad, or an image was removed."""
        if self.graph.slots:
            slot = data.draw(st.sampled_from(sorted(self.graph.slots.values(), key=lambda one: (one.kind, one.key))))
            if not slot.pins:
                for tier in tiers:
                    self.graph.drop(slot, tier)

    @rule()
    def settle(self) -> None:
        self.graph.recency.sort_below_ram(self.graph.slots.values())

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.graph.check_integrity()

    @invariant()
    def a_slot_counts_its_leases(self) -> None:
        for slot in self.graph.slots.values():
            assert slot.leases == sum(slot in leased for leased in self.leased)

    def teardown(self) -> None:
        for held in self.pinned:
            self.graph.unpin(held)
        for tier in TIERS:
            while (slot := eviction_victim(self.graph, tier)) is not None:
                self.graph.drop(slot, tier)
        while (slot := eviction_victim(self.graph, SSD)) is not None:  # kept by what hung on it in RAM
            self.graph.drop(slot, SSD)
        assert not self.graph.slots
        assert not self.graph.nodes
        assert [len(order) for order in self.graph.orders] == [0, 0]
        self.graph.check_integrity()


SPACES = {
    "rows": ((), False),
    "windows and snapshots": ((Window(300),), True),
    "chunks": ((Window(512, chunked=True),), False),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("policy", [*POLICIES, *SHARES])
def test_nothing_leaves_that_is_needed_and_all_leave_in_the_end(policy, space):
    windows, snapshots = SPACES[space]
    machine = type("Machine", (TreeMachine,), {"policy": policy, "windows": windows, "snapshots": snapshots})
    few = settings(FEW, max_examples=10, stateful_step_count=25)
    run_state_machine_as_test(machine, settings=few)


def test_what_makes_room_for_rows_that_are_evicted_first_is_before_them():
    machine = type("Machine", (TreeMachine,), {"windows": SPACES["chunks"][0]})()
    machine.request(runs((0, 812)))
    machine.spill(None, 3)
    machine.evict(SSD, 5)  # a window, so that the rows of its chunk are of no use
    order = machine.graph.orders[SSD]
    rows = [slot for slot in order if slot.evict_first]
    assert [(slot.kind, slot.node.start) for slot in rows] == [(ROWS, 768), (ROWS, 512)]
    assert [list(order.less_recent(slot, slot)) for slot in rows] == [[], rows[:1]]


def small(policy: str, room: int) -> Planting:
    """A tree whose RAM is full at `room` images, once `ended` and `keep` are all that is done."""
    planting = planted(policy)
    planting.room = room
    return planting


def keep(planting: Planting, tokens: list[int]) -> None:
    """A request, and room is made after it."""
    ended(planting, tokens)
    while len(planting.graph.slots) > planting.room:
        assert planting.evict(RAM) is not None


def test_what_was_asked_for_twice_outlives_what_came_once():
    kept = {}
    for policy in ("lru", "adaptive, .05"):
        planting = small(policy, 20)
        for _ in range(2):
            for i in range(10):
                keep(planting, blocks(1, 100 + i))
        for i in range(200):
            keep(planting, blocks(1000 + i))
        kept[policy] = sum(planting.reach(blocks(1, 100 + i)) == 512 for i in range(10))
        planting.graph.check_integrity()
    assert kept == {"lru": 0, "adaptive, .05": 10}


def test_who_comes_back_soon_after_leaving_was_asked_for_again():
    planting = small("adaptive, .05", 100)
    prompts = [blocks(i, 900, 901) for i in range(20)]
    for passing in (1000, 2000, 3000):
        for prompt in prompts if passing < 3000 else ():
            keep(planting, prompt)
        for i in range(150):
            keep(planting, blocks(passing + i))
        back = sum(planting.reach(prompt) > 0 for prompt in prompts)
        assert back == 0 if passing == 1000 else back >= 15  # two of a table's places may be one


def test_a_fetch_and_the_store_of_its_request_are_one_use():
    planting = planted("adaptive, .5")
    order, prompt = planting.graph.orders[RAM].rest, blocks(1)
    planting.store(prompt, touch=False)
    slot = planting.rows(prompt)
    planting.touch(prompt)  # a fetch while the request that brought it goes on, and both end
    planting.graph.recency.request_ended(planting.serving(prompt, SSD))
    assert slot in order._once
    ended(planting, prompt)
    assert slot in order._again


@pytest.mark.parametrize("policy", [*POLICIES, *SHARES])
def test_a_search_for_a_victim_passes_over_what_is_pinned_once(policy, monkeypatch):
    """A prompt that fills RAM is pinned while it is stored, and each of its blocks makes room for itself."""
    planting = planted(policy)
    for i in range(100):
        ended(planting, blocks(1000 + i))
    prompt = planting.store(blocks(*range(200)), touch=False)
    planting.graph.pin(prompt[-1:])  # keeps those before it, too
    ended(planting, blocks(2000))  # else all that is left is pinned
    looked_at = []
    is_needed = Graph.has_dependents
    monkeypatch.setattr(Graph, "has_dependents", lambda *at: looked_at.append(at) or is_needed(*at))
    while (victim := eviction_victim(planting.graph, RAM)) is not None:
        planting.graph.drop(victim, RAM)
    assert planting.graph.images[RAM] == len(prompt)
    assert len(looked_at) <= 101 + len(prompt)
    assert eviction_victim(planting.graph, RAM) is None
    assert len(looked_at) <= 101 + len(prompt)


def test_after_a_restart_what_was_hit_is_what_was_asked_for_again():
    planting = planted("adaptive, .05")
    for i in range(10):
        planting.store(blocks(i), touch=i < 5)
    planting.spill_all()
    planting.graph.recency.sort_below_ram(planting.graph.slots.values())
    assert [slot.hits for slot in planting.graph.orders[SSD]] == [0] * 5 + [1] * 5
    planting.graph.check_integrity()


def test_room_for_one_image_never_costs_a_hotter_one():
    """Else two that can't both stay would be written for ever, each in the other's place."""
    for policy in ("adaptive", *SHARES):
        planting = planted(policy)
        for i in range(30):
            ended(planting, blocks(1, 2, i % 7, i))
        slots = list(planting.graph.slots.values())
        planting.spill_all()
        for slot in slots:
            assert all(
                slot not in planting.graph.orders[SSD].less_recent(one, one)
                for one in planting.graph.orders[SSD].less_recent(slot, slot)
            )


# -- adaptive's judgement ---------------------------------------------------------------------------------------------


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


@pytest.mark.parametrize("room", [50, 5000])
def test_a_share_is_chosen_where_prompts_come_back_among_many_that_do_not(room):
    duel, rng = Duel(1 << 20), random.Random(1)
    for i in range(4000):
        again = rng.random() < 0.3
        number = rng.randrange(room // 20) if again else 10**6 + i
        duel.request([key(number * 40 + depth) for depth in range(20)], room)
    assert duel.best in Duel.SHARES


@pytest.mark.parametrize("room", [50, 5000])
def test_lru_stays_where_prompts_grow_and_are_then_left(room):
    duel = Duel(1 << 20)
    for session in range(60):
        for turn in range(10):
            duel.request([key(session * 10_000 + depth) for depth in reversed(range(turn * room // 25 + 1))], room)
    assert duel.best is None


def test_a_shadow_has_some_hundreds_of_keys_or_all():
    duel = Duel(POLICIES["adaptive"].most_fixed)
    for held in (10, 100, 600, 5000, 40_000, 40_000, 3000, 80):
        for i in range(0, 2 * held, 100):
            duel.request([key(held * 100_000 + i + j) for j in range(100)], held)
        sizes = {len(shadow._once) + len(shadow._again) for shadow in duel._shadows}
        assert len(sizes) == 1
        assert min(held, Duel.MOST // 4) <= sizes.pop() <= min(held, Duel.MOST)


# -- bytes ------------------------------------------------------------------------------------------------------------


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def bytes_of(make, slots: list[Slot], later: list[Slot]) -> int:
    """Of an order through which all of these went, the first and the last half used twice."""
    tracemalloc.start()
    before = traced()
    order = make()
    for slot in slots:
        order.add(slot)
    for used in (slots[::2], slots[::2]):
        order.used(used, True)
    for old, new in zip(slots, later, strict=True):
        order.remove(old)
        order.add(new)
    for used in (later[1::2], later[1::2]):
        order.used(used, True)
    after = traced()
    tracemalloc.stop()
    return after - before


def test_a_slot_takes_no_more_than_is_reckoned(new_objects_only):
    for count in (900, 4400):
        slots, later = (
            [Slot("rows", Node(None, None, b"", b""), os.urandom(32), 1) for _ in range(count)] for _ in "12"
        )
        more = len(TIERS) * (bytes_of(partial(decided, 0.5), slots, later) - bytes_of(Lru, slots, later)) / count
        assert more <= POLICIES["adaptive"].slot_bytes


def test_what_adaptive_weighs_takes_no_more_than_is_reserved(new_objects_only):
    fixed = POLICIES["adaptive"].fixed(1 << 40)
    keys = [os.urandom(32) for _ in range(8000)]
    tracemalloc.start()
    before = traced()
    duel = Duel(fixed)
    for held in (Duel.MOST, 3 * Duel.MOST):
        for i in range(0, len(keys), 20):
            duel.request(keys[i : i + 20], held)
        assert traced() - before <= fixed
    tracemalloc.stop()


@pytest.mark.parametrize("limit", [0, 1000, 1 << 20, 1 << 30])
def test_a_policy_is_paid_for_by_the_budget(limit):
    for name, policy in POLICIES.items():
        budget = Budget(limit)
        graph = Graph(budget, name)
        assert budget.held().total == 2 * policy.fixed(limit) <= limit // 16
        assert graph.slot_bytes == SLOT_BYTES + policy.slot_bytes
        graph.check_integrity()


def test_ghosts_are_bounded_by_what_is_held():
    ghosts = Ghosts(4)
    for i in range(20_000):
        ghosts.add(key(i), 1000)
    assert ghosts.nbytes == 8 * 4096
    for i in range(200):
        ghosts.add(key(i), 1)
    assert ghosts.nbytes <= 8 * 4 * Ghosts.LEAST


def test_ghosts_remember_the_last_and_forget_the_rest():
    ghosts = Ghosts(4)
    for i in range(10_000):
        ghosts.add(key(i), 1000)
    assert sum(ghosts.take(key(i), 1000) for i in range(9500, 10_000)) > 400
    assert not any(ghosts.take(key(i), 1000) for i in range(6000))
    assert not any(ghosts.take(key(i), 1000) for i in range(9500, 10_000))  # taken
    assert not any(ghosts.take(key(i), 1000) for i in range(50_000, 60_000))


# -- the doorkeeper ---------------------------------------------------------------------------------------------------


def test_a_doorkeeper_knows_all_that_came_of_late():
    doorkeeper = Doorkeeper(12_000)
    for i in range(20_000):
        doorkeeper.add(key(i))
        assert key(max(i - 3000, 0)) in doorkeeper or i < 3000
    assert sum(key(i) in doorkeeper for i in range(5000)) < 200


def test_a_doorkeeper_takes_few_strangers_for_acquaintances_and_no_more_bytes():
    doorkeeper = Doorkeeper(12_000)
    for i in range(7999):  # both generations all but full
        doorkeeper.add(key(i))
    strangers = sum(key(i) in doorkeeper for i in range(10**6, 10**6 + 5000))
    assert strangers < 0.02 * 2 * 5000
    assert len(doorkeeper._young) + len(doorkeeper._old) == 12_000
