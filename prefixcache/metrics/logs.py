"""Logs for machines: `JsonFormatter` writes a record as one line of JSON. `quotes_nothing` keeps the lines of others out
that would have something of a prompt.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # what any record has
_BODY = "the request's body is not as it must be"
_QUOTES = {  # how mlx-lm's lines begin that quote a request or an answer, and what they say in place of it
    "JSONDecodeError:": _BODY,
    "Invalid Request Body:": _BODY,
    "Failed to parse tool call": "of an answer, which was likely cut off",
}
_SERVER = "mlx_lm/server.py"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, ASCII: time (UTC), level, logger, message, what `extra` was given, and a traceback if there is
    one. A value that JSON has no form for is its text.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _OWN:
                line[f"{name}_" if name in line else name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return json.dumps(line, allow_nan=False, default=str)
        except (TypeError, ValueError, RecursionError):  # NaN, a key that is no text, an object within itself
            return json.dumps({str(name): _plain(value) for name, value in line.items()}, default=str)


def _plain(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


def quotes_nothing(record: logging.LogRecord) -> bool:
    """Take what requests and answers say out of mlx-lm's lines, and refuse its DEBUG lines, which quote all. A filter."""
    if record.pathname.replace("\\", "/").endswith(_SERVER):
        if record.levelno <= logging.DEBUG:
            return False
        for head, said in _QUOTES.items():
            if isinstance(record.msg, str) and record.msg.startswith(head):
                record.msg, record.args = f"{head} {said}", ()
    return True
