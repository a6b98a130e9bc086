"""The policies: each order against a plain one, what they do for hits, what they cost, and the doorkeeper of the SSD."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixcache.budget import Budget
from prefixcache.policies import POLICIES, Adaptive, Doorkeeper, Duel, Ghosts, Lru, Order, S3Fifo
from prefixcache.tree import RAM, SLOT_BYTES, SSD, TIERS, Node, Slot, Tree, Window
from tests.planting import IMAGE, ROOT, Planting, blocks, runs

OURS = [name for name in POLICIES if name != "lru"]


class Fixed(Adaptive):
    """`Adaptive` that has made up its mind."""

    def __init__(self, share: float | None):
        super().__init__(0)
        self._duel.best = share
        self._duel.request = lambda keys, held: None


ORDERS = {"lru": Lru, "s3fifo": S3Fifo, "adaptive, lru": partial(Fixed, None), "adaptive, 0.4": partial(Fixed, 0.4)}


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
    uses: int = 0
    where: str = "queue"  # or "demoted", "aside"


class PlainOrder:
    """Lists, and nothing remembered that can be computed. `cards` of both queues in one list, each queue in its order."""

    def __init__(self) -> None:
        self.cards: list[Card] = []
        self.demoted: list[Card] = []  # the next to leave first
        self.left: list[bytes] = []  # keys, the last at the end; None where one came back

    def card(self, slot: Slot) -> Card:
        return next(card for card in (*self.cards, *self.demoted) if card.slot is slot)

    def here(self, slot: Slot) -> bool:
        return any(card.slot is slot for card in (*self.cards, *self.demoted))

    def queue(self, again: bool) -> list[Card]:
        return [card for card in self.cards if card.again == again and card.where == "queue"]

    def bytes(self, again: bool) -> int:
        return sum(card.slot.nbytes for card in self.queue(again))

    @property
    def held(self) -> int:
        return len(self.cards) + len(self.demoted)

    def add(self, slot: Slot) -> None:
        recent = max(self.TIMES * self.held, 64 // self.TIMES * self.TIMES)
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
        elif self.MOVES and card.where == "queue":
            self.to_end(card)

    def to_end(self, card: Card) -> None:
        self.cards.remove(card)
        self.cards.append(card)

    def remove(self, slot: Slot) -> None:
        card = self.card(slot)
        (self.demoted if card.where == "demoted" else self.cards).remove(card)
        if self.REMEMBERS_ALL or not card.again:
            if slot.key in self.left:
                self.left[self.left.index(slot.key)] = b""
            self.left.append(slot.key)

    def aside(self, slot: Slot) -> None:
        card = self.card(slot)
        if card.where == "demoted":
            self.demoted.remove(card)
            self.cards.append(card)
        card.where = "aside"

    def back(self, slot: Slot, used: bool) -> None:
        card = self.card(slot)
        card.where = "queue"
        self.cards.remove(card)
        self.cards.insert(len(self.cards) if used else 0, card)

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

    def order(self) -> list[Slot]:
        return [card.slot for card in (*self.demoted, *self.queues())]


class PlainS3(PlainOrder):
    TIMES, MOVES, REMEMBERS_ALL = 1, False, False

    def used(self, slots: list[Slot], ended: bool) -> None:
        for slot in slots:
            if self.here(slot):
                card = self.card(slot)
                card.uses = min(card.uses + self.second_use(card, ended), 3)

    def small(self) -> bool:
        small, main = self.bytes(False), self.bytes(True)
        return not self.queue(True) or (bool(self.queue(False)) and small > (small + main) / 10)

    def turn(self) -> None:
        while not self.demoted and (queue := self.queue(not self.small())) and queue[0].uses:
            if queue[0].again:
                queue[0].uses -= 1
            else:
                queue[0].again, queue[0].uses, queue[0].new, queue[0].fetched = True, 0, False, False
            self.to_end(queue[0])

    def queues(self) -> list[Card]:
        small = [card for card in self.queue(False) if not card.uses]
        main = sorted(self.queue(True), key=lambda card: card.uses)
        used = [card for card in self.queue(False) if card.uses]
        return [*small, *main, *used] if self.small() else [*main, *small, *used]


class PlainShares(PlainOrder):
    TIMES, MOVES, REMEMBERS_ALL = 4, True, True

    def __init__(self, share: float | None):
        super().__init__()
        self.share = share

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

    def turn(self) -> None:
        pass

    def queues(self) -> list[Card]:
        once, others, order = self.queue(False), self.queue(True), []
        while once or others:
            if self.share is None:
                first = bool(once) and (not others or once[0].slot.tick < others[0].slot.tick)
            else:
                lately, rest = (sum(card.slot.nbytes for card in queue) for queue in (once, others))
                first = not others or lately > self.share * (lately + rest)
            order.append((once if first else others).pop(0))
        return order


PLAIN = {"s3fifo": PlainS3, "adaptive, lru": partial(PlainShares, None), "adaptive, 0.4": partial(PlainShares, 0.4)}
numbers = st.integers(0, 15)


class OrderMachine(RuleBasedStateMachine):
    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.order: Order = ORDERS[self.name]()
        self.plain = PLAIN[self.name]()
        self.slots = [slot(number, random.Random(number).choice([10, 50, 100])) for number in range(16)]
        self.clock = 0

    def drawn(self, data, where: str) -> Slot | None:
        those = [
            one
            for one in self.slots
            if self.plain.here(one) and (self.plain.card(one).where == "aside") == (where == "aside")
        ]
        return data.draw(st.sampled_from(those)) if those else None

    def tick(self, one: Slot) -> None:
        self.clock += 1
        one.tick = self.clock

    @rule(some=st.lists(numbers, min_size=1, max_size=5, unique=True))
    def add(self, some: list[int]) -> None:
        for number in some:
            one = self.slots[number]
            if not self.plain.here(one):
                self.tick(one)
                for order in (self.order, self.plain):
                    order.add(one)

    @rule(some=st.lists(numbers, max_size=6, unique=True), ended=st.booleans())
    def use(self, some: list[int], ended: bool) -> None:
        slots = [self.slots[number] for number in some]
        for one in slots:
            self.tick(one)
            if self.plain.here(one) and self.plain.card(one).where != "aside":
                for order in (self.order, self.plain):
                    order.touch(one)
        for order in (self.order, self.plain):
            order.used(slots, ended)

    @rule(data=st.data(), how=st.sampled_from(["remove", "aside", "demote", "leave", "leave"]))
    def change(self, data, how: str) -> None:
        one = self.drawn(data, "queue")
        if one is not None:
            if how == "leave":
                one, how = next(self.order.leaving()), "remove"
                self.plain.turn()
                assert one is self.plain.order()[0]
            for order in (self.order, self.plain):
                getattr(order, how)(one)

    @rule(data=st.data(), used=st.booleans())
    def back(self, data, used: bool) -> None:
        one = self.drawn(data, "aside")
        if one is not None:
            for order in (self.order, self.plain):
                order.back(one, used)

    @rule(data=st.data())
    def forget(self, data) -> None:
        one = self.drawn(data, data.draw(st.sampled_from(["queue", "aside"])))
        if one is not None:
            self.order.forget(one)
            self.plain.remove(one)
            self.order.forget(one)

    @rule(data=st.data())
    def colder(self, data) -> None:
        one, other = self.drawn(data, "queue"), self.drawn(data, "queue")
        if one is not None:
            found = list(self.order.colder(one, other))
            self.plain.turn()
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


FEW = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.mark.parametrize("name", PLAIN)
def test_an_order_is_the_plain_one(name):
    run_state_machine_as_test(type("Machine", (OrderMachine,), {"name": name}), settings=FEW)


# -- trees of each policy ---------------------------------------------------------------------------------------------


def planted(policy: str, windows: tuple[Window, ...] = (), snapshots: bool = False) -> Planting:
    planting = Planting(windows, snapshots)
    planting.tree = Tree(planting.budget, policy)
    planting.space = planting.tree.space(ROOT, windows, snapshots)
    return planting


def ended(planting: Planting, tokens: list[int]) -> None:
    """A request of these tokens: a fetch of what is known, and the store of all."""
    planting.touch(tokens)
    planting.store(tokens, touch=False)
    planting.tree.stored(planting.serving(tokens, SSD))


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
        self.tree = self.planting.tree
        self.pinned: list[list[Slot]] = []
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
        self.planting.spill(*[slot for slot in self.tree.order[RAM] if not slot.disk][:count])

    @rule(count=st.integers(1, 3), leave=st.integers(0, 2), written=st.booleans(), tokens=prompts)
    def save(self, count: int, leave: int, written: bool, tokens: list[int]) -> None:
        """Images wait for the SSD while others leave and are used, and are written then or not."""
        waiting = [(slot, slot.tick) for slot in list(self.tree.order[RAM])[:count]]
        for slot, _ in waiting:
            self.tree.save(slot)
        self.evict(RAM, leave)
        self.planting.touch(tokens)
        self.tree.check_integrity()
        for slot, tick in waiting:
            self.tree.saved(slot, slot.tick != tick)
            if written:
                self.planting.spill(slot)

    @rule(tier=st.sampled_from(TIERS), count=st.sampled_from([1, 1, 2, 5]))
    def evict(self, tier: int, count: int) -> None:
        for _ in range(count):
            slot = self.tree.coldest(tier)
            if slot is None:
                return
            assert not slot.pins
            assert not slot.saving
            assert slot.within(tier)
            assert not self.tree.needed(slot, tier)
            self.tree.leave(slot, tier)

    @rule(data=st.data())
    def make_room(self, data) -> None:
        """What makes room on the SSD for an image is colder than it."""
        if self.tree.slots:
            slot = data.draw(st.sampled_from(list(self.tree.slots.values())))
            colder = list(self.tree.colder(slot, slot))
            places = {one: place for place, one in enumerate(self.tree.order[SSD])}
            assert slot not in colder
            if self.policy != "lru":
                assert all(places[one] < places[slot] for one in colder)

    @rule(data=st.data())
    def pin(self, data) -> None:
        self.pinned.append(self.tree.pin(self.planting.serving(data.draw(st.sampled_from(self.known)), SSD)))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.tree.unpin(self.pinned.pop(0))

    @rule(data=st.data(), tiers=st.sampled_from([(RAM,), (SSD,), (SSD, RAM)]))
    def lose(self, data, tiers: tuple[int, ...]) -> None:
        """A file went bad, or an image was removed."""
        if self.tree.slots:
            slot = data.draw(st.sampled_from(sorted(self.tree.slots.values(), key=lambda one: (one.kind, one.key))))
            if not slot.pins:
                for tier in tiers:
                    self.tree.leave(slot, tier)

    @rule()
    def settle(self) -> None:
        self.tree.settle()

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.tree.check_integrity()

    def teardown(self) -> None:
        for held in self.pinned:
            self.tree.unpin(held)
        for tier in TIERS:
            while (slot := self.tree.coldest(tier)) is not None:
                self.tree.leave(slot, tier)
        while (slot := self.tree.coldest(SSD)) is not None:  # kept by what hung on it in RAM
            self.tree.leave(slot, SSD)
        assert not self.tree.slots
        assert not self.tree.nodes
        assert [len(order) for order in self.tree.order] == [0, 0]
        self.tree.check_integrity()


SPACES = {
    "rows": ((), False),
    "windows and snapshots": ((Window(300),), True),
    "chunks": ((Window(512, chunked=True),), False),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_leaves_that_is_needed_and_all_leave_in_the_end(policy, space):
    windows, snapshots = SPACES[space]
    machine = type("Machine", (TreeMachine,), {"policy": policy, "windows": windows, "snapshots": snapshots})
    few = settings(FEW, max_examples=20, stateful_step_count=25)
    run_state_machine_as_test(machine, settings=few)
