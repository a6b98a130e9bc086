"""What the public calls of `PrefixCache` do, one module each."""
