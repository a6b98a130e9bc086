"""A disk that is full, read-only, slow, or gone: RAM goes on serving, the writer tells, waits, and resumes by itself."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from prefixcache import DirectoryError, DirectoryHeld, PrefixCache
from prefixcache.ssd import queue, reconcile
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.lock import Lock, holder
from tests.inside import directory_of, inside, queue_of
from tests.models import states
from tests.models.states import fetched, prompt, put_prompts
from tests.waiting import until
from tools.faults.evidence import du


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(queue, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(queue, "LONGEST_DELAY", 0.1)


CACHE = {"ram": "20MB", "ssd": "20MB", "close_timeout": 5, "memory_reserve": 0}


def settled(cache: PrefixCache, root: Path) -> None:
    """Nothing is left of the trouble: no debris, no byte unaccounted for, nothing to repair."""
    until(lambda: cache.flush(5))
    assert not list((root / "tmp").iterdir())
    states.check_integrity(cache)
    assert cache.stats().ssd.disk == du(root)
    assert cache.stats().ssd.queued_bytes == cache.stats().ram_queued == 0


def mount(*arguments) -> int:
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


@contextmanager
def least_free(disk: Path) -> Iterator[list[int]]:
    """The least that was free on the disk within the block, looked at all the time."""
    least, ended = [free(disk)], threading.Event()

    def look() -> None:
        while not ended.is_set():
            least[0] = min(least[0], free(disk))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield least
    finally:
        ended.set()
        thread.join()


def holds(cache: PrefixCache, newest: range) -> None:
    """The newest prompts are on the SSD, and the oldest is not."""
    assert cache.promote(prompt(0), model="m").result(20) == 0
    for seed in newest:
        assert cache.promote(prompt(seed), model="m").result(20) == fetched(cache, seed) == 600


def test_a_limit_beyond_the_disk_is_said_and_the_newest_prompts_are_kept_above_the_reserve(opened, disk, caplog):
    mount("-o", "remount,size=20m", disk)
    cache = opened(ssd_dir=disk / "ssd", ssd="200GB", ram="2MB", ssd_reserve="2MB", spill="wait", spill_wait=60)
    assert "ssd=200GB is more than its disk has room for beside ssd_reserve=2MB" in caplog.text
    with least_free(disk) as least:
        for seed in range(600):  # 27 MB
            put_prompts(cache, seed)
            if not seed % 10:
                cache.flush(20)
        settled(cache, disk / "ssd")
    assert least[0] >= 2_000_000
    assert cache.stats().ssd.errors == 0
    assert cache.stats().ssd.limit < 20 << 20
    assert free(disk) < 4_000_000  # and what may be taken is taken
    cache.close()
    holds(opened(ssd_dir=disk / "ssd", ssd="200GB", ssd_reserve="2MB"), newest=range(550, 600))


def test_other_programs_files_have_the_oldest_images_deleted_and_their_end_gives_the_room_back(opened, disk):
    mount("-o", "remount,size=20m", disk)
    cache = opened(ssd_dir=disk / "ssd", ram="1MB", ssd="10MB", ssd_reserve="4MB")
    for seed in range(100):
        put_prompts(cache, seed)
        assert cache.flush(20)
    (disk / "ballast").write_bytes(bytes(free(disk) - 1_000_000))
    until(lambda: free(disk) >= 4_000_000)  # nothing is stored meanwhile
    assert cache.stats().ssd.errors == 0
    put_prompts(cache, 200)
    settled(cache, disk / "ssd")
    assert free(disk) >= 4_000_000
    assert cache.promote(prompt(200), model="m").result(20) == 600
    assert cache.promote(prompt(0), model="m").result(20) == 0
    (disk / "ballast").unlink()
    until(lambda: cache.stats().ssd.limit == 10_000_000)
    for seed in range(300, 400):
        put_prompts(cache, seed)
        assert cache.flush(20)
    settled(cache, disk / "ssd")
    assert du(disk / "ssd") > 7_000_000


def test_a_disk_full_to_the_last_byte_gives_up_the_oldest_images_for_the_newest(opened, disk):
    mount("-o", "remount,size=5m", disk)
    cache = opened(ssd_dir=disk / "ssd", ram="600KB", ssd_reserve=0)
    for seed in range(40):
        put_prompts(cache, seed)
        assert cache.flush()
    fill(disk)
    for seed in range(50, 65):
        cache.trim_to(0)  # else RAM writes the oldest again when it has been deleted from the SSD
        put_prompts(cache, seed)
        assert cache.flush(20)
    settled(cache, disk / "ssd")
    cache.close()
    holds(opened(ssd_dir=disk / "ssd", ssd_reserve=0), newest=range(55, 65))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_no_look_at_the_disk_shows_costs_the_oldest_images_and_no_error(
    opened, tmp_path, monkeypatch, number
):
    quota, original = 3_000_000, os.write
    cache = opened(ram="600KB")

    def write(fd, data):
        if ".safetensors" in os.readlink(f"/proc/self/fd/{fd}") and du(tmp_path / "ssd") + len(data) > quota:
            raise OSError(number, os.strerror(number))
        return original(fd, data)

    monkeypatch.setattr(os, "write", write)
    for seed in range(60):  # 5 MB
        put_prompts(cache, seed)
        until(lambda: cache.flush(5))
        cache.trim_to(0)  # else RAM writes the oldest again when it has been deleted from the SSD
    assert cache.stats().ssd.errors == 0
    states.check_integrity(cache)
    cache.close()
    holds(opened(), newest=range(50, 60))


def test_a_disk_that_is_full_of_other_files_costs_no_answer_and_is_used_when_there_is_room(opened, disk):
    ballast = fill(disk)
    with pytest.raises(DirectoryError, match="no space left"):
        opened(ssd_dir=disk / "ssd")
    ballast.unlink()
    cache = opened(ssd_dir=disk / "ssd")
    fill(disk)
    put_prompts(cache, *range(30))  # 1.3 MB
    cache.flush()
    assert all(fetched(cache, seed) == 600 for seed in range(30))
    ballast.unlink()
    mount("-o", "remount,size=30m", disk)
    until(lambda: cache.stats().ssd.limit == 20_000_000)  # the writer has looked
    put_prompts(cache, 50)
    settled(cache, disk / "ssd")
    cache.close()
    again = opened(ssd_dir=disk / "ssd")
    for seed in (*range(30), 50):
        assert again.promote(prompt(seed), model="m").result(20) == fetched(again, seed) == 600
    assert again.stats().counters.corrupt == 0


def test_a_full_disk_while_ram_must_let_go_loses_only_what_was_cold(opened, disk):
    cache = opened(ssd_dir=disk / "ssd", ram="600KB")
    for seed in range(40):
        put_prompts(cache, seed)
        assert fetched(cache, seed) > 0
        assert cache.stats().ram_held <= 600_000
    mount("-o", "remount,size=30m", disk)
    put_prompts(cache, *range(100, 110))
    settled(cache, disk / "ssd")
    until(lambda: cache.promote(prompt(109), model="m").result(20) == 600)


def test_a_closing_on_a_full_disk_ends_and_the_next_opening_finds_what_was_durable(opened, disk):
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, 1)
    assert cache.flush()
    put_prompts(cache, *range(10, 50))
    cache.close()
    mount("-o", "remount,size=30m", disk)
    again = opened(ssd_dir=disk / "ssd")
    states.check_integrity(again)
    for seed in range(45, 50):  # the newest, in the place of what was there
        assert again.promote(prompt(seed), model="m").result(20) == fetched(again, seed) == 600


def test_a_directory_on_a_read_only_file_system_can_be_looked_at_but_not_opened(opened, disk):
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, 1)
    cache.close()
    assert not mount("-o", "remount,ro", disk)
    with pytest.raises(DirectoryError, match="mount its disk for writing"):
        opened(ssd_dir=disk / "ssd")
    assert reconcile(disk / "ssd", dry_run=True, deep=True).clean
    assert "mount its disk for writing" in reconcile(disk / "ssd").error


def test_a_directory_that_vanishes_is_recreated_and_ram_is_written_to_it(opened, tmp_path):
    cache = opened()
    put_prompts(cache, *range(5))
    assert cache.flush()
    shutil.rmtree(tmp_path / "ssd")
    put_prompts(cache, 10, 11)
    until(lambda: cache.flush(5))
    assert all(fetched(cache, seed) == 600 for seed in (*range(5), 10, 11))
    for seed in range(20, 24):
        put_prompts(cache, seed)
        until(lambda: cache.flush(5))
    settled(cache, tmp_path / "ssd")
    cache.close()
    again = opened()
    assert again.promote(prompt(23), model="m").result(20) == fetched(again, 23) == 600


def test_what_vanished_with_the_directory_is_a_miss_and_can_be_stored_again(opened, tmp_path):
    cache = opened()
    put_prompts(cache, *range(5))
    assert cache.flush()
    cache.trim_to(0)
    shutil.rmtree(tmp_path / "ssd")
    for seed in range(5):
        assert cache.promote(prompt(seed), model="m").result(20) == 0
    cache.flush(5)
    put_prompts(cache, *range(5))
    until(lambda: cache.flush(5))
    cache.trim_to(0)
    for seed in range(5):
        assert cache.promote(prompt(seed), model="m").result(20) == fetched(cache, seed) == 600
    settled(cache, tmp_path / "ssd")


@contextmanager
def stalled(monkeypatch, *calls: str) -> Iterator[None]:
    """These calls on files take until the block ends."""
    resumed = threading.Event()
    with monkeypatch.context() as patch:
        for name in calls:
            original = getattr(os, name)

            def call(*args, original=original, **more):
                resumed.wait(60)
                return original(*args, **more)

            patch.setattr(os, name, call)
        try:
            yield
        finally:
            resumed.set()


def test_a_stalled_disk_stalls_no_caller(opened, tmp_path, monkeypatch):
    cache = opened(ram="600KB", spill_queue="200KB")
    put_prompts(cache, *range(6))
    assert cache.flush()
    done = threading.Event()

    def serve() -> None:
        for seed in range(100, 130):
            put_prompts(cache, seed)
            assert fetched(cache, seed) > 0
            assert cache.match(prompt(seed), model="m").ram > 0
            stats = cache.stats()
            assert stats.ram_held <= 600_000
            assert stats.ram_queued <= 200_000 + 40_000
        done.set()

    with stalled(monkeypatch, "fsync"):
        threading.Thread(target=serve, daemon=True).start()
        assert done.wait(60)
        assert cache.stats().counters.dropped > 0
        assert not cache.flush(0.1)
    settled(cache, tmp_path / "ssd")


def test_promotions_that_a_disk_keeps_waiting_hold_up_nobody_and_end(opened, monkeypatch):
    cache = opened()
    put_prompts(cache, *range(6))
    assert cache.flush()
    cache.trim_to(0)
    with stalled(monkeypatch, "readv"):
        waiting = [cache.promote(prompt(seed), model="m") for seed in range(6)]
        put_prompts(cache, 50)
        assert fetched(cache, 50) == 600
        assert not any(future.done() for future in waiting)
    assert [future.result(20) for future in waiting] == [600] * 6
    assert cache.stats().ram_reserved == 0


@pytest.mark.parametrize("reading", [False, True])
def test_a_closing_on_a_stalled_disk_ends_and_the_directory_is_free_when_the_disk_answers(opened, monkeypatch, reading):
    monkeypatch.setattr("prefixcache.ssd.tier.GRACE", 0.1)
    cache = opened(close_timeout=0.2)
    put_prompts(cache, *range(6))
    assert cache.flush(20)
    with stalled(monkeypatch, "readv" if reading else "fsync"):
        if reading:
            cache.trim_to(0)
            cache.promote(prompt(1), model="m")
        put_prompts(cache, *range(10, 16))
        cache.close()
        if not reading:
            with pytest.raises(DirectoryHeld):
                opened()
    until(lambda: not holder(Directory(cache.settings.ssd_dir)))
    again = opened()
    states.check_integrity(again)
    assert again.promote(prompt(3), model="m").result(20) == 600


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE])
def test_any_error_of_the_disk_is_told_and_outlived(opened, tmp_path, monkeypatch, number, caplog):
    cache = opened()
    put_prompts(cache, 1)
    assert cache.flush()
    cache.trim_to(0)
    original = os.open

    def fail(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return original(path, flags, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        put_prompts(cache, 2, 3)
        assert not cache.flush(5)
        assert os.strerror(number) in cache.stats().ssd.last_error
        assert "resumes by itself" in caplog.text
        assert cache.promote(prompt(1), model="m").result(20) == 600  # what it has, it gives
        assert [fetched(cache, seed) for seed in (1, 2, 3)] == [600] * 3
    settled(cache, tmp_path / "ssd")
    cache.trim_to(0)
    assert cache.promote(prompt(3), model="m").result(20) == fetched(cache, 3) == 600


def test_a_flush_is_false_when_a_store_found_the_disk_failing_after_a_deletion_did(opened, monkeypatch):
    cache = opened()
    put_prompts(cache, 1)
    assert cache.flush()
    monkeypatch.setattr(queue, "FIRST_DELAY", 60.0)
    queue_of(inside(cache).ssd)._delay = 60.0
    with monkeypatch.context() as patch:

        def fail(*args, **more):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        patch.setattr(directory_of(inside(cache).ssd).index, "find", fail)
        cache.remove(prompt(1), model="m")
        until(lambda: cache.stats().ssd.errors)
    put_prompts(cache, 2)
    assert not cache.flush(5)
    assert cache.flush(5)
    cache.close()
    again = opened()
    assert again.promote(prompt(2), model="m").result(20) == fetched(again, 2) == 600


def test_a_vanished_directory_that_can_t_be_recreated_at_once_is_later(opened, tmp_path, monkeypatch):
    cache = opened()
    put_prompts(cache, 1)
    assert cache.flush()
    shutil.rmtree(tmp_path / "ssd")
    with monkeypatch.context() as patch:

        def fail(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "ftruncate", fail)  # LOCK can't be signed
        put_prompts(cache, 2)
        assert not cache.flush(2)
        assert cache.stats().ssd.errors
    put_prompts(cache, 3)
    settled(cache, tmp_path / "ssd")
    assert cache.stats().ssd.files > 0


def test_a_disk_that_was_unmounted_is_waited_for_and_nothing_is_written_under_it(opened, disk):
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, 1)
    assert cache.flush()
    subprocess.run(["umount", "--lazy", disk], check=True)
    try:
        put_prompts(cache, 2)
        assert not cache.flush(2)
        assert "not mounted" in cache.stats().ssd.last_error
        assert not list(disk.iterdir())
        assert fetched(cache, 2) == 600
    finally:
        mount("-t", "tmpfs", "none", disk)


@contextmanager
def unplugged(disk: Path, aside: Path, meet: Callable[[Path], object] = lambda fresh: None) -> Iterator[None]:
    """The disk is away within the block, and back after it with all that it had, under another number. `meet` is given it
    before anybody else sees it.
    """
    shutil.copytree(disk, aside, copy_function=shutil.copy2)
    before = disk.stat().st_dev
    subprocess.run(["umount", "--lazy", disk], check=True)
    try:
        yield
    finally:
        fresh = aside.parent / "fresh"  # filled before it is mounted: a disk that comes back is whole
        fresh.mkdir()
        mount("-t", "tmpfs", "none", fresh)
        shutil.copytree(aside, fresh, copy_function=shutil.copy2, dirs_exist_ok=True)
        meet(fresh)
        mount("--bind", fresh, disk)
        subprocess.run(["umount", "--lazy", fresh], check=True)
    assert disk.stat().st_dev != before


def open_on(device: int) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.stat(f"/proc/self/fd/{number}").st_dev == device:
                found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_a_disk_that_comes_back_under_another_number_is_taken_back(opened, disk, tmp_path, caplog):
    mount("-o", "remount,size=30m", disk)
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, *range(5))
    assert cache.flush()
    device = disk.stat().st_dev
    with unplugged(disk, tmp_path / "aside"):
        put_prompts(cache, 10)
        assert not cache.flush(2)
        assert not list(disk.iterdir())
    put_prompts(cache, 11)
    settled(cache, disk / "ssd")
    assert "its disk is back" in caplog.text
    assert not open_on(device)
    cache.trim_to(0)
    for seed in (*range(5), 10, 11):
        assert cache.promote(prompt(seed), model="m").result(20) == fetched(cache, seed) == 600
    with pytest.raises(DirectoryHeld):
        opened(ssd_dir=disk / "ssd")


def test_a_disk_that_comes_back_and_is_used_by_another_process_is_left_to_it(opened, disk, tmp_path):
    mount("-o", "remount,size=30m", disk)
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, 1)
    assert cache.flush()
    others: list[Lock] = []
    with unplugged(disk, tmp_path / "aside", lambda fresh: others.append(Lock(Directory(fresh / "ssd")))):
        put_prompts(cache, 2)
        assert not cache.flush(2)
    (other,) = others
    put_prompts(cache, 3)
    assert not cache.flush(2)
    until(lambda: "in use by" in cache.stats().ssd.last_error)
    other.release()
    put_prompts(cache, 4)
    settled(cache, disk / "ssd")
    cache.trim_to(0)
    assert cache.promote(prompt(4), model="m").result(20) == 600


@pytest.mark.parametrize("there", ["nothing", "a file", "an unsigned cache"])
def test_another_disk_in_its_place_is_not_written_to(opened, disk, there):
    mount("-o", "remount,size=30m", disk)
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, 1)
    assert cache.flush()
    subprocess.run(["umount", "--lazy", disk], check=True)
    mount("-t", "tmpfs", "none", disk)
    if there != "nothing":
        (disk / "ssd").mkdir()
        (disk / "ssd" / ("note" if there == "a file" else "LOCK")).write_bytes(b"")
    before = sorted(disk.rglob("*"))
    put_prompts(cache, 2)
    assert not cache.flush(2)
    assert "not mounted" in cache.stats().ssd.last_error
    assert sorted(disk.rglob("*")) == before


def test_a_cache_s_directory_below_the_mount_point_is_not_taken_for_the_disk_s(opened, disk):
    subprocess.run(["umount", "--lazy", disk], check=True)
    opened(ssd_dir=disk / "ssd").close()  # somebody began it while the disk was away
    before = sorted(disk.rglob("*"))
    mount("-t", "tmpfs", "none", disk)
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, 1)
    assert cache.flush()
    subprocess.run(["umount", "--lazy", disk], check=True)
    try:
        put_prompts(cache, 2)
        assert not cache.flush(2)
        assert "not mounted" in cache.stats().ssd.last_error
        assert sorted(disk.rglob("*")) == before
    finally:
        mount("-t", "tmpfs", "none", disk)


@pytest.mark.parametrize("back", [True, False])
def test_a_closing_without_the_disk_waits_for_nothing(opened, disk, tmp_path, back):
    """Counted in the waits that are asked for, not by the clock."""
    cache = opened(ssd_dir=disk / "ssd", close_timeout=600)
    put_prompts(cache, 1)
    assert cache.flush()
    ended = threading.Event()
    subprocess.run(["umount", "--lazy", disk], check=True)
    if back:
        mount("-t", "tmpfs", "none", disk)
    try:
        put_prompts(cache, 2, 3)
        threading.Thread(target=lambda: (cache.close(), ended.set()), daemon=True).start()
        assert ended.wait(30)
    finally:
        if not back:
            mount("-t", "tmpfs", "none", disk)


def test_a_lowered_budget_holds_once_a_slow_disk_has_taken_what_waited(opened, monkeypatch):
    cache = opened(ram="2MB", memory_reserve=0, spill_queue="1MB")
    with stalled(monkeypatch, "fsync"):
        put_prompts(cache, *range(24))
        cache.resize(ram="300KB", wait=0.1)
        assert cache.stats().ram_held > 300_000
    until(lambda: cache.stats().ram_held <= 300_000)
    cache.check_integrity()


def test_a_closing_takes_no_more_than_its_time_and_the_grace(opened, monkeypatch):
    """Counted in the waits that are asked for, not by the clock."""
    monkeypatch.setattr("prefixcache.ssd.tier.GRACE", 0.2)
    cache = opened(close_timeout=0.3)
    put_prompts(cache, *range(6))
    ended = threading.Event()
    with stalled(monkeypatch, "fsync"):
        threading.Thread(target=lambda: (cache.close(), ended.set()), daemon=True).start()
        assert ended.wait(20)


def test_a_closing_on_a_full_disk_says_so(opened, monkeypatch, caplog):
    cache = opened(close_timeout=600)  # a failing disk is not waited for
    put_prompts(cache, *range(6))

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        cache.close()
    said = [record.getMessage() for record in caplog.records if "only RAM has" in record.getMessage()]
    assert len(said) == 1
    assert "18 images (" in said[0]
    assert "No space left on device" in said[0]
    assert "close_timeout" not in said[0]


def test_a_closing_says_what_the_limit_had_no_room_for(opened, caplog):
    caplog.set_level(logging.INFO, "prefixcache")
    cache = opened(ssd="1MB")
    put_prompts(cache, *range(24))
    cache.close()
    said = [record.getMessage() for record in caplog.records if "only RAM has" in record.getMessage()]
    assert len(said) == 1
    assert "images (" in said[0]
    assert "has no room for more" in said[0]


def test_a_closing_that_had_too_little_time_says_so(opened, monkeypatch, caplog):
    monkeypatch.setattr("prefixcache.ssd.tier.GRACE", 0.1)
    cache = opened(close_timeout=0.2)
    put_prompts(cache, *range(6))
    with stalled(monkeypatch, "fsync"):
        cache.close()
    said = [record.getMessage() for record in caplog.records if "only RAM has" in record.getMessage()]
    assert len(said) == 1
    assert "18 images (" in said[0]
    assert "close_timeout=0.2 s were not enough" in said[0]


def test_flushes_in_a_loop_neither_hammer_a_failing_disk_nor_flood_the_log(opened, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(queue, "FIRST_DELAY", 0.1)
    cache = opened()
    put_prompts(cache, 1)
    with monkeypatch.context() as patch:

        def fail(*args, **more):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "write", fail)
        flushes = 0
        while cache.stats().ssd.errors < 5:
            assert not cache.flush(0.01)
            flushes += 1
        assert flushes > cache.stats().ssd.errors
    told = [record for record in caplog.records if "resumes by itself" in record.getMessage()]
    assert [str(tmp_path) in record.getMessage() for record in told] == [True]
    until(lambda: cache.flush(5))


def test_where_no_thread_can_be_made_files_are_written_once_all_the_same(opened, tmp_path, monkeypatch):
    cache = opened()
    put_prompts(cache, *range(6))
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("prefixcache-fsync"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert cache.flush(10)
    settled(cache, tmp_path / "ssd")


@pytest.mark.parametrize("timeout", [float("nan"), -1, "soon", True])
def test_a_time_that_is_none_is_refused(opened, timeout):
    cache = opened()
    for call in (
        cache.flush,
        lambda wait: cache.resize(ram="1MB", wait=wait),
        lambda wait: cache.trim_to(0, wait=wait),
    ):
        with pytest.raises(ValueError, match="give seconds, 0 or more"):
            call(timeout)


def test_any_length_of_time_can_be_waited_for(opened):
    cache = opened()
    put_prompts(cache, 1)
    assert cache.flush(10**400)
    assert cache.flush(float("inf"))
    with pytest.raises(ValueError, match="close_timeout"):
        opened(close_timeout=float("inf"))


def fill(disk: Path) -> Path:
    """Take every byte of the disk that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 512, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


@pytest.mark.parametrize("order", ["resize", "keep", "clear"])
def test_on_a_full_disk_what_is_to_leave_leaves(opened, disk, order):
    mount("-o", "remount,size=3m", disk)
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, *range(20))
    assert cache.flush()
    before = du(disk / "ssd")
    ballast = fill(disk)
    put_prompts(cache, 50)
    assert cache.flush()  # the oldest images have made room
    if order == "resize":
        cache.resize(ssd=before // 2)
    elif order == "keep":
        assert cache.keep(8) == 8
    else:
        cache.clear()
    until(lambda: du(disk / "ssd") < before * 2 // 3)
    until(lambda: cache.flush(5))
    put_prompts(cache, 60)
    settled(cache, disk / "ssd")
    if order == "resize":
        assert du(disk / "ssd") <= before // 2
    ballast.unlink()
    cache.close()
    again = opened(ssd_dir=disk / "ssd", **({"ssd": before // 2} if order == "resize" else {}))
    states.check_integrity(again)
    assert again.promote(prompt(60), model="m").result(20) == 600


def test_a_prompt_that_is_removed_on_a_full_disk_makes_room_for_another(opened, disk):
    mount("-o", "remount,size=3m", disk)
    cache = opened(ssd_dir=disk / "ssd")
    put_prompts(cache, *range(20))
    assert cache.flush()
    fill(disk)
    for seed in range(20):
        assert cache.remove(prompt(seed), model="m")
    until(lambda: cache.flush(5))
    put_prompts(cache, *range(30, 40))
    settled(cache, disk / "ssd")
    assert cache.stats().ssd.files
