"""`prefixcache top`: a server, live in the terminal."""
