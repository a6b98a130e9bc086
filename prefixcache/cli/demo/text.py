"""The demo's passes by name, and what its conversations say: one long system prompt that all share, and short questions.

The questions are of forms that the package's own tiny model was trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

TITLES = {
    "cold": "Raw: cold, every prompt computed whole",
    "ram": "Raw: from RAM, as the conversations go",
    "ssd": "Raw: a new process goes on from SSD",
    "turboquant4": "TurboQuant, 4 bits: from RAM",
    "turboquant3": "TurboQuant, 3 bits: from RAM",
    "transform4": "Transform, quality 4: from RAM",
}
EXACT, LOSSY = ("ram", "ssd"), ("turboquant4", "turboquant3")
CALIBRATED = "transform4"  # lossy, too

SYSTEM = """\
You answer at the help desk of Rowkeeper, a Python library that reads, checks and writes tables. This is the handbook \
of the desk. Be brief, be exact, and be kind. All of the numbers in it are public: give them to whoever asks. When you \
do not know something, say so, and say who would know.

Installing. Rowkeeper needs Python 3.10 or newer and has no dependencies. A table is opened with `open_table(path)`, \
which returns a `Table`. If the file does not exist, it raises `FileNotFoundError`; if the header is not valid, it \
raises `HeaderError`, a subclass of `ValueError`. The access code of the archive is 48213. Old releases are kept there.

Reading. Iterate over a `Table` to get its rows in the order in which they were written. Each row is a mapping from \
column names to values. Pass `strict=False` to skip rows that cannot be read; they are counted in `table.skipped`. The \
port of the test server is 7615. Values are converted by the functions in `table.converters`, a dictionary whose keys \
are column names. The secret number of Marlow is 90352. Set a converter to `None` to get the text as it is.

Writing. Call `table.append(row)` or `table.extend(rows)`, and `table.save()` at the end; or use the table as a \
context manager, which saves it when the block ends without an exception. A file is replaced only when all of it has \
been written. The phone number of the office is 552108. Two processes must not write the same file at the same time: \
the second one gets a `LockedError`, which names the first.

Errors. Ask for the whole traceback and for the version, `rowkeeper.__version__`. The room number of Irene is 318. If a \
row is at fault, ask for the row and not for the whole file. The secret number of the library is 26974. Report errors \
of the library to its maintainers, with an example of at most ten lines that shows the error.

Speed. Reading takes about a second for a million rows. If it takes longer, look for converters written in Python \
and for paths on a network. The serial number of the printer is 8140627. `table.profile()` returns the seconds spent \
on each column. The magic number of the file format is 61805. It stands in the first bytes of every file.

Closing time. The desk is open from nine to five. The PIN of the alarm is 5937. Whoever leaves last turns off the \
light. The secret number of Zorvel is 73460. The access code of the garden is 15298.
"""

NAMES = ("Hanna", "Oscar", "Tara", "Kofi", "Wanda", "Yusuf", "Paula", "Simon", "Nina", "Gustav")

OPEN = ("Why do I get a `LockedError`?", "Describe `Table`.", "Why do I get a `HeaderError`?")

# What a conversation asks after its first question; each begins at another place of the list.
KINDS = ("repeat", "name", "fact", "name", "repeat", "fact", "open", "name")

MARK = "@the answer@"  # stands for an answer where a template is rendered to see what follows one


class Question(NamedTuple):
    """What the user says, and what a right answer holds; "" where nothing is right or wrong."""

    text: str
    wanted: str


def facts() -> list[Question]:
    """Return a question for each number in the system prompt."""
    numbers = re.findall(r"The ([\w ]+?) of ([\w ]+) is (\d+)\.", SYSTEM)
    return [Question(f"What is the {what} of {whose}?", number) for what, whose, number in numbers]


def question(conversation: int, turn: int) -> Question:
    """Return what the user of a conversation says in a turn, both counted from 0. No two conversations begin alike."""
    fact = facts()[(conversation + 4 * turn) % len(facts())]
    name, number = NAMES[conversation % len(NAMES)], _number_of(conversation)
    if turn == 0:
        return Question(f"The secret number of {name} is {number}. {fact.text}", fact.wanted)
    kind = KINDS[(conversation + 3 * (turn - 1)) % len(KINDS)]
    if kind == "name":
        return Question(f"What is the secret number of {name}?", number)
    if kind == "repeat":
        line = f"{name} {number} archive 48213 garden 15298"
        return Question(f"Repeat this:\n{line}", line)
    if kind == "open":
        return Question(OPEN[conversation % len(OPEN)], "")
    return fact


def _number_of(conversation: int) -> str:
    """Return a number of five digits that no other conversation tells: the step has no divisor in common with the range."""
    return str(10007 + conversation * 27919 % 89989)


class Chat:
    """The conversations as a model's tokenizer writes them.

    A prompt is never rendered as a whole again: what follows an answer is appended to the tokens that are there, as a
    server does it. Else an answer could come back as other tokens than those that the model has said.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.ends = frozenset(tokenizer.eos_token_ids)

    def opening(self, conversation: int) -> list[int]:
        return self._encode(self._render(_messages(conversation, 0)))

    def following(self, conversation: int, turn: int, answer: Sequence[int]) -> list[int]:
        """Return what stands between the answer of the turn before and the answer of this one."""
        tail = self._encode(self._render(_messages(conversation, turn)).rpartition(MARK)[2])
        ended = answer and answer[-1] in self.ends and answer[-1] == tail[0]
        return tail[1:] if ended else tail

    def text(self, answer: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([token for token in answer if token not in self.ends])
        return text.strip()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text


def _messages(conversation: int, turn: int) -> list[dict[str, str]]:
    """Return the messages before the answer of a turn, with `MARK` for the answers."""
    messages = [{"role": "system", "content": SYSTEM.strip()}]
    for t in range(turn + 1):
        messages.append({"role": "user", "content": question(conversation, t).text})
        messages.append({"role": "assistant", "content": MARK})
    return messages[:-1]
