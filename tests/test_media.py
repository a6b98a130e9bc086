"""Media of a prompt: what their ids and digests are made of, and lists that are refused by name."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache import Media, chunks, media_digest
from prefixcache.keys import PSEUDO_IDS
from prefixcache.media import as_media, check_placeholders, last_end, outside_media, rope_delta, with_pseudo_ids

DIGEST = media_digest("image", b"a")
PIXELS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@st.composite
def lists_of_media(draw: st.DrawFn) -> tuple[Media, ...]:
    """Media in order, some of them adjacent."""
    spans, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.sampled_from([0, 0, 1, 7]), st.integers(1, 9)), max_size=5)):
        digest = media_digest("image", draw(st.sampled_from([b"a", b"b"])))
        positions, whole = draw(st.none() | st.integers(0, 12)), draw(st.booleans())
        spans.append(Media(at + gap, length, digest, positions, whole))
        at = spans[-1].end
    return tuple(spans)


@pytest.mark.parametrize(
    "others",
    [
        media_digest("audio", [PIXELS, np.array([1, 2, 3])]),
        media_digest("image", [PIXELS, np.array([1, 2, 4])]),
        media_digest("image", [PIXELS.reshape(2, 4, 3), np.array([1, 2, 3])]),
        media_digest("image", [PIXELS.astype(np.float64), np.array([1, 2, 3])]),
        media_digest("image", [np.array([1, 2, 3]), PIXELS]),
        media_digest("image", PIXELS),
        media_digest("image", [PIXELS, np.array([1, 2, 3])], "qwen2_vl 4.57"),
        media_digest("image", [PIXELS.tobytes(), np.array([1, 2, 3])]),
    ],
)
def test_a_digest_covers_kind_settings_and_all_that_an_array_is(others: bytes) -> None:
    assert media_digest("image", [PIXELS, np.array([1, 2, 3])]) != others


def test_a_digest_is_that_of_equal_arrays_whatever_their_memory() -> None:
    assert media_digest("image", PIXELS) == media_digest("image", PIXELS.transpose(2, 1, 0).copy().transpose(2, 1, 0))
    assert media_digest("image", bytearray(b"ab")) == media_digest("image", memoryview(b"ab"))
    assert media_digest("image", [b"a", b"b"]) != media_digest("image", [b"ab", b""])


@pytest.mark.parametrize("data", ["text", 3, None, {"pixels": 1}, [3], np.array([None])])
def test_data_that_no_encoder_is_given_is_refused(data: object) -> None:
    with pytest.raises(TypeError, match="media_digest: "):
        media_digest("image", data)


def test_an_array_that_numpy_cant_have_is_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"media_digest: an array of dtype mlx.core.bfloat16: give it as float32"):
        media_digest("image", mx.zeros((2, 2), mx.bfloat16))


@given(lists_of_media())
def test_a_list_in_order_is_taken_and_any_other_order_refused(spans: tuple[Media, ...]) -> None:
    end = spans[-1].end if spans else 0
    assert as_media(spans, end) == spans
    if len(spans) > 1:
        with pytest.raises(ValueError, match=r"media\[1\] begins at token .* before the end of media\[0\]"):
            as_media(spans[::-1], end)
        with pytest.raises(ValueError, match=r"media\[1\] begins"):
            as_media([spans[0], *spans], end)
    if spans:
        with pytest.raises(ValueError, match=f"goes beyond the prompt's {end - 1} tokens"):
            as_media(spans, end - 1)


@given(lists_of_media())
def test_boundaries_are_outside_of_whole_media_and_nothing_else_moves_them(spans: tuple[Media, ...]) -> None:
    for place in range(spans[-1].end + 3 if spans else 3):
        inside = [medium for medium in spans if medium.whole and medium.start < place < medium.end]
        assert outside_media(spans, place) == (inside[0].start if inside else place)
        ended = [medium for medium in spans if medium.end <= place]
        assert last_end(spans, place) == max((medium.end for medium in ended), default=0)
        known = [medium for medium in ended if medium.positions is not None]
        assert rope_delta(spans, place) == sum(medium.positions - medium.length for medium in known)


@given(lists_of_media(), st.integers(1, 12), st.integers(0, 5))
def test_chunks_are_gapless_and_end_in_no_whole_medium(spans: tuple[Media, ...], step: int, more: int) -> None:
    last = (spans[-1].end if spans else 0) + more
    for limit in {last, max(last - 1, 0)}:
        bounds = [0, *(end for _, end in chunks(0, limit, step, spans))]
        assert [*chunks(0, limit, step, spans)] == [*pairwise(bounds)]
        assert bounds[-1] == outside_media(spans, limit)
        assert all(outside_media(spans, end) == end for end in bounds)
        for first, end in pairwise(bounds):
            assert 0 < end - first <= step or (first, end) in {(medium.start, medium.end) for medium in spans}


@given(lists_of_media(), st.integers(0, 5))
def test_ids_outside_of_media_stay_and_those_inside_tell_what_is_there(spans: tuple[Media, ...], more: int) -> None:
    ids = np.full((spans[-1].end if spans else 0) + more, 7)
    keyed = with_pseudo_ids(ids, spans)
    assert (ids == 7).all()
    inside = np.zeros(len(ids), bool)
    for medium in spans:
        inside[medium.start : medium.end] = True
    assert (keyed[~inside] == 7).all()
    assert (keyed[inside] >= PSEUDO_IDS).all()
    for a in spans:
        for b in spans:
            same = (a.digest, a.length, a.positions) == (b.digest, b.length, b.positions)
            assert (keyed[a.start] == keyed[b.start]) == same


def test_pseudo_ids_are_what_they_were() -> None:
    """They are in files: another would be a miss for all that is stored."""
    assert DIGEST.hex() == "c610cd7ee96cb4b2f98f0a6ccce91191d33a48c017a5df50e1767a0dd742fb1b"
    assert Media(3, 2, DIGEST).pseudo_ids().tolist() == [7074577319222673709, 7921276984127146321]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"start": -1}, "start=-1"),
        ({"length": 0}, "length=0: give an int of at least 1"),
        ({"length": 2.0}, "length=2.0: give an int"),
        ({"start": True}, "start=True"),
        ({"start": 1 << 60}, "start="),
        ({"positions": -3}, "positions=-3"),
        ({"positions": 10**5000}, "positions="),
        ({"digest": None}, "digest None: give the 32 bytes"),
        ({"digest": b"short"}, "digest of 5 bytes: give the 32 bytes"),
        ({"digest": "a" * 32}, "digest 'aaa"),
        ({"whole": 1}, "whole=1: give True or False"),
    ],
)
def test_a_medium_that_can_t_be_is_refused_by_name(values: dict[str, object], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Media(**{"start": 0, "length": 4, "digest": DIGEST, **values})  # type: ignore[arg-type]


def test_what_is_no_medium_is_refused() -> None:
    with pytest.raises(TypeError, match=r"media\[0\] of type tuple"):
        as_media([(0, 4, DIGEST)], 4)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"media of type Media: give a list of them"):
        as_media(Media(0, 4, DIGEST), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, -256])
def test_chunks_of_no_tokens_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"chunks: step={step}: give a number of tokens, 1 or more"):
        next(chunks(0, 10, step))


@given(lists_of_media(), st.data())
def test_placeholders_are_those_of_media_and_no_others(spans: tuple[Media, ...], data: st.DataObject) -> None:
    ids = np.arange(100, 103 + (spans[-1].end if spans else 0))
    for medium in spans:
        ids[medium.start : medium.end] = data.draw(st.sampled_from([5, 6]))
    check_placeholders(ids, spans, np.array([5, 6]))
    at = data.draw(st.integers(0, len(ids) - 1))
    is_inside = any(medium.start <= at < medium.end for medium in spans)
    ids[at] = 9 if is_inside else 6
    with pytest.raises(ValueError, match="only .* placeholders" if is_inside else f"token {at} is 6, a placeholder"):
        check_placeholders(ids, spans, np.array([5, 6]))
