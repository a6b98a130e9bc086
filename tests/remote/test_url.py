"""Which URLs become engines, and what is said of those that don't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.remote.url import check_url, open_engine, redacted

from .conftest import Open
from .servers import certificates


def refusal(url: str, has_key: bool = True) -> str:
    with pytest.raises(ValueError, match=r"^remote=") as failure:
        check_url(url, has_key)
    text = str(failure.value)
    assert "; " in text  # the remedy
    assert "secret" not in text
    return text


LOOPBACK = [
    "valkey://127.0.0.1",
    "valkey://127.8.9.10:1/prefix/deeper",
    "redis://localhost:6379?db=3",
    "valkeys://[::1]:6380",
    "rediss://user:secret@LOCALHOST",
    "s3://bucket?endpoint=http://127.0.0.1:8333&region=here",
    "s3://bucket/a/b?endpoint=https://localhost",
    "file:///folder",
]
ELSEWHERE = [
    "valkey://cache.example",
    "redis://10.0.0.7:6379",
    "valkeys://[fe80::1]",
    "valkey://127.0.0.1.example",
    "valkey://0.0.0.0",
    "valkey://2130706433",
    "s3://bucket/prefix",
    "s3://bucket?endpoint=https://s3.example:9000",
    "gs://bucket",
    "az://container/prefix",
]


@pytest.mark.parametrize("url", LOOPBACK)
def test_a_folder_and_this_machine_need_no_key(url):
    check_url(url, False)
    check_url(url, True)


@pytest.mark.parametrize("url", ELSEWHERE)
def test_what_leaves_the_machine_needs_a_key(url):
    check_url(url, True)
    assert "what is stored leaves this machine; name a key file" in refusal(url, has_key=False)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "empty; write it as valkey:"),
        ("cache.example:6379", "no engine has this scheme"),
        ("http://cache.example", "no engine has this scheme; write one of valkey://, valkeys://, redis://"),
        ("valkey://", "it names no host"),
        ("valkey:///prefix", "it names no host"),
        ("valkey://host:65536", "its port is not one"),
        ("valkey://host:0", "port 0 is none"),
        ("valkey://host:x", "its port is not one"),
        ("valkey://[::1", "not a URL"),
        ("valkey://host?timeout=3", "has an option that is not known; valkey:// takes db"),
        ("valkey://host?password=secret", "has an option that is not known; valkey:// takes db"),
        ("valkey://host?db=-1", "db is not a number"),
        ("valkey://host?db=one", "db is not a number"),
        ("valkey://host?db=", "the option db is empty"),
        ("valkey://host?db=1&db=2", "an option stands twice"),
        ("valkey://host/a#b", "it has a #; write %23"),
        ("valkey://:sec#ret@host", "not a URL"),
        ("s3://", "it names no bucket"),
        ("s3:///prefix", "it names no bucket"),
        (
            "s3://127.0.0.1:8333/bucket",
            "it names no bucket; write s3://BUCKET/PREFIX; a server is named by ?endpoint=URL",
        ),
        ("s3://key:secret@bucket", "credentials don't belong here"),
        ("s3://bucket?db=1", "s3:// takes endpoint and region"),
        ("gs://bucket?endpoint=https://here", "gs:// takes none"),
        ("s3://bucket?endpoint=http://s3.example", "without TLS; write https://"),
        ("s3://bucket?endpoint=http://10.0.0.1:9000", "without TLS; write https://"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "its endpoint is no URL of a server"),
        ("s3://bucket?endpoint=http://key:secret@127.0.0.1:9000", "its endpoint is no URL of a server"),
        ("s3://bucket?endpoint=http://127.0.0.1:99999", "its endpoint is no URL of a server"),
        ("file://folder", "its path is not absolute; write file:///FOLDER"),
        ("file:folder", "it names no folder; write file:///FOLDER"),
        ("file:///", "it names no folder"),
        ("file:///folder?mode=1", "file:// takes none"),
        ("valkey://127.0.0.1 ", "it has white space; remove it, or write %20"),
        (" valkey://127.0.0.1", "it has white space"),
        ("valkey://127.0.0.1\n", "it has white space"),
        ("valkey://:sec ret@127.0.0.1", "it has white space"),
        ("file:///folder\t/a", "it has white space"),
        ("file:///folder ", "it has white space"),
    ],
)
def test_what_is_no_engine_is_refused_with_a_remedy(url, reason):
    assert reason in refusal(url)
    with pytest.raises(ValueError, match=r"^remote="):
        open_engine(url, timeout=1, connect_timeout=1, ca_file=None)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("valkey://user:secret@host:1/a/b?db=1", "valkey://host:1/a/b"),
        ("valkeys://:sec%2Fret@[::1]", "valkeys://[::1]"),
        ("s3://bucket/a?endpoint=http://127.0.0.1:1", "s3://bucket/a"),
        ("file:///a//b/", "file:///a/b"),
        ("s3://key:secret@bucket", "s3://bucket"),
        # A password that was not quoted ends up anywhere.
        ("valkey://user:sec/ret@host", "valkey://..."),
        ("valkey://user:1/secret@host", "valkey://..."),
        ("valkey://user:1?secret@host", "valkey://..."),
        ("valkey://user:1#secret@host", "valkey://..."),
        ("valkey://user:secret", "valkey://..."),
        ("secret", "(not a URL)"),
    ],
)
def test_logs_show_no_credentials(url, shown):
    assert redacted(url) == shown


def test_the_environment_names_an_endpoint(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:8333")
    check_url("s3://bucket", False)
    check_url("s3://bucket?endpoint=http://localhost:1", False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.example")
    assert "without TLS" in refusal("s3://bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:8333")
    check_url("s3://bucket", False)


def test_an_endpoint_that_would_not_be_used_is_refused(monkeypatch):
    """obstore takes AWS_ENDPOINT_URL_S3 even against what it is told: data for this machine would go elsewhere."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example")
    url = "s3://bucket?endpoint=http://127.0.0.1:8333"
    assert "AWS_ENDPOINT_URL_S3 is set to another endpoint" in refusal(url, has_key=False)
    assert "unset AWS_ENDPOINT_URL_S3" in refusal(url)


def test_a_proxy_between_this_machine_and_itself_is_refused(monkeypatch):
    url = "s3://bucket?endpoint=http://127.0.0.1:8333"
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert "add 127.0.0.1 to NO_PROXY" in refusal(url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    check_url(url, False)


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("valkey://127.0.0.1", False),
        ("redis://localhost", False),
        ("valkeys://127.0.0.1", True),
        ("rediss://localhost", True),
        ("valkey://cache.example", True),
        ("redis://10.0.0.1", True),
    ],
)
def test_tls_is_spoken_off_this_machine_whatever_the_scheme(url: str, tls: bool, open_it: Open):
    assert (open_it(url)._options["tls"] is not None) is tls  # type: ignore[attr-defined]


def test_a_ca_file_means_tls_on_this_machine_too(open_it, tmp_path):
    assert open_it("valkey://127.0.0.1", ca_file=certificates(tmp_path).ca)._options["tls"] is not None


def test_passwords_of_the_url_win_and_may_be_quoted(open_it, monkeypatch):
    monkeypatch.setenv("VALKEY_USERNAME", "from")
    monkeypatch.setenv("VALKEY_PASSWORD", "the environment")
    options = open_it("valkey://us%40er:sec%2Fret@127.0.0.1/a%20b/?db=7")._options
    assert (options["username"], options["password"], options["db"]) == ("us@er", "sec/ret", 7)
    options = open_it("valkey://127.0.0.1")._options
    assert (options["username"], options["password"], options["port"]) == ("from", "the environment", 6379)


def test_the_engines_are_opened_without_a_server(open_it, tmp_path):
    (tmp_path / "with space").mkdir()
    for url in ("valkey://cache.example/a", "s3://bucket/a", f"file://{tmp_path}/with%20space"):
        assert open_it(url).label == redacted(url)


def test_a_folder_on_localhost_is_one_of_this_machine(open_it, tmp_path):
    (tmp_path / "with space").mkdir()
    engine = open_it(f"file://localhost{tmp_path}/with space")
    engine.put("v1/a", b"content")
    assert (tmp_path / "with space" / "v1" / "a").read_bytes() == b"content"


def test_a_file_of_certificates_that_is_none_is_named(open_it, tmp_path):
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(
        ValueError, match=r"missing\.pem: No such file or directory; name a file of certificates in PEM"
    ):
        open_it("valkey://cache.example", ca_file=tmp_path / "missing.pem")
    with pytest.raises(ValueError, match=r"empty\.pem: no certificate in it"):
        open_it("s3://bucket", ca_file=tmp_path / "empty.pem")


def test_a_file_is_no_folder(open_it, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: a file, and no folder; name a folder"):
        open_it(f"file://{tmp_path}/file")


BLOCKED = """
import sys
sys.modules[sys.argv[2]] = None
import prefixcache
from prefixcache.remote import url
url.check_url(sys.argv[1], True)
try:
    url.open_engine(sys.argv[1], timeout=1, connect_timeout=1, ca_file=None)
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("valkey://:secret@127.0.0.1/a", "valkey", "valkey"),
        ("s3://bucket", "obstore", "s3"),
        ("file:///a", "obstore", "s3"),
    ],
)
def test_a_package_that_is_missing_is_named_when_an_engine_is_opened(url, package, extra):
    done = subprocess.run([sys.executable, "-c", BLOCKED, url, package], capture_output=True, text=True, timeout=60)
    said = f'remote={redacted(url)}: {package} is not installed; pip install "prefixcache[{extra}]"\n'
    assert (done.stdout, done.stderr) == (said, "")


def test_the_package_itself_imports_no_engine():
    code = (
        "import sys, prefixcache, prefixcache.remote.url; print({'obstore', 'valkey', 'cryptography'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_its_extras_are_named_in_the_project():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert "\ns3 = [" in text
    assert "\nvalkey = [" in text
