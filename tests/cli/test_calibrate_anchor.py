"""`prefixcache calibrate` measures on text held back where quality 4 is; what can't be measured leaves the first guess."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache.calibration import design, texts
from prefixcache.calibration.statistics import SINKS, Collection, Statistics, collect
from prefixcache.cli.calibrate import anchor
from prefixcache.cli.calibrate.anchor import anchored, line_through, texts_of
from prefixcache.cli.calibrate.making import _groups, _windows
from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.evaluate.measuring import Subject, load
from prefixcache.cli.evaluate.texts import Excerpts
from prefixcache.cli.evaluate.trials import NotRestored, Reference, begun, read_on
from prefixcache.codecs import Transform
from prefixcache.codecs.transform import bases
from prefixcache.codecs.transform.basis import GUESSED, MATCHED, NEAREST, Basis, Measured
from tests.servers.serving import save_model

TEXT = texts.CORPUS / "languages" / "english_dialogue.txt"
SIZE = ("--text", TEXT, "--windows", 1, "--tokens", 320, "--draws", 1, "--basis-dir")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "_loaded", {})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, which depends on every row."""
    return save_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def tiny(small: Path) -> tuple[Subject, Statistics, Excerpts]:
    job = Calibration(str(small), texts=(TEXT,), windows=2, tokens=320, draws=2)
    subject = load(job.model)
    read, held_back = _windows(job, subject)
    groups, _ = _groups(job, subject.model)
    statistics = collect(subject.model, groups, read, held_back, Collection(fisher_windows=1, draws=job.draws))
    return subject, statistics, texts_of(held_back, read[0])


def by_guess(tiny: tuple[Subject, Statistics, Excerpts], folder: Path, factor: float = 1.0) -> bytes:
    """The basis that a first guess so many times as wide leads to."""
    subject, statistics, unseen = tiny
    with pytest.MonkeyPatch.context() as patched:
        guess = design._first_step
        patched.setattr(design, "_first_step", lambda drafts: factor * guess(drafts))
        made = design.Design(statistics, subject.identity, "", SINKS)
        return anchored(made, subject, unseen, folder / "tried", lambda done, of: None)


@pytest.fixture(scope="module")
def usual(tiny: tuple[Subject, Statistics, Excerpts], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return by_guess(tiny, tmp_path_factory.mktemp("usual"))


@pytest.fixture(scope="module")
def first_guess(tiny: tuple[Subject, Statistics, Excerpts]) -> bytes:
    subject, statistics, _ = tiny
    return design.design(statistics, subject.identity, "", SINKS)


def remeasured(subject: Subject, unseen: Excerpts, basis: bytes, folder: Path) -> float:
    """KL at quality 4, by the basis as it was written."""
    nbytes = bases.Bases(folder).of_hash(bases.Bases(folder).save(basis).stem[-32:]).nbytes
    reference = Reference(subject.model)
    live = reference.fill(unseen.first)
    with begun({"it": Transform()}, subject.identity, folder, nbytes, unseen.first, live) as (trial,):
        for window in unseen.windows:
            read_on(reference, [trial], window)
    return float(np.mean([rows.kl.mean() for rows in trial.windows]))


# -- where quality 4 is ---------------------------------------------------------------------------------------------------


def test_quality_4_has_the_kl_of_turboquant_4_on_text_held_back(tiny, usual, tmp_path):
    subject, _, unseen = tiny
    measured = Basis(usual).measured
    assert measured.anchor == MATCHED
    assert measured.kl == pytest.approx(measured.reference_kl, rel=0.1)
    assert (measured.windows, measured.tokens) == (2, 2 * 63)
    assert measured.kl == remeasured(subject, unseen, usual, tmp_path)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_first_guess_comes_out_with_the_same_step(tiny, usual, tmp_path, factor):
    mine, theirs = Basis(by_guess(tiny, tmp_path, factor)), Basis(usual)
    assert mine.measured.anchor == MATCHED
    for one, other in zip(mine.groups, theirs.groups, strict=True):
        assert one.spreads[:8] == pytest.approx(other.spreads[:8], rel=0.1)


@pytest.mark.parametrize("factor", [1 / 64, 64])
def test_a_guess_that_is_far_off_is_brought_nearer_or_kept(tiny, first_guess, tmp_path, factor):
    mine, guess = Basis(by_guess(tiny, tmp_path, factor)), Basis(first_guess)
    assert mine.measured.anchor in (NEAREST, GUESSED)
    moved = np.log2(factor * mine.groups[0].spreads[0] / guess.groups[0].spreads[0])
    assert moved == pytest.approx(2 * np.sign(factor - 1) if mine.measured.anchor == NEAREST else 0, abs=1e-4)


def test_the_same_gives_the_same_bits_tells_its_progress_by_windows_and_leaves_nothing_behind(tiny, usual, tmp_path):
    subject, statistics, unseen = tiny
    calls: list[tuple[int, int]] = []
    made = design.Design(statistics, subject.identity, "", SINKS)
    (tmp_path / "tried").mkdir()
    (tmp_path / "tried" / "left").write_text("by one that was killed")
    assert anchored(made, subject, unseen, tmp_path / "tried", lambda *call: calls.append(call)) == usual
    assert calls[:4] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert calls[4:] in ([], [(4, 6), (5, 6)])  # moved once more
    assert list(tmp_path.iterdir()) == []


# -- what can't be measured -----------------------------------------------------------------------------------------------


def test_windows_that_hold_no_block_and_some_tokens_leave_the_first_guess(tiny, first_guess, tmp_path):
    subject, _, unseen = tiny
    short = texts_of([[*unseen.windows[0].prompt, 1]], unseen.first)
    assert short.windows == []
    assert by_guess((subject, tiny[1], short), tmp_path) == first_guess
    assert Basis(first_guess).measured is None


def test_answers_that_hardly_depend_on_stored_rows_leave_the_first_guess(tiny, first_guess, tmp_path, monkeypatch):
    monkeypatch.setattr(anchor, "LEAST_KL", 1.0)
    basis = Basis(by_guess(tiny, tmp_path))
    assert basis.measured.anchor == GUESSED
    assert 0 < basis.measured.kl < 1.0
    for one, other in zip(basis.groups, Basis(first_guess).groups, strict=True):
        assert np.array_equal(one.spreads, other.spreads)


def test_kl_that_is_not_finite_leaves_the_first_guess(tiny, first_guess, tmp_path, monkeypatch):
    monkeypatch.setattr(anchor._Measure, "__call__", lambda self, designed, codecs: dict.fromkeys(codecs, float("nan")))
    assert by_guess(tiny, tmp_path) == first_guess


def test_a_cache_that_can_not_be_restored_leaves_the_first_guess_with_the_reason(
    tiny, first_guess, tmp_path, monkeypatch, caplog
):
    def refuse(*args: Any) -> None:
        raise NotRestored("this model's prompt cache can't be stored")

    monkeypatch.setattr(anchor, "read_on", refuse)
    assert by_guess(tiny, tmp_path) == first_guess
    assert "quality 4 is not compared with turboquant:4: this model's prompt cache can't be stored" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("around", "quality"),
    [((2e-3, 1e-3, 5e-4), 4.0), ((8e-3, 4e-3, 2e-3), 5.0), ((5e-4, 2.5e-4, 1.25e-4), 3.0), ((0.64, 0.16, 0.04), 5.83)],
)
def test_the_quality_that_matches_is_on_the_line_through_the_logarithms(around, quality):
    line = line_through(around)
    assert 4 + line.at(1e-3) == pytest.approx(quality, abs=0.01)


@pytest.mark.parametrize(
    "around",
    [
        (1e-3, 1e-3, 1e-3),
        (5e-4, 1e-3, 2e-3),
        (1.1e-3, 1e-3, 0.9e-3),
        (2e-9, 1e-9, 5e-10),
        (2e-3, 1e-3, 0.0),
        (2e-3, float("nan"), 5e-4),
        (float("inf"), 1e-3, 5e-4),
    ],
)
def test_kl_that_does_not_fall_or_is_no_number_says_no_quality(around):
    assert line_through(around) is None


@pytest.mark.parametrize(
    ("length", "cut"),
    [(257, None), (258, (256, 1)), (320, (256, 63)), (512, (256, 128)), (1024, (768, 128)), (2100, (1792, 128))],
)
def test_whole_blocks_of_a_window_are_stored_and_what_follows_is_read(length, cut):
    unseen = texts_of([range(length)], [0])
    found = [(len(window.prompt), len(window.inputs)) for window in unseen.windows]
    assert found == ([] if cut is None else [cut])
    for window in unseen.windows:
        assert window.inputs[0] == len(window.prompt)
        assert [token - 1 for token in window.targets] == window.inputs


def test_a_variable_that_is_no_setting_is_refused_and_the_calibration_kept(call, small, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFIXCACHE_RAMM", "1GB")
    done = call("calibrate", small, *SIZE, tmp_path)
    assert done.exit_code == 2
    assert "PREFIXCACHE_RAMM" in done.stderr
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(".calibrating-")


# -- the command ----------------------------------------------------------------------------------------------------------


def test_the_report_the_json_and_the_list_say_what_was_measured(call, small, tmp_path):
    done = call("calibrate", small, *SIZE, tmp_path)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.iterdir()
    basis = Basis(path.read_bytes())
    number = r"\d\.\d+"
    words = rf"on text it had not seen: KL {number} nats at quality 4 \(turboquant:4: {number}\), \d+\.\d times smaller"
    assert re.search(words + " than fp16\n", done.stdout)
    assert "guess" not in done.stdout
    said = json.loads(call("calibrate", small, *SIZE, tmp_path, "--json").stdout)
    assert Measured(**said["measured"]) == basis.measured
    listed = json.loads(call("calibrate", "--list", "--basis-dir", tmp_path, "--json").stdout)
    assert Measured(**listed["bases"][0]["basis"]["measured"]) == basis.measured
    shown = call("calibrate", "--list", "--basis-dir", tmp_path).stdout
    (row,) = (line.split() for line in shown.splitlines() if basis.hash[:8] in line)
    at = row.index("fisher")
    assert list(map(float, row[at - 2 : at])) == pytest.approx(
        [basis.measured.kl, basis.measured.reference_kl], rel=0.01
    )
    assert "on text that the basis had not seen" in shown


def test_a_basis_that_was_not_measured_says_what_it_takes(call, small, tmp_path):
    done = call("calibrate", small, *(96 if part == 320 else part for part in SIZE), tmp_path)
    said = " ".join(done.stdout.split())
    assert "on text it had not seen: KL not measured at quality 4, " in said
    assert f"quality 4 is a guess: KL takes windows of some {anchor.LONG_ENOUGH} tokens (--tokens)" in said


def test_interrupted_while_it_measures_it_goes_on_and_gives_the_same_file(call, small, tmp_path, monkeypatch):
    assert call("calibrate", small, *SIZE, tmp_path / "whole").exit_code == 0
    bases._loaded.clear()
    read_on, calls = anchor.read_on, []

    def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        read_on(*args)

    monkeypatch.setattr(anchor, "read_on", interrupted)
    ended = call("calibrate", small, *SIZE, tmp_path / "cut")
    assert ended.exit_code == 130
    assert "goes on where it was" in ended.stderr
    (kept,) = (tmp_path / "cut").iterdir()
    assert kept.name.startswith(".calibrating-")
    assert call("calibrate", small, *SIZE, tmp_path / "cut").exit_code == 0
    (file,) = (tmp_path / "cut").iterdir()
    assert file.read_bytes() == (tmp_path / "whole" / file.name).read_bytes()
