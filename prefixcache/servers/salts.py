"""Whose a request's prompts are: its salt, made of its API key and its `cache_salt`, and the rule that it must have one.

The API key is the credentials of its `Authorization` header. It is hashed and nowhere checked, kept or logged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixcache.servers.request_schema import RequestRefused

PERSON = b"prefixcache.key"  # sets these hashes apart from all others; another one makes every stored prompt a miss
HASHED = b"\xff"  # what a salt with a key begins with: no `cache_salt` does, in UTF-8

SPACE = " \t\r\n"  # of a header; other whitespace may be a byte of a key

CACHE_SALT = 'send "cache_salt": "..." in the body'
API_KEY = "send the header `Authorization: Bearer KEY`"


@dataclass(frozen=True)
class Salts:
    """What a server makes salts of.

    `from_authorization`: each API key has a space of its own. `required`: a request without a salt is refused. `key`: of the
    hash; servers that share prompts need the same. `remedy`: how a client names a salt.
    """

    from_authorization: bool = False
    required: bool = False
    key: bytes = field(default=b"", repr=False)
    remedy: str = CACHE_SALT

    def of(self, authorization: Sequence[str], cache_salt: str) -> bytes:
        """Return the salt of a request with these `Authorization` headers. RequestRefused where there is none to be had."""
        token = _only(authorization) if self.from_authorization else None
        salt = salt_of(token, cache_salt, self.key)
        if not salt and self.required:
            if self.from_authorization:
                raise RequestRefused(
                    f"the request has no API key, and this server needs one: {API_KEY}, or {self.remedy}", 401
                )
            raise RequestRefused(f"the request has no salt, and this server needs one: {self.remedy}")
        return salt


BY_CACHE_SALT = Salts()  # and without one a request is served, too


def salt_of(token: str | None, cache_salt: str, key: bytes = b"") -> bytes:
    """Return the salt of prompts: of `cache_salt` its UTF-8 bytes; with a token a hash of both, keyed with at most 64 bytes.

    The same after a restart, and on every machine with the same key. Without the token no `cache_salt` gives this salt.
    """
    salt = cache_salt.encode()
    if token is None:
        return salt
    secret = token.encode()
    parts = len(secret).to_bytes(8, "little") + secret + salt
    return HASHED + hashlib.blake2b(parts, digest_size=32, key=key, person=PERSON).digest()


def authorization_of(headers: Callable[[str], list[str]]) -> list[str]:
    """Return a request's `Authorization` headers, or in their place what `x-api-key` says. `headers` finds all of a name."""
    return headers("authorization") or [f"Bearer {key}" for key in headers("x-api-key")]


def token_of(authorization: str) -> str | None:
    """Return what an `Authorization` header names its sender by; None for nothing.

    Of `Bearer KEY` that is KEY, and so it is of KEY alone. Of any other scheme, such as Basic, it is a space, the scheme in
    lower case, a space and the credentials: no KEY begins with a space, so no two senders have one name. The header is text
    as HTTP has it: a character a byte, and whitespace is ASCII's.
    """
    scheme, *others = re.split(f"[{SPACE}]+", authorization.strip(SPACE), maxsplit=1)
    credentials = "".join(others)
    if scheme.lower() == "bearer":
        return credentials or None
    return f" {scheme.lower()} {credentials}" if credentials else scheme or None


def _only(authorization: Sequence[str]) -> str | None:
    if len(authorization) > 1:
        raise RequestRefused(f"{len(authorization)} Authorization headers: whose request is it? Send one")
    return token_of(authorization[0]) if authorization else None
