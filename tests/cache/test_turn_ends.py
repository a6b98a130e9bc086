"""Where prompts part within a coded block, others are hit: exact rows of a tail stay beside it. At a turn's end they stay
until the next turn has an end of its own.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache import PrefixCache
from prefixcache.blocks.node import Node, common_tokens
from prefixcache.image_format import ROWS
from prefixcache.tiers import prompt as tiers_prompt
from tests.inside import inside
from tests.models import states

CODEC = "turboquant:4"
PROMPT = states.prompt(1, 600)


def store(cache: PrefixCache, layers: str, *, turn_end: int | None, thought: int, answer: int = 300) -> None:
    """A turn of `PROMPT`, as a server stores it: in steps, then with the answer that the model gives."""
    prompt = cache.prompt(PROMPT, model="m", whole_blocks=True)
    if turn_end is not None:
        prompt = prompt.with_ends(turn=turn_end)
    live = states.stored_in_steps(cache, prompt, states.LAYERS[layers](), 0, 256)
    states.stored_in_steps(cache, prompt.continued([thought] * answer), live, len(PROMPT), 256)


def hit(cache: PrefixCache, tokens: list[int]) -> int:
    _, rest = cache.fetch(cache.prompt(tokens, model="m", whole_blocks=True), promote=True)
    cache.check_integrity()
    return len(tokens) - len(rest)


def nodes(cache: PrefixCache) -> list[Node]:
    return [slot.node for slot in inside(cache).storage.graph.slots.values() if slot.kind == ROWS]


@pytest.mark.parametrize("layers", sorted(states.LAYERS))
def test_the_next_turn_goes_on_from_the_last_ones_end(layers):
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        store(cache, layers, turn_end=600, thought=6)
        assert hit(cache, [*PROMPT, 7, 8]) == 600
        made, _ = cache.fetch(cache.prompt([*PROMPT, 7, 8], model="m", whole_blocks=True))
        alone = states.by_itself(tuple(PROMPT), CODEC, layers, 256)
        for own, other in zip(states.held(made), alone, strict=True):
            for part in ("keys", "values"):
                assert all(other[part][token] == row for token, row in own[part].items() if token in other[part])


@pytest.mark.parametrize("layers", sorted(states.LAYERS))
def test_without_a_turns_end_an_answer_takes_the_tails_place(layers):
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        store(cache, layers, turn_end=None, thought=6)
        assert hit(cache, [*PROMPT, 7, 8]) == 512


@pytest.mark.parametrize("layers", sorted(states.LAYERS))
def test_a_whole_block_that_shares_more_hides_no_tail(layers):
    """Another talk shares one token more with it than with the turn's end."""
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        store(cache, layers, turn_end=600, thought=6)
        beside = cache.prompt([*PROMPT[:599], 5, *[4] * 300], model="m", whole_blocks=True)
        states.stored_in_steps(cache, beside, states.LAYERS[layers](), 0, 256)
        assert hit(cache, [*PROMPT[:599], 5, 8]) == 599


@pytest.mark.parametrize("layers", sorted(states.LAYERS))
def test_a_prompt_that_ends_with_a_whole_block_is_hit_to_the_tail_in_it(layers):
    """The last token is always left, and no hit ends inside a whole block."""
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        store(cache, layers, turn_end=600, thought=6, answer=168)
        assert hit(cache, [*PROMPT, *[6] * 168]) == 600


@pytest.mark.parametrize("asked", [350, 400, 450])
@pytest.mark.parametrize("codec", ["raw", CODEC])
def test_what_the_ssd_alone_has_hides_nothing_that_ram_has(tmp_path, codec, asked):
    """The SSD's tail shares more with what is asked for than RAM's."""
    with PrefixCache(ram="20MB", codec=codec, ssd_dir=tmp_path / "ssd", ssd="50MB") as cache:
        states.put(cache, PROMPT[:400])
        cache.flush(30)
        cache.trim_to(0)
        states.put(cache, [*PROMPT[:300], *[5] * 100])
        cache.promote(PROMPT[:256], model="m").result(30)
        tokens = PROMPT[:asked]
        prompt = cache.prompt(tokens, model="m", whole_blocks=True)
        assert asked - len(cache.fetch(prompt, leave=0)[1]) == 300
        assert cache.match(prompt) == (300, min(asked, 400))
        cache.check_integrity()


def test_a_block_without_rows_hides_no_tail(tmp_path):
    """What goes on behind it may stay where its rows were deleted."""
    with PrefixCache(ram="20MB", codec="raw", ssd_dir=tmp_path / "ssd", ssd="50MB") as cache:
        states.put(cache, PROMPT[:300])
        cache.flush(30)
        cache.drop_hit(cache.prompt(PROMPT[:200], model="m"), 200)
        states.put(cache, PROMPT[:100])
        assert cache.match(PROMPT[:280], model="m") == (100, 100)
        cache.check_integrity()


@pytest.mark.parametrize("codec", ["raw", CODEC])
def test_blocks_in_which_no_hit_may_end_cost_no_comparison_of_tokens(tmp_path, monkeypatch, codec):
    """Those of which the SSD alone has the rows, and whole ones of codes."""
    compared: list[int] = []

    def common(one: bytes, other: bytes) -> int:
        compared.append(1)
        return common_tokens(one, other)

    with PrefixCache(ram="20MB", codec=codec, ssd_dir=tmp_path / "ssd", ssd="50MB") as cache:
        for number in range(50):
            tokens = [*PROMPT[:100], 3000 + number, *PROMPT[:155]]
            prompt = cache.prompt(tokens, model="m", whole_blocks=True)
            states.stored_in_steps(cache, prompt, states.LAYERS["every token"](), 0, 256)
        cache.flush(30)
        if codec == "raw":
            cache.trim_to(0)
        monkeypatch.setattr(tiers_prompt, "common_tokens", common)
        assert cache.match(cache.prompt([*PROMPT[:100], 3025, 9, 9], model="m", whole_blocks=True)).ram == 0
        assert not compared


def test_it_comes_back_from_the_ssd(tmp_path):
    options = {"ram": "20MB", "codec": CODEC, "ssd_dir": tmp_path / "ssd", "ssd": "50MB"}
    with PrefixCache(**options) as cache:
        store(cache, "every token", turn_end=600, thought=6)
        assert cache.flush(30)
        cache.trim_to(0)
        assert hit(cache, [*PROMPT, 7, 8]) == 600
    with PrefixCache(**options) as cache:
        assert hit(cache, [*PROMPT, 7, 8]) == 600


@pytest.mark.parametrize("in_ram", [True, False])
def test_it_is_removed_with_its_prompt(tmp_path, in_ram):
    """Also where RAM has the answer's block, which begins alike, and the SSD alone has the tail."""
    with PrefixCache(ram="20MB", codec=CODEC, ssd_dir=tmp_path / "ssd", ssd="50MB") as cache:
        store(cache, "every token", turn_end=600, thought=6)
        assert cache.flush(30)
        if not in_ram:
            cache.trim_to(cache.stats().ram_held - 1)
        assert [node.rows.image is not None for node in nodes(cache) if node.ends] == [in_ram]
        assert cache.remove(PROMPT, model="m") > 0
        assert [(node.start, node.end) for node in nodes(cache)] == [(0, 256), (256, 512), (512, 768), (768, 900)]
        assert hit(cache, [*PROMPT, *[6] * 300]) == 899
        cache.check_integrity()


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("more", [100, 400])
def test_the_next_turn_takes_its_place(same, more):
    """Whether it goes on as the last one did, or without its thoughts."""
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        store(cache, "every token", turn_end=600, thought=6)
        tokens = [*PROMPT, *([6] * 300 if same else []), *([7] * more)]
        following = cache.prompt(tokens, model="m", whole_blocks=True).with_ends(turn=len(tokens))
        states.stored_in_steps(cache, following, states.LAYERS["every token"](), 0, 256)
        assert hit(cache, [*tokens, 9, 9]) == len(tokens)
        assert hit(cache, [*PROMPT, 9, 9]) == (600 if len(tokens) < 768 else 512)
        assert [node.ends for node in nodes(cache) if node.ends] == ["turn"]


@pytest.mark.parametrize("layers", sorted(states.LAYERS))
def test_the_end_of_what_is_shared_stays(layers):
    """A system text ends within a block of each prompt that begins with it."""
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        for talk in range(3):
            tokens = [*PROMPT, *[6 + talk] * 300]
            prompt = cache.prompt(tokens, model="m", whole_blocks=True).with_ends(shared=600, turn=900)
            made, rest = cache.fetch(prompt)
            assert 900 - len(rest) == (600 if talk else 0)
            at, live = 900 - len(rest), made or states.LAYERS[layers]()
            live = states.stored_in_steps(cache, prompt.first(600), live, at, 256)
            states.stored_in_steps(cache, prompt, live, 600, 256)
            cache.check_integrity()


@pytest.mark.parametrize("ends", [[(600, 600)], [(600, 0), (0, 600)]])
def test_what_is_shared_stays_where_a_turn_ends_with_it(ends):
    """Be it the same prompt's turn, or another chat's."""
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        for end, (shared, turn) in [*((600, pair) for pair in ends), (900, (0, 900))]:
            asked = cache.prompt([*PROMPT, *[6] * (end - 600)], model="m", whole_blocks=True)
            asked = asked.with_ends(shared=shared, turn=turn)
            states.stored_in_steps(cache, asked, states.LAYERS["every token"](), 0, 256)
        assert hit(cache, [*PROMPT, 9, 9]) == 600


@pytest.mark.parametrize("layers", sorted(states.LAYERS))
@pytest.mark.parametrize("shared", [40, 600, 1000])
def test_where_the_second_prompt_parts_the_third_goes_on(layers, shared, tmp_path):
    """And all that come after a restart."""
    options = {"ram": "20MB", "codec": CODEC, "ssd_dir": tmp_path / "ssd", "ssd": "50MB"}
    hits = []
    for talk in range(4):
        with PrefixCache(**options) as cache:
            for tokens in ([*states.prompt(1, shared), *states.prompt(2 + 2 * talk + i, 400)] for i in range(2)):
                prompt = cache.prompt(tokens, model="m", whole_blocks=True)
                live, rest = cache.fetch(prompt, promote=True)
                at, point, live = len(tokens) - len(rest), cache.branch_point(prompt), live or states.LAYERS[layers]()
                hits.append(at)
                if point > at:
                    live, at = states.stored_in_steps(cache, prompt.first(point), live, at, 256), point
                states.stored_in_steps(cache, prompt, live, at, 256)
                cache.check_integrity()
    assert hits == [0, shared // 256 * 256, *[shared // 32 * 32] * 6]


@given(shared=st.integers(512, 600), answer=st.integers(1, 600))
def test_it_is_hit_wherever_a_prompt_parts_within_it(shared, answer):
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        store(cache, "every token", turn_end=600, thought=6, answer=answer)
        assert hit(cache, [*PROMPT[:shared], 7, 8]) == shared


def test_what_is_known_is_known_as_deep_as_before():
    with PrefixCache(ram="20MB", codec=CODEC) as cache:
        store(cache, "every token", turn_end=600, thought=6)
        assert cache.known(cache.prompt([*PROMPT, *[6] * 200, 9], model="m", whole_blocks=True)) == 800
