"""The measurements of `prefixcache evaluate`: what a model says on restored caches, beside what it says on the live one.

`trials` measures one text; here are the texts of a job, the questions, and the numbers of all texts together. Nothing here
writes to the screen.
"""

from __future__ import annotations

import copy
import logging
import math
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step

from prefixcache import model_identity
from prefixcache.cli.evaluate.texts import EvaluationSize, Haystack, NeedleQuestion, cut, haystacks
from prefixcache.cli.evaluate.trials import PREFILL, Reference, Trial, begun, joined, mean_and_error, read_on
from prefixcache.cli.text import Refused, expanded
from prefixcache.codecs import Codec, Transform, as_codec
from prefixcache.codecs.transform.bases import Bases
from prefixcache.keys import BLOCK
from prefixcache.planning.model_config import context_length
from prefixcache.settings import BASIS_DIR
from prefixcache.upstream import known_options

ANSWER = 32  # tokens that an answer may have; some models say a sentence before the number
NUMBER = re.compile(r"\d+")
GROUPING = re.compile(r"(?<=\d),(?=\d)")

Facts = dict[str, Any]
Progress = Callable[[int, int], None]  # what is done, of how much


class Subject(NamedTuple):
    """A model, its tokenizer, the longest prompt that it is made for, in tokens (None: its config doesn't say), and its
    identity, by which a basis is found.
    """

    model: Any
    tokenizer: Any
    positions: int | None
    identity: str = "evaluated"


def load(name: str, adapter: str | None = None, *, float32: bool = False, trusted: bool = False) -> Subject:
    """Load a model from its folder, or by its name on Hugging Face; with `float32` its weights are cast. `trusted`: code
    that comes with it is run.

    Refused when mlx-lm can't load it.
    """
    folder = expanded(name)
    if not folder.exists() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise Refused(f"{name}: no such folder; give a model's folder, or its name on Hugging Face (owner/name)")
    if folder.exists() and not (folder / "config.json").is_file():
        raise Refused(f"{name}: no config.json in it; give a model's folder")
    adapter = str(expanded(adapter, "--adapter-path")) if adapter is not None else None
    if adapter is not None and not Path(adapter).is_dir():
        raise Refused(f"--adapter-path {adapter}: no such folder; give the one that mlx_lm.lora wrote")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it would warn that the text is longer than the context
    try:
        model, tokenizer, config = mlx_lm.load(
            str(folder) if folder.exists() else name,
            {"trust_remote_code": trusted},
            adapter_path=adapter,
            return_config=True,
            **known_options(mlx_lm.load, trust_remote_code=trusted),
        )
    except Exception as error:  # what mlx-lm, transformers and the Hub raise has no common class
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        reason = reason.replace("trust_remote_code=True", "--trust-remote-code")
        raise Refused(f"{name}: mlx-lm can't load it: {reason}") from error
    if float32:
        model.set_dtype(mx.float32)
    try:
        identity = model_identity(str(folder) if folder.exists() else name, adapter)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from None
    return Subject(model, tokenizer, context_length(config), identity)


def measure(
    subject: Subject,
    specs: Sequence[str],
    text: str,
    job: EvaluationSize,
    progress: Progress = lambda done, of: None,
    basis_dir: Path | None = None,
) -> Facts:
    """Measure every codec, and return all about it, as plain values that JSON can hold; `specs` as `as_codec` reads them.
    Bases are looked for in `basis_dir`, or where all look.

    Refused for a spec, a text, a model or a job that can't be measured.
    """
    codecs = {spec: codec_of(spec) for spec in specs}
    folder = expanded(basis_dir or BASIS_DIR, "--basis-dir")
    basis_bytes = _basis_bytes(codecs, subject.identity, folder)
    _check_positions(subject, job)
    ids = list(subject.tokenizer.encode(text, add_special_tokens=False))
    first, windows = cut(subject.tokenizer, ids, job)
    with_numbers = haystacks(subject.tokenizer, ids, job)
    total = len(windows) + len(with_numbers)
    reference = Reference(subject.model)
    with begun(codecs, subject.identity, folder, basis_bytes, first, reference.fill(first)) as trials:
        for done, window in enumerate(windows):
            progress(done, total)
            read_on(reference, trials, window)
        for done, haystack in enumerate(with_numbers, len(windows)):
            progress(done, total)
            _ask(subject, reference, trials, haystack)
        return _facts(job, reference, trials, len(ids))


def _basis_bytes(codecs: Mapping[str, Codec], model: str, folder: Path) -> int:
    """Return the RAM of the model's basis, where a codec needs it. Refused without one: TurboQuant would be measured."""
    spec = next((spec for spec, codec in codecs.items() if isinstance(codec, Transform)), None)
    if spec is None:
        return 0
    basis = Bases(folder).of_model(model)
    if basis is None:
        raise Refused(f"codec {spec}: no basis of this model in {folder}; run `prefixcache calibrate` with it first")
    return basis.nbytes


def codec_of(spec: str) -> Codec:
    """Return the codec of a spec. Refused names the spec and what could be written."""
    try:
        codec = as_codec(spec)
    except ValueError as error:
        raise Refused(str(error)) from None
    assert codec is not None
    return codec


def _check_positions(subject: Subject, job: EvaluationSize) -> None:
    after = max(job.tokens, 2 * ANSWER if job.needles else 0)
    if subject.positions is not None and job.prefix + after > subject.positions:
        raise Refused(
            f"--prefix {job.prefix} and {after} tokens after it: this model has {subject.positions} positions "
            f"(max_position_embeddings); give --prefix {max(subject.positions - after, 1)} or less"
        )


# -- one text ---------------------------------------------------------------------------------------------------------


def _ask(subject: Subject, reference: Reference, trials: list[Trial], haystack: Haystack) -> None:
    """Ask each question after a haystack, by itself: on a copy of the live cache, then on each restored one."""
    live = reference.fill(haystack.cached)
    for trial in trials:
        trial.keep(haystack.cached, live)
    reference.right.append([_answers(subject, copy.deepcopy(live), question) for question in haystack.questions])
    del live
    for trial in trials:
        trial.right.append([_answers(subject, trial.restore(), question) for question in haystack.questions])
        mx.clear_cache()


def _answers(subject: Subject, prompt_cache: list[Any], question: NeedleQuestion) -> bool:
    """Return whether the first number in the greedy answer is the one that was hidden."""
    answer: list[int] = []
    number = None
    for token, _ in generate_step(
        mx.array(question.tokens),
        subject.model,
        max_tokens=ANSWER,
        prompt_cache=prompt_cache,
        prefill_step_size=PREFILL,
    ):
        if token in subject.tokenizer.eos_token_ids:
            break
        answer.append(token)
        text = GROUPING.sub("", subject.tokenizer.decode(answer))
        number = NUMBER.search(text)
        if number and number.end() < len(text.rstrip(",")):  # the number is over
            break
    return number is not None and number[0] == question.number


# -- the facts --------------------------------------------------------------------------------------------------------


def _facts(job: EvaluationSize, reference: Reference, trials: list[Trial], text_tokens: int) -> Facts:
    nll = [float(window.mean()) for window in reference.nll]
    versions = {name: version(name) for name in ("prefixcache", "mlx", "mlx-lm")}
    return {
        "job": {**asdict(job), "text_tokens": text_tokens, "prefill": PREFILL},
        "versions": {**versions, "python": platform.python_version(), "device": str(mx.default_device())},
        "depths": job.haystack_depths,
        "reference": {
            "perplexity": _finite(_exp(mean_and_error(nll).mean)),
            "windows": [{"nll": _finite(value)} for value in nll],
            **_recall(reference.right, job),
        },
        "codecs": [_codec_facts(trial, nll, job) for trial in trials],
    }


def _codec_facts(trial: Trial, reference_nll: list[float], job: EvaluationSize) -> Facts:
    """Return one codec's numbers. Errors are standard errors over the windows; of perplexity, to first order."""
    nll, kl, same = ([float(column.mean()) for column in columns] for columns in zip(*trial.windows, strict=True))
    before, after = _exp(mean_and_error(reference_nll).mean), _exp(mean_and_error(nll).mean)
    log_ratio, log_error = mean_and_error([a - b for a, b in zip(nll, reference_nll, strict=True)])
    kl_mean, kl_error = mean_and_error(kl)
    top1, top1_error = mean_and_error(same)
    numbers = {
        "perplexity": after,
        "perplexity_difference": after - before,
        "perplexity_difference_error": None if log_error is None else after * log_error,
        "perplexity_ratio": _exp(log_ratio),
        "perplexity_ratio_error": None if log_error is None else _exp(log_ratio) * log_error,
        "kl_mean": kl_mean,
        "kl_error": kl_error,
        "kl_p99": float(np.quantile(joined(trial.windows).kl, 0.99, method="higher")),
        "top1": top1,
        "top1_error": top1_error,
    }
    windows = zip(nll, kl, same, strict=True)
    return {
        "codec": trial.spec,
        "name": str(trial.codec),
        "spec": trial.codec.spec(),
        "identical": trial.identical,
        **_sizes(trial),
        **{name: _finite(value) for name, value in numbers.items()},
        "windows": [{"nll": _finite(a), "kl": _finite(b), "top1": c} for a, b, c in windows],
        **_recall(trial.right, job),
    }


def _sizes(trial: Trial) -> Facts:
    """Return the bytes and bits of a codec. A payload is what one token of a whole block takes in every layer that keeps rows
    by token, levels included; what is stored has headers, token ids and recurrent state beside it, and of windowed layers
    fewer rows.
    """
    assert trial.plan is not None
    plan = trial.plan
    sections = plan.rows, *plan.windowed
    specs = [spec for of in sections for spec in (*of.specs(BLOCK), *of.joined_specs(BLOCK))]  # as many as are expected
    payload = sum(spec.nbytes for spec in specs) / BLOCK
    values = sum(stream[2] * stream[3] for leaf in plan.leaves for stream in leaf.get("streams") or ())
    live = plan.fp16_bytes(1)
    tokens = sum(stored.new_tokens for stored in trial.stored)
    return {
        "bits_per_value": 8 * payload / values if values else None,
        "values_per_token": values,
        "live_bytes_per_token": live,
        "payload_bytes_per_token": payload,
        "stored_bytes_per_token": sum(s.new_bytes for s in trial.stored) / tokens if tokens else None,
        "ratio": live / payload if payload else None,
        "layers": len(plan.layers),
        "raw_layers": list(trial.stored[-1].raw_layers),
    }


def _recall(right: list[list[bool]], job: EvaluationSize) -> Facts:
    """Return how many of the hidden numbers were told, in all and by depth; `asked` is 0 without needles."""
    by_depth = [
        {"depth": depth, "asked": len(right), "right": sum(column)}
        for depth, column in zip(job.haystack_depths, zip(*right, strict=True), strict=True)
    ]
    right_answers = sum(row["right"] for row in by_depth)
    return {"needles": {"asked": len(right) * len(by_depth), "right": right_answers, "by_depth": by_depth}}


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _finite(value: float | None) -> float | None:
    """Return None for infinity and NaN, which a codec that breaks a model gives and JSON doesn't have."""
    return value if value is not None and math.isfinite(value) else None
