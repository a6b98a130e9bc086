"""A model that calls a tool `STEPS` times and then answers, whatever agent asks it, and servers of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.serving import Server, save_parrot, serving

STEPS = 2  # calls of the tool, before the answer
SAYS = ["Two lines ", "have alpha."]
NOTES = "alpha\nbeta\nalpha\n"
SHELL = "grep -c alpha notes.txt"  # what the tool is asked to run
TEMPLATE = (  # tools in front, and a prompt's end that says how many results it has since its user spoke
    "{{ bos_token }}{% if tools %}<|system|>\nTools: {{ tools | tojson }}<|end|>\n{% endif %}{% set ns = namespace(done=0) %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% set ns.done = ns.done + 1 %}"
    "{% elif m.role == 'user' %}{% set ns.done = 0 %}{% endif %}"
    "{{ '<|' + m.role + '|>\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    "<tool_call>{{ {'name': tool_call.name, 'arguments': tool_call.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '\n' if ns.done < STEPS else '.' }}{% endif %}"
).replace("STEPS", str(STEPS))


class ScriptedAgent:
    """The model, in `folder`. Each server that is started has the SSD of those before."""

    def __init__(self, folder: Path, call: str):
        says = ["<tool_call>", call, "</tool_call>"]
        more = {"template": TEMPLATE, "max_position_embeddings": 1 << 17}
        self._folder, self._model = folder, save_parrot(folder / "model", says, after={".": SAYS}, **more)
        config = self._model / "tokenizer_config.json"  # else transformers warns of prompts as long as agents' are
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 1 << 17}))

    @contextmanager
    def serving(self, name: str) -> Iterator[Server]:
        flags = ("--canonical", "--model", self._model, "--ssd-dir", self._folder / "ssd", "--ssd", "1GB")
        with serving(self._folder / f"{name}.log", *flags) as server:
            yield server


def work_folder(home: Path) -> Path:
    """A folder beside a client's home, to work in, with notes.txt."""
    folder = home.parent / "work"
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text(NOTES)
    home.mkdir(exist_ok=True)
    return folder
