"""mlx-lm's layer caches: read, cut into images, and made again. The edge where MLX arrays become bytes and bytes
arrays.
"""

from prefixcache.layers.adapters import CacheError
from prefixcache.layers.allowed_classes import allow
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.reading import Reading, read
from prefixcache.layers.stored import StoredLayer, StoredPrompt

__all__ = ["CacheError", "Plan", "Reading", "StoredLayer", "StoredPrompt", "allow", "read"]
