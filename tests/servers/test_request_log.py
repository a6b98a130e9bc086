"""What `prefixcache serve` says: at its start with what it serves, and for each request one line of numbers, with no text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import requests
from jinja2 import TemplateError
from mlx.utils import tree_flatten
from mlx_lm import server as upstream
from mlx_lm.utils import load

from prefixcache import PrefixCache, __version__, model_identity
from prefixcache.cache import Match
from prefixcache.codecs.turboquant import backends as turboquant_backends
from prefixcache.servers.mlx_lm import generator as mlx_lm_requests
from prefixcache.servers.request_log import CUT, REFUSED, RequestLog, in_words
from prefixcache.settings import ram_auto
from tests.servers.serving import SECONDS, Server, ask, save_model, serving, text, user
from tests.servers.test_requests import Asked, generating

LINE = re.compile(
    r"INFO - (?P<id>\S+): (?P<asked>[\d,]+) tokens asked, (?P<ram>[\d,]+) from RAM, (?P<ssd>[\d,]+) from SSD, "
    r"(?P<computed>[\d,]+) computed; (?P<generated>\d+) generated \((?P<end>[\w ]+)\); (?P<wait>[\d.]+) s for the SSD, "
    r"(?P<prefill>[\d.]+) s prefill, (?P<first>[\d.]+) s to the first token, (?P<whole>[\d.]+) s in all$",
    re.MULTILINE,
)


def told(server: Server) -> list[dict[str, str]]:
    return [match.groupdict() for match in LINE.finditer(server.said())]


# -- a server's log ---------------------------------------------------------------------------------------------------


def test_a_server_says_what_it_serves_and_whence_the_tokens_of_each_request_came(model, tmp_path):
    prompt, flags = user(text(600, "xylograph")), ["--model", model, "--ssd-dir", tmp_path / "ssd", "--ssd", "100MB"]
    with serving(tmp_path / "first.log", *flags) as first:
        cold, warm = ask(first, prompt), ask(first, prompt, stream=True, seed=1)
        with pytest.raises(Exception, match="404"):
            ask(first, prompt, model="/no/such/model")
        assert requests.get(f"{first.url}/metrics", timeout=SECONDS).status_code == 200
        assert requests.get(f"{first.url}/health", timeout=SECONDS).status_code == 200
    with serving(tmp_path / "second.log", *flags) as second:
        restored = ask(second, prompt)
    assert "Prompt Cache" not in first.said() + second.said()  # nor mlx-lm's lines of each type, which say less
    assert not re.search(r"- (user|assistant|system): \d+ sequences", first.said() + second.said())
    lines = [*told(first), *told(second)]
    for line, answer in zip(lines, (cold, warm, restored), strict=True):
        counts = [int(line[name].replace(",", "")) for name in ("asked", "computed", "generated")]
        assert counts == [answer.prompt, answer.computed, answer.generated]
        assert line["end"] == answer.finish
        assert line["id"].startswith("chatcmpl-")
        assert float(line["prefill"]) <= float(line["first"]) <= float(line["whole"])
    sources = [(int(line["ram"]), int(line["ssd"])) for line in lines]
    assert sources == [(0, 0), (warm.cached, 0), (0, restored.cached)]
    assert re.search(r"refused before it began: .{5,}; [\d.]+ s in all$", first.said(), re.MULTILINE)
    for said in (first.said(), second.said()):
        assert "xylograph" not in said
        assert "/metrics" not in said
        assert f"prefixcache {__version__}, mlx-lm " in said
        assert all(what in said for what in turboquant_backends.describe().values())
        assert "codec raw" in said
        named = re.escape(f"model {model}: {model_identity(model)}, ")
        assert re.search(rf"{named}[\d.]+ [kM]B of weights; RAM budget 200 MB \(ram=200000000\)", said)
    assert '"GET /health HTTP/1.1" 200' in first.said()
    assert re.search(
        rf"SSD {tmp_path / 'ssd'}: 0 images found; \d+(\.\d+)? kB of 100 MB used$", first.said(), re.MULTILINE
    )
    assert re.search(rf"SSD {tmp_path / 'ssd'}: [1-9]\d* images found", second.said())


# -- one request ------------------------------------------------------------------------------------------------------


def context(prompt: int, cached: int) -> Any:
    context = object.__new__(upstream.GenerationContext)
    context.prompt, context.prompt_cache_count = [7] * prompt, cached
    return context


@pytest.mark.parametrize(
    ("depths", "cached", "of"),
    [
        (None, -1, (0, 0)),
        ((0, 0), 0, (0, 0)),
        ((100, 100), 100, (100, 0)),
        ((100, 500), 500, (100, 400)),
        ((100, 500), 100, (100, 0)),  # it was not waited for
        ((100, 500), 700, (300, 400)),  # another computed more meanwhile
        ((100, 500), 60, (60, 0)),  # RAM lost some
    ],
)
def test_tokens_are_the_ssds_that_ram_had_not_when_the_request_came(depths, cached, of):
    line = RequestLog()
    line.depths = depths and Match(*depths)
    line.saw(context(1000, cached))
    fields = line.fields(CUT)
    assert (fields["ram_tokens"], fields["ssd_tokens"]) == of
    assert fields["computed_tokens"] == 1000 - sum(of)
    assert "prefill_seconds" not in fields
    assert "(cut)" in in_words(fields)


def test_a_wait_for_the_remote_tier_is_called_so():
    line = RequestLog()
    line.wait_for_ssd(remote=True)
    line.go_on(0)
    line.saw(context(1000, 0))
    assert " s for SSD and remote tier, " in in_words(line.fields(CUT), line.asks_remote)
    assert " s for the SSD, " in in_words(line.fields(CUT))


def test_a_request_that_never_began_has_its_end_and_its_time_alone():
    fields = RequestLog().fields()
    assert set(fields) == {"end", "seconds"}
    assert in_words(fields).startswith(f"{REFUSED} before it began; 0.0")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ValueError("top_k=9: the model has 4 tokens; give less"),
            "top_k=9: the model has 4 tokens; give less",
        ),
        (OSError("no such model: 'my secret'\nand more"), "no such model: '...'"),
        (KeyError("my secret"), "KeyError"),
        (ValueError('a "my secret'), "a '...'"),
        (ValueError("it can't be had: 'my secret', b'my secret'"), "it can't be had: '...', b'...'"),
        (ValueError("4 tokens > 3, the model's most: give less"), "4 tokens > 3, the model's most: give less"),
        (TemplateError("unknown role my secret"), "the chat template: TemplateError"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 1000), "x" * 200),
    ],
)
def test_a_request_that_was_refused_has_the_reason_without_what_it_quotes(error, said):
    line = RequestLog()
    line.saw(error)
    fields = line.fields()
    assert set(fields) == {"end", "seconds", "reason"}
    assert in_words(fields).startswith(f"{REFUSED} before it began: {said}; 0.0")
    assert "secret" not in str(fields)
    assert "reason" not in line.fields(CUT)


# -- ram="auto" -------------------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> int:
    return sum(weight.nbytes for _, weight in tree_flatten(load(str(folder))[0].parameters()))


def test_with_auto_the_budget_is_what_the_weights_of_each_model_that_is_loaded_leave(
    model, tmp_path, monkeypatch, caplog
):
    small, large = model, save_model(tmp_path / "large", hidden_size=256)
    machine = weights_of(large) * 5 // 4
    monkeypatch.setattr(mlx_lm_requests, "usable_memory", lambda: machine)
    budgets = [ram_auto(machine, weights_of(folder)) for folder in (small, large)]
    assert budgets[1] < budgets[0] == machine // 4
    with PrefixCache(ram="auto", codec="raw") as cache, generating(cache, "--model", small) as generator:
        assert cache.stats().ram_limit == budgets[0]
        Asked(generator, user("hello"), model=str(large)).answered()
        assert (cache.stats().ram_limit, cache.stats().ram_setting) == (budgets[1], "auto")
        Asked(generator, user("hello")).answered()
        assert cache.stats().ram_limit == budgets[0]
    with PrefixCache(ram="3MB", codec="raw") as cache, generating(cache, "--model", large):
        assert cache.stats().ram_limit == 3_000_000
