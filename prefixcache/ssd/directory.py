"""The directory itself: whose it is, names, modes, and what it all takes of the disk.

Every path of the SSD tier is made here, from keys as hex digits; nothing that was read from a file becomes a path.
Knows neither images nor, but for the names of its tables, the index.
"""

from __future__ import annotations

import ctypes
import errno
import os
import plistlib
import re
import sqlite3
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from prefixcache.ssd.entries import FOLDERS, Address
from prefixcache.ssd.errors import DirectoryError
from prefixcache.sync_folder import sync_folder

INDEX = "index.db"
LOCK = "LOCK"
TMP, QUARANTINE = "tmp", "quarantine"
SUFFIX = ".safetensors"
_OURS = (*FOLDERS.values(), QUARANTINE, TMP)
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_KINDS = {folder: kind for kind, folder in FOLDERS.items()}
_DEBRIS = re.compile(r"[0-9]+\.safetensors|probe")  # what a writer makes in tmp/
_COPYING = re.compile(r"\.(?!_).*[0-9a-f]{32}\.safetensors.*|\.rsync-partial|\.~tmp~", re.DOTALL)
_SIGNATURE = re.compile(rb"pid \d+\nhost .+\nsince ")
# What tells other programs that the directory is a cache, so that backups and indexers leave 400,000 files alone: the tag of
# bford.info/cachedir, and on a Mac what Time Machine and Spotlight ask for.
TAG = "CACHEDIR.TAG"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This file is a cache directory tag created by prefixcache.
# For information about cache directory tags see https://bford.info/cachedir/
"""
_NO_SPOTLIGHT = ".metadata_never_index"
_NO_TIME_MACHINE = "com.apple.metadata:com_apple_backup_excludeItem"
_TABLES = {"namespace", "image", "meta"}
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,4})")
_OF_THE_SYSTEM = {  # what it makes on disks and in folders, beside files whose names begin with a dot
    "lost+found",
    "System Volume Information",
    "$RECYCLE.BIN",
    "Thumbs.db",
    "desktop.ini",
    "Icon\r",
    "@eaDir",
    TAG,
}


class Directory:
    """Paths below one root. Holds no state beyond the root's name."""

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.index = self.root / INDEX
        self.lock = self.root / LOCK
        self.tmp = self.root / TMP
        self.quarantine = self.root / QUARANTINE

    def folder(self, address: Address) -> str:
        kind, key = address
        return f"{self.root}/{FOLDERS[kind]}/{key[:1].hex()}"

    def file(self, address: Address) -> str:
        return f"{self.folder(address)}/{address[1].hex()}{SUFFIX}"

    @property
    def ours(self) -> bool:
        """Tell whether it is a cache's: a LOCK that one has signed, an index with our tables, or a LOCK or index of any
        content beside images. Other programs have files of these names too, and what lies in tmp/ is deleted.
        """
        if _is_signed(self.lock) or _is_index(self.index):
            return True
        return self._marked and self._has_images

    @property
    def proven(self) -> bool:
        """Tell whether it is a cache's beyond doubt: a signed LOCK and an index with our tables."""
        return _is_signed(self.lock) and _is_index(self.index)

    @property
    def blank(self) -> bool:
        """Tell whether nothing is here, or nothing that could be lost: an empty LOCK, empty folders of our names."""
        try:
            items = list(os.scandir(self.root))
        except FileNotFoundError:
            return True
        return not any(map(self._matters, items))

    @property
    def _marked(self) -> bool:
        return os.path.lexists(self.index) or os.path.lexists(self.lock)

    @property
    def _has_images(self) -> bool:
        return any(address is not None for address, _ in self.files())

    def _matters(self, item: os.DirEntry[str]) -> bool:
        """Tell whether a folder with this in it is not blank."""
        if item.name == LOCK:
            return not item.is_file(follow_symlinks=False) or not _is_begun(item.path)
        if item.name in _OURS:
            return not item.is_dir(follow_symlinks=False) or any(scan_ours(item.path))
        return not is_foreign(item.name)

    def require(self) -> None:
        """Raise DirectoryError unless it is there and a cache's: asked before anything is shown of it or changed in it."""
        try:
            if not self.root.is_dir():
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.stat(self.root)  # `Path.is_dir` of Python 3.14 does not raise that there are no rights
                what = "not a directory" if os.path.lexists(self.root) else "no such directory"
                raise DirectoryError(f"{str(self.root)!r}: {what}; check the name")
            if self.ours:
                return
            if self.blank:
                raise DirectoryError(f"{str(self.root)!r}: not a prefixcache directory: it is empty; check the name")
            raise DirectoryError(self._stranger())
        except OSError as error:
            raise refusal(self.root, error) from error

    def _stranger(self) -> str:
        if self._has_images:
            return (
                f"{str(self.root)!r}: has images of a cache, but no {INDEX} or {LOCK}; to have them taken in, make an "
                f"empty {LOCK} in it"
            )
        names = sorted(item.name for item in os.scandir(self.root) if self._matters(item))
        if ranks := rank_folders(self.root):
            return (
                f"{str(self.root)!r}: has a directory for each of {len(ranks)} ranks of a model; name one of them, such as "
                f"{str(min(ranks.values()))!r}"
            )
        return (
            f"{str(self.root)!r}: not a prefixcache directory: has {names[0]!r}, but no index, signed {LOCK} or image "
            "of a cache; name another directory, an empty one for a new cache"
        )

    def relative(self, path: str | os.PathLike[str]) -> str:
        return os.path.relpath(path, self.root)

    def create(self) -> None:
        """Make the root, DirectoryError with a remedy when that is not possible, or when it is somebody else's."""
        if os.path.lexists(self.root) and not self.root.is_dir():
            raise DirectoryError(f"ssd_dir={str(self.root)!r}: not a folder; move it or name another directory")
        try:
            if not self.blank and not self.ours:
                raise DirectoryError(f"ssd_dir={self._stranger()}")
            for folder in (*reversed(self.root.parents), self.root):
                if not folder.exists() and make_folder(folder):
                    sync_folder(folder.parent)
        except OSError as error:
            raise refusal(self.root, error) from error

    def furnish(self) -> None:
        """Make the folders below the root, 0700 each, and mark it as a cache for programs that make backups."""
        for name in _OURS:
            path = self.root / name
            try:
                if make_folder(path):
                    sync_folder(self.root)
                mode = os.lstat(path).st_mode
                if not stat.S_ISDIR(mode):
                    raise DirectoryError(f"{str(path)!r}: not a folder (a link or a file); move it away")
                if stat.S_IMODE(mode) != 0o700:
                    os.chmod(path, 0o700)
            except OSError as error:
                raise refusal(path, error) from error
        mark_as_cache(self.root)

    def files(self) -> Iterator[tuple[Address | None, os.DirEntry[str]]]:
        """Yield everything inside the image folders but what `is_foreign`; None for a name that no image has."""
        for folder, kind in _KINDS.items():
            for sub in scan_ours(self.root / folder):
                if not _holds(sub):
                    yield None, sub
                    continue
                for item in scan_ours(sub.path):
                    fits = _NAME.fullmatch(item.name) and item.name.startswith(sub.name)
                    plain = fits and item.is_file(follow_symlinks=False)
                    yield ((kind, bytes.fromhex(item.name.removesuffix(SUFFIX))) if plain else None), item

    def strays(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files in tmp/ that have a name of ours: debris, unless a writer is at work."""
        if not os.path.islink(self.tmp):
            for item in scan(self.tmp):
                if _DEBRIS.fullmatch(item.name) and not item.is_dir(follow_symlinks=False):
                    yield item

    def links(self) -> Iterator[os.DirEntry[str]]:
        """Yield what stands where a two-digit folder should and leads elsewhere."""
        for folder in _KINDS:
            yield from (sub for sub in scan_ours(self.root / folder) if sub.is_symlink())

    def names(self) -> dict[str, set[str]]:
        """Return, by kind, what is in its folder: of an image the key as hex digits, of what is none its whole name."""
        names: dict[str, set[str]] = {
            kind: {i.name for i in scan_ours(self.root / folder) if not _holds(i)} for folder, kind in _KINDS.items()
        }
        for folder in self.image_folders():
            kind = _KINDS[os.path.basename(os.path.dirname(folder))]
            names[kind].update(name.removesuffix(SUFFIX) for name in os.listdir(folder) if not is_foreign(name))
        return names

    def image_folders(self) -> dict[str, int]:
        """Return the real bytes of every two-digit folder."""
        return {
            sub.path: disk_of(sub.stat(follow_symlinks=False))
            for folder in _KINDS
            for sub in scan_ours(self.root / folder)
            if sub.is_dir(follow_symlinks=False)
        }

    def sync(self) -> None:
        """Make durable, by fsync, every folder and the root's name: a process that was killed may have left names that are
        not durable.
        """
        with suppress(PermissionError):  # the parent may be another user's
            sync_folder(self.root.parent)
        for folder in (str(self.root), *(f"{self.root}/{name}" for name in _OURS), *self.image_folders()):
            with suppress(FileNotFoundError):
                sync_folder(folder)

    def size(self) -> int:
        """Return the real bytes of the root and all below it that is ours."""
        return tree_size(self.root) + disk_at(self.root / TAG)

    def upper(self) -> int:
        """Return the real bytes of the root and all in it, except the index's files and what lies inside our folders."""
        total = disk_of(os.stat(self.root)) + disk_at(self.root / TAG)
        for item in scan_ours(self.root):
            if item.name.startswith(INDEX):
                continue
            ours = item.name in _OURS or not item.is_dir(follow_symlinks=False)
            total += disk_of(item.stat(follow_symlinks=False)) if ours else tree_size(item.path)
        return total


def identity_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def require_plain(path: Path) -> None:
    """Raise DirectoryError for what is neither missing nor a file with this name alone: what is written here would be written
    elsewhere, too, and a pipe would be waited for.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refusal(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DirectoryError(f"ssd_dir: {str(path)!r} is a link, a folder or a device, not a file: move it away")
    if status.st_nlink > 1:
        raise DirectoryError(
            f"ssd_dir: {str(path)!r} is another name of a file elsewhere (a hard link): copy it or move it away"
        )


def identity_at(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the device and inode of what is at `path` now; None when nothing is."""
    try:
        return identity_of(os.stat(path, follow_symlinks=False))
    except OSError:
        return None


def lock_text(lock: str | Path) -> bytes:
    """Return what a LOCK begins with; nothing of what is no plain file."""
    fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(fd, 1000, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def _is_begun(lock: str) -> bool:
    """Tell whether a LOCK says nothing, or what a crash leaves of a signature: its beginning, or NULs where it was to be."""
    text = lock_text(lock).rstrip(b"\0")
    return len(text) < 500 and text[:4] == b"pid "[: len(text)]


def rank_folders(root: Path) -> dict[int, Path]:
    """Return, by rank, the folders below a root in which the ranks of one model have theirs: see `PrefixCache(group=)`."""
    try:
        folders = [item.name for item in os.scandir(root) if item.is_dir()]
    except OSError:
        return {}
    return dict(sorted((int(name[1]), root / name[0]) for name in map(_RANK.fullmatch, folders) if name))


def rank_folder(root: Path, rank: int) -> Path:
    return root / f"rank-{rank}"


def _is_signed(lock: Path) -> bool:
    try:
        return _SIGNATURE.match(lock_text(lock)) is not None
    except PermissionError:
        raise
    except OSError:
        return False


def _is_index(path: Path) -> bool:
    """Tell whether it is an SQLite database with our tables. Leaves no trace, and asks for no lock."""
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError:
        return False
    return tables >= _TABLES


def _set_attribute(path: Path, name: str, value: bytes) -> None:
    """Call setxattr of macOS, which Python's os lacks there. What can't be set is left."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).setxattr(os.fsencode(path), name.encode(), value, len(value), 0, 0)


def mark_as_cache(root: Path) -> None:
    """Make the marks that are missing. Whatever stands in their place stays, and what can't be made is no error."""
    _make_file(root / TAG, _TAG_TEXT)
    if sys.platform == "darwin":
        _make_file(root / _NO_SPOTLIGHT, b"")
        _set_attribute(root, _NO_TIME_MACHINE, plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY))


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


def refusal(path: Path, error: OSError | sqlite3.Error) -> DirectoryError:
    """Turn an error about the directory or its index into a text that says what to do."""
    if isinstance(error, sqlite3.Error):
        return DirectoryError(f"ssd_dir: {str(path)!r}: index: {error}: check the disk, its room and who else opens it")
    kept = f"user {os.geteuid()} may not read or write it; change its owner or mode, or name another directory"
    remedy = {
        errno.EACCES: kept,
        errno.EPERM: kept,
        errno.EROFS: "mount its disk for writing, or name another directory",
        errno.ENOSPC: "no space left on its disk; make room or name another directory",
        errno.ENOTDIR: "a part of the path is a file; name another directory",
        errno.ELOOP: "a link is in its place; move it away",
        errno.EISDIR: "a folder is in its place; move it away",
    }.get(error.errno or 0, "check the disk and the path")
    return DirectoryError(f"ssd_dir: {str(path)!r}: {os.strerror(error.errno or 0)}: {remedy}")


def make_folder(path: str | os.PathLike[str]) -> bool:
    """Make a folder, 0700 whatever the umask. Returns False when it was there."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    if stat.S_IMODE(os.stat(path).st_mode) != 0o700:
        os.chmod(path, 0o700)
    return True


def remove_folder(path: str) -> None:
    """Remove a folder of ours; foreign files go with it where nothing else is in it. Raises OSError when it is not empty."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or any(scan_ours(path)):
            raise
        for item in scan(path):
            os.unlink(item.path)
        os.rmdir(path)


def remove_empty_folders(folders: Iterable[str]) -> None:
    """Remove two-digit folders that are empty; make those that stay, and the ones above, durable."""
    above = set()
    for folder in folders:
        with suppress(OSError):  # not empty
            remove_folder(folder)
            above.add(os.path.dirname(folder))
            continue
        with suppress(FileNotFoundError):
            sync_folder(folder)
    for folder in above:
        sync_folder(folder)


def disk_of(status: os.stat_result) -> int:
    """Return the bytes really taken, as `du` counts them."""
    return status.st_blocks * 512


def device_of(path: Path) -> int:
    """Return the device of what is at `path`, or of the nearest folder above where nothing is."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.stat(path).st_dev


def device_below(path: Path) -> int | None:
    """Return the device of the folder that the disk of `path` is mounted in; None for the disk that has all others in it."""
    device = device_of(path)
    for folder in path.parents:
        if folder.exists() and (above := os.stat(folder).st_dev) != device:
            return above
    return None


def disk_at(path: str | os.PathLike[str]) -> int:
    """Return `disk_of` what is at `path`; 0 when nothing is."""
    try:
        return disk_of(os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return 0


def tree_size(path: str | os.PathLike[str]) -> int:
    """Return the real bytes of a folder and all below it but what `is_foreign`, itself included; of a link its own."""
    total = disk_at(path)
    if os.path.islink(path):
        return total
    with suppress(PermissionError):
        for item in scan_ours(path):
            if item.is_dir(follow_symlinks=False):
                total += tree_size(item.path)
            else:
                total += disk_at(item.path)
    return total


def _holds(item: os.DirEntry[str]) -> bool:
    """Tell whether it is a two-digit folder."""
    return bool(re.fullmatch("[0-9a-f]{2}", item.name)) and item.is_dir(follow_symlinks=False)


def is_foreign(name: str) -> bool:
    """Tell whether a file or folder of this name is the system's or a user's, and none of ours: its name begins with one dot,
    as the ._NAME that macOS writes beside each file where a disk has no extended attributes, or the system makes it. Nothing
    here counts it, moves it or asks what is in it; it is deleted with a folder of ours that has nothing else. What rsync
    makes of an image while it copies it is ours.
    """
    return name in _OF_THE_SYSTEM or (re.match(r"\.[^.]", name) is not None and not _COPYING.fullmatch(name))


def scan_ours(path: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder but for what `is_foreign`."""
    return (item for item in scan(path) if not is_foreign(item.name))


def scan(path: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder; nothing where there is none."""
    try:
        with os.scandir(path) as items:
            yield from list(items)
    except (FileNotFoundError, NotADirectoryError):
        return
