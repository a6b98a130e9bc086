"""A tiered prefix cache for LLM servers built on MLX.

`PrefixCache` keeps the attention state of prompts that were seen, compressed in RAM under a hard budget and on SSD, and
gives it back in milliseconds.
"""

from prefixcache.cache import Match, PrefixCache, Stored
from prefixcache.codecs import Affine, Raw, TurboQuant
from prefixcache.layers import CacheError, StoredLayer, StoredPrompt, allow
from prefixcache.settings import Settings
from prefixcache.ssd import DirectoryError, DirectoryHeld
from prefixcache.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "Affine",
    "CacheError",
    "DirectoryError",
    "DirectoryHeld",
    "Match",
    "PrefixCache",
    "Raw",
    "Settings",
    "Stats",
    "Stored",
    "StoredLayer",
    "StoredPrompt",
    "TurboQuant",
    "allow",
]
