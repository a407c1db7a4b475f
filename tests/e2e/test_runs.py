"""Application runs on a real engine with recipe hermes: told through the client, learned, kept on disk."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai

import headway
from headway.serve.graph_files import GraphFiles
from tests.e2e.server import ANSWER_S, Headway

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_runs_are_counted_and_teach_the_graph(tmp_path: Path) -> None:
    server = Headway(tmp_path, recipe="hermes")
    server.start()
    try:
        server.wait_ready()
        ask = {"model": "smollm2", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for number in range(2):
                run = headway.run("facts", base_url=f"{server.url}/v1", deadline=ANSWER_S, id=f"r{number}")
                with run:
                    client.chat.completions.create(**ask, extra_headers=run.unit("ask"))
                    with run.outside("search", backend="web"):
                        told = httpx.get(f"{server.url}/v1/runs/{run.id}?app=facts", timeout=ANSWER_S).json()
                    client.chat.completions.create(**ask, extra_headers=run.unit("verify"))
        assert [unit["unit"] for unit in told["units"]] == ["ask", "search"]
        assert told["expected_rest_s"] > 0, "the first run has taught what comes after a search"
        page = httpx.get(f"{server.url}/metrics", timeout=ANSWER_S).text
        assert 'headway_runs_total{app="facts",outcome="in_time"} 2.0' in page
        assert server.interrupt() == (0, [])
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
    graph = GraphFiles(server.queue.with_suffix(".apps")).load()["default", "facts"]
    assert graph.runs == 2
    assert graph.units["search"].next_units == {"verify": 1.0}
