"""A disk whose reads end when a test lets them: the only fake here."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

from prefixcache import PrefixCache
from tests.inside import inside


@contextmanager
def slow_disk(cache: PrefixCache) -> Iterator[threading.Event]:
    """Reads of the cache's SSD end when the event is set, at the latest at the end of the block."""
    go, ssd = threading.Event(), inside(cache).ssd
    assert ssd is not None
    read = ssd.read

    def slowly(entry: Any) -> Future[Any]:
        real, late = read(entry), Future[Any]()
        threading.Thread(target=lambda: (go.wait(30), late.set_result(real.result()))).start()
        return late

    with mock.patch.object(ssd, "read", slowly):
        try:
            yield go
        finally:
            go.set()
