"""DIR/audit.log: a line a command, nobody else's to read, bounded, and part of what the directory is said to take."""

from __future__ import annotations

import json
import os
import stat
import threading

import pytest

from prefixcache.ssd import audit
from prefixcache.ssd.directory import Directory

from .images import Opened, chain, du


@pytest.fixture
def there(quick):
    root = quick / "ssd"
    with Opened(root) as ssd:
        ssd.put(*chain(2))
    return Directory(root)


def lines(there):
    return [json.loads(line) for line in (there.root / audit.NAME).read_text().splitlines()]


def test_a_line_says_who_did_what_and_when(there):
    audit.append(there, {"command": "clear", "result": "done"})
    audit.append(there, {"command": "prune\n", "result": "done"})
    first, second = lines(there)
    assert (first["command"], first["result"], second["command"]) == ("clear", "done", "prune\n")
    assert (first["uid"], first["pid"]) == (os.getuid(), os.getpid())
    assert {"time", "user", "host"} <= first.keys()
    assert first["time"].endswith("Z")


def test_the_file_is_the_owners_alone_under_any_umask(there):
    before = os.umask(0)
    try:
        audit.append(there, {})
        assert stat.S_IMODE((there.root / audit.NAME).stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_it_counts_as_a_part_of_the_directory(there):
    for _ in range(40):
        audit.append(there, {"filler": "x" * 500})
    with Opened(there.root) as ssd:
        ssd.check_integrity()
        assert ssd._store.ledger.held().real == du(there.root)
        assert ssd.stats().files == 2


def test_beyond_its_bound_the_older_half_leaves(there, monkeypatch):
    monkeypatch.setattr(audit, "MOST", 8_000)
    for number in range(120):
        audit.append(there, {"number": number, "filler": "x" * 100})
        assert (there.root / audit.NAME).stat().st_size <= 8_000
    numbers = [line["number"] for line in lines(there)]
    assert numbers == list(range(numbers[0], 120))
    assert len(numbers) > 10
    assert not (there.root / f"{audit.NAME}.new").exists()
    assert stat.S_IMODE((there.root / audit.NAME).stat().st_mode) == 0o600


def test_what_a_crash_left_of_a_halving_is_no_obstacle(there, monkeypatch):
    monkeypatch.setattr(audit, "MOST", 2000)
    (there.root / f"{audit.NAME}.new").write_text("half")
    for number in range(30):
        audit.append(there, {"number": number})
    assert lines(there)[-1]["number"] == 29


def test_several_at_once_lose_no_line(there, monkeypatch):
    monkeypatch.setattr(audit, "MOST", 60_000)

    def work(who):
        for number in range(20):
            audit.append(there, {"who": who, "number": number})

    threads = [threading.Thread(target=work, args=[who]) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(line["who"], line["number"]) for line in lines(there)]
    assert sorted(found) == [(who, number) for who in range(6) for number in range(20)]


@pytest.mark.parametrize("obstacle", ["link", "folder", "pipe"])
def test_what_is_no_plain_file_is_not_followed(there, tmp_path, obstacle):
    path, elsewhere = there.root / audit.NAME, tmp_path / "elsewhere"
    elsewhere.write_text("")
    if obstacle == "link":
        path.symlink_to(elsewhere)
    elif obstacle == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(OSError, match=r"audit\.log|plain file"):
        audit.append(there, {})
    assert elsewhere.read_text() == ""


def test_an_endless_argument_is_cut(there):
    audit.append(there, {"command": "prune", "arguments": {"model": "x" * 200_000}, "result": "done"})
    (line,) = lines(there)
    assert line["command"] == "prune"
    assert "cut" in line
