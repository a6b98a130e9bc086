"""The watch of ranks, whose ranks are threads here: who is told what when one dies, goes silent, hangs or ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import Empty, Queue

import pytest

from prefixcache.ranks import watch as watching
from prefixcache.ranks.watch import Watch, address_of_first
from tests.ranks.test_agreement import Table, ThreadRanks

VARIABLES = ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "NCCL_HOST_IP")


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(watching, "BEAT", 0.05)


class Told:
    """What a rank's watch has said."""

    def __init__(self) -> None:
        self.ends: Queue[str] = Queue()
        self.asked = threading.Event()

    def end(self) -> str:
        return self.ends.get(timeout=10)


@contextmanager
def watches(size: int, hang: float = 60.0) -> Iterator[list[tuple[Watch, Told]]]:
    table, told = Table(size), [Told() for _ in range(size)]

    def one(rank: int) -> Watch:
        return Watch(ThreadRanks(table, rank), told[rank].ends.put, told[rank].asked.set, hang=hang)

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(one, range(size)))
    try:
        yield list(zip(made, told, strict=True))
    finally:
        for one_watch in made:
            one_watch.close()
            break_lines(one_watch)


def break_lines(of: Watch) -> None:
    """What becomes of the connections of a process that dies, and says nothing more."""
    of._over = True
    for line in of._lines.values():
        with suppress(OSError):  # broken already
            line.shutdown(socket.SHUT_RDWR)


def test_all_others_hear_which_rank_has_died():
    with watches(3) as [(_, first), (_, second), (third_watch, _)]:
        break_lines(third_watch)
        assert [first.end(), second.end()] == ["rank 2 died"] * 2


def test_all_others_hear_that_rank_0_has_died():
    with watches(3) as [(first_watch, _), (_, second), (_, third)]:
        break_lines(first_watch)
        assert [second.end(), third.end()] == ["rank 0 died"] * 2


def test_a_rank_that_could_not_go_on_tells_why():
    with watches(3) as [(_, first), (second_watch, _), (_, third)]:
        second_watch.close("rank 1 could not go on: no room")
        assert [first.end(), third.end()] == ["rank 1 could not go on: no room"] * 2


def test_the_end_in_order_is_rank_0s():
    with watches(2) as [(first_watch, first), (second_watch, second)]:
        second_watch.ask_to_end()
        assert first.asked.wait(10)
        first_watch.close()
        assert second.end() == ""
        second_watch.close()
        break_lines(second_watch)
        with pytest.raises(Empty):
            first.ends.get(timeout=0.3)


def test_a_rank_that_ends_waits_until_the_others_have_heard_it(monkeypatch):
    hear = Watch._heard

    def hear_late(self: Watch, *said: str) -> None:
        time.sleep(0.2)
        hear(self, *said)

    monkeypatch.setattr(Watch, "_heard", hear_late)
    with watches(2) as [(_, first), (second_watch, _)]:
        second_watch.close("rank 1 could not go on: no room")
        assert first.ends.get_nowait() == "rank 1 could not go on: no room"


def test_a_rank_that_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(watching, "SILENCE", 0.5)
    with watches(2) as [(_, first), (second_watch, _)]:
        second_watch._over = True  # it sends nothing any more
        assert "rank 1 has given no sign of life" in first.end()


def test_a_hang_is_the_rank_that_is_behind():
    with watches(3, hang=0.6) as all_ranks:
        for number, (watch, _) in enumerate(all_ranks):
            for _ in range(5 - (number == 1)):
                watch.step()
        reasons = [told.end() for _, told in all_ranks]
        assert all(reason.startswith("rank 1 hang: no step has ended for 1 s (steps: rank 0: 5") for reason in reasons)


def test_what_may_take_any_time_is_no_hang():
    with watches(2, hang=0.3) as [(first_watch, first), (second_watch, _)]:
        for watch in (first_watch, second_watch):
            watch.step()
            watch.step_may_take_long()
        with pytest.raises(Empty):
            first.ends.get(timeout=0.8)


def test_the_others_wait_until_rank_0_meets_them(monkeypatch):
    monkeypatch.setattr(watching, "BEAT", 30.0)
    with watches(3) as [(first, _), (second, _), (third, _)], ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            meetings = [pool.submit(second.meet), pool.submit(third.meet)]
            assert not wait(meetings, timeout=0.1).done
            first.meet()
            assert not wait(meetings, timeout=10).not_done


def test_who_is_not_met_goes_on():
    with watches(2) as [_, (second, _)]:
        second.meet()


def test_without_a_connection_it_warns_and_all_go_on(monkeypatch, caplog):
    monkeypatch.setattr(watching, "CONNECTING", 0.3)
    monkeypatch.setattr(Watch, "_call", lambda *args: False)
    with watches(2) as [(_, first), _]:
        assert "rank 1 can't reach rank 0" in caplog.text
        with pytest.raises(Empty):
            first.ends.get(timeout=0.3)


def test_a_stranger_is_not_taken_for_a_rank(monkeypatch):
    def call_after_a_stranger(self: Watch, hosts: list[str], port: int, token: bytes) -> bool:
        stranger = socket.create_connection((hosts[0], port))
        stranger.sendall(bytes(len(token) + 2))
        return call(self, hosts, port, token)

    call: Callable[..., bool] = Watch._call
    monkeypatch.setattr(Watch, "_call", call_after_a_stranger)
    with watches(2) as [(first_watch, _), (_, second)]:
        first_watch.close()
        assert second.end() == ""


def test_where_rank_0_is_found(monkeypatch, tmp_path):
    assert address_of_first() == ""
    monkeypatch.setenv("NCCL_HOST_IP", "10.0.0.3")
    assert address_of_first() == "10.0.0.3"
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "10.0.0.2:7000")
    assert address_of_first() == "10.0.0.2"
    for hosts in ([["10.0.0.1:5000", "10.1.0.1:5001"], ["10.0.0.9:5000"]], ["10.0.0.1:5000", "10.0.0.9:5000"]):
        (tmp_path / "hosts.json").write_text(json.dumps(hosts))
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
        assert address_of_first() == "10.0.0.1"
    began = time.monotonic()
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "none.json"))
    assert address_of_first() == "10.0.0.2"
    assert time.monotonic() - began < 1
