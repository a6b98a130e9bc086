"""The host's GPU notices what a real one would get wrong in silence."""

import sys

import host_gpu
import numpy as np
import pytest

from prefixcache.kernels.dialects import DIALECTS, KernelSource

pytestmark = pytest.mark.skipif(host_gpu.COMPILER is None, reason="no C++ compiler")


def run(body, folder, dialect="metal", count=64, groups=1):
    source = KernelSource("probe", ("given",), ("found",), "", body)
    given = host_gpu.Given(np.arange(count, dtype=np.uint32), "uint32")
    return host_gpu.run(DIALECTS[dialect], source, [given], [((count,), "uint32")], groups, count, folder)[0]


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_lanes_exchange(dialect, programs):
    found = run(
        "found[member] = swapped(given[member], 5) + from_next(given[member]) * (member % 32 < 31);", programs, dialect
    )
    lanes = np.arange(64)
    np.testing.assert_array_equal(found, (lanes ^ 5) + np.where(lanes % 32 < 31, lanes + 1, 0))


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_shared_memory_is_seen_after_a_barrier(dialect, programs):
    body = "SHARED u32 all[64]; all[member] = given[member]; barrier(); found[member] = all[63 - member];"
    np.testing.assert_array_equal(run(body, programs, dialect), np.arange(64)[::-1])


@pytest.mark.skipif(sys.platform != "linux", reason="needs a linker that says where a section is")
@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_shared_memory_that_nobody_wrote_holds_garbage(dialect, programs):
    body = "SHARED u32 all[32]; SHARED u32 more[32]; found[member] = all[member % 32] & more[member % 32]; barrier(); "
    assert (run(body + "all[member % 32] = 0;", programs, dialect, groups=2) == 2**32 - 1).all()


def test_a_missing_barrier_shows(programs):
    body = "SHARED u32 all[64]; all[member] = given[member] + 1; found[member] = all[63 - member];"
    assert (run(body, programs) != 64 - np.arange(64)).any()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("found[member] = member % 2 ? swapped(given[member], 1) : 0;", "missed a collective"),
        ("if (member < 3) return; found[member] = swapped(given[member], 1);", "missed a collective"),
        (
            "u32 x = given[member]; if (x < 9) x = swapped(x, 1); else x = swapped(x, 1) + 1; found[member] = x;",
            "another",
        ),
        ("found[member] = swapped(given[member], member < 7 ? 1 : 2);", "another exchange"),
        ("found[member] = swapped(given[member], 32);", "outside its simdgroup"),
        ("if (member < 32) barrier(); found[member] = given[member];", "a barrier that not all"),
        ("u32 four[4] = {1, 2, 3, 4}; if (member == 5) store_four(found + 2, four);", "odd address"),
    ],
)
def test_divergence_is_caught(body, word, programs):
    with pytest.raises(AssertionError, match=word):
        run(body, programs)


@pytest.mark.parametrize("body", ["found[member + 1] = 1;", "found[member] = given[member + 1];"])
def test_a_buffers_end_is_its_end(body, programs):
    with pytest.raises(AssertionError, match="exit code -"):
        run(body, programs)


def test_a_buffers_start_is_its_start(programs):
    with pytest.raises(AssertionError, match="in front of a buffer"):
        run("found[int(member) - 1] = 1;", programs)


def test_small_inputs_are_constant_and_positions_are_passed():
    source = KernelSource("probe", ("given",), ("found",), "", "found[member] = given[0];")
    for count, space in ((7, "constant"), (8, "device")):
        given = host_gpu.Given(np.zeros(count, np.uint32), "uint32")
        text = host_gpu.metal_text(source, [given], ["uint32"])
        assert f"const {space} uint32_t* given [[buffer(0)]]" in text
        assert "uint thread_index_in_threadgroup [[thread_index_in_threadgroup]]" in text
