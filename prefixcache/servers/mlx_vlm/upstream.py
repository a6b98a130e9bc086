"""mlx_vlm.server's inside, touched here and nowhere else: each patch says why, and when it goes. Made for mlx-vlm 0.7.10.
Decision 0055 says why prompts take this way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Queue
from typing import Any, NamedTuple

from fastapi import HTTPException
from mlx_vlm import apc
from mlx_vlm.generate import ar
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.server import anthropic, cli, generation, openai
from mlx_vlm.server.runtime import runtime
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefixcache.cache import PrefixCache
from prefixcache.metrics.prometheus import CONTENT_TYPE
from prefixcache.servers.errors import may_be_the_hits
from prefixcache.servers.mlx_vlm.prompts import ModelPrompts, ServedPrompt
from prefixcache.servers.read_or_compute import quietly
from prefixcache.servers.request_schema import RequestRefused
from prefixcache.servers.salts import Salts, authorization_of
from prefixcache.servers.web_access import WebAccess
from prefixcache.upstream import in_temporal_order

app = sys.modules["mlx_vlm.server.app"]  # the package has an object of the same name

PORT: int = cli.DEFAULT_SERVER_PORT
REFUSED = "prefixcache.refused"  # under this name a request's scope has the status of a refusal
SERVED = "_prefixcache_served"  # under this name a request's inputs, and later its sequence, have its ServedPrompt
FEATURES, THEIR_PLACES = "deepstack_visual_embeds", "visual_pos_masks"


# -- a prompt's prefill -----------------------------------------------------------------------------------------------


class Prefill(ar.PromptProcessingBatch):
    """mlx-vlm's prefill of one prompt, behind its hit, in chunks that end where the prompt's blocks and media do.

    Patch: the hooks of APC's checkpoints are where a chunk's end is chosen and its state is seen. Issue: none filed. Goes
    when a prefill can be given both.
    """

    def __init__(self, sequence: tuple[Any, ...], options: dict[str, Any]):
        self._sequence, self._options = sequence, options
        self.served, self._embed = sequence[3][SERVED]
        self._begin(self.served.fetch())

    def _begin(self, layers: list[Any]) -> None:
        uid, ids, max_tokens, _, processors, criteria = self._sequence
        depth = self.served.depth
        given = self._embed(depth)
        super().__init__(
            uids=[uid],
            input_ids=[ids[depth:]],
            max_tokens=[max_tokens],
            inputs_embeds=given.pop("inputs_embeds"),
            prompt_kwargs=given,
            logits_processors=[processors],
            thinking_budget_criteria=[criteria],
            warm_cache=layers,
            apc_meta=[{"full_input_ids": ids, "prefix_len": depth}],
            **self._options,
        )
        if self._token_context:  # type: ignore[has-type]
            self._token_context = [list(ids)]  # processors look at the whole prompt, whatever was hit

    def prompt_step(self) -> int:
        try:
            return int(super().prompt_step())
        except Exception as error:
            self._begin_without_hit(error)
            return int(super().prompt_step())

    def generate(self, *args: Any, **options: Any) -> Any:
        try:
            return super().generate(*args, **options)
        except Exception as error:
            self._begin_without_hit(error)
            while self.needs_processing():
                super().prompt_step()
            return super().generate(*args, **options)

    def _begin_without_hit(self, error: Exception) -> None:
        """Begin again where the hit may have made a step fail; raise the error where not."""
        if not self.served.depth or not may_be_the_hits(error):
            raise error
        self._begin(self.served.drop_hit(error))

    def _next_apc_checkpoint_column(self) -> int | None:
        """Return how many tokens behind the hit are computed when the coming chunk ends; None where it ends by itself."""
        if self._inputs_embeds is None or self._inputs_embeds.shape[1] <= 1:
            return None
        depth, step = self.served.depth, self.prefill_step_size or self._inputs_embeds.shape[1]
        return self.served.end_of_chunk(depth + self._processed_prompt_columns, step) - depth

    def _store_apc_exact_checkpoints(self) -> None:
        self.served.keep(self.prompt_cache, self.served.depth + self._processed_prompt_columns)

    def _prompt_kwargs_for_step(self, n: int | None = None) -> dict[str, Any]:
        """Return what the model is given beside the tokens. Features that it adds to pictures' tokens in its first layers are
        those of each layer, which mlx-vlm gives to each chunk from their beginning.
        """
        given: dict[str, Any] = super()._prompt_kwargs_for_step(n)
        features, places = given.get(FEATURES), given.get(THEIR_PLACES)
        if features is not None and places is not None:
            count = int(places.sum().item())
            given = {**given, FEATURES: [array[:count] for array in features]}
            self._prompt_kwargs[FEATURES] = [array[count:] for array in features]
        return given


# -- batches ----------------------------------------------------------------------------------------------------------


class VlmBatches(ar.BatchGenerator):
    """mlx-vlm's batches, which show each request's layers to its `ServedPrompt`. Prompts are computed one at a time: the next
    finds what the one before has stored, and none gets the padding of another into its state.

    Patch: the way to a prefill behind a hit, and the moment when a row leaves. Issue: none filed. Goes when a prompt cache
    can be given that is asked for layers and shown them.
    """

    def __init__(self, *args: Any, apc_manager: Any = None, **options: Any):
        super().__init__(*args, **options)
        self._answering: dict[int, ServedPrompt] = {}  # by uid
        if isinstance(apc_manager, Manager):
            self.prefill_batch_size = 1

    def _build_mixed_prompt_batch(self, sequences: Sequence[tuple[Any, ...]]) -> Any:
        if SERVED not in (sequences[0][3] or {}):
            return super()._build_mixed_prompt_batch(sequences)
        return Prefill(sequences[0], {"model": self.model, "prefill_step_size": self.prefill_step_size})

    def _extend_generation_batch(self, gen_batch: Any) -> None:
        if isinstance(self._prompt_batch, Prefill):
            self._answering[gen_batch.uids[0]] = self._prompt_batch.served
            gen_batch.filter = partial(self._filter, gen_batch, gen_batch.filter)
        super()._extend_generation_batch(gen_batch)

    def _next(self, **options: Any) -> Any:
        heard, generated = super()._next(**options)
        batch = self._generation_batch
        for response in generated:
            served = self._answering.get(response.uid)
            if served is not None and served.generated(response.token):
                row = batch.uids.index(response.uid)
                served.keep_block(_alone(batch, row), batch.prompt_cache, row)
        return heard, generated

    def _filter(self, batch: Any, filter_rows: Callable[[list[int]], None], keep: list[int]) -> None:
        """Keep the answers whose rows leave the batch, before they do."""
        for row in set(range(len(batch.uids))) - set(keep):
            served = self._answering.pop(batch.uids[row], None)
            if served is not None:
                tokens = batch._current_tokens
                last = tokens[row].item() if served.answered < batch._num_tokens[row] else None
                served.end(_alone(batch, row), last)
        filter_rows(keep)


def _alone(batch: Any, row: int) -> list[Any]:
    """Return one row's layer caches; of a row that is alone in layer caches for one, those themselves."""
    return [
        layer if len(batch.uids) == 1 and not _is_batched(layer) else _extracted(layer, row)
        for layer in batch.prompt_cache
    ]


def _extracted(layer: Any, row: int) -> Any:
    for each in getattr(layer, "caches", [layer]):
        in_temporal_order(each)
    return layer.extract(row)


def _is_batched(layer: Any) -> bool:
    children = getattr(layer, "caches", None)
    return any(map(_is_batched, children)) if children is not None else type(layer).__name__.startswith("Batch")


# -- requests ---------------------------------------------------------------------------------------------------------


class RequestQueue(Queue):  # type: ignore[type-arg]
    """mlx-vlm's queue of requests. Each goes through `arrive` first, on its client's thread."""

    def __init__(self, arrive: Callable[[Any], None]):
        super().__init__()
        self._arrive = arrive

    def put(self, item: Any, *args: Any, **options: Any) -> None:
        if item is not None:
            self._arrive(item)
        super().put(item, *args, **options)


class VlmGenerator(generation.ResponseGenerator):
    """mlx-vlm's thread that generates, whose requests are looked up when they arrive, and embedded when their turn has come:
    only what is behind the hit.

    Patch: `_gpu_embed` runs the encoder for the whole prompt, before anybody has looked what is stored of it. Issue: none
    filed. Goes when mlx-vlm embeds behind a hit.
    """

    prompts: ModelPrompts | None = None

    def _initialize_model(self) -> None:
        super()._initialize_model()
        self.apc_mode = None  # APC's hash of all pictures is not asked for
        manager = self.apc_manager  # type: ignore[has-type]
        if isinstance(manager, Manager):
            self.prompts = manager.prompts_of(self)
        if self.prompts is None:
            self.apc_manager = None
        else:
            self.requests = RequestQueue(self._arrive)

    def _arrive(self, request: Any) -> None:
        assert self.prompts is not None
        salt = (request.args.tenant_id or "").encode("latin-1")
        with quietly("a lookup"):
            request.raw_inputs[SERVED] = self.prompts.served(dict(request.raw_inputs), salt)
        if self._stop:
            raise RuntimeError("the model was unloaded while the request waited; ask again")

    def _gpu_embed(self, raw_inputs: dict[str, Any], images: Any = None, apc_semantic_hash: int | None = None) -> Any:
        served = raw_inputs.get(SERVED)
        if served is None:
            return super()._gpu_embed(raw_inputs, images, apc_semantic_hash)
        return raw_inputs["input_ids"], {SERVED: (served, partial(self._embed, served, images))}

    def _embed(self, served: ServedPrompt, images: Any, depth: int) -> dict[str, Any]:
        """Return what the model is given of a prompt behind its first `depth` tokens."""
        whole = served.inputs
        _, given = super()._gpu_embed(served.behind(depth), images)
        positions = getattr(self.model.language_model, "get_rope_index", None)
        if depth and positions is not None and given.get("position_ids") is not None:
            grids = (whole.get("image_grid_thw"), whole.get("video_grid_thw"))
            of_all, given["rope_deltas"] = positions(whole["input_ids"], *grids, whole.get("attention_mask"))
            given["position_ids"] = of_all[..., depth:]
        return dict(given)


class Manager:
    """What mlx-vlm's server asks of its APC manager, answered for a PrefixCache. `prompts_of`: what keeps the prompts of the
    model that a `VlmGenerator` has loaded.
    """

    def __init__(self, cache: PrefixCache, prompts_of: Callable[[Any], ModelPrompts | None]):
        self._cache, self.prompts_of = cache, prompts_of

    def stats_snapshot(self) -> dict[str, Any]:
        """Return what /v1/cache/stats and /metrics in JSON show."""
        return self._cache.stats().as_dict()

    def clear(self) -> None:
        """Empty RAM, as APC does when a model leaves and when /v1/cache/reset is asked. What the SSD has stays."""
        self._cache.trim_to(0)

    def close(self) -> None:
        """Do nothing: the PrefixCache outlives a model."""


def takes_chunks(model: Any) -> bool:
    """Return whether a prompt of this model can be computed in chunks, and so behind a hit."""
    return not any(getattr(part, "no_chunked_prefill", False) for part in (model, model.language_model))


def new_layers_of(model: Any) -> Callable[[], list[Any]]:
    """Return what makes an empty prompt cache of a model."""
    return partial(make_prompt_cache, model.language_model)


# -- the server -------------------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """What is taken of clients: whose their prompts are, which of them may ask, and what /metrics answers."""

    salts: Salts
    access: WebAccess
    metrics: Callable[[], bytes]


class Guard:
    """ASGI middleware that refuses what a foreign web page sends, and sees to it that a request without a salt is answered
    with its status: `/v1/messages` answers 400 to whatever is wrong with a request.
    """

    def __init__(self, app: Any, access: WebAccess):
        self._app, self._access = app, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        why = self._access.refusal(
            headers.getlist("host"), headers.getlist("origin"), headers.get("sec-fetch-site", "")
        )

        async def answer(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "status": scope.get(REFUSED, message["status"])}
            await send(message)

        if not why:
            await self._app(scope, receive, answer)
        elif scope["type"] == "http":
            await JSONResponse({"detail": why}, 403)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": why[:100]})


@contextmanager
def serving_with(manager: Manager, rules: Rules) -> Iterator[None]:
    """Let mlx_vlm.server keep its prompts by this manager, and answer by these rules.

    Patch: the server makes its manager, its thread and its batches by these names, and takes none as an argument. Issue: none
    filed. Goes when it takes them.
    """
    named = [
        (apc, "from_env", lambda *args, **options: manager),
        (apc, "self_check_model_apc", lambda *args, **options: None),  # says what APC could keep
        (app, "ResponseGenerator", VlmGenerator),
        (generation, "BatchGenerator", VlmBatches),
        (openai, "_read_tenant_id", partial(_tenant, rules.salts)),
        (anthropic, "_read_tenant_id", partial(_tenant, rules.salts)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in named]
    routes = app.app.router.routes
    route = Route("/metrics", partial(_metrics, rules.metrics))
    for owner, name, ours in named:
        setattr(owner, name, ours)
    routes.insert(0, route)
    app.app.add_middleware(Guard, access=rules.access)
    try:
        yield
    finally:
        routes.remove(route)
        app.app.user_middleware.pop(0)
        app.app.middleware_stack = None
        for owner, name, theirs in before:
            setattr(owner, name, theirs)


def run(flags: Sequence[str]) -> None:
    """Run mlx_vlm.server's command line with these flags, until a signal ends it; then let its thread end."""
    before = sys.argv
    sys.argv = ["mlx_vlm.server", *flags]
    try:
        cli.main()
    finally:
        sys.argv = before
        if runtime.response_generator is not None:
            runtime.response_generator.stop_and_join()


class NoSalt(HTTPException):
    """A refusal, of which `/v1/messages` answers the text."""

    def __str__(self) -> str:
        return str(self.detail)


def _tenant(salts: Salts, request: Request) -> str | None:
    """Return whose the prompts of a request are: of the headers that mlx-vlm reads, or of its API key."""
    named = request.headers.get("x-apc-tenant") or request.headers.get("x-tenant-id") or ""
    try:
        salt = salts.of(authorization_of(request.headers.getlist), named)
    except RequestRefused as error:
        request.scope[REFUSED] = error.status
        raise NoSalt(error.status, str(error)) from None
    return salt.decode("latin-1") or None


async def _metrics(render: Callable[[], bytes], request: Request) -> Response:
    app._require_management_api_key(request)
    return Response(render(), media_type=CONTENT_TYPE)
