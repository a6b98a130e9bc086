"""The admin key, on both sides: from a file, a variable or a flag. ValueError names which of them is bad."""

from __future__ import annotations

import os
from pathlib import Path

from prefixcache.cli.text import expanded

ADMIN_KEY = "PREFIXCACHE_ADMIN_KEY"


def admin_key_of(key: str | None, file: Path | None) -> bytes:
    """Return the key that was given, or that the variable has; b"" for none."""
    if key is not None and file is not None:
        raise ValueError("--admin-key with --admin-key-file: two keys; give one of them")
    if file is not None:
        try:
            return _checked(f"--admin-key-file {file}", expanded(file, "--admin-key-file").read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text"
            raise ValueError(
                f"--admin-key-file {file}: {reason}; name a file that has the key on its first line"
            ) from None
    if key is not None:
        return _checked("--admin-key", key)
    return _checked(ADMIN_KEY, os.environ[ADMIN_KEY]) if ADMIN_KEY in os.environ else b""


def _checked(source: str, text: str) -> bytes:
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{source}: no key in it; write one word of ASCII, such as `openssl rand -hex 32` prints")
    return key.encode()
