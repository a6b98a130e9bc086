"""What a model is called: `model_identity` makes the `model=` of every call of the cache from the model's files and from
mlx-lm's code for it.

Who opens a model calls it, once, with the folder that was loaded. Only files are read here: no MLX, no network, and
nothing of the cache. What a sample of the weights can see, and what it can't, stands in `model_identity`.
Decision 0006 says why.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("prefixcache")

# All of these are part of the format: whoever changes one, or what is hashed, counts the key up.
_KEY = b"prefixcache.model-identity.1"
_DIGEST = 12  # bytes
_CODE = 8  # bytes of the code's hash
WHOLE = 64 << 20  # weights of no more bytes than this, in all their files, are read whole
PLACE = 4096  # bytes read at one place of a tensor
PLACES = 64  # in one tensor, at most
READS = 20_000  # places in one model, as long as every tensor has one

_NAME = 64  # characters
_TEXT = 100_000_000  # bytes of a header, which is safetensors' own limit, or of a file of JSON or code
_READERS = 8  # an SSD answers many small reads at once
_BATCH = 16  # tensors for one reader at a time: at most 4 MiB
_WEIGHTS = "model*.safetensors"  # what mlx-lm loads
_INDEX = "*.safetensors.index.json"
_REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
_AGAIN = "copy or download it again"
_BORN = time.time_ns()
_nameless = itertools.count()

# Who wrote config.json and where it came from; the model that is made of it stays the same.
_NOT_STATE = {"transformers_version", "_name_or_path", "_commit_hash"}


class Tensor(NamedTuple):
    """A tensor of a weights file: where its bytes are in the file, and how many."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    size: int


class Weights(NamedTuple):
    """A weights file: its bytes in all, and its tensors by name."""

    path: Path
    size: int
    tensors: list[Tensor]


def model_identity(path: str | Path, adapter: str | Path | None = None) -> str:
    """Return the text to give as `model=`: `name@hash|code hash`, or `name@hash+hash|code hash` with an adapter. New weights
    have another one, and so has new code.

    `path` is the model's folder, as mlx-lm loads it: config.json and model*.safetensors. Where there is no such folder, it
    is a Hugging Face repo id, and the local cache of their hub is asked, never the network. Loading a repo may download
    newer weights: ask for its identity when it is loaded. `adapter` is a folder with adapter_config.json and
    adapters.safetensors. The name is the folder's or the repo's, in at most 64 of A-Z a-z 0-9 . _ - and is for the reader
    alone: the hashes (24 hex digits) don't depend on it, nor on where the folder is or when it was written.

    `code` is the program that computes and reads the state: the module of mlx-lm (16 hex digits) that config.json's
    model_type or `model_file` means, with all of mlx-lm that it imports, byte for byte as this process first found it. So
    processes with different releases of mlx-lm never hit each other's prompts, unless the releases have the same code for
    this model. Where that module isn't found, mlx-lm's version stands there; without mlx-lm, nothing.

    Another hash of the weights follows from any change of config.json (by meaning, not by spelling; the library's version
    and the path it was saved from don't count), of hf_quant_config.json, of the code that config.json names as
    `model_file`, of an index's weight_map, of a weights file's name or size, and of a tensor's name, dtype or shape.
    Of the tensors' values: weights of up to 64 MiB in all, or an adapter's, are read whole. In larger ones every tensor is
    sampled at n places of 4 KiB, n = 20000 / tensors, from 1 to 64; tensors of up to n * 4 KiB are read whole. There is
    one place in each nth of the tensor, drawn by the tensor's name, so a change all through a tensor, as training, fusing
    a LoRA or quantising makes it, is seen in whichever tensor it is; so is a change that fills 2/n of a tensor.

    What may go unseen is a change between the places: some rows of a large embedding, one expert of many that are
    stacked in one tensor, a few flipped bits. Nor does this prove who made the weights: whoever knows the places can
    leave them alone. What isn't in the folder isn't seen: options given to the loader or to the maker of the prompt cache
    (say `like=` to a fetch), modules beside mlx-lm's that `model_file` imports, MLX itself.

    A 400B model of 5000 tensors takes 20000 reads, 80 MB, about a second on an SSD; beyond 20000 tensors each takes one
    read. Raises TypeError for a path that is neither str nor Path, FileNotFoundError when the model, the adapter or a file
    of theirs isn't there, ValueError when a file is damaged (truncated, no JSON object, no safetensors header): each says
    which and what to do. What the system refuses to read is an OSError.
    """
    folder = folder_of(path)
    config = _json(folder / "config.json")
    identity = f"{_name(folder)}@{_model(folder, config).hex()}"
    if adapter is not None:
        identity += f"+{_adapter(_adapter_folder(adapter)).hex()}"
    return identity + _program(folder, config)


def mlx_vlm_identity(path: str | Path, adapter: str | Path | None = None) -> str:
    """Return what to give as `model=` where mlx-vlm computes: `model_identity` and the release of its code."""
    return f"{model_identity(path, adapter)}|mlx-vlm {version_of('mlx-vlm')}".rstrip()


def nameless() -> str:
    """Return a name for weights whose files can't be found, once and in this process only, so that they meet no others."""
    return f"process-{os.getpid()}-{_BORN:x}-{next(_nameless)}"


def identity_or_nameless(identify: Callable[[], str]) -> str:
    """Return what `identify` does; where it can't find the weights, a name that is good once, and say so."""
    try:
        return identify()
    except (OSError, ValueError, TypeError) as error:
        log.warning("no identity, so what is kept is of no use to another process: %s", error)
        return nameless()


def version_of(distribution: str) -> str:
    """Return the version of an installed package; "" where it isn't installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- folders and names --------------------------------------------------------------------------------------------------


def folder_of(path: str | Path) -> Path:
    """Return the folder that a model's path or repo id means now: of a repo, the local snapshot that `main` names.
    Errors as of `model_identity`.
    """
    folder = _folder(path)
    if folder is not None:
        return folder
    if _REPO_ID.fullmatch(str(path)):
        return _snapshot(str(path))
    raise FileNotFoundError(
        f"model {str(path)!r}: no such folder; give one that holds config.json and {_WEIGHTS}, or a Hugging Face repo id"
    )


def _adapter_folder(path: str | Path) -> Path:
    folder = _folder(path)
    if folder is None:
        raise FileNotFoundError(
            f"adapter {str(path)!r}: no such folder; give one that holds adapter_config.json and adapters.safetensors"
        )
    return folder


def _folder(path: str | Path) -> Path | None:
    """Return the folder itself, whichever way was given to it; None when there is none."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f"path of type {type(path).__name__}: give a folder as a str or Path")
    folder = Path(os.path.expanduser(path))
    return folder.resolve() if str(path) and folder.is_dir() else None


def _snapshot(repo_id: str) -> Path:
    """Return the folder in which the Hugging Face cache keeps a repo's files."""
    from huggingface_hub import constants, snapshot_download

    wanted = ["config.json", "hf_quant_config.json", _INDEX, _WEIGHTS]  # complete as far as it is read here
    try:
        return Path(snapshot_download(repo_id, local_files_only=True, allow_patterns=wanted)).resolve()
    except (FileNotFoundError, ValueError):  # not there, in part only, or no valid repo id
        raise FileNotFoundError(
            f"model {repo_id!r}: no such folder, and the Hugging Face cache in {constants.HF_HUB_CACHE} doesn't hold "
            "all of such a repo; download it first, or give the model's folder"
        ) from None


def _name(folder: Path) -> str:
    name = folder.name
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        name = folder.parent.parent.name.split("--", 2)[-1]  # models--org--name/snapshots/commit
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_NAME] or "model"


# -- what is hashed -----------------------------------------------------------------------------------------------------


def _model(folder: Path, config: dict[str, Any]) -> bytes:
    separate = folder / "hf_quant_config.json"  # where ModelOpt says how the weights are quantised
    quantised = _text(_json(separate)) if separate.exists() else b""
    indexes = [_index(path) for path in sorted(folder.glob(_INDEX))]
    files = sorted(folder.glob(_WEIGHTS))
    if not files:
        raise FileNotFoundError(f"{folder} holds no {_WEIGHTS}, which mlx-lm loads; convert the model, or {_AGAIN}")
    code = _code(folder, config)
    return _hash("model", _text(config), quantised, code, _hash("indexes", *indexes), _weights(files))


def _adapter(folder: Path) -> bytes:
    text = _text(_json(folder / "adapter_config.json"))
    return _hash("adapter", text, _weights([folder / "adapters.safetensors"]))


def _code(folder: Path, config: dict[str, Any]) -> bytes:
    """Return the module that builds the model in place of mlx-lm's own; empty for none."""
    name = config.get("model_file")
    if name is None:
        return b""
    if not isinstance(name, str):
        raise ValueError(f"{folder / 'config.json'}: model_file is a {type(name).__name__}, not a name; {_AGAIN}")
    return _hash("code", _content(folder / name))


def _index(path: Path) -> bytes:
    return _hash("index", _text(path.name), _text(_json(path).get("weight_map")))


def _weights(paths: list[Path]) -> bytes:
    """Return the hash of weights files: what their headers say, and a sample of every tensor."""
    files = [_header(path) for path in paths]
    count = _places_each([tensor.size for file in files for tensor in file.tensors])
    batches = [
        (file.path, file.tensors[at : at + _BATCH], count)
        for file in files
        for at in range(0, len(file.tensors), _BATCH)
    ]
    with ThreadPoolExecutor(_READERS, "prefixcache-identity") as readers:
        samples = list(readers.map(lambda batch: _sample(*batch), batches))
    described = [_described(file) for file in files]
    return _hash("weights", _hash("files", *described), _hash("samples", *samples))


def _described(file: Weights) -> bytes:
    said = [(tensor.name, tensor.dtype, tensor.shape, tensor.size) for tensor in file.tensors]
    return _hash("file", _text(file.path.name), _text(file.size), _text(said))


def _sample(path: Path, tensors: list[Tensor], count: int) -> bytes:
    """Return the hash of these tensors' bytes, at `count` places of each."""
    with _opened(path) as (file, _):
        read = [_read(path, file, *place) for tensor in tensors for place in _places(tensor, count)]
    return _hash("sample", *read)


def _places_each(sizes: list[int]) -> int:
    """Return how many places of each tensor are read, by the bytes of all."""
    if sum(sizes) <= WHOLE:
        return WHOLE // PLACE  # no tensor has more
    return max(1, min(PLACES, READS // len(sizes)))


def _places(tensor: Tensor, count: int) -> Iterator[tuple[int, int]]:
    """Give what is read of a tensor: (where in the file, bytes), one place in each of `count` equal parts.

    They are drawn, since places at equal distances fall into the same columns of every row.
    """
    if tensor.size <= count * PLACE:
        if tensor.size:
            yield tensor.start, tensor.size
        return
    for part in range(count):
        first, end = tensor.size * part // count, tensor.size * (part + 1) // count
        drawn = int.from_bytes(_hash("place", _text([tensor.name, part])), "little")
        yield tensor.start + first + drawn % (end - first - PLACE + 1), PLACE


def _hash(kind: str, *fields: bytes) -> bytes:
    """Return a keyed BLAKE2b of fields, each behind its length: no two lists of fields run together."""
    state = hashlib.blake2b(digest_size=_DIGEST, key=_KEY)
    for field in (kind.encode(), *fields):
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


# -- the program --------------------------------------------------------------------------------------------------------

_LIBRARY = "mlx_lm"
_REMAPPED = "MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"  # in its utils.py: which module a model_type means


class _ParsedModule(NamedTuple):
    """A module's file: the hash of its bytes, and the files of mlx-lm that it imports."""

    digest: bytes
    imports: tuple[Path, ...]


def _program(folder: Path, config: dict[str, Any]) -> str:
    """Behind the weights' hash: `|code hash`, `|mlx-lm version` where the code isn't found, nothing without mlx-lm."""
    try:
        package = _package()
        start = folder / config["model_file"] if config.get("model_file") is not None else _module_of(package, config)
        return f"|code {_code_hash(package, start)}"
    except (LookupError, OSError, TypeError, ValueError, SyntaxError, RecursionError):
        return f"|mlx-lm {version}" if (version := version_of("mlx-lm")) else ""


def _package() -> Path:
    """Return the folder of mlx-lm, which is not imported for that. LookupError where it isn't installed as files."""
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(_LIBRARY)
    return Path(next(iter(spec.submodule_search_locations)))


def _module_of(package: Path, config: dict[str, Any]) -> Path:
    """Return the module that mlx-lm makes a model of. LookupError where the config says none."""
    by_type, by_architecture = (_remapped(package / "utils.py").get(name, {}) for name in _REMAPPED)
    model_type, architectures = config["model_type"], config.get("architectures") or ()
    architectures = (architectures,) if isinstance(architectures, str) else architectures
    module = next(
        (by_architecture[model_type, name] for name in architectures if (model_type, name) in by_architecture),
        by_type.get(model_type, model_type),
    )
    if not re.fullmatch(r"\w+", module):
        raise LookupError(module)
    return package / "models" / f"{module}.py"


@cache
def _remapped(path: Path) -> dict[str, dict[Any, str]]:
    """Return the tables of a file that say which module is meant. ValueError for one that is no plain dictionary."""
    tables: dict[str, dict[Any, str]] = {}
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            tables |= {name: ast.literal_eval(statement.value) for name in names if name in _REMAPPED}
    return tables


def _code_hash(package: Path, start: Path) -> str:
    """Return the hash of a module and of all modules of mlx-lm that it reaches. `start`, where it lies elsewhere, is the
    model's, and hashed with it.
    """
    first, files = _source(package, start), {}
    if start.parent.parent == package:
        files[start] = first.digest
    unread = [*first.imports]
    while unread:
        path = unread.pop()
        if path not in files:
            files[path], imports = _source(package, path)
            unread += imports
    named = [(path.relative_to(package).as_posix(), digest) for path, digest in files.items()]
    return _hash("code", *(field for name, digest in sorted(named) for field in (name.encode(), digest))).hex()[
        : 2 * _CODE
    ]


def _source(package: Path, path: Path) -> _ParsedModule:
    """Return a file of mlx-lm as it was first read, which is as this process has imported it, or will."""
    return _read_once(package, path) if path.is_relative_to(package) else _parsed(package, path)


@cache
def _read_once(package: Path, path: Path) -> _ParsedModule:
    return _parsed(package, path)


def _parsed(package: Path, path: Path) -> _ParsedModule:
    data = path.read_bytes()
    package_path = (_LIBRARY, *path.relative_to(package).parent.parts) if path.is_relative_to(package) else ()
    imported: set[Path] = set()
    for node in ast.walk(ast.parse(data)):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package_path[: len(package_path) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            names = [module, *((*module, alias.name) for alias in node.names)]
        for first, *rest in filter(None, names):
            named = package.joinpath(*rest)
            files = (named / "__init__.py", named.with_suffix(".py"))
            if first == _LIBRARY and rest not in ([], ["models"]):  # these two are of all models
                imported.update(file for file in files if file.is_file())
    return _ParsedModule(_hash("source", data), tuple(imported))


# -- reading files ------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Give a file open for reading, and its size."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {_AGAIN}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no regular file; {_AGAIN}")
        yield file, status.st_size
    finally:
        os.close(file)


def _read(path: Path, file: int, start: int, size: int) -> bytes:
    data = os.pread(file, size, start)
    if len(data) != size:
        raise ValueError(f"{path} ends before byte {start + size}: truncated; {_AGAIN}")
    return data


def _content(path: Path) -> bytes:
    with _opened(path) as (file, size):
        if size > _TEXT:
            raise ValueError(f"{path} has {size} bytes, more than any such file; {_AGAIN}")
        return _read(path, file, 0, size)


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON object without what isn't state. ValueError where it is none, or has no canonical text."""
    data = _content(path)
    try:
        value = json.loads(data, object_hook=_state)
        _text(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); {_AGAIN}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object; {_AGAIN}")
    return value


def _state(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in _NOT_STATE}


def _text(value: Any) -> bytes:
    """Return JSON with sorted keys and no spaces; NaN and Infinity, which configs hold, as Python writes them."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _header(path: Path) -> Weights:
    """Return what a safetensors file says of its tensors; ValueError when that can't be true of this file."""
    with _opened(path) as (file, size):
        length = int.from_bytes(_read(path, file, 0, 8), "little")
        if length > min(_TEXT, size - 8):
            raise ValueError(f"{path} of {size} bytes claims a header of {length}: truncated, or no weights; {_AGAIN}")
        data = _read(path, file, 8, length)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a header that is no JSON ({error}); {_AGAIN}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a header that is no JSON object; {_AGAIN}")
    names = sorted(header.keys() - {"__metadata__"})
    return Weights(path, size, [_tensor(path, name, header[name], 8 + length, size) for name in names])


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> Tensor:
    """Return a header's entry for a tensor, checked against where the file's data begins and ends."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(end)]} if (
            all(type(n) is int and n >= 0 for n in shape) and 0 <= first <= end
        ):
            if data + end > size:
                raise ValueError(f"{path} of {size} bytes lacks some of tensor {name[:80]!r}: truncated; {_AGAIN}")
            return Tensor(name, dtype, shape, data + first, end - first)
    raise ValueError(f"{path} has a header that describes tensor {name[:80]!r} wrongly; {_AGAIN}")
