"""Which codec `plan` computes sizes of: `transform` with the model's basis, if there is one, or else as is typical."""

from __future__ import annotations

from pathlib import Path

from prefixcache.cli.text import Refused, expanded
from prefixcache.codecs import Codec, Raw
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import Basis, BasisError, read
from prefixcache.codecs.transform.codec import Calibrated, Transform
from prefixcache.identity import model_identity
from prefixcache.planning.model import ModelState
from prefixcache.planning.sizes import StateSizes
from prefixcache.planning.typical_basis import typical


def sizes_of(
    codecs: dict[str, Codec], model: str, state: ModelState, basis_file: Path | None, basis_dir: Path
) -> dict[str, StateSizes]:
    """Return the sizes with each codec. A basis is read from `basis_file`, or looked for in `basis_dir`. Refused for a file
    that is no basis of this model or that no codec needs.
    """
    basis = None
    if any(isinstance(codec, Transform) for codec in codecs.values()):
        bases = Bases(expanded(basis_dir, "--basis-dir"))
        basis = _of_file(basis_file, state) if basis_file is not None else _of_folder(model, bases)
    elif basis_file is not None:
        raise Refused(f"--basis {basis_file}: no codec needs one; add --codec transform")
    return {spec: StateSizes(state, _with(codec, basis, state)) for spec, codec in codecs.items()}


def _with(codec: Codec, basis: Basis | None, state: ModelState) -> Codec:
    if isinstance(codec, Transform) and basis is not None:
        return Calibrated(codec.quality, codec.otherwise, basis)
    return typical(codec, state.plan(Raw()))


def _of_file(file: Path, state: ModelState) -> Basis:
    try:
        basis = read(expanded(file, "--basis"))
    except BasisError as error:
        raise Refused(f"--basis {file}: {error}; give a file that prefixcache calibrate wrote") from error
    except OSError as error:
        raise Refused(f"--basis {file}: can't be read ({error.strerror})") from error
    if not state.plan(Calibrated(Transform().quality, Transform().otherwise, basis)).joined:
        raise Refused(f"--basis {file}: of {basis.model}, whose layers this model doesn't have; give its own")
    return basis


def _of_folder(model: str, bases: Bases) -> Basis | None:
    """Return the basis of a model whose weights are here, too: they are its identity."""
    if not bases.files():
        return None
    try:
        return bases.of_model(model_identity(model))
    except (OSError, ValueError):  # a config.json alone, a known model
        return None
