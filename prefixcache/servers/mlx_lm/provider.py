"""mlx-lm's provider of models, which also says what was loaded and what its layers ask for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx_lm.server as upstream
from mlx.utils import tree_flatten
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from prefixcache.layers import CacheError
from prefixcache.layers.form import Form
from prefixcache.layers.image_layout import read
from prefixcache.servers.model_form import form_of


class Provider(upstream.ModelProvider):
    """`on_load` is called with the key of each model that was loaded. `sliceable`: its state can be cut at any token. `form`:
    what its prompt caches are like, those of its draft model behind them.
    """

    on_load: Callable[[Any], Any] = staticmethod(lambda model_key: None)
    sliceable = False
    form: Form | None = None

    def __init__(self, cli_args: Any):
        self._began = False
        self._prompt_concurrency = cli_args.prompt_concurrency
        super().__init__(cli_args)

    def load_default(self) -> None:
        """Load the default model, once: mlx-lm's loop, entered again after a failure, goes on with what is loaded."""
        if not self._began:
            super().load_default()
            self._began = True

    def has(self, model_path: Any, adapter_path: Any, draft_model_path: Any) -> bool:
        """Whether the model is loaded that a request means by these names."""
        asked = copy.copy(self)  # only `load` knows what the names stand for: this one loads nothing
        asked.model_key, keys = None, []
        asked._load = lambda *key: keys.append(key)  # type: ignore[method-assign]
        asked.load(model_path, adapter_path, draft_model_path)
        return self.tokenizer is not None and keys == [self.model_key]

    def weights(self) -> int:
        """The bytes of the parameters that are loaded."""
        models = [model for model in (self.model, self.draft_model) if model is not None]
        return sum(weight.nbytes for model in models for _, weight in tree_flatten(model.parameters()))

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super()._load(*args, **kwargs)
        self.form = self._form()
        self.on_load(self.model_key)
        self._prepare_for(make_prompt_cache(self.model))
        return loaded

    def _form(self) -> Form | None:
        bits = getattr(self.cli_args, "kv_bits", None)  # mlx-lm 0.31 has none
        models = [model for model in (self.model, self.draft_model) if model is not None]
        return form_of(*models, kv_bits=bits, kv_group_size=getattr(self.cli_args, "kv_group_size", 64))

    def _prepare_for(self, prompt_cache: list[Any]) -> None:
        """Prompts of unequal length that mlx-lm prefills together leave some recurrent states wrong (ml-explore/mlx-lm#1736),
        and what is wrong must not be kept: there, one prompt at a time.
        """
        self.sliceable = can_trim_prompt_cache(prompt_cache)
        try:
            recurrent = any(leaf.layout["kind"] == "snapshot" for leaf in read(prompt_cache).leaves)
        except CacheError:  # layers that are not known here may be anything
            recurrent = True
        self.cli_args.prompt_concurrency = 1 if recurrent else self._prompt_concurrency
