"""The facts of `prefixcache inspect`, one plain object: sizes, ages and uses by namespace, without tokens and salts.
Nothing is drawn here.
"""

from __future__ import annotations

import json
from typing import Any

from prefixcache.ssd import IndexBroken, NamespaceSurvey, Survey

KINDS = ("blocks", "windows", "snapshots")

Facts = dict[str, Any]


def describe(whole: Survey, now: float) -> Facts:
    """Return all that is known, as plain values. Times are Unix seconds, None where there is none; sizes are bytes."""
    spaces = [_namespace(whole, space) for space in sorted(whole.namespaces, key=lambda space: -space.last_used)]
    raw_nbytes = [space["raw_nbytes"] for space in spaces]

    def total(name: str) -> int:
        return sum(space[name] for space in spaces)

    def known(name: str) -> list[float]:
        return [space[name] for space in spaces if space[name] is not None]

    totals: Facts = {
        "namespaces": len(spaces),
        "tokens": total("tokens"),
        **{
            kind: {key: sum(space[kind][key] for space in spaces) for key in ("images", "nbytes", "disk")}
            for kind in KINDS
        },
        "nbytes": total("nbytes"),
        "disk": total("disk"),
        "raw_nbytes": sum(raw_nbytes) if None not in raw_nbytes else None,
        "ratio": None,
        "oldest": min(known("oldest"), default=None),
        "newest": max(known("newest"), default=None),
        "last_used": max(known("last_used"), default=None),
        "hits": total("hits"),
        "quarantine": {"items": len(whole.quarantine), "disk": sum(item.disk for item in whole.quarantine)},
    }
    totals["ratio"] = _ratio(totals["raw_nbytes"], totals["blocks"]["nbytes"] + totals["windows"]["nbytes"])
    return {
        "directory": whole.directory,
        "error": None,
        "now": now,
        "live": bool(whole.holder),
        "holder": whole.holder or None,
        "clean": whole.clean,
        "problem": whole.problem or None,
        "disk": whole.disk,
        "index_bytes": whole.index_bytes,
        "totals": totals,
        "namespaces": spaces,
        "quarantine": [{**item._asdict(), "when": item.when or None} for item in whole.quarantine],
        "tmp": list(whole.debris),
    }


def _namespace(whole: Survey, space: NamespaceSurvey) -> Facts:
    raw_nbytes = _raw_nbytes(whole, space)
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
        "raw_nbytes": raw_nbytes,
        "ratio": _ratio(raw_nbytes, space.blocks.nbytes + space.windows.nbytes),
        "oldest": space.oldest or None,
        "newest": space.newest or None,
        "last_used": space.last_used_at or None,
        "last_used_tick": space.last_used,
        "hits": space.hits,
    }


def _raw_nbytes(whole: Survey, space: NamespaceSurvey) -> int | None:
    """Return bytes of the rows in a namespace's blocks and windows as a live cache has them. Of a windowed layer only the
    rows that are kept count. None for a layout or a window's ranges that can't be understood here.
    """
    if not space.tokens:
        return 0
    try:
        from prefixcache.blocks.window_masks import mask_from
        from prefixcache.codecs import Raw
        from prefixcache.layers.image_layout import Plan

        layout = json.loads(space.layout)
        windows: tuple[list[Any] | None, ...] = (None, [])  # all layers, and those without a window
        plan, sliceable = (
            Plan({**layout, "kinds": [_with_window(kind, window) for kind in layout["kinds"]]}, Raw())
            for window in windows
        )
        total = sliceable.fp16_bytes(space.tokens)
        row_nbytes = []  # of a token, by window
        for window in plan.windows:
            only = {**layout, "kinds": [_with_window(kind, list(window)) for kind in layout["kinds"]]}
            row_nbytes.append(Plan(only, Raw()).fp16_bytes(1) - sliceable.fp16_bytes(1))
        kinds = ("window", "rows") if any(window.keep for window in plan.windows) else ("window",)
        for span in whole.spans(space.root, kinds) if row_nbytes else ():
            if span.kind == "window":
                masks = mask_from(span.extra)
                total += sum(mask.bit_count() * size for mask, size in zip(masks, row_nbytes, strict=True))
            else:
                kept = [plan.kept_tokens(w, span.start, span.length) for w in range(len(row_nbytes))]
                total += sum(tokens * size for tokens, size in zip(kept, row_nbytes, strict=True))
    except IndexBroken:
        raise
    except Exception:  # a layout of another release, or a library that isn't here
        return None
    return total


def _with_window(kind: Facts, window: list[Any] | None) -> Facts:
    """Return the layer without its streams if it has another window than this; [] is none, None is any."""
    if "children" in kind:
        return {**kind, "children": [_with_window(child, window) for child in kind["children"]]}
    other = window is not None and "window" in kind and kind["window"] != window
    return {**kind, "streams": []} if other else kind


def _ratio(raw_nbytes: int | None, nbytes: int) -> float | None:
    return round(raw_nbytes / nbytes, 4) if raw_nbytes and nbytes else None


def _codec_name(text: str) -> str:
    try:
        from prefixcache.codecs.choice import describe_spec

        return describe_spec(json.loads(text))
    except Exception:
        spec = _parsed(text)
        return str(spec.get("name", "unknown")) if isinstance(spec, dict) else "unknown"


def _parsed(text: str) -> Any:
    """Return JSON text as a value that may stand in JSON again; the text itself when it is none."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value
