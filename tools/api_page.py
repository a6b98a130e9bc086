"""docs/api.md, the page of the public API, the table of docs/settings.md, and that of requests in docs/servers.md:
`python -m tools.api_page` writes them.

What is on the page is listed in `PAGE`; a test fails when a page is not what this script would write, or lacks a public name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import prefixcache
from prefixcache.cli.serve.cache_options import default_text, values_of
from prefixcache.servers.apis.messages import MessagesRequest
from prefixcache.servers.apis.responses import ResponsesRequest
from prefixcache.servers.mlx_lm import TieredPromptCache
from prefixcache.servers.request_schema import ChatRequest, GenerationRequest, TextRequest, rows
from prefixcache.settings import Settings

FILE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
SETTINGS = FILE.with_name("settings.md")
SERVERS = FILE.with_name("servers.md")
BEGIN, END = "<!-- settings: python -m tools.api_page -->", "<!-- end of settings -->"
BEGIN_REQUESTS, END_REQUESTS = "<!-- requests: python -m tools.api_page -->", "<!-- end of requests -->"
WIDTH = 100  # of a signature's line

HEAD = """# The public API

Made from the docstrings by `python -m tools.api_page`: change those, then run it. [embedding.md](embedding.md) shows how the
parts go together, [servers.md](servers.md) the server that is ready to run. What is not on this page may change with any
release.

All names are `prefixcache`'s unless their heading says otherwise. Sizes are bytes, times are seconds. `Tokens` are a list of
ints, or an array of integers of NumPy or MLX.
"""


class Part(NamedTuple):
    """A heading and the names under it."""

    title: str
    names: tuple[str, ...]


PAGE = (
    Part("The cache", ("PrefixCache", "Stored", "Match", "Stats", "model_identity", "rank_identity", "chunks")),
    Part("Pictures, sound and video", ("Media", "media_digest")),
    Part("Settings", ("Settings",)),
    Part("Codecs", ("TurboQuant", "Transform", "Raw")),
    Part("What `lookup` gives", ("StoredPrompt", "StoredLayer", "allow")),
    Part(
        "Live caches",
        (
            "make_prompt_cache",
            "convert_prompt_cache",
            "convert_in_place",
            "LivePromptCache",
            "SharedLevels",
            "TurboQuantKVCache",
            "BatchTurboQuantKVCache",
        ),
    ),
    Part("In mlx-lm's server", ("TieredPromptCache",)),
    Part("Errors", ("CacheError", "DirectoryError", "DirectoryHeld")),
)
ELSEWHERE = {"TieredPromptCache": TieredPromptCache}
GIVEN = {"Stored", "Match", "Stats", "StoredPrompt", "StoredLayer", "LivePromptCache"}  # nobody makes one


def page() -> str:
    parts = [HEAD]
    for part in PAGE:
        parts.append(f"\n## {part.title}\n")
        parts += [text for name in part.names for text in _entry(name)]
    return "".join(f"{text.rstrip()}\n" if text.strip() else "\n" for text in parts)


def _entry(name: str) -> Iterator[str]:
    what = ELSEWHERE[name] if name in ELSEWHERE else getattr(prefixcache, name)
    home = f", in `{what.__module__}`" if name in ELSEWHERE else ""
    yield f"\n### `{name}`{home}\n"
    if not inspect.isclass(what):
        yield _signature(name, what)
        yield from _text(what)
    elif what is Settings:
        yield from _text(what)
        yield "\nThe settings are in [settings.md](settings.md).\n"
        yield from _members(what)
    elif issubclass(what, Exception):
        yield from _text(what)
        base = what.__bases__[0]
        if base.__module__ == "builtins" or base.__name__ in prefixcache.__all__:
            yield f"\nIt is a `{base.__name__}`.\n"
    else:
        if name not in GIVEN and (is_dataclass(what) or "__init__" in vars(what)):
            yield _signature(name, what)
        yield from _text(what)
        yield from _fields(name, what)
        yield from _members(what)


def _text(what: Any) -> Iterator[str]:
    text = inspect.cleandoc(what.__doc__ or "")
    if text:
        yield f"\n{text}\n"


def _fields(name: str, what: Any) -> Iterator[str]:
    """Of a result, what it holds; of what one makes the signature says it."""
    own = getattr(what, "__annotations__", {}) if issubclass(what, tuple) or is_dataclass(what) else {}
    if name in GIVEN and own:
        yield "\n" + "".join(f"- `{field}: {_plain(kind)}`\n" for field, kind in own.items())


def _members(what: Any) -> Iterator[str]:
    """Public methods and properties that say what they do."""
    for name, member in vars(what).items():
        call = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or not (getattr(call, "__doc__", None) or "").strip():
            continue
        if isinstance(member, property):
            yield f"\n#### `{what.__name__}.{name}`, a property\n"
        elif inspect.isfunction(call):
            yield f"\n#### `{what.__name__}.{name}`\n"
            yield _signature(name, call, bound=not isinstance(member, staticmethod))
        else:
            continue
        yield from _text(call)


def settings_page() -> str:
    """docs/settings.md with its table made anew. Raises ValueError where the page lacks one of the marks."""
    return _between(SETTINGS, BEGIN, _settings_table(), END)


def servers_page() -> str:
    """docs/servers.md with its table of requests made anew. Raises ValueError where the page lacks one of the marks."""
    return _between(SERVERS, BEGIN_REQUESTS, _requests_table(), END_REQUESTS)


def _between(page: Path, begin: str, table: str, end: str) -> str:
    before, begun, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"{page} lacks {end if begun else begin}")
    return f"{before}{begin}\n{table}{end}{after}"


def _requests_table() -> str:
    table = ["| field | value | default | what it is |\n|---|---|---|---|\n"]
    for kind, where in (
        (ChatRequest, "Chats: "),
        (MessagesRequest, "Messages: "),
        (ResponsesRequest, "Responses: "),
        (TextRequest, "Texts: "),
        (GenerationRequest, ""),
    ):
        for row in rows(kind):
            table.append(f"| `{row.name}` | {row.value} | {row.default} | {where}{row.about} |\n")
    return "".join(table)


def _settings_table() -> str:
    rows = ["| setting | value | default | what it is |\n|---|---|---|---|\n"]
    for name, field in Settings.model_fields.items():
        value = (values_of(name, field) or "yes or no").replace("|", ", ")
        default = "" if field.default in (None, ()) else f"`{default_text(field.default)}`"
        rows.append(f"| `{name}` | {value} | {default} | {(field.description or '').replace('|', ', ')} |\n")
    return "".join(rows)


# -- signatures -------------------------------------------------------------------------------------------------------


def _signature(name: str, what: Any, *, bound: bool = False) -> str:
    signature = inspect.signature(what)
    made = fields(what) if inspect.isclass(what) and is_dataclass(what) else ()
    factories = {field.name for field in made if field.default_factory is not MISSING}
    parts, starred = [], False
    for parameter in list(signature.parameters.values())[1 if bound else 0 :]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(_parameter(parameter, parameter.name in factories))
    back = signature.return_annotation
    arrow = f" -> {_plain(back)}" if back is not signature.empty and not inspect.isclass(what) else ""
    awaited = "async " if inspect.iscoroutinefunction(what) else ""
    line = f"{awaited}{name}({', '.join(parts)}){arrow}"
    if len(line) > WIDTH:
        line = f"{awaited}{name}(\n{''.join(f'    {part},{chr(10)}' for part in parts)}){arrow}"
    return f"\n```text\n{line}\n```\n"


def _parameter(parameter: inspect.Parameter, made: bool) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = f": {_plain(parameter.annotation)}" if parameter.annotation is not parameter.empty else ""
    default = "" if parameter.default is parameter.empty else f" = {'...' if made else repr(parameter.default)}"
    return f"{stars}{parameter.name}{kind}{default}"


def _plain(annotation: Any) -> str:
    """As it is written in the source."""
    return getattr(annotation, "__forward_arg__", None) or (
        annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    )


if __name__ == "__main__":
    for file, text in ((FILE, page()), (SETTINGS, settings_page()), (SERVERS, servers_page())):
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")
