"""The flags of `prefixcache serve` and `prefixcache warm` for their cache, and the `Settings` that they mean: one flag for
each field of `Settings`, made from the fields, and --key-bits and --value-bits. What no flag says is left to `PREFIXCACHE_*`
variables, the TOML file and the defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from prefixcache.cli.options import flag_of
from prefixcache.settings import Settings, hidden

Flags = Mapping[str, Any]  # what was given, by the field's name; None where it was not
Command = TypeVar("Command", bound=Callable[..., None])

PANEL = "Settings of the cache: a flag, or its variable, or the file that PREFIXCACHE_CONFIG names"
BITS = {"key_bits": "TurboQuant's bits for keys: 1, 2, 3, 4 or 8.", "value_bits": "The same for values."}


# -- the flags --------------------------------------------------------------------------------------------------------


def with_settings(command: Command) -> Command:
    """Return the command with flags for all settings in the place of its `**` parameter, which gets what was given."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
    ]
    command.__signature__ = signature.replace(parameters=[*parameters, *_flags()])  # type: ignore[attr-defined]
    return command


def _flags() -> Iterator[inspect.Parameter]:
    for name, field in Settings.model_fields.items():
        kind: Any = bool if field.annotation is bool else list[str] if get_origin(field.annotation) is tuple else str
        yield _flag(name, kind, values_of(name, field), f"{_sentence(field)} ({variable(name)})")
        if name == "codec":
            yield from (_flag(bits, int, "N", text) for bits, text in BITS.items())


def _flag(name: str, kind: Any, metavar: str | None, text: str) -> inspect.Parameter:
    names = f"{flag_of(name)}/--no-{flag_of(name)[2:]}" if kind is bool else flag_of(name)
    option = typer.Option(names, metavar=metavar, help=text, rich_help_panel=PANEL, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def variable(name: str) -> str:
    return f"PREFIXCACHE_{name.upper()}"


def values_of(name: str, field: FieldInfo) -> str | None:
    """Return what a flag's value looks like, in a word; None for a flag that takes none."""
    if any(isinstance(of, BeforeValidator) for of in field.metadata):
        return "SIZE"
    if field.annotation is Path or Path in get_args(field.annotation):
        return "DIR" if name.endswith("_dir") else "FILE"
    if field.annotation is bool:
        return None
    if field.annotation in (int, float):
        return "N"
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    return "|".join(choices) if choices else "SPEC" if name == "codec" else "NAME"


def _sentence(field: FieldInfo) -> str:
    """Return the field's own words, which stand in `Settings`, and its default."""
    text = field.description or ""
    if text.split(" ")[0].isalpha():  # no name of a setting or a method
        text = text[0].upper() + text[1:]
    return f"{text}." if field.default in (None, (), "auto") else f"{text}. Default: {default_text(field.default)}."


def default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- what they mean ---------------------------------------------------------------------------------------------------


def settings_from(flags: Flags) -> Settings:
    """Return the settings that these flags mean.

    Bits change the codec that variables or the TOML file choose, where that is a TurboQuant, or else TurboQuant's defaults.
    ValueError, one line, names the flag or the setting that is bad, or the flags that contradict each other.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [], ()) and name not in BITS}
    bits = {name: flags[name] for name in BITS if flags.get(name) is not None}
    if "codec" in given and bits:
        named = " and ".join(map(flag_of, bits))
        raise ValueError(f"--codec with {named}: both choose the codec; give one, such as --codec turboquant:4:3")
    settings = _settings(given)
    return _settings({**given, "codec": _with_bits(settings.codec, bits)}) if bits else settings


def _with_bits(codec: Any, bits: dict[str, Any]) -> Any:
    from prefixcache.codecs import TurboQuant  # needs MLX, which the help does not

    try:
        return replace(codec if isinstance(codec, TurboQuant) else TurboQuant(), **bits)
    except ValueError as error:  # it begins with the field's name
        name = str(error).partition("=")[0]
        raise ValueError(f"{flag_of(name)}{str(error).removeprefix(name)}") from None


def _settings(given: dict[str, Any]) -> Settings:
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise ValueError("; ".join(_message(problem, given) for problem in problems)) from None


def _message(problem: Any, given: dict[str, Any]) -> str:
    """Return one of pydantic's errors, with the flag's name where a flag gave the value and it names no setting yet."""
    name, is_ours = ".".join(map(str, problem["loc"][:1])), problem["type"] == "value_error"
    text = str(problem["ctx"]["error"]) if is_ours else problem["msg"]
    if name not in given:
        return text if is_ours else f"{name}: {text}"
    value = hidden(name, given[name])
    return (
        f"{flag_of(name)}{text[len(name) :]}" if text.startswith(f"{name}=") else f"{flag_of(name)} {value!r}: {text}"
    )
