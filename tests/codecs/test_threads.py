"""Threads that share out one call."""

from __future__ import annotations

import threading
import time

import pytest

from prefixcache.codecs.threads import set_threads, share_out


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("in_caller", [True, False])
def test_a_call_that_fails_leaves_no_thread_at_work(error: type[BaseException], in_caller: bool) -> None:
    """The memory that it works on may be another's once it has ended."""
    set_threads(3)
    caller, each_has_one = threading.current_thread(), threading.Barrier(3)
    done: list[int] = []

    def work(first: int, last: int) -> None:
        each_has_one.wait(60)
        here = threading.current_thread()
        if here is caller if in_caller else here.name.endswith("_0"):
            raise error
        if here is not caller:
            time.sleep(0.3)
        done.append(first)

    with pytest.raises(error):
        share_out(3, 1, 3, work)
    assert len(done) == 2
