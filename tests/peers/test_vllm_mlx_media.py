"""vllm-mlx 0.6.0's multimodal generator on a PrefixCache: prompts with pictures are hit as deep as they are the same, the
encoder sees only the pictures behind a hit, and what is said is what is said without a cache.
"""

import json
import sys
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx_vlm")

from prefixcache.servers.media_inputs import Placeholders
from prefixcache.servers.vllm_mlx import installation as vllm_mlx
from tests.vlm.folders import save
from tests.vlm.pictures import CHATS, SAID, SYSTEM, Chat, user

CACHE = {"ram": "100MB", "ssd": "100MB", "disk": False}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4")
EACH_KIND = pytest.mark.parametrize("loaded", ["qwen3_vl", "qwen3_5", "gemma4"], indirect=True)  # of layers
ANY_MODEL = pytest.mark.parametrize("loaded", ["qwen3_vl"], indirect=True)


class Said(NamedTuple):
    """What a request came to: tokens of its prompt, of those from the cache, pictures that were encoded, the answer."""

    prompt: int
    hit: int
    encoded: int
    tokens: list[int]


class Generator:
    """Requests through their multimodal generator, with a pixel cache of its own."""

    def __init__(self, wheel, loaded, cached=True, **options):
        config = wheel.memory_cache.MemoryCacheConfig(max_memory_mb=100) if cached else None
        self.wheel, self.processor = wheel, loaded.processor
        self.generator = wheel.multimodal.MLLMBatchGenerator(
            loaded.model, loaded.processor, prefix_cache_config=config, **options
        )
        self.loaded = loaded

    @property
    def saved(self) -> int:
        return self.generator.get_prefix_cache_stats()["tokens_saved"]

    def __call__(self, chat: Chat, n=12) -> Said:
        before = self.saved, len(self.loaded.encoded)
        ((request, tokens),) = self.together([chat], n)
        return Said(request.input_ids.size, self.saved - before[0], sum(self.loaded.encoded[before[1] :]), tokens)

    def together(self, chats, n=12):
        """What requests are answered that are prefilled in one batch: [(request, tokens)]."""
        requests = {str(i): self.request(chat, str(i), n) for i, chat in enumerate(chats)}
        self.generator.insert(list(requests.values()))
        said = {name: [] for name in requests}
        going = set(requests)
        while going:
            for response in self.generator.next():
                assert response.finish_reason != "error"
                said[response.request_id].append(response.token)
                going -= {response.request_id} if response.finish_reason else set()
        return [(requests[name], said[name]) for name in requests]

    def request(self, chat: Chat, name: str, n: int):
        parts = [part for message in chat for part in message["content"] if not isinstance(part, str)]
        text = self.processor.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.wheel.multimodal.MLLMBatchRequest(
            uid=0,
            request_id=name,
            prompt=text,
            images=[part["image_url"]["url"] for part in parts if part["type"] == "image_url"],
            max_tokens=n,
            temperature=0.0,
        )


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(wheel, request, tmp_path_factory):
    """A tiny model with its processor, as vllm-mlx loads them; `encoded`: how many pictures each run of its encoder saw."""
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    mllm = sys.modules["vllm_mlx.models.mllm"]
    multimodal = mllm.MLXMultimodalLM(str(folder))
    multimodal.load()
    vllm_mlx.name_model(multimodal.model, folder)
    multimodal.encoded, multimodal.answered = [], {}
    tower = type(multimodal.model.vision_tower)
    encode = tower.__call__

    def counted(self, pixels, grid, *args, **options):
        multimodal.encoded.append(len(pixels if grid is None else grid))
        return encode(self, pixels, grid, *args, **options)

    tower.__call__ = counted
    yield multimodal
    tower.__call__ = encode


@pytest.fixture
def plain(wheel, loaded):
    """Answers chats in one batch without any cache, or memory of pictures: the same ones once for all tests."""

    def answer(*chats):
        asked = json.dumps(chats)
        if asked not in loaded.answered:
            generator = Generator(wheel, loaded, cached=False, enable_vision_cache=False)
            loaded.answered[asked] = answers(generator, chats)
        return loaded.answered[asked]

    return answer


def answers(generator: Generator, chats) -> list[list[int]]:
    return [tokens for _, tokens in generator.together(chats)]


@pytest.fixture
def ours(wheel, loaded, opened, install):
    """Makes a generator with a PrefixCache of its own."""

    def make(options=None, **values):
        install(opened(**values))
        return Generator(wheel, loaded, **(options or {}))

    make.model = loaded.model
    return make


def recurrent(generator: Generator) -> bool:
    return any(not hasattr(layer, "self_attn") for layer in generator.generator.language_model.layers)


def first_picture(generator: Generator, chat: Chat) -> tuple[int, int]:
    """Where the placeholders of a chat's first picture begin and end."""
    request = generator.request(chat, "", 1)
    generator.generator._preprocess_request(request)
    placeholder = generator.loaded.model.config.image_token_id
    stands = [token == placeholder for token in request.input_ids.reshape(-1).tolist()]
    start = stands.index(True)
    return start, stands.index(False, start)


def test_every_chat_is_answered_as_without_a_cache_and_hit_as_deep_as_it_is_the_same(ours, plain):
    generator = ours()
    said = {name: generator(chat) for name, chat in CHATS.items()}
    for name, chat in CHATS.items():
        assert [said[name].tokens] == plain(chat), name
    start, end = first_picture(generator, CHATS["one picture"])
    again, other = said["it again"], said["another picture, the same text"]
    assert (again.hit, again.encoded) == (again.prompt - (not recurrent(generator)), 0)
    # Of a model with recurrent layers, where two prompts part is known when a third comes.
    question = said["a third question" if recurrent(generator) else "another question"]
    assert (question.hit >= end, question.encoded) == (True, 0)
    assert (other.hit, other.encoded) == (start, 1)
    for name in ("two pictures", "the second is another", "a picture in the second turn"):
        assert (said[name].hit >= end, said[name].encoded) == (True, 1), name
    assert said["swapped"].hit >= start
    assert {name: generator(chat).tokens for name, chat in CHATS.items()} == {name: said[name].tokens for name in CHATS}


PARTS = st.sampled_from([1, 2, "and ", "Which of them? ", "Say what you see, at length, and why. " * 9])
TURNS = st.lists(st.lists(PARTS, min_size=1, max_size=5), min_size=1, max_size=2)


@EACH_KIND
@settings(max_examples=6)
@given(st.lists(TURNS, min_size=1, max_size=4))
def test_any_chats_are_answered_as_without_a_cache(ours, plain, asked):
    generator = ours(ram="3MB")  # some of it is evicted
    for turns in asked:
        chat = [message for parts in turns for message in (user(*parts), SAID)][:-1]
        assert [generator(chat, 4).tokens] == [tokens[:4] for tokens in plain(chat)]
        generator.generator.prefix_cache.cache.check_integrity()


@EACH_KIND
def test_a_cache_that_was_closed_fails_no_request(ours, plain):
    generator = ours()
    for chat in (CHATS["one picture"], CHATS["another question"], CHATS["no picture"]):
        assert [generator(chat).tokens] == plain(chat)
        generator.generator.prefix_cache.cache.close()


@EACH_KIND
def test_with_a_lossy_codec_prompts_are_computed_on_what_is_stored_and_so_answered_as_on_an_empty_cache(ours):
    generator = ours({"prefill_step_size": 256}, codec="turboquant:4")
    system = SYSTEM | {"content": SYSTEM["content"] * 2}
    chats = {name: [system, *chat[1:]] for name, chat in CHATS.items() if name != "no picture"}
    cold = {}
    for name, chat in chats.items():
        generator.generator.prefix_cache.clear()
        cold[name] = generator(chat)
        assert cold[name].hit == 0
    generator.generator.prefix_cache.clear()
    for _ in range(2):
        said = {name: generator(chat) for name, chat in chats.items()}
        assert {name: of.tokens for name, of in said.items()} == {name: of.tokens for name, of in cold.items()}
    assert all(of.hit > 200 and of.encoded == 0 for of in said.values())


@ANY_MODEL
def test_prompts_longer_than_the_bound_of_the_window_are_computed_whole(ours, wheel, loaded):
    options = {"max_kv_size": 128}
    generator, plain = ours(options), Generator(wheel, loaded, cached=False, **options)
    for chat in (CHATS["one picture"], CHATS["it again"], CHATS["another question"]):
        said = generator(chat)
        assert (said.hit, said.tokens) == (0, plain(chat).tokens)


@EACH_KIND
def test_requests_of_one_batch_keep_their_pictures_and_positions(ours, plain):
    generator = ours()
    chats = [CHATS[name] for name in ("one picture", "swapped", "no picture", "a picture in the second turn")]
    expected = plain(*chats)
    for _ in range(2):
        assert answers(generator, chats) == expected


@EACH_KIND
def test_a_request_that_joins_after_a_hit_does_not_change_what_the_hit_is_answered(ours, plain):
    generator = ours()
    one, other = CHATS["one picture"], CHATS["a picture in the second turn"]
    generator(one)
    assert answers(generator, [one, other]) == plain(one, other)
    assert generator(one).tokens == plain(one)[0]


@EACH_KIND
def test_a_prompt_with_pictures_is_hit_by_its_next_turn_after_a_restart(ours, plain):
    chat = CHATS["two pictures"]
    generator = ours(disk=True)
    before = generator(chat)
    generator.generator.prefix_cache.cache.close()
    chat = [*chat, SAID, user("And now?")]
    after = ours(disk=True)(chat)
    assert [after.tokens] == plain(chat)
    assert (after.hit, after.encoded) == (before.prompt, 0)


@EACH_KIND
def test_a_prefill_that_is_aborted_leaves_what_is_right(ours, plain):
    generator, chat = ours(), CHATS["two pictures"]
    for first in (True, False):
        request = generator.request(chat, "aborted", 4)
        generator.generator.insert([request])
        if first:
            generator.generator.abort_prefill("aborted")
        generator.generator.next()
        generator.generator.remove([request.uid])
        generator.generator._aborted_request_ids.clear()
    assert [generator(chat).tokens] == plain(chat)


@ANY_MODEL
def test_a_hit_that_cannot_be_computed_on_is_dropped(ours, plain, caplog, monkeypatch):
    generator, chat = ours(), CHATS["another question"]
    generator(CHATS["one picture"])
    kwargs = generator.generator._language_model_kwargs
    monkeypatch.setattr(generator.generator, "_language_model_kwargs", lambda *args: kwargs(*args) | {"mask": 1 / 0})
    said = generator(chat)
    monkeypatch.undo()
    assert [said.tokens] == plain(chat)
    assert "a hit is not used: ZeroDivisionError" in caplog.text
    assert generator(chat).hit > said.prompt - 40


@ANY_MODEL
def test_pictures_that_cannot_be_named_are_computed_and_not_kept(ours, plain, caplog, monkeypatch):
    generator, chat = ours(), CHATS["one picture"]
    monkeypatch.setattr("prefixcache.servers.vllm_mlx.media_prefill.placeholders_of", lambda config: Placeholders({}))
    assert [generator(chat).tokens] == [generator(chat).tokens] == plain(chat)
    assert generator.saved == 0
    assert "a prompt with pictures is not kept: ValueError" in caplog.text


@EACH_KIND
def test_a_model_whose_prompts_cannot_be_hit_is_served_without_a_prefix_cache(ours, plain, caplog, monkeypatch):
    chat = CHATS["one picture"]
    expected = plain(chat)
    monkeypatch.setattr(ours.model.config, "model_type", "paligemma")
    generator = ours()
    assert generator.generator.prefix_cache is None
    assert [generator(chat).tokens] == expected
    assert "without a prefix cache: paligemma: each token" in caplog.text
