"""The remote tier's side of the network: engines that exist, sealed images under names, uploads behind. No MLX."""
