"""A real engine with drafts, grammars, adapters, priorities and a prefix cache: tokens as with stock vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine
PHASES = ["repetitions", "constrained", "adapters", "shared_prefixes"]


@pytest.fixture(scope="module")
def answered(few_layers: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock vLLM and `slack` answer, each in a process of its own."""
    argv = [sys.executable, "-m", "tests.engine.every_feature", str(tmp_path_factory.mktemp("adapters")), few_layers]
    done = subprocess.run([*argv, "stock", "slack"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
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
