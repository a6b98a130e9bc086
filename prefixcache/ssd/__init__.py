"""The SSD tier: images as files, an index beside them, a limit that holds. `Ssd` is for the cache; `survey`, `reconcile`,
`prune`, `clear`, `export` and `import_archive` are for the admin command. No MLX here.
"""

from prefixcache.ssd.archive import ArchiveError
from prefixcache.ssd.choosing import NoSuchNamespace
from prefixcache.ssd.entries import Address, Entry, Namespace
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
from prefixcache.ssd.exporting import Exported, export
from prefixcache.ssd.importing import Imported, ImportFailed, import_archive
from prefixcache.ssd.reconcile import Finding, Report, reconcile
from prefixcache.ssd.removing import Cleared, Pruned, Selection, clear, prune
from prefixcache.ssd.survey import Count, Edge, NamespaceSurvey, Survey, survey
from prefixcache.ssd.tier import Ssd, SsdStats

__all__ = [
    "Address",
    "ArchiveError",
    "Cancelled",
    "Cleared",
    "Corrupt",
    "Count",
    "DirectoryError",
    "DirectoryHeld",
    "Edge",
    "Entry",
    "Exported",
    "Finding",
    "ImportFailed",
    "Imported",
    "IndexBroken",
    "Namespace",
    "NamespaceSurvey",
    "NewerFormat",
    "NoSuchNamespace",
    "Pruned",
    "Report",
    "Selection",
    "Ssd",
    "SsdError",
    "SsdStats",
    "Survey",
    "Unreadable",
    "clear",
    "export",
    "import_archive",
    "prune",
    "reconcile",
    "survey",
]
