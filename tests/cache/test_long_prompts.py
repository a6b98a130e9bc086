"""A prompt that is long and comes once must not push out what others use; one that comes back gets the room it needs."""

from __future__ import annotations

import pytest

from prefixcache import PrefixCache
from prefixcache.blocks.policies import POLICIES
from prefixcache.keys import BLOCK
from prefixcache.tiers.admission import SHARE, LongPrompts
from tests.models import states

TOKEN = 128  # bytes of a token's image with `states.sliceable`; with headers and nodes some 155
RAM = 1_000_000
HOT, LONG = 512, 32 * 512  # tokens


def prompt(seed: int, length: int = HOT) -> list[int]:
    return [seed * 1_000_000 + i for i in range(length)]


def put(cache: PrefixCache, tokens: list[int]) -> int:
    return cache.store(tokens, states.sliceable(tokens), model="m").tokens


def ask(cache: PrefixCache, tokens: list[int]) -> int:
    """One request: how many tokens were hit. What was not is stored."""
    rest = cache.fetch(tokens, model="m", promote=True)[1]
    put(cache, tokens)
    return len(tokens) - len(rest)


def heat(cache: PrefixCache, prompts: int) -> None:
    for _ in range(3):
        for seed in range(prompts):
            ask(cache, prompt(seed))


def left(cache: PrefixCache, prompts: int) -> int:
    cache.flush(20)
    return sum(cache.match(prompt(seed), model="m").ssd >= HOT - 1 for seed in range(prompts))


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return request.param


@pytest.fixture
def ram_alone(opened, policy):
    return opened(disk=False, ram=RAM, policy=policy)


def chunked(tokens: list[int], step: int = 512) -> list[list[int]]:
    return [tokens[:end] for end in range(step, len(tokens) + 1, step)]


def test_the_share_is_one_image_at_least(opened, policy):
    """Else what was hit once would stay for ever, where an image is larger than an eighth of the RAM."""
    cache = opened(disk=False, ram=180_000, policy=policy)  # four images
    heat(cache, 1)
    assert [put(cache, prompt(seed, BLOCK)) for seed in range(7, 13)] == [BLOCK] * 6


@pytest.mark.parametrize("parts", [lambda tokens: [tokens], chunked], ids=["at once", "in chunks"])
def test_a_long_prompt_that_comes_once_leaves_what_was_hit(ram_alone, parts):
    heat(ram_alone, 9)
    for part in parts(prompt(99, LONG)):
        put(ram_alone, part)
    assert left(ram_alone, 9) == 9


@pytest.mark.parametrize("parts", [lambda tokens: [tokens], chunked], ids=["at once", "in chunks"])
def test_of_a_ram_full_of_what_was_hit_it_takes_its_share(ram_alone, parts):
    heat(ram_alone, 11)
    before = left(ram_alone, 11)
    for part in parts(prompt(99, LONG)):
        put(ram_alone, part)
    assert before == 11
    assert left(ram_alone, 11) >= before - RAM // SHARE // (HOT * TOKEN) - 1
    assert 0 < ram_alone.match(prompt(99, LONG), model="m").ram * TOKEN <= RAM // SHARE


@pytest.mark.parametrize("ssd", [1_400_000, 3_000_000])
@pytest.mark.parametrize("parts", [lambda tokens: [tokens], chunked], ids=["at once", "in chunks"])
def test_the_ssd_keeps_what_was_hit_too(opened, policy, ssd, parts):
    cache = opened(ram=RAM, ssd=ssd, policy=policy)
    heat(cache, 9)
    cache.flush(20)
    for part in parts(prompt(99, LONG)):
        put(cache, part)
        cache.flush(20)
    assert left(cache, 9) == 9
    cache.check_integrity()


def test_what_was_hit_before_a_restart_is_left_where_it_is(opened):
    cache = opened(ram=RAM, ssd=1_400_000)
    heat(cache, 9)
    cache.close()
    cache = opened(ram=RAM, ssd=1_400_000)
    for part in chunked(prompt(99, LONG)):
        put(cache, part)
        cache.flush(20)
    assert left(cache, 9) == 9


def test_what_nobody_hit_gives_way_to_all_of_a_long_prompt(ram_alone):
    for seed in range(14):
        put(ram_alone, prompt(seed))
    assert put(ram_alone, prompt(99, LONG)) >= 5120


def test_a_long_prompt_is_kept_as_far_as_the_ram_goes_where_it_is_alone(ram_alone):
    kept = put(ram_alone, prompt(99, LONG))
    assert kept >= 5120
    assert ask(ram_alone, prompt(99, LONG)[:kept]) >= kept - 1


def test_a_long_chat_goes_on_for_turns(ram_alone):
    tokens = prompt(99, 5120)
    put(ram_alone, tokens)
    for turn in range(4):
        longer = [*tokens, *prompt(100 + turn, 300)]
        assert ask(ram_alone, longer) >= len(tokens) - BLOCK
        tokens = longer


def test_a_long_prompt_that_is_asked_again_takes_the_room_that_it_needs(ram_alone):
    heat(ram_alone, 11)
    long = prompt(99, 5120)
    assert put(ram_alone, long) * TOKEN <= RAM // SHARE
    ask(ram_alone, long)
    assert ask(ram_alone, long) == len(long) - 1


def test_the_next_chunk_of_a_prompt_is_no_second_request(ram_alone):
    heat(ram_alone, 11)
    long = prompt(99, 5120)
    for _ in range(3):
        for part in chunked(long):
            put(ram_alone, part)
    assert ram_alone.match(long, model="m").ram * TOKEN <= RAM // SHARE


def test_where_long_prompts_come_back_the_next_is_let_in_at_once(ram_alone):
    heat(ram_alone, 11)
    for seed in range(90, 93):
        for _ in range(3):
            ask(ram_alone, prompt(seed, 5120))
    heat(ram_alone, 11)
    assert put(ram_alone, prompt(99, 5120)) == 5120


def test_where_they_stop_coming_back_the_next_ones_are_not():
    long_prompts = LongPrompts()
    for n in range(3):
        long_prompts.add([b"%d" % n], 0)
        long_prompts.asked_for([b"%d" % n])
    assert long_prompts.often_return
    for n in range(100, 110):
        long_prompts.add([b"%d" % n], 0)
    assert not long_prompts.often_return


def test_a_prompt_counts_once_however_often_it_is_stored_or_asked_for():
    long_prompts = LongPrompts()
    for _ in range(5):
        long_prompts.add([b"a", b"b", b"c"], 1)
        long_prompts.add([b"a", b"b", b"c", b"d"], 3)  # its next chunk
    for _ in range(5):
        long_prompts.asked_for([b"x", b"b"])
    assert len(long_prompts) == 1
    assert long_prompts.often_return
    assert long_prompts.was_asked_again([b"a", b"b"])
    assert not long_prompts.was_asked_again([b"b", b"a"])
    for n in range(1000):
        long_prompts.add([b"%d" % n], 0)
    assert len(long_prompts) == LongPrompts.REMEMBERED
