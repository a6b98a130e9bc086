"""Commands on a running server, by its admin path: `remove`, `pin`, and with --url `clear`, `prune` and `warm`."""
