"""The cache inside servers: each module or folder is one way in. Nothing in the library imports these."""
