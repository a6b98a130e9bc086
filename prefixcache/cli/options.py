"""Commands whose options are the fields of frozen dataclasses: `with_options` gives a command those flags. Beside it are the
options that several commands have.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from prefixcache.cli.text import Refused

AsJson = Annotated[bool, typer.Option("--json", help="The result as one JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")]
AdapterPath = Annotated[
    str | None, typer.Option("--adapter-path", metavar="PATH", help="The folder of a LoRA adapter.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Float32 = Annotated[
    bool, typer.Option("--float32", help="Cast the weights: a CPU multiplies float32 faster than half precision.")
]


@dataclass(frozen=True)
class TokenizerOptions:
    """How a model's tokenizer and its chat template make prompts."""

    chat_template: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A chat template in the place of the model's own.")
    ] = None
    chat_template_args: Annotated[
        str, typer.Option(metavar="JSON", help="Arguments of the template, such as '{\"enable_thinking\": false}'.")
    ] = "{}"
    trust_remote_code: TrustRemoteCode = False

    def config(self) -> dict[str, Any]:
        """Return what mlx-lm makes the tokenizer with."""
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        return {"trust_remote_code": self.trust_remote_code, **template}

    def template_arguments(self) -> dict[str, Any]:
        try:
            arguments = json.loads(self.chat_template_args)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            remedy = "not a JSON object; write one such as '{\"enable_thinking\": false}'"
            raise Refused(f"--chat-template-args {self.chat_template_args}: {remedy}")
        return arguments


@dataclass(frozen=True)
class CanonicalOptions:
    """What means the same becomes the same tokens, and by which rules."""

    canonical: Annotated[
        bool,
        typer.Option(
            "--canonical/--no-canonical",
            help="Make the same tokens of what means the same; or leave prompts as clients and the template have them.",
        ),
    ] = True
    canonical_rules: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Only by some of the rules headers, schemas, answers, such as headers,schemas."
        ),
    ] = None

    def rules(self) -> tuple[str, ...]:
        """Return the names of the rules that are on. Refused for one that there isn't."""
        from prefixcache.servers.canonical import EVERY_RULE

        if self.canonical_rules is None or not self.canonical:
            return EVERY_RULE if self.canonical else ()
        names = [name.strip() for name in self.canonical_rules.split(",")]
        for name in names:
            if name not in EVERY_RULE:
                raise Refused(f"--canonical-rules {name!r}: no rule of that name; write {', '.join(EVERY_RULE)}")
        return tuple(rule for rule in EVERY_RULE if rule in names)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclass parameters as flags in their place. Each field is annotated as a
    parameter of a command would be, `Annotated[..., typer.Option(...)]`, and the command is given the dataclass. A `**`
    parameter stays as it is.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += _flags(groups[parameter.name]) if parameter.name in groups else [parameter]

    def run(**given: Any) -> None:
        for name, options in groups.items():
            given[name] = options(
                **{field.name: given.pop(field.name) for field in fields(options) if field.name in given}
            )
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    ordered = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    return run


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flags_of(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass of options by their flags, for messages that name one."""
    return {flag_of(field.name): getattr(options, field.name) for field in fields(options)}


def flags_given(*groups: Any) -> Iterator[str]:
    """Yield the flags by which dataclasses of options differ from their defaults."""
    for options in groups:
        usual = flags_of(type(options)())
        for flag, value in flags_of(options).items():
            if value != usual[flag]:
                yield flag.replace("--", "--no-", 1) if value is False else flag


def _flags(options: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)
    ]
