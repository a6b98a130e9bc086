"""What is private in mlx-lm is used in few modules only, so that a look at its next release is a look at those."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mlx_lm

import prefixcache

PACKAGE = Path(prefixcache.__file__).parent
LIBRARY = Path(mlx_lm.__file__).parent
UPSTREAM = ("upstream.py", "servers/mlx_lm/upstream.py", "servers/mlx_vlm/upstream.py")
# The place of a window's next row is part of what is stored of a layer cache, whose adapters import no mlx-lm.
STORED = {"layers/adapters.py": {"_idx"}}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The private names that a module gives to functions, classes and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and private(node.name):
            yield node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used_in(tree: ast.AST) -> Iterator[str]:
    """The private names that a module takes of other objects than its own, and of what it imports from mlx-lm."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm"):
            yield from (alias.name for alias in node.names if private(alias.name))


def test_private_names_of_mlx_lm_are_used_in_the_upstream_modules_only():
    modules = [*LIBRARY.glob("*.py"), LIBRARY / "models" / "base.py", LIBRARY / "models" / "cache.py"]
    theirs = {name for path in modules for name in defined_in(ast.parse(path.read_bytes()))}
    assert theirs > {"_load", "_generation_batch", "_download"}
    strays = {}
    for path in PACKAGE.rglob("*.py"):
        module, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_bytes())
        names = (set(used_in(tree)) & theirs) - set(defined_in(tree)) - STORED.get(module, set())
        if names and module not in UPSTREAM:
            strays[module] = names
    assert not strays


def test_classes_of_mlx_lms_server_are_subclassed_in_the_upstream_module_only():
    """What a server does is asked of ours, which are given to thin subclasses there."""
    for path in (PACKAGE / "servers").rglob("*.py"):
        module, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_bytes())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm")
            for alias in node.names
        }
        bases = {
            base.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for base in map(ast.unparse, node.bases)
        }
        assert module in UPSTREAM or not bases & imported, (module, bases & imported)
