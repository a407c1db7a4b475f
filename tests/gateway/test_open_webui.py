"""Open WebUI, used in a browser, with gateways in front of fake engines as its servers.

`make open-webui` installs it. It downloads nothing here; what it keeps is in a temporary directory.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from headway.config import Key, Price
from headway.engines.vllm.process.launch import Child, free_port
from tests.conftest import MARK
from tests.gateway.gateway import WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.test_media import image, png, wav

ROOT = Path(__file__).parents[2]
PROGRAM = Path(os.environ.get("HEADWAY_OPEN_WEBUI", ROOT / ".venv-open-webui")) / "bin" / "open-webui"
OPEN_WEBUI = {
    "Open WebUI": {
        "sign-up",
        "streamed answer",
        "title",
        "tags",
        "follow-ups",
        "a class for its tasks",
        "tokens and cost",
        "second turn with an image",
        "stop",
        "one of its tools",
        "responses",
        "a user's connection",
        "a wrong key",
        "transcription",
        "embeddings",
    }
}
pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="make open-webui has not installed it"),
    pytest.mark.timeout(1200),  # with all cores busy it takes minutes to start
]
START_S, PAGE_MS = 900.0, 120_000.0
KEY = "sk-open-webui-1"
TEMPLATES = {
    "TITLE": 'FAKE SAY {"title": "On capitals"} END',
    "TAGS": 'FAKE SAY {"tags": ["geography"]} END',
    "FOLLOW_UP": 'FAKE SAY {"follow_ups": ["And of Spain?"]} END',
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    """A fake engine whose answers take minutes, except those to `FAKE SAY`."""
    engine = Fake(tmp_path_factory.mktemp("slow"), options=("--tokens", "2000", "--delay", "0.1")).start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def gateway(slow: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose model has room for Open WebUI's tools."""
    more = {"keys": (Key(KEY, "webui"),), "prices": {"smollm2": Price(prompt=1e6, answer=2e6)}}
    more |= {"engine": {"max_model_len": 131_072}, "server": {"cors_origins": ("*",)}}
    with serving(configuration(tmp_path_factory.mktemp("gateway"), slow.url, **more)) as running:
        yield running


@pytest.fixture(scope="module")
def pooling(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    engine = {"runner": "pooling", "max_model_len": 4096}
    with serving(configuration(tmp_path_factory.mktemp("pooling"), fake.url, engine=engine)) as running:
        yield running


@pytest.fixture(scope="module")
def webui(gateway: Gateway, pooling: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run an Open WebUI; return its URL."""
    home, port = tmp_path_factory.mktemp("open-webui"), free_port()
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", MARK) if name in os.environ}
    # It puts the parent of its working directory on sys.path.
    argv = ["env", "-C", str(home), str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", str(port)]
    child = Child(argv, kept | settings(home, gateway, pooling), home / "open-webui.log")
    child.start()
    try:
        until(lambda: not child.alive or answers(f"http://127.0.0.1:{port}/health"), START_S)
        assert child.alive, child.log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        child.stop()


def settings(home: Path, gateway: Gateway, pooling: Gateway) -> dict[str, str]:
    """Return its environment variables: four connections to the gateway, the last of them with a wrong key."""
    url = f"{gateway.url}/v1"
    connections = [
        {},
        {"prefix_id": "tasks", "headers": {"x-llm-d-inference-objective": "batch"}},
        {"prefix_id": "responses", "api_type": "responses"},
        {"prefix_id": "wrong", "model_ids": ["smollm2"]},
    ]
    return {
        "HOME": str(home),
        "DATA_DIR": str(home),
        "WEBUI_SECRET_KEY": "for tests alone, and of more than 32 bytes",
        "OFFLINE_MODE": "true",
        "ENABLE_OLLAMA_API": "false",
        "ENABLE_DIRECT_CONNECTIONS": "true",
        "OPENAI_API_BASE_URLS": ";".join([url] * 4),
        "OPENAI_API_KEYS": ";".join([KEY] * 3 + ["sk-wrong"]),
        "OPENAI_API_CONFIGS": json.dumps({str(i): connection for i, connection in enumerate(connections)}),
        "TASK_MODEL_EXTERNAL": "tasks.smollm2",
        "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"usage": True}}),
        **{f"{name}_GENERATION_PROMPT_TEMPLATE": template for name, template in TEMPLATES.items()},
        "AUDIO_STT_ENGINE": "openai",
        "AUDIO_STT_MODEL": "smollm2",
        "AUDIO_STT_OPENAI_API_BASE_URL": url,
        "AUDIO_STT_OPENAI_API_KEY": KEY,
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": "smollm2",
        "RAG_OPENAI_API_BASE_URL": f"{pooling.url}/v1",
        "RAG_OPENAI_API_KEY": "none",
    }


def answers(url: str) -> bool:
    try:
        return WEB.get(url).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def visitor(browser: Browser, webui: str) -> Iterator[Page]:
    """A page of the first user, who has just signed up."""
    expect.set_options(timeout=PAGE_MS)
    page = browser.new_page(base_url=webui)
    page.set_default_timeout(PAGE_MS)
    page.goto("/")
    page.get_by_text("Get started").click()
    for field, text in {"name": "Ada", "email": "ada@example.com", "password": "correct-horse"}.items():
        page.locator(f"[autocomplete={field}], [type={field}]").fill(text)
    page.locator("[type=submit]").click()
    page.get_by_text("Okay, Let's Go!").click()
    yield page
    page.close()


def ask(page: Page, text: str) -> None:
    page.locator("#chat-input").click()
    page.keyboard.type(text)
    page.locator("#send-message-button").click()


def token(page: Page) -> dict[str, str]:
    return {"authorization": f"Bearer {page.evaluate('localStorage.token')}"}


def test_a_chat_with_a_second_turn_that_is_stopped(visitor: Page, webui: str, slow: Fake, gateway: Gateway) -> None:
    ask(visitor, "FAKE SAY It is Paris. END")
    expect(visitor.get_by_text("It is Paris.", exact=True)).to_be_visible()
    expect(visitor.get_by_label("Follow up: And of Spain?")).to_be_visible()
    expect(visitor).to_have_title("On capitals / Open WebUI")
    until(lambda: "geography" in WEB.get(f"{webui}/api/v1/chats/all/tags", headers=token(visitor)).text)
    finished = 'headway_requests_total{class="batch",model="smollm2",outcome="finished",tenant="webui"}'
    until(lambda: gateway.metric(finished) == len(TEMPLATES))
    visitor.locator("[id^=info-]").hover()  # 11 tokens of the prompt and one of the answer
    expect(visitor.get_by_role("tooltip").filter(has_text="cost: 13")).to_be_visible()
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": b64decode(png().split(",")[1])}
    visitor.locator("input[type=file]").first.set_input_files(picture)
    ask(visitor, "And this?")
    expect(visitor.get_by_text("fake fake fake")).to_be_visible()
    first, answer, second = slow.last()["body"]["messages"]
    assert (first["role"], answer) == ("user", {"role": "assistant", "content": "It is Paris."})
    assert second["content"][-2:] == [{"type": "text", "text": "And this?"}, image(png())]
    visitor.get_by_label("Stop").click()
    until(lambda: slow.last()["aborted"] == 1)
    assert gateway.newest() == ("failed", "client_gone: disconnected")


def test_a_tool(visitor: Page, slow: Fake) -> None:
    visitor.goto("/?model=smollm2")
    ask(visitor, "FAKE CALL get_current_timestamp {} END")
    expect(visitor.get_by_text("fake fake fake")).to_be_visible()
    assert "current_iso" in slow.last()["body"]["messages"][-1]["content"]
    visitor.get_by_label("Stop").click()


def test_responses(visitor: Page) -> None:
    visitor.goto("/?model=responses.smollm2")
    ask(visitor, "FAKE SAY It is Rome. END")
    expect(visitor.get_by_text("It is Rome.", exact=True)).to_be_visible()


def test_a_connection_that_a_user_adds(visitor: Page, webui: str, gateway: Gateway) -> None:
    """The browser asks the gateway itself."""
    own = {"OPENAI_API_BASE_URLS": [f"{gateway.url}/v1"], "OPENAI_API_KEYS": [KEY]}
    own |= {"OPENAI_API_CONFIGS": {"0": {"enable": True, "prefix_id": "own"}}}
    path = f"{webui}/api/v1/users/user/settings"
    kept = WEB.get(path, headers=token(visitor)).json()
    kept["ui"]["directConnections"] = own
    assert WEB.post(f"{path}/update", json=kept, headers=token(visitor)).status_code == 200
    visitor.goto("/?model=own.smollm2")
    with visitor.expect_response(f"{gateway.url}/v1/chat/completions"):
        ask(visitor, "FAKE SAY It is Oslo. END")
    expect(visitor.get_by_text("It is Oslo.", exact=True)).to_be_visible()


def test_a_wrong_key(visitor: Page) -> None:
    visitor.goto("/?model=wrong.smollm2")
    ask(visitor, "Hello.")
    expect(visitor.locator("#response-content-container")).to_contain_text("This server needs an API key")


def test_transcription_and_embeddings(visitor: Page, webui: str, slow: Fake, fake: Fake) -> None:
    speech = {"file": ("a.wav", b64decode(wav(1)), "audio/wav")}
    path = f"{webui}/api/v1/audio/transcriptions"
    text = WEB.post(path, files=speech, data={"language": "en"}, headers=token(visitor), timeout=60).json()["text"]
    assert text == "fake " * 2000
    assert slow.last()["path"] == "/v1/audio/transcriptions"
    note = {"file": ("a.txt", b"The capital of France is Paris.", "text/plain")}
    assert WEB.post(f"{webui}/api/v1/files/", files=note, headers=token(visitor)).status_code == 200
    until(lambda: fake.last().get("path") == "/v1/embeddings", 60)
    assert "The capital of France is Paris." in fake.last()["body"]["input"][0]
