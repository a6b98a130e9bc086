"""`prefixcache export`: images of a directory into an archive. The work is `prefixcache.ssd.exporting`'s; here are the file,
which is whole or absent, and the screen.
"""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console

from prefixcache.cli.directory.argument import Dir
from prefixcache.cli.directory.changing import changing
from prefixcache.cli.progress import bar
from prefixcache.cli.text import by_namespace, complain, console, foreign, many, mute, print_json, size
from prefixcache.ssd import Exported, SsdError
from prefixcache.ssd import export as pack
from prefixcache.ssd.directory import Directory, sync_folder

ROWS = 200  # namespaces in the table; --json has all
FEW = 10  # images left out that are named
WARNING = "The archive holds the tokens of prompts and the model's state of them: whoever has it can read them."


class NotWritable(SsdError):
    """The archive can't be written there."""


def export(
    directory: Dir,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE.tar|-", help="The archive; - is standard output.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The images of this model; the name before @ will do.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="ROOT", help="Of this namespace: the beginning of its root key.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All images.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object (on stderr with -).")] = False,
) -> None:
    """Write images into an archive, a plain tar, for `prefixcache import` on another machine.

    Works on a directory that a server has open, too. Every image is read and checked before it goes in. The archive holds the
    tokens of prompts and the model's state of them: whoever has it can read them.

    Exit code: 0 done, 1 images that are damaged or hang on nothing were left out, 2 it could not be done.
    """
    if everything == (model is not None or namespace is not None):
        complain("say which images: --model NAME, --namespace ROOT or both, or --all")
        raise typer.Exit(2)
    if file is None and not dry_run:
        complain("name the archive: FILE.tar, or - for standard output")
        raise typer.Exit(2)
    streaming = file == "-" and not dry_run
    arguments = {"directory": str(directory), "file": file, "model": model, "namespace": namespace, "all": everything}
    from prefixcache import __version__

    with changing("export", directory, arguments, dry_run=dry_run, as_json=as_json and not streaming) as told:
        Directory(directory).require()
        with _destination(None if dry_run else file, directory) as stream, bar("exporting") as show:
            found = pack(directory, stream, model=model, namespace=namespace, release=__version__, progress=show)
        told.update(images=found.images, bytes=found.nbytes, namespaces=len(found.spaces), left_out=len(found.left_out))
    if as_json:
        print_json(found.as_dict(), err=streaming)
    else:
        _show(console(stderr=streaming), found)
    if not dry_run:
        complain(WARNING)
    raise typer.Exit(1 if found.damaged else 0)


@contextmanager
def _destination(file: str | None, directory: Path) -> Iterator[BinaryIO | None]:
    if file is None:
        yield None
    elif file == "-":
        with _standard_output() as stream:
            yield stream
    else:
        with _whole_or_absent(Path(os.path.abspath(os.path.expanduser(file))), directory) as stream:
            yield stream


@contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    if sys.stdout.isatty():
        raise NotWritable("-: standard output is a terminal; pipe it, or name a file")
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        mute()
        raise NotWritable("-: the other end of the pipe was closed before the archive was whole") from None


@contextmanager
def _whole_or_absent(path: Path, directory: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its name when the block has ended without an error."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise NotWritable(f"{str(path)!r}: not a plain file; name another, or - for standard output")
    root = os.path.realpath(os.path.expanduser(directory))
    if os.path.commonpath([root, os.path.realpath(path.parent)]) == root:
        raise NotWritable(f"{str(path)!r}: inside the cache's directory; name a file elsewhere")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if (number := left.suffixes[-2][1:]).isdecimal() and not _runs(int(number)):
            with suppress(OSError):
                os.unlink(left)
    try:
        with suppress(FileNotFoundError):
            os.unlink(part)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb", buffering=0) as stream:
                os.fchmod(fd, 0o600)
                yield stream
                os.fsync(fd)
            os.rename(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise NotWritable(f"{str(path)!r}: {os.strerror(error.errno or 0)}; make room or name another file") from error


def _runs(pid: int) -> bool:
    """Whether there is such a process; what one left that was killed holds prompts, and is nobody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _show(out: Console, found: Exported) -> None:
    did = "would export" if found.dry_run else "exported"
    state = ", which is open" if found.live else ""
    out.print(
        foreign(f"{found.directory}{state}: {did} {many(found.images, 'image')}, {size(found.nbytes)}"), soft_wrap=True
    )
    if found.spaces:
        out.print(by_namespace("bytes", [(s.model, s.root, s.images, s.nbytes) for s in found.spaces], ROWS))
    gone = len(found.left_out) - found.damaged
    if gone:
        out.print(f"{many(gone, 'image')} left the directory meanwhile", soft_wrap=True)
    for one in [one for one in found.left_out if not one.gone][:FEW]:
        out.print(foreign(f"left out: {one.name}: {one.reason}", "yellow"), soft_wrap=True)
    if found.damaged > FEW:
        out.print(f"... {found.damaged - FEW:,} more: --json has all", soft_wrap=True)
