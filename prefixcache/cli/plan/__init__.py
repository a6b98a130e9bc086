"""`prefixcache plan`: how much RAM and SSD a server needs, before they are bought."""
