"""Whether a hit changes an answer: chats of several turns asked of running servers, cold and warm, and the answers compared.

    python -m tools.chats MODEL [--chats 48] [--turns 3] [--tokens 48] [--longest 6000] [--codec turboquant:4] [--codec-alone]
        [--json FILE]

Answers are greedy. The same chats are asked one after the other of a server that has seen none of them (cold), again (RAM),
after a restart (SSD), of one whose RAM holds a few prompts only (evicted to the SSD), eight at once, of a cache that is cold
for each single request, and of servers with `--exact-prefill` and with `--codec raw`. A chat is equal when each of its
answers is, to the character.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SYSTEM = (
    "You are a careful assistant who helps people to read technical documentation. Answer in plain English, in two or "
    "three short sentences, and only from what the text says. When the text does not say it, tell the reader so."
)
FIRST = "Read this part of a manual:\n\n{text}\n\nWhat is it about?"
LATER = (
    "Which word in it matters most, and why?",
    "Give a short example.",
    "Say it again for a beginner.",
    "What is missing?",
)


def chats_of(count: int, turns: int, longest: int, seed: int = 0) -> list[list[str]]:
    """What the user says in each chat: pieces of the Python reference of 300 to `longest` characters, and questions."""
    from pydoc_data.topics import topics

    text, chance = "\n\n".join(topics[name] for name in sorted(topics)), random.Random(seed)
    chats = []
    for _ in range(count):
        size = chance.randrange(300, longest)
        start = chance.randrange(len(text) - size)
        chats.append([FIRST.format(text=text[start : start + size]), *LATER[: turns - 1]])
    return chats


class Server:
    """A server's process, and what its log says."""

    def __init__(self, model: str, flags: list[str], log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            "from prefixcache.cli import app; app()",
            "serve",
            "--no-canonical",  # all answers are to the very same prompts
            "--no-decline-slow-hits",  # a declined hit's answer is that of an empty cache
            "--model",
            model,
            "--port",
            str(self.port),
            *flags,
        ]
        self.log = log.open("w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 300
        while self._healthy() is False:
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def ask(self, messages: list[dict[str, str]], tokens: int, salt: str) -> tuple[str, int, int]:
        """The answer, the prompt's tokens, and how many of them were cached."""
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, **({"cache_salt": salt} if salt else {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = json.loads(connection.getresponse().read())
        usage = response["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return response["choices"][0]["message"].get("content") or "", usage["prompt_tokens"], cached

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        self.log.close()


@contextmanager
def serving(model: str, flags: list[str], log: Path) -> Iterator[Server]:
    server = Server(model, flags, log)
    try:
        yield server
    finally:
        server.end()


Answers = list[list[str]]


def ask_all(
    server: Server,
    chats: list[list[str]],
    tokens: int,
    *,
    salt: Callable[[int, int], str] = lambda chat, turn: "",
    history: Answers | None = None,
    at_once: int = 1,
) -> tuple[Answers, float]:
    """The answers, and the share of prompt tokens that were cached. With `history` later turns follow those answers, not what
    the server has just said.
    """
    counted = [0, 0]

    def chat(number: int) -> list[str]:
        messages = [{"role": "system", "content": SYSTEM}]
        answers = []
        for turn, said in enumerate(chats[number]):
            messages.append({"role": "user", "content": said})
            answer, asked, cached = server.ask(messages, tokens, salt(number, turn))
            counted[0] += asked
            counted[1] += cached
            answers.append(answer)
            messages.append({"role": "assistant", "content": history[number][turn] if history else answer})
        return answers

    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(chat, range(len(chats))))
    return answers, counted[1] / counted[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=6000, help="characters of the longest text that is asked about")
    parser.add_argument("--codec", default="turboquant:4")
    parser.add_argument("--codec-alone", action="store_true", help="neither raw nor --exact-prefill beside it")
    parser.add_argument("--flag", action="append", default=[], help="for every server, such as --prefill-step-size=256")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chats = chats_of(given.chats, given.turns, given.longest)
    said: dict[str, Any] = {}

    def tell(name: str, answers: Answers, cached: float, reference: Answers | None) -> None:
        line = f"{name:58s} {cached:5.0%} cached"
        if reference is not None:
            equal = sum(a == b for a, b in zip(answers, reference, strict=True))
            single = sum(x == y for a, b in zip(answers, reference, strict=True) for x, y in zip(a, b, strict=True))
            line += f"   equal: {equal} of {len(chats)} chats, {single} of {len(chats) * given.turns} answers"
            said[name] = {"equal": equal, "chats": len(chats), "answers": single}
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)

        def run(name: str, *flags: str, directory: str = "ssd", **options: Any) -> tuple[Answers, float]:
            ssd = ["--ssd-dir", str(home / directory), "--ssd", "20GB"]
            with serving(given.model, [*ssd, *flags, *given.flag], home / "log") as server:
                return ask_all(server, chats, given.tokens, **options)

        coded = ["--codec", given.codec]
        ssd = ["--ssd-dir", str(home / "ssd"), "--ssd", "20GB"]
        with serving(given.model, [*ssd, "--ram", "4GB", *coded, *given.flag], home / "log") as server:
            cold, cached = ask_all(server, chats, given.tokens)
            tell(f"{given.codec}, cold", cold, cached, None)
            tell("again, from RAM", *ask_all(server, chats, given.tokens, history=cold), cold)
            batch, share = ask_all(server, chats, given.tokens, history=cold, at_once=8)
            tell("8 at once, from RAM", batch, share, cold)
            tell("8 at once, again", *ask_all(server, chats, given.tokens, history=cold, at_once=8), batch)
        tell("after a restart, from the SSD", *run("restart", "--ram", "4GB", *coded, history=cold), cold)
        tell("RAM of a few prompts, the rest on the SSD", *run("evicted", "--ram", "40MB", *coded, history=cold), cold)
        with serving(given.model, ["--ram", "4GB", *coded, *given.flag], home / "log") as server:
            each = ask_all(server, chats, given.tokens, history=cold, salt=lambda chat, turn: f"{chat}.{turn}")
            tell("each request on an empty cache", *each, cold)
        if not given.codec_alone:
            with serving(given.model, ["--ram", "8GB", "--codec", "raw", *given.flag], home / "log") as server:
                raw, cached = ask_all(server, chats, given.tokens, history=cold)
                tell("codec raw (the uncompressed model), beside the codec", raw, cached, cold)
                tell(
                    "codec raw, 8 at once, beside one by one",
                    *ask_all(server, chats, given.tokens, history=cold, at_once=8),
                    raw,
                )
            with serving(given.model, ["--ram", "4GB", "--exact-prefill", *coded, *given.flag], home / "log") as server:
                exact, cached = ask_all(server, chats, given.tokens, history=cold)
                tell("--exact-prefill, cold, beside raw", exact, cached, raw)
                tell("--exact-prefill, again", *ask_all(server, chats, given.tokens, history=cold), exact)
    if given.json:
        given.json.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
