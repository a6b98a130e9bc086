"""Random bytes and random changes to sound ones, for everything here that reads foreign bytes: a short run of the fuzzers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import targets

slow = settings(max_examples=15)
edits = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 12), st.binary(max_size=12)), max_size=5)


@pytest.fixture(scope="module", autouse=True)
def _gone_at_the_end():
    yield
    targets.clear()
    for made in (targets.sound_directory, targets.sound_index):
        made.cache_clear()


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
def test_sound_bytes_are_taken(name):
    target, seeds = targets.TARGETS[name]
    for seed in seeds():
        target(seed)


def changed(content: bytes, changes) -> bytes:
    """With stretches replaced by others, shorter or longer ones."""
    for at, length, new in changes:
        at %= len(content) + 1
        content = content[:at] + new + content[at + length :]
    return content


@pytest.mark.parametrize("name", sorted(set(targets.TARGETS) - {"index"}))
@given(changes=edits, junk=st.binary(max_size=200))
def test_changed_bytes_and_random_ones_break_no_promise(name, changes, junk):
    target, seeds = targets.TARGETS[name]
    target(junk)
    for seed in seeds():
        target(changed(seed, changes))


@slow
@given(st.binary(min_size=4, max_size=40))
def test_a_changed_index_is_read_or_rebuilt(data):
    targets.edited_index(data)


@settings(max_examples=4)
@given(st.binary(max_size=300))
def test_random_bytes_are_no_index(data):
    targets.index(data)
    targets.index(b"SQLite format 3\0" + data)


def test_a_table_whose_name_is_no_text_is_a_broken_index():
    content = targets.sound_index()
    at = content.index(b"CREATE TABLE image")
    targets.index(content[:at] + b"CREATE\xfeTABLE image" + content[at + 18 :])
