"""Machines that share a remote tier: what goes up, what comes down, who serves whom."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.codecs.choice import as_codec
from prefixcache.keys import BLOCK
from prefixcache.planning.advice import Link
from prefixcache.planning.fleet import Machine, SimulatedRemote, simulate_fleet
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell, Fleet, FleetOutcome
from prefixcache.planning.routing import COMMON, machines_of, sessions
from prefixcache.planning.simulator import Prompts, simulate
from prefixcache.planning.sizes import StateSizes
from prefixcache.trace.format import Grown
from prefixcache.trace.reading import Request, Trace
from tests.planning.test_simulator import HYBRID, PLAIN, SLIDING, requests

GB = 10**9
STATE = ModelState.of(PLAIN, name="tiny")
RAW = as_codec("raw")
IDS = 512  # tokens an id of the agents' trace
AT_ONCE = Link(0.0, float("inf"))
AGENTS = requests("coding_agents", 60, 16)
RAM, SSD = 4_000_000, 8_000_000  # of which some of the agents' blocks are evicted


def run(asked: list[Request], fleet: Fleet, state: ModelState = STATE, block: int = IDS) -> FleetOutcome:
    return simulate_fleet(asked, state, RAW, fleet, block=block)


def prompt(*ids: int, tokens: int | None = None, call: str = "request", at: float = 0.0) -> Request:
    return Request(at, BLOCK * len(ids) if tokens is None else tokens, 0, ids, call)


class Served:
    """Machines of a small fleet, each asked by hand."""

    def __init__(self, admission: str = "second", state: ModelState = STATE, limit: int | None = None, **fleet):
        of_one = {name: fleet.pop(name) for name in Cell._fields if name in fleet}
        machines = Fleet(Cell(**{"ram": GB, **of_one}), remote_admission=admission, remote=limit, **fleet)
        self.remote = SimulatedRemote(machines)
        self.machines = [Machine(state, RAW, machines, self.remote) for _ in range(3)]
        self._prompts = Prompts(BLOCK)

    def fetch(self, machine: int, *ids: int, tokens: int | None = None) -> int:
        hit = self.machines[machine].fetch(self._prompt(machine, ids, tokens))
        self.machines[machine].check_integrity()
        return hit

    def serve(self, machine: int, *ids: int, tokens: int | None = None) -> int:
        hit = self.fetch(machine, *ids, tokens=tokens)
        self.machines[machine].store(self._prompt(machine, ids, tokens))
        self.machines[machine].check_integrity()
        return hit

    def _prompt(self, machine: int, ids: tuple[int, ...], tokens: int | None):
        return self.machines[machine].prompt(self._prompts.token_bytes(prompt(*ids, tokens=tokens)))


# -- up ---------------------------------------------------------------------------------------------------------------


def test_tails_stay_where_they_are():
    fleet = Served("always")
    fleet.serve(0, 1, 2, tokens=300)
    assert fleet.remote.sent_images == 1


# -- down -------------------------------------------------------------------------------------------------------------


def test_only_blocks_beyond_what_the_machine_has_are_asked_for():
    fleet = Served("always")
    fleet.serve(0, 1, 2, 3, 4)
    fleet.serve(1, 1, 2)
    assert (fleet.remote.read_images, fleet.machines[1].trips) == (2, 2)
    assert fleet.serve(1, 1, 2, 3, 4) == 4 * BLOCK - 1
    assert (fleet.remote.read_images, fleet.machines[1].trips) == (4, 4)


def test_a_prompt_that_is_there_asks_nothing():
    fleet = Served("always")
    fleet.serve(0, 1, 2)
    trips = fleet.machines[0].trips
    fleet.serve(0, 1, 2)
    fleet.serve(0, 1, 2, 3, tokens=2 * BLOCK + 9)
    assert fleet.machines[0].trips == trips


def test_a_lookup_that_finds_nothing_costs_one_round_trip():
    fleet = Served("always")
    fleet.serve(0, 1, 2)
    assert fleet.machines[0].trips == 1


def test_what_is_computed_sooner_is_not_read():
    fleet = Served("always", link=Link(1.0, float("inf")), prefill=2.5 * BLOCK)
    fleet.serve(0, 1, 2, 3)
    assert fleet.serve(1, 1, 2) == 0
    assert fleet.serve(2, 1, 2, 3) == 3 * BLOCK - 1
    assert (fleet.machines[1].trips, fleet.machines[2].trips) == (1, 2)


def test_what_lands_spills_to_the_machine_s_own_ssd():
    fleet = Served("always", ram=60 * 75_000, ssd=GB)
    fleet.serve(0, *range(24))
    fleet.serve(1, *range(24))
    read = fleet.remote.read_images
    for first in (100, 200, 300):
        fleet.serve(1, *range(first, first + 24))
    assert fleet.serve(1, *range(24)) == 24 * BLOCK - 1
    assert fleet.remote.read_images == read


@pytest.mark.parametrize("config", [SLIDING, HYBRID], ids=["windows", "snapshots"])
@pytest.mark.parametrize("admission", ["second", "always"])
def test_windows_and_snapshots_come_with_their_rows(config, admission):
    """A chat goes on where it ended, on another machine, inside a block: the tail that its snapshot needs is there."""
    fleet = Served(admission, ModelState.of(config, name="tiny"))
    first, tokens = (1, 2, 3, 4), 4 * BLOCK - (0 if config is SLIDING else 100)
    fleet.serve(0, *first, tokens=tokens)
    assert fleet.fetch(0, *first, 5) == fleet.fetch(1, *first, 5) == tokens
    assert fleet.machines[1].storage.counters.remote_hit_tokens == tokens


@pytest.mark.parametrize("ssd", [0, GB])
def test_what_was_read_in_vain_is_the_remote_tiers_when_a_later_prompt_uses_it(ssd):
    """The snapshot behind a prompt's last token is none that the same prompt is given."""
    fleet = Served("always", ModelState.of(HYBRID, name="tiny"), ssd=ssd)
    fleet.serve(0, 1, 2)
    assert fleet.fetch(1, 1, 2) == 0 < fleet.remote.read_images
    assert fleet.fetch(1, 1, 2, 3) == 2 * BLOCK
    counters = fleet.machines[1].storage.counters
    assert (counters.ram_hit_tokens, counters.ssd_hit_tokens, counters.remote_hit_tokens) == (0, 0, 2 * BLOCK)


@pytest.mark.parametrize("config", [PLAIN, SLIDING, HYBRID], ids=["plain", "windows", "snapshots"])
@pytest.mark.parametrize(("ram", "ssd"), [(300_000, 0), (2_500_000, 0), (1_500_000, 6_000_000)])
def test_what_lands_where_room_is_short_leaves_every_machine_whole(config, ram, ssd):
    state, remote = ModelState.of(config, name="tiny"), SimulatedRemote(Fleet(Cell(ram, ssd), remote=3_000_000))
    asked = [request for request in AGENTS[:20] for _ in range(2)]
    for policy, admission in (("lru", "always"), ("adaptive", "second")):
        fleet = Fleet(Cell(ram, ssd, policy, admission), remote_admission="always", link=AT_ONCE)
        machines, prompts = [Machine(state, RAW, fleet, remote) for _ in range(3)], Prompts(IDS)
        for machine, request in zip(machines_of(asked, 3, "random"), asked, strict=True):
            served, prompt = machines[machine], machines[machine].prompt(prompts.token_bytes(request))
            for serve in (served.fetch, served.store):
                serve(prompt)
                served.check_integrity()
        assert not any(slot.is_in(m.storage.graph.last) for m in machines for slot in m.storage.graph.slots.values())
        assert not any(m.storage.graph.pinned for m in machines)
    assert remote.read_bytes > 0 or ram == 300_000


# -- a whole trace ----------------------------------------------------------------------------------------------------


def test_a_fleet_of_one_without_a_remote_is_one_machine():
    outcome, alone = run(AGENTS, Fleet(Cell(RAM, SSD))), simulate(AGENTS, STATE, RAW, Cell(RAM, SSD), block=IDS)
    assert (outcome.ram_tokens, outcome.ssd_tokens) == (alone.ram_tokens, alone.ssd_tokens)
    assert outcome.served.hit.tolist() == alone.served.hit.tolist()
    assert outcome.served.read.tolist() == alone.served.read.tolist()
    assert outcome.requests == [alone.served.requests]


def test_a_remote_that_never_is_sent_anything_changes_no_hit():
    never, none = (run(AGENTS, Fleet(Cell(RAM, SSD), machines=3, remote_admission=a)) for a in ("never", None))
    assert never.served.hit.tolist() == none.served.hit.tolist()
    assert never.served.trips.sum() > none.served.trips.sum() == 0


@pytest.mark.parametrize("ssd", [0, SSD])
@pytest.mark.parametrize("admission", ["second", "always"])
def test_a_remote_without_a_limit_and_at_once_loses_no_hit(ssd, admission):
    for machines, routing in ((1, "sticky"), (3, "sticky"), (3, "random")):
        fleet = Fleet(Cell(RAM, ssd), machines=machines, routing=routing, link=AT_ONCE)
        with_remote, without = run(AGENTS, fleet._replace(remote_admission=admission)), run(AGENTS, fleet)
        assert with_remote.hit_tokens >= without.hit_tokens
        assert with_remote.served.asked_tokens == without.served.asked_tokens


def test_machines_with_room_for_all_hit_what_one_hits_with_admission_always_but_tails():
    whole = [r._replace(tokens=IDS * len(r.ids)) for r in AGENTS]
    fleet = Fleet(Cell(GB), machines=3, routing="random", remote_admission="always", link=AT_ONCE)
    alone = simulate(whole, STATE, RAW, Cell(GB), block=IDS)
    assert run(whole, fleet).served.hit.tolist() == alone.served.hit.tolist()


@pytest.mark.parametrize("limit", [None, 2_000_000])
def test_bytes_and_tokens_add_up(limit):
    outcome = run(AGENTS, Fleet(Cell(RAM, SSD), machines=3, routing="random", remote_admission="always", remote=limit))
    assert (
        outcome.hit_tokens
        == outcome.served.hit.sum()
        == outcome.ram_tokens + outcome.ssd_tokens + outcome.remote_tokens
    )
    assert min(outcome.ram_tokens, outcome.ssd_tokens, outcome.remote_tokens) > 0
    assert outcome.served.asked_tokens == sum(request.tokens for request in AGENTS)
    assert outcome.remote_read_bytes == outcome.served.remote_read.sum() > 0
    assert outcome.remote_peak <= outcome.sent_bytes
    assert limit is None or outcome.remote_peak <= limit
    assert (outcome.remote_evicted > 0) == (limit is not None)
    assert sum(outcome.requests) == len(AGENTS)
    assert outcome.sent_per_reused_token == outcome.sent_bytes / outcome.reused_tokens


@pytest.mark.parametrize("admission", [None, "second", "always"])
@pytest.mark.parametrize("config", [PLAIN, SLIDING, HYBRID], ids=["plain", "windows", "snapshots"])
def test_a_fleets_machines_have_hot_prompts(config, admission):
    fleet = Fleet(Cell(20 * RAM, SSD, hot="auto"), machines=2, routing="random", remote_admission=admission)
    outcome = run(AGENTS, fleet, ModelState.of(config, name="tiny"))
    assert 0 < outcome.hot_tokens == outcome.served.hot.sum()
    assert (outcome.served.hot <= outcome.served.hit).all()
    assert outcome.served.hit.sum() == outcome.ram_tokens + outcome.ssd_tokens + outcome.remote_tokens
    assert min(outcome.ram_tokens, outcome.ssd_tokens, outcome.remote_tokens) >= 0


def test_the_same_fleet_gives_the_same_numbers():
    fleet = Fleet(Cell(RAM, SSD), machines=3, routing="random", remote_admission="second")
    one, other = (run(AGENTS, fleet) for _ in range(2))
    assert one._replace(served=None) == other._replace(served=None)
    assert all(np.array_equal(a, b) for a, b in zip(one.served, other.served, strict=True))


# -- against a plain model of the rules ---------------------------------------------------------------------------------


class Rules:
    """Sets of blocks in the place of caches: machines that evict nothing, and the remote's LRU."""

    def __init__(self, admission: str, machines: int, limit: int | None):
        self.admission, self.limit = admission, limit
        self.has: list[set[tuple[int, ...]]] = [set() for _ in range(machines)]
        self.there: list[set[tuple[int, ...]]] = [set() for _ in range(machines)]
        self.remote: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.sent = self.read = 0

    def ask(self, machine: int, ids: tuple[int, ...]) -> int:
        blocks = [ids[: i + 1] for i in range(len(ids))]
        has, there = self.has[machine], self.there[machine]
        local = self._leading(blocks, has)
        missing = blocks[local:]
        for block in reversed(missing):
            if block in self.remote:
                self.remote.move_to_end(block)
            else:
                there.discard(block)
        for block in missing[: self._leading(missing, self.remote)]:
            self.read += self.remote[block]
            self.remote.move_to_end(block)
            has.add(block)
            there.add(block)
        hit = self._leading(blocks, has)
        if self.admission == "second":
            self._send(blocks[:hit], there)
        has.update(blocks)
        if self.admission == "always":
            self._send(blocks, there)
        return hit

    def _send(self, blocks: list[tuple[int, ...]], there: set[tuple[int, ...]]) -> None:
        for block in reversed(blocks):
            if block in there:
                continue
            there.add(block)
            if block in self.remote:
                self.remote.move_to_end(block)
                continue
            nbytes = StateSizes(STATE, RAW).rows_bytes(BLOCK * (len(block) - 1))
            while self.limit is not None and sum(self.remote.values()) + nbytes > self.limit:
                self.remote.popitem(last=False)
            self.remote[block] = nbytes
            self.sent += nbytes

    @staticmethod
    def _leading(blocks: list[tuple[int, ...]], found) -> int:
        return next((i for i, block in enumerate(blocks) if block not in found), len(blocks))


paths = st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map("".join)


@given(
    asked=st.lists(paths, min_size=1, max_size=14),
    admission=st.sampled_from(["second", "always", "never"]),
    routing=st.sampled_from(["sticky", "random"]),
    room=st.sampled_from([None, 2.5, 6]),
)
def test_small_traces_follow_the_rules(asked, admission, routing, room):
    """Prompts are paths in a tree of two branches; an id stands for a path, as in a trace."""
    limit = None if room is None else int(room * StateSizes(STATE, RAW).rows_bytes(0))
    numbers = {}
    trace = [
        prompt(*(numbers.setdefault(path[: i + 1], len(numbers)) for i in range(len(path))), at=float(at))
        for at, path in enumerate(asked)
    ]
    rules = Rules(admission, 3, limit)
    expected = [rules.ask(m, r.ids) for m, r in zip(machines_of(trace, 3, routing), trace, strict=True)]
    fleet = Fleet(Cell(GB), machines=3, routing=routing, remote_admission=admission, remote=limit, link=AT_ONCE)
    outcome = run(trace, fleet, block=BLOCK)
    leave = [min(hit * BLOCK, r.tokens - 1) for hit, r in zip(expected, trace, strict=True)]
    assert outcome.served.hit.tolist() == leave
    assert (outcome.sent_bytes, outcome.remote_read_bytes) == (rules.sent, rules.read)


# -- who serves whom --------------------------------------------------------------------------------------------------


def test_turns_of_a_chat_are_one_session_and_those_that_share_a_system_prompt_are_not():
    chats = 2 * COMMON
    first = [prompt(0, 100 + chat) for chat in range(chats)]
    second = [prompt(0, 100 + chat, 200 + chat) for chat in range(chats)]
    told = sessions([*first, *second])
    assert told == [*range(100, 100 + chats)] * 2


def test_a_prompt_that_is_common_alone_has_its_last_block_for_a_session():
    common = [prompt(0, 100 + chat) for chat in range(COMMON)]
    assert sessions([*common, prompt(0), Request(0.0, 100, 0, ())])[-2:] == [0, -1]


def test_a_tail_that_grows_stays_in_its_session():
    """Of a recording, where the first block of a chat has another id in each turn."""
    turns = [
        Request(0.0, 100, 0, (1,), "fetch"),
        Request(1.0, 200, 0, (2,), "store", (Grown(0, tail=1, tokens=100),)),
        Request(2.0, 300, 0, (3, 4), "fetch", (Grown(0, tail=2, tokens=200),)),
    ]
    assert sessions(turns) == [1, 1, 1]


def test_sticky_requests_of_a_session_go_to_one_machine_and_sessions_to_all():
    asked = list(Trace(Path(__file__).parents[1] / "fixtures" / "traces" / "coding_agents.jsonl.gz"))
    told, chosen = sessions(asked), machines_of(asked, 4, "sticky")
    assert len(set(told)) == 50
    assert len(set(zip(told, chosen, strict=True))) == 50
    assert set(chosen) == {0, 1, 2, 3}


def test_random_routing_is_the_same_each_time_and_uses_all_machines():
    chosen = machines_of(AGENTS, 4, "random")
    assert chosen == machines_of(AGENTS, 4, "random")
    assert set(chosen) == {0, 1, 2, 3}
    assert any(a != b for a, b in pairwise(chosen))


def test_a_recorded_store_goes_where_its_prompt_was_fetched():
    asked = [prompt(1, n, call=call) for n in range(2, 30) for call in ("fetch", "store")]
    chosen = machines_of(asked, 4, "random")
    assert chosen[::2] == chosen[1::2]
    assert len(set(chosen)) > 1


def test_an_unknown_routing_is_refused():
    with pytest.raises(ValueError, match="routing='nearest': write 'sticky' or 'random'"):
        machines_of(AGENTS, 4, "nearest")
