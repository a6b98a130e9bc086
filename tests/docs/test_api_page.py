"""docs/api.md is what the docstrings say, the table of docs/settings.md what `Settings` says, and that of docs/servers.md
what a request may say.
"""

from __future__ import annotations

import re

import prefixcache
from prefixcache import Settings
from prefixcache.cli.options import flag_of
from prefixcache.cli.serve.cache_options import variable
from tools import api_page


def test_the_page_is_what_the_docstrings_say() -> None:
    assert api_page.FILE.read_text() == api_page.page(), (
        "a docstring or a signature changed: run python -m tools.api_page"
    )


def test_every_public_name_is_on_the_page() -> None:
    headed = re.findall(r"^### `(\w+)`", api_page.page(), re.MULTILINE)
    assert sorted(headed) == sorted({*prefixcache.__all__, "TieredPromptCache"})


def test_the_table_of_the_settings_is_what_settings_says() -> None:
    text = api_page.SETTINGS.read_text(encoding="utf-8")
    assert text == api_page.settings_page(), "a setting changed: run python -m tools.api_page"


def test_the_table_of_requests_is_what_their_schema_says() -> None:
    text = api_page.SERVERS.read_text(encoding="utf-8")
    assert text == api_page.servers_page(), "the schema of requests changed: run python -m tools.api_page"


def test_every_setting_is_in_its_table_and_has_the_flag_and_the_variable_that_the_page_says() -> None:
    text = api_page.SETTINGS.read_text(encoding="utf-8")
    assert "The flag of `ssd_dir` is `--ssd-dir`, its variable is `PREFIXCACHE_SSD_DIR`, and so for all." in text
    for name in Settings.model_fields:
        assert f"| `{name}` |" in text
        assert (flag_of(name), variable(name)) == (f"--{name.replace('_', '-')}", f"PREFIXCACHE_{name.upper()}")


def test_methods_have_their_signatures_and_nothing_depends_on_the_run() -> None:
    text = api_page.page()
    assert "pin(tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b'') -> int" in text
    assert "layers: Mapping[int, int | tuple[int, int] | None] = ...," in text
    assert " object at 0x" not in text
    assert "<factory>" not in text
