"""`prefixcache calibrate`: makes the basis that `--codec transform` needs. This module reads the options and ends in order;
`making` does the work, `report` says what came of it.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.options import AsJson, with_options
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, complain, console, expanded, print_json, refusing
from prefixcache.settings import BASIS_DIR


@with_options
def calibrate(
    job: Calibration,
    basis_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="PREFIXCACHE_BASIS_DIR",
            help="The folder of bases, if not ~/.cache/prefixcache-bases.",
        ),
    ] = None,
    list_bases: Annotated[
        bool, typer.Option("--list", help="Show the bases that are there, in place of MODEL.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Learn once what a model's keys and values are like, so that `--codec transform` can code them.

    The model reads texts. What comes of it, the basis, is a file that servers of this model find by themselves.

    After Ctrl-C the same command goes on where it was. The same command again gives the same basis.

    Exit code: 0 the basis is there, 2 it could not be made, 130 ended by Ctrl-C. Of --list: 0 shown, 1 a file is damaged.
    """
    if bool(job.model) == list_bases:
        complain("give either MODEL, a model's folder or name, or --list")
        raise typer.Exit(2)
    with refusing():
        folder = expanded(basis_dir or BASIS_DIR, "--basis-dir")
    if list_bases:
        _list(folder, as_json=as_json)
        return
    with refusing():
        from prefixcache.cli.calibrate.making import Resumable, make
        from prefixcache.cli.calibrate.report import facts, screen

        _check_writable(folder)
        try:
            with bar("loading the model") as show:
                calibrated = make(job, folder, show)
        except KeyboardInterrupt as stopped:
            goes_on = "goes on where it was" if isinstance(stopped, Resumable) else "begins anew: nothing was kept yet"
            complain(f"ended by SIGINT: the same command {goes_on}")
            raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        print_json(facts(calibrated))
    else:
        console().print(*screen(calibrated, job, basis_dir), sep="\n", soft_wrap=True)


def _list(folder: Path, *, as_json: bool) -> None:
    from prefixcache.cli.calibrate.bases import facts_of, screen_of

    listed = facts_of(folder)
    if as_json:
        print_json(listed)
    else:
        console().print(*screen_of(listed), sep="\n")
    raise typer.Exit(1 if any(file["error"] for file in listed["bases"]) else 0)


def _check_writable(folder: Path) -> None:
    """Raise Refused where the basis couldn't be written: the model takes a while to load."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(
            f"--basis-dir {folder}: can't be written to ({error.strerror}); give a folder that can be"
        ) from None
