"""Reading traces: what lines become, what is torn, what is refused and in which words."""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import pickle
import tracemalloc
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.trace import reading
from prefixcache.trace.reading import Request, Trace, TraceError, summary

TRACES = Path(__file__).parents[1] / "fixtures" / "traces"
GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def line(**fields) -> str:
    return json.dumps({**GOOD, **fields}) + "\n"


def without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}) + "\n"


@pytest.fixture
def written(tmp_path):
    def write(text: str | bytes, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@st.composite
def prompts(draw, block: int) -> list[dict]:
    """Lines of a trace that contradicts itself nowhere: each prompt goes down a tree, whose nodes are the ids."""
    children: dict[tuple[int, int], int] = {}
    lines, time = [], 0
    for _ in range(draw(st.integers(1, 8))):
        node, ids = -1, []
        for turn in draw(st.lists(st.integers(0, 2), max_size=5)):
            node = children.setdefault((node, turn), len(children) * 7919 % 10007)
            ids.append(node)
        time += draw(st.integers(0, 5000))
        short = draw(st.integers(0, block - 1)) if ids else 0
        lines.append({"timestamp": time, "input_length": len(ids) * block - short, "output_length": 3, "hash_ids": ids})
    return lines


def as_requests(lines: list[dict]) -> list[Request]:
    start = lines[0]["timestamp"] if lines else 0
    return [
        Request((one["timestamp"] - start) / 1000, one["input_length"], one["output_length"], tuple(one["hash_ids"]))
        for one in lines
    ]


@given(lines=prompts(16), packed=st.booleans(), ended=st.booleans(), returns=st.booleans())
def test_what_is_written_is_read_plain_and_packed_as_often_as_one_likes(
    tmp_path_factory, lines, packed, ended, returns
):
    text = ("\r\n" if returns else "\n").join(json.dumps(one) for one in lines) + ("\n" if ended else "")
    path = tmp_path_factory.mktemp("t") / "any.name"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = Trace(path, 16)
    assert list(trace) == list(trace) == as_requests(lines)
    assert not trace.torn


@given(lines=prompts(16), data=st.data())
def test_cut_at_any_byte_all_whole_lines_come_back(tmp_path_factory, lines, data):
    text = "".join(json.dumps(one) + "\n" for one in lines).encode()
    cut = data.draw(st.integers(0, len(text)))
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_bytes(text[:cut])
    ends = [at for at, byte in enumerate(text) if byte == 10]
    count = sum(end <= cut for end in ends)  # a line without its newline is whole
    if not count:
        with pytest.raises(TraceError, match="no request in it"):
            Trace(path, 16)
        return
    trace = Trace(path, 16)
    assert list(trace) == as_requests(lines[:count])
    assert trace.torn is (cut not in ends and cut - 1 not in ends)


@given(lines=prompts(16), data=st.data())
def test_a_gzip_cut_anywhere_gives_the_lines_before_the_cut(tmp_path_factory, lines, data):
    text = "".join(json.dumps(one) + "\n" for one in lines).encode()
    packed = gzip.compress(text, data.draw(st.integers(0, 9)))
    cut = data.draw(st.integers(2, len(packed) - 1))
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_bytes(packed[:cut])
    with suppress(TraceError):  # of no whole line
        trace = Trace(path, 16)
        found = list(trace)
        assert found == as_requests(lines)[: len(found)]
        assert trace.torn


def test_a_gzip_without_its_checksum_still_gives_every_line(written):
    packed = gzip.compress((line() * 3).encode())
    trace = Trace(written(packed[:-8]))
    assert len(list(trace)) == 3
    assert trace.torn


def test_several_gzip_members_are_one_trace(written):
    assert len(list(Trace(written(gzip.compress(line().encode()) * 3)))) == 3


def test_a_torn_last_line_is_left_out_and_hinted_at_once(written, caplog):
    path = written(line() + line()[:-9])
    with caplog.at_level(logging.WARNING, "prefixcache"):
        trace = Trace(path)
        assert [len(list(trace)) for _ in range(2)] == [1, 1]
    assert trace.torn
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} ends within line 2 or its gzip stream: what was cut off is left out"
    ]


def test_what_a_crash_left_as_nulls_is_a_torn_line(written):
    trace = Trace(written(line().encode() + bytes(100)))
    assert len(list(trace)) == 1
    assert trace.torn


def test_a_byte_order_mark_blank_lines_and_further_fields_are_passed_over(written):
    trace = Trace(written("\ufeff" + line() + "\n  \n" + line(chat_id=7, text="é") + "\n"))
    assert [request.ids for request in trace] == [(1, 2), (1, 2)]
    assert not trace.torn


def test_a_prompt_of_no_tokens_has_no_ids(written):
    trace = Trace(written(line(input_length=0, hash_ids=[])))
    assert list(trace) == [Request(0.0, 0, 5, ())]
    assert trace.block == 512


def test_time_begins_at_zero_never_goes_back_and_says_how_often_it_would_have(written):
    trace = Trace(written("".join(line(timestamp=at) for at in (5000, 7500.5, 6000, 1, 8000))))
    assert [request.time for request in trace] == [0.0, 2.5005, 2.5005, 2.5005, 3.0]
    assert trace.backwards == 2
    list(trace)
    assert trace.backwards == 2


def test_a_limit_keeps_the_first_requests_and_reads_no_further(written):
    path = written("".join(line(output_length=n) for n in range(300)) + "no JSON\n")
    assert [request.output for request in Trace(path, limit=7)] == list(range(7))
    assert len(list(Trace(path, limit=300))) == 300
    with pytest.raises(TraceError, match="line 301: not JSON"):
        list(Trace(path))


def test_a_pass_that_is_left_early_does_not_disturb_the_next(written):
    trace = Trace(written(line() * 5))
    next(iter(trace))
    assert len(list(trace)) == 5


def test_two_passes_at_a_time_are_apart(written):
    trace = Trace(written("".join(line(output_length=n) for n in range(9))))
    assert all(one == other for one, other in zip(trace, trace, strict=True))


def test_a_trace_can_be_sent_to_another_process(written):
    trace = Trace(written(line()), limit=1)
    assert list(pickle.loads(pickle.dumps(trace))) == list(trace)


# ---------------------------------------------------------------- the block size


@pytest.mark.parametrize(
    ("lengths", "block"),
    [
        ([(1000, 2), (512, 1), (513, 2)], 512),
        ([(1024, 2), (1500, 2)], 512),  # no id for a tail
        ([(100, 1)], 512),
        ([(1000, 63), (33, 3)], 16),
        ([(1000, 62), (33, 2)], 16),
        ([(10_000_000, 10_000)], 1000),
        ([(7, 7), (9, 9)], 1),
    ],
)
def test_the_block_is_found_from_the_first_lines(written, lengths, block):
    ids = range(max(count for _, count in lengths))
    text = "".join(line(input_length=length, hash_ids=list(ids[:count])) for length, count in lengths)
    trace = Trace(written(text))
    assert trace.block == block
    assert [len(request.ids) for request in trace] == [count for _, count in lengths]


def test_a_block_that_the_lengths_do_not_tell_is_asked_for(written):
    path = written(line(input_length=129))
    with pytest.raises(TraceError, match=r"an id may stand for 44 to 128 tokens; say for how many with --block"):
        Trace(path)
    assert len(list(Trace(path, 128))) == 1


def test_lengths_that_no_block_fits_are_refused(written):
    path = written(line(input_length=1600, hash_ids=list(range(100))) + line(input_length=1600, hash_ids=[0]))
    with pytest.raises(TraceError, match=r"line 2: hash_ids has 1 ids for an input_length of 1600.*--block"):
        Trace(path)
    with pytest.raises(TraceError, match=r"line 1: hash_ids has 2 ids for an input_length of 0"):
        Trace(written(line(input_length=0)))
    with pytest.raises(TraceError, match=r"line 1: hash_ids has 1 ids for an input_length of 0"):
        list(Trace(written(line(input_length=0, hash_ids=[1]))))


def test_the_lines_own_block_size_is_taken_and_a_given_one_stands_above_it(written):
    path = written(line(block_size=600, call="fetch") + line(block_size=600, call="store"))
    trace = Trace(path)
    assert trace.block == 600
    assert [request.call for request in trace] == ["fetch", "store"]
    assert Trace(path, 500).block == 500


def test_another_block_size_further_on_is_refused(written):
    path = written(line(block_size=600) + line(block_size=700))
    with pytest.raises(TraceError, match=r"line 2: block_size is 700, but 600 before.*--block"):
        list(Trace(path))
    assert len(list(Trace(path, 600))) == 2


@pytest.mark.parametrize(("length", "fits"), [(1023, False), (1024, True), (1536, True), (2047, True), (2048, False)])
def test_ids_are_one_for_each_block_and_at_most_one_for_a_tail(written, length, fits):
    trace = Trace(written(line(input_length=length, hash_ids=[1, 2, 3])), 512)
    if fits and length > 1024:
        assert next(iter(trace)).tokens == length
    else:
        with pytest.raises(TraceError, match=rf"line 1: hash_ids has 3 ids for an input_length of {length}, .*--block"):
            list(trace)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("empty", [b"", b"\n\n", gzip.compress(b"", mtime=0), b"\x1f\x8b", b'{"timest'])
def test_an_empty_trace_is_an_error(written, empty):
    with pytest.raises(TraceError, match=r"trace\.jsonl: no request in it.* one JSON object a line"):
        Trace(written(empty))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{\n", "not JSON"),
        ("secret words\n", "not JSON"),
        ('{"a": ' + "[" * 100_000 + "\n", "not JSON"),
        ("\xff\n".encode("latin-1"), "not JSON"),
        ("[]\n", "a list, not an object"),
        ("null\n", "null, not an object"),
        (without("timestamp"), "timestamp is missing"),
        (without("input_length"), "input_length is missing"),
        (without("output_length"), "output_length is missing"),
        (without("hash_ids"), "hash_ids is missing"),
        (line(timestamp="0"), "timestamp is a string; write milliseconds"),
        (line(timestamp=True), "timestamp is true or false"),
        (line(timestamp=-1), "timestamp is -1;"),
        (line(timestamp=math.nan), "timestamp is nan;"),
        (line(timestamp=math.inf), "timestamp is inf;"),
        (line(timestamp=10**400), "timestamp is a number of 1329 bits;"),
        (line(input_length=-1), "input_length is -1;"),
        (line(input_length=1e3), "input_length is a fraction; write a whole number of tokens"),
        (line(input_length=None), "input_length is null"),
        (line(input_length=2**63), "input_length is 9223372036854775808;"),
        (line(output_length=True), "output_length is true or false"),
        (line(output_length=[]), "output_length is a list"),
        (line(hash_ids="1 2"), "hash_ids is a string; write a list of whole numbers"),
        (line(hash_ids={"1": 2}), "hash_ids is an object"),
        (line(hash_ids=[1, "secret words"]), "hash_ids holds a string; write a list of whole numbers"),
        (line(hash_ids=[1, None]), "hash_ids holds null"),
        (line(hash_ids=[1, True]), "hash_ids holds true or false"),
        (line(hash_ids=[1, 2.0]), "hash_ids holds a fraction"),
        (line(hash_ids=[[1], [2]]), "hash_ids holds a list"),
        (line(hash_ids=[1, -2]), "hash_ids holds -2; write ids from 0 to 2**63 - 1, such as 63 bits of a hash"),
        (line(hash_ids=[1, 2**63]), "hash_ids holds 9223372036854775808;"),
        (line(hash_ids=[1, 2**4000]), "hash_ids holds a number of 4001 bits;"),
        (line(call="secret words"), "call is none of request, fetch, store"),
        (line(call=[]), "call is none of request, fetch, store"),
        (line(block_size=0), "block_size is 0"),
        (line(block_size="512"), "block_size is a string"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_number_and_field(written, bad, said):
    path = written(line().encode() + (bad if isinstance(bad, bytes) else bad.encode()) + line().encode())
    with pytest.raises(TraceError) as error:
        list(Trace(path, 512))
    assert str(error.value).startswith(f"{path}, line 2: {said}")
    assert "secret words" not in str(error.value)


@pytest.mark.parametrize(
    ("grown", "said"),
    [
        ({"0": 1}, "grown is an object; write [[index in hash_ids, id of the tail, tokens of the tail], ...]"),
        ([1], "grown holds something else than lists of three whole numbers"),
        ([[0, 7]], "grown holds something else than lists of three whole numbers"),
        ([[0, 7, True]], "grown holds something else than lists of three whole numbers"),
        ([[0, 7, 9], [0, "secret words", 9]], "grown holds something else than lists of three whole numbers"),
        ([[2, 7, 9]], "grown has index 2, but hash_ids has 2 ids"),
        ([[-1, 7, 9]], "grown has index -1, but hash_ids has 2 ids"),
        ([[0, -7, 9]], "grown holds id -7; write ids from 0 to 2**63 - 1"),
        ([[0, 2**63, 9]], "grown holds id 9223372036854775808;"),
        ([[0, 7, 0]], "grown has a tail of 0 tokens"),
        ([[0, 7, 9], [1, 7, 512]], "grown has a tail of 512 tokens, but an id stands for 512; write fewer"),
    ],
)
def test_a_tail_that_cannot_have_grown_is_named_with_its_line(written, grown, said):
    path = written(line() + line(grown=grown))
    with pytest.raises(TraceError) as error:
        list(Trace(path))
    assert str(error.value).startswith(f"{path}, line 2: {said}")
    assert "secret" not in str(error.value)


def test_tails_that_have_grown_are_read(written):
    plain, grown = Trace(written(line() + line(grown=[[1, 7, 511], [0, 2**63 - 1, 1]])))
    assert (plain.grown, grown.grown) == ((), ((1, 7, 511), (0, 2**63 - 1, 1)))


def test_the_largest_ids_and_lengths_are_read(written):
    path = written(line(hash_ids=[2**63 - 1, 0], output_length=2**63 - 1))
    assert list(Trace(path)) == [Request(0.0, 1000, 2**63 - 1, (2**63 - 1, 0))]


def test_a_folder_a_missing_file_a_pipe_and_a_binary_file_are_named(tmp_path, written):
    with pytest.raises(TraceError, match=r"a folder; give the trace's file"):
        Trace(tmp_path)
    with pytest.raises(TraceError, match=r"nowhere: can't be read \(No such file or directory\)"):
        Trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="can't be read"):
        Trace(tmp_path / "a\0b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="no regular file"):
        Trace(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"a binary file; a trace has one JSON object a line"):
        Trace(written(bytes(range(256))))


def test_a_damaged_gzip_is_named(written):
    packed = bytearray(gzip.compress(np.random.default_rng(0).bytes(4000).hex().encode()))
    packed[2000] ^= 255
    with pytest.raises(TraceError, match=r"unreadable after line 0 \(.*\); copy or record it anew"):
        Trace(written(bytes(packed)))
    wrong = bytearray(gzip.compress(line().encode()))
    wrong[-8] ^= 1
    with pytest.raises(TraceError, match=r"unreadable after line 1 \(CRC"):
        Trace(written(bytes(wrong)))
    with pytest.raises(TraceError, match="unreadable"):
        Trace(written(gzip.compress(line().encode()) + b"more"))


def test_a_line_without_end_is_given_up(written, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 1000)
    monkeypatch.setattr(reading, "LINE_BYTES", 5000)
    with pytest.raises(TraceError, match="line 2: longer than"):
        Trace(written(gzip.compress(line().encode() + b" " * 10_000)))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "512"])
def test_a_block_or_limit_that_is_no_number_of_them_is_refused(written, wrong):
    for name in ("block", "limit"):
        with pytest.raises(TraceError, match=f"{name}={wrong!r}: write a whole number from 1 on"):
            Trace(written(line()), **{name: wrong})


# ---------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("paths", "number", "said"),
    [
        ([[1, 2], [3, 2]], 2, "id 2 after id 3, but also after id 1;"),
        ([[1, 2], [2, 1]], 2, "id 2 after nothing (a prompt's first block), but also after id 1;"),
        ([[1, 2], [3, 1]], 2, "id 1 after id 3, but also after nothing (a prompt's first block);"),
        ([[0, 1], [1, 0]], 2, "id 1 after nothing (a prompt's first block), but also after id 0;"),
        ([[5, 5]], 1, "id 5 after"),
        ([[5, 6, 5]], 1, "id 5 after"),
        ([[9], [5, 6, 7, 6]], 2, "id 6 after"),
    ],
)
def test_an_id_under_two_parents_is_refused_with_both(written, paths, number, said):
    text = "".join(line(input_length=len(ids), hash_ids=ids) for ids in paths)
    with pytest.raises(TraceError, match="needs an id of its own") as error:
        list(Trace(written(text), 1))
    assert str(error.value).startswith(f"{written(text)}, line {number}: hash_ids has {said}")


@given(lines=prompts(1), data=st.data())
def test_any_id_moved_to_another_parent_is_found(tmp_path_factory, lines, data):
    """Also when few places are there, as long as no other id took its place."""
    parents = {child: parent for one in lines for parent, child in zip([-1, *one["hash_ids"]], one["hash_ids"])}  # noqa: B905
    if not parents:
        return
    child = data.draw(st.sampled_from(sorted(parents)))
    other = data.draw(st.sampled_from(sorted({-1, 20_000, *parents} - {child, parents[child]})))
    above = [other] if other >= 0 else []
    while above and above[0] in parents and parents[above[0]] >= 0:
        above.insert(0, parents[above[0]])
    if child in above:
        return
    moved = {**GOOD, "timestamp": 10**6, "input_length": len(above) + 1, "hash_ids": [*above, child]}
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*lines, moved]))
    with pytest.raises(TraceError, match=rf"line {len(lines) + 1}: hash_ids has id {child} after"):
        list(Trace(path, 1))


@given(lines=prompts(1), places=st.sampled_from([1, 2, 8]))
def test_no_contradiction_is_made_up_by_ids_that_share_a_place(tmp_path_factory, lines, places):
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PLACES", places)
        assert list(Trace(path, 1)) == as_requests(lines)


# ---------------------------------------------------------------- the traces of real use, and memory


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("chat", (12_031, 0, 144_793_823, 4_122_048, 288_500, 182_790, True, 3536.999, 126_195)),
        ("coding_agents", (3_398, 0, 413_701_007, 1_414_021, 806_322, 27_286, True, 134_009.109, 542_666)),
    ],
)
def test_the_known_numbers_of_the_real_traces(name, known):
    trace = Trace(TRACES / f"{name}.jsonl.gz")
    found = summary(trace)
    assert found == known
    assert (trace.block, trace.torn, trace.backwards) == (512, False, 0)
    assert found.mean_tokens == known[2] / known[0]


def test_a_summary_counts_prompts_looked_up_and_stores_apart(written):
    text = (
        line(call="fetch")
        + line(call="store", input_length=1400, hash_ids=[1, 2, 3], timestamp=4000)
        + line(call="fetch")
    )
    assert summary(Trace(written(text))) == (2, 1, 2000, 10, 4, 3, True, 4.0, 1000)


def test_a_summary_of_nothing_has_zeros():
    nothing = summary([])
    assert nothing == (0, 0, 0, 0, 0, 0, True, 0.0, 0)
    assert nothing.mean_tokens == 0


def test_many_distinct_blocks_are_estimated_and_said_to_be(monkeypatch):
    monkeypatch.setattr(reading, "EXACT", 1 << 12)
    monkeypatch.setattr(reading, "CHUNK", 1 << 12)
    found = summary(Request(0.0, 0, 0, tuple(range(at, at + 2000))) for at in range(0, 200_000, 1000))
    assert not found.exact
    assert found.blocks == pytest.approx(201_000, rel=0.06)  # 2,048 to 4,096 are kept


def test_a_trace_is_read_in_constant_memory(written, monkeypatch):
    """2.6 MB of lines, of which a chunk of 64 kB and a line or two are held."""
    monkeypatch.setattr(reading, "CHUNK", 1 << 16)
    text = line(input_length=512 * 2000, hash_ids=list(range(10**6, 10**6 + 2000))).encode() * 150
    trace = Trace(written(gzip.compress(text, 1)))
    tracemalloc.start()
    try:
        passing = iter(trace)
        next(passing)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        assert sum(len(request.ids) for request in passing) == 149 * 2000
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < len(text) // 4


def test_the_ids_of_the_real_traces_have_one_parent_each():
    for name in ("chat", "coding_agents"):
        parents: dict[int, int] = {}
        for request in Trace(TRACES / f"{name}.jsonl.gz", limit=500):
            for parent, child in zip((-1, *request.ids), request.ids):  # noqa: B905
                assert parents.setdefault(child, parent) == parent
        assert Counter(parents.values()).most_common(1)[0][1] > 1
