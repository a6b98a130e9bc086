"""Where images are: the RAM budget, eviction, spilling to the SSD, promotion back into RAM. No MLX."""
