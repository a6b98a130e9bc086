"""What an operator may do with the cache of a running server: delete, pin, warm prompts and give RAM back. Each operation
takes and gives JSON; `admin_http` has who may ask for it, and `cli/running` the commands.

A tenant is named as its requests name it, by `cache_salt` or `authorization`, and a prompt by the body of a chat request.
Neither is logged or given back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from mlx_lm.server import ModelDescription

from prefixcache.byte_sizes import parse_size
from prefixcache.cache import PrefixCache
from prefixcache.keys import as_session
from prefixcache.memory import trim_process_memory
from prefixcache.servers.buffer_pool import empty_pool
from prefixcache.servers.mlx_lm.context import room_for
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.idle_warming import IdleWarming
from prefixcache.servers.request_schema import GenerationRequest, RequestRefused
from prefixcache.servers.salts import Salts
from prefixcache.servers.warm_prompts import BadPrompt, WarmSequence, parse_prompt, tokens_of
from prefixcache.store_fetch_remove.pruning import Deleted
from prefixcache.store_fetch_remove.selection import NoSuchNamespace
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")

Json = dict[str, Any]

STORES = 10.0  # seconds that a deletion waits for what was answered to be stored
TENANT = ("cache_salt", "authorization")
# Fields of requests that say nothing of the prompt: what both kinds of request have, and what OpenAI's have beside it.
OF_ANSWERS = {*GenerationRequest.model_fields, "response_format", "tool_choice", "user"}
OF_ANSWERS -= {"adapters", "cache_salt", "model"}


class Admin:
    """The operations on one server's cache, called on any thread. Warming runs on the thread that generates, while no request
    is there.
    """

    def __init__(self, generator: Generator, salts: Salts):
        self._generator, self._salts = generator, salts
        self._cache: PrefixCache = generator.prompts.cache
        self.operations: dict[tuple[str, str], Callable[[Json], Json | Iterator[Json]]] = {
            ("DELETE", "images"): self.delete,
            ("DELETE", "prompts"): self.remove,
            ("POST", "prompts"): self.warm,
            ("GET", "pins"): self.pins,
            ("POST", "pins"): self.pin,
            ("DELETE", "pins"): self.unpin,
            ("GET", "leases"): self.leases,
            ("DELETE", "sessions"): self.end_session,
            ("POST", "ram"): self.trim,
        }

    def answer(self, method: str, name: str, body: Json) -> Json | Iterator[Json]:
        """Do an operation, and return its result, or one result after the other. RequestRefused where it can't be done."""
        operation = self.operations.get((method, name))
        if operation is None:
            raise RequestRefused(f"{method} {name[:50]!r}: no such operation; there are {self._listed()}", 404)
        if self._cache.ranks is not None:
            raise RequestRefused(
                "this model spans processes, whose caches must stay alike: end the server, and run prefixcache clear, prune "
                "or warm on each rank's directory",
                409,
            )
        began = time.monotonic()
        try:
            result = operation(body)
        except BadPrompt as error:
            raise RequestRefused(str(error)) from error
        except NoSuchNamespace as error:
            raise RequestRefused(str(error), 404) from error
        if isinstance(result, dict):
            log.info("admin: %s %s in %.2f s", method, name, time.monotonic() - began)
        return result

    def _listed(self) -> str:
        return ", ".join(f"{method} {name}" for method, name in self.operations)

    # -- deleting ---------------------------------------------------------------------------------------------------------

    def delete(self, body: Json) -> Json:
        """Delete all images, or those that all fields select: `model`, a tenant, `namespace`, `older_than` seconds; with
        `to_size` of the SSD, the least recent until it takes no more.
        """
        _check_keys(body, ("model", "namespace", "older_than", "to_size", *TENANT))
        model, namespace = _text(body, "model"), _text(body, "namespace")
        salt, older_than, to_size = self._tenant(body), _seconds(body, "older_than"), _size(body, "to_size")
        if to_size is not None and self._cache.stats().ssd is None:
            raise RequestRefused(f"to_size={body['to_size']!r}: this server has no SSD; leave it out, or trim RAM")
        before = time.time() - older_than if older_than is not None else None
        with self._stores_ended() if to_size is None else nullcontext():
            if namespace is None and before is None and to_size is None:
                deleted = self._cache.clear(model=model, salt=salt)
            else:
                deleted = self._cache.prune(
                    model=model, salt=salt, namespace=namespace, used_before=before, ssd_to=to_size
                )
        return self._after(deleted)

    def remove(self, body: Json) -> Json:
        """Delete a prompt, and all that begins with it."""
        prompt = self._prompt(body)
        with self._stores_ended():
            nbytes = self._cache.remove(prompt, following=True)
        return {"tokens": len(prompt), "bytes": nbytes, **self._let_go()}

    def trim(self, body: Json) -> Json:
        """Let the coldest leave RAM, to the SSD where there is one, until it holds at most `to_size`."""
        _check_keys(body, ("to_size",))
        to_size = _size(body, "to_size")
        if to_size is None:
            raise RequestRefused('to_size is missing: give what RAM may hold, such as {"to_size": "1GB"}')
        self._generator.prompts.drop_live()
        self._cache.trim_to(to_size)
        return self._let_go()

    @contextmanager
    def _stores_ended(self) -> Iterator[None]:
        """Let what was answered be stored before the block, which deletes it, and nothing be computed within."""
        with self._generator.idle.paused():
            if not self._generator.wait_for_stores(STORES):
                log.warning(
                    "admin: a step takes longer than %g s: a request under way may store its prompt again", STORES
                )
            yield

    def _after(self, deleted: Deleted) -> Json:
        return {"images": deleted.images, "bytes": deleted.nbytes, "held": deleted.held, **self._let_go()}

    def _let_go(self) -> Json:
        """Let go of what the model's caches and MLX still hold of what was deleted. Return what the tiers hold now."""
        self._generator.prompts.drop_live()
        empty_pool()
        trim_process_memory()
        stats = self._cache.stats()
        return {"ram_bytes": stats.ram_held, "ssd_bytes": stats.ssd.used if stats.ssd is not None else None}

    # -- pins -------------------------------------------------------------------------------------------------------------

    def pins(self, body: Json) -> Json:
        """List what is pinned: names to unpin by, models and numbers, no text."""
        _check_keys(body, ())
        return {"pins": [pinned._asdict() for pinned in self._cache.pinned()]}

    def pin(self, body: Json) -> Json:
        """Keep what is stored of a prompt in the tiers where it is, until it is unpinned or the server ends."""
        prompt = self._prompt(body)
        depth = self._cache.pin(prompt)
        if not depth:
            raise RequestRefused("nothing of this prompt is stored: warm it first, then pin it", 404)
        return {"tokens": len(prompt), "pinned_tokens": depth}

    def unpin(self, body: Json) -> Json:
        """End one pin of a prompt, or all pins of the one that `name` stands for in the list."""
        if "name" in body:
            _check_keys(body, ("name",))
            ended = self._cache.end_pins(_text(body, "name") or "")
        else:
            ended = int(self._cache.unpin(self._prompt(body)))
        if not ended:
            raise RequestRefused("no such pin: GET pins lists them", 404)
        return {"ended": ended}

    # -- leases and sessions ----------------------------------------------------------------------------------------------

    def leases(self, body: Json) -> Json:
        """List what requests asked to be kept for a time: models, sessions and numbers, no text."""
        _check_keys(body, ())
        return {"leases": [leased._asdict() for leased in self._cache.leased()]}

    def end_session(self, body: Json) -> Json:
        """Delete what was stored under a tenant's session alone, and end its leases."""
        _check_keys(body, ("session", *TENANT))
        try:
            session = as_session(_text(body, "session"))
        except ValueError as error:
            raise RequestRefused(str(error)) from None
        salt = self._tenant(body) or b""
        with self._stores_ended():
            deleted = self._cache.end_session(session, salt=salt)
        return self._after(deleted)

    # -- warming ----------------------------------------------------------------------------------------------------------

    def warm(self, body: Json) -> Iterator[Json]:
        """Compute and store `prompts` while no request is there. Gives how far it is, again and again, and what was done."""
        _check_keys(body, ("prompts",))
        prompts = body.get("prompts")
        if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, dict) for prompt in prompts):
            raise RequestRefused('prompts is no list of objects: give {"prompts": [{"messages": [...]}, ...]}')
        key = self._model_key()
        sequences = [self._sequence(prompt, f"prompts[{number}]") for number, prompt in enumerate(prompts)]
        return IdleWarming(self._generator, sequences, key, self._generator.prompts.name_of(key)).begin()

    # -- what is named ----------------------------------------------------------------------------------------------------

    def _model_key(self) -> Any:
        """Return the key of the model that is loaded. RequestRefused where there is none."""
        key = self._generator.model_provider.model_key
        if key is None:
            raise RequestRefused(
                "no model is loaded, and a prompt's tokens are a model's: ask the server a question first", 409
            )
        return key

    def _prompt(self, body: Json) -> Prompt:
        name = self._generator.prompts.name_of(self._model_key())
        sequence = self._sequence(body, "the body")
        return self._cache.prompt(sequence.tokens, model=name, salt=sequence.salt)

    def _sequence(self, body: Json, where: str) -> WarmSequence:
        """Return the tokens of a prompt as the server makes them of a request with this body, and its salt."""
        provider = self._generator.model_provider
        asked = _text(body, "model")
        if asked is not None and provider.loaded_as(ModelDescription(asked, "default_model", None)) is None:
            raise RequestRefused(
                f"{where}: model={asked[:100]!r} is not loaded; leave it out, or ask it a question first", 409
            )
        without_tools = ["tools"] if body.get("tool_choice") == "none" else []
        beside = ("model", "authorization", *without_tools)
        given = {name: value for name, value in body.items() if name not in beside and name not in OF_ANSWERS}
        prompt = parse_prompt(where, given).canonical(self._generator.canonical.rules)
        salt = self._tenant(body) or b""
        if not salt and self._salts.required:
            raise RequestRefused(f"{where}: no request without a salt is served here: add cache_salt or authorization")
        tokens = tokens_of(provider.tokenizer, prompt, provider.cli_args.chat_template_args)
        if not tokens:
            raise RequestRefused(f"{where}: no tokens that every request of this prompt has: give a longer one")
        if provider.loaded is not None:
            try:
                room_for(len(tokens), provider.loaded.context)
            except RequestRefused as error:
                raise RequestRefused(f"{where}: {error}") from None
        return WarmSequence(tokens, salt)

    def _tenant(self, body: Json) -> bytes | None:
        """Return the salt of a tenant; b"" of requests without one, None where nothing names it."""
        cache_salt, authorization = (_text(body, name) for name in TENANT)
        if cache_salt is None and authorization is None:
            return None
        salts = replace(self._salts, required=False)
        if authorization is None:
            return salts.of([], cache_salt or "")
        if not self._salts.from_authorization:
            raise RequestRefused(
                "authorization: this server makes no salts of API keys (--salt-from authorization); give cache_salt"
            )
        salt = salts.of([authorization], cache_salt or "")
        if salt == (cache_salt or "").encode():
            raise RequestRefused(
                'authorization: no API key in it; give "Bearer KEY", as the tenant\'s requests have it'
            )
        return salt


def _check_keys(body: Json, known: tuple[str, ...]) -> None:
    """Refuse fields that are not known, and null: left out it would select more than was meant."""
    for name, value in body.items():
        if name not in known:
            near = get_close_matches(name, known, 1, 0.6)
            there = near[0] if near else ", ".join(known) or "none"
            raise RequestRefused(f"unknown field {name[:50]!r}: write {there}, or leave it out")
        if value is None:
            raise RequestRefused(f"{name} is null: give a value, or leave it out")


def _text(body: Json, name: str) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, str) and value.encode() is not None:
            return value
    except UnicodeEncodeError:  # half of a surrogate pair
        pass
    raise RequestRefused(f"{name}: not a text; write a string, or leave it out")


def _seconds(body: Json, name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12 or math.isnan(value):
        raise RequestRefused(
            f"{name}={str(value)[:50]!r}: not a number of seconds; write one, such as 604800 for a week"
        )
    return float(value)


def _size(body: Json, name: str) -> int | None:
    if body.get(name) is None:
        return None
    try:
        return parse_size(body[name], name)
    except ValueError as error:
        raise RequestRefused(str(error)) from None
