"""Notices when a rank dies or hangs. MLX's back ends wait for a peer that is gone, some of them for ever; so each rank has a
connection to rank 0, which tells the others at once of one that died, and in time of one that is silent or of a step that
never ends.

No MLX beyond the start: what waits in a collective can't be reached, only ended.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prefixcache.ranks.agreement import Ranks, named

log = logging.getLogger("prefixcache")

BEAT = 1.0  # seconds between two signs of life
SILENCE = 30.0  # seconds after which a rank without one is given up
HEARD = 1.0  # seconds that a rank which ends waits for the others to hear of it
CONNECTING = 15.0  # seconds that the lines may take to come up
HANG = 300.0  # seconds in one step of the model, unless the caller says otherwise

ALIVE, END, ASK, MEET = "alive", "end", "ask", "meet"


class Watch:
    """One rank's end of the lines. Call `step` at each step of the thread that generates, and `step_may_take_long` where it
    waits for work.

    `on_end(reason)`: called once, on a thread of the watch, when another rank has ended, or none goes on; `reason` is ""
    where rank 0 ended in order. `on_ask`: on rank 0, when another rank was asked to end.
    """

    def __init__(self, ranks: Ranks, on_end: Callable[[str], None], on_ask: Callable[[], None], *, hang: float = HANG):
        """Collective. Without lines, where a firewall is between the machines, it warns and watches nothing."""
        self.rank, self._size = ranks.rank, ranks.size
        self._on_end, self._on_ask, self._hang = on_end, on_ask, hang
        self._lock = threading.Lock()  # of what follows
        self._over = False
        self._may_take_long, self._steps = True, 0
        self._told: dict[int, int] = {}  # on rank 0: the steps of the others
        self._lines: dict[int, socket.socket] = {}
        self._ended: set[int] = set()  # ranks that have ended in order
        self._readers: list[threading.Thread] = []
        self._meetings, self._met_by_first, self._meeting = 0, 0, threading.Condition()
        connected = self._connect(ranks)
        missing = [rank for rank, there in enumerate(ranks.each(int(connected))) if not there]
        if missing:
            log.warning("%s can't reach rank 0, so a rank that dies may leave the others waiting", named(missing))
            self.close()
            return
        for rank, line in self._lines.items():
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each word by itself, at once
            reader = threading.Thread(target=self._read, args=(rank, line), name="prefixcache-watch", daemon=True)
            self._readers.append(reader)
            reader.start()
        threading.Thread(target=self._beat, name="prefixcache-watch", daemon=True).start()

    # -- for the thread that generates ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Hear that the thread that generates goes on."""
        self._steps += 1
        self._may_take_long = False

    def step_may_take_long(self) -> None:
        """Hear that its next step may take any time, such as loading a model."""
        self._may_take_long = True

    def meet(self) -> None:
        """Call before a collective for which rank 0 may have waited, such as the one about its next request: MLX waits by
        looking without a pause, so the others wait here until rank 0 comes. Nothing hangs on it.
        """
        self._meetings += 1
        for rank in self._lines if self.rank == 0 else ():
            self._send(rank, f"{MEET} {self._meetings}")
        if self.rank != 0 and self._lines:
            with self._meeting:
                self._meeting.wait_for(lambda: self._met_by_first >= self._meetings, BEAT)

    # -- ends -------------------------------------------------------------------------------------------------------------

    def ask_to_end(self) -> None:
        """Ask rank 0 to end all, since this rank was asked to end."""
        self._send(0, f"{ASK}\n")

    def close(self, reason: str = "") -> None:
        """Tell the others that this rank ends; "" in order. May be called again.

        Waits `HEARD` at most until they have heard it: the end of a process drops what it has not sent, where something
        that it has not read lies in the same line.
        """
        with self._lock:
            ended, self._over = self._over, True
        for rank, line in self._lines.items():
            if not ended:
                self._send(rank, f"{END} {reason}\n")
            _send_no_more(line)
        until = time.monotonic() + HEARD
        for reader in self._readers:
            reader.join(max(until - time.monotonic(), 0.0))

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        if self.rank == 0:
            for rank in self._lines:
                self._send(rank, f"{END} {reason}\n")
        self._on_end(reason)

    # -- the lines --------------------------------------------------------------------------------------------------------

    def _connect(self, ranks: Ranks) -> bool:
        """Connect rank 0 and each other rank. Return whether this rank has its own line."""
        listener, token = None, secrets.token_bytes(16)
        host = address_of_first()
        with suppress(OSError):
            listener = socket.create_server((host or "", 0)) if ranks.is_first else None
        port = listener.getsockname()[1] if listener is not None else 0
        hosts = [host] if host else _addresses()
        hosts, port, token = ranks.from_first((hosts, port, token))
        try:
            if ranks.is_first:
                return listener is None or self._accept(listener, token)
            return self._call(hosts, port, token)
        finally:
            if listener is not None:
                listener.close()

    def _accept(self, listener: socket.socket, token: bytes) -> bool:
        until = time.monotonic() + CONNECTING
        while len(self._lines) < self._size - 1 and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError):
                line, _ = listener.accept()
                line.settimeout(2.0)
                said = _exactly(line, len(token) + 2)
                rank = int.from_bytes(said[-2:], "little")
                if hmac.compare_digest(said[:-2], token) and 0 < rank < self._size:
                    line.sendall(token[::-1])
                    self._lines[rank] = line
                else:
                    line.close()
        return True  # who is missing says so itself

    def _call(self, hosts: list[str], port: int, token: bytes) -> bool:
        for host in hosts:
            with suppress(OSError):
                line = socket.create_connection((host, port), timeout=3.0)
                line.sendall(token + self.rank.to_bytes(2, "little"))
                if hmac.compare_digest(_exactly(line, len(token)), token[::-1]):
                    self._lines[0] = line
                    return True
                line.close()
        return False

    def _send(self, rank: int, text: str) -> None:
        with suppress(OSError, KeyError), self._lock:
            self._lines[rank].sendall(text.replace("\n", " ").encode() + b"\n")

    def _read(self, rank: int, line: socket.socket) -> None:
        line.settimeout(BEAT)
        data, silent = b"", 0.0  # in seconds of this process's own: while it is stopped, all are silent to it
        try:
            while silent < SILENCE:
                try:
                    received = line.recv(4096)
                except TimeoutError:
                    silent += BEAT
                    continue
                if not received:
                    break
                silent = 0.0
                *said, data = (data + received).split(b"\n")
                for words in said:
                    self._heard(rank, *words.decode(errors="replace").split(" ", 1))
        except OSError:
            pass
        _send_no_more(line)  # which says that all was heard
        if silent >= SILENCE:
            self._end(f"rank {rank} has given no sign of life for {SILENCE:.0f} s")
        elif rank not in self._ended:
            self._end(f"rank {rank} died")

    def _heard(self, rank: int, kind: str, text: str = "") -> None:
        text = text.strip()
        if kind == ALIVE:
            self._told[rank] = int(text)
        elif kind == MEET:
            with self._meeting:
                self._met_by_first = int(text)
                self._meeting.notify()
        elif kind == ASK:
            self._on_ask()
        elif kind == END:
            self._ended.add(rank)
            if text or self.rank != 0:  # in order the others end with rank 0
                self._end(text)

    def _beat(self) -> None:
        stuck, seen = 0.0, 0  # in seconds of this process's own, as above
        while not self._over:
            for rank in self._lines:
                self._send(rank, f"{ALIVE} {self._steps}")
            before, seen = seen, self._steps
            stuck = stuck + BEAT if seen == before and not self._may_take_long else 0.0
            # The ranks go step by step together: where one is stuck, rank 0 is.
            if self.rank == 0 and stuck > self._hang:
                steps = {0: self._steps, **self._told}
                behind = [rank for rank, count in sorted(steps.items()) if count == min(steps.values())]
                told = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(steps.items()))
                who = named(behind) if len(behind) < self._size else "all ranks"
                self._end(f"{who} hang: no step has ended for {self._hang:.0f} s (steps: {told})")
            time.sleep(BEAT)


def _send_no_more(line: socket.socket) -> None:
    with suppress(OSError):  # broken, or said before
        line.shutdown(socket.SHUT_WR)


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = line.recv(size - len(data))
        if not received:
            raise ConnectionResetError
        data += received
    return data


def address_of_first() -> str:
    """Return where MLX's back ends find rank 0, by what `mlx.launch` has set; "" where it says nothing."""
    hosts = os.environ.get("MLX_HOSTFILE")
    if hosts:
        with suppress(OSError, ValueError, LookupError, TypeError):
            first = json.loads(Path(hosts).read_text())[0]
            return str(first if isinstance(first, str) else first[0]).rpartition(":")[0]
    coordinator = os.environ.get("MLX_JACCL_COORDINATOR")
    return coordinator.rpartition(":")[0] if coordinator else os.environ.get("NCCL_HOST_IP", "")


def _addresses() -> list[str]:
    addresses = ["127.0.0.1"]
    with suppress(OSError):
        addresses += [str(about[4][0]) for about in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys(addresses))
