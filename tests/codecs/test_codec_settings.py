"""The setting `codec`: what may be written for it, and where."""

from __future__ import annotations

import pytest

from prefixcache.codecs import Raw, TurboQuant
from prefixcache.settings import Settings


def refusal(codec) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (each caller looks at the text)
        Settings(codec=codec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("raw", Raw()),
        ("RAW ", Raw()),
        ("turboquant", TurboQuant()),
        ("turboquant:3", TurboQuant(3, 3)),
        ("turboquant:4:3", TurboQuant(4, 3)),
        (TurboQuant(2, 8), TurboQuant(2, 8)),
        (Raw(), Raw()),
        (TurboQuant(4, 1).spec(), TurboQuant(4, 1)),
    ],
)
def test_a_codec_is_read(text, codec):
    assert Settings(codec=text).codec == codec


@pytest.mark.parametrize(
    "bad", ["", "zip", "raw:4", "turboquant:", "turboquant:4:3:2", "turboquant:x", "turboquant 4", "4"]
)
def test_a_bad_codec_is_an_error_that_says_what_to_write(bad):
    said = refusal(bad)
    assert f"codec={bad!r}: not a codec; write " in said
    assert '"turboquant:4:3"' in said


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("turboquant:4:5", "value_bits=5"),
        ("turboquant:16", "key_bits=16"),
    ],
)
def test_a_codec_of_a_bad_depth_is_an_error_that_says_what_to_choose(bad, named):
    said = refusal(bad)
    assert named in said
    assert "choose" in said


@pytest.mark.parametrize("bad", [4, 4.5, True, TurboQuant, ["turboquant"], b"raw", object()])
def test_a_codec_of_another_type_is_a_value_error_too(bad):
    said = refusal(bad)
    assert "codec" in said
    assert "pass a codec such as" in said or "write " in said


def test_a_variable_may_give_a_codec(monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_CODEC", "turboquant:4:3")
    assert Settings().codec == TurboQuant(4, 3)


@pytest.mark.parametrize(
    "text", ['codec = "turboquant:8"', '[codec]\nname = "turboquant"\nversion = 2\nkey_bits = 8\nvalue_bits = 8\n']
)
def test_a_file_may_give_a_codec_by_its_name_or_its_spec(tmp_path, text):
    path = tmp_path / "cache.toml"
    path.write_text(text)
    assert Settings.from_toml(path).codec == TurboQuant(8, 8)


def test_settings_with_a_codec_are_dumped_and_read_again():
    for codec in (TurboQuant(4, 3, layers={0: 8}), Raw(), TurboQuant(8, 8), None):
        settings = Settings(ram="1GB", codec=codec)
        assert Settings(**settings.model_dump()).codec == codec
        assert Settings.model_validate_json(settings.model_dump_json()).codec == codec
