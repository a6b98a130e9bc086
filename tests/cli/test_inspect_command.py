"""`prefixcache inspect`: what it says is what is there, of live and dead directories, and it leaves no trace."""

from __future__ import annotations

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from directories import COMMAND, LONG, ODD, SALT, SHARED, SHORT, crash, fingerprint, images, kv, spoil
from typer.testing import CliRunner

from prefixcache import PrefixCache
from prefixcache.cli import app
from prefixcache.codecs.transform.backends import describe as entropy_coder

NAMESPACE = {
    "root",
    "model",
    "codec",
    "codec_name",
    "layout",
    "created",
    "tokens",
    "blocks",
    "windows",
    "snapshots",
    "nbytes",
    "disk",
    "raw_nbytes",
    "ratio",
    "oldest",
    "newest",
    "last_used",
    "last_used_tick",
    "hits",
}
TOP = {
    "directory",
    "error",
    "now",
    "live",
    "holder",
    "clean",
    "problem",
    "disk",
    "index_bytes",
    "totals",
    "namespaces",
    "quarantine",
    "tmp",
}


def facts(call, *args):
    done = call("inspect", *args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def disk(*paths: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def by_model(found, model):
    return [space for space in found["namespaces"] if space["model"] == model]


def change(root: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(root / "index.db", isolation_level=None)
    connection.execute(statement, values)
    connection.close()


def test_json_counts_what_is_on_the_disk(call, filled):
    found = facts(call, filled)
    assert found.keys() == TOP
    assert {key for space in found["namespaces"] for key in space} == NAMESPACE
    for kind, folder in (("blocks", "rows"), ("windows", "windows"), ("snapshots", "snapshots")):
        files = images(filled, folder)
        sums = {"images": len(files), "nbytes": sum(f.stat().st_size for f in files), "disk": disk(*files)}
        assert found["totals"][kind] == sums
        assert {key: sum(space[kind][key] for space in found["namespaces"]) for key in sums} == sums
        assert files
    assert found["disk"] == disk(filled, *filled.rglob("*"))
    assert found["index_bytes"] == disk(*filled.glob("index.db*"))
    assert (found["live"], found["holder"], found["clean"], found["problem"]) == (False, None, True, None)
    assert (found["quarantine"], found["tmp"]) == ([], [])


def test_json_says_what_was_stored_by_namespace(call, filled):
    found = facts(call, filled)
    chat, tenant = sorted(by_model(found, "chat"), key=lambda space: -space["tokens"])
    assert chat["tokens"] == LONG + 2 * (SHORT - SHARED)
    assert chat["blocks"]["images"] == 12 + 1 + 1
    assert chat["raw_nbytes"] == chat["tokens"] * 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, width, bytes
    assert chat["ratio"] == pytest.approx(chat["raw_nbytes"] / chat["blocks"]["nbytes"], abs=1e-4)
    assert chat["hits"] == 12
    assert chat["codec"]["name"] == "turboquant"
    assert [kind["class"] for kind in chat["layout"]["kinds"]] == ["mlx_lm.models.cache.KVCache"]
    assert time.time() - 600 < chat["oldest"] <= chat["newest"] <= chat["last_used"] <= found["now"]
    assert found["totals"]["last_used"] == max(space["last_used"] for space in found["namespaces"])
    assert (tenant["tokens"], tenant["hits"], tenant["blocks"]["images"]) == (600, 0, 3)
    (state,), (odd,) = by_model(found, "state"), by_model(found, ODD)
    assert (state["tokens"], state["snapshots"]["images"], state["windows"]["images"]) == (700, 1, 0)
    assert (odd["tokens"], odd["windows"]["images"]) == (1000, 4)
    assert odd["raw_nbytes"] == 2 * 1000 * 2 * 2 * 32 * 2  # both layers: the windowed one held all when it was stored
    assert [space["last_used_tick"] for space in found["namespaces"]] == sorted(
        (space["last_used_tick"] for space in found["namespaces"]), reverse=True
    )


def test_of_windowed_layers_the_rows_that_are_kept_are_counted(call, filled):
    whole = by_model(facts(call, filled), ODD)[0]["raw_nbytes"]
    change(filled, "DELETE FROM image WHERE kind = 1 AND start = 0")
    (odd,) = by_model(facts(call, filled), ODD)
    assert whole - odd["raw_nbytes"] == 256 * 2 * 2 * 32 * 2
    change(filled, """UPDATE image SET extra = '{"ranges":[[[0,100],[200,201]]]}' WHERE kind = 1 AND start = 256""")
    (odd,) = by_model(facts(call, filled), ODD)
    assert whole - odd["raw_nbytes"] == (256 + 256 - 101) * 2 * 2 * 32 * 2
    change(filled, "UPDATE image SET extra = '[]' WHERE kind = 1 AND start = 256")
    assert by_model(facts(call, filled), ODD)[0]["ratio"] is None


def test_hits_are_counted_once_each_over_restarts(call, tmp_path):
    path, prompt = tmp_path / "cache", list(range(600))
    with PrefixCache(ram="20MB", ssd_dir=path, ssd="100MB") as cache:
        cache.store(prompt, kv(600), model="m")
        cache.flush()
        for _ in range(3):
            assert cache.fetch(prompt, model="m")
    with PrefixCache(ram="20MB", ssd_dir=path, ssd="100MB") as cache:
        cache.promote(prompt, model="m").result(60)
        for _ in range(2):
            assert cache.fetch(prompt, model="m")
            cache.flush()
        assert cache.match(prompt, model="m").ram == 600
    (space,) = facts(call, path)["namespaces"]
    assert space["hits"] == 3 * 5  # blocks, fetches


def test_the_age_of_the_last_use_is_shown(call, filled):
    change(filled, "UPDATE image SET used_at = ? WHERE namespace = 1", time.time() - 3 * 3600 - 60)
    change(filled, "UPDATE image SET used_at = ? WHERE namespace != 1", time.time() - 2 * 86400 - 60)
    shown = call("inspect", filled).stdout
    assert "last use" in shown
    assert len(re.findall(r"\b3 h\b", shown)) == 2  # the namespace, and all
    assert len(re.findall(r"\b2 d\b", shown)) == 3


def test_the_tables_have_every_model_and_nothing_is_cut(call, filled):
    done = call("inspect", filled)
    assert done.exit_code == 0
    for text in ("chat", "state", "turboquant k4 v4", str(filled)[-40:], "closed", "total", "3,280", "1,000", "700"):
        assert text in done.stdout.replace("\n", "")
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    found = facts(call, filled)
    for space in found["namespaces"]:
        assert space["root"][:8] in done.stdout
        assert f"{space['ratio']:.2f}x" in done.stdout


def test_a_terminal_of_80_columns_shows_the_same(filled):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    with subprocess.Popen([*COMMAND, "inspect", str(filled)], stdout=theirs, env=environment) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 65536):
                written += part
        except OSError:  # how the end of a terminal reads
            pass
    os.close(ours)
    assert process.returncode == 0
    text = written.decode()
    assert "\x1b[1m" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in plain
    assert "…" not in plain
    for word in ("chat", "3,280", "1,000"):
        assert word in plain


@pytest.mark.parametrize("options", [(), ("--all",), ("--json",)])
def test_no_token_and_no_salt_is_shown(call, filled, options):
    written = call("inspect", filled, *options).output
    assert "765400" not in written
    for secret in (SALT.decode(), SALT.hex(), repr(SALT)):
        assert secret not in written


def test_a_foreign_name_is_shown_and_not_obeyed(call, filled):
    written = call("inspect", filled).stdout
    flat = re.sub(r"\s+", "", written)
    assert not {"\x1b", "\u202e"} & set(written)
    assert r"evil\x1b[31m[boldred]/model[/]\n" in flat
    assert ":smile:" in flat
    assert "\\u202e" in flat


def test_a_live_directory_of_another_process_names_its_holder(call, live):
    path, process = live
    found = facts(call, path)
    assert (found["live"], found["clean"]) == (True, False)
    assert found["holder"].startswith(f"pid {process.pid} on ")
    assert found["totals"]["tokens"] == 1000
    assert f"open: pid {process.pid} on" in call("inspect", path).stdout


def test_a_directory_whose_holder_died_says_so_and_stays_as_it_is(call, live):
    path, process = live
    crash(process)
    (path / "tmp" / "12.safetensors").write_bytes(b"x" * 100)
    before = fingerprint(path)
    found = facts(call, path)
    shown = call("inspect", path)
    assert fingerprint(path) == before
    assert (found["live"], found["holder"], found["clean"]) == (False, None, False)
    assert found["totals"]["tokens"] == 1000
    assert found["tmp"] == ["12.safetensors"]
    assert "it was not closed cleanly" in shown.stdout
    assert "12.safetensors" in shown.stdout


def test_long_lists_are_cut_unless_all_is_asked_for(call, filled):
    for number in range(250):
        (filled / "tmp" / f"{number}.safetensors").touch()
    some, whole = (call("inspect", filled, *more).stdout for more in ((), ("--all",)))
    assert some.count(".safetensors") == 200
    assert "... 50 files more: --all" in some
    assert whole.count(".safetensors") == 250
    assert "--all" not in whole


def test_what_is_in_quarantine_is_listed_with_its_reason(call, filled):
    spoil(images(filled)[0])
    assert call("reconcile", filled, "--deep").exit_code == 1
    (item,) = facts(call, filled)["quarantine"]
    origin = str(images(filled.parent / "cache", "quarantine")[0].name).split("-")[1]
    assert item["origin"].endswith(origin)
    assert item["reason"] == "the checksum does not match"
    assert item["disk"] == disk(*(filled / "quarantine").iterdir())
    shown = call("inspect", filled).stdout
    assert item["origin"] in shown
    assert item["reason"] in shown


def test_a_layout_of_another_release_costs_the_ratio_only(call, filled):
    layout, codec = '{"kinds": 7}', '{"name": "new"}'
    change(filled, "UPDATE namespace SET layout = ?, codec = ? WHERE model = 'state'", layout, codec)
    found = facts(call, filled)
    (state,) = by_model(found, "state")
    assert (state["ratio"], state["raw_nbytes"], state["codec_name"], state["tokens"]) == (None, None, "new", 700)
    assert found["totals"]["ratio"] is None
    assert call("inspect", filled).exit_code == 0


def test_an_index_that_can_not_be_read_gives_1(call, filled):
    (filled / "index.db").write_bytes(os.urandom(5000))
    done = call("inspect", filled)
    assert done.exit_code == 1
    assert "can't be read" in done.stdout
    again = call("inspect", filled, "--json")
    assert again.exit_code == 1
    assert "not a database" in json.loads(again.stdout)["problem"]


def newer(tmp_path: Path, filled: Path) -> Path:
    change(filled, "PRAGMA user_version = 2")
    return filled


def empty(tmp_path: Path, filled: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def somebody_elses(tmp_path: Path, filled: Path) -> Path:
    (tmp_path / "home" / "tmp").mkdir(parents=True)
    (tmp_path / "home" / "tmp" / "letter").write_text("dear")
    return tmp_path / "home"


def a_file(tmp_path: Path, filled: Path) -> Path:
    return filled / "LOCK"


def missing(tmp_path: Path, filled: Path) -> Path:
    return tmp_path / "no\nwhere"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (missing, "no such directory"),
        (a_file, "not a directory"),
        (empty, "it is empty"),
        (somebody_elses, "not a prefixcache directory"),
        (newer, "a newer release or one from before 0.1.0 wrote it"),
    ],
)
def test_what_can_not_be_shown_gives_2_and_one_line(call, tmp_path, filled, make, why):
    path = make(tmp_path, filled)
    done = call("inspect", path)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("prefixcache: ")
    assert why in done.stderr
    assert why in json.loads(call("inspect", path, "--json").stdout)["error"]


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")
def test_a_directory_that_may_not_be_read_gives_2(filled):
    os.chmod(filled, 0o755)
    for folder in (filled.parent, *list(filled.parents)[1:3]):
        os.chmod(folder, 0o755)
    script = (
        "import os, sys\nfrom typer.testing import CliRunner\nfrom prefixcache.cli import app\n"
        "CliRunner().invoke(app, ['inspect', '/nowhere'])\n"  # imports what nobody may not read
        "os.setuid(65534)\napp()"
    )
    done = subprocess.run([sys.executable, "-c", script, "inspect", str(filled)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Permission denied" in done.stderr


def test_json_imports_no_mlx_lm(filled):
    script = (
        "import sys\nfrom prefixcache.cli import app\n"
        f"try: app(['inspect', {str(filled)!r}, '--json'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "sys.stderr.write(' '.join(name for name in sys.modules if name.split('.')[0] in ('mlx_lm', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["totals"]["tokens"]
    assert done.stderr == ""


def test_a_pipe_that_ends_early_is_no_error(filled):
    line = f"{sys.executable} -c 'from prefixcache.cli import app; app()' inspect {filled} --json | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_an_ascii_terminal_is_enough(filled):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    done = subprocess.run([*COMMAND, "inspect", str(filled)], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "3,280" in done.stdout.decode("ascii")


def test_kernels_says_which_code_runs_the_codecs_here() -> None:
    shown = CliRunner().invoke(app, ["inspect", "--kernels"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("TurboQuant, cpu: ")
    as_json = CliRunner().invoke(app, ["inspect", "--kernels", "--json"])
    assert set(json.loads(as_json.output)["kernels"]) >= {"cpu"}
    coder = entropy_coder()
    assert f"transform, entropy coder, cpu: {coder}" in shown.output
    assert json.loads(as_json.output)["entropy_coder"] == coder


@pytest.mark.parametrize("given", [[], ["--kernels", "somewhere"]])
def test_a_directory_and_kernels_are_one_or_the_other(given: list[str]) -> None:
    shown = CliRunner().invoke(app, ["inspect", *given])
    assert shown.exit_code == 2
    assert "give DIR" in shown.output
