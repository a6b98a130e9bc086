"""The recording of a live server: what it says, what it keeps to itself, and that it never stands in a request's way."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.keys import BLOCK, chain
from prefixcache.trace import format as trace_format
from prefixcache.trace import recording
from prefixcache.trace.format import block_ids, block_keys
from prefixcache.trace.reading import Trace
from prefixcache.trace.recording import Recorder
from prefixcache.trace.tails import Tails
from tests.waiting import until

ROOT = bytes(range(16))


def raw(*parts: tuple[int, int]) -> bytes:
    """Tokens: `count` times `token` for each part."""
    return b"".join(np.full(count, token, "<i8").tobytes() for token, count in parts)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def recorded(path, *calls: tuple[str, bytes]) -> None:
    recorder = Recorder(path)
    for call, tokens in calls:
        getattr(recorder, call)(ROOT, tokens)
    recorder.close()
    assert recorder.failed is None


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_what_is_recorded_is_read_back_as_a_trace(path):
    recorded(path, ("fetch", raw((1, 600))), ("store", raw((1, 600), (2, 100))), ("fetch", raw()))
    trace = Trace(path)
    fetched, stored, nothing = trace
    assert trace.block == BLOCK
    assert [request.call for request in trace] == ["fetch", "store", "fetch"]
    assert [request.tokens for request in trace] == [600, 700, 0]
    assert [len(request.ids) for request in trace] == [3, 3, 0]
    assert fetched.ids[:2] == stored.ids[:2]
    assert fetched.ids[2] != stored.ids[2]  # tails of 88 and of 188 tokens
    assert nothing.output == stored.output == 0
    assert not trace.torn


@settings(max_examples=25)
@given(
    prompts=st.lists(
        st.tuples(
            st.sampled_from(["fetch", "store"]),
            st.sampled_from([b"a" * 32, b"b" * 32]),
            st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 300)), max_size=4),
        ),
        min_size=1,
        max_size=6,
    ),
    restarts=st.sets(st.integers(0, 5)),
)
def test_ids_are_equal_where_prefixes_are_also_over_restarts(tmp_path_factory, prompts, restarts):
    path = tmp_path_factory.mktemp("r") / "trace"
    recorder = Recorder(path)
    for at, (call, root, parts) in enumerate(prompts):
        if at in restarts:
            recorder.close()
            recorder = Recorder(path)
        getattr(recorder, call)(root, raw(*parts))
    recorder.close()
    prefix_of = {}
    for request, (call, root, parts) in zip(Trace(path), prompts, strict=True):
        tokens = raw(*parts)
        assert (request.call, request.tokens) == (call, len(tokens) // 8)
        assert len(request.ids) == -(-request.tokens // BLOCK)
        for at, one in enumerate(request.ids, 1):
            assert prefix_of.setdefault(one, (root, tokens[: at * BLOCK * 8])) == (root, tokens[: at * BLOCK * 8])
    assert len(set(prefix_of.values())) == len(prefix_of)


def test_an_id_is_a_keyed_hash_of_the_chained_key(path):
    tokens = raw((5, 256), (6, 44))
    secret = bytes(32)
    ids = block_ids(secret, block_keys(ROOT, tokens))
    keys = [chain(ROOT, tokens[:2048]), chain(chain(ROOT, tokens[:2048]), tokens[2048:])]
    assert ids == [
        int.from_bytes(hashlib.blake2b(key, digest_size=8, key=secret).digest(), "little") >> 11 for key in keys
    ]
    assert all(0 <= one < 2**53 for one in ids)
    assert not set(block_ids(b"x" * 32, keys)) & set(ids)
    assert not set(block_ids(secret, block_keys(bytes(32), tokens))) & set(ids)


def test_a_line_has_mooncakes_fields_and_nothing_of_the_prompt(path):
    recorded(path, ("fetch", raw((123456789, 300))))
    (found,) = lines(path)
    assert list(found) == ["timestamp", "call", "block_size", "input_length", "output_length", "hash_ids"]
    assert (found["input_length"], found["output_length"], found["call"], found["block_size"]) == (300, 0, "fetch", 256)
    assert b"123456789" not in path.read_bytes()
    assert ROOT.hex() not in path.read_text()


def test_the_file_and_its_secret_are_the_owners_alone(path):
    before = os.umask(0)
    try:
        path.touch(0o666)
        recorded(path)
    finally:
        os.umask(before)
    secret = path.with_name("trace.jsonl.secret")
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, secret)] == [0o600, 0o600]
    assert sorted(os.listdir(path.parent)) == ["trace.jsonl", "trace.jsonl.secret"]
    kept = secret.read_bytes()
    assert len(kept) == 32
    recorded(path)
    assert secret.read_bytes() == kept


def test_without_its_secret_a_recording_goes_on_with_new_ids(path):
    recorded(path, ("store", raw((1, 256))))
    path.with_name("trace.jsonl.secret").unlink()
    recorded(path, ("store", raw((1, 256))))
    one, other = Trace(path)
    assert one.ids != other.ids


@pytest.mark.parametrize("kept", range(1, 130, 16))
def test_a_last_line_that_a_crash_cut_goes_at_the_restart(path, kept):
    recorded(path, ("store", raw((1, 256))))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    recorded(path, ("fetch", raw((1, 256))))
    trace = Trace(path)
    assert [request.call for request in trace] == (
        ["store", "store", "fetch"] if kept >= len(whole) - 1 else ["store", "fetch"]
    )
    assert not trace.torn


BEGUN = b'{"timestamp": 12, "call": "store", "block_size": 256, '


@pytest.mark.parametrize("torn", [BEGUN[:1], BEGUN[:16], BEGUN[:28], BEGUN, BEGUN + b'"input_length": ' + b"1" * 5000])
def test_a_recording_of_half_a_line_is_begun_anew(path, torn):
    path.write_bytes(torn)
    recorded(path, ("fetch", raw((1, 256))))
    assert len(list(Trace(path))) == 1


def test_nulls_at_the_end_go_too(path):
    recorded(path, ("store", raw((1, 256))))
    path.write_bytes(path.read_bytes() + bytes(5000))
    recorded(path, ("store", raw((1, 256))))
    assert len(lines(path)) == 2


def test_a_whole_last_line_without_its_newline_gets_it(path):
    recorded(path, ("store", raw((1, 256))))
    path.write_bytes(path.read_bytes()[:-1])
    recorded(path, ("fetch", raw((1, 256))))
    assert [one["call"] for one in lines(path)] == ["store", "fetch"]


def test_a_torn_line_longer_than_a_chunk_is_found(path, monkeypatch):
    monkeypatch.setattr(recording, "FLUSH_BYTES", 16)
    recorded(path, ("store", raw((1, 256))))
    path.write_bytes(path.read_bytes() + b'{"timestamp": 5, "hash_ids": [' + b"1, " * 50)
    recorded(path, ("fetch", raw((1, 256))))
    assert [one["call"] for one in lines(path)] == ["store", "fetch"]


# ---------------------------------------------------------------- tails that grow


def grown(path) -> list[list]:
    return [one.get("grown", []) for one in lines(path)]


def test_a_block_says_which_tail_it_has_grown_from(path):
    turns = [raw((1, 256), (2, 40)), raw((1, 256), (2, 40), (3, 60)), raw((1, 256), (2, 40), (3, 60), (4, 300))]
    recorded(path, *[("store", tokens) for tokens in turns])
    first, second, third = Trace(path)
    assert [one.grown for one in (first, second, third)] == [(), ((1, first.ids[1], 40),), ((1, second.ids[1], 100),)]


def test_the_longest_tail_is_named_also_one_that_was_only_looked_up(path):
    short, longer, other = raw((1, 40)), raw((1, 90)), raw((1, 60), (2, 10))
    recorded(path, ("store", short), ("fetch", longer), ("store", other), ("fetch", raw((1, 300))))
    ids = [one["hash_ids"][0] for one in lines(path)]
    assert grown(path) == [[], [[0, ids[0], 40]], [[0, ids[0], 40]], [[0, ids[1], 90]]]


def test_what_was_said_of_a_block_is_not_said_again(path):
    recorded(
        path, ("store", raw((1, 40))), ("store", raw((1, 300))), ("fetch", raw((1, 300))), ("store", raw((1, 600)))
    )
    tails = [one["hash_ids"] for one in lines(path)]
    assert grown(path) == [[], [[0, tails[0][0], 40]], [], [[1, tails[1][1], 44]]]


def test_a_tail_after_another_prefix_or_of_another_namespace_is_no_beginning(path):
    recorder = Recorder(path)
    recorder.store(ROOT, raw((1, 256), (2, 40)))
    recorder.fetch(ROOT, raw((3, 256), (2, 50)))
    recorder.fetch(bytes(32), raw((1, 256), (2, 50)))
    recorder.fetch(ROOT, raw((1, 256), (2, 39), (4, 1)))
    recorder.close()
    assert grown(path) == [[], [], [], []]


def test_of_the_tails_the_last_ones_are_remembered(path, monkeypatch):
    monkeypatch.setattr(recording, "TAILS", 3)
    recorded(
        path, *[("store", raw((token, 40))) for token in range(4)], ("fetch", raw((0, 50))), ("fetch", raw((3, 50)))
    )
    assert [len(said) for said in grown(path)] == [0, 0, 0, 0, 0, 1]


def test_the_memory_of_tails_is_bounded():
    tails = Tails(5)
    for at in range(200):
        tokens = raw((at % 7, 256 * (at % 3)), (at % 11, 10 + at % 13))
        keys = block_keys(ROOT, tokens)
        tails.seen([ROOT, *keys], block_ids(bytes(32), keys), tokens)
        counted = [sum(lasts.values()) for lengths in tails._lasts.values() for lasts in lengths.values()]
        assert sum(counted) == len(tails._tails) <= 5
        assert all(counted)
        assert all(tails._lasts.values())
        assert len(tails._compared) <= 5


# ---------------------------------------------------------------- what can't be recorded into


def test_a_file_that_is_no_recording_is_left_as_it_is(path):
    mooncake = b'{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}'
    others = [BEGUN.replace(b"256", b"512"), BEGUN.replace(b"store", b"request"), BEGUN[:16] + b"\n", b"{" + BEGUN]
    for text in (
        b"root:x:0:0\n",
        b"[1, 2]",
        b"\0",
        b'{"text": 1}\n',
        mooncake,
        mooncake[:40],
        mooncake + b"\n{",
        *others,
    ):
        path.write_bytes(text)
        path.chmod(0o644)
        with pytest.raises(
            ValueError, match=r"trace='.*trace.jsonl': .*holds something else than a recording.*PREFIXCACHE_TRACE"
        ):
            Recorder(path)
        assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (text, 0o644)


def test_an_unusable_path_is_an_error_that_names_the_setting(tmp_path, path):
    with pytest.raises(ValueError, match=r"trace='.*nowhere/t': .*No such file or directory.*PREFIXCACHE_TRACE"):
        Recorder(tmp_path / "nowhere" / "t")
    with pytest.raises(ValueError, match=r"trace=.*Is a directory"):
        Recorder(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"trace=.*no regular file"):
        Recorder(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"trace='.*link': can't be recorded into"):
        Recorder(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    path.with_name("trace.jsonl.secret").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"trace.jsonl.secret': .*not the 32 bytes"):
        Recorder(path)


def test_a_second_recorder_of_one_file_is_refused_also_in_another_process(path):
    first = Recorder(path)
    with pytest.raises(ValueError, match=r"another server records into it.*PREFIXCACHE_TRACE"):
        Recorder(path)
    code = f"from prefixcache.trace.recording import Recorder; Recorder({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "another server records into it" in done.stderr
    first.fetch(ROOT, raw((1, 1)))
    first.close()
    Recorder(path).close()
    assert len(lines(path)) == 1


def test_a_refused_recorder_holds_nothing(path):
    before = len(os.listdir("/dev/fd"))
    path.write_bytes(b"else")
    with pytest.raises(ValueError, match="something else"):
        Recorder(path)
    assert len(os.listdir("/dev/fd")) == before
    path.unlink()
    Recorder(path).close()


# ---------------------------------------------------------------- on the request's way


def test_lines_wait_for_a_second_or_a_megabyte_of_tokens(path, monkeypatch):
    monkeypatch.setattr(recording, "FLUSH_SECONDS", 0.5)
    recorder = Recorder(path)
    began = time.monotonic()
    for _ in range(3):
        recorder.fetch(ROOT, raw((1, 256)))
    until(lambda: len(lines(path)) == 3)
    assert time.monotonic() - began >= 0.5
    monkeypatch.setattr(recording, "FLUSH_SECONDS", 1000)
    recorder.fetch(ROOT, raw((1, 256)))
    time.sleep(0.1)
    assert len(lines(path)) == 3
    recorder.fetch(ROOT, raw((1, recording.FLUSH_BYTES // 8)))
    until(lambda: len(lines(path)) == 5)
    recorder.store(ROOT, raw((1, 256)))
    recorder.close()
    assert len(lines(path)) == 6


@pytest.fixture
def stuck_disk(path, monkeypatch):
    recorded(path)  # its secret is there
    real, go_on = os.write, threading.Event()

    def slow(fd, data):
        assert go_on.wait(60)
        return real(fd, data)

    monkeypatch.setattr(recording.os, "write", slow)
    monkeypatch.setattr(recording, "FLUSH_BYTES", 1)
    yield go_on
    go_on.set()


def test_no_call_waits_for_the_disk(path, stuck_disk):
    recorder = Recorder(path)
    for token in range(6):
        recorder.fetch(ROOT, raw((token, 256)))
    recorder.store(ROOT, raw((1, 256 * 50)))
    assert not path.read_bytes()
    stuck_disk.set()
    recorder.close()
    assert [entry["call"] for entry in lines(path)] == ["fetch"] * 6 + ["store"]


def test_a_disk_that_does_not_answer_ends_the_recording_before_memory_is_full(path, stuck_disk, monkeypatch, caplog):
    monkeypatch.setattr(recording, "CLOSE_SECONDS", 0.1)
    recorder = Recorder(path)
    tokens = raw((1, 1 << 17))
    with caplog.at_level(logging.WARNING, "prefixcache"):
        for _ in range(2 + recording.QUEUE_BYTES // len(tokens) * 2):
            recorder.fetch(ROOT, tokens)
        recorder.close()
    assert "too slow" in recorder.failed
    assert len(caplog.records) == 1
    assert not recorder._calls


def test_keys_that_the_caller_has_are_not_hashed_again(path, monkeypatch):
    tokens = raw((1, 256), (2, 256), (3, 30))
    keys = block_keys(ROOT, tokens)
    recorder = Recorder(path)
    for known in ((), keys[:1], keys):
        recorder.fetch(ROOT, tokens, known)
    recorder.close()
    assert len({tuple(entry["hash_ids"]) for entry in lines(path)}) == 1
    hashed = []
    monkeypatch.setattr(trace_format, "chain", lambda key, block: hashed.append(key) or chain(key, block))
    assert block_keys(ROOT, tokens, keys[:2]) == keys
    assert hashed == [keys[1]]


def test_times_never_go_back(path, monkeypatch):
    clock = iter([5_000_000_000, 3_000_000_000, 6_500_000_000])
    monkeypatch.setattr(recording.time, "time_ns", lambda: next(clock))
    recorded(path, *[("fetch", raw())] * 3)
    assert [one["timestamp"] for one in lines(path)] == [5000, 5000, 6500]


def test_after_close_calls_do_nothing(path):
    recorder = Recorder(path)
    recorder.close()
    recorder.close()
    recorder.fetch(ROOT, raw((1, 256)))
    assert not path.read_bytes()
    assert recorder.failed is None


def test_a_full_disk_ends_the_recording_with_one_warning(path, monkeypatch, caplog):
    recorder = Recorder(path)

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recording, "FLUSH_BYTES", 1)
    monkeypatch.setattr(recording.os, "write", full)
    with caplog.at_level(logging.WARNING, "prefixcache"):
        for _ in range(3):
            recorder.fetch(ROOT, raw((1, 256)))
        recorder.close()
    assert recorder.failed == "No space left on device"
    assert [record.getMessage() for record in caplog.records] == [
        f"trace={str(path)!r}: recording has stopped (No space left on device); restart to record again"
    ]
    monkeypatch.undo()
    Recorder(path).close()  # the file was let go of


def test_half_a_line_of_a_full_disk_is_left_out_by_the_reader(path, monkeypatch):
    recorded(path, ("store", raw((1, 256))))
    recorder = Recorder(path)
    real = os.write
    left = [50]

    def nearly_full(fd, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(fd, data[: left[0]])
        left[0] -= taken
        return taken

    monkeypatch.setattr(recording.os, "write", nearly_full)
    recorder.fetch(ROOT, raw((1, 256)))
    recorder.close()
    trace = Trace(path)
    assert [request.call for request in trace] == ["store"]
    assert trace.torn


@pytest.mark.parametrize("loss", ["folder", "renamed", "replaced"])
def test_a_file_that_is_gone_ends_the_recording_with_one_warning(tmp_path, monkeypatch, caplog, loss):
    folder = tmp_path / "sub"
    folder.mkdir()
    path = folder / "t"
    recorder = Recorder(path)
    if loss == "folder":
        folder.rename(tmp_path / "other")
    else:
        path.rename(folder / "old")
        if loss == "replaced":
            path.write_bytes(b"")
    monkeypatch.setattr(recording, "FLUSH_BYTES", 1)
    with caplog.at_level(logging.WARNING, "prefixcache"):
        for _ in range(2):
            recorder.store(ROOT, raw((1, 256)))
        recorder.close()
    assert recorder.failed == ("another file has its name now" if loss == "replaced" else "No such file or directory")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("wrong", [None, "tokens", 5, [1, 2]])
def test_a_call_with_anything_never_raises(path, wrong):
    recorder = Recorder(path)
    recorder.fetch(ROOT, wrong)
    recorder.store(wrong, raw((1, 256)))
    recorder.close()
    assert recorder.failed


def test_threads_record_whole_lines_in_the_order_of_time(path, monkeypatch):
    monkeypatch.setattr(recording, "FLUSH_BYTES", 500)
    recorder = Recorder(path)

    def work(number: int) -> None:
        for turn in range(50):
            recorder.fetch(ROOT, raw((number, 256 * (turn % 4))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    trace = Trace(path)
    assert len(list(trace)) == 200
    assert trace.backwards == 0
    assert all(one["timestamp"] <= other["timestamp"] for one, other in pairwise(lines(path)))


def _child(recorder: Recorder, told) -> None:
    recorder.fetch(ROOT, raw((9, 256)))
    recorder.close()
    told.put(recorder.failed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_records_nothing_and_the_parent_goes_on(path):
    recorder = Recorder(path)
    recorder.store(ROOT, raw((1, 256)))
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with recorder._changed:  # as another thread may hold it
        child = context.Process(target=_child, args=(recorder, told))
        child.start()
    assert told.get(timeout=60) is None
    child.join(60)
    assert child.exitcode == 0
    recorder.fetch(ROOT, raw((1, 256)))
    recorder.close()
    assert [one["call"] for one in lines(path)] == ["store", "fetch"]
