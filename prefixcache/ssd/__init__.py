"""The SSD tier: images as files, an index beside them, a limit that holds. `Ssd` is for the cache; `survey`, `reconcile` and
`clear` are for the admin command. No MLX here.
"""

from prefixcache.ssd.clearing import Cleared, clear
from prefixcache.ssd.entries import Address, Entry, NamespaceRow
from prefixcache.ssd.errors import (
    Cancelled,
    Corrupt,
    DirectoryError,
    DirectoryHeld,
    IndexBroken,
    NewerFormat,
    SsdError,
    Unreadable,
)
from prefixcache.ssd.reconcile import Report, reconcile
from prefixcache.ssd.survey import Count, NamespaceSurvey, Survey, survey
from prefixcache.ssd.tier import Ssd, SsdStats
from prefixcache.ssd.writer import WriterEvents

__all__ = [
    "Address",
    "Cancelled",
    "Cleared",
    "Corrupt",
    "Count",
    "DirectoryError",
    "DirectoryHeld",
    "Entry",
    "IndexBroken",
    "NamespaceRow",
    "NamespaceSurvey",
    "NewerFormat",
    "Report",
    "Ssd",
    "SsdError",
    "SsdStats",
    "Survey",
    "Unreadable",
    "WriterEvents",
    "clear",
    "reconcile",
    "survey",
]
