"""Speech: forms go to the engine as they came, queued with a class like all else."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import Engine
from headway.gateway.parsing.media import AudioForm
from headway.types import Request, Slo
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway
from tests.gateway.test_refusals import error

PATH = "/v1/audio/transcriptions"
SPEECH = b"RIFF\r\n--\r\n\x00\xff" * 100


def ask(gateway: Gateway, path: str = PATH, content: bytes = SPEECH, **more: Any) -> Any:
    fields = {"model": "smollm2"} | more.pop("data", {})
    return gateway.post(None, path, files={"file": ("a.wav", content, "audio/wav")}, data=fields, **more)


@pytest.mark.parametrize("path", [PATH, "/v1/audio/translations"])
def test_speech_is_written_down(gateway: Gateway, fake: Fake, path: str) -> None:
    data = {"service_tier": "chat", "language": "en", "timestamp_granularities[]": ["word", "segment"]}
    answer = ask(gateway, path, data=data)
    assert answer.json()["text"] == "fake " * 8
    assert answer.headers["x-headway-class"] == "chat"
    seen = fake.last()
    assert seen["path"] == path
    form = AudioForm.read(seen["body"].encode("latin-1"), seen["headers"]["content-type"])
    sent = dict(form.fields)
    assert (form.file, form.name, sent["model"], sent["language"]) == (SPEECH, "a.wav", "smollm2", "en")
    assert [value for name, value in form.fields if name == "timestamp_granularities[]"] == ["word", "segment"]
    assert '"headway_id"' in sent["vllm_xargs"]
    assert "service_tier" not in sent
    assert gateway.newest()[0] == "done"


def test_openai_s_client_reads_text_and_stream(gateway: Gateway) -> None:
    with gateway.client() as asks:
        text = asks.audio.transcriptions.create(model="smollm2", file=("a.wav", SPEECH)).text
        assert asks.audio.translations.create(model="smollm2", file=("a.wav", SPEECH)).text == text == "fake " * 8
    stream = ask(gateway, data={"stream": "true"})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.count('"content":"fake "') == 8
    assert stream.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"response_format": "srt"}, "srt"),
        ({"model": "none"}, "none"),
        ({"service_tier": "nothing"}, "nothing"),
        ({"vllm_xargs": "[1]"}, "vllm_xargs"),
        ({f"f{i}": "x" for i in range(80)}, "more than"),
    ],
)
def test_what_cannot_be_is_refused(gateway: Gateway, data: dict[str, Any], words: str) -> None:
    answer = ask(gateway, data=data)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


def test_bodies_that_are_no_forms_with_speech(gateway: Gateway) -> None:
    assert error(gateway.post({"model": "smollm2"}, PATH), 400)["code"] == "invalid_form"
    kind = {"content-type": "multipart/form-data; boundary=abc"}
    for body in (b"", b"--abc\r\n", b"--abc--\r\n"):
        assert error(gateway.post(None, PATH, content=body, headers=kind), 400)["code"] == "invalid_form"
    two = [("file", ("a", b"x")), ("file", ("b", b"y"))]
    assert error(gateway.post(None, PATH, files=two, data={"model": "smollm2"}), 400)["code"] == "invalid_form"


def test_speech_has_a_limit_of_its_own(serve: Serve) -> None:
    with serve(server={"max_audio_mib": 2, "max_body_kib": 1}) as gateway:
        assert ask(gateway, content=b"x" * 2**20).status_code == 200
        assert ask(gateway, content=b"x" * 3 * 2**20).status_code == 413
        assert gateway.inner.bodies.used == 0


def test_an_engine_by_url_gets_its_own_name_of_the_model() -> None:
    body = AudioForm([("model", "a"), ("x", "1")], SPEECH, 'n"\r\n').for_engine("a")
    form = b"".join(body.parts({"headway_id": "hw-1"}))
    read = AudioForm.read(form, body.headers["content-type"])
    assert (dict(read.fields)["vllm_xargs"], read.file) == ('{"headway_id": "hw-1"}', SPEECH)
    request = Request("hw-1", "a", 1, 1, 0.0, Slo())
    fitted = body.fitted(Engine(url="http://a", remote_model="remote"), request)
    read = AudioForm.read(b"".join(fitted.parts({})), fitted.headers["content-type"])
    assert (dict(read.fields)["model"], read.file) == ("remote", SPEECH)
    assert body.fitted(Engine(url="http://a"), request) is body
