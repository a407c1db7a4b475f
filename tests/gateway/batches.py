"""Files of lines, and batches made of them, for tests."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.gateway.gateway import CHAT, SAY, Gateway, until
from tests.gateway.test_request_ends import fakes

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    """Return one line: a chat that the fake engine answers at once."""
    body = {"model": "smollm2", "messages": SAY, "max_tokens": 8, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def lines(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [line(f"line-{i}", **fields) for i in range(count)]


def held(name: str) -> dict[str, Any]:
    """Return the field of a line that the fake engine holds back until that name is released."""
    return fakes(hold=name)


def text(records: list[Any]) -> bytes:
    """Return lines as the content of a file; text stands for itself."""
    return b"".join((one if isinstance(one, str) else json.dumps(one)).encode() + b"\n" for one in records)


def upload(gateway: Gateway, content: bytes, purpose: str = "batch", **more: Any) -> httpx.Response:
    files = {"file": ("lines.jsonl", content)}
    return gateway.post(None, "/v1/files", files=files, data={"purpose": purpose}, **more)


def begin(gateway: Gateway, records: list[Any], window: str = "24h", **more: Any) -> str:
    """Upload lines and begin a batch of them; return its id."""
    headers = {"headers": more.pop("headers")} if "headers" in more else {}
    file = upload(gateway, text(records), **headers).json()["id"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": window, **more}
    answer = gateway.post(body, "/v1/batches", **headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "validating"
    return str(answer.json()["id"])


def look(gateway: Gateway, id: str, **more: Any) -> dict[str, Any]:
    return dict(gateway.get(f"/v1/batches/{id}", **more).json())


def ended(gateway: Gateway, id: str, seconds: float = 60.0, **more: Any) -> dict[str, Any]:
    """Wait for a batch's end and return it."""
    return dict(until(lambda: (seen := look(gateway, id, **more))["status"] in ENDED and seen, seconds))


def content(gateway: Gateway, id: str | None, **more: Any) -> list[dict[str, Any]]:
    """Return the lines of a file; [] when there is none."""
    if id is None:
        return []
    answer = gateway.get(f"/v1/files/{id}/content", **more)
    assert answer.status_code == 200, answer.text
    return [json.loads(one) for one in answer.text.splitlines()]


def outcome(gateway: Gateway, batch: dict[str, Any], **more: Any) -> tuple[list[str], list[str]]:
    """Return the `custom_id`s of a batch's output file and of its error file."""
    files = batch["output_file_id"], batch["error_file_id"]
    good, bad = ([one["custom_id"] for one in content(gateway, file, **more)] for file in files)
    return good, bad
