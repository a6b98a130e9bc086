"""The cache inside servers: each module is one way in, imported by who wants it. Nothing in the library imports these."""
