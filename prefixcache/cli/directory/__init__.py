"""The commands of operators on a directory: inspect, reconcile, prune, clear."""
