"""Chat templates that requests bring along (`serve --allow-chat-template`), rendered in a process of their own.

A template is a program: it may loop for ever, or build a text that fills the memory, and neither a thread nor a sandbox
within Python stops it. The process has limits of the system, and is killed when its time is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from prefixcache.servers.request_schema import TEMPLATE, RequestRefused

SECONDS = 5  # that a template may take, its process's start included
MEMORY = 512 << 20  # bytes that its process may have; macOS doesn't hold processes to it
AT_ONCE = 2  # processes
PROGRAM = Path(__file__).with_name("render_template.py").read_text(encoding="utf-8")
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG")  # of the environment

_places = threading.BoundedSemaphore(AT_ONCE)


def render(template: str, variables: dict[str, Any], limit: int) -> str:
    """Render a template, to at most `limit` bytes of UTF-8. RequestRefused where it fails, or takes too much."""
    if not _places.acquire(timeout=SECONDS):
        raise RequestRefused("other requests' chat templates are being rendered; ask again", 503)
    try:
        return _render(json.dumps({"template": template, "variables": variables, "limit": limit, "memory": MEMORY}))
    finally:
        _places.release()


def _render(task: str) -> str:
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=task.encode(),
            capture_output=True,
            env=environment,
            cwd="/",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RequestRefused(f"{TEMPLATE}: not rendered within {SECONDS} s; send one that ends") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise RequestRefused(f"{TEMPLATE}: it can't be rendered: {reason or 'it takes too much memory or time'}")
    return done.stdout.decode()


class ClientTemplate:
    """A tokenizer whose chat template is the request's. `limit`: bytes of what it may render."""

    has_chat_template = True

    def __init__(self, tokenizer: Any, limit: int):
        self._tokenizer, self._limit = tokenizer, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self, messages: list[Any], *, chat_template: str, tokenize: bool = True, **variables: Any
    ) -> Any:
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        text = render(chat_template, {**special, "messages": messages, "documents": None, **variables}, self._limit)
        return self._tokenizer.encode(text, add_special_tokens=False) if tokenize else text
