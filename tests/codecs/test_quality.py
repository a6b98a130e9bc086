"""The bars of quality, held by the real codecs on fixed data; `tools/bench/quality.py` prints them."""

from __future__ import annotations

import pytest

from tools.bench import quality


@pytest.mark.parametrize("name", ["error", "depths", "turns", "attention"])
def test_every_bar_of_quality_is_met(name: str) -> None:
    figures = list(quality.FIGURES[name]("tiny"))
    assert figures
    assert all(figure.met for figure in figures), [figure for figure in figures if not figure.met]
