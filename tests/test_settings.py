from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixcache.byte_sizes import UNITS, parse_size
from prefixcache.memory import machine_memory
from prefixcache.settings import Settings, ram_auto

GB = 1 << 30
REMEDY = 'write "20GB", "512MiB" or a number of bytes'


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "cache.toml"
        path.write_text(text)
        return path

    return write


def refusal(**values) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (each caller looks at the text)
        Settings(**values)
    return str(caught.value)


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("8 GB", 8 * 10**9),
        (" 8gb ", 8 * 10**9),
        ("8\tGB\n", 8 * 10**9),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("512M", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("0.5 KiB", 512),
        ("2TB", 2 * 10**12),
        ("1PiB", 1 << 50),
        ("100", 100),
        ("100B", 100),
        ("0", 0),
        ("0GB", 0),
        ("0.0", 0),
        ("007", 7),
        (0, 0),
        (1, 1),
        (8_000_000_000, 8_000_000_000),
        (2**63 - 1, 2**63 - 1),
        (8e9, 8 * 10**9),
        (0.0, 0),
    ],
)
def test_a_size_is_read(text, nbytes):
    assert parse_size(text, "ssd") == Settings(ssd=text, ssd_dir="x").ssd == nbytes


@given(
    st.integers(0, 10**6),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from([str.lower, str.upper, str]),
)
def test_every_unit_is_read_in_any_case(number, unit, gap, case):
    wanted = number * UNITS[unit]
    if wanted < 2**63:
        assert parse_size(case(f"{number}{gap}{unit}")) == wanted


BAD_SIZES = [
    "-1",
    "1e400",
    "1e3",
    "20QB",
    "20 Q",
    "",
    " ",
    "GB",
    "MiB",
    ".5GB",
    "5.GB",
    "1.5.2GB",
    "1,5GB",
    "1_000",
    "0x10",
    "8GB8",
    "8 G B",
    "8GB;",
    "inf",
    "nan",
    "infinity",
    "none",
    "Auto",
    "AUTO",
    "+5",
    "-0GB",
    "8GBB",
    "\u0668GB",
    "10000PB",
    "9" * 30,
    "9" * 5000,
    "1." + "0" * 5000,
    "0.0001",
    "0.5",
    "0.5B",
    None,
    True,
    False,
    float("nan"),
    float("inf"),
    float("-inf"),
    -1,
    -1.5,
    0.25,
    10**30,
    2**63,
    1e300,
    b"8GB",
    [8],
    {"GB": 8},
    (),
    object,
    1j,
]


@pytest.mark.parametrize("name", ["ram", "ssd", "ssd_reserve", "spill_queue"])
@pytest.mark.parametrize("value", BAD_SIZES, ids=lambda value: repr(value)[:30])
def test_a_bad_size_is_an_error_that_names_the_setting_the_value_and_the_remedy(name, value):
    assert f"{name}={value!r}: not a size; {REMEDY}" in refusal(**{name: value})


@given(st.text(max_size=12) | st.integers() | st.floats() | st.none() | st.booleans() | st.binary(max_size=3))
@example("8GB")
def test_whatever_is_given_is_a_size_or_a_value_error(value):
    try:
        nbytes, said = parse_size(value, "ssd"), ""
    except ValueError as error:
        nbytes, said = 0, str(error)
    assert 0 <= nbytes < 2**63
    assert said in ("", f"ssd={value!r}: not a size; {REMEDY}")


@pytest.mark.parametrize("name", ["ram", "ssd", "ssd_reserve", "spill_queue"])
def test_sizes_that_may_be_auto(name):
    assert getattr(Settings(**{"ssd_dir": "x", name: "auto"}), name) == getattr(Settings(), name) == "auto"


# -- where settings come from -----------------------------------------------------------------------------------------


def test_the_defaults():
    settings = Settings()
    assert settings.ram == settings.ssd == settings.spill_queue == "auto"
    assert settings.ssd_dir is settings.codec is None
    assert (settings.spill, settings.readers) == ("drop", 4)


def test_variables_are_read(monkeypatch):
    values = {
        "RAM": "2GB",
        "SSD_DIR": "/cache",
        "SSD": "10 GB",
        "SPILL": "wait",
        "READERS": "2",
        "SPILL_ON_CLOSE": "false",
        "SPILL_WAIT": "1.5",
        "ALLOW_CLASSES": '["a.B"]',
    }
    for name, value in values.items():
        monkeypatch.setenv(f"PREFIXCACHE_{name}", value)
    settings = Settings()
    assert settings.ram == 2 * 10**9
    assert settings.ssd_dir == Path("/cache")
    assert settings.ssd == 10**10
    assert (settings.spill, settings.readers, settings.spill_on_close, settings.spill_wait) == ("wait", 2, False, 1.5)
    assert settings.allow_classes == ("a.B",)


def test_a_bad_variable_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_RAM", "20QB")
    assert f"ram='20QB': not a size; {REMEDY}" in refusal()
    monkeypatch.setenv("PREFIXCACHE_RAM", "")
    assert f"ram='': not a size; {REMEDY}" in refusal()


def test_arguments_stand_above_variables_and_these_above_the_file(monkeypatch, toml):
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(toml('ram = "1GB"\nssd_dir = "x"\nssd = "1GB"\nreaders = 7\n')))
    assert (Settings().ram, Settings().ssd, Settings().readers) == (10**9, 10**9, 7)
    monkeypatch.setenv("PREFIXCACHE_RAM", "2GB")
    monkeypatch.setenv("PREFIXCACHE_SSD", "2GB")
    settings = Settings(ram="3GB")
    assert (settings.ram, settings.ssd, settings.readers) == (3 * 10**9, 2 * 10**9, 7)


@pytest.mark.parametrize("variable", ["PREFIXCACHE_SSD", "prefixcache_ssd"])
def test_a_named_file_stands_below_arguments_and_variables(monkeypatch, toml, variable):
    monkeypatch.setenv(variable, "2GB")
    settings = Settings.from_toml(toml('ram = "1GB"\nssd_dir = "x"\nssd = "1GB"\nreaders = 7\n'), ram="3GB")
    assert (settings.ram, settings.ssd, settings.readers) == (3 * 10**9, 2 * 10**9, 7)


def test_a_missing_file_is_an_error_that_names_it(monkeypatch, tmp_path):
    missing = tmp_path / "missing.toml"
    with pytest.raises(FileNotFoundError, match=r"missing.toml: no such file; give the path"):
        Settings.from_toml(missing)
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(missing))
    assert f"PREFIXCACHE_CONFIG={str(missing)!r}: no such file; name a TOML file or unset it" in refusal()
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(tmp_path))
    assert "no such file" in refusal()
    monkeypatch.setenv("PREFIXCACHE_CONFIG", "")
    assert Settings().ram == "auto"


@pytest.mark.parametrize("content", ["ram = \n", "[", "ram = 1\nram = 2\n"])
def test_a_file_that_is_not_toml_is_an_error_that_names_it(monkeypatch, toml, content):
    path = toml(content)
    with pytest.raises(ValueError, match=r"cache\.toml: not TOML: .*; mend the file"):
        Settings.from_toml(path)
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(path))
    assert "cache.toml: not TOML" in refusal()


def test_a_file_that_is_not_utf_8_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "cache.toml"
    path.write_bytes(b'ram = "\xff"')
    with pytest.raises(ValueError, match=r"cache\.toml: not TOML"):
        Settings.from_toml(path)


def test_a_bad_value_in_a_file_is_an_error(toml):
    with pytest.raises(ValueError, match="ram='lots': not a size"):
        Settings.from_toml(toml('ram = "lots"\n'))


def test_unknown_names_are_an_error(monkeypatch, toml):
    with pytest.raises(ValueError, match=r"ssd_dirr: no such setting; write ssd_dir "):
        Settings(ssd_dirr="8GB")
    path = toml('rma = "8GB"\n')
    with pytest.raises(ValueError, match="rma"):
        Settings.from_toml(path)
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(path))
    assert "rma" in refusal()


@pytest.mark.parametrize(
    ("key", "meant"),
    [("rma", "one of allow_classes, "), ("ssd_dirr", "ssd_dir"), ("ssd-dir", "ssd_dir"), ("PREFIXCACHE_RAM", "ram")],
)
def test_a_misspelt_key_of_a_file_is_an_error_that_names_the_file_and_what_to_write(monkeypatch, toml, key, meant):
    path = toml(f'readers = 7\n"{key}" = "S3CR3T"\n')
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(path))
    for read in (lambda: Settings.from_toml(path), lambda: Settings(ram="8GB")):
        with pytest.raises(ValueError, match=re.escape(f"{path}: {key!r}: no such setting; write {meant}")) as error:
            read()
        assert str(error.value).endswith(", or delete it")
        assert "S3CR3T" not in str(error.value)


def test_settings_are_frozen():
    settings = Settings(ram=5)
    with pytest.raises(ValueError, match="frozen"):
        settings.ram = 6
    assert settings.ram == 5


# -- settings of other kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"spill": "maybe"}, ["spill", "'drop', 'wait' or 'through'", "'maybe'"]),
        ({"readers": 0}, ["readers", "greater than or equal to 1", "0"]),
        ({"readers": 1000}, ["readers", "less than or equal to 64", "1000"]),
        ({"readers": "many"}, ["readers", "valid integer", "'many'"]),
        ({"spill_wait": -1}, ["spill_wait", "greater than or equal to 0", "-1"]),
        ({"spill_wait": 61}, ["spill_wait", "less than or equal to 60", "61"]),
        ({"spill_wait": float("nan")}, ["spill_wait", "nan"]),
        ({"close_timeout": 0}, ["close_timeout", "greater than 0"]),
        ({"spill_on_close": "perhaps"}, ["spill_on_close", "boolean", "'perhaps'"]),
        ({"allow_classes": "a.B"}, ["allow_classes", "valid tuple", "'a.B'"]),
        ({"ssd_dir": 3}, ["ssd_dir", "path", "3"]),
        ({"ssd_dir": ""}, ["ssd_dir=''", "write its path", "leave it out for RAM only"]),
        ({"basis_dir": ""}, ["basis_dir=''", "write its path", "leave it out for the usual one"]),
        ({"ssd_dir": "~no-such-user-here/x"}, ["ssd_dir='~no-such-user-here/x'", "write the whole path"]),
        ({"ram": 0}, ["ram=0: nothing could be kept", 'give ram a size, such as "1GB"']),
        ({"ram": "0GB", "ssd_dir": "x"}, ["ram=0: nothing could be kept"]),
    ],
)
def test_other_bad_settings_are_named_with_what_may_be_written(values, named):
    said = refusal(**values)
    for text in named:
        assert text in said


def test_a_directory_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Settings(ssd_dir="cache").ssd_dir == tmp_path / "cache"
    assert Settings(ssd_dir="~/cache").ssd_dir == tmp_path / "home/cache"
    assert Settings(ssd_dir=Path("cache")).ssd_dir == tmp_path / "cache"
    assert Settings().ssd_dir is None


def test_an_empty_directory_variable_is_not_the_current_directory(monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_SSD_DIR", "")
    assert "ssd_dir=''" in refusal()


# -- what "auto" means ------------------------------------------------------------------------------------------------


def test_ram_in_bytes():
    assert Settings().ram_bytes(16 << 30) == 4 << 30
    assert Settings(ram="3GB").ram_bytes(16 << 30) == 3 * 10**9


@pytest.mark.parametrize(("memory", "weights", "budget"), [(16, 0, 4), (96, 40, 24), (16, 12, 2)])
def test_auto_leaves_room_for_the_weights_and_running_requests(memory, weights, budget):
    assert ram_auto(memory * GB, weights * GB) == budget * GB


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
@example(16 << 30, 0)
@example(16 << 30, 100 << 30)
def test_auto_is_a_quarter_or_what_the_weights_and_an_eighth_leave(memory, weights):
    budget = ram_auto(memory, weights)
    assert memory // 64 <= budget <= ram_auto(memory) == Settings().ram_bytes(memory) == memory // 4
    assert ram_auto(memory, weights + 1) <= budget <= ram_auto(memory, weights // 2)
    assert budget + weights + memory // 8 <= memory or budget == memory // 64


def test_ssd_in_bytes_is_what_was_set(tmp_path):
    assert Settings(ssd="3GB", ssd_dir=None).ssd_bytes(tmp_path) == 3 * 10**9
    assert Settings(ssd=0).ssd_bytes(tmp_path / "not" / "there") == 0


def test_a_size_of_an_ssd_without_a_directory_is_refused():
    for size in ("3GB", "auto"):
        with pytest.raises(ValueError, match=f'ssd="{size}" without ssd_dir: no directory to keep it in; name one'):
            Settings(ssd=size)


class Usage:
    free = 100 << 20


def test_half_of_the_free_disk_is_taken_also_where_no_directory_is_yet(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("shutil.disk_usage", lambda path: asked.append(Path(path)) or Usage)
    assert Settings().ssd_bytes(tmp_path) == Settings().ssd_bytes(tmp_path / "not" / "there") == 50 << 20
    assert asked == [tmp_path, tmp_path]


def test_what_the_directory_holds_already_counts_as_free(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "file").write_bytes(b"x" * (1 << 20))
    held = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert held >= 1 << 20
    assert Settings().ssd_bytes(tmp_path) == ((100 << 20) + held) // 2


def test_the_machines_memory_is_sane():
    assert 64 << 20 < machine_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("limit", "counts"), [("1073741824\n", True), ("max\n", False), ("", False), (str(2**63 - 4096), False)]
)
def test_a_control_groups_limit_counts_when_it_is_lower(monkeypatch, limit, counts):
    monkeypatch.setattr(Path, "read_text", lambda path: limit)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine_memory() == (min(1 << 30, whole) if counts else whole)


def test_a_misspelt_variable_is_an_error_that_knows_better(monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_RMA", "8GB")
    with pytest.raises(ValueError, match="PREFIXCACHE_RMA: no such setting; write PREFIXCACHE_RAM"):
        Settings()
    monkeypatch.delenv("PREFIXCACHE_RMA")
    monkeypatch.setenv("PREFIXCACHE_SOMETHING_ELSE_ENTIRELY", "1")
    with pytest.raises(ValueError, match="PREFIXCACHE_SSD_DIR"):
        Settings()


@pytest.mark.parametrize("variable", ["PREFIXCACHE_CONFIG", "PREFIXCACHE_ADMIN_KEY"])
def test_a_variable_that_is_read_in_capitals_only_is_an_error_in_other_letters(monkeypatch, variable):
    monkeypatch.setenv(variable.lower(), "value")
    assert f"{variable.lower()}: no such setting; write {variable}, or unset it" in refusal()
