from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from prefixcache.blocks.budget import Budget, BytesHeld

LIMIT = 1000


def test_a_new_budget_holds_nothing():
    budget = Budget(LIMIT)
    assert budget.held() == BytesHeld(0, 0, 0, 0)
    assert budget.held().total == budget.peak == budget.denied == 0
    assert budget.room == LIMIT


def test_all_of_the_limit_can_be_reserved_and_not_a_byte_more():
    budget = Budget(LIMIT)
    assert budget.reserve(LIMIT + 1) is None
    assert budget.reserve(LIMIT) is not None
    assert budget.room == 0
    assert budget.reserve(1) is None
    assert budget.reserve(0) is not None
    assert (budget.denied, budget.peak) == (2, LIMIT)


def test_what_does_not_fit_takes_nothing():
    budget = Budget(LIMIT)
    first = budget.reserve(600)
    assert budget.reserve(401) is None
    assert budget.held() == BytesHeld(0, 0, 0, 600)
    first.release()
    assert budget.room == LIMIT


def test_spending_turns_reserved_bytes_into_held_ones():
    budget = Budget(LIMIT)
    with budget.reserve(500) as reservation:
        reservation.spend(images=200, nodes=100)
        assert budget.held() == BytesHeld(200, 0, 100, 200)
        assert reservation.left == 200
        assert budget.room == 500
    assert budget.held() == BytesHeld(200, 0, 100, 0)
    assert budget.held().total == 300


@pytest.mark.parametrize("spent", [{"images": 501}, {"nodes": 501}, {"images": 250, "nodes": 251}, {"images": 10**30}])
def test_spending_more_than_reserved_raises_and_changes_nothing(spent):
    budget = Budget(LIMIT)
    with budget.reserve(500) as reservation:
        with pytest.raises(ValueError, match=f"{sum(spent.values())} bytes spent of a reservation with 500 left"):
            reservation.spend(**spent)
        assert budget.held() == BytesHeld(0, 0, 0, 500)
        reservation.spend(images=300)
        with pytest.raises(ValueError, match="201 bytes spent of a reservation with 200 left"):
            reservation.spend(nodes=201)
    assert budget.held() == BytesHeld(300, 0, 0, 0)


def test_a_released_reservation_has_nothing_left_to_spend():
    budget = Budget(LIMIT)
    reservation = budget.reserve(500)
    reservation.release()
    with pytest.raises(ValueError, match="with 0 left"):
        reservation.spend(images=1)
    assert budget.room == LIMIT


def spend(reservation, error):
    reservation.spend(images=100)
    return error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_a_reservation_is_given_back_however_its_block_ends(error):
    budget = Budget(LIMIT)
    reservation = budget.reserve(500)
    with pytest.raises(error), reservation:
        raise spend(reservation, error)
    assert budget.held() == BytesHeld(100, 0, 0, 0)


def test_a_reservation_is_given_back_when_its_block_returns_or_breaks():
    budget = Budget(LIMIT)

    def returns():
        with budget.reserve(300):
            return 1

    def yields():
        with budget.reserve(300):
            yield 1

    returns()
    for _ in yields():
        break
    for _ in range(3):
        with budget.reserve(300):
            continue
    assert budget.held().total == 0


def test_a_reservation_is_given_back_once():
    budget = Budget(LIMIT)
    other = budget.reserve(200)
    with budget.reserve(500) as reservation:
        reservation.release()
        reservation.release()
    assert budget.held() == BytesHeld(0, 0, 0, 200)
    other.release()


def test_what_waits_for_the_ssd_is_counted_once():
    budget = Budget(LIMIT)
    with budget.reserve(400) as reservation:
        reservation.spend(images=400)
    budget.queue(400)
    assert budget.held() == BytesHeld(400, 400, 0, 0)
    assert budget.held().total == 400
    budget.queue(-400)
    budget.free_image(400)
    assert budget.held() == BytesHeld(0, 0, 0, 0)


@pytest.mark.parametrize(
    "wrong", [lambda b: b.free_image(1), lambda b: b.free_node(1), lambda b: b.queue(1), lambda b: b.queue(-1)]
)
def test_what_does_not_add_up_is_an_integrity_error(wrong):
    budget = Budget(LIMIT)
    budget.check_integrity()
    wrong(budget)
    with pytest.raises(AssertionError):
        budget.check_integrity()


def test_a_limit_of_nothing_holds_nothing():
    budget = Budget(0)
    assert budget.reserve(1) is None
    with budget.reserve(0) as reservation, pytest.raises(ValueError, match="1 bytes spent"):
        reservation.spend(nodes=1)


class BudgetMachine(RuleBasedStateMachine):
    """Against plain sums."""

    open = Bundle("open")

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(LIMIT)
        self.images: list[int] = []
        self.nodes: list[int] = []
        self.queued: list[int] = []
        self.left: dict[int, int] = {}
        self.peak = self.denied = 0

    @property
    def total(self) -> int:
        return sum(self.images) + sum(self.nodes) + sum(self.left.values())

    @rule(target=open, nbytes=st.integers(0, LIMIT + 1) | st.integers(0, 100))
    def reserve(self, nbytes: int):
        reservation = self.budget.reserve(nbytes)
        fits = self.total + nbytes <= LIMIT
        assert (reservation is not None) == fits
        if reservation is None:
            self.denied += 1
            return None
        self.left[id(reservation)] = nbytes
        self.peak = max(self.peak, self.total)
        return reservation

    @rule(reservation=open, images=st.integers(0, 120), nodes=st.integers(0, 120))
    def spend(self, reservation, images: int, nodes: int) -> None:
        if reservation is None:
            return
        left = self.left.get(id(reservation), 0)
        if images + nodes > left:
            with pytest.raises(ValueError, match=f"with {left} left"):
                reservation.spend(images=images, nodes=nodes)
            return
        reservation.spend(images=images, nodes=nodes)
        self.images.append(images)
        self.nodes.append(nodes)
        self.left[id(reservation)] = left - images - nodes

    @rule(reservation=consumes(open), how=st.sampled_from(["release", "leave", "raise"]))
    def give_back(self, reservation, how: str) -> None:
        if reservation is None:
            return
        if how == "release":
            reservation.release()
        elif how == "leave":
            with reservation:
                pass
        else:
            with pytest.raises(KeyError), reservation:
                raise KeyError
        self.left[id(reservation)] = 0
        self.spent = reservation  # keeps its id from being used again

    @precondition(lambda self: self.images)
    @rule(data=st.data())
    def free_image(self, data) -> None:
        nbytes = self.images.pop(data.draw(st.integers(0, len(self.images) - 1)))
        if nbytes in self.queued:
            self.queued.remove(nbytes)
            self.budget.queue(-nbytes)
        self.budget.free_image(nbytes)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def free_node(self, data) -> None:
        self.budget.free_node(self.nodes.pop(data.draw(st.integers(0, len(self.nodes) - 1))))

    @precondition(lambda self: self.images)
    @rule(data=st.data())
    def queue(self, data) -> None:
        nbytes = data.draw(st.sampled_from(self.images))
        if self.queued.count(nbytes) < self.images.count(nbytes):
            self.queued.append(nbytes)
            self.budget.queue(nbytes)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def written(self, data) -> None:
        self.budget.queue(-self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1))))

    @invariant()
    def sums_agree(self) -> None:
        self.budget.check_integrity()
        held = self.budget.held()
        assert held == BytesHeld(sum(self.images), sum(self.queued), sum(self.nodes), sum(self.left.values()))
        assert held.total == self.total <= LIMIT
        assert self.budget.room == LIMIT - self.total
        assert (self.budget.peak, self.budget.denied) == (self.peak, self.denied)


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=25, stateful_step_count=40)


def test_the_sum_never_passes_the_limit_whoever_reserves():
    budget = Budget(10_000)
    done = threading.Event()
    seen: list[int] = []
    errors: list[BaseException] = []

    def watch() -> None:
        while not done.is_set():
            held = budget.held()
            seen.append(held.total)
            if not min(held) >= 0 or held.total > budget.limit or held.queued > held.images:
                errors.append(AssertionError(held))

    def work(seed: int) -> None:
        try:
            kept: list[tuple[int, int]] = []
            for i in range(300):
                size = (seed * 7919 + i * 104729) % 1500
                reservation = budget.reserve(size)
                if reservation is None:
                    while kept:
                        image, node = kept.pop()
                        budget.queue(-image)
                        budget.free_image(image)
                        budget.free_node(node)
                    continue
                with reservation:
                    reservation.spend(images=size // 2, nodes=size // 3)
                    budget.queue(size // 2)
                    kept.append((size // 2, size // 3))
            for image, node in kept:
                budget.queue(-image)
                budget.free_image(image)
                budget.free_node(node)
        except BaseException as error:
            errors.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    watcher.join()
    assert not errors
    assert budget.held() == BytesHeld(0, 0, 0, 0)
    assert 5_000 < budget.peak <= budget.limit
    assert max(seen, default=0) <= budget.limit
    assert budget.denied
