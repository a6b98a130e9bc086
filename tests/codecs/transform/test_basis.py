"""A basis's file: what was written comes back, and of a file that was damaged or forged nothing is believed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_basis import INTERLEAVED, MODEL, ROPE, WEIGHTS, bytes_of, group_of, layer, rows_of

from prefixcache.codecs.transform import bases as bases_module
from prefixcache.codecs.transform import basis as basis_module
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import (
    ANCHORS,
    Basis,
    BasisError,
    BasisOrigin,
    Measured,
    basis_bytes,
    model_of,
    read,
    summary,
)
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.codecs.transform.entropy import DamagedCodes
from prefixcache.codecs.transform.rope import NO_ROPE
from prefixcache.codecs.transform.tables import first_guess

VALID = bytes_of()
MEASURED = Measured(0.0021, 0.0022, 4, 1020, "matched")
HEADER = 8 + int.from_bytes(VALID[:8], "little")

Fields = dict[str, str]
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process does, with no basis read."""
    monkeypatch.setattr(bases_module, "_loaded", {})
    monkeypatch.setattr(bases_module, "_lock", threading.Lock())


def parts() -> tuple[Fields, Tensors]:
    fields = json.loads(VALID[8:HEADER])["__metadata__"]
    return fields, {name: array.copy() for name, array in safetensors.numpy.load(VALID).items()}


def changed(change: Callable[[Fields, Tensors], Any]) -> bytes:
    """The valid basis with other fields or tensors, as a sound safetensors file."""
    fields, tensors = parts()
    change(fields, tensors)
    return safetensors.numpy.save(tensors, fields)


def of_header(change: Callable[[dict[str, Any]], Any], data: bytes = VALID[HEADER:]) -> bytes:
    """The valid basis with another header, over the same data or this."""
    header = json.loads(VALID[8:HEADER])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def usable(basis: Basis) -> None:
    """Rows can be coded with it, whatever its numbers are: to values, or refused as damaged."""
    for group in basis.groups:
        coder = GroupCoder(group, basis.tables, 4.0, group.layers[0].dtype)
        streams = [np.ones((3, heads, width), np.float16) for heads, width in coder.streams]
        with np.errstate(all="ignore"), contextlib.suppress(DamagedCodes):
            coder.decode(coder.encode(streams, 0), 0)


def basis_of(data: bytes) -> Basis | None:
    """None where it is refused, with a reason."""
    try:
        return Basis(data)
    except BasisError as error:
        if not str(error):
            raise
        return None


# -- what was written comes back ----------------------------------------------------------------------------------------


def test_all_that_was_written_comes_back():
    windowed = layer(5, rotation=INTERLEAVED)._replace(window=128)
    groups = [group_of([layer(0), layer(1, rotation=NO_ROPE)]), group_of([windowed], seed=1)]
    basis = Basis(basis_bytes(groups, first_guess(), BasisOrigin(MODEL, 4, "fisher", "some")))
    assert (basis.model, basis.metric, basis.texts, basis.sinks) == (MODEL, "fisher", "some", 4)
    assert [group.layers for group in basis.groups] == [group.layers for group in groups]
    for mine, theirs in zip(basis.groups, groups, strict=True):
        for name in ("mean", "vectors", "spreads", "words"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name))
        for pair, other in zip(mine.factors, theirs.factors, strict=True):
            assert all(np.array_equal(*both) for both in zip(pair, other, strict=True))
    assert np.array_equal(basis.tables.frequencies, first_guess().frequencies)
    assert basis.place_of(5) == (1, groups[1].layers[0])
    assert basis.place_of(2) is None
    assert summary(basis)["layers"] == 3


@pytest.mark.parametrize("anchor", ANCHORS)
def test_what_was_measured_comes_back(anchor):
    said = MEASURED._replace(anchor=anchor)
    basis = Basis(basis_bytes([group_of([layer(0)])], first_guess(), BasisOrigin(MODEL, 4, "fisher", ""), said))
    assert basis.measured == said
    assert summary(basis)["measured"] == said._asdict()
    assert Basis(VALID).measured is summary(Basis(VALID))["measured"] is None


def test_the_same_gives_the_same_bytes_and_the_name_is_theirs():
    assert bytes_of() == VALID
    assert Basis(VALID).hash != Basis(bytes_of(model=MODEL + "0")).hash
    assert Basis(VALID).hash == Basis(VALID).hash


def test_an_array_of_a_basis_can_not_be_written():
    basis = Basis(VALID)
    for array in (basis.groups[0].vectors, basis.groups[0].mean, basis.groups[0].factors[0][0], basis.tables.points):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


# -- damaged --------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_of_any_byte_of_the_header_is_refused_or_gives_another_basis():
    name = Basis(VALID).hash
    for at in range(HEADER):
        data = bytearray(VALID)
        data[at] ^= 1 << at % 8
        basis = basis_of(bytes(data))
        assert basis is None or basis.hash != name


@given(at=st.integers(0, 8 * (len(VALID) - HEADER) - 1))
def test_a_flipped_bit_of_the_data_is_refused_or_gives_another_basis(at):
    data = bytearray(VALID)
    data[HEADER + at // 8] ^= 1 << at % 8
    if (basis := basis_of(bytes(data))) is not None:
        assert basis.hash != Basis(VALID).hash
        usable(basis)


@given(length=st.integers(0, len(VALID) - 1))
def test_a_truncated_file_is_refused(length):
    with pytest.raises(BasisError):
        Basis(VALID[:length])


@pytest.mark.parametrize("more", [b"\0", b" " * 8, VALID])
def test_a_longer_file_is_refused(more):
    with pytest.raises(BasisError):
        Basis(VALID + more)


ANYWHERE = st.tuples(st.integers(0, len(VALID)), st.binary(max_size=12), st.integers(0, 12))
IN_THE_HEADER = st.tuples(
    st.integers(0, HEADER), st.sampled_from([b"-1", b"1e999", b"NaN", b"[", b'"', b"{}", b"9" * 20]), st.integers(0, 4)
)


@settings(max_examples=100)
@given(pieces=st.lists(st.one_of(ANYWHERE, IN_THE_HEADER), min_size=1, max_size=4))
def test_any_mutation_is_refused_or_gives_another_basis(pieces):
    data = bytearray(VALID)
    for at, put, length in pieces:
        data[at : at + length] = put
    if (basis := basis_of(bytes(data))) is not None:
        assert (basis.hash == Basis(VALID).hash) == (bytes(data) == VALID)
        usable(basis)


@settings(max_examples=100)
@given(length=st.integers(0, 2**64 - 1), tail=st.binary(max_size=64))
def test_a_claimed_length_of_the_header_is_not_believed(length, tail):
    data = length.to_bytes(8, "little") + tail
    with pytest.raises(BasisError):
        Basis(data)


# -- forged: sound safetensors files that are no basis --------------------------------------------------------------------


def put(name: str, **at: Any) -> Callable[[Fields, Tensors], None]:
    def change(fields: Fields, tensors: Tensors) -> None:
        tensors[name][at.get("where", 0)] = at["value"]

    return change


def said(position: int, **values: Any) -> Callable[[Fields, Tensors], None]:
    """Layer `position` is described otherwise."""

    def change(fields: Fields, tensors: Tensors) -> None:
        layers = json.loads(fields["layers"])
        layers[position].update(values)
        fields["layers"] = json.dumps(layers)

    return change


def field(name: str, value: str) -> Callable[[Fields, Tensors], None]:
    return lambda fields, tensors: fields.update({name: value})


def measured(**values: Any) -> Callable[[Fields, Tensors], None]:
    return lambda fields, tensors: fields.update(measured=json.dumps(MEASURED._asdict() | values))


def swap(one: str, other: str) -> Callable[[Fields, Tensors], None]:
    def change(fields: Fields, tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def as_dtype(name: str, dtype: Any) -> Callable[[Fields, Tensors], None]:
    def change(fields: Fields, tensors: Tensors) -> None:
        tensors[name] = tensors[name].astype(dtype)

    return change


def upper(fields: Fields, tensors: Tensors) -> None:
    tensors["l0.keys"][0, 0, 1] = 1


def twice(fields: Fields, tensors: Tensors) -> None:
    layers = json.loads(fields["layers"])
    fields["layers"] = json.dumps([*layers, layers[0]])


FORGED: dict[str, tuple[Callable[[Fields, Tensors], Any], str]] = {
    "a NaN in the mean": (put("g0.mean", value=np.nan), "g0.mean has values that are not finite"),
    "an infinite vector": (put("g1.vectors", value=np.inf), "g1.vectors has values that are not finite"),
    "an infinite factor": (put("l0.keys", value=-np.inf), "l0.keys has values that are not finite"),
    "a NaN among the frequencies of RoPE": (put("l0.frequencies", value=np.nan), "not finite"),
    "a NaN among the points": (put("points", value=np.nan), "not finite"),
    "a negative point": (put("points", value=-1), "points: not between 0 and 3"),
    "a negative spread": (put("g0.spreads", where=-1, value=-1), "its spreads don't fall"),
    "a spread of zero": (put("g0.spreads", where=-1, value=0), "its spreads don't fall"),
    "rising spreads": (put("g0.spreads", where=3, value=1e6), "its spreads don't fall"),
    "negative lengths": (put("g0.words", value=-1), "its rows have no length"),
    "endless lengths": (put("g0.words", value=1e9), "its rows have no length"),
    "a factor of zeros": (put("l0.values", value=0), "the metric of its values is none"),
    "a factor that is no triangle": (upper, "the metric of its keys is none"),
    "a factor that overflows when it is undone": (
        put("l0.keys", where=(0, 0, 0), value=1e-45),
        "its metric can't be undone",
    ),
    "frequencies that don't add up": (put("frequencies", where=(0, 0), value=0), "frequencies"),
    "no escape": (put("frequencies", where=(slice(None), -1), value=0), "frequencies"),
    "tables of another shape": (lambda f, t: t.update(points=t["points"][:-1]), "points of float32"),
    "swapped groups": (swap("g0.mean", "g1.mean"), "mean of float32"),
    "swapped keys and values": (swap("l0.keys", "l0.values"), "keys of float32"),
    "vectors of float32": (as_dtype("g0.vectors", np.float32), "vectors of float32"),
    "spreads of float64": (as_dtype("g0.spreads", np.float64), "spreads of float64"),
    "a mean of int32": (as_dtype("g0.mean", np.int32), "mean of int32"),
    "frequencies of float32": (as_dtype("l0.frequencies", np.float32), "its frequencies are none"),
    "a transposed matrix": (lambda f, t: t.update({"g0.vectors": t["g0.vectors"][:, :-1]}), "vectors of float16"),
    "a missing tensor": (lambda f, t: t.pop("g1.spreads"), "no tensor 'g1.spreads'"),
    "a tensor too many": (lambda f, t: t.update(more=np.zeros(1)), "a tensor 'more' that none has"),
    "another format": (field("format", "2"), "a basis of format '2': this release reads '1'"),
    "another field": (field("more", ""), "its header says other things"),
    "a missing field": (lambda f, t: f.pop("texts"), "its header says other things"),
    "no layers": (field("layers", "[]"), "not a basis"),
    "no groups": (field("groups", "[]"), "a tensor"),
    "an empty group": (lambda f, t: f.update(groups=f["groups"][:-1] + ", []]"), "no tensor 'g2.mean'"),
    "a layer in two groups": (field("groups", "[[0, 1], [5], [0]]"), "no tensor 'g2.mean'"),
    "a layer in a group twice": (field("groups", "[[0, 0, 1], [5]]"), "not a basis"),
    "a layer that isn't there": (field("groups", "[[0, 7], [5]]"), "not a basis"),
    "a layer twice": (twice, "no tensor 'l0.frequencies'"),
    "numbers that are truths": (field("groups", "[[0, true], [5]]"), "its groups are not lists of whole numbers"),
    "groups that are no lists": (field("groups", '"015"'), "its groups are not lists of whole numbers"),
    "layers nested without end": (field("layers", "[" * 100_000), "not a basis"),
    "groups nested without end": (field("groups", "[" * 100_000), "not a basis"),
    "no JSON": (field("layers", "{"), "not a basis"),
    "layers of another kind": (field("layers", "[1]"), "not a basis"),
    "sinks that are no number": (field("sinks", "four"), "not a basis"),
    "negative sinks": (field("sinks", "-1"), "not a basis"),
    "endless sinks": (field("sinks", "9" * 5000), "not a basis"),
    "a negative index": (said(0, index=-1), "not a basis"),
    "no heads": (said(0, heads=0), "layer 0 has heads and widths"),
    "half a head": (said(0, heads=1.5), "layer 0 has heads and widths"),
    "true heads": (said(0, heads=True), "layer 0 has heads and widths"),
    "huge widths": (said(0, heads=8192, key_width=8192, value_width=8192), "mean of float32"),
    "wider than any": (said(0, key_width=1 << 40), "layer 0 has heads and widths"),
    "an unknown dtype": (said(0, dtype="float64"), "'float64'"),
    "more pairs than values": (said(0, key_width=4, value_width=9), "its frequencies are none"),
    "no measurement": (field("measured", ""), "not a basis"),
    "a measurement that is a list": (field("measured", "[1, 1, 1, 1]"), "not a basis"),
    "a measurement that is a truth": (field("measured", "false"), "not a basis"),
    "a measurement nested without end": (field("measured", "[" * 100_000), "not a basis"),
    "a measurement of something else": (measured(more=1), "not a basis"),
    "a measurement of less": (lambda f, t: f.update(measured='{"kl": 0.1}'), "not a basis"),
    "negative KL": (measured(kl=-1e-3), "what was measured is no KL"),
    "a NaN as KL": (measured(kl=float("nan")), "what was measured is no KL"),
    "infinite KL": (measured(reference_kl=float("inf")), "what was measured is no KL"),
    "a text as KL": (measured(reference_kl="1"), "what was measured is no KL"),
    "a truth as KL": (measured(kl=True), "what was measured is no KL"),
    "no windows": (measured(windows=0), "of no number of tokens"),
    "half a token": (measured(tokens=0.5), "of no number of tokens"),
    "endless tokens": (measured(tokens=1 << 40), "of no number of tokens"),
    "an unknown anchor": (measured(anchor="x" * 5000), "anchored in no way"),
    "an anchor that is a list": (measured(anchor=["matched"]), "anchored in no way"),
    "a rotation of no length": (said(0, scale=0.0), "no finite numbers"),
    "a rotation that isn't finite": (said(0, scale=float("inf")), "no finite numbers"),
    "a rotation that says nothing": (said(0, interleaved=None), "how it rotates is none of ours"),
    "a group of several windows": (said(0, window=128), "group 0: its layers can't be joined"),
    "a negative window": (said(0, window=-1), "its window is of -1 tokens"),
    "half a window": (said(0, window=1.5), "its window is of 1.5 tokens"),
    "a window that is a truth": (said(0, window=True), "its window is of True tokens"),
    "a window that is no number": (said(0, window=None), "its window is of None tokens"),
    "an endless window": (said(0, window=1 << 40), "its window is of"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_basis_is_refused_with_the_reason(kind, tmp_path):
    change, told = FORGED[kind]
    data = changed(change)
    with pytest.raises(BasisError) as refused:
        Basis(data)
    assert told in str(refused.value)
    assert len(str(refused.value)) < 500
    with pytest.raises(BasisError):
        Bases(tmp_path).save(data)
    assert list(tmp_path.iterdir()) == []


def test_what_is_changed_without_being_forged_is_a_basis():
    assert Basis(changed(lambda fields, tensors: None)).groups[0].layers == Basis(VALID).groups[0].layers


@pytest.mark.parametrize(
    "claim",
    [
        {"shape": [1 << 40], "dtype": "F32", "data_offsets": [0, 1 << 42]},
        {"shape": [1 << 40], "dtype": "F32", "data_offsets": [0, 8]},
        {"shape": [1 << 33, 1 << 33], "dtype": "F16", "data_offsets": [0, 0]},
        {"shape": [1 << 62, 0], "dtype": "F16", "data_offsets": [0, 0]},
        {"shape": [-1], "dtype": "F32", "data_offsets": [0, 4]},
        {"shape": [1], "dtype": "F4", "data_offsets": [0, 4]},
    ],
)
def test_memory_stays_in_proportion_to_the_file_whatever_a_header_claims(claim):
    data = of_header(lambda header: header.update({"g0.mean": claim}))
    tracemalloc.start()
    try:
        with pytest.raises(BasisError):
            Basis(data)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(data)
    finally:
        tracemalloc.stop()


def test_tensors_that_share_bytes_are_refused():
    def share(header: dict[str, Any]) -> None:
        header["g1.mean"]["data_offsets"] = header["g0.mean"]["data_offsets"]

    with pytest.raises(BasisError):
        Basis(of_header(share))


def test_a_file_larger_than_any_basis_is_not_read(tmp_path):
    path = tmp_path / "large.safetensors"
    path.write_bytes(b"")
    os.truncate(path, (1 << 36) + 1)  # sparse
    with pytest.raises(BasisError, match="larger than any basis"):
        read(path)


@pytest.mark.parametrize(
    "data",
    [b"", bytes(8), b"\xff" * 16, b"\x0a" + bytes(7) + b"[" * 10, (1 << 20).to_bytes(8, "little") + b"[" * (1 << 20)],
)
def test_a_file_without_a_header_says_no_model(tmp_path, data):
    path = tmp_path / "none.safetensors"
    path.write_bytes(data)
    with pytest.raises(BasisError, match="not a basis"):
        model_of(path)
    assert Bases(tmp_path).of_model(MODEL) is None


# -- in a folder ------------------------------------------------------------------------------------------------------------


def test_a_basis_is_found_by_its_model_and_by_its_hash(tmp_path):
    bases = Bases(tmp_path / "not" / "there")
    assert bases.of_model(MODEL) is None
    path = bases.save(VALID)
    assert path == tmp_path / "not" / "there" / f"tiny-{Basis(VALID).hash}.safetensors"
    assert bases.path_of(Basis(VALID).hash) == path
    assert bases.of_model(MODEL) is bases.of_hash(Basis(VALID).hash)
    assert bases.of_model(MODEL).hash == Basis(VALID).hash
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_weights_decide_and_not_the_name(tmp_path):
    bases = Bases(tmp_path)
    bases.save(VALID)
    assert bases.of_model(f"renamed@{WEIGHTS}") is not None
    assert bases.of_model(f"tiny@{WEIGHTS[::-1]}") is None
    assert bases.of_model(f"{MODEL}+{WEIGHTS[::-1]}") is None  # with an adapter
    assert bases.of_model(f"{MODEL}|draft@{WEIGHTS[::-1]}") is not None
    for code in (
        "code 0123456789abcdef",
        "code fedcba9876543210",
        "mlx-lm 0.32.2",
    ):  # rows are decorrelated all the same
        assert bases.of_model(f"{MODEL}|{code}") is not None
    assert bases.of_model(f"other@{WEIGHTS[::-1]}|draft@{WEIGHTS}") is None
    for part in ("pp 2:4/4", "of 01234567|pp 0:2/4", "tp 1/2"):  # a rank's, whose layers or heads are others
        assert bases.of_model(f"{MODEL}|code 0123456789abcdef|{part}") is None
    assert bases.of_model("process-1-2-3") is None


def test_names_without_weights_are_names(tmp_path):
    bases = Bases(tmp_path)
    bases.save(bytes_of(model="process-1-2-3"))
    assert bases.of_model("process-1-2-3") is not None
    assert bases.of_model("process-1-2-4") is None


@pytest.mark.parametrize("model", ["../../etc/x@1", "a/b@1", "", "@", "\0\n@1", "x" * 300 + "@1", "...@1"])
def test_a_files_name_is_plain_whatever_the_model_is_called(tmp_path, model):
    path = Bases(tmp_path / "bases").save(bytes_of(model=model))
    assert path.parent == tmp_path / "bases"
    assert len(path.name) < 128
    assert not path.name.startswith(".")


def test_saved_twice_it_is_one_file_and_the_newest(tmp_path):
    bases, other = Bases(tmp_path), bytes_of(groups=[group_of([layer(3)])])
    first = bases.save(VALID)
    os.utime(first, (1, 1))
    bases.save(other)
    assert bases.of_model(MODEL).hash == Basis(other).hash
    os.utime(bases.path_of(Basis(other).hash), (2, 2))
    assert bases.save(VALID) == first
    assert bases.of_model(MODEL).hash == Basis(VALID).hash
    assert len(list(tmp_path.iterdir())) == 2


def test_saved_over_a_damaged_file_of_its_name_it_is_whole(tmp_path):
    bases = Bases(tmp_path)
    path = bases.save(VALID)
    path.write_bytes(VALID[:-1])
    assert bases.save(VALID) == path
    assert path.read_bytes() == VALID


def test_saved_by_several_threads_at_once_it_is_one_whole_file(tmp_path):
    bases, paths, start = Bases(tmp_path / "bases"), [], threading.Barrier(8)

    def save() -> None:
        start.wait()
        paths.append(bases.save(VALID))

    threads = [threading.Thread(target=save) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8
    assert list((tmp_path / "bases").iterdir()) == [paths[0]]
    assert paths[0].read_bytes() == VALID


def test_a_folder_that_takes_no_files_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        Bases(tmp_path / "file").save(VALID)
    assert Bases(tmp_path / "file").of_model(MODEL) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to any folder")
def test_a_read_only_folder_takes_nothing_and_what_is_there_is_found(tmp_path):
    bases = Bases(tmp_path)
    bases.save(VALID)
    tmp_path.chmod(0o500)
    try:
        assert bases.save(VALID).is_file()
        with pytest.raises(PermissionError):
            bases.save(bytes_of(groups=[group_of([layer(3)])]))
        assert bases.of_model(MODEL) is not None
    finally:
        tmp_path.chmod(0o700)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def refuse(one: Any, other: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        Bases(tmp_path).save(VALID)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_newest_is_left_out_with_a_warning_and_the_next_is_taken(tmp_path, caplog):
    bases, newer = Bases(tmp_path), bytes_of(groups=[group_of([layer(3)])])
    os.utime(bases.save(VALID), (1, 1))
    path = bases.save(newer)
    damaged = bytearray(newer)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    (tmp_path / "newest.safetensors").write_bytes(b"no basis at all")
    with caplog.at_level(logging.WARNING, "prefixcache"):
        assert bases.of_model(MODEL).hash == Basis(VALID).hash
    assert [path.name in message for message in caplog.messages].count(True) == 1
    assert len(caplog.messages) == 2


def test_a_flip_that_leaves_a_basis_is_refused_by_the_files_name(tmp_path):
    bases = Bases(tmp_path)
    path = bases.save(VALID)
    fields = changed(lambda fields, tensors: put("g0.mean", value=0.5)(fields, tensors))
    assert Basis(fields).hash != Basis(VALID).hash
    path.write_bytes(fields)
    with pytest.raises(BasisError, match="its content is not what its name says; delete it and calibrate again"):
        bases.of_hash(Basis(VALID).hash)
    assert bases.of_model(MODEL) is None


def test_a_file_with_anothers_name_is_not_that_one(tmp_path):
    bases, other = Bases(tmp_path), bytes_of(model=f"other@{WEIGHTS[::-1]}")
    path = bases.save(VALID)
    theirs = bases.save(other)
    shutil.copy(theirs, path)
    with pytest.raises(BasisError, match="its content is not what its name says"):
        bases.of_hash(Basis(VALID).hash)
    assert bases.of_model(MODEL) is None
    assert bases.of_model(f"other@{WEIGHTS[::-1]}").hash == Basis(other).hash


def test_a_basis_that_was_read_stays_though_its_file_goes_or_is_damaged(tmp_path):
    bases = Bases(tmp_path)
    path = bases.save(VALID)
    found = bases.of_hash(Basis(VALID).hash)
    path.write_bytes(b"")
    assert bases.of_hash(found.hash) is found
    path.unlink()
    assert bases.of_hash(found.hash) is found


@pytest.mark.parametrize("digest", ["", "x" * 32, "../" * 11, "0" * 31, 7, None, "0" * 32])
def test_a_hash_that_is_none_or_not_here_is_refused(tmp_path, digest):
    with pytest.raises(BasisError):
        Bases(tmp_path).of_hash(digest)


def test_what_is_no_plain_file_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    bases = Bases(tmp_path)
    assert bases.of_model(MODEL) is None
    path = bases.save(VALID)
    assert bases.of_model(MODEL).hash == Basis(VALID).hash
    assert path.is_file()


def test_a_folder_that_may_not_be_looked_at_has_none(tmp_path):
    """Python's glob raises an error there in some releases, and nothing in others."""
    bases, user = Bases(tmp_path / "closed" / "bases"), os.geteuid()
    bases.save(VALID)
    (tmp_path / "closed").chmod(0)
    os.seteuid(user or 65534)  # nothing is closed to root
    try:
        assert bases.files() == []
        assert bases.of_model(MODEL) is None
    finally:
        os.seteuid(user)
        (tmp_path / "closed").chmod(0o700)


def test_a_file_that_is_still_copied_costs_a_look_and_one_warning(tmp_path, monkeypatch, caplog):
    """A server looks for a basis with each prompt meanwhile."""
    (tmp_path / "x.safetensors").write_bytes(VALID[:-1])
    monkeypatch.setattr(basis_module, "Basis", None)
    bases = Bases(tmp_path)
    assert [bases.of_model(MODEL) for _ in range(3)] == [None] * 3
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("age", [-5, 5])
def test_what_macos_puts_beside_a_file_is_no_basis(tmp_path, caplog, age):
    """On disks that know no attributes, exFAT and SMB: a ._NAME with each file, written just before it or after."""
    bases = Bases(tmp_path)
    path = bases.save(VALID)
    beside = path.with_name(f"._{path.name}")
    beside.write_bytes(b"\0\5\x16\7" + bytes(4092))
    os.utime(beside, (path.stat().st_mtime + age,) * 2)
    assert bases.of_hash(Basis(VALID).hash).hash == Basis(VALID).hash
    assert bases.of_model(MODEL) is not None
    assert bases.files() == [path]
    assert not caplog.records


def test_rows_are_coded_by_what_was_read(tmp_path):
    bases = Bases(tmp_path)
    bases.save(VALID)
    basis = bases.of_model(MODEL)
    for group in basis.groups:
        coder = GroupCoder(group, basis.tables, 4.0, group.layers[0].dtype)
        rows = rows_of(group, 40)
        back = coder.decode(coder.encode(rows, 0), 0)
        assert all(np.abs(a.astype(np.float32) - b).max() < 1 for a, b in zip(rows, back, strict=True))
    assert basis.groups[0].layers[0].rotation == ROPE
