"""Requests on their way through mlx_lm.server's loop, with a PrefixCache: what `mlx_lm_server` changes of that loop.

mlx-lm's code does the work: templates, batches, tools, generation. Here each prompt gets its tenant's salt, weights are
identified when they are loaded, and a request waits aside, while others are served, for what the SSD has of its prompt or
for one that computes the same prefix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx_lm.server as upstream
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from prefixcache.cache import PrefixCache
from prefixcache.integrations.admission import Admission, Computing
from prefixcache.integrations.mlx_lm import SaltedToken, TieredPromptCache
from prefixcache.integrations.read_or_compute import Reading
from prefixcache.keys import as_tokens

log = logging.getLogger("prefixcache")


class ServedPromptCache(TieredPromptCache):
    """The prompt cache of one server: it times what it does on the thread that generates, and tells who waits."""

    def __init__(self, cache: PrefixCache, max_size: int | None, on_stored: Callable[[np.ndarray, str, bytes], None]):
        super().__init__(cache, max_size, longest_wait=0, salted_only=True)
        self._on_stored = on_stored
        self.store_seconds = self.fetch_seconds = 0.0
        self.stores = self.fetches = 0

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        began = time.perf_counter()
        found = super().fetch_nearest_cache(model, tokens)
        self.fetch_seconds += time.perf_counter() - began
        self.fetches += 1
        return found

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        began = time.perf_counter()
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        self.store_seconds += time.perf_counter() - began
        self.stores += 1
        if len(tokens) and isinstance(tokens[0], SaltedToken):
            self._on_stored(as_tokens(tokens), self.name_of(model), tokens[0].salt)

    def forget_names(self) -> None:
        """Other weights are being loaded: identify them anew."""
        self._names.clear()


class Provider(upstream.ModelProvider):
    """mlx-lm's provider of models. `asked`: the last request's names, whose model is the one that is loaded now."""

    asked: tuple[Any, Any, Any] | None = None
    on_load: Callable[[], None] = staticmethod(lambda: None)
    sliceable = False

    def load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        self.asked = None
        loaded = super().load(model_path, adapter_path, draft_model_path)
        self.asked = (model_path, adapter_path, draft_model_path)
        return loaded

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        self.on_load()
        loaded = super()._load(*args, **kwargs)
        self.sliceable = self.model is not None and can_trim_prompt_cache(make_prompt_cache(self.model))
        return loaded


class Answers:
    """The queue on which a request is answered, watched: whether it is still wanted, and how far it is."""

    def __init__(self, queue: Any):
        self._queue = queue
        self._context: Any = None
        self._over = False
        self.began = time.monotonic()
        self.first: float | None = None  # seconds to the first token

    def put(self, answer: Any) -> None:
        if isinstance(answer, upstream.GenerationContext):
            self._context = answer
        elif isinstance(answer, upstream.Response) and self.first is None:
            self.first = time.monotonic() - self.began
        elif answer is None or isinstance(answer, Exception):
            self._over = True
        self._queue.put(answer)

    def wanted(self) -> bool:
        """Neither answered, nor given up by the client."""
        return not self._over and not (self._context is not None and self._context._should_stop)

    def stop(self) -> None:
        if self._context is not None:
            self._context.stop()


class Known(NamedTuple):
    """What is known of a request before its turn: its tokens as the cache has them, and what `_tokenize` gave."""

    tokenizer: Any
    tokenized: Any
    ids: np.ndarray
    space: tuple[str, bytes]
    boundaries: tuple[int, ...]


class Aside(NamedTuple):
    """A request that waits, and for what."""

    item: Any
    over: Callable[[], bool]


class TimeBudget(upstream.TimeBudget):
    """How long the batch goes on before the loop looks at requests: half a second in mlx-lm, here until one is there, and
    one step at least.
    """

    def __init__(self, someone_waits: Callable[[], bool]):
        super().__init__()
        self._someone_waits = someone_waits
        self._steps = 0

    def __iter__(self) -> Any:
        self._steps = 0
        return super().__iter__()

    def __next__(self) -> None:
        self._steps += 1
        if self._steps > 1 and self._someone_waits():
            raise StopIteration
        super().__next__()


WAKE = object()  # in the queue of requests: look at those that wait


class Generator(upstream.ResponseGenerator):
    """mlx-lm's loop, on its own thread, with requests that wait aside.

    `before`: called on that thread when the default model is loaded, before the first request. `ready` is set after it, or
    when that failed; `failure` says why.
    """

    def __init__(
        self, provider: Provider, cache: PrefixCache, max_size: int | None, before: Callable[[Generator], None]
    ):
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self.answering: set[Answers] = set()
        self.admission = Admission()
        self._before = before
        self._aside: deque[Aside] = deque()
        prompts = ServedPromptCache(cache, max_size, self._stored)
        self.prompts = prompts
        provider.on_load = prompts.forget_names
        super().__init__(provider, prompts)
        self._time_budget = TimeBudget(self._someone_waits)

    def _generate(self) -> None:
        try:
            self.model_provider.load_default()
            self._before(self)
        except Exception as error:
            self.failure = error
            return
        finally:
            self.ready.set()
        super()._generate()

    def stop_answering(self) -> None:
        """Let requests under way end at their next token."""
        for answers in list(self.answering):
            answers.stop()

    # -- requests that wait aside -------------------------------------------------------------------------------------

    def _next_request(self, timeout: float | None = None) -> Any:
        """The next request that can begin. None when there is none, also when one came that must wait."""
        item = self._waited() or super()._next_request(timeout)
        if item is None or item[0] is WAKE:
            return self._waited()
        queue, request, args = item
        if not isinstance(queue, Answers):
            queue = Answers(queue)
            self.answering = {answers for answers in self.answering if answers.wanted()} | {queue}
        return self._admit((queue, request, args))

    def _someone_waits(self) -> bool:
        return not self.requests.empty() or any(aside.over() for aside in self._aside)

    def _waited(self) -> Any:
        for aside in self._aside:
            if aside.over():
                self._aside.remove(aside)
                return aside.item
        return None

    def _admit(self, item: Any) -> Any:
        """The request, if it can begin; else it waits aside."""
        answers, request, args = item
        try:
            known = self._know(request, args)
            over = self._what_for(request, known) if known is not None else None
        except Exception:  # the loop meets it again, and answers with it
            return item
        if over is not None:
            self._aside.append(Aside(item, over))
            return None
        if known is not None:
            has = self.prompts.cache.match(known.ids, model=known.space[0], salt=known.space[1]).ram
            self.admission.enter(Computing(known.ids, known.space, known.boundaries, answers.wanted, has))
        return item

    def _what_for(self, request: Any, known: Known) -> Callable[[], bool] | None:
        """What a request waits for, as a function that says whether it is over; None: it waits for nothing."""
        name, salt = known.space
        if not getattr(request, "read", False):
            request.read = True
            reading = self.prompts.reading.begin(known.ids, model=name, salt=salt)
            if reading is not None:
                return self._read(reading)
        has = self.prompts.cache.match(known.ids, model=name, salt=salt).ram
        awaited = self.admission.wait_for(known.ids, known.space, has, sliceable=self.model_provider.sliceable)
        return awaited.over if awaited is not None else None

    def _read(self, reading: Reading) -> Callable[[], bool]:
        until = time.monotonic() + reading.worth
        reading.depth.add_done_callback(lambda done: self.requests.put((WAKE, None, None)))
        return lambda: reading.depth.done() or time.monotonic() >= until

    def _know(self, request: Any, args: Any) -> Known | None:
        """Tokenize a request before its turn, if the model that it asks for is the one that is loaded."""
        asked = args.model.model, args.model.adapter, args.model.draft
        if self.model_provider.asked != asked or self.model_provider.tokenizer is None:
            return None
        known = getattr(request, "known", None)
        if known is None or known.tokenizer is not self.model_provider.tokenizer:
            tokenizer = self.model_provider.tokenizer
            known = request.known = self._look(tokenizer, request, self._tokenize(tokenizer, request, args))
        return known

    def _look(self, tokenizer: Any, request: Any, tokenized: Any) -> Known:
        prompt, segments, vision = tokenized[0], tokenized[1], _vision(tokenized)
        ids = as_tokens(prompt if vision is None else vision.cache_key)
        ends = np.cumsum([len(segment) for segment in segments])
        boundaries = tuple(int(end) for end in sorted({*ends[:-1], len(ids) - 1}))
        space = self.prompts.name_of(self.model_provider.model_key), _salt_of(request)
        return Known(tokenizer, tokenized, ids, space, boundaries)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """mlx-lm's, with the request's salt on the prompt; what was found before the request's turn is taken."""
        known = getattr(request, "known", None)
        if known is not None:
            request.known = None
            if known.tokenizer is tokenizer:
                return known.tokenized
        return _salted(super()._tokenize(tokenizer, request, args), _salt_of(request))

    def _stored(self, ids: np.ndarray, name: str, salt: bytes) -> None:
        self.admission.stored(ids, (name, salt))


def _vision(tokenized: Any) -> Any:
    return tokenized[4] if len(tokenized) > 4 else None  # mlx-lm 0.31 has none


def _salt_of(request: Any) -> bytes:
    return getattr(request, "cache_salt", "").encode()


def _salted(tokenized: Any, salt: bytes) -> Any:
    """The first token of the prompt, of its first segment, and of the images' key, made to carry the salt."""
    vision = _vision(tokenized)
    for tokens in (tokenized[0], tokenized[1][0], *([vision.cache_key] if vision is not None else [])):
        if tokens:
            tokens[0] = SaltedToken(int(tokens[0]), salt)
    return tokenized
