"""Signals that end a program of ours: the first asks for a clean end, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Ending:
    """SIGTERM, SIGINT and SIGHUP within its block. `asked`: by a signal, by another rank, or since mlx.launch has ended;
    `signum` says by which signal, or as by which.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.signum = 0

    def __enter__(self) -> Ending:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else it is under nohup
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on) for number in numbers}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it the first signal ends the process."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._on)

    def ask(self, signum: int) -> None:
        """Ask for a clean end as this signal would, unless that was asked for already."""
        if not self.signum:
            self.signum = signum
            self.asked.set()

    def _on(self, signum: int, frame: Any) -> None:
        if self.signum:
            os._exit(128 + signum)
        self.signum = signum
        self.asked.set()
