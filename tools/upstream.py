"""`python -m tools.upstream`: the tests that know mlx-lm's classes, with another release of mlx-lm than .venv's.

Without an argument: the newest release, and the pre-release where one is newer; `python -m tools.upstream 0.31.3`: that one.
Each is installed alone in an environment of its own, .venv-RELEASE, which takes all else from .venv. What is patched is in
prefixcache/upstream.py and prefixcache/servers/mlx_lm/upstream.py. Exit code: 0 where all tests pass, 1 where not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [
    "tests/layers",
    "tests/cache/test_cache_live.py",
    "tests/live/test_families_of_live_caches.py",
    "tests/models/test_families.py",
    "tests/servers/test_mlx_lm.py",
    "tests/servers/test_requests.py",
    "tests/servers/test_failing_steps.py",
    "tests/servers/test_serve_answers.py",
    "tests/peers/test_mlx_lm.py",
]
VERSION = "import importlib.metadata as m, prefixcache; print(m.version('mlx-lm'))"


def environment(release: str, *options: str) -> Path:
    """Make an environment with this release (`==0.31.3`, or "" for the newest) and return its Python."""
    folder = (
        ROOT / f".venv-{release.removeprefix('==') or '-'.join(['newest', *(option.strip('-') for option in options)])}"
    )
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    (Path(site.strip()) / "all-else.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    )
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--upgrade",
        *options,
    ]
    subprocess.run([*install, f"mlx-lm{release}"], check=True)
    return python


def version_in(python: Path) -> str:
    """Return the release of mlx-lm that this Python imports."""
    return subprocess.check_output([python, "-c", VERSION], text=True, cwd=ROOT).strip()


def passes(python: Path) -> bool:
    """Run the tests, and return whether all pass. OPENBLAS names a library to multiply with, quicker than what MLX brings."""
    print(f"mlx-lm {version_in(python)}", flush=True)
    blas = {"LD_PRELOAD": os.environ.get("OPENBLAS", ""), "OPENBLAS_NUM_THREADS": "1"}
    run = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(run, cwd=ROOT, env={**os.environ, **blas}, check=False).returncode == 0


def main(releases: list[str]) -> int:
    """Try the releases that are named, or the newest ones."""
    if releases:
        pythons = [environment(f"=={release}") for release in releases]
    else:
        newest, early = environment(""), environment("", "--pre")
        pythons = [newest] if version_in(newest) == version_in(early) else [newest, early]
    failed = [python for python in pythons if not passes(python)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
