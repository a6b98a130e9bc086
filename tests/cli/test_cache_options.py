"""The flags of a cache: what they mean, what they leave to variables and the TOML file, which contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import SecretStr
from typer.testing import CliRunner

from prefixcache import Raw, Settings, TurboQuant
from prefixcache.cli.serve.cache_options import settings_from, with_settings


def given(**flags: Any) -> Settings:
    return settings_from(flags)


def refused(**flags: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        given(**flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_flags_are_the_usual_settings() -> None:
    assert given() == Settings()


def test_flags_say_what_settings_say(tmp_path: Path) -> None:
    settings = given(ram="8GB", ssd_dir=str(tmp_path), ssd="200GB", codec="turboquant:8")
    assert settings == Settings(ram="8GB", ssd_dir=tmp_path, ssd="200GB", codec=TurboQuant(8, 8))
    assert given(ram="auto", ssd_dir=str(tmp_path), ssd="auto") == Settings(ssd_dir=tmp_path)


@pytest.mark.parametrize(
    ("bits", "codec"),
    [
        ({"key_bits": 8}, TurboQuant(8, 4)),
        ({"value_bits": 2}, TurboQuant(4, 2)),
        ({"key_bits": 3, "value_bits": 1}, TurboQuant(3, 1)),
    ],
)
def test_bits_are_turboquants(bits: dict[str, int], codec: TurboQuant) -> None:
    assert given(**bits).codec == codec


OTHERS = {  # one for each field of Settings: the flag's text, and what it means
    "ram": ("1GB", 10**9),
    "ssd_dir": ("/x", Path("/x")),
    "ssd": ("auto", "auto"),
    "ssd_reserve": ("2GB", 2 * 10**9),
    "ssd_missing": ("wait", "wait"),
    "codec": ("raw", Raw()),
    "basis_dir": ("/y", Path("/y")),
    "memory_reserve": ("0", 0),
    "spill": ("wait", "wait"),
    "spill_wait": ("0.5", 0.5),
    "spill_queue": ("1GB", 10**9),
    "hot": ("2GB", 2 * 10**9),
    "decline_slow_hits": (True, True),
    "lease_share": ("0.5", 0.5),
    "cold_below": ("0.25", 0.25),
    "spill_idle": ("3GB", 3 * 10**9),
    "spill_on_close": (False, False),
    "close_timeout": ("60", 60.0),
    "readers": ("7", 7),
    "allow_classes": (["a.B", "c.D"], ("a.B", "c.D")),
    "policy": ("adaptive", "adaptive"),
    "ssd_admission": ("second", "second"),
    "trace": ("/t", Path("/t")),
    "remote": ("file:///z", SecretStr("file:///z")),
    "remote_key_file": ("/k", Path("/k")),
    "remote_ca_file": ("/c", Path("/c")),
    "remote_admission": ("never", "never"),
    "remote_timeout": ("2", 2.0),
}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_a_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, got = typer.Typer(), {}

    @command.command()
    @with_settings
    def serve(other: int = 1, **flags: Any) -> None:
        got.update(flags)

    text, value = OTHERS[name]
    flag = f"--{name.replace('_', '-')}"
    line = [flag] if text is True else [f"--no-{flag[2:]}"] if text is False else [flag, text]
    if isinstance(text, list):
        line = [part for one in text for part in (flag, one)]
    done = CliRunner().invoke(command, line)
    assert done.exit_code == 0, done.output
    assert {other: given for other, given in got.items() if given not in (None, [])} == {name: text}
    needed = {"ssd_dir": "/x"} if name == "ssd" else {}
    assert getattr(given(**{**got, **needed}), name) == value
    shown = " ".join(CliRunner().invoke(command, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert f"(PREFIXCACHE_{name.upper()})" in shown
    assert "PREFIXCACHE_CONFIG" in shown


def test_bits_change_the_codec_that_is_chosen_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_CODEC", "turboquant:4:3:fp16_layers=2")
    assert given(key_bits=8).codec == TurboQuant(8, 3, fp16_layers=2)
    assert given(codec="raw").codec == Raw()
    monkeypatch.setenv("PREFIXCACHE_CODEC", "raw")
    assert given(key_bits=8).codec == TurboQuant(8, 4)


def test_flags_stand_above_variables_and_these_above_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('ram = "1GB"\nssd = "2GB"\nssd_dir = "/from/file"\nreaders = 7\n')
    monkeypatch.setenv("PREFIXCACHE_CONFIG", str(tmp_path / "settings.toml"))
    monkeypatch.setenv("PREFIXCACHE_SSD", "3GB")
    settings = given(ram="4GB")
    assert (settings.ram, settings.ssd, settings.readers) == (4 * 10**9, 3 * 10**9, 7)
    assert settings.ssd_dir == Path("/from/file")


@pytest.mark.parametrize("source", ["variable", "file"])
def test_a_directory_named_elsewhere_serves_the_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    if source == "variable":
        monkeypatch.setenv("PREFIXCACHE_SSD_DIR", str(tmp_path))
    else:
        (tmp_path / "settings.toml").write_text(f'ssd_dir = "{tmp_path}"\n')
        monkeypatch.setenv("PREFIXCACHE_CONFIG", str(tmp_path / "settings.toml"))
    assert given(ssd="2GB").ssd_dir == tmp_path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"codec": "raw", "key_bits": 4}, "--codec with --key-bits: "),
        ({"codec": "turboquant", "key_bits": 4, "value_bits": 4}, "--codec with --key-bits and --value-bits: "),
        ({"ssd": "2GB"}, 'ssd="2GB" without ssd_dir: '),
        ({"ssd": "auto"}, 'ssd="auto" without ssd_dir: '),
        ({"ram": "0GB"}, "--ram=0: nothing could be kept; give ram a size, such as "),
        ({"ram": "8QB"}, "--ram='8QB': not a size; write "),
        ({"ssd_dir": "/x", "ssd": "much"}, "--ssd='much': not a size; write "),
        ({"ssd_dir": ""}, "--ssd-dir='': not a directory; write "),
        ({"key_bits": 5}, "--key-bits=5: not a bit depth of TurboQuant; choose 1, 2, 3, 4 or 8"),
        ({"key_bits": 4, "value_bits": 0}, "--value-bits=0: not a bit depth of TurboQuant; choose 1, 2, 3, 4 or 8"),
        ({"codec": "best"}, "--codec='best': not a codec; write "),
        ({"codec": "turboquant:5"}, "--codec 'turboquant:5': key_bits=5: not a bit depth"),
        ({"readers": "100"}, "--readers '100': Input should be less than or equal to 64"),
        ({"policy": "mru"}, "--policy 'mru': Input should be 'lru' or 'adaptive'"),
        ({"spill_queue": "much"}, "--spill-queue='much': not a size; write "),
        ({"cold_below": "often", "readers": "x"}, "--readers 'x': Input should be a valid integer"),
    ],
)
def test_what_is_bad_or_contradictory_is_named_in_one_line(flags: dict[str, Any], said: str) -> None:
    assert refused(**flags).startswith(said)


def test_bad_variables_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_READERS", "100")
    monkeypatch.setenv("PREFIXCACHE_SPILL", "sometimes")
    said = refused(ram="1GB")
    assert "spill: Input should be 'drop', 'wait' or 'through'; readers: Input should be less" in said
    monkeypatch.setenv("PREFIXCACHE_RAMM", "1GB")
    assert refused() == "PREFIXCACHE_RAMM: no such setting; write PREFIXCACHE_RAM, or unset it"


def test_a_ram_of_0_from_a_variable_is_refused_in_the_settings_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_RAM", "0")
    assert refused().startswith("ram=0: nothing could be kept; ")
    assert given(ram="1GB").ram == 10**9
