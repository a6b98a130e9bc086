"""`prefixcache inspect --remote URL`: what it tells of an engine, and how it refuses."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from contextlib import suppress

from typer.testing import CliRunner
from valkey import Valkey

from prefixcache import PrefixCache
from prefixcache.cli import app
from tests.models.states import got, put
from tests.remote.fleet import sent
from tests.remote.servers import certificates, free_port, valkey_server

LONG = list(range(1000))


def inspect(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return done.exit_code, done.output


def test_an_engine_tells_whether_it_answers_and_has_our_images(tmp_path, key_file):
    url = f"file://{tmp_path / 'nas'}"
    (tmp_path / "nas").mkdir()
    flags = "--remote", url, "--remote-key-file", key_file
    code, said = inspect(*flags, "--json")
    assert (code, json.loads(said)["key"]) == (0, "not told yet")
    with PrefixCache(
        ram="10MB", codec="raw", ssd_dir=tmp_path / "ssd", ssd="50MB", remote=url, remote_key_file=key_file
    ) as cache:
        put(cache, LONG)
        got(cache, LONG)
        cache.flush(10)
        sent(cache)
    code, said = inspect(tmp_path / "ssd", *flags, "--json")
    facts = json.loads(said)
    assert (code, facts["key"], facts["remote"]) == (0, "ours", url)
    assert (facts["asked_images"], facts["images_there"]) == (3, 3)  # the tail stays here, and is not looked for
    code, said = inspect(tmp_path / "ssd", *flags)
    assert "3 of the 3 images used last are there" in said
    other = tmp_path / "other.key"
    other.write_text("7b" * 32)
    other.chmod(0o600)
    code, said = inspect("--remote", url, "--remote-key-file", other)
    assert (code, "another, or none" in said) == (0, True)


def test_an_engine_that_evicts_nothing_is_told_of(key_file):
    with valkey_server(maxmemory=64 << 20, policy="noeviction") as server:
        code, said = inspect("--remote", f"valkey://127.0.0.1:{server.port}", "--remote-key-file", key_file)
    assert code == 0
    assert "maxmemory-policy allkeys-lru" in said
    assert "Valkey" in said


def test_an_engine_that_does_not_answer_is_one_line_and_the_exit_code_2(key_file):
    url = f"valkey://127.0.0.1:{free_port()}"
    code, said = inspect("--remote", url, "--remote-key-file", key_file)
    assert code == 2
    assert "connection refused; check the URL" in said
    for wrong in (("--remote", "ftp://x"), ("--remote", "s3://bucket"), ("--remote", url, "--kernels")):
        code, said = inspect(*wrong)
        assert code == 2
        assert len(said.strip().splitlines()) == 1


def test_a_certificate_that_is_not_trusted_names_the_option_that_makes_it_so(tmp_path, key_file, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    made, other = certificates(tmp_path), tmp_path / "other"
    other.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.certificate, made.key)
        threading.Thread(target=shake_hands, args=(context, listener), daemon=True).start()
        port = listener.getsockname()[1]
        for url in (f"s3://images?endpoint=https://127.0.0.1:{port}", f"valkeys://127.0.0.1:{port}"):
            flags = "--remote", url, "--remote-key-file", key_file
            code, said = inspect(*flags)
            assert code == 2
            assert "its TLS certificate is not trusted; name the certificate of who signed it" in said
            assert "with --remote-ca-file FILE" in said
            ca = certificates(other).ca
            code, said = inspect(*flags, "--remote-ca-file", ca)
            assert code == 2
            assert f"in the place of --remote-ca-file {ca}" in said


def shake_hands(context: ssl.SSLContext, listener: socket.socket) -> None:
    """Show the certificate to whoever connects, until the listener is closed."""
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            return
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as shaken:
            shaken.recv(1)


def test_a_user_who_may_not_ask_for_the_policy_sees_the_rest(tmp_path, key_file):
    rights = ["on", ">pass", "~fleet/*", "+get", "+set", "+strlen", "+sadd", "+srandmember", "+srem"]
    with valkey_server() as server:
        with Valkey(port=server.port) as admin:
            admin.execute_command("ACL", "SETUSER", "few", *rights)
            admin.execute_command("ACL", "SETUSER", "more", *rights, "+info")
        place = f"127.0.0.1:{server.port}/fleet"
        with PrefixCache(
            ram="10MB",
            codec="raw",
            remote=f"valkey://few:pass@{place}",
            remote_key_file=key_file,
            remote_admission="always",
        ) as cache:
            put(cache, LONG)
            sent(cache)
        flags = "--remote-key-file", key_file, "--json"
        code, said = inspect("--remote", f"valkey://few:pass@{place}", *flags)
        facts = json.loads(said)
        assert (code, facts["engine"], facts["key"]) == (0, "Valkey or Redis", "ours")
        assert facts["policy"].startswith("not told")
        code, said = inspect("--remote", f"valkey://more:pass@{place}", *flags)
        assert (code, json.loads(said)["policy"]) == (0, "noeviction")
        code, said = inspect("--remote", f"valkey://few:wrong@{place}", *flags)
        assert (code, "refused: access denied" in said) == (2, True)


def test_the_environment_names_the_engine_where_it_is_asked_for_and_the_files(tmp_path, key_file, monkeypatch):
    (tmp_path / "nas").mkdir()
    url = f"file://{tmp_path / 'nas'}"
    code, said = inspect("--remote", "env")
    assert (code, "--remote env: PREFIXCACHE_REMOTE is not set; set it, or write the URL" in said) == (2, True)
    with PrefixCache(ram="10MB", ssd_dir=tmp_path / "ssd", ssd="50MB", remote=url, remote_key_file=key_file):
        pass
    monkeypatch.setenv("PREFIXCACHE_REMOTE", f"valkey://:S3CR3T@127.0.0.1:{free_port()}")
    monkeypatch.setenv("PREFIXCACHE_REMOTE_KEY_FILE", str(key_file))
    monkeypatch.setenv("PREFIXCACHE_REMOTE_CA_FILE", str(tmp_path / "ca.pem"))
    code, said = inspect("--remote", "env")
    assert (code, "ca.pem: No such file" in said) == (2, True)
    monkeypatch.delenv("PREFIXCACHE_REMOTE_CA_FILE")
    code, said = inspect("--remote", "env")
    assert (code, "connection refused" in said, "S3CR3T" in said) == (2, True, False)
    code, said = inspect(tmp_path / "ssd")
    assert (code, "remote" in said) == (0, False)
    assert inspect()[0] == 2
    monkeypatch.setenv("PREFIXCACHE_REMOTE", url)
    code, said = inspect("--remote", "env", "--json")
    assert (code, json.loads(said)["remote"], json.loads(said)["key"]) == (0, url, "ours")
    monkeypatch.setenv("PREFIXCACHE_REMOTE_KEY_FILE", str(tmp_path / "none"))
    assert inspect("--remote", "env", "--remote-key-file", key_file)[0] == 0
    code, said = inspect("--remote", "env")
    assert (code, "No such file" in said) == (2, True)
