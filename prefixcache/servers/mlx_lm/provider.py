"""The model that a server has loaded: which one, from where, and what its layers ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from prefixcache.layers import CacheError
from prefixcache.layers.form import CacheForm
from prefixcache.layers.reading import read
from prefixcache.planning.model_config import context_length
from prefixcache.servers.chat_messages import TemplateRoles, template_roles
from prefixcache.servers.loaded_model import form_of
from prefixcache.servers.mlx_lm.upstream import ModelKey, Models
from prefixcache.servers.request_schema import RequestRefused

log = logging.getLogger("prefixcache")


class LoadedModel(NamedTuple):
    """What the threads of clients may know of the model that is loaded. `context`: tokens of a prompt and its answer, None
    for no limit. `longest`: characters of its longest token. `roles`: which messages its chat template takes.
    """

    key: ModelKey
    tokenizer: Any
    context: int | None
    vocabulary: int
    longest: int
    roles: TemplateRoles


class BatchLimits(NamedTuple):
    """What a model's layers allow. `sliceable`: its state can be cut at any token. `concurrency`: prompts that are prefilled
    together.
    """

    sliceable: bool
    batchable: bool
    concurrency: int


class Loading:
    """How one process loads a model in the place of another. Ranks do it together: `rank_turns.RankTurns`."""

    def load(self, provider: Provider, key: ModelKey) -> None:
        """Load a model by `provider.load_now`. Where that fails, the one that was loaded is loaded again."""
        before = provider.loaded
        try:
            provider.load_now(*key)
        except Exception as error:
            if before is not None:
                log.warning("%s can't be loaded (%s): %s is loaded again", key[0], type(error).__name__, before.key[0])
                provider.load_now(*before.key)
            raise

    def agreed(self, limits: BatchLimits) -> BatchLimits:
        """Return the limits that hold for all of the model's layers."""
        return limits


class Provider:
    """The model that is loaded, by mlx-lm's provider (`upstream.Models`), and what its layers ask for.

    `on_load` is called with the key of each model that was loaded. `form`: what its prompt caches are like, those of its
    draft model behind them. `loaded` is None while there is none; it may be read on any thread. `max_context`: in the place
    of the models' own.
    """

    def __init__(self, cli_args: Any, max_context: int | None = None, loading: Loading | None = None):
        self.cli_args = cli_args
        self.on_load: Callable[[Any], Any] = lambda model_key: None
        self.sliceable = False
        self.loaded: LoadedModel | None = None
        self.form: CacheForm | None = None
        self._prompt_concurrency, self._max_context = cli_args.prompt_concurrency, max_context
        self._loading = loading or Loading()
        self.models = Models(cli_args, self._load)

    @property
    def model_key(self) -> Any:
        return self.models.model_key

    @property
    def model(self) -> Any:
        return self.models.model

    @property
    def tokenizer(self) -> Any:
        return self.models.tokenizer

    @property
    def nets(self) -> tuple[Any, ...]:
        """The model that is loaded, and its draft model."""
        return tuple(net for net in (self.models.model, self.models.draft_model) if net is not None)

    def loaded_as(self, asked: Any) -> LoadedModel | None:
        """Return the model that is loaded, if a request means it by this `ModelDescription`; None if not."""
        loaded, key = self.loaded, self.models.key_of(asked.model, asked.adapter, asked.draft)
        return loaded if loaded is not None and loaded.key == key else None

    def look_up(self, asked: Any) -> None:
        """Find, or download, the files of the model that a request means by this `ModelDescription`, and look whether they
        can be loaded. RequestRefused where not: the model that is loaded stays. Call it on the client's thread, since it may
        take long.
        """
        model, adapter, draft = self.models.key_of(asked.model, asked.adapter, asked.draft)
        if model is None:
            text = "model: the server was started without one; name a folder or a Hugging Face repository"
            raise RequestRefused(text, 404)
        for name, field in ((model, "model"), (draft, "draft_model")):
            if name is not None:
                try:
                    self.models.look_at_files(name)
                except Exception as error:
                    text = f"{field} {_short(name)} can't be loaded: {_short(error)}; {self._remedy()}"
                    raise RequestRefused(text, 404) from None
        if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
            text = f"adapters {_short(adapter)}: no folder with an adapter_config.json; name another"
            raise RequestRefused(text, 404)

    def _remedy(self) -> str:
        if (loaded := self.loaded) is None:
            return "name another"
        return f"the model {_short(loaded.key[0])} is loaded: name that, or serve with --any-model"

    def weights(self) -> int:
        return sum(weight.nbytes for net in self.nets for _, weight in tree_flatten(net.parameters()))

    def _load(self, *key: Any) -> None:
        model, adapter, draft = (*key, None, None)[:3]
        self._loading.load(self, (model, adapter, draft))

    def load_now(self, *key: Any) -> None:
        """Load a model in the place of the one that is loaded, and look at its layers."""
        self.loaded = None
        self.models.load_now(*key)
        self.form = self._form()
        self.on_load(self.model_key)
        limits = self._loading.agreed(self._limits(make_prompt_cache(self.model)))
        self.sliceable, self.models.is_batchable, self.cli_args.prompt_concurrency = limits
        self.loaded = self._look_at_loaded()

    def drop(self) -> None:
        self.loaded = None
        self.models.drop()

    def _look_at_loaded(self) -> LoadedModel:
        tokenizer, vocabulary = self.tokenizer, {}
        tokenizer.encode("a")  # it sets, once, what must not be set while several threads encode
        with suppress(Exception):
            vocabulary = tokenizer.get_vocab()
        size = getattr(getattr(self.model, "args", None), "vocab_size", None) or len(vocabulary)
        longest = max(map(len, vocabulary), default=0)
        context = self._max_context or self._own_context()
        return LoadedModel(self.model_key, tokenizer, context, size, longest, template_roles(tokenizer))

    def _own_context(self) -> int | None:
        folder = Path(self.model_key[0])
        try:
            return context_length(utils.load_config(folder if folder.exists() else utils.hf_repo_to_path(str(folder))))
        except Exception as error:  # loading has read it: the hub's own cache may be laid out otherwise
            log.warning("no config of %s to read the length of its context from: %s", folder, _short(error))
            return None

    def _form(self) -> CacheForm | None:
        bits = getattr(self.cli_args, "kv_bits", None)  # mlx-lm 0.31 has none
        return form_of(*self.nets, kv_bits=bits, kv_group_size=getattr(self.cli_args, "kv_group_size", 64))

    def _limits(self, prompt_cache: list[Any]) -> BatchLimits:
        """Prompts of unequal length that mlx-lm prefills together leave some recurrent states wrong (ml-explore/mlx-lm#1736),
        and what is wrong must not be kept: there, one prompt at a time. Decision 0031 says why.
        """
        try:
            recurrent = any(leaf.layout["kind"] == "snapshot" for leaf in read(prompt_cache).leaves)
        except CacheError:  # layers that are not known here may be anything
            recurrent = True
        concurrency = 1 if recurrent else self._prompt_concurrency
        return BatchLimits(can_trim_prompt_cache(prompt_cache), self.models.is_batchable, concurrency)


def _short(value: object) -> str:
    return " ".join(str(value).split())[:200]
