"""Requests on their way through mlx_lm.server's loop, with a PrefixCache.

mlx-lm's code does the work: templates, batches, tools, generation. Here each prompt gets its tenant's salt, weights are
identified when they are loaded, and a request is deferred, while others are served, as long as the SSD reads its prompt or
another request computes the same prefix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from queue import Empty
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.byte_sizes import size
from prefixcache.cache import PrefixCache
from prefixcache.keys import as_tokens
from prefixcache.open_cache import usable_memory
from prefixcache.servers.canonical import EVERY_RULE, CanonicalText
from prefixcache.servers.errors import RankFailed, may_be_the_hits
from prefixcache.servers.in_flight import PromptsUnderWay, PromptUnderWay, Space, Wait
from prefixcache.servers.keeping import Keeping
from prefixcache.servers.loaded_model import calibration_of, compile_kernels
from prefixcache.servers.mlx_lm.answers import Answers, Ended
from prefixcache.servers.mlx_lm.context import room_for
from prefixcache.servers.mlx_lm.idle_work import IdleWork
from prefixcache.servers.mlx_lm.leading_parts import system_end
from prefixcache.servers.mlx_lm.prefill import RequestBatches
from prefixcache.servers.mlx_lm.prefill import stream as blockwise_stream
from prefixcache.servers.mlx_lm.prompt_tokenizer import PromptTokenizer
from prefixcache.servers.mlx_lm.provider import LoadedModel, Provider
from prefixcache.servers.mlx_lm.tenant_cache import TenantPromptCache, TenantSequences, TokenizedRequest
from prefixcache.servers.mlx_lm.turns import WAKE, DeferredRequest, IdlePool, TimeBudget, Turns
from prefixcache.servers.mlx_lm.upstream import Loop, generating_with, of_request, request_of, vision_of
from prefixcache.servers.read_or_compute import AwaitedPromotions
from prefixcache.servers.request_log import RequestLog
from prefixcache.settings import ram_auto
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")


class Generator:
    """mlx-lm's loop (`upstream.Loop`), on its own `thread`, with requests that can be deferred. It stands where mlx-lm's
    HTTP handler has its `ResponseGenerator`.

    `before`: called on that thread when the default model is loaded, before the first request. `ready` is set afterwards, or
    when loading failed; `failure` says why. `model`: a line for the log about the model that is loaded; "" where none is.
    """

    def __init__(
        self,
        provider: Provider,
        cache: PrefixCache,
        before: Callable[[Generator], None],
        *,
        exact_prefill: bool = False,
        canonical: Collection[str] = EVERY_RULE,
        turns: Turns | None = None,
    ):
        self.model_provider = provider
        self.canonical = CanonicalText(canonical)
        self.turns = turns or Turns()
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self.model = ""
        self.answering: set[Answers] = set()
        self.under_way = PromptsUnderWay(whole_blocks=not exact_prefill)
        self._before = before
        self._taken = 0  # requests since mlx-lm's loop was last entered
        self._deferred: deque[DeferredRequest] = deque()
        self._idle_pool = IdlePool()
        self.idle = IdleWork(lambda: self.stopped or self.request_waits())
        self._polls = 0  # how often the loop has asked for a request; what it answered before that is then stored
        suffix = _rows_suffix(provider.cli_args)
        self.prompts = TenantPromptCache(cache, self._stored, self._shared_under_way, suffix, exact_prefill)
        provider.on_load = self._loaded
        self.loop = Loop(provider.models, self.prompts, self, TimeBudget(self.request_waits, self.turns.seconds))
        self.prompt_tokenizer = PromptTokenizer(provider, self.loop.tokenize, self.canonical, self.stored_of)
        self.requests = self.loop.requests
        self.thread = self.loop.begin(self.run, self.turns.thread)

    @property
    def cli_args(self) -> Any:
        return self.model_provider.cli_args

    @property
    def is_healthy(self) -> bool:
        return self.thread.is_alive()

    @property
    def stopped(self) -> bool:
        return self.loop.stopped

    def stop(self) -> None:
        """End the loop after its present step."""
        self.turns.stop(self.loop)

    def wait_for_stores(self, seconds: float) -> bool:
        """Wait until the loop has stored what it has answered so far: a client has its answer before that. Return False
        when a step has kept it busy for so many seconds.
        """
        before, until = self._polls, time.monotonic() + seconds
        self.requests.put((WAKE, None, None))
        while self._polls == before and self.thread.is_alive():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    # -- mlx-lm's loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Load the default model, then answer requests until `stop`, on this thread."""
        try:
            self.model_provider.models.load_default()
            self._before(self)
        except (Exception, RankFailed) as error:
            self.failure = error
            return
        finally:
            self.ready.set()
            self.turns.step_may_take_long()
        try:
            with generating_with(partial(RequestBatches, self.prompts), self._stream_in_step):
                while not self.stopped:
                    self._serve_until_a_failure()
        except (Exception, RankFailed) as error:
            self.failure = error
            log.exception("the thread that generates died")
        finally:
            self.turns.step_may_take_long()

    def _serve_until_a_failure(self) -> None:
        """Run mlx-lm's loop. An exception in it ends the requests under way with an error, and the loop can be entered again.
        If no request was taken since the loop was last entered, or with several ranks, the exception is raised.
        """
        self._taken = 0
        try:
            self.loop.run()
        except Exception as error:
            if not self._taken or self.prompts.cache.ranks is not None:
                raise
            deferred = {deferred.item[0] for deferred in self._deferred}
            ended = [answers for answers in self.answering if answers.wanted() and answers not in deferred]
            log.error("the loop failed, which ends %d requests: %s", len(ended), error, exc_info=error)
            for answers in ended:
                answers.fail(error)

    def _stream_in_step(self, **options: Any) -> Iterator[Any]:
        return self.turns.stream(self._stream, options)

    def _stream(self, *, prompt: Sequence[int], **options: Any) -> Iterator[Any]:
        """Answer a request that is served by itself; `prompt` are the tokens beyond its hit. If the model fails on the
        hit's layers, the request is computed from its first token on.
        """
        request: TokenizedRequest = request_of(prompt)
        depth, begun = len(request.tokenized[0]) - len(prompt), False
        try:
            for response in blockwise_stream(self.prompts, request, depth, prompt=prompt, **options):
                begun = True
                yield response
            return
        except Exception as error:
            if begun or not depth or not may_be_the_hits(error):
                raise
            self.prompts.drop_hit(request, depth, error)
            if self.prompts.cache.ranks is not None:
                raise
        anew = self._from_the_start(request, options["prompt_cache"])
        yield from blockwise_stream(self.prompts, request, 0, **{**options, **anew})

    def _from_the_start(self, request: TokenizedRequest, layers: list[Any]) -> dict[str, Any]:
        """Return the options that compute a request without its hit. `layers`, which mlx-lm stores in the end, become new."""
        nets = self.model_provider.nets
        layers[:] = [layer for net in nets for layer in make_prompt_cache(net)]
        tokens = list(request.tokenized[0])
        vision = vision_of(request.tokenized)
        if vision is None or not vision.pixel_values:
            return {"prompt": tokens}
        seen = nets[0].embed_inputs(mx.array(tokens), pixel_values=vision.pixel_values)
        mx.eval(seen)
        return {"prompt": tokens, "input_embeddings": seen}

    def begin_alone(self, answers: Answers) -> None:
        answers.alone = True
        self.turns.begin_alone(answers)

    def _loaded(self, model_key: Any) -> None:
        """Identify the weights that were loaded. With ram="auto" the budget becomes what they leave."""
        self.prompts.rank_part = self.turns.name_part(model_key, self.model_provider.model)
        cache = self.prompts.cache
        name, weights = self.prompts.name_anew(model_key), self.model_provider.weights()
        if cache.settings.ram == "auto":
            cache.resize(ram=ram_auto(usable_memory() // cache.sharing, weights))
        stats = cache.stats()
        calibration = calibration_of(cache, name, *map(str, filter(None, model_key[:2])))
        self.model = (
            f"model {model_key[0]}: {name}, {size(weights)} of weights; "
            f"RAM budget {size(stats.ram_limit)} (ram={stats.ram_setting}){calibration and f'; {calibration}'}"
        )
        if cache.ranks is None:
            compile_kernels(cache, self.model_provider.model, name)
        if self.ready.is_set():
            log.info("%s", self.model)

    def generate(self, request: Any, args: Any, *others: Any, **options: Any) -> Any:
        """Have a request answered, as mlx-lm does. Its client's thread tokenizes its prompt, while others are served."""
        if self.stopped:
            raise Ended
        self.prompt_tokenizer.tokenize_early(request, args)
        return self.loop.generate(request, args, *others, **options)

    def stop_answering(self) -> None:
        """Tell all clients that the server ends, and let answers under way end at their next token. Call it until the thread
        has ended.
        """
        for answers in list(self.answering):
            answers.stop()
        with suppress(Empty):
            while True:
                queue = self.requests.get_nowait()[0]
                if queue is not WAKE:
                    queue.put(Ended())

    # -- requests before their turn -----------------------------------------------------------------------------------

    def next_request(self, timeout: float | None) -> Any:
        """Return the next request that can begin; None when there is none, or the one that came must wait.

        `timeout`: seconds to wait for one; None: a batch goes on, and the loop does not wait.
        """
        self._polls += 1
        timeout = self.turns.begin_poll(timeout, deferred=bool(self._deferred))
        item = self._resumed() or self.turns.take(self, timeout)
        if item is None or item[0] is WAKE:
            item = self._resumed()
        self._idle_pool.count_poll(busy=item is not None or timeout is None or bool(self._deferred))
        if item is None:
            if timeout is not None and not self._deferred:
                self.idle.step()
            return None
        queue, request, args = item
        if not isinstance(queue, Answers):
            queue = request.answers = Answers(queue, _log_of(request))
            if self.turns.is_first:  # elsewhere nobody gives them up
                self.answering = {answers for answers in self.answering if answers.wanted()} | {queue}
        self._taken += 1
        return self._admit((queue, request, args))

    def request_waits(self) -> bool:
        """Return whether the loop should ask for a request."""
        return self.turns.any_waits(self, self._any_waits)

    def _any_waits(self) -> bool:
        return not self.requests.empty() or any(deferred.wait.over() for deferred in self._deferred)

    def _resumed(self) -> Any:
        """Return a deferred request that waits no longer, or None."""
        place = self.turns.first_over([deferred.wait for deferred in self._deferred]) if self._deferred else None
        if place is None:
            return None
        deferred = self._deferred[place]
        del self._deferred[place]
        return deferred.item

    def _admit(self, item: Any) -> Any:
        """Return the request, if it can begin; else defer it and return None."""
        answers, request, args = item
        try:
            tokenized = self._tokenize_before_turn(request, args)
            with self.turns.failure_scope("a request can't be looked up"):
                wait = self._waits_for(request, tokenized, answers) if tokenized is not None else None
        except Exception:  # the loop meets it again, and answers with it
            return item
        if wait is not None:
            self._deferred.append(DeferredRequest(item, wait))
            return None
        return item

    def _waits_for(self, request: Any, tokenized: TokenizedRequest, answers: Answers) -> Wait | None:
        """Return what a request waits for; None where it doesn't, and is under way from here on."""
        prompt, request_log = tokenized.prompt, _log_of(request)
        match = self.prompts.cache.match(prompt)
        self.prompts.hear_of_chunks(all_of_them=False)  # they count in `match`
        if request_log.depths is None:
            request_log.depths = match
            promotions = self.prompts.promotions.begin(prompt, match)
            if promotions is not None:
                request_log.wait_for_ssd(promotions.asks_remote)
                return self._wait_for_promotions(promotions)
        request_log.go_on(match.ram)
        ids, space = prompt.given, Space(prompt.model, prompt.salt)
        sliceable = self.model_provider.sliceable
        boundaries = sorted({*tokenized.boundaries, *self.prompts.branch_points(tokenized, match.ram)})
        awaited = self.turns.awaited(lambda: self.under_way.wait_for(ids, space, match.ram, sliceable=sliceable))
        if awaited is None and self.turns.is_first and tokenized.is_stored:
            self.under_way.enter(PromptUnderWay(ids, space, boundaries, answers.wanted, match.ram))
        return awaited

    def _shared_under_way(self, prompt: Prompt) -> int:
        """Return how many tokens a prompt shares with one that is computed now; 0 of a model that is hit anywhere, since it
        needs no snapshot there, and on several ranks, since rank 0 alone knows what is under way.
        """
        if self.model_provider.sliceable or self.prompts.cache.ranks is not None:
            return 0
        return self.under_way.shared(prompt.given, Space(prompt.model, prompt.salt))

    def _wait_for_promotions(self, promotions: AwaitedPromotions) -> Wait:
        if not self.turns.is_first:
            return Wait(promotions.done, float("inf"))  # nobody wakes the others but rank 0
        promotions.add_done_callback(lambda done: self.requests.put((WAKE, None, None)))
        return Wait(promotions.done, time.monotonic() + promotions.worth)

    def _stored(self, stored: Prompt, kept: int, state: bool) -> None:
        """Tell the requests that wait that tokens were stored. `kept`: how many of them are in the cache; of a model with
        recurrent layers that counts only if their `state` was kept, too.
        """
        if state or self.model_provider.sliceable:
            self.under_way.stored(stored.given, Space(stored.model, stored.salt), kept)

    # -- requests' tokens --------------------------------------------------------------------------------------------

    def _tokenize_before_turn(self, request: Any, args: Any) -> TokenizedRequest | None:
        """Tokenize a request before its turn, if the model that it asks for is the one that is loaded."""
        if self.model_provider.loaded_as(args.model) is None:
            return None
        tokenizer = self.model_provider.tokenizer
        known: TokenizedRequest | None = getattr(request, "tokenized", None)
        if known is None or known.tokenizer is not tokenizer:
            known = request.tokenized = self._tokenize(tokenizer, request, args)
        return known

    def stored_of(self, loaded: LoadedModel, request: Any) -> TenantSequences:
        """Return what is stored of a request's model and tenant."""
        name, salt, form = self.prompts.name_of(loaded.key), _salt_of(request), self.model_provider.form
        return TenantSequences(
            self.prompts.cache, lambda tokens: self.prompts.prompt_of(as_tokens(tokens), name, salt, form)
        )

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> TokenizedRequest:
        with self.turns.failure_scope("a request can't be read", request):
            loaded = self.model_provider.loaded
            assert loaded is not None
            assert loaded.tokenizer is tokenizer
            tokenized = self.turns.tokens(request, partial(self.prompt_tokenizer.tokenize, loaded, request, args))
            args.max_tokens = min(args.max_tokens, room_for(len(tokenized[0]), loaded.context))
            ids = as_tokens(_cached_tokens(tokenized))
            name, salt = self.prompts.name_of(loaded.key), _salt_of(request)
            prompt = self.prompts.prompt_of(ids, name, salt, self.model_provider.form)
        ends = [*accumulate(map(len, tokenized[1]))]
        boundaries = tuple(sorted({*ends[:-1], len(ids) - 1}))
        keeping: Keeping = getattr(request, "keeping", Keeping())
        system = system_end(*tokenized[1:3])
        leases = keeping.leases(len(ids), system)
        turn = len(ids) - 1 if _ends_turn(request, tokenizer) else 0
        return TokenizedRequest(
            tokenizer,
            tokenized,
            prompt.in_session(keeping.session).with_ends(shared=system, turn=turn),
            boundaries,
            getattr(request, "answers", None),
            leases if keeping.stored else None,
        )

    def tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return what mlx-lm's `_tokenize` gives, with tokens that say whose they are. Most requests were tokenized before
        their turn; one whose model had to be loaded first waits for the SSD here, and nobody is served meanwhile.
        """
        known: TokenizedRequest | None = getattr(request, "tokenized", None)
        request.tokenized, request.tokenizer = None, tokenizer
        if known is None or known.tokenizer is not tokenizer:
            known = self._tokenize(tokenizer, request, args)
            request_log = _log_of(request)
            if request_log.depths is None:
                request_log.depths = self.prompts.cache.match(known.prompt)
                request_log.wait_for_ssd(self.prompts.cache.settings.remote is not None)
                self.prompts.promotions.wait(known.prompt)
                request_log.go_on(self.prompts.cache.match(known.prompt).ram)
        return of_request(known.tokenized, known)


def _cached_tokens(tokenized: Any) -> Sequence[int]:
    """Return the tokens by which mlx-lm looks a prompt up; of one with images, its own key of them, as patches are alike.

    It takes images with no token in between for one, the first: a prompt that has such is neither kept nor hit.
    """
    vision = vision_of(tokenized)
    if vision is None:
        return tokenized[0]
    return vision.cache_key if len(vision.starts) == len(vision.pixel_values) else []


def _salt_of(request: Any) -> bytes:
    salt: bytes = getattr(request, "salt", b"")
    return salt


def _ends_turn(request: Any, tokenizer: Any) -> bool:
    """Tell whether the next turn may leave out thoughts of the answer to come, and so part from this prompt at its end."""
    last = request.messages[-1]["role"] if request.request_type == "chat" else "tool"
    return bool(tokenizer.has_thinking) and last not in ("tool", "assistant")


def _rows_suffix(args: Any) -> str:
    """Return the suffix of models' names that says in which form --kv-bits keeps rows; "" without it. A server without it
    can't batch such rows, so the names must differ.
    """
    bits = getattr(args, "kv_bits", None)  # mlx-lm 0.31 has none
    return "" if bits is None else f"|kv-bits {bits}/{args.kv_group_size} from {args.quantized_kv_start}"


def _log_of(request: Any) -> RequestLog:
    request_log: RequestLog | None = getattr(request, "request_log", None)
    if request_log is None:  # it did not come over HTTP
        request_log = request.request_log = RequestLog()
    return request_log
