"""The schema of the SSD tier's index, step by step. `prefixcache.ssd.index` applies the steps; nothing else imports
this.
"""
