"""Machines that share an engine, in any order of calls, with an engine that forgets, lies and fails: what a fetch gives is
right.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from prefixcache import PrefixCache
from tests.models import states
from tests.remote.dict_engine import DictEngine
from tests.remote.fleet import sent

KINDS = {
    "dense": states.sliceable,
    "window": lambda tokens: states.windowed(tokens, chunk=512),  # windows of two blocks are whole, and so are sent
    "recurrent": states.hybrid,
}
PROMPTS = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),  # blocks that prompts share
    st.integers(0, 300),  # tokens after them
)
MACHINES = (  # RAM alone; a small RAM with an SSD; the SSD almost alone
    {"ram": 3_000_000},
    {"ram": 400_000, "ssd": 20_000_000},
    {"ram": 3_000_000, "ssd": 20_000_000, "remote_admission": "always"},
)


class Fleet(RuleBasedStateMachine):
    @initialize(sealed=st.booleans())
    def begin(self, sealed: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "key").write_text("5a" * 32)
        (self.folder / "key").chmod(0o600)
        self.sealed, self.engine = sealed, DictEngine(names_at_once=4)
        self.patched = mock.patch("prefixcache.remote.client.open_engine", return_value=self.engine)
        self.patched.start()
        self.stored: list[tuple[tuple[list[int], int], str]] = []
        self.machines = [self._open(number) for number in range(len(MACHINES))]

    def _open(self, number: int) -> PrefixCache:
        values = dict(MACHINES[number])
        if "ssd" in values:
            values["ssd_dir"] = self.folder / str(number)
        key_file = self.folder / "key" if self.sealed else None
        return PrefixCache(codec="raw", remote="valkey://localhost", remote_key_file=key_file, **values)

    @staticmethod
    def _tokens(prompt) -> list[int]:
        blocks, rest = prompt
        return [*(100 * kind + i for i, kind in enumerate(blocks) for _ in range(256)), *range(rest)]

    @rule(number=st.integers(0, 2), prompt=PROMPTS, kind=st.sampled_from(sorted(KINDS)))
    def store(self, number, prompt, kind) -> None:
        tokens, cache = self._tokens(prompt), self.machines[number]
        if len(prompt[0]) > 1:
            self.stored.append((prompt, kind))
        for end in (*range(512, len(tokens), 512), len(tokens)):
            cache.store(tokens[:end], KINDS[kind](tokens[:end]), model=kind)

    @rule(number=st.integers(0, 2), prompt=PROMPTS, kind=st.sampled_from(sorted(KINDS)), promote=st.booleans())
    def fetch(self, number, prompt, kind, promote) -> None:
        tokens, cache = self._tokens(prompt), self.machines[number]
        made, rest = cache.fetch(tokens, model=kind, promote=promote)
        if made is not None:
            states.check(made, tokens[: len(tokens) - len(rest)])

    @rule(number=st.integers(0, 2))
    def send(self, number) -> None:
        stats = self.machines[number].stats().remote
        if stats.reading and stats.writing and not self.engine.down:
            sent(self.machines[number])

    @rule(number=st.integers(0, 2))
    def evict(self, number) -> None:
        self.machines[number].trim_to(0)

    @rule(number=st.integers(0, 2), place=st.integers(0, 1 << 16), call=st.sampled_from(["sizes", "get"]))
    def fetch_while_it_is_evicted(self, number, place, call) -> None:
        """A machine knows the first block of a prompt. While it asks for the rest, its RAM is emptied, and another prompt is
        stored.
        """
        if not self.stored:
            return
        (blocks, rest), kind = self.stored[place % len(self.stored)]
        other = ([(blocks[0] + 1) % 3, *blocks[1:]], rest)

        def at(called: str) -> None:
            if called == call:
                self.engine.at = lambda called: None
                self.evict(number)
                self.store(number, (other[0][:1], 0), kind)

        self.evict(number)
        self.store(number, (blocks[:1], 0), kind)
        self.engine.at = at
        for prompt in ((blocks, rest), other):
            self.fetch(number, prompt, kind, promote=True)
            self.engine.at = lambda called: None

    @rule(seed=st.integers(0, 1 << 32), how=st.sampled_from(["forget", "flip", "cut", "swap", "grow"]))
    def harm(self, seed, how) -> None:
        chance, images = random.Random(seed), self.engine.images
        if not images:
            return
        name, other = chance.choice(sorted(images)), chance.choice(sorted(images))
        data = bytearray(images[name])
        if how == "forget":
            del images[name]
        elif how == "swap":
            images[name], images[other] = images[other], images[name]
        elif how == "flip" and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            images[name] = bytes(data)
        else:
            images[name] = bytes(data[: len(data) // 2] if how == "cut" else data + b"0")

    @rule(down=st.sampled_from(["", "", "refused"]))
    def fail(self, down) -> None:
        self.engine.down = down

    @rule(number=st.integers(0, 2))
    def restart(self, number) -> None:
        self.machines[number].close()
        self.machines[number] = self._open(number)

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        for cache in getattr(self, "machines", ()):
            cache.check_integrity()
            stats = cache.stats()
            assert stats.ram_peak <= stats.ram_limit
            counters = stats.counters
            by_tier = counters.ram_hit_tokens + counters.ssd_hit_tokens + counters.remote_hit_tokens
            assert by_tier == counters.hit_tokens

    def teardown(self) -> None:
        if hasattr(self, "machines"):
            for cache in self.machines:
                cache.close()
            self.patched.stop()
            shutil.rmtree(self.folder)


def test_a_fleet_gives_what_was_stored_or_nothing():
    run_state_machine_as_test(
        Fleet, settings=settings(max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck))
    )
