"""Which codec `plan` computes sizes of: `transform` with the model's basis, if there is one, or else as is typical."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from prefixcache.cli.text import Refused
from prefixcache.codecs import Codec, Raw
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import Basis, BasisError, read
from prefixcache.codecs.transform.codec import Calibrated, Transform
from prefixcache.identity import model_identity
from prefixcache.planning.model import ModelState
from prefixcache.planning.sizes import StateSizes
from prefixcache.planning.typical_basis import typical


class Where(NamedTuple):
    """Where a basis may be: in this file, or in this folder."""

    file: Path | None
    folder: Path


def sizes_of(codecs: dict[str, Codec], model: str, state: ModelState, where: Where) -> dict[str, StateSizes]:
    """Return the sizes with each codec. Refused for a file that is no basis of this model or that no codec needs."""
    wanted = [spec for spec, codec in codecs.items() if isinstance(codec, Transform)]
    if where.file is not None and not wanted:
        raise Refused(f"--basis {where.file}: no codec needs one; add --codec transform")
    basis = _basis(model, state, where) if wanted else None
    return {spec: StateSizes(state, _with(codec, basis, state)) for spec, codec in codecs.items()}


def _with(codec: Codec, basis: Basis | None, state: ModelState) -> Codec:
    if isinstance(codec, Transform) and basis is not None:
        return Calibrated(codec.quality, codec.otherwise, basis)
    return typical(codec, state.plan(Raw()))


def _basis(model: str, state: ModelState, where: Where) -> Basis | None:
    if where.file is None:
        return _of_folder(model, Bases(where.folder.expanduser()))
    try:
        basis = read(where.file.expanduser())
    except BasisError as error:
        raise Refused(f"--basis {where.file}: {error}; give a file that prefixcache calibrate wrote") from error
    except OSError as error:
        raise Refused(f"--basis {where.file}: can't be read ({error.strerror})") from error
    if not state.plan(Calibrated(Transform().quality, Transform().otherwise, basis)).joined:
        raise Refused(f"--basis {where.file}: of {basis.model}, whose layers this model doesn't have; give its own")
    return basis


def _of_folder(model: str, bases: Bases) -> Basis | None:
    """Return the basis of a model whose weights are here, too: they are its identity."""
    if not bases.files():
        return None
    try:
        return bases.of_model(model_identity(model))
    except (OSError, ValueError):  # a config.json alone, a built-in shape
        return None
