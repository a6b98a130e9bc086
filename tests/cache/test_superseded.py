"""What `flush()` promised is had as deep afterwards, whatever is stored beside it: nothing makes place for less."""

from __future__ import annotations

import pytest

from prefixcache import PrefixCache
from tests.models import states

CODECS = ["raw", "turboquant:4"]


def narrow(tokens):
    """A window of less than a block: each store holds other rows of one."""
    return states.windowed(tokens, size=40, chunk=20)


MAKERS = {"rotating": states.windowed, "narrow": narrow, "chunked": states.chunked}


class Kept:
    """A cache with an SSD, and what was promised of it."""

    def __init__(self, folder, make, codec="raw"):
        self.folder, self.make, self.codec = folder, make, codec
        self.promised: dict[tuple[int, ...], int] = {}
        self.cache = self.open()

    def open(self):
        return PrefixCache(ram="64MB", ssd_dir=self.folder / "ssd", ssd="64MB", codec=self.codec)

    def depth(self, tokens) -> int:
        return self.cache.match(tokens, model="m").ssd

    def store(self, tokens) -> None:
        """Store, flush and trim to the SSD."""
        assert self.cache.store(tokens, self.make(tokens), model="m").tokens == len(tokens)
        assert self.cache.flush(30)
        self.promised[tuple(tokens)] = len(tokens)
        self.check()
        self.cache.trim_to(0, wait=30)
        self.check()

    def check(self) -> None:
        self.cache.check_integrity()
        for tokens, depth in self.promised.items():
            assert self.depth(list(tokens)) >= depth

    def reopen(self) -> None:
        self.cache.close()
        self.cache = self.open()
        self.check()

    def check_answers(self) -> None:
        """Each is had as it was stored, where the codec is exact."""
        for tokens, depth in self.promised.items():
            assert self.cache.promote(list(tokens), model="m").result(30) >= depth
            made, rest = self.cache.fetch(list(tokens), model="m", leave=0)
            assert rest == []
            if self.codec == "raw":
                states.check(made, list(tokens))


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.mark.parametrize("codec", CODECS)
def test_a_prompt_on_ssd_only_is_had_as_deep_after_a_longer_one_goes_on_from_it(tmp_path, make, codec):
    prompt = list(range(2000))
    kept = Kept(tmp_path, make, codec)
    kept.store(prompt[:469])
    kept.store(prompt[:1100])
    kept.reopen()
    kept.check_answers()
    kept.cache.close()


@pytest.mark.parametrize("codec", CODECS)
def test_it_is_had_as_deep_beside_any_number_that_part_from_it(tmp_path, make, codec):
    prompt = list(range(469))
    kept = Kept(tmp_path, make, codec)
    kept.store(prompt)
    for other in range(4):
        kept.store([*prompt, *range(10_000 * (other + 1), 10_000 * (other + 1) + 700)])
    kept.store([*prompt, -5])
    kept.store(prompt[:460] + [7] * 30)
    kept.reopen()
    kept.check_answers()
    kept.cache.close()


@pytest.mark.parametrize("codec", CODECS)
def test_a_block_that_is_given_rows_keeps_those_that_are_on_ssd_only(tmp_path, make, codec):
    prompt = list(range(2000))
    kept = Kept(tmp_path, make, codec)
    kept.cache.store(prompt[:400], make(prompt[:400]), model="m")
    kept.store(prompt[:900])  # its second block has the rows that served 400, and is whole
    kept.promised[tuple(prompt[:400])] = 400
    kept.check()
    for end in (560, 600, 512, 440, 480, 700):
        kept.store([*prompt[:end], 5])
        kept.store(prompt[:end])
    kept.reopen()
    kept.check_answers()
    kept.cache.close()


def test_a_successor_that_has_every_row_takes_the_place_of_a_superseded_tail(tmp_path):
    prompt = list(range(450))
    kept = Kept(tmp_path, states.windowed)
    kept.cache.store(prompt[:400], states.windowed(prompt[:400]), model="m")
    assert kept.cache.flush(30)
    kept.cache.store(prompt, states.windowed(prompt), model="m")  # its tail takes the rows over from RAM
    assert kept.cache.flush(30)
    stats = kept.cache.stats()
    assert (stats.blocks, stats.images_on_ssd, stats.images_in_ram) == (2, 4, 4)
    assert kept.depth(prompt[:400]) == 400
    kept.cache.close()


def test_a_superseded_window_that_was_pinned_when_the_process_ended_is_deleted_at_the_next_opening(tmp_path):
    prompt = list(range(256))
    kept = Kept(tmp_path, narrow)
    kept.cache.store(prompt, narrow(prompt), model="m")
    assert kept.cache.flush(30)
    assert kept.cache.pin(prompt, model="m") == 256
    kept.cache.store(prompt, states.windowed(prompt, size=40, chunk=64), model="m")  # the same rows, and more
    assert kept.cache.flush(30)
    assert kept.cache.stats().images_on_ssd == 3
    kept.reopen()
    assert kept.cache.flush(30)
    assert kept.cache.stats().images_on_ssd == kept.cache.stats().ssd.files == 2
    kept.cache.close()
