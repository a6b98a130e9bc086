"""Requests on their way through mlx_lm.server's loop, with a PrefixCache: what `mlx_lm_server` changes of that loop.

mlx-lm's code does the work: templates, batches, tools, generation. Here each prompt gets its tenant's salt, weights are
identified when they are loaded, and a request waits aside, while others are served, for what the SSD has of its prompt or
for one that computes the same prefix.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty
from typing import Any, NamedTuple

import mlx_lm.server as upstream
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from prefixcache.cache import PrefixCache, usable_memory
from prefixcache.keys import as_tokens
from prefixcache.layers import CacheError
from prefixcache.layers.plan import read
from prefixcache.servers.admission import Admission, Computing
from prefixcache.servers.mlx_lm.prefill import Blockwise
from prefixcache.servers.mlx_lm.prefill import stream as blockwise_stream
from prefixcache.servers.mlx_lm.prompt_cache import SaltedToken, TieredPromptCache, identity_of
from prefixcache.servers.read_or_compute import Reading, ReadOrCompute
from prefixcache.servers.request_log import Found, RequestLog
from prefixcache.settings import ram_auto

log = logging.getLogger("prefixcache")


class ServedPromptCache(TieredPromptCache):
    """The prompt cache of one server. Requests wait for the SSD `before_turn`, not in the lookup, and those that wait for a
    prompt are told when it is stored.
    """

    def __init__(
        self,
        cache: PrefixCache,
        on_stored: Callable[[np.ndarray, str, bytes], None],
        rows: str = "",
        exact_prefill: bool = False,
    ):
        """`rows`: a suffix of names, for a server whose rows are others than the model's. `exact_prefill`: rows stay as they
        are computed until they are fetched.
        """
        super().__init__(
            cache, identify=lambda model: identity_of(model) + rows, longest_wait=0, salted_only=True,
            whole_blocks=not exact_prefill,
        )  # fmt: skip
        self.exact_prefill = exact_prefill
        self.found: Sequence[int] = ()  # what the last lookup has given the state of
        self.before_turn = ReadOrCompute(cache, whole_blocks=not exact_prefill)
        self.before_turn.rates = self.reading.rates
        self._on_stored = on_stored

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        found, rest = super().fetch_nearest_cache(model, tokens)
        found, rest = (found, rest) if len(rest) else (None, tokens)  # mlx-lm's batches need a token to go on from
        self.found = tokens[: len(tokens) - len(rest)]
        return found, rest

    def keep_blocks(
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], since: int, state: bool, label: str = "user"
    ) -> None:
        """Keep whole blocks in the middle of a prefill; from token `since` on their rows become what a hit will give."""
        salt = self._salt(tokens)
        if salt is None or self.exact_prefill:
            return
        with self._turn:
            try:
                self.cache.store(
                    as_tokens(tokens), prompt_cache, model=self.name_of(model), salt=salt, label=label, write_back=True,
                    since=since, state=state,
                )  # fmt: skip
                self._on_stored(as_tokens(tokens), self.name_of(model), salt)
            except CacheError as error:
                log.debug("blocks stay as they are computed: %s", error)
            except Exception as error:
                self._fail(error)

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        if len(tokens) and isinstance(tokens[0], SaltedToken):
            self._on_stored(as_tokens(tokens), self.name_of(model), tokens[0].salt)


class Provider(upstream.ModelProvider):
    """mlx-lm's provider of models."""

    on_load: Callable[[Any], Any] = staticmethod(lambda model_key: None)
    sliceable = False

    def has(self, model_path: Any, adapter_path: Any, draft_model_path: Any) -> bool:
        """Whether the model is loaded that a request means by these names."""
        meant: list[Any] = []
        asked = copy.copy(self)
        asked.model_key = None
        asked._load = lambda *key: meant.append(key)  # type: ignore[method-assign]
        upstream.ModelProvider.load(asked, model_path, adapter_path, draft_model_path)
        return self.tokenizer is not None and meant == [self.model_key]

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super()._load(*args, **kwargs)
        self.on_load(self.model_key)
        self._prepare_for(make_prompt_cache(self.model))
        return loaded

    def _prepare_for(self, prompt_cache: list[Any]) -> None:
        """What the model's layers ask for. Prompts of unequal length that mlx-lm prefills together leave some recurrent
        states wrong (ml-explore/mlx-lm#1736), and what is wrong must not be kept: there, one prompt at a time.
        """
        self.sliceable = can_trim_prompt_cache(prompt_cache)
        self._asked_concurrency = getattr(self, "_asked_concurrency", self.cli_args.prompt_concurrency)
        try:
            recurrent = any(leaf.layout["kind"] == "snapshot" for leaf in read(prompt_cache).leaves)
        except CacheError:  # layers that are not known here may be anything
            recurrent = True
        self.cli_args.prompt_concurrency = 1 if recurrent else self._asked_concurrency


class Ended(Exception):
    """The server ends before a request is answered."""

    def __init__(self) -> None:
        super().__init__("the server ends; ask again when it is back")


class Answers:
    """The queue on which a request is answered, watched: whether it is still wanted, and how it ends."""

    def __init__(self, queue: Any, request_log: RequestLog | None = None):
        self._queue = queue
        self._log = request_log or RequestLog()
        self._context: Any = None
        self._over = False
        self._cut = False
        self.alone = False  # served by itself, in one call that only an exception can end

    def put(self, answer: Any) -> None:
        if isinstance(answer, upstream.GenerationContext):
            self._context = answer
        if self._cut:
            self.stop()
            if self.alone and isinstance(answer, tuple):
                raise Ended  # in the middle of its prefill
            return
        if answer is None or isinstance(answer, Exception):
            self._over = True
        self._log.saw(answer)
        self._queue.put(answer)

    def wanted(self) -> bool:
        """Neither answered, nor given up by the client."""
        return not self._over and not (self._context is not None and self._context._should_stop)

    def stop(self) -> None:
        """The server ends: if the answer is not whole, `Ended` is its last word, and no more than one token, or one step of
        the prefill, is still computed.
        """
        if not self._over:
            self._over = self._cut = True
            self._queue.put(Ended())
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
    when that failed; `failure` says why. `model`: of the model that is loaded, a line for the log; "" of none.
    """

    def __init__(
        self, provider: Provider, cache: PrefixCache, before: Callable[[Generator], None], exact_prefill: bool = False
    ):
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self.model = ""
        self.answering: set[Answers] = set()
        self.admission = Admission(whole_blocks=not exact_prefill)
        self._before = before
        self._aside: deque[Aside] = deque()
        self.prompts = ServedPromptCache(cache, self._stored, _rows(provider.cli_args), exact_prefill)
        provider.on_load = self._loaded
        super().__init__(provider, self.prompts)
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
        if self.prompts.exact_prefill:
            return super()._generate()
        upstream.BatchGenerator = partial(Blockwise, keep_blocks=self._keep_blocks)  # mlx-lm's loop takes both by name
        upstream.stream_generate = self._stream
        try:
            super()._generate()
        finally:
            upstream.BatchGenerator, upstream.stream_generate = BatchGenerator, stream_generate

    def _keep_blocks(self, tokens: Sequence[int], prompt_cache: list[Any], since: int, state: bool) -> None:
        self.prompts.keep_blocks(self.model_provider.model_key, tokens, prompt_cache, since, state)

    def _stream(self, *, prompt: Sequence[int], **options: Any) -> Iterator[Any]:
        """A request that is served by itself: `prompt` is what its lookup has left of it."""
        return blockwise_stream(stream_generate, self.prompts.found, self._keep_blocks, prompt=prompt, **options)

    def _loaded(self, model_key: Any) -> None:
        """Weights are identified when they are loaded, and with ram="auto" the budget becomes what they leave."""
        provider, cache = self.model_provider, self.prompts.cache
        name, weights = self.prompts.name_anew(model_key), _weights(provider.model) + _weights(provider.draft_model)
        if cache.settings.ram == "auto":
            cache.resize(ram=ram_auto(usable_memory(), weights))
        stats = cache.stats()
        self.model = (
            f"model {model_key[0]}: {name}, {weights / 1e9:.2f} GB of weights; "
            f"RAM budget {stats.ram_limit / 1e9:.2f} GB (ram={stats.ram_setting})"
        )
        if self.ready.is_set():
            log.info("%s", self.model)

    def _serve_single(self, request: Any, *others: Any) -> None:
        request[0].alone = True
        super()._serve_single(request, *others)

    def generate(self, *request: Any, **options: Any) -> Any:
        if self._stop:
            raise Ended
        return super().generate(*request, **options)

    def stop_answering(self) -> None:
        """Tell all that ask that the server ends, and let what is under way end at its next token; call it until the thread
        has ended.
        """
        for answers in list(self.answering):
            answers.stop()
        with suppress(Empty):
            while True:
                queue = self.requests.get_nowait()[0]
                if queue is not WAKE:
                    queue.put(Ended())

    # -- requests that wait aside -------------------------------------------------------------------------------------

    def _next_request(self, timeout: float | None = None) -> Any:
        """The next request that can begin. None when there is none, also when one came that must wait."""
        item = self._waited() or super()._next_request(timeout)
        if item is None or item[0] is WAKE:
            item = self._waited()
        if item is None:
            return None
        queue, request, args = item
        if not isinstance(queue, Answers):
            queue = Answers(queue, _log_of(request))
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
            over = self._what_for(request, known, answers) if known is not None else None
        except Exception:  # the loop meets it again, and answers with it
            return item
        if over is not None:
            self._aside.append(Aside(item, over))
            return None
        return item

    def _what_for(self, request: Any, known: Known, answers: Answers) -> Callable[[], bool] | None:
        """What a request waits for, as a function that says whether it is over. None: it waits for nothing, and is under
        way from here on.
        """
        name, salt = known.space
        request_log = _log_of(request)
        if request_log.found is None:
            request_log.found = Found(*self.prompts.cache.match(known.ids, model=name, salt=salt))
            reading = self.prompts.before_turn.begin(known.ids, model=name, salt=salt)
            if reading is not None:
                request_log.wait_for_ssd()
                return self._read(reading)
        request_log.go_on()
        has = self.prompts.cache.match(known.ids, model=name, salt=salt).ram
        awaited = self.admission.wait_for(known.ids, known.space, has, sliceable=self.model_provider.sliceable)
        if awaited is None:
            self.admission.enter(Computing(known.ids, known.space, known.boundaries, answers.wanted, has))
            return None
        return awaited.over

    def _read(self, reading: Reading) -> Callable[[], bool]:
        until = time.monotonic() + reading.worth
        reading.depth.add_done_callback(lambda done: self.requests.put((WAKE, None, None)))
        return lambda: reading.depth.done() or time.monotonic() >= until

    def _know(self, request: Any, args: Any) -> Known | None:
        """Tokenize a request before its turn, if the model that it asks for is the one that is loaded."""
        if not self.model_provider.has(args.model.model, args.model.adapter, args.model.draft):
            return None
        tokenizer = self.model_provider.tokenizer
        known = getattr(request, "known", None)
        if known is None or known.tokenizer is not tokenizer:
            known = request.known = self._look(tokenizer, request, self._tokens(tokenizer, request, args))
        return known

    def _look(self, tokenizer: Any, request: Any, tokenized: Any) -> Known:
        prompt, segments, vision = tokenized[0], tokenized[1], _vision(tokenized)
        ids = as_tokens(prompt if vision is None else vision.cache_key if _are_apart(vision) else [])
        ends = np.cumsum([len(segment) for segment in segments])
        boundaries = tuple(int(end) for end in sorted({*ends[:-1], len(ids) - 1}))
        space = self.prompts.name_of(self.model_provider.model_key), _salt_of(request)
        return Known(tokenizer, tokenized, ids, space, boundaries)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """mlx-lm's, with the request's salt on the prompt; what was found before the request's turn is taken.

        A request whose model was loaded for it waits for the SSD here: nobody else is served then.
        """
        _check(args, self.model_provider.model, tokenizer)
        known = getattr(request, "known", None)
        request.known = None
        if known is not None and known.tokenizer is tokenizer:
            return known.tokenized
        known = self._look(tokenizer, request, self._tokens(tokenizer, request, args))
        request_log, (name, salt) = _log_of(request), known.space
        if request_log.found is None:
            request_log.found = Found(*self.prompts.cache.match(known.ids, model=name, salt=salt))
            request_log.wait_for_ssd()
            self.prompts.before_turn.wait(known.ids, model=name, salt=salt)
            request_log.go_on()
        return known.tokenized

    def _tokens(self, tokenizer: Any, request: Any, args: Any) -> Any:
        own = replace(request, messages=copy.deepcopy(request.messages))  # mlx-lm rewrites them in place
        return _salted(super()._tokenize(tokenizer, own, args), _salt_of(request))

    def _stored(self, ids: np.ndarray, name: str, salt: bytes) -> None:
        kept = self.prompts.cache.match(ids, model=name, salt=salt).ssd
        self.admission.stored(ids, (name, salt), kept)


def _check(args: Any, model: Any, tokenizer: Any) -> None:
    """ValueError for what would end the thread that generates, or the process, once it samples."""
    if not args.sampling.top_k and not args.logits.logit_bias:
        return
    size = getattr(getattr(model, "args", None), "vocab_size", None) or len(tokenizer.get_vocab())
    if not args.sampling.top_k < size:
        raise ValueError(f"top_k={args.sampling.top_k}: the model has {size} tokens; give less")
    for token in args.logits.logit_bias or ():
        if not 0 <= token < size:
            raise ValueError(f"logit_bias of token {token}: the model has tokens 0 to {size - 1}")


def _rows(args: Any) -> str:
    """What --kv-bits makes of rows. A server without it can't batch them, so their names must differ."""
    bits = getattr(args, "kv_bits", None)  # mlx-lm 0.31 has none
    return "" if bits is None else f"|kv-bits {bits}/{args.kv_group_size} from {args.quantized_kv_start}"


def _vision(tokenized: Any) -> Any:
    return tokenized[4] if len(tokenized) > 4 else None  # mlx-lm 0.31 has none


def _weights(model: Any) -> int:
    """The bytes of a model's parameters; None has none."""
    return 0 if model is None else sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))


def _log_of(request: Any) -> RequestLog:
    found: RequestLog | None = getattr(request, "request_log", None)
    if found is None:  # it did not come over HTTP
        found = request.request_log = RequestLog()
    return found


def _salt_of(request: Any) -> bytes:
    return getattr(request, "cache_salt", "").encode()


def _salted(tokenized: Any, salt: bytes) -> Any:
    """The first token of the prompt, of its first segment, and of the images' key, made to carry the salt.

    mlx-lm takes images with no token in between for one, the first: a key that does so is left without, and so without hits.
    """

    def own(tokens: list[int]) -> list[int]:  # a tokenizer may have given a list of its own
        return [SaltedToken(int(tokens[0]), salt), *tokens[1:]] if tokens else tokens

    prompt, segments, *rest = tokenized
    vision = _vision(tokenized)
    if vision is not None and _are_apart(vision):
        vision.cache_key = own(vision.cache_key)
    return own(prompt), [own(segments[0]), *segments[1:]], *rest


def _are_apart(vision: Any) -> bool:
    return len(vision.starts) == len(vision.pixel_values)
