"""What the state of one rank is called: the model's identity and the rank's part of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from prefixcache.codecs.interchange import copy_out
from prefixcache.ranks.agreement import Ranks, named, number_of

PROBE = 24  # tokens on which the state of the ranks is compared


class OtherWeights(ValueError):
    """Tensor-parallel ranks have loaded parts of different models."""


def rank_identity(identity: str, model: Any, ranks: Ranks | None) -> str:
    """Return the text to give as `model=` on this rank, of a model that `mlx_lm.utils.sharded_load` has loaded. Collective;
    of a single process (`ranks` None) it is `identity`.

    `identity` is what `model_identity` gives on this rank. Behind it comes `|pp start:end/layers` for a stage of a pipeline,
    or `|tp rank/size` for tensor parallelism. Ranks whose state is the same, as MLA's latents are or heads that are repeated,
    have the first one's: that is told by a prefill of a few tokens, whose state the ranks compare.

    A rank's state hangs on the weights of all. Where the stages of a pipeline have different files, since each needs its own
    only, each one's name tells of all (`|of` and a hash); tensor-parallel ranks must have the same, else OtherWeights on all.
    """
    if ranks is None:
        return identity
    name, _, files = identity.rpartition("@")
    hashes = ranks.each(number_of(files.encode()) if name else 0)  # 0: named by something else than files
    if len(set(hashes)) > 1:
        identity += f"|of {number_of(repr(hashes).encode()):08x}"
    net = getattr(model, "model", model)
    if getattr(net, "pipeline_size", 1) > 1:
        layers = ranks.most(net.end_idx)[0]  # of the last stage
        return f"{identity}|pp {net.start_idx}:{net.end_idx}/{layers}"
    others = [rank for rank, files_hash in enumerate(hashes) if files_hash != hashes[0]]
    if others and all(hashes):
        raise OtherWeights(
            f"{named(others)}: other weights than on rank 0, or other code for the model; give all the same files and mlx-lm"
        )
    states = ranks.each(_state_of(model))
    return f"{identity}|tp {states.index(states[ranks.rank])}/{ranks.size}"


def _state_of(model: Any) -> int:
    """Return a hash of the state after the first tokens of the vocabulary."""
    from mlx_lm.models.cache import make_prompt_cache  # every PrefixCache imports this module, and not all need mlx-lm

    layers = make_prompt_cache(model)
    model(mx.array([list(range(PROBE))]), cache=layers)
    arrays = [array for _, array in tree_flatten([layer.state for layer in layers]) if isinstance(array, mx.array)]
    mx.eval(arrays)
    return number_of(b"".join(copy_out(array).tobytes() for array in arrays))
