"""Requests on their way through the loop of `prefixcache serve`: who waits, for what, and what comes of it. The loop and
the models are real, only HTTP is left out, and the disk may be slow.
"""

from __future__ import annotations

import base64
import copy
import io
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import server as upstream
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.keys import as_tokens, common_prefix
from prefixcache.metrics.rates import LONG
from prefixcache.servers.mlx_lm.answers import Answers, Ended
from prefixcache.servers.mlx_lm.arguments import read_flags
from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.provider import Provider
from prefixcache.servers.mlx_lm.turns import IDLE_POLLS, IdlePool, TimeBudget
from tests.given_rates import computing_is
from tests.inside import inside
from tests.models.families import MLX_LM_0_31
from tests.servers.serving import SECONDS, Message, save_model, text, user, wait_for
from tests.servers.slow_disk import slow_disk

ONLY_0_32 = pytest.mark.skipif(MLX_LM_0_31, reason="mlx-lm 0.31's server has it not")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_next", "mamba"):
        save_model(folder / family, family)
    return folder


@contextmanager
def generating(
    cache: PrefixCache, *flags: Any, before: Callable[[Generator], None] = lambda generator: None
) -> Iterator[Generator]:
    generator = Generator(Provider(read_flags([str(flag) for flag in flags])), cache, before)
    try:
        assert generator.ready.wait(SECONDS)
        yield generator
        assert generator.stopped or generator.thread.is_alive()
    finally:
        generator.stop_answering()
        generator.stop()
        generator.thread.join()


CACHE = {"ram": "100MB", "ssd": "200MB"}


class Asked(threading.Thread):
    """A request on its way. `begun` is set when its turn has come."""

    def __init__(
        self, generator: Generator, messages: list[Message], *, salt: str = "", max_tokens: int = 6, **more: Any
    ):
        super().__init__(daemon=True)
        self.request = upstream.CompletionRequest("chat", "", messages, None, None)
        self.request.salt = salt.encode()
        self._args = arguments(max_tokens=max_tokens, **more)
        self._generator = generator
        self.begun = threading.Event()
        self.context: Any = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.context, answers = self._generator.generate(self.request, self._args)
            self.begun.set()
            for answer in answers:
                self.tokens.append(answer.token)
                self.logprobs.append(answer.logprob)
        except Exception as error:
            self.error = error

    def answered(self) -> Asked:
        self.join(SECONDS)
        assert (self.is_alive(), self.error) == (False, None)
        return self

    @property
    def cached(self) -> int:
        return self.answered().context.prompt_cache_count

    @property
    def computed(self) -> int:
        return len(self.answered().context.prompt) - self.cached


def arguments(max_tokens: int, model: str = "default_model", seed: int | None = None) -> Any:
    return upstream.GenerationArguments(
        model=upstream.ModelDescription(model=model, draft="default_model", adapter=None),
        sampling=upstream.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
        logits=upstream.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=max_tokens,
        num_draft_tokens=2,
        logprobs=False,
        top_logprobs=-1,
        seed=seed,
        chat_template_kwargs=None,
    )


def test_a_model_below_the_home_folder_may_be_named_by_a_tilde(model, monkeypatch):
    """A shell leaves it in `--model=~/model`, and a service has no shell."""
    monkeypatch.setenv("HOME", str(model.parent))
    with PrefixCache(ram="50MB") as cache, generating(cache, "--model", f"~/{model.name}") as generator:
        assert generator.failure is None
        assert Asked(generator, user("hello")).answered().tokens


# -- the budget of time, the queue of answers -------------------------------------------------------------------------


def test_the_batch_goes_on_until_someone_waits_and_one_step_at_least():
    waits = iter([False, False, True])
    assert sum(1 for _ in TimeBudget(lambda: next(waits))) == 3
    assert sum(1 for _ in TimeBudget(lambda: True)) == 1
    budget = TimeBudget(lambda: True)
    assert [sum(1 for _ in budget) for _ in range(3)] == [1, 1, 1]


def test_the_batch_looks_up_in_the_end_when_nobody_waits():
    assert sum(1 for _ in TimeBudget(lambda: False, 0.01)) > 1


def response(token: int, finish: str | None = None) -> Any:
    given = {"text": "", "token": token, "logprob": 0.0, "finish_reason": finish, "top_tokens": ()}
    if MLX_LM_0_31:
        given |= {"state": "normal", "match": None}
    return upstream.Response(**given)


def context() -> Any:
    made = object.__new__(upstream.GenerationContext)
    made._should_stop = False
    return made


def test_answers_are_wanted_until_they_end_or_the_client_is_gone():
    kept: queue.Queue[Any] = queue.Queue()
    answers = Answers(kept)
    assert answers.wanted()
    answers.put(context())
    answers.put((3, 7))  # progress
    assert answers.wanted()
    answers.put(response(1))
    answers.put(None)
    assert not answers.wanted()
    assert kept.qsize() == 4


def test_answers_that_were_stopped_or_failed_are_not_wanted():
    gone, failed = Answers(queue.Queue()), Answers(queue.Queue())
    gone.put(context())
    gone.stop()
    failed.put(ValueError("no such model"))
    assert (gone.wanted(), failed.wanted()) == (False, False)


# -- waiting for the disk ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(models: Path) -> tuple[Path, list[int]]:
    """A directory with a prompt of about 300 tokens, and what answers it."""
    directory, flags = models / "original", ("--model", models / "llama")
    with PrefixCache(ssd_dir=directory, codec="raw", **CACHE) as cache, generating(cache, *flags) as generator:
        tokens = Asked(generator, user(text(300, "stored"))).answered().tokens
    return directory, tokens


@pytest.fixture
def stored(original: tuple[Path, list[int]], tmp_path: Path) -> list[int]:
    """The test's directory has that prompt; what answers it."""
    shutil.copytree(original[0], tmp_path / "ssd")
    return original[1]


def test_a_request_that_waits_for_the_disk_stops_no_other(models, opened, stored):
    cache = opened()
    cache.rates = computing_is("forever")
    with generating(cache, "--model", models / "llama") as generator, slow_disk(cache) as go:
        waiting = Asked(generator, user(text(300, "stored")))
        wait_for(lambda: generator._deferred, "deferred request")
        # Another tenant's: the first tokens of all prompts are the same, and the disk has them.
        others = [Asked(generator, user(text(50, f"other {i}")), salt="other") for i in range(3)]
        assert all(len(other.answered().tokens) == 6 for other in others)
        assert not waiting.begun.is_set()
        go.set()
        assert (waiting.computed, waiting.tokens) == (1, stored)


def test_a_request_waits_for_the_disk_no_longer_than_computing_takes(models, opened, stored):
    cache = opened()
    with generating(cache, "--model", models / "llama") as generator, slow_disk(cache) as go:
        waiting = Asked(generator, user(text(300, "stored")))
        assert (waiting.cached, waiting.tokens) == (0, stored)
        assert not go.is_set()


@pytest.mark.parametrize("seed", [None, 1])
def test_a_request_that_has_its_model_loaded_waits_for_the_disk_too(models, opened, stored, seed):
    cache = opened()
    cache.rates = computing_is("forever")
    with generating(cache) as generator:
        waiting = Asked(generator, user(text(300, "stored")), model=str(models / "llama"), seed=seed)
        assert (waiting.computed, waiting.tokens) == (1, stored)


def test_requests_that_waited_for_the_disk_together_compute_the_rest_once(models, opened, stored):
    """They are woken together. Some tens of tokens are in RAM, then, and some hundred are new."""
    cache = opened()
    cache.rates = computing_is("forever")
    with generating(cache, "--model", models / "llama") as generator, slow_disk(cache) as go:
        prompt = user(f"{text(300, 'stored')} {text(400, 'more')}")
        together = [Asked(generator, prompt) for _ in range(4)]
        wait_for(lambda: len(generator._deferred) == 4, "deferred requests")
        go.set()
        computed = sorted(asked.computed for asked in together)
        assert computed[:3] == [1, 1, 1]
        assert 300 < computed[3] < 500
        assert len({tuple(asked.tokens) for asked in together}) == 1


@pytest.mark.parametrize("seed", [None, 1])  # in a batch, or one by one
def test_a_slow_hit_is_computed_and_a_hot_one_given(models, opened, seed):
    cache = opened(disk=False, decline_slow_hits=True)
    cache.rates = computing_is("quicker")
    with generating(cache, "--model", models / "llama") as generator:
        first = Asked(generator, user(text(300)), seed=seed).answered()
        assert generator.wait_for_stores(SECONDS)
        hot = Asked(generator, user(text(300)), seed=seed)
        assert (hot.computed, hot.tokens) == (1, first.tokens)
        assert generator.wait_for_stores(SECONDS)  # else it may become hot afterwards
        inside(cache).storage.hot.clear()
        declined = Asked(generator, user(text(300)), seed=seed)
        assert (declined.cached, declined.tokens) == (0, first.tokens)
        counters = cache.stats().counters
        assert (counters.declined_hits, counters.declined_hit_tokens) == (1, declined.computed - 1)


def test_what_prefills_take_is_learnt_without_their_answers(models, opened):
    cache = opened(disk=False)
    with generating(cache, "--model", models / "llama") as generator:
        asked = [Asked(generator, user(text(400, f"{i}"))).answered() for i in range(5)]
        assert generator.wait_for_stores(SECONDS)
        (learnt,) = cache.rates._models.values()
    assert min(one.computed for one in asked) > LONG
    assert learnt.prefills.tells_of(1000)
    assert learnt.answers.line() is None


def test_a_promotion_that_fails_is_a_miss(models, opened, stored, tmp_path):
    for image in (tmp_path / "ssd").rglob("*.safetensors"):
        image.write_bytes(b"damaged")
    cache = opened()
    cache.rates = computing_is("forever")
    with generating(cache, "--model", models / "llama") as generator:
        asked = Asked(generator, user(text(300, "stored")))
        assert (asked.cached, asked.tokens) == (0, stored)


SYSTEM = {"role": "system", "content": text(300, "walked")}


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def walked(models: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    model, directory = models / request.param, models / f"walked {request.param}"
    with (
        PrefixCache(ssd_dir=directory, codec="raw", **CACHE) as cache,
        generating(cache, "--model", model) as generator,
    ):
        Asked(generator, [SYSTEM, *user("hello")]).answered()
    return model, directory


@pytest.mark.parametrize("seed", [None, 1])  # in a batch, or one by one
@pytest.mark.parametrize("question", ["hello", text(300, "longer")])
def test_a_request_that_comes_from_the_ssd_walks_the_graph_from_the_root_four_times_at_most(
    walked, opened, tmp_path, question, seed
):
    model, directory = walked
    shutil.copytree(directory, tmp_path / "ssd")
    cache = opened()
    graph = inside(cache).storage.graph
    cache.rates = computing_is("forever")
    with generating(cache, "--model", model) as generator:
        before = graph.walks
        asked = Asked(generator, [SYSTEM, *user(question)], seed=seed).answered()
    assert asked.cached >= 256
    counters = cache.stats().counters
    assert (counters.promoted_tokens >= 256, counters.stores >= 1) == (True, True)
    assert graph.walks - before <= 4


# -- waiting for each other -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_of_two_that_wait_for_a_third_which_is_cancelled_one_computes(models, opened, family):
    prompt = user(text(1200, "third"))
    with generating(opened(), "--model", models / family, "--prefill-step-size", 4) as generator:
        third = Asked(generator, prompt)
        assert third.begun.wait(SECONDS)
        two = [Asked(generator, prompt, max_tokens=3) for _ in range(2)]
        wait_for(lambda: len(generator._deferred) == 2, "two requests that wait")
        assert not third.tokens
        third.context.stop()
        computed = sorted(asked.computed for asked in two)
        assert computed[0] == 1
        assert computed[1] > 1000
        assert two[0].tokens == two[1].tokens
        assert generator.under_way.waited >= 2


def test_a_request_waits_for_nobody_with_another_salt_or_model(models, opened):
    prompt = user(text(300, "apart"))
    with generating(opened(), "--model", models / "llama", "--prefill-step-size", 8) as generator:
        asked = [Asked(generator, prompt, salt=salt) for salt in ("", "one", "two")]
        assert [one.cached for one in asked] == [0, 0, 0]
        assert generator.under_way.waited == 0
        assert Asked(generator, prompt, model=str(models / "qwen3_next")).cached == 0


def test_chunks_without_recurrent_state_dont_end_the_waiting_of_others(models, opened):
    with generating(opened(), "--model", models / "qwen3_next", "--prefill-step-size", 256) as generator:
        Asked(generator, user(text(600, "chunks"))).answered()
        assert generator.under_way._in_vain_until == 0.0


def test_a_model_that_counts_no_tokens_keeps_the_state_of_those_it_has_seen(models, opened):
    prompt = user(text(400, "state"))
    with generating(opened(), "--model", models / "mamba", "--prefill-step-size", 256) as generator:
        first = Asked(generator, prompt).answered()
        cache, name = generator.prompts.cache, generator.prompts.name_of(generator.model_provider.model_key)
        asked = first.context.prompt
        assert cache.match(asked, model=name).ram == len(asked) - 1
        again = [Asked(generator, prompt, seed=seed) for seed in (None, 1)]
        assert [(one.computed, one.tokens) for one in again] == [(1, first.tokens)] * 2


@pytest.mark.parametrize("seed", [None, 1])  # in a batch, or one by one
def test_a_prompt_is_hit_on_the_way_of_one_that_it_parts_from(models, opened, seed, monkeypatch):
    """At the last of the places where state was kept, long before anything is known of where others part."""
    monkeypatch.setattr("prefixcache.tiers.parting.STATE_EVERY", 512)
    with generating(opened(), "--model", models / "qwen3_next") as generator:
        first, other = (
            Asked(generator, user(text(1300, "way") + end), seed=seed).answered() for end in ("", " and another end")
        )
        shared = common_prefix(*(as_tokens(asked.context.prompt) for asked in (first, other)))
        assert 1024 < shared < len(first.context.prompt) - 1
        assert (first.cached, other.cached) == (0, shared // 512 * 512)
        alone = Asked(generator, user(text(1300, "way") + " and another end"), salt="alone", seed=seed)
        assert (alone.cached, alone.tokens) == (0, other.tokens)


@pytest.mark.parametrize("seed", [None, 1])  # in a batch, or one by one
def test_where_the_second_prompt_parts_the_third_goes_on(models, seed):
    """Though the rest of that block is coded; and its answer is that of an empty cache."""
    prompts = [user(f"{text(500, 'shared')} {name} {text(150, name)}") for name in ("alpha", "beta", "gamma")]
    flags = ["--model", models / "llama", "--prefill-step-size", 256]
    with PrefixCache(codec="turboquant:4", ram="100MB") as cache, generating(cache, *flags) as generator:
        asked = [Asked(generator, prompt, seed=seed).answered() for prompt in prompts]
        first, second, third = (as_tokens(each.context.prompt) for each in asked)
        shared = common_prefix(first, second)
        assert shared % 256 > 32
        assert [each.cached for each in asked] == [
            0,
            shared // 256 * 256,
            min(shared, common_prefix(first, third)) // 32 * 32,
        ]
        assert Asked(generator, prompts[2], salt="alone", seed=seed).answered().tokens == asked[2].tokens


@pytest.mark.parametrize("seed", [None, 1])  # in a batch, or one by one
def test_an_answer_is_made_on_the_state_that_is_stored(models, seed):
    """Which is coded: else the first answer would be made on another than the second, a hit."""
    prompt = user(text(500, "coded"))
    with (
        PrefixCache(codec="turboquant:8:state_bits=2", ram="100MB") as cache,
        generating(cache, "--model", models / "qwen3_next") as generator,
    ):
        first, again = (Asked(generator, prompt, seed=seed).answered() for _ in range(2))
        assert (first.cached, again.computed) == (0, 1)
        assert first.logprobs == again.logprobs


@pytest.mark.parametrize("name", ["default_model", "path"])
def test_however_the_loaded_model_is_named_requests_wait_for_each_other(models, opened, name):
    model = str(models / "llama") if name == "path" else name
    prompt = user(text(300, "named"))
    with generating(opened(), "--model", models / "llama", "--prefill-step-size", 8) as generator:
        asked = [Asked(generator, prompt, model=model) for _ in range(3)]
        assert sorted(one.computed for one in asked)[:2] == [1, 1]


def test_a_request_that_cant_be_tokenized_is_told_and_stops_no_other(models, opened):
    with generating(opened(), "--model", models / "llama") as generator:
        with pytest.raises(ValueError, match=r"messages\.0\.content\.0 must be a text or an image"):
            generator.generate(
                upstream.CompletionRequest("chat", "", user([{"type": "sound"}]), None, None), arguments(3)
            )
        assert Asked(generator, user("hello")).answered().tokens


def test_messages_are_left_as_the_client_sent_them(models, opened):
    """A request may be tokenized twice: before its turn, and anew when another model was loaded meanwhile."""
    called = {"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"to": 3}'}}
    messages = [*user("Count."), {"role": "assistant", "content": "", "tool_calls": [called]}, *user([])]
    before = copy.deepcopy(messages)
    with generating(opened(), "--model", models / "llama") as generator:
        asked = Asked(generator, messages).answered()
        assert asked.request.messages == before


@pytest.mark.parametrize("seed", [None, 1])  # in a batch, or one by one
@pytest.mark.parametrize("size", [20, 3000])  # at work on the answer, or on the prompt
def test_requests_under_way_can_be_ended(models, opened, size, seed):
    with generating(opened(), "--model", models / "llama", "--prefill-step-size", 16) as generator:
        prompts = [user(text(size, f"end {i}")) for i in range(2)]
        asked = [Asked(generator, prompt, max_tokens=100_000, seed=seed) for prompt in prompts]
        wait_for(lambda: any(one.begun.is_set() for one in asked), "request under way")
        generator.stop()
        wait_for(lambda: generator.stop_answering() or not generator.thread.is_alive(), "end of the thread")
        late = Asked(generator, user("late"))
        for one in (*asked, late):
            one.join(SECONDS)
            assert not one.is_alive()
            assert isinstance(one.error, Ended)


def test_an_answer_that_was_finished_stays_so_when_the_server_ends():
    kept: queue.Queue[Any] = queue.Queue()
    answers = Answers(kept)
    for answer in (context(), response(1), response(2, "length"), None):
        answers.put(answer)
    answers.stop()
    assert kept.qsize() == 4


def test_nothing_comes_after_the_end_that_cuts_an_answer():
    kept: queue.Queue[Any] = queue.Queue()
    answers, begun = Answers(kept), context()
    answers.stop()
    answers.put(begun)  # it was about to begin
    answers.put((16, 3000))
    answers.put(response(1))
    answers.put(None)
    answers.stop()
    assert begun._should_stop
    assert isinstance(kept.get_nowait(), Ended)
    assert kept.empty()


def test_a_failure_before_the_first_request_is_kept(models, opened):
    def fail(generator: Generator) -> None:
        raise ValueError("not today")

    generator = Generator(Provider(read_flags(["--model", str(models / "llama")])), opened(), fail)
    assert generator.ready.wait(SECONDS)
    assert str(generator.failure) == "not today"
    generator.thread.join()


# -- whose prompts they are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_salt_goes_with_the_prompt_wherever_it_is_stored(models, opened, family):
    system = {"role": "system", "content": text(300, "salted")}
    with generating(opened(), "--model", models / family) as generator:
        for salt in ("one", "two"):
            first = Asked(generator, [system, *user("hello")], salt=salt)
            assert first.cached == 0
            second = Asked(generator, [system, *user("good day")], salt=salt)
            assert second.cached >= 260
            assert Asked(generator, [system, *user("hello")], salt=salt, seed=4).computed == 1


def test_a_changing_header_leaves_the_system_text_that_becomes_the_users(tmp_path, opened):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    )
    model = save_model(tmp_path / "no-system", template=template)
    with generating(opened(), "--model", model) as generator:
        for version, cached in ((1, 0), (2, 260)):
            content = f"x-anthropic-billing-header: cc_version={version};\n{text(300, 'header')}"
            asked = Asked(generator, [{"role": "system", "content": content}, *user(f"{version}")])
            assert asked.cached >= cached


@ONLY_0_32
def test_rows_that_were_quantized_are_not_given_to_a_server_that_does_not(models, opened):
    cache, flags = opened(), ["--model", models / "llama"]
    prompt = user(text(300, "bits"))
    for bits in ([], ["--kv-bits", 8], ["--kv-bits", 4], []):
        more = [*bits, "--kv-group-size", 32, "--quantized-kv-start", 0] if bits else []
        with generating(cache, *flags, *more) as generator:
            asked = [Asked(generator, prompt, max_tokens=2) for _ in range(2)]
            assert min(one.computed for one in asked) == 1
            name = generator.prompts.name_of(generator.model_provider.model_key)
            layers, _ = cache.fetch(asked[0].context.prompt, model=name)
            layouts = {type(layer).__name__ for layer in layers}
            assert layouts == {"QuantizedKVCache" if bits else "KVCache"}


def test_what_belongs_to_no_request_is_neither_kept_nor_found(models, opened):
    prompt = user(text(300, "whose"))
    with generating(opened(), "--model", models / "llama") as generator:
        tokens = list(Asked(generator, prompt, salt="mine").answered().context.prompt)
        prompts, key = generator.prompts, generator.model_provider.model_key
        stored = len(prompts)
        prompts.insert_cache(key, tokens[:-20], make_prompt_cache(generator.model_provider.model))
        assert (prompts.fetch_nearest_cache(key, tokens), len(prompts)) == ((None, tokens), stored)


# -- images -----------------------------------------------------------------------------------------------------------

IMAGE, PATCHES = "<|system|>", 5  # the token of a patch, and how many an image has
PICTURES = (
    "{% for m in messages %}<|user|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<|system|>.' }}{% endfor %}{% endif %}<|end|>{% endfor %}<|assistant|>\n"
)
SIDE_BY_SIDE = PICTURES.replace("'<|system|>.'", "'<|system|>'")


class Processor:
    """What mlx-lm has for models with images: here an image is its mean colour."""

    image_token = IMAGE

    def __call__(self, text: str, images: list[Any]) -> tuple[str, list[mx.array]]:
        return text.replace(IMAGE, IMAGE * PATCHES), [mx.array(image.mean(axis=(0, 1))) / 255 for image in images]


def see(generator: Generator) -> None:
    """Give a text model eyes."""
    provider = generator.model_provider
    patch, embed = provider.tokenizer.convert_tokens_to_ids(IMAGE), provider.model.model.embed_tokens

    def embed_inputs(tokens: mx.array, pixel_values: list[mx.array]) -> mx.array:
        rows = embed(tokens)
        at = [i for i, token in enumerate(tokens.tolist()) if token == patch]
        for image, first in zip(pixel_values, at[::PATCHES], strict=True):
            rows[first : first + PATCHES, :3] = image * 20
        return rows

    provider.models.processor = Processor()
    provider.model.embed_inputs = embed_inputs


def picture(colour: tuple[int, int, int]) -> Message:
    image = pytest.importorskip("PIL.Image")
    data = io.BytesIO()
    image.new("RGB", (4, 4), colour).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def shown(*colours: tuple[int, int, int], ask: str) -> list[Message]:
    parts = [{"type": "text", "text": text(280, "picture")}, *map(picture, colours), {"type": "text", "text": ask}]
    return user(parts)


RED, BLUE = (255, 0, 0), (0, 0, 255)


@ONLY_0_32
def test_images_of_one_size_never_meet_and_the_same_is_hit(models, opened):
    flags = ["--model", models / "llama", "--chat-template", PICTURES]
    asked = {(colour, salt): shown(colour, ask="What is it?") for colour in (RED, BLUE) for salt in ("", "tenant")}
    with generating(opened(), *flags, before=see) as generator:
        first = {of: Asked(generator, messages, salt=of[1]).answered() for of, messages in asked.items()}
        before = first[RED, ""].context.prompt.index(generator.model_provider.tokenizer.convert_tokens_to_ids(IMAGE))
        assert [one.cached for one in first.values()] == [0, 0, before, before]
        assert first[RED, ""].tokens == first[RED, "tenant"].tokens != first[BLUE, ""].tokens
        assert first[BLUE, ""].tokens == first[BLUE, "tenant"].tokens
        again = {of: Asked(generator, messages, salt=of[1]).answered() for of, messages in asked.items()}
        assert [one.computed for one in again.values()] == [1, 1, 1, 1]
        assert [one.tokens for one in again.values()] == [one.tokens for one in first.values()]
        assert Asked(generator, shown(RED, ask="What is it?"), salt="other").cached == 0


@ONLY_0_32
def test_images_that_mlx_lm_takes_for_one_are_neither_kept_nor_hit(models, opened):
    flags = ["--model", models / "llama", "--chat-template", SIDE_BY_SIDE]
    one, other = shown(RED, BLUE, ask="And these?"), shown(RED, RED, ask="And these?")
    with generating(opened(), *flags, before=see) as generator:
        answers = [Asked(generator, messages).answered() for messages in (one, other, one)]
        assert [answer.cached for answer in answers] == [0, 0, 0]
        assert answers[0].tokens == answers[2].tokens
        assert len(generator.prompts) == 0


@ONLY_0_32
def test_an_image_is_hit_together_with_the_turns_after_it(models, opened):
    flags = ["--model", models / "llama", "--chat-template", PICTURES]
    one, two = shown(RED, ask="What is it?"), shown(RED, BLUE, ask="And these?")
    with generating(opened(), *flags, before=see) as generator:
        whole = len(Asked(generator, one).answered().context.prompt)
        assert Asked(generator, [*one, *user("Really?")]).cached >= whole - 1
        both = Asked(generator, two)  # the first image and the full stop are known, the second is not
        patch = generator.model_provider.tokenizer.convert_tokens_to_ids(IMAGE)
        assert both.cached == both.answered().context.prompt.index(patch) + PATCHES + 1
        alone = Asked(generator, two, salt="alone")
        assert (alone.cached, alone.tokens) == (0, both.tokens)


# -- a server that nobody asks ----------------------------------------------------------------------------------------


def test_mlx_s_pool_of_buffers_is_emptied_once_when_nobody_has_asked_for_a_while():
    emptied = []
    pool = IdlePool()
    pool._empty = lambda: emptied.append(1)
    for _ in range(3):
        for _ in range(2 * IDLE_POLLS):  # a request comes now and then, or a batch goes on
            pool.count_poll(busy=True)
            for _ in range(IDLE_POLLS - 1):
                pool.count_poll(busy=False)
        assert not emptied
    for _ in range(5 * IDLE_POLLS):
        pool.count_poll(busy=False)
    assert len(emptied) == 1


def test_a_server_empties_it_after_its_requests_on_the_thread_that_generates(opened, models):
    emptied: list[str] = []
    with generating(opened(), "--model", models / "llama") as generator:
        generator._idle_pool._empty = lambda: emptied.append(threading.current_thread().name)
        for number in (1, 2):
            Asked(generator, user("hello")).answered()
            wait_for(lambda n=number: len(emptied) == n, "the pool to be emptied")
            seen = generator._idle_pool._polls
            wait_for(lambda s=seen: generator._idle_pool._polls > s + 2, "the loop to go on")
            assert emptied == [generator.thread.name] * number
