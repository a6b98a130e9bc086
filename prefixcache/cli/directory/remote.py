"""`prefixcache inspect --remote URL`: whether an engine answers, how soon, by which rules it evicts, and whether its images
are sealed with our key; with DIR, how much of the directory it has. Writes nothing; in Valkey, what it asks
for counts as used.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from prefixcache.cli.directory.argument import reason_of
from prefixcache.cli.tables import named_rows
from prefixcache.cli.text import Refused, duration, foreign, many
from prefixcache.image_format import SNAPSHOT
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.remote.client import Client, open_client
from prefixcache.remote.engine import UNTRUSTED, EngineError
from prefixcache.remote.sealing import image_name
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.errors import SsdError
from prefixcache.ssd.index import reading
from prefixcache.ssd.lock import holder
from prefixcache.ssd.tables import read_entries

Facts = dict[str, Any]

TIMEOUT = 5.0  # seconds of a call
QUESTIONS = 5  # of which the median is shown
NEWEST = 2000  # images of a directory, the last used, that are looked for
KEYS = {True: "ours", False: "another, or none", None: "not told yet"}


@dataclass(frozen=True)
class EngineOptions:
    """A remote tier's engine, and how it is reached."""

    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A remote tier's engine: whether it answers; with DIR, how much of it is there. env: the one that "
            "PREFIXCACHE_REMOTE names.",
        ),
    ] = None
    remote_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="PREFIXCACHE_REMOTE_KEY_FILE", help="Its key, as of the servers."),
    ] = None
    remote_ca_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="PREFIXCACHE_REMOTE_CA_FILE", help="Its certificates, as of the servers."),
    ] = None


def describe_remote(options: EngineOptions, directory: Path | None) -> Facts:
    """Return all that is shown, as plain values. `Refused` for a bad URL or key, and for an engine that does not answer.

    The URL "env" is the one in the environment, where its password is in no list of processes.
    """
    url = options.remote or ""
    if url == "env":
        url = os.environ.get("PREFIXCACHE_REMOTE", "")
        if not url:
            raise Refused("--remote env: PREFIXCACHE_REMOTE is not set; set it, or write the URL")
    files = (options.remote_key_file, options.remote_ca_file)
    key_file, ca_file = (file and Path(os.path.expanduser(file)) for file in files)
    try:
        client = open_client(url, key_file, ca_file, timeout=TIMEOUT, key_setting="--remote-key-file")
    except ValueError as error:
        raise Refused(str(error)) from error
    engine = client.engine
    try:
        about, times = engine.about(), []
        for _ in range(QUESTIONS):
            began = time.monotonic()
            key = client.has_our_key()
            times.append(time.monotonic() - began)
        facts: Facts = {"remote": engine.label, **about, "answer_seconds": statistics.median(times), "key": KEYS[key]}
        if directory is not None:
            try:
                shared = _of_directory(client, directory)
            except (SsdError, OSError, sqlite3.Error) as error:
                raise Refused(reason_of(directory, error)) from error
            facts |= {"directory": str(directory), **shared._asdict()}
        return facts
    except EngineError as error:
        remedy = "check the URL, the credentials and whether it runs"
        if UNTRUSTED in str(error):
            what = "in the place of" if ca_file is not None else "with"
            given = f"--remote-ca-file {ca_file}" if ca_file is not None else "--remote-ca-file FILE"
            remedy = f"name the certificate of who signed it {what} {given}"
        raise Refused(f"{engine.label}: {error}; {remedy}") from error
    finally:
        client.close()


class SharedImages(NamedTuple):
    """How many images of a directory were looked for in the engine, and how many of them are there."""

    asked_images: int
    images_there: int


def _of_directory(client: Client, directory: Path) -> SharedImages:
    """Look for the images of a directory that were used last and leave it: no tails, and no windows, which may be partial."""
    there = Directory(directory)
    there.require()
    with reading(there.index, live=holder(there) is not None) as connection:
        leaving = (
            entry
            for entry in read_entries(connection)
            if entry.kind == SNAPSHOT or len(entry.tokens) == BLOCK * TOKEN_BYTES
        )
        entries = sorted(leaving, key=lambda entry: -entry.used)[:NEWEST]
    names = [image_name(client.seal, entry.namespace, entry.kind, entry.key, entry.parent) for entry in entries]
    step, there_now = client.engine.names_at_once, 0
    for first in range(0, len(names), step):
        there_now += sum(size is not None for size in client.engine.sizes(names[first : first + step]))
    return SharedImages(len(names), there_now)


def show_remote(out: Console, facts: Facts) -> None:
    table = named_rows()
    for name, value in facts.items():
        if name == "answer_seconds":
            table.add_row("answers in", duration(value))
        elif name == "asked_images":
            shared = f"{facts['images_there']:,} of the {many(value, 'image')} used last are there"
            table.add_row("shared", shared)
        elif name != "images_there":
            table.add_row(name, foreign(str(value)))
    out.print(table)
    if "noeviction" in facts.get("policy", ""):
        out.print("It evicts nothing: once full it takes no image. Set maxmemory, and maxmemory-policy allkeys-lru.")
