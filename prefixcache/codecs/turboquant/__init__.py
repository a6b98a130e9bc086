"""TurboQuant: rows levelled, rotated, quantised to 1 to 4 or 8 bits a value. `codec` is the choice a user makes, `format`
what all back ends share; the back ends are `gpu_rows`, `c_rows` and `numpy_rows`, bit for bit the same codes.
"""
