"""The command line's frame: which commands there are, and when their modules are imported.

Those on a directory or a running server (`inspect`, `prune`, `remove`, `pin` and others) are light and always
here. The commands in `LATER` need more, such as a model's libraries: their modules are imported when the command is called or
the help is asked for.
"""

from __future__ import annotations

import io
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from prefixcache.cli.directory.clear import clear
from prefixcache.cli.directory.inspect import inspect
from prefixcache.cli.directory.prune import prune
from prefixcache.cli.directory.reconcile import reconcile
from prefixcache.cli.running.end_session import end_session
from prefixcache.cli.running.pin import pin
from prefixcache.cli.running.remove import remove
from prefixcache.cli.text import complain, exit_without_mlx, mute

LATER = {  # by name, the module that has the function of that name
    "calibrate": "prefixcache.cli.calibrate.command",
    "demo": "prefixcache.cli.demo.command",
    "evaluate": "prefixcache.cli.evaluate.command",
    "explain": "prefixcache.cli.explain",
    "plan": "prefixcache.cli.plan.command",
    "serve": "prefixcache.cli.serve.command",
    "top": "prefixcache.cli.top.command",
    "warm": "prefixcache.cli.serve.warm",
}


class Command(TyperCommand):
    """A command whose help has each option's name whole, where typer's tables cut it at 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options, each below the heading that it names."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                heading = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if not records:
                continue
            with formatter.section(heading):
                formatter.write_dl(records)


class Commands(TyperGroup):
    """The commands that are imported here, and those in `LATER`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, each with the first sentence of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        first = [
            (name, " ".join((command.help or "").split()).partition(". ")[0]) for name, command in commands if command
        ]
        with formatter.section("Commands"):
            formatter.write_dl(first)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *LATER]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in LATER:
            return super().get_command(ctx, cmd_name)
        try:
            return _load(cmd_name)
        except Exception:  # the help lists what can be used
            return None

    def invoke(self, ctx: Any) -> Any:
        """Give no traceback where standard output is full or closed, and an exit code of its own."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except ImportError as error:
            exit_without_mlx(error)
            raise
        except BrokenPipeError:
            mute()
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except OSError as error:
            complain(f"standard output: {error.strerror}" if error.filename is None else str(error))
            mute()
            raise typer.Exit(2) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in LATER:
            try:
                _load(args[0])
            except Exception as error:
                exit_without_mlx(error)
                complain(f"{args[0]} can't be loaded: {error}")
                raise typer.Exit(2) from error
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    group = typer.Typer(add_completion=False, rich_markup_mode=None)
    module = import_module(LATER[name])
    group.command(name, cls=Command, **getattr(module, "COMMAND", {}))(getattr(module, name))
    return typer.main.get_command(group)


app = typer.Typer(
    cls=Commands,
    name="prefixcache",
    rich_markup_mode=None,
    invoke_without_command=True,
    pretty_exceptions_show_locals=False,  # locals would show tokens
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (inspect, reconcile, prune, clear, remove, end_session, pin):
    app.command(cls=Command)(command)


def _version(is_asked: bool) -> None:
    if is_asked:
        from prefixcache import __version__

        typer.echo(f"prefixcache {__version__}")
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """A tiered prefix cache for LLM servers built on MLX: what a directory holds, its care and repair."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that can't show a character gets its number
            stream.reconfigure(errors="backslashreplace")
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
