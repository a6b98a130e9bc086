"""What the next turn of a chat begins with, computed ahead while a server has no request (`idle_work`): the answer as the
template writes it in a history, which may drop its thoughts, and the opening of the turn behind it. Decision 0052 says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import psutil

from prefixcache.keys import as_tokens, common_prefix
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.idle_work import Check
from prefixcache.servers.mlx_lm.prompt_tokenizer import by_own_template
from prefixcache.servers.mlx_lm.provider import LoadedModel
from prefixcache.servers.mlx_lm.upstream import Completion, has_images
from prefixcache.servers.warm_prompts import BadPrompt, WarmPrompt, WarmSequence, common_beginning, next_requests
from prefixcache.servers.warming import Step, warm_sequences
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")

LEAST = 32  # tokens that are worth it; the end of a turn and the opening of the next have fewer
CHUNK = 64  # tokens that are computed at once: a request that comes waits for these at most
WAITING = 8  # turns that wait for their time, and turns whose hits are counted
LABEL = "assistant"  # mlx_lm.server's word for what ends with an answer


def on_battery() -> bool:
    """Return whether the machine runs on its battery, as far as it says."""
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    return battery is not None and battery.power_plugged is False


class ComputedAhead(NamedTuple):
    """Tokens that were computed for a model and tenant, behind the first `start` ones."""

    model: str
    salt: bytes
    tokens: np.ndarray
    start: int

    def hit(self, prompt: Prompt, depth: int) -> int:
        """Return how many of them a hit of `depth` tokens gave."""
        if (prompt.model, prompt.salt) != (self.model, self.salt):
            return 0
        return max(common_prefix(prompt.given[:depth], self.tokens) - self.start, 0)


class NextTurn:
    """The turn that follows a request and its answer. `chats`: the history as its client may send it back."""

    def __init__(
        self, request: Any, chats: list[WarmPrompt], loaded: LoadedModel, run: Callable[[NextTurn, Check], None]
    ):
        self.request, self.chats, self.loaded, self._run = request, chats, loaded, run
        self.wanted = True
        told = request.request_log
        self.answered = [*told.prompt, *told.tokens[:-1]]  # what the model was given of them, and so is stored
        self.beginning: list[int] = []  # the tokens that the turn begins with, once they are known

    def run(self, check: Check) -> None:
        self._run(self, check)
        self.wanted = False

    def fail(self, error: Exception) -> None:
        """Leave it: who comes next computes it."""

    def is_followed_by(self, request: Any) -> bool:
        """Tell whether a request goes on from the one before this turn."""
        mine = self.request.messages
        return bool(request.salt == self.request.salt and request.messages[: len(mine)] == mine)


class NextTurns:
    """The next turns of one server's chats. Nothing is computed where they are not `enabled`, where the model spans processes
    and where prompts are computed on exact rows.
    """

    def __init__(self, generator: Generator, *, enabled: bool = True):
        prompts = generator.prompts
        self._generator, self._cache = generator, prompts.cache
        self._enabled = enabled and prompts.cache.ranks is None and not prompts.exact_prefill
        self._lock = threading.Lock()  # of the turns that wait
        self._waiting: list[NextTurn] = []
        self._ahead: list[ComputedAhead] = []  # of the thread that generates
        self._computed = self._hit = 0
        prompts.heard_hit = self._count_hit

    def tokens(self) -> dict[str, float]:
        """Return how many tokens were computed ahead, and how many of them a request has hit."""
        return {"computed": float(self._computed), "hit": float(self._hit)}

    def add(self, request: Any, completion: Completion) -> None:
        """Have the turn computed that will follow this request, which has its answer. Called on its client's thread."""
        args = completion.prompt_arguments
        loaded = self._generator.model_provider.loaded_as(args.model)
        if not self._enabled or loaded is None or not request.keeping.stored or not request.request_log.tokens:
            return
        if not by_own_template(loaded, request, args) or has_images(request):
            return
        answers = completion.told.sent_back(request.messages)
        chats = [
            WarmPrompt(
                completion.request_id,
                (*request.messages, answer),
                tuple(request.tools or ()),
                salt=request.salt,
                chat_template_kwargs=args.chat_template_kwargs or {},
            )
            for answer in answers
        ]
        turn = NextTurn(request, chats, loaded, self._compute)
        with self._lock:
            going_on = [other for other in self._waiting if other.wanted and not other.is_followed_by(request)]
            kept = going_on[1 - WAITING :]
            for other in self._waiting:
                other.wanted = other in kept
            self._waiting = [*kept, turn]
        self._generator.idle.add(turn)

    # -- on the thread that generates ---------------------------------------------------------------------------------

    def _compute(self, turn: NextTurn, check: Check) -> None:
        """Compute and store what the turn begins with, unless little of it is missing, or what it goes on from is gone."""
        generator, loaded, provider = self._generator, turn.loaded, self._generator.model_provider
        if provider.loaded is not loaded or on_battery():
            return

        def prompt_of(tokens: list[int]) -> Prompt:
            name = generator.prompts.name_of(loaded.key)
            return generator.prompts.prompt_of(as_tokens(tokens), name, turn.request.salt, provider.form)

        if self._cache.known(prompt_of(turn.answered)) < len(turn.answered):
            return
        turn.beginning = turn.beginning or self._beginning(turn, check)
        prompt = prompt_of(turn.beginning)
        if not self._is_worth_it(prompt, loaded):
            return
        start = end = -1

        def progress(step: Step) -> None:
            nonlocal start, end
            start, end = step.done if start < 0 else start, step.done
            check()

        try:
            warm_sequences(
                self._cache,
                lambda: provider.nets,
                [WarmSequence(turn.beginning, turn.request.salt, turn.request.keeping.session, LABEL)],
                model=prompt.model,
                prefill_step_size=min(CHUNK, provider.cli_args.prefill_step_size),
                progress=progress,
            )
        finally:
            if end > start:
                self._computed += end - start
                computed = ComputedAhead(prompt.model, prompt.salt, as_tokens(prompt.given)[:end], start)
                self._ahead = [*self._ahead[1 - WAITING :], computed]

    def _is_worth_it(self, prompt: Prompt, loaded: LoadedModel) -> bool:
        """Return whether enough of a turn's beginning is missing, nothing must be read for it, and the context has room."""
        depths = self._cache.match(prompt)
        fits = loaded.context is None or len(prompt) < loaded.context
        return fits and depths.ssd <= depths.ram <= len(prompt) - LEAST

    def _beginning(self, turn: NextTurn, check: Check) -> list[int]:
        """Return the tokens with which the turn begins, whatever its client will say; [] where its template refuses it."""
        generator, loaded = self._generator, turn.loaded
        requests = []
        try:
            for chat in turn.chats:
                chat = chat.canonical(generator.canonical.rules)
                for tokens in next_requests(loaded.tokenizer, chat, generator.cli_args.chat_template_args):
                    requests.append(generator.prompt_tokenizer.written(loaded, turn.request, tokens).tokens)
                    check()
        except BadPrompt as error:
            log.debug("no next turn: %s", error)
            return []
        return common_beginning(requests)

    def _count_hit(self, prompt: Prompt, depth: int) -> None:
        """Hear how many tokens of a prompt a hit gave. What it gave of a turn is counted once."""
        ahead = [(computed, computed.hit(prompt, depth)) for computed in self._ahead]
        self._hit += sum(tokens for _, tokens in ahead)
        self._ahead = [computed for computed, tokens in ahead if not tokens]
