"""The tables of docs/benchmarks.md: `python -m tools.bench.page docs/benchmarks.md results.json ...`.

What stands between the page's two marks is replaced by the figures of the files that `--json` wrote, in their order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: python -m tools.bench.page -->", "<!-- end of figures -->"
HEAD = "| figure | prefixcache | beside it, same run | ratio | bar | met |\n|---|---|---|---|---|---|"
MET = {True: "yes", False: "**no**", None: ""}


def row(figure: dict[str, Any]) -> str:
    """A line of the table; peers are lines of one cell."""
    beside = figure.get("beside") or [["", figure["reference"], ""]]
    told = "<br>".join(f"{who}: {said}" if who else said for who, said, _ in beside)
    ratios = "<br>".join(ratio for _, _, ratio in beside)
    cells = [figure["name"], figure["measured"], told, ratios if any(r for _, _, r in beside) else "", figure["bar"]]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} | {MET[figure['met']]} |"


def machine(results: dict[str, Any]) -> str:
    """A line that says when and where."""
    packages = ", ".join(f"{name} {version}" for name, version in results["packages"].items())
    when = f"{results['date']}: " if "date" in results else ""
    where = results["machine"]
    cpus = f"{where['cpus']} CPUs ({where['processor']})" if "processor" in where else f"{where['cpus']} CPUs"
    return f"{when}{cpus}, {where['system']}, Python {where['python']}; {packages}."


def section(results: dict[str, Any]) -> str:
    return "\n".join([machine(results), "", HEAD, *(row(figure) for figure in results["figures"])])


def replaced(page: str, sections: list[str]) -> str:
    """The page with these between its marks. Raises ValueError where it lacks one of them."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"the page lacks {END if begun else BEGIN}")
    return "\n\n".join([before + BEGIN, *sections, END + after])


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print("python -m tools.bench.page docs/benchmarks.md results.json ...", file=sys.stderr)
        return 2
    page, *files = map(Path, arguments)
    page.write_text(replaced(page.read_text(), [section(json.loads(file.read_text())) for file in files]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
