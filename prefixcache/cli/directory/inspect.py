"""`prefixcache inspect`: what is in a directory, live or dead. Writes nothing into it; shows no tokens and no salts.

`describe` turns the survey into one plain object; `--json` prints that object, and the tables are drawn from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from prefixcache.cli.directory.argument import refused
from prefixcache.cli.directory.blocktree import BlockTree, Run, block_tree, largest
from prefixcache.cli.text import age, complain, console, foreign, many, print_json, safe, size
from prefixcache.keys import BLOCK
from prefixcache.ssd import DirectoryError, Edge, IndexBroken, NamespaceSurvey, NoSuchNamespace, Survey, survey
from prefixcache.ssd.choosing import model_meant

ROWS = 200  # of a table or a tree, without --all
KINDS = ("blocks", "windows", "snapshots")

Facts = dict[str, Any]


def inspect(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", readable=False, help="The cache's directory (ssd_dir).", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this model; the name before @ will do.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="The blocks of each namespace as a tree.")] = False,
    everything: Annotated[bool, typer.Option("--all", help=f"Show all, not the first {ROWS} lines of each.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Which code runs TurboQuant on this machine, in place of DIR.")
    ] = False,
) -> None:
    """Show what is in a directory, by model: tokens, sizes, age, last use, hits.

    Works on a directory that a server has open and on one that nobody has; changes nothing.

    Exit code: 0 shown, 1 the index could not be read (what could be is shown), 2 nothing could be: no such
    directory, not one of prefixcache's, not readable, written by a newer release.
    """
    if (directory is None) != kernels:
        complain("give either DIR, the cache's directory (ssd_dir), or --kernels")
        raise typer.Exit(2)
    if directory is None:
        _show_kernels(as_json)
        return
    try:
        found = _of_model(survey(directory), model)
        trees = _trees(found) if tree else None
        facts = describe(found, trees, time.time())
    except (DirectoryError, NoSuchNamespace, IndexBroken, OSError) as error:
        complain(refused(directory, error))
        if as_json:
            print_json({"directory": str(directory), "error": refused(directory, error)})
        raise typer.Exit(2) from None
    if as_json:
        print_json(facts)
    else:
        _show(console(), facts, trees, everything)
    raise typer.Exit(1 if found.problem else 0)


def _of_model(found: Survey, name: str | None) -> Survey:
    """The same with this model's namespaces only."""
    if name is None:
        return found
    meant = model_meant(name, [space.model for space in found.namespaces])
    return replace(found, namespaces=tuple(space for space in found.namespaces if space.model == meant))


def _show_kernels(as_json: bool) -> None:
    from prefixcache.codecs.turboquant.backends import describe as paths  # needs MLX, which the rest does not

    if as_json:
        print_json({"kernels": paths()})
    else:
        for where, what in paths().items():
            console().print(f"TurboQuant, {where}: {what}")


def _trees(found: Survey) -> dict[str, BlockTree]:
    """By root key, in hex."""
    return {space.root: block_tree(found.edges(space.root), bytes.fromhex(space.root)) for space in found.namespaces}


# -- the facts --------------------------------------------------------------------------------------------------------


def describe(found: Survey, trees: dict[str, BlockTree] | None, now: float) -> Facts:
    """All that is known, as plain values. Times are Unix seconds, None where there is none; sizes are bytes."""
    spaces = [
        _namespace(found, space, trees[space.root].as_dict() if trees else None)
        for space in sorted(found.namespaces, key=lambda space: -space.last_used)
    ]
    raws = [space["raw_nbytes"] for space in spaces]
    raw = sum(raws) if None not in raws else None
    totals: Facts = {
        "namespaces": len(spaces),
        "tokens": sum(space["tokens"] for space in spaces),
        **{
            kind: {key: sum(s[kind][key] for s in spaces) for key in ("images", "nbytes", "disk")} for kind in KINDS
        },
        "nbytes": sum(space["nbytes"] for space in spaces),
        "disk": sum(space["disk"] for space in spaces),
        "raw_nbytes": raw,
        "ratio": None,
        "oldest": min((s["oldest"] for s in spaces if s["oldest"] is not None), default=None),
        "newest": max((s["newest"] for s in spaces if s["newest"] is not None), default=None),
        "last_used": max((s["last_used"] for s in spaces if s["last_used"] is not None), default=None),
        "hits": sum(space["hits"] for space in spaces),
        "quarantine": {"items": len(found.quarantine), "disk": sum(item.disk for item in found.quarantine)},
    }  # fmt: skip
    totals["ratio"] = _ratio(raw, totals["blocks"]["nbytes"] + totals["windows"]["nbytes"])
    return {
        "directory": found.directory,
        "error": None,
        "now": now,
        "live": bool(found.holder),
        "holder": found.holder or None,
        "clean": found.clean,
        "problem": found.problem or None,
        "disk": found.disk,
        "index_bytes": found.index_bytes,
        "totals": totals,
        "namespaces": spaces,
        "quarantine": [{**item._asdict(), "when": item.when or None} for item in found.quarantine],
        "tmp": list(found.debris),
    }


def _namespace(found: Survey, space: NamespaceSurvey, tree: Facts | None) -> Facts:
    raw = raw_bytes(space, found.edges)
    return {
        "root": space.root,
        "model": space.model,
        "codec": _parsed(space.codec),
        "codec_name": _codec_name(space.codec),
        "layout": _parsed(space.layout),
        "created": space.created or None,
        "tokens": space.tokens,
        **{kind: getattr(space, kind)._asdict() for kind in KINDS},
        "nbytes": space.nbytes,
        "disk": space.disk,
        "raw_nbytes": raw,
        "ratio": _ratio(raw, space.blocks.nbytes + space.windows.nbytes),
        "oldest": space.oldest or None,
        "newest": space.newest or None,
        "last_used": space.last_used_at or None,
        "last_used_tick": space.last_used,
        "hits": space.hits,
        "tree": tree,
    }


def raw_bytes(space: NamespaceSurvey, edges: Callable[[str, tuple[str, ...]], Iterable[Edge]]) -> int | None:
    """What the rows in a namespace's blocks and windows take as they are in a live cache.

    `edges` gives those of some kinds, for a root key: of a windowed layer the rows that are kept are counted. None for
    a layout or a window's ranges that can't be understood here.
    """
    if not space.tokens:
        return 0
    try:
        from prefixcache.codecs import Raw
        from prefixcache.layers.plan import Plan, mask_from

        layout = json.loads(space.layout)
        choices: tuple[list[Any] | None, ...] = (None, [])  # all layers, and those without a window
        plan, sliceable = (
            Plan({**layout, "kinds": [_with_window(kind, of) for kind in layout["kinds"]]}, Raw()) for of in choices
        )
        total = sliceable.fp16_bytes(space.tokens)
        each = []  # bytes of a token's rows, by window
        for window in plan.windows:
            only = {**layout, "kinds": [_with_window(kind, list(window)) for kind in layout["kinds"]]}
            each.append(Plan(only, Raw()).fp16_bytes(1) - sliceable.fp16_bytes(1))
        kinds = ("window", "rows") if any(window.keep for window in plan.windows) else ("window",)
        for edge in edges(space.root, kinds) if each else ():
            if edge.kind == "window":
                masks = mask_from(edge.extra)
                total += sum(mask.bit_count() * size for mask, size in zip(masks, each, strict=True))
            else:
                kept = [plan.kept_tokens(w, edge.start, edge.length) for w in range(len(each))]
                total += sum(tokens * size for tokens, size in zip(kept, each, strict=True))
    except IndexBroken:
        raise
    except Exception:  # a layout of another release, or a library that isn't here
        return None
    return total


def _with_window(kind: Facts, window: list[Any] | None) -> Facts:
    """The layer without its streams if it has another window than this; [] is none, None is any."""
    if "children" in kind:
        return {**kind, "children": [_with_window(child, window) for child in kind["children"]]}
    other = window is not None and "window" in kind and kind["window"] != window
    return {**kind, "streams": []} if other else kind


def _ratio(raw: int | None, nbytes: int) -> float | None:
    return round(raw / nbytes, 4) if raw and nbytes else None


def _codec_name(text: str) -> str:
    try:
        from prefixcache.codecs import codec_from_spec

        return str(codec_from_spec(json.loads(text)))
    except Exception:
        spec = _parsed(text)
        return str(spec.get("name", "unknown")) if isinstance(spec, dict) else "unknown"


def _parsed(text: str) -> Any:
    """JSON text as a value that may stand in JSON again; the text itself when it is none."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


# -- tables -----------------------------------------------------------------------------------------------------------


def _show(out: Console, facts: Facts, trees: dict[str, BlockTree] | None, everything: bool) -> None:
    limit = None if everything else ROWS
    out.print(_summary(facts))
    if facts["namespaces"]:
        out.print(_namespaces(facts, limit))
        out.print("In the order of last use, and used: its age. raw: in a live cache. hits: of images.", style="dim")
    if trees is not None and facts["namespaces"]:
        _show_trees(out, facts, trees, everything)
    if facts["quarantine"]:
        out.print(_quarantine(facts, limit))
    if facts["tmp"]:
        out.print(_tmp(facts, limit))


def _summary(facts: Facts) -> Table:
    totals = facts["totals"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("directory", foreign(facts["directory"]))
    table.add_row("state", _state(facts))
    if facts["problem"]:
        cure = "; it is rebuilt from the files when a cache opens the directory, or by prefixcache reconcile"
        table.add_row("index", foreign(f"can't be read: {facts['problem']}{cure}", "red"))
    parts = [
        f"images {size(totals['disk'])}" if not facts["problem"] else "",
        f"index {size(facts['index_bytes'])}",
        f"quarantine {size(totals['quarantine']['disk'])}" if facts["quarantine"] else "",
    ]
    rest = "folders and the lock" if not facts["problem"] else "images, folders and the lock"
    table.add_row("on disk", f"{size(facts['disk'])}: {', '.join(filter(None, parts))}, the rest {rest}")
    if not facts["problem"]:
        images = sum(totals[kind]["images"] for kind in KINDS)
        what = (
            f"{many(totals['tokens'], 'token')} in {many(totals['blocks']['images'], 'block')}, "
            f"{many(images, 'image')} in {many(totals['namespaces'], 'namespace')}"
        )
        table.add_row("content", what if images else "nothing yet")
    return table


def _state(facts: Facts) -> Text:
    if facts["live"]:
        return foreign(f"open: {facts['holder']}", "green")
    if facts["clean"]:
        return Text("closed")
    return Text("nobody has it open, and it was not closed cleanly: the next opening looks it over", style="yellow")


def _namespaces(facts: Facts, limit: int | None) -> Table:
    """Two lines a namespace, so that all fits in 80 columns. In the order of use."""
    now, totals, spaces = facts["now"], facts["totals"], facts["namespaces"]
    several = len(spaces) > 1
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_footer=several)
    table.add_column("model\ncodec, namespace", overflow="fold", footer=Text("total"))
    for heading, top, bottom in (
        ("tokens\nblocks", f"{totals['tokens']:,}", f"{totals['blocks']['images']:,}"),
        ("windows\nsnapshots", f"{totals['windows']['images']:,}", f"{totals['snapshots']['images']:,}"),
        ("bytes\non disk", size(totals["nbytes"]), size(totals["disk"])),
        ("raw\nratio", *_against_raw(totals)),
        ("newest\noldest", age(totals["newest"], now), age(totals["oldest"], now)),
        ("used\nhits", age(totals["last_used"], now), f"{totals['hits']:,}"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, footer=Text(f"{top}\n{bottom}"))
    for space in spaces[:limit]:
        raw, ratio = _against_raw(space)
        table.add_row(
            Text.assemble(
                foreign(space["model"], "bold"), "\n", foreign(f"{space['codec_name']}, {space['root'][:8]}", "dim")
            ),
            f"{space['tokens']:,}\n{space['blocks']['images']:,}",
            f"{space['windows']['images']:,}\n{space['snapshots']['images']:,}",
            f"{size(space['nbytes'])}\n{size(space['disk'])}",
            f"{raw}\n{ratio}",
            f"{age(space['newest'], now)}\n{age(space['oldest'], now)}",
            f"{age(space['last_used'], now)}\n{space['hits']:,}",
        )
    if limit is not None and len(spaces) > limit:
        table.add_row(foreign(f"... {many(len(spaces) - limit, 'namespace')} more, used longer ago: --all", "dim"))
    return table


def _against_raw(space: Facts) -> tuple[str, str]:
    raw, ratio = space["raw_nbytes"], space["ratio"]
    return (size(raw) if raw is not None else "?"), (f"{ratio:.2f}x" if ratio else "-")


def _quarantine(facts: Facts, limit: int | None) -> Table:
    items = facts["quarantine"]
    table = _list("quarantine", "what was quarantined, and why", "age", "on disk")
    for item in items[-limit:] if limit is not None else items:
        where = item["origin"] or f"quarantine/{item['name']}"
        what = Text.assemble(foreign(where), "\n", foreign(item["reason"] or "no reason was noted", "dim"))
        table.add_row(what, age(item["when"], facts["now"]), size(item["disk"]))
    if limit is not None and len(items) > limit:
        table.add_row(foreign(f"... {len(items) - limit:,} more, older: --all", "dim"))
    return table


def _tmp(facts: Facts, limit: int | None) -> Table:
    names = facts["tmp"]
    meaning = "being written now" if facts["live"] else "left by interrupted writes; the next opening deletes them"
    table = _list("tmp", meaning)
    for name in names[:limit]:
        table.add_row(foreign(name))
    if limit is not None and len(names) > limit:
        table.add_row(foreign(f"... {many(len(names) - limit, 'file')} more: --all", "dim"))
    return table


def _list(title: str, first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column(f"{title}: {first}", overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


# -- the tree ---------------------------------------------------------------------------------------------------------


def _show_trees(out: Console, facts: Facts, trees: dict[str, BlockTree], everything: bool) -> None:
    """Drawn as wide as it has to be, so that a deep one with --all is cut by the terminal and not squeezed."""
    levels = 1 << 30 if everything else max((out.width - 64) // 4, 6)
    chosen = None if everything else largest(list(trees.values()), ROWS, levels)
    for space in facts["namespaces"]:
        tree = trees[space["root"]]
        if chosen is not None and tree.tops and id(tree.tops[0]) not in chosen:
            continue
        drawn, deepest = _draw(_heading(space, tree), tree, chosen)
        out.print()
        wide = Console(
            file=out.file, width=max(out.width, 4 * deepest + 160), markup=False, emoji=False, highlight=False
        )
        wide.print(drawn, crop=False, no_wrap=True, overflow="ignore")
    left_out = sum(bool(tree.tops) and chosen is not None and id(tree.tops[0]) not in chosen for tree in trees.values())
    if left_out:
        out.print(f"\n... {many(left_out, 'smaller tree')} not shown: --all")


def _heading(space: Facts, tree: BlockTree) -> Text:
    said = [f"deepest {many(tree.depth, 'token')}", many(tree.forks, "fork")]
    if tree.forks:
        said.append(f"the widest of {tree.fan_out:,}")
    if tree.apart:
        said.append(f"{many(tree.apart, 'image')} without a block")
    said.append(size(tree.nbytes))
    name = foreign(space["model"], "bold")
    return Text.assemble(name, f"  {safe(space['codec_name'])}, {space['root'][:8]}", f"\n{', '.join(said)}")


def _draw(heading: Text, tree: BlockTree, chosen: set[int] | None) -> tuple[Tree, int]:
    """The tree, and how deep it is drawn."""
    drawn = Tree(heading, guide_style="dim")
    deepest = 0
    todo: list[tuple[Tree, list[Run]]] = [(drawn, tree.tops)]
    while todo:
        place, runs = todo.pop()
        here = [run for run in runs if chosen is None or id(run) in chosen]
        for run in here:
            todo.append((place.add(_line(run)), run.branches))
            deepest = max(deepest, run.depth + 1)
        rest = [run for run in runs if chosen is not None and id(run) not in chosen]
        if rest:
            blocks = sum(run.blocks + run.below_blocks for run in rest)
            what = many(len(rest), "branch") if not here else f"{len(rest):,} more"
            nbytes = sum(run.total for run in rest)
            place.add(Text(f"... {what}: {many(blocks, 'block')}, {size(nbytes)}: --all", style="dim"))
            deepest = max(deepest, rest[0].depth + 1)
    return drawn, deepest


def _line(run: Run) -> Text:
    first = run.start // BLOCK
    where = f"block {first:,}" if run.blocks == 1 else f"blocks {first:,}-{first + run.blocks - 1:,}"
    said = [many(run.tokens, "token"), f"{size(run.nbytes)} ({size(run.disk)} on disk)"]
    said += [many(number, what) for number, what in ((run.windows, "window"), (run.snapshots, "snapshot")) if number]
    if run.hits:
        said.append(many(run.hits, "hit"))
    line = Text.assemble((where, "cyan"), f", {', '.join(said)}")
    if run.branches:
        below = f"{many(run.below_blocks, 'block')}, {size(run.below_nbytes)}"
        line.append(f"; then {many(len(run.branches), 'branch')}: {below}", "dim")
    if run.loose:
        line.append("; what it hangs on is not on disk", "yellow")
    return line
