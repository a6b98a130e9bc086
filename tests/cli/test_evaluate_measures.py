"""What `prefixcache evaluate` computes, against plain NumPy; its texts and haystacks; how its numbers are written."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prefixcache.cli.evaluate.report import number, signed
from prefixcache.cli.evaluate.texts import (
    DIGITS,
    EvaluationSize,
    cut,
    default_text,
    haystacks,
    hide,
    read_texts,
)
from prefixcache.cli.evaluate.trials import compare, divergence, joined, mean_and_error, surprise
from prefixcache.cli.text import Refused

FINITE = st.floats(-30, 30, width=32)
SHAPES = st.tuples(st.integers(1, 5), st.integers(2, 40))


@st.composite
def pairs(draw):
    shape = draw(SHAPES)
    return draw(arrays(np.float32, shape, elements=FINITE)), draw(arrays(np.float32, shape, elements=FINITE))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@given(pairs())
def test_divergence_is_numpys_and_never_negative(pair):
    a, b = pair
    p, q = log_softmax(a), log_softmax(b)
    got = divergence(mx.array(a), mx.array(b))
    assert (got >= 0).all()
    np.testing.assert_allclose(got, (np.exp(p) * (p - q)).sum(-1), rtol=1e-4, atol=2e-5)


@given(pairs())
def test_surprise_and_agreement_are_numpys(pair):
    a, b = pair
    targets = [int(row.argmin()) for row in b]
    rows = compare(mx.array(a), mx.array(b), targets)
    np.testing.assert_allclose(rows.nll, -log_softmax(b)[np.arange(len(b)), targets], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rows.same, a.argmax(-1) == b.argmax(-1))


@given(pairs(), st.sampled_from([mx.float32, mx.float16, mx.bfloat16]))
def test_equal_logits_diverge_by_nothing(pair, dtype):
    logits = mx.array(pair[0]).astype(dtype)
    assert (divergence(logits, logits) == 0).all()
    assert compare(logits, logits, [0] * len(pair[0])).same.all()


def test_a_constant_added_to_all_logits_changes_nothing_much():
    logits = mx.random.normal((4, 1000), key=mx.random.key(0))
    assert divergence(logits, logits + 5).max() < 1e-6
    np.testing.assert_allclose(surprise(logits, [1, 2, 3, 4]), surprise(logits + 5, [1, 2, 3, 4]), atol=1e-5)


def test_a_token_that_the_reference_never_gives_adds_nothing():
    reference = mx.array([[0.0, 0.0, -math.inf]])
    assert divergence(reference, mx.array([[0.0, 0.0, 0.0]]))[0] == pytest.approx(math.log(3 / 2), abs=1e-6)
    assert divergence(reference, reference)[0] == 0


def test_a_token_that_only_the_reference_gives_is_infinitely_far():
    assert divergence(mx.array([[0.0, 0.0]]), mx.array([[0.0, -math.inf]]))[0] == math.inf


def test_rows_of_several_calls_are_the_rows_of_one():
    a, b = (mx.random.normal((7, 50), key=mx.random.key(seed)) for seed in (1, 2))
    targets = list(range(7))
    whole = compare(a, b, targets)
    parts = joined([compare(a[:3], b[:3], targets[:3]), compare(a[3:], b[3:], targets[3:])])
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_standard_error_is_that_of_a_mean():
    values = [1.0, 2.0, 4.0, 7.0]
    mean, error = mean_and_error(values)
    assert (mean, error) == (3.5, pytest.approx(np.std(values, ddof=1) / 2))
    assert mean_and_error([3.0]) == (3.0, None)
    assert mean_and_error([3.0, math.inf]) == (math.inf, None)


# -- texts ------------------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes; 0 opens a text."""

    bos_token_id = 0
    has_chat_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("latin-1")


class Chat(Bytes):
    has_chat_template = True

    def apply_chat_template(self, messages, add_generation_prompt, enable_thinking):
        assert add_generation_prompt
        assert not enable_thinking
        return self.encode("".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>")


def test_windows_lie_apart_and_begin_as_every_text_does():
    ids = list(range(1, 1001))
    first, windows = cut(Bytes(), ids, EvaluationSize(prefix=50, tokens=20, windows=6))
    assert len(first) == 50
    pieces = [first, *(w.prompt + w.inputs for w in windows)]
    assert all(piece[0] == 0 for piece in pieces)
    assert len({token for piece in pieces for token in piece[1:]}) == sum(len(piece) - 1 for piece in pieces)
    for window in windows:
        assert (len(window.prompt), len(window.inputs), len(window.targets)) == (50, 20, 20)
        assert window.inputs[1:] == window.targets[:-1]
    assert windows[-1].targets[-1] == 1000


def test_the_least_text_is_enough_and_one_token_less_is_refused():
    needed, job = 4 * (50 - 1 + 20 + 1), EvaluationSize(prefix=50, tokens=20, windows=3)
    cut(Bytes(), [7] * needed, job)
    with pytest.raises(Refused, match=r"has 279 tokens.*need 280.*--text.*--windows"):
        cut(Bytes(), [7] * (needed - 1), job)


@pytest.mark.parametrize("tokenizer", [Bytes(), Chat()])
def test_a_haystack_holds_each_number_and_ends_before_the_question(tokenizer):
    ids = tokenizer.encode(default_text()[:20000], add_special_tokens=False)
    job = EvaluationSize(prefix=1500, needles=3, depths=4, seed=5)
    made = haystacks(tokenizer, ids, job)
    assert len(made) == 3
    for haystack in made:
        assert 1500 - 40 < len(haystack.cached) <= 1500
        text = tokenizer.decode(haystack.cached)
        assert text.endswith("\n\nWh" if tokenizer.has_chat_template else "\n\nQuestion: Wh")
        places = []
        for question in haystack.questions:
            name = re.search(r"number of (\w+)\?", tokenizer.decode(question.tokens))[1]
            assert len(question.number) == DIGITS
            places.append(text.index(f"The secret number of {name} is {question.number}.\n"))
        assert places == sorted(places)
        assert places[-1] > 0.9 * len(text) - 100
    assert haystacks(tokenizer, ids, job) == made
    assert haystacks(tokenizer, ids, replace(job, seed=6)) != made


def test_no_room_for_the_numbers_is_refused():
    with pytest.raises(Refused, match=r"--prefix 60: no room for 5 numbers.*--needles 0"):
        haystacks(Bytes(), list(b"word " * 100), EvaluationSize(prefix=60, needles=1, depths=5))


def test_needles_stand_on_lines_of_their_own():
    text = "\n".join(f"line {i}" for i in range(100))
    assert hide(text, ["A", "B", "C"], [0, 0.5, 1]).split("\n")[0] == "A"
    assert hide(text, ["A", "B", "C"], [0, 0.5, 1]).split("\n")[-2] == "C"
    assert 45 < hide(text, ["A", "B", "C"], [0, 0.5, 1]).split("\n").index("B") < 58
    assert hide("one two three four", ["N"], [0.5]) == "one two three\nN\n four"
    assert hide("x" * 1000, ["N"], [0.5]) == f"{'x' * 500}\nN\n{'x' * 500}"


def test_depths_go_from_the_beginning_to_the_end():
    assert EvaluationSize(depths=3).haystack_depths == [0.0, 0.5, 1.0]
    assert EvaluationSize(depths=1).haystack_depths == [0.5]


def test_the_default_text_is_always_the_same_and_long():
    assert default_text() == default_text()
    assert len(default_text()) > 300_000


def test_a_text_that_can_not_be_read_is_named(tmp_path):
    with pytest.raises(Refused, match=r"nowhere\.txt: can't be read .*give a text file"):
        read_texts([tmp_path / "nowhere.txt"])
    (tmp_path / "odd").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(Refused, match=r"odd: not UTF-8; convert it"):
        read_texts([tmp_path / "odd"])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (12.3456, 0.0234, "12.35 ± 0.02"),
        (12.3456, None, "12.3"),
        (0.0, 0.0, "0"),
        (-0.01, 0.2, "0.0 ± 0.2"),
        (0.0009, 0.006, "0.001 ± 0.006"),
        (31.2, 14.0, "31 ± 14"),
        (0.00012, 0.0000034, "1.2e-04 ± 3e-06"),
        (123456.0, None, "123,456"),
        (None, None, "-"),
    ],
)
def test_numbers_have_the_digits_that_their_error_bears(value, error, text):
    assert number(value, error) == text


def test_a_change_has_a_sign():
    assert [signed(v, 0.01) for v in (0.5, -0.5, None)] == ["+0.50 ± 0.01", "-0.50 ± 0.01", "-"]
