"""What the tests of servers share: a folder with a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers.serving import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, alone in a folder that the module may put its logs in."""
    return save_model(tmp_path_factory.mktemp("models") / "model")
