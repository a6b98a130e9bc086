"""Why a server can't be started or go on."""


class ServeError(Exception):
    """The server can't be started as asked. The text is one line: what is wrong, and what to do."""


class RankFailed(BaseException):
    """A rank can't go on, so none can. It ends the thread that generates, whose loop takes an Exception for a request's."""


class ServeFailed(ServeError):
    """The same, of a server whose thread has used MLX already."""
