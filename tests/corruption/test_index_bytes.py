"""index.db and its log, damaged byte by byte: the opening finds it and rebuilds, or what it says is proved otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache import DirectoryError

from .directories import EXACT, PLAIN, copy, depth, file_of, judge, opened, remove, restored, rows_of, uncleanly

HERE = Path(__file__).parents[2]
CRASH = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.corruption.directories import EXACT, PLAIN, opened, store
cache = opened(Path(sys.argv[2]))
for kept in EXACT:
    store(cache, kept._replace(tokens=[1, *kept.tokens]))
cache.flush(30)
os._exit(0)
"""


@pytest.fixture(scope="module")
def crashed(made, tmp_path_factory) -> Path:
    """A directory whose log has content: its process ended without a word."""
    root = copy(made, tmp_path_factory.mktemp("crashed") / "ssd")
    subprocess.run([sys.executable, "-c", CRASH, str(HERE), str(root)], check=True, timeout=120)
    assert (root / "index.db-wal").stat().st_size > 8192
    return root


def answers(root: Path) -> None:
    """Opens, or is refused with the path; no answer is wrong; what is stored can be had."""
    try:
        cache = opened(root)
    except DirectoryError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert str(root) in refused
        return
    with cache:
        for kept in EXACT:
            depth(cache, kept)
        restored(cache, PLAIN)


def spots(size: int, count: int) -> list[int]:
    """Places all over a file: its beginning closely, then a stride that meets every part of a page."""
    return [*range(0, 108, 18), *range(108, size, size // count | 1)]


def test_a_bit_anywhere_in_the_index_gives_no_wrong_answer(made, tmp_path):
    size = (made / "index.db").stat().st_size
    for at in spots(size, 18):
        root = copy(made, tmp_path / "copy")
        flip(root / "index.db", at)
        answers(root)
        remove(root)


def test_a_bit_anywhere_in_the_log_gives_no_wrong_answer(crashed, tmp_path):
    size = (crashed / "index.db-wal").stat().st_size
    for at in spots(size, 12):
        root = copy(crashed, tmp_path / "copy")
        flip(root / "index.db-wal", at)
        answers(root)
        remove(root)


@pytest.mark.parametrize("name", ["index.db", "index.db-wal"])
def test_an_index_or_a_log_cut_short_gives_no_wrong_answer(crashed, tmp_path, name):
    size = (crashed / name).stat().st_size
    for length in [0, 31, 99, 4096, size // 2 & ~4095, size // 2, size - 1]:
        root = copy(crashed, tmp_path / "copy")
        os.truncate(root / name, length)
        answers(root)
        remove(root)


@pytest.mark.parametrize("name", ["index.db", "index.db-wal"])
@pytest.mark.parametrize("page", [0, 2])
def test_a_page_of_zeros_or_of_another_place_gives_no_wrong_answer(crashed, tmp_path, name, page):
    for new in (bytes(4096), (crashed / "index.db").read_bytes()[12288:16384]):
        root = copy(crashed, tmp_path / "copy")
        with open(root / name, "r+b") as file:
            file.seek(page * 4096)
            file.write(new)
        answers(root)
        remove(root)


def test_the_log_of_another_directory_gives_no_wrong_answer(root, crashed):
    (root / "index.db-wal").write_bytes((crashed / "index.db-wal").read_bytes())
    judge(root)


def test_an_older_index_beside_newer_files_gives_no_wrong_answer(made, crashed, tmp_path):
    root = copy(crashed, tmp_path / "copy")
    (root / "index.db-wal").unlink()
    (root / "index.db").write_bytes((made / "index.db").read_bytes())
    answers(root)


def test_after_a_crash_with_a_damaged_log_the_account_is_what_the_disk_holds(crashed, tmp_path):
    root = copy(crashed, tmp_path / "copy")
    flip(root / "index.db-wal", 5000)
    assert judge(root).depths[PLAIN.name] == 600


@pytest.mark.parametrize("occurrence", [0, 1])
def test_a_key_that_its_table_and_its_index_do_not_agree_on_is_found_at_the_opening(root, occurrence):
    key = bytes.fromhex(file_of(root, rows_of(root, "plain")[-1]).stem)
    content, at = (root / "index.db").read_bytes(), -1
    for _ in range(occurrence + 1):
        at = content.index(key, at + 1)
    uncleanly(root)
    flip(root / "index.db", at + 5)
    judge(root)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ (1 << at % 8)]))
