"""MLX without a back end: what a plain `pip install prefixcache` gives on Linux, where the library of `mlx.core` comes with
an extra. Every command that needs MLX ends the same way then.
"""

from __future__ import annotations

import typer

from prefixcache.cli.text import complain


def refuse_without(error: BaseException) -> None:
    """Where this error is that mlx.core can't be loaded: say which extra to install, in a line, and end with 1."""
    if isinstance(error, ImportError) and (error.name in ("mlx", "mlx.core") or "libmlx" in str(error)):
        complain(
            'MLX has no back end here: on Linux run pip install "prefixcache[cpu]", or "prefixcache[cuda]" for an NVIDIA GPU '
            f"({error})"
        )
        raise typer.Exit(1) from None
