"""What a cache says of a remote tier that can't be."""

from __future__ import annotations

import builtins

import pytest

from prefixcache import PrefixCache, Settings


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
