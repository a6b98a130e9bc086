"""Threads that the end of the interpreter doesn't wait for, as it does for those of concurrent.futures."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads:
    """Runs calls on at most `most` daemon threads, started when they are needed. `_wake`'s lock guards all.

    An engine that hangs may hold them for as long as it likes.
    """

    def __init__(self, most: int, name: str):
        self._most, self._name = most, name
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Raise RuntimeError when closed, or when no thread can be started any more."""
        future: Future[Result] = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("closed")
            if self._idle <= len(self._waiting) and self._threads < self._most:
                self._start()
            self._waiting.append((future, call, arguments))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Cancel what has not begun; what has ends when it does."""
        with self._wake:
            self._closed = True
            cancelled = [future for future, _, _ in self._waiting]
            self._waiting.clear()
            self._wake.notify_all()
        for future in cancelled:
            future.cancel()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=f"{self._name}_{self._threads}", daemon=True).start()
        except RuntimeError:  # the interpreter ends: those that there are do the work
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _run(self) -> None:
        while True:
            with self._wake:
                self._idle += 1
                while not self._waiting and not self._closed:
                    self._wake.wait()
                self._idle -= 1
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            _do(*work)
            del work  # the result is whose it is


def _do(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*arguments)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
