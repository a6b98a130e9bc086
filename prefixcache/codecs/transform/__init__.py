"""Transform coding of attention state: keys with RoPE undone and values, decorrelated by a model's calibration.

`rotation` says how RoPE turned a layer's keys, and turns rows back and forth. Called by `prefixcache.calibration` too.
"""
