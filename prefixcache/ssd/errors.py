"""What can go wrong on the SSD, as types. No text here or anywhere in this package quotes tokens."""

from __future__ import annotations

from prefixcache.ssd.entries import Entry


class SsdError(Exception):
    """Any error of the SSD tier."""


class DirectoryError(SsdError):
    """The directory can't be used; the text names it, says why, and what to do."""


class DirectoryHeld(DirectoryError):
    """Another cache has the directory open; the text names its process, host and since when."""


class NewerFormat(DirectoryError):
    """A newer release wrote the directory, or a version from before the first; nothing in it was changed."""

    def __init__(self, what: str, number: int, known: int):
        super().__init__(
            f"{what} is of format {number}, this release knows {known}: a newer release or one from before 0.1.0 wrote it; "
            "upgrade prefixcache or name another directory"
        )


class IndexBroken(SsdError):
    """index.db is no database of ours, not a whole one, or says what no cache writes. The text quotes no value."""


class Corrupt(SsdError):
    """The file of `entry` is not what the index says; it was quarantined, and the entry is gone."""

    def __init__(self, entry: Entry, reason: str):
        super().__init__(f"{entry.kind} {entry.key.hex()}: {reason}; quarantined")
        self.entry, self.reason = entry, reason


class Unreadable(SsdError):
    """The file of `entry` could not be read now (no descriptor, an I/O error); it stays, a later read may succeed."""

    def __init__(self, entry: Entry, reason: str):
        super().__init__(f"{entry.kind} {entry.key.hex()}: {reason}; try again later")
        self.entry, self.reason = entry, reason


class Cancelled(SsdError):
    """The write was still waiting when its entry was deleted, or the tier closed."""


class LogHeld(SsdError):
    """Another program reads index.db in one transaction that does not end, so its log can't be cut, and has used up its
    allowance: nothing is written until that program is done.
    """
