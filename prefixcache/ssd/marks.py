"""What tells other programs that the directory is a cache, so that backups and indexers leave 400,000 files alone: the tag of
bford.info/cachedir, and on a Mac what Time Machine and Spotlight ask for.
"""

from __future__ import annotations

import ctypes
import os
import plistlib
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TAG = "CACHEDIR.TAG"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This file is a cache directory tag created by prefixcache.
# For information about cache directory tags see https://bford.info/cachedir/
"""
_NO_SPOTLIGHT = ".metadata_never_index"
_NO_TIME_MACHINE = "com.apple.metadata:com_apple_backup_excludeItem"


def _set_attribute(path: Path, name: str, value: bytes) -> None:
    """setxattr of macOS, which Python's os lacks there. What can't be set is left."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).setxattr(os.fsencode(path), name.encode(), value, len(value), 0, 0)


def mark_as_cache(
    root: Path,
    platform: str = sys.platform,
    set_attribute: Callable[[Path, str, bytes], None] = _set_attribute,
) -> None:
    """Make the marks that are missing. Whatever stands in their place stays, and what can't be made is no error."""
    _make_file(root / TAG, _TAG_TEXT)
    if platform == "darwin":
        _make_file(root / _NO_SPOTLIGHT, b"")
        set_attribute(root, _NO_TIME_MACHINE, plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY))


def _make_file(path: Path, content: bytes) -> None:
    with suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            whole = os.write(fd, content) == len(content)
        except OSError:  # a full disk
            whole = False
        finally:
            os.close(fd)
        if not whole:
            os.unlink(path)
