"""What a cache says of a remote tier that can't be."""

import builtins
import logging
import traceback

import pytest
from pydantic import SecretStr, ValidationError

from prefixcache import PrefixCache, Settings
from prefixcache.cli.serve.cache_options import settings_from

URL = "valkey://:S3CR3T@cache.lan"


@pytest.mark.parametrize(
    ("remote", "said"),
    [
        ("s3://bucket/prefix", "leaves this machine; name a key file"),
        ("valkey://cache.lan", "leaves this machine; name a key file"),
        ("ftp://localhost", "no engine has this scheme"),
        ("file://relative/path", "three slashes"),
        ("", "remote="),
    ],
)
def test_a_url_that_can_not_be_is_an_error_with_a_remedy(remote, said):
    with pytest.raises(ValueError, match=said):
        PrefixCache(ram="1MB", remote=remote)


def test_a_bad_key_file_is_an_error_before_anything_is_opened(tmp_path):
    with pytest.raises(ValueError, match=r"remote_key_file=.*openssl"):
        PrefixCache(ram="1MB", ssd_dir=tmp_path / "ssd", ssd="10MB", remote="s3://b/p", remote_key_file=tmp_path / "no")
    assert not (tmp_path / "ssd").exists()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("valkey"):
            raise ImportError("No module named 'valkey'", name="valkey")
        return imported(name, *args, **options)

    monkeypatch.delitem(__import__("sys").modules, "prefixcache.remote.valkey_store", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r'pip install "prefixcache\[valkey\]"'):
        PrefixCache(ram="1MB", remote="valkey://localhost")


def test_no_password_shows_in_settings():
    settings = Settings(remote="valkey://:secret@localhost")
    assert "secret" not in repr(settings) + str(settings)


@pytest.mark.parametrize(
    "values",
    [
        {"ram": 0, "remote": URL},
        {"spill": "through", "ssd_admission": "second", "remote": URL},
        {"remote": [URL]},
        {"remote": {"url": URL}},
        {"remote": URL.encode() + b"\xff"},
        {"remtoe": URL},
        {"remote_key": "S3CR3T"},
        {"ram": 0, "remote": "S3CR3T"},
    ],
)
def test_no_password_shows_in_errors_of_settings(values, caplog):
    for make in (PrefixCache, Settings, lambda **given: Settings.model_validate(given)):
        with pytest.raises(ValidationError) as caught:
            make(**values)
        error = caught.value
        logging.getLogger("prefixcache").error("no cache", exc_info=error)
        said = [str(error), repr(error), repr(error.errors()), *traceback.format_exception(error), caplog.text]
        assert "S3CR3T" not in "".join(said)
        assert error.__context__ is error.__cause__ is None
    with pytest.raises(ValueError, match=r"ram|remote|remtoe|spill") as refused:
        settings_from(values)
    assert "S3CR3T" not in str(refused.value)


def test_no_password_of_a_variable_or_a_file_shows_in_errors(monkeypatch, tmp_path):
    (tmp_path / "cache.toml").write_text(f'ram = 0\nremote = ["{URL}"]\n')
    with pytest.raises(ValidationError) as of_a_file:
        Settings.from_toml(tmp_path / "cache.toml")
    monkeypatch.setenv("PREFIXCACHE_REMOTE", URL)
    with pytest.raises(ValidationError) as of_a_variable:
        Settings(ram=0)
    monkeypatch.delenv("PREFIXCACHE_REMOTE")
    with pytest.raises(ValidationError) as of_an_assignment:
        Settings().remote = URL
    for caught in (of_a_file, of_a_variable, of_an_assignment):
        assert "S3CR3T" not in f"{caught.value}{caught.value!r}{caught.value.errors()}{caught.value.json()}"


def test_an_empty_url_is_an_error_that_says_to_leave_it_out(monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_REMOTE", "")  # as compose files write what is not set
    with pytest.raises(ValueError, match=r"remote='': empty; write it as valkey://HOST:6379 .* or leave it out"):
        PrefixCache(ram="1MB")


def test_errors_still_show_the_values_of_other_settings():
    with pytest.raises(ValidationError) as caught:
        Settings(ram="1GB", readers=0, spill="maybe", remote=URL)
    assert [(error["loc"], error["type"], error["input"]) for error in caught.value.errors()] == [
        (("spill",), "literal_error", "maybe"),
        (("readers",), "greater_than_equal", 0),
    ]
    with pytest.raises(ValidationError, match="choose one of them") as caught:
        Settings(spill="through", ssd_admission="second", remote=URL)
    assert caught.value.errors()[0]["input"] == {
        "spill": "through",
        "ssd_admission": "second",
        "remote": SecretStr(URL),
    }
