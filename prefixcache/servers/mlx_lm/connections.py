"""Connections that may be slow or many: deadlines for what a client sends, and how many clients are served at once."""

from __future__ import annotations

import io
import resource
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress

HEAD_SECONDS = 30.0  # for a request's first line and its headers
BODY_SECONDS = 60.0  # for its body, and a second more for each BODY_RATE bytes of it
BODY_RATE = 64 << 10
UNREAD_SECONDS = 600.0  # that a client may leave its answer unread before it counts as gone
DRAIN_SECONDS = 0.5  # in which the rest of a refused request is read, so that its client reads the refusal
DRAIN = 1 << 20  # bytes of it, at most
MOST = 512  # connections at once, and at most half of the descriptors that the process may have


class SlowClient(Exception):
    """A client took too long to send its request."""


class TimedReader(io.RawIOBase):
    """What a client sends, until a deadline. `expect` sets the next one."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._until = 0.0
        self.expect(HEAD_SECONDS)

    def expect(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            return self._connection.recv_into(buffer)
        except TimeoutError:
            raise SlowClient("the request took too long to arrive: send it again, in one go") from None


def drain(connection: socket.socket) -> None:
    """Read what a client still sends of a request that was answered: closing before would take the answer from it."""
    until, left = time.monotonic() + DRAIN_SECONDS, DRAIN
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while left > 0 and (seconds := until - time.monotonic()) > 0:
            connection.settimeout(seconds)
            got = len(connection.recv(min(left, 1 << 16)))
            if not got:
                return
            left -= got


class Connections:
    """Those that are open, the oldest first. When there are too many, a new one takes the place of the oldest whose request
    has not arrived.

    Thread-safe: `_lock` guards `_arriving`, which says of each connection whether its request still arrives.
    """

    def __init__(self) -> None:
        self.limit = min(MOST, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 16))
        self._lock = threading.Lock()
        self._arriving: OrderedDict[socket.socket, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._arriving)

    def admit(self, connection: socket.socket) -> bool:
        """Return whether it may be served; then `closed` must be called of it. What it displaces is shut down."""
        displaced = None
        with self._lock:
            if len(self._arriving) >= self.limit:
                displaced = next((other for other, arriving in self._arriving.items() if arriving), None)
                if displaced is None:
                    return False
                del self._arriving[displaced]
            self._arriving[connection] = True
        if displaced is not None:
            with suppress(OSError):
                displaced.shutdown(socket.SHUT_RDWR)
        return True

    def arrived(self, connection: socket.socket) -> None:
        """Its request is whole: nothing displaces it any more."""
        with self._lock:
            if connection in self._arriving:
                self._arriving[connection] = False

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._arriving.pop(connection, None)
