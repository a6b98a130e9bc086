"""`Periodic` looks on after a look that raised."""

from __future__ import annotations

import threading

from prefixcache.metrics.periodic import Periodic


def test_a_look_that_raises_is_logged_and_the_next_comes(caplog):
    looks, over = iter([OSError("no"), None]), threading.Event()

    class Looking(Periodic):
        def look(self) -> bool:
            if (error := next(looks)) is not None:
                raise error
            over.set()
            return False

    Looking("test", 0.01, "it could not be looked at").start()
    assert over.wait(20)
    assert [record.getMessage() for record in caplog.records] == ["it could not be looked at"]
