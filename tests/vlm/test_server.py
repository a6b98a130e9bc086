"""`prefixcache serve --vlm` over HTTP: its answers are mlx_vlm.server's, from RAM, from an SSD after a restart, at once and
when clients leave.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from mlx_vlm.server import anthropic, openai
from starlette.testclient import TestClient

from prefixcache.codecs import Transform, TurboQuant
from prefixcache.servers.mlx_vlm.serve import TENANT, without_transform
from prefixcache.servers.mlx_vlm.upstream import RequestQueue, Rules, VlmGenerator, app, run, serving_with
from prefixcache.servers.salts import Salts
from prefixcache.servers.web_access import WebAccess
from prefixcache.settings import Settings
from tests.servers.serving import SECONDS, Server, wait_for
from tests.vlm import folders
from tests.vlm.generators import picture

TEXT = "Describe what you see, and what you do not see. " * 14
FAMILIES = ("qwen2_5_vl", "qwen3_5")
ONE_MODEL = pytest.mark.parametrize("model", FAMILIES[:1], indirect=True)


def serve(flags: list[str]) -> None:
    """`prefixcache serve --vlm`, which gives every hit: what is hit must not depend on how fast this machine is."""
    from prefixcache.cli import app

    app(["serve", "--vlm", "--no-decline-slow-hits", *flags], prog_name="prefixcache")


def serve_plain(flags: list[str]) -> None:
    """mlx_vlm.server itself."""
    run(["--host", "127.0.0.1", *flags])
    sys.exit()


class PictureServer(Server):
    ADDRESS = r"running on (http://\S+)"

    def __init__(self, main, model: Path, log: Path, *flags: object):
        super().__init__(main, ["--model", model, "--port", 0, *flags], log)
        self.model = str(model)
        self.ready()

    def post(self, path: str, body: dict, **options) -> requests.Response:
        body = {"model": self.model, "temperature": 0, **body}
        return requests.post(f"{self.url}{path}", json=body, timeout=SECONDS, **options)

    def ask(self, *parts: str | int | Path, before: tuple = (), **headers: str) -> tuple[str, int]:
        """What is answered about texts and pictures, and how many tokens of the prompt were hit."""
        messages = [*before, {"role": "user", "content": [part_of(part) for part in parts]}]
        done = self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12}, headers=headers)
        assert done.status_code == 200, done.text
        answer = done.json()
        cached = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["message"]["content"], cached.get("cached_tokens", 0)


def png(number: int) -> bytes:
    data = io.BytesIO()
    picture(number).save(data, "PNG")
    return data.getvalue()


def part_of(part: str | int | Path) -> dict:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = str(part) if isinstance(part, Path) else f"data:image/png;base64,{base64.b64encode(png(part)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> Path:
    return folders.save(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    server = PictureServer(serve_plain, model, tmp_path_factory.mktemp("plain") / "log")
    yield server
    server.process.kill()


@pytest.fixture
def serving(model, tmp_path):
    """Begins servers of the model with these flags, which share a directory."""
    servers = []

    def begin(*flags: object) -> PictureServer:
        flags = ("--ram", "200MB", "--ssd-dir", tmp_path / "ssd", "--ssd", "200MB", *flags)
        servers.append(PictureServer(serve, model, tmp_path / f"log-{len(servers)}", *flags))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()


def test_answers_are_mlx_vlms_alone_at_once_after_cancelled_ones_and_after_a_restart(plain, serving, tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(png(0))
    asked = [(0, TEXT, "One?"), (0, TEXT, "Another?"), (1, TEXT, "One?"), (TEXT, 0, 1, "Both?"), (TEXT, "None?")]
    right = {parts: plain.ask(*parts)[0] for parts in asked}
    server = serving("--codec", "raw")
    first = {parts: server.ask(*parts) for parts in asked}
    assert {parts: answer for parts, (answer, _) in first.items()} == right
    assert first[asked[0]][1] == 0 < first[asked[1]][1]
    again = {parts: server.ask(*parts) for parts in asked}
    assert {parts: answer for parts, (answer, _) in again.items()} == right
    assert all(hit > 50 for _, hit in again.values())
    answer, hit = server.ask(file, TEXT, "One?")  # the same picture
    assert (answer, hit) == again[asked[0]]

    stream = {"messages": [{"role": "user", "content": [part_of(2), part_of(TEXT)]}], "max_tokens": 500, "stream": True}
    with server.post("/v1/chat/completions", stream, stream=True) as cancelled:
        next(cancelled.iter_lines())
    with ThreadPoolExecutor(len(asked)) as clients:
        together = [*clients.map(lambda parts: server.ask(*parts)[0], asked)]
    assert together == [right[parts] for parts in asked]
    assert server.ask(2, TEXT)[0] == plain.ask(2, TEXT)[0]
    assert [line for line in server.troubles() if "stream_closed" not in line] == []  # its client left
    assert server.end() == 0

    restarted = serving("--codec", "raw")
    assert {parts: restarted.ask(*parts) for parts in asked[:1]} == {asked[0]: again[asked[0]]}
    assert restarted.end() == 0


def test_a_chat_goes_on_with_another_picture(plain, serving):
    server = serving("--codec", "raw")
    question = {"role": "user", "content": [part_of(0), part_of(TEXT)]}
    before = (question, {"role": "assistant", "content": "A picture."})
    server.ask(0, TEXT)
    answer, hit = server.ask(1, "And this one?", before=before)
    assert answer == plain.ask(1, "And this one?", before=before)[0]
    assert hit > 50


def test_codec_transform_leaves_all_to_turboquant_and_says_so(caplog):
    """Before any basis is read, which would take RAM for nothing."""
    codec = TurboQuant(8, 8)
    assert without_transform(Settings(codec=Transform(3, codec))).codec == codec
    assert caplog.messages == [
        "--codec transform with --vlm: no basis is of mlx-vlm's prompt caches; all rows are coded by turboquant k8 v8"
    ]
    settings = Settings(codec="raw")
    assert without_transform(settings) is settings


@ONE_MODEL
def test_other_apis_hit_what_a_chat_has_stored(serving):
    server = serving("--codec", "turboquant:4")
    server.ask(0, TEXT)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(0)).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    said = server.post("/v1/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 8})
    assert said.json()["usage"]["cache_read_input_tokens"] > 50
    url = part_of(0)["image_url"]["url"]
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": TEXT}]
    said = server.post("/v1/responses", {"input": [{"role": "user", "content": content}], "max_output_tokens": 8})
    assert said.json()["usage"]["input_tokens_details"]["cached_tokens"] > 50


@ONE_MODEL
def test_tenants_metrics_and_web_pages(serving):
    server = serving("--codec", "raw", "--salt-from", "authorization", "--require-salt")
    assert (
        server.post("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).status_code
        == 401
    )
    assert server.ask(0, TEXT, Authorization="Bearer a")[1] == 0 == server.ask(0, TEXT, Authorization="Bearer b")[1]
    assert server.ask(0, TEXT, Authorization="Bearer a")[1] > 50
    assert server.ask(0, TEXT, **{"X-Api-Key": "a"})[1] > 50  # Anthropic's clients send it so
    assert server.ask(0, TEXT, **{"X-Api-Key": "c"})[1] == 0
    assert server.ask(0, TEXT, **{"Authorization": "Bearer a", "X-Tenant-Id": "part"})[1] == 0
    assert server.metrics()["prefixcache_hit_tokens_total{ram}"] > 50
    assert json.loads(requests.get(f"{server.url}/v1/cache/stats", timeout=SECONDS).text)["enabled"]
    page = requests.get(f"{server.url}/health", headers={"Origin": "https://evil.example"}, timeout=SECONDS)
    assert page.status_code == 403
    named = requests.get(f"{server.url}/health", headers={"Host": "evil.example"}, timeout=SECONDS)
    assert named.status_code == 403
    assert requests.post(f"{server.url}/v1/cache/reset", timeout=SECONDS).json() == {
        "enabled": True,
        "status": "cleared",
    }
    wait_for(lambda: server.metrics()["prefixcache_ram_bytes{images}"] == 0, "an empty RAM", server.log)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
@pytest.mark.parametrize(
    ("from_authorization", "status", "said"),
    [
        (False, 400, "no salt, and this server needs one: send the header `X-Tenant-Id: ...`"),
        (True, 401, "no API key, and this server needs one: send the header `Authorization: Bearer KEY`"),
    ],
)
def test_a_request_without_a_salt_is_refused_where_one_is_required(monkeypatch, path, from_authorization, status, said):
    """The server's own application, without a model."""
    for module in (openai, anthropic):
        monkeypatch.setattr(module, "get_cached_model", lambda *_: (None, None, SimpleNamespace(model_type="")))
    salts = Salts(from_authorization, required=True, remedy=TENANT)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "input": "Hello", "max_tokens": 4}
    with serving_with(None, Rules(salts, WebAccess(), lambda: b"")):
        client = TestClient(app.app, "http://127.0.0.1")
        done = client.post(path, json=body)
        assert said not in client.post(path, json=body, headers={"X-Tenant-Id": "a"}).text
    assert done.status_code == status
    assert said in done.text
    assert f"{status}:" not in done.text


def test_a_request_whose_model_leaves_while_it_waits_is_refused():
    """Nobody would take it from the queue, and its client would wait for ever."""
    generator = object.__new__(VlmGenerator)
    generator._stop, generator.prompts = False, SimpleNamespace(served=lambda *_: setattr(generator, "_stop", True))
    queue = RequestQueue(generator._arrive)
    with pytest.raises(RuntimeError, match="unloaded while the request waited; ask again"):
        queue.put(SimpleNamespace(args=SimpleNamespace(tenant_id=None), raw_inputs={}))
    assert queue.empty()
