"""vllm-mlx on a PrefixCache: `install` puts it where vllm-mlx's schedulers have their own."""

from prefixcache.servers.vllm_mlx.installation import identity_of, install, name_model, uninstall
from prefixcache.servers.vllm_mlx.prefix_cache import TieredPrefixCache

__all__ = ["TieredPrefixCache", "identity_of", "install", "name_model", "uninstall"]
