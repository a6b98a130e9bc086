"""Several processes, forks, threads, signals and ends of a program: who may do what, and what is there afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixcache import DirectoryHeld, PrefixCache
from prefixcache.cli import app
from prefixcache.ssd import reconcile
from prefixcache.tiers.idle import Idle
from tests.inside import inside
from tests.models import states
from tests.models.states import exact, put
from tests.waiting import until
from tools.faults.evidence import du

ROOT = Path(__file__).parents[2]
LONG = list(range(1000))
LIMITS = {"ram": "10MB", "ssd": "50MB", "codec": "raw"}


def open_on(root: Path, **values) -> PrefixCache:
    return PrefixCache(ssd_dir=root, **{**LIMITS, **values})


def program(text: str, *arguments: object, **more) -> subprocess.Popen[str]:
    """A program that has a cache open on the directory of its first argument, as `cache`."""
    head = """
        import os, signal, sys, threading, time
        from prefixcache import PrefixCache
        from tests.models import states
        LONG = list(range(1000))
        cache = PrefixCache(ssd_dir=sys.argv[1], ram="10MB", ssd="50MB", codec="raw")
    """
    source = textwrap.dedent(head) + textwrap.dedent(text)
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


# -- two processes ----------------------------------------------------------------------------------------------------


def test_a_second_process_is_told_who_has_the_directory_and_may_look_at_it(tmp_path):
    other = program("print('open', flush=True); sys.stdin.read(); cache.close()", tmp_path)
    assert other.stdout.readline() == "open\n"
    try:
        with pytest.raises(DirectoryHeld, match=f"pid {other.pid} on .* since .*close that one, or give this one"):
            open_on(tmp_path)
        shown = CliRunner().invoke(app, ["inspect", str(tmp_path)])
        assert shown.exit_code == 0
        assert f"open: pid {other.pid}" in shown.output
        assert reconcile(tmp_path, dry_run=True, deep=True).exit_code == 0
        refused = reconcile(tmp_path)
        assert refused.exit_code == 2
        assert f"pid {other.pid}" in refused.error
    finally:
        assert other.communicate("")[1] == ""
    open_on(tmp_path).close()


def test_a_directory_is_free_the_moment_its_process_was_killed(tmp_path):
    script = """
        cache.store(LONG, states.sliceable(LONG), model='m')
        assert cache.flush(10)
        cache.store([5] * 600, states.sliceable([5] * 600), model='m')
        print('flushed', flush=True)
        time.sleep(60)
    """
    other = program(script, tmp_path)
    assert other.stdout.readline() == "flushed\n"
    other.kill()
    other.wait()
    with open_on(tmp_path) as cache:
        assert exact(cache, LONG)
        cache.check_integrity()


def test_reconcile_and_inspect_find_nothing_wrong_while_a_cache_is_at_work(tmp_path):
    cache = open_on(tmp_path, ram="500KB", ssd="2MB")
    ended = threading.Event()

    def work() -> None:
        seed = 0
        while not ended.is_set():
            put(cache, [seed * 1000 + i for i in range(600)])
            cache.promote([(seed - 5) * 1000 + i for i in range(600)], model="m").result(20)
            seed += 1

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(8):
            report = reconcile(tmp_path, dry_run=True, deep=True)
            assert report.clean, report.findings
            assert CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).exit_code == 0
    finally:
        ended.set()
        worker.join()
        cache.close()
    assert cache.stats().counters.corrupt == 0


# -- forks ------------------------------------------------------------------------------------------------------------


def forked(work) -> int:
    pid = os.fork()
    if not pid:
        code = 9
        try:
            code = work() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_in_a_fork_the_cache_is_dead_and_says_so_even_if_its_locks_were_taken(tmp_path):
    cache = open_on(tmp_path)
    put(cache, LONG)

    def child() -> int:
        for call in (
            lambda: cache.match(LONG, model="m"),
            lambda: cache.fetch(LONG, model="m"),
            lambda: put(cache, [1, 2, 3]),
            cache.stats,
            cache.flush,
            cache.clear,
        ):
            try:
                call()
                return 1
            except RuntimeError as error:
                if f"of process {os.getppid()}" not in str(error):
                    return 2
        cache.close()
        return 0

    held = threading.Event()
    let_go = threading.Event()

    def hold() -> None:
        with inside(cache).storage.lock:
            held.set()
            let_go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    assert forked(child) == 0
    let_go.set()
    holder.join()
    assert exact(cache, LONG)
    cache.close()
    with open_on(tmp_path) as again:
        assert exact(again, LONG)


def test_in_a_fork_of_a_process_that_used_an_object_store_another_is_refused(tmp_path):
    remote = f"file://{tmp_path}"
    with PrefixCache(ram="10MB", remote=remote):
        pass

    def child() -> int:
        try:
            PrefixCache(ram="10MB", remote=remote)
        except ValueError as error:
            return 0 if "fork of one that has used an object store" in str(error) and '"spawn"' in str(error) else 2
        return 1

    assert forked(child) == 0


def test_a_fork_that_ends_by_exit_neither_closes_nor_changes_the_parents_directory(tmp_path):
    script = """
        cache.store(LONG, states.sliceable(LONG), model='m')
        cache.flush()
        pid = os.fork()
        if not pid:
            sys.exit(0)  # exit handlers run
        assert os.waitpid(pid, 0)[1] == 0
        cache.store(LONG + [5] * 300, states.sliceable(LONG + [5] * 300), model='m')
        assert cache.flush()
        states.check_integrity(cache)
        cache.close()
        print('fine')
    """
    out, err = program(script, tmp_path).communicate(timeout=60)
    assert (out, err) == ("fine\n", "")
    with open_on(tmp_path) as again:
        assert exact(again, [*LONG, *[5] * 300])


# -- the end of a program ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["raise ValueError('a bug')", "del cache; import gc; gc.collect()"])
def test_a_program_that_ends_without_close_leaves_a_warm_and_clean_directory(tmp_path, end):
    script = f"cache.store(LONG, states.sliceable(LONG), model='m')\ncache.promote(LONG, model='m').result()\n{end}"
    ended = program(script, tmp_path)
    _, err = ended.communicate(timeout=60)
    assert ended.returncode == ("a bug" in end)
    assert "prefixcache" not in err
    assert ("a bug" in err) == ("a bug" in end)
    assert reconcile(tmp_path, dry_run=True, deep=True).clean
    with open_on(tmp_path) as cache:
        assert exact(cache, LONG)


def test_a_program_that_ends_while_threads_store_ends(tmp_path):
    script = """
        def work(first):
            for n in range(10_000):
                tokens = [first + n * 1000 + i for i in range(600)]
                try:
                    cache.store(tokens, states.sliceable(tokens), model='m')
                except RuntimeError:
                    return  # closed
        for n in range(4):
            threading.Thread(target=work, args=(n * 10**8,), daemon=True).start()
        time.sleep(.3)
    """
    ended = program(script, tmp_path)
    ended.communicate(timeout=60)
    assert ended.returncode == 0
    with open_on(tmp_path) as cache:
        states.check_integrity(cache)
        assert cache.stats().ssd.files > 0


@pytest.mark.parametrize(("number", "delay"), [(signal.SIGINT, 0.02), (signal.SIGTERM, 0.02)])
def test_a_signal_during_close_leaves_what_was_durable_and_no_debris(tmp_path, number, delay):
    script = """
        for n in range(40):
            tokens = [n * 1000 + i for i in range(600)]
            cache.store(tokens, states.sliceable(tokens), model='m')
            if n == 9:
                cache.flush()
        print('closing', flush=True)
        cache.close()
    """
    other = program(script, tmp_path)
    assert other.stdout.readline() == "closing\n"
    time.sleep(delay)
    other.send_signal(number)
    _, err = other.communicate(timeout=60)
    assert other.returncode in (0, 1, -number)
    assert err == "" or "KeyboardInterrupt" in err
    with open_on(tmp_path) as cache:
        states.check_integrity(cache)
        assert cache.stats().ssd.disk == du(tmp_path)
        for n in range(10):
            assert exact(cache, [n * 1000 + i for i in range(600)])
    assert not list((tmp_path / "tmp").iterdir())


def test_an_interrupted_close_lets_go_of_the_directory(tmp_path, monkeypatch):
    cache = open_on(tmp_path)
    put(cache, LONG)

    def interrupted(timeout: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(inside(cache).storage.spilling, "drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    cache.close()
    open_on(tmp_path).close()


def test_an_opening_that_fails_lets_go_of_the_directory(tmp_path, monkeypatch):
    """It fails last, when the SSD is open and threads run."""

    def fails(idle: Idle) -> None:
        raise OSError("no thread")

    before = set(threading.enumerate())
    monkeypatch.setattr(Idle, "start", fails)
    with pytest.raises(OSError, match="no thread"):
        open_on(tmp_path)
    until(lambda: set(threading.enumerate()) <= before)
    monkeypatch.undo()
    open_on(tmp_path).close()


# -- threads ----------------------------------------------------------------------------------------------------------


def test_sixteen_threads_that_do_everything_at_once_break_no_invariant(tmp_path):
    """The soak does this for ten minutes; here it is two seconds."""
    cache = open_on(tmp_path, ram="400KB", ssd="3MB")
    wrong: list[BaseException] = []
    end = time.monotonic() + 2

    def work(number: int) -> None:
        chance = random.Random(number)
        try:
            while time.monotonic() < end:
                seed = chance.randrange(20)
                tokens = [*range(300), *(seed * 1000 + i for i in range(chance.choice([20, 256, 400])))]
                call = chance.randrange(12)
                if call < 4:
                    put(cache, tokens)
                elif call < 8:
                    made, rest = cache.fetch(tokens, model="m", leave=0)
                    if made is not None:
                        states.check(made, tokens[: len(tokens) - len(rest)])
                elif call == 8:
                    cache.promote(tokens, model="m").result(30)
                elif call == 9:
                    cache.pin(tokens, model="m")
                    cache.check_integrity()
                    cache.unpin(tokens, model="m")
                elif call == 10:
                    cache.remove(tokens, model="m")
                else:
                    chance.choice([cache.stats, lambda: cache.trim_to(100_000, wait=0), lambda: cache.flush(5)])()
                held = cache.stats()
                assert held.ram_held <= held.ram_limit
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert du(tmp_path) <= 3_000_000
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    cache.flush()
    states.check_integrity(cache)
    assert cache.stats().pinned == 0
    assert cache.stats().counters.corrupt == 0
    cache.close()
    assert reconcile(tmp_path, deep=True).clean


def test_a_signals_handler_may_close_what_is_being_closed(tmp_path):
    script = """
        signal.signal(signal.SIGALRM, lambda *_: cache.close())
        cache.store(LONG, states.sliceable(LONG), model='m')
        drain = cache._storage.spilling.drain
        def interrupted(timeout):
            signal.raise_signal(signal.SIGALRM)
            return drain(timeout)
        cache._storage.spilling.drain = interrupted
        cache.close()
        print('closed')
    """
    out, err = program(script, tmp_path).communicate(timeout=60)
    assert (out, err) == ("closed\n", "")
