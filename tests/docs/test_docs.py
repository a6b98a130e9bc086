"""The pages lead somewhere: links, anchors, commands with their options, mentions in the sources, the index of decisions."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixcache.cli import app

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [path for folder in ("prefixcache", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "prefixcache")]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")
MLX_LM_S = {"--model", "--adapter-path", "--draft-model", "--prefill-step-size"}  # of `prefixcache serve`


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*?)\s*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{n}" if n else anchor for anchor, times in found.items() for n in range(times + 1)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_and_anchor_resolves(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_anchors_are_made_as_github_makes_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A hit doesn't change an answer\n## What a kill -9 takes\n```\n# no heading\n```\n## Two\n## Two\n"
    )
    assert anchors(page) == {"a-hit-doesnt-change-an-answer", "what-a-kill--9-takes", "two", "two-1"}


def test_pages_that_sources_name_are_there() -> None:
    for source in SOURCES:
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", source.read_text(encoding="utf-8")):
            assert (ROOT / page).is_file(), f"{name(source)} names {page}"


def test_files_and_names_of_the_architecture_are_there() -> None:
    page = re.sub(r"\s+", " ", FENCE.sub("", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    places = (ROOT / "prefixcache", ROOT)
    for path in set(re.findall(r"`([\w./]+(?:\.\w+|/))`", page)):
        is_path = "/" in path or path.endswith(".py")
        assert not is_path or any((place / path).exists() for place in places), path
    for dotted, path in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", page):
        source = (ROOT / "prefixcache" / path).read_text(encoding="utf-8")
        for part in dotted.split("."):
            assert re.search(
                rf"^\s*(?:(?:async )?def|class) {part}\b|^\s*(?:self\.)?{part}\b[^=\n]* = ", source, re.M
            ), f"{path} has no {part}"


def test_tests_that_pages_name_are_there() -> None:
    for page in PAGES[2:]:
        for test in re.findall(r"\btests/[\w/]+\.\w+\b", page.read_text(encoding="utf-8")):
            assert (ROOT / test).is_file(), f"{name(page)} names {test}"


def test_log_lines_that_operating_explains_are_in_the_sources() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    table = page.partition("## What the log lines mean")[2].partition("\n## ")[0]
    nodes = (node for path in PACKAGE for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    lines = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        for part in re.split(r"\.\.\.|\bDIR\b|\d+|OSError: \[Errno .*directory|OSError: .*?;|[:;()x]", line):
            assert len(part.strip()) < 8 or any(part.strip() in text for text in texts), (
                f"nothing logs {part.strip()!r}"
            )


@cache
def options(command: str) -> set[str]:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "240", "NO_COLOR": "1", "TERM": "dumb"})
    assert shown.exit_code == 0, f"no command {command!r}: {shown.output}"
    return set(re.findall(r"(?<![\w-])--?[\w-]+", shown.output)) | (MLX_LM_S if command == "serve" else set())


@pytest.mark.parametrize("page", PAGES[2:], ids=name)
def test_commands_of_its_fences_exist_and_have_their_options(page: Path) -> None:
    for fence in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^(?:\w+=\S+ )*prefixcache ([a-z]\w*.*)", fence, re.MULTILINE):
            command, *words = shlex.split(line.split("  ")[0], comments=True)
            asked = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert asked <= options(command), line


def test_each_decision_is_cited_by_the_code_that_it_explains_and_no_other_is() -> None:
    cited = {
        number
        for source in SOURCES
        for number in re.findall(r"\b[Dd]ecisions? (\d{4})\b", source.read_text(encoding="utf-8"))
    }
    assert cited == {record.name[:4] for record in DECISIONS.glob("[0-9]*.md")}


def test_the_index_of_decisions_has_each_record_once_under_its_title_and_date() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    records = sorted(DECISIONS.glob("[0-9]*.md"))
    assert len(re.findall(r"^- ", index, re.MULTILINE)) == len(records)
    for number, record in enumerate(records, 1):
        head, date = re.match(r"# (.*)\n\n(\d{4}-\d\d-\d\d)\n", record.read_text(encoding="utf-8")).groups()  # type: ignore[union-attr]
        assert head.startswith(f"{number:04d}: ")
        assert f"- [{number:04d}]({record.name}) {head[6:]} ({date})\n" in index
