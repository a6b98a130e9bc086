"""`VisionPromptCache` and `text_prompt_cache`, called as LM Studio's mlx-engine calls what they stand for: what is restored
is the state of these tokens and pictures, as deep as they are the same.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.servers.causality import NotCausal
from prefixcache.servers.mlx_engine import MOST_GOING, VisionPromptCache, text_prompt_cache
from tests.models import states
from tests.servers.serving import TINY

CACHE = {"ram": "50MB", "ssd": "100MB", "disk": False}
PLACEHOLDER, STEP = 900, 512


@dataclass
class Span:
    """mlx-engine's `PromptImageSpan`."""

    start: int
    end: int
    image_hash: str


@dataclass
class Chunk:
    """mlx-engine's `PromptPrefixChunk`."""

    start: int
    end: int
    key: str


def chunks_of(tokens: list[int], spans: list[Span], chunks: list[Chunk] | None = None) -> list[Chunk]:
    """mlx-engine's `build_prefix_cache_chunks` and, given chunks, its `extend_prefix_cache_chunks`."""
    chunks = [] if chunks is None else chunks
    for start in range(chunks[-1].end if chunks else 0, len(tokens) - 255, 256):
        end, before = start + 256, chunks[-1].key if chunks else ""
        seen = [span.image_hash for span in spans if span.start < end and start < span.end]
        text = f"{before}|{tokens[start:end]}|{seen}"
        chunks.append(Chunk(start, end, hashlib.sha256(text.encode()).hexdigest()))
    return chunks


def prompt_of(parts: list[Any]) -> tuple[list[int], list[Span], list[int]]:
    """A prompt of texts (first token, length) and of pictures by name: its tokens, its spans, and what the model sees."""
    tokens: list[int] = []
    seen: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, str):
            spans.append(Span(len(tokens), len(tokens) + 90, part))
            tokens += [PLACEHOLDER] * 90
            seen += [5000 + ord(part)] * 90
        else:
            tokens += range(part[0], part[0] + part[1])
            seen += tokens[len(seen) :]
        tokens.append(7)
        seen.append(7)
    return tokens, spans, seen


class Kit:
    """A `BatchedVisionModelKit`, as far as its prompt cache goes; `state` makes the layer caches of what a model has seen."""

    def __init__(self, kept: VisionPromptCache, state: Any = states.sliceable):
        self.kept, self.state = kept, state

    def ask(self, parts: list[Any], alone: bool = True) -> int:
        """Answer a prompt with three tokens. Returns how many of its tokens were restored, which are checked."""
        tokens, spans, seen = prompt_of(parts)
        restored = self.kept.restore(prompt_input_ids=tokens, image_spans=spans)
        depth = 0 if restored is None else restored.cached_prefix_len
        if restored is not None:
            states.check(restored.prompt_cache, seen[:depth])
            assert restored.rope_deltas is None
            assert not any(span.start < depth < span.end for span in spans)
        chunks = chunks_of(tokens, spans)
        for end in [*range(depth + STEP - depth % STEP, len(tokens), STEP), (len(tokens) - 1) // 256 * 256]:
            crossed = depth // 256, end // 256
            if end > depth and self.kept.can_store_records():
                self.kept.save_prompt_cache_snapshot(self.state(seen[:end]), chunks, *crossed, end)
        said = [1, 2, 3]
        chunks_of(tokens + said, spans, chunks)
        done = self.state(seen + said[:-1])
        assert self.kept.budget_update_from_completed_cache(done) is None
        if alone:
            self.kept.store_hot_prompt_cache(
                prompt_input_ids=tokens + said, image_spans=spans, prompt_cache=done, rope_deltas=object()
            )
        else:
            self.kept.clear_hot_prompt_cache()
        return depth


def kept_in(cache: Any) -> VisionPromptCache:
    return VisionPromptCache(cache, TINY, chunks_of)


PARTS = st.lists(st.sampled_from([(0, 40), (100, 256), (400, 300), "a", "b"]), min_size=1, max_size=5)


@pytest.mark.parametrize("state", [states.sliceable, states.hybrid, states.windowed])
@given(st.lists(st.tuples(PARTS, st.booleans()), min_size=1, max_size=6))
def test_whatever_is_restored_is_the_state_of_these_tokens_and_pictures(opened, state, asked):
    kit = Kit(kept_in(cache := opened()), state)
    for parts, alone in asked:
        kit.ask(parts, alone)
        cache.check_integrity()


def test_a_prompt_is_restored_as_deep_as_its_text_and_pictures_are_the_same(opened):
    kit = Kit(kept_in(opened()))
    first = [(0, 300), "a", (500, 20)]
    assert kit.ask(first) == 0
    assert kit.ask(first) == len(prompt_of(first)[0]) - 1
    assert kit.ask([(0, 300), "b", (500, 20)]) == 301
    assert kit.ask([(0, 300), "a", (600, 20)]) == 392
    assert kit.ask([*first, "b", (700, 9)]) == len(prompt_of(first)[0])


def test_recurrent_state_is_kept_before_the_first_picture_the_end_and_where_prompts_part(opened):
    kit = Kit(kept_in(opened()), states.hybrid)
    kit.ask([(0, 3000), "a", (500, 3000)], alone=False)
    assert kit.ask([(0, 3000), "b", (4000, 9)]) == 2560
    assert kit.ask([(0, 3000), "a", (500, 3000)]) == 5888
    assert kit.ask([(0, 1500), (9000, 1500)]) == 0
    assert kit.ask([(0, 1500), (8000, 1500)]) == 1024


def test_after_a_restart_and_by_another_kit_it_is_restored_from_the_ssd(opened):
    parts = [(0, 300), "a", (500, 20)]
    cache = opened(disk=True)
    Kit(kept := kept_in(cache)).ask(parts)
    kept.close()
    cache.close()
    assert Kit(kept_in(opened(disk=True))).ask(parts) == len(prompt_of(parts)[0]) - 1


@pytest.mark.parametrize("family", ["paligemma", "mllama", "florence2"])
def test_families_whose_prompts_cannot_be_hit_are_refused_by_name(opened, tmp_path, family):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(NotCausal, match=f"{family}: .*; its prompts can't be hit"):
        VisionPromptCache(opened(), tmp_path / "model", chunks_of)


def test_what_fails_is_said_and_fails_no_request(opened, caplog):
    kept = kept_in(opened())
    overlapping = [Span(0, 5, "a"), Span(3, 6, "b")]
    assert kept.restore(prompt_input_ids=[1] * 9, image_spans=overlapping) is None
    kept.store_hot_prompt_cache(prompt_input_ids=[1] * 9, image_spans=[], prompt_cache=[object()], rope_deltas=None)
    kept.save_prompt_cache_snapshot([], chunks_of([1] * 256, []), 0, 1, 256)  # of a prompt that it doesn't know
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "a lookup failed",
        "a store failed",
    ]


def test_prompts_that_never_ended_are_forgotten(opened):
    kept = kept_in(opened())
    for first in range(MOST_GOING + 9):
        kept.restore(prompt_input_ids=[first] * 300, image_spans=[])
    assert len(kept._going) == MOST_GOING


def test_text_is_kept_by_the_interface_of_mlx_lms_prompt_cache(opened):
    cache = opened()
    tokens = list(range(700))
    text_prompt_cache(cache, TINY).insert_cache("lmstudio", tokens, states.sliceable(tokens))
    found, rest = text_prompt_cache(cache, TINY).fetch_nearest_cache("session", [*tokens, 1])
    states.check(found, tokens)
    assert rest == [1]
