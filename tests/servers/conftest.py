"""What the tests of servers share: models, and servers of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.serving import TEMPLATE, Server, save_model, save_parrot, serving


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


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that thinks, says something and calls a tool, whatever it is asked."""
    where = tmp_path_factory.mktemp("agent")
    call = ["<tool_call>", '{"name": "count", "arguments": {"to": 3}}', "</tool_call>"]
    says = ["<think>", "Hm, ", "three.", "</think>", "\n\n", "Let me ", "count.", *call]
    model = save_parrot(where / "model", says, template=TEMPLATE)
    with serving(where / "log", "--model", model) as server:
        yield server
