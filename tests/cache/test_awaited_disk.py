"""A directory whose disk is not there yet: RAM only until it is, and then all that either has can be hit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from prefixcache import DirectoryHeld
from prefixcache.ssd import awaited
from prefixcache.ssd.awaited import why_absent
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.lock import Lock
from prefixcache.tiers import idle
from prefixcache.tiers.storage import Storage
from tests.inside import inside, queue_of
from tests.models import states
from tests.models.states import fetched, prompt, put_prompts
from tests.waiting import until
from tools.faults.evidence import du

CACHE = {"ram": "20MB", "ssd": "20MB", "close_timeout": 5, "memory_reserve": 0}


@pytest.fixture(autouse=True)
def impatient(monkeypatch, tmp_path):
    monkeypatch.setattr(awaited, "PERIOD", 0.02)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")


@pytest.fixture
def disk(opened, tmp_path) -> Path:
    """The root of a disk that isn't mounted; what will be on it is in `plugged`: a cache with the prompts 0 to 4."""
    with opened(ssd_dir=tmp_path / "plugged" / "ssd") as cache:
        put_prompts(cache, *range(5))
    return tmp_path / "disk"


def plug_in(disk: Path) -> None:
    (disk.parent / "plugged").rename(disk)


def test_ram_serves_until_the_disk_is_there_which_is_said_once(opened, disk, caplog):
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait")
    put_prompts(cache, *range(10, 15))
    assert not cache.flush()  # nothing is durable
    assert [fetched(cache, seed) for seed in range(10, 15)] == [600] * 5
    assert cache.promote(prompt(0), model="m").result(5) == 0
    assert cache.stats().ssd is None
    assert not disk.exists()
    told = [record.getMessage() for record in caplog.records]
    assert [
        f"no such folder: {str(disk)!r}; mount its disk, or make it; RAM only until then" in text for text in told
    ] == [True]
    with pytest.raises(ValueError, match="not there yet"):
        cache.resize(ssd="1GB")


def test_once_it_is_there_what_it_has_is_hit_and_what_ram_has_is_written(opened, disk):
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait")
    put_prompts(cache, *range(10, 15))
    put_prompts(cache, 1)  # as the disk has it
    put_prompts(cache, 2, count=500)  # a part of what the disk has
    plug_in(disk)
    until(lambda: cache.stats().ssd)
    cache.check_integrity()
    assert cache.stats().ssd.errors == 0
    for seed in range(5):
        assert cache.promote(prompt(seed), model="m").result(20) == fetched(cache, seed) == 600
    assert fetched(cache, 10) == 600
    put_prompts(cache, 20)
    assert cache.flush(20)
    states.check_integrity(cache)
    cache.close()
    again = opened(ssd_dir=disk / "ssd")
    for seed in (*range(5), *range(10, 15), 20):
        assert again.promote(prompt(seed), model="m").result(20) == fetched(again, seed) == 600


def test_what_ram_got_meanwhile_is_written_while_nobody_asks(opened, disk, monkeypatch):
    monkeypatch.setattr(idle, "PERIOD", 0.02)
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait", spill_idle="auto")
    put_prompts(cache, 10)
    plug_in(disk)
    until(lambda: cache.stats().counters.idle_bytes)


def test_a_quarter_of_the_ram_that_there_is_by_then_may_wait_for_it(opened, disk):
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait", ram="20MB")
    cache.resize(ram="8MB")
    plug_in(disk)
    until(lambda: cache.stats().ssd)
    assert queue_of(inside(cache).ssd)._limit == 2 * 10**6


def test_an_index_that_cant_be_read_in_leaves_no_tier_behind(opened, disk, monkeypatch, caplog):
    load = Storage._load

    def failing(*args):
        monkeypatch.setattr(Storage, "_load", load)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Storage, "_load", failing)
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait")
    plug_in(disk)
    until(lambda: cache.stats().ssd)
    assert "Input/output error" in caplog.text
    assert cache.promote(prompt(0), model="m").result(20) == 600
    cache.check_integrity()


def test_what_ram_got_meanwhile_is_newer_than_what_the_disk_has(opened, disk):
    with opened(ssd_dir=disk.parent / "plugged" / "ssd") as cache:
        for _ in range(20):  # its clock runs ahead
            cache.promote(prompt(0), model="m").result(5)
            fetched(cache, 0)
        cache.flush()
    room = du(disk.parent / "plugged" / "ssd")
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait", ssd=room + 300_000)
    put_prompts(cache, *range(10, 15))
    plug_in(disk)
    until(lambda: cache.stats().ssd)
    assert cache.flush(20)
    cache.close()
    again = opened(ssd_dir=disk / "ssd")
    assert [again.promote(prompt(seed), model="m").result(20) for seed in range(10, 15)] == [600] * 5
    assert again.promote(prompt(1), model="m").result(20) < 600


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_ram_that_is_full_makes_room_for_the_index_of_the_disk(opened, disk, policy):
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait", ram="800KB", policy=policy)
    put_prompts(cache, *range(10, 40))
    plug_in(disk)
    until(lambda: cache.stats().ssd)
    cache.check_integrity()
    assert cache.promote(prompt(3), model="m").result(20) == fetched(cache, 3) == 600
    put_prompts(cache, *range(50, 60))
    cache.flush(20)
    cache.check_integrity()


def test_a_directory_that_another_process_has_open_then_is_waited_for_too(opened, disk, caplog):
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait")
    other = Lock(Directory(disk.parent / "plugged" / "ssd"))
    plug_in(disk)
    until(lambda: "in use by" in caplog.text)
    assert cache.stats().ssd is None
    put_prompts(cache, 10)
    other.release()
    until(lambda: cache.stats().ssd)
    assert caplog.text.count("in use by") == 1
    with pytest.raises(DirectoryHeld):
        opened(ssd_dir=disk / "ssd")


def test_a_cache_that_waits_can_be_closed_and_makes_nothing_afterwards(opened, disk):
    cache = opened(ssd_dir=disk / "ssd", ssd_missing="wait")
    put_prompts(cache, 10)
    cache.close()
    disk.mkdir()
    assert not list(disk.iterdir())


def test_by_default_folders_are_made_and_what_is_wrong_is_an_error_as_ever(opened, tmp_path):
    opened(ssd_dir=tmp_path / "a" / "b" / "ssd").close()
    assert (tmp_path / "a" / "b" / "ssd" / "LOCK").exists()
    shutil.rmtree(tmp_path / "a")


# -- what is absent ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fstab(tmp_path) -> Path:
    path = tmp_path / "fstab"
    path.write_text(
        f"# <file system> <mount point>\nUUID=1 / ext4 defaults 0 1\nUUID=2 none swap sw 0 0\n"
        f"UUID=3 {tmp_path}/a\\040disk ext4 noauto 0 2\nproc /proc proc defaults 0 0\n"
    )
    return path


def test_what_the_system_mounts_and_is_not_mounted_is_absent_even_if_something_is_there(tmp_path, fstab):
    (tmp_path / "a disk" / "ssd").mkdir(parents=True)
    assert "a disk' is not mounted" in why_absent(tmp_path / "a disk" / "ssd", fstab)
    assert why_absent(Path("/proc/ssd"), fstab) == ""
    assert why_absent(tmp_path / "ssd", fstab) == ""


def test_a_folder_of_the_same_disk_that_is_mounted_elsewhere_is_there(tmp_path, monkeypatch, fstab):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw\n"
        f"36 22 8:2 /data {tmp_path}/a\\040disk rw,relatime shared:1 - ext4 /dev/sda2 rw\n"
    )
    monkeypatch.setattr(awaited, "MOUNTS", mounts)
    (tmp_path / "a disk").mkdir()
    assert why_absent(tmp_path / "a disk" / "ssd", fstab) == ""


@pytest.mark.parametrize(
    ("there", "directory", "absent"),
    [
        ("", "X/ssd", True),  # not even its mount point
        ("X", "X/ssd", True),  # an empty one
        ("X", "X", False),
        ("X/other", "X/ssd", False),  # a folder with something in it
        ("X/ssd", "X/ssd", False),
        ("X", "X/deep/ssd", True),
    ],
)
def test_in_the_folders_of_what_people_plug_in_an_empty_mount_point_is_absent(
    tmp_path, monkeypatch, there, directory, absent
):
    monkeypatch.setattr(awaited, "AREAS", {str(tmp_path): 1})
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    assert bool(why_absent(tmp_path / directory, tmp_path / "none")) is absent


def test_a_link_to_a_disk_that_is_not_mounted_is_absent(tmp_path, monkeypatch, fstab):
    volumes, own = tmp_path / "Volumes", tmp_path / "own"
    for folder in (volumes, own, tmp_path / "a disk"):
        folder.mkdir()
    monkeypatch.setattr(awaited, "AREAS", {str(volumes): 1})
    (own / "volume").symlink_to(volumes / "X")
    (own / "ssd").symlink_to(volumes / "X" / "ssd")
    (own / "mounted").symlink_to(tmp_path / "a disk")
    assert why_absent(own / "volume" / "ssd", fstab)
    assert why_absent(own / "ssd", fstab)
    assert "a disk' is not mounted" in why_absent(own / "mounted" / "ssd", fstab)
    (volumes / "X" / "ssd").mkdir(parents=True)
    assert why_absent(own / "volume" / "ssd", fstab) == ""
    assert why_absent(own / "ssd", fstab) == ""


def test_below_a_home_that_is_a_link_folders_are_made_too(tmp_path):
    (tmp_path / "var").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "var")
    assert why_absent(tmp_path / "home" / ".cache" / "prefixcache", tmp_path / "none") == ""


def test_elsewhere_the_folder_that_it_is_made_in_must_be_there_but_for_the_user_s_own(tmp_path):
    none = tmp_path / "none"
    assert why_absent(tmp_path / "ssd", none) == ""
    assert "no such folder" in why_absent(tmp_path / "vra" / "ssd", none)
    assert why_absent(tmp_path / "home" / ".cache" / "prefixcache", none) == ""
    assert why_absent(tmp_path / "ssd" / "rank-3", none) == ""
    assert "no such folder" in why_absent(tmp_path / "vra" / "ssd" / "rank-3", none)


def test_a_user_without_a_home_has_no_folders_that_are_made(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 123_456)  # as in a container: nobody of this number is known
    with pytest.raises(RuntimeError):
        Path.home()
    assert why_absent(tmp_path / "ssd", tmp_path / "none") == ""
    assert "no such folder" in why_absent(tmp_path / "vra" / "ssd", tmp_path / "none")


def test_a_folder_that_cant_be_looked_into_is_there_and_to_open_it_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(awaited, "AREAS", {str(tmp_path): 2})
    monkeypatch.setattr(Path, "exists", os.path.exists)  # as in Python 3.14: it raises nothing
    (tmp_path / "user").mkdir()
    stat = os.stat

    def refused(path, *args, **options):
        if str(path).startswith(str(tmp_path / "user" / "disk")):
            raise PermissionError(13, os.strerror(13))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert why_absent(tmp_path / "user" / "disk" / "ssd", tmp_path / "none") == ""


def test_a_mount_point_that_may_not_be_read_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(awaited, "AREAS", {str(tmp_path): 1})
    (tmp_path / "X").mkdir()

    def refused(path):
        raise PermissionError(13, os.strerror(13), path)

    monkeypatch.setattr(os, "scandir", refused)
    assert why_absent(tmp_path / "X" / "ssd", tmp_path / "none")
