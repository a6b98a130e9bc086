"""The setting `codec`: what may be written for it, and where."""

import pytest

from prefixcache.codecs import Raw, TurboQuant
from prefixcache.settings import Settings


@pytest.mark.parametrize("bad", ["zip", "turboquant:4:5", 4, 4.5, True, TurboQuant, ["turboquant"], b"raw", object()])
def test_what_names_no_codec_is_a_value_error_of_the_settings_too(bad):
    with pytest.raises(ValueError, match="codec"):
        Settings(codec=bad)


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
