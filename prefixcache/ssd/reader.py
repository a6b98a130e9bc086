"""The pool that reads images back, a file at a time on each thread; an image is believed only when its checksum holds."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

from prefixcache.image_format import Image
from prefixcache.metrics.histogram import Histogram
from prefixcache.ssd.entries import Entry
from prefixcache.ssd.errors import Corrupt, Unreadable
from prefixcache.ssd.files import DamagedFile, Misindexed, read_image
from prefixcache.ssd.open_directory import OpenDirectory
from prefixcache.ssd.queue import Queue


class Reader:
    """Reads files on `workers` threads. A file that is proved wrong is quarantined, and its row goes by way of the queue;
    where the row is what is wrong, the file stays. `_lock` guards the counters and `_reading`.
    """

    def __init__(self, opened: OpenDirectory, queue: Queue, workers: int):
        self._opened = opened
        self._queue = queue
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="prefixcache-ssd-reader")
        self._lock = threading.Lock()
        self._reading: set[Future[Image]] = set()
        self.read_files = self.read_bytes = self.corrupt = self.unreadable = 0
        self.read_seconds = Histogram()  # of an image that was read whole and checked

    def read(self, entry: Entry) -> Future[Image]:
        """Begin to read an image. The future raises Corrupt or Unreadable."""
        future = self._pool.submit(self._read, entry)
        with self._lock:
            self._reading.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Image]) -> None:
        with self._lock:
            self._reading.discard(future)

    def close(self, timeout: float | None) -> None:
        """Take no more reads, and wait for those under way, for at most so many seconds."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            reading = list(self._reading)
        wait(reading, timeout)

    def _read(self, entry: Entry) -> Image:
        path, began = self._opened.directory.file(entry.address), time.monotonic()
        try:
            image = self._image(path, entry)
        except DamagedFile as damage:
            if isinstance(damage, Misindexed):
                self._opened.index.doubtful = True
                self._queue.forget(entry)  # the writer opens the index again, and finds the file's size
            else:
                self._quarantine(path, entry, damage)
            with self._lock:
                self.corrupt += 1
            raise Corrupt(entry, str(damage)) from None
        except OSError as error:
            with self._lock:
                self.unreadable += 1
            raise Unreadable(entry, os.strerror(error.errno or 0)) from error
        self.read_seconds.observe(time.monotonic() - began)
        with self._lock:
            self.read_files += 1
            self.read_bytes += entry.nbytes
        return image

    @staticmethod
    def _image(path: str, entry: Entry) -> Image:
        """Return the image, also where its row alone is wrong and it was read whole."""
        try:
            return read_image(path, entry)
        except Misindexed as wrong:
            if wrong.image is None:
                raise
            return wrong.image

    def _quarantine(self, path: str, entry: Entry, damage: DamagedFile) -> None:
        try:
            moved = self._opened.move_away(path, str(damage), damage.identity)
        except OSError:  # a disk so broken that it can't rename: the row goes, and the next reconcile finds the file
            moved = True
        if moved or damage.identity is None:
            self._queue.forget(entry)
