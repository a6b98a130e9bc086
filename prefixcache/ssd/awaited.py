"""Whether a directory's disk is there yet. A folder below a mount point that has no disk would fill the disk above it, so
where the setting `ssd_missing` says "wait", it is not made.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from prefixcache.metrics.periodic import Periodic
from prefixcache.ssd.errors import SsdError

log = logging.getLogger("prefixcache.ssd")

PERIOD = 5.0  # seconds between two looks
# Where systems mount what people plug in, and how many folders deep its names are.
AREAS = {"/Volumes": 1, "/mnt": 1, "/media": 2, "/run/media": 2}
FSTAB = Path("/etc/fstab")
MOUNTS = Path("/proc/self/mountinfo")
_RANK = re.compile(r"rank-[0-9]+")


class AwaitedDisk(Periodic):
    """Calls `open_ssd` once the directory can be had, and ends. What refuses the opening then is said once, and it is tried
    again.
    """

    def __init__(self, directory: Path, open_ssd: Callable[[], None]):
        super().__init__("disk", PERIOD, f"SSD {directory}: could not be opened; tried again")
        self._directory, self._open_ssd = directory, open_ssd
        self._told = ""

    def look(self) -> bool:
        """Open the SSD if its disk is there. Returns whether it is still to be opened."""
        return bool(why_absent(self._directory)) or not self._is_opened()

    def _is_opened(self) -> bool:
        try:
            self._open_ssd()
        except (SsdError, OSError, ValueError) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("SSD %s: its disk is there, but: %s; tried again", self._directory, error)
            return False
        log.info("SSD %s: its disk is there, and in use", self._directory)
        return True


def why_absent(directory: Path, fstab: Path = FSTAB) -> str:
    """Say why a directory is not there yet, in words that end with what to do; "" when it is there, or can be made at once.
    Below the user's home folders are made as they are missing. A link is where it leads.
    """
    if _RANK.fullmatch(directory.name):  # the directory of the rank of a model, in the one that was named
        directory = directory.parent
    return _why_absent(directory, fstab) or _why_absent(Path(os.path.realpath(directory)), fstab)


def _why_absent(directory: Path, fstab: Path) -> str:
    for point in _mount_points(fstab):
        if directory.is_relative_to(point) and not _is_mounted(point):
            return f"{str(point)!r} is not mounted; mount it"
    try:
        os.stat(directory)  # `Path.exists` of Python 3.14 raises nothing
        return ""
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # no rights, or a failing disk: to open it says so
        return ""
    for area, depth in AREAS.items():
        if directory.is_relative_to(area) and _is_empty_mount_point(directory, Path(area), depth):
            return "its disk is not mounted; mount it, or make the folder"
    if not directory.parent.exists() and not any(directory.is_relative_to(home) for home in _homes()):
        return f"no such folder: {str(directory.parent)!r}; mount its disk, or make it"
    return ""


def _homes() -> tuple[Path, ...]:
    """Return the user's home, by its name and where that leads; nothing of a user that the system does not know."""
    try:
        home = Path.home()
    except RuntimeError:
        return ()
    return home, Path(os.path.realpath(home))


def _mount_points(fstab: Path) -> list[Path]:
    """Return what the system mounts by itself or on demand, but for the disk that has all others."""
    try:
        lines = [line.split() for line in fstab.read_text(errors="replace").splitlines()]
    except OSError:
        return []
    points = [line[1].replace("\\040", " ") for line in lines if len(line) > 2 and not line[0].startswith("#")]
    return [Path(point) for point in points if point.startswith("/") and point != "/"]


def _is_mounted(point: Path) -> bool:
    """Tell whether something is mounted there: also a folder of the same disk, which `ismount` does not see."""
    if os.path.ismount(point):
        return True
    try:
        lines = [line.split() for line in MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:  # not Linux
        return False
    return str(point) in {line[4].replace("\\040", " ") for line in lines if len(line) > 4}


def _is_empty_mount_point(directory: Path, area: Path, depth: int) -> bool:
    """Tell whether a missing directory would be made in a folder in which a disk is to be mounted, or beside such folders."""
    above = [folder for folder in directory.parents if folder == area or folder.is_relative_to(area)]
    if any(map(_is_mounted, above[:-1])):
        return False
    nearest = next((folder for folder in above if folder.is_dir()), area)
    level = len(nearest.relative_to(area).parts)
    try:
        return level < depth or not any(os.scandir(nearest))
    except OSError:  # not readable: it is no folder of ours
        return True
