"""Where bases are: files in one folder, found by model or by hash, in memory once.

A file is called after its model and its content, so nobody's is ever overwritten. What a basis is, `basis` says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import threading
from pathlib import Path
from weakref import WeakValueDictionary

from prefixcache.codecs.transform.basis import SUFFIX, Basis, BasisError, is_hash, model_of, read
from prefixcache.sync_folder import sync_folder

log = logging.getLogger("prefixcache")

# By hash, for all caches of the process, as long as one of them uses it.
_loaded: WeakValueDictionary[str, Basis] = WeakValueDictionary()
_lock = threading.Lock()


class Bases:
    """The bases in a folder, which need not be there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._warnings: set[str] = set()

    def of_model(self, model: str) -> Basis | None:
        """Return the basis of a model, by its identity; of several the file that was written last. None where there is
        none.
        """
        if is_part(model):
            return None
        wanted = _weights(model)
        for path in self.files():
            try:
                if _weights(model_of(path)) == wanted:
                    basis = self.read(path)
                    if _weights(basis.model) == wanted:
                        return basis
            except (BasisError, OSError) as error:
                warning = f"basis {path} is left out: {error}"
                if warning not in self._warnings:
                    self._warnings.add(warning)
                    log.warning("%s", warning)
        return None

    def of_hash(self, digest: str) -> Basis:
        """Return the basis of this hash. BasisError where it isn't here, or is damaged."""
        if not is_hash(digest):
            raise BasisError(f"basis {digest!r}: not 32 hex digits")
        with _lock:
            if (known := _loaded.get(digest)) is not None:
                return known
        path = self.path_of(digest)
        if path is None:
            raise BasisError(f"basis {digest} is not in {self.folder}: bring its file there, or calibrate the model")
        try:
            return self.read(path)
        except BasisError as error:
            raise BasisError(f"basis {path}: {error}") from None
        except OSError as error:
            raise BasisError(f"basis {path}: {error.strerror}") from None

    def changed_at(self) -> int:
        """Return when a file last came, went or was written, in nanoseconds; 0 where there is no folder. One that is copied
        there comes long before it is whole.
        """
        try:
            with os.scandir(self.folder) as entries:
                files = [entry for entry in entries if entry.name.endswith(SUFFIX)]
            written = [file.stat(follow_symlinks=False).st_ctime_ns for file in files]
            return max([self.folder.stat().st_mtime_ns, *written])
        except OSError:
            return 0

    def path_of(self, digest: str) -> Path | None:
        """Return the file that is called after this hash; None where there is none."""
        return next((path for path in self.files() if path.name.endswith(f"{digest}{SUFFIX}")), None)

    def files(self) -> list[Path]:
        """Return the files, newest first. A pipe would wait for its writer: only plain files count. Hidden ones are those
        that macOS puts beside others. A folder that may not be looked at has none.
        """
        dated = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode):
                            dated.append((-status.st_mtime_ns, self.folder / entry.name))
        return [path for _, path in sorted(dated)]

    def save(self, data: bytes) -> Path:
        """Write a basis's bytes to its file, durably, unless it is there already. BasisError for bytes that are none."""
        basis = Basis(data)
        path = self.folder / f"{_name(basis.model)}-{basis.hash}{SUFFIX}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(BasisError, OSError):
            if read(path).hash == basis.hash:
                os.utime(path)
                return path
        number, temporary = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync_folder(self.folder)
        return path

    def read(self, path: Path) -> Basis:
        """Return the basis of a file that is called after its content. BasisError for any other, OSError where it can't be
        read.
        """
        digest = path.name.removesuffix(SUFFIX)[-32:]
        with _lock:
            if (known := _loaded.get(digest)) is not None:
                return known
            basis = read(path)
            if basis.hash != digest:
                raise BasisError("its content is not what its name says; delete it and calibrate again")
            return _loaded.setdefault(digest, basis)


def is_part(model: str) -> bool:
    """Tell whether an identity is of what one of several ranks has of a model: no basis counts its layers and heads."""
    return any(said.startswith(("pp ", "tp ")) for said in model.split("|")[1:])


def _weights(model: str) -> str:
    """Return the part of an identity that says which weights they are: the name before it is for the reader, and a draft
    model that a server names behind it has layers after all of the model's.
    """
    return (model.partition("@")[2] or model).partition("|")[0]


def _name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model.partition("@")[0])[:64].strip("-.") or "model"
