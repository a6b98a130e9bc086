"""`prefixcache evaluate`: what a codec does to a model's output."""
