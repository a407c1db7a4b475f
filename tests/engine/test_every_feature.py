"""A real engine with drafts, grammars, adapters, priorities and a prefix cache: tokens as with stock vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
PHASES = ["repetitions", "constrained", "adapters", "shared_prefixes"]


@pytest.fixture(scope="module")
def answered(few_layers: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock vLLM and `slack` answer, each in a process of its own."""
    folder = tmp_path_factory.mktemp("features")
    processes = {recipe: start(recipe, folder / recipe, few_layers) for recipe in ("stock", "slack")}
    return {recipe: read(process, folder / recipe) for recipe, process in processes.items()}


def start(recipe: str, folder: Path, model: str) -> subprocess.Popen[bytes]:
    folder.mkdir()
    argv = [sys.executable, "-m", "tests.engine.every_feature", recipe, str(folder), model]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return subprocess.Popen(argv, stdout=out, stderr=err)


def read(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    assert process.wait(280) == 0, (folder / "err").read_text()[-3000:]
    found: dict[str, Any] = json.loads((folder / "out").read_text().splitlines()[-1])
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_tokens_and_drafts_are_those_of_stock(answered: dict[str, dict[str, Any]], phase: str) -> None:
    stock, slack = answered["stock"][phase], answered["slack"][phase]
    assert len(stock) > 4
    assert slack == stock
    assert stock["drafts"] > 0


def test_answers_are_what_was_asked_for(answered: dict[str, dict[str, Any]]) -> None:
    for recipe in answered:
        made = answered[recipe]["constrained"]
        for name in ("s0", "s2"):
            assert json.loads(made[name]["text"]).keys() == {"name", "age"}
        for name in ("t1", "t3"):
            assert '"name":"weather"' in made[name]["text"]
        assert answered[recipe]["free"] == 63
    full, held, free = answered["slack"]["pinned"]
    assert full == held == 63 - free > 5, "a pin finds what requests have left in the cache"
    assert answered["slack"]["steps"] > answered["stock"]["steps"], "batches were to differ"
