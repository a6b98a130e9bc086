"""What Python source does with an object that it calls by a known name: the attributes that it reads, and its calls."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """One attribute of the object at one place. `call`: (positional arguments, keywords) where it is called there."""

    name: str
    where: str
    call: tuple[int, tuple[str, ...]] | None


def uses(path: Path, names: tuple[str, ...]) -> list[Use]:
    """What a file does with objects whose last name is one of `names`: `x.name.attribute`, `name.attribute`,
    `getattr(x.name, "attribute", ...)`, and with what a function assigns from them.
    """
    found: list[Use] = []
    for scope in _functions(ast.parse(path.read_text())):
        known = {*names, *_aliases(scope, names)}
        calls = {id(node.func): node for node in _own(scope) if isinstance(node, ast.Call)}
        for node in _own(scope):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and _name(node.value) in known:
                found.append(Use(node.attr, where, _arguments(calls.get(id(node)))))
            elif isinstance(node, ast.Call) and _name(node.func) == "getattr" and _name(node.args[0]) in known:
                found.append(Use(ast.literal_eval(node.args[1]), where, None))
    return found


def _functions(tree: ast.Module) -> Iterator[ast.AST]:
    yield tree
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """A function's nodes without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _own(child)


def _aliases(scope: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
    for node in _own(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value
            if isinstance(value, ast.Call) and _name(value.func) == "getattr":
                value = value.args[1] if isinstance(value.args[1], ast.Constant) else value
                if isinstance(value, ast.Constant) and value.value in names:
                    yield node.targets[0].id
            elif isinstance(value, (ast.Attribute, ast.Name)) and _name(value) in names:
                yield node.targets[0].id


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _arguments(call: ast.Call | None) -> tuple[int, tuple[str, ...]] | None:
    if call is None:
        return None
    return len(call.args), tuple(keyword.arg for keyword in call.keywords if keyword.arg)
