from __future__ import annotations

import tracemalloc
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from prefixcache.image_format import (
    DTYPES,
    FORMAT,
    TOKENS,
    Blueprint,
    Digest,
    HeaderFields,
    Image,
    ImageError,
    Spec,
    examine,
)

META = HeaderFields(
    "rows", "ab" * 32, "cd" * 32, "ef" * 32, "qwen3-8b", '{"name":"raw"}', '{"layers":[0]}', 512, '{"x":1}'
)

texts = st.text(max_size=30)
metas = st.builds(
    HeaderFields,
    kind=st.sampled_from(["rows", "window", "snapshot"]),
    **dict.fromkeys(("key", "parent", "namespace"), st.binary(min_size=32, max_size=32).map(bytes.hex)),
    **dict.fromkeys(("model", "codec", "layout", "extra"), texts),
    start=st.integers(0, 2**40 - 1),
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = texts.filter(lambda name: name not in ("__metadata__", TOKENS))
specs = st.lists(
    st.builds(Spec, names, st.sampled_from(sorted(DTYPES)), shapes)
    | st.builds(Spec, st.just(TOKENS), st.just("I64"), st.tuples(st.integers(0, 5))),
    max_size=6,
    unique_by=lambda spec: spec.name,
)


def bytes_of(spec: Spec, seed: int) -> bytes:
    data = np.random.default_rng(seed).integers(0, 2 if spec.dtype == "BOOL" else 256, spec.nbytes, np.uint8)
    return data.tobytes()


def sealed(meta: HeaderFields, chosen: list[Spec], seed: int = 0) -> Image:
    draft = Blueprint(meta, chosen).draft()
    for i, spec in enumerate(chosen):
        draft.tensors[spec.name][...] = np.frombuffer(bytes_of(spec, seed + i), DTYPES[spec.dtype]).reshape(spec.shape)
    return draft.seal()


def foreign(image: Image | bytes) -> np.ndarray:
    return np.frombuffer(bytearray(image if isinstance(image, bytes) else image.data.tobytes()), np.uint8)


def believed(data: np.ndarray, checksum: str | None = None) -> Image:
    examine(data, checksum)
    return Image(data)


def small() -> Image:
    return sealed(META._replace(model="m", codec="", layout=""), [Spec("a", "U8", (3,)), Spec("b", "F16", (2,))])


# -- what goes in comes out -------------------------------------------------------------------------------------------


@given(metas, specs, st.integers(0, 1000))
def test_what_was_sealed_is_what_examined_bytes_give(meta, chosen, seed):
    blueprint = Blueprint(meta, chosen)
    image = sealed(meta, chosen, seed)
    assert image.nbytes == image.data.nbytes == blueprint.nbytes
    for checksum in (None, image.checksum):
        again, tensors = believed(foreign(image), checksum).header()
        assert again == meta
        assert tensors.keys() == {spec.name for spec in chosen}
        for i, spec in enumerate(chosen):
            assert tensors[spec.name].shape == spec.shape
            assert tensors[spec.name].dtype == DTYPES[spec.dtype]
            assert tensors[spec.name].tobytes() == bytes_of(spec, seed + i)


def test_the_last_start_that_is_written_is_read():
    meta = META._replace(start=2**40 - 1)
    assert believed(foreign(sealed(meta, []))).header()[0] == meta


@given(metas, specs)
def test_every_tensor_starts_at_a_multiple_of_its_element(meta, chosen):
    image = sealed(meta, chosen)
    origin = image.data.ctypes.data
    for array in image.tensors().values():
        assert not array.size or (array.ctypes.data - origin) % array.itemsize == 0


def test_the_size_is_exact_before_memory_is_taken():
    tracemalloc.start()
    try:
        blueprint = Blueprint(META, [Spec("a", "F32", (1 << 20, 256)), Spec("b", "U8", (7,))])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (1 << 30) + 7 < blueprint.nbytes < (1 << 30) + 7 + 2048


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("shape", "count"), [((), 1), ((0,), 0), ((3, 0, 2), 0), ((2, 3), 6)])
def test_a_specs_size(dtype, shape, count):
    assert Spec("a", dtype, shape).nbytes == count * DTYPES[dtype].itemsize


def test_equal_content_has_equal_bytes():
    assert (
        sealed(META, [Spec("a", "F32", (4,))], 7).data.tobytes()
        == sealed(META, [Spec("a", "F32", (4,))], 7).data.tobytes()
    )


def test_an_image_without_tensors_is_an_image():
    assert believed(foreign(sealed(META, []))).header() == (META, {})


@given(
    st.integers(1, 256),
    st.integers(0, 256),
    st.lists(st.integers(1, 4), max_size=3),
    st.sampled_from(["U32", "F16", "U8"]),
)
def test_the_first_tokens_of_a_block_are_a_byte_prefix_of_each_tensor(tokens, first, rest, dtype):
    first = min(first, tokens)
    whole = sealed(META, [Spec("k", dtype, (tokens, *rest))]).tensors()["k"]
    part = Blueprint(META, [Spec("k", dtype, (first, *rest))]).draft()
    part.tensors["k"][...] = whole[:first]
    assert whole.tobytes()[: whole[:first].nbytes] == part.seal().tensors()["k"].tobytes() == whole[:first].tobytes()


# -- immutable --------------------------------------------------------------------------------------------------------


def test_an_image_is_read_only_and_so_are_its_tensors():
    for image in (sealed(META, [Spec("a", "F32", (4,))]), believed(foreign(sealed(META, [Spec("a", "F32", (4,))])))):
        for array in (image.data, image.tensors()["a"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def test_a_draft_gives_up_its_arrays_when_sealed():
    draft = Blueprint(META, [Spec("a", "F32", (4,))]).draft()
    draft.seal()
    assert draft.tensors == {}


def test_tensors_cost_no_memory_of_their_own():
    image = sealed(META, [Spec("a", "F32", (1000,))])
    assert np.shares_memory(image.tensors()["a"], image.data)


# -- others read it ---------------------------------------------------------------------------------------------------

READABLE = [Spec(name.lower(), name, (3, 2)) for name in DTYPES if name != "BF16"] + [
    Spec("none", "F32", (0, 4)),
    Spec("scalar", "F16", ()),
]


def test_the_safetensors_library_reads_it(tmp_path):
    image = sealed(META, READABLE, 5)
    (tmp_path / "a.safetensors").write_bytes(image.data.tobytes())
    loaded = safetensors.numpy.load(image.data.tobytes())
    assert loaded.keys() == image.tensors().keys()
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        said = file.metadata()
        for name, array in image.tensors().items():
            for read in (loaded[name], file.get_tensor(name)):
                assert read.dtype == array.dtype
                assert read.shape == array.shape
                assert read.tobytes() == array.tobytes()
    assert said.pop("checksum") == image.checksum
    assert said.pop("format") == str(FORMAT)
    assert said == {**META._asdict(), "start": "512"}


@given(metas, specs.map(lambda chosen: [spec for spec in chosen if spec.dtype != "BF16"]))
def test_the_safetensors_library_reads_any_image(meta, chosen):
    image = sealed(meta, chosen)
    loaded = safetensors.numpy.load(image.data.tobytes())
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in image.tensors().items()
    }


def test_mlx_reads_it_bfloat16_too(tmp_path):
    chosen = [Spec(name.lower(), name, (3, 2)) for name in DTYPES if name not in ("F64", "BOOL")]
    image = sealed(META, chosen, 3)
    (tmp_path / "a.safetensors").write_bytes(image.data.tobytes())
    loaded, said = mx.load(str(tmp_path / "a.safetensors"), return_metadata=True)
    assert said == {"checksum": image.checksum, "format": str(FORMAT), **META._asdict(), "start": "512"}
    assert loaded.keys() == image.tensors().keys()
    for name, array in image.tensors().items():
        assert bytes(memoryview(loaded[name]).cast("B")) == array.tobytes()
    assert loaded["bf16"].dtype == mx.bfloat16


def test_other_libraries_see_a_flipped_bit_as_we_do_only_by_the_checksum():
    data = foreign(small())
    data[-1] ^= 1
    safetensors.numpy.load(data.tobytes())
    with pytest.raises(ImageError, match="the checksum does not match"):
        examine(data)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_the_checksum_is_of_the_whole_file_with_its_own_digits_as_zeros():
    image = small()
    data = image.data.tobytes()
    assert data.count(image.checksum.encode()) == 1
    assert xxhash.xxh3_128_hexdigest(data.replace(image.checksum.encode(), b"0" * 32)) == image.checksum


@given(cuts=st.lists(st.integers(0, 400), max_size=6), bit=st.none() | st.integers(0, 8 * 400 - 1))
def test_the_checksum_of_pieces_is_that_of_the_whole(cuts, bit):
    image = small()
    data = foreign(image)
    if bit is not None:
        data[bit // 8 % data.nbytes] ^= 1 << bit % 8
    digest = Digest()
    for first, last in pairwise([0, *sorted(min(cut, data.nbytes) for cut in cuts), data.nbytes]):
        digest.update(data[first:last].data)
    if bit is None:
        assert examine(data, digest=digest) == examine(data)
        assert digest.hex() == image.checksum
    else:
        with pytest.raises(ImageError):
            examine(data, digest=digest)


def test_every_flipped_bit_of_a_small_image_is_found():
    image = small()
    for bit in range(image.nbytes * 8):
        data = foreign(image)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ImageError):
            examine(data)
        with pytest.raises(ImageError):
            examine(foreign(data.tobytes()), image.checksum)


LARGE = sealed(META, [Spec("k", "U32", (256, 700)), Spec("v", "F16", (256, 500))])


@given(st.integers(0, LARGE.nbytes * 8 - 1))
def test_flipped_bits_of_a_large_image_are_found(bit):
    data = foreign(LARGE)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ImageError):
        examine(data, LARGE.checksum)


@given(st.integers(0, LARGE.nbytes - 1), st.binary(min_size=1, max_size=4096))
def test_overwritten_stretches_are_found(at, junk):
    data = foreign(LARGE)
    junk = junk[: LARGE.nbytes - at]
    before = data[at : at + len(junk)].tobytes()
    data[at : at + len(junk)] = np.frombuffer(junk, np.uint8)
    if before == junk:
        examine(data)
    else:
        with pytest.raises(ImageError):
            examine(data)


def test_every_truncation_is_found():
    data = small().data.tobytes()
    for length in range(len(data)):
        with pytest.raises(ImageError):
            examine(foreign(data[:length]))


@pytest.mark.parametrize("more", [b"\0", b" ", b"\0" * 8, b"x" * 4096])
def test_bytes_beyond_the_end_are_found(more):
    with pytest.raises(ImageError):
        examine(foreign(small().data.tobytes() + more))


def test_zeroed_ends_are_found():
    whole = small().data.tobytes()
    for kept in range(len(whole)):
        if any(whole[kept:]):
            with pytest.raises(ImageError):
                examine(foreign(whole[:kept] + bytes(len(whole) - kept)))


def test_another_image_than_the_index_names_is_refused():
    one, other = sealed(META, [Spec("a", "U8", (8,))], 1), sealed(META, [Spec("a", "U8", (8,))], 2)
    with pytest.raises(ImageError, match="not the one that the index names"):
        examine(foreign(one), other.checksum)
    with pytest.raises(ImageError, match="not the one that the index names"):
        examine(foreign(one), "")


def test_an_error_says_nothing_of_the_prompt():
    image = sealed(META._replace(model="secret-model", extra="secret-extra"), [Spec("secret", "U8", (8,))])
    for at in range(0, image.nbytes, 7):
        data = foreign(image)
        data[at] ^= 255
        with pytest.raises(ImageError) as caught:
            examine(data)
        assert "secret" not in str(caught.value)
