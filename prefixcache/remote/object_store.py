"""An engine on an object store, or on a folder that is used like one: S3, Google Cloud Storage, Azure and file://, by
obstore.

One request a call, no second try. obstore's errors quote URLs, names and the answers of servers: `_reason` keeps none of it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import InvalidPathError
from obstore.store import from_url

from prefixcache.remote.engine import PIECE, UNTRUSTED, EngineError, Sink
from prefixcache.remote.threads import DaemonThreads

_LISTED = 1000  # names of a folder at most; a page of S3
_PAGES = 10  # of a listing at most: names in deeper folders are listed too, and left out here
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_ROLE = re.compile(r"http://(169\.254\.(169\.254|170\.2)|metadata(\.google\.internal)?)/")
_LOST = re.compile(r"IncompleteMessage|IncompleteBody|UnexpectedEof|kind: Interrupted|kind: Decode")
_FULL = {"507", "QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"}
_made_in: dict[str, int] = {}  # the process that made the first store
_FULL_OS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ObjectStore:
    """Names are objects behind the URL's prefix. An empty object counts as none.

    `sizes` are HEADs, eight at once; object stores do not evict by use, so nothing becomes the most recently used. `listed`
    has no meaning here: `names_under` lists.
    """

    names_at_once = 8

    def __init__(
        self,
        label: str,
        url: str,
        *,
        timeout: float,
        connect_timeout: float,
        ca_file: Path | None = None,
        **config: str | bool,
    ):
        """Take `url` as obstore does, and `config` as more of its settings. Raises ValueError where these make no store, and
        in a fork of a process that has made one: obstore's threads are not in it, so its calls would wait for ever.
        """
        if _made_in.setdefault("pid", os.getpid()) != os.getpid():
            raise ValueError(
                f"remote={label}: this process is a fork of one that has used an object store or a folder; start it anew, "
                'with multiprocessing\'s "spawn"'
            )
        self.label = label
        self.kind = url.partition(":")[0]
        self._timeout = timeout
        self._closed = False
        self._folder: str | None = None
        self._made: Any = None
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=timeout),  # from the connection to the last byte of the body
            "connect_timeout": timedelta(seconds=connect_timeout),
            "allow_http": str(config.get("endpoint")).startswith("http://"),
            "allow_invalid_certificates": False,  # whatever the environment says
        }
        if ca_file is not None:
            options["root_certificate"] = ca_file.read_bytes()
        try:
            if self.kind == "file":
                self._folder = url.removeprefix("file://")
                if os.path.exists(self._folder) and not os.path.isdir(self._folder):
                    raise ValueError("a file, and no folder; name a folder")
            else:
                make: Any = from_url  # its overloads don't take settings by name
                self._made = make(url, client_options=options, retry_config={"max_retries": 0}, **config)
        except ValueError as error:
            raise ValueError(f"remote={label}: {error}") from None
        except Exception as error:
            raise ValueError(
                f"remote={label}: {_reason(error)}; check the URL and what the environment says of the store"
            ) from None
        self._pool = DaemonThreads(self.names_at_once, "prefixcache-objects")

    @property
    def _store(self) -> Any:
        """Return obstore's store. A folder's is made once the folder is there: its share may be mounted later."""
        if self._made is None:
            self._check_folder()
            self._made = obstore.store.LocalStore(self._folder)
        return self._made

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        deadline = time.monotonic() + self._timeout
        with self._errors():
            asked = [self._pool.submit(self._size, name) for name in names]
            try:
                sizes = [future.result(max(0.0, deadline - time.monotonic())) for future in asked]
            finally:
                for future in asked:
                    future.cancel()
            if None in sizes:
                self._check_folder()
            return sizes

    def get(self, name: str, size: int | None, accept: Callable[[int], Sink | None]) -> bool:
        if self._folder is not None:
            return self._read_file(name, accept)
        with self._errors():
            try:
                answer = obstore.get(self._store, name)
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                return False
            nbytes: int = answer.meta["size"]
        if not nbytes or (sink := accept(nbytes)) is None:
            return False
        with self._errors():
            _pour(map(memoryview, answer.stream(min_chunk_size=PIECE)), nbytes, sink)
        return True

    def _read_file(self, name: str, accept: Callable[[int], Sink | None]) -> bool:
        """Read a file without obstore, which would copy it once more."""
        with self._errors():
            try:  # a FIFO is not waited for
                fd = os.open(os.path.join(self._folder or "", name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                self._check_folder()
                return False
        try:
            status = os.fstat(fd)
            nbytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
            if not nbytes or (sink := accept(nbytes)) is None:
                return False
            memory = memoryview(bytearray(min(PIECE, nbytes)))
            with self._errors():
                _pour((memory[:read] for read in iter(lambda: os.readv(fd, [memory]), 0)), nbytes, sink)
        finally:
            os.close(fd)
        return True

    def put(self, name: str, data: bytes | memoryview, listed: bool = False) -> None:
        with self._errors():
            if self._folder is not None:
                self._make_folder(os.path.dirname(os.path.join(self._folder, name)))
            # Not in parts: these are several requests, each with a timeout, and what is cut off stays in the bucket.
            obstore.put(self._store, name, memoryview(data).cast("B"), use_multipart=False)

    def keep_listed(self, names: Sequence[str]) -> None:
        """Do nothing: the store lists what it has."""

    def names_under(self, folder: str) -> list[str]:
        with self._errors():
            return self._pool.submit(self._list, folder).result(self._timeout)

    def about(self) -> dict[str, str]:
        return {"engine": self.kind}

    def close(self) -> None:
        """Take no more calls. Those under way end by their timeout at the latest: obstore can't cancel one."""
        self._closed = True
        self._pool.close()

    def _list(self, folder: str) -> list[str]:
        """List a folder. Several pages are several requests, so the pool runs it: there is one time for all of them."""
        if self._folder is not None:
            pages = iter([obstore.list_with_delimiter(self._store, folder)["objects"]])
        else:
            pages = iter(obstore.list(self._store, folder, chunk_size=_LISTED))
        names: list[str] = []
        with suppress(InvalidPathError):  # of an object that is none of ours; what comes after it is not listed
            for _, page in zip(range(_PAGES), pages, strict=False):
                paths = (item["path"] for item in page if item["size"])
                names += [path for path in paths if path.rpartition("/")[0] == folder]
                if len(names) >= _LISTED:
                    break
        return names[:_LISTED]

    def _size(self, name: str) -> int | None:
        try:
            nbytes: int = obstore.head(self._store, name)["size"]
        except FileNotFoundError:
            return None
        return nbytes or None

    def _check_folder(self) -> None:
        """Raise EngineError where the folder is gone: what is missing in it is not known to be missing."""
        if self._folder is not None and not os.path.isdir(self._folder):
            raise EngineError("no such folder; mount it, or make it")

    def _make_folder(self, folder: str) -> None:
        """Make a folder, and those between it and the engine's own, which is never made. They are the owner's alone, whatever
        the umask.
        """
        if not os.path.isdir(folder):
            if folder == self._folder:
                self._check_folder()
            self._make_folder(os.path.dirname(folder))
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._closed:
            raise EngineError("closed")
        try:
            yield
        except EngineError:
            raise
        except FutureTimeout:
            raise EngineError("timed out") from None
        except Exception as error:
            if self._closed:
                raise EngineError("closed") from None
            raise _engine_error(error) from None


def _pour(pieces: Iterable[memoryview], nbytes: int, sink: Sink) -> None:
    """Give a sink so many bytes; EngineError where they are fewer."""
    for piece in pieces:
        sink(piece[:nbytes])
        nbytes -= len(piece)
        if nbytes <= 0:
            return
    raise EngineError("the answer was cut short")


def _engine_error(error: Exception) -> EngineError:
    number = _os_error(error)
    if number in _FULL_OS:
        return EngineError(f"full: {os.strerror(number).lower()}")
    status, code = _refusal(str(error))
    if status in _FULL or code in _FULL:
        return EngineError(f"full: {code or f'HTTP {status}'}")
    return EngineError(_reason(error))


def _reason(error: Exception) -> str:
    """Return the class of the problem. It has only numbers and fixed words of obstore's text."""
    text = str(error)
    if _NO_BUCKET.search(text):
        return "no such bucket"
    if _ROLE.search(text):
        return "no credentials in the environment, and the machine has no role that gives some"
    if "Account must be specified" in text:
        return "no account in the environment (AZURE_STORAGE_ACCOUNT_NAME)"
    status, code = _refusal(text)
    if status is not None:
        said = f"HTTP {status}" + (f", {code}" if code else "")
        if status == "404" or isinstance(error, FileNotFoundError):
            return f"no such bucket or path ({said})"
        return f"refused: access denied ({said})" if status in ("401", "403") else said
    if "InvalidCertificate" in text or "UnknownIssuer" in text:
        return UNTRUSTED
    if "kind: Timeout" in text or "TimedOut" in text:
        return "timed out"
    if "dns error" in text:
        return "its host name can't be resolved"
    number = _os_error(error)
    if number in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED) or _LOST.search(text):
        return "the connection was lost"
    if number is not None:
        return os.strerror(number).lower()
    if "kind: Connect" in text:
        return "can't be connected to"
    return f"failed ({type(error).__name__})"


def _refusal(text: str) -> tuple[str | None, str | None]:
    """Return HTTP's status and the store's word for it, where there are some."""
    status = re.search(r"\bstatus: (\d{3})\b", text) or re.search(r"status code: (\d{3})\b", text)
    code = re.search(r"<Code>([A-Za-z]{3,40})</Code>", text)
    return status and status[1], code and code[1]


def _os_error(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"Os \{\s*code: (\d+)", str(error)) or re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None
