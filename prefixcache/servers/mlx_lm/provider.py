"""mlx-lm's provider of models, which also says what was loaded and what its layers ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from mlx_lm.server import ModelProvider

from prefixcache.layers import CacheError
from prefixcache.layers.form import CacheForm
from prefixcache.layers.image_layout import read
from prefixcache.servers.loaded_model import form_of
from prefixcache.servers.mlx_lm.context import context_of
from prefixcache.servers.mlx_lm.upstream import look_at_files, model_key
from prefixcache.servers.request_schema import RequestRefused

log = logging.getLogger("prefixcache")


class LoadedModel(NamedTuple):
    """What the threads of clients may know of the model that is loaded. `context`: tokens of a prompt and its answer, None
    for no limit. `longest`: characters of its longest token.
    """

    key: tuple[Any, Any, Any]
    tokenizer: Any
    context: int | None
    vocabulary: int
    longest: int


class Provider(ModelProvider):
    """`on_load` is called with the key of each model that was loaded. `sliceable`: its state can be cut at any token. `form`:
    what its prompt caches are like, those of its draft model behind them. `loaded` is None while there is none; it may be
    read on any thread. `max_context`: in the place of the models' own.
    """

    on_load: Callable[[Any], Any] = staticmethod(lambda model_key: None)
    sliceable = False
    loaded: LoadedModel | None = None
    form: CacheForm | None = None

    def __init__(self, cli_args: Any, max_context: int | None = None):
        self._began = False
        self._prompt_concurrency, self._max_context = cli_args.prompt_concurrency, max_context
        super().__init__(cli_args)
        served = cli_args.model
        if served and Path(served).exists():  # as /v1/models lists it
            self._model_map[str(Path(served).resolve())] = served

    def load_default(self) -> None:
        """Load the default model, once: mlx-lm's loop, entered again after a failure, goes on with what is loaded."""
        if not self._began:
            super().load_default()
            self._began = True

    def has(self, model_path: Any, adapter_path: Any, draft_model_path: Any) -> bool:
        """Whether the model is loaded that a request means by these names."""
        return self.loaded_as(model_path, adapter_path, draft_model_path) is not None

    def loaded_as(self, model_path: Any, adapter_path: Any, draft_model_path: Any) -> LoadedModel | None:
        """The model that is loaded, if a request means it by these names."""
        loaded = self.loaded
        key = model_key(self, model_path, adapter_path, draft_model_path)
        return loaded if loaded is not None and loaded.key == key else None

    def look_up(self, model_path: Any, adapter_path: Any, draft_model_path: Any) -> None:
        """Find, or download, the files of a model that a request means by these names, and look whether they can be loaded.
        RequestRefused where not: the model that is loaded stays. Call it on the client's thread, since it may take long.
        """
        model, adapter, draft = model_key(self, model_path, adapter_path, draft_model_path)
        if model is None:
            raise RequestRefused(
                "model: the server was started without one; name a folder or a Hugging Face repository", 404
            )
        for name, field in ((model, "model"), (draft, "draft_model")):
            if name is not None:
                try:
                    look_at_files(name, self._tokenizer_config)
                except Exception as error:
                    text = f"{field} {_short(name)} can't be loaded: {_short(error)}; {self._remedy()}"
                    raise RequestRefused(text, 404) from None
        if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
            raise RequestRefused(
                f"adapters {_short(adapter)}: no folder with an adapter_config.json; name another", 404
            )

    def _remedy(self) -> str:
        loaded = self.loaded
        return "name another" if loaded is None else f"the model {_short(loaded.key[0])} is loaded: name that"

    def reset(self) -> None:
        self.loaded = None
        if hasattr(ModelProvider, "reset"):  # mlx-lm 0.31 has none
            super().reset()

    def weights(self) -> int:
        """The bytes of the parameters that are loaded."""
        models = [model for model in (self.model, self.draft_model) if model is not None]
        return sum(weight.nbytes for model in models for _, weight in tree_flatten(model.parameters()))

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        """Load a model in the place of the one that is loaded. Where that fails, the other is loaded again."""
        before, self.loaded = self.loaded, None
        try:
            return self._load_now(*args, **kwargs)
        except Exception as error:
            if before is not None and not self.is_distributed:
                log.warning("%s can't be loaded (%s): %s is loaded again", args[0], type(error).__name__, before.key[0])
                self._load_now(*before.key)
            raise

    def _load_now(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super()._load(*args, **kwargs)
        self.form = self._form()
        self.on_load(self.model_key)
        self._prepare_for(make_prompt_cache(self.model))
        self.loaded = self._look_at_loaded()
        return loaded

    def _look_at_loaded(self) -> LoadedModel:
        tokenizer, vocabulary = self.tokenizer, {}
        tokenizer.encode("a")  # it sets, once, what must not be set while several threads encode
        with suppress(Exception):
            vocabulary = tokenizer.get_vocab()
        size = getattr(getattr(self.model, "args", None), "vocab_size", None) or len(vocabulary)
        longest = max(map(len, vocabulary), default=0)
        return LoadedModel(self.model_key, tokenizer, self._max_context or self._own_context(), size, longest)

    def _own_context(self) -> int | None:
        folder = Path(self.model_key[0])
        try:
            return context_of(utils.load_config(folder if folder.exists() else utils.hf_repo_to_path(str(folder))))
        except Exception as error:  # loading has read it: the hub's own cache may be laid out otherwise
            log.warning("no config of %s to read the length of its context from: %s", folder, _short(error))
            return None

    def _form(self) -> CacheForm | None:
        bits = getattr(self.cli_args, "kv_bits", None)  # mlx-lm 0.31 has none
        models = [model for model in (self.model, self.draft_model) if model is not None]
        return form_of(*models, kv_bits=bits, kv_group_size=getattr(self.cli_args, "kv_group_size", 64))

    def _prepare_for(self, prompt_cache: list[Any]) -> None:
        """Prompts of unequal length that mlx-lm prefills together leave some recurrent states wrong (ml-explore/mlx-lm#1736),
        and what is wrong must not be kept: there, one prompt at a time. Decision 0031 says why.
        """
        self.sliceable = can_trim_prompt_cache(prompt_cache)
        try:
            recurrent = any(leaf.layout["kind"] == "snapshot" for leaf in read(prompt_cache).leaves)
        except CacheError:  # layers that are not known here may be anything
            recurrent = True
        self.cli_args.prompt_concurrency = 1 if recurrent else self._prompt_concurrency


def _short(value: object) -> str:
    return " ".join(str(value).split())[:200]
