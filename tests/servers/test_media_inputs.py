"""What a processor made of a prompt's pictures is told apart, counts as what it is, and is given for a rest."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.servers.media_inputs import Placeholders, media_inputs, placeholders_of

PICTURE, SOUND, VIDEO, WIDTH = 900, 901, 902, 6
GRIDS = st.lists(st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 6])), min_size=1, max_size=4)


def patches(seed: int, rows: int, columns: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((rows * columns, WIDTH), dtype=np.float32))


def qwen(pictures: list[tuple[int, int, int]], text: int = 5):
    """A prompt in Qwen's manner: text, and for each (seed, rows, columns) a picture of a quarter as many tokens, and text."""
    tokens = list(range(text))
    for seed, rows, columns in pictures:
        tokens += [PICTURE] * (rows * columns // 4) + [seed % 7, 8]
    arrays = {
        "input_ids": mx.array([tokens]),
        "pixel_values": mx.concatenate([patches(*picture) for picture in pictures]),
        "image_grid_thw": mx.array([[1, rows, columns] for _, rows, columns in pictures]),
        "attention_mask": mx.ones((1, len(tokens))),
        "video_grid_thw": None,
    }
    return tokens, arrays


KINDS = {PICTURE: "image", SOUND: "audio", VIDEO: "video"}


def of(tokens, arrays, **apart):
    return media_inputs(tokens, arrays, Placeholders(KINDS, **apart))


@given(GRIDS)
def test_each_picture_has_its_span_its_digest_and_its_positions(grids):
    tokens, arrays = qwen([(i, *grid) for i, grid in enumerate(grids)])
    media = of(tokens, arrays).media
    assert [medium.length for medium in media] == [rows * columns // 4 for rows, columns in grids]
    assert all(set(tokens[medium.start : medium.end]) == {PICTURE} for medium in media)
    assert sum(medium.length for medium in media) == tokens.count(PICTURE)
    assert [medium.positions for medium in media] == [max(rows, columns) // 2 for rows, columns in grids]
    assert len({medium.digest for medium in media}) == len(media)
    for i, grid in enumerate(grids):
        assert of(*qwen([(i, *grid)])).media[0].digest == media[i].digest


@given(GRIDS, st.data())
def test_what_is_given_for_a_part_of_the_prompt_is_what_its_pictures_have(grids, data):
    pictures = [(i, *grid) for i, grid in enumerate(grids)]
    inputs = of(*qwen(pictures))
    first = data.draw(st.integers(0, len(grids)))
    last = data.draw(st.integers(first, len(grids)))
    edges = [0, *(medium.end for medium in inputs.media)]
    given = inputs.between(edges[first], edges[last])
    if first == last:
        assert given == {}
        return
    expected = qwen(pictures[first:last])[1]
    assert set(given) == {"pixel_values", "image_grid_thw"}
    for name, value in given.items():
        assert mx.array_equal(value, expected[name])


def test_a_bit_a_shape_and_a_dtype_count():
    tokens, arrays = qwen([(1, 2, 2)])
    digests = {of(tokens, arrays).media[0].digest}
    pixels = arrays["pixel_values"]
    flipped = np.array(pixels)
    flipped.view(np.uint32)[-1, -1] ^= 1
    for other in (mx.array(flipped), pixels.astype(mx.bfloat16), np.array(pixels).astype(np.float64)):
        digests.add(of(tokens, arrays | {"pixel_values": other}).media[0].digest)
    digests.add(of(tokens, arrays | {"image_sizes": mx.array([[2, 2]])}).media[0].digest)
    assert len(digests) == 5
    assert of(tokens, arrays | {"attention_mask": None}).media[0].digest in digests


@pytest.mark.parametrize("kind", [lambda pixels: mx.array(np.stack(pixels)), np.stack, list])
def test_pictures_with_a_row_each_are_told_apart(kind):
    tokens = [1, PICTURE, PICTURE, 2, PICTURE, PICTURE, 3]
    pixels = [np.full((3, 4, 4), i, np.float32) for i in range(2)]
    inputs = of(tokens, {"pixel_values": kind(pixels)})
    assert [(medium.start, medium.end) for medium in inputs.media] == [(1, 3), (4, 6)]
    (rest,) = inputs.between(3, 7).values()
    assert np.array_equal(np.array(rest), pixels[1:])


def test_where_pictures_cannot_be_told_apart_each_counts_as_all_of_them():
    tokens = [1, PICTURE, 2, PICTURE, 3, SOUND]
    arrays = {"pixel_values": mx.zeros((5, 3, 4, 4)), "input_features": mx.ones((1, 80))}
    inputs = of(tokens, arrays)
    assert len(inputs.media) == 3
    assert len({medium.digest for medium in inputs.media}) == 1
    other = of(tokens, arrays | {"input_features": mx.zeros((1, 80))})
    assert inputs.media[0].digest != other.media[0].digest
    assert inputs.between(6, 6) == {}
    assert set(inputs.between(0, 6)) == set(arrays)
    with pytest.raises(ValueError, match="can't be divided"):
        inputs.between(2, 6)


FRAMES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=3)  # of videos, by seeds


def filmed(videos: list[list[int]], *, gridded: bool):
    """A prompt with placeholders for each frame of its videos: with Qwen's arrays, or with Gemma's."""
    tokens = [token for video in videos for seed in video for token in (seed + 1, VIDEO, VIDEO)]
    frames = [[patches(seed, 2, 4) for seed in video] for video in videos]
    if gridded:
        arrays = {
            "pixel_values_videos": mx.concatenate([frame for video in frames for frame in video]),
            "video_grid_thw": mx.array([[len(video), 2, 4] for video in videos]),
        }
    else:
        stacked = [mx.stack(video) for video in frames]
        same_length = len({len(video) for video in videos}) == 1
        arrays = {
            "pixel_values_videos": mx.stack(stacked) if same_length else stacked,
            "num_frames_per_video": [len(video) for video in videos],
        }
    return tokens, arrays


@pytest.mark.parametrize("gridded", [True, False])
@given(videos=FRAMES, data=st.data())
def test_each_group_of_frames_is_a_medium_where_an_encoder_sees_it_by_itself(gridded, videos, data):
    seeds = [seed for video in videos for seed in video]
    inputs = of(*filmed(videos, gridded=gridded), frames_apart=True)
    assert [medium.length for medium in inputs.media] == [2] * len(seeds)
    alone = {seed: of(*filmed([[seed]], gridded=gridded), frames_apart=True).media[0].digest for seed in range(3)}
    assert [medium.digest for medium in inputs.media] == [alone[seed] for seed in seeds]
    assert [medium.positions for medium in inputs.media] == [2 if gridded else None] * len(seeds)
    first = data.draw(st.integers(0, len(seeds) - 1))
    rest = inputs.between(inputs.media[first].start, inputs.media[-1].end)["pixel_values_videos"]
    pixels = np.concatenate([np.array(frame).reshape(-1, WIDTH) for frame in rest], axis=0)
    assert np.array_equal(pixels, np.concatenate([np.array(patches(seed, 2, 4)) for seed in seeds[first:]]))


def test_frames_count_together_where_an_encoder_may_see_all_of_a_video():
    one, other = (of(*filmed([[0, seed]], gridded=True)) for seed in (1, 2))
    assert one.parts is None
    assert {medium.digest for medium in one.media}.isdisjoint(medium.digest for medium in other.media)


def test_media_of_several_kinds_are_told_apart_where_the_model_takes_them():
    tokens = [1, PICTURE, 2, SOUND, 3, PICTURE, 4]
    arrays = {"pixel_values": mx.array([[1.0], [2.0]]), "input_features": mx.array([[3.0]])}
    inputs = of(tokens, arrays, kinds_apart=True)
    assert len({medium.digest for medium in inputs.media}) == 3
    other = of(tokens, arrays | {"input_features": mx.array([[4.0]])}, kinds_apart=True)
    changed = [a.digest != b.digest for a, b in zip(inputs.media, other.media, strict=True)]
    assert changed == [False, True, False]
    assert {name: value.tolist() for name, value in inputs.between(2, 6).items()} == {
        "input_features": [[3.0]],
        "pixel_values": [[2.0]],
    }
    assert inputs.between(2, 4).keys() == {"input_features"}
    assert of(tokens, arrays, kinds_apart=False).parts is None
    assert of(tokens, arrays | {"pixel_values_videos": mx.zeros((1, 1))}, kinds_apart=True).parts is None
    assert of(tokens, arrays | {"what_is_it": mx.zeros((2, 1))}, kinds_apart=True).parts is None


def test_a_picture_is_the_same_beside_one_of_another_size():
    pixels = [mx.ones((3, 4, 4)), mx.ones((3, 4, 8))]
    beside = of([PICTURE, 1, PICTURE], {"pixel_values": pixels})
    assert beside.media[0].digest == of([PICTURE], {"pixel_values": mx.stack(pixels[:1])}).media[0].digest


@pytest.mark.parametrize("tokens", [[1, 2, 3], []])
def test_pictures_without_placeholders_are_refused(tokens):
    with pytest.raises(ValueError, match="0 runs of placeholders"):
        of(tokens, {"pixel_values": mx.zeros((1, 3))})


def test_placeholders_without_pictures_are_refused_and_so_is_what_no_processor_makes():
    with pytest.raises(ValueError, match="1 runs of placeholders, and 0 arrays"):
        of([1, PICTURE], {"attention_mask": mx.ones((1, 2))})
    with pytest.raises(TypeError, match="object"):
        of([1, PICTURE], {"pixel_values": object()})


def test_the_placeholders_are_those_that_the_configuration_names():
    class Config:
        image_token_id, image_token_index, video_token_id, audio_token_id = 5, 6, None, 7

    assert placeholders_of(Config()) == Placeholders({5: "image", 6: "image", 7: "audio"})
    assert placeholders_of(None) == Placeholders({})
