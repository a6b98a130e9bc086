"""The one graph of blocks: which tokens are known, how deep a prompt can be hit, who is evicted first. No MLX, no I/O."""
