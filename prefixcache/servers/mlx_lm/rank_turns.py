"""mlx_lm.server on several ranks (`mlx.launch`), each with a PrefixCache of its own. Rank 0 takes the requests and decides
what hangs on time or size; all ranks do the same work in the same order, or they would wait for each other for ever.

What must be the same is agreed on: which request is next, its tokens, how deep it is hit (`PrefixCache(group=)`), whether it
waits, whether it is given up, and when the server ends.
"""

from __future__ import annotations

import copy
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import mlx.core as mx
from mlx_lm import utils

from prefixcache.ranks import OtherWeights, Ranks, rank_identity
from prefixcache.ranks.watch import Watch
from prefixcache.servers.errors import RankFailed
from prefixcache.servers.in_flight import Wait
from prefixcache.servers.mlx_lm.answers import Answers
from prefixcache.servers.mlx_lm.prompt_cache import identity_of
from prefixcache.servers.mlx_lm.provider import BatchLimits, Provider
from prefixcache.servers.mlx_lm.turns import WAKE, Requests, Turns
from prefixcache.servers.mlx_lm.upstream import Loop, ModelKey, has_images
from prefixcache.servers.request_schema import RequestRefused
from prefixcache.upstream import any_backend, download, known_options

SMALL_FILES = ["*.json", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jsonl", "*.jinja"]
POLL = 0.005  # seconds that rank 0 waits for a request while others are deferred
END = "end"  # in the place of a request: all ranks end their loop
RANK_0_KNOWS = Wait(lambda: True, 0.0)  # only rank 0 knows what this request waits for


class RankTurns(Turns):
    """Decides for one rank before each step, in step with the others. Made on the thread that runs the loop: the ranks have
    agreed on things there.
    """

    seconds = float("inf")

    def __init__(self, ranks: Ranks, watch: Watch):
        self._ranks, self._watch = ranks, watch
        self._ending = False
        self._alone = Answers(None)  # of the request that is served by itself
        self.thread = threading.current_thread()
        self.is_first = ranks.is_first

    def name_part(self, model_key: Any, model: Any) -> str:
        identity = identity_of(model_key)
        return rank_identity(identity, model, self._ranks).removeprefix(identity)

    def stop(self, loop: Loop) -> None:
        """Have rank 0 tell the others, so that all end at the same step."""
        self._ending = True

    def leave(self) -> None:
        self._watch.ask_to_end()
        self._watch.close()

    def step_may_take_long(self) -> None:
        self._watch.step_may_take_long()

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, provider: Provider, key: ModelKey) -> None:
        """Load a part of a model, once all ranks have found that they can."""
        model, adapter, draft = key
        if adapter is not None or draft is not None:
            return provider.models.load_now(*key)  # refuses it, and leaves what is loaded
        self._watch.step_may_take_long()
        # The ranks wait for each other in the middle of loading: what can be known to fail must fail before.
        try:
            self._ranks.done_by_all(lambda: self._make(provider, model), f"load {model}")
        finally:
            self._reseed()
        try:
            with any_backend():
                provider.load_now(*key)
        except OtherWeights as error:
            provider.drop()
            raise OtherWeights(f"{model}: {error}") from error
        except Exception as error:
            raise RankFailed(f"{model} can't be loaded: {type(error).__name__}: {error}") from error
        self._reseed()

    def agreed(self, limits: BatchLimits) -> BatchLimits:
        """Return the limits that hold on every rank."""
        sliceable, batchable, concurrency = self._ranks.least(*map(int, limits))
        return BatchLimits(bool(sliceable), bool(batchable), concurrency)

    def _reseed(self) -> None:
        """Seed all ranks alike, which must sample the same tokens: making a model draws random numbers, or fails on one."""
        mx.random.seed(self._ranks.from_first(secrets.randbits(31)))

    def _make(self, provider: Provider, name: str) -> None:
        """Make the model and its tokenizer without the weights: an error, that of mlx-lm, where it can't be."""
        folder, models = download(name, allow_patterns=SMALL_FILES), provider.models
        models.tokenizer_in(folder)
        trusted = known_options(utils.load_model, trust_remote_code=provider.cli_args.trust_remote_code)
        model, _ = utils.load_model(folder, lazy=True, strict=False, **trusted)
        if models.pipeline_group is not None:
            if not hasattr(getattr(model, "model", None), "pipeline"):
                raise ValueError(f"{name}: mlx-lm has no pipeline for this model; leave --pipeline out")
            if not (folder / "model.safetensors.index.json").is_file():
                raise ValueError(f"{name}: --pipeline needs its model.safetensors.index.json")
        elif not hasattr(model, "shard"):
            raise ValueError(f"{name}: mlx-lm can't shard this model; try --pipeline")
        else:
            model.shard(models.tensor_group)

    # -- which request is next ----------------------------------------------------------------------------------------

    def begin_poll(self, timeout: float | None, *, deferred: bool) -> float | None:
        self._watch.step()
        return min(timeout, POLL) if deferred and timeout is not None else timeout

    def any_waits(self, of: Requests, waits: Callable[[], bool]) -> bool:
        """Return whether rank 0 has a request to look at, one that was given up, or its own end."""
        self._watch.step()
        here = False
        if self.is_first:
            given_up = {answers for answers in of.answering if answers.given_up}
            of.answering -= given_up  # once is enough
            here = self._ending or bool(given_up) or waits()
        return self._ranks.any(here)

    def take(self, of: Requests, timeout: float | None) -> Any:
        """Return rank 0's request on every rank, with its tokens, if the model that it asks for is loaded."""
        message: bytes | str | None = None
        item: Any = super().take(of, timeout) if self.is_first else None
        if item is not None and item[0] is WAKE:
            item = None
        if self.is_first:
            message = END if self._ending else _packed(of, *item) if item is not None else None
        if timeout is not None:
            self._watch.meet()
        message = self._ranks.from_first(message)
        if not isinstance(message, bytes):
            if message == END:
                of.loop.stop()
            if of.loop.stopped and item is not None:
                of.requests.put(item)  # it is told that the server ends
            return None
        request, args, tokens = pickle.loads(message)
        queue: Any = Queue()
        if item is not None:
            queue, request, args = item
        request.rank_tokens = tokens
        return queue, request, args

    def first_over(self, waits: list[Wait]) -> int | None:
        """Return the place of the first wait that is over on every rank, or that is too long for rank 0."""
        late = [self.is_first and time.monotonic() >= wait.until for wait in waits]
        greatest = self._ranks.most(*(int(not wait.done()) for wait in waits), *map(int, late))
        ends = zip(greatest, greatest[len(waits) :], strict=False)
        return next((place for place, (waiting, too_late) in enumerate(ends) if not waiting or too_late), None)

    def awaited(self, find: Callable[[], Wait | None]) -> Wait | None:
        """Return whom a request waits for, as rank 0 finds it."""
        awaited = find() if self.is_first else None
        return (awaited or RANK_0_KNOWS) if self._ranks.any(awaited is not None) else None

    # -- a request ----------------------------------------------------------------------------------------------------

    def tokens(self, request: Any, tokenize: Callable[[], Any]) -> Any:
        """Return a request's tokens as rank 0 has made them, or makes them now; its error on all ranks."""
        tokens, request.rank_tokens = getattr(request, "rank_tokens", None), None
        try:
            if isinstance(tokens, Exception):
                request.rank_tokens = tokens  # the loop asks once more, to answer with it
                raise tokens
            if tokens is None:
                tokens = tokenize() if has_images(request) else self._ranks.done_by_first(tokenize)
        except Exception as error:
            error.of_all_ranks = True  # type: ignore[attr-defined]
            raise
        return tokens

    @contextmanager
    def failure_scope(self, what: str, request: Any = None) -> Iterator[None]:
        """Let an exception within the block end the ranks, unless all have it: else this one alone would go on."""
        try:
            yield
        except Exception as error:
            if getattr(error, "of_all_ranks", False) or (request is not None and has_images(request)):
                raise
            raise RankFailed(f"{what}: {type(error).__name__}: {error}") from error

    def begin_alone(self, answers: Answers) -> None:
        self._alone = answers
        answers.in_step = True

    def stream(self, begin: Callable[..., Iterator[Any]], options: dict[str, Any]) -> Iterator[Any]:
        progress = options.get("prompt_progress_callback") or (lambda done, total: None)

        def step(done: int, total: int) -> None:
            self._watch.step()
            progress(done, total)

        with self.failure_scope("a request failed"):
            for response in begin(**{**options, "prompt_progress_callback": step}):
                self._watch.step()
                if self._ranks.any(self.is_first and self._alone.stop_asked):
                    return
                yield response


def _packed(of: Requests, queue: Any, request: Any, args: Any) -> bytes | None:
    """Return a request for the other ranks, pickled: without the attributes that are rank 0's alone, with its tokens. If that
    can't be, answer the request with an error and return None.
    """
    bare = copy.copy(request)
    for name in ("request_log", "tokenized", "early_tokens", "answers"):
        vars(bare).pop(name, None)
    try:
        return pickle.dumps((bare, args, _tokens_of(of, request, args)))
    except Exception as error:  # nested too deeply, or no model's name
        queue.put(ValueError(f"the request can't be read: {type(error).__name__}: {error}"))
        return None


def _tokens_of(of: Requests, request: Any, args: Any) -> Any:
    """Return what mlx-lm's `_tokenize` gives, or its error. None where the model is yet to be loaded, or there are images."""
    loaded = of.model_provider.loaded_as(args.model)
    if loaded is None or has_images(request):
        return None
    try:
        return of.prompt_tokenizer.tokenize(loaded, request, args)
    except RequestRefused as error:
        return error
    except Exception as error:
        return ValueError(str(error))
