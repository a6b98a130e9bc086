"""Who may import what: the layers of the design, and where MLX may be seen."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import prefixcache

PACKAGE = Path(prefixcache.__file__).parent
ROOT = PACKAGE.parent

# By the first part of a module's name, the higher may import the lower: the lowest stand at the bottom.
LEVELS = {
    "image_memory": -1,
    "byte_sizes": 0,
    "sync_folder": 0,
    "identity": 0,
    "image_format": 0,
    "kernels": 0,
    "keys": 0,
    "memory": 0,
    "blocks": 1,
    "codecs": 1,
    "media": 1,
    "metrics": 1,
    "settings": 1,
    "trace": 1,
    "upstream": 1,
    "calibration": 2,
    "live": 2,
    "ssd": 2,
    "layers": 3,
    "ranks": 3,
    "tiers": 3,
    "remote": 4,
    "store_fetch_remove": 5,
    "open_cache": 6,
    "cache": 7,
    "planning": 7,
    "": 8,
    "servers": 9,
    "cli": 10,
    "__main__": 11,
}

# Beside the levels: what these may import of the package at all.
ONLY = {
    "image_format": {"image_memory"},
    "image_memory": set(),
    "keys": set(),
    "media": {"keys"},
    "memory": {"image_memory"},
    "kernels": set(),
    "identity": set(),
    "upstream": set(),
    "byte_sizes": set(),
    "sync_folder": set(),
    "settings": {"byte_sizes"},
    "metrics": {"", "byte_sizes"},
    "blocks": {"keys", "image_format", "image_memory"},
    "trace": {"keys"},
    "ssd": {"byte_sizes", "sync_folder", "keys", "image_format", "image_memory", "memory", "metrics"},
    "remote": {"blocks", "image_format", "image_memory", "keys", "metrics", "ssd", "tiers"},
    "codecs": {"sync_folder", "kernels"},
    "calibration": {"codecs"},
    "live": {"codecs", "memory", "upstream"},
    "tiers": {
        "blocks",
        "byte_sizes",
        "image_format",
        "image_memory",
        "keys",
        "media",
        "memory",
        "metrics",
        "settings",
        "ssd",
    },
    "layers": {"keys", "image_format", "codecs", "blocks"},
    "ranks": {"codecs"},
}

# Looked up in a function, when one is to be checked, not when the module is loaded.
LATE = {("settings", "codecs"), ("metrics", "")}

WITHOUT_MLX = [
    "keys",
    "image_format",
    "image_memory",
    "media",
    "memory",
    "blocks",
    "settings",
    "ssd",
    "identity",
    "trace",
    "metrics",
    "tiers",
    "remote",
    "byte_sizes",
    "sync_folder",
]


def modules() -> dict[str, Path]:
    """Module names, relative to the package, and their files."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(module: str, path: Path) -> set[tuple[str, bool]]:
    """The package's modules that one imports, and whether it does so when it is loaded. Types only don't count."""
    found: set[tuple[str, bool]] = set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part]

    def visit(node: ast.AST, late: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found.update((name.partition(".")[2], not late) for name in names if name.split(".")[0] == "prefixcache")
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = ["prefixcache", *package[: len(package) - node.level + 1], *base]
            if base[0] == "prefixcache":
                for alias in node.names:
                    whole = ".".join([*base[1:], alias.name])
                    found.add((whole if whole in MODULES else ".".join(base[1:]), not late))
        for child in ast.iter_child_nodes(node):
            visit(child, late)

    visit(ast.parse(path.read_text()), False)
    return found


MODULES = modules()


def test_every_module_has_a_level():
    assert {name.split(".")[0] for name in MODULES} <= LEVELS.keys()
    assert {"keys", "image_format", "blocks.budget", "blocks.graph", "settings", "cache", "ssd.tier"} <= MODULES.keys()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module):
    own = module.split(".")[0]
    for name, _ in imported(module, MODULES[module]):
        other = name.split(".")[0]
        if other == own or (own, other) in LATE:
            continue
        assert other in ONLY.get(own, LEVELS.keys()), f"prefixcache.{module} imports prefixcache.{name}"
        assert LEVELS[other] < LEVELS[own], f"prefixcache.{module} imports prefixcache.{name}"


def test_what_is_looked_up_late_is_not_loaded_with_the_module():
    for own, other in LATE:
        assert not [name for name, at_load in imported(own, MODULES[own]) if at_load and name.split(".")[0] == other]


def test_no_module_is_called_for_what_has_no_home():
    assert not {"utils", "util", "helpers", "common", "misc"} & {part for name in MODULES for part in name.split(".")}


def without_mlx(code: str) -> subprocess.CompletedProcess[str]:
    source = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.without_mlx\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)


def test_the_blocker_blocks():
    done = without_mlx("from prefixcache import PrefixCache")
    assert done.returncode
    assert "mlx" in done.stderr
    assert "is blocked" in done.stderr
    assert "is blocked" in without_mlx("import prefixcache.codecs").stderr


def test_keys_image_blocks_settings_and_ssd_load_without_mlx():
    wanted = sorted(name for name in MODULES if name.split(".")[0] in WITHOUT_MLX)
    assert len(wanted) > len(WITHOUT_MLX)
    done = without_mlx(f"""
        import importlib, json
        for name in {wanted!r}:
            importlib.import_module("prefixcache." + name)
        print(json.dumps([name for name in sys.modules if name.startswith("prefixcache.")]))
    """)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert {f"prefixcache.{name}" for name in wanted} <= set(loaded)
    assert {name.split(".")[1] for name in loaded} <= {*WITHOUT_MLX}


def test_settings_without_a_codec_are_made_without_mlx():
    done = without_mlx("""
        from prefixcache.settings import Settings
        settings = Settings(ram="8GB", ssd_dir="x", ssd="1GB")
        assert settings.codec is None
        print(settings.ram)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8000000000\n"


def test_a_planner_runs_tree_and_budget_without_mlx():
    done = without_mlx("""
        from prefixcache.blocks.budget import Budget
        from prefixcache.keys import as_tokens
        from prefixcache.blocks.graph import Graph
        from prefixcache.blocks.lookup import image_depth
        from prefixcache.blocks.node import RAM, Slot
        graph = Graph(Budget(1 << 20))
        tree = graph.tree(bytes(32))
        with graph.budget.reserve(1 << 16) as reservation:
            node = graph.grow(tree.root, as_tokens(range(256)).tobytes(), reservation)
            slot = Slot("rows", node, node.key, 1000)
            graph.attach(slot, reservation)
            graph.place(slot, RAM, image="anything", reservation=reservation)
        walk = graph.walk(tree, as_tokens(range(300)).tobytes())
        print(image_depth(walk, RAM, 300))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "256\n"
