"""How the product is built: imports point one way, a class name stands for one class, calls take few parameters."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "prefixcache").rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}


def imports_of(module: str) -> Iterator[str]:
    """The product's modules that a module imports: also inside functions, and for type checkers alone."""
    for statement in ast.walk(TREES[module]):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name in FILES)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level < 2, f"{module}: an import from a folder above; write the whole name"
            source = f"{module.rpartition('.')[0]}.{statement.module}" if statement.level else str(statement.module)
            for alias in statement.names:
                yield from [name for name in (f"{source}.{alias.name}", source) if name in FILES][:1]


def test_imports_go_in_no_circle() -> None:
    graph = {module: set(imports_of(module)) - {module} for module in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_a_class_name_stands_for_one_class() -> None:
    homes = defaultdict(list)
    for module, tree in TREES.items():
        for statement in ast.walk(tree):
            if isinstance(statement, ast.ClassDef):
                homes[statement.name.lstrip("_")].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_call_takes_at_most_six_parameters() -> None:
    foreign = {"scaled_dot_product_attention"}  # which stands in the place of mlx-lm's
    for module, tree in TREES.items():
        for call in ast.walk(tree):
            if isinstance(call, ast.FunctionDef | ast.AsyncFunctionDef) and call.name not in foreign:
                names = {each.arg for each in (*call.args.posonlyargs, *call.args.args, *call.args.kwonlyargs)}
                assert len(names - {"self", "cls"}) <= 6, f"{module}: {call.name}"
