"""Keys of the terminal, noticed while `top` waits for its next look: q and Esc end it."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ESCAPE = b"\x1b"  # alone; arrows and other keys send more behind it


@contextmanager
def end_keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for so many seconds, or until a key asks for the end: then it returns True.

    Within the block a terminal at standard input sends each key as it is pressed, without showing it; Ctrl-C stays a signal.
    Afterwards it is as it was. Where there is no terminal, or this process is in its background, the function only sleeps.
    """
    fd = _terminal()
    if fd is None:
        yield _sleep
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield lambda seconds: _ended_within(fd, seconds)
    finally:
        with suppress(termios.error):  # it was closed
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _terminal() -> int | None:
    """Return the descriptor of standard input where that is a terminal whose keys are ours."""
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (AttributeError, OSError, ValueError):  # closed, or none
        return None


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _ended_within(fd: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            return False
        try:
            pressed = os.read(fd, 64)
        except OSError:
            pressed = b""  # as of a terminal that is gone
        if pressed in (b"", ESCAPE) or (not pressed.startswith(ESCAPE) and b"q" in pressed.lower()):
            return True
    return False
