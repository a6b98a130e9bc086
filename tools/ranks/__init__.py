"""Sharded models under random requests and faults: every answer beside the one of a cold run on the same ranks."""
