"""Clients from npm against a gateway in front of the fake engine: Codex, Claude Code, the openai package for Node.

`make clients` installs them, pinned by tests/e2e/clients/node/package-lock.json. They need no account: each has the
gateway as its server, and a home of its own. `FAKE CALL` in a prompt has the fake engine call a tool of the agent's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.gateway import Fake, Gateway, configuration, serving

ROOT = Path(__file__).parents[2]
NODE = Path(os.environ.get("HEADWAY_CLIENTS", ROOT / ".venv-clients")) / "node"
BIN = NODE / "node_modules" / ".bin"
AGENTS = {
    "Codex": {"answer", "a command that it runs", "a tool of an MCP server", "a patch by its custom tool"},
    "Claude Code": {"answer", "a command that it runs"},
    "openai for Node": {"chat", "stream", "responses", "responses stream", "models"},
}
NO_NODE = "node is not installed" if shutil.which("node") is None else "make clients has not installed them (no npm?)"
pytestmark = pytest.mark.skipif(not BIN.exists() or shutil.which("node") is None, reason=NO_NODE)
ROOM: dict[str, Any] = {"engine": {"max_model_len": 131_072}, "aliases": {"gpt-*": "smollm2"}}
ANSWER = "fake fake fake"


@pytest.fixture(scope="module")
def large(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose model has room for an agent's prompts."""
    folder = tmp_path_factory.mktemp("agents")
    with serving(configuration(folder, fake.url, **ROOM)) as running:
        yield running


def run(*argv: str, home: Path, **more: str) -> str:
    """Run a program in an empty folder; return what it printed."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=240, cwd=home, check=False, stdin=subprocess.DEVNULL,
        env={**kept, "HOME": str(home), **more},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def tool_results(fake: Fake) -> list[str]:
    """Return the results of tools that the engine was told last."""
    return [str(one["content"]) for one in fake.last()["body"]["messages"] if one["role"] == "tool"]


def codex(gateway: Gateway, home: Path, prompt: str, model: str = "smollm2") -> str:
    """Run `codex exec` with an MCP server and web search; return what it printed."""
    (home / ".codex").mkdir(parents=True)
    server = Path(__file__).parent / "mcp_server.py"
    settings = f"""
        model = "{model}"
        model_provider = "headway"
        web_search = "live"
        check_for_update_on_startup = false
        analytics.enabled = false
        mcp_servers.tests = {{ command = {json.dumps(sys.executable)}, args = [{json.dumps(str(server))}] }}
        model_providers.headway = {{ name = "Headway", base_url = "{gateway.url}/v1", wire_api = "responses" }}
    """
    (home / ".codex" / "config.toml").write_text(settings)
    argv = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt)
    return run(str(BIN / "codex"), *argv, home=home)


def claude(gateway: Gateway, home: Path, prompt: str) -> str:
    """Run `claude -p`, which may use a shell; return what it printed."""
    more = {
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    argv = ("-p", prompt, "--model", "smollm2", "--allowedTools", "Bash")
    return run(str(BIN / "claude"), *argv, home=home, **more)


def test_codex_answers_and_runs_a_command(large: Gateway, fake: Fake, tmp_path: Path) -> None:
    assert ANSWER in codex(large, tmp_path / "a", "Say hello.")
    names = [tool["function"]["name"] for tool in fake.last()["body"]["tools"]]
    assert "mcp__tests__say" in names
    assert "web_search" not in names
    call = 'FAKE CALL exec_command {"cmd": "echo sum=$((40+2))"} END'
    assert ANSWER in codex(large, tmp_path / "b", call)
    assert "sum=42" in tool_results(fake)[-1]


def test_codex_calls_a_tool_of_an_mcp_server(large: Gateway, fake: Fake, tmp_path: Path) -> None:
    assert ANSWER in codex(large, tmp_path, 'FAKE CALL mcp__tests__say {"text": "aloud"} END')
    assert "said aloud" in tool_results(fake)[-1]


def test_codex_patches_a_file_by_its_custom_tool(large: Gateway, fake: Fake, tmp_path: Path) -> None:
    """It offers that tool to models that it knows."""
    patch = json.dumps({"input": "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch"})
    assert ANSWER in codex(large, tmp_path, f"FAKE CALL apply_patch {patch} END", "gpt-5.5")
    assert (tmp_path / "new.txt").read_text() == "hello\n"
    assert "Success" in tool_results(fake)[-1]


def test_codex_offers_tools_in_its_input(large: Gateway, fake: Fake, tmp_path: Path) -> None:
    assert ANSWER in codex(large, tmp_path, "Say hello.", "gpt-6.2-sol")
    assert "functions__exec" in {tool["function"]["name"] for tool in fake.last()["body"]["tools"]}


def test_claude_code_answers_and_runs_a_command(large: Gateway, fake: Fake, tmp_path: Path) -> None:
    assert ANSWER in claude(large, tmp_path / "a", "Say hello.")
    call = 'FAKE CALL Bash {"command": "echo sum=$((40+2))", "description": "Add"} END'
    assert ANSWER in claude(large, tmp_path / "b", call)
    assert any("sum=42" in result for result in tool_results(fake))


def test_the_package_for_node_is_answered(gateway: Gateway) -> None:
    script = ROOT / "tests" / "e2e" / "clients" / "node" / "openai.mjs"
    done = subprocess.run(
        ["node", str(script), str(NODE), gateway.url], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert set(seen) == AGENTS["openai for Node"]
    assert seen.pop("models") == ["smollm2"]
    assert all(ANSWER in text for text in seen.values()), seen
