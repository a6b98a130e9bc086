"""Kernel sources: one body, a prelude for each dialect."""
