"""`prefixcache warm`: prompts prefilled and stored ahead of the first user. This module is the screen, finds and loads the
model, and ends in order; the work is `servers.warming`'s.

MLX and mlx-lm are imported when the command runs, so that asking for help and a wrong flag are quick.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixcache.cache import PrefixCache
from prefixcache.cli.model_files import load_tokenizer, model_folder
from prefixcache.cli.options import AdapterPath, CanonicalOptions, TokenizerOptions, flag_of, flags_given, with_options
from prefixcache.cli.progress import bar
from prefixcache.cli.running.admin_client import KeyFile
from prefixcache.cli.running.warm import warm_live
from prefixcache.cli.serve.cache_options import Flags, settings_from, with_settings
from prefixcache.cli.text import Refused, complain, expanded, many, one_line
from prefixcache.layers import CacheError
from prefixcache.ranks.launcher import when_launcher_ends
from prefixcache.servers.ending import Ending
from prefixcache.settings import Settings
from prefixcache.ssd import DirectoryHeld, SsdError

if TYPE_CHECKING:
    from prefixcache.ranks import Ranks
    from prefixcache.servers.warm_prompts import WarmPrompt, WarmSequence
    from prefixcache.servers.warming import Step, Warmed

# Nobody waits for an answer here, so what is stored may wait for the disk as long as that takes.
PATIENT = {"spill": "wait", "spill_wait": 60.0, "close_timeout": 3600.0}


class Stopped(BaseException):
    """A signal, `args[0]`, asked for the end."""


@dataclass(frozen=True)
class WarmOptions:
    """The model that computes the prompts, and how."""

    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model's folder, or its name on Hugging Face.")
    ] = None
    adapter_path: AdapterPath = None
    prefill_step_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens in one call of the model.")] = 2048
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Under mlx.launch: a pipeline, as the server's, not tensor parallelism.")
    ] = False

    @property
    def adapter(self) -> str | None:
        return str(expanded(self.adapter_path, "--adapter-path")) if self.adapter_path is not None else None


@with_settings
@with_options
def warm(
    given: WarmOptions,
    tokenizer: TokenizerOptions,
    text: CanonicalOptions,
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PROMPTS.JSONL",
            help='A prompt on each line: {"messages": [...], "tools": [...]}, or {"prompt": "..."}; with '
            '"cache_salt": "..." it is one tenant\'s.',
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A running server, http://127.0.0.1:8080, computes and stores them while it has no request; it needs no "
            "other option here.",
        ),
    ] = None,
    admin_key_file: KeyFile = None,
    **flags: Any,
) -> None:
    """Prefill and store prompts (system prompts, tool lists), so that not even the first user waits for them.

    Without --url it needs --model, --ssd-dir and a file of prompts, such as
    {"messages": [{"role": "system", "content": "You are ..."}]} on a line:
    `prefixcache warm --model MODEL --ssd-dir DIR prompts.jsonl`. Nobody else may have DIR open.

    Give model, template, codec and canonical text as the server has them that is to find the prompts. What is stored already
    costs nothing.
    After Ctrl-C or SIGTERM what was computed stays stored, and the same command goes on from there. For a model that several
    processes serve, run it under mlx.launch as the server.

    Exit code: 0 all is stored, 1 not all of it found room, 2 it could not be done, 128 + the signal that ended it.
    """
    if url is not None:
        settings_given = (flag_of(name) for name, value in flags.items() if value not in (None, [], ()))
        for option in (*flags_given(given, tokenizer, text), *settings_given):
            complain(f"{option} with --url: the server has its own; leave it out")
            raise typer.Exit(2)
        return warm_live(url, admin_key_file, prompts or [])
    try:
        settings = _settings(flags)
        arguments = tokenizer.template_arguments()
        requests = _read(prompts or [], text.rules())
        if given.model is None:
            raise Refused("--model is missing: give a model's folder, or its name on Hugging Face (owner/name)")
        from prefixcache.identity import model_identity
        from prefixcache.servers.warm_prompts import sequences_of

        folder = model_folder(given.model)
        name = model_identity(folder, given.adapter)
        ranks = _ranks(given.adapter)
        sequences = sequences_of(load_tokenizer(given.model, folder, tokenizer.config()), requests, arguments)

        def load() -> Any:
            return _load(folder, given, tokenizer.trust_remote_code, ranks)

        with _errors_of(ranks):
            done = _warm(settings, load, name, sequences, given, ranks)
    except (ValueError, OSError, SsdError) as error:
        complain(one_line(error))
        raise typer.Exit(2) from error
    except Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        complain(f"ended by {number.name}: what was computed is stored; the same command goes on from there")
        raise typer.Exit(128 + number) from None
    if ranks is not None and not ranks.is_first:
        raise typer.Exit(1 if done.unkept else 0)
    whole = f", {done.skipped:,} stored already" if done.skipped else ""
    typer.echo(f"{many(done.prompts, 'prompt')}{whole}; {done.computed:,} of {many(done.tokens, 'token')} computed")
    if done.unkept:
        complain(f"{done.unkept} of {many(done.prompts, 'prompt')} found no room: give more with --ssd and --ram")
        raise typer.Exit(1)


# -- what is asked for ------------------------------------------------------------------------------------------------


def _settings(flags: Flags) -> Settings:
    settings = settings_from(flags)
    if settings.ssd_dir is None or settings.ssd == 0:
        problem = "--ssd-dir is missing" if settings.ssd_dir is None else "--ssd 0"
        raise Refused(f"{problem}: without an SSD tier all would be lost at the end; add --ssd-dir DIR with an --ssd")
    return settings.model_copy(update={n: value for n, value in PATIENT.items() if n not in settings.model_fields_set})


def _read(files: list[Path], rules: Sequence[str]) -> list[WarmPrompt]:
    if not files:
        raise Refused("no prompts: name a file that has a prompt as JSON on each line")
    from prefixcache.servers.warm_prompts import read_prompts

    return [prompt.canonical(rules) for file in files for prompt in read_prompts(file)]


def _load(folder: Path, given: WarmOptions, trusted: bool, ranks: Ranks | None) -> Any:
    """Load the weights, or a rank's part of them. `trusted`: code that comes with them is run; mlx-lm 0.31 never asks."""
    from mlx_lm.utils import load_adapters, load_model, sharded_load

    from prefixcache.upstream import any_backend, known_options

    try:
        if ranks is not None:
            options = known_options(
                sharded_load, tokenizer_config={"trust_remote_code": trusted}, trust_remote_code=trusted
            )
            whose = {"pipeline_group" if given.pipeline else "tensor_group": ranks.group}
            with any_backend():
                return sharded_load(str(folder), **whose, **options)[0]
        model, _ = load_model(folder, **known_options(load_model, trust_remote_code=trusted))
        if given.adapter is not None:
            model = load_adapters(model, given.adapter)
            model.eval()
        return model
    except Exception as error:  # what mlx-lm raises has no common class
        raise Refused(f"--model {given.model}: mlx-lm can't load it: {one_line(error)}") from error


# -- the work ---------------------------------------------------------------------------------------------------------


def _ranks(adapter: str | None) -> Ranks | None:
    """Return the processes that `mlx.launch` has started for one model; None for a single one."""
    import mlx.core as mx

    from prefixcache.ranks import Ranks

    group = mx.distributed.init()
    if group.size() == 1:
        return None
    if adapter is not None:
        raise Refused("--adapter-path with several ranks: mlx-lm has no adapters there; leave it out")
    return Ranks(group)


@contextmanager
def _errors_of(ranks: Ranks | None) -> Iterator[None]:
    """Raise Refused for what ends the work of all: a rank that is gone, can't open its cache or has other weights."""
    from prefixcache.ranks import OtherWeights

    try:
        yield
    except (RuntimeError, OtherWeights) as error:
        if ranks is None:
            raise
        raise Refused(f"rank {ranks.rank} can't go on: {one_line(error)}; what was stored is kept") from error


def _warm(
    settings: Settings,
    load_model: Callable[[], Any],
    name: str,
    sequences: list[WarmSequence],
    given: WarmOptions,
    ranks: Ranks | None,
) -> Warmed:
    """Warm them. What is `unkept` is not whole in the directory, as the next process will find it."""
    from mlx_lm.generate import wired_limit

    from prefixcache.ranks import rank_identity
    from prefixcache.servers.loaded_model import calibration_of
    from prefixcache.servers.warming import unkept, warm_sequences

    group = ranks.group if ranks is not None else None
    if ranks is not None:
        sequences = ranks.from_first(sequences)
    total = sum(len(sequence.tokens) for sequence in sequences)
    with _ending(ranks) as check, bar("", total, "tokens") as show, ExitStack() as stack:

        def load() -> Any:
            show(None, what="loading the model")
            model = load_model()
            stack.enter_context(wired_limit(model))  # as mlx-lm does it: on a Mac the weights stay in memory
            return model

        def progress(step: Step) -> None:
            show(step.done, what=f"prompt {step.prompt} of {step.prompts}")
            check()

        if ranks is not None:  # only the loaded model tells what its part is called
            part = load()
            name, load = rank_identity(name, part, ranks), lambda: part
        with PrefixCache(settings, group=group) as cache:
            calibration_of(cache, name, str(given.model), given.adapter)
            try:
                done = warm_sequences(
                    cache, load, sequences, model=name, prefill_step_size=given.prefill_step_size, progress=progress
                )
            except CacheError as error:
                raise Refused(f"--model {given.model}: its prompt cache can't be kept: {error}") from error
            show(total, what="writing")
        if not done.computed or ranks is not None:  # ranks would have to open it together
            return done
        try:
            with PrefixCache(settings) as cache:
                return done._replace(unkept=unkept(cache, sequences, model=name))
        except DirectoryHeld:  # a server was quicker
            return done


@contextmanager
def _ending(ranks: Ranks | None) -> Iterator[Callable[[], None]]:
    """Give a check that raises Stopped once a signal came, or mlx.launch ended, on all ranks if one has it. A second signal
    ends the process at once.
    """
    with Ending() as ending:

        def check() -> None:
            signum = ending.signum if ranks is None else ranks.most(ending.signum)[0]
            if signum:
                raise Stopped(signum)

        if ranks is not None:
            when_launcher_ends(lambda pid: ending.ask(signal.SIGTERM))
        yield check
