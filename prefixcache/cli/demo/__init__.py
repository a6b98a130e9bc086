"""`prefixcache demo`: what the cache does, shown and checked on this machine."""
