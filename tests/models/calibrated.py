"""Bases of small models, made by a calibration that takes seconds: good enough to code with, no measure of anything."""

from __future__ import annotations

from pathlib import Path

from prefixcache.calibration.texts import CORPUS
from prefixcache.cli.calibrate.making import make
from prefixcache.cli.calibrate.options import Calibration

TEXT = CORPUS / "languages" / "english_dialogue.txt"


def calibrate(model: Path, folder: Path, adapter: Path | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return make(Calibration(str(model), adapter and str(adapter), (TEXT,), windows=4, tokens=96, draws=3), folder).path
