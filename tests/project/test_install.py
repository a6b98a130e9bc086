"""The package installs with and without a C compiler, and what is built is in the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "prefixcache"
LIBRARIES = {"prefixcache/kernels/_turboquant.so", "prefixcache/kernels/_transform.so"}

# Imports all that there is, codes and decodes rows, and prints which back end did.
USE = """
import importlib, pkgutil, sys
import numpy as np
import prefixcache, prefixcache.cli
from prefixcache.codecs.transform import backends as entropy_back_ends
from prefixcache.codecs.transform.entropy import words_of
from prefixcache.codecs.transform.tables import first_guess
from prefixcache.codecs.turboquant import backends as back_ends, c_rows
from prefixcache.codecs.turboquant.format import form_of

assert prefixcache.__file__.startswith(sys.argv[1]), prefixcache.__file__
for name in prefixcache.__all__:
    assert sys.modules[getattr(prefixcache, name).__module__].__file__.startswith(sys.argv[1]), name
for module in pkgutil.walk_packages(prefixcache.__path__, "prefixcache."):
    if not module.name.rpartition(".")[2].startswith("_"):  # __main__, and the kernels that ctypes loads
        importlib.import_module(module.name)
rows = np.random.default_rng(0).standard_normal((50, 2, 128)).astype(np.float16)
codes, scales, back = np.zeros((50, 2, 16), np.uint32), np.zeros((50, 2), np.uint16), np.zeros((2, 50, 128), np.float16)
form = form_of(128, 4, 0)
back_ends.encode_all([(rows, (codes, scales), None)], "float16", form)
back_ends.decode_all([((codes, scales), back, None)], "float16", form)
assert np.mean((rows.swapaxes(0, 1) - back).astype(float) ** 2) < 0.015
print("c_rows" if c_rows.available() else "numpy_rows", c_rows.describe(), sep=": ")

steps = np.random.default_rng(0).integers(-9, 9, (5, 30)).astype(np.float32)
classes, tables = np.full(30, 30, np.int32), first_guess()
heads, words, decoded = entropy_back_ends.encode(steps, classes, tables)
counts = words_of(heads)
assert (entropy_back_ends.decode(heads, words, counts.cumsum() - counts, classes, tables) == steps).all()
print("entropy:", entropy_back_ends.describe())
assert (np.full(8, 1e-40, np.float32) * np.float32(2)).all()  # no library that was loaded flushes small numbers to zero
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The sources, where building leaves nothing in the repository."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(PACKAGE, copy / "prefixcache", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


def is_kept(file: Path) -> bool:
    """Whether a file of the tree is to be in the wheel, as all are but what is compiled."""
    return file.is_file() and "__pycache__" not in file.parts and file.suffix not in (".c", ".h", ".so")


def python(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def install(source: Path, site: Path, **environment: str) -> None:
    """Without the network: setuptools is that of the tests, and dependencies are those that are here."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    python("-m", "pip", "install", *options, "--target", site, source, cwd=source.parent, **environment)


def use(site: Path) -> str:
    return python("-c", USE, site, cwd=site, PYTHONPATH=str(site))


def test_without_a_compiler_numpy_serves(source: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(source, site, CC="/nonexistent/cc")
    assert not list(site.rglob("*.so"))
    assert use(site) == "numpy_rows: not built\nentropy: NumPy (C kernel: not built)\n"


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler here")
def test_the_kernels_are_built_from_a_source_distribution(source: Path, tmp_path: Path) -> None:
    build = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"
    name = python("-c", build.format("sdist"), tmp_path, cwd=source).splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    fast = {"CFLAGS": "-Ofast -funsafe-math-optimizations"}  # which must count for nothing
    name = python("-c", build.format("wheel"), tmp_path, cwd=unpacked, **fast).splitlines()[-1]
    assert name.split("-", 2)[2].startswith("py3-none-")
    with zipfile.ZipFile(tmp_path / name) as wheel:
        kept = {file for file in wheel.namelist() if file.startswith("prefixcache/")}
    tree = {f"prefixcache/{file.relative_to(PACKAGE).as_posix()}" for file in PACKAGE.rglob("*") if is_kept(file)}
    assert kept == tree | LIBRARIES

    site = tmp_path / "site"
    install(tmp_path / name, site)
    said = use(site)
    assert said.startswith("c_rows: C, ")
    assert said.endswith("entropy: C\n")


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "tools.bench", "--help"),
        ("-m", "prefixcache", "--version"),
        ("-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "tests/test_settings.py"),
        (
            "-c",
            "import sys, pytest; sys.path.remove(''); "  # as the script `pytest` has it
            "sys.exit(pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', 'tests/test_settings.py']))",
        ),
    ],
    ids=lambda command: command[1] if command[0] == "-m" else command[0],
)
def test_a_checkout_beside_an_installed_copy_runs_its_own_code(command: tuple[str, ...], tmp_path: Path) -> None:
    installed = tmp_path / "site" / "prefixcache"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("raise SystemExit('the installed copy was imported')\n")
    python(*command, cwd=ROOT, PYTHONPATH=str(tmp_path / "site"))
