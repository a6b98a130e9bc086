"""mlx_lm.server's inside, touched here and nowhere else: each patch says why, which issue of mlx-lm asks for a better way,
and when it goes. mlx-lm 0.31.3 and 0.32 both work; `python -m tools.upstream` looks at the next release. What is patched
without a server, too, is in `prefixcache.upstream`.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

from mlx_lm import server, utils
from mlx_lm.generate import BatchGenerator, stream_generate

from prefixcache.servers.mlx_lm.stop_texts import StopTexts
from prefixcache.servers.request_schema import RequestRefused
from prefixcache.servers.told_answer import ToldAnswer
from prefixcache.upstream import classes_of, download

MLX_LM_0_31 = version("mlx-lm").startswith("0.31.")
FINGERPRINT = server.get_system_fingerprint()
STOP_TEXT = "stop text"  # a finish_reason at which mlx-lm's answer still takes the token's text


# -- flags ------------------------------------------------------------------------------------------------------------


class _Parsed(Exception):
    """Ends mlx-lm's `main` where it has made its parser."""


def parse_flags(parser: type[argparse.ArgumentParser], flags: Sequence[str]) -> argparse.Namespace | None:
    """Return what mlx_lm.server's command line makes of these flags, read by a parser of this class; None where this release
    reads its flags another way.

    Patch: `main` makes its parser and offers it nowhere else, so it runs that far with ours in argparse's place; a list of
    its flags of our own would lack the next release's. Issue: none filed. Goes when mlx-lm offers its parser.
    """
    parsed: list[argparse.Namespace] = []

    class Parser(parser):  # type: ignore[misc, valid-type]
        def parse_args(self) -> NoReturn:
            # mlx-lm's are every web page's, and a number that says nothing of whether it was given
            self.set_defaults(allowed_origins=[], prompt_cache_size=None)
            parsed.append(super().parse_args(flags))
            raise _Parsed

    before = server.argparse
    server.argparse = SimpleNamespace(ArgumentParser=Parser)
    try:
        server.main()
    except _Parsed:
        return parsed[0]
    finally:
        server.argparse = before
    return None


# -- models -----------------------------------------------------------------------------------------------------------


ModelKey = tuple[Any, Any, Any]  # of mlx-lm's provider: model, adapter and draft model, as `load` names them


class Models(server.ModelProvider):
    """mlx-lm's provider of models, which loads each by way of `load`.

    Patch: `_load` is where every load can be reached, and `_model_map` has what a name means. Issue: none filed. Goes when a
    provider can be told what to do before and after it loads.
    """

    def __init__(self, cli_args: argparse.Namespace, load: Callable[..., None]):
        self._load_by, self._has_begun = load, False
        super().__init__(cli_args)
        self._served = cli_args.model
        self._folder = Path(self._served).resolve() if self._served and Path(self._served).exists() else None

    def load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> Any:
        return super().load(self._named(model_path, adapter_path), adapter_path, draft_model_path)

    def _named(self, model: str, adapter: str | None) -> str:
        """Return the served model's name as the server was given it for any other of its folder, as which it would be loaded
        again; "default_model" where a request names no adapter, since it would have none.
        """
        if not self._is_served(model):
            return model
        return "default_model" if adapter is None else self._served

    def _is_served(self, model: str) -> bool:
        try:
            return model == self._served or (self._folder is not None and Path(model).resolve() == self._folder)
        except (OSError, ValueError, RuntimeError):  # no name that a folder may have
            return False

    def load_default(self) -> None:
        """Load the default model, once: mlx-lm's loop, entered again after a failure, goes on with what is loaded."""
        if not self._has_begun:
            super().load_default()
            self._has_begun = True

    def load_now(self, *key: Any) -> None:
        """Load a model in the place of the one that is loaded, as mlx-lm does."""
        super()._load(*key)

    @property
    def reads_images(self) -> bool:
        """Whether the model that is loaded takes images. mlx-lm 0.31 has none that does."""
        return getattr(self, "processor", None) is not None

    def drop(self) -> None:
        if not MLX_LM_0_31:  # which has no `reset`
            self.reset()

    def key_of(self, model: str, adapter: str | None, draft: str | None) -> ModelKey:
        """Return the key of model, adapter and draft model that a request means by these names.

        Patch: only `load` knows it, and releases differ in it, so it runs on an object that loads nothing. Issue: none
        filed. Goes when mlx-lm resolves names apart from loading.
        """
        keys: list[tuple[Any, ...]] = []
        maps = {name: getattr(self, name) for name in ("_model_map", "_adapter_map", "_draft_model_map")}
        no_model = dict.fromkeys(("model_key", "model", "tokenizer"))
        of_names = SimpleNamespace(**maps, **no_model, _load=lambda *key: keys.append(key))
        server.ModelProvider.load(of_names, self._named(model, adapter), adapter, draft)
        return (*keys[0], None, None)[:3]

    def tokenizer_in(self, folder: Path) -> Any:
        """Return the tokenizer of a model's folder, as `load` makes it."""
        return utils.load_tokenizer(folder, self._tokenizer_config)

    def look_at_files(self, name: str) -> None:
        """Raise what mlx-lm would raise of a model's files, downloaded where need be, as far as that shows without their
        weights.
        """
        folder = download(name)
        config = utils.load_config(folder)
        if "model_file" not in config:
            classes_of(config)
        if not any(folder.glob("model*.safetensors")):
            raise FileNotFoundError("it has no model*.safetensors")
        self.tokenizer_in(folder)

    def _load(self, *key: Any) -> None:
        self._load_by(*key)


# -- requests ---------------------------------------------------------------------------------------------------------


class RequestTokens(list[int]):
    """Tokens of a prompt, or of a prompt and its answer, that say whose they are, as all slices of them do.

    Patch: mlx-lm's loop passes tokens to the prompt cache and to its batches, and nothing of the request; what `_tokenize`
    gives goes that way whole or sliced, and is extended in place. Issue: none filed. Goes when `fetch_nearest_cache`,
    `insert_cache` and `insert_segments` are told of the request.
    """

    def __init__(self, tokens: Iterable[int], request: Any):
        super().__init__(tokens)
        self.request = request

    def __getitem__(self, index: Any) -> Any:
        part: Any = super().__getitem__(index)
        return RequestTokens(part, self.request) if isinstance(index, slice) else part


def request_of(tokens: Sequence[int]) -> Any:
    """Return the request whose tokens these are; None where they don't say."""
    return getattr(tokens, "request", None)


def of_request(tokenized: tuple[Any, ...], request: Any) -> tuple[Any, ...]:
    """Return what `_tokenize` gave, with tokens that say whose they are."""
    prompt, *others = tokenized
    if (vision := vision_of(tokenized)) is not None:
        others[3] = replace(vision, cache_key=RequestTokens(vision.cache_key, request))
    return RequestTokens(prompt, request), *others


def vision_of(tokenized: tuple[Any, ...]) -> Any:
    """Return the images of what `_tokenize` gave, or None. mlx-lm 0.31 has none."""
    return tokenized[4] if len(tokenized) > 4 else None


def has_images(request: Any) -> bool:
    """Return whether a request brings images. Private: `_image_parts`, which mlx-lm 0.31 doesn't have. Issue: none filed."""
    parts = getattr(server, "_image_parts", lambda messages: ())
    return bool(request.messages) and any(True for _ in parts(request.messages))


def is_given_up(context: Any) -> bool:
    """Return whether a request's `GenerationContext` was told to stop."""
    return bool(context._should_stop)


# -- HTTP -------------------------------------------------------------------------------------------------------------

LONG = ("messages", "prompt", "tools")  # fields that mlx-lm's reading of a body need not go through once more


class Completion(server.APIHandler):
    """mlx-lm's reading of a request's fields, and its answer, on the connection of `http`, a handler of ours. Its
    `complete(completion, request, answer)` has a request answered by `answer()`; its `send_cors_headers` lets pages read it.
    `told`: what its client was told so far. `stopped_by`: the stop text that has ended it, where its tokens were others.

    Patch: mlx-lm's handler owns its connection, so it is made without one and given a body of its own. RequestRefused for
    what it refuses: its own errors have another form, and it says 404 whatever a request failed of. Issue: none filed. Goes
    when mlx-lm reads and answers a request apart from HTTP.
    """

    def __init__(self, http: Any, generator: Any, fields: dict[str, Any]):
        self._http = http
        debugging = logging.getLogger().isEnabledFor(logging.DEBUG)  # it quotes the body
        self._long = {} if debugging else {name: fields.pop(name) for name in LONG if name in fields}
        body = json.dumps(fields).encode()
        self.created, self.system_fingerprint = int(time.time()), FINGERPRINT
        self.told, self.stopped_by, self._is_stopped = ToldAnswer(), "", False
        self.response_generator, self.path = generator, http.path
        self._tokenizer: Any = None  # of the model that answers, once it does
        self.headers, self.rfile = {"Content-Length": str(len(body))}, io.BytesIO(body)
        self.wfile, self.send_response = http.wfile, http.send_response
        self.send_header, self.end_headers = http.send_header, http.end_headers

    def validate_model_parameters(self) -> None:
        """Give the long fields back, as all others were read."""
        self.body |= self._long
        try:
            super().validate_model_parameters()
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        if self.top_logprobs > 0:
            self.logprobs = True

    @property
    def prompt_arguments(self) -> Any:
        """What `_tokenize` reads of a request's arguments, without those of its answer."""
        model = server.ModelDescription(
            model=self.requested_model, draft=self.requested_draft_model, adapter=self.adapter
        )
        return SimpleNamespace(model=model, chat_template_kwargs=self.chat_template_kwargs)

    def handle_completion(self, request: Any, stop_words: Any) -> None:
        self._http.complete(self, request, partial(self._answer, request, stop_words))

    def _answer(self, request: Any, stop_words: Any) -> None:
        """Answer, and end where a stop text does.

        Patch: mlx-lm ends an answer at the tokens that a stop text has by itself. Where the model writes it in others, it
        only takes the text out of the answer and goes on; and an answer's last characters are lost where a stop text may
        begin with them. Issue: none filed. Goes when it ends there.
        """
        reads_stops = stop_words and not MLX_LM_0_31  # which leaves such a text where it is
        stops = StopTexts(stop_words) if reads_stops else None
        generate = partial(self._generate, self.response_generator, request, stops)
        self.response_generator = SimpleNamespace(generate=generate)
        super().handle_completion(request, stop_words)

    def _generate(self, generator: Any, request: Any, stops: StopTexts | None, *args: Any, **options: Any) -> Any:
        context, responses = generator.generate(*args, **options)
        self._tokenizer = request.tokenizer
        context.tool_parser = partial(calls_in, context.tool_parser)
        if stops is None:
            return context, responses

        def until_stop() -> Iterator[Any]:
            for response in responses:
                if (last := self._last(response, stops)) is not None:
                    self.stopped_by, self._is_stopped, request.request_log.end = stops.ended_by, True, "stop"
                    yield last
                    return
                yield response

        return context, until_stop()

    def _last(self, response: Any, stops: StopTexts) -> Any:
        """Return the last response of an answer that ends with this one, with a reason for which mlx-lm leaves out the stop
        text alone; None where the answer goes on, or where that can't be told.
        """
        text, end = response.text, stops.end_in(response.text)
        if end is None and response.finish_reason == "stop":
            if response.token in self._tokenizer.eos_token_ids:
                return replace(response, finish_reason="length")  # what a stop text may begin with is told
            text += self._tokenizer.decode([response.token])  # it is left out of a batch's
            end = stops.end_in(text[len(response.text) :])
            end = None if end is None else end + len(response.text)
        return None if end is None else replace(response, text=text[:end], finish_reason=STOP_TEXT)

    def generate_response(self, text: str, finish_reason: str | None, *args: Any, **more: Any) -> Any:
        self.told.add(text, more.get("tool_calls"), more.get("reasoning_text"))
        if finish_reason is not None and self._is_stopped:
            finish_reason = "tool_calls" if self.told.calls else "stop"
        response = super().generate_response(text, finish_reason, *args, **more)
        if more.get("token_logprobs"):
            response["choices"][0]["logprobs"] = {"content": self._logprobs(**more)}
        return response

    def _logprobs(
        self, tokens: list[int], token_logprobs: list[float], top_tokens: Sequence[Any], **_: Any
    ) -> list[dict[str, Any]]:
        """Return the logprobs of an answer's tokens, each with those of the likeliest, in their order.

        Patch: mlx-lm names no token, or with `top_logprobs` any of the likeliest as the one that was sampled, unsorted.
        Issue: none filed. Goes when its are OpenAI's.
        """
        names = self._tokenizer.convert_ids_to_tokens(tokens)
        tops = [sorted(top, key=lambda each: -each["logprob"]) for top in top_tokens] or [[] for _ in tokens]
        return [
            {"id": token, "token": name, "logprob": logprob, "top_logprobs": top}
            for token, name, logprob, top in zip(tokens, names, token_logprobs, tops, strict=True)
        ]

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if (error := sys.exc_info()[1]) is not None:
            raise RequestRefused(str(error), getattr(error, "status", status_code)) from error
        super()._set_completion_headers(status_code)

    def _set_cors_headers(self) -> None:
        self._http.send_cors_headers()


def calls_in(parse: Callable[..., Any], text: str, tools: Any) -> list[dict[str, Any]]:
    """Return the calls that a model's parser reads in a text: those that have a name. ValueError where it can't be read.

    Patch: mlx-lm leaves out a call whose parser raises ValueError; of any other exception, and of a call without a name or
    arguments, its answer ends without a word to the client. Issue: none filed. Goes when it leaves those out, too.
    """
    try:
        read = parse(text, tools)
        calls = read if isinstance(read, list) else [read]
        json.dumps(calls)
    except Exception as error:  # parsers raise what they like
        raise ValueError(type(error).__name__) from error
    return [{"arguments": {}, **call} for call in calls if isinstance(call, dict) and isinstance(call.get("name"), str)]


# -- the loop ---------------------------------------------------------------------------------------------------------


class LoopSteps(Protocol):
    """What `Loop` asks of its owner, on the thread that generates."""

    def next_request(self, timeout: float | None) -> Any:
        """Return the next request that can begin, as `(queue, request, args)`, or None. Wait at most `timeout` seconds for
        it; None: not at all, since a batch goes on.
        """

    def tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return what `_tokenize` gives. The loop looks this request up next."""

    def begin_alone(self, answers: Any) -> None:
        """Hear that a request is served by itself from here on."""


class Loop(server.ResponseGenerator):
    """mlx-lm's loop, which takes and tokenizes requests by `steps`, and runs on the thread that calls `run`.

    Patch: `_next_request`, `_tokenize` and `_serve_single` are where it can be reached. Issue: none filed. Goes when mlx-lm's
    loop takes its requests from an object that it is given.
    """

    def __init__(self, provider: Any, prompt_cache: Any, steps: LoopSteps, time_budget: Any):
        self._steps = steps
        self._is_running = False
        super().__init__(provider, prompt_cache)
        self._generation_thread.join()  # mlx-lm's own has nothing to do
        self._time_budget = time_budget

    def begin(self, target: Callable[[], None], thread: threading.Thread | None = None) -> threading.Thread:
        """Have `target`, which calls `run`, called on a new thread; or on this `thread`, by its owner. Return the thread."""
        self._generation_thread = thread or threading.Thread(target=target, name="prefixcache-generate")
        if thread is None:
            self._generation_thread.start()
        return self._generation_thread

    def run(self) -> None:
        """Answer requests until `stop`. May be called again after an exception."""
        self._is_running = True
        try:
            self._generate()
        finally:
            self._is_running = False

    def stop(self) -> None:
        """End the loop after its present step."""
        self._stop = True

    @property
    def stopped(self) -> bool:
        return self._stop

    def tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Return what mlx-lm's `_tokenize` gives: tokens, segments and more. It rewrites the request's messages."""
        return super()._tokenize(tokenizer, request, args)

    def _generate(self) -> None:
        if self._is_running:
            super()._generate()

    def _next_request(self, timeout: float | None = None) -> Any:
        return self._steps.next_request(timeout)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        return self._steps.tokenize(tokenizer, request, args)

    def _serve_single(self, request: Any, *others: Any) -> None:
        self._steps.begin_alone(request[0])
        super()._serve_single(request, *others)

    def _log_cache_stats(self) -> None:
        """Log nothing: mlx-lm would write a line and one for each type of prompt, and a request's own line follows."""


AnyCall = Callable[..., Any]


class Batches(BatchGenerator):
    """mlx-lm's batches, with names for what is done with their inside. `watched` gives a call in the place of one that
    changes the batch that generates; `processed` gets what a step gave, and returns it.

    Private: the two batches, the queue before them and the count of uids. Issue: none filed. Goes when `BatchGenerator`
    survives a step that fails, and lets a sequence begin again.
    """

    def __init__(self, watched: Callable[[AnyCall], AnyCall], processed: AnyCall, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._processed = watched(processed)
        self._generation_batch.next = watched(self._generation_batch.next)
        self._generation_batch.extend = watched(self._generation_batch.extend)

    @property
    def prefilling(self) -> Any:
        return self._prompt_batch

    @property
    def generating(self) -> Any:
        return self._generation_batch

    def waiting(self) -> set[int]:
        """Return the uids whose prefill has not begun."""
        return {sequence[0] for sequence in self._unprocessed_sequences}

    def drop_prefilling(self) -> None:
        """Forget the sequences whose prompts are computed."""
        self._prompt_batch.filter([])
        self._currently_processing: list[Any] = []

    def drop_generating(self) -> None:
        """Forget the sequences that generate."""
        self._generation_batch.filter([])
        self._generation_batch._current_tokens, self._generation_batch._current_logprobs = None, []

    def told_of(self, uid: int) -> Any:
        """Return a response that says nothing but that there is such a sequence."""
        return self._prompt_batch.Response(uid, (0, 0), False, False)

    def insert_as(self, uid: int, insert: Callable[[], Any]) -> None:
        """Have `insert` insert a sequence under a uid that it has had, by which the loop knows it."""
        last: int = self._uid_count  # type: ignore[has-type]
        self._uid_count = uid
        insert()
        self._uid_count = last

    def _next(self) -> Any:
        return self._processed(*super()._next())


@contextmanager
def generating_with(batches: Callable[..., Any], stream: Callable[..., Iterator[Any]]) -> Iterator[None]:
    """Let mlx-lm's loop make its batches and its streams by these.

    Patch: it makes them by two names of its module, and takes neither as an argument. Issue: none filed. Goes when
    `ResponseGenerator` takes them.
    """
    server.BatchGenerator, server.stream_generate = batches, stream
    try:
        yield
    finally:
        server.BatchGenerator, server.stream_generate = BatchGenerator, stream_generate
