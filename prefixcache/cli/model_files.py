"""A model's files as the option --model names them: a folder, or a name on Hugging Face."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from prefixcache.cli.text import Refused, expanded, one_line


def model_folder(model: str) -> Path:
    """Return the folder of a model's files, downloaded where need be. Refused where there is none."""
    from prefixcache.upstream import download

    folder = expanded(model, "--model")
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise Refused(
            f"--model {model}: no such folder; give a model's folder, or its name on Hugging Face (owner/name)"
        )
    try:
        return download(model)
    except Exception as error:  # what the Hub raises has no common class
        raise Refused(
            f"--model {model}: no such folder, and Hugging Face doesn't give it: {one_line(error)}"
        ) from error


def load_tokenizer(model: str, folder: Path, config: dict[str, Any]) -> Any:
    """Return the tokenizer of a model's folder, as mlx-lm's servers have it. Refused where it can't be loaded."""
    from mlx_lm.utils import load_tokenizer as load

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it would warn that a prompt is longer than the context
    try:
        return load(folder, config)
    except Exception as error:  # what tokenizers raise has no common class
        raise Refused(f"--model {model}: its tokenizer can't be loaded: {one_line(error)[:200]}") from error
