"""Transform coding of attention state: keys with RoPE undone and values, decorrelated by a model's calibration.

`rotation` says how RoPE turned a layer's keys, and turns rows back and forth. Called by `prefixcache.calibration` too.
`backends` codes rows of whole steps, in C (`c_entropy`) or in NumPy (`entropy`), by the `tables` of a calibration.
"""
