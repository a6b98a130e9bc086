"""How a URL becomes an engine, and which URLs may be one. The packages of the engines are imported when one is opened."""

from __future__ import annotations

import ipaddress
import os
import posixpath
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from prefixcache.remote.engine import Engine

# By scheme: True asks for TLS on loopback as well; elsewhere TLS is always used.
_VALKEY = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_OBJECTS = ("s3", "gs", "az")
_OPTIONS = {**{scheme: {"db"} for scheme in _VALKEY}, "s3": {"endpoint", "region"}}
# Variables that obstore reads an endpoint from. The first overrides even the endpoint that it is given.
_WINS = "AWS_ENDPOINT_URL_S3"
_ENDPOINTS = (_WINS, "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class _EngineUrl(NamedTuple):
    """The parts of a URL, checked. `host`: of a server, or the bucket's name; None for a folder."""

    scheme: str
    host: str | None
    port: int | None
    path: str
    options: dict[str, str]
    username: str | None
    password: str | None
    loopback: bool
    tls: bool
    endpoint: str | None


def open_engine(url: str, *, timeout: float, connect_timeout: float, ca_file: Path | None) -> Engine:
    """Return the engine that `url` names; nothing is connected to yet. Times in seconds: of a whole call, of its connecting.

    `ca_file`: certificates (PEM) to trust; with some, TLS is spoken on loopback, too. ValueError for a URL or file that makes
    no engine, ImportError for a package that is missing.
    """
    target = _parse(url)
    label = redacted(url)
    if ca_file is not None:
        _check_certificates(ca_file)
    if target.scheme in _VALKEY:
        try:
            from prefixcache.remote.valkey_store import ValkeyAddress, ValkeyStore
        except ImportError as error:
            raise _missing(label, "valkey", error) from error
        address = ValkeyAddress(
            target.host or "",
            target.port or 6379,
            tls=target.tls or ca_file is not None,
            prefix=target.path.strip("/"),
            database=int(target.options.get("db", 0)),
            username=target.username or os.environ.get("VALKEY_USERNAME") or None,
            password=target.password or os.environ.get("VALKEY_PASSWORD") or None,
        )
        return ValkeyStore(label, address, timeout=timeout, connect_timeout=connect_timeout, ca_file=ca_file)
    try:
        from prefixcache.remote.object_store import ObjectStore
    except ImportError as error:
        raise _missing(label, "s3", error) from error
    config: dict[str, str | bool] = {}
    if target.endpoint is not None:
        config |= {"endpoint": target.endpoint, "virtual_hosted_style_request": False}
    if "region" in target.options:
        config["region"] = target.options["region"]
    place = f"{target.scheme}://{target.host or ''}{target.path}"
    return ObjectStore(label, place, timeout=timeout, connect_timeout=connect_timeout, ca_file=ca_file, **config)


def check_url(url: str, has_key: bool) -> None:
    """Raise ValueError for a URL that can't be an engine, or that may not be one without a key file."""
    target = _parse(url)
    if not has_key and target.scheme != "file" and not target.loopback:
        raise _refused(
            url, "what is stored leaves this machine", "name a key file, or use file:// or a server on loopback"
        )


def _parse(url: str) -> _EngineUrl:
    """Return the URL's parts. Raise ValueError for a URL that no engine can be made of."""
    if not url:
        raise ValueError("remote='': empty; write it as valkey://HOST:6379 or s3://BUCKET/PREFIX, or leave it out")
    spaced = url.replace(" ", "") if url.startswith("file:") else url  # folders may have them
    if url != url.strip() or any(map(str.isspace, spaced)):
        raise _refused(url, "it has white space", "remove it, or write %20 for a space that belongs there")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError:
        remedy = "write it as valkey://HOST:6379 or s3://BUCKET/PREFIX; in a password, %2F for /, %23 for #, %40 for @"
        raise _refused(url, "not a URL, or its port is not one", remedy) from None
    scheme = parts.scheme
    if scheme not in (*_VALKEY, *_OBJECTS, "file"):
        known = ", ".join(f"{known}://" for known in ("valkey", "valkeys", "redis", "rediss", "s3", "gs", "az", "file"))
        raise _refused(url, "no engine has this scheme", f"write one of {known}")
    if parts.fragment:
        raise _refused(url, "it has a #", "write %23 for it")
    options = _options(url, parts)
    path = unquote(parts.path) if scheme in (*_VALKEY, "file") else parts.path
    target = _EngineUrl(scheme, host, port, path, options, None, None, False, False, None)
    if scheme == "file":
        return _checked_folder(url, parts, target)
    if scheme in _OBJECTS:
        return _checked_bucket(url, parts, target)
    if not host:
        raise _refused(url, "it names no host", f"write {scheme}://HOST:6379/PREFIX")
    if port == 0:
        raise _refused(url, "port 0 is none", "write one from 1 to 65535")
    if not options.get("db", "0").isdecimal() or not options.get("db", "0").isascii():
        raise _refused(url, "db is not a number", "write ?db=0 or a higher one")
    loopback = is_loopback(host)
    return target._replace(
        username=unquote(parts.username or "") or None,
        password=unquote(parts.password or "") or None,
        loopback=loopback,
        tls=_VALKEY[scheme] or not loopback,
    )


def _options(url: str, parts: SplitResult) -> dict[str, str]:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    known = _OPTIONS.get(parts.scheme, set())
    for name, value in pairs:
        if name not in known:
            taken = " and ".join(sorted(known)) or "none"
            raise _refused(url, "it has an option that is not known", f"{parts.scheme}:// takes {taken}")
        if not value:
            raise _refused(url, f"the option {name} is empty", "write a value, or leave it out")
    if len(options) < len(pairs):
        raise _refused(url, "an option stands twice", "write it once")
    return options


def _checked_folder(url: str, parts: SplitResult, target: _EngineUrl) -> _EngineUrl:
    if parts.netloc not in ("", "localhost"):
        raise _refused(url, "its path is not absolute", "write file:///FOLDER, with three slashes")
    path = posixpath.normpath(target.path)
    if not target.path.startswith("/") or path in ("/", "//"):
        raise _refused(url, "it names no folder", "write file:///FOLDER, with three slashes")
    return target._replace(host=None, path=path, loopback=True)


def _checked_bucket(url: str, parts: SplitResult, target: _EngineUrl) -> _EngineUrl:
    if "@" in parts.netloc:
        raise _refused(url, "credentials don't belong here", "set them in the environment, or give the machine a role")
    if not parts.netloc or target.port is not None:
        raise _refused(
            url, "it names no bucket", f"write {parts.scheme}://BUCKET/PREFIX; a server is named by ?endpoint=URL"
        )
    target = target._replace(host=parts.netloc, tls=True)
    return _with_endpoint(url, target) if parts.scheme == "s3" else target


def _with_endpoint(url: str, target: _EngineUrl) -> _EngineUrl:
    """Add the server that an S3 URL means, if it is not Amazon's."""
    stated = target.options.get("endpoint")
    forced = os.environ.get(_WINS)
    if stated is not None and forced and forced != stated:
        raise _refused(url, f"{_WINS} is set to another endpoint, and obstore would use that", f"unset {_WINS}")
    endpoint = stated or next((value for name in _ENDPOINTS if (value := os.environ.get(name))), None)
    if endpoint is None:
        return target
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or "@" in parts.netloc or parts.query or parts.fragment:
        raise _refused(url, "its endpoint is no URL of a server", "write it as endpoint=https://HOST:PORT")
    loopback, tls = is_loopback(host), parts.scheme == "https"
    if not loopback and not tls:
        raise _refused(url, "its endpoint is off this machine and without TLS", "write https://")
    if loopback and _is_proxied(parts.scheme, host):
        raise _refused(
            url, "a proxy of the environment would get what is meant for this machine", f"add {host} to NO_PROXY"
        )
    return target._replace(endpoint=endpoint, loopback=loopback, tls=tls)


def is_loopback(host: str) -> bool:
    """Tell whether `host` is this machine: a loopback address as it is usually written, or localhost."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _is_proxied(scheme: str, host: str) -> bool:
    proxies = urllib.request.getproxies_environment()
    return bool(proxies.get(scheme) or proxies.get("all")) and not urllib.request.proxy_bypass_environment(host)  # type: ignore[attr-defined]


def _check_certificates(ca_file: Path) -> None:
    import ssl

    try:
        ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        unreadable = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
        said = error.strerror if unreadable else "no certificate in it"  # type: ignore[union-attr]
        raise ValueError(f"{ca_file}: {said}; name a file of certificates in PEM") from None


def redacted(url: str) -> str:
    """Return the URL without user, password and options: for logs, errors and statistics. If a stray @ may hide a password,
    return only "scheme://...".
    """
    try:
        parts = urlsplit(url)
        misplaced = "@" in parts.path + parts.query + parts.fragment
        _ = parts.port  # ValueError where it is none
        path = "/".join(part for part in parts.path.split("/") if part)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        scheme = url.partition("://")[0]
        return f"{scheme}://..." if scheme.isalnum() else "(not a URL)"
    if not parts.scheme:
        return "(not a URL)"
    if misplaced or (not host and parts.scheme != "file"):
        return f"{parts.scheme}://..."
    return f"{parts.scheme}://{host}" + (f"/{path}" if path else "")


def _refused(url: str, reason: str, remedy: str) -> ValueError:
    return ValueError(f"remote={redacted(url)}: {reason}; {remedy}")


def _missing(label: str, extra: str, error: ImportError) -> ImportError:
    return ImportError(
        f'remote={label}: {error.name or "a package"} is not installed; pip install "prefixcache[{extra}]"'
    )
