"""Why a server can't be started or go on."""


class ServeError(Exception):
    """The server can't be started as asked. The text is one line: what is wrong, and what to do."""


class ServeFailed(ServeError):
    """The same, of a server whose thread has used MLX already."""
