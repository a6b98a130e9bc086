"""What the tests of codecs share: each leaves the number of threads as it was."""

from collections.abc import Iterator

import pytest

from prefixcache.codecs.threads import set_threads, threads


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    before = threads()
    yield
    set_threads(before)
