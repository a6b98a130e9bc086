"""Where one of a request's `stop` texts ends in an answer, whichever tokens write it. `upstream.Completion` asks."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Reads an answer piece by piece. `ended_by` is the stop text that has ended it, "" before."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._longest = max(map(len, stops))
        self._read = ""  # the last characters, of which a stop text may have begun in all but one
        self.ended_by = ""

    def end_in(self, piece: str) -> int | None:
        """Return how many characters of the next piece there are up to the end of the first stop text, None without one."""
        text = self._read + piece
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if not ends:
            self._read = text[len(text) - min(self._longest - 1, len(text)) :]
            return None
        end, self.ended_by = min(ends)
        return end - len(self._read)
