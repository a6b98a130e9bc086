"""How the commands write numbers, sizes, times and foreign texts."""

import pytest

from prefixcache.cli.text import age, complain, duration, many, safe, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (99_949, "99.9 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (8 * 10**9, "8.00 GB"),
        (1234 * 10**15, "1,234 PB"),
    ],
)
def test_sizes(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (90_000, "1 d"), (400 * 86400, "1 y")],
)
def test_ages(seconds, text):
    assert age(1e9 - seconds, 1e9) == text
    assert age(None, 1e9) == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.000_042, "42 us"),
        (0.001_25, "1.2 ms"),
        (0.016, "16 ms"),
        (1.42, "1.42 s"),
        (12.34, "12.3 s"),
        (150, "2.5 min"),
        (8000, "2.2 h"),
        (200_000, "2.3 d"),
        (None, "-"),
    ],
)
def test_times_say_no_more_than_they_know(seconds, text):
    assert duration(seconds) == text


def test_words():
    assert [many(1, "branch"), many(2, "branch"), many(1234, "block")] == ["1 branch", "2 branches", "1,234 blocks"]
    assert safe("a\x1b\n\u202e\udc80é漢") == "a\\x1b\\n\\u202e\\udc80é漢"


@pytest.mark.parametrize(
    "quoted",
    ["valkey://:S3CR3T@host/x", "http://me:p@S3CR3T@host/x", "valkey:/user:S3CR3T@host", "/home/valkey:/:S3CR3T@host"],
)
def test_complaints_quote_no_password(quoted, capsys):
    complain(f"{quoted}: no such directory")
    said = capsys.readouterr().err
    assert "S3CR3T" not in said
    assert "...@host" in said
