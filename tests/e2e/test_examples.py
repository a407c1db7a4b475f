"""Application runs on a real engine with recipe hermes: told through the client, learned, kept on disk.

Some of them are the examples: they end, and their units are known.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import headway
from headway.client import Run
from headway.gateway.control.graph_files import GraphFiles
from tests.e2e.server import ANSWER_S, Headway
from tests.gateway.gateway import WEB
from tests.helpers.examples import EXAMPLES, example

TEXT = "The river rises in the hills. It feeds the mill below the old town. " * 12
TASK, NEVER = "add(a, b), which returns the sum", "raise AssertionError('never right')"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
APPS = {"map-reduce-summary", "code-check", "react"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headway]:
    running = Headway(tmp_path_factory.mktemp("examples"), recipe="hermes")
    running.start()
    try:
        running.wait_ready()
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            running.interrupt()


def get(server: Headway, path: str) -> dict[str, Any]:
    answer = WEB.get(f"{server.url}/v1/{path}", timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def units(server: Headway, run: Run) -> list[tuple[str, str, int]]:
    """Return unit, backend and requests of each visit of a live run."""
    told = get(server, f"runs/{run.id}?app={run.app}")
    assert told["status"] == "live"
    return [(unit["unit"], unit["backend"], unit["requests"]) for unit in told["units"]]


def test_runs_are_counted_and_teach_the_graph(server: Headway) -> None:
    ask = {"model": "smollm2", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for number in range(2):
            run = headway.run("facts", base_url=f"{server.url}/v1", deadline=ANSWER_S, id=f"r{number}")
            with run:
                client.chat.completions.create(**ask, extra_headers=run.unit("ask"))
                with run.outside("search", backend="web"):
                    told = get(server, f"runs/{run.id}?app=facts")
                client.chat.completions.create(**ask, extra_headers=run.unit("verify"))
    assert [unit["unit"] for unit in told["units"]] == ["ask", "search"]
    assert told["expected_rest_s"] > 0, "the first run has taught what comes after a search"
    page = WEB.get(f"{server.url}/metrics", timeout=ANSWER_S).text
    assert 'headway_runs_total{app="facts",outcome="in_time"} 2.0' in page


def test_the_gateway_knows_the_runs_by_their_units(server: Headway, tmp_path: Path) -> None:
    common, url = example("common"), f"{server.url}/v1"
    model = common.connect(url, "none", None)
    assert model.name == "smollm2"

    mapped = example("map_reduce_summary")
    with headway.run(mapped.APP, base_url=url) as first:
        parts = mapped.chunks(TEXT, 30, 6)
        assert len(parts) == 6
        assert mapped.summarize(model, first, parts)
        # An answer may end before the last of its peers comes: that is another visit then.
        seen = units(server, first)
        asked = {unit: sum(count for name, _, count in seen if name == unit) for unit, _, _ in seen}
        assert asked == {"summarize": 6, "merge": 3}
        assert {backend for _, backend, _ in seen} == {"llm"}

    code = example("code_check")
    with headway.run(code.APP, base_url=url) as second:
        result = code.solve(model, second, TASK, NEVER, attempts=2, seconds=10.0)
        assert result.attempts == 2
        assert result.error is not None
        assert units(server, second) == [("write", "llm", 1), ("check", "python-sandbox", 0)] * 2

    react = example("react")
    (tmp_path / "mill.md").write_text("The mill was built in 1812.\n\nThe town has a river.")
    with headway.run(react.APP, base_url=url) as third:
        texts = react.passages(tmp_path)
        found = react.solve(model, third, texts, "When was the mill built?", turns=3)
        assert found.answer
        assert 1 <= len(found.searches) <= 3
        seen = units(server, third)
        assert seen[:2] == [("think", "llm", 1), ("search", "text-search", 0)]
        assert seen[-1][0] in ("think", "answer")
        assert 3 <= len(seen) <= 7

    for run in (first, second, third):
        ended = get(server, f"runs/{run.id}?app={run.app}")
        assert (ended["status"], ended["outcome"]) == ("ended", "finished")
    known = {app["id"]: app for app in get(server, "apps")["data"]}
    assert {name for name, app in known.items() if app["learned_runs"] and not app["live_runs"]} >= APPS


@pytest.fixture(scope="module")
def ran(server: Headway, tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run each example from the command line."""
    folder = tmp_path_factory.mktemp("texts")
    text = folder / "river.txt"
    text.write_text(TEXT)
    words = {
        "map_reduce_summary": [str(text), "--words", "40", "--chunks", "3"],
        "code_check": [TASK, "--check", NEVER, "--attempts", "2"],
        "react": [str(folder), "Where does the river rise?", "--turns", "2"],
    }
    return {name: _run(name, "--base-url", f"{server.url}/v1", *some) for name, some in words.items()}


def _run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(EXAMPLES / f"{name}.py"), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)


def test_each_runs_from_the_command_line(ran: dict[str, subprocess.CompletedProcess[str]]) -> None:
    for name, done in ran.items():
        assert done.returncode == (name == "code_check"), done.stderr
        assert done.stderr == "", "every report was taken"
        assert done.stdout.startswith("Run ")
    assert "attempt 2 of 2 failed: " in ran["code_check"].stdout
    assert all(len(ran[name].stdout.splitlines()) > 1 for name in ("map_reduce_summary", "react"))


def test_their_graphs_have_loops_and_parallel_requests(server: Headway, ran: object) -> None:
    """Ends the gateway, which then writes its graphs."""
    assert server.interrupt() == (0, [])
    graphs = GraphFiles(server.queue.with_suffix(".apps")).load()
    assert graphs["default", "facts"].runs == 2
    assert graphs["default", "facts"].units["search"].next_units == {"verify": 1.0}
    mapped, code, react = (graphs["default", name].units for name in ("map-reduce-summary", "code-check", "react"))
    # Requests that begin after another of their unit has ended are a visit of their own.
    assert max(record.visit.parallel for record in mapped["summarize"].records) > 1
    assert "merge" in mapped["summarize"].next_units
    assert code["write"].next_units == {"check": 1.0}
    assert code["check"].next_units["write"] == 0.5
    assert react["think"].next_units["search"] > 0
    assert "think" in react["search"].next_units
