"""A gateway is killed in the middle of a batch: every line is answered once, no finished one runs again."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.peers import gateway_argv, serving, write_config
from headway.engines.vllm.process.launch import free_port
from tests.gateway.batches import held, line, text
from tests.gateway.gateway import CHAT, WEB, Fake

COUNT, AT_A_TIME = 60, 8
BLOCKED = AT_A_TIME - AT_A_TIME // 2


@pytest.mark.timeout(300)
def test_a_batch_survives_kills(fake: Fake, tmp_path: Path) -> None:
    port, before = free_port(), fake.last()["asked"]
    write_config(tmp_path, fake.port, port, engines={"max_running": AT_A_TIME // 2}, lease_seconds=2.0)
    id = ""
    # Answers that are held back may get all places of the engine before the others.
    for kill_at, release in ((10 - BLOCKED, ""), (30 - BLOCKED, "crash-a"), (None, "crash-b")):
        if release:
            fake.release(release)
        with serving("gateway", gateway_argv(tmp_path), port, "/ready", tmp_path) as gateway:
            if not id:
                id = begin(port)
            if kill_at is None:
                batch = progress(port, id, COUNT)
                good, bad = answers(port, batch, "output"), answers(port, batch, "error")
            else:
                seen = progress(port, id, kill_at)
                assert seen["status"] == "in_progress"
                gateway.process.kill()
    assert batch["status"] == "completed"
    assert Counter(good + bad) == Counter(f"line-{i}" for i in range(COUNT))
    assert bad == []
    again = fake.last()["asked"] - before - COUNT
    assert 0 <= again <= 2 * AT_A_TIME, "only what an engine worked on when its gateway was killed"


def begin(port: int) -> str:
    """Begin a batch whose first 10 answers come at once; the next 20, and the others, are held back."""
    url = f"http://127.0.0.1:{port}/v1"
    holds = [{}] * 10 + [held("crash-a")] * 20 + [held("crash-b")] * 30
    content = text([line(f"line-{i}", **fields) for i, fields in enumerate(holds)])
    file = WEB.post(f"{url}/files", files={"file": ("x", content)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(WEB.post(f"{url}/batches", json=body).json()["id"])


def progress(port: int, id: str, count: int) -> dict[str, Any]:
    """Wait until so many lines have ended, with all of them for the end of the batch; return it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        seen = WEB.get(f"http://127.0.0.1:{port}/v1/batches/{id}").json()
        counts = seen["request_counts"]
        if counts["completed"] + counts["failed"] >= count and (count < COUNT or seen["completed_at"]):
            return dict(seen)
        time.sleep(0.02)
    raise AssertionError(f"it stays at {seen}")


def answers(port: int, batch: dict[str, Any], kind: str) -> list[str]:
    """Return the `custom_id`s of one of the batch's files."""
    id = batch[f"{kind}_file_id"]
    if id is None:
        return []
    said = WEB.get(f"http://127.0.0.1:{port}/v1/files/{id}/content").text
    return [json.loads(line)["custom_id"] for line in said.splitlines()]
