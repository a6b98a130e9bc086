"""`prefixcache calibrate`: what a model's keys and values are like, measured once, for `--codec transform`."""
