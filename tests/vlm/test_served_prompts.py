"""mlx-vlm's server on a PrefixCache answers what it answers without, whoever asked what before, and computes less for it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from threading import Event, Semaphore

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache
from prefixcache.keys import BLOCK
from prefixcache.servers.media_inputs import Placeholders
from prefixcache.servers.mlx_vlm.prompts import ModelPrompts, ServedPrompt
from tests.vlm import folders
from tests.vlm.generators import Answer, Question, Sound, Video, ask, at_once, begin, generating
from tests.waiting import until

TEXT = "Describe what you see, and what you do not see. " * 9
TEXTS, PICTURES = st.sampled_from((TEXT, "One?", "Another?")), st.integers(0, 3)
VIDEOS = st.builds(Video, st.integers(0, 1), st.sampled_from((2, 4)))
SOUNDS = st.builds(Sound, st.integers(0, 1), st.sampled_from((0.3, 0.5)))

EACH_KIND = pytest.mark.parametrize("plain", ["qwen3_vl", "qwen3_5", "gemma4"], indirect=True)  # of layers
ANY_MODEL = pytest.mark.parametrize("plain", ["qwen3_vl"], indirect=True)
CODED = pytest.mark.parametrize("generator", ["turboquant:4"], indirect=True)


def questions_of(family: str) -> st.SearchStrategy[Question]:
    """Questions about pictures, videos and sounds: of several kinds where mlx-vlm takes them in one prompt."""
    of_family = {
        "gemma3": [PICTURES],
        "gemma4": [st.one_of(PICTURES, SOUNDS)],
    }  # gemma4's videos have 70 tokens a frame
    kinds = of_family.get(family, [PICTURES, VIDEOS])
    parts = st.one_of([st.lists(st.one_of(TEXTS, kind), min_size=1, max_size=4) for kind in kinds])
    return parts.map(lambda parts: Question((*parts, "Say it.")))


@pytest.fixture(scope="module", params=sorted(folders.CONFIGS))
def plain(request, tmp_path_factory):
    """A model's folder, and what mlx-vlm answers with it."""
    folder = folders.save(request.param, tmp_path_factory.mktemp("models") / request.param)
    with generating(folder) as generator:
        known: dict[Question, list[int]] = {}

        def answer(question: Question) -> list[int]:
            if question not in known:
                known[question] = ask(generator, question).tokens
            return known[question]

        yield folder, answer


def machine_of(folder: Path, right):
    questions = questions_of(folder.name)

    class ServedPrompts(RuleBasedStateMachine):
        """Requests alone, at once and cancelled; what is evicted; restarts."""

        @initialize(step=st.sampled_from((64, 256, 2048)), budget=st.sampled_from(("300kB", "100MB")))
        def start(self, step, budget):
            self.directory = tempfile.mkdtemp()
            self.options = {"ssd_dir": self.directory, "ssd": "200MB", "ram": budget, "codec": "raw"}
            self.step = step
            self.open()

        def open(self):
            self.cache = PrefixCache(**self.options)
            self.running = generating(folder, self.cache, prefill_step_size=self.step)
            self.generator = self.running.__enter__()

        def close(self):
            self.running.__exit__(None, None, None)
            self.cache.close()

        @rule(question=questions)
        def alone(self, question):
            assert ask(self.generator, question).tokens == right(question)

        @rule(question=questions)
        def again(self, question):
            first = ask(self.generator, question)
            second = ask(self.generator, question)
            assert first.tokens == second.tokens == right(question)
            if self.options["ram"] == "100MB":
                assert second.hit == length(self.generator, question) - 1

        @rule(asked=st.lists(questions, min_size=2, max_size=4))
        def together(self, asked):
            for question, answer in zip(asked, at_once(self.generator, asked), strict=True):
                assert answer.tokens == right(question)

        @rule(question=questions, heard=st.integers(1, 3))
        def cancelled(self, question, heard):
            tokens = begin(self.generator, question)
            for _ in range(heard):
                next(tokens)
            tokens.close()

        @rule(question=questions, chunks=st.integers(1, 4))
        def cancelled_in_its_prefill(self, question, chunks):
            """Its client leaves when so many chunks are stored, or all."""
            computed, left = Semaphore(0), Event()

            def keep(served, layers, done):
                keep_chunk(served, layers, done)
                computed.release(chunks if done == len(served.tokens) - 1 else 1)
                if computed._value >= chunks:
                    left.wait(20)

            with pytest.MonkeyPatch.context() as patch:
                keep_chunk = ServedPrompt.keep
                patch.setattr(ServedPrompt, "keep", keep)
                tokens = begin(self.generator, question)
                until(lambda: computed._value >= chunks or not tokens._rqueue.empty())  # or all of it was hit
                tokens.close()
                left.set()
                until(lambda: not self.generator._cancelled)

        @rule()
        def evicted(self):
            self.cache.trim_to(0)

        @rule()
        def restarted(self):
            self.close()
            self.open()

        @invariant()
        def is_whole(self):
            if hasattr(self, "cache"):
                self.cache.check_integrity()

        def teardown(self):
            if hasattr(self, "cache"):
                self.close()
                shutil.rmtree(self.directory)

    return ServedPrompts


def test_answers_are_mlx_vlms_whatever_was_asked_before(plain):
    run_state_machine_as_test(
        machine_of(*plain), settings=settings(max_examples=6, stateful_step_count=8, deadline=None)
    )


@pytest.fixture
def generator(plain, request):
    with (
        PrefixCache(ram="200MB", codec=getattr(request, "param", "raw")) as cache,
        generating(plain[0], cache) as generator,
    ):
        yield generator
        cache.check_integrity()


def inputs(generator, question):
    return generator._preprocess_request(question.text(generator.config.model_type), **question.media)


def length(generator, question):
    return inputs(generator, question)["input_ids"].size


def until_a_block_is_whole(generator, question):
    """How many tokens an answer takes to reach beyond the block in which the prompt ends."""
    return BLOCK - length(generator, question) % BLOCK + 8


@EACH_KIND
def test_another_question_about_the_same_picture_hits_all_of_it(generator):
    one, another = Question((TEXT, 0, "One?")), Question((TEXT, 0, "Another?"))
    ask(generator, one)
    assert length(generator, Question((TEXT, 0))) - 8 <= ask(generator, another).hit < length(generator, another)


@EACH_KIND
def test_what_is_asked_about_a_picture_is_answered_as_on_an_empty_cache(plain):
    """With a lossy codec, too: the rows up to the picture's end stay as they were computed."""
    asked = [Question((TEXT, TEXT, 0, text)) for text in ("One?", "Another?", "And this?")]
    with PrefixCache(ram="200MB", codec="turboquant:4") as cache, generating(plain[0], cache) as generator:
        cold = []
        for question in asked:
            cold.append(ask(generator, question).tokens)
            cache.clear()
        warm = [ask(generator, question) for question in asked]
        if not generator.prompts.is_recurrent:  # such go on inside a coded block
            assert [answer.tokens for answer in warm] == cold
        assert min(answer.hit for answer in warm[1:]) >= length(generator, Question((TEXT, TEXT, 0))) - 8


@EACH_KIND
def test_other_pictures_are_missed(generator):
    """What is hit ends where the pictures do not agree, though all of the tokens do."""
    first = ask(generator, Question((TEXT, TEXT, 0, 1, "One?")))
    swapped = ask(generator, Question((TEXT, TEXT, 1, 0, "One?")))
    other = ask(generator, Question((TEXT, TEXT, 0, 5, "One?")))
    assert first.hit == 0 < swapped.hit <= length(generator, Question((TEXT, TEXT)))
    assert swapped.hit <= other.hit <= length(generator, Question((TEXT, TEXT, 0)))
    assert len({tuple(answer.tokens) for answer in (first, swapped, other)}) == 3


@pytest.mark.parametrize("plain", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4"], indirect=True)  # gemma3 takes none
def test_a_video_is_hit_as_deep_as_its_frames_are_the_same(plain):
    """By groups of frames, where the family's placeholders stand by them; qwen2_5_vl has one run for a video."""
    folder, right = plain
    of_group = 1 if folder.name == "gemma4" else 2  # frames
    videos = (Video(0, 2 * of_group), Video(0, 3 * of_group), Video(1, 2 * of_group))
    first, longer, other = (Question((TEXT, video, "What?")) for video in videos)
    with PrefixCache(ram="200MB", codec="raw") as cache, generating(folder, cache) as generator:
        answers = [ask(generator, question) for question in (first, longer, other, Question((*longer.parts, "And?")))]
        media = {q: generator.prompts.served(dict(inputs(generator, q)), b"").media.media for q in (first, longer)}
    assert [answer.tokens for answer in answers[:3]] == [right(question) for question in (first, longer, other)]
    begin, groups = media[longer][0].start, len(media[first])
    assert groups == (1 if folder.name == "qwen2_5_vl" else 2)
    shared = media[first][-1].end if groups > 1 else begin
    hit = [answer.hit for answer in answers]
    assert hit[0] == 0
    assert hit[1] >= (begin if generator.prompts.is_recurrent else shared)
    assert hit[2] <= begin
    assert hit[3] >= media[longer][-1].end


def test_a_sound_is_hit_again_and_told_from_others(tmp_path):
    """In one prompt with a picture, too. A sound is another one beside a longer sound: the encoder's padding is in it."""
    folder = folders.save("gemma4", tmp_path / "gemma4")
    asked = [
        (0, Sound(0), "What?"),
        (0, Sound(0), "Who?"),
        (0, Sound(1), "What?"),
        (0, Sound(0), Sound(1, 0.3), "Both?"),
    ]
    questions = [Question((TEXT, *parts)) for parts in asked]
    with generating(folder) as generator:
        right = [ask(generator, question).tokens for question in questions]
    with PrefixCache(ram="200MB", codec="raw") as cache, generating(folder, cache) as generator:
        answers = [ask(generator, question) for question in questions]
        picture, sound = generator.prompts.served(dict(inputs(generator, questions[0])), b"").media.media
    assert [answer.tokens for answer in answers] == right
    first, again, other, both = (answer.hit for answer in answers)
    assert first == 0 < picture.end <= other <= sound.start < sound.end <= min(again, both)


def test_a_placeholder_without_a_picture_is_said_once(caplog):
    with PrefixCache(ram="1MB") as cache:
        prompts = ModelPrompts(cache, "m", lambda: [KVCache()], Placeholders({9: "image"}), whole=False)
        served = [prompts.served({"input_ids": mx.array([[1, 9, 2]])}, b"") for _ in range(3)]
    assert [each.prompt for each in served] == [None] * 3
    assert [record.levelname for record in caplog.records if "media can't be told" in record.message] == ["WARNING"]


@EACH_KIND
@CODED
def test_a_question_that_is_asked_again_has_the_same_answer(generator):
    asked = [Question((TEXT, 0, "One?")), Question((TEXT, TEXT, 0, 1, "Another?")), Question((1, 2, TEXT, "Say it."))]
    first = [ask(generator, question).tokens for question in asked]
    assert [ask(generator, question).tokens for question in asked] == first
    assert [answer.tokens for answer in at_once(generator, asked)] == first


@EACH_KIND
@pytest.mark.parametrize("generator", ["raw", "turboquant:4"], indirect=True)
def test_an_answer_goes_on_from_the_one_before(generator):
    """The next turn hits what tokens it has of the prompt and its answer, in which a block became whole meanwhile."""
    question = Question((TEXT, TEXT, 0, "One?"))
    text_only = dict.fromkeys(folders.IDS.values(), -1e9)
    answer = ask(generator, question, most=until_a_block_is_whole(generator, question), logit_bias=text_only)
    seen = [*inputs(generator, question)["input_ids"][0].tolist(), *answer.tokens]
    said = generator.tokenizer.decode(answer.tokens)
    turn = Question((*question.parts, f"<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>user\nAnd?"))
    told = inputs(generator, turn)["input_ids"][0].tolist()
    same = next((i for i, (a, b) in enumerate(zip(seen, told, strict=False)) if a != b), len(seen))
    pictures_end = max(i for i, token in enumerate(seen) if token == min(generator.prompts.placeholders.kinds)) + 1
    assert pictures_end <= ask(generator, turn).hit <= same
    assert same < len(seen) or ask(generator, turn).hit == same


@ANY_MODEL
def test_an_answer_is_generated_on_what_is_stored_of_it(plain):
    """The rows behind a block that became whole meanwhile are those that its codes give, and so the prompt's next turn."""
    question, generated = Question((TEXT, TEXT, "One?")), {"logit_bias": dict.fromkeys(folders.IDS.values(), -1e9)}
    with PrefixCache(ram="200MB", codec="turboquant:2") as cache, generating(plain[0], cache) as generator:
        answer = ask(generator, question, most=until_a_block_is_whole(generator, question), **generated)
        prompt = generator.prompts.served(dict(inputs(generator, question)), b"").prompt
        assert prompt is not None
        seen = prompt.continued(answer.tokens)
        whole = len(seen) // BLOCK * BLOCK
        kept, rest = cache.fetch(seen)
        computed, _ = cache.fetch(seen.first(whole), leave=0)
        tail = np.frombuffer(seen.token_bytes, np.int64)[whole : len(seen) - len(rest)]
        generator.model.language_model(mx.array(tail[None]), cache=computed)
        for mine, theirs in zip(kept, computed, strict=True):
            assert mine.offset == theirs.offset > whole
            rows, right = (layer.keys[..., whole : layer.offset, :].astype(mx.float32) for layer in (mine, theirs))
            assert mx.abs(rows - right).max() < 0.02 * mx.abs(right).max()


@EACH_KIND
@CODED
def test_the_next_turn_may_leave_thoughts_out(generator, monkeypatch):
    """It parts from the prompt at its end, where the answer has made a block whole."""
    monkeypatch.setattr(generator.prompts, "_thinks", True)
    question = Question((TEXT, TEXT, 0, "One?"))
    ask(generator, question, most=until_a_block_is_whole(generator, question))
    turn = Question((*question.parts, "<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>user\nAnd?"))
    assert ask(generator, turn).hit >= length(generator, question) - 1 - generator.prompts.is_recurrent


@EACH_KIND
def test_the_encoder_sees_no_picture_inside_a_hit(generator, monkeypatch):
    seen = []
    tower = type(generator.model.vision_tower)
    encode = tower.__call__

    def counted(self, pixels, *args, **options):
        seen.append(len(pixels))
        return encode(self, pixels, *args, **options)

    monkeypatch.setattr(tower, "__call__", counted)
    generator.vision_cache = None
    ask(generator, Question((TEXT, 0, "One?")))
    ask(generator, Question((TEXT, 0, "Another?")))
    assert len(seen) == 1
    ask(generator, Question((TEXT, 0, 4, "Both?")))  # the fourth is as large as the first
    assert seen[1:] == seen[:1]


@ANY_MODEL
def test_a_hit_that_the_model_fails_on_is_deleted_and_its_prompt_computed(generator, monkeypatch):
    question = Question((TEXT, 0, "One?"))
    right = ask(generator, question)
    language_model = type(generator.model.language_model)
    compute, failed = language_model.__call__, []

    def fails_once(self, tokens, *args, cache=None, **options):
        if not failed:
            failed.append(True)
            raise RuntimeError("shapes (1, 2) and (3, 4) don't match")
        return compute(self, tokens, *args, cache=cache, **options)

    monkeypatch.setattr(language_model, "__call__", fails_once)
    assert ask(generator, question).tokens == right.tokens
    assert failed
    assert generator.prompts.cache.stats().counters.failed_hits == 1
    assert ask(generator, question).hit > 0


@EACH_KIND
def test_of_a_model_that_takes_prompts_as_a_whole_nothing_is_kept(plain, monkeypatch, caplog):
    folder, right = plain
    question = Question((0, "One?"))
    expected = right(question)
    with PrefixCache(ram="200MB") as cache:
        monkeypatch.setattr("prefixcache.servers.mlx_vlm.upstream.takes_chunks", lambda model: False)
        with generating(folder, cache) as generator:
            assert [ask(generator, question) for _ in range(2)] == [Answer(expected, 0)] * 2
        assert cache.stats().counters.stores == 0
    assert "takes prompts as a whole" in caplog.text


@EACH_KIND
def test_tenants_hit_nothing_of_each_other(generator):
    question = Question((TEXT, 0, "One?"))
    assert ask(generator, question, tenant_id="a").hit == 0 == ask(generator, question, tenant_id="b").hit
    assert ask(generator, question, tenant_id="a").hit > 0
