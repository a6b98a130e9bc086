"""Calibration of a model for transform coding: what its keys and values look like while it reads texts.

`layers` finds the layers that can be transformed and how RoPE turns their keys, `statistics` reads windows of tokens.
"""
