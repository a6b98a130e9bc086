"""mlx_lm.server on a PrefixCache: its prompt cache, its prefill, its request loop, its start and end."""

from prefixcache.servers.mlx_lm.prompt_cache import TieredPromptCache

__all__ = ["TieredPromptCache"]
