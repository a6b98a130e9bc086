"""`PrefixCache.prompt`: a request's tokens, checked once, that walk the graph of blocks once."""

from __future__ import annotations

import pytest

from prefixcache import PrefixCache
from prefixcache.tiers.prompt import take_hit
from tests.inside import inside
from tests.models import states
from tests.models.states import prompt

PROMPT = prompt(1, 256 * 9 + 100)
LONGER = [*PROMPT, *range(400)]


@pytest.fixture
def cache(tmp_path):
    """Its SSD has the prompt, and its RAM nothing."""
    with PrefixCache(ram="8MB", ssd_dir=tmp_path, ssd="40MB", codec="raw", memory_reserve=0) as opened:
        opened.store(PROMPT, states.sliceable(PROMPT), model="m")
        opened.store([1] * 600, states.sliceable([1] * 600), model="m")
        assert opened.flush(20)
        opened.trim_to(0)
        assert opened.match(PROMPT, model="m") == (0, len(PROMPT))
        yield opened
        opened.check_integrity()


def counted(cache: PrefixCache) -> tuple[int, int]:
    graph = inside(cache).storage.graph
    return graph.walks, graph.visits


def test_a_request_from_the_ssd_walks_the_graph_four_times(cache):
    before = counted(cache)
    assert cache.match(LONGER, model="m").ssd == len(PROMPT)
    assert cache.promote(LONGER, model="m").result() == len(PROMPT)
    _, rest = cache.fetch(LONGER, model="m")
    assert len(rest) == 400
    assert cache.store(LONGER, states.sliceable(LONGER), model="m").tokens == len(LONGER)
    walks, visits = counted(cache)
    assert walks - before[0] <= 4
    assert visits - before[1] <= 4 * (len(LONGER) // 256 + 5)


def test_with_a_prompt_it_walks_once_and_goes_on_from_there(cache):
    before = counted(cache)
    prompt = cache.prompt(LONGER, model="m")
    assert cache.match(prompt).ssd == cache.promote(prompt).result() == cache.match(prompt).ram == len(PROMPT)
    restored, rest = cache.fetch(prompt)
    assert (len(rest), rest) == (400, LONGER[len(PROMPT) :])
    assert restored is not None
    assert cache.store(prompt, states.sliceable(LONGER), model=None).tokens == len(LONGER)
    assert cache.match(prompt).ram == len(LONGER)
    walks, visits = counted(cache)
    assert walks - before[0] == 1
    assert visits - before[1] <= 2 * (len(LONGER) // 256 + 5)


def test_a_prompt_sees_what_others_change(cache):
    prompt = cache.prompt(PROMPT, model="m")
    assert cache.match(prompt).ssd == len(PROMPT)
    cache.remove(PROMPT, model="m")
    assert cache.match(prompt) == (0, 0)
    assert cache.fetch(prompt) == (None, PROMPT)
    cache.store(PROMPT[:600], states.sliceable(PROMPT[:600]), model="m")
    assert cache.match(prompt).ram == 600
    cache.clear()
    assert cache.match(prompt) == (0, 0)
    cache.store(prompt, states.sliceable(PROMPT))
    assert cache.match(prompt).ram == len(PROMPT)
    assert cache.pin(prompt) == len(PROMPT)
    assert cache.unpin(PROMPT, model="m")
    assert cache.lookup(prompt).tokens == len(PROMPT)
    assert cache.remove(prompt) > 0


def test_a_prompt_made_before_its_namespace_is_known_finds_it(tmp_path):
    with PrefixCache(ram="8MB", codec="raw", memory_reserve=0) as cache:
        prompt = cache.prompt(PROMPT, model="m", salt=b"tenant")
        assert cache.match(prompt) == (0, 0)
        cache.store(PROMPT, states.sliceable(PROMPT), model="m", salt=b"tenant")
        assert cache.match(prompt).ram == len(PROMPT)
        assert cache.match(PROMPT, model="m") == (0, 0)


def test_the_model_and_salt_of_a_prompt_are_given_once(cache):
    prompt = cache.prompt(PROMPT, model="m", salt=b"tenant")
    for wrong in ({"model": "m"}, {"salt": b"tenant"}):
        with pytest.raises(TypeError, match="a Prompt has its model and salt"):
            cache.match(prompt, **wrong)
    with pytest.raises(TypeError, match="model of type NoneType"):
        cache.match(PROMPT)
    assert "tenant" not in repr(prompt)


def test_a_prompt_continued_with_its_answer_goes_on_from_its_walk(cache):
    prompt = cache.prompt(PROMPT, model="m")
    assert cache.match(prompt).ssd == len(PROMPT)
    before = counted(cache)
    longer = prompt.continued(LONGER[len(PROMPT) :])
    assert len(longer) == len(LONGER)
    assert cache.match(longer).ssd == len(PROMPT)
    assert cache.store(longer, states.sliceable(LONGER)).tokens == len(LONGER)
    assert cache.fetch(longer, leave=0, promote=True)[1].tolist() == []
    assert cache.match(LONGER, model="m").ram == len(LONGER)
    walks, visits = counted(cache)
    assert (walks - before[0], visits - before[1] <= 2 * (len(LONGER) // 256 + 5)) == (1, True)


@pytest.mark.parametrize("count", [0, 100, 512, 700, len(PROMPT), len(PROMPT) + 9])
def test_the_first_tokens_of_a_prompt_go_on_from_its_walk(cache, count):
    prompt = cache.prompt(PROMPT, model="m")
    assert cache.match(prompt).ssd == len(PROMPT)
    before = inside(cache).storage.graph.walks
    first = prompt.first(count)
    known = min(count, len(PROMPT))
    assert (len(first), cache.match(first).ssd) == (known, known)
    assert inside(cache).storage.graph.walks - before == (count < 256)
    assert cache.match(prompt).ssd == len(PROMPT)


def test_less_than_no_token_of_a_prompt_is_an_error(cache):
    with pytest.raises(ValueError, match=r"first\(-1\): give a number of tokens, 0 or more"):
        cache.prompt(PROMPT, model="m").first(-1)


def test_the_first_tokens_of_a_prompt_are_stored_where_the_layers_have_seen_more(cache):
    prompt = cache.prompt([5] * 900, model="m")
    assert cache.store(prompt.first(512), states.sliceable([5] * 700)).tokens == 512
    assert cache.match(prompt).ram == 512


def test_a_prompt_of_another_cache_is_refused(cache):
    with PrefixCache(ram="8MB", codec="raw", memory_reserve=0) as other:
        prompt = other.prompt(PROMPT, model="m")
        with pytest.raises(ValueError, match="of another PrefixCache"):
            cache.match(prompt)


def test_tokens_appended_later_are_not_of_the_prompt(cache):
    tokens = list(PROMPT)
    prompt = cache.prompt(tokens, model="m")
    tokens.append(7)
    assert cache.fetch(prompt, promote=True)[1] == PROMPT[-1:]


def test_of_equal_siblings_the_one_that_came_to_ram_is_hit(cache):
    first, second = ([*range(100), *([i] * 156)] for i in (1, 2))
    for tokens in (first, second):
        cache.store(tokens, states.sliceable(tokens), model="m")
    assert cache.flush(20)
    cache.trim_to(0)
    prompt = cache.prompt([*range(100), *([3] * 100)], model="m")
    assert cache.match(prompt) == (0, 100)
    for tokens in (second, first):
        cache.trim_to(0)
        assert cache.promote(tokens, model="m").result() == 256
        assert cache.match(prompt).ram == 100


def test_a_lookup_that_a_close_overtakes_is_a_miss(cache):
    cache.promote(PROMPT, model="m").result()
    prompt = cache.prompt(PROMPT, model="m")
    assert cache.match(prompt).ram == len(PROMPT)
    storage = inside(cache).storage
    cache.close()
    assert take_hit(storage, prompt, 0) is None
