"""What a client was told of an answer, and how it may send it back in its next request. Nothing here knows MLX."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

THOUGHTS = ("reasoning_content", "reasoning")  # fields in which clients send a model's thoughts back


class ToldAnswer:
    """The message of an answer, as its parts are told one after the other."""

    def __init__(self) -> None:
        self.text = self.thoughts = ""
        self.calls: list[Message] = []

    def add(self, text: str, calls: list[Message] | None = None, thoughts: str | None = None) -> None:
        """Hear what comes next of each."""
        self.text += text
        self.calls += calls or []
        self.thoughts += thoughts or ""

    def sent_back(self, history: list[Message]) -> list[Message]:
        """Return the messages as which a client may send the answer back behind this history: with its thoughts where those
        of earlier answers are there, without where they are not; both where no answer tells.
        """
        plain = {"role": "assistant", "content": self.text} | ({"tool_calls": self.calls} if self.calls else {})
        answers = [message for message in history if message.get("role") == "assistant"]
        names = [name for name in THOUGHTS if any(message.get(name) for message in answers)]
        if not self.thoughts or (answers and not names):
            return [plain]
        with_thoughts = {**plain, (names or THOUGHTS)[0]: self.thoughts}
        return [with_thoughts] if answers else [plain, with_thoughts]
