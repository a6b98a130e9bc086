"""A server whose model says what it is told, and that notes its prompts: `speaking.py WHICH FOLDER FLAGS`, as a program.

WHICH is "prefixcache", "mlx_lm.server" or "vllm-mlx"; FLAGS are the server's. Everything but the sampler is as it is. The
answer to the next request is in FOLDER/answer.json (token ids); a line of FOLDER/requests.jsonl is a request: its prompt's
token ids, and how many were cached. One request at a time. Imports nothing of this project: peers have their own interpreter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


class Speaker:
    """What is said to one request after the other."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rest: Iterator[int] = iter(())

    def asked(self, prompt: Sequence[int], cached: int) -> None:
        """Note a request, and say its answer from now on."""
        self._rest = iter(json.loads((self._folder / "answer.json").read_text()))
        with (self._folder / "requests.jsonl").open("a") as lines:
            lines.write(json.dumps({"prompt": [int(token) for token in prompt], "cached": cached}) + "\n")

    def sample(self, logprobs: Any) -> Any:
        """Return the next token of the answer; behind its end, tokens that nobody is given."""
        import mlx.core as mx

        return mx.full((logprobs.shape[0],), next(self._rest, 0), dtype=mx.uint32)


def speak_in_batches(
    server: Any, cache_class: Any, prompt_of: Callable[[Any], Sequence[int]], speaker: Speaker
) -> None:
    """Have mlx-lm's server say it; what is cached is what its prompt cache gives."""
    inner = cache_class.fetch_nearest_cache

    def fetch(self: Any, model: Any, tokens: Any) -> Any:
        found, rest = inner(self, model, tokens)
        prompt = prompt_of(tokens)
        speaker.asked(prompt, len(prompt) - len(rest) if found is not None else 0)
        return found, rest

    cache_class.fetch_nearest_cache = fetch
    server._make_sampler = lambda args, tokenizer: speaker.sample


def serve_ours(speaker: Speaker, flags: list[str]) -> None:
    import mlx_lm.server

    from prefixcache.cli import app
    from prefixcache.servers.mlx_lm.tenant_cache import TenantPromptCache

    speak_in_batches(mlx_lm.server, TenantPromptCache, lambda tokens: tokens, speaker)
    app(["serve", *flags], prog_name="prefixcache")


def serve_mlx_lm(speaker: Speaker, flags: list[str]) -> None:
    import mlx_lm.server
    from mlx_lm.models.cache import LRUPromptCache

    speak_in_batches(mlx_lm.server, LRUPromptCache, lambda tokens: tokens, speaker)
    sys.argv = ["mlx_lm.server", *flags]
    mlx_lm.server.main()


def serve_vllm_mlx(speaker: Speaker, flags: list[str]) -> None:
    from vllm_mlx import cli, scheduler

    inner = scheduler.Scheduler._schedule_waiting

    def schedule(self: Any) -> Any:
        scheduled = inner(self)
        for request in scheduled:
            speaker.asked(request.prompt_token_ids, request.cached_tokens)
        return scheduled

    scheduler.Scheduler._schedule_waiting = schedule
    scheduler.make_sampler = lambda *args, **options: speaker.sample
    model = flags[flags.index("--model") + 1]
    others = [flag for flag in flags if flag not in ("--model", model)]
    sys.argv = ["vllm-mlx", "serve", model, *others]
    cli.main()


SERVERS = {"prefixcache": serve_ours, "mlx_lm.server": serve_mlx_lm, "vllm-mlx": serve_vllm_mlx}

if __name__ == "__main__":
    SERVERS[sys.argv[1]](Speaker(Path(sys.argv[2])), sys.argv[3:])
