"""A recording of a live server, simulated: it hits, stores, writes and reads what the server did, although tails grow."""

import random

import numpy as np
import pytest

from prefixcache import PrefixCache
from prefixcache.codecs.choice import as_codec
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell
from prefixcache.planning.simulator import Prompts, simulate, tokens_of
from prefixcache.planning.sizes import StateSizes
from prefixcache.trace.format import Grown
from prefixcache.trace.reading import Request, Trace
from tests.inside import inside
from tests.planning.test_simulator import GB, PLAIN, by_turns, live_cache

STATE, RAW = ModelState.of(PLAIN, name="tiny"), as_codec("raw")
Call = tuple[str, list[int]]


class Talk:
    """Makes up tokens, each a new one, so that prompts agree only where one goes on from another."""

    def __init__(self, mean: int, seed: int = 7):
        self.dice, self.mean, self.next = random.Random(seed), mean, 0

    def turn(self) -> list[int]:
        count = 1 + int(self.dice.expovariate(1 / self.mean))
        self.next += count
        return list(range(self.next - count, self.next))

    def chats(self, chats: int, turns: int) -> list[Call]:
        """By turns: a prompt is looked up, and stored with its answer, from which the chat goes on."""
        calls: list[Call] = []
        texts: list[list[int]] = [[] for _ in range(chats)]
        for _ in range(turns):
            for text in self.dice.sample(texts, chats):
                text += self.turn()
                calls.append(("fetch", text.copy()))
                text += self.turn()
                calls.append(("store", text.copy()))
        return calls


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serves calls with a real cache that records them; the tokens hit by each fetch, what it counted and the recording."""

    def serve(calls: list[Call], ram: int, ssd: int):
        model, trace = StateSizes(STATE, RAW).model, tmp_path / "trace.jsonl"
        disk = {"ssd_dir": tmp_path / "ssd", "ssd": ssd, "spill_on_close": False} if ssd else {}
        hits = []
        with PrefixCache(ram=ram, codec="raw", memory_reserve=0, trace=trace, **disk) as cache:
            if ssd:
                by_turns(cache, monkeypatch)
            for call, text in calls:
                tokens = np.array(text)
                if call == "fetch":
                    if ssd:
                        cache.promote(tokens, model=model).result()
                        inside(cache).ssd.flush()
                    hits.append(len(tokens) - len(cache.fetch(tokens, model=model)[1]))
                else:
                    cache.store(tokens, live_cache(STATE, tokens), model=model)
                    if ssd:
                        inside(cache).ssd.flush()
            cache.check_integrity()
            stats = cache.stats()
        return hits, stats, Trace(trace)

    return serve


def agree(served, calls: list[Call], ram: int = GB, ssd: int = 0) -> None:
    hits, stats, trace = served(calls, ram, ssd)
    outcome = simulate(trace, STATE, RAW, Cell(ram, ssd), block=trace.block)
    counters = stats.counters
    assert outcome.served.hit.tolist() == hits
    assert sum(hits) == counters.hit_tokens
    assert (outcome.stored_tokens, outcome.stored_bytes) == (counters.stored_tokens, counters.stored_bytes)
    assert (outcome.evicted, outcome.dropped) == (counters.evicted, counters.dropped)
    assert outcome.ram_peak == stats.ram_peak
    assert (outcome.ram_tokens, outcome.ssd_tokens) == (counters.ram_hit_tokens, counters.ssd_hit_tokens)
    if stats.ssd is not None:
        assert (outcome.written_files, outcome.written_bytes) == (stats.ssd.written_files, stats.ssd.written_bytes)
        assert (outcome.read_files, outcome.read_bytes) == (stats.ssd.read_files, stats.ssd.read_bytes)


@pytest.mark.parametrize("ssd", [0, GB], ids=["ram", "ram and ssd"])
@pytest.mark.parametrize(("mean", "chats", "turns"), [(60, 6, 8), (300, 5, 5), (1000, 4, 3)])
def test_chats_by_turns_hit_and_store_what_they_did(served, mean, chats, turns, ssd):
    agree(served, Talk(mean).chats(chats, turns), 1_000_000 if mean == 60 else 3_000_000, ssd)


def test_all_that_a_chat_said_is_hit_again(served):
    calls = Talk(60).chats(3, 10)
    hits, _, trace = served(calls, GB, 0)
    fetched = [len(text) for call, text in calls if call == "fetch"]
    assert sum(hits) > 0.85 * sum(fetched)
    assert simulate(trace, STATE, RAW, Cell(GB), block=trace.block).served.hit.tolist() == hits


def test_prompts_that_are_asked_again_or_edited_at_their_end(served):
    talk = Talk(100)
    calls = []
    for _ in range(4):
        prompt = talk.turn()
        for _ in range(3):
            calls += [("fetch", prompt), ("store", prompt + talk.turn())]
            edited = prompt + talk.turn()
            calls += [("fetch", edited), ("store", edited + talk.turn())]
    agree(served, calls)


def test_a_system_prompt_that_ends_within_a_block_and_was_stored_by_itself(served):
    talk = Talk(80)
    system = list(range(10**6, 10**6 + 700))
    texts = [("store", system)]
    for call, text in talk.chats(4, 3):
        texts.append((call, system + text))
    agree(served, texts)


def test_prompts_that_part_where_no_prompt_ended_share_whole_blocks_only(served):
    """The recording knows tails, not tokens: of 700 tokens that are shared, two blocks are simulated."""
    system = list(range(10**6, 10**6 + 700))
    calls = [("store", [*system, *range(50)]), ("fetch", [*system, *range(100, 150)])]
    hits, _, trace = served(calls, GB, 0)
    assert hits == [700]
    assert simulate(trace, STATE, RAW, Cell(GB), block=trace.block).served.hit.tolist() == [512]


# -- the tokens that stand for ids -------------------------------------------------------------------------------------


def call(ids: tuple[int, ...], tokens: int, *grown: tuple[int, int, int]) -> Request:
    return Request(0.0, tokens, 0, ids, "store", tuple(Grown(*each) for each in grown))


def test_a_grown_block_begins_with_all_its_tails():
    prompts = Prompts(256)
    first, second = prompts.token_bytes(call((1, 2), 300)), prompts.token_bytes(call((1, 3), 400, (1, 2, 44)))
    third = prompts.token_bytes(call((1, 4, 5), 600, (1, 3, 144)))
    assert second.startswith(first)
    assert third.startswith(second)
    assert [len(raw) // 8 for raw in (first, second, third)] == [300, 400, 600]
    markers = [[token for token in memoryview(stored).cast("q") if token] for stored in (first, second, third)]
    assert [len(set(tokens)) for tokens in markers] == [len(tokens) for tokens in markers] == [2, 3, 5]
    aside = prompts.token_bytes(call((1, 6), 400, (1, 3, 20)))  # fewer tokens than the first of the tails has
    assert aside[: 276 * 8] == first[: 276 * 8]
    assert aside[276 * 8 : 277 * 8] != first[276 * 8 : 277 * 8]


def test_an_id_has_the_same_tokens_for_good():
    """A tail that is named later, or names a block in turn, changes nothing of what a cache may hold already."""
    prompts = Prompts(256)
    own = prompts.token_bytes(call((1,), 256))
    assert prompts.token_bytes(call((1,), 256, (0, 2, 40))) == own
    grown = prompts.token_bytes(call((3,), 256, (0, 4, 40)))
    assert prompts.token_bytes(call((4,), 40, (0, 3, 20))) == grown[: 40 * 8]
    assert prompts.token_bytes(call((3,), 256, (0, 5, 99))) == grown
    itself = prompts.token_bytes(call((6,), 256, (0, 6, 9)))
    assert prompts.token_bytes(call((6,), 256)) == itself


@pytest.mark.parametrize("block", [1, 16, 256, 1000])
def test_ids_of_any_size_have_tokens_of_their_own(block):
    near = {conversation << 56 | turn for conversation in range(100) for turn in range(20)}
    ids = (*(near | {at + step for at in (0, 2**53 - 500, 2**63 - 500) for step in range(500)}),)
    rows = np.frombuffer(tokens_of(Request(0.0, len(ids) * block, 0, ids), block), "<i8").reshape(-1, block)
    assert rows[:, 0].min() > 0
    assert len(np.unique(rows[:, 0])) == len(ids)
    assert not rows[:, 1:].any()
