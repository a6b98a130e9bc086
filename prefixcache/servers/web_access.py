"""Which requests a browser may send: `Host` and `Origin` of a request, against what the server was bound to and told.

Any web page can make its visitor's browser ask a server of that machine, and can read the answer where the server allows its
origin, or where the page's own name is made to mean the server's address (DNS rebinding). Other programs than browsers send
no `Origin`, and in `Host` the name that they were given.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

ANY = "*"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OPEN_HOSTS = "start the server with --allowed-hosts {}"
OPEN_ORIGINS = "start the server with --allowed-origins {}"
SHOWN = 100  # characters of a header in an error
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class WebAccess:
    """`hosts`: names that `Host` may have, in lower case; `addresses`: any IP address, too, since a page that was made to
    mean the server has a name. `origins`: of pages that may ask, as browsers send them.
    """

    hosts: frozenset[str] = frozenset(LOOPBACK)
    addresses: bool = False
    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, host: str, address: str, allowed_hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> WebAccess:
        """Return the access to a server that was bound to `address`, which `host` stands for."""
        address = address.partition("%")[0]  # browsers leave out the zone of a link-local one
        hosts = {host.lower(), address, *(name.lower().strip("[]") for name in allowed_hosts)}
        bound = ipaddress.ip_address(address)
        if bound.is_loopback or bound.is_unspecified:
            hosts |= LOOPBACK
        if bound.is_unspecified:
            name = socket.gethostname().lower()
            hosts |= {name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}
        allowed = {origin.strip().rstrip("/").lower() for origin in origins}  # as browsers send them
        return cls(frozenset(hosts - {""}), bound.is_unspecified, frozenset(allowed - {""}))

    def allows(self, origin: str) -> bool:
        """Return whether pages of a foreign origin may ask, and read the answer."""
        return ANY in self.origins or origin in self.origins

    def refusal(self, host: Sequence[str], origin: Sequence[str], fetch_site: str) -> str:
        """Return why a request with these values of `Host`, `Origin` and `Sec-Fetch-Site` is refused; "" for nothing."""
        if len(host) > 1 or len(origin) > 1:
            return "the request has more than one Host or Origin header: send one"
        if host and not self._is_own(host[0]):
            shown = host[0][:SHOWN]
            return f"Host {shown!a}: this server is not called so; {OPEN_HOSTS.format('NAME')}"
        if origin:
            if self.allows(origin[0]) or (host and _without_scheme(origin[0]) == host[0].lower()):
                return ""
            return f"Origin {origin[0][:SHOWN]!a}: pages from there may not ask; {OPEN_ORIGINS.format('ORIGIN')}"
        if fetch_site in ("cross-site", "same-site") and ANY not in self.origins:
            return f"a page of another origin sent this; {OPEN_ORIGINS.format('ORIGIN')}"
        return ""

    def _is_own(self, host: str) -> bool:
        if ANY in self.hosts:
            return True
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match["name"].lower().strip("[]").removesuffix(".")
        return name in self.hosts or (self.addresses and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_scheme(origin: str) -> str:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return ""
    return parts.netloc.lower() if parts.scheme in ("http", "https") else ""
