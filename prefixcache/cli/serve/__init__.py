"""`prefixcache serve` and `prefixcache warm`: a server on this cache, and prompts stored ahead of its first user."""
