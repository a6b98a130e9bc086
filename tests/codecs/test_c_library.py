"""Where the C kernels can't be used, that is said once, with what to do."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from prefixcache.codecs import c_library
from prefixcache.codecs.transform import backends as entropy_back_ends
from prefixcache.codecs.transform import c_entropy
from prefixcache.codecs.transform.tables import first_guess
from prefixcache.codecs.turboquant import backends, c_rows
from prefixcache.codecs.turboquant.format import form_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (c_rows, c_entropy):
        monkeypatch.setattr(module, "loaded", lambda: c_library.Library(None, "not built"))
    c_library.warn_that_numpy_serves.cache_clear()


def encode() -> None:
    rows, codes, scales = np.ones((5, 1, 64), np.float16), np.zeros((5, 1, 8), np.uint32), np.zeros((5, 1), np.uint16)
    backends.encode_all([(rows, (codes, scales), None)], "float16", form_of(64, 4, 0))


@pytest.mark.usefixtures("unbuilt")
def test_that_numpy_serves_is_said_once_and_names_what_builds_the_kernels_of_this_checkout(caplog):
    caplog.set_level(logging.WARNING, "prefixcache")
    assert backends.describe()["cpu"] == "NumPy (C kernel: not built)"
    assert not caplog.messages  # nothing was done yet, and a GPU may do it all
    encode()
    encode()
    entropy_back_ends.encode(np.ones((2, 30), np.float32), np.full(30, 30, np.int32), first_guess())
    (said,) = caplog.messages
    assert "(not built): NumPy does their work" in said
    assert said.endswith(f"then run pip install -e {ROOT}")


def test_kernels_that_work_are_not_spoken_of(caplog):
    if not c_rows.available():
        pytest.skip("not built here")
    c_library.warn_that_numpy_serves.cache_clear()
    encode()
    assert not caplog.messages


@pytest.mark.usefixtures("unbuilt")
def test_an_installed_copy_is_installed_anew(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(c_library, "FOLDER", tmp_path / "site-packages" / "prefixcache" / "kernels")
    encode()
    (said,) = caplog.messages
    assert said.endswith("then install the package again")
