"""`Periodic`: a thread that looks after something every so many seconds."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("prefixcache")


class Periodic:
    """`look` is one look, on any thread; `start` has a daemon thread do it until `stop`, or until a look returns False."""

    def __init__(self, name: str, period: float, failure: str):
        """`period`: seconds between two looks. `failure` is logged when one raises; the next comes all the same."""
        self._name, self._period, self._failure = name, period, failure
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to look, the first time after a period."""
        threading.Thread(target=self._run, name=f"prefixcache-{self._name}", daemon=True).start()

    def stop(self) -> None:
        """End the looks. Does not wait: whoever calls it may hold what the thread waits for."""
        self._stop.set()

    def look(self) -> bool:
        """Look once. Returns whether to look again."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            try:
                if not self.look():
                    return
            except Exception:
                log.exception(self._failure)
