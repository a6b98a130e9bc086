"""mlx_vlm.server on a PrefixCache: what `prefixcache serve --vlm` runs."""
