"""What a model reads while it is calibrated: many kinds of text, none of it read twice, the same everywhere."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from prefixcache.calibration.texts import CORPUS, Text, default_texts, read_texts, windows
from prefixcache.cli.calibrate.making import HELD_BACK
from prefixcache.cli.calibrate.options import Calibration

FIXTURES = Path(__file__).parent.parent / "fixtures"
DIGEST = "46436929d81ad70f138394ecaeb4f54a"  # of the default text: who changes it changes the bases of all models


@pytest.fixture(scope="module")
def defaults() -> list[Text]:
    return default_texts()


def numbered(lengths: list[int], kind: str = "languages", first: int = 0) -> list[Text]:
    """Texts of these many words, each word a number that no other text has."""
    made = []
    for i, length in enumerate(lengths):
        made.append(Text(f"{kind} {i}", " ".join(map(str, range(first, first + length))), kind))
        first += length
    return made


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def utf8(text: str) -> list[int]:
    return list(text.encode())


# -- the default text --------------------------------------------------------------------------------------------------------


def test_the_default_text_is_the_same_bytes_whatever_is_installed(defaults):
    parts = "\0".join(part for text in defaults for part in text)
    assert hashlib.blake2b(parts.encode(), digest_size=16).hexdigest() == DIGEST


def test_the_default_text_has_languages_code_and_prose(defaults):
    assert list(dict.fromkeys(text.kind for text in defaults)) == ["languages", "code", "prose"]
    assert {text.kind for text in defaults} == {folder.name for folder in CORPUS.iterdir()}
    assert len({text.name for text in defaults}) == len(defaults) == len(list(CORPUS.rglob("*.*")))


def test_the_default_text_is_enough_for_the_default_windows(defaults):
    """Tokenizers of the largest vocabularies make a token of 3.6 of its bytes on average."""
    job = Calibration()
    cut = windows(defaults, lambda text: utf8(text)[::4], job.windows, job.tokens, held_back=HELD_BACK)
    assert len(cut.read) == job.windows


def test_what_evaluate_measures_on_is_not_calibrated_on(defaults):
    def runs_of_words(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[i : i + 14]) for i in range(len(words) - 13)}

    measured = runs_of_words("\n\n".join(topics.values()))
    assert not {text.name: both for text in defaults if (both := measured & runs_of_words(text.text))}


# -- the corpus ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CORPUS.rglob("*.txt")), ids=lambda path: path.stem)
def test_a_file_of_the_corpus_is_long_and_clean(path):
    text = path.read_text(encoding="utf-8")
    assert 7_000 <= len(text.encode()) <= 20_000
    assert text.endswith("\n")
    assert not re.search(r"[ \t]\n|\r|\n\n\n\n|�", text) or path.stem == "unified_diff"  # context that is empty


@pytest.mark.parametrize("path", sorted((CORPUS / "languages").glob("*.txt")), ids=lambda path: path.stem)
def test_a_language_is_varied_and_repeats_no_line(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n---\n") >= 9 or path.stem == "english_dialogue"
    lines = Counter(line.strip() for line in text.splitlines() if len(line.strip()) >= 12)
    assert not [line for line, times in lines.items() if times > 1]


def test_no_line_is_in_two_languages():
    files = (CORPUS / "languages").glob("*.txt")
    lines = Counter(line for path in files for line in set(path.read_text("utf-8").splitlines()))
    assert not [line for line, times in lines.items() if times > 1 and len(line) >= 12]


# -- texts of one's own ------------------------------------------------------------------------------------------------------


def test_each_file_is_a_text_of_its_own(tmp_path):
    for name, said in (("a.txt", "Grüße"), ("b.md", "# 標題\n")):
        (tmp_path / name).write_text(said, encoding="utf-8")
    read = read_texts([tmp_path / "b.md", tmp_path / "a.txt"])
    assert [(Path(text.name).name, text.text) for text in read] == [("b.md", "# 標題\n"), ("a.txt", "Grüße")]
    assert {text.kind for text in read} == {"given"}


def test_a_file_that_is_not_utf8_or_not_there_is_named_with_a_remedy(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8; convert it, or give another text"):
        read_texts([tmp_path / "latin.txt"])
    with pytest.raises(ValueError, match=r"gone\.txt: can't be read \(No such file or directory\); give a text file"):
        read_texts([tmp_path / "gone.txt"])


# -- windows ---------------------------------------------------------------------------------------------------------------


@given(
    lengths=st.dictionaries(
        st.sampled_from(["languages", "code", "prose", "given"]), st.lists(st.integers(0, 60)), min_size=1
    ),
    count=st.integers(1, 20),
    length=st.integers(1, 12),
    opening=st.sampled_from([[], [-1], [-1, -2]]),
    most=st.integers(0, 5),
)
def test_no_token_is_in_two_windows_and_all_windows_have_their_length(lengths, count, length, opening, most):
    made: list[Text] = []
    for kind, of_kind in lengths.items():
        made += numbered(of_kind, kind, 1000_000 * len(made))
    size = length - len(opening)
    try:
        cut, held_back = windows(made, numbers, count, length, opening, most)
    except ValueError:
        spare = len(lengths) * max(size - 1, 0)  # of each kind, fewer tokens than a window has may be left
        assert size < 1 or sum(map(sum, lengths.values())) < (count + min(most, 1)) * size + spare
        return
    assert len(cut) == count
    assert min(most, 1) <= len(held_back) <= most
    assert all(len(window) == length and window[: len(opening)] == opening for window in cut + held_back)
    read = [token for window in cut + held_back for token in window[len(opening) :]]
    assert len(read) == len(set(read))
    assert (cut, held_back) == windows(made, numbers, count, length, opening, most)


def test_half_of_the_windows_are_of_languages_and_the_rest_is_code_and_prose():
    made = numbered([500] * 4) + numbered([4000], "code", 10_000) + numbered([900] * 5, "prose", 20_000)
    kinds = [window[0] // 10_000 for window in windows(made, numbers, 32, 50).read]
    assert Counter(kinds) == {0: 16, 1: 8, 2: 8}
    assert Counter(kinds[:8]) == {0: 4, 1: 2, 2: 2}


def test_what_languages_have_too_little_of_comes_from_code_and_prose():
    made = numbered([100]) + numbered([4000], "code", 10_000) + numbered([4000], "prose", 20_000)
    kinds = [window[0] // 10_000 for window in windows(made, numbers, 32, 50).read]
    assert Counter(kinds) == {0: 2, 1: 15, 2: 15}


def test_texts_of_a_kind_have_equally_many_windows_while_they_are_long_enough():
    cut = windows(numbered([1000, 100, 1000, 1000]), numbers, 14, 50).read
    texts = [0 if w[0] < 1000 else 1 if w[0] < 1100 else 2 if w[0] < 2100 else 3 for w in cut]
    assert Counter(texts) == {0: 4, 1: 2, 2: 4, 3: 4}
    assert texts[:4] == [0, 1, 2, 3]


def test_a_few_windows_are_of_texts_evenly_spaced():
    assert [w[0] // 100 for w in windows(numbered([100] * 9), numbers, 3, 100).read] == [1, 4, 7]


def test_windows_are_evenly_spaced_in_a_long_text():
    starts = [window[0] for window in windows(numbered([10_000]), numbers, 4, 100).read]
    assert starts == [1200, 3700, 6200, 8700]


def test_windows_held_back_are_of_all_kinds_and_evenly_spaced():
    made = numbered([5000]) + numbered([9000], "code", 10_000) + numbered([9000], "prose", 20_000)
    read, held_back = windows(made, numbers, 60, 50, held_back=4)
    starts = sorted(window[0] for window in read + held_back)
    kinds = [[start for start in starts if start // 10_000 == kind] for kind in range(3)]
    places = [(window[0] // 10_000, kinds[window[0] // 10_000].index(window[0])) for window in held_back]
    assert list(map(len, kinds)) == [32, 16, 16]
    assert sorted(places) == [(0, 8), (0, 24), (1, 8), (2, 8)]


def test_as_many_are_held_back_as_the_text_has_and_one_at_least():
    read, held_back = windows(numbered([100]), numbers, 7, 10, held_back=4)
    assert (len(read), len(held_back)) == (7, 3)
    with pytest.raises(ValueError, match="10 windows of 10 tokens and one to hold back need 110 tokens of text"):
        windows(numbered([100]), numbers, 10, 10, held_back=4)


def test_texts_shorter_than_a_window_are_joined():
    (window,) = windows(numbered([7, 7, 7]), numbers, 1, 20).read
    assert window == list(range(20))
    assert windows(numbered([25, 5]), numbers, 3, 10).read == [[*range(10)], [*range(20, 30)], [*range(10, 20)]]


def test_too_little_text_is_refused_with_the_numbers_and_the_remedy():
    with pytest.raises(
        ValueError, match="40 windows of 51 tokens need 2,000 tokens of text; the text has 1,234, which makes 24"
    ):
        windows(numbered([1000, 234]), numbers, 40, 51, [-1])
    with pytest.raises(ValueError, match="ask for fewer or shorter windows, or give more text"):
        windows([], numbers, 1, 10)


def test_windows_without_room_for_text_are_refused():
    for count, length in ((0, 10), (3, 1), (3, 0)):
        with pytest.raises(ValueError, match="ask for at least one window"):
            windows(numbered([100]), numbers, count, length, [-1])


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2"])
def test_the_default_text_makes_the_windows_of_a_calibration(defaults, model):
    tokenizer = load_tokenizer(str(FIXTURES / model))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    opening = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    cut = windows(defaults, encode, 24, 256, opening).read
    assert [len(window) for window in cut] == [256] * 24
    assert all(window[: len(opening)] == opening for window in cut)
    assert sum(any(ord(sign) > 0x2FF for sign in tokenizer.decode(window)) for window in cut) >= 5  # not Latin


def test_every_file_of_the_corpus_is_read(defaults):
    cut = [bytes(window) for window in windows(defaults, utf8, 128, 1024).read]
    read = {text.name: sum(window in text.text.encode() for window in cut) for text in defaults}
    assert all(read[text.name] in ((4, 5) if text.kind == "languages" else (1, 2)) for text in defaults)
