"""Leases: a prompt that was asked to be kept is there while others come and go, for as long as was asked and no longer."""

import json

import pytest

from prefixcache import PrefixCache
from prefixcache.store_fetch_remove import leases
from tests.inside import inside
from tests.models import states

KEPT = states.prompt(1, 600)
HALF_HOUR = 1800


class Clock:
    """Stands still until it is told."""

    def __init__(self, cache):
        self.now = 1000.0
        inside(cache).leases.clock = lambda: self.now


@pytest.fixture(params=["ram", "both"])
def tiers(request, tmp_path):
    return {} if request.param == "ram" else {"ssd_dir": tmp_path / "ssd", "ssd": "8MB", "ssd_reserve": 0}


@pytest.fixture
def opened(tiers):
    caches = []

    def open_cache(**options):
        standard = {"ram": "3MB", "codec": "raw", "memory_reserve": 0, "spill": "wait", "spill_wait": 30}
        caches.append(PrefixCache(**{**standard, **tiers, **options}))
        return caches[-1]

    yield open_cache
    for cache in caches:
        if not inside(cache).closed:
            cache.check_integrity()
        cache.close()


def put(cache, tokens, make=states.sliceable, salt=b"", session=""):
    prompt = cache.prompt(tokens, model="m", salt=salt).in_session(session)
    return cache.store(prompt, make(tokens)).tokens


def flood(cache, make=states.sliceable, times=2, salt=b""):
    """One-off prompts of so many times the bytes of all tiers; those that come are asked for once more, as real ones are."""
    stats, stored, seed = cache.stats(), 0, 100
    room = max(stats.ram_limit, stats.ssd.limit if stats.ssd is not None else 0)
    while stored < times * room:
        seed += 1
        tokens = states.prompt(seed, 700)
        before = cache.stats().counters.stored_bytes
        put(cache, tokens, make, salt)
        cache.fetch(tokens, model="m", salt=salt)
        stored += cache.stats().counters.stored_bytes - before
    assert cache.match(states.prompt(101, 700), model="m", salt=salt).ssd == 0  # a flood it was


@pytest.mark.parametrize("make", [states.sliceable, states.windowed, states.hybrid])
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_flood_leaves_a_prompt_with_a_lease_whole(opened, make, policy):
    cache = opened(policy=policy)
    put(cache, KEPT, make)
    assert cache.lease(KEPT, model="m", ttl=HALF_HOUR) == 600
    flood(cache, make)
    assert cache.match(KEPT, model="m").ssd == 600
    made, rest = cache.fetch(KEPT, model="m", leave=0, promote=True)
    assert rest == []
    states.check(made, KEPT)


def test_a_flood_takes_a_prompt_whose_lease_is_over(opened):
    cache = opened()
    clock = Clock(cache)
    put(cache, KEPT)
    cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    clock.now += HALF_HOUR
    flood(cache)
    assert cache.leased() == []
    assert cache.match(KEPT, model="m").ssd == 0


def test_the_next_turn_takes_the_lease_of_the_one_before(opened):
    cache = opened()
    for tokens in (KEPT, states.prompt(1, 900)):
        put(cache, tokens)
        assert cache.lease(tokens, model="m", ttl=HALF_HOUR) == len(tokens)
    (leased,) = cache.leased()
    assert leased.tokens == 900
    assert cache.stats().leased_bytes == leased.nbytes


def test_a_turn_that_asks_for_less_leaves_the_longer_lease(opened):
    cache = opened()
    clock = Clock(cache)
    put(cache, KEPT)
    cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    put(cache, states.prompt(1, 900))
    cache.lease(states.prompt(1, 900), model="m", ttl=60)
    assert [leased.tokens for leased in cache.leased()] == [600, 900]
    clock.now += 60
    assert [leased.tokens for leased in cache.leased()] == [600]
    flood(cache)
    assert cache.match(KEPT, model="m").ssd == 600


def test_beyond_a_tenants_share_its_oldest_lease_ends(opened):
    cache = opened(lease_share=0.05)
    put(cache, KEPT, salt=b"another")
    assert cache.lease(KEPT, model="m", salt=b"another", ttl=HALF_HOUR) == 600
    prompts = [states.prompt(seed, 700) for seed in range(200, 220)]
    for tokens in prompts:
        put(cache, tokens)
        assert cache.lease(tokens, model="m", ttl=HALF_HOUR) == 700
        cache.check_integrity()
    mine = [leased for leased in cache.leased() if leased.tokens == 700]
    stats = cache.stats()
    limit = stats.ssd.limit if stats.ssd is not None else stats.ram_limit
    assert 0 < sum(leased.nbytes for leased in mine) <= 0.05 * limit
    assert len(mine) < 20
    assert cache.leased()[0].tokens == 600  # another's is older, and stays
    assert cache.leased()[-1].tokens == 700


@pytest.mark.parametrize("salt", [b"", b"another"])
def test_what_is_larger_than_a_tenants_share_ends_no_lease(opened, salt):
    cache = opened(lease_share=0.1)
    put(cache, KEPT)
    assert cache.lease(KEPT, model="m", ttl=HALF_HOUR) == 600
    large = states.prompt(1, 6000)
    put(cache, large, salt=salt)
    assert cache.lease(large, model="m", salt=salt, ttl=HALF_HOUR) == 0
    assert [leased.tokens for leased in cache.leased()] == [600]


def test_all_tenants_together_lease_no_more_than_half(opened):
    cache = opened()
    for seed in range(40):
        tokens = states.prompt(seed, 900)
        put(cache, tokens, salt=b"%d" % seed)
        cache.lease(tokens, model="m", salt=b"%d" % seed, ttl=HALF_HOUR)
    stats = cache.stats()
    assert 0 < stats.leased_bytes <= (stats.ssd.limit if stats.ssd is not None else stats.ram_limit) / 2
    put(cache, KEPT)
    assert cache.match(KEPT, model="m").ram == 600


def test_leased_images_hold_up_nothing(opened):
    """Where all of RAM is leased, a prompt that is larger than what is not takes their room."""
    cache = opened(lease_share=1)
    for seed in range(40):
        put(cache, states.prompt(seed, 900))
        cache.lease(states.prompt(seed, 900), model="m", ttl=HALF_HOUR)
    assert put(cache, states.prompt(99, 2000)) == 2000


def test_a_share_of_nothing_leases_nothing(opened):
    cache = opened(lease_share=0)
    put(cache, KEPT)
    assert cache.lease(KEPT, model="m", ttl=HALF_HOUR) == 0
    assert cache.stats().leases == 0


def test_what_is_not_stored_is_not_leased(opened):
    assert opened().lease(KEPT, model="m", ttl=HALF_HOUR) == 0


@pytest.mark.parametrize("ttl", [None, -1, "1h", True, float("nan")])
def test_a_ttl_is_a_number_of_seconds(opened, ttl):
    with pytest.raises(ValueError, match="ttl="):
        opened().lease(KEPT, model="m", ttl=ttl)


def test_a_lease_ends_with_its_prompt(opened):
    cache = opened()
    put(cache, KEPT)
    cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    cache.remove(KEPT, model="m")
    cache.check_integrity()
    assert (cache.stats().leases, cache.stats().leased_bytes) == (0, 0)


# -- over a restart ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [states.sliceable, states.windowed, states.hybrid])
@pytest.mark.parametrize("tiers", ["both"], indirect=True)
def test_a_lease_outlasts_a_restart(opened, make):
    cache = opened()
    put(cache, KEPT, make)
    cache.lease(cache.prompt(KEPT, model="m").in_session("chat"), ttl=HALF_HOUR)
    before = cache.leased()
    cache.close()
    cache = opened()
    (after,) = cache.leased()
    assert after.seconds <= before[0].seconds <= HALF_HOUR
    assert after._replace(seconds=before[0].seconds) == before[0]
    flood(cache, make)
    assert cache.match(KEPT, model="m").ssd == 600


@pytest.mark.parametrize("tiers", ["both"], indirect=True)
def test_a_lease_of_what_was_superseded_since_outlasts_a_restart(opened):
    cache = opened()
    for tokens, ttl in ((KEPT, HALF_HOUR), (states.prompt(1, 900), 60)):
        put(cache, tokens)
        cache.lease(tokens, model="m", ttl=ttl)
    cache.close()
    assert [leased.tokens for leased in opened().leased()] == [600, 900]


@pytest.mark.parametrize("tiers", ["both"], indirect=True)
def test_a_restart_with_a_smaller_ssd_leaves_what_is_leased(opened):
    cache = opened()
    put(cache, KEPT)
    cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    for seed in range(100, 120):
        put(cache, states.prompt(seed, 700))
    cache.close()
    cache = opened(ssd="1MB")
    assert cache.match(KEPT, model="m").ssd == 600


@pytest.mark.parametrize("tiers", ["both"], indirect=True)
def test_an_index_that_is_lost_takes_no_lease(opened, tmp_path):
    """What it had noted is noted in the next one."""
    cache = opened()
    put(cache, KEPT)
    cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    assert cache.flush()
    for file in (tmp_path / "ssd").glob("index.db*"):
        file.unlink()
    put(cache, states.prompt(2, 300))
    assert cache.flush()
    cache.close()
    assert [leased.tokens for leased in opened().leased()] == [600]


@pytest.mark.parametrize("tiers", ["both"], indirect=True)
def test_a_lease_that_ended_meanwhile_is_over(opened, monkeypatch):
    cache = opened()
    put(cache, KEPT)
    cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    cache.close()
    now = leases.time.time()
    monkeypatch.setattr(leases.time, "time", lambda: now + HALF_HOUR + 1)
    cache = opened()
    assert cache.leased() == []
    assert cache.match(KEPT, model="m").ssd == 600


@pytest.mark.parametrize("tiers", ["both"], indirect=True)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: None,
        lambda told: [told, 7],
        lambda told: {**told, "until": 1e400},
        lambda told: {**told, "until": "tomorrow"},
        lambda told: {**told, "tokens": True},
        lambda told: {**told, "session": None},
        lambda told: {**told, "ends": []},
        lambda told: {**told, "ends": [["rows", "zz"]]},
        lambda told: {**told, "ends": [["rows", 7]]},
        lambda told: {**told, "ends": [[["rows"], "00"]]},
        lambda told: {**told, "ends": [["rows", "00"]]},
    ],
)
def test_a_note_that_no_cache_wrote_is_passed_over(opened, spoil):
    cache = opened()
    put(cache, KEPT)
    cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    (told,) = json.loads(inside(cache).leases.note())
    inside(cache).leases.restore(json.dumps([spoil(told)]))
    for text in ("", "[", "7", "{}", "[" * 100_000):
        inside(cache).leases.restore(text)
    assert len(cache.leased()) == 1
    cache.check_integrity()


@pytest.mark.parametrize("tiers", ["both"], indirect=True)
def test_a_note_is_short_however_many_there_are(opened):
    cache = opened(ram="12MB", ssd="40MB", lease_share=0.5)
    for seed in range(300):
        tokens = states.prompt(seed, 30)
        put(cache, tokens)
        assert cache.lease(tokens, model="m", ttl=HALF_HOUR) == 30
    note = inside(cache).leases.note()
    assert len(note) <= leases.NOTED
    assert 50 < len(json.loads(note)) < 300


# -- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [states.sliceable, states.windowed, states.hybrid])
def test_the_end_of_a_session_deletes_what_was_stored_under_it_alone(opened, make):
    cache = opened()
    shared = states.prompt(1, 512)
    mine, others = [*shared, *states.prompt(2, 300)], [*shared, *states.prompt(3, 300)]
    put(cache, mine, make, session="mine")
    put(cache, others, make, session="others")
    cache.lease(cache.prompt(mine, model="m").in_session("mine"), ttl=HALF_HOUR)
    deleted = cache.end_session("mine")
    cache.check_integrity()
    assert deleted.images >= 2
    assert cache.leased() == []
    assert cache.match(mine, model="m").ssd <= 512
    assert cache.match(others, model="m").ssd == 812
    assert cache.end_session("mine").images == 0


@pytest.mark.parametrize("user", ["", "other"])
def test_what_another_has_used_since_is_no_sessions_alone(opened, user):
    cache = opened()
    put(cache, KEPT, session="mine")
    cache.fetch(cache.prompt([*KEPT, 1], model="m").in_session(user))
    assert cache.end_session("mine") == (0, 0, 0)
    assert cache.match(KEPT, model="m").ssd == 600


def test_what_begins_alike_is_no_use_of_a_sessions_block(opened):
    cache = opened()
    put(cache, KEPT, session="mine")
    other = [*KEPT[:100], *states.prompt(5, 500)]
    cache.fetch(other, model="m")
    put(cache, other)
    assert cache.end_session("mine").images == 3
    assert cache.match(KEPT, model="m").ssd == 100
    assert cache.match(other, model="m").ssd == 600


def test_what_a_session_uses_again_is_still_its_own(opened):
    cache = opened()
    for tokens in (KEPT, states.prompt(1, 900)):
        cache.fetch(cache.prompt(tokens, model="m").in_session("mine"))
        put(cache, tokens, session="mine")
    assert cache.end_session("mine").images == 4
    assert cache.stats().blocks == 0


def test_a_session_is_a_tenants(opened):
    cache = opened()
    put(cache, KEPT, salt=b"a", session="main")
    put(cache, KEPT, salt=b"b", session="main")
    assert cache.end_session("main", salt=b"a").images == 3
    assert cache.match(KEPT, model="m", salt=b"a").ssd == 0
    assert cache.match(KEPT, model="m", salt=b"b").ssd == 600


@pytest.mark.parametrize("keep", ["pin", "lease"])
def test_what_is_pinned_or_leased_by_others_outlasts_a_session(opened, keep):
    cache = opened()
    put(cache, KEPT, session="mine")
    cache.pin(KEPT, model="m") if keep == "pin" else cache.lease(KEPT, model="m", ttl=HALF_HOUR)
    assert cache.end_session("mine") == (0, 0, 3)
    assert cache.match(KEPT, model="m").ssd == 600


@pytest.mark.parametrize("name", ["", "x" * 257, 7])
def test_a_session_has_a_name(opened, name):
    with pytest.raises(ValueError, match="session="):
        opened().end_session(name)
