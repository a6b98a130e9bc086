"""What the cache counts, and how it tells: `stats()`, durations, Prometheus, logs for machines."""
