"""Threads that share out one call."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Any

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


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_thread_that_is_called_with_an_error_is_waited_for(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C comes at any moment; and a pool that can't start another thread has taken its work in all the same, which
    one that it has will do."""
    set_threads(3)
    begun, submit = threading.Event(), threads._helpers.submit
    done: list[int] = []

    def refused(*work: Any) -> None:
        submit(*work)
        begun.wait(60)
        raise error

    def work(first: int, last: int) -> None:
        if threading.current_thread() is not caller:
            begun.set()
            time.sleep(0.2)
        done.append(first)

    caller = threading.current_thread()
    monkeypatch.setattr(threads._helpers, "submit", refused)
    with pytest.raises(error) if error is KeyboardInterrupt else nullcontext():
        share_out(3, 1, 3, work)
    assert sorted(done) == [0, 1, 2]
