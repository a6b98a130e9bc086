"""The SSD tier: images as files, an index beside them, a limit that holds. `Ssd` is for the cache, `reconcile` and
`survey` are for the admin command. No MLX here.
"""

from prefixcache.ssd.entries import Address, Entry, Namespace
from prefixcache.ssd.errors import (
    Cancelled,
    Corrupt,
    DirectoryError,
    DirectoryHeld,
    IndexBroken,
    NewerFormat,
    SsdError,
    StatisticsLost,
    Unreadable,
)
from prefixcache.ssd.reconcile import Finding, Report, reconcile
from prefixcache.ssd.survey import Count, Edge, NamespaceSurvey, Survey, survey
from prefixcache.ssd.tier import Ssd, SsdStats

__all__ = [
    "Address",
    "Cancelled",
    "Corrupt",
    "Count",
    "DirectoryError",
    "DirectoryHeld",
    "Edge",
    "Entry",
    "Finding",
    "IndexBroken",
    "Namespace",
    "NamespaceSurvey",
    "NewerFormat",
    "Report",
    "Ssd",
    "SsdError",
    "SsdStats",
    "StatisticsLost",
    "Survey",
    "Unreadable",
    "reconcile",
    "survey",
]
