"""URLs and texts without their passwords."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_PASSWORD = re.compile(r"([a-z0-9+]+:/+)[^/\s@]*@", re.IGNORECASE)  # a path of a URL has one slash


def redacted(url: str) -> str:
    """The URL without user, password and options: for logs, errors and statistics. Of one that may hold a password where none
    belongs, only the scheme.
    """
    try:
        parts = urlsplit(url)
        misplaced = "@" in parts.path + parts.query + parts.fragment
        _ = parts.port  # ValueError where it is none
        path = "/".join(part for part in parts.path.split("/") if part)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        scheme = url.partition("://")[0]
        return f"{scheme}://..." if scheme.isalnum() else "(not a URL)"
    if not parts.scheme:
        return "(not a URL)"
    if misplaced or (not host and parts.scheme != "file"):
        return f"{parts.scheme}://..."
    return f"{parts.scheme}://{host}" + (f"/{path}" if path else "")


def masked(text: str) -> str:
    """A text that may quote what a user gave: without the passwords of URLs."""
    return _PASSWORD.sub(r"\1...@", text)
