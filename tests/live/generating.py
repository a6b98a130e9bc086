"""mlx-lm's BatchGenerator under random traffic, and what each of its requests would have had alone.

`drive` takes the function that makes one request's prompt cache, so the same traffic runs with any kind of live cache.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

STEP = 24  # tokens of a prompt that are fed at once
REQUESTS, LONGEST, VOCABULARY = 8, 90, 128  # of the traffic: how many, tokens of a prompt at most, ids
BATCH, CANCELLED = 4, 0.02  # requests at once, and the chance of each at each step
MakeCache = Callable[[], list[Any]]


class Request(NamedTuple):
    """`history` is in its prompt cache before it joins, in pieces of `STEP`; `prompt` is what the generator feeds."""

    history: list[int]
    prompt: list[int]
    max_tokens: int


class Result(NamedTuple):
    """What a request got: a token and its (vocabulary,) float32 logprobs at each step, and its own cache at the end.

    A cancelled one has the tokens until then, and the cache that was taken out of the batch with it: of the prompt and
    its tokens, or of fewer where it was still in prefill (`tokens` is empty) or waiting.
    """

    request: Request
    tokens: list[int]
    logprobs: list[mx.array]
    cache: list[Any]
    cancelled: bool


def traffic(seed: int) -> Iterator[tuple[int, Request]]:
    """(the step before which it comes, the request): long and short ones, with history and without."""
    rng, at = random.Random(seed), 0
    for _ in range(REQUESTS):
        at += rng.choice([0, 0, 1, 3, 8])
        lengths = rng.choice([0, 0, 1, 37]), rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, LONGEST)])
        history, prompt = ([rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths)
        yield at, Request(history, prompt, rng.randint(1, 16))


def drive(model: nn.Module, make_cache: MakeCache, seed: int) -> list[Result]:
    """Run requests that join, finish and are cancelled at random, at most `BATCH` of them at once."""
    rng = random.Random(seed + 1)
    generator = BatchGenerator(model, completion_batch_size=BATCH, prefill_batch_size=BATCH, prefill_step_size=STEP)
    coming = list(traffic(seed))
    running: dict[int, Result] = {}
    done: list[Result] = []
    step = 0
    while coming or running:
        while coming and (coming[0][0] <= step or not running):
            request = coming.pop(0)[1]
            cache = make_cache()
            feed(model, cache, request.history)
            [uid] = generator.insert([request.prompt], [request.max_tokens], caches=[cache])
            running[uid] = Result(request, [], [], cache, False)
        for uid in [uid for uid in running if rng.random() < CANCELLED]:
            cache, _ = generator.remove([uid], return_prompt_caches=True)[uid]
            done.append(running.pop(uid)._replace(cache=cache, cancelled=True))
        for response in generator.next()[1]:
            result = running[response.uid]
            result.tokens.append(response.token)
            result.logprobs.append(response.logprobs.astype(mx.float32))
            if response.finish_reason:
                done.append(running.pop(response.uid)._replace(cache=response.prompt_cache))
        step += 1
    generator.close()
    return done


def feed(model: nn.Module, cache: list[Any], tokens: list[int]) -> mx.array | None:
    """The (vocabulary,) logprobs after the last of `tokens`, which are fed in the pieces that the generator takes."""
    logits = None
    for at in range(0, len(tokens), STEP):
        logits = model(mx.array([tokens[at : at + STEP]]), cache=cache)
        mx.eval(logits)
    return None if logits is None else nn.log_softmax(logits[0, -1].astype(mx.float32))


def alone(model: nn.Module, make_cache: MakeCache, result: Result) -> tuple[list[mx.array], list[Any]]:
    """The logprobs and the cache of the same request by itself, fed the tokens that it got in the batch."""
    cache = make_cache()
    feed(model, cache, result.request.history)
    feed(model, cache, result.request.prompt[:-1])
    logprobs = [feed(model, cache, [token]) for token in [result.request.prompt[-1], *result.tokens]]
    return logprobs[:-1], cache


def check_logprobs(result: Result, logprobs: list[mx.array], near: float = 1e-3) -> None:
    """AssertionError unless each step's logprobs are those of the run alone. A token may be another one only where
    the two are nearer than twice `near`.
    """
    for own, got, token in zip(logprobs, result.logprobs, result.tokens, strict=True):
        assert mx.max(mx.abs(own - got)).item() <= near
        assert (mx.max(own) - own[token]).item() <= 2 * near
