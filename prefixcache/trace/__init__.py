"""Traces of requests: recorded by a server, read by the planner. One format, described here."""
