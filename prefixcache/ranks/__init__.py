"""A model that spans processes: what its ranks agree on, what each one's state is called, and who watches that all live.

`mlx.launch` starts a process for each rank; each has a `PrefixCache` of its own.
"""

from prefixcache.ranks.agreement import OutOfStep, Ranks
from prefixcache.ranks.identity import OtherWeights, rank_identity

__all__ = ["OtherWeights", "OutOfStep", "Ranks", "rank_identity"]
