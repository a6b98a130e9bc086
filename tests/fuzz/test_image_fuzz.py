"""Hostile images: whatever the bytes, `examine` takes what can be read, or raises ImageError, and needs little memory.

Random damage never gets past the checksum, so the headers here are sealed anew: what an attacker would do.
"""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from prefixcache import image_format
from prefixcache.image_format import DTYPES, Blueprint, HeaderFields, Image, ImageError, Spec, examine
from tests.fuzz.targets import sealed_anew

META = {
    "checksum": "0" * 32,
    "format": str(image_format.FORMAT),
    "kind": "rows",
    "key": "1" * 64,
    "parent": "2" * 64,
    "namespace": "3" * 64,
    "model": "m",
    "codec": "{}",
    "layout": "{}",
    "start": "0",
    "extra": "{}",
}
BEYOND = 2**63


def forged(header: bytes | str, body: bytes = b"") -> np.ndarray:
    header = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return sealed_anew(len(header).to_bytes(8, "little") + header + body)


def text(tensors, **meta) -> str:
    return json.dumps({"__metadata__": {**META, **meta}, **tensors}, separators=(",", ":"))


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more) -> dict:
    return {"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}}


def without(field: str) -> str:
    return json.dumps({"__metadata__": {k: v for k, v in META.items() if k != field}}, separators=(",", ":"))


def quickly(header: str | bytes, room: int, headers: image_format.Headers | None = None) -> None:
    """What `Headers` says is what `parse_header` says, the first time and the second."""
    header = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    try:
        expected = image_format.parse_header(header, room)
    except ImageError as error:
        expected = str(error)
    headers = headers or image_format.Headers()
    for _ in range(2):
        try:
            said = headers.parse(header, room)
        except ImageError as error:
            said = str(error)
        assert said == expected


def readable(data: np.ndarray, checksum: str | None = None) -> bool:
    """Whether it is believed; then everything in it must be readable, too."""
    try:
        examine(data, checksum)
    except ImageError:
        return False
    meta, tensors = Image(data).header()
    assert isinstance(meta, HeaderFields)
    assert sum(array.nbytes for array in tensors.values()) <= data.nbytes
    for array in tensors.values():
        array.tobytes()
    return True


def test_what_is_forged_here_is_taken_when_it_is_sound():
    assert readable(forged(text({})))
    assert readable(forged(text(entry()), b"1234"))
    assert readable(forged(text(entry("F32", (), (0, 4))), b"1234"))
    assert readable(forged(text(entry("F32", (0, 3), (0, 0)))))


HEADERS = {
    "not JSON": "{" + text({})[1:-1],
    "a list": text({}) + "]",
    "two values": text({}) + "{}",
    "no metadata's end": text({})[:-2],
    "metadata alone": text({})[:-1],
    "deep lists": text({})[:-1] + ',"t":' + "[" * 200_000 + "]" * 200_000 + "}",
    "deep objects": text({})[:-1] + ',"t":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",
    "invalid UTF-8": text({})[:-1].encode() + b',"\xff\xfe":1}',
    "half a surrogate": text({})[:-1].encode() + b',"\xed\xa0\x80":1}',
    "a NUL": text({})[:-1] + ',"\0":1}',
    "duplicate tensors": text(entry())[:-1] + "," + json.dumps(entry())[1:],
    "duplicate metadata": text({})[:-1] + ',"__metadata__":{}}',
    "duplicate checksum": text({}).replace('"format"', '"checksum":"1","format"'),
    "duplicate fields of a tensor": text(entry()).replace('"dtype"', '"dtype":"U8","dtype"'),
    "a tensor that is a number": text({"t": 1}),
    "a tensor that is a list": text({"t": []}),
    "a tensor that is null": text({"t": None}),
    "an empty tensor entry": text({"t": {}}),
    "a field too many": text(entry(more=1)),
    "no dtype": text({"t": {"shape": [4], "data_offsets": [0, 4]}}),
    "a huge integer": text({})[:-1] + ',"t":' + "9" * 100_000 + "}",
    "a huge shape": text(entry()).replace("[4]", "[" + "9" * 4000 + "]"),
    "a huge offset": text(entry()).replace("[0,4]", "[0," + "9" * 4000 + "]"),
    "infinity": text(entry(shape=[float("inf")])),
    "not a number": text(entry(offsets=[0, float("nan")])),
    "format of tomorrow": text({}, format="3"),
    **{
        f"{field} {v!r}": text({}, **{field: v})
        for field in ("key", "parent", "namespace", "checksum")
        for v in ("", "k", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 31 + "\n")
    },
    "tokens of another dtype": text({"tokens": entry("U8", [4], [0, 4])["t"]}),
    "tokens of two dimensions": text({"tokens": entry("I64", [0, 4], [0, 0])["t"]}),
    "format with surrogates": text({}, format="\ud800" * 100),
    "unknown kind": text({}, kind="prompt"),
    "empty start": text({}, start=""),
    "negative start": text({}, start="-1"),
    "start with a sign": text({}, start="+1"),
    "start with a fraction": text({}, start="1.5"),
    "start with spaces": text({}, start=" 1"),
    "start in other digits": text({}, start="\u0663"),
    "superscript start": text({}, start="\u00b2"),
    "start too long to read": text({}, start="9" * 5000),
    "start beyond 64 bits": text({}, start="9" * 19),
    **{f"no {field}": without(field) for field in META if field != "checksum"},
    **{
        f"{field} as {type(v).__name__}": text({}, **{field: v})
        for field in META
        if field != "checksum"
        for v in (1, None, ["a"], {"a": "b"}, True, 1.5)
    },
    "unknown field of metadata that is no text": text({}, later=5),
    **{
        f"dtype {d!r}": text(entry(dtype=d))
        for d in ("F8_E4M3", "u8", "", "F16 ", 5, None, True, ["U8"], {"U8": 1}, 1.5)
    },
    **{
        f"shape {s!r}": text({"t": {"dtype": "U8", "shape": s, "data_offsets": [0, 4]}})
        for s in (
            4,
            None,
            "4",
            {"4": 4},
            [4.0],
            [True, 4],
            [-4],
            [-2, -2],
            ["4"],
            [None],
            [[4]],
            [2**40],
            [BEYOND],
            [2**32, 2**32],
            [4, 0],
            [1] * 33 + [4],
            [4] + [1] * 100_000,
        )
    },
    **{
        f"shape {s!r} of nothing": text({"t": {"dtype": "U8", "shape": s, "data_offsets": [0, 0]}})
        for s in ([2**39, 2**39, 0], [0] * 65, [0.0], [False], [-0.0], [2**40, 0])
    },
    **{
        f"offsets {o!r}": text({"t": {"dtype": "U8", "shape": [4], "data_offsets": o}})
        for o in (
            4,
            None,
            "04",
            {},
            [],
            [0],
            [0, 4, 8],
            [4, 0],
            [-4, 0],
            [0, 3],
            [0, 5],
            [1, 5],
            [0, 2**63],
            [-1, 3],
            [0.0, 4.0],
            [False, 4],
            [0, "4"],
            [None, 4],
            [[0], [4]],
            {"0": 0, "4": 4},
        )
    },
    "a boolean offset": text(entry(shape=[1], offsets=[0, True])),
    "overlapping tensors": text({"a": entry()["t"], "b": entry()["t"]}),
    "a gap between tensors": text({"a": entry("U8", [1], [0, 1])["t"], "b": entry("U8", [1], [3, 4])["t"]}),
    "tensors in another order": text({"b": entry("U8", [2], [2, 4])["t"], "a": entry("U8", [2], [0, 2])["t"]}),
    "no tensor for the bytes": text({}),
    "fewer bytes than a tensor has": text(entry(shape=[8], offsets=[0, 8])),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=[name[:60] for name in HEADERS])
def test_a_hostile_header_is_an_image_error(header):
    body = b"" if "[0,0]" in (header if isinstance(header, str) else "") else b"1234"
    quickly(header, len(body))
    with pytest.raises(ImageError) as caught:
        examine(forged(header, body))
    assert str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("claim", [0, 1, 7, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1])
def test_a_header_of_a_hostile_length_takes_no_memory(claim):
    data = forged(text(entry()), b"1234")
    data[:8] = np.frombuffer(claim.to_bytes(8, "little"), np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError):
            examine(sealed_anew(data.tobytes()))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [[2**39], [2**39, 2**39], [2**39] * 30, [2**20, 2**20, 0], [2**39] * 30 + [0]])
def test_a_hostile_shape_takes_no_memory(shape):
    nbytes = 0 if 0 in shape else 2**50
    data = forged(text(entry(shape=shape, offsets=[0, nbytes])))
    tracemalloc.start()
    try:
        readable(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_of_a_megabyte_of_rubbish_takes_a_few():
    header = text({})[:-1] + ',"t":[' + "[]," * 300_000 + "[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(ImageError):
            examine(forged(header))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_any_few_bytes_are_an_image_error():
    for size in range(100):
        for fill in (b"\0", b"\xff", b"{", b"0"):
            assert not readable(np.frombuffer(bytearray(fill * size), np.uint8))


@given(st.binary(max_size=300))
@example(b"")
def test_random_bytes_are_an_image_error(data):
    assert not readable(np.frombuffer(bytearray(data), np.uint8))
    assert not readable(sealed_anew(data))


@given(st.binary(max_size=300))
@example(b"")
def test_random_bytes_behind_the_opening_are_an_image_error(rest):
    assume(rest.strip() != b"}")  # the header whole
    assert not readable(forged(image_format.OPENING + b"0" * 32 + rest))
    assert not readable(forged(text({}).encode()[:-1] + rest))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=5)
    | st.sampled_from([0, 1, 4, -1, 2**63, "U8", "F32", "C64", "shape", "dtype", "data_offsets", [0, 4], [4]]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=4)
    ),
    max_leaves=10,
)
tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPES)) | junk,
        "shape": st.lists(st.integers(0, 4) | junk, max_size=3) | junk,
        "data_offsets": st.lists(st.integers(0, 20) | junk, min_size=1, max_size=3) | junk,
    }
)


@given(st.dictionaries(st.text(max_size=3), tensors | junk, max_size=3), st.binary(max_size=40))
def test_random_tensor_tables_are_refused_or_readable(table, body):
    readable(forged(text(table), body))


@given(st.sampled_from([name for name in META if name != "checksum"]), junk, st.booleans())
def test_random_metadata_is_refused_or_readable(field, value, inside):
    readable(forged(text({}, **{field: value})))
    readable(forged(text({}, extra=text({"a": value}) if inside else "{}")))


BASE = Blueprint(
    HeaderFields(**{k: META[k] for k in HeaderFields._fields if k != "start"}, start=0),
    [Spec("a", "F32", (2, 2)), Spec("b", "U8", (3,))],
)


def base() -> bytes:
    draft = BASE.draft()
    draft.tensors["a"][...] = 1
    draft.tensors["b"][...] = 2
    return draft.seal().data.tobytes()


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_bytes_changed_and_sealed_anew_are_refused_or_readable(changes):
    data = bytearray(base())
    for at, value in changes:
        data[at % len(data)] = value
    readable(sealed_anew(bytes(data)))


@given(st.integers(0, 10**6), st.integers(0, 30), st.binary(max_size=30))
def test_stretches_replaced_and_sealed_anew_are_refused_or_readable(at, length, new):
    data = base()
    at %= len(data)
    spliced = data[:at] + new + data[at + length :]
    readable(sealed_anew(spliced))
    header = spliced[8:]  # with a length that fits, so that the header is reached
    readable(forged(header[: header.rfind(b"}") + 1], header[header.rfind(b"}") + 1 :]))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30), st.binary(max_size=30)), min_size=1, max_size=3))
@example([(text({}).index('"start":"') + 9, 1, b"0099")])
@example([(text({}).index('"start":"') + 9, 1, b"9" * 12)])
@example([(text({}).index('"start":"') + 9, 1, b"9" * 13)])
@example([(text({}).index('"key":"') + 7, 1, b"g")])
@example([(text({}).index('"kind":"') + 8, 4, b"snapshot")])
@example([(text({}).index('"m"') + 1, 1, b'\\",\\"start\\":\\"1')])
def test_a_header_like_one_that_is_known_is_judged_as_if_it_were_parsed(changes):
    data = base()
    end = 8 + int.from_bytes(data[:8], "little")
    header, headers = data[8:end], image_format.Headers()
    headers.parse(header, len(data) - end)
    for at, length, new in changes:
        header = header[:at] + new + header[at + length :]
    quickly(header, len(data) - end, headers)
