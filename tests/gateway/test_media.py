"""Images and audio: passed on by every API of chats, and counted as the model's own processor counts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import wave
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headway.errors import RequestError
from headway.gateway.apis.anthropic.translate import chat_of as chat_of_message
from headway.gateway.apis.responses.translate import chat_of
from headway.gateway.parsing.media import MediaCounter, media_tokens, refuse_urls
from headway.gateway.parsing.requests import ChatBody
from headway.gateway.parsing.tokens import TokenCounter, load_tokenizer
from headway.models.resolve import resolve
from tests.gateway.batches import begin, ended, line
from tests.gateway.gateway import Fake, Gateway

LINK = "https://example.com/cat.png"


def png(width: int = 84, height: int = 56) -> str:
    """Return an image as a data URL."""
    file = BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def wav(seconds: int) -> str:
    file = BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(16_000)
        audio.writeframes(bytes(32_000 * seconds))
    return b64encode(file.getvalue()).decode()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


class Patches:
    """A processor whose images have a token for each 14 x 14 pixels, at most 1,024."""

    def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> dict[str, list[int]]:
        return {"num_image_tokens": [min(height // 14 * (width // 14), 1024) for height, width in image_sizes]}


class Refuses:
    """A processor that reads no image, as Qwen2-VL's of 1 x 300 pixels."""

    def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> dict[str, list[int]]:
        raise ValueError("absolute aspect ratio must be smaller than 200")


COUNTER = MediaCounter(Patches(), 1024)


def test_an_image_counts_by_its_size_or_as_the_largest() -> None:
    assert media_tokens(COUNTER, [[image(png())]]) == (24, 0)
    assert media_tokens(COUNTER, ["text", None, [image(png()), image(png(14, 14))]]) == (25, 0)
    assert media_tokens(COUNTER, [[image(LINK), image("data:image/png;base64,AAAA"), image("data:,x")]]) == (0, 3072)
    assert media_tokens(None, [[image(png())]]) == (0, 0)
    assert MediaCounter(Refuses(), 1024).image(png(1, 300)) is None, "the engine says what is wrong with it"


def test_speech_counts_by_its_length() -> None:
    parts = [{"type": "input_audio", "input_audio": {"data": wav(2), "format": "wav"}}]
    assert media_tokens(None, [parts]) == (0, 100)
    assert media_tokens(None, [[{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}]]) == (0, 0)


def test_a_bound_leaves_room_for_the_answer_and_a_count_does_not() -> None:
    counter = TokenCounter(load_tokenizer("smollm2"), COUNTER)

    def tokens(url: str, most: int) -> int:
        parts: list[Any] = [{"type": "text", "text": "What is it?"}, image(url)]
        body = ChatBody(model="smollm2", messages=[{"role": "user", "content": parts}], max_tokens=10)  # type: ignore[list-item]
        prompt = counter.read(body, most)
        assert prompt.ids is None, "the engine alone knows its tokens, so no prefix is known"
        return prompt.tokens

    text = tokens(png(14, 14), 9999) - 1
    assert tokens(png(), 9999) == text + 24
    assert tokens(png(), 40) == text + 24, "it does not fit, and is refused"
    assert tokens(LINK, 9999) == text + 1024
    assert tokens(LINK, 100) == 90


def llava(folder: Path) -> None:
    """Write the processor of LLaVA: each image is cut to 28 x 28 pixels, of which 14 x 14 are a token."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(Path(resolve("smollm2"), name).read_bytes())
    side = {"height": 28, "width": 28}
    image = {"image_processor_type": "CLIPImageProcessor", "crop_size": side, "size": {"shortest_edge": 28}}
    processor = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    files = {
        "config.json": {"model_type": "llava", "vision_config": {}, "text_config": {}},
        "preprocessor_config.json": image,
        "processor_config.json": {"processor_class": "LlavaProcessor", "image_token": "<|im_start|>", **processor},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def test_a_model_s_processor_counts_its_images(tmp_path: Path) -> None:
    llava(tmp_path)
    counter = MediaCounter.of(str(tmp_path))
    assert counter is not None
    assert (counter.most, counter.image(png())) == (4, 4)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").unlink()
    assert MediaCounter.of(str(tmp_path)) is None
    assert MediaCounter.of(resolve("smollm2")) is None


def test_a_model_of_the_hub_has_its_images_counted(tmp_path: Path) -> None:
    """It is in the hub's cache, where its tokenizer is, too."""
    model = tmp_path / "hub" / "models--org--seeing"
    llava(model / "snapshots" / "1")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("1")
    code = "from headway.gateway.parsing.media import MediaCounter; print(MediaCounter.of('org/seeing').most)"
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert found.stdout == "4\n", found.stderr


# ---- what engines may fetch

METADATA = "http://169.254.169.254/latest/meta-data"


def part_of(kind: str, url: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


@pytest.mark.parametrize(
    "url",
    [
        METADATA,
        "file:///etc/passwd",
        "https://images.example.evil.example/a.png",
        "https://images.example\\@evil.example/a.png",
        "https://images.example@evil.example/a.png",
        "https://images.example\t.evil.example/a.png",
        " https://images.example/a.png",
        "https://[::1]/a.png",
        "//images.example/a.png",
        "https://images.example:8080/a.png",
        "http://images.example:443/a.png",
        "https://other.example/a.png",
        "https://\u212a.example/a.png",  # the Kelvin sign, whose lower case is a k
    ],
)
def test_an_engine_fetches_from_named_hosts_alone(url: str) -> None:
    for parts in (
        [part_of("image_url", url)],
        [part_of("audio_url", url)],
        [part_of("video_url", url)],
        [{"image_url": url}],
        [{"type": "input_image", "image_url": url}],
        [{"type": "image_url", "uuid": "u", "audio_url": url}],
    ):
        for body in (
            {"messages": [{"role": "user", "content": parts}]},
            {"input": [{"content": parts}]},
            {"queries": {"content": parts}, "documents": ["a"]},
        ):
            with pytest.raises(RequestError) as refused:
                refuse_urls(body, ("images.example", "other.example:8443", "k.example"))
            assert (refused.value.status, refused.value.code) == (400, "media_url_refused")
            assert "server.media_domains" in str(refused.value)


def test_named_hosts_data_and_fields_that_nothing_fetches_are_accepted() -> None:
    urls = [png(), "https://images.example/a.png?b=http://c", "http://Images.Example:8080", "https://images.example#x"]
    urls += ["https://images.example:443/a.png", "http://images.example:80"]
    parts = [image(url) for url in urls] + [
        {"type": "image_url", "image_url": None, "uuid": "u"},
        {"type": "image_url"},
    ]
    refuse_urls({"messages": [{"role": "user", "content": parts}]}, ("images.EXAMPLE", "images.example:8080"))
    schema = {"properties": {"image_url": {"type": "string"}}}
    refuse_urls({"messages": "text", "metadata": {"image_url": METADATA}, "tools": [schema]}, ())


def test_every_api_refuses_urls(gateway: Gateway, fake: Fake) -> None:
    before = fake.last()
    source = {"type": "image", "source": {"type": "url", "url": METADATA}}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": gateway.chat(messages=[{"role": "user", "content": [image(METADATA)]}]),
        "/v1/responses": {
            "model": "smollm2",
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": METADATA}]}],
        },
        "/tokenize": {"model": "smollm2", "messages": [{"role": "user", "content": [image(METADATA)]}]},
    }
    for path, body in asked.items():
        answer = gateway.post(body, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_url_refused"), path
    message = {"role": "user", "content": [source]}
    answer = gateway.post({"model": "smollm2", "max_tokens": 8, "messages": [message]}, "/v1/messages")
    assert answer.status_code == 400
    assert "server.media_domains" in answer.json()["error"]["message"]
    asking = [line("a", messages=[{"role": "user", "content": [image(METADATA)]}])]
    (problem,) = ended(gateway, begin(gateway, asking))["errors"]["data"]
    assert problem["code"] == "media_url_refused"
    assert fake.last() == before


def test_every_api_passes_images_on(gateway: Gateway, fake: Fake) -> None:
    url, text = png(), {"type": "text", "text": "What is it?"}
    wanted = [{"role": "user", "content": [text, image(url)]}]
    gateway.post(gateway.chat(messages=wanted))
    assert fake.last()["body"]["messages"] == wanted
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": url}]
    asked = {"model": "smollm2", "input": [{"role": "user", "content": parts}], "max_output_tokens": 8}
    assert gateway.post(asked, "/v1/responses").status_code == 200
    assert fake.last()["body"]["messages"] == wanted
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    message = {"role": "user", "content": [text, {"type": "image", "source": source}]}
    assert gateway.post({"model": "smollm2", "max_tokens": 8, "messages": [message]}, "/v1/messages").status_code == 200
    assert fake.last()["body"]["messages"] == wanted


def test_results_of_tools_may_have_images() -> None:
    output = [{"type": "input_image", "image_url": LINK, "detail": "low"}]
    items = [{"type": "function_call_output", "call_id": "c", "output": output}]
    (tool,) = chat_of({"input": items})["messages"]
    assert tool["content"] == [{"type": "image_url", "image_url": {"url": LINK, "detail": "low"}}]
    block = {"type": "image", "source": {"type": "url", "url": LINK}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block], "is_error": True}
    message = {"role": "user", "content": [result]}
    (told,) = chat_of_message({"model": "m", "max_tokens": 1, "messages": [message]})["messages"]
    assert told["content"] == [{"type": "text", "text": "Error:"}, image(LINK)]


@pytest.mark.parametrize("part", [{"type": "input_file", "file_id": "f"}, {"type": "input_image", "file_id": "f"}])
def test_files_are_refused(gateway: Gateway, part: dict[str, Any]) -> None:
    answer = gateway.post({"model": "smollm2", "input": [{"role": "user", "content": [part]}]}, "/v1/responses")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_item")
