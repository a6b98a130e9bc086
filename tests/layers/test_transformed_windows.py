"""Where rows of transformed windows are read: in live leaves and in tails, on the host or on a device, they are the same."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache import TurboQuant
from prefixcache.codecs.transform.basis import Basis
from prefixcache.codecs.transform.codec import Calibrated
from prefixcache.image_format import DTYPES
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.reading import read
from prefixcache.layers.transformed import RowsToCode, TailRows, _streams_of
from prefixcache.layers.transformed_windows import WindowRows, encode_window
from tests.models import states
from tests.models.transforming import uneven_basis

TOKENS = list(range(512))


@pytest.fixture
def live():
    """The leaves of layers, of which two have a window, and their plan."""
    layers = states.uneven_windows(TOKENS)
    basis = Basis(uneven_basis("m", states.windows_of(layers)))
    leaves = read(layers)
    return Plan(leaves.layout, Calibrated(4.0, TurboQuant(), basis)), leaves.leaves


def tail(plan, rows: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    specs = plan.window_tails[0].specs(rows)
    return {spec.name: chance.normal(size=spec.shape).astype(DTYPES[spec.dtype]) for spec in specs}


def test_rows_for_a_device_are_those_for_the_host(live):
    plan, leaves = live
    tails = TailRows(plan.window_tails[0], tail(plan, 40), slice(3, 23))
    parts = [RowsToCode(330, 400, 0, None), RowsToCode(300, 320, 0, None, tails), RowsToCode(400, 410, 0, None)]
    for some in (parts, parts[::2]):
        for joined in plan.windowed[0].joined:
            for rows, (leaf, stream) in zip(_streams_of(plan, joined, leaves, some), joined.streams, strict=True):
                place = plan.tail_places[leaf][stream]
                host = np.concatenate([part.of(leaves[leaf], stream, place) for part in some])
                assert np.array_equal(np.array(rows).swapaxes(0, 1), host)


def test_codes_of_live_rows_do_not_depend_on_a_tails_that_are_coded_with_them(live):
    plan, leaves = live
    held, stored = (1 << 100) - (1 << 60), (1 << 60) - (1 << 20)
    alone = encode_window(plan, 0, leaves, [WindowRows(256, held, held, {}, 0)])
    beside = encode_window(plan, 0, leaves, [WindowRows(256, held | stored, held, tail(plan, 40), stored)])
    for (of_live,), (of_both,) in zip(alone, beside, strict=True):
        assert len(of_both.heads) == 80
        assert np.array_equal(of_both.heads[40:], of_live.heads)
        assert np.array_equal(of_both.words[-len(of_live.words) :], of_live.words)
        assert np.array_equal(of_both.offsets, of_live.offsets)
