"""Pictures as requests bring them, and chats with them: the same seed, the same picture."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

Chat = list[dict[str, Any]]


def picture(seed: int, rows: int = 112, columns: int = 140) -> str:
    """A picture of noise, as a data URL: a PNG in base64."""
    pixels = np.random.default_rng(seed).integers(0, 255, (rows, columns, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def user(*parts: str | int) -> dict[str, Any]:
    """A message of texts, and of pictures by their seeds."""
    return {"role": "user", "content": [text(part) if isinstance(part, str) else shown(part) for part in parts]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def shown(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture(seed)}}


SYSTEM = {"role": "system", "content": "You look at pictures, and say what you see in them. " * 12}
SAID = {"role": "assistant", "content": "A bird."}

# What differs from what was asked before, which a server must tell apart and yet hit what is the same.
CHATS: dict[str, Chat] = {
    "one picture": [SYSTEM, user(1, "What is it?")],
    "it again": [SYSTEM, user(1, "What is it?")],
    "another picture, the same text": [SYSTEM, user(2, "What is it?")],
    "another question": [SYSTEM, user(1, "How many are there?")],
    "a third question": [SYSTEM, user(1, "Where are they?")],
    "two pictures": [SYSTEM, user(1, "and", 3, "Which?")],
    "the second is another": [SYSTEM, user(1, "and", 2, "Which?")],
    "side by side": [SYSTEM, user(1, 2, "Which?")],
    "swapped": [SYSTEM, user(2, 1, "Which?")],
    "a picture in the second turn": [SYSTEM, user(1, "What is it?"), SAID, user(3, "And this?")],
    "no picture": [SYSTEM, user("Hello")],
}
