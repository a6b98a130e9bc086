"""The measurements of `prefixcache evaluate`: what a model says on restored caches, beside what it says on the live one.

A text at a time: the live cache is filled, every codec's `PrefixCache` stores it, the live cache goes on as the
reference, and then each codec's restored cache does. So only one text's logits are in memory, whatever the number of codecs,
and each codec has one cache for all texts, as on a server. Nothing here writes to the screen.
"""

from __future__ import annotations

import copy
import logging
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache, model_identity
from prefixcache.cache import Stored
from prefixcache.cli.evaluate.texts import Haystack, Question, Window, cut, depths_of, haystacks
from prefixcache.cli.text import Refused
from prefixcache.codecs import Codec, Transform, as_codec
from prefixcache.codecs.transform.bases import Bases
from prefixcache.keys import BLOCK
from prefixcache.layers.adapters import CacheError
from prefixcache.layers.image_layout import Plan
from prefixcache.operations.namespaces import BASES_SHARE
from prefixcache.planning.model_config import context_length
from prefixcache.settings import BASIS_DIR

PREFILL = 512  # tokens in one call of the model, as mlx-lm's servers do it
CHUNK = 64  # the same where logits are looked at: 64 x 250,000 float32 logits are 64 MB
ANSWER = 32  # tokens that an answer may have; some models say a sentence before the number
SPARE = 64 << 20
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


@dataclass(frozen=True)
class Job:
    """How much is measured. Lengths are in tokens; `prefix` is what is cached, `tokens` what is read after it."""

    prefix: int = 2048
    tokens: int = 256
    windows: int = 8
    needles: int = 8
    depths: int = 5
    seed: int = 0

    @property
    def haystack_depths(self) -> list[float]:
        return depths_of(self.depths) if self.needles else []


def load(name: str, adapter: str | None = None, float32: bool = False) -> Subject:
    """A model's folder, or its name on Hugging Face; with `float32` its weights are cast.

    Refused when mlx-lm can't load it.
    """
    folder = Path(name).expanduser()
    if not folder.exists() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise Refused(f"{name}: no such folder; give a model's folder, or its name on Hugging Face (owner/name)")
    adapter = str(Path(adapter).expanduser()) if adapter is not None else None
    if adapter is not None and not Path(adapter).is_dir():
        raise Refused(f"--adapter {adapter}: no such folder; give the one that mlx_lm.lora wrote")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it would warn that the text is longer than the context
    try:
        model, tokenizer, config = mlx_lm.load(
            str(folder) if folder.exists() else name, adapter_path=adapter, return_config=True
        )
    except Exception as error:  # what mlx-lm, transformers and the Hub raise has no common class
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
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
    job: Job,
    progress: Progress = lambda done, of: None,
    basis_dir: Path | None = None,
) -> Facts:
    """Everything about every codec, as plain values that JSON can hold; `specs` as `as_codec` reads them. Bases are looked
    for in `basis_dir`, or where all look.

    Refused for a spec, a text, a model or a job that can't be measured.
    """
    codecs = {spec: codec_of(spec) for spec in specs}
    folder = (basis_dir or BASIS_DIR).expanduser()
    for_basis = BASES_SHARE * _basis_bytes(codecs, subject.identity, folder)
    _check_positions(subject, job)
    ids = list(subject.tokenizer.encode(text, add_special_tokens=False))
    first, windows = cut(subject.tokenizer, ids, job.prefix, job.tokens, job.windows)
    with_numbers = haystacks(subject.tokenizer, ids, job.prefix, job.needles, job.haystack_depths, job.seed)
    total = len(windows) + len(with_numbers)
    reference = Reference(subject.model)
    live = reference.fill(first)
    ram = 4 * _nbytes(live) + SPARE + for_basis  # two prompts are stored at once; this is a limit, not what is taken
    trials = [Trial(spec, codec, ram, subject.identity, folder) for spec, codec in codecs.items()]
    try:
        for trial in trials:  # as on a server, other prompts are there already
            trial.keep(first, live)
        for done, window in enumerate(windows):
            progress(done, total)
            _read_on(reference, trials, window)
        for done, haystack in enumerate(with_numbers, len(windows)):
            progress(done, total)
            _ask(subject, reference, trials, haystack)
        return _facts(job, reference, trials, len(ids))
    finally:
        for trial in trials:
            trial.cache.close()


def _basis_bytes(codecs: Mapping[str, Codec], model: str, folder: Path) -> int:
    """RAM of the model's basis, where one of the codecs needs it. Refused without: TurboQuant would be measured."""
    spec = next((spec for spec, codec in codecs.items() if isinstance(codec, Transform)), None)
    if spec is None:
        return 0
    basis = Bases(folder).of_model(model)
    if basis is None:
        raise Refused(f"codec {spec}: no basis of this model in {folder}; run `prefixcache calibrate` with it first")
    return basis.nbytes


def codec_of(spec: str) -> Codec:
    """Refused names the spec and what could be written."""
    try:
        codec = as_codec(spec)
    except ValueError as error:
        raise Refused(str(error)) from None
    assert codec is not None
    return codec


def _check_positions(subject: Subject, job: Job) -> None:
    after = max(job.tokens, 2 * ANSWER if job.needles else 0)
    if subject.positions is not None and job.prefix + after > subject.positions:
        raise Refused(
            f"--prefix {job.prefix} and {after} tokens after it: this model has {subject.positions} positions "
            f"(max_position_embeddings); give --prefix {max(subject.positions - after, 1)} or less"
        )


# -- two outputs ------------------------------------------------------------------------------------------------------
# Logits come in a few rows at a time. All arithmetic is float32, the sums over rows float64.


class Rows(NamedTuple):
    """One value a row of logits: nats of the target, nats of KL(reference || other), whether both choose one token."""

    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def surprise(logits: mx.array, targets: Sequence[int]) -> np.ndarray:
    """Negative log-likelihood of each row's target, in nats: float64 (rows,)."""
    chosen = mx.take_along_axis(_log_probabilities(logits), mx.array(list(targets))[:, None], axis=-1)[:, 0]
    return -np.array(chosen).astype(np.float64)


def divergence(reference: mx.array, logits: mx.array) -> np.ndarray:
    """KL(reference || other) of each row's distributions, in nats: float64 (rows,).

    Never below 0, though rounding alone would bring near-equal rows there. A token that the reference never gives
    (a logit of -inf) adds nothing.
    """
    p, q = _log_probabilities(reference), _log_probabilities(logits)
    terms = mx.where(p == -mx.inf, 0.0, mx.exp(p) * (p - q))
    nats = np.array(terms.sum(axis=-1)).astype(np.float64)
    return np.maximum(nats, 0.0)


def compare(reference: mx.array, logits: mx.array, targets: Sequence[int]) -> Rows:
    same = np.array(mx.argmax(reference, axis=-1) == mx.argmax(logits, axis=-1))
    return Rows(surprise(logits, targets), divergence(reference, logits), same)


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several calls as one."""
    return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of independent values, and its standard error; None from fewer than two, or where one isn't finite."""
    mean = sum(values) / len(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, None
    return mean, float(np.std(values, ddof=1)) / math.sqrt(len(values))


# -- one text ---------------------------------------------------------------------------------------------------------


class Reference:
    """The model on its live cache, and what came of it."""

    def __init__(self, model: Any):
        self.model = model
        self.nll: list[np.ndarray] = []  # of each window
        self.right: list[list[bool]] = []  # of each haystack, by depth

    def fill(self, prompt: list[int]) -> list[Any]:
        """A prompt cache that has seen these tokens."""
        prompt_cache = make_prompt_cache(self.model)
        for at in range(0, len(prompt), PREFILL):
            self.model(mx.array([prompt[at : at + PREFILL]]), cache=prompt_cache)
            mx.eval([layer.state for layer in prompt_cache])
            mx.clear_cache()
        return prompt_cache

    def go_on(self, prompt_cache: list[Any], inputs: list[int]) -> Iterator[mx.array]:
        """Logits (rows, vocabulary) of what follows each input, some rows at a time."""
        for at in range(0, len(inputs), CHUNK):
            logits = self.model(mx.array([inputs[at : at + CHUNK]]), cache=prompt_cache)[0]
            mx.eval(logits)
            yield logits


class Trial:
    """One codec: its cache, and what came of it."""

    def __init__(self, spec: str, codec: Codec, ram: int, model: str, basis_dir: Path):
        self.spec, self.codec = spec, codec
        self._model = model
        try:  # variables may name a server's directory, which is not for this
            self.cache = PrefixCache(codec=codec, ram=ram, ssd_dir=None, ssd=0, basis_dir=basis_dir)
        except ValueError as error:  # another variable is bad
            raise Refused(str(error)) from None
        self.stored: list[Stored] = []  # of each window
        self.windows: list[Rows] = []
        self.identical = True  # logits that are the reference's bit for bit
        self.right: list[list[bool]] = []
        self.plan: Plan | None = None
        self._last: list[int] = []

    def keep(self, prompt: list[int], live: list[Any]) -> Stored:
        """Store the prompt, and let the one before go: the namespace stays."""
        try:
            stored = self.cache.store(prompt, live, model=self._model)
        except CacheError as error:
            raise Refused(f"this model's prompt cache can't be stored: {error}") from error
        if self._last != prompt:
            if self._last:
                self.cache.remove(self._last, model=self._model)
            self._last = prompt
        entry = self.cache.lookup(prompt, model=self._model)
        if entry is None or entry.tokens != len(prompt):
            raise Refused(
                f"codec {self.spec}: of {len(prompt)} tokens that were stored {entry.tokens if entry else 0} can be "
                "found: this model's state can't be restored there, so there is nothing to compare"
            )
        self.plan = entry.plan
        return stored

    def restore(self) -> list[Any]:
        """The prompt kept last, decoded: a new live cache."""
        prompt_cache, rest = self.cache.fetch(self._last, model=self._model, leave=0)
        assert prompt_cache is not None
        assert not rest
        return prompt_cache


def _read_on(reference: Reference, trials: list[Trial], window: Window) -> None:
    """The tokens after a prompt, given one after the other: on the live cache, then on each restored one."""
    live = reference.fill(window.prompt)
    for trial in trials:
        trial.stored.append(trial.keep(window.prompt, live))
    expected = list(reference.go_on(live, window.inputs))
    targets = [window.targets[at : at + CHUNK] for at in range(0, len(window.targets), CHUNK)]
    reference.nll.append(np.concatenate([surprise(*pair) for pair in zip(expected, targets, strict=True)]))
    del live
    for trial in trials:
        parts = []
        logits = reference.go_on(trial.restore(), window.inputs)
        for before, after, chunk in zip(expected, logits, targets, strict=True):
            parts.append(compare(before, after, chunk))
            trial.identical = trial.identical and bool(mx.array_equal(before, after))
        trial.windows.append(joined(parts))
        mx.clear_cache()


def _ask(subject: Subject, reference: Reference, trials: list[Trial], haystack: Haystack) -> None:
    """Each question after a haystack, by itself: on a copy of the live cache, then on each restored one."""
    live = reference.fill(haystack.cached)
    for trial in trials:
        trial.keep(haystack.cached, live)
    reference.right.append([_answers(subject, copy.deepcopy(live), question) for question in haystack.questions])
    del live
    for trial in trials:
        trial.right.append([_answers(subject, trial.restore(), question) for question in haystack.questions])
        mx.clear_cache()


def _answers(subject: Subject, prompt_cache: list[Any], question: Question) -> bool:
    """Whether the first number in the greedy answer is the one that was hidden."""
    answer: list[int] = []
    number = None
    for token, _ in generate_step(
        mx.array(question.tokens), subject.model, max_tokens=ANSWER, prompt_cache=prompt_cache,
        prefill_step_size=PREFILL,
    ):  # fmt: skip
        if token in subject.tokenizer.eos_token_ids:
            break
        answer.append(token)
        text = GROUPING.sub("", subject.tokenizer.decode(answer))
        number = NUMBER.search(text)
        if number and number.end() < len(text.rstrip(",")):  # the number is over
            break
    return number is not None and number[0] == question.number


# -- the facts --------------------------------------------------------------------------------------------------------


def _facts(job: Job, reference: Reference, trials: list[Trial], text_tokens: int) -> Facts:
    nll = [float(window.mean()) for window in reference.nll]
    versions = {name: version(name) for name in ("prefixcache", "mlx", "mlx-lm")}
    return {
        "job": {**asdict(job), "text_tokens": text_tokens, "prefill": PREFILL},
        "versions": {**versions, "python": platform.python_version(), "device": str(mx.default_device())},
        "depths": job.haystack_depths,
        "reference": {
            "perplexity": _finite(_exp(mean_and_error(nll)[0])), "windows": [{"nll": _finite(value)} for value in nll],
            **_recall(reference.right, job),
        },
        "codecs": [_codec_facts(trial, nll, job) for trial in trials],
    }  # fmt: skip


def _codec_facts(trial: Trial, reference_nll: list[float], job: Job) -> Facts:
    """One codec's numbers. Errors are standard errors over the windows; of perplexity, to first order."""
    nll, kl, same = ([float(column.mean()) for column in columns] for columns in zip(*trial.windows, strict=True))
    before, after = _exp(mean_and_error(reference_nll)[0]), _exp(mean_and_error(nll)[0])
    log_ratio, log_error = mean_and_error([a - b for a, b in zip(nll, reference_nll, strict=True)])
    kl_mean, kl_error = mean_and_error(kl)
    top1, top1_error = mean_and_error(same)
    numbers = {
        "perplexity": after, "perplexity_difference": after - before,
        "perplexity_difference_error": None if log_error is None else after * log_error,
        "perplexity_ratio": _exp(log_ratio),
        "perplexity_ratio_error": None if log_error is None else _exp(log_ratio) * log_error,
        "kl_mean": kl_mean, "kl_error": kl_error,
        "kl_p99": float(np.quantile(joined(trial.windows).kl, 0.99, method="higher")),
        "top1": top1, "top1_error": top1_error,
    }  # fmt: skip
    windows = zip(nll, kl, same, strict=True)
    return {
        "codec": trial.spec, "name": str(trial.codec), "spec": trial.codec.spec(), "identical": trial.identical,
        **_sizes(trial), **{name: _finite(value) for name, value in numbers.items()},
        "windows": [{"nll": _finite(a), "kl": _finite(b), "top1": c} for a, b, c in windows],
        **_recall(trial.right, job),
    }  # fmt: skip


def _sizes(trial: Trial) -> Facts:
    """Bytes and bits. A payload is what one token of a whole block takes in every layer that keeps rows by token, levels
    included; what is stored has headers, token ids and recurrent state beside it, and of windowed layers fewer rows.
    """
    assert trial.plan is not None
    plan = trial.plan
    specs = [spec for section in (plan.rows, *plan.windowed) for spec in section.specs(BLOCK)]
    specs += [spec for joined in plan.joined for spec in joined.specs(BLOCK)]  # as many bytes as are expected
    payload = sum(spec.nbytes for spec in specs) / BLOCK
    values = sum(stream[2] * stream[3] for leaf in plan.leaves for stream in leaf.get("streams") or ())
    live = plan.fp16_bytes(1)
    tokens = sum(stored.new_tokens for stored in trial.stored)
    return {
        "bits_per_value": 8 * payload / values if values else None, "values_per_token": values,
        "live_bytes_per_token": live, "payload_bytes_per_token": payload,
        "stored_bytes_per_token": sum(s.new_bytes for s in trial.stored) / tokens if tokens else None,
        "ratio": live / payload if payload else None, "layers": len(plan.layers),
        "raw_layers": list(trial.stored[-1].raw_layers),
    }  # fmt: skip


def _recall(right: list[list[bool]], job: Job) -> Facts:
    """How many of the hidden numbers were told, in all and by depth; `asked` is 0 without needles."""
    by_depth = [
        {"depth": depth, "asked": len(right), "right": sum(column)}
        for depth, column in zip(job.haystack_depths, zip(*right, strict=True), strict=True)
    ]
    told = sum(row["right"] for row in by_depth)
    return {"needles": {"asked": len(right) * len(by_depth), "right": told, "by_depth": by_depth}}


def _nbytes(prompt_cache: list[Any]) -> int:
    leaves = tree_flatten([layer.state for layer in prompt_cache])
    return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _finite(value: float | None) -> float | None:
    """None for infinity and NaN, which a codec that breaks a model gives and JSON doesn't have."""
    return value if value is not None and math.isfinite(value) else None
