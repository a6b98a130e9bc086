"""How much RAM and SSD a server needs, before it is bought: traces of requests, the bytes of a model's state, and the cache
itself at work on sizes in place of bytes.

`trace` reads who asked for what, `model` says what a model's state is and `sizes` what it takes, `simulator` runs the cache's
own tree, budget, store, promotion and spill on them, `fleet` several such caches that share a remote tier, whose requests
`routing` shares out. `bound` gives what no policy can beat, `sweep` many sizes at once, `advice` what follows from them.
"""
