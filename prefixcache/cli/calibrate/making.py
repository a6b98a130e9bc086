"""Makes a model's basis in its folder, or finds it there where the same calibration has made it already.

Statistics are gathered with a checkpoint beside the basis, which goes when the basis is written. Nothing here writes to
the screen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import wired_limit

from prefixcache.calibration.design import Design
from prefixcache.calibration.layers import eligible_layers
from prefixcache.calibration.statistics import FISHER_PHASE, PREFILL_PHASE, SINKS, Collection, collect
from prefixcache.calibration.texts import Windows, default_texts, read_texts, windows
from prefixcache.cli.calibrate.anchor import anchored, texts_of
from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.evaluate.measuring import Subject, load
from prefixcache.cli.evaluate.texts import opening_of
from prefixcache.cli.text import Refused
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import Basis, BasisError
from prefixcache.codecs.transform.layer import GroupedLayers, grouped

VERSION = 2  # of how a basis is made: another one is not found again
HELD_BACK = 8  # windows beside those that a basis is made of, or as many as those
PHASES = {PREFILL_PHASE: "reading", FISHER_PHASE: "drawing"}

Progress = Callable[[int | None, int | None, str], None]  # what is done, of how much, and what it is


class CalibratedBasis(NamedTuple):
    """A basis, its file, whether it was there already, and by index why other layers are not in it."""

    basis: Basis
    path: Path
    was_there: bool
    left_out: dict[int, str]


class Resumable(KeyboardInterrupt):
    """Ended by the user, with a checkpoint from which the same call goes on."""


def make(job: Calibration, folder: Path, progress: Progress = lambda done, of, what: None) -> CalibratedBasis:
    """Return the basis of a model, in a file of `folder`, which is there.

    Refused for a model, a text or a job that gives none; Resumable when it is interrupted. The same job gives the same file.
    """
    subject = load(job.model, job.adapter, trusted=job.trust_remote_code)
    identity = subject.identity
    progress(None, None, "cutting the text")
    read = _windows(job, subject)
    progress(None, None, "finding RoPE")
    groups, left_out = _groups(job, subject.model)
    texts = _described(job, read)
    bases = Bases(folder)
    basis = bases.of_model(identity)
    joined = [[layer.index for layer in group] for group in groups]  # an earlier release left windows out
    if basis is not None and basis.texts == texts and [[of.index for of in g.layers] for g in basis.groups] == joined:
        path = bases.path_of(basis.hash)
        if path is not None:
            return CalibratedBasis(basis, path, True, left_out)
    checkpoint = folder / f".calibrating-{_hash(identity, texts)}.npz"
    try:
        with wired_limit(subject.model):  # as mlx-lm does it: on a Mac the weights stay in memory
            statistics = collect(
                subject.model,
                groups,
                *read,
                Collection(SINKS, job.fisher_windows, job.draws_each, identity, checkpoint),
                lambda phase, done, of: progress(done, of, PHASES[phase]),
            )
            progress(None, None, "designing the basis")
            design = Design(statistics, identity, texts, SINKS)
            unseen = texts_of(read.held_back, read.read[0])
            data = anchored(
                design, subject, unseen, checkpoint.with_suffix(""), lambda done, of: progress(done, of, "measuring")
            )
        path = bases.save(data)
    except KeyboardInterrupt:
        if checkpoint.exists():
            raise Resumable from None
        raise
    except BasisError as error:
        raise Refused(f"{job.model}: what it says of these texts makes no basis ({error}); give other texts") from error
    checkpoint.unlink(missing_ok=True)
    return CalibratedBasis(bases.of_hash(path.stem[-32:]), path, False, left_out)


def _windows(job: Calibration, subject: Subject) -> Windows:
    if subject.positions is not None and job.tokens > subject.positions:
        raise Refused(
            f"--tokens {job.tokens:,}: the model is made for {subject.positions:,}; give --tokens {subject.positions}"
        )
    tokenizer = subject.tokenizer
    try:
        texts = read_texts(job.texts) if job.texts else default_texts()
        return windows(
            texts,
            lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            job.windows,
            job.tokens,
            opening_of(tokenizer),
            min(job.windows, HELD_BACK),
        )
    except ValueError as error:
        raise Refused(str(error)) from error


def _groups(job: Calibration, model: nn.Module) -> GroupedLayers:
    """Return the groups of layers, of the model cast where the job says so. Layers are joined by the dtypes that the model is
    served with. Refused where no layer is in a group.
    """
    layers, left_out = eligible_layers(model)
    groups, too_wide = grouped(layers)
    if job.float32:
        model.set_dtype(mx.float32)
        cast = {layer.index: layer for layer in eligible_layers(model).layers}
        groups = [[cast[layer.index] for layer in group if layer.index in cast] for group in groups]
        groups = [group for group in groups if group]
    left_out = dict(sorted({**left_out, **too_wide}.items()))
    if not groups:
        raise Refused(
            f"{job.model}: no layer can be transformed ({reasons(left_out)}); serve it with --codec turboquant"
        )
    return GroupedLayers(groups, left_out)


def _described(job: Calibration, read: Windows) -> str:
    """Return what a basis says of the text that it is made of, for a person, and the hash of all that it depends on."""
    source = "given text" if job.texts else "default text"
    draws = job.fisher_windows * job.draws_each
    asked = (VERSION, SINKS, job.fisher_windows, job.draws_each, job.float32, read)
    return (
        f"{source}, {job.windows} windows of {job.tokens} tokens, {draws} draws{', float32' * job.float32}, "
        f"request {_hash(json.dumps(asked))}"
    )


def _hash(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def reasons(left_out: dict[int, str]) -> str:
    """Return the reasons in words: "layers 0-2, 4: chunked attention; layer 3: recurrent state"."""
    by_reason: dict[str, list[int]] = {}
    for index, reason in left_out.items():
        by_reason.setdefault(reason, []).append(index)
    return "; ".join(f"layer{'s' * (len(of) > 1)} {_ranges(of)}: {reason}" for reason, of in by_reason.items())


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
