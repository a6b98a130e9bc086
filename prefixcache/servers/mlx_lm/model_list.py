"""The models that a server names: the one that it serves, and those in the Hugging Face cache. `/v1/models` is made of them,
and with `--any-model` a request for any other gets the one that is served.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from huggingface_hub import CacheNotFound, scan_cache_dir, try_to_load_from_cache

from prefixcache.servers.request_schema import RequestRefused, shown

PATH = "/v1/models"
DEFAULT = "default_model"  # in requests: the model that the server was started with
LISTED = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}  # files of a model that mlx-lm lists


def downloaded(folder: Path | None = None) -> list[str]:
    """Names of the models in the Hugging Face cache (`folder`; None: where theirs is) that mlx-lm lists; none where there
    is no such folder, or none that can be read.
    """
    try:
        repos = scan_cache_dir(folder).repos
    except (CacheNotFound, ValueError, OSError):
        return []
    models = [repo for repo in repos if repo.repo_type == "model" and "main" in repo.refs]
    return sorted(repo.repo_id for repo in models if {file.file_name for file in repo.refs["main"].files} >= LISTED)


def listing(path: str, served: str | None) -> dict[str, Any]:
    """Return what `/v1/models` answers, or for a path below it the model that it names. RequestRefused, with status 404,
    where there is no such model. `served`: the folder or the name that the server was started with.
    """
    name = unquote(path.partition("?")[0].removeprefix(PATH).removeprefix("/"))
    served_name = None if not served else str(Path(served).resolve()) if Path(served).exists() else served
    names = dict.fromkeys([*downloaded(), served_name] if served_name else downloaded())
    if not name:
        return {"object": "list", "data": [_model(each) for each in names]}
    if name not in names and not (served_name and name in (served, DEFAULT)):
        there = f"; this server has {served_name}" if served_name else ""
        raise RequestRefused(f"no model {shown(name)}{there}, and GET {PATH} lists all", 404)
    return _model(name)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "local"}


def is_here(name: str) -> bool:
    """Return whether a request's model is on this machine: the default one, a folder, or in the Hugging Face cache."""
    try:
        return name == DEFAULT or Path(name).exists() or isinstance(try_to_load_from_cache(name, "config.json"), str)
    except (OSError, ValueError):  # no name that a folder may have, or a repository
        return False
