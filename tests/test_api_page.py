"""docs/api.md is what the docstrings say."""

from __future__ import annotations

import re

import prefixcache
from prefixcache import Settings
from tools import api_page


def test_the_page_is_what_the_docstrings_say() -> None:
    assert api_page.FILE.read_text() == api_page.page(), (
        "a docstring or a signature changed: run python -m tools.api_page"
    )


def test_every_public_name_is_on_the_page() -> None:
    headed = re.findall(r"^### `(\w+)`", api_page.page(), re.MULTILINE)
    assert sorted(headed) == sorted({*prefixcache.__all__, "TieredPromptCache"})


def test_every_setting_is_in_its_table() -> None:
    text = api_page.page()
    for name in Settings.model_fields:
        assert f"| `{name}`, `--{name.replace('_', '-')}`, `PREFIXCACHE_{name.upper()}` |" in text


def test_methods_have_their_signatures_and_nothing_depends_on_the_run() -> None:
    text = api_page.page()
    assert "remove(tokens: Tokens, *, model: str, salt: bytes = b'') -> int" in text
    assert "layers: Mapping[int, int | tuple[int, int] | None] = ...," in text
    assert " object at 0x" not in text
    assert "<factory>" not in text
