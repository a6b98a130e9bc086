"""PrefixCache against a plain model, operation by operation, with another thread watching the budget."""

import errno
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule
from mlx_lm.models.cache import KVCache

from prefixcache import TurboQuantKVCache, chunks
from prefixcache.blocks.budget import Budget
from prefixcache.ssd import open_directory, writer
from prefixcache.store_fetch_remove import namespaces
from prefixcache.store_fetch_remove.leases import Leases
from prefixcache.tiers import ram
from prefixcache.tiers.admission import SHARE
from prefixcache.tiers.hot import HotPrompts
from tests.cache.pictured import Picture, PicturedCache, cut, may_end, media_of
from tests.given_rates import computing_is
from tests.inside import inside
from tests.models import states
from tests.models.transforming import uneven_bases
from tests.waiting import until
from tools.faults.evidence import du

TEXT = st.tuples(st.integers(0, 2), st.sampled_from([1, 30, 100, 155, 156, 157, 256, 300]))
PICTURES = st.builds(Picture, st.integers(0, 1), st.sampled_from([1, 100, 156, 300]), st.booleans())
RUNS = st.lists(TEXT | TEXT | PICTURES, min_size=1, max_size=5)


def spell(runs) -> list[int]:
    parts = [run.tokens() if isinstance(run, Picture) else [run[0]] * run[1] for run in runs]
    return [token for part in parts for token in part]


def common(a, b) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class Watch(threading.Thread):
    """Reads the budget as fast as it can."""

    def __init__(self, cache):
        super().__init__(daemon=True)
        self.budget, self.over, self.stop = inside(cache).storage.budget, [], threading.Event()

    def run(self):
        while not self.stop.wait(0.0005):
            before, held = self.budget.bound, self.budget.held()
            if (
                held.total > max(before, self.budget.bound) or min(held) < 0
            ):  # a lowered limit's falls with what is held
                self.over.append(held)


def unlocked(cache):
    """Have a cache fail where it waits for stores behind with the lock that they need to end."""
    wait = inside(cache).behind.wait

    def checked():
        assert not inside(cache).storage.lock._is_owned()
        wait()

    inside(cache).behind.wait = checked


class CacheMachine(RuleBasedStateMachine):
    """Nothing wrong is ever fetched, nothing deeper than was stored; with room enough, nothing less either."""

    prompts = Bundle("prompts")
    make = staticmethod(states.sliceable)
    check = staticmethod(states.check)
    codec = "raw"
    any_boundary = True
    recurrent = False
    recodes = False  # whether hits may be of another codec than what is stored now

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        ram=st.sampled_from([120_000, 400_000, 5_000_000]),
        tier=st.sampled_from(["both", "ram only"]),
        spill=st.sampled_from(["drop", "wait"]),
        close=st.booleans(),
    )
    def open(self, ram, tier, spill, close):
        self.dir = Path(tempfile.mkdtemp())
        self.options = {"ram": ram, "codec": self.codec, "spill": spill, "spill_wait": 5, "spill_on_close": close}
        if tier != "ram only":
            self.options |= {"ssd_dir": self.dir / "ssd", "ssd": "30MB"}
        self.options["decline_slow_hits"] = True  # none is slow: nobody says what computing takes
        self.roomy = ram > 1_000_000
        self.stored: list[list[int]] = []  # all that was ever stored and may be found
        self.ever: list[list[int]] = []  # all that was
        self.sure: list[list[int]] = []  # what must be found: stored, and not removed nor lost since
        self.pinned: list[list[int]] = []
        self.promised: dict[tuple[int, ...], int] = {}  # how deep it was on SSD; nothing was removed since
        self.now = 0.0
        self.leased: list[tuple[list[int], int, float]] = []  # tokens, how deep, until when; the oldest first
        self._open()

    @initialize(target=prompts, several=st.lists(RUNS, min_size=3, max_size=3))
    def first_prompts(self, several):
        return multiple(*map(spell, several))

    def _open(self):
        Leases.clock = staticmethod(lambda: self.now)
        self.cache = PicturedCache(**self.options)
        unlocked(self.cache)
        self.watch = Watch(self.cache)
        self.watch.start()

    def _close(self):
        self.watch.stop.set()
        self.watch.join()
        assert not self.watch.over
        self.cache.close()

    def note_stored(self, tokens, kept=None):
        """Of these tokens, `kept` can be hit. Rows of more may be there, which no hit can use without their windows."""
        self.stored.append(tokens[:kept])
        self.ever.append(tokens)

    def expected(self, tokens, among=None) -> int:
        return max((common(tokens, s) for s in (self.stored if among is None else among)), default=0)

    @rule(target=prompts, runs=RUNS)
    def prompt(self, runs):
        return spell(runs)

    @rule(tokens=prompts, hot=st.booleans(), behind=st.booleans())
    def store(self, tokens, hot=False, behind=False):
        made, prompt = self.make(tokens), self.cache.prompt(tokens, model="m")
        if behind:
            stored = self.cache.store_behind(prompt, made, write_back_from=0 if hot else None).result(30)
        else:
            stored = self.cache.store(prompt, made, write_back_from=0 if hot else None)
        if hot:
            self.cache.keep_hot(prompt, made)
        self.note_stored(tokens, stored.tokens)
        if self.roomy:
            assert stored.tokens == len(tokens)
            self.sure.append(tokens)

    @rule(tokens=prompts, part=st.floats(0, 1))
    def store_what_a_cancelled_prefill_left(self, tokens, part):
        """Rows inside of a whole picture are not among what is kept."""
        seen = max(int(len(tokens) * part), 1)
        end = max(place for place in range(seen + 1) if may_end(tokens, place))
        stored = self.cache.store(tokens, self.make(tokens[:seen]), model="m").tokens
        assert stored <= end
        assert may_end(tokens, stored)
        self.note_stored(tokens[:end], end if self.recurrent else stored)  # a branch point needs no state
        if self.roomy and self.any_boundary:
            assert stored == end

    @rule(tokens=prompts, leave=st.integers(0, 3), promote=st.booleans())
    def fetch(self, tokens, leave, promote=False):
        hot_before = self.cache.stats().counters.hot_hit_tokens
        made, rest = self.cache.fetch(tokens, model="m", leave=leave, promote=promote)
        depth = len(tokens) - len(rest)
        if self.any_boundary:  # what is hot of it is not decoded
            gained = self.cache.stats().counters.hot_hit_tokens - hot_before
            assert gained // 256 >= self.hot_beginning(tokens[:depth]) // 256
        assert rest == tokens[depth:]
        assert depth <= min(self.expected(tokens), max(len(tokens) - leave, 0))
        if made is None:
            assert depth == 0
        else:
            self.check(made, tokens[:depth])
            self.as_images_give(tokens, depth, made)

    def hot_beginning(self, tokens) -> int:
        """How many of these tokens a hot prompt begins with."""
        hot = inside(self.cache).storage.hot
        tokens = np.frombuffer(self.cache.prompt(tokens, model="m").token_bytes, "<i8").tolist()
        return max((common(tokens, one.ids.tolist()) for root in hot.roots() for one in hot.of(root)), default=0)

    def as_images_give(self, tokens, depth, layers):
        """Of whole blocks, all rows that a fetch without hot prompts gives, bit for bit."""
        images = self.cache.lookup(tokens, model="m")
        if images is not None:
            whole = min(depth, images.tokens) // 256 * 256
            for own, other in zip(states.held(layers), states.held(images.dequantize()), strict=True):
                for part, rows in own.items():
                    assert [t for t in rows.keys() & other[part] if t < whole and rows[t] != other[part][t]] == []

    @rule(tokens=prompts, runs=RUNS, leave=st.integers(0, 3), evicted=st.booleans())
    def fetch_what_goes_on_from_a_hot_prompt(self, tokens, runs, leave, evicted):
        """A hit that images make deeper begins with a hot prompt's whole blocks."""
        longer = [*tokens, *spell(runs)]
        self.store(tokens, hot=True)
        self.store(longer, hot=False)
        if evicted:
            self.flush()
            self.trim(0)
        self.fetch(longer, leave, promote=evicted)

    @rule(tokens=prompts, leave=st.integers(0, 3))
    def fetch_where_computing_is_quicker(self, tokens, leave):
        """What is hot is given, and no more."""
        learnt, self.cache.rates = self.cache.rates, computing_is("quicker")
        before = self.cache.stats().counters.hot_hit_tokens
        made, rest = self.cache.fetch(tokens, model="m", leave=leave)
        self.cache.rates = learnt
        depth = len(tokens) - len(rest)
        assert depth == self.cache.stats().counters.hot_hit_tokens - before
        if made is not None:
            self.check(made, tokens[:depth])

    @rule(tokens=prompts, leave=st.integers(0, 3), write_back=st.booleans())
    def store_a_hit(self, tokens, leave, write_back):
        """What was fetched is stored as it is: it adds nothing that was not there."""
        made, rest = self.cache.fetch(tokens, model="m", leave=leave)
        if made is not None:
            depth = len(tokens) - len(rest)
            stored = self.cache.store(tokens[:depth], made, model="m", write_back_from=0 if write_back else None)
            self.check(made, tokens[:depth])
            self.note_stored(tokens[:depth], stored.tokens)
            if self.roomy:
                assert stored.tokens == depth
                assert stored.new_tokens == 0 or self.recodes
            self.fetch(tokens[:depth], 1)

    @rule(tokens=prompts, runs=RUNS)
    def store_where_it_parts_from_others(self, tokens, runs):
        """Recurrent state at a branch point is hit by all that begin so. Other layers need none."""
        asked = [*tokens, *spell(runs)]
        point = self.cache.branch_point(asked, model="m")
        rows = self.stored if self.roomy else self.ever  # which may stand where there was no room for a state
        assert point <= self.expected(asked, rows) * self.recurrent
        if self.roomy and self.recurrent:
            known = min(self.expected(asked, self.sure), len(asked) - 1)
            ends = {medium.end for medium in media_of(asked)} | {*range(0, known + 1, 256)}
            assert point >= max(end for end in ends if end <= known and may_end(asked, end))
        assert may_end(asked, point)
        if point:
            self.store(asked[:point])
            if self.roomy:
                assert self.cache.match([*cut(asked, point), -1], model="m").ssd == point

    @rule(tokens=prompts)
    def parting(self, tokens):
        """A prompt parts where its nearest neighbour does: of what is stored, or of what was evicted."""
        hit = len(tokens) - len(self.cache.fetch(tokens, model="m")[1])
        told = self.cache.parting(tokens, hit, model="m")
        assert told.hit <= told.position <= self.expected(tokens, self.ever)
        if told.reason == "not_read":  # beyond that, rows of a part of a picture may be the same
            assert hit < self.cache.match(tokens, model="m").ssd <= self.expected(tokens)
        elif told.reason not in (
            "evicted",
            "no_window",
            "no_state",
            "whole_medium",
        ):  # else of rows that no hit can use
            assert told.position <= self.expected(tokens)
        if self.roomy:
            assert told.position >= self.expected(tokens, self.sure)
        if told.reason in ("parted", "nothing_stored"):
            assert hit >= min(told.position, len(tokens) - 1)

    @rule(tokens=prompts)
    def promote(self, tokens):
        depth = self.cache.promote(tokens, model="m").result(30)
        match = self.cache.match(tokens, model="m")
        assert match.ram <= match.ssd <= self.expected(tokens)
        assert may_end(tokens, match.ram)
        assert may_end(tokens, match.ssd)
        assert depth <= match.ssd
        if self.roomy and self.any_boundary:
            assert match.ram == match.ssd >= self.expected(tokens, self.sure)

    @precondition(lambda self: not self.roomy)
    @rule(seed=st.integers(0, 1 << 30), step=st.sampled_from([512, 1280, 5120]))
    def store_a_long_prompt_that_never_came(self, seed, step):
        """What was hit stays, but for a share of the RAM, or room for one image, however the prompt is stored."""
        storage = inside(self.cache).storage
        hit = {slot.key: slot.nbytes for slot in storage.graph.slots.values() if slot.hits}
        forgotten, limit = storage.counters.forgotten, storage.budget.limit
        often_returned = storage.long_prompts.often_return
        tokens = [3 + (seed + i) % 5000 for i in range(5120 if limit > 200_000 else 2560)]
        for end in range(min(step, len(tokens)), len(tokens) + 1, step):
            stored = self.cache.store(tokens[:end], self.make(tokens[:end]), model="m").tokens
            self.note_stored(tokens[:end], stored)
        with storage.lock:
            kept = {slot.key for slot in storage.graph.slots.values()}
            lost = sum(nbytes for key, nbytes in hit.items() if key not in kept)
            # It is decided with the first of its images.
            often_return = often_returned or storage.long_prompts.often_return
            if storage.counters.forgotten == forgotten and not often_return:
                image = max([*hit.values(), *(slot.nbytes for slot in storage.graph.slots.values())], default=0)
                assert lost <= max(limit // SHARE, image) + max(hit.values(), default=0)

    @rule(tokens=prompts)
    def remove(self, tokens):
        self.cache.remove(tokens, model="m")
        self.sure.clear()
        self.promised.clear()

    @rule(tokens=prompts)
    def drop_hit(self, tokens):
        """As if the model could not go on from what a fetch gave."""
        _, rest = self.cache.fetch(tokens, model="m")
        depth = len(tokens) - len(rest)
        if depth:
            prompt = self.cache.prompt(tokens, model="m")
            before = self.cache.stats().counters.failed_hits
            self.cache.drop_hit(prompt, depth)
            assert self.cache.stats().counters.failed_hits == before + 1
            assert self.cache.match(prompt).ssd < depth
            self.sure.clear()
            self.promised.clear()

    @rule(tokens=prompts)
    def remove_following(self, tokens):
        """Nothing that begins with the tokens is there afterwards; what does not is as deep as before."""
        rest = [s for s in self.stored if s[: len(tokens)] != tokens]
        unindexed = any(tier.unindexed for tier in inside(self.cache).storage.lower)
        self.cache.remove(tokens, model="m", following=True)
        self.pinned = [p for p in self.pinned if p[: len(tokens)] != tokens]
        self.sure.clear()
        self.promised.clear()
        if not unindexed:
            self.stored = rest
            assert self.cache.match(tokens, model="m").ssd <= self.expected(tokens)

    @rule(tokens=prompts, part=st.integers(0, 4))
    def prune(self, tokens, part):
        """All that is not pinned goes, or a part of what the SSD has; other tenants and models keep theirs."""
        self.cache.store(tokens, self.make(tokens), model="m", salt=b"other")
        kept = self.cache.match(tokens, model="m", salt=b"other").ssd
        if part and "ssd_dir" in self.options:
            self.cache.prune(salt=b"", ssd_to=self.cache.stats().ssd.used * part // 4)
        else:
            self.cache.prune(salt=b"")
            if not self.pinned and not inside(self.cache).storage.graph.pinned:
                assert self.cache.match(tokens, model="m").ssd == 0
        assert self.cache.match(tokens, model="m", salt=b"other").ssd >= kept or not self.roomy
        self.cache.clear(salt=b"other")
        assert self.cache.match(tokens, model="m", salt=b"other").ssd == 0
        self.sure.clear()
        self.promised.clear()

    @rule(tokens=prompts)
    def pin(self, tokens):
        depth = self.cache.pin(tokens, model="m")
        if depth:
            self.pinned.append(tokens)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self):
        tokens = self.pinned.pop()
        assert self.cache.unpin(tokens, model="m")

    @rule(tokens=prompts, ttl=st.sampled_from([10, 20, 40]), session=st.sampled_from(["", "a", "b"]))
    def lease(self, tokens, ttl, session):
        prompt = self.cache.prompt(tokens, model="m").in_session(session)
        depth = self.cache.lease(prompt, ttl=ttl)
        assert depth in (0, self.cache.match(tokens, model="m").ssd)
        if depth:
            self.leased.append((tokens, depth, self.now + ttl))

    @rule(seconds=st.sampled_from([5, 15, 100]))
    def time_passes(self, seconds):
        self.now += seconds
        self.leased = [lease for lease in self.leased if lease[2] > self.now]
        inside(self.cache).leases._note_change()  # the note goes by the wall clock, and here that stands still

    @invariant()
    def leases_are_those_that_were_asked_for(self):
        """None is there that was not asked for, or that is over; the newest are there, unless their images left."""
        if not hasattr(self, "cache"):
            return
        wanted = [(depth, until) for _, depth, until in self.leased]
        stats, listed = self.cache.stats(), self.cache.leased()
        for leased in listed:
            assert any(depth == leased.tokens and until - self.now >= leased.seconds > 0 for depth, until in wanted)
        limit = stats.ssd.limit if stats.ssd is not None else stats.ram_limit
        assert stats.leases == len(listed)
        assert stats.leased_bytes <= max(leased.nbytes for leased in listed) * len(listed) if listed else True
        self.most_leased = max(limit, getattr(self, "most_leased", 0))
        assert stats.leased_bytes <= self.most_leased * self.cache.settings.lease_share

    @precondition(lambda self: self.roomy)
    @rule(seed=st.integers(0, 1 << 30))
    def trim_beside_leases(self, seed):
        """What is leased is there as deep as before, after all that is not has left RAM and come back."""
        depths = {tuple(tokens): self.cache.match(tokens, model="m").ssd for tokens, _, _ in self.leased}
        self.store([9 + (seed + i) % 5000 for i in range(300)])
        if "ssd_dir" in self.options:
            self.flush()
        for tokens, depth in depths.items():
            assert self.cache.match(list(tokens), model="m").ssd >= depth

    @rule(tokens=prompts, session=st.sampled_from(["a", "b"]), other=st.sampled_from(["", "a", "b"]))
    def end_session(self, tokens, session, other):
        """What another has used is there as deep as before; nothing is left that only this one used."""
        prompt = self.cache.prompt([7, *tokens], model="m")
        self.cache.store(prompt.in_session(session), self.make([7, *tokens]))
        self.stored.append([7, *tokens])
        self.cache.fetch(prompt.in_session(other), leave=0)
        self.cache.store(prompt.in_session(other), self.make([7, *tokens]))
        used = self.cache.match(prompt).ram
        self.cache.end_session(session)
        if other != session:
            assert self.cache.match(prompt).ssd >= used
        slots = inside(self.cache).storage.graph.slots.values()
        needed = [slot for slot in slots if slot.session == session and not (slot.pins or slot.leases)]
        assert all(slot.kind == "rows" for slot in needed)
        self.sure.clear()
        self.promised.clear()

    @rule(part=st.sampled_from([0, 2, 4]))
    def trim(self, part):
        self.cache.trim_to(self.cache.stats().ram_limit // part if part else 0)
        if "ssd_dir" not in self.options or self.options["spill"] == "drop":
            self.sure.clear()

    @precondition(lambda self: "ssd_dir" in self.options and self.options["ram"])
    @rule(ram=st.sampled_from([5_000, 20_000, 60_000]))
    def unindex(self, ram):
        """For a moment RAM has no room to index what the SSD has: that is known again after a restart."""
        self.cache.resize(ram=ram, wait=5)
        self.cache.resize(ram=self.options["ram"])
        self.sure.clear()
        self.promised.clear()

    @rule()
    def flush(self):
        assert self.cache.flush(30)
        if "ssd_dir" in self.options and self.roomy:  # else blocks are forgotten for want of RAM to know them by
            self.what_was_durable_is_had_as_deep()
            self.promised = {tuple(tokens): self.cache.match(tokens, model="m").ssd for tokens in self.stored}

    @precondition(lambda self: "ssd_dir" in self.options and self.options["spill_on_close"])
    @rule()
    def rest(self):
        """Nobody asks for a while: then no whole block is lost with RAM. Without spill_on_close, spill_idle="auto" is 0."""
        assert inside(self.cache).ssd.flush(30)
        while inside(self.cache).idle.write():
            assert inside(self.cache).ssd.flush(30)
        if self.roomy:
            in_ram = inside(self.cache).storage.graph.orders[0]
            assert all(slot.is_in(1) for slot in in_ram if slot.kind == "snapshot" or slot.node.is_whole)

    @rule(tokens=prompts, data=st.data(), missing=st.sampled_from([0, 1, 40, 200]), runs=RUNS)
    def store_beside_what_is_on_ssd_only(self, tokens, data, missing, runs):
        """Durable and gone from RAM; then a longer prompt that goes on from it, or from shortly before its end."""
        old = data.draw(st.sampled_from(self.stored)) if self.stored else tokens
        self.flush()
        self.trim(0)
        self.store([*cut(old, max(len(old) - missing, 1)), *spell(runs)])
        self.flush()

    @rule()
    def clear(self):
        self.cache.clear()
        self.promised.clear()
        self.stored.clear()
        self.sure.clear()
        self.pinned.clear()
        assert self.cache.stats().blocks == 0

    @rule()
    def restart(self):
        before, lasting = self.leased_now(), self.leased_now(lasting=not self.options["spill_on_close"])
        self._close()
        if "ssd_dir" not in self.options:
            self.stored.clear()
        if "ssd_dir" not in self.options or not self.options["spill_on_close"]:
            self.sure.clear()
        self.pinned.clear()
        self._open()
        if "ssd_dir" in self.options and self.roomy:
            after = self.leased_now()
            assert {*lasting} <= {*after}
            # One that ended since RAM could not index its images is there again, as these are.
            assert [lease for lease in after if lease in before] == [lease for lease in before if lease in after]

    @precondition(lambda self: self.roomy and "ssd_dir" in self.options)
    @rule(tokens=prompts)
    def killed_after_a_flush(self, tokens):
        """Another process finds what was promised, leases too."""
        self.store(tokens)
        self.lease(tokens, 40, "a")
        self.flush()
        leased = self.leased_now()
        with inside(self.cache).ssd._queue._lock:  # its writer rests
            subprocess.run(["cp", "-a", self.dir / "ssd", self.dir / "killed"], check=True)
        self._close()
        shutil.rmtree(self.dir / "ssd")
        (self.dir / "killed").rename(self.dir / "ssd")
        self.pinned.clear()
        self._open()
        assert self.leased_now() == leased

    def leased_now(self, lasting=False):
        """Return what names each lease. Lasting are those of which the SSD has all images, or is being given them."""
        self.cache.leased()  # what is over ends
        return [
            (lease.root, lease.tokens, lease.session, *(end.key for end in lease.ends))
            for lease in inside(self.cache).leases._leases
            if not lasting or all((slot.tiers | slot.pending) >> 1 & 1 for slot in lease.slots)
        ]

    @invariant()
    def sound(self):
        if hasattr(self, "cache"):
            self.cache.check_integrity()

    @invariant()
    def what_was_durable_is_had_as_deep(self):
        if hasattr(self, "cache"):
            for tokens, depth in self.promised.items():
                assert self.cache.match(tokens, model="m").ssd >= depth

    def teardown(self):
        if hasattr(self, "cache"):
            self._close()
            shutil.rmtree(self.dir)
        Leases.clock = staticmethod(time.monotonic)
        self.patch.undo()


class WindowMachine(CacheMachine):
    make = staticmethod(states.windowed)
    any_boundary = False


class NarrowMachine(CacheMachine):
    """A window of less than a block, so each store holds other rows of one; with room for all, so that nothing may go."""

    make = staticmethod(lambda tokens: states.windowed(tokens, size=40, chunk=20))
    any_boundary = False

    @initialize(close=st.booleans())
    def open(self, close):
        super().open(5_000_000, "both", "wait", close)


class KeepMachine(CacheMachine):
    """Fed one by one, a ring holds no more than its window."""

    make = staticmethod(lambda tokens: states.windowed(tokens, keep=4, size=200, chunk=1))
    any_boundary = False


class ChunkedMachine(CacheMachine):
    make = staticmethod(states.chunked)
    any_boundary = False


class HybridMachine(CacheMachine):
    make = staticmethod(states.hybrid)
    any_boundary = False
    recurrent = True


class LevelledMachine(CacheMachine):
    """Whole blocks are coded, each with levels of its own; a tail is kept as it is."""

    make = staticmethod(states.uneven)
    check = staticmethod(states.check_uneven)
    codec = "turboquant:8:sink_tokens=3"


class RecurrentMachine(LevelledMachine):
    """Recurrent state is coded, too."""

    make = staticmethod(states.recurrent)
    check = staticmethod(states.check_recurrent)
    any_boundary = False
    recurrent = True

    prompts = CacheMachine.prompts

    def _open(self):
        super()._open()
        inside(self.cache).storage.hot = HotPrompts(Budget(1_000_000), 1_000_000)

    @rule(tokens=prompts)
    def go_on_from_a_store(self, tokens):
        """Where RAM has the state, the live cache has the same, however it was computed before."""
        live = self.make(tokens)
        live[-1][1] = live[-1][1] * 1.001
        self.note_stored(tokens, self.cache.store(tokens, live, model="m", write_back_from=0).tokens)
        if self.roomy:
            self.sure.append(tokens)
        self.same_state(tokens, len(tokens), live)

    def as_images_give(self, tokens, depth, layers):
        """And the state, a hot prompt's, too."""
        super().as_images_give(tokens, depth, layers)
        self.same_state(tokens, depth, layers)

    def same_state(self, tokens, depth, layers):
        images = self.cache.lookup(tokens[:depth], model="m")
        if images is not None and images.tokens == depth:
            assert all(map(mx.array_equal, layers[-1].cache, images.dequantize()[-1].cache))


class TransformMachine(LevelledMachine):
    """Whole blocks are coded across layers, each in as many bytes as it takes. The basis may take more of a small RAM, and
    may be made while the cache runs.
    """

    prompts = CacheMachine.prompts
    codec = "transform:6"
    windows: tuple[int | None, ...] = (0, 0)

    @initialize(
        ram=st.sampled_from([450_000, 700_000, 5_000_000]),
        tier=st.sampled_from(["both", "ram only"]),
        spill=st.sampled_from(["drop", "wait"]),
        close=st.booleans(),
        calibrated=st.booleans(),
    )
    def open(self, ram, tier, spill, close, calibrated):
        self.patch.setattr(namespaces, "BASES_SHARE", 1)
        self.calibrated = calibrated
        super().open(ram, tier, spill, close)

    def _open(self):
        self.options["basis_dir"] = self.dir / "bases"
        if self.calibrated:
            shutil.copytree(uneven_bases(self.windows), self.dir / "bases", dirs_exist_ok=True)
        super()._open()
        self.cache.match([1], model="m")  # its basis is read
        assert (self.cache.stats().ram_reserved > 300_000) == self.calibrated

    @precondition(lambda self: not self.calibrated)
    @rule(tokens=prompts, runs=RUNS)
    def calibrate(self, tokens, runs):
        """What stands is hit as before, and what is stored next is transformed."""
        self.store(tokens)
        known = {tuple(tokens): self.cache.match(tokens, model="m").ssd for tokens in self.stored}
        self.calibrated = self.recodes = True
        shutil.copytree(uneven_bases(self.windows), self.dir / "bases", dirs_exist_ok=True)
        codec = self.cache.codec_of("m")
        if self.roomy:
            assert str(codec).startswith("transform")
            assert {
                known_tokens: self.cache.match(list(known_tokens), model="m").ssd for known_tokens in known
            } == known
        self.go_on_from_a_hit(tokens, runs)

    @rule(tokens=prompts, runs=RUNS)
    def go_on_from_a_hit(self, tokens, runs):
        """What is generated on is what is stored, by whichever codec the hit was coded."""
        longer = [*tokens, *spell(runs)]
        prompt = self.cache.prompt(longer, model="m")
        live, rest = self.cache.fetch(prompt, promote=True)
        if live is None:
            return
        depth = len(longer) - len(rest)
        states.fed_uneven(live, longer, depth)
        self.note_stored(longer, self.cache.store(prompt, live, write_back_from=depth).tokens)
        if self.roomy:
            self.sure.append(longer)
            self.as_images_give(longer, len(longer), live)

    @rule(tokens=prompts)
    def store_live_codes(self, tokens):
        """What a live cache has coded is decoded for the transform; plain ones hit it."""
        live = [
            TurboQuantKVCache(layer=i).filled_from(own) if type(own) is KVCache else own
            for i, own in enumerate(self.make(tokens))
        ]
        stored = self.cache.store(tokens, live, model="m")
        self.note_stored(tokens, stored.tokens)
        if self.roomy:
            assert stored.tokens == len(tokens)
            self.sure.append(tokens)
        self.fetch(tokens, 0)


class TransformedWindowMachine(TransformMachine):
    """The same of layers with windows, which have forgotten rows of their own."""

    make = staticmethod(states.uneven_windows)
    check = staticmethod(states.check_held)
    windows = states.windows_of(states.uneven_windows([]))
    any_boundary = False


class NeighboursMachine(CacheMachine):
    """What a block decodes to depends on its own rows and the codec, never on what else was stored: bit for bit."""

    prompts = CacheMachine.prompts
    check = staticmethod(states.check_held)
    any_boundary = False

    @initialize(
        tier=st.sampled_from(["both", "ram only"]),
        close=st.booleans(),
        codec=st.sampled_from(["turboquant:4:sink_tokens=3", "turboquant:3:4", "turboquant:4:4:plain", "transform:5"]),
        layers=st.sampled_from(sorted(states.LAYERS)),
        step=st.sampled_from([256, 512]),
    )
    def open(self, tier, close, codec, layers, step):
        self.codec, self.layers, self.step, self.turns = codec, layers, step, 0
        self.bases = uneven_bases(states.windows_of(states.LAYERS[layers]()))
        super().open(5_000_000, tier, "wait", close)

    def make(self, tokens):
        return states.fed_uneven(states.LAYERS[self.layers](), tokens, 0)

    def _open(self):
        self.options["basis_dir"] = self.bases
        super()._open()

    @rule(tokens=prompts, hot=st.booleans())
    def store(self, tokens, hot=False):
        self._store(tokens, self.asked(tokens), states.LAYERS[self.layers](), 0, hot)

    @rule(
        target=prompts,
        tokens=prompts,
        shared=st.sampled_from([20, 100, 234, 300, 511]),
        other=st.integers(3, 4),
        total=st.sampled_from([256, 300, 512, 800]),
        hot=st.booleans(),
    )
    def store_what_begins_alike(self, tokens, shared, other, total, hot):
        tokens = cut([*cut(tokens, shared), *[other] * total], total) or [other] * total
        self.store(tokens, hot)
        return tokens

    @rule(tokens=prompts, hot=st.booleans())
    def store_behind_a_hit(self, tokens, hot):
        """With a chunk that ends where it parts from what is stored."""
        prompt = self.asked(tokens)
        made, rest = self.cache.fetch(prompt, promote=True)
        layers, at = made if made is not None else states.LAYERS[self.layers](), len(tokens) - len(rest)
        point = self.cache.branch_point(prompt)
        if point > at:
            self._in_steps(prompt.first(point), tokens[:point], layers, at)
        self._store(tokens, prompt, layers, max(point, at), hot)

    @rule(tokens=prompts, restarted=st.booleans())
    def part_where_another_did(self, tokens, restarted):
        """A third prompt goes on from where the second one parted from the first."""
        self.turns += 1
        first, second, third = ([*tokens, 8_000 + self.turns, *[end] * 300] for end in (3, 4, 5))
        self.store(first)
        point = self.cache.branch_point(self.asked(second))
        assert may_end(second, point)
        self.store_behind_a_hit(second, hot=False)
        self._restart(restarted)
        made, rest = self.cache.fetch(self.asked(third), promote=True)
        depth = len(third) - len(rest)
        assert point <= depth <= len(tokens) + 1
        if made is not None:
            self.as_if_alone(third[:depth], made, to=depth)

    def _restart(self, restarted):
        """Restart where that loses nothing."""
        if restarted and "ssd_dir" in self.options and self.options["spill_on_close"]:
            self.restart()

    @rule(tokens=prompts, answer=st.sampled_from([5, 100, 300]), parted=st.booleans(), restarted=st.booleans())
    def part_behind_an_answer(self, tokens, answer, parted, restarted):
        """The next turn goes on from the last one's end, though an answer has made its block whole."""
        self.turns += 1
        tokens = [*tokens, 8_000 + self.turns]
        live, prompt = states.LAYERS[self.layers](), self.asked(tokens).with_ends(turn=len(tokens))
        self._in_steps(prompt, tokens, live, 0)
        self._in_steps(prompt.continued([6] * answer), [*tokens, *[6] * answer], live, len(tokens))
        if parted:
            following = [*tokens, *[7] * 300]
            ended = self.asked(following).with_ends(turn=len(following))
            self._in_steps(ended, following, states.LAYERS[self.layers](), 0)
        self._restart(restarted)
        made, rest = self.cache.fetch(self.asked([*tokens, 8, 9]), promote=True)
        depth = len(tokens) + 2 - len(rest)
        assert depth == len(tokens) or (parted and depth >= len(tokens) // 256 * 256)
        if made is not None:  # of less than a block nothing need be there
            self.as_if_alone(tokens[:depth], made, to=depth)

    def asked(self, tokens):
        return self.cache.prompt(tokens, model="m", whole_blocks=True)

    def _in_steps(self, prompt, tokens, live, at):
        states.stored_in_steps(self.cache, prompt, live, at, self.step, tokens)
        for _, end in chunks(at, len(tokens), self.step, prompt.media):
            self.note_stored(tokens[:end])

    def _store(self, tokens, prompt, live, at, hot):
        self._in_steps(prompt, tokens, live, at)
        if hot:
            self.cache.keep_hot(prompt, live)
        self.sure.append(tokens)
        self.as_if_alone(tokens, live)
        self.fetch(tokens, 0)

    @rule(tokens=prompts, leave=st.integers(0, 3))
    def fetch(self, tokens, leave, promote=True):
        """Of another question about the same picture all that comes before it is hit."""
        made, rest = self.cache.fetch(self.asked(tokens), leave=leave, promote=promote)
        for known in self.sure if promote else ():
            end = max((medium.end for medium in media_of(known)), default=0)
            if end <= min(common(known, tokens), len(tokens) - leave):
                assert len(tokens) - len(rest) >= end
        if made is not None:
            self.as_if_alone(tokens[: len(tokens) - len(rest)], made)

    def as_if_alone(self, tokens, layers, to=None):
        """Of whole blocks, or up to token `to`, all rows that are there on an empty cache, too."""
        whole = len(tokens) // 256 * 256 if to is None else to
        pictures = tuple(medium for medium in media_of(tokens) if medium.whole or medium.end <= len(tokens))
        alone = states.by_itself(tuple(tokens), self.codec, self.layers, self.step, self.bases, pictures)
        for own, other in zip(states.held(layers), alone, strict=True):
            for part in ("keys", "values"):
                assert [t for t in own[part].keys() & other[part] if t < whole and own[part][t] != other[part][t]] == []


class HotMachine(NeighboursMachine):
    """What is hot is in memory of its own and stays when images leave RAM: hits go on from it with images."""

    prompts = CacheMachine.prompts

    @initialize(
        tier=st.sampled_from(["both", "ram only"]),
        close=st.booleans(),
        codec=st.sampled_from(["raw", "turboquant:4:sink_tokens=3", "turboquant:3:4"]),
        step=st.sampled_from([256, 512]),
    )
    def open(self, tier, close, codec, step):
        super().open(tier, close, codec, "every token", step)

    def _open(self):
        super()._open()
        inside(self.cache).storage.hot = HotPrompts(Budget(1_000_000), 1_000_000)


class SharedDiskMachine(CacheMachine):
    """Others fill the disk and leave it, down to less than what the directory takes without an image."""

    @initialize(
        ram=st.sampled_from([120_000, 400_000, 5_000_000]),
        spill=st.sampled_from(["drop", "wait"]),
        close=st.booleans(),
    )
    def open(self, ram, spill, close):
        self.size = 30_000_000  # of the disk that others leave
        self.patch.setattr(writer, "DISK_POLL_SECONDS", 0.01)
        self.patch.setattr(open_directory, "free_space", lambda path: max(0, self.size - du(self.dir)))
        original = writer.write_file

        def write_file(path, data):
            if du(self.dir) + data.nbytes > self.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(path, data)

        self.patch.setattr(writer, "write_file", write_file)
        super().open(ram, "both", spill, close)
        self.roomy = False

    def _open(self):
        self.options["ssd_reserve"] = 50_000
        super()._open()

    @rule(size=st.sampled_from([100_000, 400_000, 1_000_000, 30_000_000]))
    def others_fill_the_disk_or_leave_it(self, size):
        self.size = size
        if not self.pinned:
            until(lambda: self.within_the_limit() and not self.cache.stats().ssd.queued_bytes)

    def within_the_limit(self) -> bool:
        ssd = self.cache.stats().ssd
        room = max(self.size, du(self.dir)) - 50_000  # what is there already can't be less than nothing free
        return ssd.limit <= room and (ssd.used <= ssd.limit or not ssd.files)

    @rule()
    def flush(self):
        self.cache.flush(30)

    @precondition(lambda self: self.options["spill_on_close"])
    @rule()
    def rest(self):
        """A full disk may take nothing of it."""
        inside(self.cache).idle.write()
        self.cache.flush(30)


MACHINES = [
    CacheMachine,
    WindowMachine,
    NarrowMachine,
    KeepMachine,
    ChunkedMachine,
    HybridMachine,
    LevelledMachine,
    RecurrentMachine,
    TransformMachine,
    TransformedWindowMachine,
    NeighboursMachine,
    HotMachine,
    SharedDiskMachine,
]


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_wrong_is_ever_fetched(machine, monkeypatch):
    from hypothesis.stateful import run_state_machine_as_test

    monkeypatch.setattr(ram, "LOOK_AGAIN", 0.001)  # what could be evicted by now is up to the machine alone
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=18, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )
