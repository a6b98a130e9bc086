"""The shim as Python sees it: built from shim.c, armed in a child that was started with it, asked what it saw.

What a call is, and what may become of it, are the tables of shim.c under the same names. Decision 0039 says why.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

LOOK, MAKE, WRITE, SYNC, RENAME, UNLINK, FOLDER, CUT, READ = (1 << n for n in range(9))
CHANGES = MAKE | WRITE | SYNC | RENAME | UNLINK | FOLDER | CUT
NEEDS_ROOM = MAKE | WRITE | SYNC | RENAME | FOLDER  # what a full disk refuses; late allocation makes fsync one of them
EVERY = CHANGES | LOOK | READ

COUNT, KILL_BEFORE, KILL_AFTER, TORN, FAIL_ONCE, FAIL_FROM, SHORT, STALL = range(8)


def unavailable() -> str:
    """Why there can be no shim here; "" when there can."""
    if sys.platform != "linux":
        return f"interposes glibc's file calls, and this is {sys.platform}"
    if platform.libc_ver()[0] != "glibc":
        return "interposes glibc's file calls, and the C library here is another"
    if shutil.which("cc") is None:
        return "no C compiler: cc is not on the PATH"
    if not os.access("/dev/shm", os.W_OK):
        return "thousands of runs need a folder in memory: /dev/shm is not writable"
    return ""


def build(folder: Path) -> Path:
    source, library = Path(__file__).with_name("shim.c"), folder / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


class Shim:
    """The one that this process was started with."""

    def __init__(self) -> None:
        self._calls = ctypes.CDLL(None)
        self._calls.shim_count.restype = self._calls.shim_fired.restype = ctypes.c_long
        self._calls.shim_say.argtypes = [ctypes.c_char_p]
        self._kept = (b"", -1, -1)

    def arm(self, root: str, mode: int, at: int, mask: int, error: int, report: int, journal: int = -1) -> None:
        """From now on count the calls below `root` whose kind is in `mask`, and let `mode` happen at the one numbered
        `at`."""
        self._kept = os.path.realpath(root).encode(), report, journal
        self.again(mode, at, mask, error)

    def again(self, mode: int, at: int, mask: int, error: int = 0) -> None:
        """Arm it anew, with the counts at 0."""
        folder, report, journal = self._kept
        self._calls.shim_arm(folder, mode, ctypes.c_long(at), mask, error, report, journal)

    def lift(self) -> None:
        """The disk is well again."""
        self._calls.shim_lift()

    @property
    def count(self) -> int:
        return int(self._calls.shim_count())

    @property
    def fired(self) -> int:
        """How many calls have failed or stood still."""
        return int(self._calls.shim_fired())

    def say(self, text: str) -> None:
        """A line to whoever watches, and into the journal."""
        self._calls.shim_say(f"{text}\n".encode())
