"""From synthetic statistics to a basis: groups, vectors, the step, the same bytes for the same."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.calibration import design
from prefixcache.calibration.statistics import GroupStatistics, Statistics
from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform.basis import QUALITIES, Basis, LayerGroup
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.codecs.transform.layer import Layer, grouped
from prefixcache.codecs.transform.rope import Rope

HEADS, KEYS, VALUES = 2, 32, 48


def layer(index: int, heads: int = HEADS, dtype: str = "float32") -> Layer:
    return Layer(index, heads, KEYS, VALUES, dtype, Rope(10000.0 ** -np.linspace(0, 1, KEYS // 2)))


def rows_of(count: int, channels: int, seed: int) -> Array:
    """Rows whose channels say much the same: a few directions spread widely."""
    rng = np.random.default_rng(7)
    mixing = rng.normal(size=(channels, channels)) * 0.7 ** np.arange(channels)[:, None] / 4
    source = np.random.default_rng(seed).laplace(size=(count, channels))
    return (source @ mixing + rng.normal(size=channels) * 5).astype(np.float32)


def statistics_of(groups: list[list[Layer]], metric: float = 1.0) -> Statistics:
    gathered, blocks = [], {}
    for g, layers in enumerate(groups):
        rows = rows_of(3000, sum(one.channels for one in layers), g)
        mean = rows.mean(axis=0, dtype=np.float64)
        centred = rows - mean.astype(np.float32)
        gathered.append(GroupStatistics(tuple(layers), mean, centred.T @ centred / len(rows), rows.astype(np.float16)))
        for one in layers:
            rng = np.random.default_rng(one.index)
            for part, width in (("keys", KEYS), ("values", VALUES)):
                gradients = rng.normal(size=(one.heads, 200, width)) * rng.uniform(0.5, 2, width)
                blocks[one.index, part] = np.einsum("hna,hnb->hab", gradients, gradients) / 200 * metric
    flat = tuple(one for layers in groups for one in layers)
    return Statistics(3000, flat, tuple(gathered), "fisher", blocks)


@pytest.fixture(scope="module")
def made() -> bytes:
    return design.design(statistics_of([[layer(0), layer(2)], [layer(3)]]), "tiny@0", "synthetic", 4)


def test_neighbours_are_joined_until_a_group_has_channels_enough():
    layers = [layer(0), layer(1), layer(5), layer(6, dtype="float16"), layer(7, heads=200)]
    groups, refused = grouped(layers, channels=2 * layer(0).channels)
    assert [[one.index for one in group] for group in groups] == [[0, 1], [5], [6]]
    assert refused.keys() == {7}
    assert "16000 channels" in refused[7]


def test_the_same_statistics_give_the_same_bytes(made):
    again = design.design(statistics_of([[layer(0), layer(2)], [layer(3)]]), "tiny@0", "synthetic", 4)
    assert again == made


def test_a_basis_says_what_it_was_made_of(made):
    basis = Basis(made)
    assert (basis.model, basis.texts, basis.metric, basis.sinks) == ("tiny@0", "synthetic", "fisher", 4)
    assert [[one.index for one in group.layers] for group in basis.groups] == [[0, 2], [3]]
    assert basis.place_of(2) == (0, basis.groups[0].layers[1])
    assert basis.place_of(1) is None
    assert basis.fp16_bytes == 2 * sum(group.channels for group in basis.groups)


def in_metric(group: LayerGroup, errors: Array) -> float:
    """What errors (rows, channels) count in the metric, in squared steps."""
    total, at = 0.0, 0
    for pair in group.factors:
        for factor in pair:
            heads, width, _ = factor.shape
            part = errors[:, at : at + heads * width].reshape(-1, heads, width).astype(np.float64)
            total += float(np.square(np.einsum("thw,hwv->thv", part, factor)).sum(axis=(1, 2)).mean())
            at += heads * width
    return total


def streams_of(group: LayerGroup, rows: Array) -> list[Array]:
    streams, at = [], 0
    for i, one in enumerate(group.layers):
        for width in (one.key_width, one.value_width):
            part = rows[:, at : at + one.heads * width].reshape(len(rows), one.heads, width)
            at += one.heads * width
            streams.append(group.layers[i].rotation.redo(part, 0) if width == KEYS else part.copy())
    return streams


def test_a_step_of_quality_doubles_the_error_and_rows_have_the_length_that_was_expected(made):
    basis = Basis(made)
    group = basis.groups[0]
    rows = rows_of(256, group.channels, 0)
    squares = []
    for quality in (3.0, 4.0, 5.0):
        coder = GroupCoder(group, basis.tables, quality, "float32")
        codes = coder.encode(streams_of(group, rows), 0)
        back = coder.decode(codes, 0)
        errors = [
            (group.layers[i // 2].rotation.undo(b, 0) if i % 2 == 0 else b).reshape(256, -1) for i, b in enumerate(back)
        ]
        squares.append(in_metric(group, np.concatenate(errors, axis=1) - rows))
        assert group.row_words(quality) == pytest.approx(len(codes.words) / 256, rel=0.05, abs=0.25)
    assert 2 < squares[0] / squares[1] < 5
    assert 2 < squares[1] / squares[2] < 5


def test_the_metric_s_scale_changes_nothing_but_the_factors(made):
    """Fisher information is as large as the text is hard: the step is found, not given."""
    other = Basis(design.design(statistics_of([[layer(0), layer(2)], [layer(3)]], metric=1e-6), "tiny@0", "", 4))
    for mine, yours in zip(Basis(made).groups, other.groups, strict=True):
        assert np.allclose(mine.spreads, yours.spreads, rtol=2e-3)


@pytest.mark.parametrize("quality", [3.0, 4.5])
def test_a_design_at_a_quality_has_its_step_as_quality_4(made, quality):
    other = Basis(
        design.Design(statistics_of([[layer(0), layer(2)], [layer(3)]]), "tiny@0", "synthetic", 4).at(quality).data()
    )
    for guess, moved in zip(Basis(made).groups, other.groups, strict=True):
        assert moved.spreads[:6] == pytest.approx(guess.spreads[:6] * 2 ** (quality - 4), rel=1e-5)
        assert moved.components(4) == guess.components(quality)
        assert moved.row_words(4) == pytest.approx(guess.row_words(quality), rel=0.02)


def test_what_hardly_spreads_is_left_out(made):
    group = Basis(made).groups[0]
    counts = [group.components(quality) for quality in QUALITIES]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] <= group.channels
    assert len(group.spreads) == counts[-1]
