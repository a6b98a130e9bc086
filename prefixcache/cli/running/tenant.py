"""Options that name one tenant of a server as its requests do. Both are secrets, so they come from files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.text import Refused

CacheSaltFile = Annotated[
    Path | None,
    typer.Option(
        "--cache-salt-file", metavar="FILE", help="With --url: of the tenant with the cache_salt in this file."
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="With --url: of the tenant with the API key in this file."),
]
NoSaltOption = Annotated[
    bool, typer.Option("--no-salt", help="With --url: of the prompts without a salt, which those share who send none.")
]


def tenant_of(cache_salt_file: Path | None, api_key_file: Path | None, no_salt: bool) -> dict[str, str]:
    """The fields of an operation that name the tenant; none where no option does."""
    if no_salt and (cache_salt_file is not None or api_key_file is not None):
        raise Refused("--no-salt with the file of a salt: no tenant is both; give one of them")
    if no_salt:
        return {"cache_salt": ""}
    fields = {}
    if cache_salt_file is not None:
        fields["cache_salt"] = _secret("--cache-salt-file", cache_salt_file)
    if api_key_file is not None:
        fields["authorization"] = f"Bearer {_secret('--api-key-file', api_key_file)}"
    return fields


def _secret(option: str, file: Path) -> str:
    try:
        secret = file.expanduser().read_text("utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"{option} {file}: {getattr(error, 'strerror', None) or 'not UTF-8'}; name a file with it"
        ) from None
    if not secret:
        raise Refused(f"{option} {file}: empty; write what the tenant's requests send, or use --no-salt")
    return secret
