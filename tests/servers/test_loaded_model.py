"""What a server does of a model that it has just loaded, before the first request."""

from __future__ import annotations

from types import SimpleNamespace

from prefixcache import PrefixCache, Raw
from prefixcache.servers import loaded_model
from tests.models.families import FAMILIES


def test_kernels_are_compiled_in_a_cache_that_records_and_shares_nothing(monkeypatch, tmp_path, caplog):
    (tmp_path / "fleet").mkdir()
    monkeypatch.setenv("PREFIXCACHE_REMOTE", f"file://{tmp_path / 'fleet'}")
    monkeypatch.setenv("PREFIXCACHE_REMOTE_ADMISSION", "always")
    monkeypatch.setenv("PREFIXCACHE_TRACE", str(tmp_path / "trace.jsonl"))
    monkeypatch.setattr(loaded_model, "dialect_here", lambda: SimpleNamespace(name="cuda"))
    caplog.set_level("DEBUG", "prefixcache")
    with PrefixCache(ram="100MB", codec=Raw(), remote=None) as cache:  # it records
        loaded_model.compile_kernels(cache, FAMILIES["llama"].build(), "model")
    assert "kernels are not compiled" not in caplog.text
    assert (tmp_path / "trace.jsonl").read_bytes() == b""
    assert not list((tmp_path / "fleet").iterdir())
