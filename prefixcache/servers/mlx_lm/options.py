"""How `prefixcache serve` was asked to serve, beside the cache's settings and mlx-lm's own flags."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from prefixcache.ranks.watch import HANG
from prefixcache.servers.canonical import EVERY_RULE
from prefixcache.servers.salts import BY_CACHE_SALT, Salts


@dataclass(frozen=True)
class ServeOptions:
    """`before`: called with the `Generator`, on the thread that generates, when the model is there, before the first request
    is taken. `grace`: seconds that requests under way may go on at the end. `exact_prefill`: prompts are computed on exact
    rows, not on those that a hit will give. `warm_next_turn`: what a chat's next turn begins with is computed while there is
    no request. `log_json`: all that is logged goes to standard error as JSON. `salts`: whose a request's prompts are.
    `allowed_hosts`: names of the server, beside those that it was bound to. `max_context`: tokens of a prompt and its answer,
    in the place of the model's own. `any_model`: a request for a model that is not on this machine gets the one that is
    served. `canonical`: which rules of `servers.canonical` are on. `admin_key`: what opens the admin path; with b"" programs
    on this machine may use it. `hang_timeout`: seconds after which ranks that wait for each other end.
    """

    before: Callable[[Any], None] = lambda generator: None
    grace: float = 5.0
    exact_prefill: bool = False
    warm_next_turn: bool = True
    log_json: bool = False
    salts: Salts = BY_CACHE_SALT
    allowed_hosts: tuple[str, ...] = ()
    allow_chat_template: bool = False
    max_context: int | None = None
    any_model: bool = False
    canonical: Collection[str] = EVERY_RULE
    admin_key: bytes = field(default=b"", repr=False)
    hang_timeout: float = HANG
