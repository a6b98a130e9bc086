"""What the tests of servers share: a folder with a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.serving import Server, save_model, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, alone in a folder that the module may put its logs in."""
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def served(model: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of that model, with the `FLAGS` of the module that has some."""
    flags = getattr(request.module, "FLAGS", ())
    with serving(model.parent / "served.log", "--model", model, *flags) as server:
        yield server
