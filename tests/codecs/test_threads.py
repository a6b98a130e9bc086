"""Threads that share out one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from prefixcache.codecs import threads
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


def test_an_interrupt_while_threads_are_called_leaves_none_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(3)
    begun, submit = threading.Event(), threads._helpers.submit
    done: list[int] = []

    def interrupted(take: Callable[[], None]) -> Future[None]:
        if begun.is_set():
            raise KeyboardInterrupt
        future = submit(take)
        begun.wait(60)
        return future

    def work(first: int, last: int) -> None:
        begun.set()
        time.sleep(0.1)
        done.append(first)

    monkeypatch.setattr(threads._helpers, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        share_out(3, 1, 3, work)
    assert done == [0, 1, 2]
