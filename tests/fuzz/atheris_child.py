"""One target under atheris: started by `atheris_run`, or by hand with a crashing input to see its traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["prefixcache", "json"]):
    from tests.fuzz import targets


def main() -> None:
    name, *rest = sys.argv[1:]
    target, seeds = targets.TARGETS[name]
    for argument in rest:
        if Path(argument).is_dir() and not any(Path(argument).iterdir()):
            for number, seed in enumerate(seeds()):
                Path(argument, f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *rest], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
