"""Prompts with pictures are told apart, hit as deep as they are the same, and answered as on an empty cache: two of the cases
that `tools.bench.pictures` has.
"""

import mlx.core as mx
import pytest

from prefixcache.media import rope_delta
from tests.vlm import folders
from tests.vlm.seeing import SeeingModel
from tools.bench import pictures

CHOSEN = {"second of two pictures differs", "a picture in the second turn"}


@pytest.fixture(scope="module", params=sorted(folders.CONFIGS))
def model(request, tmp_path_factory):
    return SeeingModel(request.param, tmp_path_factory.mktemp(request.param))


def test_no_picture_is_taken_for_another_and_none_is_computed_again(model):
    for case in pictures.cases(model, pictures.SCALES["tiny"]):
        if case.name in CHOSEN:
            figure = pictures.figure_of(case, model)
            assert figure.met, figure
            assert figure.raw["plain ids"]["same_answer"] == case.next_turn  # else nothing was to be told apart


def test_positions_behind_pictures_are_the_models(model):
    inputs = model.text("Look:") + model.picture(1, 112, 224) + model.text("and") + model.picture(2, 224, 112)
    language_model = model.model.language_model
    if not hasattr(language_model, "get_rope_index"):
        assert all(medium.positions is None for medium in inputs.media)
        return
    ids = mx.array([inputs.tokens])
    positions, delta = language_model.get_rope_index(ids, inputs.all_of("image_grid_thw"), None, mx.ones_like(ids))
    assert rope_delta(inputs.media, len(inputs.tokens)) == delta.item()
    for depth in (inputs.media[0].end, inputs.media[1].start, inputs.media[1].end):
        assert positions[0, 0, depth].item() == depth + rope_delta(inputs.media, depth)


@pytest.mark.parametrize(
    ("family", "kind", "length"),
    [("qwen2_5_vl", "video", 96), ("gemma4", "sound", 50)],
)
def test_videos_and_sounds_are_told_apart_too(family, kind, length, tmp_path):
    model = SeeingModel(family, tmp_path)
    first, second, third = (getattr(model, kind)(seed) for seed in (1, 2, 3))
    assert first.media[0].length == length
    text, question = model.text("Before that: " * 40), model.text("What was it?")
    asked = text + first + model.text(", then") + third + question
    case = pictures.Case(f"second {kind} differs", text + first + model.text(", then") + second + question, asked)
    figure = pictures.figure_of(case, model)
    assert figure.met, figure
    assert not figure.raw["plain ids"]["same_answer"]
