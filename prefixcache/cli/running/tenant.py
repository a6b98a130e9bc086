"""Options that name one tenant of a server as its requests do. Both are secrets, so they come from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.text import Refused, expanded


@dataclass(frozen=True)
class TenantOptions:
    """A tenant: its cache_salt, its API key, or the one that all share who send neither."""

    cache_salt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --url: of the tenant with the cache_salt in this file.")
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --url: of the tenant with the API key in this file.")
    ] = None
    no_salt: Annotated[
        bool,
        typer.Option("--no-salt", help="With --url: of the prompts without a salt, which those share who send none."),
    ] = False

    def fields(self) -> dict[str, str]:
        """Return the fields of an operation that name the tenant; none where no option does."""
        if self.no_salt and (self.cache_salt_file is not None or self.api_key_file is not None):
            raise Refused("--no-salt with the file of a salt: no tenant is both; give one of them")
        if self.no_salt:
            return {"cache_salt": ""}
        fields = {}
        if self.cache_salt_file is not None:
            fields["cache_salt"] = _secret("--cache-salt-file", self.cache_salt_file)
        if self.api_key_file is not None:
            fields["authorization"] = f"Bearer {_secret('--api-key-file', self.api_key_file)}"
        return fields


def _secret(option: str, file: Path) -> str:
    try:
        secret = expanded(file, option).read_text("utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"{option} {file}: {getattr(error, 'strerror', None) or 'not UTF-8'}; name a file with it"
        ) from None
    if not secret:
        raise Refused(f"{option} {file}: empty; write what the tenant's requests send, or use --no-salt")
    return secret
