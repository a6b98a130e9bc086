"""Where quality 4 is: at the step at which a model's answers differ as much as with turboquant:4, on text held back.

The first guess of a step is by the metric alone, which few draws make noise and which knows nothing of errors that tokens
share. KL of the next token is what counts, so it is measured: with the first guess, and again with the step that follows
from the first measurement.
Decision 0020 says why.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prefixcache.calibration.design import Design, Designed
from prefixcache.cli.evaluate.measuring import Subject
from prefixcache.cli.evaluate.texts import Excerpt, Excerpts
from prefixcache.cli.evaluate.trials import NotRestored, Reference, begun, read_on
from prefixcache.codecs import Codec, Transform, TurboQuant
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import GUESSED, MATCHED, NEAREST, Measured
from prefixcache.codecs.transform.codec import QUALITY
from prefixcache.keys import BLOCK

log = logging.getLogger("prefixcache")

REFERENCE = TurboQuant()
AROUND = (QUALITY - 0.5, QUALITY, QUALITY + 0.5)  # where the first guess is measured
FARTHEST = 2.0  # qualities by which a first guess is moved
CLOSE, CORRECTIONS = 0.05, 1  # of ln KL: what is farther off is moved once more, along the line
CONTINUATION = 128  # tokens that the model reads after a stored prefix,
LONG_ENOUGH = BLOCK + CONTINUATION  # of a window; less is read where it isn't as long as that
LEAST_KL = 1e-5  # nats: less is rounding, log-probabilities being float32
FLATTEST = -0.5  # of ln KL by quality, which is about -2 ln 2: a curve that falls less says nothing

Progress = Callable[[int, int], None]  # windows measured, of how many


def texts_of(held_back: Sequence[Sequence[int]], other: Sequence[int]) -> Excerpts:
    """Cut windows that a basis has not seen: whole blocks of each are stored, and some CONTINUATION tokens behind them are
    read. Windows that are too short for that are left out. The `other` one is stored before them.
    """
    windows = [window for tokens in held_back if (window := _cut(list(tokens))) is not None]
    return Excerpts(list(other), windows)


def _cut(tokens: list[int]) -> Excerpt | None:
    prefix = max(BLOCK, (len(tokens) - CONTINUATION) // BLOCK * BLOCK)
    inputs = tokens[prefix : prefix + CONTINUATION]
    targets = tokens[prefix + 1 : prefix + CONTINUATION + 1]
    return Excerpt(tokens[:prefix], inputs[: len(targets)], targets) if targets else None


def anchored(design: Design, subject: Subject, texts: Excerpts, folder: Path, progress: Progress) -> bytes:
    """Return the bytes of a design's basis whose quality 4 has the KL of turboquant:4 on these texts, as nearly as can be
    found: the basis says how nearly. Bases that are tried are in `folder`, which is emptied first and deleted in the end.
    """
    guess = design.at(QUALITY)
    if not texts.windows:
        return guess.data()
    measure = _Measure(subject, texts, folder, progress)
    codecs: dict[str, Codec] = {"reference": REFERENCE, **{f"{quality:g}": Transform(quality) for quality in AROUND}}
    try:
        divergences = measure(guess, codecs)
        reference = divergences["reference"]
        line = line_through([divergences[f"{quality:g}"] for quality in AROUND]) if reference >= LEAST_KL else None
        if line is None:
            chosen, kl, anchor = guess, divergences[f"{QUALITY:g}"], GUESSED
        else:
            beside = line.at(reference)
            for _ in range(1 + CORRECTIONS):
                nearest = min(max(beside, -FARTHEST), FARTHEST)
                chosen, anchor = design.at(QUALITY + nearest), MATCHED if nearest == beside else NEAREST
                kl = measure(chosen, {"chosen": Transform(QUALITY)})["chosen"]
                if anchor == NEAREST or not LEAST_KL <= kl < math.inf or abs(math.log(kl / reference)) < CLOSE:
                    break
                beside += math.log(reference / kl) / line.slope
    except NotRestored as why:
        log.warning("quality %g is not compared with turboquant:4: %s", QUALITY, why)
        return guess.data()
    if not (math.isfinite(kl) and math.isfinite(reference)):
        return guess.data()
    tokens = sum(len(window.inputs) for window in texts.windows)
    return chosen.data(Measured(kl, reference, len(texts.windows), tokens, anchor))


class FittedLine(NamedTuple):
    """ln KL by quality, counted from quality 4."""

    slope: float
    level: float

    def at(self, kl: float) -> float:
        return (math.log(kl) - self.level) / self.slope


def line_through(around: Sequence[float]) -> FittedLine | None:
    """Return the line through KL at the qualities AROUND 4; None where it doesn't say which quality has a given KL."""
    if not all(LEAST_KL <= kl < math.inf for kl in around):
        return None
    slope, level = np.polyfit(np.array(AROUND) - QUALITY, np.log(around), 1)
    return FittedLine(float(slope), float(level)) if slope <= FLATTEST else None


class _Measure:
    """KL of the next token, by codec: the mean over the windows, in nats."""

    def __init__(self, subject: Subject, texts: Excerpts, folder: Path, progress: Progress):
        self._subject, self._texts, self._folder, self._progress = subject, texts, folder, progress
        self._passes = 0

    def __call__(self, designed: Designed, codecs: Mapping[str, Codec]) -> dict[str, float]:
        """Measure with this basis. NotRestored where the model's prompt cache can't be."""
        reference, texts = Reference(self._subject.model), self._texts
        before, count = self._passes * len(texts.windows), max(2, self._passes + 1) * len(texts.windows)
        with _emptied(self._folder):
            bases = Bases(self._folder)
            nbytes = bases.of_hash(bases.save(designed.data()).stem[-32:]).nbytes
            with begun(
                codecs, self._subject.identity, bases.folder, nbytes, texts.first, reference.fill(texts.first)
            ) as trials:
                for done, window in enumerate(texts.windows, before):
                    self._progress(done, count)
                    read_on(reference, trials, window)
        self._passes += 1
        return {trial.spec: float(np.mean([rows.kl.mean() for rows in trial.windows])) for trial in trials}


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Empty the folder, which a killed calibration may have left, and delete it in the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
