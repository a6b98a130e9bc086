"""`prefixcache reconcile`: index against files, the findings and what was done. The work is `prefixcache.ssd.reconcile`'s."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixcache.cli.directory.argument import Dir
from prefixcache.cli.options import AsJson
from prefixcache.cli.progress import bar
from prefixcache.cli.tables import listing
from prefixcache.cli.text import complain, console, foreign, many, print_json, size
from prefixcache.ssd import Report
from prefixcache.ssd import reconcile as compare

ROWS = 200  # findings in the table; --json has all
FEW = 10  # findings that need no table of sums


def reconcile(
    directory: Dir,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every file and check its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the index of a directory with its files: adopt images that were copied into it, repair the index, quarantine
    what is damaged.

    Without --dry-run nobody else may have the directory open. A dry run reads a live one too.

    Exit code: 0 index and files agree, 1 they do not (--dry-run) or did not (repaired), 2 it could not be done.
    """
    with bar("checking" if dry_run else "reconciling") as show:
        report = compare(directory, dry_run=dry_run, deep=deep, progress=show)
    if as_json:
        print_json(report.as_dict())
    elif not report.error:
        _show(console(), report)
    if report.error:
        complain(report.error)
    raise typer.Exit(report.exit_code)


def _show(out: Console, report: Report) -> None:
    how = ", every checksum read" if report.deep else ""
    whole = f"{many(report.images, 'whole image')}, {size(report.nbytes)} on disk{how}"
    if report.clean:
        out.print(foreign(f"{report.directory}: index and files agree: {whole}"), soft_wrap=True)
        return
    out.print(foreign(report.directory, "bold"), soft_wrap=True)
    out.print(_findings(report))
    if len(report.findings) > FEW:
        out.print(_sums(report))
        out.print()
    out.print(whole, soft_wrap=True)
    if report.dry_run:
        out.print("Nothing was changed. To repair, run the same without --dry-run.", soft_wrap=True)


def _findings(report: Report) -> Table:
    table = listing(["found", "where, why: action"], ["on disk"])
    for finding in report.findings[:ROWS]:
        description = Text.assemble(
            foreign(finding.path), "\n", foreign(f"{finding.reason}: ", "dim"), foreign(finding.action)
        )
        table.add_row(foreign(finding.kind, "bold"), description, _size(finding.nbytes))
    if len(report.findings) > ROWS:
        table.add_row("...", foreign(f"{len(report.findings) - ROWS:,} more: --json has all", "dim"))
    return table


def _sums(report: Report) -> Table:
    """Return one line for each kind of finding and what was done about it."""
    sums: dict[tuple[str, str], list[int]] = {}
    for finding in report.findings:
        sums.setdefault((finding.kind, finding.action), []).append(finding.nbytes)
    table = Table.grid("", "", "", "", padding=(0, 2))
    table.columns[1].justify = table.columns[2].justify = "right"
    for (kind, action), sizes in sorted(sums.items()):
        table.add_row(foreign(kind, "bold"), f"{len(sizes):,}", _size(sum(sizes)), foreign(action))
    return table


def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes else "-"
