"""`python -m tools.release`: make a release of the commit that is checked out.

Refused for a tree with changes, a commit on which `.ci/run` has not passed, a version that was released, and a changelog that
doesn't know it. What is left is to push the tag and upload the two files; the last lines say how.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from prefixcache import __version__
from tools.release.building import ROOT, build, use

PASSED = Path("build", "passed")  # `.ci/run` leaves the commit here that it passed on


def git(*arguments: str, root: Path = ROOT) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def reasons_against(version: str, root: Path = ROOT) -> list[str]:
    """Why the commit that is checked out can't be released as this version; empty where it can."""
    reasons = []
    if changes := git("status", "--porcelain", root=root):
        reasons.append(f"the tree has changes; commit them or put them aside:\n{changes}")
    commit, passed = git("rev-parse", "HEAD", root=root), root / PASSED
    if not passed.is_file() or passed.read_text().strip() != commit:
        reasons.append(f"{PASSED} is not of {commit[:7]}; run bash .ci/run on it")
    if git("tag", "--list", f"v{version}", root=root):
        reasons.append(f"v{version} was released; give prefixcache/__init__.py another __version__")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (root / "CHANGELOG.md").read_text(), re.M):
        reasons.append(f"CHANGELOG.md has no heading with a date; write ## {version} (YYYY-MM-DD)")
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--try", action="store_true", dest="only_try", help="build and try the commit, release nothing")
    only_try = parser.parse_args().only_try
    if not only_try and (reasons := reasons_against(__version__)):
        raise SystemExit("not released: " + "\nnot released: ".join(reasons))
    with tempfile.TemporaryDirectory(prefix="prefixcache-release-") as name:
        made = build(Path(name, "built"))
        use(made, Path(name, "environment"))
        if only_try:
            return
        shutil.copytree(made.wheel.parent, ROOT / "dist", dirs_exist_ok=True)
    git("tag", "--annotate", f"v{__version__}", "--message", f"prefixcache {__version__}")
    print(f"tagged v{__version__}; git push origin v{__version__}, then twine upload dist/prefixcache-{__version__}*")


if __name__ == "__main__":
    main()
