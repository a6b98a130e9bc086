"""mlx_lm.server's own command line, read from a list of flags, and checked before anything is loaded or downloaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from prefixcache.servers.errors import ServeError
from prefixcache.servers.mlx_lm.upstream import parse_flags

FOLDERS = ("--model", "--draft-model", "--adapter-path")


def with_homes(flags: Iterable[str]) -> list[str]:
    """Return the flags with the path of a home for the ~ that a shell leaves in --model=~/model: mlx-lm and mlx-vlm would
    take it for a Hugging Face name.
    """
    expanded: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if expanded and expanded[-1] in FOLDERS:
            flag = os.path.expanduser(flag)
        elif equals and name in FOLDERS:
            flag = f"{name}={os.path.expanduser(value)}"
        expanded.append(flag)
    return expanded


class Flags(argparse.ArgumentParser):
    """Flags in full, so that ours and mlx-lm's are told apart. One that is bad is told in one line."""

    def __init__(self, description: str | None = None):
        super().__init__(prog="prefixcache serve", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ServeError(f"{message}; see `prefixcache serve --help` and `mlx_lm.server --help`")


def read_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Return what mlx_lm.server's command line makes of these flags. ServeError for those that it doesn't take."""
    args = parse_flags(Flags, with_homes(flags))
    if args is None:
        raise ServeError("this release of mlx-lm reads its flags another way; install mlx-lm 0.31.3 or 0.32")
    return args


def check_model(args: argparse.Namespace) -> None:
    """Name a folder that isn't there, by ServeError, before anything is loaded or downloaded."""
    for flag in FOLDERS:
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is None:
            continue
        if not value:
            raise ServeError(f"{flag} is empty: give a folder, or leave it out")
        folder = Path(value)
        local = flag == "--adapter-path" or value.count("/") != 1 or value.startswith(("/", ".", "~"))
        if local and not folder.is_dir():
            others = "" if flag == "--adapter-path" else " or a Hugging Face name"
            raise ServeError(f"{flag} {value}: no such folder; give one{others}")
        config = "adapter_config.json" if flag == "--adapter-path" else "config.json"
        if folder.is_dir() and not (folder / config).is_file():
            raise ServeError(f"{flag} {value}: the folder has no {config}; give the folder that has it")
