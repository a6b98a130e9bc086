"""The cache inside servers: a folder for each server, and beside them the parts that the servers share. Only the commands in
`cli` import these.
"""
