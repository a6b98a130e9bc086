"""What `PrefixCache` does to store, fetch and remove prompts, one module for each of its public calls."""
