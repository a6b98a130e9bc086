"""mlx_lm.server on several ranks (`mlx.launch`), each with a PrefixCache of its own. Rank 0 takes the requests and decides
what hangs on time or size; all ranks do the same work in the same order, or they would wait for each other for ever.

What must be the same is agreed on: which request is next, its tokens, how deep it is hit (`PrefixCache(group=)`), whether it
waits, whether it is given up, and when the server ends.
"""

from __future__ import annotations

import copy
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import mlx.core as mx
from mlx_lm import utils

from prefixcache.cache import PrefixCache
from prefixcache.ranks import OtherWeights, Ranks, rank_identity
from prefixcache.ranks.watch import Watch
from prefixcache.servers.in_flight import Admission, Awaited, Computing
from prefixcache.servers.mlx_lm.answers import Answers
from prefixcache.servers.mlx_lm.errors import RankFailed
from prefixcache.servers.mlx_lm.generator import WAKE, Generator, TimeBudget, Wait
from prefixcache.servers.mlx_lm.prompt_cache import identity_of
from prefixcache.servers.mlx_lm.provider import Provider
from prefixcache.servers.mlx_lm.tenant_cache import TokenizedRequest
from prefixcache.servers.mlx_lm.upstream import has_images
from prefixcache.servers.read_or_compute import AwaitedPromotions
from prefixcache.servers.request_schema import RequestRefused
from prefixcache.upstream import any_backend, known_options

log = logging.getLogger("prefixcache")

SMALL_FILES = ["*.json", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jsonl", "*.jinja"]
POLL = 0.005  # seconds that rank 0 waits for a request while others are deferred
END = "end"  # in the place of a request: all ranks end their loop
RANK_0_KNOWS = Wait(lambda: True, 0.0)  # only rank 0 knows what this request waits for


class RankAdmission(Admission):
    """Rank 0 decides which requests wait for which."""

    def __init__(self, ranks: Ranks, whole_blocks: bool):
        super().__init__(whole_blocks=whole_blocks)
        self._ranks = ranks

    def wait_for(self, *request: Any, **options: Any) -> Awaited | None:
        awaited = super().wait_for(*request, **options) if self._ranks.is_first else None
        if not self._ranks.any(awaited is not None):
            return None
        return awaited or RANK_0_KNOWS  # type: ignore[return-value]

    def enter(self, prompt: Computing) -> None:
        if self._ranks.is_first:
            super().enter(prompt)


class RankProvider(Provider):
    """A rank's part of a model. What depends on layers is agreed on: the stages of a pipeline have different ones."""

    def __init__(self, cli_args: Any, ranks: Ranks, watch: Watch, max_context: int | None = None):
        self._ranks, self._watch = ranks, watch
        super().__init__(cli_args, max_context)

    def _load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        if adapter_path is not None or draft_model_path is not None:
            return super()._load(model_path, adapter_path, draft_model_path)  # refused before anything is loaded
        self._watch.rest()
        # The ranks wait for each other in the middle of loading: what can be known to fail must fail before.
        try:
            self._ranks.done_by_all(lambda: self._make(model_path), f"load {model_path}")
        finally:
            self._reseed()
        try:
            with any_backend():
                loaded = super()._load(model_path, adapter_path, draft_model_path)
        except OtherWeights as error:
            self.reset()
            raise OtherWeights(f"{model_path}: {error}") from error
        except Exception as error:
            raise RankFailed(f"{model_path} can't be loaded: {type(error).__name__}: {error}") from error
        self._reseed()
        return loaded

    def _reseed(self) -> None:
        """Making a model draws random numbers, and on one rank it may have failed: all must sample the same tokens."""
        mx.random.seed(self._ranks.from_first(secrets.randbits(31)))

    def _make(self, model_path: str) -> None:
        """Make the model and its tokenizer without the weights: an error, that of mlx-lm, where it can't be."""
        folder = utils._download(model_path, allow_patterns=SMALL_FILES)
        utils.load_tokenizer(folder, self._tokenizer_config)
        trusted = known_options(utils.load_model, trust_remote_code=self.cli_args.trust_remote_code)
        model, _ = utils.load_model(folder, lazy=True, strict=False, **trusted)
        if self.pipeline_group is not None:
            if not hasattr(getattr(model, "model", None), "pipeline"):
                raise ValueError(f"{model_path}: mlx-lm has no pipeline for this model; leave --pipeline out")
            if not (Path(folder) / "model.safetensors.index.json").is_file():
                raise ValueError(f"{model_path}: --pipeline needs its model.safetensors.index.json")
        elif not hasattr(model, "shard"):
            raise ValueError(f"{model_path}: mlx-lm can't shard this model; try --pipeline")
        else:
            model.shard(self.tensor_group)

    def _prepare_for(self, prompt_cache: list[Any]) -> None:
        super()._prepare_for(prompt_cache)
        flags: tuple[bool, bool] = self.sliceable, self.is_batchable  # type: ignore[has-type]
        sliceable, batchable, concurrency = self._ranks.least(*map(int, flags), self.cli_args.prompt_concurrency)
        self.sliceable, self.is_batchable = bool(sliceable), bool(batchable)
        self.cli_args.prompt_concurrency = concurrency


class RankGenerator(Generator):
    """mlx-lm's loop on one rank, in step with the others. `failure` says why it ended, where a rank could not go on."""

    def __init__(
        self,
        provider: RankProvider,
        cache: PrefixCache,
        before: Callable[[Generator], None],
        exact_prefill: bool,
        watch: Watch,
    ):
        assert cache.ranks is not None
        self._ranks, self._watch = cache.ranks, watch
        self._ending = False
        self._answers = Answers(None)
        super().__init__(provider, cache, before, exact_prefill)

    def _make_admission(self, whole_blocks: bool) -> Admission:
        return RankAdmission(self._ranks, whole_blocks)

    def _make_time_budget(self) -> TimeBudget:
        return TimeBudget(self.request_waits, float("inf"))

    def _begin(self) -> threading.Thread:
        """Leave the loop to who calls `run`, on the thread on which this is made: the ranks have agreed on things there."""
        return self.loop.begin(self.run, threading.current_thread())

    def stop(self) -> None:
        """Rank 0 tells the others, and all end at the same step."""
        self._ending = True

    def leave(self) -> None:
        self._watch.ask_to_end()
        self._watch.close()

    def request_waits(self) -> bool:
        """Return whether rank 0 has a request to look at, one that was given up, or its own end."""
        self._watch.step()
        waits = False
        if self._ranks.is_first:
            given_up = {answers for answers in self.answering if answers.given_up}
            self.answering -= given_up  # once is enough
            waits = self._ending or bool(given_up) or super().request_waits()
        return self._ranks.any(waits)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._watch.rest()

    def _loaded(self, model_key: Any) -> None:
        identity = identity_of(model_key)
        self.prompts.rank_part = rank_identity(identity, self.model_provider.model, self._ranks).removeprefix(identity)
        super()._loaded(model_key)

    # -- requests -----------------------------------------------------------------------------------------------------

    def next_request(self, timeout: float | None = None) -> Any:
        self._watch.step()
        request = super().next_request(min(timeout, POLL) if self._deferred and timeout is not None else timeout)
        if not self._ranks.is_first:
            self.answering.clear()  # nobody gives them up but rank 0's clients
        return request

    def _take(self, timeout: float | None) -> Any:
        """Return rank 0's request on every rank, with its tokens, if the model that it asks for is loaded."""
        told: bytes | str | None = None
        request: Any = super()._take(timeout) if self._ranks.is_first else None
        if self._ranks.is_first:
            if request is not None and request[0] is WAKE:
                request = None
            if self._ending:
                told = END
            elif request is not None:
                told = self._packed(*request)
        told = self._ranks.from_first(told)
        if not isinstance(told, bytes):
            if told == END:
                self.loop.stop()
            if self.stopped and request is not None:
                self.requests.put(request)  # it is told that the server ends
            return None
        asked, args, tokens = pickle.loads(told)
        queue: Any = Queue()
        if self._ranks.is_first:
            queue, asked, args = request
        asked.rank_tokens = tokens
        return queue, asked, args

    def _packed(self, queue: Any, request: Any, args: Any) -> bytes | None:
        """What the other ranks are told of a request. None, and the request is answered, where that can't be."""
        try:
            return pickle.dumps((_without_rank_0s(request), args, self._tokens_of(request, args)))
        except Exception as error:  # nested too deeply, or no model's name
            queue.put(ValueError(f"the request can't be read: {type(error).__name__}: {error}"))
            return None

    def _tokens_of(self, request: Any, args: Any) -> Any:
        """What mlx-lm's `_tokenize` gives, or its error. None where the model is yet to be loaded, or there are images."""
        if not self.model_provider.has(args.model.model, args.model.adapter, args.model.draft) or has_images(request):
            return None
        try:
            return super()._tokenize_anew(self.model_provider.tokenizer, request, args)
        except RequestRefused as error:
            return error
        except Exception as error:
            return ValueError(str(error))

    def _read_tokens(self, tokenizer: Any, request: Any, args: Any) -> TokenizedRequest:
        try:
            return super()._read_tokens(tokenizer, request, args)
        except Exception as error:
            if getattr(error, "of_all_ranks", False) or has_images(request):
                raise
            raise RankFailed(f"a request can't be read: {type(error).__name__}: {error}") from error

    def _tokenize_anew(self, tokenizer: Any, request: Any, args: Any) -> Any:
        tokens, request.rank_tokens = getattr(request, "rank_tokens", None), None
        make = partial(super()._tokenize_anew, tokenizer, request, args)
        try:
            if isinstance(tokens, Exception):
                request.rank_tokens = tokens  # the loop asks once more, to answer with it
                raise tokens
            if tokens is None:
                tokens = make() if has_images(request) else self._ranks.done_by_first(make)
        except Exception as error:
            error.of_all_ranks = True  # type: ignore[attr-defined]
            raise
        return tokens

    def _waits_for(self, *request: Any) -> Any:
        try:
            return super()._waits_for(*request)
        except Exception as error:
            raise RankFailed(f"a request can't be looked up: {type(error).__name__}: {error}") from error

    def _read(self, reading: AwaitedPromotions) -> Wait:
        if self._ranks.is_first:
            return super()._read(reading)
        return Wait(reading.done, float("inf"))  # nobody wakes the others but rank 0

    def _resumed(self) -> Any:
        """A deferred request that waits no longer: what it waits for is done on every rank, or rank 0 waits no longer."""
        if not self._deferred:
            return None
        waits = [deferred.wait for deferred in self._deferred]
        late = [self._ranks.is_first and time.monotonic() >= wait.until for wait in waits]
        told = self._ranks.most(*(int(not wait.done()) for wait in waits), *map(int, late))
        for deferred, waiting, given_up in zip(self._deferred, told, told[len(waits) :], strict=False):
            if not waiting or given_up:
                self._deferred.remove(deferred)
                return deferred.item
        return None

    # -- a request that is served by itself ---------------------------------------------------------------------------

    def begin_alone(self, answers: Answers) -> None:
        self._answers = answers
        answers.in_step = True

    def _stream(self, *, prompt: Sequence[int], **options: Any) -> Iterator[Any]:
        progress = options.get("prompt_progress_callback") or (lambda done, total: None)

        def step(done: int, total: int) -> None:
            self._watch.step()
            progress(done, total)

        try:
            for response in super()._stream(prompt=prompt, **{**options, "prompt_progress_callback": step}):
                self._watch.step()
                if self._ranks.any(self._ranks.is_first and self._answers.stop_asked):
                    return
                yield response
        except Exception as error:  # mlx-lm would answer with it, and this rank alone would go on to the next request
            raise RankFailed(f"a request failed: {type(error).__name__}: {error}") from error


def _without_rank_0s(request: Any) -> Any:
    """A request without what is only rank 0's."""
    bare = copy.copy(request)
    for name in ("request_log", "tokenized", "early_tokens", "answers"):
        vars(bare).pop(name, None)
    return bare
