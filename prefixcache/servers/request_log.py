"""One line of the log for each request that is served: what it asked for, whence its tokens came, how long it took. It has
numbers only, nothing of a prompt or an answer. `mlx_lm.http_server` begins and writes it, `mlx_lm.generator` fills it in.
"""

from __future__ import annotations

import re
import time
from typing import Any

import mlx_lm.server as upstream

from prefixcache.cache import Match
from prefixcache.tiers.parting import Parting

CUT, REFUSED, GONE, FAILED = "cut", "refused", "client gone", "failed"  # how it ended, where no finish_reason says so
COUNTED = "counted"  # its prompt's tokens, which was all that it asked for


REASON = 200  # characters of why a request was refused
_QUOTED = re.compile(r"""(?!(?<=\w\w)'[st]\b)'[^']*'?|"[^"]*"?|`[^`]*`?""")  # "the model's" and "can't" quote nothing


class RequestLog:
    """One request, watched. Times are `time.monotonic()`'s, in seconds.

    The thread of its client begins it and asks for `fields` in the end; the thread that generates does all the rest.
    """

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        self.depths: Match | None = None  # what could be had when it came; None: the SSD was not asked yet
        self.remote_depth = 0  # the same with the remote tier, once that has answered
        self.ssd_wait = 0.0
        self.asks_remote = False
        self.end = ""
        self.tokens: list[int] = []  # of its answer
        self.reason = ""  # why it was refused
        self.parting: Parting | None = None  # of a cold request
        self._context: Any = None
        self._waits_since: float | None = None
        self._begun = self._first = 0.0

    def wait_for_ssd(self, remote: bool) -> None:
        """Hear that the request is deferred until the SSD, and with `remote` the remote tier, have answered."""
        self._waits_since, self.asks_remote = time.monotonic(), remote

    def go_on(self, ram: int) -> None:
        """Hear that it waits for them no longer; RAM has so many of its tokens now."""
        if self._waits_since is not None:
            self.ssd_wait, self._waits_since = time.monotonic() - self._waits_since, None
            if self.asks_remote:
                self.remote_depth = ram

    def saw(self, answer: Any) -> None:
        """Hear what was put on the queue on which it is answered."""
        if isinstance(answer, Exception) and self._context is None:
            self.reason = reason_of(answer)
        if isinstance(answer, upstream.GenerationContext):
            self._context, self._begun = answer, time.monotonic()
        elif isinstance(answer, upstream.Response):
            self._first = self._first or time.monotonic()
            self.tokens.append(answer.token)
            self.end = answer.finish_reason or self.end

    @property
    def prompt(self) -> list[int]:
        """The tokens of its prompt, once its turn has come."""
        return self._context.prompt if self._context is not None else []

    def refuse(self, error: BaseException) -> None:
        """Hear that it is answered with an error. A chat template's, where that is its cause, is only named."""
        cause: BaseException | None = error
        while cause is not None and not type(cause).__module__.startswith("jinja2"):
            cause = cause.__cause__
        self.reason = self.reason or reason_of(cause or error)

    def fields(self, end: str = "") -> dict[str, Any]:
        """Return the numbers of the line. `end`: how it ended; "": as its answers say. A request that never began has its
        end, its time, and why it was refused.
        """
        fields: dict[str, Any] = {"end": end or self.end or REFUSED, "seconds": _ms(time.monotonic() - self.arrived)}
        if self._context is None:
            return fields | ({"reason": self.reason} if self.reason and fields["end"] == REFUSED else {})
        prompt, cached = len(self._context.prompt), max(self._context.prompt_cache_count, 0)
        depths = self.depths or Match(0, 0)
        from_ssd = max(min(cached, depths.ssd) - depths.ram, 0)
        from_remote = max(min(cached, self.remote_depth) - depths.ssd, 0)
        fields |= {
            "prompt_tokens": prompt,
            "ram_tokens": cached - from_ssd - from_remote,
            "ssd_tokens": from_ssd,
            "remote_tokens": from_remote,
            "computed_tokens": prompt - cached,
            "generated_tokens": len(self.tokens),
            "ssd_wait_seconds": _ms(self.ssd_wait),
        }
        if self._first:
            fields |= {
                "prefill_seconds": _ms(self._first - self._begun),
                "first_token_seconds": _ms(self._first - self.arrived),
            }
        return fields


def in_words(fields: dict[str, Any], remote: bool = False) -> str:
    """`RequestLog.fields`, as a line to read. `remote`: it waited for the remote tier, too."""
    whole = f"{fields['seconds']:.3f} s in all"
    if "prompt_tokens" not in fields:
        reason = f": {fields['reason']}" if "reason" in fields else ""
        return f"{fields['end']} before it began{reason}; {whole}"
    times = f"{fields['ssd_wait_seconds']:.3f} s for {'SSD and remote tier' if remote else 'the SSD'}, "
    from_remote = f"{fields['remote_tokens']:,} from remote, " if fields["remote_tokens"] else ""
    if "prefill_seconds" in fields:
        times += (
            f"{fields['prefill_seconds']:.3f} s prefill, {fields['first_token_seconds']:.3f} s to the first token, "
        )
    return (
        f"{fields['prompt_tokens']:,} tokens asked, {fields['ram_tokens']:,} from RAM, {fields['ssd_tokens']:,} from SSD, "
        f"{from_remote}{fields['computed_tokens']:,} computed; {fields['generated_tokens']:,} generated "
        f"({fields['end']}); {times}{whole}"
    )


def reason_of(error: BaseException) -> str:
    """Return an error's first line, without what it quotes: that may be of the request. A chat template's own errors may
    have words of the request without quotes, so they are only named; so are those that say nothing else.
    """
    name = type(error).__name__
    if type(error).__module__.startswith("jinja2"):
        return f"the chat template: {name}"
    said = _QUOTED.sub("'...'", str(error).split("\n", 1)[0])
    return said[:REASON] if any(map(str.isalnum, said)) else name


def _ms(seconds: float) -> float:
    return round(seconds, 3)
