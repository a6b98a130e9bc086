"""An engine on Valkey, or on a Redis that speaks the same: images are strings, and the server evicts by its own policy.

The connections are valkey-py's; its pool and its client are not used. A call has one deadline for all it does: connecting,
sending, and every read.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from valkey import exceptions
from valkey.connection import Connection, PythonRespSerializer

from prefixcache.remote.engine import PIECE, UNTRUSTED, EngineError, Sink

_LISTED = 1000
_HEAD = 64  # bytes that are read at first of an answer that goes into a sink
_LONGEST_ERROR = 1 << 12  # bytes
_SENT = 1 << 20  # bytes that are sent at once
_SLACK = 1 << 20  # bytes that the answers of a call may have beside the value
# What the server's errors begin with; the rest of their text may hold names and users.
_REASONS = {
    "MISCONF": "refused: MISCONF, it can't save its data to its disk",
    "READONLY": "refused: READONLY, it is a replica",
    "MASTERDOWN": "refused: MASTERDOWN, it is a replica without a primary",
    "CLUSTERDOWN": "refused: CLUSTERDOWN",
    "MOVED": "refused: MOVED, it is part of a cluster; name a server or proxy that takes all names",
}

Command = tuple[Any, ...]
Received = TypeVar("Received", bytes, int)


@dataclass(frozen=True)
class ValkeyAddress:
    """Where a server is, and who asks it. `tls`: whether it is spoken with TLS; `prefix`: of all keys."""

    host: str
    port: int
    tls: bool
    prefix: str = ""
    database: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)


class ValkeyStore:
    """Names are keys behind a prefix. An empty value counts as none, as STRLEN does.

    Thread-safe: a connection serves one call at a time, and `_lock` guards the two collections of them. A connection goes
    back to `_idle` only when every answer of its call was read. Any other end closes it, so no call reads another's answer.
    """

    names_at_once = 1 << 16

    def __init__(
        self, label: str, address: ValkeyAddress, *, timeout: float, connect_timeout: float, ca_file: Path | None
    ):
        """`ca_file`: whom to trust beside the system's authorities."""
        self.label = label
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._timeout = timeout
        context = ssl.create_default_context(cafile=ca_file) if address.tls else None
        if context is not None:
            context.load_default_certs()
        self._options: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "db": address.database,
            "username": address.username,
            "password": address.password,
            "connect_timeout": connect_timeout,
            "socket_read_size": PIECE,
            "lib_name": None,  # two round trips more, and an error where the server is old
            "lib_version": None,
            "tls": context,
        }
        self._lock = threading.Lock()
        self._idle: list[_TimedConnection] = []
        self._used: set[_TimedConnection] = set()
        self._closed = False

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Ask by STRLEN, which counts as a use for LRU and LFU alike, except while the server forks to save."""
        deadline = time.monotonic() + self._timeout
        sizes: list[int | None] = []
        for start in range(0, len(names), self.names_at_once):
            asked = names[start : start + self.names_at_once]
            sizes += self._lengths([self._key(name) for name in asked], deadline)
        return sizes

    def get(self, name: str, size: int | None, accept: Callable[[int], Sink | None]) -> bool:
        """Return False also when the value is no longer of the size that was accepted."""
        deadline = time.monotonic() + self._timeout
        key = self._key(name)
        if size is None:
            (size,) = self._lengths([key], deadline)
        if not size or (sink := accept(size)) is None:
            return False
        (is_whole,) = self._on_a_connection(lambda connection: [connection.pour(("GET", key), size, sink, deadline)])
        return bool(is_whole)

    def put(self, name: str, data: bytes | memoryview, listed: bool = False) -> None:
        key = self._key(name)
        commands: list[Command] = [("SET", key, memoryview(data).cast("B"))]
        if listed:
            commands.append(("SADD", self._list_of(name.rpartition("/")[0]), key))
        self._call(commands, time.monotonic() + self._timeout)

    def keep_listed(self, names: Sequence[str]) -> None:
        commands = [("SADD", self._list_of(name.rpartition("/")[0]), self._key(name)) for name in names]
        self._call(commands, time.monotonic() + self._timeout, 32 * len(commands))

    def names_under(self, folder: str) -> list[str]:
        """Return 1000 by chance where there are more. Those that were evicted are taken off the list."""
        deadline = time.monotonic() + self._timeout
        listed = self._list_of(folder)
        (answer,) = self._call([("SRANDMEMBER", listed, _LISTED)], deadline)
        members = [member for member in answer if isinstance(member, bytes)] if isinstance(answer, list) else []
        sizes = self._lengths(members, deadline)
        gone = [member for member, size in zip(members, sizes, strict=True) if not size]
        if gone:
            with suppress(EngineError):  # a replica, which takes no writes
                self._call([("SREM", listed, *gone)], deadline)
        there = (member for member, size in zip(members, sizes, strict=True) if size)
        return [member.decode("utf-8", "replace").removeprefix(self._prefix) for member in there]

    def about(self) -> dict[str, str]:
        """Ask INFO: a user who may not learns nothing of the policy."""
        commands, deadline = [("INFO", "server"), ("INFO", "memory")], time.monotonic() + self._timeout

        def ask(connection: _TimedConnection) -> list[Any]:
            answers = connection.ask(commands, deadline, _SLACK)
            return [False if isinstance(answer, exceptions.NoPermissionError) else answer for answer in answers]

        sections = self._on_a_connection(ask)
        if any(section is False for section in sections):
            not_told = "not told, its user may not ask INFO"
            return {"engine": "Valkey or Redis", "policy": not_told, "limit": not_told}
        text = b"\n".join(section for section in sections if isinstance(section, bytes))
        lines = text.decode("utf-8", "replace").splitlines()
        told = dict(line.split(":", 1) for line in lines if ":" in line)
        if "valkey_version" in told:
            engine = f"Valkey {told['valkey_version']}"
        else:
            engine = f"Redis {told.get('redis_version', 'of an unknown version')}"
        return {"engine": engine, "policy": told.get("maxmemory_policy", ""), "limit": told.get("maxmemory", "")}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [*self._idle, *self._used]
            self._idle.clear()
        for connection in connections:
            connection.break_off()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _list_of(self, folder: str) -> str:
        """Return the key of a folder's set; no name ends so."""
        return f"{self._prefix}{folder}/"

    def _lengths(self, keys: Sequence[str | bytes], deadline: float) -> list[int | None]:
        sizes = self._call([("STRLEN", key) for key in keys], deadline, 32 * len(keys)) if keys else []
        return [size if isinstance(size, int) and size > 0 else None for size in sizes]

    def _call(self, commands: Sequence[Command], deadline: float, limit: int = 0) -> list[Any]:
        """Return the answers, all commands in one round trip. Raise EngineError for the first that is an error, and for
        answers of many more bytes than `limit`.
        """
        return self._on_a_connection(lambda connection: connection.ask(commands, deadline, limit + _SLACK))

    def _on_a_connection(self, call: Callable[[_TimedConnection], list[Any]]) -> list[Any]:
        """Return what the call answers. Raise EngineError for the first answer that is an error."""
        connection = self._take()
        try:
            answers = call(connection)
        except BaseException as error:
            with self._lock:
                self._used.discard(connection)
                idle, self._idle = self._idle, []  # of the same age or older: a restart of the server cut them all
                closed = self._closed
            for broken in (connection, *idle):
                broken.disconnect()
            if not isinstance(error, (exceptions.ValkeyError, OSError, ValueError, AttributeError)):
                raise
            raise EngineError("closed" if closed else _why_lost(error)) from None
        with self._lock:
            self._used.discard(connection)
            closed = self._closed
            if not closed:
                self._idle.append(connection)
        if closed:
            connection.disconnect()
        for answer in answers:
            if isinstance(answer, Exception):
                raise _refusal(answer)
        return answers

    def _take(self) -> _TimedConnection:
        """Return the connection that was used last and still is one, or a new one, not connected yet."""
        while True:
            with self._lock:
                if self._closed:
                    raise EngineError("closed")
                connection = self._idle.pop() if self._idle else _TimedConnection(**self._options)
                self._used.add(connection)
            if connection.is_quiet():
                return connection
            connection.disconnect()
            with self._lock:
                self._used.discard(connection)


class _TimedConnection(Connection):
    """valkey-py's, with one deadline for all that a call waits for; valkey-py has one for each read only.

    It sends with the packer in Python, which does not copy the image as libvalkey's does.
    """

    def __init__(self, tls: ssl.SSLContext | None, connect_timeout: float, **options: Any):
        super().__init__(**options)
        self._tls, self._connect_timeout = tls, connect_timeout
        self._deadline, self._allowed = 0.0, 0
        self._command_packer = PythonRespSerializer(self._buffer_cutoff, self.encoder.encode)

    def ask(self, commands: Sequence[Command], deadline: float, limit: int) -> list[Any]:
        """Return an answer for each; where the server answers with an error, that. Raises when the connection is of no more
        use, and when more than `limit` bytes come.
        """
        self._deadline, self._allowed = deadline, limit
        self.connect()
        self.send_packed_command(self.pack_commands(commands), check_health=False)
        return [self._answer() for _ in commands]

    def pour(self, command: Command, nbytes: int, sink: Sink, deadline: float) -> Any:
        """Give the value that a command answers with to a sink as it comes. False where there is none of this size; where the
        server answers with an error, that.

        valkey-py would read all of it into buffers of its own, and copy it twice.
        """
        self._deadline, self._allowed = deadline, nbytes + _SLACK
        self.connect()
        self.send_packed_command(self.pack_command(*command), check_health=False)
        sock, head = self._sock, b""
        assert sock is not None
        while b"\r\n" not in head:
            head += _some(sock.recv(_HEAD))
            longest = {b"$": _HEAD, b"-": _LONGEST_ERROR}.get(head[:1], 0)
            if len(head) >= longest and b"\r\n" not in head:
                raise exceptions.InvalidResponse
        line, _, rest = head.partition(b"\r\n")
        if rest and (line[:1] == b"-" or line == b"$-1"):
            raise exceptions.InvalidResponse
        if line[:1] == b"-":
            error = self._parser.parse_error(line[1:].decode("utf-8", "replace"))
            if isinstance(error, exceptions.ConnectionError):
                raise error
            return error
        if line != b"$%d" % nbytes:
            if not re.fullmatch(rb"\$(-1|[0-9]{1,12})", line):
                raise exceptions.InvalidResponse
            if line != b"$-1":
                self.disconnect()  # the value, of another size, is still on its way
            return False
        sink(memoryview(rest)[:nbytes])
        end, left = rest[nbytes:], nbytes - len(rest)
        piece = memoryview(bytearray(min(PIECE, max(left, 0))))
        while left > 0:
            read = _some(sock.recv_into(piece[:left]))
            sink(piece[:read])
            left -= read
        while len(end) < 2:
            end += _some(sock.recv(2 - len(end)))
        if end != b"\r\n":
            raise exceptions.InvalidResponse
        return True

    def is_quiet(self) -> bool:
        """Tell whether it may be used: not connected yet, or open with nothing to read. An end of the stream can be read,
        too.
        """
        if self._sock is None:
            return True
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return not poll.poll(0)

    def break_off(self) -> None:
        """Let a call that waits on this connection fail at once. From any thread."""
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _answer(self) -> Any:
        try:
            return self.read_response()
        except exceptions.ConnectionError:  # LOADING is one of them
            raise
        except exceptions.ResponseError as error:
            # Something else under a name is a name that is missing, and no failure of the server.
            return None if str(error).startswith("WRONGTYPE") else error

    def _connect(self) -> Any:
        error: OSError = OSError("no address")
        for family, kind, protocol, _, address in _addresses(self.host, self.port, self._deadline):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.settimeout(min(self._connect_timeout, _left(self._deadline)))
                sock.connect(address)
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, server_hostname=self.host)
                return _Socket(sock, self)
            except OSError as failed:
                sock.close()
                error = failed
        raise error


class _Socket:
    """A socket that waits until its connection's deadline, whatever came before, and reads no more than that allows. As much
    of a socket as valkey-py uses.
    """

    def __init__(self, sock: socket.socket, connection: _TimedConnection):
        self._sock, self._connection = sock, connection
        self.fileno, self.close = sock.fileno, sock.close
        # Not TLS's: that forgets its keys first, and what another thread is sending would go in clear.
        self.shutdown = partial(socket.socket.shutdown, sock)

    def recv(self, size: int) -> bytes:
        self._sock.settimeout(_left(self._connection._deadline))
        data = self._sock.recv(size)
        self._count(len(data))
        return data

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        self._sock.settimeout(_left(self._connection._deadline))
        size = self._sock.recv_into(buffer)
        self._count(size)
        return size

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            self._sock.settimeout(_left(self._connection._deadline))
            rest = rest[self._sock.send(rest[:_SENT]) :]

    def _count(self, size: int) -> None:
        self._connection._allowed -= size
        if self._connection._allowed < 0:
            raise exceptions.InvalidResponse

    def settimeout(self, timeout: float | None) -> None:
        """Do nothing: the deadline holds, whatever valkey-py wishes."""


def _some(received: Received) -> Received:
    """Return what a socket gave, or how much. Raise ConnectionError at the end of the stream."""
    if not received:
        raise exceptions.ConnectionError("the server closed the connection")
    return received


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Do getaddrinfo, which waits as long as the system's resolver likes, until the deadline."""
    addresses: list[Any] = []

    def look_up() -> None:
        try:
            addresses.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            addresses.append(error)

    thread = threading.Thread(target=look_up, name="prefixcache-resolver", daemon=True)
    thread.start()
    thread.join(_left(deadline))
    if not addresses:
        raise TimeoutError
    if isinstance(addresses[0], OSError):
        raise addresses[0]
    return addresses


def _why_lost(error: BaseException) -> str:
    """Return the text of an EngineError for what a connection ended with."""
    if isinstance(error, exceptions.BusyLoadingError):
        return "refused: LOADING, it still loads its data"
    if isinstance(error, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
        return "refused: access denied"
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return "timed out"
    if isinstance(error, exceptions.InvalidResponse):
        return "it answered what no server of this kind does"
    text = str(error)
    if "max number of clients" in text:
        return "refused: it has as many clients as it takes"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return UNTRUSTED
    if "SSL" in text:
        return "TLS failed"
    if isinstance(error, exceptions.ResponseError):
        return str(_refusal(error))
    if "Name or service" in text or "nodename" in text or "resolution" in text or "No address" in text:
        return "its host name can't be resolved"
    if "refused" in text:
        return "connection refused"
    return "the connection was lost"


def _refusal(error: Exception) -> EngineError:
    """Return what an error that the server answered is here."""
    if isinstance(error, exceptions.OutOfMemoryError):
        return EngineError("full: it has reached its maxmemory, and evicts nothing")
    if isinstance(error, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
        return EngineError("refused: access denied")
    if isinstance(error, exceptions.ReadOnlyError):
        return EngineError(_REASONS["READONLY"])
    text = str(error)
    if text.startswith("DB index"):
        return EngineError("refused: it has no database of this number")
    code = re.match(r"[A-Z]{3,20}\b", text)
    return EngineError(_REASONS.get(code[0], f"refused: {code[0]}") if code else "refused")
